//! An answer that is good for a second: what is asked often and does not change so soon.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What was answered last.
pub(crate) struct Recent {
    since: Instant,
    /// Twice the second in which it was looked, and one more if the answer is yes.
    known: AtomicU64,
}

impl Recent {
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), known: AtomicU64::new(0) }
    }

    /// What was answered in this second, or is now.
    pub(crate) fn get(&self, look: impl FnOnce() -> bool) -> bool {
        let second = self.since.elapsed().as_secs() + 1;
        let known = self.known.load(Ordering::Relaxed);
        if known / 2 == second {
            return known % 2 == 1;
        }
        let is = look();
        self.known.store(2 * second + u64::from(is), Ordering::Relaxed);
        is
    }
}
