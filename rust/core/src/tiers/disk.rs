//! Files of a near disk as a level.

use super::tier::{Filling, Lent, Sealed, Sink, Tier, TierStats};
use crate::disk::compression::{Packed, is_packed, pack};
use crate::disk::{Compression, DiskStore};
use crate::error::{Error, Kind, Result};
use crate::records::portable;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A disk store as a tier.
pub struct Disk {
    store: Arc<DiskStore>,
    /// Of what is written from now on; what is there says itself how it is packed.
    compression: Compression,
}

impl Disk {
    /// Records that go there are packed like this.
    pub fn new(store: Arc<DiskStore>, compression: Compression) -> Self {
        Self { store, compression }
    }

    /// Gives a record that was read, unpacked; false if it is not the one that was asked for, and nothing if
    /// it is not wanted.
    fn give(&self, lent: Lent, i: usize, sink: &mut dyn Sink) -> Option<bool> {
        if !is_packed(&lent) {
            return Some(sink.done(lent));
        }
        let (key, fingerprint) = self.store.identity(i);
        let unpacked = match Packed::open(&lent, key, fingerprint) {
            None => Some(false),
            Some(packed) => packed.len().map_or(Some(false), |len| {
                let mut whole = sink.lend(lent.which(), len, len)?;
                Some(packed.unpack(&mut whole) && sink.done(whole))
            }),
        };
        sink.take_back(lent);
        unpacked
    }
}

impl Tier for Disk {
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        let store = &*self.store;
        let files = store.open_files();
        let (mut hits, mut trouble) = (0, None);
        for (which, &key) in keys.iter().enumerate() {
            if Instant::now() >= deadline {
                break;
            }
            let Some(i) = store.index(key) else { continue };
            let Some(found) = store.find(i, deadline) else { continue };
            let Some(mut lent) = sink.lend(which, found.len, found.room()) else { continue };
            match store.read(files, &found, lent.pages()) {
                Ok(Some(start)) => {
                    lent.lies_at(start);
                    match self.give(lent, i, sink) {
                        Some(true) => hits += 1,
                        Some(false) => store.forget(i, &found),
                        None => {}
                    }
                }
                Ok(None) => store.forget(i, &found),
                Err(errno) => trouble = trouble.or(Some(errno)),
            }
        }
        store.note_reads(hits, keys.len() as u64 - hits);
        match trouble {
            None => Ok(()),
            Some(errno) => {
                store.note_trouble("read from", errno);
                let message = format!("cannot read from {}: {errno}", store.path().display());
                Err(Error::new(Kind::System, message))
            }
        }
    }

    fn expect(&self, keys: &[u64]) {
        self.store.expect(keys.iter().filter_map(|&key| self.store.index(key)));
    }

    fn put_many(
        &self,
        records: &[Sealed<'_>],
        taken: &mut [bool],
        deadline: Instant,
    ) -> Result<()> {
        for (record, taken) in records.iter().zip(taken) {
            let Some(i) = self.store.index(record.key) else { continue };
            let put = |head: &[u8], parts: &[IoSlice<'_>]| {
                self.store.put(i, record.since, head, parts, deadline)
            };
            // What is there need not be packed for it.
            let settled = match self.compression {
                Compression::None => None,
                _ => self.store.is_settled(i),
            };
            *taken = settled.unwrap_or_else(|| {
                match pack(self.compression, &record.head, record.parts) {
                    Some((head, bytes)) => put(&head, &[IoSlice::new(&bytes)]),
                    None => put(&record.head, record.parts),
                }
            });
        }
        Ok(())
    }

    fn schema(&self, hash: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(self.store.schemas().into_iter().find(|schema| portable::schema_hash(schema) == hash))
    }

    fn put_schema(&self, hash: u128, schema: &[u8], _: Instant) -> Result<()> {
        let known = |schema: &Vec<u8>| portable::schema_hash(schema) == hash;
        if self.store.schemas().iter().any(known) {
            return Ok(());
        }
        self.store.add_schema(schema).map_err(|errno| {
            self.store.note_trouble("write to", errno);
            let message = format!("cannot write to {}: {errno}", self.store.path().display());
            Error::new(Kind::System, message)
        })
    }

    fn stats(&self) -> TierStats {
        let stats = self.store.stats();
        TierStats {
            hits: stats.hits,
            misses: stats.misses,
            fills: stats.fills,
            records: stats.records,
            bytes: stats.bytes,
            capacity: stats.capacity,
            evicted: stats.evicted,
            errors: stats.errors,
        }
    }

    fn filling(&self) -> Option<Filling> {
        let space = self.store.space();
        Some(Filling {
            records: space.about_filled(),
            bytes: self.store.taken_bytes(),
            capacity: self.store.budget(),
        })
    }

    fn has(&self, key: u64) -> Option<bool> {
        Some(self.store.index(key).is_some_and(|i| self.store.has(i)))
    }

    fn lacks(&self, key: u64) -> bool {
        self.store.index(key).is_none_or(|i| self.store.lacks(i))
    }

    fn identity(&self, key: u64) -> Option<(u64, u128)> {
        self.store.index(key).map(|i| self.store.identity(i))
    }

    fn takes(&self) -> bool {
        self.store.writes()
    }

    fn tells(&self) -> bool {
        true
    }

    fn readers(&self) -> usize {
        // Of small records, disks do more reads at the same time.
        if self.store.is_of_small() { 8 } else { 4 }
    }

    fn clear(&self) -> Result<()> {
        self.store.clear()
    }

    fn emptied(&self) -> u64 {
        self.store.emptied()
    }

    fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience)
    }

    fn news(&self) -> Option<String> {
        self.store.news()
    }
}
