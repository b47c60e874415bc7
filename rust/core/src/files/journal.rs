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
//! record is lost, also if the processes do not share a /dev/shm.
//! Nobody waits for long, though: who writes the log anew may be stopped, or on a slow disk. Who did
//! not get the lock in time appends without it, then looks whether the log was replaced meanwhile, and
//! if so appends again. Who replaces it looks for late records afterwards. One of the two sees the other.

use crate::fault::{Fault, active};
use crate::file::{is_same, open_private, write_all};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
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
/// With a name of one byte.
const SHORTEST_RECORD: u64 = (16 + FIXED + 1) as u64;
/// How long to wait for who writes the log anew.
const PATIENCE: Duration = Duration::from_millis(200);
/// How often a record is appended again because the log was replaced.
const TRIES: usize = 5;

/// A file that is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) version: (u64, u64),
    pub(crate) hash: u64,
}

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

/// What a log says.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) files: HashMap<Vec<u8>, Kept>,
    /// Bytes that are no record.
    pub(crate) damaged: usize,
    /// Records that say nothing any more.
    pub(crate) outdated: usize,
}

impl Journal {
    pub(crate) fn keep(&self, name: &[u8], kept: Kept) -> rustix::io::Result<()> {
        self.append(&record(KEPT, name, kept))
    }

    pub(crate) fn keep_all(&self, files: &HashMap<Vec<u8>, Kept>) -> rustix::io::Result<()> {
        let records: Vec<u8> =
            files.iter().flat_map(|(name, kept)| record(KEPT, name, *kept)).collect();
        if records.is_empty() { Ok(()) } else { self.append(&records) }
    }

    pub(crate) fn remove(&self, name: &[u8]) -> rustix::io::Result<()> {
        self.append(&record(REMOVED, name, Kept { version: (0, 0), hash: 0 }))
    }

    fn append(&self, records: &[u8]) -> rustix::io::Result<()> {
        for _ in 0..TRIES {
            if self.append_once(records)? {
                return Ok(());
            }
        }
        Err(Errno::AGAIN)
    }

    /// Whether what was written is in the log, and not in one that was replaced.
    /// O_APPEND: the kernel puts each write at the end, whoever else writes.
    fn append_once(&self, records: &[u8]) -> rustix::io::Result<bool> {
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
        let stays = self.is_at(file.as_fd());
        unlock(&file);
        match written? {
            n if n == records.len() => Ok(stays),
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
    /// the time. Where that cannot be, the old one is as good.
    pub(crate) fn tidy(&self) -> rustix::io::Result<()> {
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
        let done = if self.is_at(old.as_fd()) { replace() } else { Ok(()) };
        unlock(&old);
        done
    }

    /// Puts what `bytes` say, which were read from the log `old`, in its place.
    fn replace(&self, old: &File, bytes: &[u8]) -> rustix::io::Result<()> {
        let mut records = Vec::new();
        for (name, kept) in &parse(bytes).files {
            records.extend(record(KEPT, name, *kept));
        }
        let new = beside(&self.path, ".new");
        let file = open_private(&new, OFlags::TRUNC | OFlags::WRONLY)?;
        write_all(file.as_fd(), &records, 0)?;
        rustix::fs::rename(&new, &self.path)?;
        if active(Fault::ForgetLateRecords) {
            return Ok(());
        }
        // Of what came late, removals are left out: such a file may be there again by now, and a
        // record of what is gone is no harm.
        self.keep_all(&parse(&rest_of(old)?).files)
    }
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

fn record(kind: u8, name: &[u8], kept: Kept) -> Vec<u8> {
    let mut body = Vec::with_capacity(FIXED + name.len());
    body.push(kind);
    for number in [kept.version.0, kept.version.1, kept.hash] {
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
    let mut contents = Contents::default();
    while !bytes.is_empty() {
        let Some((kind, name, kept, len)) = first(bytes) else {
            bytes = &bytes[1..];
            contents.damaged += 1;
            continue;
        };
        let before = if kind == KEPT {
            contents.files.insert(name.to_vec(), kept)
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
fn first(bytes: &[u8]) -> Option<(u8, &[u8], Kept, usize)> {
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
    let kept = Kept { version: (u64_at(body, 1)?, u64_at(body, 9)?), hash: u64_at(body, 17)? };
    Some((body[0], &body[FIXED..], kept, 16 + len))
}

/// The files below `folder` that can only be ours: regular, private, of this user. For a folder whose
/// log is lost.
pub(crate) fn walk(folder: &Path) -> HashMap<Vec<u8>, Kept> {
    let mut found = HashMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(at) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&at) else { continue };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let Ok(stat) = rustix::fs::lstat(&path) else { continue };
            if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
                folders.push(path);
            } else if crate::file::check_private(&stat).is_ok()
                && let Ok(name) = path.strip_prefix(folder)
            {
                let kept = Kept { version: crate::copy::version(&stat), hash: 0 };
                found.insert(name.as_os_str().as_bytes().to_vec(), kept);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(n: u64) -> Kept {
        Kept { version: (n, n * 1000), hash: n ^ 7 }
    }

    #[test]
    fn what_was_appended_is_read_in_order() {
        let mut bytes = record(KEPT, b"a", kept(1));
        bytes.extend(record(KEPT, b"b/c", kept(2)));
        bytes.extend(record(KEPT, b"a", kept(3)));
        bytes.extend(record(REMOVED, b"b/c", kept(0)));
        let read = parse(&bytes);
        assert_eq!(read.files, HashMap::from([(b"a".to_vec(), kept(3))]));
        assert_eq!((read.damaged, read.outdated), (0, 3));
    }

    #[test]
    fn a_torn_record_costs_only_itself() {
        let (one, two) = (record(KEPT, b"one", kept(1)), record(KEPT, b"two", kept(2)));
        for cut in 0..one.len() {
            let read = parse(&[&one[..cut], &two[..]].concat());
            assert_eq!(read.files, HashMap::from([(b"two".to_vec(), kept(2))]), "cut at {cut}");
            assert_eq!(read.damaged, cut);
        }
    }

    /// P13: no flipped bit makes a record say something else.
    #[test]
    fn flipped_bits_are_found() {
        let good = [record(KEPT, b"one", kept(1)), record(KEPT, b"two", kept(2))].concat();
        let names = HashMap::from([(b"one".to_vec(), kept(1)), (b"two".to_vec(), kept(2))]);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let read = parse(&bad);
            assert!(read.damaged > 0 && read.files.len() == 1, "bit {bit}");
            assert!(read.files.iter().all(|(name, kept)| names.get(name) == Some(kept)));
        }
    }

    fn journal(what: &str) -> (PathBuf, Journal) {
        let folder = std::env::temp_dir().join(format!("stocache-{what}-{}", std::process::id()));
        let _old = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        (folder.clone(), Journal { path: folder.join("index") })
    }

    #[test]
    fn nothing_is_lost_when_the_log_is_written_anew_while_others_append() {
        const EACH: u64 = 300;
        let (folder, log) = journal("tidy");
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4u64)
                .map(|t| {
                    let log = &log;
                    scope.spawn(move || {
                        for n in 0..EACH {
                            let name = format!("{t}-{n}");
                            log.keep(name.as_bytes(), kept(0)).unwrap();
                            std::thread::sleep(Duration::from_micros(100));
                            log.keep(name.as_bytes(), kept(n)).unwrap();
                            if n % 2 == 1 {
                                log.remove(name.as_bytes()).unwrap();
                            }
                        }
                    })
                })
                .collect();
            let mut anew = 0;
            while !writers.iter().all(|writer| writer.is_finished()) {
                anew += u64::from(log.tidy().is_ok());
            }
            assert!(anew > 0, "never written anew: the test tests nothing");
        });
        let read = log.read();
        assert_eq!(read.damaged, 0);
        assert_eq!(read.files.len() as u64, 4 * EACH / 2);
        for (name, found) in &read.files {
            let n: u64 = std::str::from_utf8(name).unwrap()[2..].parse().unwrap();
            assert_eq!(*found, kept(n), "{n}");
        }
        log.tidy().unwrap();
        let tidy = log.read();
        assert_eq!((tidy.files, tidy.damaged, tidy.outdated), (read.files, 0, 0));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_in_the_place_of_the_log_is_moved_away_and_not_removed() {
        let (folder, log) = journal("displace");
        std::fs::create_dir_all(log.path.join("somebody's")).unwrap();
        assert_eq!(log.read().damaged, 1);
        assert_eq!(log.at_most(), None);
        log.displace();
        log.keep(b"a", kept(1)).unwrap();
        assert_eq!(log.read().files.len(), 1);
        assert!(folder.join("index.not-ours/somebody's").is_dir());
        assert!(log.at_most() >= Some(1));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn nothing_is_lost_when_who_writes_the_log_anew_takes_longer_than_others_wait() {
        let (folder, log) = journal("slow");
        log.keep(b"a", kept(1)).unwrap();
        log.keep(b"b", kept(2)).unwrap();
        let old = File::options().read(true).write(true).open(&log.path).unwrap();
        rustix::fs::flock(&old, FlockOperation::NonBlockingLockExclusive).unwrap();
        let bytes = rest_of(&old).unwrap();
        log.keep(b"late", kept(3)).unwrap();
        log.remove(b"b").unwrap();
        log.replace(&old, &bytes).unwrap();
        let read = log.read();
        assert_eq!(read.files.get(&b"a"[..]), Some(&kept(1)));
        assert_eq!(read.files.get(&b"late"[..]), Some(&kept(3)), "written without the lock");
        assert_eq!((read.files.len(), read.damaged), (3, 0), "a removal may be forgotten");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn who_writes_the_log_anew_and_stands_still_holds_nobody_up() {
        let (folder, log) = journal("stopped");
        log.keep(b"a", kept(1)).unwrap();
        let file = std::fs::File::open(&log.path).unwrap();
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        log.keep(b"b", kept(2)).unwrap();
        assert!(log.tidy().is_err());
        assert_eq!(log.read().files.len(), 2);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
