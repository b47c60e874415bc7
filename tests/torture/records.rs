//! P1, P2 and P16 for records: no torn or foreign record, nothing stuck, never more than the budget.
//!
//! Processes read, load, give up, clear, look, fork, close and open again, each against each other,
//! and are killed at any time. A cleared sample comes back with other bytes.
//!
//! Every record is one word repeated, with the sample's index in its upper half and, in its first
//! word, its length, so that mixtures, foreign records and wrong lengths are all seen.

use crate::processes::{Child, Random, Tally, adopt_orphans, request, unique, wait_for_orphans};
use crate::tear::{FILLS, READS, TORN, kill};
use crate::{Run, Verdict};
use std::io::IoSlice;
use std::time::{Duration, Instant};
use stocache::{Claim, Geometry, Put, RecordStore, RecordsGeometry, Request};

pub const SAMPLES: u64 = 400;
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

/// A request for a store of so many samples.
pub fn store_of(what: &str, limit: u64, recycle: bool, samples: u64) -> Result<Request, String> {
    let geometry = Geometry::Records(
        RecordsGeometry::plan(limit, samples, recycle).map_err(|e| e.to_string())?,
    );
    Ok(Request { geometry, ..request(&unique(what), 1, 1) })
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
        Claim::LoadAndStore => {
            if random.below(16) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(300)));
            }
            if random.below(32) == 0 {
                return store.abandon(i);
            }
            let bytes = record(i as u64, random.next(), 16 + random.below(LONGEST / 8) * 8);
            let (head, tail) = bytes.split_at(random.below(bytes.len() as u64) as usize);
            let parts = [IoSlice::new(head), IoSlice::new(tail)];
            if matches!(store.fill(i, (i % 7) as u16, &parts), Ok(Put::Stored)) {
                tally.add(FILLS);
            }
        }
        Claim::LoadingElsewhere => {
            let _interrupted = store.wait(i, Duration::from_millis(5));
        }
        Claim::Present | Claim::LoadOnly => {}
    }
}

/// What a process may do to a store, at random, for ever.
fn work(wanted: &Request, mut random: Random, tally: &Tally) {
    let open = || match RecordStore::open(wanted) {
        Ok((store, _)) => Some(store),
        Err(error) => {
            // Its last user is just closing it, or somebody makes it.
            eprintln!("opened later: {error}");
            None
        }
    };
    let mut opened = open();
    loop {
        let Some(store) = opened.clone() else {
            opened = open();
            continue;
        };
        match random.below(2048) {
            0..4 => drop(store.clear()),
            4..6 => {
                drop(store);
                drop(opened);
                opened = open();
            }
            6 => {
                let mut theirs = Random::new(random.next());
                let child = Child::fork(|| (0..50).for_each(|_| visit(&store, &mut theirs, tally)));
                if child.wait() != 0 {
                    tally.add(TORN);
                }
            }
            7..12 => {
                let stats = store.stats();
                if stats.filled > SAMPLES || stats.used_bytes > stats.data_bytes {
                    eprintln!("impossible: {stats:?}");
                    tally.add(TORN);
                }
            }
            12..16 => {
                let schema = vec![b's'; 1 + random.below(6) as usize];
                let known = store.intern(&schema).and_then(|number| store.schema(number));
                if known.is_some_and(|known| known != schema) {
                    tally.add(TORN);
                }
            }
            _ => visit(&store, &mut random, tally),
        }
    }
}

/// After all writers died, every sample can be stored or is there, those that are there were counted,
/// and the budget was kept.
fn all_usable(store: &RecordStore) -> Result<(), String> {
    let there = (0..SAMPLES as usize).filter(|&i| store.find(i).is_some()).count() as u64;
    let stats = store.stats();
    if stats.filled != there {
        return Err(format!("{there} samples are there, {} were counted", stats.filled));
    }
    if stats.used_bytes > stats.data_bytes {
        return Err(format!("{} of {} bytes are used", stats.used_bytes, stats.data_bytes));
    }
    for i in 0..SAMPLES as usize {
        match store.begin(i) {
            Claim::LoadAndStore => store.abandon(i),
            Claim::Present => {}
            other => {
                return Err(format!("sample {i} is stuck after all writers died: {other:?}"));
            }
        }
    }
    Ok(())
}

/// What is cleared while somebody writes, who then dies, can all be filled again, without another clear.
fn room_comes_back(store: &RecordStore, random: &mut Random, tally: &Tally) -> Result<(), String> {
    let full = record(0, 0, LONGEST);
    for round in 0..100 {
        let mut theirs = Random::new(random.next());
        let writer = Child::fork(|| {
            loop {
                visit(store, &mut theirs, tally);
            }
        });
        // Where processes are slow to start it would else be stopped before it wrote anything.
        let wrote = tally.get(FILLS);
        let began = Instant::now();
        while tally.get(FILLS) == wrote && began.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(random.below(1_000)));
        writer.stop();
        store.clear().map_err(|error| error.to_string())?;
        drop(writer);
        let fits = |i: &usize| {
            store.begin(*i) == Claim::LoadAndStore
                && matches!(store.fill(*i, 0, &[IoSlice::new(&full)]), Ok(Put::Stored))
        };
        const WITH_HEAD: u64 = LONGEST + 16;
        let filled = (0..SAMPLES as usize).take_while(fits).count() as u64 * WITH_HEAD;
        let room = store.stats().data_bytes;
        if filled + WITH_HEAD <= room {
            return Err(format!("round {round}: {filled} of {room} bytes could be filled again"));
        }
        store.clear().map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn torture(run: &mut Run, what: &str, limit: u64, recycle: bool) -> Verdict {
    let wanted = store_of(what, limit, recycle, SAMPLES)?;
    let wanted = &Request { keep: true, ..wanted };
    let tally = Tally::new();
    let counts = &tally;
    adopt_orphans();
    let verdict = kill(run, &tally, move |random| work(wanted, random, counts)).and_then(|()| {
        wait_for_orphans();
        let (store, _) = RecordStore::open(wanted).map_err(|error| error.to_string())?;
        all_usable(&store)?;
        if !recycle {
            room_comes_back(&store, &mut run.random, counts)?;
        }
        match store.stats().evicted {
            0 if recycle => Err("nothing was ever evicted: the torture tests nothing".into()),
            evicted => Ok(format!("no torn record, no stuck sample, {evicted} evicted")),
        }
    });
    // Kept, so that it outlives those who close it; no longer needed.
    if let Some(path) = RecordStore::open(wanted).ok().and_then(|(s, _)| s.segment().path()) {
        drop(std::fs::remove_file(path));
    }
    verdict
}

/// Regions are recycled all the time.
pub fn recycled(run: &mut Run) -> Verdict {
    torture(run, "records-lru", 1 << 20, true)
}

/// Records stay until somebody clears.
pub fn frozen(run: &mut Run) -> Verdict {
    torture(run, "records", 3 << 20, false)
}
