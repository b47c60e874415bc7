//! Files and folders that can only be ours: opened, written whole, removed only if still the same.

use crate::fault::{Fault, active};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::io::IoSlice;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

/// Removes `path` if it still names `file`. Call it with the exclusive lock held: nobody else can then
/// remove or replace the name. Without it (`stocache rm --force`) a cache that takes the name between
/// the look and the removal may lose it instead, and goes on without it as well.
pub(crate) fn unlink_same(file: BorrowedFd<'_>, path: &Path) -> bool {
    match (rustix::fs::fstat(file), rustix::fs::lstat(path)) {
        (Ok(ours), Ok(named)) if ours.st_nlink > 0 && is_same(&ours, &named) => {
            rustix::fs::unlink(path).is_ok()
        }
        _ => false,
    }
}

/// Opens a file for writing, made if need be, that only its owner may reach, whatever the umask says.
pub(crate) fn open_private(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = flags | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(CWD, path, flags, mode)?;
    make_private(file.as_fd())?;
    Ok(file)
}

/// The mode that was asked for is less the umask, and a memfd asks for none.
pub(crate) fn make_private(file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    if active(Fault::NoChmod) {
        return Ok(());
    }
    rustix::fs::fchmod(file, Mode::RUSR | Mode::WUSR)
}

/// Whether two looks met one file.
pub(crate) fn is_same(a: &rustix::fs::Stat, b: &rustix::fs::Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Opens what is at `path` if it can only be a segment of ours; `None` if nothing is there.
pub(crate) fn open_checked(path: &Path) -> std::result::Result<Option<OwnedFd>, String> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(format!("cannot look at it ({errno})")),
    };
    check_private(&stat)?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(format!("cannot open it ({errno})")),
    };
    let opened =
        rustix::fs::fstat(&file).map_err(|errno| format!("cannot look at it ({errno})"))?;
    // Replaced between the two looks: whatever it is now, it is not what was checked.
    if !is_same(&opened, &stat) {
        return Ok(None);
    }
    Ok(Some(file))
}

/// A regular file of this user that nobody else may reach.
pub(crate) fn check_private(stat: &rustix::fs::Stat) -> std::result::Result<(), String> {
    match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
        rustix::fs::FileType::RegularFile => {}
        rustix::fs::FileType::Symlink => return Err("symlink: it is a symbolic link".into()),
        other => return Err(format!("type: it is not a regular file but a {other:?}")),
    }
    let uid = rustix::process::geteuid().as_raw();
    if stat.st_uid != uid {
        return Err(format!("owner: it belongs to user {}, we are user {uid}", stat.st_uid));
    }
    match stat.st_mode & 0o7777 {
        0o600 => Ok(()),
        mode => Err(format!("mode: others may reach it (mode {mode:o}, not 600)")),
    }
}

/// Makes a folder, and those above it, for this user alone, whatever the umask says.
pub(crate) fn private_folder(path: &Path) -> std::io::Result<()> {
    let made = one_private_folder(path);
    match (&made, path.parent()) {
        (Err(error), Some(parent)) if error.kind() == std::io::ErrorKind::NotFound => {
            private_folder(parent)?;
            // Once: /proc says so again, whatever is there.
            one_private_folder(path)
        }
        _ => made,
    }
}

fn one_private_folder(path: &Path) -> std::io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) if active(Fault::NoChmod) => Ok(()),
        Ok(()) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => Err(error),
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

/// The first bytes of a file, and its length.
pub(crate) fn read_header<const N: usize>(
    file: BorrowedFd<'_>,
) -> std::result::Result<([u8; N], u64), String> {
    let stat = rustix::fs::fstat(file).map_err(|errno| format!("cannot look at it ({errno})"))?;
    let mut bytes = [0; N];
    match rustix::io::pread(file, &mut bytes[..], 0) {
        Ok(n) if n == N => Ok((bytes, stat.st_size as u64)),
        Ok(n) => Err(format!("size: it has only {n} bytes")),
        Err(errno) => Err(format!("cannot read it ({errno})")),
    }
}

pub(crate) fn write_all(
    file: BorrowedFd<'_>,
    mut bytes: &[u8],
    mut at: u64,
) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(n) => {
                bytes = &bytes[n..];
                at += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// As `write_all`, of parts that follow each other.
pub(crate) fn write_all_parts(
    file: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    mut at: u64,
) -> rustix::io::Result<()> {
    const MOST: usize = 1024; // what the kernel takes at once
    for some in parts.chunks(MOST) {
        let mut list = some.to_vec();
        let mut left = &mut list[..];
        IoSlice::advance_slices(&mut left, 0); // leaves out empty ones at the front
        while !left.is_empty() {
            match rustix::io::pwritev(file, left, at) {
                Ok(0) => return Err(Errno::NOSPC),
                Ok(n) => {
                    IoSlice::advance_slices(&mut left, n);
                    at += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
    Ok(())
}

/// Signals undo an allocation that is under way, so it is tried again, a bounded number of times.
pub(crate) fn allocate(file: BorrowedFd<'_>, at: u64, len: u64) -> rustix::io::Result<()> {
    let mut result = Ok(());
    for _ in 0..100 {
        result = rustix::fs::fallocate(file, FallocateFlags::empty(), at, len);
        if result != Err(Errno::INTR) {
            break;
        }
    }
    result
}

pub(crate) fn is_named(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink > 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn folders_are_made_with_those_above_them_or_not_at_all() {
        let top = std::env::temp_dir().join(format!("stocache-folders-{}", std::process::id()));
        let lowest = top.join("a/b");
        private_folder(&lowest).unwrap();
        private_folder(&lowest).unwrap();
        assert_eq!(std::fs::metadata(&lowest).unwrap().permissions().mode() & 0o777, 0o700);
        std::fs::write(top.join("file"), []).unwrap();
        assert!(private_folder(&top.join("file/c")).is_err());
        std::fs::remove_dir_all(&top).unwrap();
        // Where there are no folders to be made, the kernel says that there is none above.
        for path in ["/proc/stocache", "/proc/stocache/a", ""] {
            assert!(private_folder(Path::new(path)).is_err(), "{path:?}");
        }
    }
}
