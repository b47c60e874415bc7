//! The parts that all segments have, whatever they hold: states, leases, counters, and a few words.
//!
//! Slots, records and tables of files all stand on these; each adds its own parts.

use crate::error::Result;
use crate::segment::claim::Slots;
use crate::segment::counters::Counters;
use crate::segment::lease::{self, Leases};
use crate::segment::parts::{FROZEN_AT, RESTS, RESTS_AT, TOLD_AT};
use crate::segment::{Opened, Segment};
use crate::sys::fork;
use rustix::io::Errno;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

impl Segment {
    /// The one object of this process over a segment that was come by so: what is open already, or
    /// what `make` makes.
    pub(crate) fn unique<T: Any + Send + Sync>(
        self,
        how: Opened,
        make: impl FnOnce(Self) -> Result<T>,
    ) -> Result<Arc<T>> {
        if how == Opened::Resumed {
            // It may have been kept because the space ran out; there may be more now. And whoever
            // was told has gone.
            self.thaw();
            self.told().store(0, Ordering::Relaxed);
            self.rests().iter().for_each(|rest| rest.store(0, Ordering::Relaxed));
        }
        let (anchor, name) = (self.anchor().clone(), self.name().to_string());
        Ok(fork::unique(anchor, &name, make(self)?))
    }

    /// The slot protocol over the first `count` states.
    #[inline]
    pub(crate) fn slots(&self, count: u64) -> Slots<'_> {
        lease::slots(self.mapping(), self.states_at, count)
    }

    /// Who may write, as this process sees it.
    #[inline]
    pub(crate) fn leases(&self) -> Leases<'_> {
        Leases(self.anchor())
    }

    /// What all processes count.
    #[inline]
    pub(crate) fn counters(&self) -> Counters<'_> {
        Counters(self.mapping())
    }

    // No more memory. Relaxed: who does not see it yet meets the full mount itself.

    /// Whether nothing more is taken.
    #[inline]
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen().load(Ordering::Relaxed) != 0
    }

    /// Nothing more is taken, because a write failed. True the first time.
    pub(crate) fn freeze(&self, errno: Errno) -> bool {
        self.frozen_by.store(errno.raw_os_error() as u32, Ordering::Relaxed);
        self.frozen().swap(1, Ordering::Relaxed) == 0
    }

    /// It takes samples again.
    pub(crate) fn thaw(&self) {
        self.frozen().store(0, Ordering::Relaxed);
    }

    /// Why it froze, for the one warning; `state` is what it was like.
    pub(crate) fn frozen_reason(&self, state: &str) -> String {
        let errno = self.frozen_by.load(Ordering::Relaxed) as i32;
        crate::error::frozen_reason(self.name(), state, errno)
    }

    fn frozen(&self) -> &AtomicU32 {
        self.mapping().half_word(FROZEN_AT)
    }

    // What was said to people. Relaxed: nothing but a message depends on it.

    /// Whether the caller is the first, of all processes, to tell the user `what`, a bit.
    pub(crate) fn is_first_to_tell(&self, what: u32) -> bool {
        self.told().fetch_or(what, Ordering::Relaxed) & what == 0
    }

    /// Until when processes leave servers alone.
    pub(crate) fn rests(&self) -> &[AtomicU64] {
        self.mapping().words(RESTS_AT, RESTS)
    }

    fn told(&self) -> &AtomicU32 {
        self.mapping().half_word(TOLD_AT)
    }
}
