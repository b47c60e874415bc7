//! The core alone: what a hit, a fill and a batch cost without Python and torch.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use stocache::{Backing, Cache, Request, SlotsGeometry};

const SMALL: u64 = 3 * 32 * 32;
const LARGE: u64 = 3 * 224 * 224;

fn cache(what: &str, slots: u64, bytes: u64) -> std::sync::Arc<Cache> {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(
            format!("bench-{what}-{}", std::process::id()),
            stocache::Geometry::Slots(
                SlotsGeometry::plan(u64::MAX >> 2, slots, &[bytes], 0, 1, false)
                    .expect("a geometry"),
            ),
        )
    };
    Cache::open(&request).expect("a cache").0
}

fn filled(what: &str, slots: u64, bytes: u64) -> std::sync::Arc<Cache> {
    let cache = cache(what, slots, bytes);
    let value = vec![7u8; bytes as usize];
    for i in 0..slots {
        cache.store(i as i64, &value, false).expect("a store");
    }
    cache
}

/// Indices in an order that no prefetcher foresees.
fn shuffled(slots: u64, n: u64) -> Vec<i64> {
    (0..n)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) as i64 & i64::MAX)
        .map(|i| i % slots as i64)
        .collect()
}

fn hits(c: &mut Criterion) {
    let cache = filled("hit", 4096, SMALL);
    let indices = shuffled(4096, 4096);
    let mut k = 0;
    c.bench_function("load, one hit", |b| {
        b.iter(|| {
            k = (k + 1) % indices.len();
            black_box(cache.load(indices[k]))
        });
    });
}

fn batches(c: &mut Criterion) {
    let mut group = c.benchmark_group("load_many of 256");
    for (what, bytes, slots) in [("3 KB", SMALL, 1000), ("150 KB", LARGE, 1000)] {
        let cache = filled("batch", slots, bytes);
        let indices = shuffled(slots, 256);
        let mut out = vec![0u8; 256 * bytes as usize];
        let mut found = vec![false; 256];
        group.throughput(Throughput::Bytes(256 * bytes));
        group.bench_function(what, |b| {
            b.iter(|| {
                // SAFETY: `out` has one row per index.
                unsafe { cache.load_many(&indices, out.as_mut_ptr(), &mut found, 1) }
                    .expect("a batch");
            });
        });
    }
    group.finish();
}

fn fills(c: &mut Criterion) {
    let value = vec![7u8; LARGE as usize];
    let mut group = c.benchmark_group("store");
    group.throughput(Throughput::Bytes(LARGE));
    group.bench_function("150 KB into a fresh slot", |b| {
        let mut cache_and_next = (cache("fill", 1000, LARGE), 0);
        b.iter_batched(
            || {
                if cache_and_next.1 == 1000 {
                    cache_and_next = (cache("fill", 1000, LARGE), 0);
                }
                cache_and_next.1 += 1;
                (cache_and_next.0.clone(), cache_and_next.1 - 1)
            },
            |(cache, i)| cache.store(i, &value, false).expect("a store"),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, hits, batches, fills);
criterion_main!(benches);
