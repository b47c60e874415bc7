//! Regions: stretches of the data in which records are laid down one after the other.
//!
//! ```text
//!   active        the region that is being filled; NONE while somebody empties all, and after that
//!                 until a region is free
//!   generation    of a region: raised when it is emptied, so that every record in it is gone at once
//!   cursor        where its next record begins
//!   held          how many records it holds, under the generation that they belong to
//!   writers       per lease a word of eight bytes: in which regions (+ 1) its process is writing
//! ```
//!
//! Emptying a region is one step, whatever it holds: its generation is raised. Entries of the index
//! that name the old one are out of date, and nobody need look for them. Who copies a record reads
//! the generation before and after: if it did not move, the copy is whole.
//!
//! # When may the room of a region be used again?
//! When nobody is about to write to it. A writer says in which region it will write *before* it moves
//! the cursor, then looks again whether that region is still active; who empties a region has made
//! another one active before, or none, and looks at what writers say. One of the two sees the other
//! (both use SeqCst). A writer that lives keeps the room of its region; what the dead said goes.
//!
//! # How many records are there?
//! A record is counted before it can be found. A writer that dies in between leaves its word, so that
//! whoever meets it doubts the count of that region; who wants to know then counts anew, by the index.

use super::base::{LOCK_PATIENCE, RecordStore};
use super::format::{HEAD_BYTES, LAST_GENERATION, Record, pack_count, unpack_count, unpack_head};
use crate::fault::{Fault, active as broken, reached};
use crate::segment::claim::{LEASES, Lease, Orphans};
use crate::segment::counters::Count;
use crate::segment::layout::{RECORD_ALIGN, RecordsGeometry};
use crate::sys::mapping::Mapping;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// So much of a region is read at once to find its records; a page costs as much as a head.
const BLOCK: usize = 4096;
/// No region is active: somebody is emptying all of them, or died doing so, or all were being written
/// to then. Who needs room chooses one.
const NONE: u64 = u64::MAX;

/// Words of all regions together.
const ACTIVE: usize = 0;
const TICK: usize = 1;
const HEAD_WORDS: usize = 2;
/// Words of one region. Those that every reader looks at are not on the line of the writers' words.
const RAISED: usize = 0;
const USED: usize = 1;
const BORN: usize = 2;
const CURSOR: usize = 8;
const HELD: usize = 9;
const DOUBTS: usize = 10;
const SETTLED: usize = 11;
const REGION_WORDS: usize = 12;

/// How many records a store holds, as they were counted, without opening it: for a look from outside.
pub fn count_records(geometry: &RecordsGeometry, mapping: &Mapping) -> Option<u64> {
    let layout = geometry.layout().ok()?;
    let held = |r| {
        let words = mapping.words(layout.region_at(r), REGION_WORDS);
        let (generation, count) = unpack_count(words[HELD].load(Ordering::Relaxed));
        if generation == words[RAISED].load(Ordering::Relaxed) as u32 + 1 { count } else { 0 }
    };
    Some((0..geometry.regions).map(held).sum())
}

/// What a record of `len` bytes takes. Also one without any has a byte of its region.
fn room_for(len: u64) -> u64 {
    HEAD_BYTES + len.next_multiple_of(RECORD_ALIGN).max(RECORD_ALIGN)
}

/// Room for a record, and the right to write there while this lives.
pub(super) struct Reserved<'a> {
    _writing: Writing<'a>,
    /// Its head, from the first byte of all records.
    pub(super) at: u64,
    pub(super) region: u64,
    pub(super) generation: u32,
}

/// The word of a thread that it is writing to a region.
struct Writing<'a> {
    row: &'a AtomicU64,
    byte: u32,
}

impl<'a> Writing<'a> {
    /// None if eight threads of this process are writing already.
    fn say(row: &'a AtomicU64, region: u64) -> Option<Self> {
        let mut byte = 0;
        // SYNC POINT writing: SeqCst here and in `is_written`, see the head of this file.
        row.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |said| {
            byte = said.to_le_bytes().iter().position(|&byte| byte == 0)? as u32;
            Some(said | (region + 1) << (8 * byte))
        })
        .ok()
        .map(|_| Self { row, byte })
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        // SYNC POINT written: Release here, SeqCst in `is_written`: who sees that nobody writes any
        // more sees what was written.
        self.row.fetch_and(!(0xff << (8 * self.byte)), Ordering::Release);
    }
}

impl RecordStore {
    fn head(&self, word: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout().regions_at as usize, HEAD_WORDS)[word]
    }

    fn region(&self, r: u64, word: usize) -> &AtomicU64 {
        &self.mapping().words(self.layout().region_at(r), REGION_WORDS)[word]
    }

    fn writers(&self) -> &[AtomicU64] {
        self.mapping().words(self.layout().writers_at as usize, usize::from(LEASES))
    }

    // Reading

    /// The generation of a region; the first is 1.
    #[inline]
    pub(super) fn generation(&self, r: u64, order: Ordering) -> u32 {
        self.region(r, RAISED).load(order) as u32 + 1
    }

    /// Notes that region `r` is in use.
    #[inline]
    pub(super) fn touch(&self, r: u64) {
        if self.recycles() {
            let tick = self.head(TICK).load(Ordering::Relaxed);
            let used = self.region(r, USED);
            if used.load(Ordering::Relaxed) != tick {
                used.store(tick, Ordering::Relaxed);
            }
        }
    }

    // Writing

    /// This process's lease; what a dead holder of it left is put right at the first call.
    pub(super) fn lease(&self) -> Option<Lease> {
        self.leases().mine_after(|| self.slots(), |lease| self.forget_writer(lease))
    }

    /// Finds room for a record of `len` bytes and its head. None if there is none to be had.
    pub(super) fn reserve(&self, lease: Lease, len: u64) -> Option<Reserved<'_>> {
        let room = room_for(len);
        let end = self.geometry().region_bytes();
        let began = Instant::now();
        // Each round, the active region is full or another one became active.
        let mut rounds = 4 * self.geometry().regions;
        while rounds > 0 {
            let r = self.head(ACTIVE).load(Ordering::SeqCst);
            if r >= self.geometry().regions {
                if self.next_region(r, lease).is_some() {
                    rounds -= 1;
                } else if began.elapsed() > LOCK_PATIENCE {
                    return None;
                } else {
                    std::thread::sleep(Duration::from_micros(50)); // who writes there is soon done
                }
                continue;
            }
            let Some(writing) = Writing::say(&self.writers()[usize::from(lease)], r) else {
                if began.elapsed() > LOCK_PATIENCE {
                    return None;
                }
                std::thread::yield_now();
                continue;
            };
            rounds -= 1;
            // SYNC POINT writing: SeqCst here and in `next_region` and `empty_all`.
            if self.head(ACTIVE).load(Ordering::SeqCst) != r {
                continue;
            }
            reached("regions: active");
            let generation = self.generation(r, Ordering::Acquire);
            let taken =
                self.region(r, CURSOR).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
                    at.checked_add(room).filter(|&next| next <= end)
                });
            if let Ok(at) = taken {
                // SYNC POINT changed: orders every raise that we have seen before our bytes, also
                // those that the kernel copies; see `is_whole`.
                fence(Ordering::SeqCst);
                return Some(Reserved {
                    _writing: writing,
                    at: r * end + at,
                    region: r,
                    generation,
                });
            }
            drop(writing); // or we would keep the region ourselves
            self.next_region(r, lease)?;
        }
        None
    }

    /// Counts a record that is about to be found; not if its region was emptied meanwhile.
    pub(super) fn count_record(&self, r: u64, generation: u32) {
        // Relaxed: a count orders nothing; who counts anew looks at the writers first.
        let _emptied =
            self.region(r, HELD).fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
                match unpack_count(held) {
                    (counted, _) if counted > generation => None,
                    (counted, count) if counted == generation => {
                        Some(pack_count(counted, count + 1))
                    }
                    _ => Some(pack_count(generation, 1)),
                }
            });
    }

    /// Makes another region active than `full`. None if there is none to be had.
    fn next_region(&self, full: u64, lease: Lease) -> Option<()> {
        if !self.recycles() && full != NONE {
            return None;
        }
        self.locked(self.lock_of_regions(), lease, || {
            if self.head(ACTIVE).load(Ordering::SeqCst) != full {
                return Some(()); // somebody was faster
            }
            let tick = self.head(TICK).fetch_add(1, Ordering::Relaxed) + 1;
            let mut candidates: Vec<u64> =
                (0..self.geometry().regions).filter(|&r| r != full).collect();
            let word = |r, word| self.region(r, word).load(Ordering::Relaxed);
            // Empty ones first, then by last use, then by age.
            // Each key is read once: others change them meanwhile.
            candidates
                .sort_by_cached_key(|&r| (word(r, CURSOR) != 0, word(r, USED), word(r, BORN)));
            let next = candidates.into_iter().find(|&r| self.recycle(r))?;
            self.region(next, USED).store(tick, Ordering::Relaxed);
            self.region(next, BORN).store(tick, Ordering::Relaxed);
            self.head(ACTIVE).store(next, Ordering::SeqCst);
            Some(())
        })?
    }

    // Emptying

    /// Empties region `r`, which is not active, to use its room again. False if that cannot be.
    fn recycle(&self, r: u64) -> bool {
        if self.is_written(r) {
            return false;
        }
        let held = self.held(r);
        if !self.raise(r) {
            return false;
        }
        self.counters().add(Count::Evicted, held);
        self.region(r, CURSOR).store(0, Ordering::Relaxed);
        true
    }

    /// Empties all regions. False if one was emptied too often to be emptied again.
    pub(super) fn empty_all(&self, lease: Lease) -> Option<bool> {
        self.locked(self.lock_of_regions(), lease, || {
            // From here on nobody begins to write.
            let before = self.head(ACTIVE).swap(NONE, Ordering::SeqCst);
            let (mut free, mut kept) = (None, None);
            for r in 0..self.geometry().regions {
                // Asked before the raise: who is done by now took the old generation with it, and who
                // is not may take the new one, and must keep its room.
                let mut written = self.is_written(r);
                let raised = self.raise(r);
                reached("regions: raised");
                if broken(Fault::RaiseThenAsk) {
                    written = self.is_written(r);
                }
                if !raised {
                    kept = kept.or(Some(r));
                } else if !written {
                    self.region(r, CURSOR).store(0, Ordering::Relaxed);
                    free = free.or(Some(r));
                }
                // Else its records are gone, but not yet the room: who wants it looks again.
            }
            // What could not be emptied goes on as it was.
            let active = free.or(kept.filter(|&r| r == before));
            let none = if broken(Fault::LoseRoom) { 0 } else { NONE };
            self.head(ACTIVE).store(active.unwrap_or(none), Ordering::SeqCst);
            kept.is_none()
        })
    }

    /// Says that every record of region `r` is gone. False if it has no generation left.
    fn raise(&self, r: u64) -> bool {
        let last = u64::from(LAST_GENERATION) - 1;
        // SYNC POINT generation: Release here, Acquire in `find`.
        let raised =
            self.region(r, RAISED).fetch_update(Ordering::AcqRel, Ordering::Relaxed, |raised| {
                (raised < last).then_some(raised + 1)
            });
        // SYNC POINT changed: orders the raise before bytes that come; see `is_whole`.
        fence(Ordering::SeqCst);
        raised.is_ok()
    }

    /// As if region `r` had been emptied so many times more.
    #[cfg(test)]
    pub(super) fn skip_generations(&self, r: u64, times: u64) {
        self.region(r, RAISED).fetch_add(times, Ordering::Relaxed);
    }

    /// Whether a living process is writing to region `r`. Forgets what the dead said.
    fn is_written(&self, r: u64) -> bool {
        self.writers().iter().zip(0..LEASES).any(|(row, lease)| {
            // SYNC POINT writing: SeqCst here and in `Writing::say`.
            let said = row.load(Ordering::SeqCst);
            said != 0
                && said.to_le_bytes().contains(&((r + 1) as u8))
                && !broken(Fault::RecycleInUse)
                && self.leases().while_orphaned(lease, || self.forget_writer(lease)).is_none()
        })
    }

    /// Forgets what a dead holder of `lease` said. Its lease must be held meanwhile.
    pub(super) fn forget_writer(&self, lease: Lease) {
        let row = &self.writers()[usize::from(lease)];
        for byte in row.load(Ordering::SeqCst).to_le_bytes() {
            if let Some(r) = u64::from(byte).checked_sub(1).filter(|&r| r < self.geometry().regions)
            {
                // It may have counted a record that nobody will find.
                self.region(r, DOUBTS).fetch_add(1, Ordering::SeqCst);
            }
        }
        row.store(0, Ordering::SeqCst);
    }

    // What there is

    /// The records of region `r`, each with the number of its sample, in the order in which they lie
    /// there. Costs what the region holds, and a look per 16 bytes of what the dead left between. As
    /// with `find`, they may be gone when they are looked at; to look for them is no use of the region.
    pub fn records_in(&self, r: u64) -> impl Iterator<Item = (usize, Record)> + '_ {
        let (first, bytes) = (r * self.geometry().region_bytes(), self.geometry().region_bytes());
        let end = first + self.region(r, CURSOR).load(Ordering::Acquire).min(bytes);
        let mut at = first;
        let (mut block, mut block_at, mut read) = (vec![0; BLOCK], first, 0);
        std::iter::from_fn(move || {
            while at + HEAD_BYTES < end {
                let here = self.layout().data_at + at;
                if (at - block_at) as usize + HEAD_BYTES as usize > read {
                    block_at = at;
                    read = self.segment().read(&mut block, here);
                    if read < HEAD_BYTES as usize {
                        return None;
                    }
                }
                let (key, len, schema) = unpack_head(&block[(at - block_at) as usize..]);
                let found = self.index(key as i64).and_then(|i| {
                    let record = self.indexed(i)?;
                    let generation = self.generation(record.region.into(), Ordering::Acquire);
                    (generation == record.generation).then_some((i, record))
                });
                match found {
                    Some((i, record))
                        if broken(Fault::TrustHeads)
                            || record.at as u64 == here + HEAD_BYTES
                                && (record.len as u64, record.schema) == (len, schema) =>
                    {
                        at += room_for(len);
                        return Some((i, record));
                    }
                    // A gap that the dead left, or a record that is gone.
                    _ => at += RECORD_ALIGN,
                }
            }
            None
        })
    }

    /// Bytes laid down, gaps included.
    pub(super) fn used_bytes(&self) -> u64 {
        let used = |r| self.region(r, CURSOR).load(Ordering::Relaxed);
        (0..self.geometry().regions).map(used).sum()
    }

    /// How many records there are.
    pub(super) fn filled(&self) -> u64 {
        let regions = 0..self.geometry().regions;
        let counted: Vec<u64> =
            regions.clone().map(|r| self.region(r, HELD).load(Ordering::SeqCst)).collect();
        // Who begins to write after this look changes what was counted.
        let nobody_writes = self.writers().iter().all(|row| row.load(Ordering::SeqCst) == 0);
        regions.zip(counted).map(|(r, counted)| self.count_of(r, counted, nobody_writes)).sum()
    }

    /// How many records of its present generation a region holds, as they were counted.
    fn held(&self, r: u64) -> u64 {
        let (generation, count) = unpack_count(self.region(r, HELD).load(Ordering::SeqCst));
        if generation == self.generation(r, Ordering::Acquire) { count } else { 0 }
    }

    /// The same, without those that the dead counted and nobody finds.
    fn count_of(&self, r: u64, counted: u64, nobody_writes: bool) -> u64 {
        let written = !nobody_writes && self.is_written(r); // which forgets the dead
        let doubts = self.region(r, DOUBTS).load(Ordering::SeqCst);
        if self.region(r, SETTLED).load(Ordering::SeqCst) == doubts || broken(Fault::TrustCounts) {
            return self.held(r);
        }
        let generation = self.generation(r, Ordering::Acquire);
        let is_here = |i: &usize| {
            self.indexed(*i)
                .is_some_and(|found| (found.region, found.generation) == (r as u32, generation))
        };
        let found = (0..self.geometry().dataset_len as usize).filter(is_here).count() as u64;
        let agreed = !written
            && self
                .region(r, HELD)
                .compare_exchange(
                    counted,
                    pack_count(generation, found),
                    Ordering::SeqCst,
                    Ordering::Relaxed,
                )
                .is_ok();
        if agreed {
            self.region(r, SETTLED).store(doubts, Ordering::SeqCst);
        }
        found
    }
}
