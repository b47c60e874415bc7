//! Threads that wait for work, so that sharing pays for a job of a fraction of a millisecond.
//!
//! A job is posted and goes on by itself: helpers take its parts one by one, those of the oldest job
//! first. Who needs it done waits for it, and does parts meanwhile. Helpers are started with the first
//! job and sleep while there is none, after they have looked for the next one for a moment: to be woken
//! takes longer than a small job.
//!
//! There are two pools: threads that read wait for disks, and those that copy must not wait behind them.
//!
//! A job belongs to who posted it, and ends with it. Helpers go in under the lock of the queue; who ends
//! a job takes it out of the queue under that lock, and waits until all are out.
//!
//! Fork: a child has none of its parent's threads, and finds the pool in whatever state it was. So
//! the pool knows whose it is; a child leaves it alone and makes its own at first use. A job that was
//! posted before the fork is done once more in the child, by who waits for it.
#![allow(unsafe_code)] // helpers reach jobs of others

#[cfg(loom)]
use loom::{
    sync::{Mutex, atomic as atomics},
    thread::yield_now,
};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(not(loom))]
use std::{
    sync::{Mutex, atomic as atomics},
    thread::yield_now,
};

use atomics::{AtomicBool, AtomicUsize, Ordering};

/// So often who ends a job looks whether helpers are out, before others get the processor.
const SPINS: usize = 2_000;

/// What is to be done once for every number below that of the parts.
pub(crate) type Work = Box<dyn Fn(usize) + Send + Sync>;

struct Job {
    work: Work,
    parts: usize,
    /// The next part that nobody has taken. Relaxed: `inside` orders what the parts wrote.
    next: AtomicUsize,
    /// How many helpers are at it. Raised under the lock of the queue.
    inside: AtomicUsize,
    panicked: AtomicBool,
}

impl Job {
    fn new(parts: usize, work: Work) -> Self {
        let (next, inside) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { work, parts, next, inside, panicked: AtomicBool::new(false) }
    }

    fn has_parts(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.parts
    }

    /// Does parts until none is left.
    fn help(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.parts {
                return;
            }
            if catch_unwind(AssertUnwindSafe(|| (self.work)(part))).is_err() {
                self.panicked.store(true, Ordering::Relaxed); // ordered by `inside`
            }
        }
    }
}

/// Jobs that are posted, the oldest first.
struct Queue {
    jobs: Mutex<VecDeque<*const Job>>,
    /// How many there are: for a look without the lock.
    waiting: AtomicUsize,
}

// SAFETY: a job is reached by helpers that are inside, which its owner waits for.
unsafe impl Sync for Queue {}
// SAFETY: as above.
unsafe impl Send for Queue {}

impl Queue {
    fn new() -> Self {
        Self { jobs: Mutex::new(VecDeque::new()), waiting: AtomicUsize::new(0) }
    }

    fn with<R>(&self, change: impl FnOnce(&mut VecDeque<*const Job>) -> R) -> R {
        // Nothing panics under the lock.
        let mut jobs = self.jobs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let done = change(&mut jobs);
        self.waiting.store(jobs.len(), Ordering::Relaxed); // a hint
        done
    }

    fn post(&self, job: *const Job) {
        self.with(|jobs| jobs.push_back(job));
    }

    /// From now on nobody goes in.
    fn remove(&self, job: *const Job) {
        self.with(|jobs| jobs.retain(|&posted| !std::ptr::eq(posted, job)));
    }

    /// Helps with the oldest job that has parts left; false if there is none.
    fn help(&self) -> bool {
        let first = self.with(|jobs| {
            while let Some(&first) = jobs.front() {
                // SAFETY: it is in the queue, which its owner leaves before it goes.
                let job = unsafe { &*first };
                if job.has_parts() {
                    job.inside.fetch_add(1, Ordering::Relaxed); // the lock orders it
                    return Some(first);
                }
                jobs.pop_front();
            }
            None
        });
        let Some(first) = first else { return false };
        // SAFETY: inside, so its owner waits.
        let job = unsafe { &*first };
        job.help();
        // SYNC POINT done: Release here, Acquire in `end`: what was done here is there. The job may be
        // gone after this.
        job.inside.fetch_sub(1, Ordering::Release);
        true
    }

    /// Ends a job of which no part is left: afterwards nobody is at it, and all is done.
    fn end(&self, job: &Job) {
        self.remove(job);
        // A helper that is at its last part is soon done.
        let mut spins = if cfg!(loom) { 0 } else { SPINS };
        // SYNC POINT done: Acquire here, Release in `help`.
        while job.inside.load(Ordering::Acquire) != 0 {
            if spins == 0 {
                yield_now();
            } else {
                spins -= 1;
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(not(loom))]
pub(crate) use real::{Done, Posted, Threads, post};

#[cfg(not(loom))]
mod real {
    use super::{Job, Ordering, Queue, Work};
    use crate::sys::fork::Me;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicPtr;
    use std::thread::Thread;
    use std::time::{Duration, Instant};

    /// Which threads do it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Threads {
        /// Those that copy in memory.
        Copying,
        /// Those that read from disks.
        Reading,
    }

    impl Threads {
        /// Copying is bound by the memory, reading by the disk: more threads do not make it faster.
        fn most(self) -> usize {
            match self {
                Self::Copying => 7,
                Self::Reading => 8,
            }
        }
    }

    /// For so long a helper looks for the next job before it sleeps: about what a thread takes to wake.
    const LOOK: Duration = Duration::from_micros(60);
    /// So often between two looks at the clock.
    const LOOKS: u32 = 32;

    /// The threads of this process. Never dropped: helpers wait until the process ends.
    struct ThreadPool {
        owner: Me,
        threads: Threads,
        queue: Queue,
        helpers: Mutex<Vec<Thread>>,
    }

    /// A job that goes on by itself. It ends when this is dropped, done or not.
    pub(crate) struct Posted {
        // In a box: helpers know it by its address.
        job: Box<Job>,
        pool: &'static ThreadPool,
    }

    /// Who did what was waited for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Done {
        /// Helpers and the caller, each part once.
        Shared,
        /// The caller, all of it: the job was posted before a fork, and nobody knows which parts had been
        /// done by then.
        HereOnceMore,
    }

    /// Has `work(i)` called for every i below `parts`, by up to so many helpers.
    pub(crate) fn post(threads: Threads, parts: usize, helpers: usize, work: Work) -> Posted {
        let posted = Posted { job: Box::new(Job::new(parts, work)), pool: pool(threads) };
        let wanted = parts.min(helpers).min(threads.most());
        if wanted > 0 {
            posted.pool.queue.post(&raw const *posted.job);
            posted.pool.wake(wanted);
        }
        posted
    }

    impl Posted {
        /// Does what is left, and returns when all is done. A panic of `work` is one here.
        pub(crate) fn wait(self) -> Done {
            if self.is_inherited() {
                (0..self.job.parts).for_each(|part| (self.job.work)(part));
                return Done::HereOnceMore;
            }
            self.job.help();
            self.pool.queue.end(&self.job);
            // Relaxed: `end` has ordered it.
            let panicked = self.job.panicked.load(Ordering::Relaxed);
            assert!(!panicked, "a part of a shared job panicked");
            Done::Shared
        }

        fn is_inherited(&self) -> bool {
            self.pool.owner != Me::now()
        }
    }

    impl Drop for Posted {
        fn drop(&mut self) {
            if !self.is_inherited() {
                // Nobody takes another part.
                self.job.next.store(self.job.parts, Ordering::Relaxed);
                self.pool.queue.end(&self.job);
            }
        }
    }

    fn pool(threads: Threads) -> &'static ThreadPool {
        static POOLS: [AtomicPtr<ThreadPool>; 2] =
            [const { AtomicPtr::new(std::ptr::null_mut()) }; 2];
        let pool = &POOLS[threads as usize];
        let me = Me::now();
        loop {
            // Acquire: as below.
            let current = pool.load(Ordering::Acquire);
            // SAFETY: null or a leaked pool, which is never freed.
            if let Some(found) = unsafe { current.as_ref() }.filter(|pool| pool.owner == me) {
                return found;
            }
            let made = Box::into_raw(Box::new(ThreadPool {
                owner: me,
                threads,
                queue: Queue::new(),
                helpers: Mutex::new(Vec::new()),
            }));
            // Release: whoever sees the address sees the pool. That of the parent is left as it is.
            let put = pool.compare_exchange(current, made, Ordering::Release, Ordering::Relaxed);
            if put.is_err() {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }

    impl ThreadPool {
        /// Wakes so many helpers, and makes them if there are fewer.
        fn wake(&'static self, wanted: usize) {
            let mut helpers =
                self.helpers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            while helpers.len() < wanted {
                let serve = || loop {
                    if !self.queue.help() && !self.comes_soon() {
                        std::thread::park();
                    }
                };
                let name = match self.threads {
                    Threads::Copying => "stocache-gather",
                    Threads::Reading => "stocache-read",
                };
                match std::thread::Builder::new().name(name.into()).spawn(serve) {
                    Ok(helper) => helpers.push(helper.thread().clone()),
                    Err(_) => break, // no more threads to be had: fewer do it, too
                }
            }
            helpers.iter().take(wanted).for_each(Thread::unpark);
        }

        /// Whether a job is posted within a moment.
        fn comes_soon(&self) -> bool {
            if self.threads == Threads::Reading {
                return false; // a disk takes longer than a thread to wake
            }
            let began = Instant::now();
            while began.elapsed() < LOOK {
                for _ in 0..LOOKS {
                    // Relaxed: who goes in looks again.
                    if self.queue.waiting.load(Ordering::Relaxed) != 0 {
                        return true;
                    }
                    std::hint::spin_loop();
                }
            }
            false
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{Threads, Work};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn post(parts: usize, helpers: usize, work: Work) -> super::Posted {
        let threads = if parts.is_multiple_of(2) { Threads::Copying } else { Threads::Reading };
        super::post(threads, parts, helpers, work)
    }

    /// A job that counts how often each part is done, and its counts.
    fn counting(parts: usize, helpers: usize) -> (super::Posted, Arc<Vec<AtomicUsize>>) {
        let done: Arc<Vec<AtomicUsize>> =
            Arc::new((0..parts).map(|_| AtomicUsize::new(0)).collect());
        let counts = Arc::clone(&done);
        let work = move |part: usize| {
            counts[part].fetch_add(1, Ordering::Relaxed);
        };
        (post(parts, helpers, Box::new(work)), done)
    }

    fn all_are_done_once(parts: usize, helpers: usize) {
        let (posted, done) = counting(parts, helpers);
        assert_eq!(posted.wait(), super::Done::Shared);
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        assert_eq!(Arc::strong_count(&done), 1, "nobody has the job any more");
    }

    #[test]
    fn every_part_is_done_once_by_however_many() {
        for round in 0..2000 {
            all_are_done_once(round % 70, round % 11);
        }
    }

    #[test]
    fn jobs_go_on_while_nobody_waits() {
        let jobs: Vec<_> = (0..8).map(|_| counting(50, 3)).collect();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let all_done =
            || jobs.iter().all(|(_, done)| done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        while !all_done() {
            assert!(std::time::Instant::now() < deadline, "helpers do not come");
            std::thread::yield_now();
        }
        for (posted, _) in jobs {
            posted.wait();
        }
    }

    #[test]
    fn a_job_that_is_dropped_is_not_gone_on_with() {
        for round in 0..500 {
            let (posted, done) = counting(200, round % 4);
            drop(posted);
            assert_eq!(Arc::strong_count(&done), 1, "nobody has the job any more");
            let now = || done.iter().map(|n| n.load(Ordering::Relaxed)).collect::<Vec<_>>();
            let then = now();
            assert!(then.iter().all(|&count| count <= 1));
            std::thread::yield_now();
            assert_eq!(now(), then);
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
    fn a_panic_of_a_part_is_one_of_who_waits_and_the_pool_goes_on() {
        for helpers in [0, 4] {
            let failing = || post(64, helpers, Box::new(|part| assert_ne!(part, 40))).wait();
            assert!(std::panic::catch_unwind(failing).is_err());
            all_are_done_once(64, helpers);
        }
    }

    #[test]
    fn a_forked_child_makes_a_pool_of_its_own_and_does_its_parents_jobs_itself() {
        all_are_done_once(64, 4);
        for _ in 0..20 {
            // While others are at it.
            std::thread::scope(|scope| {
                scope.spawn(|| all_are_done_once(64, 4));
                let (before, done) = counting(64, 4);
                let (dropped, _) = counting(64, 4);
                // SAFETY: the child ends without a return to the test.
                let pid = unsafe { libc::fork() };
                if pid == 0 {
                    // SAFETY: only turns a hang into a failure.
                    unsafe { libc::alarm(60) };
                    let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        drop(dropped);
                        assert_eq!(before.wait(), super::Done::HereOnceMore);
                        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) >= 1));
                        (0..20).for_each(|_| all_are_done_once(64, 4));
                    }));
                    // SAFETY: ends the child at once.
                    unsafe { libc::_exit(i32::from(good.is_err())) };
                }
                before.wait();
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
    use super::{Job, Ordering, Queue, Work};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    struct Parts([UnsafeCell<u32>; 2]);
    // SAFETY: every part is done by one thread; loom checks it.
    unsafe impl Sync for Parts {}
    // SAFETY: as above.
    unsafe impl Send for Parts {}

    impl Parts {
        fn new() -> Arc<Self> {
            Arc::new(Self([UnsafeCell::new(0), UnsafeCell::new(0)]))
        }

        fn work(parts: &Arc<Self>) -> Work {
            let parts = Arc::clone(parts);
            // SAFETY: one thread does this part; loom checks it.
            Box::new(move |part| parts.0[part].with_mut(|count| unsafe { *count += 1 }))
        }

        fn counts(&self) -> [u32; 2] {
            // SAFETY: nobody else is at it; loom checks it.
            [0, 1].map(|part| self.0[part].with_mut(|count| unsafe { *count }))
        }
    }

    /// Two jobs one after the other, each gone with its turn, while a helper comes when it likes. What
    /// helpers write is there at the end of a job, and nobody is at it any more: loom's cells see an
    /// access that is not ordered.
    fn jobs_with_a_helper(end: Option<fn(&Queue, &Job)>, does_it_all: bool) {
        // Three switches against a thread's will find all that is known to go wrong; all orders of two jobs
        // take minutes.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let queue = Arc::new(Queue::new());
            let helper = {
                let queue = Arc::clone(&queue);
                loom::thread::spawn(move || {
                    queue.help();
                    queue.help();
                })
            };
            let mut kept = Vec::new();
            for _ in 0..2 {
                let parts = Parts::new();
                let job = Box::new(Job::new(2, Parts::work(&parts)));
                queue.post(&raw const *job);
                if does_it_all {
                    job.help();
                } else {
                    job.next.store(2, Ordering::Relaxed);
                }
                match end {
                    Some(end) => {
                        end(&queue, &job);
                        drop(job);
                    }
                    // The control: nobody waits. The job stays, for the helper is at it.
                    None => {
                        queue.remove(&raw const *job);
                        kept.push(job);
                    }
                }
                let counts = parts.counts();
                assert!(counts.iter().all(|&count| count == 1 || !does_it_all && count == 0));
            }
            helper.join().unwrap();
        });
    }

    #[test]
    fn a_job_is_over_when_it_was_waited_for() {
        jobs_with_a_helper(Some(Queue::end), true);
    }

    #[test]
    fn a_job_that_is_dropped_is_over() {
        jobs_with_a_helper(Some(Queue::end), false);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn not_waiting_for_helpers_is_caught() {
        jobs_with_a_helper(None, true);
    }
}
