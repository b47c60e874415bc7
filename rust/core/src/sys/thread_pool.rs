//! Threads that wait for work, so that sharing pays for a job of a fraction of a millisecond.
//!
//! Helpers are started at the first call and sleep between calls, after they have looked for the next
//! job for a moment: to be woken takes longer than a small job. A job is posted behind a gate:
//! helpers go in while it is open, and who posted the job closes it and waits until all are out. So
//! a job may live on the stack of the call, and a helper that wakes late finds the gate closed.
//!
//! Fork: a child has none of its parent's threads, and finds the pool in whatever state it was. So
//! the pool knows whose it is; a child leaves it alone and makes its own at first use.
#![allow(unsafe_code)] // a job on the caller's stack, reached by other threads

#[cfg(loom)]
use loom::{cell::UnsafeCell, sync::atomic as atomics, thread::yield_now};
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(not(loom))]
use std::{sync::atomic as atomics, thread::yield_now};

use atomics::{AtomicBool, AtomicUsize, Ordering};

/// Copying is bound by the memory: more threads do not make it faster.
#[cfg(not(loom))]
const MOST_HELPERS: usize = 7;

/// The gate: one bit says that there is a job, the rest counts the helpers that are at it.
const OPEN: usize = 1;
const INSIDE: usize = 2;

/// Work to be done once for every number below `parts`.
struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    parts: usize,
    /// The next part that nobody has taken. Relaxed: the gate orders what the parts wrote.
    next: AtomicUsize,
    panicked: AtomicBool,
}

impl<'a> Job<'a> {
    fn new(parts: usize, work: &'a (dyn Fn(usize) + Sync)) -> Self {
        Self { work, parts, next: AtomicUsize::new(0), panicked: AtomicBool::new(false) }
    }

    /// Does parts until none is left.
    fn help(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            (self.work)(part);
        }
    }

    fn help_or_note(&self) {
        if catch_unwind(AssertUnwindSafe(|| self.help())).is_err() {
            self.panicked.store(true, Ordering::Relaxed); // ordered by the gate
        }
    }
}

/// What a job is posted on.
struct Gate {
    state: AtomicUsize,
    /// Written while the gate is closed and nobody is inside, read by those inside.
    job: UnsafeCell<*const Job<'static>>,
}

// SAFETY: see `job`.
unsafe impl Sync for Gate {}
// SAFETY: as above; a job is only reached from inside.
unsafe impl Send for Gate {}

impl Gate {
    fn new() -> Self {
        Self { state: AtomicUsize::new(0), job: UnsafeCell::new(std::ptr::null()) }
    }

    /// Posts a job, does it with whoever `wake` brings, and returns when nobody is at it any more.
    /// Only one caller at a time.
    fn run(&self, job: &Job<'_>, wake: impl FnOnce()) {
        let posted = std::ptr::from_ref(job).cast::<Job<'static>>();
        // SAFETY: the gate is closed and nobody is inside: the last call waited for that.
        self.job.with_mut(|job| unsafe { *job = posted });
        // SYNC POINT open: Release here, Acquire in `help`: the job is there before the gate opens.
        self.state.fetch_or(OPEN, Ordering::Release);
        wake();
        job.help_or_note();
        // No new helpers; those inside still have the job.
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        // SYNC POINT done: Acquire here, Release in `help`: what helpers wrote is there.
        while self.state.load(Ordering::Acquire) != 0 {
            yield_now();
        }
    }

    /// Helps with the job that is posted, if there is one.
    fn help(&self) {
        let enter = |state| (state & OPEN != 0).then_some(state + INSIDE);
        // SYNC POINT open: Acquire here, Release in `run`.
        if self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_err() {
            return;
        }
        // SAFETY: inside, so the job stays where it is, and nobody writes the pointer.
        self.job.with(|job| unsafe { (**job).help_or_note() });
        // SYNC POINT done: Release here, Acquire in `run`.
        self.state.fetch_sub(INSIDE, Ordering::Release);
    }
}

/// std's cell with the methods of loom's.
#[cfg(not(loom))]
struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    fn with<R>(&self, look: impl FnOnce(*const T) -> R) -> R {
        look(self.0.get())
    }

    fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
        change(self.0.get())
    }
}

#[cfg(not(loom))]
pub(crate) use real::share;

#[cfg(not(loom))]
mod real {
    use super::{AtomicBool, Gate, Job, MOST_HELPERS, OPEN, Ordering};
    use std::sync::atomic::AtomicPtr;
    use std::thread::Thread;
    use std::time::{Duration, Instant};

    /// For so long a helper looks for the next job before it sleeps: about what a thread takes to wake.
    const LOOK: Duration = Duration::from_micros(60);
    /// So often between two looks at the clock.
    const LOOKS: u32 = 32;

    /// The threads of this process. Never dropped: helpers wait until the process ends.
    struct ThreadPool {
        owner: u32,
        /// Somebody's job is being done.
        busy: AtomicBool,
        gate: Gate,
        /// Changed by whoever holds `busy`.
        helpers: std::cell::UnsafeCell<Vec<Thread>>,
    }
    // SAFETY: `helpers` is touched only by who set `busy`.
    unsafe impl Sync for ThreadPool {}

    /// Calls `work(i)` for every i below `parts`: in this thread, and in up to `threads` - 1 others
    /// that come when they can. Parts are handed out one by one, so a helper that wakes late costs
    /// nothing. A second call at the same time does its work alone. A panic of `work` is one here.
    pub(crate) fn share(parts: usize, threads: usize, work: &(dyn Fn(usize) + Sync)) {
        let job = Job::new(parts, work);
        let helpers = parts.min(threads).min(MOST_HELPERS + 1).saturating_sub(1);
        match if helpers > 0 { pool().take() } else { None } {
            Some(turn) => turn.run(&job, helpers),
            None => job.help(),
        }
        assert!(!job.panicked.load(Ordering::Relaxed), "a part of a shared job panicked");
    }

    fn pool() -> &'static ThreadPool {
        static CURRENT: AtomicPtr<ThreadPool> = AtomicPtr::new(std::ptr::null_mut());
        let me = std::process::id();
        loop {
            // Acquire: as below.
            let current = CURRENT.load(Ordering::Acquire);
            // SAFETY: null or a leaked pool, which is never freed.
            if let Some(found) = unsafe { current.as_ref() }.filter(|pool| pool.owner == me) {
                return found;
            }
            let made = Box::into_raw(Box::new(ThreadPool {
                owner: me,
                busy: AtomicBool::new(false),
                gate: Gate::new(),
                helpers: std::cell::UnsafeCell::new(Vec::new()),
            }));
            // Release: whoever sees the address sees the pool. That of the parent is left as it is.
            let put = CURRENT.compare_exchange(current, made, Ordering::Release, Ordering::Relaxed);
            if put.is_err() {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }

    /// The pool while nobody else has it.
    struct Turn(&'static ThreadPool);

    impl ThreadPool {
        fn take(&'static self) -> Option<Turn> {
            // Acquire and Release: from one turn to the next.
            (!self.busy.swap(true, Ordering::Acquire)).then_some(Turn(self))
        }
    }

    impl Turn {
        fn run(self, job: &Job<'_>, wanted: usize) {
            let pool = self.0;
            // SAFETY: we have the turn.
            let helpers = unsafe { &mut *pool.helpers.get() };
            while helpers.len() < wanted {
                let serve = || loop {
                    pool.gate.help();
                    if !opens_soon(&pool.gate) {
                        std::thread::park();
                    }
                };
                match std::thread::Builder::new().name("stocache-gather".into()).spawn(serve) {
                    Ok(helper) => helpers.push(helper.thread().clone()),
                    Err(_) => break, // no more threads to be had: fewer do it, too
                }
            }
            pool.gate.run(job, || helpers.iter().take(wanted).for_each(Thread::unpark));
        }
    }

    /// Whether a job is posted within a moment.
    fn opens_soon(gate: &Gate) -> bool {
        let began = Instant::now();
        while began.elapsed() < LOOK {
            for _ in 0..LOOKS {
                // Relaxed: who goes in looks again.
                if gate.state.load(Ordering::Relaxed) & OPEN != 0 {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        false
    }

    impl Drop for Turn {
        fn drop(&mut self) {
            self.0.busy.store(false, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::share;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn all_are_done_once(parts: usize, threads: usize) {
        let done: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
        share(parts, threads, &|part| {
            done[part].fetch_add(1, Ordering::Relaxed);
        });
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn every_part_is_done_once_by_however_many() {
        for round in 0..2000 {
            all_are_done_once(round % 70, round % 11);
        }
    }

    #[test]
    fn calls_at_the_same_time_all_end() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|_| all_are_done_once(16, 4)));
            }
        });
    }

    #[test]
    fn a_panic_of_a_part_is_one_of_the_call_and_the_pool_goes_on() {
        for threads in [1, 4] {
            let failing = || share(64, threads, &|part| assert_ne!(part, 40));
            assert!(std::panic::catch_unwind(failing).is_err());
            all_are_done_once(64, threads);
        }
    }

    #[test]
    fn a_forked_child_makes_a_pool_of_its_own() {
        all_are_done_once(64, 4);
        for _ in 0..20 {
            // While others are at it.
            std::thread::scope(|scope| {
                scope.spawn(|| all_are_done_once(64, 4));
                // SAFETY: the child ends without a return to the test.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    // SAFETY: only turns a hang into a failure.
                    unsafe { libc::alarm(60) };
                    let good = std::panic::catch_unwind(|| {
                        (0..20).for_each(|_| all_are_done_once(64, 4));
                    });
                    // SAFETY: ends the child at once.
                    unsafe { libc::_exit(i32::from(good.is_err())) };
                }
                let mut status = -1;
                // SAFETY: our child, and a status of our own.
                assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
                assert_eq!(status, 0);
            });
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::{Gate, Job, Ordering, UnsafeCell};
    use loom::sync::Arc;

    /// Two jobs one after the other, each on the stack of its call, while a helper comes when it
    /// likes. What helpers write is there when `run` returns, and nobody is at the job any more:
    /// loom's cells see an access that is not ordered.
    fn jobs_with_a_helper(waits: bool) {
        loom::model(move || {
            let gate = Arc::new(Gate::new());
            let helper = {
                let gate = Arc::clone(&gate);
                loom::thread::spawn(move || {
                    gate.help();
                    gate.help();
                })
            };
            for _ in 0..2 {
                struct Parts([UnsafeCell<u32>; 2]);
                // SAFETY: every part is done by one thread; loom checks it.
                unsafe impl Sync for Parts {}
                let done = Parts([UnsafeCell::new(0), UnsafeCell::new(0)]);
                let done = &done;
                // SAFETY: as above.
                let work = |part: usize| done.0[part].with_mut(|count| unsafe { *count += 1 });
                let job = Job::new(2, &work);
                if waits {
                    gate.run(&job, || {});
                } else {
                    gate.run_without_waiting(&job);
                }
                for part in &done.0 {
                    // SAFETY: nobody else is at it; loom checks it.
                    assert_eq!(part.with_mut(|count| unsafe { *count }), 1);
                }
            }
            helper.join().unwrap();
        });
    }

    impl Gate {
        /// The control.
        fn run_without_waiting(&self, job: &Job<'_>) {
            let posted = std::ptr::from_ref(job).cast::<Job<'static>>();
            // SAFETY: none; loom is to see it.
            self.job.with_mut(|job| unsafe { *job = posted });
            self.state.fetch_or(super::OPEN, Ordering::Release);
            job.help();
            self.state.fetch_and(!super::OPEN, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_job_is_over_when_its_call_returns() {
        jobs_with_a_helper(true);
    }

    #[test]
    #[should_panic]
    fn not_waiting_for_helpers_is_caught() {
        jobs_with_a_helper(false);
    }
}
