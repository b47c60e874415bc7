//! What a level below memory must do: a disk, a server, a test's pretence of one.
//!
//! A tier carries records that can travel (`records/portable.rs`) and looks into none of them: whoever
//! gets one opens it, and takes what is not the record that was asked for, whole, for a miss. So a
//! tier that is damaged, confused or hostile costs time, and never gives wrong bytes.

use crate::error::Result;
use crate::records::portable::HEAD;
use crate::sys::pages::Pages;
use std::io::IoSlice;
use std::ops::{Deref, DerefMut, Range};
use std::time::{Duration, Instant};

/// A level. All calls are synchronous, from any thread and any process: what a process inherits by
/// fork (a connection, a thread) is not its own, and a tier makes its own at the first use.
pub trait Tier: Send + Sync {
    /// Reads what there is of these samples: each record into memory that `sink` lends for it, then
    /// given back by `done`. A sample that is not there is left out. An error says that the tier is in
    /// trouble, not that something is missing; what was done before it counts. Returns at `deadline`
    /// at the latest: what has not come by then is missing.
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()>;

    /// Takes note that these samples are about to be asked for, and others soon: who reads many at once says
    /// so, and who wants one does not.
    fn expect(&self, _keys: &[u64]) {}

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

    /// Whether it has a sample, if it can say so without asking anybody.
    fn has(&self, _key: u64) -> Option<bool> {
        None
    }

    /// Whether it surely has no such sample, nor gets one that it can be waited for: then it need not be asked.
    fn lacks(&self, _key: u64) -> bool {
        false
    }

    /// What the record of a sample is sealed with, if that is not its number and the dataset's fingerprint.
    fn identity(&self, _key: u64) -> Option<(u64, u128)> {
        None
    }

    /// About how many records it has, how many bytes they take, and how many it may hold; nothing where it
    /// is not known.
    fn filling(&self) -> Option<Filling> {
        None
    }

    /// Whether it takes records at all, now: what it would not take need not be sealed for it.
    fn takes(&self) -> bool {
        true
    }

    /// Whether it tells people of its errors itself, by `news`: once for all processes of the node.
    fn tells(&self) -> bool {
        false
    }

    /// Whether the bytes of its records were compared with more than their checksum before it gives them.
    fn vouches(&self) -> bool {
        false
    }

    /// How many threads may ask for records at the same time with profit.
    fn readers(&self) -> usize {
        1
    }

    /// Whether other nodes find what it has: then it gets all that is loaded, whatever levels of this node have.
    fn is_of_all_nodes(&self) -> bool {
        false
    }

    /// Forgets all records.
    fn clear(&self) -> Result<()> {
        Ok(())
    }

    /// How often it was emptied, if it can say so without asking anybody.
    fn emptied(&self) -> u64 {
        0
    }

    /// Waits until what it took from this process is where it belongs; whether it is.
    fn flush(&self, _patience: Duration) -> bool {
        true
    }

    /// What people should know, once.
    fn news(&self) -> Option<String> {
        None
    }
}

/// Where records are read to. It lends memory, and so decides whether that is where a record stays.
pub trait Sink {
    /// Memory for the record of the sample at this position of the keys, `len` bytes in all, in `room` or more:
    /// a disk reads whole pages. None if a record of that length is not wanted. Several may be lent at the same
    /// time; one that is dropped is a miss.
    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Lent>;

    /// A record that was read whole; false if it is not the one that was asked for. Who has such a record
    /// does well to forget it: only then it is put again.
    fn done(&mut self, lent: Lent) -> bool;

    /// Memory that was lent for a record which is given in other memory.
    fn take_back(&mut self, _lent: Lent) {}

    /// Says that the tier let the caller wait in vain: for this caller it was asked often enough.
    fn was_in_vain(&mut self) {}
}

/// Memory for one record.
pub struct Lent {
    which: usize,
    memory: Pages,
    at: Range<usize>,
}

impl Lent {
    /// The first `len` bytes of this memory, for the record at this position.
    pub fn new(which: usize, memory: Pages, len: usize) -> Self {
        assert!(len <= memory.len());
        Self { which, memory, at: 0..len }
    }

    /// For which of the keys.
    pub fn which(&self) -> usize {
        self.which
    }

    /// All of the memory, to be read into.
    pub fn pages(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Says that the record begins here in the memory.
    pub fn lies_at(&mut self, start: usize) {
        let len = self.at.len();
        assert!(start + len <= self.memory.len());
        self.at = start..start + len;
    }

    /// The memory itself, and where the record lies in it.
    pub fn into_memory(self) -> (Pages, Range<usize>) {
        (self.memory, self.at)
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.at.clone()]
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.at.clone()]
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
    /// `Tier::emptied` of before anybody loaded or read it: it is not stored if the tier was emptied since.
    pub since: u64,
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

/// How full a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filling {
    /// Records, or a few more.
    pub records: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// Bytes that there may be.
    pub capacity: u64,
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
    /// Bytes that it may hold; 0 if it is not known.
    pub capacity: u64,
    /// Records that made room for others.
    pub evicted: u64,
    /// Reads and writes that failed.
    pub errors: u64,
}
