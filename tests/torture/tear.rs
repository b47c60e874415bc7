//! P1: no reader sees torn or foreign bytes, however many writers are killed.
//!
//! Every value is one word repeated, with the slot's index in its upper half, so a mixture of two
//! writes and the value of another slot are both seen.

use crate::processes::{Child, Random, Tally, open, request, unique};
use crate::{Run, Verdict};
use std::time::Duration;
use stocache::{Cache, Load, Stored};

pub const READS: usize = 0;
pub const TORN: usize = 1;
pub const FILLS: usize = 2;
const CHILDREN: usize = 4;
const READS_PER_KILL: u64 = 100;

fn value(index: u64, salt: u64, bytes: usize) -> Vec<u8> {
    let word = (index << 32 | (salt & 0xffff_ffff)).to_le_bytes();
    word.iter().copied().cycle().take(bytes).collect()
}

/// Whether these are the bytes of one value of slot `index`.
fn whole(index: u64, bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
    let first = words.next().unwrap();
    first >> 32 == index && words.all(|word| word == first)
}

/// Kills children at random until `run.count` have died, then asks the tally.
pub fn kill(run: &mut Run, tally: &Tally, work: impl Fn(Random) + Copy) -> Result<(), String> {
    let spawn = |random: &mut Random| {
        let theirs = Random::new(random.next());
        Child::fork(move || work(theirs))
    };
    let mut children: Vec<Child> = (0..CHILDREN).map(|_| spawn(&mut run.random)).collect();
    let before = tally.get(READS);
    let mut killed = 0;
    // On a busy machine the children need time to get anything done, so reads keep step with kills.
    while killed < run.count && tally.get(TORN) == 0 {
        if tally.get(READS) - before < killed * READS_PER_KILL {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        }
        std::thread::sleep(Duration::from_micros(run.random.below(400)));
        let victim = run.random.below(CHILDREN as u64) as usize;
        if children[victim].has_ended() {
            return Err("a child panicked; what it said is above".into());
        }
        drop(std::mem::replace(&mut children[victim], spawn(&mut run.random)));
        killed += 1;
    }
    drop(children);
    let line =
        format!("{killed} kills, {} verified reads, {} fills", tally.get(READS), tally.get(FILLS));
    if tally.get(TORN) > 0 {
        return Err(format!("{} torn or foreign reads after {line}", tally.get(TORN)));
    }
    println!("{line}");
    Ok(())
}

/// No slot may stay in the hands of the dead: each can be stored, or holds a whole value.
fn all_usable(cache: &Cache, slots: u64, bytes: usize) -> Result<(), String> {
    for i in 0..slots {
        let stored =
            cache.store(i as i64, &value(i, 1, bytes), true).map_err(|error| error.to_string())?;
        if stored != Stored::Done {
            return Err(format!("slot {i} is stuck after all writers died: {stored:?}"));
        }
    }
    Ok(())
}

/// Copies, while slots are overwritten and cleared.
pub fn copies(run: &mut Run) -> Verdict {
    const SLOTS: u64 = 16;
    const BYTES: usize = 16 << 10;
    let (cache, _) = open(&request(&unique("copies"), SLOTS, BYTES as u64))?;
    let tally = Tally::new();
    let (shared, counts) = (&cache, &tally);
    kill(run, &tally, move |mut random| {
        let mut row = vec![0u8; BYTES];
        loop {
            let i = random.below(SLOTS);
            match random.below(64) {
                0 => drop(shared.clear()),
                1..8 => {
                    let done = shared.store(i as i64, &value(i, random.next(), BYTES), true);
                    if done.is_ok_and(|done| done == Stored::Done) {
                        counts.add(FILLS);
                    }
                }
                _ => {
                    let mut found = [false];
                    // SAFETY: `row` is one slot long.
                    let loaded =
                        unsafe { shared.load_many(&[i as i64], row.as_mut_ptr(), &mut found, 1) };
                    if loaded.is_ok() && found[0] {
                        counts.add(if whole(i, &row) { READS } else { TORN });
                    }
                }
            }
        }
    })?;
    all_usable(&cache, SLOTS, BYTES)?;
    Ok("no torn copy, no stuck slot".into())
}

/// Views, while slots are filled for the first time. A new cache whenever one is full.
pub fn views(run: &mut Run) -> Verdict {
    const SLOTS: u64 = 256;
    const BYTES: usize = 128 << 10;
    const KILLS_PER_CACHE: u64 = 20;
    let mut left = run.count;
    let tally = Tally::new();
    let mut round = 0;
    while left > 0 {
        let (cache, _) =
            open(&request(&format!("{}-{round}", unique("views")), SLOTS, BYTES as u64))?;
        let (shared, counts) = (&cache, &tally);
        let mut part =
            Run { count: left.min(KILLS_PER_CACHE), random: Random::new(run.random.next()) };
        kill(&mut part, &tally, move |mut random| {
            loop {
                let i = random.below(SLOTS);
                match shared.load(i as i64) {
                    Load::Hit(at) => {
                        let start = shared.segment().mapping().at(at, BYTES);
                        // SAFETY: a set slot that nobody overwrites: its bytes do not change.
                        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), BYTES) };
                        counts.add(if whole(i, bytes) { READS } else { TORN });
                    }
                    // Rarely, so that caches stay unfilled long enough for kills to meet writers.
                    _ if random.below(8) == 0 => {
                        let done = shared.store(i as i64, &value(i, random.next(), BYTES), false);
                        if done.is_ok_and(|done| done == Stored::Done) {
                            counts.add(FILLS);
                        }
                    }
                    _ => {}
                }
            }
        })?;
        all_usable(&cache, SLOTS, BYTES)?;
        left -= part.count;
        round += 1;
    }
    Ok(format!("{} verified views over {round} caches", tally.get(READS)))
}
