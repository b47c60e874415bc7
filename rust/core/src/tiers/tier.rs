//! What a level below memory must do: a disk, a server, a test's pretence of one.
//!
//! A tier carries records that can travel (`records/portable.rs`) and looks into none of them: whoever
//! gets one opens it, and takes what is not the record that was asked for, whole, for a miss. So a
//! tier that is damaged, confused or hostile costs time, and never gives wrong bytes.

use crate::error::Result;
use crate::records::portable::HEAD;
use std::io::IoSlice;
use std::ops::{Deref, DerefMut};
use std::time::Instant;

/// A level. All calls are synchronous, from any thread and any process: what a process inherits by
/// fork (a connection, a thread) is not its own, and a tier makes its own at the first use.
pub trait Tier: Send + Sync {
    /// Reads what there is of these samples: each record into memory that `sink` lends for it, then
    /// given back by `done`. A sample that is not there is left out. An error says that the tier is in
    /// trouble, not that something is missing; what was done before it counts. Returns at `deadline`
    /// at the latest: what has not come by then is missing.
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()>;

    /// Takes these records, as far as there is room, and says by position which: from then on they
    /// are found. A record that is there already may be left as it is: a sample has one value.
    fn put_many(&self, records: &[Sealed<'_>], taken: &mut [bool], deadline: Instant)
    -> Result<()>;

    /// The schema with this content hash, if somebody gave it.
    fn schema(&self, hash: u128, deadline: Instant) -> Result<Option<Vec<u8>>>;

    /// Keeps a schema, before the first record that needs it.
    fn put_schema(&self, hash: u128, schema: &[u8], deadline: Instant) -> Result<()>;

    /// What it holds and did, as far as it knows.
    fn stats(&self) -> TierStats;
}

/// Where records are read to. It lends memory, and so decides whether that is where a record stays.
pub trait Sink {
    /// Memory for the record of the sample at this position of the keys, `len` bytes in all. None if a
    /// record of that length is not wanted. Several may be lent at the same time; one that is dropped
    /// is a miss.
    fn lend(&mut self, which: usize, len: usize) -> Option<Lent>;

    /// A record that was read whole.
    fn done(&mut self, lent: Lent);
}

/// Memory for one record.
pub struct Lent {
    which: usize,
    len: usize,
    memory: Vec<u8>,
}

impl Lent {
    /// The first `len` bytes of this memory, for the record at this position.
    pub fn new(which: usize, memory: Vec<u8>, len: usize) -> Self {
        assert!(len <= memory.len());
        Self { which, len, memory }
    }

    /// For which of the keys.
    pub fn which(&self) -> usize {
        self.which
    }

    /// The memory itself, with what was read.
    pub fn into_memory(self) -> Vec<u8> {
        self.memory
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

/// A record on its way down.
pub struct Sealed<'a> {
    /// The number of its sample.
    pub key: u64,
    /// What stands in front.
    pub head: [u8; HEAD],
    /// Its bytes, part by part.
    pub parts: &'a [IoSlice<'a>],
}

impl Sealed<'_> {
    /// How long it is, with its head.
    pub fn len(&self) -> usize {
        HEAD + self.parts.iter().map(|part| part.len()).sum::<usize>()
    }

    /// Never: it has a head. clippy asks.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// What a tier holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Records that were given.
    pub hits: u64,
    /// Records that were asked for and not there.
    pub misses: u64,
    /// Records that were taken.
    pub fills: u64,
    /// Records there are.
    pub records: u64,
    /// Bytes that they take.
    pub bytes: u64,
}
