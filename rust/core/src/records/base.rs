//! The store as it lies in its segment: its parts, its lease, its locks.

use crate::error::{Error, Kind, Result};
use crate::segment::claim::{Lease, Slots};
use crate::segment::counters::Counters;
use crate::segment::layout::{Geometry, RecordsGeometry, RecordsLayout};
use crate::segment::lease::Leases;
use crate::segment::{Opened, Request, Segment};
use crate::space::Space;
use crate::sys::mapping::Mapping;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Which of the locks of the segment is that of the schemas; the first is that of the regions.
pub(super) const LOCK_OF_SCHEMAS: u64 = 1;

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

    /// Where its records lie.
    #[inline]
    pub(crate) fn space(&self) -> Space<'_> {
        Space::new(&self.segment, &self.layout.space)
    }

    /// The claims: a state per sample, which is empty or claimed.
    pub(super) fn slots(&self) -> Slots<'_> {
        self.space().slots()
    }

    pub(super) fn leases(&self) -> Leases<'_> {
        self.segment.leases()
    }

    /// This process's lease.
    pub(crate) fn lease(&self) -> Option<Lease> {
        self.space().lease()
    }

    pub(super) fn counters(&self) -> Counters<'_> {
        self.segment.counters()
    }
}
