//! A batch in the making: records that were found, laid out, and copied out whole.
//!
//! ```text
//!   find      where the records of these samples are, all of one schema
//!   give      what the store does not have: records of samples that were loaded
//!   lay out   which columns that makes; the caller then makes the memory for them
//!   copy      rows into columns, on several threads; then each record is checked, and those that
//!             moved meanwhile are looked for and copied again
//! ```
#![allow(unsafe_code)] // memory of others, and of the caller

use super::columns::{Column, Columns, Pieces, Row, Text};
use super::gather::Target;
use crate::error::{Error, Kind, Result};
use crate::records::schema::Schema;
use crate::records::{INLINE, Record, RecordStore};
use std::sync::Arc;

/// How often a record is copied again while others recycle the memory under it.
const TRIES: usize = 8;

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gathered {
    /// All rows are there, as they were at one time each.
    Whole,
    /// Shapes differ: there is no such batch.
    Unlike,
    /// A record is gone.
    Gone,
}

/// Many records, gathered column by column into what default_collate makes of them.
pub struct Batch {
    rows: Vec<Row>,
    schema: u16,
    origin: Origin,
    /// Rows that are not there yet, the last one first.
    absent: Vec<usize>,
    given: Vec<(usize, Pieces)>,
    columns: Option<Columns>,
    texts: Vec<u8>,
}

/// Who has the records.
enum Origin {
    /// The caller, who answers for them.
    Caller,
    /// A store, which may recycle the memory under them; where each was found, if it was.
    Store { store: Arc<RecordStore>, indices: Vec<usize>, found: Vec<Option<Record>> },
}

impl Batch {
    /// The records of these samples, as far as they are there; `None` if there are none, or they are not of
    /// one schema.
    pub fn find(store: &Arc<RecordStore>, indices: &[i64]) -> Option<Self> {
        let indices: Vec<usize> =
            indices.iter().map(|&index| store.index(index)).collect::<Option<_>>()?;
        let found: Vec<Option<Record>> = indices.iter().map(|&index| store.find(index)).collect();
        let mut schemas = found.iter().flatten().map(|record| record.schema);
        let schema = schemas.next();
        if indices.is_empty()
            || schema == Some(INLINE)
            || schemas.any(|other| Some(other) != schema)
        {
            return None;
        }
        let nowhere = Row { data: std::ptr::null(), len: 0 };
        let row = |record: &Option<Record>| record.map_or(nowhere, |record| row_of(store, record));
        let rows = found.iter().map(row).collect();
        let absent = (0..found.len()).rev().filter(|&row| found[row].is_none()).collect();
        let origin = Origin::Store { store: Arc::clone(store), indices, found };
        Some(Self { absent, schema: schema.unwrap_or(INLINE), ..Self::made(rows, origin) })
    }

    /// A batch of these records of one schema.
    ///
    /// # Safety
    /// They must be readable for as long as the batch is used.
    pub unsafe fn over(rows: Vec<Row>) -> Self {
        Self::made(rows, Origin::Caller)
    }

    fn made(rows: Vec<Row>, origin: Origin) -> Self {
        let (absent, given, texts) = Default::default();
        Self { rows, schema: INLINE, origin, absent, given, columns: None, texts }
    }

    /// The first row that is not there.
    pub fn absent(&self) -> Option<usize> {
        self.absent.last().copied()
    }

    /// Puts the record of a sample that was loaded where the first row is not there; false if it is
    /// not of the schema of the others.
    ///
    /// # Safety
    /// The pieces must be readable, and stay as they are, for as long as the batch is used.
    pub unsafe fn give(&mut self, schema: u16, pieces: Pieces) -> bool {
        let alike = self.schema == schema || self.schema == INLINE;
        if schema == INLINE || !alike {
            return false;
        }
        let Some(row) = self.absent.pop() else { return false };
        self.schema = schema;
        self.rows[row] = pieces.row();
        self.given.push((row, pieces));
        true
    }

    /// The number of the schema in its store.
    pub fn schema(&self) -> u16 {
        self.schema
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Finds out which columns there are; false if these records are not a batch.
    pub fn lay_out(&mut self, schema: Arc<Schema>) -> bool {
        if !self.absent.is_empty() {
            return false;
        }
        // SAFETY: in the mapping of a store that we hold, or by the promise of `over` or `give`.
        self.columns = unsafe { Columns::plan(schema, &self.rows, &self.given) };
        self.columns.is_some()
    }

    /// The columns, in the order of the schema's parts.
    pub fn columns(&self) -> &[Column] {
        self.columns.as_ref().map_or(&[], |columns| &columns.columns)
    }

    /// How long the lists of numbers of this payload are: one column per entry.
    pub fn numbers_in(&self, leaf: u32) -> usize {
        self.columns
            .as_ref()
            .map_or(0, |columns| columns.extents(0)[leaf as usize].len as usize / 8)
    }

    /// What `copy` moves.
    pub fn bytes(&self) -> usize {
        self.columns.as_ref().map_or(0, Columns::bytes)
    }

    /// Copies all rows of every column to these addresses, each with its length, and the strings to
    /// memory of its own.
    ///
    /// # Safety
    /// The targets must be valid for writes of their lengths, and nobody else's meanwhile.
    pub unsafe fn copy(&mut self, to: &[(*mut u8, usize)], threads: usize) -> Result<Gathered> {
        let Some(columns) = &mut self.columns else { return Ok(Gathered::Unlike) };
        let right = to.len() == columns.columns.len()
            && to.iter().zip(&columns.columns).all(|(&(_, len), column)| {
                Some(len) == column.row_bytes.checked_mul(self.rows.len())
            });
        if !right {
            let message =
                "a batch was allocated with another shape, dtype or layout than asked for";
            return Err(Error::new(Kind::State, message));
        }
        self.texts = vec![0; columns.text_bytes];
        let addresses: Vec<*mut u8> = to.iter().map(|&(address, _)| address).collect();
        let target = Target { columns: &addresses, texts: self.texts.as_mut_ptr() };
        // SAFETY: the rows are those of the plan; the target was checked, and is the caller's.
        let alike = unsafe { columns.copy_all(&self.rows, &target, threads) };
        for _ in 0..TRIES {
            // Nothing that was read is believed before this, not even that shapes differ.
            let moved = self.origin.moved();
            if moved.is_empty() {
                return Ok(if alike { Gathered::Whole } else { Gathered::Unlike });
            }
            if !alike {
                return Ok(Gathered::Gone);
            }
            for row in moved {
                let Some(found) = self.origin.find_again(row, self.schema) else {
                    return Ok(Gathered::Gone);
                };
                // SAFETY: in the mapping of a store that we hold.
                if !unsafe { columns.replace(row, found) } {
                    return Ok(Gathered::Gone);
                }
                self.rows[row] = found;
                // SAFETY: as above, and the record fits.
                if !unsafe { columns.copy(&self.rows, &target, row..row + 1) } {
                    return Ok(Gathered::Gone);
                }
            }
        }
        Ok(Gathered::Gone)
    }

    /// How many strings a row has.
    pub fn texts_per_row(&self) -> usize {
        self.columns.as_ref().map_or(0, |columns| columns.text_leaves.len())
    }

    /// The strings of all rows, row by row: where they lie in `text_bytes`.
    pub fn texts(&self) -> &[Text] {
        self.columns.as_ref().map_or(&[], |columns| &columns.texts)
    }

    /// The bytes of all strings, once they were copied.
    pub fn text_bytes(&self) -> &[u8] {
        &self.texts
    }
}

fn row_of(store: &RecordStore, found: Record) -> Row {
    Row { data: store.segment().mapping().at(found.at, found.len).as_ptr(), len: found.len }
}

impl Origin {
    /// The rows whose records moved since they were found.
    fn moved(&self) -> Vec<usize> {
        match self {
            Self::Caller => Vec::new(),
            Self::Store { store, found, .. } => {
                let moved = |record: Record| !store.is_whole(record.region, record.generation);
                (0..found.len()).filter(|&row| found[row].is_some_and(moved)).collect()
            }
        }
    }

    fn find_again(&mut self, row: usize, schema: u16) -> Option<Row> {
        match self {
            Self::Caller => None,
            Self::Store { store, indices, found } => {
                let again = store.find(indices[row]).filter(|record| record.schema == schema)?;
                found[row] = Some(again);
                Some(row_of(store, again))
            }
        }
    }
}
