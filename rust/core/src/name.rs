//! Names of segments: what is allowed, and how a name appears in /dev/shm and in /proc.

use crate::error::{Error, Kind, Result};
use crate::layout::FORMAT;
use std::path::{Path, PathBuf};

/// Where named segments live.
pub(crate) const SHM: &str = "/dev/shm";

/// Where the bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// /dev/shm if it has room and leaves some to others, else a memfd.
    Auto,
    /// A file in /dev/shm.
    Shm,
    /// Anonymous memory with no size limit but that of the memory cgroup.
    Memfd,
}

/// Which backing a link in /proc leads to, if it is the segment of that name:
/// "/memfd:stocache-…" or "/dev/shm/stocache-…", with or without " (deleted)".
pub(crate) fn backing_of(target: &Path, name: &str) -> Option<Backing> {
    let target = target.to_str()?;
    let target = target.strip_suffix(" (deleted)").unwrap_or(target);
    let file = file_name(name);
    if target.strip_prefix("/memfd:") == Some(&file) {
        Some(Backing::Memfd)
    } else if Path::new(target) == path_of(name) {
        Some(Backing::Shm)
    } else {
        None
    }
}

/// The entries of a folder of /proc that are numbers: processes, descriptors.
pub(crate) fn numbers(dir: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

pub(crate) fn file_prefix() -> String {
    format!("stocache-{}-", rustix::process::geteuid().as_raw())
}

pub(crate) fn file_name(name: &str) -> String {
    format!("{}{FORMAT}-{name}", file_prefix())
}

pub(crate) fn path_of(name: &str) -> PathBuf {
    Path::new(SHM).join(file_name(name))
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=100).contains(&name.len()) && name.chars().all(allowed) {
        return Ok(());
    }
    Err(Error::new(
        Kind::Argument,
        format!(
            "name {name:?} is not allowed: use 1 to 100 letters, digits, dots, dashes and underscores"
        ),
    ))
}

/// A name that nobody else has.
pub fn random_name() -> Result<String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Error::system("no random numbers", errno))?;
    Ok(format!("private-{:016x}", u64::from_le_bytes(bytes)))
}
