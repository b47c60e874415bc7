//! The record store: records of any size, one per sample, found by index.
//!
//! ```text
//!   state[i]   the byte of slot.rs: empty, set, or claimed by the holder of a lease
//!   place[i]   where the record begins; written while the state is claimed
//!   info[i]    its length and schema, likewise
//!   region     a stretch of the data with a cursor: records are laid down one after the other
//! ```
//!
//! A sample is claimed *before* it is loaded, so that one process loads it and the others wait.
//! Its record is then laid down where the cursor of the active region stands, and published.
//!
//! A store with one region fills up and stays as it is ("freeze"): a record never moves, and may be
//! read in place. With several ("lru"), the region that was not used for longest is emptied when
//! the active one is full; its records are gone, and readers copy records out, which the epoch of
//! slot.rs guards. There is no free list that a crash could damage: what the dead leave is a claim,
//! which others take over, and a gap, which goes with its region.
//!
//! # When is it safe to empty a region?
//! When nobody is about to write to it. A writer says where it will write (`place` becomes an
//! intent) *before* it moves the cursor, then looks again whether that region is still active; who
//! empties a region has made another one active before, and looks for claims that point into it.
//! One of the two sees the other (both use SeqCst). A claim of the living keeps its region.

use crate::counters::{Count, Counters};
use crate::error::{Error, Kind, Result, frozen_reason};
use crate::fault::{Fault, active as broken};
use crate::fork;
use crate::layout::{
    EPOCH_AT, FROZEN_AT, LOCKS, Plan, RECORD_ALIGN, RecordLayout, Room, SCHEMA_BYTES,
};
use crate::lease::Leases;
use crate::memory::Mapping;
use crate::segment::{Opened, Request, Segment};
use crate::slot::{Claim, FIRST_LEASE, SET, Slots};
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest record.
pub const MAX_RECORD: u64 = 4 << 30;
/// The schema number of a record that brings its own.
pub const INLINE: u16 = u16::MAX;

/// Who loads may be waited for this many times as long as loading took lately, but not longer than
/// `LONGEST_WAIT`; where nobody has loaded anything yet, for `FIRST_WAIT`.
const WAIT_FACTOR: u32 = 4;
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_secs(10);

/// How long to wait for somebody who is choosing a region, or adding a schema.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
/// No region is active: somebody is emptying all of them, or died doing so.
const NONE: u64 = u64::MAX;
/// In `place`: not where the record is, but in which region it will be.
const INTENT: u64 = 1 << 63;
const LENGTH_BITS: u32 = 40;

/// Words at the head of the regions.
const ACTIVE: usize = 0;
const TICK: usize = 1;
/// Words of one region.
const CURSOR: usize = 0;
const USED: usize = 1;
const BORN: usize = 2;

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its first byte, from the start of the mapping.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The number of its schema, or [`INLINE`].
    pub schema: u16,
}

/// What to do about a sample that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// It is the caller's to load; `fill` or `abandon` it.
    Mine,
    /// It has come meanwhile.
    Present,
    /// Somebody who lives is loading it.
    Busy,
    /// The store takes nothing now: load it, and keep it.
    Refused,
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// It can be read now.
    Stored,
    /// Another process took the sample over and stored it.
    Lost,
    /// There is no room for it, now.
    Full,
    /// It is longer than the store could ever hold.
    TooLarge,
    /// The memory ran out: nothing is taken any more. `true` the first time.
    Refused(bool),
}

/// Sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of counters.rs
pub struct StoreStats {
    pub hits: u64,
    pub misses: u64,
    pub fills: u64,
    pub bytes: u64,
    pub waits: u64,
    pub lost: u64,
    pub dropped: u64,
    pub loads: u64,
    pub load_nanos: u64,
    pub too_large: u64,
    pub evicted: u64,
    /// Samples that are there at this moment.
    pub filled: u64,
    /// Bytes laid down, gaps included.
    pub used_bytes: u64,
    /// Bytes there are for records.
    pub data_bytes: u64,
    /// No more records are taken until `clear`.
    pub frozen: bool,
}

/// A store open in this process.
pub struct RecordStore {
    segment: Segment,
    room: Room,
    layout: RecordLayout,
    /// errno of the write that froze the store, if it was ours; for the message.
    frozen_by: AtomicU32,
    /// Nanoseconds that loading took lately, as this process saw it: by its own calls, of which one
    /// may load many samples, and by waiting for others.
    lately: AtomicU64,
}

impl RecordStore {
    /// Joins the store of that name, or makes it.
    pub fn open(request: &Request) -> Result<(Arc<Self>, Opened)> {
        let (segment, how) = Segment::open(request)?;
        let Plan::Records(room) = segment.header().plan.clone() else {
            return Err(Error::new(
                Kind::Argument,
                format!("the cache {:?} is a SharedCache; use another name", segment.name()),
            ));
        };
        let (file, name) = (segment.file(), segment.name().to_string());
        let layout = room.layout()?;
        let (frozen_by, lately) = (AtomicU32::new(0), AtomicU64::new(0));
        let store = fork::unique(file, &name, Self { segment, room, layout, frozen_by, lately });
        if how == Opened::Resumed {
            // It may have been kept because the space ran out; there may be more now.
            store.frozen().store(0, Ordering::Relaxed);
        }
        Ok((store, how))
    }

    /// The segment under it.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// What it has room for.
    pub fn room(&self) -> &Room {
        &self.room
    }

    /// The longest record that can ever be stored.
    pub fn longest(&self) -> u64 {
        self.room.region_bytes().min(MAX_RECORD)
    }

    /// Whether records stay where they are once they are set.
    pub fn is_stable(&self) -> bool {
        self.room.regions == 1
    }

    fn mapping(&self) -> &Mapping {
        self.segment.mapping()
    }

    fn slots(&self) -> Slots<'_> {
        let states = (self.room.dataset_len + LOCKS) as usize;
        Slots::new(
            self.mapping().bytes(self.layout.states_at as usize, states),
            &self.mapping().words(EPOCH_AT, 1)[0],
        )
    }

    fn leases(&self) -> Leases<'_> {
        Leases(self.segment.anchor())
    }

    fn counters(&self) -> Counters<'_> {
        Counters(self.mapping())
    }

    fn place(&self, i: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout.places_at as usize, self.room.dataset_len as usize)[i]
    }

    fn info(&self, i: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout.infos_at as usize, self.room.dataset_len as usize)[i]
    }

    fn head(&self, word: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout.regions_at as usize, 2)[word]
    }

    fn region(&self, r: u64, word: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout.region_at(r), 3)[word]
    }

    fn frozen(&self) -> &AtomicU32 {
        self.mapping().half_word(FROZEN_AT)
    }

    fn lock_of_regions(&self) -> usize {
        self.room.dataset_len as usize
    }

    fn lock_of_schemas(&self) -> usize {
        self.room.dataset_len as usize + 1
    }

    /// The index as a place in the dataset.
    pub fn index(&self, index: i64) -> Option<usize> {
        u64::try_from(index).ok().filter(|&i| i < self.room.dataset_len).map(|i| i as usize)
    }

    // Reading

    /// Where the record of sample `i` is. It stays there only if the store is stable; otherwise see
    /// `read`. Counts nothing.
    #[inline]
    pub fn find(&self, i: usize) -> Option<Record> {
        (self.slots().state(i) == SET).then(|| self.located(i)).flatten()
    }

    /// What `place` and `info` say, if it can be believed.
    #[inline]
    fn located(&self, i: usize) -> Option<Record> {
        // Relaxed: ordered by the state. Who reads them while they change discards what came of it.
        let (place, info) =
            (self.place(i).load(Ordering::Relaxed), self.info(i).load(Ordering::Relaxed));
        let len = info & ((1 << LENGTH_BITS) - 1);
        let from = place.wrapping_sub(1).wrapping_mul(RECORD_ALIGN);
        let inside = place != 0
            && place & INTENT == 0
            && from.checked_add(len).is_some_and(|end| end <= self.room.data_bytes);
        inside.then(|| {
            self.touch(from / self.room.region_bytes());
            Record {
                at: (self.layout.data_at + from) as usize,
                len: len as usize,
                schema: (info >> LENGTH_BITS) as u16,
            }
        })
    }

    /// Notes that region `r` is in use.
    #[inline]
    fn touch(&self, r: u64) {
        if self.room.regions > 1 {
            let tick = self.head(TICK).load(Ordering::Relaxed);
            let used = self.region(r, USED);
            if used.load(Ordering::Relaxed) != tick {
                used.store(tick, Ordering::Relaxed);
            }
        }
    }

    /// Runs `copy` on the record of sample `i`; `Some` only if it did not change meanwhile. What
    /// `copy` sees may be anything until then: it must not trust a byte of it.
    pub fn read<R>(&self, i: usize, mut copy: impl FnMut(Record) -> R) -> Option<R> {
        if self.is_stable() {
            return self.find(i).map(copy);
        }
        self.slots().read_stable(i, || self.located(i).map(&mut copy)).flatten()
    }

    /// A number that moves whenever a record that could be read is about to change. Read it before
    /// `find` and after the use of what was found: if it did not move, what was seen was whole.
    pub fn epoch(&self) -> u64 {
        self.mapping().words(EPOCH_AT, 1)[0].load(Ordering::Acquire)
    }

    /// Whether the epoch is still `before`, for everything read until now.
    pub fn unmoved(&self, before: u64) -> bool {
        // SYNC POINT changed: as in `read_stable`.
        std::sync::atomic::fence(Ordering::Acquire);
        self.mapping().words(EPOCH_AT, 1)[0].load(Ordering::Relaxed) == before
            || broken(Fault::IgnoreEpoch)
    }

    /// The record's bytes.
    ///
    /// # Safety
    /// `to` must be valid for writes of `record.len` bytes, outside the mapping.
    #[allow(unsafe_code)] // the copy's target is a raw pointer
    pub unsafe fn copy_out(&self, record: Record, to: *mut u8) {
        // SAFETY: by the caller's promise.
        unsafe { self.mapping().copy_out(record.at, to, record.len) }
    }

    /// Counts look-ups, and the time that loading took.
    pub fn note(&self, hits: u64, misses: u64) {
        self.counters().add(Count::Hits, hits);
        self.counters().add(Count::Misses, misses);
    }

    /// Counts samples that were loaded from the source.
    pub fn note_loads(&self, loads: u64, took: Duration) {
        self.counters().add(Count::Loads, loads);
        self.counters().add(Count::LoadNanos, took.as_nanos() as u64);
        self.learn(took);
    }

    /// Takes note of what a load took. The past fades, so that one that was slow does not count for
    /// ever; relaxed and not atomic as a whole, for it is an estimate.
    fn learn(&self, took: Duration) {
        let before = self.lately.load(Ordering::Relaxed);
        self.lately.store((before - before / 8).max(took.as_nanos() as u64), Ordering::Relaxed);
    }

    // Writing

    /// Says who loads sample `i`.
    pub fn begin(&self, i: usize) -> Begin {
        if self.frozen().load(Ordering::Relaxed) != 0 {
            return Begin::Refused;
        }
        let slots = self.slots();
        let Some(lease) = self.leases().mine(&slots) else { return Begin::Refused };
        match slots.claim(i, lease, false, &self.leases()) {
            Claim::Claimed => {
                // What an earlier life left here means nothing: its region may be another's by now.
                self.place(i).store(0, Ordering::SeqCst);
                Begin::Mine
            }
            Claim::Occupied => Begin::Present,
            Claim::Busy => Begin::Busy,
            Claim::Beyond => Begin::Refused,
        }
    }

    /// Waits until nobody is loading sample `i`: for `patience`, and longer where loading is seen
    /// to take longer. Returns when the loader has died; `begin` then takes over.
    pub fn wait(&self, i: usize, patience: Duration) {
        self.counters().add(Count::Waits, 1);
        let began = Instant::now();
        let mut until = patience;
        let mut nap = Duration::from_micros(20);
        while self.slots().state(i) >= FIRST_LEASE {
            if began.elapsed() >= until {
                until += patience;
                if patience.is_zero() || !self.is_worth_waiting(began.elapsed()) {
                    return;
                }
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(1));
            // Its loader may have died: then `begin` takes it over.
            if nap == Duration::from_millis(1) && !self.is_claimed_by_the_living(i) {
                break;
            }
        }
        if self.slots().state(i) == SET {
            self.learn(began.elapsed());
        }
    }

    /// Whether a loader that lives and was waited for so long may be expected to come to an end. One
    /// that hangs cannot be told from a slow one, so there is a limit; one that was stopped can.
    fn is_worth_waiting(&self, waited: Duration) -> bool {
        let loads = self.counters().sum(Count::Loads);
        let lately = self.lately.load(Ordering::Relaxed);
        let limit = match self.counters().sum(Count::LoadNanos).checked_div(loads) {
            None if lately == 0 => FIRST_WAIT,
            mean => Duration::from_nanos(mean.unwrap_or(0).max(lately)) * WAIT_FACTOR,
        };
        waited < limit.min(LONGEST_WAIT) && !self.segment.has_stopped_users()
    }

    fn is_claimed_by_the_living(&self, i: usize) -> bool {
        use crate::slot::Orphans;
        let state = self.slots().state(i);
        state >= FIRST_LEASE && self.leases().while_orphaned(state - FIRST_LEASE, || ()).is_none()
    }

    /// Gives a sample back that `begin` gave to the caller.
    pub fn abandon(&self, i: usize) {
        if let Some(lease) = self.leases().mine(&self.slots()) {
            self.slots().abandon(i, lease);
        }
    }

    /// Stores the record of a sample that `begin` gave to the caller; ends the claim in any case.
    pub fn fill(&self, i: usize, schema: u16, parts: &[IoSlice<'_>]) -> Result<Filled> {
        let slots = self.slots();
        let Some(lease) = self.leases().mine(&slots) else {
            return Ok(Filled::Lost); // a forked child without a lease: the claim was its parent's
        };
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if len > self.longest() {
            slots.abandon(i, lease);
            self.counters().add(Count::TooLarge, 1);
            return Ok(Filled::TooLarge);
        }
        let Some(at) = self.lay_down(i, lease, schema, len) else {
            slots.abandon(i, lease);
            self.counters().add(Count::Dropped, 1);
            return Ok(Filled::Full);
        };
        if broken(Fault::PublishEarly) {
            slots.publish(i, lease);
        }
        if let Err(errno) = self.segment.write_parts(parts, self.layout.data_at + at) {
            slots.abandon(i, lease);
            self.counters().add(Count::Dropped, 1);
            if let Some(error) = Error::unwritable("sample", errno) {
                return Err(error);
            }
            self.frozen_by.store(errno.raw_os_error() as u32, Ordering::Relaxed);
            return Ok(Filled::Refused(self.frozen().swap(1, Ordering::Relaxed) == 0));
        }
        if !slots.publish(i, lease) && !broken(Fault::PublishEarly) {
            self.counters().add(Count::Lost, 1);
            return Ok(Filled::Lost);
        }
        self.counters().add(Count::Fills, 1);
        self.counters().add(Count::Bytes, len);
        Ok(Filled::Stored)
    }

    /// Finds room for a record of `len` bytes, and says in the index that it is taken.
    fn lay_down(&self, i: usize, lease: u8, schema: u16, len: u64) -> Option<u64> {
        let info = len | u64::from(schema) << LENGTH_BITS;
        let room = len.next_multiple_of(RECORD_ALIGN).max(RECORD_ALIGN);
        // Each round, the active region is full or another one became active.
        for _ in 0..4 * self.room.regions {
            let r = self.head(ACTIVE).load(Ordering::SeqCst);
            if r >= self.room.regions {
                self.next_region(r, lease)?;
                continue;
            }
            // SYNC POINT intent: SeqCst here and in `recycle`, see the head of this file.
            self.place(i).store(INTENT | r, Ordering::SeqCst);
            if self.head(ACTIVE).load(Ordering::SeqCst) != r {
                continue;
            }
            let cursor = self.region(r, CURSOR);
            let end = self.room.region_bytes();
            let taken = cursor.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
                at.checked_add(room).filter(|&next| next <= end)
            });
            if let Ok(at) = taken {
                let at = r * end + at;
                self.info(i).store(info, Ordering::Relaxed);
                self.place(i).store(at / RECORD_ALIGN + 1, Ordering::SeqCst);
                return Some(at);
            }
            self.place(i).store(0, Ordering::SeqCst);
            self.next_region(r, lease)?;
        }
        None
    }

    /// Makes another region active than `full`. None if there is none to be had.
    fn next_region(&self, full: u64, lease: u8) -> Option<()> {
        if self.is_stable() && full != NONE {
            return None;
        }
        self.locked(self.lock_of_regions(), lease, || {
            if self.head(ACTIVE).load(Ordering::SeqCst) != full {
                return Some(()); // somebody was faster
            }
            let tick = self.head(TICK).fetch_add(1, Ordering::Relaxed) + 1;
            let mut candidates: Vec<u64> = (0..self.room.regions).filter(|&r| r != full).collect();
            let word = |r, word| self.region(r, word).load(Ordering::Relaxed);
            // Empty ones first, then by last use, then by age.
            // Each key is read once: others change them meanwhile.
            candidates
                .sort_by_cached_key(|&r| (word(r, CURSOR) != 0, word(r, USED), word(r, BORN)));
            let next = candidates.into_iter().find(|&r| self.recycle(r, lease))?;
            self.region(next, USED).store(tick, Ordering::Relaxed);
            self.region(next, BORN).store(tick, Ordering::Relaxed);
            self.head(ACTIVE).store(next, Ordering::SeqCst);
            Some(())
        })?
    }

    /// Empties region `r`, which is not active. False if somebody is writing to it.
    fn recycle(&self, r: u64, lease: u8) -> bool {
        let slots = self.slots();
        let samples = self.room.dataset_len as usize;
        // SYNC POINT intent: SeqCst here and in `lay_down`.
        let points_here =
            |i: usize| self.region_of(self.place(i).load(Ordering::SeqCst)) == Some(r);
        for i in 0..samples {
            if slots.state(i) >= FIRST_LEASE && points_here(i) {
                // The dead do not write any more, so their claim can go.
                match slots.claim(i, lease, false, &self.leases()) {
                    Claim::Claimed => {
                        self.place(i).store(0, Ordering::SeqCst);
                        slots.abandon(i, lease);
                    }
                    Claim::Busy if !broken(Fault::RecycleInUse) => return false,
                    _ => {}
                }
            }
        }
        let mut evicted = 0;
        slots.clear(lease, |i| i < samples && points_here(i), |_| evicted += 1);
        self.counters().add(Count::Evicted, evicted);
        self.region(r, CURSOR).store(0, Ordering::Relaxed);
        true
    }

    fn region_of(&self, place: u64) -> Option<u64> {
        match place {
            0 => None,
            place if place & INTENT != 0 => Some(place & !INTENT),
            place => Some((place - 1) * RECORD_ALIGN / self.room.region_bytes()),
        }
    }

    /// Runs `act` as the only one, under a lock that ends with its holder. None if others keep it.
    fn locked<R>(&self, lock: usize, lease: u8, act: impl FnOnce() -> R) -> Option<R> {
        let began = Instant::now();
        while self.slots().claim(lock, lease, false, &self.leases()) != Claim::Claimed {
            if began.elapsed() > LOCK_PATIENCE {
                return None;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        let result = act();
        self.slots().abandon(lock, lease);
        Some(result)
    }

    /// Empties the store and takes records again. What others are writing at this moment stays.
    pub fn clear(&self) -> Result<()> {
        let slots = self.slots();
        let busy = || {
            Error::new(Kind::State, "others keep this cache from being cleared; try again later")
        };
        let lease = self.leases().mine(&slots).ok_or_else(busy)?;
        self.locked(self.lock_of_regions(), lease, || {
            // From here on nobody begins to write, so that every region can be emptied.
            self.head(ACTIVE).store(NONE, Ordering::SeqCst);
            let mut free = None;
            for r in 0..self.room.regions {
                if self.recycle(r, lease) {
                    free = free.or(Some(r));
                }
            }
            slots.clear(lease, |i| i < self.room.dataset_len as usize, |_| {});
            // Where somebody is writing to the only region, its room is regained by the next clear.
            self.head(ACTIVE).store(free.unwrap_or(0), Ordering::SeqCst);
        })
        .ok_or_else(busy)?;
        self.frozen().store(0, Ordering::Relaxed);
        Ok(())
    }

    // Schemas

    /// The number of this schema, kept once for all records. None if there is no room for it.
    pub fn intern(&self, schema: &[u8]) -> Option<u16> {
        if let Some(known) = self.schemas().position(|known| known == schema) {
            return u16::try_from(known).ok();
        }
        let need = 4 + schema.len().next_multiple_of(4);
        let lease = self.leases().mine(&self.slots())?;
        self.locked(self.lock_of_schemas(), lease, || {
            // Again: somebody may have added it.
            let mut known = self.schemas();
            if let Some(number) = known.position(|known| known == schema) {
                return u16::try_from(number).ok();
            }
            let number = self.schemas().count();
            let used = self.schemas_used().load(Ordering::Relaxed) as usize;
            if number >= usize::from(INLINE) || used + need > (SCHEMA_BYTES - 8) as usize {
                return None;
            }
            let at = self.layout.schemas_at as usize + 8 + used;
            self.mapping().write(at, &(schema.len() as u32).to_le_bytes());
            self.mapping().write(at + 4, schema);
            // SYNC POINT schema: Release here, Acquire in `schemas`: who sees the length sees the
            // bytes, and a dead writer's half is never seen.
            self.schemas_used().store((used + need) as u64, Ordering::Release);
            u16::try_from(number).ok()
        })?
    }

    /// The schema of that number.
    pub fn schema(&self, number: u16) -> Option<Vec<u8>> {
        self.schemas().nth(usize::from(number))
    }

    fn schemas_used(&self) -> &AtomicU64 {
        &self.mapping().words(self.layout.schemas_at as usize, 1)[0]
    }

    fn schemas(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let end = self.schemas_used().load(Ordering::Acquire).min(SCHEMA_BYTES - 8) as usize;
        let bytes = self.mapping().bytes(self.layout.schemas_at as usize + 8, end);
        let read = move |from: usize, len: usize| -> Option<Vec<u8>> {
            let part = bytes.get(from..from.checked_add(len)?)?;
            Some(part.iter().map(|byte| byte.load(Ordering::Relaxed)).collect())
        };
        let mut at = 0;
        std::iter::from_fn(move || {
            let len = u32::from_le_bytes(read(at, 4)?.try_into().ok()?) as usize;
            let schema = read(at + 4, len)?;
            at += 4 + len.next_multiple_of(4);
            Some(schema)
        })
    }

    // What it did

    /// Sums over all processes.
    pub fn stats(&self) -> StoreStats {
        let sum = |count| self.counters().sum(count);
        let samples = self.room.dataset_len as usize;
        let slots = self.slots();
        StoreStats {
            hits: sum(Count::Hits),
            misses: sum(Count::Misses),
            fills: sum(Count::Fills),
            bytes: sum(Count::Bytes),
            waits: sum(Count::Waits),
            lost: sum(Count::Lost),
            dropped: sum(Count::Dropped),
            loads: sum(Count::Loads),
            load_nanos: sum(Count::LoadNanos),
            too_large: sum(Count::TooLarge),
            evicted: sum(Count::Evicted),
            filled: (0..samples).filter(|&i| slots.state(i) == SET).count() as u64,
            used_bytes: (0..self.room.regions)
                .map(|r| self.region(r, CURSOR).load(Ordering::Relaxed))
                .sum(),
            data_bytes: self.room.data_bytes,
            frozen: self.frozen().load(Ordering::Relaxed) != 0,
        }
    }

    /// Why the store froze, for the one warning.
    pub fn frozen_reason(&self) -> String {
        frozen_reason(self.segment.name(), "", self.frozen_by.load(Ordering::Relaxed) as i32)
    }
}
