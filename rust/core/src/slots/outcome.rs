//! What became of a load or a store, and the sums of both.

/// What a look-up found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// The slot's bytes begin at this offset of the mapping.
    Hit(usize),
    /// Nothing is stored, or it is being written just now.
    Empty,
    /// The sample lies beyond the capacity of the cache.
    Beyond,
    /// The index lies outside the dataset.
    Outside,
}

/// What became of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It can be loaded now.
    Done,
    /// Another process stored, or is storing, this sample: nothing to do.
    Lost,
    /// The slot is filled and this process knew it; the old value stays.
    Occupied,
    /// The sample lies beyond the capacity of the cache.
    Beyond,
    /// The index lies outside the dataset.
    Outside,
    /// The cache takes no more values: no space, or no lease. `true` the first time.
    Refused(bool),
}

/// Sums over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names are those of counters.rs
pub struct Stats {
    pub hits: u64,
    pub misses: u64,
    pub fills: u64,
    pub bytes: u64,
    pub waits: u64,
    pub lost: u64,
    pub dropped: u64,
    pub damaged: u64,
    /// Slots set at this moment.
    pub filled: u64,
    /// No more values are taken until `clear`.
    pub frozen: bool,
}
