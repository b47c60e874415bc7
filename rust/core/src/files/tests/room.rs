//! Limits, eviction and the table's own room.

use super::*;
use crate::files::content::Content;
use crate::files::journal::Journal;
use crate::files::options::Verdict;
use crate::files::paths::key;

#[test]
fn the_limit_holds_and_the_oldest_go() {
    let disks = Disks::new("limit");
    for i in 0..50 {
        disks.put(&format!("{i}"), i, 100);
    }
    disks.put("large", 9, 1001);
    let cache = disks.open_with(|o| o.limit = Some(1000));
    for i in 0..50 {
        assert_eq!(cache.bytes(&format!("{i}")), (vec![i; 100], true));
        assert!(cache.stats().bytes <= 1000);
    }
    let left = |i: &u8| cache.copy_at(&format!("{i}")).exists();
    assert!((40..50).all(|i| left(&i)) && !(0..40).any(|i| left(&i)));
    assert_eq!(cache.stats().evicted, 40);
    assert_eq!(cache.bytes("large"), (vec![9; 1001], false));
    assert_eq!(cache.stats().too_large, 1);
    assert!((40..50).all(|i| left(&i)), "nothing goes for what does not fit anyway");
}

#[test]
fn a_changed_source_takes_the_room_of_its_old_copy() {
    let disks = Disks::new("same-room");
    disks.put("a", 1, 900);
    let cache = disks.open_with(|o| {
        o.limit = Some(1000);
        o.check = Check::Always;
    });
    assert!(cache.is_copied("a"));
    for (salt, bytes) in [(2, 1000), (3, 10), (4, 800)] {
        disks.put("a", salt, bytes);
        assert_eq!(cache.bytes("a"), (vec![salt; bytes], true));
        assert_eq!(cache.stats().bytes, bytes as u64);
    }
}

#[test]
fn what_the_dead_had_set_aside_comes_back() {
    let disks = Disks::new("reserved");
    disks.put("a", 1, 600);
    disks.put("b", 2, 600);
    for evict in [false, true] {
        let cache = disks.open_with(|o| {
            o.limit = Some(1000);
            o.evict = evict;
        });
        cache.clear();
        let folder = cache.opened();
        let i = folder.table.find_or_add(key(b"a")).unwrap();
        let dead = folder.table.lock(i).unwrap();
        folder.table.reserve(&dead, 600);
        std::fs::write(folder.part(i), b"half").unwrap();
        drop(dead);
        assert!(cache.is_copied("b"));
        assert_eq!(cache.stats().bytes, 600);
        assert!(!folder.part(i).exists());
    }
}

#[test]
fn a_frozen_cache_keeps_what_it_has() {
    let disks = Disks::new("frozen");
    for i in 0..20 {
        disks.put(&format!("{i}"), i, 100);
    }
    let cache = disks.open_with(|o| {
        o.limit = Some(1000);
        o.evict = false;
    });
    for _epoch in 0..2 {
        for i in 0..20 {
            assert_eq!(cache.bytes(&format!("{i}")), (vec![i; 100], i < 10));
        }
    }
    assert_eq!((cache.stats().copies, cache.stats().evicted), (10, 0));
}

#[test]
fn more_files_than_the_table_has_places_are_read_from_the_source() {
    let disks = Disks::new("many");
    let names: Vec<String> = (0..1100).map(|i| format!("{i}")).collect();
    names.iter().for_each(|name| disks.put(name, 1, 1));
    let small = disks.open_with(|o| o.files = 0);
    let copied = names.iter().filter(|name| small.is_copied(name)).count();
    assert_eq!(copied, 1024);
    assert_eq!(small.take_news().unwrap().lines().count(), 1);
    assert_eq!(small.verify(b"no-place").unwrap(), Verdict::Absent);
    drop(small);
    // The next table has room for all that is there, whatever it is asked for.
    let next = disks.open_with(|o| o.files = 0);
    assert_eq!(names.iter().filter(|name| next.is_copied(name)).count(), 1100);
    drop(next);
    let third = disks.open_with(|o| o.files = 0);
    assert!(names.iter().all(|name| third.is_copied(name)));
    assert_eq!((third.stats().copies, third.stats().files), (0, 1100));
}

/// Bytes that this thread has read, as the kernel counts them.
fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse().ok()).unwrap()
}

#[test]
fn a_file_is_removed_without_reading_the_log() {
    const LOGGED: u64 = 20_000;
    const FILES: u64 = 300;
    let disks = Disks::new("log-read");
    (0..FILES).for_each(|i| disks.put(&format!("{i}"), 1, 10));
    drop(disks.open());
    // Names of files that are gone: the log is long, the folder is not.
    let log = disks.open().opened().journal.path.clone();
    let gone = |i| format!("of an earlier job, with a long name, number {i}").into_bytes();
    let names = (0..LOGGED).map(|i| (gone(i), Content::default())).collect();
    Journal { path: log.clone() }.keep_all(&names).unwrap();
    let length = std::fs::metadata(&log).unwrap().len();
    let cache = disks.open_with(|o| o.limit = Some(1000));
    let before = bytes_read();
    (0..FILES).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
    let (read, evicted) = (bytes_read() - before, cache.stats().evicted);
    assert_eq!(evicted, FILES - 100);
    assert!(read / evicted < 2000, "{} bytes read for each, the log has {length}", read / evicted);
}

#[test]
fn a_log_of_files_that_come_and_go_stays_short() {
    let disks = Disks::new("short-log");
    (0..60u8).for_each(|i| disks.put(&format!("{i}"), i, 10));
    let cache = disks.open_with(|o| o.limit = Some(100));
    let before = bytes_read();
    for round in 0..4000 {
        assert!(cache.is_copied(&format!("{}", round % 60)));
    }
    let length = cache.opened().journal.len();
    assert!(length < 300 << 10, "{length} bytes for 10 files");
    assert!(cache.stats().evicted > 3900);
    // Also with the log written anew now and then.
    let each = (bytes_read() - before) / 4000;
    assert!(each < 2000, "{each} bytes read for each");
}

/// Whoever shares the disk but not the table may write the log anew.
#[test]
fn a_file_is_removed_although_the_log_was_written_anew_by_others() {
    let disks = Disks::new("anew");
    (0..40u8).for_each(|i| disks.put(&format!("{i}"), i, 10));
    let cache = disks.open_with(|o| o.limit = Some(100));
    for i in 0..40 {
        assert!(cache.is_copied(&format!("{i}")));
        if i % 7 == 0 {
            let log = Journal { path: cache.opened().journal.path.clone() };
            log.keep(b"something of theirs", Content::default()).unwrap();
            log.tidy().unwrap();
        }
    }
    assert_eq!((cache.stats().files, cache.stats().bytes, cache.stats().evicted), (10, 100, 30));
    let left: Vec<u8> = (0..40).filter(|i| cache.copy_at(&format!("{i}")).exists()).collect();
    assert_eq!(left, (30..40).collect::<Vec<u8>>());
}

/// P6: what there is no memory for is not known, and not a signal.
#[test]
fn a_full_dev_shm_is_the_source_for_files_that_are_new() {
    let disks = Disks::new("full-shm");
    (0..600).for_each(|i| disks.put(&format!("{i}"), 1, 10));
    with_mounts("a full /dev/shm", || {
        let shm = Path::new("/dev/shm");
        mount(Some("tmpfs"), shm, 0, "size=600m").unwrap();
        let cache = disks.open_with(|o| o.files = 1_000_000);
        assert!(cache.opened().table.segment().path().is_some());
        assert!(cache.is_copied("0"));
        mount(Some("tmpfs"), shm, libc::MS_REMOUNT, "size=1m").unwrap();
        let copied = (0..600).filter(|i| cache.is_copied(&format!("{i}"))).count();
        assert!((10..500).contains(&copied), "{copied} were copied");
        let news = cache.take_news().unwrap();
        assert!(news.contains("no memory to note more files") && news.lines().count() == 1);
        assert_eq!(cache.stats().files, copied as u64);
        assert_eq!(
            (0..600).filter(|i| cache.hit(format!("{i}").as_bytes()).is_some()).count(),
            copied
        );
        mount(Some("tmpfs"), shm, libc::MS_REMOUNT, "size=600m").unwrap();
        assert!((0..600).all(|i| cache.is_copied(&format!("{i}"))), "there is room again");
    });
}
