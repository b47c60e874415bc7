//! The copies: rows of many records into the columns of one batch.
//!
//! Other processes may write to the records meanwhile. No byte in them can make the copies read or
//! write out of bounds: all that is believed was copied to private memory first. But the batch is
//! nonsense then, so whoever has the records is asked afterwards whether they stayed as they were
//! ([`super::batch`]).
#![allow(unsafe_code)] // copies between raw addresses

use super::columns::{Column, Columns, Row, Start};
use crate::sys::thread_pool::share;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// A column of this size is out of the processor's caches before anybody reads it.
const BEYOND_CACHES: usize = 16 << 20;
const PAGE: usize = 4096;
/// Rows are handed to threads in parts of about this size.
const BYTES_PER_PART: usize = 128 << 10;
/// A few rows at a time: what a record's columns share is then still in the processor's cache.
const BLOCK: usize = 64;

/// Where the columns of a batch go.
pub(super) struct Target<'a> {
    /// The first byte of each column.
    pub columns: &'a [*mut u8],
    /// Where the strings go.
    pub texts: *mut u8,
}

// SAFETY: threads write different rows of it.
unsafe impl Sync for Target<'_> {}

impl Columns {
    /// Copies all rows, on up to that many threads; false if one has another shape than the first:
    /// then there is no batch.
    ///
    /// # Safety
    /// The rows must be those of the plan, or fit it, and be readable; the target must be valid for
    /// writes of all rows of every column and of all strings, and nobody else's.
    pub(super) unsafe fn copy_all(&self, rows: &[Row], to: &Target<'_>, threads: usize) -> bool {
        let parts = (self.bytes() / BYTES_PER_PART).clamp(1, rows.len());
        let rows_each = rows.len().div_ceil(parts);
        let alike = AtomicBool::new(true);
        share(rows.len().div_ceil(rows_each), threads, &|part| {
            let first = part * rows_each;
            let last = rows.len().min(first + rows_each);
            // SAFETY: by the caller's promise; each row is in one part.
            if !unsafe { self.copy(rows, to, first..last) } {
                alike.store(false, Ordering::Relaxed); // ordered by the end of `share`
            }
        });
        alike.load(Ordering::Relaxed)
    }

    /// Copies these rows of every column.
    ///
    /// # Safety
    /// As for `copy_all`.
    pub(super) unsafe fn copy(&self, rows: &[Row], to: &Target<'_>, which: Range<usize>) -> bool {
        for first in which.clone().step_by(BLOCK) {
            let block = first..which.end.min(first + BLOCK);
            // SAFETY: by the caller's promise.
            if self.schema.all_fixed && !unsafe { self.are_alike(&rows[block.clone()]) } {
                return false;
            }
            for (column, &to) in self.columns.iter().zip(to.columns) {
                // SAFETY: as above.
                unsafe { self.copy_column(rows, column, to, block.clone()) };
            }
            // SAFETY: as above.
            unsafe { self.copy_texts(rows, to.texts, block) };
        }
        true
    }

    /// Whether these rows have the shapes of the first one; they are as long as it.
    ///
    /// # Safety
    /// The rows must be readable.
    unsafe fn are_alike(&self, rows: &[Row]) -> bool {
        let (words, len) = (self.words.as_ptr().cast(), 4 * self.words.len());
        // SAFETY: rows are as long as the first, which begins with these words.
        let alike = |row: &Row| unsafe { libc::memcmp(row.data.cast(), words, len) == 0 };
        len == 0 || rows.iter().all(alike)
    }

    /// Where a row of a column begins.
    ///
    /// # Safety
    /// The row must be one that the plan was made for, or fit it.
    #[inline(always)]
    unsafe fn source(&self, rows: &[Row], column: &Column, row: usize) -> *const u8 {
        // SAFETY: the plan found these bytes inside the record.
        unsafe {
            match column.start {
                Start::Number(at) => rows[row].data.add(at as usize),
                Start::Payload(leaf, at) => self.payload(rows, row, leaf).add(at as usize),
            }
        }
    }

    /// # Safety
    /// As for `copy_all`; `to` is the first byte of the column.
    unsafe fn copy_column(&self, rows: &[Row], column: &Column, to: *mut u8, which: Range<usize>) {
        let size = column.row_bytes;
        if column.truth {
            for row in which {
                // SAFETY: a number is 8 bytes.
                let value: u64 =
                    unsafe { self.source(rows, column, row).cast::<u64>().read_unaligned() };
                // SAFETY: row `row` of the column, of one byte.
                unsafe { to.add(row).write(u8::from(value != 0)) };
            }
            return;
        }
        let beyond_caches = size >= PAGE && size * rows.len() >= BEYOND_CACHES;
        // A macro, so that each kind of copy is part of its loop.
        macro_rules! each_row {
            ($copy:expr) => {
                for row in which {
                    // SAFETY: row `row` of a column of rows of `size`, and its source, by the caller's
                    // promise.
                    unsafe { $copy(self.source(rows, column, row), to.add(row * size), size) };
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
            _ if beyond_caches => each_row!(stream),
            _ => each_row!(copy_many),
        }
    }

    /// # Safety
    /// As for `copy_all`; `to` is the first byte of all strings.
    unsafe fn copy_texts(&self, rows: &[Row], to: *mut u8, which: Range<usize>) {
        let count = self.text_leaves.len();
        if count == 0 {
            return;
        }
        for row in which {
            for (text, &leaf) in self.texts[row * count..].iter().zip(&self.text_leaves) {
                // SAFETY: the plan found these bytes inside the record, and made room for them.
                unsafe { copy_many(self.payload(rows, row, leaf), to.add(text.at), text.len) };
            }
        }
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

/// Past the caches: memory that is only written is not read first.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut size: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = to.align_offset(16).min(size);
    // SAFETY: every step is within `size`, and the streaming stores are aligned after the head.
    unsafe {
        copy_many(from, to, head);
        (from, to, size) = (from.add(head), to.add(head), size - head);
        while size >= 64 {
            let source = from.cast::<__m128i>();
            let target = to.cast::<__m128i>();
            let parts = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
            for (i, part) in parts.into_iter().enumerate() {
                _mm_stream_si128(target.add(i), part);
            }
            (from, to, size) = (from.add(64), to.add(64), size - 64);
        }
        _mm_sfence(); // others see what was written once they see that this thread is done
        copy_many(from, to, size);
    }
}

/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
unsafe fn stream(from: *const u8, to: *mut u8, size: usize) {
    // SAFETY: by the caller's promise.
    unsafe { copy_many(from, to, size) }
}
