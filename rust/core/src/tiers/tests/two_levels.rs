//! Memory over a disk: where samples are, and that they come back, in this run and the next.

use super::super::levels::Levels;
use super::ways::{load_all, right};
use super::{SCHEMA, Temporary, cached, disk_of, disk_packed, memory_of, parts, store_of, value};
use crate::disk::Compression;
use std::sync::Arc;
use std::time::Duration;

const SAMPLES: u64 = 400;

fn levels(folder: &Temporary, memory: u64, disk: u64, recycles: bool) -> Arc<Levels> {
    let below = disk_of(folder, disk, SAMPLES, recycles);
    Levels::new(memory_of(memory, SAMPLES, recycles), vec![Box::new(below)])
}

/// In an order of which their sizes know nothing.
fn all() -> Vec<usize> {
    (0..SAMPLES as usize).map(|i| i * 7919 % SAMPLES as usize).collect()
}

/// Loads all in batches, and checks them: how many were loaded.
fn epoch(levels: &Arc<Levels>) -> usize {
    let batch = |some: &[usize]| {
        let (loaded, samples) = load_all(levels, some);
        assert_eq!(samples, right(some));
        loaded
    };
    all().chunks(8).map(batch).sum()
}

/// How many samples are in memory, on disk, and in neither.
fn places(levels: &Levels) -> (usize, usize, usize) {
    let is_in_memory = |i: &usize| levels.memory().find(*i).is_some();
    let in_memory = all().into_iter().filter(is_in_memory).count();
    let on_disk = all().into_iter().filter(|&i| levels.is_below(i)).count();
    let nowhere = |i: &usize| !is_in_memory(i) && !levels.is_below(*i);
    (in_memory, on_disk, all().into_iter().filter(nowhere).count())
}

fn flush(levels: &Levels) {
    assert!(levels.flush(Duration::from_secs(60)));
}

#[test]
fn what_memory_and_disk_hold_together_is_loaded_once() {
    // All samples take about 1 MB.
    let folder = Temporary::new();
    let levels = levels(&folder, 700 << 10, 640 << 10, false);
    assert_eq!(epoch(&levels), 400);
    flush(&levels);
    let (in_memory, on_disk, nowhere) = places(&levels);
    assert_eq!(nowhere, 0);
    assert!(in_memory + on_disk <= 400 + 16, "each is in one place, but for the first");
    assert!(in_memory > 100 && on_disk > 100, "{in_memory} {on_disk}");
    assert_eq!(epoch(&levels), 0);
    assert_eq!(places(&levels), (in_memory, on_disk, 0), "and stays there");
    assert_eq!(levels.stats()[0].tier.fills as usize, on_disk, "each is written once");
}

#[test]
fn where_the_disk_holds_all_the_next_run_finds_all_and_memory_fills_from_it() {
    let folder = Temporary::new();
    let first = levels(&folder, 700 << 10, 8 << 20, false);
    assert_eq!(epoch(&first), 400);
    flush(&first);
    assert_eq!(places(&first).1, 400, "also those in memory");
    drop(first);
    let second = levels(&folder, 700 << 10, 8 << 20, false);
    assert_eq!(places(&second), (0, 400, 0));
    assert_eq!(epoch(&second), 0);
    let (in_memory, on_disk, _) = places(&second);
    assert!(in_memory > 100 && on_disk == 400, "{in_memory}");
    assert_eq!(second.stats()[0].tier.fills, 0, "none is written again");
}

#[test]
fn where_both_are_needed_the_next_run_keeps_memory_for_what_is_nowhere() {
    let folder = Temporary::new();
    let first = levels(&folder, 700 << 10, 640 << 10, false);
    epoch(&first);
    flush(&first);
    let on_disk = places(&first).1;
    drop(first);
    let second = levels(&folder, 700 << 10, 640 << 10, false);
    assert_eq!(places(&second), (0, on_disk, 400 - on_disk));
    assert_eq!(epoch(&second), 400 - on_disk);
    assert_eq!(places(&second).2, 0);
    assert_eq!(epoch(&second), 0);
}

#[test]
fn what_leaves_memory_goes_to_disk_and_comes_back() {
    let folder = Temporary::new();
    let levels = levels(&folder, 700 << 10, 8 << 20, true);
    for _ in 0..3 {
        epoch(&levels);
    }
    flush(&levels);
    let (in_memory, _, nowhere) = places(&levels);
    assert_eq!(nowhere, 0, "nothing is lost");
    assert!(in_memory > 50 && in_memory < 350, "{in_memory}");
    assert_eq!(epoch(&levels), 0);
    let last = all()[399];
    assert_eq!(cached(levels.memory(), last), Some(value(last)), "asked for last");
}

#[test]
fn where_both_are_full_the_oldest_goes() {
    let folder = Temporary::new();
    let levels = levels(&folder, 500 << 10, 256 << 10, true);
    for _ in 0..3 {
        epoch(&levels);
        flush(&levels);
    }
    let (in_memory, on_disk, nowhere) = places(&levels);
    assert!(in_memory > 30 && on_disk > 30 && nowhere > 30, "{in_memory} {on_disk} {nowhere}");
    let stats = levels.stats()[0].tier;
    assert!(stats.evicted > 0 && stats.bytes <= stats.capacity, "{stats:?}");
}

#[test]
fn samples_below_are_no_longer_there_after_both_are_cleared() {
    let folder = Temporary::new();
    let levels = levels(&folder, 700 << 10, 8 << 20, false);
    epoch(&levels);
    levels.clear().unwrap();
    assert_eq!(places(&levels), (0, 0, 400));
    assert_eq!(epoch(&levels), 400);
    assert_eq!(epoch(&levels), 0);
}

/// Flips a bit in every fifth page of the files with records.
fn damage(folder: &Temporary) {
    for file in std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|end| end == "dat") {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes.iter_mut().skip(1000).step_by(5 * 4096).for_each(|byte| *byte ^= 4);
            std::fs::write(&file, bytes).unwrap();
        }
    }
}

#[test]
fn a_damaged_record_is_loaded_once_and_written_again() {
    let folder = Temporary::new();
    let open = || levels(&folder, 300 << 10, 8 << 20, false);
    let first = open();
    assert_eq!(epoch(&first), 400);
    flush(&first);
    assert!(first.is_complete());
    drop(first);
    damage(&folder);
    let second = open();
    let mut acquiring = second.acquire(&all(), Duration::from_secs(60));
    let damaged = acquiring.next_to_load();
    assert!(damaged.len() > 20 && damaged.len() < 200, "{}", damaged.len());
    drop(acquiring);
    assert!(!second.is_complete() && damaged.iter().all(|&i| !second.is_below(i)));
    assert_eq!(second.stats()[0].tier.records as usize, 400 - damaged.len());
    assert_eq!(epoch(&second), damaged.len());
    flush(&second);
    assert_eq!((places(&second).1, second.stats()[0].tier.records), (400, 400));
    assert_eq!(epoch(&second), 0);
    drop(second);
    let third = open();
    assert_eq!(third.stats()[0].tier.records, 400, "each is counted once");
    assert_eq!(epoch(&third), 0, "the one that was written last is the record");
}

/// Levels over a disk that has everything, and over memory that has room for nothing.
fn all_on_disk(folder: &Temporary) -> Arc<Levels> {
    let filled = levels(folder, 700 << 10, 8 << 20, false);
    epoch(&filled);
    flush(&filled); // nothing waits to be written when it is opened again
    drop(filled);
    levels(folder, 190 << 10, 8 << 20, false)
}

#[test]
fn what_is_read_ahead_is_there_when_it_is_asked_for_and_is_read_once() {
    let folder = Temporary::new();
    let levels = all_on_disk(&folder);
    let reads = || levels.stats()[0].tier.hits;
    levels.prefetch(&all());
    for index in all() {
        assert_eq!(load_all(&levels, &[index]), (0, right(&[index])));
    }
    assert_eq!(reads(), SAMPLES, "once each");
    // Twice, in another order than was said, and some that nobody asked for.
    levels.prefetch(&all());
    for index in all().into_iter().rev().step_by(2) {
        assert_eq!(load_all(&levels, &[index]), (0, right(&[index])));
    }
    levels.prefetch(&[3, 5, SAMPLES as usize + 7, usize::MAX]);
    assert_eq!(load_all(&levels, &[3, 4, 5]), (0, right(&[3, 4, 5])));
    levels.end_prefetch();
    let weak = Arc::downgrade(&levels);
    drop(levels);
    assert!(weak.upgrade().is_none(), "nothing keeps them");
}

#[test]
fn what_was_read_ahead_is_not_given_after_it_was_cleared() {
    let folder = Temporary::new();
    let levels = all_on_disk(&folder);
    levels.prefetch(&all());
    assert_eq!(load_all(&levels, &[7]).0, 0);
    levels.clear().unwrap();
    assert_eq!(load_all(&levels, &[7, 8, 9]).0, 3);
    levels.end_prefetch();
}

/// Who empties all is done with the disk, and not yet with memory.
#[test]
fn what_is_being_loaded_while_others_empty_the_disk_is_not_written() {
    let folder = Temporary::new();
    let levels = levels(&folder, 190 << 10, 8 << 20, false);
    let number = levels.memory().intern(SCHEMA).unwrap();
    let mut acquiring = levels.acquire(&[3], Duration::from_secs(60));
    assert_eq!(acquiring.next_to_load(), [3]);
    store_of(&folder, 8 << 20, SAMPLES, false).clear().unwrap();
    acquiring.fill(3, number, &parts(&anew(3))).unwrap();
    drop(acquiring);
    flush(&levels);
    assert!(!levels.is_below(3), "of before");
    levels.memory().clear().unwrap();
    assert_eq!(load_all(&levels, &[3]), (1, right(&[3])));
    flush(&levels);
    assert!(levels.is_below(3));
}

/// Fills all samples with other bytes than they had.
fn fill_anew(levels: &Arc<Levels>) {
    let number = levels.memory().intern(SCHEMA).unwrap();
    let mut acquiring = levels.acquire(&all(), Duration::from_secs(60));
    for i in acquiring.next_to_load() {
        acquiring.fill(i, number, &parts(&anew(i))).unwrap();
    }
    flush(levels);
}

fn anew(i: usize) -> Vec<u8> {
    value(i).iter().map(|byte| !byte).chain([1]).collect()
}

#[test]
fn what_was_read_ahead_is_not_given_after_others_filled_all_anew() {
    let folder = Temporary::new();
    let levels = all_on_disk(&folder);
    let below = disk_of(&folder, 8 << 20, SAMPLES, false);
    let others = Levels::new(Arc::clone(levels.memory()), vec![Box::new(below)]);
    levels.prefetch(&all());
    let reads = || levels.stats()[0].tier.hits;
    for _ in 0..60_000 {
        if reads() > 100 {
            break; // there, and nobody asks for them yet
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(reads() > 100);
    others.clear().unwrap();
    fill_anew(&others);
    for i in all() {
        let (loaded, samples) = load_all(&levels, &[i]);
        assert_eq!((loaded, samples), (0, vec![anew(i)]), "sample {i}");
    }
    levels.end_prefetch();
}

#[test]
fn packed_records_come_back_and_take_less_room() {
    for (compression, smaller) in [(Compression::Zstd, true), (Compression::None, false)] {
        let folder = Temporary::new();
        let open = || {
            let below = disk_packed(&folder, SAMPLES, compression);
            Levels::new(memory_of(300 << 10, SAMPLES, false), vec![Box::new(below)])
        };
        let first = open();
        assert_eq!(epoch(&first), 400);
        flush(&first);
        let bytes = first.stats()[0].tier.bytes;
        assert_eq!(bytes < 700 << 10, smaller, "{compression:?}: {bytes}");
        drop(first);
        let second = open();
        assert_eq!(epoch(&second), 0);
        drop(second);
        // Damage in what is packed is a miss, too.
        damage(&folder);
        let third = open();
        assert!(epoch(&third) > 0);
        flush(&third);
        assert_eq!(epoch(&third), 0);
        assert!(smaller || third.stats()[0].damaged > 0);
        // Without compression, what is packed is read all the same.
        let plain = Levels::new(
            memory_of(300 << 10, SAMPLES, false),
            vec![Box::new(disk_packed(&folder, SAMPLES, Compression::None))],
        );
        assert_eq!(epoch(&plain), 0);
    }
}

/// Two policies are two tables, of which one writes.
#[test]
fn who_only_reads_has_nothing_to_complain_of() {
    let folder = Temporary::new();
    let _writer = levels(&folder, 700 << 10, 8 << 20, false);
    let reader = levels(&folder, 300 << 10, 8 << 20, true);
    assert_eq!(epoch(&reader), 400);
    assert_eq!((reader.news(), reader.stats()[0].errors), (None, 0));
}

#[test]
fn a_disk_that_cannot_be_read_is_told_of_once() {
    let folder = Temporary::new();
    let first = levels(&folder, 300 << 10, 8 << 20, false);
    epoch(&first);
    flush(&first);
    drop(first);
    let second = levels(&folder, 300 << 10, 8 << 20, false);
    for file in std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|end| end == "dat") {
            std::fs::remove_file(&file).unwrap();
            std::fs::create_dir(&file).unwrap();
        }
    }
    assert_eq!(epoch(&second), 400);
    let news = second.news().unwrap();
    assert!(news.starts_with("cannot read from the disk level in"), "{news}");
    assert_eq!(second.news(), None);
    assert!(second.stats()[0].tier.errors > 0);
}
