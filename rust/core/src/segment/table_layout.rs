//! The format of a table of files (kind 2): where everything lies.
//!
//! ```text
//!   heads     two lines            words of all files together
//!   present   a bit per page       of this segment: it is allocated, and may be touched
//!   states    LOCKS + entries      states: of the locks, then the lock of each file
//!   flags     entries              bytes
//!   rows      LEASES               of ROW_WORDS u64 each: which files a process was given last
//!   index     levels               of slots: u64 each, from the hash of a name to its number
//!   entries   entries              of ENTRY_WORDS u64 each (see files/table)
//!   hashes    entries              u64, touched only if they are asked for
//!
//!   32   8   entries            40   8   expected files
//!   192  8   states offset      200  8   index offset
//!   208  8   entries offset     216  8   total length
//! ```
//!
//! What lies before the second page of the states is allocated at creation. The rest is a hole, of
//! which pages are allocated as they are needed: a table takes what its files take, whatever it was
//! planned for.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::claim::{LEASES, State};
use crate::segment::parts::{LOCKS, PAGE, STATES_AT};

/// How much room there is to note what is known of files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableGeometry {
    /// Files that can be told apart; many more than are expected.
    pub entries: u64,
    /// Files that are expected: they are found at the first look.
    pub expected: u64,
}

/// Entries beyond those that are expected; few in unit tests, which fill a table.
const SPARE: u64 = if cfg!(test) { 1 << 10 } else { 1 << 22 };
/// Words of one file.
pub(crate) const ENTRY_WORDS: u64 = 6;
/// Threads of a process that are told apart; see files/table/rows.rs.
pub(crate) const ROW_THREADS: u64 = 32;
/// Words of one process: two per thread.
pub(crate) const ROW_WORDS: u64 = 2 * ROW_THREADS;
/// Words of all files together.
pub(crate) const HEAD_WORDS: u64 = 16;
/// Slots of the first level of the index beyond those for the expected files.
const SPARE_SLOTS: u64 = 1 << 10;
/// A level of the index has so many times the slots of the one before.
const GROWTH: u64 = 4;
/// The first offset in the file; also those of all other parts are multiples of it.
const FIRST: u64 = STATES_AT;
/// The most entries: their number and one must fit half a slot of the index.
const MOST: u64 = u32::MAX as u64 - 1;
/// Bytes of one state.
pub(crate) const STATE_BYTES: u64 = size_of::<State>() as u64;

impl TableGeometry {
    /// Room for `files` files and for those that come later: new ones, or those of another list of
    /// names below the same source.
    pub fn plan(files: u64) -> Result<Self> {
        Self { entries: files.saturating_mul(2).saturating_add(SPARE), expected: files }.checked()
    }

    /// The same with half the room for files that are not expected; None if there is no more.
    pub(crate) fn smaller(&self) -> Option<Self> {
        let spare = (self.entries - self.expected) / 2;
        (spare > 0).then(|| Self { entries: self.expected + spare, expected: self.expected })
    }

    fn checked(self) -> Result<Self> {
        self.layout().map(|_| self)
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<TableLayout> {
        TableLayout::of(self).ok_or_else(|| {
            Error::new(
                Kind::Argument,
                format!("{} files are more than one cache can know", self.expected),
            )
        })
    }

    /// What the expected files take, once each was asked for.
    pub(crate) fn likely_bytes(&self) -> u64 {
        let each = 8 * ENTRY_WORDS + STATE_BYTES + 1 + 12;
        FIRST.saturating_add(self.expected.saturating_mul(each))
    }

    /// The levels of the index, as their first slot and the number of their slots.
    pub(crate) fn levels(&self) -> Option<Vec<(u64, u64)>> {
        let mut slots = self.expected.checked_add(self.expected / 2)?.checked_add(SPARE_SLOTS)?;
        let (mut levels, mut first) = (Vec::new(), 0u64);
        // Half of the slots beyond the first level may stay empty.
        while levels.is_empty() || first < self.entries.checked_mul(2)? {
            levels.push((first, slots));
            first = first.checked_add(slots)?;
            slots = slots.checked_mul(GROWTH)?;
        }
        Some(levels)
    }
}

impl std::fmt::Display for TableGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a table of {} files", self.expected)
    }
}

/// Offsets of the parts of a table of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLayout {
    pub(crate) heads_at: u64,
    pub(crate) present_at: u64,
    pub(crate) states_at: u64,
    pub(crate) flags_at: u64,
    pub(crate) rows_at: u64,
    pub(crate) index_at: u64,
    pub(crate) entries_at: u64,
    pub(crate) hashes_at: u64,
    /// Everything before is allocated at creation.
    pub(crate) data_at: u64,
    pub(crate) total: u64,
}

impl TableLayout {
    pub(crate) fn of(table: &TableGeometry) -> Option<Self> {
        if table.entries == 0 || table.entries > MOST || table.expected > table.entries {
            return None;
        }
        let page = PAGE as u64;
        let (first, slots) = *table.levels()?.last()?;
        let heads_at = FIRST;
        let present_at = heads_at + 8 * HEAD_WORDS;
        // As if the bits had to cover themselves twice: a bound on what they cover.
        let sizes = [
            table.entries.checked_add(LOCKS)?.checked_mul(STATE_BYTES)?,
            table.entries,
            u64::from(LEASES) * 8 * ROW_WORDS,
            first.checked_add(slots)?.checked_mul(8)?,
            table.entries.checked_mul(8 * ENTRY_WORDS)?,
            table.entries.checked_mul(8)?,
        ];
        let mut pages = 0u64;
        for size in sizes {
            pages = pages.checked_add(size.div_ceil(page))?;
        }
        let before = (present_at + pages / 4).div_ceil(page);
        let bits = pages.checked_add(before)?.checked_next_multiple_of(64)?;
        let states_at = (present_at + bits / 8).checked_next_multiple_of(page)?;
        let mut at = states_at;
        let mut offsets = [0; 6];
        for (offset, size) in offsets.iter_mut().zip(sizes) {
            *offset = at;
            at = at.checked_add(size.div_ceil(page) * page)?;
        }
        let [states_at, flags_at, rows_at, index_at, entries_at, hashes_at] = offsets;
        let fits = at <= i64::MAX as u64;
        fits.then_some(Self {
            heads_at,
            present_at,
            states_at,
            flags_at,
            rows_at,
            index_at,
            entries_at,
            hashes_at,
            data_at: if active(Fault::AllocateTable) { at } else { states_at + page },
            total: at,
        })
    }

    /// What the header keeps.
    pub(crate) fn offsets(&self) -> [u64; 4] {
        [self.states_at, self.index_at, self.entries_at, self.total]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_table_has_room_for_more_files_than_expected() {
        assert_eq!(TableGeometry::plan(0).unwrap().entries, 1024);
        assert_eq!(TableGeometry::plan(1_000_000).unwrap().entries, 2_001_024);
        assert!(TableGeometry::plan(u64::MAX).is_err());
        assert!(TableGeometry::plan(1 << 31).is_err());
        let mut table = TableGeometry::plan(100).unwrap();
        while let Some(smaller) = table.smaller() {
            assert!(smaller.entries < table.entries && smaller.layout().is_ok());
            table = smaller;
        }
        assert_eq!(table.entries, 100 + 1, "never less than expected");
    }

    proptest! {
        #[test]
        fn parts_of_a_table_do_not_overlap(expected in 0u64..1 << 30, spare in 1u64..1 << 30) {
            let table = TableGeometry { entries: expected + spare, expected };
            let l = table.layout().unwrap();
            let n = table.entries;
            prop_assert_eq!(l.heads_at + 8 * HEAD_WORDS, l.present_at);
            prop_assert!(l.present_at + (l.total / PAGE as u64) / 8 <= l.states_at);
            prop_assert!(l.states_at + (n + LOCKS) * STATE_BYTES <= l.flags_at);
            prop_assert!(l.flags_at + n <= l.rows_at);
            prop_assert!(l.rows_at + u64::from(LEASES) * 8 * ROW_WORDS <= l.index_at);
            let (first, slots) = *table.levels().unwrap().last().unwrap();
            prop_assert!(first + slots >= 2 * n);
            prop_assert!(l.index_at + (first + slots) * 8 <= l.entries_at);
            prop_assert!(l.entries_at + n * 8 * ENTRY_WORDS <= l.hashes_at);
            prop_assert!(l.hashes_at + 8 * n <= l.total);
            prop_assert!(l.data_at <= l.flags_at);
            let parts = [l.states_at, l.flags_at, l.rows_at, l.index_at, l.entries_at, l.hashes_at];
            prop_assert!(parts.iter().all(|at| at % PAGE as u64 == 0));
        }
    }
}
