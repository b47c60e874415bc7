//! From the hash of a name to the number of its file.
//!
//! ```text
//!   slot   upper half  of the key, to tell most others apart without a look at the entry
//!          lower half  number of the file, plus one; 0: free. Set once
//! ```
//!
//! The slots are in levels. The first has room for the files that were expected; each other one is
//! four times as large as the one before, and used by keys that found no free slot there. A key has a
//! few slots in each level, and takes the first that is free: since none is ever freed, all who look
//! for it meet it before a free one.

use crate::files::table::{FileTable, Head, KEY, NoRoom};
use crate::segment::parts::LOCKS;
use crate::segment::table_layout::{ENTRY_WORDS, HEAD_WORDS, STATE_BYTES};
use std::sync::atomic::{AtomicU64, Ordering};

/// How many slots of a level a key can have: the next ones from where it belongs.
const WINDOW: u64 = 64;
const LOWER: u64 = u32::MAX as u64;

impl FileTable {
    /// The file of that key, if it has a number.
    #[inline]
    pub(crate) fn find(&self, key: u64) -> Option<usize> {
        debug_assert!(key != 0);
        for at in self.slots_of(key) {
            if !self.is_present(at) {
                return None;
            }
            match self.slot(at).load(Ordering::Acquire) {
                0 => return None,
                slot if self.is_of(slot, key) => return Some(number_in(slot)),
                _ => {}
            }
        }
        None
    }

    /// The file of that key, numbered if need be.
    pub(crate) fn find_or_add(&self, key: u64) -> Result<usize, NoRoom> {
        debug_assert!(key != 0);
        let mut number = None;
        let found = self.find_or_put(key, &mut number);
        if let Some(unused) = number.filter(|&number| found != Ok(number)) {
            self.give_back(unused);
        }
        found
    }

    /// As `find_or_add`; the number that was taken for it may stay unused.
    fn find_or_put(&self, key: u64, number: &mut Option<usize>) -> Result<usize, NoRoom> {
        for at in self.slots_of(key) {
            self.take_pages(at, 8)?;
            let mut found = self.slot(at).load(Ordering::Acquire);
            if found == 0 {
                let mine = match *number {
                    Some(mine) => mine,
                    None => *number.insert(self.take_number(key)?),
                };
                let new = key & !LOWER | (mine as u64 + 1);
                // SYNC POINT numbered: Release here, Acquire above and in `find`: who sees the slot
                // sees the key of its entry.
                let swapped =
                    self.slot(at).compare_exchange(0, new, Ordering::AcqRel, Ordering::Acquire);
                match swapped {
                    Ok(_) => return Ok(mine),
                    Err(other) => found = other,
                }
            }
            if self.is_of(found, key) {
                return Ok(number_in(found));
            }
        }
        Err(NoRoom::Table)
    }

    /// Where the slots are that a key can have, in the order in which it takes them.
    #[inline]
    fn slots_of(&self, key: u64) -> impl Iterator<Item = u64> {
        let index_at = self.layout.index_at;
        self.levels.iter().flat_map(move |&(first, slots)| {
            let start = key % slots;
            (start..start + WINDOW.min(slots))
                .map(move |slot| index_at + 8 * (first + slot % slots))
        })
    }

    #[inline]
    fn slot(&self, at: u64) -> &AtomicU64 {
        &self.segment.mapping().words(at as usize, 1)[0]
    }

    #[inline]
    fn is_of(&self, slot: u64, key: u64) -> bool {
        // A number that was damaged leads nowhere.
        (slot ^ key) & !LOWER == 0
            && number_in(slot) < self.len()
            && self.entry(number_in(slot)).key() == key
    }

    /// The next number, for a file of that key. Nobody sees it before it is in the index.
    fn take_number(&self, key: u64) -> Result<usize, NoRoom> {
        let given = |word: &AtomicU64| (word.swap(0, Ordering::AcqRel) as usize).checked_sub(1);
        let number = match self.unused().iter().find_map(given) {
            Some(number) if number < self.len() => number,
            _ => self.next_number()?,
        };
        let entry = self.entry(number);
        entry.words[KEY].store(key, Ordering::Relaxed);
        Ok(number)
    }

    fn next_number(&self) -> Result<usize, NoRoom> {
        let count = self.head(Head::Count);
        let mut number = count.load(Ordering::Acquire);
        loop {
            if number >= self.entries as u64 {
                return Err(NoRoom::Table);
            }
            // What is numbered can be touched, also if we die here.
            let layout = &self.layout;
            let state_at = layout.states_at + (number + LOCKS) * STATE_BYTES;
            self.take_pages(state_at, STATE_BYTES)?;
            self.take_pages(layout.flags_at + number, 1)?;
            self.take_pages(layout.entries_at + number * 8 * ENTRY_WORDS, 8 * ENTRY_WORDS)?;
            let next = number + 1;
            // SYNC POINT count: Release here, Acquire in `len`.
            match count.compare_exchange(number, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(number as usize),
                Err(other) => number = other,
            }
        }
    }

    /// A number that was not needed, because another was a moment faster, goes to the next one.
    /// If there are too many such numbers, it stays unused.
    fn give_back(&self, number: usize) {
        let new = number as u64 + 1;
        let _kept = self
            .unused()
            .iter()
            .any(|word| word.compare_exchange(0, new, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    }

    fn unused(&self) -> &[AtomicU64] {
        &self.heads()[Head::Unused as usize..HEAD_WORDS as usize]
    }
}

#[inline]
fn number_in(slot: u64) -> usize {
    ((slot & LOWER) as usize).wrapping_sub(1)
}
