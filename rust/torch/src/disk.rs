//! Levels below a store of records, as C++ knows them.
#![allow(unsafe_code)] // records are handed out as addresses

use crate::bridge::ffi;
use crate::disk_folder::compression;
use crate::guard::{Crossing, calm, guard};
use crate::handle::{argument, hashed};
use crate::records::{Below, Records};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;
use stocache::disk::{DiskOptions, DiskStore, Keys};
use stocache::tiers::{Disk, Fetched, Levels};

type Result<T> = std::result::Result<T, Crossing>;

/// Records from levels below memory, by position.
pub struct FetchedRecords {
    levels: Arc<Levels>,
    records: Vec<Option<Fetched>>,
}

/// Nothing, where there might be a record.
pub(crate) fn nothing() -> ffi::RecordAt {
    ffi::RecordAt { data: std::ptr::null(), len: 0, schema: 0, region: 0, generation: 0 }
}

/// A record that lies in memory of its own.
pub(crate) fn record_at(fetched: Option<&Fetched>) -> ffi::RecordAt {
    fetched.map_or_else(nothing, |fetched| {
        let bytes = fetched.bytes();
        ffi::RecordAt {
            data: bytes.as_ptr(),
            len: bytes.len(),
            schema: fetched.schema,
            ..nothing()
        }
    })
}

impl Records {
    pub fn open_disk(&self, options: &ffi::DiskOptions) -> Result<()> {
        guard(|| {
            let store = self.store();
            let compression = compression(&options.compression)?;
            let keys: Arc<[u128]> = options
                .keys
                .chunks_exact(2)
                .map(|halves| u128::from(halves[0]) | u128::from(halves[1]) << 64)
                .collect();
            let options = DiskOptions {
                path: OsStr::from_bytes(&options.path).into(),
                budget: options.budget,
                dataset_len: store.geometry().dataset_len,
                fingerprint: hashed(&options.fingerprint),
                recycles: store.recycles(),
                keys: match (keys.is_empty(), options.table) {
                    (false, _) => Keys::Of(keys),
                    (true, 0) => Keys::Numbers,
                    (true, table) => Keys::OfTable(table),
                },
            };
            if self.cluster().is_some() {
                return Err(argument("the disk is opened before the cluster".to_string()));
            }
            let disk = DiskStore::open(&options)?;
            let below = Box::new(Disk::new(Arc::clone(&disk), compression));
            let levels = Levels::new(Arc::clone(store), vec![below]);
            if !self.put_below(Below { levels, disk, compression }) {
                return Err(argument("a level below is open already".to_string()));
            }
            Ok(())
        })
    }

    pub fn disk_options(&self) -> Result<ffi::DiskOptions> {
        guard(|| {
            let Some(disk) = self.disk() else {
                return Ok(ffi::DiskOptions {
                    path: Vec::new(),
                    budget: 0,
                    fingerprint: String::new(),
                    keys: Vec::new(),
                    table: 0,
                    compression: String::new(),
                });
            };
            let options = disk.options();
            Ok(ffi::DiskOptions {
                path: options.path.into_os_string().into_encoded_bytes(),
                budget: options.budget,
                fingerprint: format!("{:032x}", options.fingerprint),
                keys: Vec::new(),
                table: if let Keys::OfTable(table) = options.keys { table } else { 0 },
                compression: self.compression().name().to_string(),
            })
        })
    }

    pub fn disk_stats(&self) -> Result<ffi::DiskStats> {
        guard(|| {
            let s = self.disk().map(|disk| disk.stats()).unwrap_or_default();
            Ok(ffi::DiskStats {
                hits: s.hits,
                fills: s.fills,
                records: s.records,
                bytes: s.bytes,
                capacity: s.capacity,
                evicted: s.evicted,
                dropped: s.dropped,
                waiting: s.waiting,
                errors: s.errors,
                writes: self.disk().is_some_and(|disk| disk.writes()),
            })
        })
    }

    pub fn look_ups_of(&self, rank: u32) -> Result<ffi::LookUps> {
        guard(|| {
            let (hits, misses) = self.store().look_ups_of(rank);
            let from_disk = self.disk().map_or(0, |disk| disk.hits_of(rank));
            Ok(ffi::LookUps { hits, misses, from_disk })
        })
    }

    pub fn is_below(&self, i: i64) -> bool {
        calm(false, || self.store().index(i).is_some_and(|i| self.levels().is_below(i)))
    }

    pub fn is_complete(&self) -> Result<bool> {
        guard(|| Ok(self.levels().is_complete()))
    }

    pub fn prefetch(&self, indices: &[i64]) -> Result<()> {
        guard(|| {
            let indices: Vec<usize> =
                indices.iter().filter_map(|&i| self.store().index(i)).collect();
            self.levels().prefetch(&indices);
            Ok(())
        })
    }

    pub fn flush(&self, nanos: u64) -> bool {
        calm(false, || self.levels().flush(Duration::from_nanos(nanos)))
    }

    pub fn news_below(&self) -> String {
        calm(String::new(), || self.levels().news().unwrap_or_default())
    }

    pub fn fetch(&self, indices: &[i64]) -> Result<Box<FetchedRecords>> {
        guard(|| {
            let levels = Arc::clone(self.levels());
            let mut records: Vec<Option<Fetched>> = indices.iter().map(|_| None).collect();
            let (positions, wanted): (Vec<usize>, Vec<usize>) = indices
                .iter()
                .enumerate()
                .filter_map(|(k, &i)| Some((k, self.store().index(i)?)))
                .filter(|&(_, i)| levels.is_below(i))
                .unzip();
            if !wanted.is_empty() {
                for (k, fetched) in positions.into_iter().zip(levels.begin_fetch(wanted).wait()) {
                    records[k] = fetched;
                }
            }
            Ok(Box::new(FetchedRecords { levels, records }))
        })
    }
}

impl FetchedRecords {
    pub fn at(&self, which: usize) -> ffi::RecordAt {
        calm(nothing(), || record_at(self.records.get(which).and_then(Option::as_ref)))
    }
}

impl Drop for FetchedRecords {
    fn drop(&mut self) {
        let levels = Arc::clone(&self.levels);
        calm((), || self.records.drain(..).flatten().for_each(|fetched| levels.reuse(fetched)));
    }
}
