//! Names, paths and folders.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use rustix::fs::Stat;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
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

/// Makes a folder, and those above it, for this user alone, whatever the umask says.
pub(crate) fn private_folder(path: &Path) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) if broken(Fault::NoChmod) => Ok(()),
        Ok(()) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => match path.parent() {
            Some(parent) if error.kind() == std::io::ErrorKind::NotFound => {
                private_folder(parent)?;
                private_folder(path)
            }
            _ => Err(error),
        },
    }
}

/// A folder of this user that nobody else can write to.
pub(crate) fn check_folder(path: &Path) -> std::result::Result<(), String> {
    let stat = rustix::fs::lstat(path).map_err(|errno| errno.to_string())?;
    let uid = rustix::process::geteuid().as_raw();
    if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir() {
        return Err(format!("{} is not a folder", path.display()));
    }
    if stat.st_uid != uid {
        return Err(format!(
            "{} belongs to user {}, we are user {uid}",
            path.display(),
            stat.st_uid
        ));
    }
    if stat.st_mode & 0o022 != 0 {
        return Err(format!("others may write to {} (chmod 700 it)", path.display()));
    }
    Ok(())
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
