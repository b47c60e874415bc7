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
//! What all processes of the node must agree upon is in shared memory (table.rs): who is copying,
//! what was compared with its source already, what was used last and by whom.
//!
//! # Whose trouble is it?
//! What goes wrong on the side of the cache (disk full, read-only, taken by others) never stops the
//! job: the path of the source is served instead. What goes wrong at the source is the caller's to
//! know, unless there is a copy.

use crate::copy::{
    self, Copied, Trouble, copy, is_about_one_file, is_lack_of_room, stat_file, version,
};
use crate::counters::Count;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::journal::Kept;
use crate::near::{Near, Victims, as_path, can_be_ours, key, private_folder, with_slash};
use crate::shelf::Shelf;
use crate::table::{CHECKED, EVICTING, Locked, OWNED};
use rustix::fs::Stat;
use rustix::io::Errno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};
use xxhash_rust::xxh3::xxh3_64;

/// After a write failed, nothing is written for so long.
const REST: Duration = Duration::from_secs(10);
/// How often a source that changes while it is copied is tried again.
const TRIES: usize = 3;
/// What there is to tell people, once each.
const FULL: u64 = 1;
const UNWRITABLE: u64 = 2;
const VANISHED: u64 = 4;
const FOREIGN: u64 = 8;
const UNSHARED: u64 = 16;
const BACKGROUND: u64 = 32;
const MANY: u64 = 64;
const ODD: u64 = 128;

/// When a copy is compared with its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// At the first use in a job.
    Once,
    /// At every use.
    Always,
    /// Not if there is a copy that we made.
    Never,
}

/// What to cache, and how.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// The far folder; absolute.
    pub source: PathBuf,
    /// The folder to keep copies in; absolute.
    pub cache: PathBuf,
    /// Bytes that copies may take.
    pub limit: Option<u64>,
    /// Remove what was not used for longest to make room; else what is there stays.
    pub evict: bool,
    /// When to compare.
    pub check: Check,
    /// Keep a hash of every copy, and compare it when the copy is.
    pub hashed: bool,
    /// How many files are expected.
    pub files: u64,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// The path of a whole copy.
    Copy(Vec<u8>),
    /// The path of the source, because there is no copy and none can be made now.
    Source(Vec<u8>),
}

/// What a comparison found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is no copy.
    Absent,
    /// The copy is what the source has.
    Same,
    /// It is not, and was removed if it was ours.
    Differs,
}

/// Sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of counters.rs
pub struct FileStats {
    pub hits: u64,
    pub copies: u64,
    pub copied_bytes: u64,
    pub copy_nanos: u64,
    pub waits: u64,
    pub passed: u64,
    pub failed: u64,
    pub stale: u64,
    pub evicted: u64,
    pub too_large: u64,
    /// Files that are ours at this moment, and their bytes.
    pub files: u64,
    pub bytes: u64,
}

/// What came of the wish for a copy.
enum Provided {
    /// It was there.
    Found,
    /// It was made.
    Made,
    /// There is none, and none can be made now.
    Not,
}

/// A cache of files, open in this process.
pub struct FileCache {
    options: FileOptions,
    folder: PathBuf,
    /// The source as it stands before a name.
    source: Vec<u8>,
    near: std::result::Result<Near, String>,
    /// What to tell people next.
    news: Shelf<String>,
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
        let folder = options.cache.join(name);
        let near = Near::open(&folder, &options);
        let source = with_slash(source);
        let made = Self { options, folder, source, near, news: Shelf::new() };
        made.trim();
        Ok(Arc::new(made))
    }

    /// An earlier job may have had a higher limit.
    fn trim(&self) {
        let (Ok(near), Some(limit)) = (&self.near, self.options.limit) else { return };
        while near.table.bytes() > limit && self.evict_one(near) == Ok(true) {}
    }

    /// Why nothing is cached, if that is so.
    pub fn trouble(&self) -> Option<&str> {
        self.near.as_ref().err().map(String::as_str)
    }

    /// Where the copies are: below `files` in this folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    // Serving

    /// The copy of that file, if there is one that is known to be right. Quick: one look at the disk.
    #[inline]
    pub fn hit(&self, name: &[u8]) -> Option<Vec<u8>> {
        let near = self.near.as_ref().ok()?;
        let i = near.table.find(key(name))?;
        let path = self.valid(near, i, name)?;
        near.table.counters().add(Count::Hits, 1);
        Some(path)
    }

    /// The path of file `i` if its copy is there, in the version that was compared with the source.
    #[inline]
    fn valid(&self, near: &Near, i: usize, name: &[u8]) -> Option<Vec<u8>> {
        let entry = near.table.entry(i);
        if entry.flags() & CHECKED == 0 || !near.table.give_out(i) {
            return None;
        }
        // Again: from here on nobody begins to remove it. See table.rs.
        if entry.flags() & (CHECKED | EVICTING) != CHECKED {
            return None;
        }
        let path = near.path(name);
        let there = rustix::fs::lstat(as_path(&path)).ok()?;
        if version(&there) != entry.version() && !broken(Fault::TrustCopies) {
            return None;
        }
        if self.options.check == Check::Always {
            let far = stat_file(as_path(&self.source_of(name))).ok()?;
            if version(&far) != entry.version() {
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
        let Ok(near) = &self.near else { return Ok(Served::Source(self.source_of(name))) };
        match self.provide(near, name)? {
            Provided::Found => near.table.counters().add(Count::Hits, 1),
            Provided::Made => {}
            Provided::Not if broken(Fault::NoFallback) => {
                return Err(source_error(name, Errno::NOSPC));
            }
            Provided::Not => return Ok(self.pass(near, name)),
        }
        Ok(Served::Copy(near.path(name)))
    }

    fn pass(&self, near: &Near, name: &[u8]) -> Served {
        near.table.counters().add(Count::Passed, 1);
        Served::Source(self.source_of(name))
    }

    /// Sees to it that there is a right copy, alone or by waiting for who does.
    fn provide(&self, near: &Near, name: &[u8]) -> Result<Provided> {
        let Some(i) = near.table.find_or_add(key(name)) else {
            self.tell(near, MANY, || {
                format!(
                    "{} was opened for fewer files than are asked for; those that are new to it are \
                     read from the source: construct the cache with the most files first",
                    self.folder.display()
                )
            });
            return Ok(Provided::Not);
        };
        if !near.table.give_out(i) {
            return Ok(Provided::Not);
        }
        let mut waited = false;
        loop {
            if self.valid(near, i, name).is_some() {
                return Ok(Provided::Found);
            }
            if let Some(lock) = near.table.lock(i) {
                return self.settle(near, &lock, name);
            }
            if !waited {
                near.table.counters().add(Count::Waits, 1);
                waited = true;
            }
            if !near.wait(i) {
                return Ok(Provided::Not);
            }
        }
    }

    /// Makes sure, as the only one, that the copy is there and right.
    fn settle(&self, near: &Near, lock: &Locked<'_>, name: &[u8]) -> Result<Provided> {
        let entry = near.table.entry(lock.i);
        entry.lower(EVICTING); // left by somebody who died
        near.table.unreserve(lock);
        let path = near.path(name);
        let there = rustix::fs::lstat(as_path(&path)).ok();
        let known = there.as_ref().filter(|stat| version(stat) == entry.version());
        let mut ours = entry.flags() & OWNED != 0;
        if ours && there.as_ref().is_some_and(|stat| !can_be_ours(stat)) {
            near.forget(lock, name); // another took its place
            ours = false;
        }
        let hit = || {
            entry.raise(CHECKED);
            entry.touch(now());
            Ok(Provided::Found)
        };
        if ours && known.is_some() && self.options.check == Check::Never {
            return hit();
        }
        let source = self.source_of(name);
        let far = match stat_file(as_path(&source)) {
            Ok(far) => far,
            // The source is gone or cannot be reached; what we copied from it is as good as ever.
            Err(errno) if ours && known.is_some() => {
                self.tell(near, VANISHED, || {
                    format!(
                        "{}: {errno}; its copy is used, and likewise for other files that can no \
                         longer be compared with their source",
                        lossy(&source)
                    )
                });
                return hit();
            }
            Err(errno) => return Err(self.lose(near, lock, &source, errno)),
        };
        let same = |stat: &&Stat| copy::is_file(stat) && version(stat) == version(&far);
        let right = there.as_ref().filter(same);
        if right.is_some() && self.is_unharmed(lock, near, &path, ours) {
            if !ours {
                entry.set_version(version(&far));
            } else if known.is_none() {
                // Replaced by processes with another table (see `Domain`).
                let kept = Kept { version: version(&far), hash: 0 };
                near.table.own(lock, kept.version, kept.hash);
                let _lost = near.journal.keep(name, kept);
            }
            return hit();
        }
        if there.is_some() && !ours {
            if !near.table.is_recalled() {
                return Ok(Provided::Not); // whose it is will be known soon
            }
            self.tell(near, FOREIGN, || {
                format!(
                    "{} is not the source's file, and stocache did not make it; the source is used \
                     instead: remove it or use another cache folder",
                    lossy(&path)
                )
            });
            return Ok(Provided::Not);
        }
        if there.is_some() && right.is_none() {
            near.table.counters().add(Count::Stale, 1);
        }
        self.make(near, lock, name, &far)
    }

    /// Whether the bytes are those that were copied, as far as that was asked for.
    fn is_unharmed(&self, lock: &Locked<'_>, near: &Near, path: &[u8], ours: bool) -> bool {
        let hash = near.table.entry(lock.i).hash();
        !self.options.hashed
            || !ours
            || broken(Fault::TrustCopies)
            || (hash != 0 && copy::hash_of(as_path(path)).is_ok_and(|found| found == hash))
    }

    /// Copies the file, if there is room for it and a way to write.
    fn make(&self, near: &Near, lock: &Locked<'_>, name: &[u8], far: &Stat) -> Result<Provided> {
        let table = &near.table;
        // A time that is too far off was set by another clock.
        let left = table.resume_at().load(Ordering::Relaxed).saturating_sub(now());
        if (1..=REST.as_nanos() as u64).contains(&left) {
            return Ok(Provided::Not);
        }
        let (source, path) = (self.source_of(name), near.path(name));
        if let Some(parent) = as_path(&path).parent()
            && let Err(error) = private_folder(parent)
        {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Ok(self.give_up(near, lock, name, errno));
        }
        let part = if broken(Fault::CopyInPlace) {
            as_path(&path).to_path_buf()
        } else {
            near.part(lock.i)
        };
        let mut wanted = version(far);
        for _ in 0..TRIES {
            match self.make_room(near, lock, wanted.0) {
                Ok(true) => {}
                Ok(false) => return Ok(Provided::Not),
                Err(errno) => return Ok(self.give_up(near, lock, name, errno)),
            }
            let began = Instant::now();
            match copy(as_path(&source), &part, wanted, self.options.hashed) {
                Ok(copied) => {
                    if let Err(errno) = self.publish(near, lock, &part, name, copied) {
                        return Ok(self.give_up(near, lock, name, errno));
                    }
                    let counters = table.counters();
                    counters.add(Count::Fills, 1);
                    counters.add(Count::Bytes, copied.version.0);
                    counters.add(Count::LoadNanos, began.elapsed().as_nanos() as u64);
                    return Ok(Provided::Made);
                }
                Err(Trouble::Changed) => {
                    table.unreserve(lock);
                    match stat_file(as_path(&source)) {
                        Ok(far) => wanted = version(&far),
                        Err(errno) => return Err(self.lose(near, lock, &source, errno)),
                    }
                }
                Err(Trouble::Source(errno)) => return Err(self.lose(near, lock, &source, errno)),
                // Somebody removed the folder.
                Err(Trouble::Copy(Errno::NOENT)) if private_folder(&near.parts).is_ok() => {
                    table.unreserve(lock);
                }
                Err(Trouble::Copy(errno)) => return Ok(self.give_up(near, lock, name, errno)),
            }
        }
        let _gone = rustix::fs::unlink(&part);
        table.counters().add(Count::Dropped, 1);
        Ok(Provided::Not) // it is being written all the time
    }

    /// Gives the whole copy its name. It is noted before that: who dies in between leaves a note of
    /// a file that is not there, and not a file that nobody knows.
    fn publish(
        &self,
        near: &Near,
        lock: &Locked<'_>,
        part: &Path,
        name: &[u8],
        copied: Copied,
    ) -> rustix::io::Result<()> {
        let entry = near.table.entry(lock.i);
        let before = (entry.flags() & OWNED != 0)
            .then(|| Kept { version: entry.version(), hash: entry.hash() });
        near.journal.keep(name, Kept { version: copied.version, hash: copied.hash })?;
        near.table.own(lock, copied.version, copied.hash);
        if let Err(errno) = rustix::fs::rename(part, as_path(&near.path(name))) {
            match before {
                Some(kept) => {
                    near.table.own(lock, kept.version, kept.hash);
                    let _lost = near.journal.keep(name, kept);
                }
                None => near.forget(lock, name),
            }
            return Err(errno);
        }
        entry.touch(now());
        entry.raise(CHECKED);
        Ok(())
    }

    /// After the source could not be read.
    fn lose(&self, near: &Near, lock: &Locked<'_>, source: &[u8], errno: Errno) -> Error {
        let _gone = rustix::fs::unlink(near.part(lock.i));
        near.table.unreserve(lock);
        near.table.counters().add(Count::Dropped, 1);
        source_error(source, errno)
    }

    /// After a write failed: nothing more is written for a while, unless it was this file's fault,
    /// and people are told once.
    fn give_up(&self, near: &Near, lock: &Locked<'_>, name: &[u8], errno: Errno) -> Provided {
        let _gone = rustix::fs::unlink(near.part(lock.i));
        near.table.unreserve(lock);
        near.table.counters().add(Count::Dropped, 1);
        if is_about_one_file(errno) {
            self.tell(near, ODD, || {
                let path = lossy(&near.path(name));
                format!("{path} cannot be made: {errno}; its source is used instead")
            });
            return Provided::Not;
        }
        near.table.resume_at().store(now() + REST.as_nanos() as u64, Ordering::Relaxed);
        let (what, remedy) = if is_lack_of_room(errno) {
            (FULL, "free some space or set limit=")
        } else {
            (UNWRITABLE, "make it writable or use another cache folder")
        };
        self.tell(near, what, || {
            format!(
                "{} takes no more files ({errno}); what is there is used, the rest is read from the \
                 source, and writing is tried again every {} s: {remedy}",
                self.folder.display(),
                REST.as_secs()
            )
        });
        Provided::Not
    }

    // Room

    /// Sets `bytes` aside for a file, removing others if that is allowed and needed. An error if they
    /// cannot be removed.
    fn make_room(&self, near: &Near, lock: &Locked<'_>, bytes: u64) -> rustix::io::Result<bool> {
        let (table, entry) = (&near.table, near.table.entry(lock.i));
        let limit = self.options.limit.unwrap_or(u64::MAX);
        if bytes > limit || crate::space::check_file_size(bytes).is_err() {
            table.counters().add(Count::TooLarge, 1);
            return Ok(false);
        }
        // What it takes already is going to be replaced.
        let before = if entry.flags() & OWNED != 0 { entry.version().0 } else { 0 };
        table.reserve(lock, bytes.saturating_sub(before));
        while table.bytes() > limit {
            if near.reclaim(false) {
                continue;
            }
            let gained = if self.options.evict { self.evict_one(near) } else { Ok(false) };
            if gained != Ok(true) {
                table.unreserve(lock);
                return gained;
            }
        }
        Ok(true)
    }

    /// Removes the file that was not used for longest. False if there is none to remove.
    fn evict_one(&self, near: &Near) -> rustix::io::Result<bool> {
        if !near.domain.is_alone() {
            self.tell(near, UNSHARED, || {
                format!(
                    "{} is also used by processes that do not share this /dev/shm (another \
                     container?), so nothing is removed from it; share /dev/shm or use another folder",
                    self.folder.display()
                )
            });
            return Ok(false);
        }
        // Who finds the list in another thread's hands makes another one.
        let mut victims = near.victims.take().unwrap_or_default();
        let gained = Self::remove_one_of(near, &mut victims);
        let _there_is_one = near.victims.put(victims);
        gained
    }

    fn remove_one_of(near: &Near, victims: &mut Victims) -> rustix::io::Result<bool> {
        let mut looked = false;
        loop {
            let Some((used, name)) = victims.pop() else {
                if looked {
                    return Ok(false);
                }
                looked = true;
                if near.reclaim(true) {
                    return Ok(true);
                }
                *victims = near.look_out();
                continue;
            };
            let Some(i) = near.table.find(key(&name)) else { continue };
            if near.table.entry(i).used() == used && near.remove(i, &name)? {
                near.table.counters().add(Count::Evicted, 1);
                return Ok(true);
            }
        }
    }

    // Telling

    fn tell(&self, near: &Near, what: u64, text: impl FnOnce() -> String) {
        if near.table.is_news(what) {
            self.put_news(text());
        }
    }

    fn put_news(&self, text: String) {
        let mut text = Box::new(text);
        while let Err(back) = self.news.put(text) {
            text = back;
            if let Some(before) = self.news.take() {
                *text = format!("{before}\n{text}");
            }
        }
    }

    /// What happened that people should know, each once per node.
    pub fn take_news(&self) -> Option<String> {
        if self.news.is_empty() { None } else { self.news.take().map(|text| *text) }
    }

    // In the background

    /// The path of that file at once: of the copy if there is a right one, else of the source. The
    /// copy is made by another thread.
    pub fn fetch_behind(self: &Arc<Self>, name: &[u8]) -> Result<Served> {
        check_name(name)?;
        let Ok(near) = &self.near else { return self.fetch(name) };
        // A copy from an earlier job only has to be compared: quicker than reading the source.
        if let Some(i) = near.table.find(key(name))
            && near.table.entry(i).flags() & (OWNED | CHECKED) == OWNED
            && !near.table.is_locked(i)
        {
            return self.fetch(name);
        }
        crate::pool::submit(self, name);
        Ok(self.pass(near, name))
    }

    /// What the other thread does.
    pub(crate) fn copy_behind(&self, name: &[u8]) {
        let Ok(near) = &self.near else { return };
        if let Err(error) = self.provide(near, name) {
            self.tell(near, BACKGROUND, || {
                format!("copying in the background: {error}; its source keeps being used")
            });
        }
    }

    // Looking

    /// Whether there is a copy of that file that we know, compared or not.
    pub fn contains(&self, name: &[u8]) -> bool {
        let Ok(near) = &self.near else { return false };
        near.table.find(key(name)).is_some_and(|i| {
            let entry = near.table.entry(i);
            entry.flags() & (OWNED | CHECKED) != 0
                && rustix::fs::lstat(as_path(&near.path(name)))
                    .is_ok_and(|stat| version(&stat) == entry.version())
        })
    }

    /// The names of all files that are ours.
    pub fn names(&self) -> Vec<Vec<u8>> {
        let Ok(near) = &self.near else { return Vec::new() };
        let mut names = near.names();
        names.retain(|name| self.contains(name));
        names.sort();
        names
    }

    /// Compares the bytes of a copy with those of its source; with the hash of the copy if the source
    /// is gone. A copy that differs is removed if it is ours.
    pub fn verify(&self, name: &[u8]) -> Result<Verdict> {
        check_name(name)?;
        let Ok(near) = &self.near else { return Ok(Verdict::Absent) };
        let Some(i) = near.table.find_or_add(key(name)) else { return Ok(Verdict::Absent) };
        if !near.table.is_seen() {
            return Ok(Verdict::Absent);
        }
        let lock = loop {
            match near.table.lock(i) {
                Some(lock) => break lock,
                None if near.wait(i) => {}
                None => return Ok(Verdict::Absent), // being copied
            }
        };
        let path = near.path(name);
        let Ok(found) = copy::hash_of(as_path(&path)) else { return Ok(Verdict::Absent) };
        let (source, entry) = (self.source_of(name), near.table.entry(i));
        let wanted = match copy::hash_of(as_path(&source)) {
            Ok(hash) => hash,
            Err(_) if entry.hash() != 0 => entry.hash(),
            Err(errno) => return Err(source_error(&source, errno)),
        };
        if found == wanted {
            return Ok(Verdict::Same);
        }
        let ours = rustix::fs::lstat(as_path(&path)).is_ok_and(|stat| can_be_ours(&stat));
        if ours && entry.flags() & OWNED != 0 && rustix::fs::unlink(as_path(&path)).is_ok() {
            near.forget(&lock, name);
        }
        Ok(Verdict::Differs)
    }

    /// Removes all copies that are ours and that nobody is about to use; says how many.
    pub fn clear(&self) -> u64 {
        let Ok(near) = &self.near else { return 0 };
        let remove = |name: &Vec<u8>| {
            near.table.find(key(name)).is_some_and(|i| near.remove(i, name) == Ok(true))
        };
        near.names().iter().filter(|name| remove(name)).count() as u64
    }

    /// Sums over all processes.
    pub fn stats(&self) -> FileStats {
        let Ok(near) = &self.near else { return FileStats::default() };
        let sum = |count| near.table.counters().sum(count);
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
            files: near.table.entries().filter(|entry| entry.flags() & OWNED != 0).count() as u64,
            bytes: near.table.bytes(),
        }
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Nanoseconds of the clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64)
}

/// A name that stays below the folder.
fn check_name(name: &[u8]) -> Result<()> {
    // One spelling per file: no empty part, no "." and no "..".
    let good = |part: &[u8]| !matches!(part, b"" | b"." | b"..");
    if !name.contains(&0) && name.split(|&byte| byte == b'/').all(good) {
        return Ok(());
    }
    Err(Error::new(
        Kind::Argument,
        format!(
            "{:?} is not the name of a file below the source folder; names are relative to it",
            lossy(name)
        ),
    ))
}

/// What reading the file itself would have said, with the number of the error for Python.
fn source_error(path: &[u8], errno: Errno) -> Error {
    Error::new(Kind::Errno(errno.raw_os_error()), lossy(path))
}

#[cfg(test)]
mod tests;
