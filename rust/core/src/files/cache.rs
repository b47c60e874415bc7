//! Files next to the job: copies of a far folder's files on a near disk.
//!
//! ```text
//!   <cache>/<name of the source>-<hash>/    one folder per source and user, mode 0700
//!       files/…      the copies, under the names they have at the source
//!       parts/…      copies in the making
//!       index        which files are ours (journal.rs)
//!       lock         which tables of files are in use (see `Domain`)
//! ```
//!
//! A copy is made in `parts`, and when it is whole it is written down as ours (journal, table), and
//! only then renamed. So no name ever shows half a file, and there is no file of ours that nobody
//! knows of. It carries the source's time of change: size and time tell whether it is still what the
//! source has.
//! What all processes of the node must agree upon is in shared memory (`table`): who is copying,
//! what was compared with its source already, what was used last and by whom.
//!
//! # Whose trouble is it?
//! What goes wrong on the side of the cache (disk full, read-only, taken by others) never stops the
//! job: the path of the source is served instead. What goes wrong at the source is the caller's to
//! know, unless there is a copy.

use crate::error::{Error, Result};
use crate::fault::{Fault, active as broken};
use crate::files::background::{self, Copier};
use crate::files::content::{Content, Version, is_file, stat_file};
use crate::files::copy::hash_of;
use crate::files::folder::Folder;
use crate::files::make::{Provided, source_error};
use crate::files::news::Topic;
use crate::files::options::{Check, FileOptions, Served};
use crate::files::paths::{as_path, can_be_ours, check_name, key, lossy, with_slash};
use crate::files::table::{CHECKED, EVICTING, FileLock, OWNED};
use crate::segment::counters::Count;
use crate::segment::lease::now;
use rustix::fs::Stat;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use xxhash_rust::xxh3::xxh3_64;

/// A cache of files, open in this process.
pub struct FileCache {
    path: PathBuf,
    /// The source as it stands before a name.
    source: Vec<u8>,
    /// Or why it cannot be used.
    folder: std::result::Result<Folder, String>,
}

impl FileCache {
    /// Opens the folder, or makes it. A folder that cannot be used is no error: see `trouble`.
    pub fn open(options: FileOptions) -> Result<Arc<Self>> {
        let source = options.source.as_os_str().as_bytes().to_vec();
        let mut text = source.clone();
        text.extend(rustix::process::geteuid().as_raw().to_le_bytes());
        let base = options.source.file_name().unwrap_or(OsStr::new("files"));
        let mut name = base.to_os_string();
        name.push(format!("-{:08x}", xxh3_64(&text) as u32));
        let path = options.cache.join(name);
        let folder = Folder::open(&path, &options);
        if let Ok(folder) = &folder {
            folder.trim();
        }
        Ok(Arc::new(Self { path, source: with_slash(source), folder }))
    }

    /// Why nothing is cached, if that is so.
    pub fn trouble(&self) -> Option<&str> {
        self.folder.as_ref().err().map(String::as_str)
    }

    /// The folder, if it can be used.
    pub(crate) fn folder(&self) -> Option<&Folder> {
        self.folder.as_ref().ok()
    }

    /// Where the copies are: below `files` in this folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What happened that people should know, each once per node.
    pub fn take_news(&self) -> Option<String> {
        self.folder()?.news.take()
    }

    // Serving

    /// The copy of that file, if there is one that is known to be right. Quick: one look at the disk.
    #[inline]
    pub fn hit(&self, name: &[u8]) -> Option<Vec<u8>> {
        let folder = self.folder()?;
        let i = folder.table.find(key(name))?;
        let path = self.valid(folder, i, name)?;
        folder.table.counters().add(Count::Hits, 1);
        Some(path)
    }

    /// The path of file `i` if its copy is there, in the version that was compared with the source.
    #[inline]
    fn valid(&self, folder: &Folder, i: usize, name: &[u8]) -> Option<Vec<u8>> {
        let entry = folder.table.entry(i);
        if entry.flags() & CHECKED == 0 || !folder.give_out(i) {
            return None;
        }
        // Again: from here on nobody begins to remove it. See rows.rs.
        if entry.flags() & (CHECKED | EVICTING) != CHECKED {
            return None;
        }
        let path = folder.path_of(name);
        let there = rustix::fs::lstat(as_path(&path)).ok()?;
        if Version::of(&there) != entry.version() && !broken(Fault::TrustCopies) {
            return None;
        }
        if folder.options.check == Check::Always {
            let far = stat_file(as_path(&self.source_of(name))).ok()?;
            if Version::of(&far) != entry.version() {
                return None;
            }
        }
        entry.touch(now());
        Some(path)
    }

    /// The path of that file at the source.
    pub fn source_of(&self, name: &[u8]) -> Vec<u8> {
        [&self.source[..], name].concat()
    }

    /// The path of that file: of the copy, which is made if need be, or of the source. An error only
    /// if there is neither.
    pub fn fetch(&self, name: &[u8]) -> Result<Served> {
        check_name(name)?;
        let Ok(folder) = &self.folder else { return Ok(Served::Source(self.source_of(name))) };
        match self.provide(folder, name)? {
            Provided::Found => folder.table.counters().add(Count::Hits, 1),
            Provided::Made => {}
            Provided::Not if broken(Fault::NoFallback) => {
                return Err(source_error(name, Errno::NOSPC));
            }
            Provided::Not => return Ok(self.pass(folder, name)),
        }
        Ok(Served::Copy(folder.path_of(name)))
    }

    fn pass(&self, folder: &Folder, name: &[u8]) -> Served {
        folder.table.counters().add(Count::Passed, 1);
        Served::Source(self.source_of(name))
    }

    /// Sees to it that there is a right copy, alone or by waiting for who does.
    fn provide(&self, folder: &Folder, name: &[u8]) -> Result<Provided> {
        let i = match folder.table.find_or_add(key(name)) {
            Ok(i) => i,
            Err(why) => {
                folder.tell_no_room(why);
                return Ok(Provided::Not);
            }
        };
        if !folder.give_out(i) {
            return Ok(Provided::Not);
        }
        let mut waited = false;
        loop {
            if self.valid(folder, i, name).is_some() {
                return Ok(Provided::Found);
            }
            if !folder.table.can_lock() {
                return Ok(Provided::Not);
            }
            if let Some(lock) = folder.table.lock(i) {
                return self.settle(folder, &lock, name);
            }
            if !waited {
                folder.table.counters().add(Count::Waits, 1);
                waited = true;
            }
            if !folder.wait(i)? {
                return Ok(Provided::Not);
            }
        }
    }

    /// Makes sure, as the only one, that the copy is there and right.
    fn settle(&self, folder: &Folder, lock: &FileLock<'_>, name: &[u8]) -> Result<Provided> {
        let entry = folder.table.entry(lock.i);
        entry.lower(EVICTING); // left by somebody who died
        folder.table.unreserve(lock);
        let path = folder.path_of(name);
        let there = rustix::fs::lstat(as_path(&path)).ok();
        let known = there.as_ref().filter(|stat| Version::of(stat) == entry.version());
        let mut ours = entry.flags() & OWNED != 0;
        if ours && there.as_ref().is_some_and(|stat| !can_be_ours(stat)) {
            folder.forget(lock, name); // another took its place
            ours = false;
        }
        let hit = || {
            entry.raise(CHECKED);
            entry.touch(now());
            Ok(Provided::Found)
        };
        if ours && known.is_some() && folder.options.check == Check::Never {
            return hit();
        }
        let source = self.source_of(name);
        let far = match stat_file(as_path(&source)) {
            Ok(far) => far,
            // The source is gone or cannot be reached; what we copied from it is as good as ever.
            Err(errno) if ours && known.is_some() => {
                folder.tell(Topic::Vanished, || {
                    format!(
                        "{}: {errno}; its copy is used, and likewise for other files that can no \
                         longer be compared with their source",
                        lossy(&source)
                    )
                });
                return hit();
            }
            Err(errno) => return Err(folder.lose(lock, &source, errno)),
        };
        let same = |stat: &&Stat| is_file(stat) && Version::of(stat) == Version::of(&far);
        let right = there.as_ref().filter(same);
        if right.is_some() && self.is_unharmed(lock, folder, &path, ours)? {
            if !ours {
                entry.set_version(Version::of(&far));
            } else if known.is_none() {
                // Replaced by processes with another table (see `Domain`).
                let content = Content { version: Version::of(&far), hash: 0 };
                folder.table.own(lock, content);
                let _lost = folder.note(lock, name, content);
            }
            return hit();
        }
        if there.is_some() && !ours {
            if !folder.table.is_recalled() {
                return Ok(Provided::Not); // whose it is will be known soon
            }
            folder.tell(Topic::Foreign, || {
                format!(
                    "{} is not the source's file, and stocache did not make it; the source is used \
                     instead: remove it or use another cache folder",
                    lossy(&path)
                )
            });
            return Ok(Provided::Not);
        }
        if there.is_some() && right.is_none() {
            folder.table.counters().add(Count::Stale, 1);
        }
        folder.make(lock, name, &source, &far)
    }

    /// Whether the bytes are those that were copied, as far as that was asked for.
    fn is_unharmed(
        &self,
        lock: &FileLock<'_>,
        folder: &Folder,
        path: &[u8],
        ours: bool,
    ) -> Result<bool> {
        let hash = folder.table.entry(lock.i).hash();
        if !folder.options.hashed || !ours || broken(Fault::TrustCopies) {
            return Ok(true);
        }
        match hash_of(as_path(path)) {
            Err(Errno::INTR) => Err(Error::interrupted()),
            found => Ok(hash != 0 && found == Ok(hash)),
        }
    }

    // In the background

    /// The path of that file at once: of the copy if there is a right one, else of the source. The
    /// copy is made by another thread.
    pub fn fetch_behind(self: &Arc<Self>, name: &[u8]) -> Result<Served> {
        check_name(name)?;
        let Ok(folder) = &self.folder else { return self.fetch(name) };
        // A copy from an earlier job only has to be compared: quicker than reading the source.
        if let Some(i) = folder.table.find(key(name))
            && folder.table.entry(i).flags() & (OWNED | CHECKED) == OWNED
            && !folder.table.is_locked(i)
        {
            return self.fetch(name);
        }
        let copier: Weak<Self> = Arc::downgrade(self);
        background::submit(copier, name);
        Ok(self.pass(folder, name))
    }
}

impl Copier for FileCache {
    fn copy(&self, name: &[u8]) {
        let Ok(folder) = &self.folder else { return };
        if let Err(error) = self.provide(folder, name) {
            folder.tell(Topic::Background, || {
                format!("copying in the background: {error}; its source keeps being used")
            });
        }
    }
}
