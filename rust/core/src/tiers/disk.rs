//! Files of a near disk as a level.

use super::tier::{Filling, Sealed, Sink, Tier, TierStats};
use crate::disk::DiskStore;
use crate::error::{Error, Kind, Result};
use crate::records::portable;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Below this size of a record, disks do more reads at the same time.
const SMALL: u64 = 16 << 10;

/// A disk store as a tier.
pub struct Disk(pub Arc<DiskStore>);

impl Tier for Disk {
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        let store = &*self.0;
        let (mut hits, mut trouble) = (0, None);
        for (which, &key) in keys.iter().enumerate() {
            if Instant::now() >= deadline {
                break;
            }
            let Some(i) = store.index(key) else { continue };
            let Some(found) = store.find(i, deadline) else { continue };
            let Some(mut lent) = sink.lend(which, found.len, found.room()) else { continue };
            match store.read(&found, lent.pages()) {
                Ok(Some(start)) => {
                    lent.lies_at(start);
                    if sink.done(lent) {
                        hits += 1;
                    } else {
                        store.forget(i, &found);
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

    fn put_many(
        &self,
        records: &[Sealed<'_>],
        taken: &mut [bool],
        deadline: Instant,
    ) -> Result<()> {
        for (record, taken) in records.iter().zip(taken) {
            let Some(i) = self.0.index(record.key) else { continue };
            *taken = self.0.put(i, &record.head, record.parts, deadline);
        }
        Ok(())
    }

    fn schema(&self, hash: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(self.0.schemas().into_iter().find(|schema| portable::schema_hash(schema) == hash))
    }

    fn put_schema(&self, hash: u128, schema: &[u8], _: Instant) -> Result<()> {
        let known = |schema: &Vec<u8>| portable::schema_hash(schema) == hash;
        if self.0.schemas().iter().any(known) {
            return Ok(());
        }
        self.0.add_schema(schema).map_err(|errno| {
            self.0.note_trouble("write to", errno);
            let message = format!("cannot write to {}: {errno}", self.0.path().display());
            Error::new(Kind::System, message)
        })
    }

    fn stats(&self) -> TierStats {
        let stats = self.0.stats();
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
        let space = self.0.space();
        Some(Filling {
            records: space.about_filled(),
            bytes: space.used_bytes(),
            capacity: self.0.budget(),
        })
    }

    fn has(&self, key: u64) -> Option<bool> {
        Some(self.0.index(key).is_some_and(|i| self.0.has(i)))
    }

    fn identity(&self, key: u64) -> Option<(u64, u128)> {
        self.0.index(key).map(|i| self.0.identity(i))
    }

    fn takes(&self) -> bool {
        self.0.writes()
    }

    fn tells(&self) -> bool {
        true
    }

    fn readers(&self) -> usize {
        let space = self.0.space();
        let small = space.used_bytes() < SMALL * space.about_filled();
        if small { 8 } else { 4 }
    }

    fn clear(&self) -> Result<()> {
        self.0.clear()
    }

    fn flush(&self, patience: Duration) -> bool {
        self.0.flush(patience)
    }

    fn news(&self) -> Option<String> {
        self.0.news()
    }
}
