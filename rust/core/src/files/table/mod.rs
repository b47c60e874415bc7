//! What the processes of a node know together about the files of one folder.
//!
//! The truth about a file is on the disk: it is there, whole, or it is not. This table holds what
//! would be slow to find out again and what must be agreed upon:
//!
//! ```text
//!   entry   key       hash of the name. Set once
//!           size      of the source when it was copied or compared, with
//!           mtime     its time of change, in nanoseconds
//!           used      when it was last asked for, in nanoseconds of the clock
//!           name_at   where in the log its name is; a guess, see `Folder::name_of`
//!           reserved  bytes set aside by whoever is copying it, or died doing so
//!   flags   CHECKED   compared with its source since this table was made
//!           OWNED     we made the file: it counts, and may be evicted
//!           EVICTING  about to be removed
//!           RESERVED  bytes may be set aside for it
//!   hash    of its bytes, if asked for; 0: none
//!   state   the file's lock (claim.rs): whoever holds it may copy, replace or remove the file.
//!           Two more: for what earlier jobs left, and for the sum of bytes
//! ```
//!
//! Files are numbered as they come, and found by the hash of their name (index.rs). A table has room
//! for many more than there are; pages of it are taken as they are needed (pages.rs).
//!
//! | module | role |
//! | --- | --- |
//! | `room` | the bytes of all files, and which were not used for longest |
//! | `rows` | which files were just given to whom |
//! | `index` | from the hash of a name to the number of its file |
//! | `pages` | pages that are taken as they are needed |
//!
//! The words of an entry change under the file's lock only, but for `used` and `name_at`.

mod index;
mod pages;
mod room;
mod rows;

use crate::error::{Error, Kind, Result};
use crate::files::content::{Content, Version};
use crate::segment::claim::{Slots, is_claimed};
use crate::segment::counters::Counters;
use crate::segment::layout::Geometry;
use crate::segment::lease::Leases;
use crate::segment::lock::StateLock;
use crate::segment::parts::LOCKS;
use crate::segment::table_layout::{ENTRY_WORDS, HEAD_WORDS, TableLayout};
use crate::segment::{Opened, Request, Segment};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

pub(crate) use pages::NoRoom;

pub(crate) const CHECKED: u8 = 1;
pub(crate) const OWNED: u8 = 2;
pub(crate) const EVICTING: u8 = 4;
const RESERVED: u8 = 8;

/// Words of an entry.
const KEY: usize = 0;
const SIZE: usize = 1;
const MTIME: usize = 2;
const USED: usize = 3;
const NAME_AT: usize = 4;
const RESERVED_BYTES: usize = 5;

/// Words of all files together.
#[derive(Clone, Copy)]
enum Head {
    /// Of all files that are ours, and of those being copied.
    Bytes = 0,
    /// How many are ours.
    Files = 1,
    /// Somebody is changing the two above.
    Counting = 2,
    /// Nothing is written before this time.
    ResumeAt = 3,
    // 4 is not used.
    /// The table knows what earlier jobs left.
    Recalled = 5,
    /// When the reservations of the dead were last looked for.
    ReclaimedAt = 6,
    /// Where the next look for old files begins.
    Hand = 7,
    /// How many files are numbered.
    Count = 8,
    /// At this length, the log is worth a look.
    TidyAt = 9,
    /// The first of the numbers that somebody took and did not need, plus one; up to the last word.
    Unused = 10,
}

/// The states of locks that are no file's.
const RECALL: usize = 0;
const COUNTING: usize = 1;

/// A table open in this process.
pub(crate) struct FileTable {
    segment: Segment,
    layout: TableLayout,
    entries: usize,
    /// First slot and number of slots of each level of the index.
    levels: Vec<(u64, u64)>,
}

/// What is known of one file.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    table: &'a FileTable,
    i: usize,
    words: &'a [AtomicU64],
    flags: &'a AtomicU8,
}

impl Entry<'_> {
    #[inline]
    pub(crate) fn flags(&self) -> u8 {
        // SYNC POINT flags: SeqCst here and in `raise`, `lower`; see rows.rs.
        self.flags.load(Ordering::SeqCst)
    }

    /// The flags before.
    pub(crate) fn raise(&self, flags: u8) -> u8 {
        self.flags.fetch_or(flags, Ordering::SeqCst)
    }

    /// The flags before.
    pub(crate) fn lower(&self, flags: u8) -> u8 {
        self.flags.fetch_and(!flags, Ordering::SeqCst)
    }

    /// Size and time of change. A reader without the lock may see them half changed: it compares
    /// them with a file, and a mixture equals none.
    #[inline]
    pub(crate) fn version(&self) -> Version {
        Version {
            size: self.words[SIZE].load(Ordering::Acquire),
            mtime: self.words[MTIME].load(Ordering::Acquire),
        }
    }

    pub(crate) fn set_version(&self, version: Version) {
        self.words[SIZE].store(version.size, Ordering::Release);
        self.words[MTIME].store(version.mtime, Ordering::Release);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.table.hash_of(self.i).map_or(0, |hash| hash.load(Ordering::Relaxed))
    }

    /// Where there is no room for it, the file counts as not hashed.
    fn set_hash(&self, hash: u64) {
        if hash != 0 {
            let _no_room = self.table.take_pages(self.table.hash_at(self.i), 8);
        }
        if let Some(word) = self.table.hash_of(self.i) {
            word.store(hash, Ordering::Relaxed);
        }
    }

    pub(crate) fn content(&self) -> Content {
        Content { version: self.version(), hash: self.hash() }
    }

    pub(crate) fn used(&self) -> u64 {
        self.words[USED].load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn touch(&self, now: u64) {
        self.words[USED].store(now, Ordering::Relaxed);
    }

    pub(crate) fn key(&self) -> u64 {
        self.words[KEY].load(Ordering::Relaxed)
    }

    pub(crate) fn name_at(&self) -> u64 {
        self.words[NAME_AT].load(Ordering::Relaxed)
    }

    pub(crate) fn set_name_at(&self, at: u64) {
        self.words[NAME_AT].store(at, Ordering::Relaxed);
    }

    /// Bytes that it takes of the limit, as a file of ours.
    pub(crate) fn owned_bytes(&self) -> u64 {
        if self.flags() & OWNED != 0 { self.version().size } else { 0 }
    }
}

/// The only one who may change file `i`.
pub(crate) struct FileLock<'a> {
    pub(crate) i: usize,
    _state: StateLock<'a>,
}

impl FileTable {
    pub(crate) fn open(request: &Request) -> Result<(Arc<Self>, Opened)> {
        let (segment, how) = Segment::open(request)?;
        let Geometry::Files(table) = segment.header().geometry.clone() else {
            let message = format!("{:?} is the name of another cache", segment.name());
            return Err(Error::new(Kind::Argument, message));
        };
        let table = segment.unique(how, |segment| {
            Ok(Self {
                segment,
                layout: table.layout()?,
                entries: table.entries as usize,
                levels: table.levels().unwrap_or_default(),
            })
        })?;
        Ok((table, how))
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.segment
    }

    #[inline]
    pub(crate) fn counters(&self) -> Counters<'_> {
        self.segment.counters()
    }

    /// The states of all files that are numbered, after those of the other locks.
    fn slots(&self) -> Slots<'_> {
        self.segment.slots(self.len() as u64 + LOCKS)
    }

    fn leases(&self) -> Leases<'_> {
        self.segment.leases()
    }

    #[inline]
    pub(crate) fn entry(&self, i: usize) -> Entry<'_> {
        debug_assert!(i < self.entries);
        let mapping = self.segment.mapping();
        let words = ENTRY_WORDS as usize;
        Entry {
            table: self,
            i,
            words: mapping.words(self.layout.entries_at as usize + i * 8 * words, words),
            flags: &mapping.bytes(self.layout.flags_at as usize + i, 1)[0],
        }
    }

    fn hash_at(&self, i: usize) -> u64 {
        self.layout.hashes_at + 8 * i as u64
    }

    fn hash_of(&self, i: usize) -> Option<&AtomicU64> {
        let at = self.hash_at(i);
        self.is_present(at).then(|| &self.segment.mapping().words(at as usize, 1)[0])
    }

    #[inline]
    fn head(&self, head: Head) -> &AtomicU64 {
        &self.heads()[head as usize]
    }

    #[inline]
    fn heads(&self) -> &[AtomicU64] {
        self.segment.mapping().words(self.layout.heads_at as usize, HEAD_WORDS as usize)
    }

    /// How many files are numbered.
    pub(crate) fn len(&self) -> usize {
        // SYNC POINT count: Acquire here, Release in `take_number`: what is numbered can be touched.
        (self.head(Head::Count).load(Ordering::Acquire) as usize).min(self.entries)
    }

    // Locking

    /// The lock of file `i`; None if somebody who lives has it.
    pub(crate) fn lock(&self, i: usize) -> Option<FileLock<'_>> {
        let state = self.lock_state(i + LOCKS as usize)?;
        Some(FileLock { i, _state: state })
    }

    /// The lock of whoever tells the table what earlier jobs left; None as for a file.
    pub(crate) fn lock_recall(&self) -> Option<StateLock<'_>> {
        self.lock_state(RECALL)
    }

    fn lock_state(&self, state: usize) -> Option<StateLock<'_>> {
        StateLock::take(self.slots(), state, self.lease()?, &self.leases())
    }

    /// Whether somebody has the lock of file `i`, dead or alive.
    pub(crate) fn is_locked(&self, i: usize) -> bool {
        is_claimed(self.slots().state(i + LOCKS as usize))
    }

    // What earlier jobs left

    /// Whether the table knows what earlier jobs left.
    pub(crate) fn is_recalled(&self) -> bool {
        // SYNC POINT recalled: Acquire here, Release in `set_recalled`.
        self.head(Head::Recalled).load(Ordering::Acquire) != 0
    }

    pub(crate) fn set_recalled(&self) {
        self.head(Head::Recalled).store(1, Ordering::Release);
    }

    #[cfg(test)]
    pub(crate) fn forget_recall(&self) {
        self.head(Head::Recalled).store(0, Ordering::Relaxed);
    }

    /// The length at which the log is worth a look.
    pub(crate) fn tidy_at(&self) -> &AtomicU64 {
        self.head(Head::TidyAt)
    }

    // Trouble

    /// Nothing is written before this time, in nanoseconds of the clock.
    pub(crate) fn resume_at(&self) -> &AtomicU64 {
        self.head(Head::ResumeAt)
    }
}

#[cfg(test)]
mod tests;
