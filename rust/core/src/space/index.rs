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

use super::base::Space;
use super::format::{self, Record};
use crate::fault::{Fault, active as broken};
use std::sync::atomic::{AtomicU64, Ordering, fence};

const WORDS: usize = 2;

impl Space<'_> {
    #[inline]
    fn entry(&self, i: usize) -> (&AtomicU64, &AtomicU64) {
        debug_assert!((i as u64) < self.layout().samples);
        let words = self.mapping().words(self.layout().index_at as usize + 8 * WORDS * i, WORDS);
        (&words[0], &words[1])
    }

    /// Has the processor fetch what the index knows of sample `i`, for a `find` that will come.
    #[inline]
    pub(crate) fn prefetch(&self, i: usize) {
        self.mapping().prefetch(self.layout().index_at as usize + 8 * WORDS * i);
    }

    /// Where the record of sample `i` is. Its bytes may be gone at any time: who has copied them asks
    /// `is_whole`.
    #[inline]
    pub(crate) fn find(&self, i: usize) -> Option<Record> {
        let found = self.indexed(i)?;
        // SYNC POINT generation: Acquire here, Release in `raise`.
        (self.generation(found.region.into(), Ordering::Acquire) == found.generation).then(|| {
            self.touch(found.region.into());
            found
        })
    }

    /// Whether all that was read of this record until now was the record.
    #[inline]
    pub(crate) fn is_whole(&self, region: u32, generation: u32) -> bool {
        // SYNC POINT changed: Acquire fence here, SeqCst fences in `raise` and `reserve`: if one new
        // byte was read, the load below sees the raise before it.
        fence(Ordering::Acquire);
        self.generation(region.into(), Ordering::Relaxed) == generation
            || broken(Fault::IgnoreEpoch)
    }

    /// The record that the index knows of, if it can be believed; it may be gone since.
    #[inline]
    pub(crate) fn indexed(&self, i: usize) -> Option<Record> {
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
        let layout = self.layout();
        let inside = at < layout.bytes && len <= layout.bytes - at;
        inside.then(|| Record {
            at: (layout.base + at) as usize,
            len: len as usize,
            schema,
            // A division is most of what this function costs.
            region: if layout.regions > 1 { (at / layout.region_bytes()) as u32 } else { 0 },
            generation,
        })
    }

    /// Says where the record of a claimed sample will be. Nobody finds it yet.
    pub(crate) fn announce(&self, i: usize, (to, _): (u64, u64)) {
        let (location, extent) = self.entry(i);
        extent.store(0, Ordering::Relaxed);
        // SYNC POINT entry: see `indexed`.
        location.store(to, Ordering::Release);
    }

    /// Says that a claimed sample has no record.
    pub(crate) fn withdraw(&self, i: usize) {
        self.entry(i).1.store(0, Ordering::Relaxed);
    }

    /// Makes the record of a claimed sample readable.
    pub(crate) fn publish(&self, i: usize, (_, now): (u64, u64)) {
        // SYNC POINT entry: see `indexed`.
        self.entry(i).1.store(now, Ordering::Release);
    }
}
