//! What this process has seen to be set.
//!
//! `set_slot` on a filled slot is an error of the caller, unless another process filled it a
//! moment ago: that is an ordinary race. The two are told apart by what this process could know:
//! what was set when it attached or was forked, what it set itself, and what it read as a hit.
//!
//! Threads of one process race as well: one looks, misses and loads while another fills the slot. So
//! a thread remembers its last misses, and what it missed it could not know.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// More than a batch: people look up a whole batch before they fill it.
const MISSES: usize = 4096;

thread_local! {
    /// What this thread looked for in vain, the latest first: the cache, by number, and the sample.
    static MISSED: RefCell<VecDeque<(u64, usize)>> = const { RefCell::new(VecDeque::new()) };
}

/// One bit per sample that can be cached. Private to the process; Relaxed throughout, because a
/// bit orders nothing: it only decides whether a refusal is reported.
pub(crate) struct Seen {
    bits: Box<[AtomicU64]>,
    /// Tells caches of this process apart. Not the address: a later cache may get that of a closed
    /// one, and with it what was missed there.
    number: u64,
}

impl Seen {
    pub(crate) fn new(capacity: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let words = capacity.div_ceil(64) as usize;
        Self {
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }

    #[inline]
    pub(crate) fn contains(&self, i: usize) -> bool {
        self.bits[i / 64].load(Ordering::Relaxed) & (1 << (i % 64)) != 0
    }

    /// Reads first: on the hit path the bit is nearly always there, and a read costs no ownership
    /// of the cache line.
    #[inline]
    pub(crate) fn insert(&self, i: usize) {
        if !self.contains(i) {
            self.bits[i / 64].fetch_or(1 << (i % 64), Ordering::Relaxed);
        }
    }

    /// Notes that this thread found nothing.
    pub(crate) fn missed(&self, i: usize) {
        self.remove(i);
        // Gone if the thread is ending: then there is nothing to note either.
        let _ended = MISSED.try_with(|missed| {
            let mut missed = missed.borrow_mut();
            missed.truncate(MISSES - 1);
            missed.push_front((self.number, i));
        });
    }

    /// Whether this thread's last look at the sample found nothing. Asked once: the answer is no
    /// afterwards.
    pub(crate) fn was_missed(&self, i: usize) -> bool {
        MISSED
            .try_with(|missed| {
                let mut missed = missed.borrow_mut();
                let at = missed.iter().position(|&miss| miss == (self.number, i));
                at.and_then(|at| missed.remove(at)).is_some()
            })
            .unwrap_or(false)
    }

    /// After this process has emptied the cache.
    pub(crate) fn forget(&self) {
        self.bits.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    #[inline]
    pub(crate) fn remove(&self, i: usize) {
        if self.contains(i) {
            self.bits[i / 64].fetch_and(!(1 << (i % 64)), Ordering::Relaxed);
        }
    }
}
