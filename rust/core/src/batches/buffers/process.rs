//! The buffers of this process, and what happens to them when it forks.
#![allow(unsafe_code)] // pthread_atfork, and mappings replaced in a child

use super::mapped::{HELD, Mapped, lock_shared};
use super::pool::Pool;
use crate::sys::fork::{ForkGuard, ForkLock, at_load};
use std::cell::UnsafeCell;
use std::os::fd::RawFd;

/// Taken around a fork, so that a child finds it free and what it guards whole. Everything that
/// opens, maps, locks or closes a buffer happens under it: a child inherits nothing unknowingly.
static BUFFERS: ForkLock<Pool> = ForkLock::new(Pool::new());

/// The buffers of this process.
pub(super) fn buffers() -> ForkGuard<'static, Pool> {
    register();
    BUFFERS.lock()
}

at_load!(register, {
    // SAFETY: plain functions that live as long as the library, which is never unloaded, and do
    // only what is allowed between fork and exec.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
});

/// The guard of `BUFFERS` between prepare and parent/child.
struct AcrossFork(UnsafeCell<Option<ForkGuard<'static, Pool>>>);
// SAFETY: touched only by the thread that forks, which holds the lock of `BUFFERS` as it does so.
unsafe impl Sync for AcrossFork {}
static ACROSS_FORK: AcrossFork = AcrossFork(UnsafeCell::new(None));

extern "C" fn prepare() {
    let mut pool = BUFFERS.lock();
    for entry in pool.entries.iter_mut().filter(|entry| entry.holds > 0) {
        entry.exposed |= entry.made;
        entry.spare = entry.open_for_child();
    }
    // SAFETY: we hold the lock, so no other thread is here; nothing was there to be dropped.
    unsafe { *ACROSS_FORK.0.get() = Some(pool) };
}

extern "C" fn parent() {
    // SAFETY: as in `prepare`, whose lock we still hold.
    let Some(mut pool) = (unsafe { (*ACROSS_FORK.0.get()).take() }) else { return };
    for entry in pool.entries.iter_mut().filter(|entry| entry.holds > 0) {
        match std::mem::replace(&mut entry.spare, -1) {
            -1 => entry.unusable = true, // the child shares our open file description
            // SAFETY: a descriptor opened by `prepare`; the child has it now.
            spare => drop(unsafe { libc::close(spare) }),
        }
    }
}

extern "C" fn child() {
    // SAFETY: as in `parent`; the child has a copy of the lock and of the guard.
    let Some(mut pool) = (unsafe { (*ACROSS_FORK.0.get()).take() }) else { return };
    pool.entries.retain(|entry| entry.holds > 0);
    for entry in &mut pool.entries {
        entry.made = false;
        entry.exposed = false; // what the parent sent leads to the parent
        entry.unusable = !entry.replace();
    }
}

impl Mapped {
    /// An open file description for a child, with a lock of its own; -1 if that cannot be had.
    /// Allocates nothing.
    fn open_for_child(&self) -> RawFd {
        use std::io::Write;
        let mut path = [0; 32];
        if !self.is_ours() || write!(&mut path[..31], "/proc/self/fd/{}", self.fd).is_err() {
            return -1;
        }
        // SAFETY: a NUL-terminated path on our stack.
        let spare = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
        if spare >= 0 && !lock_shared(spare, HELD) {
            // SAFETY: opened just now, known to nobody else.
            unsafe { libc::close(spare) };
            return -1;
        }
        spare
    }

    /// In a child: puts the spare description in place of the inherited one, whose locks are the
    /// parent's. False if that cannot be done.
    fn replace(&mut self) -> bool {
        let spare = std::mem::replace(&mut self.spare, -1);
        if spare < 0 {
            return false;
        }
        let (start, len) = (self.mapping.at(0, 0).as_ptr(), self.mapping.len());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: exactly our own mapping is replaced, by the same bytes of the same file, while
        // the child has no other thread: no pointer into it can tell.
        let mapped = unsafe { libc::mmap(start.cast(), len, access, flags, spare, 0) };
        let done = mapped != libc::MAP_FAILED;
        let unwanted = if done { std::mem::replace(&mut self.fd, spare) } else { spare };
        // SAFETY: a descriptor of this entry (`open_for_child` checked it) that it uses no more.
        unsafe { libc::close(unwanted) };
        done
    }
}
