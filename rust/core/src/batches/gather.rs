//! The copies: rows of many records into the columns of one batch.
//!
//! Other processes may write to the records meanwhile. No byte in them can make the copies read or
//! write out of bounds: all that is believed was copied to private memory first. But the batch is
//! nonsense then, so whoever has the records is asked afterwards whether they stayed as they were
//! ([`super::batch`]).
#![allow(unsafe_code)] // copies between raw addresses

use super::columns::{Column, Columns, Row, Start, Text};
use crate::augment::Scratch;
use crate::records::schema::PAYLOAD_ALIGN;
use crate::sys::prefetch::{self, copy_and_fetch};
use crate::sys::stores::{Stores, are_streamed, stream};
use crate::sys::thread_pool::{Done, Posted, Threads, post};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

const PAGE: usize = 4096;
/// Rows are handed to threads in parts of about this size.
const BYTES_PER_PART: usize = 128 << 10;
/// A few rows at a time: what a record's columns share is then still in the processor's cache.
const ROWS_PER_BLOCK: usize = 64;

/// Rows of a batch that are copied together: their records have the same shapes.
pub(super) struct Rows {
    pub columns: Columns,
    pub records: Vec<Row>,
    /// Which row of the batch each of them is.
    pub places: Vec<u32>,
    /// Of how many rows the batch is.
    pub all: usize,
    texts: Box<[UnsafeCell<u8>]>,
}

// SAFETY: addresses of records, which who plans them answers for; strings are written by one thread per
// row, and read when the copy is over.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

/// Where the columns of a batch go: the first byte of each.
#[derive(Clone)]
pub(super) struct Target(pub Arc<[*mut u8]>);

// SAFETY: threads write different rows of it.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

/// A copy that goes on by itself, where there are threads for it, and ends when this is dropped.
pub(super) struct Copying {
    posted: Posted,
    outcome: Arc<Outcome>,
}

/// Says which rows of the batch did not stay as they were until now.
pub(super) type Moved = Box<dyn Fn() -> Vec<usize> + Send + Sync>;

/// What a copy finds out.
struct Outcome {
    alike: AtomicBool,
    /// Parts that are still to be copied.
    left: AtomicUsize,
    moved: Moved,
    /// What that said when the last part was copied.
    had_moved: OnceLock<Vec<usize>>,
}

impl Rows {
    /// `None` if there is no memory for their strings.
    pub(super) fn new(
        columns: Columns,
        records: Vec<Row>,
        places: Vec<u32>,
        all: usize,
    ) -> Option<Self> {
        let mut texts = Vec::new();
        texts.try_reserve_exact(columns.text_bytes).ok()?;
        texts.resize_with(columns.text_bytes, || UnsafeCell::new(0));
        Some(Self { columns, records, places, all, texts: texts.into() })
    }

    /// Begins to copy all rows, on up to that many threads, the caller's included, and looks afterwards
    /// at once which of them `moved` meanwhile.
    ///
    /// # Safety
    /// The records must be those of the plan, and be readable, until the copy is over; until then the
    /// target must be valid for writes of all rows of every column, and nobody else's.
    pub(super) unsafe fn begin(
        self: &Arc<Self>,
        to: &Target,
        threads: usize,
        moved: Moved,
    ) -> Copying {
        let count = self.records.len();
        let parts = (self.columns.bytes() / BYTES_PER_PART).clamp(1, count);
        let each = count.div_ceil(parts);
        let parts = count.div_ceil(each);
        let outcome = Arc::new(Outcome {
            alike: AtomicBool::new(true),
            left: AtomicUsize::new(parts),
            moved,
            had_moved: OnceLock::new(),
        });
        let (rows, to, found) = (Arc::clone(self), to.clone(), Arc::clone(&outcome));
        let work = move |part: usize| {
            let first = part * each;
            // SAFETY: by the caller's promise; each row is in one part.
            if !unsafe { rows.copy(&to, first..count.min(first + each)) } {
                found.alike.store(false, Ordering::Relaxed); // ordered by the end of the copy
            }
            // What was read here was read before anybody asks whether it has moved.
            fence(Ordering::Acquire);
            // SYNC POINT copied: Release here of what this part read, Acquire of the others' by the last.
            if found.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let _ = found.had_moved.set((found.moved)()); // once, but in a forked child
            }
        };
        // What is copied in no time is copied by who waits for it.
        let helpers = if parts > 1 { threads.saturating_sub(1) } else { 0 };
        Copying { posted: post(Threads::Copying, parts, helpers, Box::new(work)), outcome }
    }

    /// Copies all rows, here and now; false if they are not of one shape.
    ///
    /// # Safety
    /// As for `begin`.
    pub(super) unsafe fn copy_all(&self, to: &Target) -> bool {
        // SAFETY: by the caller's promise.
        unsafe { self.copy(to, 0..self.records.len()) }
    }

    /// A string of that row, when the copy is over.
    ///
    /// # Safety
    /// The copy must be over.
    pub(super) unsafe fn text(&self, row: usize, column: usize) -> &[u8] {
        // SAFETY: by the caller's promise.
        unsafe { self.bytes(self.columns.texts[row * self.columns.text_leaves.len() + column]) }
    }

    /// What that row keeps beside its columns, when the copy is over.
    ///
    /// # Safety
    /// The copy must be over.
    pub(super) unsafe fn rest(&self, row: usize) -> Option<&[u8]> {
        // SAFETY: by the caller's promise.
        self.columns.rests.get(row).map(|&rest| unsafe { self.bytes(rest) })
    }

    /// # Safety
    /// As for `text`.
    unsafe fn bytes(&self, text: Text) -> &[u8] {
        let bytes = &self.texts[text.at..][..text.len];
        // SAFETY: nobody writes any more, by the caller's promise; a cell is its byte.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) }
    }

    /// Copies these rows of every column; false if one has another shape than the first: then there is
    /// no batch.
    ///
    /// # Safety
    /// As for `begin`.
    unsafe fn copy(&self, to: &Target, which: Range<usize>) -> bool {
        let bytes = self.columns.bytes() / self.columns.rows.max(1);
        let between = prefetch::samples_between(bytes);
        let rows = between.unwrap_or(prefetch::samples_ahead(bytes)).min(ROWS_PER_BLOCK);
        if between.is_some() {
            let first = which.start..which.end.min(which.start + rows);
            self.records[first].iter().for_each(|row| prefetch::sample(row.data, row.len));
        }
        for first in which.clone().step_by(rows) {
            let block = first..which.end.min(first + rows);
            let next = self.records[block.end..which.end.min(block.end + rows)].iter();
            match between {
                // Their beginnings; the rest is fetched as columns are copied.
                Some(_) => next.for_each(|row| prefetch::word(row.data)),
                None => next.for_each(|row| prefetch::sample(row.data, row.len)),
            }
            // SAFETY: by the caller's promise.
            let alike = !self.columns.all_fixed() || unsafe { self.are_alike(block.clone()) };
            if !alike {
                return false;
            }
            for (column, &to) in self.columns.columns.iter().zip(&*to.0) {
                if let Start::Image(leaf, part) = column.start {
                    // SAFETY: as above.
                    if !unsafe { self.make_images(leaf, part, column, to, block.clone()) } {
                        return false;
                    }
                    continue;
                }
                // SAFETY: as above.
                unsafe { self.copy_column(column, to, block.clone(), between) };
            }
            // SAFETY: as above.
            unsafe { self.copy_texts(block.clone()) };
            // SAFETY: as above.
            unsafe { self.copy_rests(block) };
        }
        true
    }

    /// Makes these rows of a column of images; false if one cannot be made.
    ///
    /// # Safety
    /// As for `copy_column`.
    unsafe fn make_images(
        &self,
        leaf: u32,
        part: usize,
        column: &Column,
        to: *mut u8,
        which: Range<usize>,
    ) -> bool {
        let Some(images) = &self.columns.images else { return false };
        let stores = Stores::of(column.row_bytes * self.all);
        Scratch::here(|scratch| {
            which.into_iter().all(|row| {
                // SAFETY: the plan found this payload inside the record, and the row is one of the column.
                unsafe {
                    let from = self.columns.payload(&self.records, row, leaf);
                    let to = to.add(self.places[row] as usize * column.row_bytes);
                    images.make(row, part, from, to, stores, scratch)
                }
            })
        })
    }

    /// Whether these rows have the shapes of the first one; they are as long as it.
    ///
    /// # Safety
    /// The rows must be readable.
    unsafe fn are_alike(&self, which: Range<usize>) -> bool {
        let words = &self.columns.words;
        let (words, len) = (words.as_ptr().cast(), 4 * words.len());
        // SAFETY: rows are as long as the first, which begins with these words.
        let alike = |row: &Row| unsafe { libc::memcmp(row.data.cast(), words, len) == 0 };
        len == 0 || self.records[which].iter().all(alike)
    }

    /// Where a row of a column begins.
    ///
    /// # Safety
    /// The row must be one that the plan was made for.
    #[inline(always)]
    unsafe fn source(&self, column: &Column, row: usize) -> *const u8 {
        // SAFETY: the plan found these bytes inside the record.
        unsafe {
            match column.start {
                Start::Number(at) => self.records[row].data.add(at as usize),
                Start::Payload(leaf, at) => {
                    self.columns.payload(&self.records, row, leaf).add(at as usize)
                }
                Start::Image(leaf, _) => self.columns.payload(&self.records, row, leaf),
            }
        }
    }

    /// Copies these rows of a column, and has those fetched meanwhile that are so far `ahead`.
    ///
    /// # Safety
    /// As for `begin`; `to` is the first byte of the column.
    unsafe fn copy_column(
        &self,
        column: &Column,
        to: *mut u8,
        which: Range<usize>,
        ahead: Option<usize>,
    ) {
        let size = column.row_bytes;
        if column.truth {
            for row in which {
                // SAFETY: a number is 8 bytes.
                let value: u64 = unsafe { self.source(column, row).cast::<u64>().read_unaligned() };
                // SAFETY: a row of the column, of one byte.
                unsafe { to.add(self.places[row] as usize).write(u8::from(value != 0)) };
            }
            return;
        }
        let streamed = size >= PAGE && Stores::of(size * self.all) == Stores::Streamed;
        // A macro, so that each kind of copy is part of its loop.
        macro_rules! each_row {
            ($copy:expr) => {
                for row in which {
                    let at = self.places[row] as usize * size;
                    // SAFETY: a row of a column of rows of `size`, and its source, by the caller's
                    // promise.
                    unsafe { $copy(self.source(column, row), to.add(at), size) };
                }
            };
        }
        match size {
            0 => {}
            1 => each_row!(copy_fixed::<1>),
            2 => each_row!(copy_fixed::<2>),
            4 => each_row!(copy_fixed::<4>),
            8 => each_row!(copy_fixed::<8>),
            16 => each_row!(copy_fixed::<16>),
            32 => each_row!(copy_fixed::<32>),
            64 => each_row!(copy_fixed::<64>),
            _ if size < 64 => each_row!(copy_few),
            _ if streamed => {
                each_row!(stream);
                are_streamed();
            }
            _ => match ahead {
                None => each_row!(copy_many),
                Some(ahead) => {
                    for row in which {
                        let at = self.places[row] as usize * size;
                        let next = (row + ahead).min(self.records.len() - 1);
                        // SAFETY: as above.
                        unsafe {
                            let next = self.source(column, next);
                            copy_and_fetch(self.source(column, row), to.add(at), size, next);
                        }
                    }
                }
            },
        }
    }

    /// # Safety
    /// As for `begin`.
    unsafe fn copy_texts(&self, which: Range<usize>) {
        let count = self.columns.text_leaves.len();
        if count == 0 {
            return;
        }
        for row in which {
            let texts = &self.columns.texts[row * count..];
            for (text, &leaf) in texts.iter().zip(&self.columns.text_leaves) {
                let to = self.texts[text.at..][..text.len].as_ptr();
                // SAFETY: the plan found these bytes inside the record; the cells are this row's.
                unsafe {
                    let from = self.columns.payload(&self.records, row, leaf);
                    copy_many(from, UnsafeCell::raw_get(to), text.len);
                }
            }
        }
    }

    /// # Safety
    /// As for `begin`.
    unsafe fn copy_rests(&self, which: Range<usize>) {
        let schema = &self.columns.schema;
        for row in if self.columns.rests.is_empty() { 0..0 } else { which } {
            let rest = self.columns.rests[row];
            let cells = &self.texts[rest.at..][..rest.len];
            let head = schema.head() as usize;
            let to = UnsafeCell::raw_get(cells[..head].as_ptr());
            // SAFETY: a record begins with its head, which the first of its pieces holds; the cells are
            // this row's.
            unsafe { copy_many(self.records[row].data, to, head) };
            let mut at = head.next_multiple_of(PAYLOAD_ALIGN as usize);
            let leaves = schema.leaves.iter().zip(self.columns.extents(row)).enumerate();
            for (leaf, (_, extent)) in leaves.filter(|(_, (leaf, _))| leaf.apart) {
                let len = extent.len as usize;
                let to = UnsafeCell::raw_get(cells[at..][..len].as_ptr());
                // SAFETY: the plan found these bytes inside the record; the cells are this row's.
                unsafe {
                    copy_many(self.columns.payload(&self.records, row, leaf as u32), to, len);
                }
                at += len.next_multiple_of(PAYLOAD_ALIGN as usize);
            }
        }
    }
}

impl Copying {
    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.outcome.had_moved.get().is_some()
    }

    /// Waits for the end of the copy. The rows that moved meanwhile, which are nonsense; and whether all
    /// rows have one shape, which is to be believed only if none has moved.
    pub(super) fn wait(self) -> (Vec<usize>, bool) {
        let outcome = self.outcome;
        let moved = match self.posted.wait() {
            Done::Shared => outcome.had_moved.get().cloned(),
            Done::HereOnceMore => None, // what was noted before the fork is of that copy
        };
        (moved.unwrap_or_else(&outcome.moved), outcome.alike.load(Ordering::Relaxed))
    }
}

/// # Safety
/// As for `copy_nonoverlapping` of SIZE bytes.
#[inline(always)]
unsafe fn copy_fixed<const SIZE: usize>(from: *const u8, to: *mut u8, _: usize) {
    // SAFETY: by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, SIZE) }
}

/// For a few bytes, without a call.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy_few(from: *const u8, to: *mut u8, size: usize) {
    let words = size / 8 * 8;
    for at in (0..words).step_by(8) {
        // SAFETY: within `size`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), 8) };
    }
    for at in words..size {
        // SAFETY: within `size`.
        unsafe { to.add(at).write(from.add(at).read()) };
    }
}

/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy_many(from: *const u8, to: *mut u8, size: usize) {
    // SAFETY: by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, size) }
}
