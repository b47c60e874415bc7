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
//!   state   the file's lock (slot.rs): whoever holds it may copy, replace or remove the file
//!   row     one per process: which files its threads were given last
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

/// How long to wait for the lock of all files together.
const LOCK_PATIENCE: Duration = Duration::from_millis(200);

/// Words of all files together.
const BYTES: usize = 0;
const RESUME_AT: usize = 1;
const WARNED: usize = 2;

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
        for i in (first..self.entries).chain(0..first) {
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
        let Some(lease) = self.leases().mine(&self.slots()) else { return false };
        let row = self.row(lease);
        let process = u64::from(fork::process());
        if row[0].load(Ordering::Relaxed) != process {
            // Left by a dead holder of this lease.
            row[1..].iter().for_each(|word| word.store(0, Ordering::Relaxed));
            row[0].store(process, Ordering::Relaxed);
        }
        let place = 8 + 2 * thread();
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
        let mine = self.leases().mine(&self.slots());
        (0..LEASES).any(|lease| {
            self.row(lease)[8..].iter().any(|word| word.load(Ordering::SeqCst) == note)
                && (mine == Some(lease) || self.leases().while_orphaned(lease, || ()).is_none())
        })
    }

    // Locking

    /// The lock of file `i`; None if somebody who lives has it.
    pub(crate) fn lock(&self, i: usize) -> Option<Locked<'_>> {
        let lease = self.leases().mine(&self.slots())?;
        let claim = self.slots().claim(i, lease, false, &self.leases());
        (claim == Claim::Claimed).then_some(Locked { table: self, i, lease })
    }

    /// Runs `act` as the only one on this node. None if others keep the lock for too long.
    pub(crate) fn exclusively<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        let began = Instant::now();
        let _lock = loop {
            match self.lock(self.entries) {
                Some(lock) => break lock,
                None if began.elapsed() > LOCK_PATIENCE => return None,
                None => std::thread::sleep(Duration::from_micros(50)),
            }
        };
        Some(act())
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

    /// Sets bytes aside for a file; `own` it or `unreserve` them.
    pub(crate) fn reserve(&self, file: &Locked<'_>, bytes: u64) {
        // In this order: who dies between the two leaves too little room, not too much.
        self.head(BYTES).fetch_add(bytes, Ordering::Relaxed);
        self.entry(file.i).0[RESERVED].store(bytes, Ordering::Relaxed);
    }

    /// Gives back what was set aside for a file, by us or by somebody who died.
    pub(crate) fn unreserve(&self, file: &Locked<'_>) {
        let bytes = self.entry(file.i).0[RESERVED].swap(0, Ordering::Relaxed);
        self.head(BYTES).fetch_sub(bytes, Ordering::Relaxed);
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
        let before = if entry.flags() & OWNED != 0 { entry.version().0 } else { 0 };
        let reserved = entry.0[RESERVED].swap(0, Ordering::Relaxed);
        entry.set_version(version);
        entry.set_hash(hash);
        entry.raise(OWNED);
        // In one step, so that nobody sees the file counted twice.
        let change = version.0.wrapping_sub(reserved).wrapping_sub(before);
        self.head(BYTES).fetch_add(change, Ordering::Relaxed);
    }

    /// The file is gone.
    pub(crate) fn disown(&self, file: &Locked<'_>) {
        let entry = self.entry(file.i);
        if entry.lower(OWNED | CHECKED | EVICTING) & OWNED != 0 {
            self.head(BYTES).fetch_sub(entry.version().0, Ordering::Relaxed);
        }
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

/// The place of this thread in a row. More threads than places share them, which protects less.
fn thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    PLACE.with(|place| {
        if place.get() == usize::MAX {
            place.set(NEXT.fetch_add(1, Ordering::Relaxed) % ROW_THREADS as usize);
        }
        place.get()
    })
}
