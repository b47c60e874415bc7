//! What tiers and the way through them promise.
//!
//! | module | role |
//! | --- | --- |
//! | `conformance` | what every tier must do, asked of each of them |
//! | `ways` | the way of samples through memory and the levels below it |
//! | `pretence` | a tier that misses, fails, lies and takes its time, as it is told |

mod conformance;
mod pretence;
mod ways;

use crate::records::RecordStore;
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::{Backing, Request, random_name};
use std::io::IoSlice;
use std::sync::Arc;

const FINGERPRINT: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
/// One number.
const SCHEMA: &[u8] = b"\x01i";

fn memory(limit: u64, samples: u64) -> Arc<RecordStore> {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        fingerprint: FINGERPRINT,
        ..Request::new(
            random_name().unwrap(),
            Geometry::Records(RecordsGeometry::plan(limit, samples, false).unwrap()),
        )
    };
    RecordStore::open(&request).unwrap().0
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
