//! Which files of a folder are ours: a log on disk that survives every crash.
//!
//! ```text
//!   record   4   marker
//!            4   length of the body
//!            n   body: kind u8 (1 kept, 2 removed), size u64, mtime u64, hash u64, name
//!            8   XXH3 of the body
//! ```
//!
//! A record is appended with one write, after the file has its name. What a crash tears is skipped:
//! the next record is found by its marker. A file whose record was lost is known again by its size
//! and time of change when somebody asks for it; if the log is damaged, by a walk over the folder.
//! Numbers are little-endian. The log is written anew, without what says nothing any more, when that
//! is most of it.

use crate::file::write_all;
use rustix::fd::AsFd;
use rustix::fs::{CWD, Mode, OFlags};
use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const MARKER: [u8; 4] = *b"\x9fsto";
const KEPT: u8 = 1;
const REMOVED: u8 = 2;
/// kind, size, mtime, hash
const FIXED: usize = 1 + 8 + 8 + 8;
/// The longest path of Linux, and then some.
const LONGEST_NAME: usize = 8192;

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

    pub(crate) fn remove(&self, name: &[u8]) -> rustix::io::Result<()> {
        self.append(&record(REMOVED, name, Kept { version: (0, 0), hash: 0 }))
    }

    /// O_APPEND: the kernel puts each write at the end, whoever else writes.
    fn append(&self, record: &[u8]) -> rustix::io::Result<()> {
        let flags =
            OFlags::CREATE | OFlags::APPEND | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(CWD, &self.path, flags, Mode::RUSR | Mode::WUSR)?;
        match rustix::io::write(&file, record)? {
            n if n == record.len() => Ok(()),
            _ => Err(rustix::io::Errno::NOSPC), // a torn record: skipped by readers
        }
    }

    /// No log is an empty log.
    pub(crate) fn read(&self) -> std::io::Result<Contents> {
        match std::fs::read(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Contents::default()),
            bytes => bytes.map(|bytes| parse(&bytes)),
        }
    }

    /// Writes the log anew, with these files alone. Only while nobody else writes to it.
    pub(crate) fn rewrite(&self, files: &HashMap<Vec<u8>, Kept>) -> rustix::io::Result<()> {
        let mut bytes = Vec::new();
        for (name, kept) in files {
            bytes.extend(record(KEPT, name, *kept));
        }
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let flags =
            OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(CWD, &new, flags, Mode::RUSR | Mode::WUSR)?;
        write_all(file.as_fd(), &bytes, 0)?;
        rustix::fs::rename(&new, &self.path)
    }
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
    if u64_at(bytes, 8 + len)? != xxh3_64(body) || ![KEPT, REMOVED].contains(&body[0]) {
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
}
