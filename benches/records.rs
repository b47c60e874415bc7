//! Storing under "lru" and clearing, by the length of the dataset: neither may depend on it.
//!
//! `cargo bench --bench records [-- SAMPLES ...]`. An index takes about 18 bytes per sample, in memory
//! outside /dev/shm; data take 32 MiB, some 10,000 records, so a shorter dataset has nothing to evict.
//! Times are those of the processor, not of the clock on the wall: others may use the machine.
#![allow(unsafe_code)] // the clock of a thread has no safe wrapper

use std::io::IoSlice;
use std::time::Duration;
use stocache::{Backing, Claim, Geometry, Put, RecordStore, RecordsGeometry, Request};

const RECORD: usize = 3 * 32 * 32;
const DATA: u64 = 32 << 20;
const FILLS: u64 = 200_000;

/// What this thread has used of the processor.
fn now() -> Duration {
    // SAFETY: all-zero is a valid timespec, and the call fills it in.
    let used = unsafe {
        let mut used: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut used);
        used
    };
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

/// Fills per second, the slowest of them, the records that were dropped, and what clear takes.
fn measure(samples: u64) -> (f64, Duration, u64, Duration) {
    let index = 24 * samples + (1 << 20);
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(
            format!("bench-records-{samples}-{}", std::process::id()),
            Geometry::Records(RecordsGeometry::plan(index + DATA, samples, true).expect("room")),
        )
    };
    let store = RecordStore::open(&request).expect("a store").0;
    let record = vec![7u8; RECORD];
    // Takes the lease, which is once per process.
    assert_eq!(store.begin(0), Claim::LoadAndStore);
    store.abandon(0);
    let began = now();
    let mut slowest = Duration::ZERO;
    // At most five seconds.
    let (mut tried, mut done) = (0u64, 0);
    while done < FILLS && (now() - began) < Duration::from_secs(5) {
        tried += 1;
        let i = (tried.wrapping_mul(0x9e37_79b9_7f4a_7c15) % samples) as usize;
        let one = now();
        if store.begin(i) != Claim::LoadAndStore {
            continue; // it is there: that is no fill
        }
        let put = store.fill(i, 0, &[IoSlice::new(&record)]).expect("a fill");
        slowest = slowest.max(now() - one);
        done += u64::from(put == Put::Stored);
    }
    let rate = done as f64 / (now() - began).as_secs_f64();
    let dropped = store.stats().dropped;
    let began = now();
    store.clear().expect("cleared");
    (rate, slowest, dropped, (now() - began))
}

fn main() {
    let given: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let lengths = if given.is_empty() { vec![100_000, 1_000_000, 10_000_000] } else { given };
    println!(
        "{:>12}  {:>10}  {:>12}  {:>8}  {:>12}",
        "samples", "fills/s", "slowest", "dropped", "clear"
    );
    for samples in lengths {
        let (rate, slowest, dropped, clear) = measure(samples);
        println!("{samples:>12}  {rate:>10.0}  {slowest:>12.1?}  {dropped:>8}  {clear:>12.1?}");
    }
}
