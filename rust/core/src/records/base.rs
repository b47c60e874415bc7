//! The store as it lies in its segment: its parts, its lease, its locks.

use crate::error::{Error, Kind, Result};
use crate::segment::claim::{Lease, Slots};
use crate::segment::counters::Counters;
use crate::segment::layout::{Geometry, RecordsGeometry, RecordsLayout};
use crate::segment::lease::Leases;
use crate::segment::lock::StateLock;
use crate::segment::parts::LOCKS;
use crate::segment::{Opened, Request, Segment};
use crate::sys::mapping::Mapping;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// How long to wait for somebody who is choosing a region or adding a schema; where many threads of
/// this process write, for one of them; and where all was emptied, for who was writing then.
pub(super) const LOCK_PATIENCE: Duration = Duration::from_millis(100);

/// A store open in this process.
pub struct RecordStore {
    segment: Segment,
    geometry: RecordsGeometry,
    layout: RecordsLayout,
    /// Nanoseconds that loading took lately, as this process saw it: by its own calls, of which one
    /// may load many samples, and by waiting for others.
    pub(super) lately: AtomicU64,
}

impl RecordStore {
    /// Joins the store of that name, or makes it.
    pub fn open(request: &Request) -> Result<(Arc<Self>, Opened)> {
        let (segment, how) = Segment::open(request)?;
        let Geometry::Records(geometry) = segment.header().geometry.clone() else {
            return Err(Error::new(
                Kind::Argument,
                format!("the cache {:?} is a SharedCache; use another name", segment.name()),
            ));
        };
        let store = segment.unique(how, |segment| {
            let layout = geometry.layout()?;
            Ok(Self { segment, geometry, layout, lately: AtomicU64::new(0) })
        })?;
        Ok((store, how))
    }

    /// The segment under it.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What it has room for.
    pub fn geometry(&self) -> &RecordsGeometry {
        &self.geometry
    }

    /// Whether regions are emptied to make room for new records.
    pub fn recycles(&self) -> bool {
        self.geometry.regions > 1
    }

    pub(super) fn layout(&self) -> &RecordsLayout {
        &self.layout
    }

    pub(super) fn mapping(&self) -> &Mapping {
        self.segment.mapping()
    }

    /// The claims: a state per sample, which is empty or claimed, and those of the locks.
    pub(super) fn slots(&self) -> Slots<'_> {
        self.segment.slots(self.geometry.dataset_len + LOCKS)
    }

    pub(super) fn leases(&self) -> Leases<'_> {
        self.segment.leases()
    }

    pub(super) fn counters(&self) -> Counters<'_> {
        self.segment.counters()
    }

    pub(super) fn lock_of_regions(&self) -> usize {
        self.geometry.dataset_len as usize
    }

    pub(super) fn lock_of_schemas(&self) -> usize {
        self.geometry.dataset_len as usize + 1
    }

    /// Runs `act` as the only one, under a lock that ends with its holder. None if others keep it.
    pub(super) fn locked<R>(
        &self,
        lock: usize,
        lease: Lease,
        act: impl FnOnce() -> R,
    ) -> Option<R> {
        let _lock = StateLock::wait(self.slots(), lock, lease, &self.leases(), LOCK_PATIENCE)?;
        Some(act())
    }
}
