//! Schemas: what records are made of, kept once per store and known by a number.
//!
//! They are appended one after the other, each behind its length, and never changed.

use super::base::{LOCK_OF_SCHEMAS, RecordStore};
use super::portable::schema_hash;
use crate::segment::layout::SCHEMA_BYTES;
use std::sync::atomic::{AtomicU64, Ordering};

/// The schema number of a record that brings its own.
pub const INLINE: u16 = u16::MAX;

impl RecordStore {
    /// The number of this schema, kept once for all records. None if there is no room for it.
    pub fn intern(&self, schema: &[u8]) -> Option<u16> {
        if let Some(known) = self.schemas().position(|known| known == schema) {
            return u16::try_from(known).ok();
        }
        let need = 4 + schema.len().next_multiple_of(4);
        let lease = self.lease()?;
        self.space().locked(LOCK_OF_SCHEMAS, lease, || {
            // Again: somebody may have added it.
            let mut known = self.schemas();
            if let Some(number) = known.position(|known| known == schema) {
                return u16::try_from(number).ok();
            }
            let number = self.schemas().count();
            let used = self.schemas_used().load(Ordering::Relaxed) as usize;
            if number >= usize::from(INLINE) || used + need > (SCHEMA_BYTES - 8) as usize {
                return None;
            }
            let at = self.layout().schemas_at as usize + 8 + used;
            self.mapping().write(at, &(schema.len() as u32).to_le_bytes());
            self.mapping().write(at + 4, schema);
            // SYNC POINT schema: Release here, Acquire in `schemas`: who sees the length sees the
            // bytes, and a dead writer's half is never seen.
            self.schemas_used().store((used + need) as u64, Ordering::Release);
            u16::try_from(number).ok()
        })?
    }

    /// The schema of that number.
    pub fn schema(&self, number: u16) -> Option<Vec<u8>> {
        self.schemas().nth(usize::from(number))
    }

    /// The number that this store has given to the schema with this content hash.
    pub fn schema_of_hash(&self, hash: u128) -> Option<u16> {
        let number = self.schemas().position(|schema| schema_hash(&schema) == hash)?;
        u16::try_from(number).ok()
    }

    /// All schemas from that number on.
    pub(crate) fn schemas_from(&self, number: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.schemas().skip(number)
    }

    fn schemas_used(&self) -> &AtomicU64 {
        &self.mapping().words(self.layout().schemas_at as usize, 1)[0]
    }

    fn schemas(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        let end = self.schemas_used().load(Ordering::Acquire).min(SCHEMA_BYTES - 8) as usize;
        let bytes = self.mapping().bytes(self.layout().schemas_at as usize + 8, end);
        let read = move |from: usize, len: usize| -> Option<Vec<u8>> {
            let part = bytes.get(from..from.checked_add(len)?)?;
            Some(part.iter().map(|byte| byte.load(Ordering::Relaxed)).collect())
        };
        let mut at = 0;
        std::iter::from_fn(move || {
            let len = u32::from_le_bytes(read(at, 4)?.try_into().ok()?) as usize;
            let schema = read(at + 4, len)?;
            at += 4 + len.next_multiple_of(4);
            Some(schema)
        })
    }
}
