//! What a file holds, as far as it can be told without reading it, and a hash if it was read.

use rustix::fs::{FileType, Stat};
use rustix::io::Errno;
use std::path::Path;

/// Size and time of change, by which two states of a file are told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) size: u64,
    /// In nanoseconds.
    pub(crate) mtime: u64,
}

impl Version {
    pub(crate) fn of(stat: &Stat) -> Self {
        let nanos = (stat.st_mtime as u64).wrapping_mul(1_000_000_000);
        Self { size: stat.st_size as u64, mtime: nanos.wrapping_add(stat.st_mtime_nsec) }
    }
}

/// What was copied: the source's state, and a hash of the bytes if asked for; 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) version: Version,
    pub(crate) hash: u64,
}

pub(crate) fn is_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_file()
}

/// A regular file's state; a folder or a device is none.
pub(crate) fn stat_file(path: &Path) -> Result<Stat, Errno> {
    regular(rustix::fs::stat(path)?)
}

pub(crate) fn regular(stat: Stat) -> Result<Stat, Errno> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(stat),
        FileType::Directory => Err(Errno::ISDIR),
        _ => Err(Errno::INVAL),
    }
}
