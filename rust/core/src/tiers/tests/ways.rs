//! The way of samples through memory and the levels below it.

use super::super::acquire::Outlook;
use super::super::levels::Levels;
use super::super::tier::{Sealed, Sink, Tier, TierStats};
use super::super::{Acquiring, Filled};
use super::pretence::{Pretence, Wrongs};
use super::{FINGERPRINT, SCHEMA, cached, memory, memory_of, parts, value};
use crate::error::Result;
use crate::records::portable::{self, Head};
use crate::records::{INLINE, Put, RecordStore};
use std::io::IoSlice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

const PATIENCE: Duration = Duration::from_secs(1_000_000);

fn acquire(levels: &Arc<Levels>, indices: &[usize]) -> Acquiring {
    levels.acquire(indices, PATIENCE)
}

/// Loads what is to be loaded, as a caller does; how many that were, and what each sample is then.
pub(super) fn load_all(levels: &Arc<Levels>, indices: &[usize]) -> (usize, Vec<Vec<u8>>) {
    let number = levels.memory().intern(SCHEMA).unwrap();
    let mut acquiring = acquire(levels, indices);
    let mut loaded = std::collections::BTreeMap::new();
    loop {
        let todo = acquiring.next_to_load();
        if todo.is_empty() {
            break;
        }
        for &i in &todo {
            loaded.insert(i, value(i));
            acquiring.fill(i, number, &parts(&loaded[&i])).unwrap();
        }
    }
    let samples = indices.iter().map(|&i| {
        let given = acquiring.given(i).map(|fetched| fetched.bytes().to_vec());
        loaded.get(&i).cloned().or(given).or_else(|| cached(levels.memory(), i)).unwrap()
    });
    (loaded.len(), samples.collect())
}

pub(super) fn right(indices: &[usize]) -> Vec<Vec<u8>> {
    indices.iter().map(|&i| value(i)).collect()
}

fn with(tier: &Arc<Pretence>, limit: u64, samples: u64) -> Arc<Levels> {
    Levels::new(memory(limit, samples), vec![Box::new(Arc::clone(tier))])
}

/// A level below that has all samples.
fn full_tier(samples: usize) -> Arc<Pretence> {
    spoilt_tier(samples, Wrongs::default(), 1)
}

fn spoilt_tier(samples: usize, wrongs: Wrongs, seed: u64) -> Arc<Pretence> {
    let tier = Arc::new(Pretence::new(wrongs, seed));
    let schema = portable::schema_hash(SCHEMA);
    tier.put_schema(schema, SCHEMA, soon()).unwrap();
    for i in 0..samples {
        tier.plant(i as u64, sealed(i, &value(i), Some(schema), FINGERPRINT));
    }
    tier
}

fn sealed(i: usize, bytes: &[u8], schema: Option<u128>, fingerprint: u128) -> Vec<u8> {
    let head = Head { key: i as u64, fingerprint, schema, len: bytes.len() as u64 };
    let mut record = portable::seal(&head, &[IoSlice::new(bytes)]).to_vec();
    record.extend_from_slice(bytes);
    record
}

#[test]
fn without_a_level_below_the_caller_loads_once() {
    let levels = Levels::new(memory(1 << 20, 50), vec![]);
    let wanted = [3, 7, 3, 49, 0];
    assert_eq!(load_all(&levels, &wanted), (4, right(&wanted)));
    assert_eq!(load_all(&levels, &wanted), (0, right(&wanted)));
}

#[test]
fn what_a_level_has_is_not_loaded_and_stays_in_memory() {
    let tier = full_tier(50);
    let levels = with(&tier, 1 << 20, 50);
    let wanted = [3, 7, 3, 49, 0];
    assert_eq!(load_all(&levels, &wanted), (0, right(&wanted)));
    assert_eq!(cached(levels.memory(), 7), Some(value(7)));
    assert_eq!(load_all(&levels, &wanted), (0, right(&wanted)));
    assert_eq!(*tier.asked.lock().unwrap(), [3, 7, 49, 0], "asked once, and not for what is there");
    assert_eq!(levels.stats()[0].fetched, 4);
}

#[test]
fn what_memory_has_no_room_for_goes_below_and_comes_back() {
    let tier = Arc::new(Pretence::new(Wrongs::default(), 1));
    let levels = with(&tier, 280 << 10, 200);
    let all: Vec<usize> = (0..200).collect();
    assert_eq!(load_all(&levels, &all), (200, right(&all)));
    let (stats, below) = (levels.memory().stats(), levels.stats()[0]);
    assert!(stats.filled > 5 && stats.filled < 150, "{stats:?}");
    assert_eq!(below.passed_down + stats.filled, 200, "each is in one place");
    assert_eq!(load_all(&levels, &all), (0, right(&all)));
}

#[test]
fn the_next_level_is_asked_for_what_the_first_lacks() {
    let (near, far) = (Arc::new(Pretence::new(Wrongs::default(), 1)), full_tier(20));
    let schema = portable::schema_hash(SCHEMA);
    near.put_schema(schema, SCHEMA, soon()).unwrap();
    near.plant(4, sealed(4, &value(4), Some(schema), FINGERPRINT));
    let below: Vec<Box<dyn Tier>> = vec![Box::new(Arc::clone(&near)), Box::new(Arc::clone(&far))];
    let levels = Levels::new(memory(1 << 20, 20), below);
    assert_eq!(load_all(&levels, &[4, 5]), (0, right(&[4, 5])));
    assert_eq!(
        (near.asked.lock().unwrap().clone(), far.asked.lock().unwrap().clone()),
        (vec![4, 5], vec![5])
    );
}

/// A level that others empty, with memory, while it is asked.
struct Emptied(Arc<Pretence>, Arc<RecordStore>);

impl Tier for Emptied {
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        self.1.clear()?;
        self.0.get_many(keys, sink, deadline)
    }

    fn put_many(&self, records: &[Sealed<'_>], taken: &mut [bool], by: Instant) -> Result<()> {
        self.0.put_many(records, taken, by)
    }

    fn schema(&self, hash: u128, deadline: Instant) -> Result<Option<Vec<u8>>> {
        self.0.schema(hash, deadline)
    }

    fn put_schema(&self, hash: u128, schema: &[u8], deadline: Instant) -> Result<()> {
        self.0.put_schema(hash, schema, deadline)
    }

    fn stats(&self) -> TierStats {
        self.0.stats()
    }
}

#[test]
fn what_is_being_read_while_others_empty_all_does_not_come_up() {
    for (limit, recycles) in [(1 << 20, false), (4 << 20, true)] {
        let memory = memory_of(limit, 50, recycles);
        let below = Emptied(full_tier(50), Arc::clone(&memory));
        let levels = Levels::new(Arc::clone(&memory), vec![Box::new(below)]);
        let came = levels.begin_fetch(vec![3, 4]).wait();
        assert!(came.iter().all(Option::is_some));
        let mut acquiring = acquire(&levels, &[5, 6]);
        assert!(acquiring.next_to_load().is_empty());
        assert!((3..7).all(|i| memory.find(i).is_none()), "of before");
        assert_eq!(acquiring.given(5).unwrap().bytes(), value(5));
    }
}

#[test]
fn what_is_being_loaded_while_others_empty_all_is_not_stored() {
    let number = |levels: &Levels| levels.memory().intern(SCHEMA).unwrap();
    for (limit, recycles, has_more) in [
        (1 << 20, false, false),
        (1 << 20, false, true),
        (200 << 10, false, true),
        (4 << 20, true, false),
        (4 << 20, true, true),
    ] {
        let tier = Arc::new(Pretence::new(Wrongs::default(), 1));
        let below: Option<Box<dyn Tier>> = has_more.then(|| Box::new(Arc::clone(&tier)) as _);
        let memory = memory_of(limit, 50, recycles);
        let levels = Levels::new(memory, below.into_iter().collect());
        let mut acquiring = acquire(&levels, &[3, 7]);
        assert_eq!(acquiring.next_to_load(), [3, 7]);
        levels.clear().unwrap();
        for i in [3, 7] {
            let filled = acquiring.fill(i, number(&levels), &parts(b"of before")).unwrap();
            assert_eq!(filled, Filled { memory: Put::StoredElsewhere, below: false });
        }
        drop(acquiring);
        // And what is loaded from now on is.
        assert_eq!(load_all(&levels, &[3, 7]), (2, right(&[3, 7])));
        assert_eq!(load_all(&levels, &[3, 7]), (0, right(&[3, 7])));
    }
}

/// Who wants one sample wants it soon, and not what lies around it.
#[test]
fn a_tier_is_told_of_many_samples_and_not_of_one() {
    let tier = full_tier(50);
    let levels = with(&tier, 1 << 20, 50);
    levels.begin_fetch(vec![3]).wait();
    assert!(tier.expected.lock().unwrap().is_empty());
    levels.begin_fetch(vec![4, 5, 6]).wait();
    let mut expected = tier.expected.lock().unwrap().clone();
    expected.sort_unstable();
    assert_eq!(expected, [4, 5, 6]);
}

/// Whatever a tier does, a sample is itself: found, or loaded.
fn whatever_it_does(seed: u64, rounds: u64) -> u64 {
    let mut damaged = 0;
    for round in 0..rounds {
        let seed = seed + round;
        let wrongs = Wrongs {
            misses: seed * 7 % 40,
            errors: seed * 3 % 10,
            garbage: 20 + seed % 70,
            ..Wrongs::default()
        };
        let tier = spoilt_tier(60, wrongs, seed);
        let levels = with(&tier, if round % 2 == 0 { 1 << 20 } else { 220 << 10 }, 60);
        for first in [0, 20, 40, 10] {
            let wanted: Vec<usize> = (first..first + 20).collect();
            assert_eq!(load_all(&levels, &wanted).1, right(&wanted), "seed {seed}");
        }
        damaged += levels.stats()[0].damaged;
    }
    damaged
}

#[test]
fn garbage_from_below_is_a_miss() {
    assert!(whatever_it_does(1, 300) > 1000, "there was garbage");
}

#[test]
fn a_level_that_answers_nothing_costs_its_time_and_no_more() {
    let tier = spoilt_tier(20, Wrongs { late: true, ..Wrongs::default() }, 1);
    let levels = with(&tier, 1 << 20, 20);
    assert_eq!(load_all(&levels, &[1, 2]), (2, right(&[1, 2])));
    assert!(tier.returned_late.load(Ordering::Relaxed), "it was given a deadline, and met it");
}

#[test]
fn an_error_of_a_level_is_a_miss_that_is_counted_and_told_once() {
    let tier = spoilt_tier(20, Wrongs { errors: 100, ..Wrongs::default() }, 1);
    let levels = with(&tier, 1 << 20, 20);
    assert_eq!(load_all(&levels, &[1, 2]), (2, right(&[1, 2])));
    assert_eq!(load_all(&levels, &[3]), (1, right(&[3])));
    assert_eq!(levels.stats()[0].errors, 2);
    assert!(levels.news().unwrap().contains("broken"));
    assert_eq!(levels.news(), None);
}

#[test]
fn a_schema_that_memory_does_not_know_is_asked_for() {
    let tier = full_tier(20);
    let levels = with(&tier, 1 << 20, 20);
    assert!(acquire(&levels, &[1, 2]).next_to_load().is_empty());
    assert_eq!(levels.memory().schema_of_hash(portable::schema_hash(SCHEMA)), Some(0));
    tier.forget_schemas();
    let unknown = with(&tier, 1 << 20, 20);
    assert_eq!(acquire(&unknown, &[1, 2]).next_to_load(), [1, 2], "nobody knows what they are");
    assert_eq!(unknown.stats()[0].damaged, 2);
}

/// Bytes that ask for pickle run code when they are read: they neither go down nor come up.
#[test]
fn pickles_do_not_travel() {
    const PICKLE: &[u8] = b"\x01p";
    let tier = Arc::new(Pretence::new(Wrongs::default(), 1));
    let schema = portable::schema_hash(PICKLE);
    tier.put_schema(schema, PICKLE, soon()).unwrap();
    tier.plant(1, sealed(1, b"bomb", Some(schema), FINGERPRINT));
    let inline = [&2u32.to_le_bytes()[..], PICKLE, &[0; 10]].concat();
    tier.plant(2, sealed(2, &inline, None, FINGERPRINT));
    let levels = with(&tier, 200 << 10, 20);
    let number = levels.memory().intern(PICKLE).unwrap();
    let mut acquiring = acquire(&levels, &[1, 2, 3, 4]);
    assert_eq!(acquiring.next_to_load(), [1, 2, 3, 4]);
    assert_eq!(levels.stats()[0].damaged, 2);
    // Too large for memory.
    let large = vec![0; 1 << 20];
    let (large, inline) = ([IoSlice::new(&large)], [IoSlice::new(&inline), IoSlice::new(&large)]);
    let filled = |memory, below| Filled { memory, below };
    assert_eq!(acquiring.fill(1, number, &large).unwrap(), filled(Put::TooLarge, false));
    assert_eq!(acquiring.fill(2, INLINE, &inline).unwrap(), filled(Put::TooLarge, false));
    // The control: what asks for no pickle goes.
    let number = levels.memory().intern(SCHEMA).unwrap();
    assert_eq!(acquiring.fill(3, number, &large).unwrap(), filled(Put::TooLarge, true));
    let safe = [&2u32.to_le_bytes()[..], SCHEMA, &[0; 10]].concat();
    let safe = [IoSlice::new(&safe), large[0]];
    assert_eq!(acquiring.fill(4, INLINE, &safe).unwrap(), filled(Put::TooLarge, true));
    drop(acquiring);
    assert!(acquire(&levels, &[3, 4]).next_to_load().is_empty());
}

/// Whoever reads a record imports its classes by the names that are in it.
#[test]
fn classes_come_up_once_somebody_has_stored_such_a_sample() {
    const COLOUR: &[u8] = b"\x01E\x03app\x06Colour\0\0";
    const TWO: &[u8] = b"\x01(\x02E\x03app\x06Colour\0\0E\x03app\x06Colour\0\0";
    const PLANTED: &[u8] = b"\x01E\x03bad\x06Colour\0\0";
    let tier = Arc::new(Pretence::new(Wrongs::default(), 1));
    for (i, schema) in [COLOUR, TWO, PLANTED].into_iter().enumerate() {
        let hash = portable::schema_hash(schema);
        tier.put_schema(hash, schema, soon()).unwrap();
        tier.plant(i as u64, sealed(i, b"red", Some(hash), FINGERPRINT));
        let inline = [&(schema.len() as u32).to_le_bytes()[..], schema, b"red"].concat();
        tier.plant(10 + i as u64, sealed(10 + i, &inline, None, FINGERPRINT));
    }
    let levels = with(&tier, 1 << 20, 20);
    let wanted = [0, 1, 2, 10, 11, 12];
    assert_eq!(acquire(&levels, &wanted).next_to_load(), wanted, "nobody knows the class");
    levels.memory().intern(COLOUR).unwrap();
    assert_eq!(acquire(&levels, &wanted).next_to_load(), [2, 12]);
    assert_eq!(levels.memory().schema_of_hash(portable::schema_hash(PLANTED)), None);
    assert_eq!(levels.stats()[0].damaged, 0, "they may be good one day");
}

#[test]
fn what_was_not_filled_is_given_back() {
    let levels = Levels::new(memory(1 << 20, 20), vec![]);
    let mut first = acquire(&levels, &[1, 2, 3]);
    assert_eq!(first.next_to_load(), [1, 2, 3]);
    let number = levels.memory().intern(SCHEMA).unwrap();
    first.fill(2, number, &parts(b"two")).unwrap();
    // Who comes back without a sample does not want to store it.
    assert!(first.next_to_load().is_empty());
    assert_eq!(first.fill(1, number, &parts(b"late")).unwrap().memory, Put::StoredElsewhere);
    // Nobody is waited for, for who keeps a claim would be.
    let mut second = levels.acquire(&[1, 2, 3], Duration::ZERO);
    assert_eq!(second.next_to_load(), [1, 3]);
    assert_eq!(second.fill(1, number, &parts(b"one")).unwrap().memory, Put::Stored);
    drop(second);
    let mut third = levels.acquire(&[1, 2, 3], Duration::ZERO);
    assert_eq!(third.next_to_load(), [3]);
    assert_eq!(third.fill(3, number, &parts(b"three")).unwrap().memory, Put::Stored);
}

#[test]
fn each_sample_is_loaded_by_one_of_many_threads() {
    let levels = with(&full_tier(30), 4 << 20, 200);
    let loads = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (levels, loads) = (&levels, &loads);
            scope.spawn(move || {
                for round in 0..40 {
                    let first = (thread + round * 5) % 180;
                    let wanted: Vec<usize> = (first..first + 20).collect();
                    let (loaded, samples) = load_all(levels, &wanted);
                    assert_eq!(samples, right(&wanted));
                    loads.fetch_add(loaded, Ordering::Relaxed);
                }
            });
        }
    });
    let stats = levels.memory().stats();
    assert_eq!(stats.filled as usize, loads.into_inner() + 30, "30 came from below");
    assert_eq!(stats.fills, stats.filled);
}

/// A worker that dies with samples that it was to load leaves them to others.
#[test]
#[allow(unsafe_code)] // fork
fn what_the_dead_were_to_load_is_loaded_by_others() {
    let levels = Levels::new(memory(1 << 20, 20), vec![]);
    // SAFETY: the child ends at once, without unwinding into the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let mut acquiring = acquire(&levels, &[1, 2]);
        let claimed = acquiring.next_to_load() == [1, 2];
        std::mem::forget(acquiring);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!claimed)) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(load_all(&levels, &[1, 2]), (2, right(&[1, 2])));
    assert_eq!(cached(levels.memory(), 1), Some(value(1)), "and stored");
}

/// A forked child gives nothing back of its parent's, and claims for itself.
#[test]
#[allow(unsafe_code)] // fork
fn a_child_leaves_its_parents_claims_alone() {
    let levels = Levels::new(memory(1 << 20, 20), vec![]);
    let number = levels.memory().intern(SCHEMA).unwrap();
    let mut inherited = acquire(&levels, &[1, 2]);
    assert_eq!(inherited.next_to_load(), [1, 2]);
    // SAFETY: the child ends at once, without unwinding into the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let told = inherited.outlook(1).is_none();
        let stored = inherited.fill(1, number, &parts(b"mine")).unwrap().memory;
        let mut good = told && stored == Put::StoredElsewhere;
        drop(inherited);
        // What the parent has claimed is still its own.
        let mut own = levels.acquire(&[1, 2, 3], Duration::ZERO);
        good = good && own.next_to_load() == [3] && own.next_to_load() == [1, 2];
        good = good && own.outlook(1) == Some(Outlook::StoredElsewhere);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = 0;
    // SAFETY: a child of ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(inherited.fill(1, number, &parts(b"mine")).unwrap().memory, Put::Stored);
}

/// Takes all, and looks meanwhile who could store sample 3.
struct Looks {
    above: Arc<Levels>,
    seen: Arc<Mutex<Vec<Option<Outlook>>>>,
}

impl Tier for Looks {
    fn get_many(&self, _: &[u64], _: &mut dyn Sink, _: Instant) -> Result<()> {
        Ok(())
    }

    fn put_many(&self, _: &[Sealed<'_>], taken: &mut [bool], _: Instant) -> Result<()> {
        let mut other = self.above.acquire(&[3], Duration::ZERO);
        other.next_to_load();
        self.seen.lock().unwrap().push(other.outlook(3));
        taken.fill(true);
        Ok(())
    }

    fn schema(&self, _: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put_schema(&self, _: u128, _: &[u8], _: Instant) -> Result<()> {
        Ok(())
    }

    fn stats(&self) -> TierStats {
        TierStats::default()
    }
}

/// Says so when it is flushed, which takes longer than there is time, or none.
struct Flushed(bool, Arc<AtomicUsize>);

impl Tier for Flushed {
    fn get_many(&self, _: &[u64], _: &mut dyn Sink, _: Instant) -> Result<()> {
        Ok(())
    }

    fn put_many(&self, _: &[Sealed<'_>], _: &mut [bool], _: Instant) -> Result<()> {
        Ok(())
    }

    fn schema(&self, _: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put_schema(&self, _: u128, _: &[u8], _: Instant) -> Result<()> {
        Ok(())
    }

    fn stats(&self) -> TierStats {
        TierStats::default()
    }

    fn flush(&self, _: Duration) -> bool {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0
    }
}

#[test]
fn all_levels_are_flushed_also_if_the_first_of_them_is_not_done() {
    for done in [[true, true], [false, true], [true, false]] {
        let asked = Arc::new(AtomicUsize::new(0));
        let below = done.map(|done| Box::new(Flushed(done, Arc::clone(&asked))) as Box<dyn Tier>);
        let levels = Levels::new(memory(1 << 20, 20), below.into());
        assert_eq!(levels.flush(Duration::from_secs(1)), done == [true, true]);
        assert_eq!(asked.load(Ordering::Relaxed), 2);
    }
}

#[test]
fn a_claim_lasts_until_a_level_below_has_the_sample() {
    let memory = memory(200 << 10, 20);
    let above = Levels::new(Arc::clone(&memory), vec![]);
    let seen = Arc::new(Mutex::default());
    let looks = Looks { above, seen: Arc::clone(&seen) };
    let levels = Levels::new(memory, vec![Box::new(looks)]);
    let number = levels.memory().intern(SCHEMA).unwrap();
    let mut acquiring = acquire(&levels, &[3]);
    assert_eq!(acquiring.next_to_load(), [3]);
    let large = vec![0; 1 << 20];
    let filled = acquiring.fill(3, number, &[IoSlice::new(&large)]).unwrap();
    assert_eq!(filled, Filled { memory: Put::TooLarge, below: true });
    assert_eq!(*seen.lock().unwrap(), [Some(Outlook::StoredElsewhere)]);
    // And then it ends.
    let mut other = levels.acquire(&[3], Duration::ZERO);
    assert_eq!((other.next_to_load(), other.outlook(3)), (vec![3], Some(Outlook::Stored)));
}

#[test]
fn memory_is_emptied_in_time_though_the_level_below_takes_none_of_it() {
    let tier = Arc::new(Pretence::new(Wrongs { stuck: true, ..Wrongs::default() }, 1));
    let levels = Levels::new(memory_of(700 << 10, 400, true), vec![Box::new(Arc::clone(&tier))]);
    let evicted = || levels.memory().stats().evicted;
    for i in (0..400).take_while(|_| evicted() < 15) {
        load_all(&levels, &[i]);
    }
    let (waits, evicted) = (tier.waits.load(Ordering::Relaxed), evicted());
    assert!(evicted >= 15, "{evicted}");
    assert!((1..=evicted / 4).contains(&waits), "once for each region, not {waits} of {evicted}");
}
