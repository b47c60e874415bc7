//! Which files of a folder are ours: a log on disk that survives every crash.
//!
//! ```text
//!   record   4   marker
//!            4   length of the body
//!            n   body: kind u8 (1 kept, 2 removed), size u64, mtime u64, hash u64, name
//!            8   XXH3 of the body
//! ```
//!
//! A record is appended with one write, before the file gets its name: there is no file of ours
//! without one. What a crash tears is skipped: the next record is found by its marker. If the log is
//! damaged or gone, a walk over the folder tells.
//! Numbers are little-endian. The log is written anew, without what says nothing any more, when that
//! is most of it. Who appends has the log locked, shared (flock); who writes it anew, alone. So no
//! record is lost, also if the processes do not share a /dev/shm: which is why this is not the lock of
//! segment/lock.rs.
//! Nobody waits for long, though: who writes the log anew may be stopped, or on a slow disk. Who did
//! not get the lock in time appends without it, then looks whether the log was replaced meanwhile, and
//! if so appends again. Who replaces it looks for late records afterwards. One of the two sees the other.

use crate::fault::{Fault, active};
use crate::files::content::{Content, Version};
use crate::sys::private_file::{is_same, open_private, write_all};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

const MARKER: [u8; 4] = *b"\x9fsto";
const KEPT: u8 = 1;
const REMOVED: u8 = 2;
/// kind, size, mtime, hash
const FIXED: usize = 1 + 8 + 8 + 8;
/// The longest path of Linux, and then some.
const LONGEST_NAME: usize = 8192;
/// Long enough for most records, and for all.
const LIKELY_RECORD: usize = 512;
const LONGEST_RECORD: usize = 16 + FIXED + LONGEST_NAME;
/// With a name of one byte.
const SHORTEST_RECORD: u64 = (16 + FIXED + 1) as u64;
/// How long to wait for who writes the log anew.
const PATIENCE: Duration = Duration::from_millis(200);
/// How often a record is appended again because the log was replaced.
const TRIES: usize = 5;

/// The log of one folder. It is opened for every record, so that it may be replaced.
pub(crate) struct Journal {
    pub(crate) path: PathBuf,
}

impl Contents {
    /// Whether the log is worth writing anew.
    pub(crate) fn is_untidy(&self) -> bool {
        self.damaged > 0 || self.outdated > 1000 + self.files.len()
    }
}

/// A file that the log has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Logged {
    pub(crate) content: Content,
    /// Where in the log its record begins.
    pub(crate) at: u64,
}

/// What a log says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) files: HashMap<Vec<u8>, Logged>,
    /// Bytes that are no record.
    pub(crate) damaged: usize,
    /// Records that say nothing any more.
    pub(crate) outdated: usize,
}

impl Journal {
    /// Where the record is, as of all that follow.
    pub(crate) fn keep(&self, name: &[u8], content: Content) -> rustix::io::Result<Range<u64>> {
        self.append(&record(KEPT, name, content))
    }

    pub(crate) fn keep_all(
        &self,
        files: &HashMap<Vec<u8>, Content>,
    ) -> rustix::io::Result<HashMap<Vec<u8>, Logged>> {
        let (records, mut logged) = records(files.iter().map(|(name, content)| (name, *content)));
        if !records.is_empty() {
            let start = self.append(&records)?.start;
            logged.values_mut().for_each(|file| file.at += start);
        }
        Ok(logged)
    }

    pub(crate) fn remove(&self, name: &[u8]) -> rustix::io::Result<Range<u64>> {
        self.append(&record(REMOVED, name, Content::default()))
    }

    fn append(&self, records: &[u8]) -> rustix::io::Result<Range<u64>> {
        for _ in 0..TRIES {
            if let Some(at) = self.append_once(records)? {
                return Ok(at);
            }
        }
        Err(Errno::AGAIN)
    }

    /// Where what was written is; None if that is a log that was replaced.
    /// O_APPEND: the kernel puts each write at the end, whoever else writes.
    fn append_once(&self, records: &[u8]) -> rustix::io::Result<Option<Range<u64>>> {
        let began = Instant::now();
        let file = loop {
            let file = open_private(&self.path, OFlags::APPEND | OFlags::WRONLY)?;
            let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
            // Where files cannot be locked, nobody writes the log anew.
            let busy = locked == Err(Errno::WOULDBLOCK) || !self.is_at(file.as_fd());
            if !busy || began.elapsed() > PATIENCE {
                break file;
            }
            drop(file);
            std::thread::sleep(Duration::from_millis(1));
        };
        let written = loop {
            match rustix::io::write(&file, records) {
                Err(Errno::INTR) => {}
                done => break done,
            }
        };
        let end = rustix::fs::tell(&file);
        let stays = self.is_at(file.as_fd());
        unlock(&file);
        match written? {
            n if n == records.len() => {
                let end = end?;
                Ok(stays.then(|| end.saturating_sub(n as u64)..end))
            }
            _ => Err(Errno::NOSPC), // a torn record: skipped by readers
        }
    }

    /// Whether this is the log, and not one that was replaced meanwhile.
    fn is_at(&self, file: BorrowedFd<'_>) -> bool {
        match (rustix::fs::fstat(file), rustix::fs::lstat(&self.path)) {
            (Ok(file), Ok(named)) => is_same(&file, &named),
            _ => false,
        }
    }

    /// No log is an empty log; one that cannot be read is a damaged one.
    pub(crate) fn read(&self) -> Contents {
        match std::fs::read(&self.path) {
            Ok(bytes) => parse(&bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Contents::default(),
            Err(_) => Contents { damaged: 1, ..Contents::default() },
        }
    }

    /// The name in the record that begins at `at`, if there is one that keeps a file.
    pub(crate) fn name_at(&self, at: u64) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = rustix::fs::openat(CWD, &self.path, flags, Mode::empty()).ok()?;
        [LIKELY_RECORD, LONGEST_RECORD].into_iter().find_map(|len| {
            let mut bytes = vec![0; len];
            let n = rustix::io::pread(&file, &mut bytes[..], at).ok()?;
            let (kind, name, ..) = first(&bytes[..n])?;
            (kind == KEPT).then(|| name.to_vec())
        })
    }

    /// Its length; 0 if there is none.
    pub(crate) fn len(&self) -> u64 {
        std::fs::symlink_metadata(&self.path).map_or(0, |meta| meta.len())
    }

    /// At least as many files as the log can have; None if there is none to tell.
    pub(crate) fn at_most(&self) -> Option<u64> {
        let meta = std::fs::symlink_metadata(&self.path).ok()?;
        (meta.is_file() && meta.len() > 0).then(|| meta.len() / SHORTEST_RECORD + 1)
    }

    /// Moves away what is not a file, so that there can be a log.
    pub(crate) fn displace(&self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|meta| !meta.is_file()) {
            let aside = beside(&self.path, ".not-ours");
            let flags = RenameFlags::NOREPLACE;
            let _stays = rustix::fs::renameat_with(CWD, &self.path, CWD, aside, flags);
        }
    }

    /// Writes the log anew, without what says nothing any more, unless somebody is writing to it all
    /// the time. Where that cannot be, the old one is as good. Says where everything is now.
    pub(crate) fn tidy(&self) -> rustix::io::Result<HashMap<Vec<u8>, Logged>> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let old = File::from(rustix::fs::openat(CWD, &self.path, flags, Mode::empty())?);
        let began = Instant::now();
        while let Err(errno) = rustix::fs::flock(&old, FlockOperation::NonBlockingLockExclusive) {
            if errno != Errno::WOULDBLOCK || began.elapsed() > PATIENCE / 10 {
                return Err(errno);
            }
            std::thread::yield_now();
        }
        let replace = || self.replace(&old, &rest_of(&old)?);
        // Else somebody was faster.
        let done = if self.is_at(old.as_fd()) { replace() } else { Err(Errno::AGAIN) };
        unlock(&old);
        done
    }

    /// Puts what `bytes` say, which were read from the log `old`, in its place.
    fn replace(&self, old: &File, bytes: &[u8]) -> rustix::io::Result<HashMap<Vec<u8>, Logged>> {
        let files = parse(bytes).files;
        let (records, mut logged) = records(files.iter().map(|(name, file)| (name, file.content)));
        let new = beside(&self.path, ".new");
        let file = open_private(&new, OFlags::TRUNC | OFlags::WRONLY)?;
        write_all(file.as_fd(), &records, 0)?;
        rustix::fs::rename(&new, &self.path)?;
        if active(Fault::ForgetLateRecords) {
            return Ok(logged);
        }
        // Of what came late, removals are left out: such a file may be there again by now, and a
        // record of what is gone is no harm.
        let late = parse(&rest_of(old)?).files.into_iter();
        let late = late.map(|(name, file)| (name, file.content)).collect();
        logged.extend(self.keep_all(&late)?);
        Ok(logged)
    }
}

/// Records one after the other, and where each begins.
fn records<'a>(
    files: impl Iterator<Item = (&'a Vec<u8>, Content)>,
) -> (Vec<u8>, HashMap<Vec<u8>, Logged>) {
    let (mut bytes, mut logged) = (Vec::new(), HashMap::new());
    for (name, content) in files {
        logged.insert(name.clone(), Logged { content, at: bytes.len() as u64 });
        bytes.extend(record(KEPT, name, content));
    }
    (bytes, logged)
}

/// What was not read yet.
fn rest_of(mut file: &File) -> rustix::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match file.read_to_end(&mut bytes) {
        Ok(_) => Ok(bytes),
        Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
    }
}

/// Said aloud, because a child that was forked meanwhile has the same lock.
fn unlock(file: impl AsFd) {
    let _unlocked = rustix::fs::flock(file, FlockOperation::Unlock);
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.to_path_buf().into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

fn record(kind: u8, name: &[u8], content: Content) -> Vec<u8> {
    let mut body = Vec::with_capacity(FIXED + name.len());
    body.push(kind);
    for number in [content.version.size, content.version.mtime, content.hash] {
        body.extend(number.to_le_bytes());
    }
    body.extend(name);
    let mut out = MARKER.to_vec();
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(&body);
    out.extend(xxh3_64(&body).to_le_bytes());
    out
}

/// Believes nothing: a record counts only if its checksum says so.
pub(crate) fn parse(mut bytes: &[u8]) -> Contents {
    let (mut contents, all) = (Contents::default(), bytes.len());
    while !bytes.is_empty() {
        let Some((kind, name, content, len)) = first(bytes) else {
            bytes = &bytes[1..];
            contents.damaged += 1;
            continue;
        };
        let before = if kind == KEPT {
            let at = (all - bytes.len()) as u64;
            contents.files.insert(name.to_vec(), Logged { content, at })
        } else {
            contents.outdated += 1;
            contents.files.remove(name)
        };
        contents.outdated += usize::from(before.is_some());
        bytes = &bytes[len..];
    }
    contents
}

/// The record at the beginning of `bytes`, and its length.
fn first(bytes: &[u8]) -> Option<(u8, &[u8], Content, usize)> {
    if !bytes.starts_with(&MARKER) {
        return None;
    }
    let u64_at = |from: &[u8], at: usize| {
        from.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().unwrap_or_default()))
    };
    let len = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?) as usize;
    if !(FIXED + 1..=FIXED + LONGEST_NAME).contains(&len) {
        return None;
    }
    let body = bytes.get(8..8 + len)?;
    let intact = u64_at(bytes, 8 + len)? == xxh3_64(body) || active(Fault::SkipRecordChecksum);
    if !intact || ![KEPT, REMOVED].contains(&body[0]) {
        return None;
    }
    let version = Version { size: u64_at(body, 1)?, mtime: u64_at(body, 9)? };
    let content = Content { version, hash: u64_at(body, 17)? };
    Some((body[0], &body[FIXED..], content, 16 + len))
}

/// The files below `folder` that can only be ours: regular, private, of this user. For a folder whose
/// log is lost.
pub(crate) fn walk(folder: &Path) -> HashMap<Vec<u8>, Content> {
    let mut found = HashMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&at) else { continue };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let Ok(stat) = rustix::fs::lstat(&path) else { continue };
            if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                folders.push(path);
            } else if crate::sys::private_file::check_private(&stat).is_ok()
                && let Ok(name) = path.strip_prefix(folder)
            {
                let content = Content { version: Version::of(&stat), hash: 0 };
                found.insert(name.as_os_str().as_bytes().to_vec(), content);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests;
