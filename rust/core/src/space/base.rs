//! The words of a space in its segment.

use crate::segment::Segment;
use crate::segment::claim::{Lease, Slots};
use crate::segment::counters::Counters;
use crate::segment::lease::Leases;
use crate::segment::lock::StateLock;
use crate::segment::parts::LOCKS;
use crate::segment::space_layout::SpaceLayout;
use crate::sys::mapping::Mapping;
use std::time::Duration;

/// How long to wait for somebody who is choosing a region or adding a schema; where many threads of
/// this process write, for one of them; and where all was emptied, for who was writing then.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);

/// A space, as this process sees it.
#[derive(Clone, Copy)]
pub(crate) struct Space<'a> {
    segment: &'a Segment,
    layout: &'a SpaceLayout,
    patience: Duration,
}

impl<'a> Space<'a> {
    #[inline]
    pub(crate) fn new(segment: &'a Segment, layout: &'a SpaceLayout) -> Self {
        Self { segment, layout, patience: LOCK_PATIENCE }
    }

    /// The same, for who may wait longer.
    pub(crate) fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    #[inline]
    pub(crate) fn layout(&self) -> &'a SpaceLayout {
        self.layout
    }

    #[inline]
    pub(crate) fn mapping(&self) -> &'a Mapping {
        self.segment.mapping()
    }

    pub(crate) fn counters(&self) -> Counters<'a> {
        self.segment.counters()
    }

    /// The claims: a state per sample, which is empty or claimed, and those of the locks.
    pub(crate) fn slots(&self) -> Slots<'a> {
        self.segment.slots(self.layout.samples + LOCKS)
    }

    pub(crate) fn leases(&self) -> Leases<'a> {
        self.segment.leases()
    }

    /// This process's lease; what a dead holder of it left is put right at the first call.
    pub(crate) fn lease(&self) -> Option<Lease> {
        self.leases().mine_after(|| self.slots(), |lease| self.forget_writer(lease))
    }

    /// Runs `act` as the only one, under a lock that ends with its holder. None if others keep it.
    /// There are LOCKS of them; the first is that of the regions.
    pub(crate) fn locked<R>(&self, lock: u64, lease: Lease, act: impl FnOnce() -> R) -> Option<R> {
        let lock = (self.layout.samples + lock) as usize;
        let _lock = StateLock::wait(self.slots(), lock, lease, &self.leases(), self.patience)?;
        Some(act())
    }
}
