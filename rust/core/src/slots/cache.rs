//! The dense cache: one slot per sample of a dataset, loaded and stored by index.

use crate::error::{Error, Kind, Result};
use crate::segment::claim::{SET, Slots};
use crate::segment::counters::{Count, Counters};
use crate::segment::layout::{Geometry, SlotsGeometry, SlotsLayout};
use crate::segment::lease::Leases;
use crate::segment::{Opened, Request, Segment};
use crate::slots::outcome::{Load, Stats};
use crate::slots::seen::Seen;
use crate::sys::fork::{self, OpenCache};
use crate::sys::mapping::Mapping;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A cache open in this process.
pub struct Cache {
    pub(super) segment: Segment,
    geometry: SlotsGeometry,
    layout: SlotsLayout,
    pub(super) seen: Seen,
}

impl Cache {
    /// Joins the cache of that name, or makes it.
    pub fn open(request: &Request) -> Result<(Arc<Self>, Opened)> {
        Self::over(Segment::open(request)?)
    }

    /// Joins the cache of that name, which must exist and, if given, be what `like` asks for.
    pub fn join(name: &str, like: Option<&Request>) -> Result<(Arc<Self>, Opened)> {
        Self::over(Segment::join(name, like)?)
    }

    /// The cache of that name as this process has it open; otherwise it is joined, and held open
    /// until `release`.
    pub fn by_name(name: &str) -> Result<Arc<Self>> {
        // The newest, should an older one have lost its name in /dev/shm.
        let any = fork::open_caches()
            .iter()
            .rev()
            .filter(|entry| *entry.name == *name)
            .find_map(|entry| entry.cache.upgrade());
        match any.and_then(|any| any.downcast().ok()) {
            Some(cache) => Ok(cache),
            None => {
                let (cache, _) = Self::join(name, None)?;
                cache.hold();
                Ok(cache)
            }
        }
    }

    /// Keeps the cache open in this process and its forks until `release`.
    pub fn hold(self: &Arc<Self>) {
        let ours = |entry: &&mut OpenCache| Arc::ptr_eq(&entry.anchor, self.segment.anchor());
        for entry in fork::open_caches().iter_mut().filter(ours) {
            entry.held = entry.cache.upgrade();
        }
    }

    /// Ends what `hold` and `by_name` began for this name; says whether there was anything to end.
    pub fn release(name: &str) -> bool {
        let mut open = fork::open_caches();
        // Dropping a cache takes the same lock, so it is dropped after this one is released.
        let held: Vec<_> = open
            .iter_mut()
            .filter(|entry| *entry.name == *name)
            .filter_map(|entry| entry.held.take())
            .collect();
        drop(open);
        !held.is_empty()
    }

    fn over((segment, how): (Segment, Opened)) -> Result<(Arc<Self>, Opened)> {
        let Geometry::Slots(geometry) = segment.header().geometry.clone() else {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "the cache {:?} holds the samples of a CachedDataset; use another name",
                    segment.name()
                ),
            ));
        };
        let cache = segment.unique(how, |segment| {
            let (seen, layout) = (Seen::new(geometry.capacity), geometry.layout()?);
            Ok(Self { segment, geometry, layout, seen })
        })?;
        cache.take_note();
        Ok((cache, how))
    }

    /// The segment under it.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What it holds.
    pub fn geometry(&self) -> &SlotsGeometry {
        &self.geometry
    }

    /// Where everything lies in the segment.
    pub fn layout(&self) -> &SlotsLayout {
        &self.layout
    }

    pub(super) fn mapping(&self) -> &Mapping {
        self.segment.mapping()
    }

    pub(super) fn slots(&self) -> Slots<'_> {
        self.segment.slots(self.geometry.capacity)
    }

    pub(super) fn counters(&self) -> Counters<'_> {
        self.segment.counters()
    }

    pub(super) fn leases(&self) -> Leases<'_> {
        self.segment.leases()
    }

    /// The slot of a sample, or why it has none.
    #[inline]
    pub(super) fn slot_of(&self, index: i64) -> std::result::Result<usize, Load> {
        let geometry = self.geometry();
        match u64::try_from(index) {
            Ok(i) if i < geometry.capacity => Ok(i as usize),
            Ok(i) if i < geometry.dataset_len => Err(Load::Beyond),
            _ => Err(Load::Outside),
        }
    }

    /// Notes what is set as this process begins to use the cache (seen.rs).
    fn take_note(&self) {
        if !self.segment.anchor().informed.swap(true, Ordering::Relaxed) {
            let slots = self.slots();
            for i in 0..self.geometry().capacity as usize {
                if slots.state(i) == SET {
                    self.seen.insert(i);
                }
            }
        }
    }

    #[inline]
    pub(crate) fn take_note_after_fork(&self) {
        if !self.segment.anchor().informed.load(Ordering::Relaxed) {
            self.take_note();
        }
    }

    /// Checks many indices at once; the first one outside the dataset is the error.
    pub(crate) fn check_indices(&self, indices: &[i64]) -> Result<()> {
        match indices.iter().find(|&&index| self.slot_of(index) == Err(Load::Outside)) {
            None => Ok(()),
            Some(index) => Err(self.outside(*index)),
        }
    }

    /// The error for an index outside the dataset.
    pub fn outside(&self, index: i64) -> Error {
        Error::new(
            Kind::Index,
            format!(
                "Index {index} out of bounds for dataset of length {}",
                self.geometry().dataset_len
            ),
        )
    }

    /// How many slots are set.
    pub fn filled(&self) -> u64 {
        self.slots().filled()
    }

    /// Sums over all processes.
    pub fn stats(&self) -> Stats {
        let counters = self.counters();
        Stats {
            hits: counters.sum(Count::Hits),
            misses: counters.sum(Count::Misses),
            fills: counters.sum(Count::Fills),
            bytes: counters.sum(Count::Bytes),
            waits: counters.sum(Count::Waits),
            lost: counters.sum(Count::Lost),
            dropped: counters.sum(Count::Dropped),
            damaged: counters.sum(Count::Damaged),
            filled: self.filled(),
            frozen: self.segment.is_frozen(),
        }
    }
}
