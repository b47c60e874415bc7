//! Names of segments: what is allowed, and how a name appears in /dev/shm and in /proc.

use crate::error::{Error, Kind, Result};
use crate::segment::layout::FORMAT;
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

/// Which backing a link in /proc leads to, if it can be the segment of that name:
/// "/memfd:stocache-…", "/dev/shm/stocache-…" or "/dev/shm/#123", with or without " (deleted)". The
/// last is how the kernel goes on showing the descriptor of whoever made a file before it had a name.
pub(crate) fn backing_of(target: &Path, name: &str) -> Option<Backing> {
    let target = target.to_str()?;
    let target = target.strip_suffix(" (deleted)").unwrap_or(target);
    let file = file_name(name);
    if target.strip_prefix("/memfd:") == Some(&file) {
        Some(Backing::Memfd)
    } else if Path::new(target) == path_of(name) || is_made_unnamed(target) {
        Some(Backing::Shm)
    } else {
        None
    }
}

fn is_made_unnamed(target: &str) -> bool {
    Path::new(target)
        .strip_prefix(SHM)
        .ok()
        .and_then(|file| file.to_str()?.strip_prefix('#'))
        .is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_proc_are_told_apart() {
        let backing = |link: &str| backing_of(Path::new(link), "mine");
        let (named, memfd) = (path_of("mine"), format!("/memfd:{}", file_name("mine")));
        let named = named.to_str().unwrap();
        for end in ["", " (deleted)"] {
            assert_eq!(backing(&format!("{named}{end}")), Some(Backing::Shm));
            assert_eq!(backing(&format!("/dev/shm/#4711{end}")), Some(Backing::Shm));
            assert_eq!(backing(&format!("{memfd}{end}")), Some(Backing::Memfd));
        }
        for other in ["/dev/shm/#a", "/tmp/#4711", "/memfd:#4711", "pipe:[4711]", "/dev/shm"] {
            assert_eq!(backing(other), None, "{other}");
        }
        assert_eq!(backing(&format!("{named}2")), None);
        assert_eq!(backing(&format!("{memfd}2")), None);
    }
}
