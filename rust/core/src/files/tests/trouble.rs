//! Disks and folders that do not do what they should.

use super::*;
use crate::error::Kind;
use crate::files::options::FileStats;
use crate::files::paths::key;
use crate::segment::lease::now;
use crate::sys::interrupt::tests::interrupted;

#[test]
fn a_file_in_the_place_of_a_folder_is_trouble_for_that_file_alone() {
    let disks = Disks::new("place");
    disks.put("a", 1, 10);
    disks.put("b", 2, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a"));
    std::fs::remove_file(disks.far("a")).unwrap();
    disks.put("a/below", 3, 10);
    let long = format!("{}/x", "y".repeat(250));
    disks.put(&long, 4, 10);
    assert_eq!(cache.bytes("a/below"), (vec![3; 10], false));
    assert!(cache.take_news().unwrap().contains("cannot be made"));
    assert!(cache.is_copied("b") && cache.is_copied(&long), "nothing rests");
}

#[test]
fn a_removed_cache_folder_is_made_again() {
    let disks = Disks::new("rm");
    disks.put("a/b", 1, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a/b"));
    std::fs::remove_dir_all(cache.path()).unwrap();
    assert_eq!(cache.bytes("a/b"), (vec![1; 10], true));
    assert_eq!(cache.take_news(), None);
}

#[test]
fn a_full_disk_is_the_source_and_one_line_of_news_until_there_is_room() {
    let disks = Disks::new("full");
    (0..8).for_each(|i| disks.put(&format!("{i}"), i, 1 << 20));
    std::fs::create_dir_all(disks.root.join("near")).unwrap();
    with_mounts("a full disk", || {
        mount(Some("tmpfs"), &disks.root.join("near"), 0, "size=4m").unwrap();
        for hashed in [false, true] {
            let cache = disks.open_with(|o| o.hashed = hashed);
            let hog = disks.root.join("near/hog");
            std::fs::write(&hog, vec![0; 1 << 19]).unwrap();
            let copied = |i: &u8| cache.bytes(&format!("{i}")) == (vec![*i; 1 << 20], true);
            assert_eq!((0..8).filter(copied).count(), 3);
            let news = cache.take_news().unwrap();
            assert!(news.contains("takes no more files") && news.lines().count() == 1, "{news}");
            assert_eq!(std::fs::read_dir(cache.path().join("parts")).unwrap().count(), 0);
            assert_eq!((cache.stats().failed, cache.stats().bytes), (1, 3 << 20), "it rests");
            // Room again: after the rest, writing goes on.
            std::fs::remove_file(&hog).unwrap();
            std::fs::remove_file(cache.copy_at("0")).unwrap();
            assert_eq!(cache.bytes("7"), (vec![7; 1 << 20], false));
            cache.opened().table.resume_at().store(now(), Ordering::Relaxed);
            assert_eq!(cache.bytes("7"), (vec![7; 1 << 20], true));
            assert_eq!(cache.take_news(), None);
            // A clock that was set back does not make it rest for longer.
            let hours = 3600 * 1_000_000_000;
            cache.opened().table.resume_at().store(now() + hours, Ordering::Relaxed);
            std::fs::remove_file(cache.copy_at("1")).unwrap();
            assert_eq!(cache.bytes("6"), (vec![6; 1 << 20], true));
            cache.clear();
            cache.bytes("5");
            cache.bytes("4");
            cache.clear();
            let files = cache.path().join("files");
            drop(cache);
            std::fs::remove_dir_all(files.parent().unwrap()).unwrap();
        }
    });
}

#[test]
fn a_read_only_disk_serves_what_it_has() {
    let disks = Disks::new("read-only");
    (0..6).for_each(|i| disks.put(&format!("{i}"), i, 100));
    std::fs::create_dir_all(disks.root.join("near")).unwrap();
    with_mounts("a read-only disk", || {
        let near = disks.root.join("near");
        mount(Some("tmpfs"), &near, 0, "size=4m").unwrap();
        let open = || disks.open_with(|o| o.limit = Some(300));
        let mut cache = open();
        (0..3).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
        mount(Some("tmpfs"), &near, libc::MS_REMOUNT | libc::MS_RDONLY, "").unwrap();
        for _job in 0..2 {
            for i in 0..6 {
                assert_eq!(cache.bytes(&format!("{i}")), (vec![i; 100], i < 3));
            }
            assert_eq!(cache.take_news().unwrap().lines().count(), 1);
            assert_eq!(cache.stats().failed, 1, "it rests");
            drop(cache);
            cache = open();
        }
        mount(Some("tmpfs"), &near, libc::MS_REMOUNT, "").unwrap();
        assert!(cache.is_copied("5"));
    });
}

/// ext4 ends in 2446, tmpfs does not.
#[test]
fn a_time_that_the_disk_cannot_keep_is_trouble_for_that_file_alone() {
    let disks = Disks::new("times");
    with_mounts("a disk that cannot keep a time", || {
        mount(Some("tmpfs"), &disks.far(""), 0, "size=4m").unwrap();
        disks.put("a", 1, 10);
        disks.put("b", 2, 10);
        let file = std::fs::File::options().write(true).open(disks.far("a")).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 * 365 * 86400);
        file.set_modified(time).unwrap();
        let cache = disks.open();
        let (bytes, copied) = cache.bytes("a");
        assert_eq!(bytes, [1; 10]);
        let kept = cache.copy_at("a").metadata().is_ok_and(|m| m.modified().unwrap() == time);
        assert_eq!(copied, kept);
        assert_eq!(cache.take_news().is_none(), kept);
        assert_eq!(cache.bytes("b"), (vec![2; 10], true));
    });
}

#[test]
fn a_folder_that_cannot_be_used_is_no_error() {
    let disks = Disks::new("unusable");
    disks.put("a", 1, 10);
    std::fs::write(disks.root.join("near"), b"a file").unwrap();
    let cache = FileCache::open(disks.options()).unwrap();
    assert!(cache.trouble().unwrap().contains("cannot be used"));
    assert_eq!(cache.bytes("a"), (vec![1; 10], false));
    assert_eq!((cache.hit(b"a"), cache.stats(), cache.clear()), (None, FileStats::default(), 0));
}

#[test]
fn who_is_interrupted_while_copying_or_waiting_leaves_nothing_behind() {
    for hashed in [false, true] {
        let disks = Disks::new("interrupted");
        disks.put("a", 1, 1 << 20);
        let cache = disks.open_with(|options| options.hashed = hashed);
        let fetched = || cache.fetch(b"a").map(|_| ()).map_err(|error| error.kind());
        let is_interrupted = || assert_eq!(interrupted(fetched), Err(Kind::Interrupted));
        is_interrupted();
        assert_eq!(std::fs::read_dir(cache.path().join("parts")).unwrap().count(), 0);
        assert_eq!((cache.stats().bytes, cache.stats().failed), (0, 0));
        {
            let table = &cache.opened().table;
            let _copying = table.lock(table.find(key(b"a")).unwrap()).unwrap();
            is_interrupted();
        }
        // The control: who is not is served.
        assert_eq!((fetched(), cache.bytes("a")), (Ok(()), (vec![1; 1 << 20], true)));
    }
}
