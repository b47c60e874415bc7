//! Memory as a level: a store of records that another one can be below or above.
//!
//! The way of a sample through memory does not lead here: batches are gathered from the store itself
//! (`batches`). This is what memory looks like through the eyes of a tier's user, and so the first to
//! be held to the tests of all tiers.
#![allow(unsafe_code)] // the copy out of the mapping

use super::tier::{Sealed, Sink, Tier, TierStats};
use crate::error::Result;
use crate::records::portable::{self, HEAD, Head};
use crate::records::{Claim, INLINE, Put, RecordStore};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

/// A store of records as a tier.
pub struct Memory(pub Arc<RecordStore>);

impl Memory {
    fn fingerprint(&self) -> u128 {
        self.0.segment().header().fingerprint
    }
}

impl Tier for Memory {
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        let store = &*self.0;
        let (mut hits, mut misses) = (0, 0);
        for (which, &key) in keys.iter().enumerate() {
            if Instant::now() >= deadline {
                break;
            }
            let index = i64::try_from(key).ok().and_then(|key| store.index(key));
            let found = index.and_then(|i| {
                store.read(i, |record| {
                    let mut lent = sink.lend(which, HEAD + record.len, HEAD + record.len)?;
                    let bytes = &mut lent[HEAD..];
                    // SAFETY: as long as the record.
                    unsafe { store.copy_out(record, bytes.as_mut_ptr()) };
                    Some((lent, record.schema))
                })?
            });
            let Some((mut lent, schema)) = found else {
                misses += 1;
                continue;
            };
            let schema = match schema {
                INLINE => None,
                number => match store.schema(number) {
                    Some(bytes) => Some(portable::schema_hash(&bytes)),
                    None => continue,
                },
            };
            let (head, bytes) = lent.split_at_mut(HEAD);
            let fingerprint = self.fingerprint();
            let sealed = Head { key, fingerprint, schema, len: bytes.len() as u64 };
            head.copy_from_slice(&portable::seal(&sealed, &[IoSlice::new(bytes)]));
            hits += u64::from(sink.done(lent));
        }
        store.note(hits, misses);
        Ok(())
    }

    fn put_many(&self, records: &[Sealed<'_>], taken: &mut [bool], _: Instant) -> Result<()> {
        let store = &*self.0;
        for (record, taken) in records.iter().zip(taken) {
            let index = i64::try_from(record.key).ok().and_then(|key| store.index(key));
            let Some(i) = index else { continue };
            let Some(schema) = self.number_of(record) else { continue };
            *taken = match store.begin(i) {
                Claim::Present => true,
                Claim::LoadAndStore => store.fill(i, schema, record.parts)? == Put::Stored,
                Claim::LoadingElsewhere | Claim::LoadOnly => false,
            };
        }
        Ok(())
    }

    fn schema(&self, hash: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(self.0.schema_of_hash(hash).and_then(|number| self.0.schema(number)))
    }

    fn put_schema(&self, _: u128, schema: &[u8], _: Instant) -> Result<()> {
        let _full = self.0.intern(schema); // records that need it are not taken then
        Ok(())
    }

    fn stats(&self) -> TierStats {
        let stats = self.0.stats();
        TierStats {
            hits: stats.hits,
            misses: stats.misses,
            fills: stats.fills,
            records: stats.filled,
            bytes: stats.used_bytes,
            capacity: stats.data_bytes,
            evicted: stats.evicted,
            errors: 0,
        }
    }
}

impl Memory {
    /// The number of a record's schema in this store. None if the record is no record: what is taken
    /// here is given out under a new seal, which must not make damaged bytes whole.
    fn number_of(&self, record: &Sealed<'_>) -> Option<u16> {
        let head =
            portable::check(&record.head, record.parts, record.key, self.fingerprint()).ok()?;
        match head.schema {
            None => Some(INLINE),
            Some(hash) => self.0.schema_of_hash(hash),
        }
    }
}
