//! The index: which record is a sample's.
//!
//! An entry is two words (format.rs). Only the holder of a sample's claim writes them, in this order:
//!
//! ```text
//!   extent = 0      there is no record
//!   location        where it will be
//!   ...             its bytes are written
//!   extent          now it can be read
//! ```
//!
//! Who reads looks at the extent before and after the location: if it is the same, both belong
//! together. A kill leaves an entry without a record, or a whole one.

use super::base::RecordStore;
use super::format::{self, Record};
use std::sync::atomic::{AtomicU64, Ordering};

const WORDS: usize = 2;

impl RecordStore {
    #[inline]
    fn entry(&self, i: usize) -> (&AtomicU64, &AtomicU64) {
        debug_assert!((i as u64) < self.geometry().dataset_len);
        let words = self.mapping().words(self.layout().index_at as usize + 8 * WORDS * i, WORDS);
        (&words[0], &words[1])
    }

    /// Has the processor fetch what the index knows of sample `i`, for a `find` that will come.
    #[inline]
    pub fn prefetch(&self, i: usize) {
        self.mapping().prefetch(self.layout().index_at as usize + 8 * WORDS * i);
    }

    /// The record that the index knows of, if it can be believed; it may be gone since.
    #[inline]
    pub(super) fn indexed(&self, i: usize) -> Option<Record> {
        let (location, extent) = self.entry(i);
        // SYNC POINT entry: Acquire here, Release in `publish`: who sees the extent sees location
        // and bytes; Acquire of the location, Release in `announce`: who sees a new location sees
        // that the extent before it is gone.
        let before = extent.load(Ordering::Acquire);
        let location = location.load(Ordering::Acquire);
        // Acquire once more: two regions may be of the same generation, so that a new record may have
        // the extent of the old one; its bytes are seen, too.
        if before == 0 || extent.load(Ordering::Acquire) != before {
            return None;
        }
        let (at, len, schema, generation) = format::unpack(location, before);
        let geometry = self.geometry();
        let inside = at < geometry.data_bytes && len <= geometry.data_bytes - at;
        inside.then(|| Record {
            at: (self.layout().data_at + at) as usize,
            len: len as usize,
            schema,
            // A division is most of what this function costs.
            region: if self.recycles() { (at / geometry.region_bytes()) as u32 } else { 0 },
            generation,
        })
    }

    /// Says where the record of a claimed sample will be. Nobody finds it yet.
    pub(super) fn announce(&self, i: usize, (to, _): (u64, u64)) {
        let (location, extent) = self.entry(i);
        extent.store(0, Ordering::Relaxed);
        // SYNC POINT entry: see `indexed`.
        location.store(to, Ordering::Release);
    }

    /// Makes the record of a claimed sample readable.
    pub(super) fn publish(&self, i: usize, (_, now): (u64, u64)) {
        // SYNC POINT entry: see `indexed`.
        self.entry(i).1.store(now, Ordering::Release);
    }
}
