//! The bytes of all files together, and which files were not used for longest.

use crate::files::content::Content;
use crate::files::table::{
    CHECKED, COUNTING, EVICTING, FileLock, FileTable, Head, OWNED, RESERVED, RESERVED_BYTES,
};
use crate::segment::lock::StateLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long to wait for who is changing the sum of bytes: a few instructions, unless it is stopped.
const PATIENCE: Duration = Duration::from_millis(200);
/// How many files are looked at to find old ones. Of so many, the oldest few are among the oldest of
/// all; where there are no more, they are the oldest.
pub(super) const SAMPLE: usize = 1 << 16;
/// How many of them are named at a time: the sixteenth part, so that a look costs each no more than
/// sixteen files looked at.
pub(super) const OLDEST: usize = SAMPLE / 16;
/// Files next to each other that are looked at together: a cache line of flags.
const BLOCK: usize = 64;

impl FileTable {
    /// Bytes of all files that are ours, and of those being copied.
    pub(crate) fn bytes(&self) -> u64 {
        self.head(Head::Bytes).load(Ordering::Relaxed)
    }

    /// How many files are ours.
    pub(crate) fn files(&self) -> u64 {
        self.head(Head::Files).load(Ordering::Relaxed)
    }

    /// Runs `act`, which changes what files take, and the sums. Who dies in between leaves sums that
    /// are wrong, and `Counting` set: the next one counts anew.
    fn counting<R>(&self, act: impl FnOnce() -> R) -> R {
        // Who has it may be stopped: better a sum that may be wrong.
        let lock = self.lease().and_then(|lease| {
            StateLock::wait(self.slots(), COUNTING, lease, &self.leases(), PATIENCE)
        });
        if lock.is_some() && self.head(Head::Counting).swap(1, Ordering::Relaxed) != 0 {
            self.count_anew();
        }
        let result = act();
        if lock.is_some() {
            self.head(Head::Counting).store(0, Ordering::Relaxed);
        }
        result
    }

    fn count_anew(&self) {
        let (mut bytes, mut files) = (0u64, 0);
        for i in self.flagged(OWNED | RESERVED) {
            let entry = self.entry(i);
            let reserved = entry.words[RESERVED_BYTES].load(Ordering::Relaxed);
            bytes = bytes.wrapping_add(entry.owned_bytes()).wrapping_add(reserved);
            files += u64::from(entry.flags() & OWNED != 0);
        }
        self.head(Head::Bytes).store(bytes, Ordering::Relaxed);
        self.head(Head::Files).store(files, Ordering::Relaxed);
    }

    /// Sets bytes aside for a file; `own` it or `unreserve` them.
    pub(crate) fn reserve(&self, file: &FileLock<'_>, bytes: u64) {
        let entry = self.entry(file.i);
        self.counting(|| {
            entry.raise(RESERVED); // first, so that there are no bytes that nobody finds
            entry.words[RESERVED_BYTES].store(bytes, Ordering::Relaxed);
            self.head(Head::Bytes).fetch_add(bytes, Ordering::Relaxed);
        });
    }

    /// Gives back what was set aside for a file, by us or by somebody who died.
    pub(crate) fn unreserve(&self, file: &FileLock<'_>) {
        let entry = self.entry(file.i);
        if entry.flags() & RESERVED != 0 {
            self.counting(|| {
                let bytes = entry.words[RESERVED_BYTES].swap(0, Ordering::Relaxed);
                self.head(Head::Bytes).fetch_sub(bytes, Ordering::Relaxed);
                entry.lower(RESERVED);
            });
        }
    }

    /// The files for which bytes are set aside.
    pub(crate) fn reserved(&self) -> impl Iterator<Item = usize> {
        self.flagged(RESERVED)
    }

    /// The file is ours, in this version, from now on; what was set aside for it is used up.
    pub(crate) fn own(&self, file: &FileLock<'_>, content: Content) {
        let entry = self.entry(file.i);
        self.counting(|| {
            let before = entry.owned_bytes();
            let reserved = entry.words[RESERVED_BYTES].swap(0, Ordering::Relaxed);
            entry.set_version(content.version);
            entry.set_hash(content.hash);
            let flags = entry.raise(OWNED);
            entry.lower(RESERVED);
            self.head(Head::Files).fetch_add(u64::from(flags & OWNED == 0), Ordering::Relaxed);
            // In one step, so that nobody sees the file counted twice.
            let change = content.version.size.wrapping_sub(reserved).wrapping_sub(before);
            self.head(Head::Bytes).fetch_add(change, Ordering::Relaxed);
        });
    }

    /// The file is gone.
    pub(crate) fn disown(&self, file: &FileLock<'_>) {
        let entry = self.entry(file.i);
        self.counting(|| {
            if entry.lower(OWNED | CHECKED | EVICTING) & OWNED != 0 {
                self.head(Head::Bytes).fetch_sub(entry.version().size, Ordering::Relaxed);
                self.head(Head::Files).fetch_sub(1, Ordering::Relaxed);
            }
        });
    }

    /// When the reservations of the dead were last looked for, in nanoseconds of the clock.
    pub(crate) fn reclaimed_at(&self) -> &AtomicU64 {
        self.head(Head::ReclaimedAt)
    }

    // Which are old

    /// Files of ours that were not used for long, the oldest last, with the time of their last use.
    ///
    /// Of many, some are looked at: blocks from all over the table, others each time.
    pub(crate) fn oldest(&self) -> Vec<(u64, usize)> {
        let (count, mut found) = (self.len(), Vec::new());
        let steps = count.div_ceil(SAMPLE).max(1);
        let first = self.head(Head::Hand).fetch_add(1, Ordering::Relaxed) as usize % steps;
        for step in (first..steps).chain(0..first) {
            for block in (step * BLOCK..count).step_by(steps * BLOCK) {
                let owned = |&i: &usize| self.entry(i).flags() & OWNED != 0;
                let files = (block..count.min(block + BLOCK)).filter(owned);
                found.extend(files.map(|i| (self.entry(i).used(), i)));
            }
            if found.len() >= SAMPLE / 2 {
                break;
            }
        }
        if found.len() > OLDEST {
            found.select_nth_unstable(OLDEST);
            found.truncate(OLDEST);
        }
        found.sort_unstable_by(|a, b| b.cmp(a));
        found
    }

    /// The files that have one of these flags.
    fn flagged(&self, flags: u8) -> impl Iterator<Item = usize> {
        (0..self.len()).filter(move |&i| self.entry(i).flags() & flags != 0)
    }
}
