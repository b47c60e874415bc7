//! Reading one slot: a look-up, or a copy.

use crate::segment::claim::{Claim, SET};
use crate::segment::counters::Count;
use crate::slots::cache::Cache;
use crate::slots::outcome::Load;
use crate::sys::mapping::checksum;
use crate::sys::prefetch;
use std::sync::atomic::{AtomicU64, Ordering};

impl Cache {
    /// Looks up a sample. On a hit the bytes stay readable at that offset while the mapping is
    /// held; they change only if somebody overwrites the slot or clears the cache.
    #[inline]
    pub fn load(&self, index: i64) -> Load {
        self.take_note_after_fork();
        let found = match self.slot_of(index) {
            Err(Load::Outside) => return Load::Outside,
            Err(other) => other,
            Ok(i) => self.look(i),
        };
        let count = if matches!(found, Load::Hit(_)) { Count::Hits } else { Count::Misses };
        self.counters().add(count, 1);
        found
    }

    #[inline]
    fn look(&self, i: usize) -> Load {
        let slots = self.slots();
        if slots.state(i) == SET && (!self.geometry().verify || self.is_whole(i)) {
            self.seen.insert(i);
            return Load::Hit(self.layout().slot_at(self.geometry(), i as u64) as usize);
        }
        self.seen.missed(i);
        Load::Empty
    }

    /// Compares a slot with its checksum; empties it if they differ.
    #[cold]
    fn is_whole(&self, i: usize) -> bool {
        let slots = self.slots();
        let at = self.layout().slot_at(self.geometry(), i as u64) as usize;
        let bytes = self.geometry().slot_bytes as usize;
        let check = &self.checks()[i];
        let intact = slots.read_stable(i, || {
            // Relaxed: ordered by the slot's state, like the bytes it belongs to.
            self.mapping().checksum(at, bytes) == check.load(Ordering::Relaxed)
        });
        if intact == Some(false) {
            self.discard(i);
        }
        intact == Some(true)
    }

    /// Empties a slot whose bytes are not what was stored.
    #[cold]
    fn discard(&self, i: usize) {
        let slots = self.slots();
        self.counters().add(Count::Damaged, 1);
        if let Some(lease) = self.leases().mine(&slots)
            && slots.claim(i, lease, true, &self.leases()) == Claim::Claimed
        {
            slots.abandon(i, lease);
        }
    }

    pub(super) fn checks(&self) -> &[AtomicU64] {
        self.mapping().words(self.layout().checks_at as usize, self.geometry().capacity as usize)
    }

    /// Has a sample fetched that is about to be copied.
    pub(super) fn prefetch(&self, i: usize) {
        let at = self.layout().slot_at(self.geometry(), i as u64) as usize;
        let bytes = self.geometry().slot_bytes as usize;
        prefetch::sample(self.mapping().at(at, bytes).as_ptr(), bytes);
    }

    /// Copies a sample to `to` if it is there and whole.
    ///
    /// # Safety
    /// `to` must be valid for writes of `slot_bytes` bytes, outside the mapping.
    #[allow(unsafe_code)] // the copy's target is a raw pointer
    #[inline]
    pub(crate) unsafe fn copy(&self, i: usize, to: *mut u8) -> bool {
        let bytes = self.geometry().slot_bytes as usize;
        let at = self.layout().slot_at(self.geometry(), i as u64) as usize;
        let copied = self.slots().read_stable(i, || {
            // SAFETY: `to` by the caller's promise.
            unsafe { self.mapping().copy_out(at, to, bytes) };
            // SAFETY: written just now, by us alone. The copy is checked, not the slot: it is the
            // copy that the caller gets.
            !self.geometry().verify
                || checksum(unsafe { std::slice::from_raw_parts(to, bytes) })
                    == self.checks()[i].load(Ordering::Relaxed)
        });
        if copied == Some(false) {
            self.discard(i);
        }
        let hit = copied == Some(true);
        if hit {
            self.seen.insert(i);
        } else {
            self.seen.missed(i);
        }
        hit
    }

    pub(crate) fn note_loads(&self, hits: u64, misses: u64) {
        self.counters().add(Count::Hits, hits);
        self.counters().add(Count::Misses, misses);
    }
}
