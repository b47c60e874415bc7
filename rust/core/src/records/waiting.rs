//! Waiting for another process that is loading the same sample.
//!
//! A loader that lives may be slow, stopped or hung, and its lease says only that it lives. So who
//! waits does so for as long as loading is seen to take, and not for ever.

use super::base::RecordStore;
use crate::segment::claim::{Orphans, is_claimed, lease_of};
use crate::segment::counters::Count;
use crate::segment::lease::Leases;
use crate::sys::interrupt::Patience;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Who loads may be waited for this many times as long as loading took lately, but not longer than
/// `LONGEST_WAIT`; where nobody has loaded anything yet, for `FIRST_WAIT`.
const WAIT_FACTOR: u32 = 4;
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_secs(10);

impl RecordStore {
    /// Waits until nobody is loading sample `i`: for `patience`, and longer where loading is seen
    /// to take longer. Returns when the loader has died; `begin` then takes over. True if the caller
    /// wants to be let go.
    pub fn wait(&self, i: usize, patience: Duration) -> bool {
        self.counters().add(Count::Waits, 1);
        let began = Instant::now();
        let mut until = patience;
        let mut nap = Duration::from_micros(20);
        let mut asking = Patience::new();
        while is_claimed(self.slots().state(i)) {
            if began.elapsed() >= until {
                until += patience;
                if patience.is_zero() || !self.is_worth_waiting(i, began.elapsed()) {
                    return false;
                }
            }
            std::thread::sleep(nap);
            if asking.is_interrupted() {
                return true;
            }
            nap = (nap * 2).min(Duration::from_millis(1));
            // Its loader may have died: then `begin` takes it over.
            if nap == Duration::from_millis(1) && !self.is_claimed_by_the_living(i) {
                break;
            }
        }
        if self.find(i).is_some() {
            self.learn(began.elapsed());
        }
        false
    }

    /// Whether a loader that lives and was waited for so long may be expected to come to an end. One
    /// that hangs cannot be told from a slow one, so there is a limit; one that was stopped can.
    fn is_worth_waiting(&self, i: usize, waited: Duration) -> bool {
        let loads = self.counters().sum(Count::Loads);
        let lately = self.lately.load(Ordering::Relaxed);
        let limit = match self.counters().sum(Count::LoadNanos).checked_div(loads) {
            None if lately == 0 => FIRST_WAIT,
            mean => Duration::from_nanos(mean.unwrap_or(0).max(lately)) * WAIT_FACTOR,
        };
        waited < limit.min(LONGEST_WAIT) && !Leases::is_writer_stopped(&self.slots(), i)
    }

    fn is_claimed_by_the_living(&self, i: usize) -> bool {
        lease_of(self.slots().state(i))
            .is_some_and(|lease| self.leases().while_orphaned(lease, || ()).is_none())
    }

    /// Takes note of what a load took. The past fades, so that one that was slow does not count for
    /// ever; relaxed and not atomic as a whole, for it is an estimate.
    pub(super) fn learn(&self, took: Duration) {
        let before = self.lately.load(Ordering::Relaxed);
        self.lately.store((before - before / 8).max(took.as_nanos() as u64), Ordering::Relaxed);
    }
}
