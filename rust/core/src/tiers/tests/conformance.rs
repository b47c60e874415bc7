//! What every tier must do, asked of each of them. A new tier is a line in `each_tier`.

use super::super::cluster::Cluster;
use super::super::memory::Memory;
use super::super::tier::{Lent, Sealed, Sink, Tier};
use super::pretence::{Pretence, Wrongs};
use super::{FINGERPRINT, SCHEMA, Temporary, disk, disk_packed, memory, parts, value};
use crate::cluster::tests::{Server, store};
use crate::disk::Compression;
use crate::records::portable::{self, HEAD, Head};
use crate::sys::pages::Pages;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SAMPLES: usize = 200;

fn each_tier(test: impl Fn(&dyn Tier)) {
    test(&Memory(memory(4 << 20, SAMPLES as u64)));
    test(&Pretence::new(Wrongs::default(), 1));
    let folder = Temporary::new();
    test(&disk(&folder, SAMPLES as u64));
    for compression in [Compression::Zstd, Compression::Lz4] {
        let folder = Temporary::new();
        test(&disk_packed(&folder, SAMPLES as u64, compression));
    }
    if let Some(server) = Server::start("") {
        let url = format!("redis://127.0.0.1:{}", server.port);
        let store = Arc::new(store(&url, b"secret", FINGERPRINT));
        test(&Cluster::new(store, memory(4 << 20, SAMPLES as u64)));
    }
}

/// Keeps what it gets; lends no more than `longest`.
struct Keeps {
    got: BTreeMap<usize, Vec<u8>>,
    longest: usize,
}

impl Keeps {
    fn new() -> Self {
        Self { got: BTreeMap::new(), longest: usize::MAX }
    }
}

impl Sink for Keeps {
    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Lent> {
        assert!(room >= len);
        let mut memory = Pages::new(room)?;
        memory.fill(0xaa);
        (len <= self.longest).then(|| Lent::new(which, memory, len))
    }

    fn done(&mut self, lent: Lent) -> bool {
        assert!(self.got.insert(lent.which(), lent.to_vec()).is_none(), "given twice");
        true
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn put(tier: &dyn Tier, indices: &[usize]) -> Vec<bool> {
    let hash = portable::schema_hash(SCHEMA);
    tier.put_schema(hash, SCHEMA, soon()).unwrap();
    let values: Vec<Vec<u8>> = indices.iter().map(|&i| value(i)).collect();
    let pieces: Vec<_> = values.iter().map(|value| parts(value)).collect();
    let sealed: Vec<Sealed<'_>> = indices
        .iter()
        .zip(&values)
        .zip(&pieces)
        .map(|((&i, value), parts)| {
            let (key, len) = (i as u64, value.len() as u64);
            let head = Head { key, fingerprint: FINGERPRINT, schema: Some(hash), len };
            let since = tier.emptied();
            Sealed { key, head: portable::seal(&head, parts), parts, since }
        })
        .collect();
    let mut taken = vec![false; indices.len()];
    tier.put_many(&sealed, &mut taken, soon()).unwrap();
    taken
}

fn get(tier: &dyn Tier, indices: &[usize]) -> BTreeMap<usize, Vec<u8>> {
    let keys: Vec<u64> = indices.iter().map(|&i| i as u64).collect();
    let mut sink = Keeps::new();
    tier.get_many(&keys, &mut sink, soon()).unwrap();
    let opened = |(which, record): (usize, Vec<u8>)| {
        let (head, bytes) = portable::open(&record, keys[which], FINGERPRINT).unwrap();
        assert_eq!(head.schema, Some(portable::schema_hash(SCHEMA)));
        (which, bytes.to_vec())
    };
    sink.got.into_iter().map(opened).collect()
}

#[test]
fn a_record_that_was_put_is_given_whole() {
    each_tier(|tier| {
        let all: Vec<usize> = (0..SAMPLES).collect();
        assert_eq!(put(tier, &all), vec![true; SAMPLES]);
        let wanted: Vec<usize> = all.iter().rev().copied().step_by(3).collect();
        let found = get(tier, &wanted);
        assert_eq!(found.len(), wanted.len());
        assert!(found.iter().all(|(&which, bytes)| *bytes == value(wanted[which])));
    });
}

#[test]
fn what_is_not_there_is_left_out_and_is_no_error() {
    each_tier(|tier| {
        put(tier, &[3, 5]);
        let found = get(tier, &[4, 5, 6, 3, SAMPLES + 10]);
        assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1, 3]);
        assert_eq!(get(tier, &[]), BTreeMap::new());
        let mut sink = Keeps::new();
        tier.get_many(&[u64::MAX, 3], &mut sink, soon()).unwrap();
        assert_eq!(sink.got.len(), 1);
    });
}

#[test]
fn a_key_may_come_twice_and_a_record_be_put_twice() {
    each_tier(|tier| {
        put(tier, &[7]);
        put(tier, &[7]);
        let found = get(tier, &[7, 7]);
        assert_eq!(found.len(), 2);
        assert!(found.values().all(|bytes| *bytes == value(7)));
        assert_eq!(tier.stats().records, 1);
    });
}

#[test]
fn a_sink_may_refuse_to_lend() {
    each_tier(|tier| {
        put(tier, &[1, 100]);
        let mut sink = Keeps { longest: HEAD + value(1).len(), ..Keeps::new() };
        tier.get_many(&[100, 1], &mut sink, soon()).unwrap();
        assert_eq!(sink.got.keys().copied().collect::<Vec<_>>(), [1]);
    });
}

/// Takes the first record only when the time is over.
struct Slow {
    keeps: Keeps,
    until: Instant,
}

impl Sink for Slow {
    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Lent> {
        std::thread::sleep(self.until.saturating_duration_since(Instant::now()));
        self.keeps.lend(which, len, room)
    }

    fn done(&mut self, lent: Lent) -> bool {
        self.keeps.done(lent)
    }
}

fn lets_go(tier: &dyn Tier) -> bool {
    let all: Vec<usize> = (0..SAMPLES).collect();
    put(tier, &all);
    get(tier, &all[..1]); // connected
    let keys: Vec<u64> = all.iter().map(|&i| i as u64).collect();
    let until = Instant::now() + Duration::from_millis(50);
    let mut sink = Slow { keeps: Keeps::new(), until };
    tier.get_many(&keys, &mut sink, until).unwrap();
    sink.keeps.got.len() < SAMPLES
}

#[test]
fn who_has_no_time_left_is_let_go_in_the_middle_of_many_records() {
    each_tier(|tier| assert!(lets_go(tier)));
}

#[test]
fn a_control_a_tier_that_overruns_its_time_is_noticed() {
    let wrongs = Wrongs { overruns: true, ..Wrongs::default() };
    assert!(!lets_go(&Pretence::new(wrongs, 1)));
}

#[test]
fn a_deadline_that_is_over_is_no_error() {
    each_tier(|tier| {
        put(tier, &[1]);
        let mut sink = Keeps::new();
        tier.get_many(&[1], &mut sink, Instant::now() - Duration::from_secs(1)).unwrap();
        assert_eq!(get(tier, &[1]).len(), 1, "it is there all the same");
    });
}

#[test]
fn schemas_are_known_by_their_hash() {
    each_tier(|tier| {
        let hash = portable::schema_hash(SCHEMA);
        assert_eq!(tier.schema(hash, soon()).unwrap(), None);
        tier.put_schema(hash, SCHEMA, soon()).unwrap();
        tier.put_schema(hash, SCHEMA, soon()).unwrap();
        assert_eq!(tier.schema(hash, soon()).unwrap().as_deref(), Some(SCHEMA));
        assert_eq!(tier.schema(hash ^ 1, soon()).unwrap(), None);
    });
}

#[test]
fn what_it_did_is_counted() {
    each_tier(|tier| {
        put(tier, &[1, 2, 3]);
        get(tier, &[1, 2, 90]);
        let stats = tier.stats();
        assert_eq!((stats.hits, stats.misses, stats.fills, stats.records), (2, 1, 3, 3));
        let bytes: usize = [1, 2, 3].map(|i| value(i).len()).iter().sum();
        assert!(stats.bytes >= bytes as u64);
    });
}

#[test]
fn threads_may_use_it_at_the_same_time() {
    each_tier(|tier| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    for round in 0..50 {
                        let i = (thread * 13 + round * 7) % SAMPLES;
                        put(tier, &[i, (i + 1) % SAMPLES]);
                        for (which, bytes) in get(tier, &[i, (i + 50) % SAMPLES]) {
                            assert_eq!(bytes, value([i, (i + 50) % SAMPLES][which]));
                        }
                    }
                });
            }
        });
    });
}
