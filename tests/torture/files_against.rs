//! Operations on a cache of files against each other: asked for, copied behind, compared, cleared,
//! opened and closed with other limits, forked and killed, by many processes at once.

use crate::files::{Disks, ask, name, path_of, sizes};
use crate::processes::{Child, Random, Tally};
use crate::tear::{READS, TORN};
use crate::{Run, Verdict};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stocache::segment::claim::LEASES;
use stocache::{Check, FileCache, FileOptions, Served, Verdict as Compared};

const PASSED: usize = 2;
const STARTED: usize = 3;
/// Only turns a hang into a message.
const HANG: Duration = Duration::from_secs(120);

/// Reads what was given. A copy that was just given is there, and whole.
fn read(disks: &Disks, served: &Served, i: usize, tally: &Tally) {
    match served {
        Served::Source(_) => tally.add(PASSED),
        Served::Copy(_) => match disks.check(i, path_of(served)) {
            Ok(true) => tally.add(READS),
            wrong => {
                eprintln!("file {i}, just given: {wrong:?}");
                tally.add(TORN);
            }
        },
    }
}

fn open(disks: &Disks, random: &mut Random) -> Arc<FileCache> {
    let some = |random: &mut Random| random.below(2) == 0;
    let limit = disks.total() / (1 + random.below(4));
    let cache = FileCache::open(FileOptions {
        source: disks.root.join("far"),
        cache: disks.root.join("near"),
        limit: Some(limit),
        evict: random.below(4) > 0,
        check: [Check::Once, Check::Always, Check::Never][random.below(3) as usize],
        hashed: some(random),
        files: random.below(2 * disks.count() as u64),
    })
    .expect("an open cache");
    assert_eq!(cache.trouble(), None);
    cache
}

/// One operation of the many; panics if it says what cannot be.
fn operate(disks: &Disks, cache: &mut Arc<FileCache>, random: &mut Random, tally: &Tally) {
    let i = random.below(disks.count() as u64) as usize;
    let text = name(i);
    let file = text.as_bytes();
    match random.below(40) {
        0 => drop(cache.clear()),
        1 => *cache = open(disks, random),
        2 => {
            let (cache, seed) = (cache.clone(), random.next());
            let child = Child::fork(|| {
                let (mut cache, mut random) = (cache, Random::new(seed));
                for _ in 0..3 {
                    let i = random.below(disks.count() as u64) as usize;
                    read(disks, &ask(&cache, i).expect("a path"), i, tally);
                }
                cache = open(disks, &mut random);
                read(disks, &ask(&cache, i).expect("a path"), i, tally);
            });
            let status = child.wait_at_most(HANG).expect("a child that ends");
            assert_eq!(status, 0, "a child of a child");
        }
        3 => {
            let names = cache.names();
            assert!(names.len() <= disks.count(), "{names:?}");
        }
        4 => assert!(cache.stats().files <= disks.count() as u64, "{:?}", cache.stats()),
        5..8 => {
            let found = cache.verify(file).expect("a source that can be read");
            assert_ne!(found, Compared::Differs, "file {i}");
        }
        8..12 => {
            let served = cache.fetch_behind(file).expect("a path");
            read(disks, &served, i, tally);
        }
        12..14 => drop(cache.contains(file)),
        _ => read(disks, &ask(cache, i).expect("a path"), i, tally),
    }
}

/// Every operation against every other one, while processes are killed. `count` is how many die.
pub fn all(run: &mut Run) -> Verdict {
    const PROCESSES: usize = 4;
    let disks = Disks::new("files-against", sizes(48, &mut run.random))?;
    let tally = Tally::new();
    let (shared, counts) = (&disks, &tally);
    let start = |seed: u64| {
        Child::fork(move || {
            let mut random = Random::new(seed);
            let mut cache = open(shared, &mut random);
            loop {
                operate(shared, &mut cache, &mut random, counts);
            }
        })
    };
    let mut children: Vec<Child> = (0..PROCESSES).map(|_| start(run.random.next())).collect();
    let began = Instant::now();
    for round in 0..run.count {
        std::thread::sleep(Duration::from_micros(run.random.below(20_000)));
        let next = run.random.below(PROCESSES as u64) as usize;
        if let Some(ended) = children.iter().position(Child::has_ended) {
            return Err(format!("round {round}: process {ended} ended; what it said is above"));
        }
        if tally.get(TORN) > 0 || began.elapsed() > HANG * 20 {
            break;
        }
        children[next].signal(libc::SIGKILL);
        let dead = std::mem::replace(&mut children[next], start(run.random.next()));
        dead.wait();
    }
    // On until enough was read: a short run only starts processes.
    while tally.get(READS) < 50 && tally.get(TORN) == 0 && began.elapsed() < HANG {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(children);
    let line = format!("{} read, {} from the source", tally.get(READS), tally.get(PASSED));
    if tally.get(TORN) > 0 {
        return Err(format!("a file was not there or not whole; what it was is above; {line}"));
    }
    if tally.get(READS) < 50 {
        return Err(format!("hardly anything was read: the torture tests nothing; {line}"));
    }
    settled(&disks)?;
    Ok(line)
}

/// Nothing is stuck, nothing is left over, and what is there is known.
fn settled(disks: &Disks) -> Result<(), String> {
    let last = disks.open(None, true)?;
    for i in 0..disks.count() {
        match ask(&last, i)? {
            Served::Copy(path) => {
                let served = Served::Copy(path);
                if !disks.check(i, path_of(&served)).map_err(|error| error.to_string())? {
                    return Err(format!("file {i} is not whole"));
                }
            }
            Served::Source(_) => return Err(format!("file {i} is stuck")),
        }
    }
    let stats = last.stats();
    if (stats.files, stats.bytes) != (disks.count() as u64, disks.total()) {
        return Err(format!("{} files of {} bytes, but {stats:?}", disks.count(), disks.total()));
    }
    if last.names().len() != disks.count() || !disks.parts().is_empty() {
        return Err(format!("{} names, left over: {:?}", last.names().len(), disks.parts()));
    }
    Ok(())
}

/// So many processes at once that each copies a file and is given what others copied.
pub fn many(run: &mut Run) -> Verdict {
    let processes = run.count as usize;
    let disks = Disks::new("files-many", vec![100; processes])?;
    let cache = disks.open(None, true)?;
    let tally = Tally::new();
    let (shared, open, counts) = (&disks, &cache, &tally);
    let children: Vec<Child> = (0..processes)
        .map(|i| {
            Child::fork(move || {
                let wait_for = |which: usize| {
                    let began = Instant::now();
                    while counts.get(which) < processes as u64 {
                        assert!(began.elapsed() < HANG, "the others do not come");
                        std::thread::sleep(Duration::from_millis(5));
                    }
                };
                read(shared, &ask(open, i).expect("a path"), i, counts);
                counts.add(STARTED);
                wait_for(STARTED); // all live, and have their lease
                for other in [0, 1, i] {
                    match open.hit(name(other).as_bytes()).map(Served::Copy) {
                        Some(served) => read(shared, &served, other, counts),
                        // Its copier had no lease.
                        None => assert!(!open.contains(name(other).as_bytes()), "{i} of {other}"),
                    }
                }
            })
        })
        .collect();
    for child in children {
        let status = child.wait_at_most(HANG)?;
        if status != 0 {
            return Err(format!("a child ended with status {status:#x}"));
        }
    }
    let (stats, seen) = (cache.stats(), processes.min(usize::from(LEASES) - 1) as u64);
    let line = format!("{processes} processes, {} copies, {} hits", stats.copies, stats.hits);
    if tally.get(TORN) > 0 || stats.copies < seen {
        return Err(format!("{line}; {} passed", tally.get(PASSED)));
    }
    Ok(line)
}

/// Processes that share the folder but not /dev/shm come and go, while others remove what they need
/// the room of. `count` is how many come.
pub fn two_tables(run: &mut Run) -> Verdict {
    const STAYING: u64 = 2;
    let disks = Disks::new("files-two-tables", vec![1000; 40])?;
    let tally = Tally::new();
    let (shared, counts) = (&disks, &tally);
    let limit = Some(disks.total() / 4);
    let here = disks.open(limit, true)?;
    let visit = move |cache: &FileCache, random: &mut Random| {
        let i = random.below(shared.count() as u64) as usize;
        read(shared, &ask(cache, i).expect("a path"), i, counts);
    };
    let staying: Vec<Child> = (0..STAYING)
        .map(|_| {
            let mut random = Random::new(run.random.next());
            Child::fork(move || {
                let cache = shared.open(limit, true).expect("an open cache");
                loop {
                    visit(&cache, &mut random);
                }
            })
        })
        .collect();
    for round in 0..run.count {
        let mut random = Random::new(run.random.next());
        let coming = Child::fork(move || {
            if !with_another_shm() {
                // SAFETY: ends this process here and now.
                unsafe { libc::_exit(3) };
            }
            let cache = shared.open(limit, true).expect("an open cache");
            (0..10).for_each(|_| visit(&cache, &mut random));
            assert_eq!(cache.stats().evicted, 0, "not alone, nothing goes");
        });
        match coming.wait_at_most(HANG)? {
            0 => {}
            status if libc::WEXITSTATUS(status) == 3 => {
                return Ok("skipped: no right to mount, so two tables are not covered".into());
            }
            status => return Err(format!("round {round}: who came ended with {status:#x}")),
        }
        if tally.get(TORN) > 0 || staying.iter().any(Child::has_ended) {
            return Err(format!("round {round}: what was given was not there; see above"));
        }
    }
    drop(staying);
    let evicted = here.stats().evicted;
    drop(here);
    settled(&disks)?;
    let line = format!("{} read, {} from the source", tally.get(READS), tally.get(PASSED));
    if evicted == 0 {
        return Err(format!("nothing was evicted: the torture tests nothing; {line}"));
    }
    Ok(format!("{line}, {evicted} evicted"))
}

/// Gives this process a /dev/shm of its own; false if it may not.
fn with_another_shm() -> bool {
    let (kind, root, shm) = (c"tmpfs".as_ptr(), c"/".as_ptr(), c"/dev/shm".as_ptr());
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: this process alone gets a mount namespace, which ends with it; texts end with NUL.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(std::ptr::null(), root, std::ptr::null(), private, std::ptr::null()) == 0
            && libc::mount(kind, shm, kind, 0, std::ptr::null()) == 0
    }
}
