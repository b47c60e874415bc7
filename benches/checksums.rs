//! The checksum of records: XXH3, which they have, and crc32c, which the processor helps with.
//!
//! `cargo bench --bench checksums`. GB/s of one thread, by its own time of the processor: out of its cache, and out of
//! memory. The best of some turns.
#![allow(unsafe_code)] // the clock of a thread has no safe wrapper

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use std::hint::black_box;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// More than a processor's cache holds.
const MEMORY: usize = 256 << 20;
const TURNS: usize = 5;

fn now() -> Duration {
    // SAFETY: all-zero is a valid timespec, and the call fills it in.
    let used = unsafe {
        let mut used: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut used);
        used
    };
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// Bytes per nanosecond over records of that length, `all` bytes of them at a time.
fn speed(bytes: &[u8], record: usize, sum: impl Fn(&[u8]) -> u64) -> f64 {
    let turn = || {
        let began = now();
        let mut done = 0;
        while done < MEMORY {
            for one in bytes.chunks_exact(record) {
                black_box(sum(black_box(one)));
                done += record;
            }
        }
        done as f64 / (now() - began).as_nanos() as f64
    };
    (0..TURNS).map(|_| turn()).fold(0.0, f64::max)
}

fn main() {
    let bytes: Vec<u8> = (0..MEMORY).map(|i| (i * 31 + i / 251) as u8).collect();
    println!("{:>10}  {:>8}  {:>10}  {:>10}", "record", "out of", "XXH3", "crc32c");
    for record in [3072, 150_528, 2 << 20] {
        for (place, len) in [("cache", record), ("memory", MEMORY)] {
            let xxh3 = speed(&bytes[..len], record, xxh3_64);
            let crc = speed(&bytes[..len], record, |one| crc_fast::checksum(Crc32Iscsi, one));
            println!("{record:>10}  {place:>8}  {xxh3:>5.1} GB/s  {crc:>5.1} GB/s");
        }
    }
}
