//! One process, and what can be on its disks.
#![allow(unsafe_code)] // mounts of a thread's own, pipes

use super::*;
use std::ffi::CString;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicU64;

/// A far and a near folder, gone at the end.
struct Disks {
    root: PathBuf,
}

impl Disks {
    fn new(what: &str) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("stocache-{what}-{}-{n}", std::process::id()));
        let _old = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("far")).unwrap();
        Self { root }
    }

    fn far(&self, name: &str) -> PathBuf {
        self.root.join("far").join(name)
    }

    /// A file at the source whose bytes follow from `salt`.
    fn put(&self, name: &str, salt: u8, bytes: usize) {
        std::fs::create_dir_all(self.far(name).parent().unwrap()).unwrap();
        std::fs::write(self.far(name), vec![salt; bytes]).unwrap();
    }

    fn options(&self) -> FileOptions {
        FileOptions {
            source: self.root.join("far"),
            cache: self.root.join("near"),
            limit: None,
            evict: true,
            check: Check::Once,
            hashed: false,
            files: 100,
        }
    }

    fn open(&self) -> Arc<FileCache> {
        self.open_with(|_| ())
    }

    fn open_with(&self, change: impl FnOnce(&mut FileOptions)) -> Arc<FileCache> {
        let mut options = self.options();
        change(&mut options);
        let cache = FileCache::open(options).unwrap();
        assert_eq!(cache.trouble(), None);
        cache
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.root);
    }
}

impl FileCache {
    fn near(&self) -> &Near {
        self.near.as_ref().unwrap()
    }

    fn copy_at(&self, name: &str) -> PathBuf {
        self.folder.join("files").join(name)
    }

    /// What a reader gets, and whether it is the copy.
    fn bytes(&self, name: &str) -> (Vec<u8>, bool) {
        match self.fetch(name.as_bytes()).unwrap() {
            Served::Copy(path) => (std::fs::read(as_path(&path)).unwrap(), true),
            Served::Source(path) => (std::fs::read(as_path(&path)).unwrap(), false),
        }
    }

    fn is_copied(&self, name: &str) -> bool {
        matches!(self.fetch(name.as_bytes()), Ok(Served::Copy(_)))
    }
}

fn later(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap();
}

/// Runs `act` in a thread with mounts of its own, or says what is not covered.
fn with_mounts(uncovered: &str, act: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: this thread alone gets a mount namespace, which ends with it.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                return eprintln!("skipped: no right to mount here, so {uncovered} is not covered");
            }
            mount(None, Path::new("/"), libc::MS_REC | libc::MS_PRIVATE, "").unwrap();
            act();
        });
        thread.join().unwrap();
    });
}

fn mount(kind: Option<&str>, at: &Path, flags: u64, data: &str) -> std::io::Result<()> {
    let text = |text: &[u8]| CString::new(text).unwrap();
    let (kind, at) = (text(kind.unwrap_or("none").as_bytes()), text(at.as_os_str().as_bytes()));
    let data = text(data.as_bytes());
    // SAFETY: NUL-terminated texts that outlive the call.
    let done = unsafe {
        libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn a_copy_is_made_once_and_known_again() {
    let disks = Disks::new("known");
    disks.put("a", 1, 1000);
    disks.put("deep/er/b", 2, 0);
    let cache = disks.open();
    assert_eq!(cache.hit(b"a"), None);
    assert_eq!(cache.bytes("a"), (vec![1; 1000], true));
    assert_eq!(cache.bytes("deep/er/b"), (vec![], true));
    assert!(cache.hit(b"a").is_some());
    assert_eq!((cache.stats().copies, cache.stats().files, cache.stats().bytes), (2, 2, 1000));
    assert_eq!(cache.names(), [b"a".to_vec(), b"deep/er/b".to_vec()]);
    drop(cache);
    let cache = disks.open();
    assert!(cache.contains(b"a") && cache.is_copied("a") && cache.is_copied("deep/er/b"));
    assert_eq!((cache.stats().copies, cache.stats().files, cache.stats().bytes), (0, 2, 1000));
}

#[test]
fn a_name_that_leads_elsewhere_is_refused() {
    let disks = Disks::new("names");
    let cache = disks.open();
    for name in ["", ".", "..", "../far/a", "a/../b", "a//b", "/etc/passwd", "a/", "a\0b"] {
        let error = cache.fetch(name.as_bytes()).unwrap_err();
        assert_eq!(error.kind(), Kind::Argument, "{name:?}");
    }
}

#[test]
fn a_changed_source_is_noticed_by_the_next_job_and_always_if_asked_to() {
    let disks = Disks::new("changed");
    disks.put("a", 1, 100);
    let (once, always) = (disks.open(), disks.open_with(|o| o.check = Check::Always));
    assert_eq!(once.bytes("a").0, [1; 100]);
    disks.put("a", 2, 100);
    later(&disks.far("a"));
    assert_eq!(once.bytes("a").0, [1; 100]);
    assert_eq!(always.hit(b"a"), None);
    assert_eq!(always.bytes("a"), (vec![2; 100], true));
    assert_eq!(always.stats().stale, 1);
    disks.put("a", 3, 50);
    drop((once, always));
    let next = disks.open();
    assert_eq!(next.bytes("a"), (vec![3; 50], true));
    assert_eq!((next.stats().stale, next.stats().bytes), (1, 50));
}

#[test]
fn the_copy_of_a_vanished_source_is_used_and_people_are_told_once() {
    let disks = Disks::new("vanished");
    disks.put("a", 1, 100);
    disks.put("b", 2, 100);
    let always = disks.open_with(|o| o.check = Check::Always);
    assert!(always.is_copied("a") && always.is_copied("b"));
    std::fs::remove_dir_all(disks.far("")).unwrap();
    assert_eq!(always.bytes("a"), (vec![1; 100], true));
    assert!(always.take_news().unwrap().contains("its copy is used"));
    drop(always);
    let next = disks.open();
    assert_eq!(next.bytes("a").0, [1; 100]);
    assert_eq!(next.bytes("b").0, [2; 100]);
    assert_eq!(next.take_news().unwrap().lines().count(), 1);
    assert_eq!(next.take_news(), None);
}

#[test]
fn errors_of_the_source_are_those_of_the_source() {
    let disks = Disks::new("source");
    let cache = disks.open();
    let kind = |name: &str| cache.fetch(name.as_bytes()).unwrap_err().kind();
    assert_eq!(kind("none"), Kind::Errno(libc::ENOENT));
    std::fs::create_dir(disks.far("folder")).unwrap();
    assert_eq!(kind("folder"), Kind::Errno(libc::EISDIR));
    let pipe = CString::new(disks.far("pipe").into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    assert_eq!(kind("pipe"), Kind::Errno(libc::EINVAL));
    disks.put("file", 1, 10);
    assert_eq!(kind("file/below"), Kind::Errno(libc::ENOTDIR));
    std::os::unix::fs::symlink("loop", disks.far("loop")).unwrap();
    assert_eq!(kind("loop"), Kind::Errno(libc::ELOOP));
    assert!(cache.is_copied("file"), "the others are served");
    assert_eq!((cache.stats().bytes, cache.take_news()), (10, None));
    assert_eq!(std::fs::read_dir(cache.folder.join("parts")).unwrap().count(), 0);
}

/// A job killed while it told the table what earlier jobs left: the next process begins again.
#[test]
fn what_earlier_jobs_left_is_known_although_the_first_process_died_early() {
    let disks = Disks::new("died-early");
    disks.put("a", 1, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a"));
    let table = &cache.near().table;
    let i = table.find(key(b"a")).unwrap();
    table.disown(&table.lock(i).unwrap());
    table.forget_recall();
    let next = disks.open();
    assert_eq!((next.stats().files, next.stats().bytes), (1, 10));
    assert!(next.is_copied("a") && next.stats().copies == 1);
}

// Whose files are they?

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
    assert_ne!(first.folder(), second.folder());
    assert_eq!(first.bytes("a"), (vec![1; 100], true));
    assert_eq!(second.bytes("a"), (vec![2; 100], true));
    second.clear();
    drop(second);
    let second = two.open_with(|o| o.cache = one.root.join("near"));
    assert_eq!(second.bytes("b").0, [2; 100]);
    assert!(first.hit(b"a").is_some());
}

#[test]
fn a_changed_copy_is_made_again() {
    let disks = Disks::new("harmed");
    disks.put("a", 1, 100);
    let cache = disks.open();
    assert!(cache.is_copied("a"));
    std::fs::write(cache.copy_at("a"), b"oops").unwrap();
    assert_eq!(cache.bytes("a"), (vec![1; 100], true));
    std::fs::remove_file(cache.copy_at("a")).unwrap();
    assert_eq!(cache.bytes("a"), (vec![1; 100], true));
    assert_eq!((cache.stats().bytes, cache.stats().files), (100, 1));
}

#[test]
fn a_flipped_bit_is_found_by_the_hash_and_by_verify() {
    let disks = Disks::new("flipped");
    disks.put("a", 1, 100_000);
    let flip = |cache: &FileCache| {
        let path = cache.copy_at("a");
        let time = std::fs::metadata(&path).unwrap().modified().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[77_777] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    };
    let cache = disks.open_with(|o| o.hashed = true);
    assert!(cache.is_copied("a"));
    flip(&cache);
    drop(cache);
    let cache = disks.open_with(|o| o.hashed = true);
    assert_eq!(cache.bytes("a"), (vec![1; 100_000], true));
    assert_eq!(cache.verify(b"a").unwrap(), Verdict::Same);
    flip(&cache);
    assert_eq!(cache.verify(b"a").unwrap(), Verdict::Differs);
    assert_eq!(cache.verify(b"a").unwrap(), Verdict::Absent);
    assert_eq!(cache.bytes("a"), (vec![1; 100_000], true));
}

/// P13: size and time of change say nothing here, so the hash must.
#[test]
fn damaged_copies_are_found_by_the_hash() {
    const FILES: u64 = 6;
    const BYTES: u64 = 10_000;
    let disks = Disks::new("damaged");
    let name = |i: u64| format!("{i}");
    let contents = |i: u64| vec![i as u8 + 1; BYTES as usize];
    (0..FILES).for_each(|i| disks.put(&name(i), i as u8 + 1, BYTES as usize));
    let open = || disks.open_with(|o| o.hashed = true);
    let cache = open();
    (0..FILES).for_each(|i| assert!(cache.is_copied(&name(i))));
    let copies: Vec<PathBuf> = (0..FILES).map(|i| cache.copy_at(&name(i))).collect();
    drop(cache);
    let long = std::env::var_os("STOCACHE_LONG").is_some();
    let seed = u64::from(std::process::id());
    eprintln!("seed {seed}");
    let mut random = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1;
    let mut below = |n: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % n
    };
    for round in 0..if long { 10_000 / FILES } else { 20 } {
        for (i, copy) in (0..FILES).zip(&copies) {
            let (other, at) = (below(FILES - 1) + 1, below(BYTES) as usize);
            let mut bytes = contents(i);
            match below(4) {
                0 => bytes[at] ^= 1 << below(8),
                1 => bytes.truncate(at),
                2 => bytes[at / 4096 * 4096..].iter_mut().take(4096).for_each(|byte| *byte = 0),
                _ => bytes = contents((i + other) % FILES),
            }
            let time = std::fs::metadata(copy).unwrap().modified().unwrap();
            std::fs::write(copy, bytes).unwrap();
            std::fs::File::options().write(true).open(copy).unwrap().set_modified(time).unwrap();
        }
        let cache = open();
        for i in 0..FILES {
            assert_eq!(cache.bytes(&name(i)), (contents(i), true), "round {round}");
        }
        assert_eq!((cache.stats().copies, cache.take_news()), (FILES, None), "round {round}");
    }
}

// The log

#[test]
fn a_damaged_log_is_made_anew() {
    let disks = Disks::new("log");
    for i in 0..20 {
        disks.put(&format!("{i}"), i, 10);
    }
    let cache = disks.open();
    (0..20).for_each(|i| assert!(cache.is_copied(&format!("{i}"))));
    let index = cache.folder.join("index");
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
        let log = crate::journal::parse(&std::fs::read(&index).unwrap());
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
    std::fs::remove_file(cache.folder.join("index")).unwrap();
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
        cache.near().journal.keep(b"a", Kept { version: (100, 5), hash: 0 }).unwrap();
        drop(cache);
        let cache = disks.open_with(|o| o.limit = limit);
        assert!(!cache.contains(b"a"));
        assert_eq!(cache.bytes("a"), (vec![1; 100], true));
        assert_eq!(cache.stats().bytes, 100);
        drop(cache.near().victims.take());
        std::fs::remove_file(cache.copy_at("a")).unwrap();
    }
}

// Room

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
        let near = cache.near();
        let i = near.table.find_or_add(key(b"a")).unwrap();
        let dead = near.table.lock(i).unwrap();
        near.table.reserve(&dead, 600);
        std::fs::write(near.part(i), b"half").unwrap();
        drop(dead);
        assert!(cache.is_copied("b"));
        assert_eq!(cache.stats().bytes, 600);
        assert!(!near.part(i).exists());
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
fn who_cannot_be_seen_by_others_reads_from_the_source() {
    let disks = Disks::new("unseen");
    disks.put("a", 1, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a"));
    let anchor = cache.near().table.segment().anchor();
    anchor.lease.store(0, Ordering::Relaxed);
    anchor.inherited.store(true, Ordering::Relaxed);
    assert_eq!(cache.hit(b"a"), None);
    assert_eq!(cache.bytes("a"), (vec![1; 10], false));
    assert_eq!(cache.verify(b"a").unwrap(), Verdict::Absent);
    assert_eq!(cache.clear(), 0);
}

#[test]
fn a_removed_cache_folder_is_made_again() {
    let disks = Disks::new("rm");
    disks.put("a/b", 1, 10);
    let cache = disks.open();
    assert!(cache.is_copied("a/b"));
    std::fs::remove_dir_all(cache.folder()).unwrap();
    assert_eq!(cache.bytes("a/b"), (vec![1; 10], true));
    assert_eq!(cache.take_news(), None);
}

#[test]
fn no_news_is_lost_among_threads() {
    let disks = Disks::new("news");
    let cache = disks.open();
    let mut seen = String::new();
    std::thread::scope(|scope| {
        for t in 0..4 {
            let cache = &cache;
            scope.spawn(move || (0..500).for_each(|n| cache.put_news(format!("{t}-{n}"))));
        }
        for _ in 0..100 {
            seen.extend(cache.take_news().into_iter().chain(["\n".into()]));
            std::thread::yield_now();
        }
    });
    seen.extend(cache.take_news());
    assert_eq!(seen.lines().filter(|line| !line.is_empty()).count(), 2000);
}

#[test]
fn copies_are_made_behind_the_caller() {
    let disks = Disks::new("behind");
    disks.put("a", 1, 10);
    let cache = disks.open();
    assert!(matches!(cache.fetch_behind(b"a").unwrap(), Served::Source(_)));
    let began = Instant::now();
    while cache.hit(b"a").is_none() {
        assert!(began.elapsed() < Duration::from_secs(60), "nothing is copied");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(cache.fetch_behind(b"none").unwrap(), Served::Source(_)));
    while cache.news.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody is told");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(cache.take_news().unwrap().contains("in the background"));
}

// Leftovers

#[test]
fn parts_of_the_dead_are_swept_by_the_next_job() {
    let disks = Disks::new("parts");
    let cache = disks.open();
    let part = cache.folder.join("parts").join("123abc-5");
    std::fs::write(&part, b"half").unwrap();
    let living = cache.near().part(7);
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
    let part = here.near().part(7);
    std::fs::write(&part, b"half").unwrap();
    with_mounts("a folder without a common /dev/shm", || {
        mount(Some("tmpfs"), Path::new("/dev/shm"), 0, "").unwrap();
        let there = disks.open_with(|o| o.limit = Some(300));
        assert_ne!(here.near().domain.id, there.near().domain.id);
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
            cache.near().journal.keep(name, Kept { version: (1, 1), hash: 0 }).unwrap();
        };
        note(&here, b"x");
        there.near().journal.tidy().unwrap();
        note(&here, b"y");
        assert_eq!(there.near().names().len(), 5);
    });
    assert!(here.is_copied("9"), "alone again");
}

// Trouble

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
            assert_eq!(std::fs::read_dir(cache.folder.join("parts")).unwrap().count(), 0);
            assert_eq!((cache.stats().failed, cache.stats().bytes), (1, 3 << 20), "it rests");
            // Room again: after the rest, writing goes on.
            std::fs::remove_file(&hog).unwrap();
            std::fs::remove_file(cache.copy_at("0")).unwrap();
            assert_eq!(cache.bytes("7"), (vec![7; 1 << 20], false));
            cache.near().table.resume_at().store(now(), Ordering::Relaxed);
            assert_eq!(cache.bytes("7"), (vec![7; 1 << 20], true));
            assert_eq!(cache.take_news(), None);
            // A clock that was set back does not make it rest for longer.
            let hours = 3600 * 1_000_000_000;
            cache.near().table.resume_at().store(now() + hours, Ordering::Relaxed);
            std::fs::remove_file(cache.copy_at("1")).unwrap();
            assert_eq!(cache.bytes("6"), (vec![6; 1 << 20], true));
            cache.clear();
            cache.bytes("5");
            cache.bytes("4");
            cache.clear();
            let files = cache.folder.join("files");
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
