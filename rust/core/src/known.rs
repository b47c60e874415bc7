//! What this process knows to be set.
//!
//! `set_slot` on a filled slot is an error of the caller, unless another process filled it a
//! moment ago: that is an ordinary race. The two are told apart by what this process could know:
//! what was set when it attached or was forked, what it set itself, and what it read as a hit.

use std::sync::atomic::{AtomicU64, Ordering};

/// One bit per sample that can be cached. Private to the process; Relaxed throughout, because a
/// bit orders nothing: it only decides whether a refusal is reported.
pub(crate) struct Known {
    bits: Box<[AtomicU64]>,
}

impl Known {
    pub(crate) fn new(capacity: u64) -> Self {
        let words = capacity.div_ceil(64) as usize;
        Self { bits: (0..words).map(|_| AtomicU64::new(0)).collect() }
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
