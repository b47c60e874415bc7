//! What the processes of a node know together about the files of one folder.
//!
//! The truth about a file is on the disk: it is there, whole, or it is not. This table holds what
//! would be slow to find out again and what must be agreed upon:
//!
//! ```text
//!   entry   key       hash of the name; 0: free. Set once
//!           flags     CHECKED   compared with its source since this table was made
//!                     OWNED     we made the file: it counts, and may be evicted
//!                     EVICTING  about to be removed
//!           size      of the source when it was copied or compared, with
//!           mtime     its time of change, in nanoseconds
//!           used      when it was last asked for, in nanoseconds of the clock
//!           hash      of its bytes, if asked for; 0: none
//!           reserved  bytes set aside by whoever is copying it, or died doing so
//!   state   the file's lock (slot.rs): whoever holds it may copy, replace or remove the file.
//!           Two more: for what earlier jobs left, and for the sum of bytes
//!   row     one per lease: which files the threads of its holder were given last
//! ```
//!
//! # When is it safe to remove a file?
//! When nobody is about to open it. A reader notes the file in its row, then looks at the flags; who
//! removes a file sets EVICTING, then looks at the rows of all living processes. One of the two sees
//! the other (both use SeqCst). A file that is open already may be removed: its reader keeps it.
//!
//! The words of an entry change under the file's lock only, but for `used` and EVICTING.

use crate::counters::Counters;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::fork;
use crate::layout::{ENTRY_WORDS, EPOCH_AT, LOCKS, Plan, ROW_THREADS, ROW_WORDS, TableLayout};
use crate::lease::Leases;
use crate::segment::{Opened, Request, Segment};
use crate::slot::{Claim, FIRST_LEASE, LEASES, Orphans, Slots};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub(crate) const CHECKED: u64 = 1;
pub(crate) const OWNED: u64 = 2;
pub(crate) const EVICTING: u64 = 4;

const KEY: usize = 0;
const FLAGS: usize = 1;
const SIZE: usize = 2;
const MTIME: usize = 3;
const USED: usize = 4;
const HASH: usize = 5;
const RESERVED: usize = 6;

/// How far a key may lie from where it belongs: a full table must not be walked for every file.
const FARTHEST: usize = 4096;

/// How long to wait for who is changing the sum of bytes: a few instructions, unless it is stopped.
const PATIENCE: Duration = Duration::from_millis(200);

/// Words of all files together.
const BYTES: usize = 0;
const RESUME_AT: usize = 1;
const WARNED: usize = 2;
const RECALLED: usize = 3;
const RECLAIMED_AT: usize = 4;
const COUNTING: usize = 5;

/// A table open in this process.
pub(crate) struct FileTable {
    segment: Segment,
    layout: TableLayout,
    entries: usize,
}

/// What is known of one file.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a>(&'a [AtomicU64]);

impl Entry<'_> {
    pub(crate) fn flags(&self) -> u64 {
        // SYNC POINT flags: SeqCst here and in `raise`, `lower`; see "When is it safe".
        self.0[FLAGS].load(Ordering::SeqCst)
    }

    /// The flags before.
    pub(crate) fn raise(&self, flags: u64) -> u64 {
        self.0[FLAGS].fetch_or(flags, Ordering::SeqCst)
    }

    /// The flags before.
    pub(crate) fn lower(&self, flags: u64) -> u64 {
        self.0[FLAGS].fetch_and(!flags, Ordering::SeqCst)
    }

    /// Size and time of change. A reader without the lock may see them half changed: it compares
    /// them with a file, and a mixture equals none.
    pub(crate) fn version(&self) -> (u64, u64) {
        (self.0[SIZE].load(Ordering::Acquire), self.0[MTIME].load(Ordering::Acquire))
    }

    pub(crate) fn set_version(&self, (size, mtime): (u64, u64)) {
        self.0[SIZE].store(size, Ordering::Release);
        self.0[MTIME].store(mtime, Ordering::Release);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.0[HASH].load(Ordering::Relaxed)
    }

    pub(crate) fn set_hash(&self, hash: u64) {
        self.0[HASH].store(hash, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> u64 {
        self.0[USED].load(Ordering::Relaxed)
    }

    pub(crate) fn touch(&self, now: u64) {
        self.0[USED].store(now, Ordering::Relaxed);
    }
}

/// The only one who may change a file; ends with its holder.
pub(crate) struct Locked<'a> {
    table: &'a FileTable,
    pub(crate) i: usize,
    lease: u8,
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.table.slots().abandon(self.i, self.lease);
    }
}

impl FileTable {
    pub(crate) fn open(request: &Request) -> Result<(Arc<Self>, Opened)> {
        let (segment, how) = Segment::open(request)?;
        let Plan::Files(table) = segment.header().plan.clone() else {
            let message = format!("{:?} is the name of another cache", segment.name());
            return Err(Error::new(Kind::Argument, message));
        };
        let (file, name) = (segment.file(), segment.name().to_string());
        let layout = table.layout()?;
        let made = Self { segment, layout, entries: table.entries as usize };
        Ok((fork::unique(file, &name, made), how))
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(crate) fn counters(&self) -> Counters<'_> {
        Counters(self.segment.mapping())
    }

    fn slots(&self) -> Slots<'_> {
        let mapping = self.segment.mapping();
        let states = self.entries + LOCKS as usize;
        Slots::new(
            mapping.bytes(self.layout.states_at as usize, states),
            &mapping.words(EPOCH_AT, 1)[0],
        )
    }

    fn leases(&self) -> Leases<'_> {
        Leases(self.segment.anchor())
    }

    pub(crate) fn entry(&self, i: usize) -> Entry<'_> {
        debug_assert!(i < self.entries);
        let words = ENTRY_WORDS as usize;
        let at = self.layout.entries_at as usize + i * 8 * words;
        Entry(self.segment.mapping().words(at, words))
    }

    fn head(&self, word: usize) -> &AtomicU64 {
        &self.segment.mapping().words(self.layout.heads_at as usize, 8)[word]
    }

    fn row(&self, lease: u8) -> &[AtomicU64] {
        let words = ROW_WORDS as usize;
        let at = self.layout.rows_at as usize + usize::from(lease) * 8 * words;
        self.segment.mapping().words(at, words)
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let used = |entry: &Entry<'_>| entry.0[KEY].load(Ordering::Relaxed) != 0;
        (0..self.entries).map(|i| self.entry(i)).filter(used)
    }

    // Finding

    /// The entry of that key, if there is one.
    #[inline]
    pub(crate) fn find(&self, key: u64) -> Option<usize> {
        self.probe(key, |_| None)
    }

    /// The entry of that key, made if need be. None if the table is full.
    pub(crate) fn find_or_add(&self, key: u64) -> Option<usize> {
        self.probe(key, |word| {
            match word.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => Some(true),
                Err(found) => Some(found == key),
            }
        })
    }

    /// Looks at one place after the other, from where the key belongs. `free` says of a free place
    /// whether it is the one; None ends the search.
    #[inline]
    fn probe(&self, key: u64, free: impl Fn(&AtomicU64) -> Option<bool>) -> Option<usize> {
        debug_assert!(key != 0);
        let first = (key % self.entries as u64) as usize;
        for i in (first..self.entries).chain(0..first).take(FARTHEST) {
            // Relaxed: a key is set once, and says nothing about the other words.
            let word = &self.entry(i).0[KEY];
            match word.load(Ordering::Relaxed) {
                0 if free(word)? => return Some(i),
                found if found == key => return Some(i),
                _ => {}
            }
        }
        None
    }

    // Giving out

    /// Notes that this thread is about to use file `i`, so that nobody removes it. It keeps the last
    /// two files of every thread. False if this process cannot be seen by others.
    #[inline]
    pub(crate) fn give_out(&self, i: usize) -> bool {
        let Some(lease) = self.lease() else { return false };
        let row = self.row(lease);
        let place = 2 * thread();
        let (last, before) = (&row[place], &row[place + 1]);
        let (note, seen) = (i as u64 + 1, last.load(Ordering::Relaxed));
        if seen != note {
            before.store(seen, Ordering::SeqCst);
            // SYNC POINT given: SeqCst here and in `is_given_out`; see "When is it safe".
            last.store(note, Ordering::SeqCst);
        }
        true
    }

    /// Whether a living process was given file `i` and may be about to open it.
    pub(crate) fn is_given_out(&self, i: usize) -> bool {
        let note = i as u64 + 1;
        let mine = self.lease();
        (0..LEASES).any(|lease| {
            self.row(lease).iter().any(|word| word.load(Ordering::SeqCst) == note)
                && (mine == Some(lease) || self.leases().while_orphaned(lease, || ()).is_none())
        })
    }

    // Locking

    /// This process's lease; its row is empty when it gets one.
    #[inline]
    fn lease(&self) -> Option<u8> {
        self.leases().mine_after(&self.slots(), |lease| {
            self.row(lease).iter().for_each(|word| word.store(0, Ordering::SeqCst));
        })
    }

    /// Whether this process can be seen by others. Else it may read what is there, and no more.
    pub(crate) fn is_seen(&self) -> bool {
        self.lease().is_some()
    }

    /// The lock of file `i`; None if somebody who lives has it.
    pub(crate) fn lock(&self, i: usize) -> Option<Locked<'_>> {
        let lease = self.lease()?;
        let claim = self.slots().claim(i, lease, false, &self.leases());
        let got = claim == Claim::Claimed || broken(Fault::IgnoreFileLock);
        // Not `then_some`: a lock that is made gives back what it locks.
        got.then(|| Locked { table: self, i, lease })
    }

    /// The lock of whoever tells the table what earlier jobs left; None as for a file.
    pub(crate) fn lock_recall(&self) -> Option<Locked<'_>> {
        self.lock(self.entries)
    }

    /// Whether somebody has the lock of file `i`, dead or alive.
    pub(crate) fn is_locked(&self, i: usize) -> bool {
        self.slots().state(i) >= FIRST_LEASE
    }

    // Room

    /// Bytes of all files that are ours, and of those being copied.
    pub(crate) fn bytes(&self) -> u64 {
        self.head(BYTES).load(Ordering::Relaxed)
    }

    /// Runs `act`, which changes what files take, and their sum. Who dies in between leaves a sum that
    /// is wrong, and COUNTING set: the next one counts anew.
    fn counting<R>(&self, act: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let lock = loop {
            match self.lock(self.entries + 1) {
                // Who has it may be stopped: better a sum that may be wrong.
                None if began.elapsed() < PATIENCE => std::thread::yield_now(),
                lock => break lock,
            }
        };
        if lock.is_some() && self.head(COUNTING).swap(1, Ordering::Relaxed) != 0 {
            let of = |i: usize| {
                let entry = self.entry(i);
                let owned = if entry.flags() & OWNED != 0 { entry.version().0 } else { 0 };
                owned.wrapping_add(entry.0[RESERVED].load(Ordering::Relaxed))
            };
            let sum = (0..self.entries).map(of).fold(0, u64::wrapping_add);
            self.head(BYTES).store(sum, Ordering::Relaxed);
        }
        let result = act();
        if lock.is_some() {
            self.head(COUNTING).store(0, Ordering::Relaxed);
        }
        result
    }

    /// Sets bytes aside for a file; `own` it or `unreserve` them.
    pub(crate) fn reserve(&self, file: &Locked<'_>, bytes: u64) {
        self.counting(|| {
            self.entry(file.i).0[RESERVED].store(bytes, Ordering::Relaxed);
            self.head(BYTES).fetch_add(bytes, Ordering::Relaxed);
        });
    }

    /// Gives back what was set aside for a file, by us or by somebody who died.
    pub(crate) fn unreserve(&self, file: &Locked<'_>) {
        if self.is_reserved(file.i) {
            self.counting(|| {
                let bytes = self.entry(file.i).0[RESERVED].swap(0, Ordering::Relaxed);
                self.head(BYTES).fetch_sub(bytes, Ordering::Relaxed);
            });
        }
    }

    /// Whether bytes are set aside for file `i`.
    pub(crate) fn is_reserved(&self, i: usize) -> bool {
        self.entry(i).0[RESERVED].load(Ordering::Relaxed) != 0
    }

    /// How many entries there can be.
    pub(crate) fn len(&self) -> usize {
        self.entries
    }

    /// The file is ours, in this version, from now on; what was set aside for it is used up.
    pub(crate) fn own(&self, file: &Locked<'_>, version: (u64, u64), hash: u64) {
        let entry = self.entry(file.i);
        self.counting(|| {
            let before = if entry.flags() & OWNED != 0 { entry.version().0 } else { 0 };
            let reserved = entry.0[RESERVED].swap(0, Ordering::Relaxed);
            entry.set_version(version);
            entry.set_hash(hash);
            entry.raise(OWNED);
            // In one step, so that nobody sees the file counted twice.
            let change = version.0.wrapping_sub(reserved).wrapping_sub(before);
            self.head(BYTES).fetch_add(change, Ordering::Relaxed);
        });
    }

    /// The file is gone.
    pub(crate) fn disown(&self, file: &Locked<'_>) {
        let entry = self.entry(file.i);
        self.counting(|| {
            if entry.lower(OWNED | CHECKED | EVICTING) & OWNED != 0 {
                self.head(BYTES).fetch_sub(entry.version().0, Ordering::Relaxed);
            }
        });
    }

    /// Whether the table knows what earlier jobs left.
    pub(crate) fn is_recalled(&self) -> bool {
        // SYNC POINT recalled: Acquire here, Release in `set_recalled`.
        self.head(RECALLED).load(Ordering::Acquire) != 0
    }

    pub(crate) fn set_recalled(&self) {
        self.head(RECALLED).store(1, Ordering::Release);
    }

    #[cfg(test)]
    pub(crate) fn forget_recall(&self) {
        self.head(RECALLED).store(0, Ordering::Relaxed);
    }

    /// When the reservations of the dead were last looked for, in nanoseconds of the clock.
    pub(crate) fn reclaimed_at(&self) -> &AtomicU64 {
        self.head(RECLAIMED_AT)
    }

    // Trouble

    /// Nothing is written before this time, in nanoseconds of the clock.
    pub(crate) fn resume_at(&self) -> &AtomicU64 {
        self.head(RESUME_AT)
    }

    /// Whether nobody on this node was told about `what` yet.
    pub(crate) fn is_news(&self, what: u64) -> bool {
        self.head(WARNED).fetch_or(what, Ordering::Relaxed) & what == 0
    }
}

/// The places of a row that threads of this process have, as bits; above them the number of the
/// process that this is about: a forked child has none of its parent's threads.
static TAKEN: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(ROW_THREADS == 32);

/// A thread's place, given back when the thread ends.
struct Place {
    /// As in `TAKEN`: the process, then the bit of the place; 0 for a place that others may have too.
    taken: Cell<u64>,
    place: Cell<usize>,
}

/// The place of this thread in a row. More threads than places share them, which protects less.
fn thread() -> usize {
    thread_local! {
        static PLACE: Place = const { Place { taken: Cell::new(0), place: Cell::new(0) } };
    }
    let found = PLACE.try_with(|mine| {
        if mine.taken.get() >> 32 != u64::from(fork::process()) {
            mine.take();
        }
        mine.place.get()
    });
    found.unwrap_or(0) // a thread that is ending
}

impl Place {
    #[cold]
    fn take(&self) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // One after the other, so that what a thread was given stays a while after its end.
        let first = NEXT.fetch_add(1, Ordering::Relaxed) % ROW_THREADS as usize;
        let process = u64::from(fork::process()) << 32;
        self.place.set(first);
        self.taken.set(process);
        let free = |taken: u64| {
            let taken = if taken >> 32 == process >> 32 { taken as u32 } else { 0 };
            let next = taken.rotate_right(first as u32).trailing_ones() as usize;
            (next < ROW_THREADS as usize).then(|| (taken, (first + next) % ROW_THREADS as usize))
        };
        let more =
            |all: u64| free(all).map(|(taken, place)| process | u64::from(taken) | 1 << place);
        if let Ok(before) = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            && let Some((_, place)) = free(before)
        {
            self.place.set(place);
            self.taken.set(process | 1 << place);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (process, bit) = (self.taken.get() >> 32, self.taken.get() & u64::from(u32::MAX));
        let less = |all: u64| (all >> 32 == process).then_some(all & !bit);
        let _others = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Table;
    use crate::segment::Backing;

    fn table(files: u64) -> Arc<FileTable> {
        let request = Request {
            name: crate::random_name().unwrap(),
            plan: Plan::Files(Table { entries: files }),
            fingerprint: 0,
            keep: false,
            backing: Backing::Shm,
            private: true,
            join: None,
        };
        FileTable::open(&request).unwrap().0
    }

    #[test]
    fn a_full_table_says_so() {
        let table = table(10);
        let added = (1..100).filter(|&key| table.find_or_add(key).is_some()).count();
        assert_eq!(added, 10);
        assert!((1..=10).all(|key| table.find(key).is_some()));
        assert_eq!((table.find(50), table.find_or_add(50)), (None, None));
    }

    #[test]
    fn a_full_table_is_not_walked_to_its_end() {
        let table = table(2 * FARTHEST as u64);
        let same = |n: u64| 1 + n * 2 * FARTHEST as u64; // all belong to one place
        for n in 0..FARTHEST as u64 {
            assert!(table.find_or_add(same(n)).is_some());
        }
        assert_eq!(table.find_or_add(same(FARTHEST as u64)), None);
        assert!(table.find_or_add(FARTHEST as u64 + 7).is_some(), "there is room elsewhere");
    }

    #[test]
    fn a_sum_that_somebody_died_changing_is_made_anew() {
        let table = table(8);
        table.own(&table.lock(1).unwrap(), (100, 1), 0);
        table.reserve(&table.lock(2).unwrap(), 30);
        let dead = table.lock(table.entries + 1).unwrap();
        table.head(COUNTING).store(1, Ordering::Relaxed);
        table.head(BYTES).fetch_add(5000, Ordering::Relaxed);
        drop(dead);
        table.unreserve(&table.lock(2).unwrap());
        assert_eq!(table.bytes(), 100);
        // And nobody waits for ever for one who stands still there.
        let stopped = table.lock(table.entries + 1).unwrap();
        table.own(&table.lock(3).unwrap(), (7, 1), 0);
        assert_eq!(table.bytes(), 107);
        drop(stopped);
        table.disown(&table.lock(1).unwrap());
        assert_eq!(table.bytes(), 7);
    }

    /// The first threads of a process meet while its row is still that of a dead one.
    #[test]
    fn no_thread_loses_what_it_was_given() {
        for _ in 0..50 {
            let table = table(64);
            table.row(0).iter().for_each(|word| word.store(99, Ordering::Relaxed));
            let start = std::sync::Barrier::new(8);
            std::thread::scope(|scope| {
                for i in 0..8 {
                    let (table, start) = (&table, &start);
                    scope.spawn(move || {
                        start.wait();
                        assert!(table.give_out(i));
                        assert!(table.is_given_out(i), "file {i} was forgotten");
                        start.wait(); // nobody's place is given away before all have looked
                    });
                }
            });
        }
    }

    #[test]
    fn a_thread_keeps_its_place_however_many_come_and_go() {
        let table = table(4096);
        assert!(table.give_out(4000));
        for i in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| assert!(table.give_out(i)));
            });
            assert!(table.is_given_out(4000), "after {i} threads");
        }
        let kept = (0..100).filter(|&i| table.is_given_out(i)).count();
        assert!(kept < 100, "of threads that ended long ago");
    }

    #[test]
    fn a_thread_keeps_its_last_two_files() {
        let table = table(64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..10 {
                    assert!(table.give_out(i) && table.give_out(i));
                }
                let kept: Vec<_> = (0..10).filter(|&i| table.is_given_out(i)).collect();
                assert_eq!(kept, [8, 9]);
            });
        });
    }

    #[test]
    fn bytes_are_counted_once_whatever_happens_to_a_file() {
        let table = table(8);
        let lock = table.lock(3).unwrap();
        table.reserve(&lock, 100);
        assert!(table.is_reserved(3) && table.bytes() == 100);
        table.own(&lock, (100, 1), 0);
        assert!(!table.is_reserved(3) && table.bytes() == 100);
        table.reserve(&lock, 40); // what a larger version needs more
        table.own(&lock, (140, 2), 0);
        assert_eq!(table.bytes(), 140);
        table.own(&lock, (10, 3), 0);
        assert_eq!(table.bytes(), 10);
        table.reserve(&lock, 5);
        table.unreserve(&lock);
        table.disown(&lock);
        table.disown(&lock);
        assert_eq!(table.bytes(), 0);
        assert!(table.lock(3).is_none(), "it is locked");
        assert!(table.lock(3).is_none(), "it is locked, also after somebody tried");
        drop(lock);
        assert!(table.lock(3).is_some());
    }
}
