//! What the store promises, as far as one process can see it. The rest is in tests/torture/records.rs.
#![allow(unsafe_code)] // forks, and pages that nobody may touch

use super::heads::{HEAD_BYTES, pack_head, room_for};
use super::{Claim, Put, RecordStore};
use crate::fault::meeting;
use crate::segment::claim::{LEASES, Lease};
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::space_layout::RECORD_ALIGN;
use crate::segment::{Backing, Request, random_name};
use crate::space::{self, Firm, Reserved};
use crate::sys::ofd::lock_byte;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

fn reserve(store: &RecordStore, lease: Lease, len: u64) -> Option<Reserved<'_>> {
    store.space().reserve(lease, room_for(len), 0, &Firm).ok()
}

fn store(limit: u64, samples: u64, recycle: bool) -> Arc<RecordStore> {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(
            random_name().unwrap(),
            Geometry::Records(RecordsGeometry::plan(limit, samples, recycle).unwrap()),
        )
    };
    RecordStore::open(&request).unwrap().0
}

fn put(store: &RecordStore, i: usize, bytes: &[u8]) -> Put {
    assert_eq!(store.begin(i), Claim::LoadAndStore);
    store.fill(i, 0, &[IoSlice::new(bytes)]).unwrap()
}

fn get(store: &RecordStore, i: usize) -> Option<Vec<u8>> {
    store.read(i, |found| {
        let mut bytes = vec![0; found.len];
        // SAFETY: as long as the record.
        unsafe { store.copy_out(found, bytes.as_mut_ptr()) };
        bytes
    })
}

/// How a forked child that ran `act` ended: as waitpid says.
fn in_child(act: impl FnOnce()) -> i32 {
    // SAFETY: the child runs `act` and ends at once, without unwinding into the test harness.
    unsafe {
        let child = libc::fork();
        assert!(child >= 0);
        if child == 0 {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).is_ok();
            libc::_exit(i32::from(!done));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    }
}

#[test]
fn what_was_stored_comes_back_until_it_is_cleared() {
    for recycle in [false, true] {
        let store = store(1 << 20, 10, recycle);
        assert_eq!(get(&store, 3), None);
        assert_eq!(put(&store, 3, b"three"), Put::Stored);
        assert_eq!(put(&store, 4, b""), Put::Stored);
        assert_eq!((get(&store, 3), get(&store, 4)), (Some(b"three".to_vec()), Some(vec![])));
        assert_eq!((store.begin(3), store.stats().filled), (Claim::Present, 2));
        store.clear().unwrap();
        assert_eq!((get(&store, 3), get(&store, 4), store.stats().filled), (None, None, 0));
        assert_eq!(store.stats().used_bytes, 0);
        assert_eq!(put(&store, 4, b"four"), Put::Stored);
        assert_eq!((get(&store, 3), get(&store, 4)), (None, Some(b"four".to_vec())));
        assert_eq!((store.stats().filled, store.stats().evicted), (1, 0));
    }
}

#[test]
fn a_copy_is_whole_only_if_its_region_was_not_emptied_meanwhile() {
    let store = store(1 << 20, 10, false);
    put(&store, 1, b"first");
    let mut copies = 0;
    let copied = store.read(1, |found| {
        copies += 1;
        if copies == 1 {
            store.clear().unwrap();
            put(&store, 1, b"other");
        }
        found.len
    });
    assert_eq!((copied, copies), (Some(5), 2));
}

/// A writer has found its region active, and takes its generation after all was said to be gone. What
/// it writes then belongs to the new generation, so nobody else may be given its room.
#[test]
fn a_record_that_is_written_while_all_is_emptied_keeps_its_room() {
    const BYTES: usize = 1000;
    for recycle in [false, true] {
        let store = store(1 << 20, 400, recycle);
        let (found_active, is_active) = channel();
        let (raise_all, raised) = channel();
        let (write_all, written) = channel();
        let writer = {
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                let mut told = false;
                meeting::at(move |place| {
                    if place == "regions: active" && !std::mem::replace(&mut told, true) {
                        found_active.send(()).unwrap();
                        raised.recv().unwrap();
                    }
                });
                put(&store, 5, &[5; BYTES]);
                write_all.send(()).unwrap();
            })
        };
        is_active.recv().unwrap();
        let mut met = false;
        meeting::at(move |place| {
            if place == "regions: raised" && !std::mem::replace(&mut met, true) {
                raise_all.send(()).unwrap();
                written.recv().unwrap();
            }
        });
        store.clear().unwrap();
        writer.join().unwrap();
        for i in 100..150 {
            put(&store, i, &[i as u8; BYTES]);
        }
        let found = get(&store, 5);
        assert!(found.is_none_or(|bytes| bytes == [5; BYTES]), "the bytes of another sample");
        assert_eq!(get(&store, 149), Some(vec![149; BYTES]));
    }
}

/// A region's records are found by their heads, whatever the dead left between them.
#[test]
fn the_records_of_a_region_are_found_without_the_index() {
    for recycle in [false, true] {
        let store = store(1 << 20, 3000, recycle);
        let regions = store.geometry().regions;
        let mut stored = std::collections::BTreeMap::new();
        for i in (0..3000).step_by(7) {
            let bytes = vec![i as u8; i % 900];
            if put(&store, i, &bytes) == Put::Stored {
                stored.insert(i, bytes);
            }
            if i % 3 == 0 {
                // Room that somebody took and died without a word, and room with a false head in it.
                let lease = store.lease().unwrap();
                let lost = reserve(&store, lease, (i % 50) as u64).map(|lost| lost.at);
                if let Some(at) = lost.filter(|_| i % 2 == 0) {
                    let head = pack_head(stored.len() as u64, 40, 0);
                    store.segment().write(&head, store.layout().data_at + at).unwrap();
                }
            }
        }
        let found: Vec<(usize, u64)> =
            (0..regions).flat_map(|r| store.records_in(r).map(move |(i, _)| (i, r))).collect();
        assert_eq!(found.len() as u64, store.stats().filled);
        for &(i, r) in &found {
            assert_eq!(get(&store, i).as_ref(), stored.get(&i));
            assert_eq!(u64::from(store.find(i).unwrap().region), r);
        }
        store.clear().unwrap();
        assert_eq!((0..regions).map(|r| store.records_in(r).count()).sum::<usize>(), 0);
    }
}

/// To find all leases taken takes a call for each, so it is not done for every sample.
#[test]
fn where_no_lease_is_free_one_is_asked_for_now_and_then() {
    let store = store(1 << 20, 10, false);
    let anchor = store.segment().anchor();
    let others = std::fs::File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", anchor.fd))
        .unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&others);
    assert!((0..u64::from(LEASES)).all(|lease| lock_byte(fd, lease)));
    let looks = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&looks);
    meeting::at(move |place| {
        counted.fetch_add(usize::from(place == "lease: looking"), Ordering::Relaxed);
    });
    let begun = |samples: usize| {
        assert!((0..samples).all(|i| store.begin(i) == Claim::LoadOnly));
        looks.load(Ordering::Relaxed)
    };
    assert_eq!(begun(5), 1);
    anchor.refused.fetch_sub(Duration::from_secs(2).as_nanos() as u64, Ordering::Relaxed);
    assert_eq!(begun(5), 2);
    drop(others);
    assert_eq!(store.begin(0), Claim::LoadOnly);
    // A child that another test has just forked keeps the description for a moment.
    let is_had = |_| {
        std::thread::sleep(Duration::from_millis(1));
        anchor.refused.fetch_sub(Duration::from_secs(2).as_nanos() as u64, Ordering::Relaxed);
        store.begin(0) == Claim::LoadAndStore
    };
    assert!((0..10_000).any(is_had));
}

#[test]
fn readers_of_one_region_are_not_disturbed_when_another_is_emptied() {
    let store = store(1 << 20, 1000, true);
    let room = store.longest() as usize;
    put(&store, 0, &vec![0; room]);
    put(&store, 1, &vec![1; room]);
    let first = store.find(0).unwrap();
    let evicted = |store: &RecordStore| store.stats().evicted;
    for i in 2.. {
        store.find(0).unwrap(); // in use: it stays
        put(&store, i, &vec![2; room]);
        if evicted(&store) > 0 {
            break;
        }
    }
    assert!(store.is_whole(first.region, first.generation));
    assert_eq!(get(&store, 0), Some(vec![0; room]));
    assert_eq!(store.find(1), None);
}

/// The pages of states and index cannot be touched while regions are emptied, and need not be.
#[test]
fn emptying_touches_no_entry_of_the_index() {
    const SAMPLES: u64 = 1 << 20;
    for recycle in [false, true] {
        let store = store(64 << 20, SAMPLES, recycle);
        for i in 0..1000 {
            put(&store, i, &[7; 1000]);
        }
        let layout = *store.layout();
        let guarded = |act: &dyn Fn(&RecordStore)| {
            in_child(|| {
                let lease = store.lease().unwrap(); // looks at all states, once per process
                for (from, to) in [
                    (layout.states_at, layout.states_at + 2 * SAMPLES), // then come those of the locks
                    (layout.space.index_at, layout.space.regions_at),
                ] {
                    let from = from.next_multiple_of(4096) as usize;
                    let pages = to as usize / 4096 * 4096 - from;
                    let start = store.mapping().at(from, pages).as_ptr();
                    // SAFETY: whole pages of a mapping of this child, which ends soon.
                    assert_eq!(unsafe { libc::mprotect(start.cast(), pages, libc::PROT_NONE) }, 0);
                }
                act(&store);
                assert_eq!(store.lease(), Some(lease));
            })
        };
        let emptied = |store: &RecordStore| {
            let lease = store.lease().unwrap();
            store.clear().unwrap();
            if recycle {
                for _ in 0..3 * store.geometry().regions {
                    reserve(store, lease, store.longest()).unwrap();
                }
            }
            assert_eq!(store.stats().filled, 0);
        };
        assert_eq!(guarded(&emptied), 0);
        // The control: a look at one entry in the middle ends the child.
        let looked = guarded(&|store| assert!(store.find(SAMPLES as usize / 2).is_none()));
        assert!(libc::WIFSIGNALED(looked) && libc::WTERMSIG(looked) == libc::SIGSEGV, "{looked}");
    }
}

#[test]
fn what_is_being_written_while_the_store_is_cleared_is_gone_and_keeps_its_room() {
    for recycle in [false, true] {
        let store = store(1 << 20, 10, recycle);
        let lease = store.lease().unwrap();
        assert_eq!(store.begin(1), Claim::LoadAndStore);
        let reserved = reserve(&store, lease, 100).unwrap();
        let words = space::pack(reserved.at, 100, 0, reserved.generation);
        store.space().announce(1, words);
        store.clear().unwrap();
        // Somebody else does not get the room of the one who is still writing: other room, or none.
        let meanwhile = if recycle { Put::Stored } else { Put::NoRoom };
        assert_eq!(put(&store, 2, &[2; 100]), meanwhile);
        let other = store.find(2).map(|found| found.at as u64);
        assert_ne!(other, Some(store.layout().data_at + reserved.at));
        store.space().count_record(reserved.region, reserved.generation);
        store.space().publish(1, words);
        drop(reserved);
        store.abandon(1);
        assert_eq!((store.find(1), store.stats().filled), (None, u64::from(recycle)));
        store.clear().unwrap();
        assert_eq!(store.stats().used_bytes, 0);
    }
}

#[test]
fn the_room_of_a_cleared_store_is_there_once_who_wrote_is_done_or_dead() {
    for dies in [false, true] {
        let store = store(1 << 20, 10, false);
        let longest = (store.longest() - RECORD_ALIGN) as usize;
        let writes = |then: &dyn Fn()| {
            let lease = store.lease().unwrap();
            let reserved = reserve(&store, lease, longest as u64).unwrap();
            store.clear().unwrap();
            assert_eq!(put(&store, 1, &[1; 10]), Put::NoRoom);
            then();
            drop(reserved);
        };
        if dies {
            // SAFETY: ends this child.
            assert_eq!(in_child(|| writes(&|| unsafe { libc::_exit(0) })), 0);
        } else {
            writes(&|| ());
        }
        // All of it, and nobody clears again.
        assert_eq!(put(&store, 2, &vec![2; longest]), Put::Stored);
        assert_eq!(get(&store, 2), Some(vec![2; longest]));
        assert_eq!((store.stats().filled, store.stats().evicted), (1, 0));
    }
}

#[test]
fn a_count_that_the_dead_left_is_made_anew() {
    for recycle in [false, true] {
        let store = store(1 << 20, 100, recycle);
        for i in 0..10 {
            put(&store, i, &[1; 100]);
        }
        assert_eq!(store.stats().filled, 10);
        // Killed between counting a record and publishing it.
        assert_eq!(
            in_child(|| {
                let lease = store.lease().unwrap();
                assert_eq!(store.begin(50), Claim::LoadAndStore);
                let reserved = reserve(&store, lease, 100).unwrap();
                store.space().count_record(reserved.region, reserved.generation);
                std::mem::forget(reserved);
                // SAFETY: ends this child.
                unsafe { libc::_exit(0) }
            }),
            0
        );
        assert_eq!(store.stats().filled, 10);
        put(&store, 50, &[1; 100]);
        assert_eq!(store.stats().filled, 11);
        store.clear().unwrap();
        assert_eq!((store.stats().filled, store.stats().used_bytes), (0, 0));
    }
}

#[test]
fn a_region_that_has_no_generation_left_is_not_emptied_again() {
    let store = store(1 << 20, 10, false);
    put(&store, 1, b"one");
    let (last, before) = (space::LAST_GENERATION, store.space().generation(0, Ordering::Relaxed));
    store.space().skip_generations(0, u64::from(last - before) - 1);
    store.clear().unwrap();
    assert_eq!(store.space().generation(0, Ordering::Relaxed), last);
    put(&store, 1, b"last");
    let refused = store.clear().unwrap_err().to_string();
    assert!(refused.contains("2147483646 times"), "{refused}");
    assert_eq!(get(&store, 1), Some(b"last".to_vec()));
    assert_eq!(put(&store, 2, b"more"), Put::Stored);
}

#[test]
fn more_threads_than_can_write_at_once_wait_for_each_other() {
    let store = store(1 << 20, 10, false);
    let lease = store.lease().unwrap();
    let mut writing: Vec<_> = (0..8).map(|_| reserve(&store, lease, 10).unwrap()).collect();
    assert!(reserve(&store, lease, 10).is_none());
    writing.pop();
    assert!(reserve(&store, lease, 10).is_some());
    drop(writing);
    let many = |t: usize| {
        for i in (t..3200).step_by(32) {
            assert_eq!(put(&store_of_many(), i, &[t as u8; 10]), Put::Stored);
        }
    };
    std::thread::scope(|scope| (0..32).for_each(|t| drop(scope.spawn(move || many(t)))));
    assert_eq!(store_of_many().stats().filled, 3200);
}

fn store_of_many() -> Arc<RecordStore> {
    static STORE: std::sync::OnceLock<Arc<RecordStore>> = std::sync::OnceLock::new();
    STORE.get_or_init(|| store(1 << 20, 3200, false)).clone()
}

#[test]
fn a_forked_child_leaves_the_claims_of_its_parent_alone() {
    let store = store(1 << 20, 10, false);
    assert_eq!(store.begin(1), Claim::LoadAndStore);
    let child = in_child(|| {
        assert_eq!(store.begin(1), Claim::LoadingElsewhere);
        let put = store.fill(1, 0, &[IoSlice::new(b"child")]).unwrap();
        assert_eq!(put, Put::StoredElsewhere);
        store.abandon(1);
        assert_eq!(store.begin(1), Claim::LoadingElsewhere);
    });
    assert_eq!((child, store.find(1)), (0, None));
    assert_eq!(store.fill(1, 0, &[IoSlice::new(b"parent")]).unwrap(), Put::Stored);
    assert_eq!(get(&store, 1), Some(b"parent".to_vec()));
}

#[test]
fn a_record_that_fits_no_region_is_too_large_and_a_full_store_says_so() {
    let store = store(1 << 20, 100, false);
    let longest = store.longest();
    assert_eq!(put(&store, 1, &vec![0; longest as usize + 1]), Put::TooLarge);
    assert_eq!(
        put(&store, 1, &vec![0; (longest - HEAD_BYTES - RECORD_ALIGN) as usize]),
        Put::Stored
    );
    assert_eq!(put(&store, 2, &[0; 17]), Put::NoRoom);
    assert_eq!(put(&store, 2, &[0; 16]), Put::Stored);
    assert_eq!(store.begin(1), Claim::Present);
    let stats = store.stats();
    assert_eq!((stats.too_large, stats.dropped, stats.filled), (1, 1, 2));
}

#[test]
fn who_is_interrupted_waits_no_longer_and_the_claim_stays() {
    let store = store(1 << 20, 10, false);
    assert_eq!(store.begin(1), Claim::LoadAndStore);
    // Longer than anybody runs this test.
    crate::sys::interrupt::tests::interrupted(|| store.wait(1, Duration::from_secs(1_000_000)));
    assert_eq!(store.begin(1), Claim::LoadingElsewhere);
    // The control: without an interrupt it is waited for, here as long as it takes to give it back.
    let waiting = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| store.wait(1, Duration::from_secs(1_000_000)));
        while store.stats().waits < 2 {
            std::thread::yield_now();
        }
        let waiting = !waiter.is_finished();
        store.abandon(1);
        waiting
    });
    assert!(waiting);
}

#[test]
fn who_lost_its_descriptor_claims_stores_and_clears_nothing() {
    let store = store(1 << 20, 10, false);
    put(&store, 1, b"one");
    let child = in_child(|| {
        assert_eq!(store.begin(2), Claim::LoadAndStore);
        // SAFETY: the number is that of the segment, which this child does not need any more.
        unsafe { libc::close(store.segment().anchor().fd) };
        let put = store.fill(2, 0, &[IoSlice::new(b"two")]).unwrap();
        assert_eq!((put, store.begin(3)), (Put::StoredElsewhere, Claim::LoadOnly));
        assert!(store.is_cut_off());
        let why = store.clear().unwrap_err().to_string();
        assert!(why.contains("closed a descriptor"), "{why}");
        assert_eq!(get(&store, 1), Some(b"one".to_vec()));
    });
    assert_eq!((child, store.is_cut_off()), (0, false));
    // What it had claimed is there for the taking.
    assert_eq!(put(&store, 2, b"two"), Put::Stored);
}

#[test]
fn who_lost_its_descriptor_can_store_after_opening_the_store_anew() {
    let store = store(1 << 20, 10, false);
    let again = Request {
        join: Some(store.segment().location()),
        ..Request::new(store.segment().name(), Geometry::Records(store.geometry().clone()))
    };
    let ended = in_child(move || {
        // The twin: with its descriptor it is the one object of this process.
        assert!(Arc::ptr_eq(&RecordStore::open(&again).unwrap().0, &store));
        // SAFETY: as above.
        unsafe { libc::close(store.segment().anchor().fd) };
        let (fresh, _) = RecordStore::open(&again).unwrap();
        assert!(store.is_cut_off() && !fresh.is_cut_off());
        assert_eq!(put(&fresh, 1, b"one"), Put::Stored);
        assert_eq!(get(&store, 1), Some(b"one".to_vec()));
        assert!(Arc::ptr_eq(&RecordStore::open(&again).unwrap().0, &fresh));
        // It has the number of the other one, which is not closed once more.
        assert_eq!(fresh.segment().anchor().fd, store.segment().anchor().fd);
        assert!(store.is_cut_off());
        drop(store);
        assert_eq!(put(&fresh, 2, b"two"), Put::Stored);
    });
    assert_eq!(ended, 0);
}
