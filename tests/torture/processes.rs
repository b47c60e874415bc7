//! Children that are forked, killed and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use stocache::segment::Segment;
use stocache::segment::claim::{SET, State, is_claimed};
use stocache::{Backing, Cache, Opened, Request, SlotsGeometry};

/// A small generator that needs nothing; every run prints its seed.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Counters that the children of this process share with it.
pub struct Tally(&'static [AtomicU64; 4]);

impl Tally {
    pub fn new() -> Self {
        // SAFETY: anonymous shared memory of the right size and alignment, zeroed, never unmapped.
        let counters = unsafe {
            let memory = libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert!(memory != libc::MAP_FAILED);
            &*memory.cast::<[AtomicU64; 4]>()
        };
        Self(counters)
    }

    pub fn add(&self, which: usize) {
        self.0[which].fetch_add(1, Ordering::Relaxed);
    }

    pub fn get(&self, which: usize) -> u64 {
        self.0[which].load(Ordering::Relaxed)
    }
}

/// A forked child, killed when it is dropped.
pub struct Child(libc::pid_t);

impl Child {
    /// Forks; the child runs `work` and exits without unwinding into its parent's code.
    pub fn fork(work: impl FnOnce()) -> Self {
        let parent = std::process::id();
        // SAFETY: the harness has no thread but this one where it forks, except in "forks", where
        // surviving that is the point.
        match unsafe { libc::fork() } {
            -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: a child must not outlive a harness that was killed, also not if that was
                // before the child asked to die with it.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    if libc::getppid() as u32 != parent {
                        libc::_exit(0);
                    }
                }
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
                // SAFETY: ends this process here and now.
                unsafe { libc::_exit(if done { 0 } else { 101 }) }
            }
            pid => Self(pid),
        }
    }

    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of ours that has not been waited for.
        unsafe { libc::kill(self.0, signal) };
    }

    /// Whether it ended by itself.
    pub fn has_ended(&self) -> bool {
        let flags = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
        // SAFETY: a child of ours; WNOWAIT leaves its end to be waited for again.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, self.0 as libc::id_t, &mut info, flags) == 0
                && info.si_pid() == self.0
        }
    }

    /// Stops the child, and returns when it stands still or is gone.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let flags = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
        // SAFETY: a child of ours; WNOWAIT leaves its end to be waited for again.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            libc::waitid(libc::P_PID, self.0 as libc::id_t, &mut info, flags);
        }
    }

    /// Waits for the end; the status as from waitpid.
    pub fn wait(self) -> libc::c_int {
        let mut status = 0;
        // SAFETY: a child of ours, waited for once.
        unsafe { libc::waitpid(self.0, &mut status, 0) };
        std::mem::forget(self);
        status
    }

    /// Waits for the end at most that long.
    pub fn wait_at_most(self, limit: Duration) -> Result<libc::c_int, String> {
        let began = Instant::now();
        let mut status = 0;
        // SAFETY: as in `wait`; WNOHANG leaves a living child as it is.
        while unsafe { libc::waitpid(self.0, &mut status, libc::WNOHANG) } == 0 {
            if began.elapsed() > limit {
                return Err(format!("a child hangs since {limit:?}"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        std::mem::forget(self);
        Ok(status)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        // SAFETY: as in `wait`.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// From now on, children of the children of this process that are killed become its own.
pub fn adopt_orphans() {
    // SAFETY: a setting of this process alone.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }, 0);
}

/// Waits until this process has no child any more. A child's child is killed when its parent is, but
/// a moment later: until then it lives, and so do its lease and its claims.
pub fn wait_for_orphans() {
    // SAFETY: ends when there is nobody to wait for; each was killed, with its parent.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } > 0 {}
}

/// Where permitted, a /dev/shm of this process's own. Other programs remove leftovers too, and what one of them
/// is just removing cannot be removed by us.
pub fn own_shm() {
    let (none, root, shm, tmpfs) = (c"none", c"/", c"/dev/shm", c"tmpfs");
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: NUL-terminated texts; the mounts are seen by this process and its children only.
    unsafe {
        let alone = libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none.as_ptr(), root.as_ptr(), nothing.cast(), private, nothing) == 0
            && libc::mount(tmpfs.as_ptr(), shm.as_ptr(), tmpfs.as_ptr(), 0, nothing) == 0;
        if !alone {
            eprintln!("in the /dev/shm of all: another program may look like a failure");
        }
    }
}

/// A request for `len` slots of `bytes` bytes each.
pub fn request(name: &str, len: u64, bytes: u64) -> Request {
    Request {
        backing: Backing::Shm,
        ..Request::new(
            name,
            stocache::Geometry::Slots(
                SlotsGeometry::plan(u64::MAX >> 2, len, &[bytes], 0, 1, false)
                    .expect("a valid geometry"),
            ),
        )
    }
}

/// A name for this run.
pub fn unique(what: &str) -> String {
    format!("torture-{what}-{}", std::process::id())
}

pub fn open(request: &Request) -> Result<(Arc<Cache>, Opened), String> {
    Cache::open(request).map_err(|error| format!("open failed: {error}"))
}

/// The state of sample `i`, as it is.
pub fn state(segment: &Segment, i: u64) -> State {
    const STATES_AT: usize = 192; // the offset of the states, in the header
    let mapping = segment.mapping();
    // SAFETY: in bounds (`at`), and bytes of the mapping may always be read.
    let states = unsafe { mapping.at(STATES_AT, 8).cast::<u64>().as_ptr().read() };
    // SAFETY: as above.
    unsafe { mapping.at((states + 2 * i) as usize, 2).cast::<State>().as_ptr().read_volatile() }
}

/// Waits until slot `i` is being written, or was written before we could look (false).
pub fn being_written(cache: &Cache, i: u64) -> Result<bool, String> {
    let began = Instant::now();
    loop {
        match state(cache.segment(), i) {
            SET => return Ok(false),
            claimed if is_claimed(claimed) => return Ok(true),
            _ if began.elapsed() > Duration::from_secs(60) => {
                return Err("no writer claims the slot".into());
            }
            _ => std::hint::spin_loop(),
        }
    }
}
