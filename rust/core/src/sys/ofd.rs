//! Locks on bytes of a file that belong to an open file description (F_OFD_SETLK): the kernel frees
//! them when the last descriptor *and the last mapping* of that description is gone, and nothing
//! else does. The bytes themselves are not touched: such a lock is only a label on a range.
//!
//! Nothing here allocates or panics: it is called between fork and exec.
#![allow(unsafe_code)] // F_OFD_SETLK has no safe wrapper

use rustix::io::Errno;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};

/// Locks byte `at` against everybody else; false if somebody has it.
pub(crate) fn lock_byte(fd: RawFd, at: u64) -> bool {
    set(fd, range(libc::F_WRLCK, at, 1)).is_ok()
}

/// Ends what `lock_byte` began.
pub(crate) fn unlock_byte(fd: RawFd, at: u64) {
    let unlocked = set(fd, range(libc::F_UNLCK, at, 1));
    debug_assert!(unlocked.is_ok());
}

/// As `unlock_byte`, where the descriptor may be gone: false then.
pub(crate) fn try_unlock_byte(fd: RawFd, at: u64) -> bool {
    set(fd, range(libc::F_UNLCK, at, 1)).is_ok()
}

/// Ends all locks of this description, those of flock(2) too.
pub(crate) fn unlock_all(fd: RawFd) {
    let _closed = set(fd, range(libc::F_UNLCK, 0, 0)); // a length of 0 is all the rest
    // SAFETY: a system call on a number.
    unsafe { libc::flock(fd, libc::LOCK_UN) };
}

/// Locks byte `at` of `file`, together with others who do the same.
pub(crate) fn share_byte(file: &impl AsRawFd, at: u64) -> rustix::io::Result<()> {
    set(file.as_raw_fd(), range(libc::F_RDLCK, at, 1))
}

/// Whether anybody has locked one of these bytes of `file` other than `at`, which is one of them.
pub(crate) fn is_locked_beside(file: &impl AsRawFd, bytes: Range<u64>, at: u64) -> bool {
    let any = |bytes: Range<u64>| {
        !bytes.is_empty() && any_locked(file, bytes.start, bytes.end - bytes.start)
    };
    any(bytes.start..at) || any(at + 1..bytes.end)
}

/// Whether anybody else has locked byte `at` of `file`.
pub(crate) fn is_locked(file: &impl AsRawFd, at: u64) -> bool {
    any_locked(file, at, 1)
}

/// Whether anybody else has locked any byte of `file`.
pub(crate) fn is_any_locked(file: &impl AsRawFd) -> bool {
    any_locked(file, 0, 0) // a length of 0 is all the rest
}

fn any_locked(file: &impl AsRawFd, start: u64, len: u64) -> bool {
    let mut range = range(libc::F_WRLCK, start, len);
    // SAFETY: the kernel writes into `range`, which outlives the call.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut range) };
    asked != 0 || i32::from(range.l_type) != libc::F_UNLCK
}

fn set(fd: RawFd, range: libc::flock) -> rustix::io::Result<()> {
    // SAFETY: `range` outlives the call, which reads it.
    match unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

fn range(kind: libc::c_int, start: u64, len: u64) -> libc::flock {
    // SAFETY: all-zero is a valid flock, and l_pid must be zero for F_OFD_SETLK.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start as libc::off_t;
    range.l_len = len as libc::off_t;
    range
}
