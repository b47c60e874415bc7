//! One log, damaged, replaced and written to by many.

use super::*;

/// What a log says, wherever it says so.
fn said(read: &Contents) -> HashMap<Vec<u8>, Content> {
    read.files.iter().map(|(name, file)| (name.clone(), file.content)).collect()
}

fn kept(n: u64) -> Content {
    Content { version: Version { size: n, mtime: n * 1000 }, hash: n ^ 7 }
}

#[test]
fn what_was_appended_is_read_in_order() {
    let mut bytes = record(KEPT, b"a", kept(1));
    bytes.extend(record(KEPT, b"b/c", kept(2)));
    bytes.extend(record(KEPT, b"a", kept(3)));
    bytes.extend(record(REMOVED, b"b/c", kept(0)));
    let read = parse(&bytes);
    assert_eq!(said(&read), HashMap::from([(b"a".to_vec(), kept(3))]));
    assert_eq!((read.damaged, read.outdated), (0, 3));
}

#[test]
fn a_torn_record_costs_only_itself() {
    let (one, two) = (record(KEPT, b"one", kept(1)), record(KEPT, b"two", kept(2)));
    for cut in 0..one.len() {
        let read = parse(&[&one[..cut], &two[..]].concat());
        assert_eq!(said(&read), HashMap::from([(b"two".to_vec(), kept(2))]), "cut at {cut}");
        assert_eq!(read.damaged, cut);
    }
}

/// P13: no flipped bit makes a record say something else.
#[test]
fn flipped_bits_are_found() {
    let good = [record(KEPT, b"one", kept(1)), record(KEPT, b"two", kept(2))].concat();
    let names = HashMap::from([(b"one".to_vec(), kept(1)), (b"two".to_vec(), kept(2))]);
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        let read = parse(&bad);
        assert!(read.damaged > 0 && read.files.len() == 1, "bit {bit}");
        assert!(said(&read).iter().all(|(name, content)| names.get(name) == Some(content)));
    }
}

fn journal(what: &str) -> (PathBuf, Journal) {
    let folder = std::env::temp_dir().join(format!("stocache-{what}-{}", std::process::id()));
    let _old = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    (folder.clone(), Journal { path: folder.join("index") })
}

#[test]
fn nothing_is_lost_when_the_log_is_written_anew_while_others_append() {
    const EACH: u64 = 300;
    let (folder, log) = journal("tidy");
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|t| {
                let log = &log;
                scope.spawn(move || {
                    for n in 0..EACH {
                        let name = format!("{t}-{n}");
                        log.keep(name.as_bytes(), kept(0)).unwrap();
                        std::thread::sleep(Duration::from_micros(100));
                        log.keep(name.as_bytes(), kept(n)).unwrap();
                        if n % 2 == 1 {
                            log.remove(name.as_bytes()).unwrap();
                        }
                    }
                })
            })
            .collect();
        let mut anew = 0;
        while !writers.iter().all(|writer| writer.is_finished()) {
            anew += u64::from(log.tidy().is_ok());
        }
        assert!(anew > 0, "never written anew: the test tests nothing");
    });
    let read = log.read();
    assert_eq!(read.damaged, 0);
    assert_eq!(read.files.len() as u64, 4 * EACH / 2);
    for (name, found) in &said(&read) {
        let n: u64 = std::str::from_utf8(name).unwrap()[2..].parse().unwrap();
        assert_eq!(*found, kept(n), "{n}");
    }
    log.tidy().unwrap();
    let tidy = log.read();
    assert_eq!((said(&tidy), tidy.damaged, tidy.outdated), (said(&read), 0, 0));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_name_is_found_where_its_record_was_said_to_be() {
    let (folder, log) = journal("offsets");
    let long = vec![b'x'; 5000];
    let at = log.keep(b"one", kept(1)).unwrap();
    let long_at = log.keep(&long, kept(2)).unwrap();
    assert_eq!((at.start, at.end, long_at.end), (0, long_at.start, log.len()));
    let many = (0..5u64).map(|n| (vec![n as u8 + 1], kept(n))).collect();
    let mut logged = log.keep_all(&many).unwrap();
    let gone = log.remove(b"one").unwrap();
    assert_eq!(log.name_at(at.start).unwrap(), b"one", "whoever asks knows better");
    assert_eq!((log.name_at(gone.start), log.name_at(3), log.name_at(1 << 40)), (None, None, None));
    for again in [false, true] {
        assert_eq!(logged.len(), if again { 6 } else { 5 });
        for (name, file) in &logged {
            assert_eq!(log.name_at(file.at).as_ref(), Some(name));
            assert_eq!(log.read().files.get(name), Some(file));
        }
        logged = log.tidy().unwrap();
    }
    assert_eq!(log.name_at(logged[&long].at), Some(long));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_is_in_the_place_of_the_log_is_moved_away_and_not_removed() {
    let (folder, log) = journal("displace");
    std::fs::create_dir_all(log.path.join("somebody's")).unwrap();
    assert_eq!(log.read().damaged, 1);
    assert_eq!(log.at_most(), None);
    log.displace();
    log.keep(b"a", kept(1)).unwrap();
    assert_eq!(log.read().files.len(), 1);
    assert!(folder.join("index.not-ours/somebody's").is_dir());
    assert!(log.at_most() >= Some(1));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn nothing_is_lost_when_who_writes_the_log_anew_takes_longer_than_others_wait() {
    let (folder, log) = journal("slow");
    log.keep(b"a", kept(1)).unwrap();
    log.keep(b"b", kept(2)).unwrap();
    let old = File::options().read(true).write(true).open(&log.path).unwrap();
    rustix::fs::flock(&old, FlockOperation::NonBlockingLockExclusive).unwrap();
    let bytes = rest_of(&old).unwrap();
    log.keep(b"late", kept(3)).unwrap();
    log.remove(b"b").unwrap();
    log.replace(&old, &bytes).unwrap();
    let read = log.read();
    assert_eq!(said(&read).get(&b"a"[..]), Some(&kept(1)));
    assert_eq!(said(&read).get(&b"late"[..]), Some(&kept(3)), "written without the lock");
    assert_eq!((read.files.len(), read.damaged), (3, 0), "a removal may be forgotten");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn who_writes_the_log_anew_and_stands_still_holds_nobody_up() {
    let (folder, log) = journal("stopped");
    log.keep(b"a", kept(1)).unwrap();
    let file = std::fs::File::open(&log.path).unwrap();
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
    log.keep(b"b", kept(2)).unwrap();
    assert!(log.tidy().is_err());
    assert_eq!(log.read().files.len(), 2);
    std::fs::remove_dir_all(folder).unwrap();
}
