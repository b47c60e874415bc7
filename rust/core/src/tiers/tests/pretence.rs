//! A tier that misses, fails, lies and takes its time, as it is told.

use super::super::tier::{Lent, Sealed, Sink, Tier, TierStats};
use crate::error::{Error, Kind, Result};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What it does wrong, per call or per record, each with a chance of so many in a hundred.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wrongs {
    /// A record is not found.
    pub misses: u64,
    /// A call ends with an error in its middle.
    pub errors: u64,
    /// A record is not what was put.
    pub garbage: u64,
    /// The call takes longer than its caller has time.
    pub late: bool,
    /// It goes on when its time is over.
    pub overruns: bool,
    /// Nothing is taken.
    pub full: bool,
    /// Nor is that said before the caller has no time left.
    pub stuck: bool,
}

#[derive(Default)]
pub(super) struct Pretence {
    records: Mutex<BTreeMap<u64, Vec<u8>>>,
    schemas: Mutex<BTreeMap<u128, Vec<u8>>>,
    wrongs: Wrongs,
    /// A random number, step by step.
    chance: AtomicU64,
    pub asked: Mutex<Vec<u64>>,
    pub expected: Mutex<Vec<u64>>,
    /// Whether it was let go at its deadline.
    pub returned_late: AtomicBool,
    /// How often somebody waited for it in vain, for longer than nothing.
    pub waits: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    fills: AtomicU64,
}

impl Pretence {
    pub(super) fn new(wrongs: Wrongs, seed: u64) -> Self {
        Self { wrongs, chance: AtomicU64::new(seed), ..Self::default() }
    }

    /// As if somebody had written this to the disk.
    pub(super) fn plant(&self, key: u64, record: Vec<u8>) {
        self.records.lock().unwrap().insert(key, record);
    }

    pub(super) fn forget_schemas(&self) {
        self.schemas.lock().unwrap().clear();
    }

    fn random(&self) -> u64 {
        let mut x = self.chance.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn happens(&self, percent: u64) -> bool {
        self.random() % 100 < percent
    }

    /// Something else than the record.
    fn spoilt(&self, record: &[u8]) -> Vec<u8> {
        let mut other = record.to_vec();
        let at = self.random() as usize % other.len();
        match self.random() % 6 {
            0 => other.truncate(at),
            1 => other[at] ^= 1 << (self.random() % 8),
            2 => other.extend_from_slice(b"more"),
            3 => other[at..].fill(0),
            4 => {
                let records = self.records.lock().unwrap();
                other = records.values().nth(at % records.len()).unwrap().clone();
                if other == record {
                    other.clear();
                }
            }
            _ => other = (0..at).map(|_| self.random() as u8).collect(),
        }
        if other == record {
            other.clear(); // zeros in the place of zeros
        }
        other
    }
}

fn fill(sink: &mut dyn Sink, which: usize, record: &[u8]) -> Option<Lent> {
    let mut lent = sink.lend(which, record.len(), record.len())?;
    lent.copy_from_slice(record);
    Some(lent)
}

fn broken() -> Error {
    Error::new(Kind::State, "the pretence is broken, as it was told")
}

impl Tier for Pretence {
    fn expect(&self, keys: &[u64]) {
        self.expected.lock().unwrap().extend_from_slice(keys);
    }

    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        self.asked.lock().unwrap().extend_from_slice(keys);
        if self.wrongs.late {
            // It answers nothing for as long as it is given.
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
            self.returned_late.store(true, Ordering::Relaxed);
            return Ok(());
        }
        for (which, key) in keys.iter().enumerate() {
            if Instant::now() >= deadline && !self.wrongs.overruns {
                break;
            }
            if self.happens(self.wrongs.errors) {
                return Err(broken());
            }
            let found = self.records.lock().unwrap().get(key).cloned();
            let Some(record) = found.filter(|_| !self.happens(self.wrongs.misses)) else {
                self.misses.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let spoils = self.happens(self.wrongs.garbage);
            let given = if spoils { self.spoilt(&record) } else { record };
            if spoils {
                // Memory that is never given back, or for what nobody asked for.
                drop(sink.lend(which, given.len(), given.len()));
                assert!(sink.lend(keys.len() + which, given.len(), given.len()).is_none());
            }
            if let Some(lent) = fill(sink, which, &given) {
                sink.done(lent);
                self.hits.fetch_add(1, Ordering::Relaxed);
            }
            if spoils && let Some(lent) = fill(sink, which, &given) {
                sink.done(lent); // once more
            }
        }
        Ok(())
    }

    fn put_many(
        &self,
        records: &[Sealed<'_>],
        taken: &mut [bool],
        deadline: Instant,
    ) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if self.wrongs.stuck && !left.is_zero() {
            self.waits.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(left);
        }
        for (record, taken) in records.iter().zip(taken) {
            if self.happens(self.wrongs.errors) {
                return Err(broken());
            }
            if self.wrongs.full || self.wrongs.stuck {
                continue;
            }
            let mut bytes = record.head.to_vec();
            record.parts.iter().for_each(|part| bytes.extend_from_slice(part));
            assert_eq!(bytes.len(), record.len());
            self.records.lock().unwrap().insert(record.key, bytes);
            self.fills.fetch_add(1, Ordering::Relaxed);
            *taken = true;
        }
        Ok(())
    }

    fn schema(&self, hash: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(self.schemas.lock().unwrap().get(&hash).cloned())
    }

    fn put_schema(&self, hash: u128, schema: &[u8], _: Instant) -> Result<()> {
        self.schemas.lock().unwrap().insert(hash, schema.to_vec());
        Ok(())
    }

    fn stats(&self) -> TierStats {
        let records = self.records.lock().unwrap();
        TierStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            fills: self.fills.load(Ordering::Relaxed),
            records: records.len() as u64,
            bytes: records.values().map(|record| record.len() as u64).sum(),
            ..TierStats::default()
        }
    }
}

/// So that a test keeps one that it has put below.
impl Tier for std::sync::Arc<Pretence> {
    fn expect(&self, keys: &[u64]) {
        (**self).expect(keys);
    }

    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        (**self).get_many(keys, sink, deadline)
    }

    fn put_many(
        &self,
        records: &[Sealed<'_>],
        taken: &mut [bool],
        deadline: Instant,
    ) -> Result<()> {
        (**self).put_many(records, taken, deadline)
    }

    fn schema(&self, hash: u128, deadline: Instant) -> Result<Option<Vec<u8>>> {
        (**self).schema(hash, deadline)
    }

    fn put_schema(&self, hash: u128, schema: &[u8], deadline: Instant) -> Result<()> {
        (**self).put_schema(hash, schema, deadline)
    }

    fn stats(&self) -> TierStats {
        (**self).stats()
    }
}
