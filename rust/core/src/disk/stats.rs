//! What a disk store holds and did.

use super::log;
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
    /// Bytes laid down, with gaps and logs.
    pub bytes: u64,
    /// Bytes that files may take.
    pub capacity: u64,
    /// Records that made room for others.
    pub evicted: u64,
    /// Records that could not be written.
    pub dropped: u64,
    /// Records of this process that wait to be written.
    pub waiting: u64,
    /// Reads and writes that failed.
    pub errors: u64,
}

impl DiskStore {
    /// Records that were given to the processes that count for that rank.
    pub fn hits_of(&self, rank: u32) -> u64 {
        self.space().counters().of_rank(rank, Count::Hits)
    }

    /// Bytes laid down, with gaps and logs.
    pub(crate) fn taken_bytes(&self) -> u64 {
        let space = self.space();
        let most = self.geometry().region_bytes;
        let in_region = |r| most.min(space.used_in(r) + log::bytes(space.logged_in(r)));
        (0..self.geometry().regions).map(in_region).sum()
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
            bytes: self.taken_bytes(),
            capacity: self.budget(),
            evicted: sum(Count::Evicted),
            dropped: sum(Count::Dropped),
            waiting: self.behind.get().map_or(0, |behind| behind.waiting() as u64),
            errors: sum(Count::Errors),
        }
    }
}
