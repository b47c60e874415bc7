//! What happens to open segments when the process forks or exits.
//!
//! A lock taken with flock or F_OFD_SETLK belongs to the open file description, and a forked child
//! shares its parent's. Left alone, the parent could not tell that the child still uses the
//! segment, and a dead parent's leases would live on in the child. So every fork gives the child
//! an open file description of its own, *before* the child exists: there is no moment in which a
//! process uses a segment without holding its own lock. The mapping that the child inherits holds
//! none (see `Mapping::map`), so the parent's locks end with the parent.
//!
//! ```text
//!   prepare (parent)   open the segment anew through /proc/self/fd, lock it shared
//!   parent             close that descriptor: the child has it now
//!   child              dup3 it over the inherited number, forget the parent's lease
//! ```
//!
//! Nothing here allocates, panics or takes a lock of std between prepare and parent/child.
#![allow(unsafe_code)] // pthread_atfork, atexit and the raw calls that are allowed in them

use crate::fault::{Fault, active};
use crate::sys::ofd;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// `at_load!(name, body)` makes a function `name` that runs `body` once, and has it called as the
/// library is loaded. Who relies on `body` calls `name` too: that keeps the linker from leaving
/// out the entry, and serves programs that are linked in other ways.
///
/// Fork handlers belong here. At the first use it would be too late: a fork that another thread has
/// begun does not run handlers that come later, and its child could find a lock held for ever.
macro_rules! at_load {
    ($name:ident, $body:block) => {
        extern "C" fn $name() {
            #[used]
            #[unsafe(link_section = ".init_array")]
            static AT_LOAD: extern "C" fn() = at_load;
            extern "C" fn at_load() {
                if !crate::fault::active(crate::fault::Fault::LateForkHandler) {
                    $name();
                }
            }
            static ONCE: std::sync::Once = std::sync::Once::new();
            std::hint::black_box(&AT_LOAD);
            ONCE.call_once(|| $body);
        }
    };
}
pub(crate) use at_load;

/// Deals with the name of a segment; says what to try again at exit if it was still in use.
pub(crate) type OnRelease = fn(&Anchor) -> Option<fn()>;

/// The process-local side of one open segment: all that a fork must put right.
pub(crate) struct Anchor {
    /// The segment's descriptor; the number stays the same in every forked child.
    pub(crate) fd: RawFd,
    /// Device and inode of the segment. Programs that close descriptors they do not know (daemons
    /// do) may get our number for a file of their own; see `is_ours`.
    pub(crate) file: (u64, u64),
    /// The descriptor prepared for a child, between prepare and parent/child; else -1.
    spare: AtomicI32,
    /// Another process shares our open file description, because no spare could be opened:
    /// then we must neither take leases nor conclude that we are the last.
    pub(crate) inherited: AtomicBool,
    /// The lease of this process plus one; 0 if it has none yet.
    pub(crate) lease: AtomicU32,
    /// When no lease was free, in nanoseconds of the clock; 0: not so.
    pub(crate) refused: AtomicU64,
    /// The number belongs to another anchor now: ours was closed behind our back. Device and inode
    /// do not tell if that one is of the same segment.
    lost: AtomicBool,
    /// Held while a thread of this process looks at other leases (see lease.rs).
    pub(crate) looking: ForkLock<()>,
    /// This process has taken note of what was set when it began (see seen.rs).
    pub(crate) informed: AtomicBool,
    /// Taken off the registry; the name was dealt with.
    pub(crate) retired: AtomicBool,
    /// What to do with the name when this process lets go of the segment.
    pub(crate) on_release: OnRelease,
    /// The file's path, NUL-terminated, if it has one that we may remove.
    pub(crate) path: Option<std::ffi::CString>,
}

impl Anchor {
    pub(crate) fn new(
        fd: RawFd,
        file: (u64, u64),
        path: Option<std::ffi::CString>,
        on_release: OnRelease,
    ) -> Self {
        Self {
            fd,
            file,
            spare: AtomicI32::new(-1),
            inherited: AtomicBool::new(false),
            lease: AtomicU32::new(0),
            refused: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            looking: ForkLock::new(()),
            informed: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            on_release,
            path,
        }
    }

    /// Whether the descriptor still leads to the segment.
    pub(crate) fn is_ours(&self) -> bool {
        if self.lost.load(Ordering::Relaxed) {
            return false;
        }
        // SAFETY: all-zero is a valid stat to be filled in; fstat is async-signal-safe.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            libc::fstat(self.fd, &mut stat) == 0 && (stat.st_dev, stat.st_ino) == self.file
        }
    }

    /// Deals with the name, once.
    fn release(&self) -> Option<fn()> {
        let first = !self.retired.swap(true, Ordering::AcqRel);
        (first && self.is_ours()).then(|| (self.on_release)(self)).flatten()
    }
}

/// A lock among the threads of this process that survives fork: the forking thread holds it across and
/// both sides release it, or the child does, which has no other thread that could hold it.
pub(crate) struct ForkLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached only through a guard, and a guard exists only while `held` is ours.
unsafe impl<T: Send> Sync for ForkLock<T> {}

pub(crate) struct ForkGuard<'a, T>(&'a ForkLock<T>);

impl<T> ForkLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Critical sections are a few pushes and look-ups long, so yielding is enough.
    pub(crate) fn lock(&self) -> ForkGuard<'_, T> {
        // SYNC POINT lock: Acquire here, Release in `unlock`.
        while self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            std::thread::yield_now();
        }
        ForkGuard(self)
    }

    fn unlock(&self) {
        self.held.store(false, Ordering::Release);
    }
}

impl<T> Deref for ForkGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the guard proves that `held` is ours.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for ForkGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and `&mut self` excludes other references through this guard.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for ForkGuard<'_, T> {
    fn drop(&mut self) {
        self.0.unlock();
    }
}

/// The segments of this process.
struct Anchors {
    open: Vec<Arc<Anchor>>,
    /// Descriptors that a child must not have.
    unshared: Vec<RawFd>,
    /// Set once a segment was let go while others used it: to be called at exit.
    again: Option<fn()>,
}

static ANCHORS: ForkLock<Anchors> =
    ForkLock::new(Anchors { open: Vec::new(), unshared: Vec::new(), again: None });
/// Other fork-safe tables take their lock around a fork too, after `ANCHORS`.
static OPEN: ForkLock<Vec<OpenCache>> = ForkLock::new(Vec::new());
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// How often the processes before this one forked on the way to it.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// One entry of the table of open caches.
pub(crate) struct OpenCache {
    pub(crate) name: Box<str>,
    /// Of the segment under it.
    pub(crate) anchor: Arc<Anchor>,
    pub(crate) cache: std::sync::Weak<dyn std::any::Any + Send + Sync>,
    /// Keeps it open for those who know it by name only.
    pub(crate) held: Option<Arc<dyn std::any::Any + Send + Sync>>,
}

/// The caches open in this process, so that a segment is mapped once and found by name.
pub(crate) fn open_caches() -> ForkGuard<'static, Vec<OpenCache>> {
    OPEN.lock()
}

/// The one object of this process over the segment of `anchor`: what is open already, or `fresh`. What
/// lost its descriptor stores nothing any more, so whoever opens the segment anew gets what can.
pub(crate) fn unique<T: std::any::Any + Send + Sync>(
    anchor: Arc<Anchor>,
    name: &str,
    fresh: T,
) -> Arc<T> {
    // Dropping a cache takes the same lock, so what must go is kept until it is released: also what is
    // found and of another type, of which this may be the last reference by now.
    let fresh = Arc::new(fresh);
    let mut open = open_caches();
    let found = open
        .iter()
        .find(|entry| entry.anchor.file == anchor.file && entry.anchor.is_ours())
        .and_then(|entry| entry.cache.upgrade());
    let existing = found.clone().and_then(|any| any.downcast::<T>().ok());
    let chosen = existing.unwrap_or_else(|| {
        open.retain(|entry| entry.cache.strong_count() > 0);
        let any: Arc<dyn std::any::Any + Send + Sync> = fresh.clone();
        let cache = Arc::downgrade(&any);
        open.push(OpenCache { name: name.into(), anchor, cache, held: None });
        fresh.clone()
    });
    drop(open);
    chosen
}

/// The pid, remembered: getpid is a system call.
#[inline]
pub(crate) fn process() -> u32 {
    match PROCESS.load(Ordering::Relaxed) {
        0 => {
            let pid = std::process::id();
            PROCESS.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

/// This process, told apart from those that it was forked by: a child may have its parent's pid, in
/// another namespace or when that number is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Me {
    pid: u32,
    forks: u32,
}

impl Me {
    #[inline]
    pub(crate) fn now() -> Self {
        register();
        // Relaxed: changed where there is but one thread.
        Self { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }
}

/// Keeps this process from forking while it is held. A child that is forked between the opening of
/// a segment's file and its registration would share the open file description unknowingly.
pub(crate) struct Unforked(ForkGuard<'static, Anchors>);

at_load!(register, {
    if !active(Fault::NoForkHandler) {
        // SAFETY: the handlers are plain functions that live as long as the library, which is
        // never unloaded, and do only what is allowed between fork and exec.
        unsafe {
            libc::pthread_atfork(Some(prepare), Some(parent), Some(child));
            libc::atexit(exit);
        }
    }
});

/// Waits for forks that are under way, and holds up others.
pub(crate) fn hold() -> Unforked {
    register();
    process();
    Unforked(ANCHORS.lock())
}

impl Unforked {
    /// From now on, forks and the exit of the process take care of this segment.
    pub(crate) fn register(mut self, anchor: Arc<Anchor>) {
        for other in self.0.open.iter().filter(|other| other.fd == anchor.fd) {
            other.lost.store(true, Ordering::Relaxed);
        }
        self.0.open.push(anchor);
    }
}

/// A descriptor that no forked child has: what ends with it ends with this process.
pub(crate) struct Unshared(Option<OwnedFd>);

impl Unforked {
    /// From now on, a forked child closes its copy of this descriptor.
    pub(crate) fn keep(mut self, file: OwnedFd) -> Unshared {
        self.0.unshared.push(file.as_raw_fd());
        Unshared(Some(file))
    }
}

impl Unshared {
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        // It goes when this is dropped, and not before.
        self.0.as_ref().expect("open until it is dropped").as_fd()
    }
}

impl Drop for Unshared {
    fn drop(&mut self) {
        let mut anchors = ANCHORS.lock();
        if let Some(file) = self.0.take() {
            anchors.unshared.retain(|&fd| fd != file.as_raw_fd());
            drop(file); // before a child can be made that nobody told
        }
    }
}

/// Ends what `register` began: deals with the name and closes the descriptor.
pub(crate) fn close(anchor: &Arc<Anchor>) {
    let mut anchors = ANCHORS.lock();
    anchors.open.retain(|a| !Arc::ptr_eq(a, anchor));
    anchors.again = anchors.again.or(anchor.release());
    if anchor.is_ours() {
        // Said aloud: a child that was made without our handlers (clone, vfork) has the same
        // description, and must not keep what is ours alone.
        let shared = anchor.inherited.load(Ordering::Relaxed);
        if !shared && !active(Fault::MapLockedDescription) {
            ofd::unlock_all(anchor.fd);
        }
        // SAFETY: opened for this anchor, owned by its segment alone, used by nobody after this.
        unsafe { libc::close(anchor.fd) };
    }
}

extern "C" fn prepare() {
    let anchors = ANCHORS.lock();
    for anchor in &anchors.open {
        let spare = if anchor.is_ours() { reopen(anchor.fd) } else { -1 };
        anchor.spare.store(spare, Ordering::Relaxed);
    }
    std::mem::forget(anchors);
    std::mem::forget(OPEN.lock());
}

extern "C" fn parent() {
    OPEN.unlock();
    let anchors = held_anchors();
    for anchor in &anchors.open {
        match anchor.spare.swap(-1, Ordering::Relaxed) {
            -1 => anchor.inherited.store(true, Ordering::Relaxed),
            // SAFETY: a descriptor opened by `prepare`, not known to anybody else.
            spare => drop(unsafe { libc::close(spare) }),
        }
    }
}

extern "C" fn child() {
    OPEN.unlock();
    let mut anchors = held_anchors();
    for fd in anchors.unshared.drain(..) {
        // SAFETY: open in the parent when it forked; its owner there is a thread that we do not have.
        unsafe { libc::close(fd) };
    }
    // SAFETY: getpid cannot fail and is async-signal-safe.
    PROCESS.store(unsafe { libc::getpid() } as u32, Ordering::Relaxed);
    FORKS.fetch_add(1, Ordering::Relaxed);
    for anchor in &anchors.open {
        match anchor.spare.swap(-1, Ordering::Relaxed) {
            -1 => anchor.inherited.store(true, Ordering::Relaxed),
            spare => {
                // SAFETY: both are open descriptors of this process; `spare` replaces the
                // inherited description under the same number, then its own number goes.
                unsafe {
                    let failed = libc::dup3(spare, anchor.fd, libc::O_CLOEXEC) < 0;
                    anchor.inherited.store(failed, Ordering::Relaxed);
                    libc::close(spare);
                }
            }
        }
        anchor.lease.store(0, Ordering::Relaxed);
        anchor.refused.store(0, Ordering::Relaxed);
        anchor.looking.unlock(); // of a thread that we do not have
        anchor.informed.store(false, Ordering::Relaxed);
    }
}

/// At a normal exit objects may never be dropped (globals of an interpreter), the name must go
/// all the same. Views may still be read by other threads, so nothing is unmapped.
///
/// Those who used a segment longer than this process may have ended without a word, as workers of
/// a DataLoader do; so what was in use then is looked at again.
extern "C" fn exit() {
    leave();
}

/// The same for a process that ends without a word, and says so before.
pub fn leave() {
    let anchors = ANCHORS.lock();
    for anchor in &anchors.open {
        anchor.release();
    }
    let again = anchors.again;
    drop(anchors);
    if let Some(again) = again {
        again();
    }
}

/// The guard that `prepare` left behind.
fn held_anchors() -> ForkGuard<'static, Anchors> {
    ForkGuard(&ANCHORS)
}

/// A new open file description of the same file, locked shared; -1 if that cannot be had.
fn reopen(fd: RawFd) -> RawFd {
    let path = proc_self_fd(fd);
    // SAFETY: a NUL-terminated path on our stack; the descriptors are closed on every failure.
    unsafe {
        let spare = libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC);
        if spare >= 0 && libc::flock(spare, libc::LOCK_SH | libc::LOCK_NB) != 0 {
            libc::close(spare);
            return -1;
        }
        spare
    }
}

/// "/proc/self/fd/<fd>", NUL-terminated, without allocating.
fn proc_self_fd(fd: RawFd) -> [u8; 32] {
    use std::io::Write;
    let mut path = [0; 32];
    let mut rest = &mut path[..31];
    let written = write!(rest, "/proc/self/fd/{fd}");
    debug_assert!(written.is_ok());
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_somebody_else_even_if_it_has_its_parents_number() {
        let parent = Me::now();
        // SAFETY: the child ends without a return to the test.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let child = Me { pid: parent.pid, ..Me::now() };
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(child == parent)) };
        }
        let mut status = -1;
        // SAFETY: our child, and a status of our own.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
        assert_eq!(Me::now(), parent);
    }

    #[test]
    fn path_of_a_descriptor_is_nul_terminated() {
        assert_eq!(&proc_self_fd(i32::MAX)[..25], b"/proc/self/fd/2147483647\0");
    }
}
