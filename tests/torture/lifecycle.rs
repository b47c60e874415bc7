//! P4, P5, P10 and P22: names come and go, live segments stay, forks work, a lost name is no loss.

use crate::processes::{Child, Random, Tally, open, own_shm, request, unique};
use crate::{Run, Verdict};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stocache::{Backing, Cache, Join, Load, Opened, Request, Stored};

const CYCLES: usize = 0;
const REMOVED: usize = 1;
const FAILED: usize = 2;

/// Whether the cache's name still leads to its own segment.
fn named(cache: &Cache) -> bool {
    let path = cache.segment().path().expect("a file in /dev/shm");
    let fd = cache.segment().location().fd;
    let ours = std::fs::metadata(format!("/proc/self/fd/{fd}")).map(|m| m.ino());
    matches!((std::fs::metadata(path), ours), (Ok(named), Ok(ours)) if named.ino() == ours)
}

/// Attach and detach under kills: while one process is attached, the name never goes; when all
/// are dead, at most the one object per name is left, and `remove_leftovers` does so.
pub fn cycles(run: &mut Run) -> Verdict {
    const CHILDREN: usize = 4;
    own_shm();
    let names: Vec<String> = (0..2).map(|i| format!("{}-{i}", unique("cycles"))).collect();
    let tally = Tally::new();
    let work = |mut random: Random| {
        loop {
            let name = &names[random.below(2) as usize];
            let Ok((cache, _)) = Cache::open(&request(name, 8, 4096)) else {
                tally.add(FAILED);
                continue;
            };
            for _ in 0..random.below(4) {
                if !named(&cache) {
                    tally.add(REMOVED);
                }
            }
            drop(cache);
            tally.add(CYCLES);
        }
    };
    let spawn = |random: &mut Random| {
        let theirs = Random::new(random.next());
        Child::fork(move || work(theirs))
    };
    let mut children: Vec<Child> = (0..CHILDREN).map(|_| spawn(&mut run.random)).collect();
    let mut killed = 0;
    while tally.get(CYCLES) < run.count && tally.get(REMOVED) + tally.get(FAILED) == 0 {
        std::thread::sleep(Duration::from_micros(run.random.below(20_000)));
        let victim = run.random.below(CHILDREN as u64) as usize;
        drop(std::mem::replace(&mut children[victim], spawn(&mut run.random)));
        killed += 1;
    }
    drop(children);
    let left = || left(&unique("cycles")).len();
    let leftovers = left();
    stocache::remove_leftovers();
    let line = format!("{} cycles, {killed} kills, {leftovers} leftovers", tally.get(CYCLES));
    match (tally.get(REMOVED), tally.get(FAILED)) {
        _ if leftovers > names.len() => Err(format!("more than one leftover per name: {line}")),
        _ if left() > 0 => Err(format!("{} leftovers survived: {line}", left())),
        (0, 0) => Ok(line),
        (removed, failed) => {
            Err(format!("{removed} live segments lost their name, {failed} opens failed: {line}"))
        }
    }
}

/// The files in /dev/shm whose names contain `mine`.
fn left(mine: &str) -> Vec<PathBuf> {
    let shm = std::fs::read_dir("/dev/shm").expect("/dev/shm");
    shm.flatten()
        .filter(|entry| entry.file_name().to_string_lossy().contains(mine))
        .map(|entry| entry.path())
        .collect()
}

/// A name goes with the last process that detaches. If all were killed, one object is left at most,
/// and the next cache of any name removes it; of a memfd nothing is left.
pub fn leftovers(run: &mut Run) -> Verdict {
    own_shm();
    let mine = unique("leftovers");
    let seen = (0..run.count).try_fold(0, |seen, round| {
        end_in_order(&format!("{mine}-{round}"))
            .and_then(|()| end_by_kills(&format!("{mine}-{round}")))
            .map(|left| seen + left)
            .map_err(|what| format!("round {round}: {what}"))
    });
    // A broken build must not leave anything behind either.
    left(&mine).iter().for_each(|path| drop(std::fs::remove_file(path)));
    match seen? {
        0 => Err("never was anything left to be removed: the test tests nothing".into()),
        seen => Ok(format!("{} caches ended in order, {seen} left something", run.count)),
    }
}

fn end_in_order(name: &str) -> Result<(), String> {
    let wanted = request(name, 8, 4096);
    let (cache, _) = open(&wanted)?;
    let child = Child::fork(|| drop(open(&wanted).expect("a cache in a child")));
    if child.wait() != 0 || !named(&cache) {
        return Err("the first to detach took the name along".into());
    }
    drop(cache);
    match left(name).len() {
        0 => Ok(()),
        _ => Err("the name stayed when the last process had detached".into()),
    }
}

/// How many objects were there after the kills.
fn end_by_kills(name: &str) -> Result<usize, String> {
    const CHILDREN: usize = 3;
    let mut seen = 0;
    for (backing, most) in [(Backing::Memfd, 0), (Backing::Shm, 1)] {
        let wanted = Request { backing, ..request(name, 8, 4096) };
        let attach = |mut tell: PipeWriter| {
            let (_cache, _) = open(&wanted).expect("a cache in a child");
            tell.write_all(&[0]).expect("a pipe");
            loop {
                std::thread::park(); // until it is killed
            }
        };
        let (mut children, mut attached) = (Vec::new(), Vec::new());
        for _ in 0..CHILDREN {
            let (told, tell) = std::io::pipe().map_err(|error| error.to_string())?;
            children.push(Child::fork(|| attach(tell)));
            attached.push(told);
        }
        for mut told in attached {
            told.read_exact(&mut [0]).map_err(|_| "a child could not attach")?;
        }
        drop(children);
        // Fewer, if another program has swept just now.
        let found = left(name).len();
        if found > most {
            return Err(format!("{found} objects of a killed {backing:?} cache"));
        }
        seen += found;
    }
    drop(open(&request(&format!("next-{name}"), 4, 64))?);
    match left(name).len() {
        0 => Ok(seen),
        _ => Err("the next cache did not remove what the killed ones left".into()),
    }
}

/// A process removes the name of its own cache and goes on. Another one, told where the segment is
/// open, joins it, and both see what the other one stores.
pub fn name_removed(run: &mut Run) -> Verdict {
    let wanted = request(&unique("unnamed"), 8, 4096);
    for round in 0..run.count {
        let fail = |error: std::io::Error| format!("round {round}: the owner is gone: {error}");
        let (mut told, tell) = std::io::pipe().map_err(fail)?;
        let (wait, mut go) = std::io::pipe().map_err(fail)?;
        let wanted = &wanted;
        let owner = Child::fork(move || own_without_a_name(wanted, tell, wait));
        let (mut instance, mut pid, mut fd, mut answer) = ([0; 16], [0; 4], [0; 4], [0]);
        for part in [&mut instance[..], &mut pid, &mut fd] {
            told.read_exact(part).map_err(fail)?;
        }
        let join = Some(Join {
            instance: u128::from_ne_bytes(instance),
            pid: u32::from_ne_bytes(pid),
            fd: i32::from_ne_bytes(fd),
        });
        let (cache, how) = open(&Request { join, ..wanted.clone() })?;
        if how != Opened::Joined || !holds(&cache, 0) || !keeps(&cache, 1) {
            return Err(format!("round {round}: {how:?} instead of joining what lost its name"));
        }
        go.write_all(&[0]).map_err(fail)?;
        told.read_exact(&mut answer).map_err(fail)?;
        if answer[0] == 0 || !holds(&cache, 2) {
            return Err(format!("round {round}: what one stored the other one does not have"));
        }
        owner.wait();
    }
    Ok(format!("{} caches worked on without a name", run.count))
}

fn own_without_a_name(wanted: &Request, mut tell: PipeWriter, mut wait: PipeReader) {
    let (cache, _) = open(wanted).expect("a cache");
    assert!(keeps(&cache, 0));
    std::fs::remove_file(cache.segment().path().expect("a name")).expect("it can be removed");
    let here = cache.segment().location();
    for part in [&here.instance.to_ne_bytes()[..], &here.pid.to_ne_bytes(), &here.fd.to_ne_bytes()]
    {
        tell.write_all(part).expect("a pipe");
    }
    wait.read_exact(&mut [0]).expect("the other one");
    let works = holds(&cache, 0) && holds(&cache, 1) && keeps(&cache, 2);
    tell.write_all(&[u8::from(works)]).expect("a pipe");
}

fn keeps(cache: &Cache, i: i64) -> bool {
    cache.store(i, &[i as u8 + 1; 4096], false).is_ok_and(|stored| stored == Stored::Done)
        && holds(cache, i)
}

fn holds(cache: &Cache, i: i64) -> bool {
    let Load::Hit(at) = cache.load(i) else { return false };
    let start = cache.segment().mapping().at(at, 4096);
    // SAFETY: a set slot that nobody overwrites: its bytes do not change.
    let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), 4096) };
    bytes.iter().all(|&byte| byte == i as u8 + 1)
}

/// A parent that forks and detaches at once must not take the name from its child.
pub fn fork_then_detach(run: &mut Run) -> Verdict {
    for round in 0..run.count {
        let (cache, _) = open(&request(&unique("detach"), 8, 4096))?;
        let (mut go, mut tell) = ([0; 2], [0; 2]);
        // SAFETY: two pipes, closed at the end of the round.
        unsafe { (libc::pipe(go.as_mut_ptr()), libc::pipe(tell.as_mut_ptr())) };
        let shared = &cache;
        let child = Child::fork(|| {
            let mut byte = [0u8];
            // SAFETY: waits for the parent to have detached, then answers.
            unsafe { libc::read(go[0], byte.as_mut_ptr().cast(), 1) };
            let alive = named(shared)
                && shared.store(3, &[7; 4096], false).is_ok_and(|stored| stored == Stored::Done)
                && matches!(shared.load(3), Load::Hit(_));
            byte[0] = u8::from(alive);
            // SAFETY: one byte to an open pipe.
            unsafe { libc::write(tell[1], byte.as_ptr().cast(), 1) };
        });
        drop(cache);
        let mut byte = [0u8];
        // SAFETY: as above, from the other side; then the four descriptors are closed.
        unsafe {
            libc::write(go[1], byte.as_ptr().cast(), 1);
            libc::read(tell[0], byte.as_mut_ptr().cast(), 1);
            for fd in go.into_iter().chain(tell) {
                libc::close(fd);
            }
        }
        child.wait();
        if byte[0] == 0 {
            return Err(format!(
                "round {round}: the child lost its segment when its parent detached"
            ));
        }
        stocache::remove_leftovers();
    }
    Ok(format!("{} children kept their segment", run.count))
}

/// Forks while threads open, load and store: every child must work.
pub fn forks_while_threads_run(run: &mut Run) -> Verdict {
    let (cache, _) = open(&request(&unique("forks"), 64, 4096))?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for t in 0..3u64 {
            let (cache, stop) = (&cache, &stop);
            scope.spawn(move || {
                let mut random = Random::new(t + 1);
                while !stop.load(Ordering::Relaxed) {
                    let i = random.below(64) as i64;
                    cache.load(i);
                    drop(cache.store(i, &[i as u8; 4096], true));
                    drop(Cache::open(&request(&format!("{}-{t}", unique("side")), 4, 64)));
                }
            });
        }
        let outcome = (0..run.count).try_for_each(|round| {
            let (shared, random) = (&cache, run.random.next());
            let child = Child::fork(move || {
                let i = (random % 64) as i64;
                let stored = shared.store(i, &[i as u8; 4096], true).expect("a store in a child");
                assert!(matches!(stored, Stored::Done | Stored::Lost));
                let (side, _) = Cache::open(&request(&format!("{}-child", unique("side")), 4, 64))
                    .expect("an open in a child");
                side.store(0, &[1; 64], true).expect("a store in a child's own cache");
            });
            let status = child.wait_at_most(Duration::from_secs(60))?;
            if status == 0 {
                Ok(())
            } else {
                Err(format!("round {round}: a child ended with status {status:#x}"))
            }
        });
        stop.store(true, Ordering::Relaxed);
        outcome
    })?;
    // Children end without destructors, as DataLoader workers do: what they opened is a leftover.
    stocache::remove_leftovers();
    Ok(format!("{} children worked", run.count))
}

/// Forks while another thread opens the first cache of its process: every child must work. This
/// process opens none, so each round is a first use.
pub fn fork_during_first_use(run: &mut Run) -> Verdict {
    const FORKS: u64 = 3;
    let name = unique("first");
    let use_one = |who: &str| {
        let (cache, _) =
            Cache::open(&request(&format!("{name}-{who}"), 4, 64)).expect("an open in a child");
        cache.store(0, &[1; 64], true).expect("a store in a child");
    };
    for round in 0..run.count {
        let wait = run.random.below(40_000);
        let world = Child::fork(|| {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..5).for_each(|_| use_one("thread")));
                (0..wait).for_each(|_| std::hint::spin_loop());
                for _ in 0..FORKS {
                    let child = Child::fork(|| use_one("child"));
                    let status = child.wait_at_most(Duration::from_secs(10));
                    if status != Ok(0) {
                        eprintln!("round {round}: {status:?}");
                        // SAFETY: ends this process here and now, whatever its thread does.
                        unsafe { libc::_exit(1) };
                    }
                }
            });
        });
        if world.wait() != 0 {
            return Err(format!(
                "round {round}: a child forked during the first use hangs or died"
            ));
        }
    }
    stocache::remove_leftovers();
    Ok(format!("{} first uses", run.count))
}

/// Ranks that make a memfd of one name at the same moment share one.
pub fn memfd_race(run: &mut Run) -> Verdict {
    race(run, |name| Request { backing: Backing::Memfd, ..request(name, 8, 4096) })
}

/// The same with a file in a /dev/shm that has room for one: what one of them sets aside before its file
/// has a name does not keep the others from joining. Needs a small tmpfs, as full.rs does.
pub fn shm_race(run: &mut Run) -> Verdict {
    const BYTES: u64 = 4;
    let mount = stocache::sys::limits::mount(std::path::Path::new("/dev/shm"))
        .map_err(|error| error.to_string())?;
    let per_sample = BYTES + 2; // and its state
    let samples = (mount.free - (1 << 20)) / per_sample;
    race(run, |name| request(name, samples, BYTES))
}

fn race(run: &mut Run, wanted: impl Fn(&str) -> Request) -> Verdict {
    const RANKS: usize = 4;
    for round in 0..run.count {
        let wanted = wanted(&format!("{}-{round}", unique("race")));
        let (mut told, mut tell) = std::io::pipe().map_err(|error| error.to_string())?;
        let ranks: Vec<Child> = (0..RANKS)
            .map(|_| {
                Child::fork(|| {
                    let opened = open(&wanted);
                    let instance = match &opened {
                        Ok((cache, _)) => cache.segment().header().instance,
                        Err(_) => 0,
                    };
                    tell.write_all(&instance.to_ne_bytes()).expect("a pipe");
                    loop {
                        std::thread::park(); // until it is killed
                    }
                })
            })
            .collect();
        let mut instances = std::collections::BTreeSet::new();
        for _ in &ranks {
            let mut instance = [0; 16];
            told.read_exact(&mut instance).map_err(|error| error.to_string())?;
            instances.insert(instance);
        }
        // What they leave would take room in the next round, until the first of them removed it.
        drop(ranks);
        stocache::remove_leftovers();
        if instances.contains(&[0; 16]) {
            return Err(format!("round {round}: an error where others have the cache"));
        }
        if instances.len() != 1 {
            return Err(format!("round {round}: {} caches of one name", instances.len()));
        }
    }
    Ok(format!("{} times, {RANKS} processes had one cache", run.count))
}
