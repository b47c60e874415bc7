//! P26: a process's locks end with it, whatever its children and its views do.

use crate::processes::{Child, being_written, open, own_shm, request, state, unique};
use crate::records::{SAMPLES, store_of};
use crate::{Run, Verdict};
use std::io::{IoSlice, PipeReader, PipeWriter, Read, Write};
use std::time::Duration;
use stocache::segment::claim::is_claimed;
use stocache::{Backing, Claim, Load, Opened, Put, RecordStore, Request, Stored};

/// Large enough that a write is still going on when its claim is seen.
const BYTES: u64 = 16 << 20;

/// A child that does not end with its parent, but when this is dropped, or with this program.
struct Heir {
    wait: PipeReader,
    end: Option<PipeWriter>,
}

impl Heir {
    fn new() -> Result<Self, String> {
        let (wait, end) = std::io::pipe().map_err(text)?;
        Ok(Self { wait, end: Some(end) })
    }

    /// Forks a child that runs `work` when this is dropped elsewhere; returns when it runs.
    fn fork(&mut self, work: impl FnOnce()) {
        let (mut runs, mut tell) = std::io::pipe().expect("a pipe");
        // SAFETY: the harness has one thread where it forks.
        match unsafe { libc::fork() } {
            -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
            0 => {
                self.end = None;
                tell.write_all(&[0]).expect("a pipe");
                let _end = self.wait.read(&mut [0]);
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_ok();
                // SAFETY: ends this process here and now.
                unsafe { libc::_exit(if done { 0 } else { 101 }) }
            }
            _ => runs.read_exact(&mut [0]).expect("the child runs"),
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A main process dies while it writes a slot, loads a sample, or holds a lock, and its forked worker
/// lives on: the next one to ask gets the slot, the sample and the lock at once.
pub fn orphaned(run: &mut Run) -> Verdict {
    own_shm();
    let mut met = [0; 3];
    for round in 0..run.count {
        let fail = |what: String| format!("round {round}: {what}");
        met[0] += u64::from(orphaned_slot().map_err(fail)?);
        orphaned_sample().map_err(fail)?;
        met[1] += 1;
        met[2] += u64::from(orphaned_lock(&mut run.random).map_err(fail)?);
    }
    if met.contains(&0) {
        return Err(format!("not all was met in the middle: {met:?}"));
    }
    Ok(format!("slots, samples and locks of the dead taken over: {met:?} of {}", run.count))
}

/// Whether the main process died in the middle of its write.
fn orphaned_slot() -> Result<bool, String> {
    let wanted = request(&unique("orphaned-slot"), 2, BYTES);
    let mut heir = Heir::new()?;
    let (forked, mut tell) = std::io::pipe().map_err(text)?;
    let (mut seen, mut go) = std::io::pipe().map_err(text)?;
    let main = Child::fork(|| {
        let (mine, _) = open(&wanted).expect("a cache");
        mine.store(1, &vec![1; BYTES as usize], true).expect("a store");
        heir.fork(|| assert_eq!(mine.load(9), Load::Outside));
        tell.write_all(&[0]).expect("a pipe");
        seen.read_exact(&mut [0]).expect("a pipe");
        drop(mine.store(0, &vec![1; BYTES as usize], true));
    });
    // Not before: a child would inherit it, and have no mapping of its own.
    told(forked)?;
    let (cache, _) = open(&wanted)?;
    go.write_all(&[0]).map_err(text)?;
    let writing = being_written(&cache, 0)?;
    main.signal(libc::SIGKILL);
    main.wait();
    let met = writing && matches!(cache.load(0), Load::Empty);
    match cache.store(0, &vec![2; BYTES as usize], true).map_err(text)? {
        Stored::Done => Ok(met),
        other => Err(format!("the slot of a dead main process is not taken over: {other:?}")),
    }
}

fn told(mut pipe: PipeReader) -> Result<(), String> {
    pipe.read_exact(&mut [0]).map_err(|_| "the main process ended early".into())
}

fn orphaned_sample() -> Result<(), String> {
    let wanted = store_of("orphaned-sample", 1 << 20, false, SAMPLES)?;
    let mut heir = Heir::new()?;
    let (has_begun, mut tell) = std::io::pipe().map_err(text)?;
    let main = Child::fork(|| {
        let (mine, _) = RecordStore::open(&wanted).expect("a store");
        assert_eq!(mine.begin(0), Claim::LoadAndStore);
        heir.fork(|| assert_eq!(mine.find(0), None));
        assert_eq!(mine.begin(1), Claim::LoadAndStore);
        tell.write_all(&[0]).expect("a pipe");
        std::thread::sleep(Duration::from_secs(600));
    });
    told(has_begun)?;
    let (store, _) = RecordStore::open(&wanted).map_err(text)?;
    if [0, 1].map(|i| store.begin(i)) != [Claim::LoadingElsewhere; 2] {
        return Err("the samples of a living process were taken".into());
    }
    main.signal(libc::SIGKILL);
    main.wait();
    match [0, 1].map(|i| store.begin(i)) {
        [Claim::LoadAndStore, Claim::LoadAndStore] => Ok(()),
        other => Err(format!("the samples of a dead main process are not taken over: {other:?}")),
    }
}

/// Whether the main process died with the lock of the regions in its hands.
fn orphaned_lock(random: &mut crate::processes::Random) -> Result<bool, String> {
    let wanted = store_of("orphaned-lock", 1 << 20, true, SAMPLES)?;
    let mut heir = Heir::new()?;
    let (forked, mut tell) = std::io::pipe().map_err(text)?;
    let bytes = vec![7; 4096];
    let parts = [IoSlice::new(&bytes)];
    let main = Child::fork(|| {
        let (mine, _) = RecordStore::open(&wanted).expect("a store");
        assert_eq!(mine.begin(0), Claim::LoadAndStore);
        heir.fork(|| assert_eq!(mine.find(0), None));
        tell.write_all(&[0]).expect("a pipe");
        for i in (1..400).cycle() {
            if mine.begin(i) == Claim::LoadAndStore {
                drop(mine.fill(i, 0, &parts));
            }
        }
    });
    told(forked)?;
    let (store, _) = RecordStore::open(&wanted).map_err(text)?;
    let lock = || is_claimed(state(store.segment(), 400));
    // Until it is seen with the lock; now and then anywhere.
    let began = std::time::Instant::now();
    while random.below(1 << 20) != 0 && !lock() {
        if began.elapsed() > Duration::from_secs(60) {
            return Err("nobody takes the lock of the regions".into());
        }
    }
    main.signal(libc::SIGKILL);
    main.wait();
    let met = lock();
    // More than one region holds, so that the lock is needed.
    for i in 1..200 {
        if store.begin(i) == Claim::LoadAndStore {
            match store.fill(i, 0, &parts).map_err(text)? {
                Put::Stored => {}
                other => {
                    return Err(format!("a lock of the dead drops what others store: {other:?}"));
                }
            }
        }
    }
    Ok(met)
}

/// A process that forked and died is gone: its child can be the last, and removes the name.
pub fn parent_first(run: &mut Run) -> Verdict {
    own_shm();
    for round in 0..run.count {
        let wanted = request(&unique("parent-first"), 8, 4096);
        let mut heir = Heir::new()?;
        let (forked, mut tell) = std::io::pipe().map_err(text)?;
        let (mut done, mut tell_end) = std::io::pipe().map_err(text)?;
        let parent = Child::fork(|| {
            let (mine, _) = open(&wanted).expect("a cache");
            mine.store(0, &[1; 4096], false).expect("a store");
            let path = mine.segment().path().expect("a name");
            let mut held = Some(mine);
            heir.fork(|| {
                let mine = held.take().expect("the cache");
                let stored = mine.store(1, &[2; 4096], false).expect("a store");
                let named = path.exists();
                // The parent has an object of its own: the child's ends with the child.
                drop(mine);
                let gone = !path.exists();
                let right = stored == Stored::Done && named && gone;
                tell_end.write_all(&[u8::from(right)]).expect("a pipe");
            });
            tell.write_all(&[0]).expect("a pipe");
            std::thread::sleep(Duration::from_secs(600));
        });
        drop(tell_end);
        told(forked)?;
        parent.signal(libc::SIGKILL);
        parent.wait();
        drop(heir);
        let mut right = [0];
        done.read_exact(&mut right).map_err(|_| format!("round {round}: the child died"))?;
        if right != [1] {
            return Err(format!(
                "round {round}: a dead parent keeps the name of its child's cache"
            ));
        }
    }
    Ok(format!("{} children outlived their parents", run.count))
}

/// Views that outlive their cache hold nothing but memory: no lease, no lock, no name.
pub fn kept_views(run: &mut Run) -> Verdict {
    own_shm();
    let wanted = Request { keep: true, ..request(&unique("kept-views"), 8, 64) };
    let mut views = Vec::new();
    for round in 0..run.count {
        let (cache, how) = open(&wanted)?;
        if how != if round == 0 { Opened::Created } else { Opened::Resumed } {
            return Err(format!("round {round}: {how:?}, though nobody has it open"));
        }
        match cache.store(0, &[round as u8; 64], true).map_err(text)? {
            Stored::Done => {}
            other => return Err(format!("round {round}: {other:?}: views hold leases")),
        }
        views.push(cache.segment().mapping().clone());
        let path = cache.segment().path().expect("a name");
        drop(cache);
        if round + 1 == run.count {
            std::fs::remove_file(path).map_err(text)?;
        }
    }
    // And the name goes with the last to close, though others have views.
    for backing in [Backing::Shm, Backing::Memfd] {
        let wanted = Request { backing, ..request(&unique("viewed"), 8, 64) };
        let (opened, mut tell) = std::io::pipe().map_err(text)?;
        let (mut both, mut go) = std::io::pipe().map_err(text)?;
        let (closed, mut tell_again) = std::io::pipe().map_err(text)?;
        let other = Child::fork(|| {
            let (theirs, _) = open(&wanted).expect("a cache");
            let view = theirs.segment().mapping().clone();
            tell.write_all(&[0]).expect("a pipe");
            both.read_exact(&mut [0]).expect("a pipe");
            drop(theirs);
            tell_again.write_all(&[0]).expect("a pipe");
            std::thread::sleep(Duration::from_secs(600));
            drop(view);
        });
        told(opened)?;
        let (cache, _) = open(&wanted)?;
        go.write_all(&[0]).map_err(text)?;
        told(closed)?;
        let path = cache.segment().path();
        views.push(cache.segment().mapping().clone());
        drop(cache);
        let named = path.is_some_and(|path| path.exists());
        drop(other);
        if named {
            return Err("a view keeps the name".into());
        }
    }
    Ok(format!("{} views held nothing but memory", views.len()))
}
