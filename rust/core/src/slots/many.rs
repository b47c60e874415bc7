//! Many slots at once.
//!
//! Threads are started per call, and only for batches large enough that starting them is noise:
//! a pool that lives on would have to be rebuilt in every forked child, and a call that is over
//! leaves nothing that a fork could break.
#![allow(unsafe_code)] // rows of one buffer, written by several threads

use crate::error::{Error, Kind, Result};
use crate::slots::cache::Cache;
use crate::slots::outcome::Stored;
use crate::sys::prefetch;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Below this many bytes per thread a thread costs more than it saves.
const BYTES_PER_THREAD: usize = 4 << 20;

/// The rows and flags of a batch, given out to threads in chunks, each chunk to one.
struct Batch<'a> {
    indices: &'a [i64],
    out: *mut u8,
    found: *mut bool,
    chunk: usize,
    /// The next chunk that nobody has taken. Relaxed: the threads' end orders what they wrote.
    next: AtomicUsize,
}
// SAFETY: the pointers are only used for rows of a chunk that no other thread has taken.
unsafe impl Sync for Batch<'_> {}

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
        self.check_indices(indices)?;
        self.take_note_after_fork();
        let bytes = indices.len() * self.geometry().slot_bytes as usize;
        let threads = threads.clamp(1, (bytes / BYTES_PER_THREAD).max(1));
        let batch = Batch {
            indices,
            out,
            found: found.as_mut_ptr(),
            // Several chunks per thread, so that a slow one does not keep the others waiting.
            chunk: if threads == 1 { indices.len() } else { indices.len().div_ceil(threads * 4) },
            next: AtomicUsize::new(0),
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // SAFETY: `out` by the caller's promise, `found` is one flag per index.
                let help = || unsafe { self.load_chunks(&batch) };
                if std::thread::Builder::new().spawn_scoped(scope, help).is_err() {
                    break; // no more threads to be had: those that run do the work
                }
            }
            // SAFETY: as above.
            unsafe { self.load_chunks(&batch) };
        });
        let hits = found.iter().filter(|&&hit| hit).count() as u64;
        self.note_loads(hits, indices.len() as u64 - hits);
        Ok(())
    }

    /// Takes chunks until none is left.
    ///
    /// # Safety
    /// The batch's `out` and `found` must be valid for writes of one row and one flag per index.
    unsafe fn load_chunks(&self, batch: &Batch<'_>) {
        let row = self.geometry().slot_bytes as usize;
        loop {
            let first = batch.next.fetch_add(1, Ordering::Relaxed) * batch.chunk;
            if first >= batch.indices.len() {
                return;
            }
            let last = (first + batch.chunk).min(batch.indices.len());
            let ahead = prefetch::samples_ahead(row);
            for (k, &index) in batch.indices.iter().enumerate().take(last).skip(first) {
                let coming = batch.indices[..last].get(k + ahead);
                if let Some(i) = coming.and_then(|&index| self.slot_of(index).ok()) {
                    self.prefetch(i);
                }
                // SAFETY: row `k` of a chunk that only this thread has.
                let to = unsafe { batch.out.add(k * row) };
                // SAFETY: as above; the buffer lies outside the cache.
                let hit = self.slot_of(index).ok().is_some_and(|i| unsafe { self.copy(i, to) });
                if !hit {
                    // SAFETY: as above.
                    unsafe { std::ptr::write_bytes(to, 0, row) };
                }
                // SAFETY: flag `k`, as above.
                unsafe { batch.found.add(k).write(hit) };
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
        self.check_indices(indices)?;
        let mut froze = false;
        for ((&index, bytes), stored) in indices.iter().zip(rows.chunks(row)).zip(stored) {
            let outcome = self.store(index, bytes, overwrite)?;
            *stored = outcome == Stored::Done;
            froze |= outcome == Stored::Refused(true);
        }
        Ok(froze)
    }
}
