//! What a disk store promises.

use super::{Check, DiskOptions, DiskStore, Keys, inspect, remove, tidy};
use crate::fault::meeting;
use crate::records::portable::{self, HEAD, Head};
use crate::space::{Firm, Ground};
use crate::sys::direct::pages_in_cache;
use crate::sys::pages::{PAGE, Pages};
use std::io::IoSlice;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const FINGERPRINT: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
const SAMPLES: u64 = 2000;

/// A folder of a test, gone at its end.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> Self {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("stocache-disk-{}-{serial}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options(path: &Path, budget: u64, recycles: bool) -> DiskOptions {
    let path = path.to_path_buf();
    let (dataset_len, fingerprint) = (SAMPLES, FINGERPRINT);
    DiskOptions { path, budget, dataset_len, fingerprint, recycles, keys: Keys::Numbers }
}

fn open(path: &Path, budget: u64, recycles: bool) -> Arc<DiskStore> {
    DiskStore::open(&options(path, budget, recycles)).unwrap()
}

/// The one value of a sample, of a length of its own.
fn value(i: usize) -> Vec<u8> {
    (0..i * 37 % 9000).map(|at| (at ^ i.wrapping_mul(31)) as u8).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn put(store: &Arc<DiskStore>, i: usize) -> bool {
    let bytes = value(i);
    let parts = [IoSlice::new(&bytes)];
    let (key, fingerprint) = store.identity(i);
    let head = Head { key, fingerprint, schema: Some(1), len: bytes.len() as u64 };
    store.put(i, store.emptied(), &portable::seal(&head, &parts), &parts, soon())
}

/// What is read of a sample: whole, or nothing.
fn get(store: &DiskStore, i: usize) -> Option<Vec<u8>> {
    let found = store.find(i, soon())?;
    let mut pages = Pages::new(found.room()).unwrap();
    let start = store.read(store.open_files(), &found, &mut pages).unwrap()?;
    let (key, fingerprint) = store.identity(i);
    let (_, bytes) = portable::open(&pages[start..start + found.len], key, fingerprint).ok()?;
    Some(bytes.to_vec())
}

fn count(store: &DiskStore) -> usize {
    let there = |i: &usize| match get(store, *i) {
        Some(bytes) => {
            assert_eq!(bytes, value(*i), "sample {i}");
            true
        }
        None => false,
    };
    (0..SAMPLES as usize).filter(there).count()
}

fn fill(store: &Arc<DiskStore>, samples: impl IntoIterator<Item = usize>) -> usize {
    let taken = samples.into_iter().filter(|&i| put(store, i)).count();
    assert!(store.flush(Duration::from_secs(60)));
    taken
}

#[test]
fn what_was_put_is_there_and_in_the_next_run_too() {
    let folder = Temporary::new();
    for run in 0..3 {
        let store = open(&folder.0, 64 << 20, false);
        let before = run * 500;
        assert_eq!((count(&store), store.stats().records), (before, before as u64));
        assert_eq!(fill(&store, before..before + 500), 500);
        assert_eq!(fill(&store, 0..before + 500), before + 500, "they are there");
        assert_eq!((count(&store), store.stats().fills), (before + 500, 500));
        assert_eq!(store.stats().errors, 0);
    }
}

#[test]
fn who_comes_meanwhile_shares_it_and_who_is_dropped_has_written_all() {
    let folder = Temporary::new();
    let first = open(&folder.0, 64 << 20, false);
    (0..300).for_each(|i| assert!(put(&first, i)));
    // What waits to be written is waited for.
    let second = open(&folder.0, 64 << 20, false);
    assert!(Arc::ptr_eq(&first, &second), "one object per process");
    assert_eq!(count(&second), 300);
    (300..600).for_each(|i| assert!(put(&first, i)));
    drop((first, second)); // without a flush
    assert_eq!(count(&open(&folder.0, 64 << 20, false)), 600);
}

#[test]
fn a_frozen_store_fills_up_and_stays_so() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    fill(&store, 0..SAMPLES as usize);
    let (kept, stats) = (count(&store), store.stats());
    assert!(kept > 100 && kept < 300, "{kept}");
    assert_eq!((stats.records as usize, stats.evicted), (kept, 0));
    assert!(stats.bytes <= stats.capacity && stats.bytes > stats.capacity * 8 / 10, "{stats:?}");
    assert!(!put(&store, 1999), "nothing more is taken");
    // The files take what they may, from the first on.
    let on_disk: u64 = std::fs::read_dir(&folder.0)
        .unwrap()
        .map(|file| file.unwrap())
        .filter(|file| file.file_name().to_string_lossy().ends_with(".dat"))
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert!(on_disk <= 1 << 20);
    drop(store);
    let store = open(&folder.0, 1 << 20, false);
    assert_eq!((count(&store), store.stats().records as usize), (kept, kept));
    fill(&store, 0..SAMPLES as usize);
    assert!(count(&store) >= kept, "nothing goes in the next run");
    store.clear().unwrap();
    assert_eq!((count(&store), store.stats().records), (0, 0));
    assert_eq!(fill(&store, 500..600), 100);
    assert_eq!(count(&store), 100);
}

#[test]
fn a_recycled_store_keeps_the_newest_and_its_budget() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    for i in 0..SAMPLES as usize {
        assert!(put(&store, i));
        if i % 50 == 0 {
            assert!(store.flush(Duration::from_secs(60)));
        }
    }
    assert!(store.flush(Duration::from_secs(60)));
    let stats = store.stats();
    assert!(stats.evicted > 1000 && stats.records > 100, "{stats:?}");
    assert_eq!(count(&store) as u64, stats.records);
    assert!((1990..2000).all(|i| get(&store, i).is_some()), "the newest are there");
    let files = std::fs::read_dir(&folder.0).unwrap().count();
    assert!(files <= 3 + 2 * 4, "old files are gone: {files}");
}

#[test]
fn another_dataset_is_refused_and_its_store_left_alone() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    fill(&store, 0..50);
    drop(store);
    let refused = |change: &dyn Fn(&mut DiskOptions)| {
        let mut other = options(&folder.0, 1 << 20, false);
        change(&mut other);
        DiskStore::open(&other).err().unwrap().to_string()
    };
    assert!(refused(&|other| other.fingerprint += 1).contains("it was made for other data"));
    assert!(refused(&|other| other.dataset_len += 1).contains("for 2000 samples, not 2001"));
    let keys: Arc<[u128]> = (0..SAMPLES).map(u128::from).collect();
    assert!(refused(&|other| other.keys = Keys::Of(keys.clone())).contains("without key="));
    assert_eq!(count(&open(&folder.0, 1 << 20, false)), 50);
}

#[test]
fn keys_find_their_samples_wherever_these_are_now() {
    let folder = Temporary::new();
    let key =
        |what: usize| u128::from(what as u64) << 64 | (what as u128).wrapping_mul(0x9e37_79b9);
    let with = |order: Vec<usize>| {
        let keys: Arc<[u128]> = order.iter().map(|&what| key(what)).collect();
        let dataset_len = keys.len() as u64;
        let keys = Keys::Of(keys);
        let options = DiskOptions { dataset_len, keys, ..options(&folder.0, 8 << 20, false) };
        DiskStore::open(&options).unwrap()
    };
    let store = with((0..200).collect());
    assert_eq!(fill(&store, 0..200), 200);
    drop(store);
    // Reordered, longer, and some are gone.
    let order: Vec<usize> = (100..260).rev().collect();
    let store = with(order.clone());
    for (i, &what) in order.iter().enumerate() {
        assert_eq!(get(&store, i), (what < 200).then(|| value(what)), "{what}");
    }
    drop(store);
    // Half of a key is not enough.
    let keys: Arc<[u128]> = (0..200).map(|what| key(what) ^ 1 << 100).collect();
    let (dataset_len, keys) = (200, Keys::Of(keys));
    let options = DiskOptions { dataset_len, keys, ..options(&folder.0, 8 << 20, false) };
    let store = DiskStore::open(&options).unwrap();
    assert!((0..200).all(|i| get(&store, i).is_none()));
}

#[test]
fn a_folder_that_is_removed_meanwhile_ends_nothing() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..100);
    assert_eq!(count(&store), 100);
    std::fs::remove_dir_all(&folder.0).unwrap();
    assert_eq!(count(&store), 100, "what is open is read");
    for i in 100..200 {
        put(&store, i);
    }
    assert!(store.flush(Duration::from_secs(60)));
    assert_eq!(count(&store), 100);
    let news = store.news().unwrap();
    assert!(news.starts_with("cannot write to the disk level in"), "{news}");
    assert_eq!(store.news(), None, "told once");
    drop(store);
    let store = open(&folder.0, 16 << 20, false);
    assert_eq!((count(&store), fill(&store, 0..10)), (0, 10));
}

#[test]
fn children_of_fork_read_and_write_and_have_no_descriptors_of_their_parent() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..100);
    assert_eq!(count(&store), 100);
    (100..150).for_each(|i| assert!(put(&store, i))); // perhaps not written yet
    #[allow(unsafe_code)] // the child ends without a return to the test
    // SAFETY: as said.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let link = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
            let data = |path: PathBuf| path.extension().is_some_and(|end| end == "dat");
            assert!(!(0..200).filter_map(link).any(data));
            assert_eq!(count(&store), 150);
            assert_eq!(fill(&store, 150..200), 50);
        }));
        #[allow(unsafe_code)]
        // SAFETY: ends the child at once.
        unsafe {
            libc::_exit(i32::from(good.is_err()))
        };
    }
    let mut status = -1;
    #[allow(unsafe_code)]
    // SAFETY: our child, and a status of our own.
    unsafe {
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid)
    };
    assert_eq!(status, 0);
    assert_eq!(count(&store), 200);
}

#[test]
fn damaged_files_are_misses() {
    let folder = Temporary::new();
    let store = open(&folder.0, 64 << 20, false);
    fill(&store, 0..1000);
    drop(store);
    let file = |end: &str| {
        let mut all = std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path());
        all.find(|path| path.to_string_lossy().ends_with(end)).unwrap()
    };
    let (data, log) = (file(".dat"), file(".log"));
    let (whole_data, whole_log) = (std::fs::read(&data).unwrap(), std::fs::read(&log).unwrap());
    let check = |what: &str| {
        let store = open(&folder.0, 64 << 20, false);
        let there = count(&store); // what is there is right
        assert!(there < 1000, "{what} was not seen");
        there
    };
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize % below
    };
    let used = 1000 * 4500; // bytes, about
    for round in 0..12 {
        let (mut bad_data, mut bad_log) = (whole_data.clone(), whole_log.clone());
        match round % 6 {
            0 => (0..64).for_each(|_| bad_data[random(used)] ^= 1 << random(8)),
            1 => bad_data.truncate(random(used)),
            2 => {
                let at = random(used / PAGE) * PAGE;
                bad_data[at..at + 16 * PAGE].fill(0);
            }
            3 => {
                // Two stretches that are exchanged.
                let (a, b) = (random(used / 2) / 64 * 64, used / 2 + random(used / 4) / 64 * 64);
                let kept = bad_data[a..a + 40_000].to_vec();
                bad_data.copy_within(b..b + 40_000, a);
                bad_data[b..b + 40_000].copy_from_slice(&kept);
            }
            4 => (0..20).for_each(|_| bad_log[random(24_000)] ^= 1 << random(8)),
            _ => bad_log.truncate(random(23_000)),
        }
        std::fs::write(&data, bad_data).unwrap();
        std::fs::write(&log, bad_log).unwrap();
        check(["flips", "a cut", "zeros", "swaps", "flips in the log", "a cut log"][round % 6]);
    }
    std::fs::write(&data, &whole_data).unwrap();
    std::fs::write(&log, &whole_log).unwrap();
    assert_eq!(count(&open(&folder.0, 64 << 20, false)), 1000, "control");
}

#[test]
fn a_store_of_a_newer_format_stays_untouched() {
    let folder = Temporary::new();
    drop(open(&folder.0, 1 << 20, false));
    let path = folder.0.join("store");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[8] = 2;
    std::fs::write(&path, &bytes).unwrap();
    let error = DiskStore::open(&options(&folder.0, 1 << 20, false)).err().unwrap().to_string();
    assert!(error.contains("it has format 2, this stocache reads format 1"), "{error}");
    assert!(error.contains("remove it (`stocache rm"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[test]
fn a_damaged_store_is_made_anew_unless_it_is_in_use_or_not_only_ours() {
    let folder = Temporary::new();
    let reopened = || DiskStore::open(&options(&folder.0, 1 << 20, false));
    let path = folder.0.join("store");
    let damages: [fn(&mut Vec<u8>); 4] =
        [|b| b[40] ^= 1, |b| b[0] = 0, |b| b.truncate(20), |b| b.clear()];
    for damage in damages {
        let store = reopened().unwrap();
        assert_eq!(fill(&store, 0..50), 50);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        damage(&mut bad);
        std::fs::write(&path, &bad).unwrap();
        // Another process; this one has one object per folder.
        assert!(!is_killed(|| {
            let error = reopened().err().unwrap().to_string();
            assert!(error.contains("its file \"store\""), "{error}");
        }));
        assert_eq!(count(&store), 50, "it is in use");
        drop(store);
        std::fs::write(folder.0.join("notes.txt"), "theirs").unwrap();
        assert!(reopened().is_err());
        assert_eq!(files_of(&folder, ".log").len(), 1);
        std::fs::remove_file(folder.0.join("notes.txt")).unwrap();
        let store = reopened().unwrap();
        let news = store.news().unwrap();
        assert!(news.contains("could not be read (its file \"store\""), "{news}");
        assert_eq!((store.news(), count(&store), fill(&store, 0..50)), (None, 0, 50));
        drop(store);
        let store = reopened().unwrap();
        assert_eq!((store.news(), count(&store)), (None, 50));
    }
}

#[test]
fn whatever_the_file_of_locks_says_somebody_writes() {
    let folder = Temporary::new();
    drop(open(&folder.0, 1 << 20, false));
    for noise in [&b"\xff\xff\xff\xff\xff\xff\xff\xff"[..], b"\0\0\0\0\0\0\0\x40", b"abc", b""] {
        std::fs::write(folder.0.join("lock"), noise).unwrap();
        assert!(open(&folder.0, 1 << 20, false).writes(), "{noise:?}");
    }
}

/// Descriptors of this process on files of records.
fn descriptors(folder: &Temporary) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = links.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
    links.filter(|to| to.starts_with(&folder.0) && to.to_string_lossy().contains(".dat")).count()
}

/// P9: one descriptor for each file, and two more, however they are read.
#[test]
fn a_file_is_one_descriptor_whichever_way_it_is_read() {
    let folder = Temporary::new();
    drop(open(&folder.0, 1 << 20, false)); // in small files
    fill(&open(&folder.0, 16 << 20, false), 0..SAMPLES as usize);
    let store = open(&folder.0, 16 << 20, false);
    let files = files_of(&folder, ".dat");
    assert!(files.len() > 30, "{}", files.len());
    for round in 0..2 {
        files.iter().for_each(|path| make_cold(path));
        assert_eq!(count(&store), SAMPLES as usize);
        let cold = descriptors(&folder);
        files.iter().for_each(|path| drop(std::fs::read(path).unwrap()));
        assert_eq!(count(&store), SAMPLES as usize);
        let warm = descriptors(&folder);
        let most = files.len() + 2;
        assert!(cold.max(warm) <= most, "{cold}, then {warm} of {most} in round {round}");
    }
    drop(store);
    assert_eq!(descriptors(&folder), 0);
    // And never more than so many files, however much the store may take by now.
    assert_eq!(open(&folder.0, 1 << 30, false).geometry().regions, 64);
}

/// Takes all of a file out of the page cache.
fn make_cold(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn of_a_small_level_what_lies_around_a_record_comes_into_the_page_cache() {
    let folder = Temporary::new();
    fill(&open(&folder.0, 64 << 20, false), 0..SAMPLES as usize);
    let store = open(&folder.0, 64 << 20, false);
    let files = files_of(&folder, ".dat");
    let pages = || -> Option<u64> {
        let of = |path: &PathBuf| pages_in_cache(&std::fs::File::open(path).unwrap());
        files.iter().map(of).sum()
    };
    files.iter().for_each(|path| make_cold(path));
    if pages() != Some(0) {
        return; // in memory, or a kernel that does not tell
    }
    assert_eq!(get(&store, 900), Some(value(900)));
    assert_eq!(pages(), Some(0), "one record is read past it");
    store.expect(std::iter::once(900));
    let there = pages().unwrap();
    assert!((100..=256).contains(&there), "{there} pages of a stretch");
    assert_eq!(get(&store, 900), Some(value(900)));
    // What is expected and gone, or was never there, harms nobody.
    files.iter().for_each(|path| make_cold(path));
    store.expect(0..SAMPLES as usize);
    assert_eq!(count(&store), SAMPLES as usize);
    store.clear().unwrap();
    store.expect(0..SAMPLES as usize);
    assert_eq!(count(&store), 0);
}

/// Writes go past the page cache, into which pages come that are about to be written.
#[test]
fn what_is_written_while_what_lies_around_it_is_read_is_there() {
    let folder = Temporary::new();
    let store = open(&folder.0, 64 << 20, false);
    fill(&store, 0..100);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for first in (100..SAMPLES as usize).step_by(10) {
                fill(&store, first..first + 10);
            }
        });
        while !writer.is_finished() {
            store.expect(0..SAMPLES as usize);
            for i in (0..SAMPLES as usize).filter(|&i| store.has(i)) {
                assert_eq!(get(&store, i), Some(value(i)), "sample {i}");
            }
            files_of(&folder, ".dat").iter().for_each(|path| make_cold(path));
        }
    });
    assert_eq!(count(&store), SAMPLES as usize);
}

#[test]
fn a_level_that_memory_has_no_room_for_stays_out_of_the_page_cache() {
    let folder = Temporary::new();
    let store = open(&folder.0, 64 << 20, false);
    assert!(!store.is_small(u64::MAX), "nothing is known of its records");
    fill(&store, 0..SAMPLES as usize);
    let used = store.space().used_bytes();
    assert!(store.is_small(4 * used));
    assert!(!store.is_small(4 * used - 1));
}

/// P16: what the logs take is part of the budget, also where records are small.
#[test]
fn records_and_logs_take_no_more_than_the_budget() {
    use std::os::unix::fs::MetadataExt;
    for recycles in [false, true] {
        let folder = Temporary::new();
        let options = DiskOptions { dataset_len: 20_000, ..options(&folder.0, 1 << 20, recycles) };
        let store = DiskStore::open(&options).unwrap();
        for i in 0..20_000 {
            let (parts, (key, fingerprint)) = ([IoSlice::new(b"tiny")], store.identity(i));
            let head = Head { key, fingerprint, schema: Some(1), len: 4 };
            store.put(i, store.emptied(), &portable::seal(&head, &parts), &parts, soon());
        }
        assert!(store.flush(Duration::from_secs(60)));
        let stats = store.stats();
        let files = [files_of(&folder, ".dat"), files_of(&folder, ".log")].concat();
        let taken: u64 = files.iter().map(|file| file.metadata().unwrap().blocks() * 512).sum();
        assert!(taken <= 1 << 20, "{taken} bytes");
        assert!(stats.bytes <= taken && stats.bytes > taken * 3 / 4, "{stats:?} of {taken}");
        assert!(stats.records > 4000, "{stats:?}");
        drop(store);
        let again = DiskStore::open(&options).unwrap();
        assert_eq!(again.stats().records, stats.records);
        assert_eq!(checked(&folder.0), (stats.records, 0));
    }
}

#[test]
fn small_samples_that_come_slowly_are_written_together() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    let payload: usize = (1..31).map(|i| value(i).len()).sum();
    for i in 1..31 {
        assert!(put(&store, i));
        std::thread::sleep(Duration::from_millis(25));
    }
    let waiting = store.stats().waiting;
    assert!(store.flush(Duration::from_secs(60)));
    let stats = store.stats();
    assert!(stats.bytes < 2 * payload as u64, "{} for {payload}", stats.bytes);
    assert!(waiting > 0 && stats.waiting == 0 && stats.records == 30, "{waiting} waited");
}

#[test]
fn what_waits_in_another_process_is_written_when_it_is_wanted() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    let (brought, seen) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    let ((mut tell, told), (mut see, done)) = ((brought.0, brought.1), (seen.0, seen.1));
    let waits = std::thread::spawn({
        let store = Arc::clone(&store);
        move || {
            let mut byte = [0];
            std::io::Read::read_exact(&mut tell, &mut byte).unwrap();
            let found = get(&store, 7);
            std::io::Write::write_all(&mut &done, &[0]).unwrap();
            found
        }
    });
    assert!(!is_killed(|| {
        assert!(put(&store, 7));
        std::io::Write::write_all(&mut &told, &[0]).unwrap();
        std::io::Read::read_exact(&mut see, &mut [0]).unwrap();
    }));
    assert_eq!(waits.join().unwrap(), Some(value(7)));
}

/// The head is as long as it was, wherever a record begins.
#[test]
fn records_lie_in_whole_pages_of_their_own_and_others() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..200);
    for i in 0..200 {
        let found = store.find(i, soon()).unwrap();
        assert_eq!(found.len, HEAD + value(i).len());
        assert!(found.room() >= found.len && found.room() < found.len + 2 * PAGE);
    }
}

/// In the way of every file that will be made: what bears the name of a file is a folder.
struct Blocked(Vec<PathBuf>);

impl Blocked {
    fn new(folder: &Path) -> Self {
        let names = (0..4).flat_map(|r| (2..40).map(move |g| format!("{r:03}-{g:08x}.dat")));
        let paths: Vec<PathBuf> =
            names.map(|name| folder.join(name)).filter(|path| !path.exists()).collect();
        paths.iter().for_each(|path| std::fs::create_dir(path).unwrap());
        Self(paths)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| std::fs::remove_dir(path).unwrap());
    }
}

/// Longer than nothing is written after it went wrong.
fn rest() {
    std::thread::sleep(Duration::from_millis(1100));
}

fn there(store: &DiskStore) -> Vec<usize> {
    (0..SAMPLES as usize).filter(|&i| get(store, i).is_some()).collect()
}

#[test]
fn where_no_file_can_be_made_what_is_there_stays() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    (0..500).for_each(|i| assert_eq!(fill(&store, [i]), 1));
    let before = there(&store);
    assert!(before.len() > 80, "{}", before.len());
    let blocked = Blocked::new(&folder.0);
    for round in 0..3 {
        fill(&store, 1000 + 100 * round..1100 + 100 * round);
        let now = there(&store);
        assert!(before.iter().all(|i| now.contains(i)), "round {round}: {} left", now.len());
        rest();
    }
    assert!(store.news().unwrap().starts_with("cannot write to the disk level in"));
    drop(blocked);
    (1500..2000).for_each(|i| assert_eq!(fill(&store, [i]), 1));
    let now = there(&store);
    assert!(now.contains(&1999) && now.len() > 80, "and then it goes on");
}

#[test]
fn a_first_file_that_cannot_be_made_is_not_waited_for() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    assert!(store.writes());
    std::fs::remove_dir_all(&folder.0).unwrap();
    let began = Instant::now();
    fill(&store, 0..400); // many groups
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    assert!(there(&store).is_empty());
    std::fs::create_dir(&folder.0).unwrap();
    rest();
    assert_eq!((fill(&store, 0..50), count(&store)), (50, 50));
}

#[test]
fn clearing_while_others_write_is_no_trouble() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in (0..SAMPLES as usize).cycle() {
                put(&store, i);
                if i % 8 == 0 {
                    store.flush(Duration::from_secs(60));
                }
                if done.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for _ in 0..300 {
            store.clear().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!((store.news(), store.stats().errors), (None, 0));
    assert!(!store.is_resting());
    store.clear().unwrap();
    assert_eq!((fill(&store, 0..50), count(&store)), (50, 50));
}

/// Regions of which each must be prepared.
#[derive(Default)]
struct Loose(Mutex<Vec<(u64, u32)>>);

impl Ground for Loose {
    fn prepare(&self, r: u64, next: u32) -> bool {
        self.0.lock().unwrap().push((r, next));
        true
    }

    fn is_firm(&self) -> bool {
        false
    }
}

#[test]
fn what_waits_to_be_written_while_others_empty_all_is_not_written() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..10);
    (10..50).for_each(|i| assert!(put(&store, i)));
    assert!(!is_killed(|| open(&folder.0, 16 << 20, false).clear().unwrap()));
    assert!(store.flush(Duration::from_secs(60)));
    assert_eq!((there(&store), store.stats().records), (vec![], 0));
    assert_eq!((fill(&store, 10..50), there(&store)), (40, (10..50).collect()));
    drop(store);
    assert_eq!(there(&open(&folder.0, 16 << 20, false)), (10..50).collect::<Vec<_>>());
}

#[test]
fn what_is_emptied_at_the_last_moment_is_prepared_before_it_is_written_to() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    fill(&store, 0..10);
    let lease = store.space().lease().unwrap();
    let (others, mut once) = (Arc::clone(&store), true);
    meeting::at(move |place| {
        if place == "regions: active" && std::mem::take(&mut once) {
            let store = Arc::clone(&others);
            let clear = move || store.space().empty_all(lease, &Loose::default());
            assert_eq!(std::thread::spawn(clear).join().unwrap(), Some(true));
        }
    });
    let ground = Loose::default();
    let reserved = store.space().reserve(lease, 4096, 1, &ground).unwrap();
    let prepared = ground.0.lock().unwrap().clone();
    assert_eq!(prepared, [(reserved.region, reserved.generation)]);
}

/// Regions for which a file can be made, but others have taken the room.
struct Taken;

impl Ground for Taken {
    fn settle(&self, _r: u64, _generation: u32) -> bool {
        false
    }
}

#[test]
fn where_there_is_no_room_for_a_new_file_one_old_one_goes_and_no_more() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    (0..500).for_each(|i| assert_eq!(fill(&store, [i]), 1));
    let (space, all) = (store.space(), store.geometry().region_bytes);
    let generations = || -> Vec<u32> {
        (0..store.geometry().regions).map(|r| space.generation(r, Ordering::Acquire)).collect()
    };
    let before = generations();
    for _ in 0..5 {
        assert!(space.reserve(space.lease().unwrap(), all, 1, &Taken).is_err());
    }
    let now = generations();
    assert_eq!(before.iter().zip(&now).filter(|(was, is)| was != is).count(), 1, "{now:?}");
}

#[test]
fn to_be_kept_waiting_is_not_to_be_full() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    fill(&store, 0..10);
    let space = store.space().with_patience(Duration::from_millis(20));
    let lease = space.lease().unwrap();
    let all = store.geometry().region_bytes;
    let kept = space.locked(0, lease, || space.reserve(lease, all, 1, &Firm).is_err());
    assert_eq!((kept, space.is_full()), (Some(true), false));
    assert_eq!((fill(&store, 10..20), count(&store)), (10, 20));
    fill(&store, 0..SAMPLES as usize);
    assert!(space.is_full());
    store.clear().unwrap();
    assert!(!space.is_full());
}

#[test]
fn files_that_go_take_no_room_though_others_have_them_open() {
    use std::os::unix::fs::MetadataExt;
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, true);
    fill(&store, 0..20);
    let is_data = |path: &PathBuf| path.extension().is_some_and(|end| end == "dat");
    let files = || std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path());
    let readers: Vec<std::fs::File> =
        files().filter(is_data).map(|path| std::fs::File::open(path).unwrap()).collect();
    let found = store.find(3, soon()).unwrap();
    (100..700).for_each(|i| assert_eq!(fill(&store, [i]), 1));
    assert!(store.stats().evicted > 100);
    for file in readers.iter().map(|file| file.metadata().unwrap()) {
        assert_eq!((file.nlink(), file.len(), file.blocks()), (0, 0, 0));
    }
    // Who is about to read there finds nothing.
    let mut pages = Pages::new(found.room()).unwrap();
    assert_eq!(store.read(store.open_files(), &found, &mut pages), Ok(None));
}

/// Two policies are two tables, as two containers have them.
#[test]
fn who_writes_after_others_goes_on_where_they_ended() {
    let folder = Temporary::new();
    let first = open(&folder.0, 64 << 20, false);
    fill(&first, 0..100);
    let second = open(&folder.0, 64 << 20, true);
    assert_eq!(count(&second), 100);
    assert!(!put(&second, 1500), "one of them writes");
    fill(&first, 100..300);
    drop(first);
    assert_eq!((fill(&second, 300..500), count(&second)), (200, 500));
    assert_eq!(second.stats().records, 500);
    let third = open(&folder.0, 64 << 20, false);
    assert_eq!(count(&third), 500);
    // What is no more is known to be no more.
    second.clear().unwrap();
    fill(&second, 700..710);
    drop(second);
    assert_eq!((fill(&third, 710..720), there(&third)), (10, (700..720).collect()));
    drop(third);
    assert_eq!(there(&open(&folder.0, 64 << 20, false)), (700..720).collect::<Vec<_>>());
}

#[test]
fn keys_are_as_many_as_samples() {
    let folder = Temporary::new();
    for count in [SAMPLES - 1, SAMPLES + 1, 0] {
        let keys = Keys::Of((0..count).map(u128::from).collect());
        let wrong = DiskOptions { keys, ..options(&folder.0, 1 << 20, false) };
        let error = DiskStore::open(&wrong).err().unwrap().to_string();
        assert!(error.contains(&format!("{count} keys for 2000 samples")), "{error}");
    }
}

#[test]
fn a_budget_that_is_too_small_for_the_files_there_are_is_an_error() {
    let folder = Temporary::new();
    fill(&open(&folder.0, 16 << 20, false), 0..50); // in files of 4 MiB
    let error = |budget, recycles| {
        DiskStore::open(&options(&folder.0, budget, recycles)).err().map(|error| error.to_string())
    };
    let said = error(2 << 20, false).unwrap();
    assert!(said.contains("in files of 4.00 MiB; give it 4.00 MiB or more"), "{said}");
    assert!(error(7 << 20, true).unwrap().contains("give it 8.00 MiB or more"));
    assert_eq!((error(4 << 20, false), error(8 << 20, true)), (None, None));
    assert_eq!(count(&open(&folder.0, 16 << 20, false)), 50, "nothing was lost");
}

#[test]
fn who_cannot_read_the_logs_does_not_wait_for_long() {
    let folder = Temporary::new();
    let store = open(&folder.0, 1 << 20, false);
    store.space().unset_ready();
    let anchor = store.segment().anchor();
    anchor.lease.store(0, Ordering::Relaxed);
    anchor.inherited.store(true, Ordering::Relaxed); // takes no lease
    let began = Instant::now();
    let error = store.inform(None).unwrap_err().to_string();
    assert!(error.contains("too many processes use the disk level in"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

/// What a check of all records finds: how many, and how many are damaged.
fn checked(path: &Path) -> (u64, u64) {
    let mut check = Check::begin(path).unwrap();
    let (mut records, mut damaged) = (0, 0);
    loop {
        let step = check.step().unwrap();
        if step.records == 0 {
            break;
        }
        (records, damaged) = (records + step.records, damaged + step.damaged);
    }
    assert_eq!(records, check.records());
    (records, damaged)
}

fn files_of(folder: &Temporary, end: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(&folder.0).unwrap().map(|file| file.unwrap().path());
    files.filter(|path| path.to_string_lossy().ends_with(end)).collect()
}

#[test]
fn a_look_tells_what_there_is_and_changes_nothing() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..300);
    let found = inspect(&folder.0).unwrap();
    assert_eq!((found.records, found.samples, found.keyed), (300, SAMPLES, false));
    assert_eq!((found.fingerprint, found.in_use), (FINGERPRINT, true));
    assert!(found.bytes > 300 << 10 && found.used_at > 0 && found.trouble.is_empty());
    assert_eq!(checked(&folder.0), (300, 0), "also while it is used");
    drop(store);
    assert!(!inspect(&folder.0).unwrap().in_use);
    assert_eq!((count(&open(&folder.0, 16 << 20, false)), checked(&folder.0)), (300, (300, 0)));
    let other = Temporary::new();
    assert!(inspect(&other.0).is_none());
    std::fs::create_dir(&other.0).unwrap();
    std::fs::write(other.0.join("notes"), "").unwrap();
    assert!(inspect(&other.0).is_none());
    let error = remove(&other.0, true).unwrap_err().to_string();
    assert!(error.contains("it is not the folder of a disk level"), "{error}");
}

#[test]
fn a_check_reads_every_record_and_counts_the_damaged() {
    let folder = Temporary::new();
    fill(&open(&folder.0, 16 << 20, false), 1..301);
    let data = &files_of(&folder, ".dat")[0];
    let mut bytes = std::fs::read(data).unwrap();
    let heads: Vec<usize> =
        (0..bytes.len() - 4).step_by(64).filter(|&at| &bytes[at..at + 4] == b"stor").collect();
    assert_eq!(heads.len(), 300);
    heads.iter().step_by(10).for_each(|&at| bytes[at + 20] ^= 1);
    std::fs::write(data, &bytes).unwrap();
    assert_eq!(checked(&folder.0), (300, 30));
    // Of what the log does not tell any more nobody knows; of what it tells wrongly, everybody.
    let log = &files_of(&folder, ".log")[0];
    let mut entries = std::fs::read(log).unwrap();
    (0..5).for_each(|k| entries[24 * (7 + k) + 3] ^= 8);
    std::fs::write(log, &entries).unwrap();
    let (records, damaged) = checked(&folder.0);
    assert_eq!(records, 300);
    assert!((34..=35).contains(&damaged), "{damaged}");
    std::fs::write(data, &bytes[..bytes.len() / 64]).unwrap();
    assert!(checked(&folder.0).1 > 200, "a file that was cut");
}

#[test]
fn a_check_knows_records_by_their_keys() {
    let folder = Temporary::new();
    let keys: Arc<[u128]> = (0..SAMPLES).map(|i| u128::from(i) << 70 | u128::from(i)).collect();
    let keyed = DiskOptions { keys: Keys::Of(keys), ..options(&folder.0, 16 << 20, false) };
    fill(&DiskStore::open(&keyed).unwrap(), 0..100);
    assert_eq!(checked(&folder.0), (100, 0));
    assert!(inspect(&folder.0).unwrap().keyed);
}

#[test]
fn what_is_in_use_or_not_ours_is_not_removed() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..50);
    let error = remove(&folder.0, false).unwrap_err().to_string();
    assert!(error.contains("is in use; end its processes first, or use --force"), "{error}");
    let theirs = folder.0.join("notes.txt");
    std::fs::write(&theirs, "mine").unwrap();
    let error = remove(&folder.0, true).unwrap_err().to_string();
    assert!(error.contains("it holds \"notes.txt\", which is not stocache's"), "{error}");
    assert_eq!(count(&store), 50);
    std::fs::remove_file(theirs).unwrap();
    let link = Temporary::new();
    std::os::unix::fs::symlink(&folder.0, &link.0).unwrap();
    assert!(remove(&link.0, true).is_err(), "a link leads anywhere");
    std::fs::remove_file(&link.0).unwrap();
    remove(&folder.0, true).unwrap();
    assert!(!folder.0.exists());
    drop(store);
    // A store of a newer format is removed by who asks for it by name.
    drop(open(&folder.0, 1 << 20, false));
    let header = folder.0.join("store");
    let mut bytes = std::fs::read(&header).unwrap();
    bytes[8] = 9;
    std::fs::write(&header, bytes).unwrap();
    assert!(inspect(&folder.0).unwrap().trouble.contains("it has format 9"));
    remove(&folder.0, false).unwrap();
    assert!(!folder.0.exists());
}

/// At each place where somebody who opens it has not joined yet, another one takes it for left over.
#[test]
fn a_folder_that_is_removed_while_it_is_opened_is_made_anew() {
    for place in ["disk: header written", "disk: lock opened"] {
        let folder = Temporary::new();
        std::fs::create_dir(&folder.0).unwrap();
        std::fs::write(folder.0.join("lock"), []).unwrap();
        let (path, mut once) = (folder.0.clone(), true);
        meeting::at(move |there| {
            if there == place && std::mem::take(&mut once) {
                let path = path.clone();
                std::thread::spawn(move || remove(&path, false).unwrap()).join().unwrap();
            }
        });
        let store = open(&folder.0, 1 << 20, false);
        assert!(inspect(&folder.0).unwrap().in_use, "{place}");
        assert!(remove(&folder.0, false).is_err(), "{place}");
        assert_eq!((fill(&store, 0..50), count(&store)), (50, 50));
    }
}

/// What others put in the place of a file is nothing that is waited for.
#[test]
fn pipes_in_a_folder_hold_nobody_up() {
    for name in ["lock", "store"] {
        let folder = Temporary::new();
        drop(open(&folder.0, 1 << 20, false));
        std::fs::remove_file(folder.0.join(name)).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            folder.0.join(name),
            rustix::fs::FileType::Fifo,
            mode,
            0,
        )
        .unwrap();
        let _looked_at = inspect(&folder.0);
        assert!(tidy(&folder.0).unwrap_or_default().is_empty());
        assert!(remove(&folder.0, false).is_err(), "it is not stocache's");
    }
}

#[test]
fn what_the_killed_left_goes_and_nothing_else() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    fill(&store, 0..50);
    let left = ["store.00000000000000ff", "about.123", "007-00000001.dat", "000-00000099.log"];
    left.iter().for_each(|name| std::fs::write(folder.0.join(name), "x").unwrap());
    assert_eq!(tidy(&folder.0).unwrap(), [""; 0], "it is in use");
    drop(store);
    assert_eq!(tidy(&folder.0).unwrap().len(), 4);
    assert!(left.iter().all(|name| !folder.0.join(name).exists()));
    assert_eq!(tidy(&folder.0).unwrap(), [""; 0]);
    assert_eq!(count(&open(&folder.0, 16 << 20, false)), 50);
    // One that was never a store.
    std::fs::remove_file(folder.0.join("store")).unwrap();
    assert_eq!(tidy(&folder.0).unwrap(), [""]);
    assert!(!folder.0.exists());
}

/// Everywhere between two steps of a process that uses a store.
const PLACES: [&str; 15] = [
    "disk: header written",
    "disk: damaged files removed",
    "disk: schema to be written",
    "disk: writer chosen",
    "disk: logs read",
    "regions: active",
    "disk: file made",
    "disk: allocated",
    "disk: reserved",
    "disk: written",
    "disk: logged",
    "disk: announced",
    "disk: withdrawn",
    "disk: file cut",
    "regions: raised",
];

/// Uses a store for a while, in all ways; in a child, which may be killed meanwhile.
fn use_it(path: &Path, seed: usize) {
    let store = open(path, 1 << 20, true);
    for round in 0..60 {
        let some = (0..12).map(|k| (seed * 131 + round * 17 + k * 29) % SAMPLES as usize);
        fill(&store, some.clone());
        let _full = store.add_schema(&[round as u8; 20]);
        for i in some.take(2) {
            if let Some(found) = store.find(i, soon()) {
                store.forget(i, &found);
            }
        }
        if round % 20 == 19 {
            store.clear().unwrap();
        }
    }
}

/// Runs `act` in a child; whether it was killed. Whatever else goes wrong there goes wrong here.
fn is_killed(act: impl FnOnce()) -> bool {
    #[allow(unsafe_code)] // the child ends without a return to the test
    // SAFETY: as said.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act));
        #[allow(unsafe_code)]
        // SAFETY: ends the child at once.
        unsafe {
            libc::_exit(i32::from(good.is_err()))
        };
    }
    let mut status = -1;
    #[allow(unsafe_code)]
    // SAFETY: our child, and a status of our own.
    unsafe {
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid)
    };
    assert!(status == 0 || libc::WIFSIGNALED(status), "a child ended with status {status}");
    status != 0
}

/// P14: at every place × 100 with STOCACHE_LONG.
#[test]
fn a_kill_at_any_place_leaves_nothing_torn() {
    use std::os::unix::fs::MetadataExt;
    let times = if std::env::var_os("STOCACHE_LONG").is_some() { 100 } else { 4 };
    let folder = Temporary::new();
    for place in PLACES {
        let mut kills = 0;
        for time in 0..times {
            match place {
                "disk: header written" => drop(std::fs::remove_dir_all(&folder.0)),
                "disk: damaged files removed" => {
                    std::fs::write(folder.0.join("store"), "no header").unwrap();
                }
                _ => {}
            }
            kills += usize::from(is_killed(|| {
                meeting::die_at(place, if time == 0 { 0 } else { (time * 7 % 40) as u32 });
                use_it(&folder.0, time);
            }));
            let store = open(&folder.0, 1 << 20, true);
            count(&store); // what is there is right
            assert_eq!(checked(&folder.0).1, 0, "{place}: what the log says is not there");
            let room: u64 = [files_of(&folder, ".dat"), files_of(&folder, ".log")]
                .concat()
                .iter()
                .map(|it| it.metadata().unwrap().blocks() * 512)
                .sum();
            assert!(room <= (1 << 20) + 4 * PAGE as u64, "{place}: {room} bytes");
            assert_eq!((fill(&store, 0..9), store.stats().errors), (9, 0), "{place}");
            assert!((0..9).all(|i| get(&store, i).is_some()), "{place}");
            drop(store);
            assert_eq!(
                tidy(&folder.0).unwrap().iter().filter(|name| name.contains('-')).count(),
                0
            );
        }
        assert!(kills > 0, "nobody came by {place}");
    }
}

/// P13: 10,000 records, each damaged in one of the ways that disks have.
#[test]
fn ten_thousand_damaged_records_are_misses() {
    let folder = Temporary::new();
    let each = 40;
    let samples = 10_000u64;
    let options = DiskOptions { dataset_len: samples, ..options(&folder.0, 64 << 20, false) };
    let bytes = |i: usize| -> Vec<u8> { (0..each).map(|at| (at * 7 + i * 31) as u8).collect() };
    let store = DiskStore::open(&options).unwrap();
    for i in 0..samples as usize {
        let bytes = bytes(i);
        let parts = [IoSlice::new(&bytes)];
        let head =
            Head { key: i as u64, fingerprint: FINGERPRINT, schema: Some(1), len: each as u64 };
        assert!(store.put(i, store.emptied(), &portable::seal(&head, &parts), &parts, soon()));
    }
    assert!(store.flush(Duration::from_secs(60)));
    drop(store);
    let whole = || {
        let store = DiskStore::open(&options).unwrap();
        (0..samples as usize).filter(|&i| get(&store, i).is_some_and(|got| got == bytes(i))).count()
    };
    assert_eq!((whole(), checked(&folder.0)), (10_000, (10_000, 0)), "the control");
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed as usize % below
    };
    let long = HEAD + each;
    for data in files_of(&folder, ".dat") {
        let mut file = std::fs::read(&data).unwrap();
        let heads: Vec<usize> =
            (0..file.len() - 4).step_by(64).filter(|&at| &file[at..at + 4] == b"stor").collect();
        for pair in heads.chunks(2) {
            match (random(4), pair) {
                (0, &[a, b]) => {
                    let (one, other) = (file[a..a + long].to_vec(), file[b..b + long].to_vec());
                    file[a..a + long].copy_from_slice(&other);
                    file[b..b + long].copy_from_slice(&one);
                }
                (1, some) => some.iter().for_each(|&at| file[at + random(HEAD)..at + long].fill(0)),
                (2, some) => {
                    some.iter().for_each(|&at| file[at..at + long].fill(random(256) as u8))
                }
                (_, some) => {
                    some.iter().for_each(|&at| file[at + random(long)] ^= 1 << random(8));
                }
            }
        }
        std::fs::write(&data, file).unwrap();
    }
    assert_eq!(checked(&folder.0), (10_000, 10_000));
    assert_eq!(whole(), 0);
}

/// Claims samples in a process of its own, which then ends or stops.
fn claimed_by_another(store: &DiskStore, samples: std::ops::Range<usize>, end: i32) -> i32 {
    #[allow(unsafe_code)] // the child ends without a return to the test
    // SAFETY: as said.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let space = store.space();
        let lease = space.lease();
        for i in samples {
            lease.map(|lease| space.slots().claim(i, lease, false, &space.leases()));
        }
        #[allow(unsafe_code)]
        // SAFETY: ends or stops the child at once.
        unsafe {
            libc::raise(end);
            libc::_exit(0)
        };
    }
    let mut status = -1;
    #[allow(unsafe_code)]
    // SAFETY: our child, and a status of our own.
    let seen = unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) };
    assert_eq!(seen, pid);
    pid
}

#[test]
fn who_is_dead_or_stopped_is_not_waited_for() {
    let folder = Temporary::new();
    let store = open(&folder.0, 16 << 20, false);
    for end in [libc::SIGKILL, libc::SIGSTOP] {
        let pid = claimed_by_another(&store, 0..100, end);
        let began = Instant::now();
        assert!((0..100).all(|i| store.find(i, soon()).is_none()));
        let took = began.elapsed();
        #[allow(unsafe_code)]
        // SAFETY: our child, of which nobody else knows.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        assert!(took < Duration::from_secs(5), "{took:?} for 100 samples, after signal {end}");
    }
    assert_eq!(fill(&store, 0..100), 100, "and what they left is written");
    assert_eq!(count(&store), 100);
}

/// Two samples of one key are the same sample: a list may name a file twice.
#[test]
fn samples_of_one_key_are_all_found_in_the_next_run() {
    let folder = Temporary::new();
    let key = |i: usize| (i as u128 / 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) << 32 | 7;
    let open = || {
        let keys = Keys::Of((0..SAMPLES as usize).map(key).collect());
        DiskStore::open(&DiskOptions { keys, ..options(&folder.0, 64 << 20, false) }).unwrap()
    };
    let put = |store: &Arc<DiskStore>, i: usize| {
        let bytes = value(i / 3);
        let (parts, (key, fingerprint)) = ([IoSlice::new(&bytes)], store.identity(i));
        let head = Head { key, fingerprint, schema: Some(1), len: bytes.len() as u64 };
        store.put(i, store.emptied(), &portable::seal(&head, &parts), &parts, soon())
    };
    let store = open();
    assert!((0..300).step_by(3).all(|i| put(&store, i)));
    drop(store);
    let store = open();
    assert!((0..300).all(|i| get(&store, i) == Some(value(i / 3))));
    assert_eq!(store.stats().records, 300);
    assert!((0..300).all(|i| put(&store, i)), "they are there");
    assert_eq!(store.stats().fills, 0);
}

/// What could not be read may be read the next time, unless somebody has written there.
#[test]
fn a_file_whose_log_cannot_be_read_is_left_as_it_is() {
    let harms: [fn(&Path); 2] = [
        |log| std::fs::create_dir(log).unwrap(),
        |log| std::fs::File::create(log).unwrap().set_len(1 << 43).unwrap(), // without an end
    ];
    for harm in harms {
        let folder = Temporary::new();
        fill(&open(&folder.0, 64 << 20, false), 0..100);
        let log = files_of(&folder, "log").remove(0);
        let aside = folder.0.join("aside");
        std::fs::rename(&log, &aside).unwrap();
        harm(&log);
        let store = open(&folder.0, 64 << 20, false);
        assert_eq!(Check::begin(&folder.0).unwrap().records(), 1);
        std::fs::remove_dir(&log).or_else(|_| std::fs::remove_file(&log)).unwrap();
        std::fs::rename(&aside, &log).unwrap();
        assert!(there(&store).is_empty());
        assert_eq!(fill(&store, 200..300), 100);
        drop(store);
        assert_eq!(count(&open(&folder.0, 64 << 20, false)), 200);
    }
}

#[test]
fn who_has_lost_its_folder_leaves_the_one_that_others_made_in_its_place_alone() {
    let folder = Temporary::new();
    let first = open(&folder.0, 16 << 20, false);
    let reader = open(&folder.0, 16 << 20, true);
    fill(&first, 0..100);
    std::fs::remove_dir_all(&folder.0).unwrap();
    let second = open(&folder.0, 16 << 20, false);
    assert!(!Arc::ptr_eq(&first, &second));
    assert_eq!(fill(&second, 0..100), 100);
    fill(&first, 300..400);
    assert!(first.news().unwrap().contains("Stale file handle"));
    first.clear().unwrap();
    drop(first);
    assert!(!put(&reader, 500), "nor does who comes after it");
    assert_eq!(count(&second), 100);
    drop(second);
    assert_eq!(count(&open(&folder.0, 16 << 20, false)), 100);
}

#[test]
fn a_copy_of_a_folder_is_another_one() {
    let folders = (Temporary::new(), Temporary::new());
    fill(&open(&folders.0.0, 16 << 20, false), 0..100);
    std::fs::DirBuilder::new().mode(0o700).create(&folders.1.0).unwrap();
    for file in std::fs::read_dir(&folders.0.0).unwrap().map(|file| file.unwrap()) {
        std::fs::copy(file.path(), folders.1.0.join(file.file_name())).unwrap();
    }
    let (one, other) = (open(&folders.0.0, 16 << 20, false), open(&folders.1.0, 16 << 20, false));
    assert_eq!((one.path(), other.path()), (&*folders.0.0, &*folders.1.0));
    assert_eq!((fill(&one, 100..150), fill(&other, 150..200)), (50, 50));
    assert_eq!(there(&one), (0..150).collect::<Vec<_>>());
    assert_eq!(there(&other), (0..100).chain(150..200).collect::<Vec<_>>());
}

#[test]
fn that_a_store_cannot_grow_as_far_as_it_may_is_told() {
    let folder = Temporary::new();
    drop(open(&folder.0, 16 << 20, false)); // files of 4 MiB
    let store = open(&folder.0, 256 << 20, false);
    assert_eq!((store.stats().capacity, store.news()), (256 << 20, None));
    drop(store);
    let store = open(&folder.0, 1 << 30, false);
    let news = store.news().unwrap();
    assert!(
        news.contains("in files of 4.00 MiB") && news.contains("256.00 MiB of the 1.00 GiB"),
        "{news}"
    );
    assert_eq!(store.stats().capacity, 256 << 20);
}
