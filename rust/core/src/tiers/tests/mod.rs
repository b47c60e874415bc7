//! What tiers and the way through them promise.
//!
//! | module | role |
//! | --- | --- |
//! | `conformance` | what every tier must do, asked of each of them |
//! | `two_levels` | memory over a disk |
//! | `ways` | the way of samples through memory and the levels below it |
//! | `pretence` | a tier that misses, fails, lies and takes its time, as it is told |

mod conformance;
mod pretence;
mod two_levels;
mod ways;

use super::disk::Disk;
use crate::disk::{Compression, DiskOptions, DiskStore, Keys};
use crate::records::RecordStore;
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::{Backing, Request, random_name};
use std::io::IoSlice;
use std::sync::Arc;

const FINGERPRINT: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
/// One number.
const SCHEMA: &[u8] = b"\x01i";

fn memory(limit: u64, samples: u64) -> Arc<RecordStore> {
    memory_of(limit, samples, false)
}

fn memory_of(limit: u64, samples: u64, recycles: bool) -> Arc<RecordStore> {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        fingerprint: FINGERPRINT,
        ..Request::new(
            random_name().unwrap(),
            Geometry::Records(RecordsGeometry::plan(limit, samples, recycles).unwrap()),
        )
    };
    RecordStore::open(&request).unwrap().0
}

/// A folder of a test, gone at its end.
struct Temporary(std::path::PathBuf);

impl Temporary {
    fn new() -> Self {
        Self(std::env::temp_dir().join(format!("stocache-{}", random_name().unwrap())))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn disk(folder: &Temporary, samples: u64) -> Disk {
    disk_of(folder, 64 << 20, samples, false)
}

fn disk_packed(folder: &Temporary, samples: u64, compression: Compression) -> Disk {
    Disk::new(store_of(folder, 64 << 20, samples, false), compression)
}

fn disk_of(folder: &Temporary, budget: u64, samples: u64, recycles: bool) -> Disk {
    Disk::new(store_of(folder, budget, samples, recycles), Compression::None)
}

fn store_of(folder: &Temporary, budget: u64, samples: u64, recycles: bool) -> Arc<DiskStore> {
    let options = DiskOptions {
        path: folder.0.clone(),
        budget,
        dataset_len: samples,
        fingerprint: FINGERPRINT,
        recycles,
        keys: Keys::Numbers,
    };
    DiskStore::open(&options).unwrap()
}

/// The one value of a sample, of a length of its own.
fn value(i: usize) -> Vec<u8> {
    (0..i * 37 % 5000).map(|at| (at ^ i.wrapping_mul(31)) as u8).collect()
}

fn parts(bytes: &[u8]) -> [IoSlice<'_>; 2] {
    let (front, back) = bytes.split_at(bytes.len() / 3);
    [IoSlice::new(front), IoSlice::new(back)]
}

/// What memory has of a sample.
#[allow(unsafe_code)] // the copy's target
fn cached(store: &RecordStore, i: usize) -> Option<Vec<u8>> {
    store.read(i, |found| {
        let mut bytes = vec![0; found.len];
        // SAFETY: as long as the record.
        unsafe { store.copy_out(found, bytes.as_mut_ptr()) };
        bytes
    })
}
