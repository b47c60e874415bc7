//! Servers as a level: of all nodes, not of this one alone.

use super::tier::{Lent, Sealed, Sink, Tier, TierStats};
use crate::cluster::{ClusterStore, Receiver};
use crate::error::Result;
use crate::records::RecordStore;
use crate::records::portable;
use crate::segment::counters::Count;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A cluster as a tier.
pub struct Cluster {
    store: Arc<ClusterStore>,
    /// Where the processes of this node count, and know schemas.
    memory: Arc<RecordStore>,
}

impl Cluster {
    /// Below this memory.
    pub fn new(store: Arc<ClusterStore>, memory: Arc<RecordStore>) -> Self {
        store.share_rests(&memory);
        Self { store, memory }
    }

    fn count(&self, count: Count, n: u64) {
        if n > 0 {
            self.memory.space().counters().add(count, n);
        }
    }

    /// Counts what servers answered meanwhile, and what none was given.
    fn count_answers(&self, refused: u64) {
        let (fills, dropped, errors) = self.store.take_counts();
        self.count(Count::ClusterFills, fills);
        self.count(Count::ClusterDropped, dropped + refused);
        self.count(Count::ClusterErrors, errors);
    }

    /// The schema of that hash: what came with a value, or what memory has.
    fn known(&self, hash: u128) -> Option<Vec<u8>> {
        self.store.schema(hash).or_else(|| {
            let schema = self.memory.schema(self.memory.schema_of_hash(hash)?)?;
            self.store.keep_schema(&schema);
            Some(schema)
        })
    }
}

/// Memory that a sink lends.
struct Lending<'a>(&'a mut dyn Sink);

impl Receiver for Lending<'_> {
    type Memory = Lent;

    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Lent> {
        self.0.lend(which, len, room)
    }

    fn room(memory: &mut Lent) -> &mut [u8] {
        memory.pages()
    }

    fn done(&mut self, memory: Lent) -> bool {
        self.0.done(memory)
    }

    fn take_back(&mut self, memory: Lent) {
        self.0.take_back(memory);
    }
}

impl Tier for Cluster {
    /// Trouble of a server is told by `news`, once for each.
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        let received = self.store.get_many(keys, &mut Lending(sink), deadline);
        self.count(Count::ClusterHits, received.hits);
        self.count(Count::ClusterMisses, keys.len() as u64 - received.hits);
        self.count_answers(0);
        if received.errors > 0 {
            sink.was_in_vain();
        }
        Ok(())
    }

    fn put_many(
        &self,
        records: &[Sealed<'_>],
        taken: &mut [bool],
        deadline: Instant,
    ) -> Result<()> {
        for (record, taken) in records.iter().zip(taken.iter_mut()) {
            let Ok(head) = portable::check(
                &record.head,
                record.parts,
                record.key,
                self.store.options().fingerprint,
            ) else {
                continue;
            };
            let schema = match head.schema {
                None => Some(Vec::new()),
                Some(hash) => self.known(hash),
            };
            let Some(schema) = schema else { continue };
            *taken = self.store.put(record.key, &schema, &record.head, record.parts, deadline);
        }
        self.count_answers(taken.iter().filter(|taken| !**taken).count() as u64);
        Ok(())
    }

    fn schema(&self, hash: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(self.store.schema(hash))
    }

    /// Schemas travel in the values.
    fn put_schema(&self, _: u128, schema: &[u8], _: Instant) -> Result<()> {
        self.store.keep_schema(schema);
        Ok(())
    }

    /// Asks the servers what they hold.
    fn stats(&self) -> TierStats {
        let holdings = self.store.holdings();
        self.count_answers(0);
        let sum = |of: fn(&crate::cluster::Holding) -> u64| holdings.iter().map(of).sum();
        let space = self.memory.space();
        let counters = space.counters();
        TierStats {
            hits: counters.sum(Count::ClusterHits),
            misses: counters.sum(Count::ClusterMisses),
            fills: counters.sum(Count::ClusterFills),
            records: sum(|holding| holding.samples.unwrap_or(0)),
            bytes: sum(|holding| holding.used_bytes),
            capacity: sum(|holding| holding.max_bytes),
            evicted: 0,
            errors: counters.sum(Count::ClusterErrors),
        }
    }

    fn identity(&self, key: u64) -> Option<(u64, u128)> {
        Some((key, self.store.options().fingerprint))
    }

    fn is_of_all_nodes(&self) -> bool {
        true
    }

    /// The tag covers the whole record.
    fn vouches(&self) -> bool {
        true
    }

    fn clear(&self) -> Result<()> {
        self.store.clear()
    }

    fn flush(&self, patience: Duration) -> bool {
        let good = self.store.flush(patience);
        self.count_answers(0);
        good
    }

    fn news(&self) -> Option<String> {
        self.store.news()
    }
}
