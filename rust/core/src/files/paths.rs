//! Names, paths and folders.

use crate::error::{Error, Kind, Result};
use rustix::fs::Stat;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Whether a file in the place of a copy of ours can be that copy: one that only its owner may reach.
/// What people put there as a rule is not.
pub(crate) fn can_be_ours(stat: &Stat) -> bool {
    crate::sys::private_file::check_private(stat).is_ok()
}

pub(crate) fn key(name: &[u8]) -> u64 {
    xxh3_64(name).max(1)
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

pub(crate) fn with_slash(mut path: Vec<u8>) -> Vec<u8> {
    if path.last() != Some(&b'/') {
        path.push(b'/');
    }
    path
}

/// For messages.
pub(crate) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A name that stays below the folder.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
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
