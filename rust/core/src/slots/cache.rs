//! The dense cache: one slot per sample of a dataset, loaded and stored by index.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::claim::{BEYOND, Claim, Lease, SET, Slots};
use crate::segment::counters::{Count, Counters};
use crate::segment::layout::{Geometry, Layout, Plan};
use crate::segment::lease::Leases;
use crate::segment::{Opened, Request, Segment};
use crate::slots::seen::Seen;
use crate::sys::fork;
use crate::sys::mapping::{Mapping, checksum};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long an overwrite waits for another writer of the same slot before it lets that one win.
const OVERWRITE_PATIENCE: Duration = Duration::from_millis(100);

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// The slot's bytes begin at this offset of the mapping.
    Hit(usize),
    /// Nothing is stored, or it is being written just now.
    Empty,
    /// The sample lies beyond the capacity of the cache.
    Beyond,
    /// The index lies outside the dataset.
    Outside,
}

/// What became of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It can be loaded now.
    Done,
    /// Another process stored, or is storing, this sample: nothing to do.
    Lost,
    /// The slot is filled and this process knew it; the old value stays.
    Occupied,
    /// The sample lies beyond the capacity of the cache.
    Beyond,
    /// The index lies outside the dataset.
    Outside,
    /// The cache takes no more values: no space, or no lease. `true` the first time.
    Refused(bool),
}

/// Sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of counters.rs
pub struct Stats {
    pub hits: u64,
    pub misses: u64,
    pub fills: u64,
    pub bytes: u64,
    pub waits: u64,
    pub lost: u64,
    pub dropped: u64,
    pub damaged: u64,
    /// Slots set at this moment.
    pub filled: u64,
    /// No more values are taken until `clear`.
    pub frozen: bool,
}

/// A cache open in this process.
pub struct Cache {
    segment: Segment,
    geometry: Geometry,
    layout: Layout,
    seen: Seen,
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
        for entry in fork::open_caches().iter_mut().filter(|entry| entry.file == self.file()) {
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
        let Plan::Slots(geometry) = segment.header().plan.clone() else {
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

    fn file(&self) -> (u64, u64) {
        self.segment.file()
    }

    /// The segment under it.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What it holds.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Where everything lies in the segment.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn mapping(&self) -> &Mapping {
        self.segment.mapping()
    }

    fn slots(&self) -> Slots<'_> {
        self.segment.slots(self.geometry.capacity)
    }

    fn counters(&self) -> Counters<'_> {
        self.segment.counters()
    }

    fn leases(&self) -> Leases<'_> {
        self.segment.leases()
    }

    /// The index as a place in the cache, or why it is none.
    #[inline]
    fn place(&self, index: i64) -> std::result::Result<usize, Load> {
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

    /// Looks up a sample. On a hit the bytes stay readable at that place while the mapping is
    /// held; they change only if somebody overwrites the slot or clears the cache.
    #[inline]
    pub fn load(&self, index: i64) -> Load {
        self.take_note_after_fork();
        let found = match self.place(index) {
            Err(Load::Outside) => return Load::Outside,
            Err(other) => other,
            Ok(i) => self.look(i),
        };
        let count = if matches!(found, Load::Hit(_)) { Count::Hits } else { Count::Misses };
        self.counters().add(count, 1);
        found
    }

    #[inline]
    fn look(&self, i: usize) -> Load {
        let slots = self.slots();
        if slots.state(i) == SET && (!self.geometry().verify || self.is_whole(i)) {
            self.seen.insert(i);
            return Load::Hit(self.layout().slot_at(self.geometry(), i as u64) as usize);
        }
        self.seen.missed(i);
        Load::Empty
    }

    /// Compares a slot with its checksum; empties it if they differ.
    #[cold]
    fn is_whole(&self, i: usize) -> bool {
        let slots = self.slots();
        let at = self.layout().slot_at(self.geometry(), i as u64) as usize;
        let bytes = self.geometry().slot_bytes as usize;
        let check = &self.checks()[i];
        let intact = slots.read_stable(i, || {
            // Relaxed: ordered by the slot's state, like the bytes it belongs to.
            self.mapping().checksum(at, bytes) == check.load(Ordering::Relaxed)
        });
        if intact == Some(false) {
            self.discard(i);
        }
        intact == Some(true)
    }

    /// Empties a slot whose bytes are not what was stored.
    #[cold]
    fn discard(&self, i: usize) {
        let slots = self.slots();
        self.counters().add(Count::Damaged, 1);
        if let Some(lease) = self.leases().mine(&slots)
            && slots.claim(i, lease, true, &self.leases()) == Claim::Claimed
        {
            slots.abandon(i, lease);
        }
    }

    fn checks(&self) -> &[AtomicU64] {
        self.mapping().words(self.layout().checks_at as usize, self.geometry().capacity as usize)
    }

    /// Copies a sample to `to` if it is there and whole.
    ///
    /// # Safety
    /// `to` must be valid for writes of `slot_bytes` bytes, outside the mapping.
    #[allow(unsafe_code)] // the copy's target is a raw pointer
    #[inline]
    pub(crate) unsafe fn copy(&self, i: usize, to: *mut u8) -> bool {
        let bytes = self.geometry().slot_bytes as usize;
        let at = self.layout().slot_at(self.geometry(), i as u64) as usize;
        let copied = self.slots().read_stable(i, || {
            // SAFETY: `to` by the caller's promise.
            unsafe { self.mapping().copy_out(at, to, bytes) };
            // SAFETY: written just now, by us alone. The copy is checked, not the slot: it is the
            // copy that the caller gets.
            !self.geometry().verify
                || checksum(unsafe { std::slice::from_raw_parts(to, bytes) })
                    == self.checks()[i].load(Ordering::Relaxed)
        });
        if copied == Some(false) {
            self.discard(i);
        }
        let hit = copied == Some(true);
        if hit {
            self.seen.insert(i);
        } else {
            self.seen.missed(i);
        }
        hit
    }

    /// Checks many indices at once; the first one outside the dataset is the error.
    pub(crate) fn places(&self, indices: &[i64]) -> Result<()> {
        match indices.iter().find(|&&index| self.place(index) == Err(Load::Outside)) {
            None => Ok(()),
            Some(index) => Err(self.outside(*index)),
        }
    }

    pub(crate) fn place_of(&self, index: i64) -> Option<usize> {
        self.place(index).ok()
    }

    pub(crate) fn note_loads(&self, hits: u64, misses: u64) {
        self.counters().add(Count::Hits, hits);
        self.counters().add(Count::Misses, misses);
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

    /// Stores a sample. `bytes` must be exactly one slot long.
    pub fn store(&self, index: i64, bytes: &[u8], overwrite: bool) -> Result<Stored> {
        if bytes.len() as u64 != self.geometry().slot_bytes {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "a value of {} bytes does not fit a slot of {} bytes",
                    bytes.len(),
                    self.geometry().slot_bytes
                ),
            ));
        }
        self.take_note_after_fork();
        let i = match self.place(index) {
            Ok(i) => i,
            Err(Load::Outside) => return Ok(Stored::Outside),
            Err(_) => return Ok(Stored::Beyond),
        };
        let slots = self.slots();
        // Known and still set: the answer needs neither a lease nor space.
        if !overwrite && slots.state(i) == SET {
            return Ok(self.already_set(i));
        }
        if self.segment.is_frozen() {
            self.counters().add(Count::Dropped, 1);
            return Ok(Stored::Refused(false));
        }
        let Some(lease) = self.leases().mine(&slots) else {
            self.counters().add(Count::Dropped, 1);
            return Ok(Stored::Refused(false));
        };
        match self.claim(i, lease, overwrite) {
            Claim::Claimed => self.fill(i, lease, bytes),
            Claim::Occupied => Ok(self.already_set(i)),
            Claim::Busy => {
                self.counters().add(Count::Lost, 1);
                Ok(Stored::Lost)
            }
            Claim::Beyond => Ok(Stored::Beyond),
        }
    }

    fn already_set(&self, i: usize) -> Stored {
        let missed = self.seen.was_missed(i); // asked in any case: the answer is used up
        if self.seen.contains(i) && !missed {
            return Stored::Occupied;
        }
        self.seen.insert(i);
        self.counters().add(Count::Lost, 1);
        Stored::Lost
    }

    /// An overwrite waits, bounded, for a living writer of the slot; others need not.
    fn claim(&self, i: usize, lease: Lease, overwrite: bool) -> Claim {
        let slots = self.slots();
        let mut claim = slots.claim(i, lease, overwrite, &self.leases());
        if claim == Claim::Busy && overwrite {
            self.counters().add(Count::Waits, 1);
            let began = Instant::now();
            while claim == Claim::Busy && began.elapsed() < OVERWRITE_PATIENCE {
                std::thread::sleep(Duration::from_micros(50));
                claim = slots.claim(i, lease, overwrite, &self.leases());
            }
        }
        claim
    }

    fn fill(&self, i: usize, lease: Lease, bytes: &[u8]) -> Result<Stored> {
        let slots = self.slots();
        if active(Fault::PublishEarly) {
            slots.publish(i, lease);
        }
        let at = self.layout().slot_at(self.geometry(), i as u64);
        if let Err(errno) = self.segment.write(bytes, at) {
            slots.abandon(i, lease);
            self.counters().add(Count::Dropped, 1);
            if let Some(error) = Error::unwritable("value", errno) {
                return Err(error);
            }
            return Ok(Stored::Refused(self.segment.freeze(errno)));
        }
        if self.geometry().verify {
            self.checks()[i].store(checksum(bytes), Ordering::Relaxed);
        }
        let published = slots.publish(i, lease);
        if !published && !active(Fault::PublishEarly) {
            self.counters().add(Count::Lost, 1);
            return Ok(Stored::Lost);
        }
        self.seen.insert(i);
        self.seen.was_missed(i); // and is not any more
        self.counters().add(Count::Fills, 1);
        self.counters().add(Count::Bytes, bytes.len() as u64);
        Ok(Stored::Done)
    }

    /// Why the cache froze, for the one warning.
    pub fn frozen_reason(&self) -> String {
        let (filled, capacity) = (self.slots().filled(), self.geometry().capacity);
        self.segment.frozen_reason(&format!(" with {filled} of {capacity} slots filled"))
    }

    /// Empties every slot, wipes its bytes and takes values again. The memory stays allocated.
    pub fn clear(&self) -> Result<()> {
        let slots = self.slots();
        let lease = self.leases().mine(&slots).ok_or_else(|| {
            Error::new(
                Kind::State,
                "too many processes are writing to this cache to clear it; try again later",
            )
        })?;
        let zeros = vec![0u8; self.geometry().slot_bytes as usize];
        let mut failed = None;
        slots.clear(
            lease,
            |_| true,
            |i| {
                let wiped =
                    self.segment.write(&zeros, self.layout().slot_at(self.geometry(), i as u64));
                failed = failed.or(wiped.err());
            },
        );
        self.seen.forget();
        self.segment.thaw();
        failed.map_or(Ok(()), |errno| Err(Error::system("cannot wipe a slot", errno)))
    }

    /// Makes sure that touching slots `from..to` through the mapping cannot fail any more.
    pub fn reserve(&self, from: u64, to: u64) -> Result<()> {
        let (g, layout) = (self.geometry(), self.layout());
        let (at, len) = (layout.data_at + from * g.slot_bytes, (to - from) * g.slot_bytes);
        self.segment.reserve(at, len).map_err(|errno| {
            Error::system(
                &format!("cannot reserve {} for direct access to the array", Bytes(len)),
                errno,
            )
        })
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

const _: () = assert!(BEYOND > SET); // states beyond the capacity are never looked at through Slots

#[cfg(test)]
mod tests {
    //! On a heap-backed segment, so that Miri can run them: `cargo +nightly miri test --lib heap`.
    use super::*;
    use crate::segment::claim::{EMPTY, Orphans, claimed_by};
    use crate::segment::lease;

    fn heap() -> (Mapping, Layout, Geometry) {
        let geometry = Geometry::plan(1 << 16, 100, &[64], 0, 1, true).unwrap();
        let layout = geometry.layout().unwrap();
        (Mapping::heap(layout.total as usize), layout, geometry)
    }

    fn slots<'a>(mapping: &'a Mapping, layout: &Layout, geometry: &Geometry) -> Slots<'a> {
        lease::slots(mapping, layout.states_at, geometry.capacity)
    }

    /// No lease is ever free.
    struct AllAlive;

    impl Orphans for AllAlive {
        fn while_orphaned<R>(&self, _k: Lease, _act: impl FnOnce() -> R) -> Option<R> {
            None
        }
    }

    /// Every lease is free.
    struct AllDead;

    impl Orphans for AllDead {
        fn while_orphaned<R>(&self, _k: Lease, act: impl FnOnce() -> R) -> Option<R> {
            Some(act())
        }
    }

    #[test]
    fn heap_slot_is_claimed_filled_published_and_read() {
        let (mapping, layout, geometry) = heap();
        let slots = slots(&mapping, &layout, &geometry);
        let at = layout.slot_at(&geometry, 5) as usize;
        assert_eq!(slots.claim(5, 0, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(5, 1, false, &AllAlive), Claim::Busy);
        mapping.write(at, &[9; 64]);
        assert!(slots.publish(5, 0));
        assert_eq!(slots.claim(5, 1, false, &AllAlive), Claim::Occupied);
        let mut row = [0u8; 64];
        #[allow(unsafe_code)]
        // SAFETY: `row` is one slot long.
        let copied = slots.read_stable(5, || unsafe { mapping.copy_out(at, row.as_mut_ptr(), 64) });
        assert_eq!((copied, row), (Some(()), [9; 64]));
        assert_eq!(mapping.checksum(at, 64), checksum(&[9; 64]));
        assert_eq!(slots.filled(), 1);
    }

    #[test]
    fn heap_slot_of_a_dead_writer_is_taken_over_or_swept() {
        let (mapping, layout, geometry) = heap();
        let slots = slots(&mapping, &layout, &geometry);
        assert_eq!(slots.claim(0, 7, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(1, 7, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(0, 8, false, &AllDead), Claim::Claimed);
        slots.empty_claims_of_the_dead(7);
        assert_eq!((slots.state(0), slots.state(1)), (claimed_by(8), EMPTY));
    }

    #[test]
    fn heap_only_a_lease_whose_holder_left_claims_costs_a_walk() {
        let (mapping, layout, geometry) = heap();
        let slots = slots(&mapping, &layout, &geometry);
        let left = |lease| slots.entry(lease).claims.load(Ordering::Relaxed);
        assert_eq!(slots.claim(0, 7, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(0, 8, true, &AllAlive), Claim::Busy);
        assert_eq!((left(7), left(8)), (1, 0));
        assert!(slots.publish(0, 7) && !slots.publish(0, 7));
        slots.abandon(0, 7);
        assert_eq!(left(7), 0);
        slots.clear(7, |_| true, |_| assert_eq!(left(7), 1));
        assert_eq!(slots.claim(3, 7, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(4, 7, false, &AllAlive), Claim::Claimed);
        assert_eq!(slots.claim(4, 8, false, &AllDead), Claim::Claimed);
        assert_eq!((left(7), left(8)), (2, 1), "one was taken over, and is counted all the same");
        slots.empty_claims_of_the_dead(7);
        assert_eq!((left(7), slots.state(3), slots.state(4)), (0, EMPTY, claimed_by(8)));
    }

    #[test]
    fn heap_clear_empties_what_is_set_and_leaves_what_is_being_written() {
        let (mapping, layout, geometry) = heap();
        let slots = slots(&mapping, &layout, &geometry);
        for i in 0..100 {
            assert_eq!(slots.claim(i, 0, false, &AllAlive), Claim::Claimed);
            assert!(i == 42 || slots.publish(i, 0));
        }
        let mut scrubbed = 0;
        slots.clear(1, |_| true, |_| scrubbed += 1);
        assert_eq!((scrubbed, slots.filled(), slots.state(42)), (99, 0, claimed_by(0)));
    }

    #[test]
    fn heap_counters_of_threads_add_up() {
        let (mapping, ..) = heap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| Counters(&mapping).add(Count::Hits, 2)));
            }
        });
        assert_eq!(Counters(&mapping).sum(Count::Hits), 800);
    }

    #[test]
    fn heap_what_was_missed_in_a_closed_cache_excuses_nothing() {
        for _ in 0..100 {
            let seen = Seen::new(64);
            assert!(!seen.was_missed(7), "of a cache at the same address");
            seen.missed(7);
        }
    }

    #[test]
    fn heap_what_was_seen_is_remembered_per_sample() {
        let seen = Seen::new(130);
        seen.insert(129);
        seen.insert(64);
        seen.remove(64);
        assert!(seen.contains(129) && !seen.contains(64) && !seen.contains(0));
    }
}
