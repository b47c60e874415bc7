//! A store of records as C++ holds it.
#![allow(unsafe_code)] // records are handed out as addresses

use crate::bridge::ffi;
use crate::guard::{Crossing, guard};
use crate::handle::{argument, backing, hashed, join_of, place, unknown, whole};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;
use stocache::store::INLINE;
use stocache::{Begin, Filled, Opened, Plan, Record, RecordStore, Request, Room, random_name};

type Result<T> = std::result::Result<T, Crossing>;

/// A store of records, open in this process.
pub struct Records {
    store: Arc<RecordStore>,
    opened: Opened,
}

/// Joins or makes a store.
pub fn open_records(options: &ffi::RecordOptions) -> Result<Box<Records>> {
    guard(|| {
        let recycle = match options.policy.as_str() {
            "freeze" => false,
            "lru" => true,
            other => return Err(unknown("policy", other, r#""freeze" or "lru""#)),
        };
        let private = options.name.is_empty();
        if options.keep && private {
            let message = "keep=True needs name=, so that the next run can find the cache";
            return Err(argument(message.to_string()));
        }
        let dataset_len = whole("the length of the dataset", options.dataset_len)?;
        let request = Request {
            name: if private { random_name()? } else { options.name.clone() },
            plan: Plan::Records(Room::plan(options.limit_bytes, dataset_len, recycle)?),
            fingerprint: hashed(&options.fingerprint),
            keep: options.keep,
            backing: backing(&options.backing)?,
            private,
            join: join_of(&options.instance, options.pid, options.fd),
        };
        let (store, opened) = RecordStore::open(&request)?;
        Ok(Box::new(Records { store, opened }))
    })
}

impl Records {
    /// Where the record of sample `i` is. It stays there only if the store is stable; otherwise
    /// compare the epoch before and after.
    pub fn find(&self, i: i64) -> ffi::RecordAt {
        let found = self.store.index(i).and_then(|i| self.store.find(i));
        match found {
            None => ffi::RecordAt { data: std::ptr::null(), len: 0, schema: 0 },
            Some(Record { at, len, schema }) => ffi::RecordAt {
                data: self.store.segment().mapping().at(at, len).as_ptr(),
                len,
                schema,
            },
        }
    }

    pub fn is_stable(&self) -> bool {
        self.store.is_stable()
    }

    pub fn epoch(&self) -> u64 {
        self.store.epoch()
    }

    pub fn unmoved(&self, before: u64) -> bool {
        self.store.is_stable() || self.store.unmoved(before)
    }

    pub fn note(&self, hits: u64, misses: u64) {
        self.store.note(hits, misses);
    }

    pub fn note_loads(&self, loads: u64, nanos: u64) {
        self.store.note_loads(loads, Duration::from_nanos(nanos));
    }

    pub fn begin(&self, i: i64) -> ffi::Loader {
        match self.store.index(i).map(|i| self.store.begin(i)) {
            Some(Begin::Mine) => ffi::Loader::Mine,
            Some(Begin::Present) => ffi::Loader::Nobody,
            Some(Begin::Busy) => ffi::Loader::Other,
            Some(Begin::Refused) | None => ffi::Loader::Refused,
        }
    }

    pub fn wait(&self, i: i64, nanos: u64) {
        if let Some(i) = self.store.index(i) {
            self.store.wait(i, Duration::from_nanos(nanos));
        }
    }

    pub fn abandon(&self, i: i64) {
        if let Some(i) = self.store.index(i) {
            self.store.abandon(i);
        }
    }

    /// # Safety
    /// The parts must be readable for the length of the call.
    pub unsafe fn fill(&self, i: i64, schema: u16, parts: &[ffi::Part]) -> Result<ffi::Filled> {
        guard(|| {
            let slice = |part: &ffi::Part| match part.len {
                0 => IoSlice::new(&[]),
                // SAFETY: by the caller's promise.
                len => IoSlice::new(unsafe { std::slice::from_raw_parts(part.data, len) }),
            };
            let parts: Vec<IoSlice<'_>> = parts.iter().map(slice).collect();
            let Some(i) = self.store.index(i) else { return Ok(ffi::Filled::Lost) };
            Ok(match self.store.fill(i, schema, &parts)? {
                Filled::Stored => ffi::Filled::Stored,
                Filled::Lost => ffi::Filled::Lost,
                Filled::Full => ffi::Filled::Full,
                Filled::TooLarge => ffi::Filled::TooLarge,
                Filled::Refused(true) => ffi::Filled::Froze,
                Filled::Refused(false) => ffi::Filled::Refused,
            })
        })
    }

    /// The schema's number, or INLINE.
    pub fn intern(&self, schema: &[u8]) -> u16 {
        self.store.intern(schema).unwrap_or(INLINE)
    }

    /// Empty if there is none of that number.
    pub fn schema(&self, number: u16) -> Vec<u8> {
        self.store.schema(number).unwrap_or_default()
    }

    pub fn clear(&self) -> Result<()> {
        guard(|| Ok(self.store.clear()?))
    }

    pub fn stats(&self) -> ffi::RecordStats {
        let s = self.store.stats();
        ffi::RecordStats {
            hits: s.hits,
            misses: s.misses,
            fills: s.fills,
            bytes: s.bytes,
            waits: s.waits,
            lost: s.lost,
            dropped: s.dropped,
            loads: s.loads,
            load_nanos: s.load_nanos,
            too_large: s.too_large,
            evicted: s.evicted,
            filled: s.filled,
            used_bytes: s.used_bytes,
            data_bytes: s.data_bytes,
            dataset_len: self.store.room().dataset_len,
            frozen: s.frozen,
        }
    }

    pub fn frozen_reason(&self) -> String {
        self.store.frozen_reason()
    }

    pub fn place(&self) -> ffi::Place {
        place(self.store.segment(), self.opened)
    }

    /// The options that lead here again, or to an equal store if this one is gone.
    pub fn options(&self) -> ffi::RecordOptions {
        let (place, header) = (self.place(), self.store.segment().header());
        ffi::RecordOptions {
            limit_bytes: header.plan.extent().map_or(0, |(_, total)| total),
            dataset_len: self.store.room().dataset_len as i64,
            policy: if self.store.is_stable() { "freeze" } else { "lru" }.to_string(),
            name: place.name,
            backing: place.backing,
            keep: header.keep,
            fingerprint: format!("{:032x}", header.fingerprint),
            instance: place.instance,
            pid: place.pid,
            fd: place.fd,
        }
    }
}
