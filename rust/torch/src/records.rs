//! A store of records as C++ holds it.
#![allow(unsafe_code)] // records are handed out as addresses

use crate::bridge::ffi;
use crate::disk::nothing;
use crate::guard::{Crossing, calm, guard};
use crate::handle::{
    argument, backing, hashed, huge_pages, huge_pages_word, join_of, location, unknown, whole,
};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use stocache::cluster::ClusterStore;
use stocache::disk::{Compression, DiskStore};
use stocache::records::INLINE;
use stocache::tiers::Levels;
use stocache::{Geometry, Opened, Record, RecordStore, RecordsGeometry, Request, random_name};

type Result<T> = std::result::Result<T, Crossing>;

/// A store of records, open in this process.
pub struct Records {
    /// Memory alone.
    memory: Arc<Levels>,
    /// With the level below, once there is one: others may be using what was there before.
    with_disk: OnceLock<Below>,
    /// With a cluster below that, likewise.
    with_cluster: OnceLock<BelowAll>,
    opened: Opened,
}

/// Memory with a level below it, and that level.
pub(crate) struct Below {
    pub(crate) levels: Arc<Levels>,
    pub(crate) disk: Arc<DiskStore>,
    pub(crate) compression: Compression,
}

/// Memory with a cluster below it and below the disk, if there is one.
pub(crate) struct BelowAll {
    levels: Arc<Levels>,
    pub(crate) store: Arc<ClusterStore>,
    /// As they were given.
    pub(crate) options: ffi::ClusterOptions,
}

/// The least memory that a store for so many samples takes.
pub fn least_memory(dataset_len: i64, policy: &str) -> Result<u64> {
    guard(|| {
        let dataset_len = whole("the length of the dataset", dataset_len)?;
        Ok(RecordsGeometry::least(dataset_len, recycles(policy)?)?)
    })
}

fn recycles(policy: &str) -> Result<bool> {
    match policy {
        "freeze" => Ok(false),
        "lru" => Ok(true),
        other => Err(unknown("policy", other, r#""freeze" or "lru""#)),
    }
}

/// Joins or makes a store.
pub fn open_records(options: &ffi::RecordOptions) -> Result<Box<Records>> {
    guard(|| {
        let recycle = recycles(&options.policy)?;
        let private = options.name.is_empty();
        if options.keep && private {
            let message = "keep=True needs name=, so that the next run can find the cache";
            return Err(argument(message.to_string()));
        }
        let dataset_len = whole("the length of the dataset", options.dataset_len)?;
        let request = Request {
            name: if private { random_name()? } else { options.name.clone() },
            geometry: Geometry::Records(RecordsGeometry::plan(
                options.limit_bytes,
                dataset_len,
                recycle,
            )?),
            fingerprint: hashed(&options.fingerprint),
            keep: options.keep,
            backing: backing(&options.backing)?,
            huge_pages: huge_pages(&options.huge_pages)?,
            private,
            join: join_of(&options.instance, options.pid, options.fd),
        };
        let (store, opened) = RecordStore::open(&request)?;
        let memory = Levels::new(store, Vec::new());
        let (with_disk, with_cluster) = (OnceLock::new(), OnceLock::new());
        Ok(Box::new(Records { memory, with_disk, with_cluster, opened }))
    })
}

impl Records {
    /// The store itself.
    pub fn store(&self) -> &Arc<RecordStore> {
        self.memory.memory()
    }

    /// The store and what is below it.
    pub fn levels(&self) -> &Arc<Levels> {
        match (self.with_cluster.get(), self.with_disk.get()) {
            (Some(below), _) => &below.levels,
            (None, Some(below)) => &below.levels,
            (None, None) => &self.memory,
        }
    }

    /// The level below it.
    pub(crate) fn disk(&self) -> Option<&Arc<DiskStore>> {
        self.with_disk.get().map(|below| &below.disk)
    }

    /// How records are packed there.
    pub(crate) fn compression(&self) -> Compression {
        self.with_disk.get().map(|below| below.compression).unwrap_or_default()
    }

    /// From now on, with these levels; false if there is a level below already.
    pub(crate) fn put_below(&self, below: Below) -> bool {
        self.with_disk.set(below).is_ok()
    }

    /// The servers below it.
    pub(crate) fn cluster(&self) -> Option<&BelowAll> {
        self.with_cluster.get()
    }

    /// From now on, with these levels; false if there is a cluster already.
    pub(crate) fn put_cluster(
        &self,
        levels: Arc<Levels>,
        store: Arc<ClusterStore>,
        options: ffi::ClusterOptions,
    ) -> bool {
        self.with_cluster.set(BelowAll { levels, store, options }).is_ok()
    }

    /// Where the record of sample `i` is.
    pub fn find(&self, i: i64) -> ffi::RecordAt {
        calm(nothing(), || match self.store().index(i).and_then(|i| self.store().find(i)) {
            None => nothing(),
            Some(Record { at, len, schema, region, generation }) => ffi::RecordAt {
                data: self.store().segment().mapping().at(at, len).as_ptr(),
                len,
                schema,
                region,
                generation,
            },
        })
    }

    /// Whether what was read of that region until now were records of that generation.
    pub fn is_whole(&self, region: u32, generation: u32) -> bool {
        calm(false, || self.store().is_whole(region, generation))
    }

    pub fn note(&self, hits: u64, misses: u64) {
        calm((), || self.store().note(hits, misses));
    }

    pub fn note_transforms(&self, samples: u64, nanos: u64) {
        calm((), || self.store().note_transforms(samples, Duration::from_nanos(nanos)));
    }

    pub fn note_loads(&self, loads: u64, nanos: u64) {
        calm((), || self.store().note_loads(loads, Duration::from_nanos(nanos)));
    }

    pub fn note_unsupported(&self, samples: u64) {
        calm((), || self.store().note_unsupported(samples));
    }

    pub fn is_first_to_tell(&self, what: u32) -> bool {
        calm(false, || self.store().is_first_to_tell(what))
    }

    /// Why nothing can be stored from this process; empty if something can.
    pub fn cut_off(&self) -> String {
        let why = "this process closed a descriptor of the cache, which it does not own: what is \
                   cached is used, and nothing more is stored from here; construct the cache after \
                   closing descriptors";
        let cut_off = calm(false, || self.store().is_cut_off());
        if cut_off { why.to_string() } else { String::new() }
    }

    /// The schema's number, or INLINE.
    pub fn intern(&self, schema: &[u8]) -> u16 {
        calm(INLINE, || self.store().intern(schema).unwrap_or(INLINE))
    }

    /// Empty if there is none of that number.
    pub fn schema(&self, number: u16) -> Vec<u8> {
        calm(Vec::new(), || self.store().schema(number).unwrap_or_default())
    }

    pub fn clear(&self) -> Result<()> {
        guard(|| Ok(self.levels().clear()?))
    }

    pub fn stats(&self) -> Result<ffi::RecordStats> {
        let s = guard(|| Ok::<_, Crossing>(self.store().stats()))?;
        Ok(ffi::RecordStats {
            hits: s.hits,
            misses: s.misses,
            fills: s.fills,
            bytes: s.bytes,
            waits: s.waits,
            lost: s.lost,
            dropped: s.dropped,
            loads: s.loads,
            load_nanos: s.load_nanos,
            transforms: s.transforms,
            transform_nanos: s.transform_nanos,
            too_large: s.too_large,
            evicted: s.evicted,
            unsupported: s.unsupported,
            cluster_hits: s.cluster_hits,
            cluster_misses: s.cluster_misses,
            cluster_fills: s.cluster_fills,
            cluster_dropped: s.cluster_dropped,
            cluster_errors: s.cluster_errors,
            filled: s.filled,
            used_bytes: s.used_bytes,
            data_bytes: s.data_bytes,
            dataset_len: self.store().geometry().dataset_len,
            frozen: s.frozen,
        })
    }

    pub fn frozen_reason(&self) -> Result<String> {
        guard(|| Ok(self.store().frozen_reason()))
    }

    pub fn location(&self) -> Result<ffi::Location> {
        guard(|| Ok(location(self.store().segment(), self.opened)))
    }

    /// The options that lead here again, or to an equal store if this one is gone.
    pub fn options(&self) -> Result<ffi::RecordOptions> {
        let (location, header) = (self.location()?, self.store().segment().header());
        Ok(ffi::RecordOptions {
            limit_bytes: header.geometry.extent().map_or(0, |extent| extent.total),
            dataset_len: self.store().geometry().dataset_len as i64,
            policy: if self.store().recycles() { "lru" } else { "freeze" }.to_string(),
            name: location.name,
            backing: location.backing,
            keep: header.keep,
            fingerprint: format!("{:032x}", header.fingerprint),
            huge_pages: huge_pages_word(self.store().segment()),
            instance: location.instance,
            pid: location.pid,
            fd: location.fd,
        })
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        calm((), || self.levels().end_prefetch()); // what is on its way keeps the levels
    }
}
