//! Looking at what is there, and comparing it.

use crate::error::{Error, Result};
use crate::files::cache::FileCache;
use crate::files::content::Version;
use crate::files::copy;
use crate::files::folder::Folder;
use crate::files::make::source_error;
use crate::files::options::{FileStats, Verdict};
use crate::files::paths::{as_path, can_be_ours, check_name, key};
use crate::files::table::{CHECKED, OWNED};
use crate::segment::counters::Count;
use rustix::io::Errno;

impl FileCache {
    /// Whether there is a copy of that file that we know, compared or not.
    pub fn contains(&self, name: &[u8]) -> bool {
        let Some(folder) = self.folder() else { return false };
        folder.table.find(key(name)).is_some_and(|i| {
            let entry = folder.table.entry(i);
            entry.flags() & (OWNED | CHECKED) != 0
                && rustix::fs::lstat(as_path(&folder.path_of(name)))
                    .is_ok_and(|stat| Version::of(&stat) == entry.version())
        })
    }

    /// The names of all files that are ours.
    pub fn names(&self) -> Vec<Vec<u8>> {
        let Some(folder) = self.folder() else { return Vec::new() };
        let mut names = folder.names();
        names.retain(|name| self.contains(name));
        names.sort();
        names
    }

    /// Compares the bytes of a copy with those of its source; with the hash of the copy if the source
    /// is gone. A copy that differs is removed if it is ours.
    pub fn verify(&self, name: &[u8]) -> Result<Verdict> {
        check_name(name)?;
        let Some(folder) = self.folder() else { return Ok(Verdict::Absent) };
        let Ok(i) = folder.table.find_or_add(key(name)) else { return Ok(Verdict::Absent) };
        if !folder.table.can_lock() {
            return Ok(Verdict::Absent);
        }
        let lock = loop {
            match folder.table.lock(i) {
                Some(lock) => break lock,
                None if folder.wait(i)? => {}
                None => return Ok(Verdict::Absent), // being copied
            }
        };
        let path = folder.path_of(name);
        let found = match copy::hash_of(as_path(&path)) {
            Ok(hash) => hash,
            Err(Errno::INTR) => return Err(Error::interrupted()),
            Err(_) => return Ok(Verdict::Absent),
        };
        let (source, entry) = (self.source_of(name), folder.table.entry(i));
        let wanted = match copy::hash_of(as_path(&source)) {
            Ok(hash) => hash,
            Err(Errno::INTR) => return Err(Error::interrupted()),
            Err(_) if entry.hash() != 0 => entry.hash(),
            Err(errno) => return Err(source_error(&source, errno)),
        };
        if found == wanted {
            return Ok(Verdict::Same);
        }
        let ours = rustix::fs::lstat(as_path(&path)).is_ok_and(|stat| can_be_ours(&stat));
        if ours && entry.flags() & OWNED != 0 && rustix::fs::unlink(as_path(&path)).is_ok() {
            folder.forget(&lock, name);
        }
        Ok(Verdict::Differs)
    }

    /// Removes all copies that are ours and that nobody is about to use; says how many.
    pub fn clear(&self) -> u64 {
        self.folder().map_or(0, Folder::clear)
    }

    /// Sums over all processes.
    pub fn stats(&self) -> FileStats {
        let Some(folder) = self.folder() else { return FileStats::default() };
        let sum = |count| folder.table.counters().sum(count);
        FileStats {
            hits: sum(Count::Hits),
            copies: sum(Count::Fills),
            copied_bytes: sum(Count::Bytes),
            copy_nanos: sum(Count::LoadNanos),
            waits: sum(Count::Waits),
            passed: sum(Count::Passed),
            failed: sum(Count::Dropped),
            stale: sum(Count::Stale),
            evicted: sum(Count::Evicted),
            too_large: sum(Count::TooLarge),
            files: folder.table.files(),
            bytes: folder.table.bytes(),
        }
    }
}
