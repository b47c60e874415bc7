//! A batch in the making: rows from wherever they are, each written once.
//!
//! ```text
//!   find      where the records of these samples are; all of one schema per store. What is in a level
//!             below memory is read from now on
//!   lay out   which columns that makes, or those of another batch; the caller then makes the memory for them
//!   begin     copies what was found, on threads that go on by themselves. As soon as the last row is
//!             copied it is noted which records moved meanwhile
//!   arrive    waits for what is read from below; of a batch that is laid out, who reads has copied it
//!   lend, receive   rows that somebody acquires; see `receive`
//!   give      a row that no store had: the record of a sample that was loaded meanwhile
//!   finish    the rows that were given, or have come into a store; those that moved are looked for and
//!             copied again
//! ```
//!
//! Where no record was found, the columns are laid out when there is one.
#![allow(unsafe_code)] // memory of others, and of the caller

use super::columns::{Column, Columns, Pieces, Row};
use super::gather::{Copying, Moved, Rows, Target};
use super::images::Fused;
use super::taking::Taking;
use crate::error::{Error, Kind, Result};
use crate::records::schema::Schema;
use crate::records::{INLINE, Record, RecordStore};
use crate::tiers::{Fetched, Fetching, Levels, Taker};
use std::sync::Arc;

/// How often a record is copied again while others recycle the memory under it.
const TRIES: usize = 8;

/// So many rows ahead the index is asked for: samples of a batch are anywhere in it.
const PREFETCHED: usize = 8;

/// Which columns a batch has, for another one of the same store.
#[derive(Clone)]
pub struct Layout {
    /// Of the schema, in that store.
    number: u16,
    columns: Arc<Columns>,
}

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
    /// What is being copied. Before the rest: it ends before what it copies goes.
    pub(super) copying: Vec<Copying>,
    /// What those that were waited for found out: the rows that moved, and whether any were of other shapes.
    moved: Vec<usize>,
    unlike: bool,
    pub(super) stores: Arc<[Arc<Levels>]>,
    /// Per store, how often it had been emptied when its records were first looked for.
    emptied: Vec<u64>,
    /// Per store, the schema of the records that were found in it; several only where images are fused.
    pub(super) schemas: Vec<Vec<u16>>,
    /// Those of them that are not the one by which the batch is laid out: the store, the number there.
    others: Vec<(u32, u16, Arc<Schema>)>,
    pub(super) rows: Vec<Place>,
    /// By the index of their samples, once somebody looks for them so.
    pub(super) by_index: Vec<(usize, usize)>,
    /// Those for which records of somebody else's stand.
    pub(super) lent: Vec<usize>,
    /// Those that are in pieces.
    given: Vec<(usize, Pieces)>,
    /// Those of another schema than that of the batch.
    given_as: Vec<(usize, Arc<Schema>)>,
    /// What is being read from below.
    coming: Vec<Coming>,
    /// What was, with the store: rows lie in it.
    fetched: Vec<(u32, Fetched)>,
    schema: Option<Arc<Schema>>,
    /// By which it was laid out, before any row was there.
    usual: Option<Layout>,
    /// What becomes of images.
    fused: Option<Fused>,
    columns: Vec<Column>,
    pub(super) target: Option<Target>,
    threads: usize,
    /// All rows that were copied, or are being copied. A row that is in several is that of the last.
    copied: Vec<Arc<Rows>>,
}

/// Rows that are being read from below.
struct Coming {
    store: u32,
    rows: Vec<usize>,
    fetching: Fetching,
    /// Copies them as they are read, once there is somewhere to copy them to.
    taking: Option<Arc<Taking>>,
}

/// Where a row comes from.
#[derive(Clone, Copy)]
pub(super) struct Place {
    store: u32,
    pub(super) index: usize,
    /// What random numbers of its images follow from.
    number: u64,
    pub(super) state: State,
    /// Where it is in `copied`, and the how-manieth of those.
    pub(super) copied: Option<(u32, u32)>,
}

#[derive(Clone, Copy)]
pub(super) enum State {
    Absent,
    /// In a level below memory.
    Below,
    Found(Record),
    /// From below: where in memory it is now, and of which schema.
    Fetched(Row, u16),
    /// It came from below and is copied.
    Received,
    /// By the caller, who answers for it.
    Given(Row),
}

// SAFETY: addresses, of which the caller answers for those that are its own.
unsafe impl Send for Batch {}

impl Batch {
    /// So many rows, none of which is there.
    pub fn new(rows: usize) -> Self {
        let place = Place { store: 0, index: 0, number: 0, state: State::Absent, copied: None };
        Self {
            copying: Vec::new(),
            moved: Vec::new(),
            unlike: false,
            stores: Arc::new([]),
            emptied: Vec::new(),
            schemas: Vec::new(),
            others: Vec::new(),
            rows: vec![place; rows],
            by_index: Vec::new(),
            lent: Vec::new(),
            given: Vec::new(),
            given_as: Vec::new(),
            coming: Vec::new(),
            fetched: Vec::new(),
            schema: None,
            usual: None,
            fused: None,
            columns: Vec::new(),
            target: None,
            threads: 1,
            copied: Vec::new(),
        }
    }

    /// The samples of these indices, each of the store of that number, as far as they are there; `None`
    /// if one is in no dataset, or if the records that were found in one store are not of one schema.
    /// Without numbers all are of the first store.
    pub fn find(stores: Vec<Arc<Levels>>, which: &[u32], indices: &[i64]) -> Option<Self> {
        Self::find_for(None, stores, which, indices)
    }

    /// The same where images are `fused`: made by a pipeline. Then there may be several schemas.
    pub fn find_for(
        fused: Option<Fused>,
        stores: Vec<Arc<Levels>>,
        which: &[u32],
        indices: &[i64],
    ) -> Option<Self> {
        let mut made = Self::new(0);
        made.fused = fused;
        made.emptied = stores.iter().map(|store| store.memory().emptied()).collect();
        made.schemas = vec![Vec::new(); stores.len()];
        made.stores = stores.into();
        if !which.is_empty() && which.len() != indices.len() {
            return None;
        }
        made.rows.try_reserve_exact(indices.len()).ok()?; // as long as the caller says
        for (row, &index) in indices.iter().enumerate() {
            let store = which.get(row).copied().unwrap_or(0);
            let index = made.stores.get(store as usize)?.memory().index(index)?;
            let numbers = made.fused.as_ref().map(|fused| &fused.numbers);
            let number = numbers.and_then(|numbers| numbers.get(row)).map_or(index as u64, |n| *n);
            made.rows.push(Place { store, index, number, state: State::Absent, copied: None });
        }
        made.look_again().then_some(made)
    }

    /// Has those rows read that are below memory.
    fn begin_to_fetch(&mut self) {
        for (store, levels) in self.stores.iter().enumerate().filter(|(_, of)| of.has_more()) {
            let mut rows = Vec::new();
            for (row, place) in self.rows.iter_mut().enumerate() {
                let here = place.store as usize == store && matches!(place.state, State::Absent);
                if here && levels.is_below(place.index) {
                    place.state = State::Below;
                    rows.push(row);
                }
            }
            if !rows.is_empty() {
                let indices = rows.iter().map(|&row| self.rows[row].index).collect();
                let (store, fetching) = (store as u32, levels.begin_fetch(indices));
                self.coming.push(Coming { store, rows, fetching, taking: None });
            }
        }
        self.take_as_they_come();
    }

    /// Has rows copied by who reads them, if there are columns.
    fn take_as_they_come(&mut self) {
        let Some((target, schema)) = self.target.as_ref().zip(self.schema.as_ref()) else { return };
        let first = self.copied.first().map(|first| first.columns.without_rows());
        let usual = self.usual.as_ref().map(|usual| Arc::clone(&usual.columns));
        let Some(like) = first.map(Arc::new).or(usual).filter(|_| self.fused.is_none()) else {
            return;
        };
        for coming in self.coming.iter_mut().filter(|coming| coming.taking.is_none()) {
            let store = coming.store as usize;
            let Some(&number) = self.schemas[store].first() else { continue };
            let (schema, like) = ((Arc::clone(schema), number), Arc::clone(&like));
            let (levels, all) = (&self.stores[store], self.rows.len());
            let taking =
                Arc::new(Taking::new(levels, schema, like, target.clone(), all, &coming.rows));
            coming.fetching.offer_to(Arc::clone(&taking) as Arc<dyn Taker>);
            coming.taking = Some(taking);
        }
    }

    /// Whether rows are being read from below.
    pub fn is_coming(&self) -> bool {
        !self.coming.is_empty()
    }

    /// Waits for what is read from below. What did not come is absent. False if a record is of another schema
    /// than others of its store, or brings its own.
    pub fn arrive(&mut self) -> bool {
        let mut alike = true;
        for Coming { store, rows, fetching, taking } in std::mem::take(&mut self.coming) {
            for (row, fetched) in rows.into_iter().zip(fetching.wait()) {
                let place = &mut self.rows[row];
                place.state = State::Absent;
                let Some(fetched) = fetched else { continue };
                let schema = fetched.schema;
                alike &= met(&mut self.schemas[store as usize], schema, self.fused.is_some());
                let bytes = fetched.bytes();
                let row = Row { data: bytes.as_ptr(), len: bytes.len() };
                place.state = State::Fetched(row, schema);
                self.fetched.push((store, fetched)); // its memory stays where it is
            }
            for rows in taking.iter().flat_map(|taking| taking.taken()) {
                for &row in &rows.places {
                    self.rows[row as usize].state = State::Received;
                }
                self.note(rows);
            }
        }
        alike
    }

    /// Looks for the rows that are not there, and has those read that are below memory by now; false if
    /// a record is of another schema than others of its store, or brings its own.
    pub fn look_again(&mut self) -> bool {
        for row in 0..self.rows.len() {
            if let Some(next) = self.rows.get(row + PREFETCHED)
                && let Some(store) = self.stores.get(next.store as usize)
            {
                store.memory().prefetch(next.index);
            }
            let place = &mut self.rows[row];
            if !matches!(place.state, State::Absent) {
                continue;
            }
            let Some(store) = self.stores.get(place.store as usize) else { continue };
            let Some(record) = store.memory().find(place.index) else { continue };
            let schemas = &mut self.schemas[place.store as usize];
            if !met(schemas, record.schema, self.fused.is_some()) {
                return false;
            }
            place.state = State::Found(record);
        }
        self.begin_to_fetch();
        true
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Which rows are not there.
    pub fn absent(&self) -> Vec<u32> {
        let absent = |row: &usize| matches!(self.rows[*row].state, State::Absent);
        (0..self.rows.len()).filter(absent).map(|row| row as u32).collect()
    }

    /// The schemas of what was found in that store, by their numbers there: one at the most, unless
    /// images are fused.
    pub fn schemas_in(&self, store: usize) -> &[u16] {
        self.schemas.get(store).map_or(&[], Vec::as_slice)
    }

    /// Says what that schema of a store is, where it is another one than that of the batch, and like it.
    pub fn know(&mut self, store: usize, number: u16, schema: Arc<Schema>) {
        let store = store as u32;
        if !self.others.iter().any(|other| (other.0, other.1) == (store, number)) {
            self.others.push((store, number, schema));
        }
    }

    /// Puts the record of a sample that was loaded where that row is not there; false if it is.
    ///
    /// # Safety
    /// The pieces must be readable, and stay as they are, for as long as the batch is used.
    pub unsafe fn give(&mut self, row: usize, pieces: Pieces) -> bool {
        let Some(place) = self.rows.get_mut(row) else { return false };
        if !matches!(place.state, State::Absent) {
            return false;
        }
        place.state = State::Given(pieces.row());
        if pieces.0.len() > 1 {
            self.given.push((row, pieces));
        }
        true
    }

    /// As `give`, of another schema than that of the batch, and like it.
    ///
    /// # Safety
    /// As for `give`.
    pub unsafe fn give_as(&mut self, row: usize, pieces: Pieces, schema: Arc<Schema>) -> bool {
        // SAFETY: by the caller's promise.
        let given = unsafe { self.give(row, pieces) };
        if given {
            self.given_as.push((row, schema));
        }
        given
    }

    /// Finds out which columns there are, by the rows that are there, all of which are of this schema or
    /// one that is known to be like it; false if there are none, or they are not a batch.
    pub fn lay_out(&mut self, schema: Arc<Schema>) -> bool {
        if self.schema.is_some() {
            return false;
        }
        self.schema = Some(schema);
        self.plan_more()
    }

    /// Finds out which columns there are, by another batch. Rows of other columns are then none of this one.
    pub fn lay_out_like(&mut self, layout: &Layout) -> bool {
        if self.schema.is_some() || self.stores.len() != 1 || !self.meets(0, layout.number) {
            return false;
        }
        self.schema = Some(Arc::clone(&layout.columns.schema));
        self.columns.clone_from(&layout.columns.columns);
        self.usual = Some(layout.clone());
        true
    }

    /// How this batch is laid out, for another one of the same store; None if it is not, or not by schemas and
    /// shapes alone.
    pub fn layout(&self) -> Option<Layout> {
        if self.fused.is_some() || self.stores.len() != 1 {
            return None;
        }
        let columns = &self.copied.first()?.columns;
        let number = *self.schemas[0].first()?;
        Some(Layout { number, columns: Arc::new(columns.without_rows()) })
    }

    /// Whether this batch is laid out so.
    pub fn is_laid_out_like(&self, layout: &Layout) -> bool {
        let number = self.schemas.first().and_then(|numbers| numbers.first());
        let is_like = |rows: &Arc<Rows>| {
            self.columns == layout.columns.columns && layout.columns.has_shapes_of(&rows.columns)
        };
        number == Some(&layout.number) && self.copied.first().is_some_and(is_like)
    }

    /// The columns, in the order of the schema's parts.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// How long the lists of numbers of this payload are: one column per entry.
    pub fn numbers_in(&self, leaf: u32) -> usize {
        self.copied
            .first()
            .map_or(0, |rows| rows.columns.extents(0)[leaf as usize].len as usize / 8)
    }

    /// Begins to copy the rows that are there to these addresses, each with its length: on up to that
    /// many threads, the caller's included, which comes in when it waits.
    ///
    /// # Safety
    /// The targets must be valid for writes of their lengths, and nobody else's, until the batch is
    /// finished or dropped.
    pub unsafe fn begin(&mut self, to: &[(*mut u8, usize)], threads: usize) -> Result<()> {
        let right = self.target.is_none()
            && to.len() == self.columns.len()
            && to.iter().zip(&self.columns).all(|(&(_, len), column)| {
                Some(len) == column.row_bytes.checked_mul(self.rows.len())
            });
        if !right || self.copied.is_empty() && self.usual.is_none() {
            let message =
                "a batch was allocated with another shape, dtype or layout than asked for";
            return Err(Error::new(Kind::State, message));
        }
        self.target = Some(Target(to.iter().map(|&(address, _)| address).collect()));
        self.threads = threads;
        for rows in self.copied.clone() {
            // SAFETY: the target was checked, and is the caller's; records are those of a store that we
            // hold, or of the caller.
            unsafe { self.copy(&rows) };
        }
        self.take_as_they_come();
        Ok(())
    }

    /// Waits for the copies, and makes them for rows that have come since. Nothing is to be read of the
    /// batch before.
    pub fn finish(&mut self) -> Gathered {
        if self.target.is_none() {
            return Gathered::Unlike;
        }
        if self.rows.iter().any(|row| row.copied.is_none()) {
            if self.rows.iter().any(|row| matches!(row.state, State::Absent | State::Below)) {
                return Gathered::Gone;
            }
            if !self.copy_more() {
                return Gathered::Unlike;
            }
        }
        for _ in 0..TRIES {
            self.wait_for_copies();
            let all_alike = !std::mem::take(&mut self.unlike);
            let all_moved = std::mem::take(&mut self.moved);
            // Nothing that was read is believed before this, not even that shapes differ.
            if all_moved.is_empty() {
                return if all_alike { Gathered::Whole } else { Gathered::Unlike };
            }
            if !all_alike || !self.find_again(&all_moved) || !self.copy_more() {
                return Gathered::Gone;
            }
        }
        Gathered::Gone
    }

    /// Waits until all that was begun is copied, and notes what that found out.
    pub(super) fn wait_for_copies(&mut self) {
        for copying in std::mem::take(&mut self.copying) {
            let (moved, alike) = copying.wait();
            self.unlike |= !alike;
            self.moved.extend(moved);
        }
    }

    /// Whether all that was begun is copied.
    #[cfg(test)]
    pub(super) fn is_copied(&self) -> bool {
        self.copying.iter().all(Copying::is_over)
    }

    /// Whether every row that came from a store is still there, as it was copied.
    pub fn is_current(&self) -> bool {
        let found = found_in(&self.rows, 0..self.rows.len());
        let is_there = |place: &Place| {
            let store = &self.stores[place.store as usize];
            // What is there may be another one, of after a clear().
            store.memory().emptied() == self.emptied[place.store as usize]
                && (store.is_below(place.index) || store.memory().find(place.index).is_some())
        };
        let fetched = |place: &&Place| matches!(place.state, State::Fetched(..) | State::Below);
        let is_of_now = |place: &Place| {
            let store = place.store as usize;
            !matches!(place.state, State::Received)
                || self.stores[store].memory().emptied() == self.emptied[store]
        };
        moved(&self.stores, &found).is_empty()
            && self.rows.iter().filter(fetched).all(is_there)
            && self.rows.iter().all(is_of_now)
    }

    /// A string of a row, after the batch was finished; `None` if there is none.
    pub fn text(&self, row: usize, column: usize) -> Option<&[u8]> {
        let (rows, at) = self.rows.get(row)?.copied?;
        let rows = self.copied.get(rows as usize).filter(|_| self.copying.is_empty())?;
        // SAFETY: nothing is being copied.
        (column < rows.columns.text_leaves.len()).then(|| unsafe { rows.text(at as usize, column) })
    }

    /// What a row keeps beside its columns, after the batch was finished; `None` if that is nothing.
    pub fn rest(&self, row: usize) -> Option<&[u8]> {
        let (rows, at) = self.rows.get(row)?.copied?;
        let rows = self.copied.get(rows as usize).filter(|_| self.copying.is_empty())?;
        // SAFETY: nothing is being copied.
        unsafe { rows.rest(at as usize) }
    }

    /// The schema of that row, if it is another one than that of the batch.
    fn other_schema(&self, row: usize) -> Option<&Arc<Schema>> {
        let of_store = |store, number| {
            let other = self.others.iter().find(|other| (other.0, other.1) == (store, number));
            other.map(|(.., schema)| schema)
        };
        let place = &self.rows[row];
        match place.state {
            State::Found(record) => of_store(place.store, record.schema),
            State::Fetched(_, number) => of_store(place.store, number),
            _ => {
                let given = self.given_as.iter().find(|(given, _)| *given == row);
                given.map(|(_, schema)| schema)
            }
        }
    }

    /// The rows that are there and not copied yet, by their schemas; that of the batch first.
    fn rows_to_plan(&self) -> Vec<(Arc<Schema>, Vec<u32>, Vec<Row>)> {
        let record_of = |place: &Place| match place.state {
            State::Found(record) if place.copied.is_none() => {
                Some(row_of(self.stores[place.store as usize].memory(), record))
            }
            State::Given(row) | State::Fetched(row, _) if place.copied.is_none() => Some(row),
            _ => None,
        };
        let Some(own) = &self.schema else { return Vec::new() };
        let mut found = vec![(Arc::clone(own), Vec::new(), Vec::new())];
        let is_one = self.others.is_empty() && self.given_as.is_empty();
        for (row, place) in self.rows.iter().enumerate() {
            let Some(record) = record_of(place) else { continue };
            let schema = if is_one { own } else { self.other_schema(row).unwrap_or(own) };
            let at = found.iter().position(|(of, ..)| Arc::ptr_eq(of, schema));
            let at = at.unwrap_or_else(|| {
                found.push((Arc::clone(schema), Vec::new(), Vec::new()));
                found.len() - 1
            });
            found[at].1.push(row as u32);
            found[at].2.push(record);
        }
        found.retain(|(_, places, _)| !places.is_empty());
        found
    }

    /// Rows of one schema that are there, as rows of this batch.
    fn plan(&self, schema: Arc<Schema>, places: Vec<u32>, records: Vec<Row>) -> Option<Rows> {
        let pieces: Vec<_> = self
            .given
            .iter()
            .filter_map(|(row, pieces)| Some((places.binary_search(&(*row as u32)).ok()?, pieces)))
            .collect();
        let number_of = |&row: &u32| self.rows[row as usize].number;
        let numbers: Vec<u64> = places.iter().map(number_of).collect();
        let fused = self.fused.as_ref().map(|fused| (fused, &*numbers));
        // SAFETY: in the mapping of a store that we hold, in what was fetched and is held, or by the promise of
        // `give`.
        let columns = unsafe { Columns::plan(schema, &records, &pieces, fused) }?;
        Rows::new(columns, records, places, self.rows.len())
    }

    fn note(&mut self, rows: Rows) {
        for (at, &place) in rows.places.iter().enumerate() {
            self.rows[place as usize].copied = Some((self.copied.len() as u32, at as u32));
        }
        self.copied.push(Arc::new(rows));
    }

    /// Notes the rows that are there and not copied yet; false if there are none, or they are not of this
    /// batch.
    fn plan_more(&mut self) -> bool {
        let found = self.rows_to_plan();
        let any = !found.is_empty();
        for (schema, places, records) in found {
            let is_own = self.schema.as_ref().is_some_and(|own| Arc::ptr_eq(own, &schema));
            let Some(rows) = self.plan(schema, places, records) else { return false };
            let columns = &rows.columns.columns;
            let usual = self.usual.as_ref().map(|usual| &*usual.columns);
            match self.copied.first().map(|first| &first.columns).or(usual) {
                None => self.columns.clone_from(columns),
                // What rows keep beside their columns is read by one schema.
                Some(first) => {
                    let alike = is_own || !rows.columns.schema.has_rest;
                    if !alike || !first.is_like(&rows.columns) {
                        return false;
                    }
                }
            }
            self.note(rows);
        }
        any
    }

    /// Begins with the rows that have come since; false if they are not of this batch.
    pub(super) fn copy_more(&mut self) -> bool {
        let before = self.copied.len();
        if !self.plan_more() {
            return false;
        }
        for at in before..self.copied.len() {
            let rows = Arc::clone(&self.copied[at]);
            // SAFETY: by the promises of `begin` and `give`: the columns are as long as those of before.
            unsafe { self.copy(&rows) };
        }
        true
    }

    /// # Safety
    /// As for `Rows::begin`.
    unsafe fn copy(&mut self, rows: &Arc<Rows>) {
        let Some(target) = &self.target else { return };
        let found = found_in(&self.rows, rows.places.iter().map(|&row| row as usize));
        let stores = Arc::clone(&self.stores);
        let check: Moved = Box::new(move || moved(&stores, &found));
        // SAFETY: by the caller's promise.
        self.copying.push(unsafe { rows.begin(target, self.threads, check) });
    }

    /// Notes a schema of records of a store; false if there is another one, where there may be but one.
    pub(super) fn meets(&mut self, store: usize, schema: u16) -> bool {
        met(&mut self.schemas[store], schema, self.fused.is_some())
    }

    /// Looks for records that moved; false if one is not there, or is of another schema.
    fn find_again(&mut self, rows: &[usize]) -> bool {
        for &row in rows {
            self.rows[row].state = State::Absent;
            self.rows[row].copied = None;
        }
        self.look_again() && rows.iter().all(|&row| matches!(self.rows[row].state, State::Found(_)))
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.copying.clear(); // nobody reads any more
        for (store, fetched) in self.fetched.drain(..) {
            self.stores[store as usize].reuse(fetched);
        }
    }
}

/// Notes a schema of records of one store; false if there is another one, where there may be but one.
fn met(schemas: &mut Vec<u16>, schema: u16, may_differ: bool) -> bool {
    if schema == INLINE {
        return false;
    }
    if !schemas.contains(&schema) {
        schemas.push(schema);
    }
    may_differ || schemas.len() == 1
}

fn row_of(store: &RecordStore, found: Record) -> Row {
    Row { data: store.segment().mapping().at(found.at, found.len).as_ptr(), len: found.len }
}

/// Where rows were found whose bytes may move: the row, its store, region and generation.
type FoundIn = Vec<(usize, u32, u32, u32)>;

fn found_in(rows: &[Place], which: impl Iterator<Item = usize>) -> FoundIn {
    let found = |row: usize| match rows[row].state {
        State::Found(record) => Some((row, rows[row].store, record.region, record.generation)),
        _ => None,
    };
    which.filter_map(found).collect()
}

/// The rows whose records moved since they were found.
fn moved(stores: &[Arc<Levels>], found: &FoundIn) -> Vec<usize> {
    // Neighbours are often in the same region.
    let mut last = None;
    let mut has_moved = |&&(_, store, region, generation): &&(usize, u32, u32, u32)| {
        let (place, moved) = last.unwrap_or((None, false));
        if place == Some((store, region, generation)) {
            return moved;
        }
        let moved = !stores[store as usize].memory().is_whole(region, generation);
        last = Some((Some((store, region, generation)), moved));
        moved
    };
    found.iter().filter(|place| has_moved(place)).map(|&(row, ..)| row).collect()
}
