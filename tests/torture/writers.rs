//! P2 and P3: dead writers hold nothing, stopped writers lose nothing.

use crate::processes::{Child, being_written, open, request, state, unique};
use crate::{Run, Verdict};
use std::time::Duration;
use stocache::slot::FIRST_LEASE;
use stocache::{Load, Store};

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
        met += u64::from(state(&cache, 0) >= FIRST_LEASE);
        if cache.load(0) == Load::Outside {
            return Err("the slot vanished".into());
        }
        let stored = cache.store(0, &new, true).map_err(|error| error.to_string())?;
        if stored != Store::Stored {
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
        if state(&cache, 0) < FIRST_LEASE {
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
        if (stored, overwritten) != (Store::Lost, Store::Lost) {
            return Err(format!("a stopped writer's slot was taken: {stored:?}, {overwritten:?}"));
        }
        std::thread::sleep(Duration::from_millis(run.count));
        let stored = cache.store(0, &ours, false).map_err(|error| error.to_string())?;
        if stored != Store::Lost {
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
