//! Rows of a batch that somebody acquires: from levels that must be asked whether they have them.
//!
//! ```text
//!   lend       the first records that come stand for their rows; the caller lays out the columns by them
//!   keep_lent  they are copied, and their memory is used again
//!   receive    what comes from now on is copied as it comes, out of memory that stays in the processor's caches
//! ```

use super::batch::{Batch, State};
use super::columns::Row;
use crate::records::INLINE;
use crate::tiers::{Acquiring, Fetched};
use std::sync::Arc;

/// So many bytes of records are copied together.
const TOGETHER: usize = 128 << 10;
/// About so many bytes come before there are columns.
const FIRST: usize = 512 << 10;

impl Batch {
    /// Asks for the first records, and has those that come, and are not in memory then, stand for their rows;
    /// false if they are of several schemas. Until `keep_lent` or `return_lent` they must stay where they are.
    pub fn lend(&mut self, acquiring: &mut Acquiring) -> bool {
        if self.stores.len() != 1 {
            return true;
        }
        acquiring.fetch_some(FIRST);
        let stand_in = |(index, fetched): (usize, &Fetched)| {
            let is_like = fetched.schema != INLINE && self.meets(0, fetched.schema);
            let rows = if is_like { self.stand_in(index, fetched) } else { Vec::new() };
            self.lent.extend(rows);
            is_like
        };
        // Before others are looked for: these may be on this node's disk by now, and are not read again.
        let alike = acquiring.all_given().all(stand_in) && self.look_again();
        if !alike {
            self.return_lent();
        }
        alike
    }

    /// The rows that were lent are absent again. If they were being copied it is no batch any more.
    pub fn return_lent(&mut self) {
        if self.lent.is_empty() {
            return;
        }
        if !self.copying.is_empty() {
            self.copying.clear(); // nobody reads any more, nor knows what moved meanwhile
            self.target = None;
        }
        for row in std::mem::take(&mut self.lent) {
            self.rows[row].state = State::Absent;
            self.rows[row].copied = None;
        }
    }

    /// Waits until all that was begun is copied, and lets go of what was lent.
    pub fn keep_lent(&mut self, acquiring: &mut Acquiring) {
        self.wait_for_copies();
        for row in std::mem::take(&mut self.lent) {
            self.rows[row].state = State::Received;
            acquiring.has(self.rows[row].index);
        }
    }

    /// Copies what comes of the rest, once there are columns. What is not of this batch is left `given`.
    pub fn receive(&mut self, acquiring: &mut Acquiring) {
        if self.stores.len() != 1 || self.target.is_none() {
            return;
        }
        let mut together = Vec::new();
        let mut unlike = Vec::new();
        let mut bytes = 0;
        acquiring.fetch_rest(&mut |index, fetched: Fetched| {
            if !self.schemas[0].contains(&fetched.schema) {
                return Some(fetched);
            }
            bytes += fetched.bytes().len();
            together.push((index, fetched));
            if bytes >= TOGETHER {
                self.copy_together(&mut together, &mut unlike);
                bytes = 0;
            }
            None
        });
        self.copy_together(&mut together, &mut unlike);
        unlike.into_iter().for_each(|(index, fetched)| acquiring.keep(index, fetched));
    }

    /// The samples whose rows are there, or read from below.
    pub fn present(&self) -> Vec<usize> {
        let present = self.rows.iter().filter(|row| !matches!(row.state, State::Absent));
        present.map(|row| row.index).collect()
    }

    /// Copies these records, and has their memory used again; those that are not of this batch are `unlike`.
    fn copy_together(
        &mut self,
        together: &mut Vec<(usize, Fetched)>,
        unlike: &mut Vec<(usize, Fetched)>,
    ) {
        let stand_in = |(index, fetched): &(usize, Fetched)| self.stand_in(*index, fetched);
        let rows: Vec<usize> = together.iter().flat_map(stand_in).collect();
        if rows.is_empty() {
            unlike.append(together);
            return;
        }
        let alike = self.copy_more();
        self.wait_for_copies();
        for row in rows {
            self.rows[row].state = if alike { State::Received } else { State::Absent };
            self.rows[row].copied = self.rows[row].copied.filter(|_| alike);
        }
        if !alike {
            unlike.append(together);
        }
        let levels = Arc::clone(&self.stores[0]);
        together.drain(..).for_each(|(_, fetched)| levels.reuse(fetched));
    }

    /// Has a record stand for the rows of its sample that are not there: which.
    fn stand_in(&mut self, index: usize, fetched: &Fetched) -> Vec<usize> {
        let bytes = fetched.bytes();
        let record = Row { data: bytes.as_ptr(), len: bytes.len() };
        if self.by_index.is_empty() {
            let by_index = self.rows.iter().enumerate().map(|(row, place)| (place.index, row));
            self.by_index = by_index.collect();
            self.by_index.sort_unstable();
        }
        let from = self.by_index.partition_point(|&(other, _)| other < index);
        let rows = self.by_index[from..].iter().take_while(|&&(other, _)| other == index);
        let mut found = Vec::new();
        for &(_, row) in rows {
            let place = &mut self.rows[row];
            if matches!(place.state, State::Absent) {
                place.state = State::Fetched(record, fetched.schema);
                found.push(row);
            }
        }
        found
    }
}
