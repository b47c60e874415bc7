//! Small records of a small level: a stretch of the file around one that is wanted comes into the page cache.
//!
//! A disk gives a stretch in the time of some dozen pages, and who asks for many records, in whatever order, soon
//! wants most of what lies in it. That holds while the page cache keeps it until then, and costs others theirs. So
//! it is done where a level takes a small part of the memory that is free; a larger one is read past the page
//! cache, record by record.

use super::store::DiskStore;
use crate::fault::{Fault, active as broken};
use crate::sys::limits;

/// So long is a stretch, and begins at multiples of this.
const STRETCH: u64 = 1 << 20;
/// Of records that take less on average, a stretch has many.
const SMALL: u64 = 16 << 10;
/// A level may take one part in so many of the memory that is free. Page cache counts as free, also what others
/// want of it: they lose little.
const SHARE: u64 = 4;

impl DiskStore {
    /// Takes note that the records of these samples are about to be read, and others soon.
    pub(crate) fn expect(&self, samples: impl Iterator<Item = usize>) {
        // Others fill memory, and a level grows: neither from one read to the next.
        if !self.is_small.get(|| self.is_small(limits::memory().free)) {
            return;
        }
        let open = self.files.here();
        for i in samples {
            let Some(found) = self.space().find(i) else { continue };
            let (r, region_bytes) = (u64::from(found.region), self.geometry().region_bytes);
            let at = found.at as u64 - r * region_bytes;
            let first = at - at % STRETCH;
            let record = at..at + found.len as u64;
            // What is not laid down yet will be written past the page cache.
            let end = (first + STRETCH).max(record.end).min(self.space().used_in(r));
            // The record is read all the same, and if that fails it is told then.
            let _only_sooner =
                open.ask_for(&self.folder, (r, found.generation), record, first..end);
        }
    }

    /// Whether its records are small, on average.
    pub(crate) fn is_of_small(&self) -> bool {
        let space = self.space();
        space.used_bytes() < SMALL * space.about_filled()
    }

    /// Whether the level is small against so much free memory, and so are its records.
    pub(super) fn is_small(&self, free: u64) -> bool {
        let is_few = self.space().used_bytes().saturating_mul(SHARE) <= free;
        self.is_of_small() && (is_few || broken(Fault::CrowdOut))
    }
}
