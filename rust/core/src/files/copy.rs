//! One file copied whole, or not at all.

use crate::files::content::{Content, Version, regular};
use crate::sys::interrupt::Patience;
use crate::sys::private_file::open_private;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Whose fault it was.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    /// The source cannot be read.
    Source(Errno),
    /// The copy cannot be written.
    Copy(Errno),
    /// The source changed meanwhile.
    Changed,
    /// The caller wants to be let go.
    Interrupted,
}

/// So much at once, so that others can see that it goes on.
const STEP: usize = 16 << 20;
const BUFFER: usize = 256 << 10;

/// Copies `from`, which must be in the state `wanted`, to `to`, which only its owner may read and
/// which gets the source's time of change.
pub(crate) fn copy(
    from: &Path,
    to: &Path,
    wanted: Version,
    hashed: bool,
) -> Result<Content, Trouble> {
    let source = open_source(from).map_err(at_source)?;
    let before = rustix::fs::fstat(&source).and_then(regular).map_err(at_source)?;
    if Version::of(&before) != wanted {
        return Err(Trouble::Changed);
    }
    let target = open_private(to, OFlags::TRUNC | OFlags::WRONLY).map_err(Trouble::Copy)?;
    set_time(&target, &before).map_err(Trouble::Copy)?; // before all the work
    let (copied, hash) = if hashed {
        by_hand(source.as_fd(), target.as_fd(), 0, wanted.size, true)?
    } else {
        (in_kernel(source.as_fd(), target.as_fd(), wanted.size)?, 0)
    };
    let after = rustix::fs::fstat(&source).map_err(at_source)?;
    if Version::of(&after) != wanted || copied != wanted.size {
        return Err(Trouble::Changed);
    }
    set_time(&target, &before).map_err(Trouble::Copy)?;
    Ok(Content { version: wanted, hash })
}

/// Gives a copy its source's time of change. A file system that cannot keep it cannot tell two states
/// of a file apart.
fn set_time(copy: &OwnedFd, source: &Stat) -> rustix::io::Result<()> {
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        last_modification: Timespec {
            tv_sec: source.st_mtime as _,
            tv_nsec: source.st_mtime_nsec as _,
        },
    };
    rustix::fs::futimens(copy, &times)?;
    let kept = Version::of(&rustix::fs::fstat(copy)?).mtime == Version::of(source).mtime;
    if kept { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// A file that was replaced on its server is gone for who had it open.
fn at_source(errno: Errno) -> Trouble {
    if errno == Errno::STALE { Trouble::Changed } else { Trouble::Source(errno) }
}

/// Not blocking: what is opened may turn out to be a pipe.
fn open_source(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(
        CWD,
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
}

/// Shares the blocks where the file system can, else lets the kernel copy, else copies.
fn in_kernel(from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> Result<u64, Trouble> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(size);
    }
    let (mut read, mut written) = (0, 0);
    let mut asking = Patience::new();
    while read < size {
        if asking.is_interrupted() {
            return Err(Trouble::Interrupted);
        }
        match rustix::fs::copy_file_range(from, Some(&mut read), to, Some(&mut written), STEP) {
            Ok(0) => break, // some file systems say so where there is more
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) if is_lack_of_room(errno) || errno == Errno::FBIG => {
                return Err(Trouble::Copy(errno));
            }
            Err(_) => break, // not between these two, or an error that reading or writing explains
        }
    }
    if read == size {
        Ok(size)
    } else {
        by_hand(from, to, read, size, false).map(|(copied, _)| copied)
    }
}

pub(crate) fn is_lack_of_room(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

/// Whether another file may well be written: this one has a name, a size or a time that cannot be.
pub(crate) fn is_about_one_file(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::FBIG
            | Errno::NAMETOOLONG
            | Errno::NOTDIR
            | Errno::ISDIR
            | Errno::EXIST
            | Errno::NOTEMPTY
            | Errno::ILSEQ
            | Errno::INVAL
            | Errno::LOOP
            | Errno::OPNOTSUPP
    )
}

/// Copies from `at` to the end, which must be at `size`. The length of all, and the hash of what was
/// copied.
fn by_hand(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    mut at: u64,
    size: u64,
    hashed: bool,
) -> Result<(u64, u64), Trouble> {
    let mut hasher = hashed.then(Xxh3::new);
    read_all(from, &mut at, |part, at| {
        if at + part.len() as u64 > size {
            return Err(Trouble::Changed);
        }
        if let Some(hasher) = &mut hasher {
            hasher.update(part);
        }
        crate::sys::private_file::write_all(to, part, at).map_err(Trouble::Copy)
    })?;
    Ok((at, hasher.map_or(0, |hasher| hasher.digest().max(1))))
}

/// Calls `each` with one part after the other, and where it is.
fn read_all(
    from: BorrowedFd<'_>,
    at: &mut u64,
    mut each: impl FnMut(&[u8], u64) -> Result<(), Trouble>,
) -> Result<(), Trouble> {
    let mut buffer = vec![0; BUFFER];
    let mut asking = Patience::new();
    loop {
        if asking.is_interrupted() {
            return Err(Trouble::Interrupted);
        }
        match rustix::io::pread(from, &mut buffer[..], *at) {
            Ok(0) => return Ok(()),
            Ok(n) => {
                each(&buffer[..n], *at)?;
                *at += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(at_source(errno)),
        }
    }
}

/// The hash of a file's bytes, as `copy` makes it.
pub(crate) fn hash_of(path: &Path) -> Result<u64, Errno> {
    let file = open_source(path)?;
    let mut hasher = Xxh3::new();
    let read = read_all(file.as_fd(), &mut 0, |part, _| {
        hasher.update(part);
        Ok(())
    });
    match read {
        Ok(()) => Ok(hasher.digest().max(1)),
        Err(Trouble::Source(errno) | Trouble::Copy(errno)) => Err(errno),
        Err(Trouble::Changed) => Err(Errno::STALE),
        Err(Trouble::Interrupted) => Err(Errno::INTR),
    }
}
