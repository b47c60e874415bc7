//! Which files are ours, and what is remembered of them.

use super::*;
use crate::fault::meeting;
use crate::files::content::{Content, Version};
use crate::files::paths::key;
use std::os::unix::fs::PermissionsExt;

/// A job killed while it told the table what earlier jobs left: the next process begins again.
#[test]
fn what_earlier_jobs_left_is_known_although_the_first_process_died_early() {
    let disks = Disks::new("died-early");
    disks.put("a", 1, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a"));
    let table = &cache.opened().table;
    let i = table.find(key(b"a")).unwrap();
    table.disown(&table.lock(i).unwrap());
    table.forget_recall();
    let next = disks.open();
    assert_eq!((next.stats().files, next.stats().bytes), (1, 10));
    assert!(next.is_copied("a") && next.stats().copies == 1);
}

#[test]
fn a_file_that_people_put_there_stays_as_it_is() {
    let disks = Disks::new("foreign");
    disks.put("a", 1, 100);
    disks.put("b", 2, 100);
    disks.put("c", 3, 100);
    let cache = disks.open_with(|o| o.limit = Some(250));
    let theirs = |name: &str, bytes: &[u8]| {
        let path = cache.copy_at(name);
        let _ours = std::fs::remove_file(&path);
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    };
    // One where no copy was, one in the place of a copy, one that the source does not have.
    theirs("a", b"theirs");
    assert!(cache.is_copied("b"));
    theirs("b", b"theirs too");
    theirs("notes", b"mine");
    assert_eq!(cache.bytes("a"), (vec![1; 100], false));
    assert!(cache.take_news().unwrap().contains("stocache did not make it"));
    assert_eq!(cache.bytes("b"), (vec![2; 100], false));
    assert_eq!(cache.stats().files, 0);
    for i in 0..20 {
        disks.put(&format!("more-{i}"), 7, 100);
        assert!(cache.is_copied(&format!("more-{i}")));
    }
    assert_eq!(cache.clear(), 0, "the last two are about to be opened");
    cache.verify(b"a").unwrap();
    drop(cache);
    let cache = disks.open_with(|o| o.limit = Some(250));
    assert_eq!(cache.bytes("b"), (vec![2; 100], false));
    assert!(cache.names().iter().all(|name| name.starts_with(b"more-")));
    for (name, bytes) in [("a", &b"theirs"[..]), ("b", b"theirs too"), ("notes", b"mine")] {
        assert_eq!(std::fs::read(cache.copy_at(name)).unwrap(), bytes);
    }
}

#[test]
fn what_took_the_place_of_a_copy_is_not_evicted() {
    let disks = Disks::new("replaced");
    for i in 0..10 {
        disks.put(&format!("{i}"), i, 100);
    }
    let cache = disks.open_with(|o| o.limit = Some(300));
    assert!(cache.is_copied("0"));
    std::fs::remove_file(cache.copy_at("0")).unwrap();
    std::fs::write(cache.copy_at("0"), b"theirs").unwrap();
    std::fs::set_permissions(cache.copy_at("0"), std::fs::Permissions::from_mode(0o644)).unwrap();
    for i in 1..10 {
        assert!(cache.is_copied(&format!("{i}")));
    }
    assert_eq!(std::fs::read(cache.copy_at("0")).unwrap(), b"theirs");
    assert!(cache.stats().bytes <= 300);
}

#[test]
fn the_right_file_is_served_whoever_put_it_there_but_is_not_ours() {
    let disks = Disks::new("adopted");
    disks.put("a", 1, 100);
    disks.put("b", 1, 100);
    let cache = disks.open();
    assert!(cache.is_copied("b")); // so that the log is not lost
    std::fs::copy(disks.far("a"), cache.copy_at("a")).unwrap();
    let time = std::fs::metadata(disks.far("a")).unwrap().modified().unwrap();
    std::fs::File::options()
        .write(true)
        .open(cache.copy_at("a"))
        .unwrap()
        .set_modified(time)
        .unwrap();
    std::fs::set_permissions(cache.copy_at("a"), std::fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(cache.bytes("a"), (vec![1; 100], true));
    assert!(cache.hit(b"a").is_some());
    assert_eq!((cache.stats().copies, cache.stats().files), (1, 1));
    cache.fetch(b"b").unwrap();
    cache.clear();
    assert!(cache.copy_at("a").exists());
}

#[test]
fn caches_of_two_sources_in_one_folder_do_not_meet() {
    let (one, two) = (Disks::new("one"), Disks::new("two"));
    one.put("a", 1, 100);
    two.put("a", 2, 100);
    two.put("b", 2, 100);
    let first = one.open();
    let second = two.open_with(|o| {
        o.cache = one.root.join("near");
        o.limit = Some(100);
    });
    assert_ne!(first.path(), second.path());
    assert_eq!(first.bytes("a"), (vec![1; 100], true));
    assert_eq!(second.bytes("a"), (vec![2; 100], true));
    second.clear();
    drop(second);
    let second = two.open_with(|o| o.cache = one.root.join("near"));
    assert_eq!(second.bytes("b").0, [2; 100]);
    assert!(first.hit(b"a").is_some());
}

#[test]
fn a_damaged_log_is_made_anew() {
    let disks = Disks::new("log");
    for i in 0..20 {
        disks.put(&format!("{i}"), i, 10);
    }
    let cache = disks.open();
    (0..20).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
    let index = cache.path().join("index");
    drop(cache);
    let good = std::fs::read(&index).unwrap();
    let cut = |bytes: &[u8]| bytes[..bytes.len() - 7].to_vec();
    let flip = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x10;
        bytes
    };
    let bad: Vec<Box<dyn Fn()>> = vec![
        Box::new(|| std::fs::write(&index, cut(&good)).unwrap()),
        Box::new(|| std::fs::write(&index, flip(&good, 100)).unwrap()),
        Box::new(|| std::fs::write(&index, vec![0; 5000]).unwrap()),
        Box::new(|| std::fs::write(&index, b"").unwrap()),
        Box::new(|| std::fs::remove_file(&index).unwrap()),
        Box::new(|| {
            std::fs::remove_file(&index).unwrap();
            std::fs::create_dir_all(index.join("of somebody")).unwrap();
        }),
    ];
    for (n, damage) in bad.iter().enumerate() {
        damage();
        let cache = disks.open_with(|o| o.limit = Some(200));
        assert_eq!((cache.stats().files, cache.stats().bytes), (20, 200), "damage {n}");
        assert_eq!(cache.names().len(), 20, "damage {n}");
        (0..20).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
        assert_eq!((cache.stats().copies, cache.take_news()), (0, None), "damage {n}");
        drop(cache);
        let log = crate::files::journal::parse(&std::fs::read(&index).unwrap());
        assert_eq!((log.files.len(), log.damaged), (20, 0), "damage {n}");
    }
}

#[test]
fn files_can_be_evicted_although_the_log_was_removed_under_way() {
    let disks = Disks::new("removed");
    for i in 0..30 {
        disks.put(&format!("{i}"), i, 10);
    }
    let cache = disks.open_with(|o| o.limit = Some(100));
    (0..10).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
    std::fs::remove_file(cache.path().join("index")).unwrap();
    (10..30).for_each(|i| assert!(cache.is_copied(&format!("{i}")), "{i}"));
    assert_eq!(cache.stats().bytes, 100);
    assert_eq!(cache.names().len(), 10);
}

#[test]
fn a_note_of_a_file_that_never_came_is_no_harm() {
    let disks = Disks::new("noted");
    disks.put("a", 1, 100);
    for limit in [None, Some(1000)] {
        let cache = disks.open_with(|o| o.limit = limit);
        cache
            .opened()
            .journal
            .keep(b"a", Content { version: Version { size: 100, mtime: 5 }, hash: 0 })
            .unwrap();
        drop(cache);
        let cache = disks.open_with(|o| o.limit = limit);
        assert!(!cache.contains(b"a"));
        assert_eq!(cache.bytes("a"), (vec![1; 100], true));
        assert_eq!(cache.stats().bytes, 100);
        drop(cache.opened().victims.take());
        std::fs::remove_file(cache.copy_at("a")).unwrap();
    }
}

#[test]
fn parts_of_the_dead_are_swept_by_the_next_job() {
    let disks = Disks::new("parts");
    let cache = disks.open();
    let part = cache.path().join("parts").join("123abc-5");
    std::fs::write(&part, b"half").unwrap();
    let living = cache.opened().part(7);
    std::fs::write(&living, b"half").unwrap();
    let second = disks.open();
    assert!(part.exists() && living.exists(), "others may be writing them");
    drop((cache, second));
    let _next = disks.open();
    assert!(!part.exists() && !living.exists());
}

#[test]
fn two_tables_on_one_folder_remove_nothing_while_both_live() {
    let disks = Disks::new("two-tables");
    for i in 0..10 {
        disks.put(&format!("{i}"), i, 100);
    }
    let here = disks.open_with(|o| o.limit = Some(300));
    (0..3).for_each(|i| assert!(here.is_copied(&format!("{i}"))));
    let part = here.opened().part(7);
    std::fs::write(&part, b"half").unwrap();
    with_mounts("a folder without a common /dev/shm", || {
        mount(Some("tmpfs"), Path::new("/dev/shm"), 0, "").unwrap();
        let there = disks.open_with(|o| o.limit = Some(300));
        assert_ne!(here.opened().domain.id, there.opened().domain.id);
        assert!(part.exists(), "of a living process");
        assert_eq!(there.stats().files, 3);
        for (cache, other) in [(&here, &there), (&there, &here)] {
            for i in 0..10 {
                assert_eq!(cache.bytes(&format!("{i}")), (vec![i; 100], i < 3));
            }
            assert!(cache.take_news().unwrap().contains("share this /dev/shm"));
            assert_eq!((cache.clear(), cache.stats().evicted), (0, 0));
            assert!((0..3).all(|i| other.is_copied(&format!("{i}"))));
        }
        // Both log: nothing is lost when one writes the log anew.
        let note = |cache: &FileCache, name: &[u8]| {
            cache.opened().journal.keep(name, Content::default()).unwrap();
        };
        note(&here, b"x");
        there.opened().journal.tidy().unwrap();
        note(&here, b"y");
        assert_eq!(there.opened().names().len(), 5);
    });
    assert!(here.is_copied("9"), "alone again");
}

#[test]
fn who_comes_while_a_file_is_removed_is_not_given_it() {
    let disks = Arc::new(Disks::new("coming"));
    for i in 0..4 {
        disks.put(&format!("{i}"), i, 100);
    }
    let here = disks.open_with(|o| o.limit = Some(300));
    (0..3).for_each(|i| assert!(here.is_copied(&format!("{i}"))));
    let mut coming = None;
    let shared = Arc::clone(&disks);
    let (came, comes) = std::sync::mpsc::channel();
    meeting::at(move |place| {
        if place != "nobody else is there" || coming.is_some() {
            return;
        }
        let (disks, came) = (Arc::clone(&shared), came.clone());
        coming = Some(std::thread::spawn(move || {
            with_mounts("who comes with another table", || {
                mount(Some("tmpfs"), Path::new("/dev/shm"), 0, "").unwrap();
                let there = disks.open_with(|o| o.limit = Some(300));
                let paths: Vec<_> = (0..3).map(|i| there.path_of(&format!("{i}"))).collect();
                std::thread::sleep(Duration::from_millis(500)); // it may take its time to open them
                came.send(paths.iter().all(|path| std::fs::read(path).is_ok())).unwrap();
            });
        }));
        std::thread::sleep(Duration::from_millis(250));
    });
    assert!(here.is_copied("3"), "by removing another");
    // Nobody came if there is no right to mount.
    assert_ne!(
        comes.recv_timeout(Duration::from_secs(30)),
        Ok(false),
        "what was given was removed"
    );
}

#[test]
fn who_is_stopped_while_it_removes_is_not_waited_for_long() {
    let disks = Disks::new("stopped");
    disks.put("a", 1, 100);
    let here = disks.open();
    assert!(here.is_copied("a"));
    let removing = here.opened().domain.may_remove();
    with_mounts("who comes with another table", || {
        mount(Some("tmpfs"), Path::new("/dev/shm"), 0, "").unwrap();
        let there = FileCache::open(disks.options()).unwrap();
        assert!(there.trouble().is_some());
        assert_eq!(there.bytes("a"), (vec![1; 100], false), "from the source");
    });
    drop(removing);
    assert!(here.is_copied("a"));
}
