//! Leases: proof that a writer lives.
//!
//! Lease `k` is byte `k` of the segment, locked with F_OFD_SETLK: the kernel frees it when its
//! holder dies, and nothing else does. A process takes one lease per cache, at its first write,
//! and keeps it. The bytes themselves are not touched: file locks are only labels on a range.
#![allow(unsafe_code)] // F_OFD_SETLK has no safe wrapper

use crate::fork::Anchor;
use crate::slot::{LEASES, Orphans, Slots};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;

/// The leases of a segment as this process sees them.
#[derive(Clone, Copy)]
pub(crate) struct Leases<'a>(pub(crate) &'a Anchor);

impl Leases<'_> {
    /// This process's lease; taken, and swept, at the first call. `None` if all are in use.
    #[inline]
    pub(crate) fn mine(&self, slots: &Slots<'_>) -> Option<u8> {
        self.mine_after(slots, |_| ())
    }

    /// As `mine`; `clean` does away with what else a dead holder left, before the lease is used.
    #[inline]
    pub(crate) fn mine_after(&self, slots: &Slots<'_>, clean: impl FnOnce(u8)) -> Option<u8> {
        // SYNC POINT lease: Acquire here, Release below: who sees the lease sees it swept.
        match self.0.lease.load(Ordering::Acquire) {
            0 => self.take(slots, clean),
            taken => Some((taken - 1) as u8),
        }
    }

    #[cold]
    fn take(&self, slots: &Slots<'_>, clean: impl FnOnce(u8)) -> Option<u8> {
        if self.0.inherited.load(Ordering::Relaxed) {
            return None; // the lock would be our parent's too
        }
        let looking = Looking::wait(self.0);
        if let taken @ 1.. = self.0.lease.load(Ordering::Acquire) {
            return Some((taken - 1) as u8); // by another thread meanwhile
        }
        // Starting at different places keeps processes from trying each other's leases.
        let start = crate::fork::process();
        let lease = (0..u32::from(LEASES))
            .map(|i| (start.wrapping_add(i) % u32::from(LEASES)) as u8)
            .find(|&k| lock(self.0.fd, k))?;
        slots.sweep(lease);
        clean(lease);
        self.0.lease.store(u32::from(lease) + 1, Ordering::Release);
        drop(looking);
        Some(lease)
    }
}

impl Orphans for Leases<'_> {
    fn while_orphaned<R>(&self, k: u8, act: impl FnOnce() -> R) -> Option<R> {
        if self.0.inherited.load(Ordering::Relaxed) {
            return None;
        }
        // All threads of a process share its locks, so only one may look at a time: a second
        // would "get" the lock of the first and lose it when the first unlocks.
        let looking = Looking::wait(self.0);
        if self.0.lease.load(Ordering::Acquire) == u32::from(k) + 1 || !lock(self.0.fd, k) {
            return None;
        }
        // While we hold the lock nobody can become the owner of lease k, so what `act` sees in
        // its name is a dead process's.
        let result = act();
        unlock(self.0.fd, k);
        drop(looking);
        Some(result)
    }
}

/// The right of one thread of this process to look at other leases; a few system calls long.
struct Looking<'a>(&'a Anchor);

impl<'a> Looking<'a> {
    fn wait(anchor: &'a Anchor) -> Self {
        // SYNC POINT looking: Acquire here, Release in drop. Reset in a forked child.
        while anchor
            .looking
            .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            std::thread::yield_now();
        }
        Self(anchor)
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.looking.store(false, Ordering::Release);
    }
}

fn lock(fd: RawFd, k: u8) -> bool {
    set_lock(fd, k, libc::F_WRLCK)
}

fn unlock(fd: RawFd, k: u8) {
    let unlocked = set_lock(fd, k, libc::F_UNLCK);
    debug_assert!(unlocked);
}

fn set_lock(fd: RawFd, k: u8, kind: libc::c_int) -> bool {
    let range = range(u64::from(k), 1, kind);
    // SAFETY: `fd` is open while its anchor lives, and `range` outlives the call.
    unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &range) == 0 }
}

/// Locks byte `at` of `file`, together with others who do the same.
pub(crate) fn share_byte(file: &impl AsRawFd, at: u64) -> rustix::io::Result<()> {
    let range = range(at, 1, libc::F_RDLCK);
    // SAFETY: `file` is open, and `range` outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } {
        0 => Ok(()),
        _ => Err(rustix::io::Errno::from_io_error(&std::io::Error::last_os_error())
            .unwrap_or(rustix::io::Errno::IO)),
    }
}

/// Whether anybody has locked a byte of `file` other than `at`.
pub(crate) fn is_locked_elsewhere(file: &impl AsRawFd, at: u64) -> bool {
    let locked = |start: u64, len: u64| {
        let mut range = range(start, len, libc::F_WRLCK);
        // SAFETY: as above; the kernel writes into `range`.
        let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut range) };
        asked != 0 || i32::from(range.l_type) != libc::F_UNLCK
    };
    (at > 0 && locked(0, at)) || locked(at + 1, 0) // a length of 0 is all the rest
}

fn range(start: u64, len: u64, kind: libc::c_int) -> libc::flock {
    // SAFETY: all-zero is a valid flock, and l_pid must be zero for F_OFD_SETLK.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = start as libc::off_t;
    range.l_len = len as libc::off_t;
    range
}
