//! One process and its table.

#![allow(unsafe_code)] // forks

use super::*;
use crate::fault::meeting;
use crate::segment::Backing;
use crate::segment::claim::LEASES;
use crate::segment::table_layout::{ROW_WORDS, TableGeometry};
use std::io::{Read, Write, pipe};

fn content(size: u64, mtime: u64) -> Content {
    Content { version: Version { size, mtime }, hash: 0 }
}

fn open(geometry: TableGeometry, backing: Backing) -> Arc<FileTable> {
    let request = Request {
        backing,
        private: true,
        ..Request::new(crate::random_name().unwrap(), Geometry::Files(geometry))
    };
    FileTable::open(&request).unwrap().0
}

/// A table whose files 0 to `files` are numbered.
fn table(files: usize) -> Arc<FileTable> {
    let table = open(TableGeometry::plan(files as u64).unwrap(), Backing::Shm);
    for i in 0..files {
        assert_eq!(table.find_or_add(key(i)), Ok(i));
    }
    table
}

fn key(i: usize) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&i.to_le_bytes()).max(1)
}

/// Bytes that the table takes in /dev/shm, as the kernel counts them.
fn taken(table: &FileTable) -> u64 {
    let path = table.segment().path().unwrap();
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

/// Files are numbered as they are asked for. Who dies having locked the newest, just as another process
/// is about to be given its lease, leaves nothing that would count as that one's own.
#[test]
fn what_the_dead_locked_last_is_free_for_who_has_their_lease() {
    let table = table(1);
    let ((mut ask, mut asked), (mut tell, mut told)) = (pipe().unwrap(), pipe().unwrap());
    // SAFETY: the child ends at once, without unwinding into the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert_eq!(table.lease(), Some(0));
            told.write_all(&[1]).unwrap();
            ask.read_exact(&mut [0]).unwrap();
            let newest = table.find_or_add(key(1)).unwrap();
            std::mem::forget(table.lock(newest).unwrap());
        }));
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    tell.read_exact(&mut [0]).unwrap();
    let died = std::sync::Arc::new(std::sync::atomic::AtomicI32::new(-1));
    let at = std::sync::Arc::clone(&died);
    meeting::at(move |place| {
        if place == "lease: looking" && at.load(Ordering::Relaxed) == -1 {
            asked.write_all(&[1]).unwrap();
            let mut status = 0;
            // SAFETY: our child.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            at.store(status, Ordering::Relaxed);
        }
    });
    assert_eq!(table.lease(), Some(0));
    assert_eq!(died.load(Ordering::Relaxed), 0);
    let newest = table.find(key(1)).unwrap();
    assert!(table.lock(newest).is_some(), "a dead process's lock counts as our own");
}

#[test]
fn a_full_table_says_so() {
    let table = open(TableGeometry { entries: 10, expected: 5 }, Backing::Shm);
    let added = (1..100).filter(|&key| table.find_or_add(key).is_ok()).count();
    assert_eq!(added, 10);
    assert!((1..=10).all(|key| table.find(key).is_some()));
    assert_eq!((table.find(50), table.find_or_add(50)), (None, Err(NoRoom::Table)));
}

#[test]
fn many_more_files_than_expected_are_found_again() {
    const FILES: usize = 100_000;
    let table = open(TableGeometry { entries: 1 << 20, expected: 10 }, Backing::Shm);
    let numbers: Vec<_> = (0..FILES).map(|i| table.find_or_add(key(i)).unwrap()).collect();
    assert_eq!(numbers, (0..FILES).collect::<Vec<_>>());
    for i in 0..FILES {
        assert_eq!((table.find(key(i)), table.find_or_add(key(i))), (Some(i), Ok(i)));
    }
    assert!((FILES..2 * FILES).all(|i| table.find(key(i)).is_none()));
    assert_eq!(table.len(), FILES);
    assert!(taken(&table) < FILES as u64 * 100, "{} bytes a file", taken(&table) / FILES as u64);
}

/// What threads took and did not need is used by the next ones.
#[test]
fn a_file_has_one_number_whoever_asks() {
    const FILES: usize = 5000;
    const THREADS: usize = 4;
    let table = open(TableGeometry { entries: 1 << 20, expected: 100 }, Backing::Shm);
    let numbers: Vec<Vec<usize>> = std::thread::scope(|scope| {
        let work = || (0..FILES).map(|i| table.find_or_add(key(i)).unwrap()).collect();
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(numbers.iter().all(|found| *found == numbers[0]));
    let distinct: std::collections::HashSet<_> = numbers[0].iter().collect();
    assert_eq!(distinct.len(), FILES);
    assert!(table.len() < FILES + FILES / 10, "{} numbers for {FILES} files", table.len());
}

/// Names in a list cost nothing, files that are asked for do.
#[test]
fn a_table_takes_what_its_files_take() {
    const LISTED: u64 = 1 << 18;
    const FILES: usize = 1000;
    let table = open(TableGeometry::plan(LISTED).unwrap(), Backing::Shm);
    let empty = taken(&table);
    assert!(empty < 1 << 20, "{empty} bytes for nothing");
    for i in 0..FILES {
        let i = table.find_or_add(key(i)).unwrap();
        table.own(&table.lock(i).unwrap(), content(1, 1));
    }
    let others = (0..100_000).filter(|&i| table.find(key(i)).is_some()).count();
    assert_eq!(others, FILES); // to look takes nothing
    assert!(table.oldest().len() == FILES && table.reserved().count() == 0);
    assert!(!table.is_given_out(7));
    // At most a page of the index each.
    let grown = taken(&table) - empty;
    assert!(grown < FILES as u64 * 4096 + (200 << 10), "{grown} bytes for {FILES} files");
}

#[test]
fn the_oldest_are_named_of_few_files_exactly_and_of_many_nearly() {
    for files in [1000, 4 * room::SAMPLE] {
        let table = table(files);
        for i in 0..files {
            let entry = table.entry(i);
            entry.raise(if i % 4 == 0 { 0 } else { OWNED });
            // Neighbours were used at the same time, as in a job that takes one part after the other.
            entry.touch((i / 100 * 7919 % 1000 * 100 + i % 100) as u64);
        }
        let mut all: Vec<_> =
            (0..files).filter(|i| i % 4 != 0).map(|i| (table.entry(i).used(), i)).collect();
        all.sort_unstable_by(|a, b| b.cmp(a));
        let found = table.oldest();
        assert!(found.is_sorted_by(|a, b| a >= b));
        if files == 1000 {
            assert_eq!(found, all);
            continue;
        }
        assert_eq!(found.len(), room::OLDEST);
        // All of them belong to the oldest eighth or so: the sixteenth part of a sample.
        let (newest, eighth) = (found[0], all[all.len() - all.len() / 6]);
        assert!(newest <= eighth, "{newest:?} is newer than {eighth:?}");
        // Another look meets others.
        let mut again = table.oldest();
        again.retain(|file| found.contains(file));
        assert!(again.len() < room::OLDEST / 2, "{} were named twice", again.len());
    }
}

#[test]
fn a_sum_that_somebody_died_changing_is_made_anew() {
    let table = table(8);
    table.own(&table.lock(1).unwrap(), content(100, 1));
    table.reserve(&table.lock(2).unwrap(), 30);
    let dead = table.lock_state(COUNTING).unwrap();
    table.head(Head::Counting).store(1, Ordering::Relaxed);
    table.head(Head::Bytes).fetch_add(5000, Ordering::Relaxed);
    drop(dead);
    table.unreserve(&table.lock(2).unwrap());
    assert_eq!(table.bytes(), 100);
    // And nobody waits for ever for one who stands still there.
    let stopped = table.lock_state(COUNTING).unwrap();
    table.own(&table.lock(3).unwrap(), content(7, 1));
    assert_eq!(table.bytes(), 107);
    drop(stopped);
    table.disown(&table.lock(1).unwrap());
    assert_eq!(table.bytes(), 7);
}

/// The first threads of a process meet while its row is still that of a dead one.
#[test]
fn no_thread_loses_what_it_was_given() {
    for _ in 0..50 {
        let table = table(64);
        let rows = table.layout.rows_at;
        table.take_pages(rows, u64::from(LEASES) * 8 * ROW_WORDS).unwrap();
        let all =
            table.segment().mapping().words(rows as usize, LEASES as usize * ROW_WORDS as usize);
        all.iter().for_each(|word| word.store(99, Ordering::Relaxed));
        let start = std::sync::Barrier::new(8);
        std::thread::scope(|scope| {
            for i in 0..8 {
                let (table, start) = (&table, &start);
                scope.spawn(move || {
                    start.wait();
                    assert!(table.give_out(i));
                    assert!(table.is_given_out(i), "file {i} was forgotten");
                    start.wait(); // nobody's place is given away before all have looked
                });
            }
        });
    }
}

#[test]
fn a_thread_keeps_its_place_however_many_come_and_go() {
    let table = table(4096);
    assert!(table.give_out(4000));
    for i in 0..200 {
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(table.give_out(i)));
        });
        assert!(table.is_given_out(4000), "after {i} threads");
    }
    let kept = (0..100).filter(|&i| table.is_given_out(i)).count();
    assert!(kept < 100, "of threads that ended long ago");
}

#[test]
fn a_thread_keeps_its_last_two_files() {
    let table = table(64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..10 {
                assert!(table.give_out(i) && table.give_out(i));
            }
            let kept: Vec<_> = (0..10).filter(|&i| table.is_given_out(i)).collect();
            assert_eq!(kept, [8, 9]);
        });
    });
}

#[test]
fn bytes_are_counted_once_whatever_happens_to_a_file() {
    let table = table(8);
    let lock = table.lock(3).unwrap();
    table.reserve(&lock, 100);
    assert!(table.reserved().eq([3]) && table.bytes() == 100);
    table.own(&lock, content(100, 1));
    assert!(table.reserved().next().is_none() && table.bytes() == 100);
    table.reserve(&lock, 40); // what a larger version needs more
    table.own(&lock, content(140, 2));
    assert_eq!(table.bytes(), 140);
    table.own(&lock, content(10, 3));
    assert_eq!(table.bytes(), 10);
    table.reserve(&lock, 5);
    table.unreserve(&lock);
    table.disown(&lock);
    table.disown(&lock);
    assert_eq!(table.bytes(), 0);
    assert!(table.lock(3).is_none(), "it is locked");
    assert!(table.lock(3).is_none(), "it is locked, also after somebody tried");
    drop(lock);
    assert!(table.lock(3).is_some());
}
