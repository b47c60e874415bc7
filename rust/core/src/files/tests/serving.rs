//! What a request gets.
#![allow(unsafe_code)] // a pipe

use super::*;
use crate::error::Kind;
use crate::files::domain::Domain;
use crate::files::options::Verdict;
use crate::segment::claim::LEASES;
use crate::sys::ofd::{share_byte, unlock_byte};
use std::fs::File;

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
    assert_eq!(std::fs::read_dir(cache.path().join("parts")).unwrap().count(), 0);
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

/// More processes than leases, or a fork that left no descriptor: what is there is served, nothing is
/// copied, and nothing is removed while such a process lives.
#[test]
fn who_has_no_lease_is_served_what_is_there() {
    let disks = Disks::new("no-lease");
    (0..4).for_each(|i| disks.put(&format!("{i}"), i, 100));
    for inherited in [false, true] {
        let cache = disks.open_with(|o| o.limit = Some(200));
        assert!(cache.is_copied("0") && cache.is_copied("1"));
        let segment = cache.opened().table.segment();
        let others = File::options().read(true).write(true).open(segment.path().unwrap()).unwrap();
        let anchor = segment.anchor();
        let mine = anchor.lease.swap(0, Ordering::Relaxed);
        if inherited {
            anchor.inherited.store(true, Ordering::Relaxed);
        } else {
            (0..u64::from(LEASES)).filter(|&k| k + 1 != u64::from(mine)).for_each(|k| {
                share_byte(&others, k).unwrap();
            });
            // The one that was ours.
            anchor.lease.store(0, Ordering::Relaxed);
            unlock_byte(anchor.fd, u64::from(mine) - 1);
            share_byte(&others, u64::from(mine) - 1).unwrap();
        }
        assert!(cache.hit(b"0").is_some());
        assert_eq!(cache.bytes("1"), (vec![1; 100], true));
        assert_eq!(cache.bytes("2"), (vec![2; 100], false));
        assert_eq!((cache.verify(b"0").unwrap(), cache.clear()), (Verdict::Absent, 0));
        // As others see it, who have a lease of their own.
        let domain = Domain::join(&cache.path().join("lock"), segment.header().instance).unwrap();
        assert!(domain.has_rowless() && !domain.is_alone());
        drop(cache);
        assert!(!domain.has_rowless() && domain.is_alone(), "it ends with its process");
    }
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
    while cache.opened().news.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody is told");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(cache.take_news().unwrap().contains("in the background"));
}
