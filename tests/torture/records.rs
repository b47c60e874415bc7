//! P1, P2 and P16 for records: no torn or foreign record, nothing stuck, never more than the budget.
//!
//! Every record is one word repeated, with the sample's index in its upper half and, in its first
//! word, its length, so that mixtures, foreign records and wrong lengths are all seen.

use crate::processes::{Random, Tally, request, unique};
use crate::tear::{FILLS, READS, TORN, kill};
use crate::{Run, Verdict};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;
use stocache::{Begin, Filled, Plan, RecordStore, Request, Room};

const SAMPLES: u64 = 400;
const LONGEST: u64 = 8 << 10;

fn record(index: u64, salt: u64, bytes: u64) -> Vec<u8> {
    let word = (index << 32 | (salt & 0xffff_ffff)).to_le_bytes();
    let rest = word.iter().copied().cycle().take(bytes as usize - 8);
    bytes.to_le_bytes().into_iter().chain(rest).collect()
}

fn whole(index: u64, bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
    let (len, first) = (words.next().unwrap_or(0), words.next().unwrap_or(u64::MAX));
    len == bytes.len() as u64 && first >> 32 == index && words.all(|word| word == first)
}

fn store(what: &str, limit: u64, recycle: bool) -> Result<Arc<RecordStore>, String> {
    let plan = Plan::Records(Room::plan(limit, SAMPLES, recycle).map_err(|e| e.to_string())?);
    let request = Request { plan, ..request(&unique(what), 1, 1) };
    RecordStore::open(&request).map(|(store, _)| store).map_err(|e| format!("open failed: {e}"))
}

/// Loads a sample as a dataset would: looks, and if it is not there makes it, alone.
fn visit(store: &RecordStore, random: &mut Random, tally: &Tally) {
    let i = random.below(SAMPLES) as usize;
    let copied = store.read(i, |found| {
        let mut bytes = vec![0; found.len];
        // SAFETY: as long as the record.
        unsafe { store.copy_out(found, bytes.as_mut_ptr()) };
        (bytes, found.schema)
    });
    if let Some((bytes, schema)) = copied {
        let right = whole(i as u64, &bytes) && u64::from(schema) == i as u64 % 7;
        return tally.add(if right { READS } else { TORN });
    }
    match store.begin(i) {
        Begin::Mine => {
            if random.below(16) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(300)));
            }
            if random.below(32) == 0 {
                return store.abandon(i);
            }
            let bytes = record(i as u64, random.next(), 16 + random.below(LONGEST / 8) * 8);
            let (head, tail) = bytes.split_at(random.below(bytes.len() as u64) as usize);
            let parts = [IoSlice::new(head), IoSlice::new(tail)];
            if matches!(store.fill(i, (i % 7) as u16, &parts), Ok(Filled::Stored)) {
                tally.add(FILLS);
            }
        }
        Begin::Busy => store.wait(i, Duration::from_millis(5)),
        Begin::Present | Begin::Refused => {}
    }
}

/// After all writers died, every sample can be stored or is there; and the budget was kept.
fn all_usable(store: &RecordStore) -> Result<(), String> {
    for i in 0..SAMPLES as usize {
        if store.find(i).is_none() {
            match store.begin(i) {
                Begin::Mine => store.abandon(i),
                other => {
                    return Err(format!("sample {i} is stuck after all writers died: {other:?}"));
                }
            }
        }
    }
    let stats = store.stats();
    if stats.used_bytes > stats.data_bytes {
        return Err(format!("{} of {} bytes are used", stats.used_bytes, stats.data_bytes));
    }
    Ok(())
}

/// Regions are recycled all the time.
pub fn recycled(run: &mut Run) -> Verdict {
    let store = store("records-lru", 1 << 20, true)?;
    let tally = Tally::new();
    let (shared, counts) = (&store, &tally);
    kill(run, &tally, move |mut random| {
        loop {
            if random.below(4096) == 0 {
                drop(shared.clear());
            }
            visit(shared, &mut random, counts);
        }
    })?;
    all_usable(&store)?;
    let stats = store.stats();
    if stats.evicted == 0 {
        return Err("nothing was ever evicted: the torture tests nothing".into());
    }
    Ok(format!("no torn record, no stuck sample, {} evicted", stats.evicted))
}

/// Records stay. A new store whenever one is full.
pub fn stable(run: &mut Run) -> Verdict {
    const KILLS_PER_STORE: u64 = 20;
    let mut left = run.count;
    let tally = Tally::new();
    let mut round = 0;
    while left > 0 {
        let store = store(&format!("records-{round}"), 3 << 20, false)?;
        let (shared, counts) = (&store, &tally);
        let mut part =
            Run { count: left.min(KILLS_PER_STORE), random: Random::new(run.random.next()) };
        kill(&mut part, &tally, move |mut random| {
            loop {
                visit(shared, &mut random, counts);
            }
        })?;
        all_usable(&store)?;
        left -= part.count;
        round += 1;
    }
    Ok(format!("{} verified records over {round} stores", tally.get(READS)))
}
