//! What a disk store holds and did.

use super::store::DiskStore;
use crate::segment::counters::Count;

/// Sums over all processes with this table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskStats {
    /// Records that were given.
    pub hits: u64,
    /// Records that were asked for and not there.
    pub misses: u64,
    /// Records that were written.
    pub fills: u64,
    /// Records there are.
    pub records: u64,
    /// Bytes laid down, gaps included.
    pub bytes: u64,
    /// Bytes that files may take.
    pub capacity: u64,
    /// Records that made room for others.
    pub evicted: u64,
    /// Records that could not be written.
    pub dropped: u64,
    /// Reads and writes that failed.
    pub errors: u64,
}

impl DiskStore {
    /// Records that were given to the processes that count for that rank.
    pub fn hits_of(&self, rank: u32) -> u64 {
        self.space().counters().of_rank(rank, Count::Hits)
    }

    /// Sums over all processes with this table.
    pub fn stats(&self) -> DiskStats {
        let space = self.space();
        let sum = |count| space.counters().sum(count);
        DiskStats {
            hits: sum(Count::Hits),
            misses: sum(Count::Misses),
            fills: sum(Count::Fills),
            records: space.filled(),
            bytes: space.used_bytes(),
            capacity: self.budget(),
            evicted: sum(Count::Evicted),
            dropped: sum(Count::Dropped),
            errors: sum(Count::Errors),
        }
    }
}
