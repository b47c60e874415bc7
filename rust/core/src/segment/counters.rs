//! Counters of all processes, without contention: each process adds to a stripe of its own, or those of a
//! rank to one that tells what became of their requests.

use crate::segment::parts::{COUNTER_STRIPE_BYTES, COUNTER_STRIPES, COUNTERS_AT};
use crate::sys::fork;
use crate::sys::mapping::Mapping;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What is counted; the number is the index of the counter in a stripe.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Count {
    /// Loads that found a value.
    Hits = 0,
    /// Loads inside the dataset that found none.
    Misses = 1,
    /// Values written.
    Fills = 2,
    /// Bytes of values written.
    Bytes = 3,
    /// Overwrites that waited for another writer.
    Waits = 4,
    /// Writes not done because another process had done or was doing them.
    Lost = 5,
    /// Writes not done for lack of space or of a lease.
    Dropped = 6,
    /// Slots whose checksum did not match.
    Damaged = 7,
    /// Samples loaded from the source.
    Loads = 8,
    /// Nanoseconds that took.
    LoadNanos = 9,
    /// Records too large for any room there is.
    TooLarge = 10,
    /// Records or files that made room for others.
    Evicted = 11,
    /// Files whose source had changed.
    Stale = 12,
    /// Requests for a file that were answered with its source.
    Passed = 13,
    /// Samples of a type that cannot be stored.
    Unsupported = 14,
    /// Reads and writes that failed.
    Errors = 15,
    /// Samples that came from a cluster's servers.
    ClusterHits = 16,
    /// Samples that its servers were asked for in vain.
    ClusterMisses = 17,
    /// Samples given to its servers.
    ClusterFills = 18,
    /// Samples that its servers did not take.
    ClusterDropped = 19,
    /// Operations on a server that failed.
    ClusterErrors = 20,
    /// Samples that a program's own function changed as they were handed out.
    Transforms = 21,
    /// Nanoseconds that took.
    TransformNanos = 22,
}

/// The counters of a segment.
#[derive(Clone, Copy)]
pub(crate) struct Counters<'a>(pub(crate) &'a Mapping);

const WORDS: usize = COUNTER_STRIPE_BYTES / 8;

/// The rank that this process and its children count for; above all ranks: none was named.
static RANK: AtomicU32 = AtomicU32::new(u32::MAX);

/// Has this process, and those it forks, count for that rank of the node.
pub fn count_for(rank: u32) {
    RANK.store(rank, Ordering::Relaxed);
}

fn stripe() -> usize {
    let of = match RANK.load(Ordering::Relaxed) {
        u32::MAX => fork::process(),
        rank => rank,
    };
    of as usize % COUNTER_STRIPES
}

impl Counters<'_> {
    /// Relaxed: a count orders nothing.
    #[inline]
    pub(crate) fn add(&self, count: Count, n: u64) {
        self.words(stripe())[count as usize].fetch_add(n, Ordering::Relaxed);
    }

    /// What the processes of a rank counted; also what others did, if not all count for their rank or
    /// there are more ranks than stripes.
    pub(crate) fn of_rank(&self, rank: u32, count: Count) -> u64 {
        self.words(rank as usize % COUNTER_STRIPES)[count as usize].load(Ordering::Relaxed)
    }

    fn words(&self, stripe: usize) -> &[AtomicU64] {
        self.0.words(COUNTERS_AT + stripe * COUNTER_STRIPE_BYTES, WORDS)
    }

    /// The sum over all processes, the dead ones included.
    pub(crate) fn sum(&self, count: Count) -> u64 {
        self.0
            .words(COUNTERS_AT, COUNTER_STRIPES * WORDS)
            .chunks(WORDS)
            .fold(0, |sum, stripe| sum.wrapping_add(stripe[count as usize].load(Ordering::Relaxed)))
    }
}
