//! P2 and P3: dead writers hold nothing, stopped writers lose nothing.

use crate::processes::{Child, Tally, being_written, open, request, state, unique};
use crate::{Run, Verdict};
use std::io::{Read, Write};
use std::time::Duration;
use stocache::segment::claim::{LEASES, is_claimed};
use stocache::{Load, Stored};

/// Large enough that a write is still going on when its claim is seen.
const BYTES: u64 = 16 << 20;

/// A writer is killed while it writes; the next one gets the slot at once.
pub fn takeover(run: &mut Run) -> Verdict {
    let (cache, _) = open(&request(&unique("takeover"), 2, BYTES))?;
    let old = vec![1u8; BYTES as usize];
    let new = vec![2u8; BYTES as usize];
    let mut met = 0;
    for round in 0..run.count {
        let shared = &cache;
        let writer = Child::fork(|| drop(shared.store(0, &old, true)));
        being_written(&cache, 0)?;
        writer.signal(libc::SIGKILL);
        writer.wait();
        // Often it was killed in time; where it had finished, the slot is simply set.
        met += u64::from(is_claimed(state(cache.segment(), 0)));
        if cache.load(0) == Load::Outside {
            return Err("the slot vanished".into());
        }
        let stored = cache.store(0, &new, true).map_err(|error| error.to_string())?;
        if stored != Stored::Done {
            return Err(format!(
                "round {round}: a dead writer's slot is not taken over: {stored:?}"
            ));
        }
        cache.clear().map_err(|error| error.to_string())?;
    }
    if met == 0 {
        return Err("no writer was killed in the middle of a write: nothing was tested".into());
    }
    Ok(format!(
        "{met} of {} writers died in the middle of a write, all slots were taken over",
        run.count
    ))
}

/// A writer is stopped while it writes: nobody waits for it, nobody takes its slot, and its value
/// is whole when it goes on. `count` is how long it stays stopped, in milliseconds.
pub fn stopped(run: &mut Run) -> Verdict {
    let (cache, _) = open(&request(&unique("stopped"), 2, BYTES))?;
    let theirs = vec![1u8; BYTES as usize];
    let ours = vec![2u8; BYTES as usize];
    // A stop may come too late to meet the write; then try again.
    for _ in 0..1000 {
        let shared = &cache;
        let writer = Child::fork(|| drop(shared.store(0, &theirs, true)));
        if being_written(&cache, 0)? {
            writer.stop();
        }
        if !is_claimed(state(cache.segment(), 0)) {
            drop(writer);
            cache.clear().map_err(|error| error.to_string())?;
            continue;
        }
        // None of these may wait for the writer; a hang here is ended by the test's own limit.
        if cache.load(0) != Load::Empty {
            return Err("a slot that is being written was readable".into());
        }
        let stored = cache.store(0, &ours, false).map_err(|error| error.to_string())?;
        let overwritten = cache.store(0, &ours, true).map_err(|error| error.to_string())?;
        if (stored, overwritten) != (Stored::Lost, Stored::Lost) {
            return Err(format!("a stopped writer's slot was taken: {stored:?}, {overwritten:?}"));
        }
        std::thread::sleep(Duration::from_millis(run.count));
        let stored = cache.store(0, &ours, false).map_err(|error| error.to_string())?;
        if stored != Stored::Lost {
            return Err(format!("time was taken for death: {stored:?}"));
        }
        writer.signal(libc::SIGCONT);
        writer.wait();
        let mut row = vec![0u8; BYTES as usize];
        let mut found = [false];
        // SAFETY: `row` is one slot long.
        unsafe { cache.load_many(&[0], row.as_mut_ptr(), &mut found, 1) }
            .map_err(|error| error.to_string())?;
        return match found[0] && row == theirs {
            true => Ok(format!("stopped for {} ms, not stolen, whole afterwards", run.count)),
            false => Err("the stopped writer's value was lost or is not whole".into()),
        };
    }
    Err("no writer was stopped in the middle of a write: nothing was tested".into())
}

/// So many processes write to one cache, and all of them live.
pub fn many(run: &mut Run) -> Verdict {
    const STORED: usize = 0;
    let (cache, _) = open(&request(&unique("many"), run.count, 64))?;
    let tally = Tally::new();
    let (mut told, mut tell) = std::io::pipe().map_err(|error| error.to_string())?;
    let writers: Vec<Child> = (0..run.count)
        .map(|i| {
            let (cache, tally) = (&cache, &tally);
            let tell = &mut tell;
            Child::fork(move || {
                if matches!(cache.store(i as i64, &[i as u8; 64], false), Ok(Stored::Done)) {
                    tally.add(STORED);
                }
                tell.write_all(&[0]).expect("a pipe");
                loop {
                    std::thread::park(); // until it is killed
                }
            })
        })
        .collect();
    for _ in &writers {
        told.read_exact(&mut [0]).map_err(|error| error.to_string())?;
    }
    let stored = tally.get(STORED);
    drop(writers);
    if stored != run.count.min(u64::from(LEASES)) {
        return Err(format!("only {stored} of {} processes could store", run.count));
    }
    // And when they are dead, their leases are free again.
    cache.clear().map_err(|error| error.to_string())?;
    match cache.store(0, &[1; 64], true) {
        Ok(Stored::Done) => Ok(format!("{stored} processes stored while all of them lived")),
        other => Err(format!("after all writers died: {other:?}")),
    }
}
