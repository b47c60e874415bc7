//! Many slots at once.
//!
//! Threads are started per call, and only for batches large enough that starting them is noise:
//! a pool that lives on would have to be rebuilt in every forked child, and a call that is over
//! leaves nothing that a fork could break.
#![allow(unsafe_code)] // rows of one buffer, written by several threads

use crate::cache::{Cache, Store};
use crate::error::{Error, Kind, Result};

/// Below this many bytes per thread a thread costs more than it saves.
const BYTES_PER_THREAD: usize = 4 << 20;

/// A buffer whose rows are given out to threads, each row to one.
#[derive(Clone, Copy)]
struct Rows(*mut u8);
// SAFETY: the pointer is only used for rows that no other thread touches (`load_many`).
unsafe impl Send for Rows {}

impl Cache {
    /// Copies the samples `indices` to `out`, one row each, and says in `found` which were there.
    /// The rows of the others are zeroed.
    ///
    /// # Safety
    /// `out` must be valid for writes of `indices.len() * slot_bytes` bytes, outside the cache.
    pub unsafe fn load_many(
        &self,
        indices: &[i64],
        out: *mut u8,
        found: &mut [bool],
        threads: usize,
    ) -> Result<()> {
        if found.len() != indices.len() {
            return Err(Error::new(
                Kind::Argument,
                format!("found has {} entries for {} indices", found.len(), indices.len()),
            ));
        }
        self.places(indices)?;
        let row = self.geometry().slot_bytes as usize;
        let useful = (indices.len() * row / BYTES_PER_THREAD).max(1);
        let threads = threads.clamp(1, useful);
        if threads == 1 {
            // SAFETY: `out` by the caller's promise.
            unsafe { self.load_rows(indices, Rows(out), found) };
        } else {
            let chunk = indices.len().div_ceil(threads);
            std::thread::scope(|scope| {
                for (k, (indices, found)) in
                    indices.chunks(chunk).zip(found.chunks_mut(chunk)).enumerate()
                {
                    // SAFETY: the chunk's first row lies inside `out`.
                    let rows = Rows(unsafe { out.add(k * chunk * row) });
                    scope.spawn(move || {
                        // SAFETY: the rows of different chunks do not overlap.
                        unsafe { self.load_rows(indices, rows, found) }
                    });
                }
            });
        }
        let hits = found.iter().filter(|&&hit| hit).count() as u64;
        self.note_loads(hits, indices.len() as u64 - hits);
        Ok(())
    }

    /// # Safety
    /// `rows` must be valid for writes of one row per index, and nobody else may touch them.
    unsafe fn load_rows(&self, indices: &[i64], rows: Rows, found: &mut [bool]) {
        let row = self.geometry().slot_bytes as usize;
        for (k, (&index, found)) in indices.iter().zip(found).enumerate() {
            // SAFETY: row `k` lies inside the buffer.
            let to = unsafe { rows.0.add(k * row) };
            // SAFETY: as above; the buffer lies outside the cache.
            *found = self.place_of(index).is_some_and(|i| unsafe { self.copy(i, to) });
            if !*found {
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(to, 0, row) };
            }
        }
    }

    /// Stores one row per index and says in `stored` which were. A filled slot is no error here.
    /// Returns true if this call froze the cache.
    pub fn store_many(
        &self,
        indices: &[i64],
        rows: &[u8],
        overwrite: bool,
        stored: &mut [bool],
    ) -> Result<bool> {
        let row = self.geometry().slot_bytes as usize;
        if indices.len().checked_mul(row) != Some(rows.len()) || stored.len() != indices.len() {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "{} rows of {row} bytes need {} bytes, {} were given",
                    indices.len(),
                    indices.len() * row,
                    rows.len()
                ),
            ));
        }
        self.places(indices)?;
        let mut froze = false;
        for ((&index, bytes), stored) in indices.iter().zip(rows.chunks(row)).zip(stored) {
            let outcome = self.store(index, bytes, overwrite)?;
            *stored = outcome == Store::Stored;
            froze |= outcome == Store::Refused(true);
        }
        Ok(froze)
    }
}
