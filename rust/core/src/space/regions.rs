//! Regions: stretches of the data in which records are laid down one after the other.
//!
//! ```text
//!   active        the region that is being filled; NONE while somebody empties all, and after that
//!                 until a region is free
//!   generation    of a region: raised when it is emptied, so that every record in it is gone at once
//!   cursor        where its next record begins
//!   held          how many records it holds, under the generation that they belong to
//!   writers       per lease a word of eight bytes: in which regions (+ 1) its process is writing
//!   logged        places in the log of a region, if it has one (disk/log.rs)
//!   ready         whether what there was before is known, where there can be something: 0 no, 1 as it was
//!                 then, 2 as it is, because nobody else writes
//!   full          there is no room any more, and none comes by itself
//!   resting       until when nothing is written, by the clock of the node
//!   calls         how often somebody wanted what waits to be written
//!   emptied       how often all was emptied: what was fetched elsewhere before is not laid down after it
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

use super::base::Space;
use super::format::{LAST_GENERATION, pack_count, unpack_count};
use crate::fault::{Fault, active as broken, reached};
use crate::segment::claim::{LEASES, Lease, Orphans};
use crate::segment::counters::Count;
use crate::segment::space_layout::{RECORD_ALIGN, SpaceLayout};
use crate::sys::mapping::Mapping;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// Which of the locks of a segment is that of the regions.
const LOCK: u64 = 0;
/// No region is active: somebody is emptying all of them, or died doing so, or all were being written
/// to then. Who needs room chooses one.
const NONE: u64 = u64::MAX;

/// Words of all regions together.
const ACTIVE: usize = 0;
const TICK: usize = 1;
const READY: usize = 2;
const READY_TO_READ: u64 = 1;
const READY_TO_WRITE: u64 = 2;
const FULL: usize = 3;
const RESTING: usize = 4;
const EMPTIED: usize = 5;
const CALLS: usize = 6;
const HEAD_WORDS: usize = 7;
/// Words of one region. Those that every reader looks at are not on the line of the writers' words.
const RAISED: usize = 0;
const USED: usize = 1;
const BORN: usize = 2;
const CURSOR: usize = 8;
const HELD: usize = 9;
const DOUBTS: usize = 10;
const SETTLED: usize = 11;
const LOGGED: usize = 12;
const REGION_WORDS: usize = 13;

/// How many records a space holds, as they were counted, without opening it: for a look from outside.
pub fn count_records(layout: &SpaceLayout, mapping: &Mapping) -> u64 {
    let held = |r| {
        let words = mapping.words(layout.region_at(r), REGION_WORDS);
        let (generation, count) = unpack_count(words[HELD].load(Ordering::Relaxed));
        if generation == words[RAISED].load(Ordering::Relaxed) as u32 + 1 { count } else { 0 }
    };
    (0..layout.regions).map(held).sum()
}

/// How often somebody wanted what waits to be written: for who has the mapping and not the space.
pub(crate) fn calls(layout: &SpaceLayout, mapping: &Mapping) -> u64 {
    mapping.words(layout.regions_at as usize, HEAD_WORDS)[CALLS].load(Ordering::Relaxed)
}

/// The bytes of regions, as far as choosing a region depends on them. Asked under the lock of regions.
pub(crate) trait Ground {
    /// Whether what region `r` holds in this generation may go.
    fn may_go(&self, _r: u64, _generation: u32) -> bool {
        true
    }

    /// Makes what region `r` needs in its next generation, while it still holds what it does; false if it
    /// cannot be had. Then it cannot be had for others either, and nothing is emptied in vain.
    fn prepare(&self, _r: u64, _next: u32) -> bool {
        true
    }

    /// Takes the room of what region `r` held for its new generation, which was prepared; false if there is
    /// less of it.
    fn settle(&self, _r: u64, _generation: u32) -> bool {
        true
    }

    /// Bytes that a log of so many places takes of its region.
    fn log_bytes(&self, _places: u64) -> u64 {
        0
    }

    /// Whether a region that was emptied may be written to as it is.
    fn is_firm(&self) -> bool {
        true
    }
}

/// Memory that is always there.
pub(crate) struct Firm;
impl Ground for Firm {}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// None is left, and none comes by itself.
    Full,
    /// Others kept it from us for as long as we waited.
    Busy,
    /// The ground does not bear another region now.
    NoGround,
}

/// Room for records, and the right to write there while this lives.
pub(crate) struct Reserved<'a> {
    _writing: Writing<'a>,
    /// From the first byte of the space.
    pub(crate) at: u64,
    pub(crate) region: u64,
    pub(crate) generation: u32,
    /// The first of the places in the log.
    pub(crate) place: u64,
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

impl<'a> Space<'a> {
    fn head(&self, word: usize) -> &'a AtomicU64 {
        &self.mapping().words(self.layout().regions_at as usize, HEAD_WORDS)[word]
    }

    fn region(&self, r: u64, word: usize) -> &'a AtomicU64 {
        &self.mapping().words(self.layout().region_at(r), REGION_WORDS)[word]
    }

    fn writers(&self) -> &'a [AtomicU64] {
        self.mapping().words(self.layout().writers_at as usize, usize::from(LEASES))
    }

    // Reading

    /// The generation of a region; the first is 1.
    #[inline]
    pub(crate) fn generation(&self, r: u64, order: Ordering) -> u32 {
        self.region(r, RAISED).load(order) as u32 + 1
    }

    /// Notes that region `r` is in use.
    #[inline]
    pub(super) fn touch(&self, r: u64) {
        if self.layout().recycles {
            let tick = self.head(TICK).load(Ordering::Relaxed);
            let used = self.region(r, USED);
            if used.load(Ordering::Relaxed) != tick {
                used.store(tick, Ordering::Relaxed);
            }
        }
    }

    // Writing

    /// Finds so many bytes, a multiple of RECORD_ALIGN, and places in the log of their region, if it has one.
    /// Both together never take more than a region has: places are taken first, so that whoever takes room
    /// sees the log as long as it will be.
    pub(crate) fn reserve(
        &self,
        lease: Lease,
        room: u64,
        places: u64,
        ground: &dyn Ground,
    ) -> Result<Reserved<'a>, NoRoom> {
        debug_assert!(room.is_multiple_of(RECORD_ALIGN));
        let end = self.layout().region_bytes();
        let began = Instant::now();
        // Each round, the active region is full or another one became active.
        let mut rounds = 4 * self.layout().regions;
        while rounds > 0 {
            let r = self.head(ACTIVE).load(Ordering::SeqCst);
            if r >= self.layout().regions {
                match self.next_region(r, lease, ground) {
                    Ok(()) => rounds -= 1,
                    Err(NoRoom::Busy) if began.elapsed() <= self.patience() => {
                        // Who writes there is soon done.
                        std::thread::sleep(Duration::from_micros(50));
                    }
                    Err(why) => return Err(why),
                }
                continue;
            }
            let Some(writing) = Writing::say(&self.writers()[usize::from(lease)], r) else {
                if began.elapsed() > self.patience() {
                    return Err(NoRoom::Busy);
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
            // Who empties all makes none active before the raise: if this is the new generation, nothing was
            // prepared for it.
            if !ground.is_firm() && self.head(ACTIVE).load(Ordering::SeqCst) != r {
                continue;
            }
            let logged = self.region(r, LOGGED);
            let place = if places == 0 { 0 } else { logged.fetch_add(places, Ordering::SeqCst) };
            // SYNC POINT logged: SeqCst above and here: of two, the later one sees the places of both.
            let taken =
                self.region(r, CURSOR).fetch_update(Ordering::SeqCst, Ordering::Relaxed, |at| {
                    let log = match places {
                        0 => 0,
                        _ => ground.log_bytes(logged.load(Ordering::SeqCst)),
                    };
                    at.checked_add(room).filter(|next| next.saturating_add(log) <= end)
                });
            if let Ok(at) = taken {
                // SYNC POINT changed: orders every raise that we have seen before our bytes, also
                // those that the kernel copies; see `is_whole`.
                fence(Ordering::SeqCst);
                let at = r * end + at;
                return Ok(Reserved { _writing: writing, at, region: r, generation, place });
            }
            if places > 0 {
                // As if they had not been taken, unless others have taken some since.
                let (ours, order) = (place + places, Ordering::SeqCst);
                let _others = logged.compare_exchange(ours, place, order, Ordering::Relaxed);
            }
            drop(writing); // or we would keep the region ourselves
            self.next_region(r, lease, ground)?;
        }
        Err(NoRoom::Busy)
    }

    /// Counts a record that is about to be found; not if its region was emptied meanwhile.
    pub(crate) fn count_record(&self, r: u64, generation: u32) {
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

    /// The reverse, of a record that is found no more.
    pub(crate) fn uncount_record(&self, r: u64, generation: u32) {
        let less = |held| match unpack_count(held) {
            (counted, count @ 1..) if counted == generation => Some(pack_count(counted, count - 1)),
            _ => None, // emptied meanwhile
        };
        let before = self.region(r, HELD).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if before == Ok(pack_count(generation, 1)) {
            self.set_full(false); // a region without a record can be filled anew
        }
    }

    /// Makes another region active than `full`.
    fn next_region(&self, full: u64, lease: Lease, ground: &dyn Ground) -> Result<(), NoRoom> {
        if full != NONE && self.is_full() {
            return Err(NoRoom::Full);
        }
        let chosen = self.locked(LOCK, lease, || {
            if self.head(ACTIVE).load(Ordering::SeqCst) != full {
                return Ok(()); // somebody was faster
            }
            let tick = self.head(TICK).fetch_add(1, Ordering::Relaxed) + 1;
            let can_be_emptied = |r| self.generation(r, Ordering::Acquire) < LAST_GENERATION;
            let mut candidates: Vec<u64> =
                (0..self.layout().regions).filter(|&r| r != full && can_be_emptied(r)).collect();
            let word = |r, word| self.region(r, word).load(Ordering::Relaxed);
            // Where nothing is to go, only after all was emptied: what was written meanwhile goes, too.
            if !self.layout().recycles && full != NONE {
                candidates.retain(|&r| self.held(r) == 0);
            }
            if candidates.is_empty() {
                // Under the lock: who empties all says the opposite under it.
                self.set_full(true);
                return Err(NoRoom::Full);
            }
            // Empty ones first, then by last use, then by age.
            // Each key is read once: others change them meanwhile.
            candidates
                .sort_by_cached_key(|&r| (word(r, CURSOR) != 0, word(r, USED), word(r, BORN)));
            for next in candidates {
                if self.recycle(next, ground)? {
                    self.region(next, USED).store(tick, Ordering::Relaxed);
                    self.region(next, BORN).store(tick, Ordering::Relaxed);
                    self.head(ACTIVE).store(next, Ordering::SeqCst);
                    return Ok(());
                }
            }
            Err(NoRoom::Busy)
        });
        chosen.unwrap_or(Err(NoRoom::Busy))
    }

    // Emptying

    /// Empties region `r`, which is not active, to use its room again. False if others keep it; an error if
    /// it is in vain to try another one.
    fn recycle(&self, r: u64, ground: &dyn Ground) -> Result<bool, NoRoom> {
        let (held, before) = (self.held(r), self.generation(r, Ordering::Acquire));
        if self.is_written(r) || held > 0 && !ground.may_go(r, before) {
            return Ok(false);
        }
        if broken(Fault::EmptyInVain) && !ground.prepare(r, before + 1) {
            self.raise(r);
            return Ok(false);
        }
        if !ground.prepare(r, before + 1) {
            return Err(NoRoom::NoGround);
        }
        if !self.raise(r) {
            return Ok(false);
        }
        self.counters().add(Count::Evicted, held);
        self.region(r, CURSOR).store(0, Ordering::Relaxed);
        self.region(r, LOGGED).store(0, Ordering::Relaxed);
        if ground.settle(r, before + 1) { Ok(true) } else { Err(NoRoom::NoGround) }
    }

    /// Empties all regions. False if one was emptied too often to be emptied again.
    pub(crate) fn empty_all(&self, lease: Lease, ground: &dyn Ground) -> Option<bool> {
        self.locked(LOCK, lease, || {
            // From here on nobody begins to write.
            let before = self.head(ACTIVE).swap(NONE, Ordering::SeqCst);
            // SYNC POINT emptied: before any `raise`, whose Release carries it to who sees the raise.
            self.head(EMPTIED).fetch_add(1, Ordering::Relaxed);
            let (mut free, mut kept) = (None, None);
            for r in 0..self.layout().regions {
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
                    self.region(r, LOGGED).store(0, Ordering::Relaxed);
                    free = free.or(Some(r));
                }
                // Else its records are gone, but not yet the room: who wants it looks again.
            }
            // What could not be emptied goes on as it was. Where a region must be prepared, who needs room
            // does so: to be killed before that, or to write meanwhile, would be to have none.
            let active = free.filter(|_| ground.is_firm()).or(kept.filter(|&r| r == before));
            let none = if broken(Fault::LoseRoom) { 0 } else { NONE };
            self.head(ACTIVE).store(active.unwrap_or(none), Ordering::SeqCst);
            self.set_full(false);
            kept.is_none()
        })
    }

    /// How often all was emptied. Whoever reserves room and then finds the number as it was before it fetched
    /// what it will write, has room that the next emptying takes back.
    #[inline]
    pub(crate) fn emptied(&self) -> u64 {
        // SYNC POINT emptied: after the Acquire of the generation in `reserve`: who has room of after an
        // emptying sees the new number.
        self.head(EMPTIED).load(Ordering::Acquire)
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
    pub(crate) fn skip_generations(&self, r: u64, times: u64) {
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
            if let Some(r) = u64::from(byte).checked_sub(1).filter(|&r| r < self.layout().regions) {
                // It may have counted a record that nobody will find.
                self.region(r, DOUBTS).fetch_add(1, Ordering::SeqCst);
            }
        }
        row.store(0, Ordering::SeqCst);
    }

    // What was there before

    /// Whether it is known what was there before.
    pub(crate) fn is_ready(&self) -> bool {
        // SYNC POINT ready: Acquire here, Release in `set_ready`: who sees it sees what is known.
        self.head(READY).load(Ordering::Acquire) != 0
    }

    /// Whether that cannot have changed since without our knowledge.
    pub(crate) fn is_ready_to_write(&self) -> bool {
        // SYNC POINT ready: as above.
        self.head(READY).load(Ordering::Acquire) == READY_TO_WRITE
    }

    pub(crate) fn set_ready(&self, to_write: bool) {
        let ready = if to_write { READY_TO_WRITE } else { READY_TO_READ };
        self.head(READY).store(ready, Ordering::Release);
    }

    /// As if nothing were known yet.
    #[cfg(test)]
    pub(crate) fn unset_ready(&self) {
        self.head(READY).store(0, Ordering::Release);
    }

    /// Says that region `r` is as it was left: in that generation, with so many bytes, places in its log
    /// and records. Nobody writes.
    pub(crate) fn restore(&self, r: u64, generation: u32, used: u64, places: u64, records: u64) {
        let set = |word, value| self.region(r, word).store(value, Ordering::Relaxed);
        set(RAISED, u64::from(generation) - 1);
        set(CURSOR, used);
        set(LOGGED, places);
        set(HELD, pack_count(generation, records));
        let tick = self.head(TICK).fetch_add(1, Ordering::Relaxed) + 1;
        set(USED, tick);
        set(BORN, tick);
    }

    /// Makes region `r` the one that is filled; none without one.
    pub(crate) fn activate(&self, r: Option<u64>) {
        self.head(ACTIVE).store(r.unwrap_or(NONE), Ordering::SeqCst);
    }

    // What is known to be in vain

    /// Whether there was no room when somebody looked last, and none has come since.
    pub(crate) fn is_full(&self) -> bool {
        self.head(FULL).load(Ordering::Relaxed) != 0
    }

    fn set_full(&self, full: bool) {
        self.head(FULL).store(u64::from(full), Ordering::Relaxed);
    }

    /// Until when nothing is written; see `rest`.
    pub(crate) fn resting(&self) -> u64 {
        self.head(RESTING).load(Ordering::Relaxed)
    }

    /// Has nobody write until then.
    pub(crate) fn rest(&self, until: u64) {
        self.head(RESTING).fetch_max(until, Ordering::Relaxed);
    }

    /// Has those write who collect records until there are enough: see `calls`.
    pub(crate) fn call(&self) {
        self.head(CALLS).fetch_add(1, Ordering::Relaxed);
    }

    // What there is

    /// Places that were taken in the log of region `r`.
    pub(crate) fn logged_in(&self, r: u64) -> u64 {
        self.region(r, LOGGED).load(Ordering::Relaxed)
    }

    /// Bytes laid down, gaps included.
    pub(crate) fn used_bytes(&self) -> u64 {
        (0..self.layout().regions).map(|r| self.used_in(r)).sum()
    }

    /// Bytes laid down in region `r`.
    pub(crate) fn used_in(&self, r: u64) -> u64 {
        self.region(r, CURSOR).load(Ordering::Acquire).min(self.layout().region_bytes())
    }

    /// About how many records there are: also those that the dead counted and nobody finds.
    pub(crate) fn about_filled(&self) -> u64 {
        (0..self.layout().regions).map(|r| self.held(r)).sum()
    }

    /// How many records there are.
    pub(crate) fn filled(&self) -> u64 {
        let regions = 0..self.layout().regions;
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
        let found = (0..self.layout().samples as usize).filter(is_here).count() as u64;
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
