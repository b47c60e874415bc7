//! The record store: records of any size, one per sample, found by index.
//!
//! ```text
//!   state[i]    the claim of claim.rs: empty, or claimed by the holder of a lease
//!   index[i]    where the record is, and in which generation of its region (index.rs)
//!   region      a stretch of the data that is filled, and emptied as a whole (regions.rs)
//! ```
//!
//! A sample is claimed *before* it is loaded, so that one process loads it and the others wait.
//! Its record is then laid down where the cursor of the active region stands, and published in the
//! index. A store with one region fills up and stays as it is ("freeze"); with several ("lru"), the
//! region that was not used for longest is emptied when the active one is full. `clear` empties all.
//!
//! So no record stays for ever, and readers copy: the generation of the region says afterwards
//! whether what was copied was whole. There is no free list that a crash could damage: what the dead
//! leave is a claim, which others take over, and a gap, which goes with its region.

use super::base::RecordStore;
use super::heads::{HEAD_BYTES, pack_head, room_for};
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::segment::claim::{self, Lease, Slots, claimed_by};
use crate::segment::counters::Count;
use crate::space::{self, Firm, Ground, MAX_RECORD, Record};
use std::io::IoSlice;
use std::time::Duration;

/// How often a copy is tried again while others empty the region under it.
const TRIES: usize = 8;

/// What to do about a sample that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is the caller's to load; `fill` or `abandon` it.
    LoadAndStore,
    /// It has come meanwhile.
    Present,
    /// Somebody who lives is loading it: `wait`, or load it too and do not store it.
    LoadingElsewhere,
    /// The store takes nothing now: load it, and keep it.
    LoadOnly,
}

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It can be read now.
    Stored,
    /// It is not to be stored: the claim was another process's, which stores it, or all was emptied since it was
    /// loaded.
    StoredElsewhere,
    /// There is no room for it, now.
    NoRoom,
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
    /// Samples that a program's own function changed as they were handed out.
    pub transforms: u64,
    /// Nanoseconds that took.
    pub transform_nanos: u64,
    pub too_large: u64,
    pub evicted: u64,
    pub unsupported: u64,
    pub cluster_hits: u64,
    pub cluster_misses: u64,
    pub cluster_fills: u64,
    pub cluster_dropped: u64,
    pub cluster_errors: u64,
    /// Samples that are there at this moment.
    pub filled: u64,
    /// Bytes laid down, gaps included.
    pub used_bytes: u64,
    /// Bytes there are for records.
    pub data_bytes: u64,
    /// No more records are taken until `clear`.
    pub frozen: bool,
}

impl RecordStore {
    /// The longest record that can ever be stored.
    pub fn longest(&self) -> u64 {
        self.geometry().region_bytes().saturating_sub(HEAD_BYTES).min(MAX_RECORD)
    }

    /// The index, if the dataset has such a sample.
    pub fn index(&self, index: i64) -> Option<usize> {
        u64::try_from(index).ok().filter(|&i| i < self.geometry().dataset_len).map(|i| i as usize)
    }

    // Reading

    /// Has the processor fetch what the index knows of sample `i`, for a `find` that will come.
    #[inline]
    pub fn prefetch(&self, i: usize) {
        self.space().prefetch(i);
    }

    /// Where the record of sample `i` is. Its bytes may change at any time: copy them, then ask
    /// `is_whole`. Counts nothing.
    #[inline]
    pub fn find(&self, i: usize) -> Option<Record> {
        self.space().find(i)
    }

    /// Whether all that was read of this record until now was the record.
    #[inline]
    pub fn is_whole(&self, region: u32, generation: u32) -> bool {
        self.space().is_whole(region, generation)
    }

    /// How often all was emptied, whoever called `clear`.
    #[inline]
    pub fn emptied(&self) -> u64 {
        self.space().emptied()
    }

    /// Runs `copy` on the record of sample `i`; `Some` only if it did not change meanwhile. What
    /// `copy` sees may be anything until then: it must not trust a byte of it.
    pub fn read<R>(&self, i: usize, mut copy: impl FnMut(Record) -> R) -> Option<R> {
        for _ in 0..TRIES {
            let found = self.find(i)?;
            let copied = copy(found);
            if self.is_whole(found.region, found.generation) {
                return Some(copied);
            }
        }
        None
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

    // Writing

    /// Says who loads sample `i`.
    pub fn begin(&self, i: usize) -> Claim {
        self.begin_as(i, || self.lease())
    }

    /// The same for who begins with several: to ask for the lease is most of what it costs.
    pub(crate) fn begin_as(&self, i: usize, lease: impl FnOnce() -> Option<Lease>) -> Claim {
        if self.segment().is_frozen() {
            return Claim::LoadOnly;
        }
        if self.find(i).is_some() {
            return Claim::Present;
        }
        let Some(lease) = lease() else { return Claim::LoadOnly };
        match self.slots().claim(i, lease, false, &self.leases()) {
            // Somebody may have stored it before we had the claim, also who died before it ended.
            claim::Claim::Claimed if self.find(i).is_some() => {
                self.slots().abandon(i, lease);
                Claim::Present
            }
            claim::Claim::Claimed => Claim::LoadAndStore,
            claim::Claim::Busy => Claim::LoadingElsewhere,
            // States of this store are empty or claimed; whatever says otherwise is not ours.
            claim::Claim::Occupied | claim::Claim::Beyond => Claim::LoadOnly,
        }
    }

    /// Whether the program closed our descriptor: then what is there can be read, and nothing stored.
    pub fn is_cut_off(&self) -> bool {
        !self.segment().anchor().is_ours()
    }

    /// Gives a sample back that `begin` gave to the caller. Where the lease is another process's by now, that
    /// one may load it twice.
    pub fn abandon(&self, i: usize) {
        if let Some(lease) = self.leases().taken() {
            self.slots().abandon(i, lease);
        }
    }

    /// Stores the record of a sample that `begin` gave to the caller; ends the claim in any case.
    pub fn fill(&self, i: usize, schema: u16, parts: &[IoSlice<'_>]) -> Result<Put> {
        self.fill_since(i, schema, parts, None)
    }

    /// The same. What was loaded when `emptied` was another number than `since` is not stored.
    pub(crate) fn fill_since(
        &self,
        i: usize,
        schema: u16,
        parts: &[IoSlice<'_>],
        since: Option<u64>,
    ) -> Result<Put> {
        // Also if it panics, which the bridge makes an error.
        struct Ends<'a>(Option<(Slots<'a>, Lease)>, usize);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                if let Some((slots, lease)) = &self.0 {
                    slots.abandon(self.1, *lease);
                }
            }
        }
        let _ends = Ends(self.own_claim(i).map(|lease| (self.slots(), lease)), i);
        self.fill_claimed(i, schema, parts, since, &Firm)
    }

    /// This process's lease, if it has claimed sample `i` under it. A forked child may come with a claim
    /// of its parent's, who alone may touch the entry.
    fn own_claim(&self, i: usize) -> Option<Lease> {
        self.lease().filter(|&lease| self.slots().state(i) == claimed_by(lease))
    }

    /// The same, and the claim stays: `abandon` ends it. `ground` is asked before a region is emptied. What
    /// was fetched when `emptied` was another number than `since` is not stored.
    pub(crate) fn fill_claimed(
        &self,
        i: usize,
        schema: u16,
        parts: &[IoSlice<'_>],
        since: Option<u64>,
        ground: &dyn Ground,
    ) -> Result<Put> {
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let put = if len > self.longest() {
            Ok(Put::TooLarge)
        } else if self.has_no_room(len) {
            Ok(Put::NoRoom)
        } else if let Some(lease) = self.own_claim(i) {
            self.store(i, lease, schema, parts, since, ground)
        } else {
            self.counters().add(Count::Lost, 1);
            return Ok(Put::StoredElsewhere);
        };
        match put {
            Ok(Put::Stored) => {}
            Ok(Put::TooLarge) => self.counters().add(Count::TooLarge, 1),
            _ => self.counters().add(Count::Dropped, 1),
        }
        put
    }

    /// Whether a record of so many bytes is known to find no room. To ask for the lease, which is most of what
    /// storing costs then, would be in vain.
    pub(crate) fn has_no_room(&self, len: u64) -> bool {
        let left = || self.geometry().data_bytes.saturating_sub(self.space().used_in(0));
        let is_full = !self.recycles() && self.space().is_full();
        len > self.longest() || is_full && left() < room_for(len)
    }

    /// Stores the record of a claimed sample; the claim stays.
    fn store(
        &self,
        i: usize,
        lease: Lease,
        schema: u16,
        parts: &[IoSlice<'_>],
        since: Option<u64>,
        ground: &dyn Ground,
    ) -> Result<Put> {
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let space = self.space();
        let Ok(reserved) = space.reserve(lease, room_for(len), 0, ground) else {
            return Ok(Put::NoRoom);
        };
        if since.is_some_and(|since| since != space.emptied()) && !broken(Fault::OutliveClear) {
            return Ok(Put::StoredElsewhere); // this room is not of then
        }
        let head = pack_head(i as u64, len, schema);
        let words = space::pack(reserved.at + HEAD_BYTES, len, schema, reserved.generation);
        space.announce(i, words);
        if broken(Fault::PublishEarly) {
            space.publish(i, words);
        }
        let parts: Vec<IoSlice<'_>> =
            [IoSlice::new(&head)].into_iter().chain(parts.iter().copied()).collect();
        let at = self.layout().data_at + reserved.at;
        if let Err(errno) = self.segment().write_parts(&parts, at) {
            if let Some(error) = Error::unwritable("sample", errno) {
                return Err(error);
            }
            return Ok(Put::Refused(self.segment().freeze(errno)));
        }
        space.count_record(reserved.region, reserved.generation);
        space.publish(i, words);
        self.counters().add(Count::Fills, 1);
        self.counters().add(Count::Bytes, len);
        Ok(Put::Stored)
    }

    /// Empties the store and takes records again. Costs the same whatever it holds.
    pub fn clear(&self) -> Result<()> {
        let busy = || {
            Error::new(Kind::State, "others keep this cache from being cleared; try again later")
        };
        let lease =
            self.lease().ok_or_else(|| if self.is_cut_off() { Error::closed() } else { busy() })?;
        if !self.space().empty_all(lease, &Firm).ok_or_else(busy)? {
            return Err(Error::new(
                Kind::State,
                format!(
                    "this cache was emptied {} times, which is as often as it can be; make a new one",
                    space::LAST_GENERATION - 1
                ),
            ));
        }
        self.segment().thaw();
        Ok(())
    }

    // What it did

    /// Counts look-ups.
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

    /// Counts samples that a program's own function changed.
    pub fn note_transforms(&self, samples: u64, took: Duration) {
        self.counters().add(Count::Transforms, samples);
        self.counters().add(Count::TransformNanos, took.as_nanos() as u64);
    }

    /// Counts samples that cannot be stored.
    pub fn note_unsupported(&self, samples: u64) {
        self.counters().add(Count::Unsupported, samples);
    }

    /// Whether the caller is the first, of all processes, to tell the user `what` (0 to 31).
    pub fn is_first_to_tell(&self, what: u32) -> bool {
        self.segment().is_first_to_tell(1 << (what % 32))
    }

    /// Sums over all processes.
    pub fn stats(&self) -> StoreStats {
        let sum = |count| self.counters().sum(count);
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
            transforms: sum(Count::Transforms),
            transform_nanos: sum(Count::TransformNanos),
            too_large: sum(Count::TooLarge),
            evicted: sum(Count::Evicted),
            unsupported: sum(Count::Unsupported),
            cluster_hits: sum(Count::ClusterHits),
            cluster_misses: sum(Count::ClusterMisses),
            cluster_fills: sum(Count::ClusterFills),
            cluster_dropped: sum(Count::ClusterDropped),
            cluster_errors: sum(Count::ClusterErrors),
            filled: self.space().filled(),
            used_bytes: self.space().used_bytes(),
            data_bytes: self.geometry().data_bytes,
            frozen: self.segment().is_frozen(),
        }
    }

    /// Hits and misses of the processes that count for that rank (`count_for`).
    pub fn look_ups_of(&self, rank: u32) -> (u64, u64) {
        let of = |count| self.counters().of_rank(rank, count);
        (of(Count::Hits), of(Count::Misses))
    }

    /// Why the store froze, for the one warning.
    pub fn frozen_reason(&self) -> String {
        self.segment().frozen_reason("")
    }
}
