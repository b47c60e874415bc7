//! Rows that are copied by who reads their records, part by part: out of the caches of the processor that did.
//!
//! What is read before a batch has columns, or is of another kind than its rows, is copied later with the rest.
#![allow(unsafe_code)] // copies to memory of the caller

use super::columns::{Columns, Row};
use super::gather::{Rows, Target};
use crate::fault::{Fault, active as broken};
use crate::records::schema::Schema;
use crate::sys::fork::Me;
use crate::tiers::{Fetched, Levels, Taker};
use std::sync::{Arc, Mutex, PoisonError};

/// Takes records into a batch that is laid out.
pub(super) struct Taking {
    levels: Arc<Levels>,
    /// Of the records that are rows of this batch: what it is, and its number in that store.
    schema: Arc<Schema>,
    number: u16,
    like: Arc<Columns>,
    target: Target,
    /// Of how many rows the batch is; and which of them the record of each position is.
    all: usize,
    rows: Vec<u32>,
    taken: Mutex<Vec<Rows>>,
    /// A forked child leaves its parent's batch alone.
    owner: Me,
}

impl Taking {
    /// For a batch of so many rows with columns like these, into this target, which must be there until the fetch
    /// that this is offered is over. `rows` are by position.
    pub(super) fn new(
        levels: &Arc<Levels>,
        (schema, number): (Arc<Schema>, u16),
        like: Arc<Columns>,
        target: Target,
        all: usize,
        rows: &[usize],
    ) -> Self {
        let rows = rows.iter().map(|&row| row as u32).collect();
        let (levels, taken) = (Arc::clone(levels), Mutex::default());
        Self { levels, schema, number, like, target, all, rows, taken, owner: Me::now() }
    }

    fn is_ours(&self) -> bool {
        self.owner == Me::now() || broken(Fault::TakeForParent)
    }

    /// The rows that were copied; none in a child, who has read all of them again.
    pub(super) fn taken(&self) -> Vec<Rows> {
        if self.owner != Me::now() {
            return Vec::new(); // and the lock may be held by a thread that it does not have
        }
        std::mem::take(&mut *self.taken.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Copies these records, if all of them are rows of this batch.
    fn copy(&self, records: &[(usize, Fetched)]) -> Option<Rows> {
        let places = records.iter().map(|(at, _)| self.rows[*at]).collect();
        let row_of = |(_, fetched): &(usize, Fetched)| {
            let bytes = fetched.bytes();
            Row { data: bytes.as_ptr(), len: bytes.len() }
        };
        let records: Vec<Row> = records.iter().map(row_of).collect();
        // SAFETY: of memory that the caller holds.
        let columns = unsafe { Columns::plan(Arc::clone(&self.schema), &records, &[], None) }?;
        if !columns.is_like(&self.like) {
            return None;
        }
        let rows = Rows::new(columns, records, places, self.all)?;
        // SAFETY: as above; the target is that of a batch with such columns, and lives for as long as this is used;
        // each row is at one position.
        unsafe { rows.copy_all(&self.target) }.then_some(rows)
    }
}

impl Taker for Taking {
    fn take(&self, records: &mut Vec<(usize, Fetched)>) {
        let is_one = |(_, fetched): &(usize, Fetched)| fetched.schema == self.number;
        if records.is_empty() || !self.is_ours() || !records.iter().all(is_one) {
            return;
        }
        if let Some(rows) = self.copy(records) {
            self.taken.lock().unwrap_or_else(PoisonError::into_inner).push(rows);
            records.drain(..).for_each(|(_, fetched)| self.levels.reuse(fetched));
        }
    }
}
