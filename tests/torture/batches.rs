//! P1 and P2 for batches: rows are those of their samples, whoever clears, evicts, forks and dies while
//! they are gathered.
//!
//! Processes acquire what is missing of a batch, store some of it and give the rest to the batch
//! themselves; they begin several batches before they finish one, leave some unfinished, clear, fork with
//! batches under way, and are killed at any time. Batches are large enough to be copied by helpers.
//!
//! A sample is its number and a tensor of one word repeated, with that number in its upper half.

use crate::processes::{Child, Random, Tally, adopt_orphans, wait_for_orphans};
use crate::records::store_of;
use crate::tear::{FILLS, READS, TORN, kill};
use crate::{Run, Verdict};
use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;
use stocache::batches::{Batch, Gathered, Pieces, Row};
use stocache::records::schema::Schema;
use stocache::tiers::{Acquiring, Levels};
use stocache::{Claim, Put, RecordStore};

const SAMPLES: u64 = 60;
const WORDS: usize = 1 << 10;
/// A tuple of an int and a tensor of int64 with one dimension.
const SCHEMA: [u8; 7] = [1, b'(', 2, b'i', b'T', 4, 1];
/// One word, a number from the next multiple of 8 on, a payload from the next multiple of 16 on.
const PAYLOAD: usize = 16;

fn record(index: usize, salt: u64) -> Vec<u8> {
    let word = (index as u64) << 32 | (salt & 0xffff_ffff);
    let mut bytes = Vec::with_capacity(PAYLOAD + 8 * WORDS);
    bytes.extend((WORDS as u64).to_le_bytes());
    bytes.extend((index as u64).to_le_bytes());
    bytes.extend(std::iter::repeat_n(word.to_le_bytes(), WORDS).flatten());
    bytes
}

/// A batch under way.
struct Begun {
    // Before what it writes to and reads from.
    batch: Batch,
    indices: Vec<i64>,
    numbers: Vec<u64>,
    rows: Vec<u64>,
    given: Vec<Vec<u8>>,
}

impl Begun {
    fn find(store: &Arc<RecordStore>, random: &mut Random) -> Option<Self> {
        let count = 1 + random.below(50) as usize;
        let indices: Vec<i64> = (0..count).map(|_| random.below(SAMPLES) as i64).collect();
        let batch = Batch::find(vec![Levels::new(Arc::clone(store), Vec::new())], &[], &indices)?;
        let (numbers, rows) = (vec![u64::MAX; count], vec![u64::MAX; count * WORDS]);
        Some(Self { batch, indices, numbers, rows, given: Vec::new() })
    }

    /// Lays it out and begins, if a row is there; false if it is no batch, for a record moved.
    fn begin(&mut self, schema: &Arc<Schema>) -> bool {
        if self.batch.absent().len() == self.indices.len() {
            return true;
        }
        if !self.batch.lay_out(Arc::clone(schema)) {
            return false;
        }
        let to = [
            (self.numbers.as_mut_ptr().cast(), 8 * self.numbers.len()),
            (self.rows.as_mut_ptr().cast(), 8 * self.rows.len()),
        ];
        // SAFETY: memory of this object, which nobody looks at before the end of the batch.
        unsafe { self.batch.begin(&to, 3) }.is_ok()
    }

    /// Acquires what is missing. Some of it is stored, some given to the batch, some both.
    fn load(&mut self, levels: &Arc<Levels>, random: &mut Random, tally: &Tally) {
        let missing: Vec<usize> =
            self.batch.absent().iter().map(|&row| self.indices[row as usize] as usize).collect();
        let mut made: HashMap<usize, Vec<u8>> = HashMap::new();
        let mut acquired: Acquiring = levels.acquire(&missing, Duration::from_millis(2));
        for _ in 0..3 {
            let todo = acquired.next_to_load();
            if todo.is_empty() {
                break;
            }
            for index in todo {
                let bytes = record(index, random.next());
                if random.below(40) == 0 {
                    continue; // it is given back with the others
                }
                if random.below(4) > 0 {
                    let (head, tail) = bytes.split_at(random.below(bytes.len() as u64) as usize);
                    let parts = [IoSlice::new(head), IoSlice::new(tail)];
                    if acquired.fill(index, 0, &parts).is_ok_and(|f| f.memory == Put::Stored) {
                        tally.add(FILLS);
                    }
                }
                made.insert(index, bytes);
            }
        }
        drop(acquired);
        for row in self.batch.absent() {
            let index = self.indices[row as usize] as usize;
            let Some(bytes) = made.get(&index).filter(|_| random.below(3) > 0) else { continue };
            self.given.push(bytes.clone());
            let bytes = &self.given[self.given.len() - 1];
            let cut = if random.below(2) == 0 { PAYLOAD } else { bytes.len() };
            let piece = |part: &[u8]| Row { data: part.as_ptr(), len: part.len() };
            let pieces = Pieces(vec![piece(&bytes[..cut]), piece(&bytes[cut..])]);
            // SAFETY: kept as long as the batch.
            unsafe { self.batch.give(row as usize, pieces) };
        }
    }

    fn finish(mut self, schema: &Arc<Schema>, tally: &Tally) {
        if !self.batch.look_again() {
            return tally.add(TORN); // there is one schema
        }
        if self.batch.columns().is_empty() && !self.begin(schema) {
            return; // what was found has moved
        }
        if self.batch.finish() != Gathered::Whole {
            return; // a sample that nobody brought, or one that others cleared
        }
        for (row, &index) in self.indices.iter().enumerate() {
            let words = &self.rows[row * WORDS..][..WORDS];
            let whole = self.numbers[row] == index as u64
                && words[0] >> 32 == index as u64
                && words.iter().all(|&word| word == words[0]);
            tally.add(if whole { READS } else { TORN });
        }
    }
}

fn work(store: &Arc<RecordStore>, schema: &Arc<Schema>, mut random: Random, tally: &Tally) {
    let levels = Levels::new(Arc::clone(store), Vec::new());
    let mut begun: Vec<Begun> = Vec::new();
    loop {
        match random.below(256) {
            0..2 => drop(store.clear()),
            2..4 => begun.clear(),
            4 => {
                // A child goes on with what its parent has begun, and so does the parent.
                let mut theirs = Random::new(random.next());
                let mut inherited = std::mem::take(&mut begun);
                let child = Child::fork(|| {
                    for _ in 0..20 {
                        one_more(store, schema, &levels, &mut inherited, &mut theirs, tally);
                    }
                });
                begun = inherited;
                if child.wait() != 0 {
                    tally.add(TORN);
                }
            }
            _ => one_more(store, schema, &levels, &mut begun, &mut random, tally),
        }
    }
}

/// Begins with a batch, or finishes the oldest.
fn one_more(
    store: &Arc<RecordStore>,
    schema: &Arc<Schema>,
    levels: &Arc<Levels>,
    begun: &mut Vec<Begun>,
    random: &mut Random,
    tally: &Tally,
) {
    if begun.len() < 4 && random.below(2) == 0 {
        let Some(mut next) = Begun::find(store, random) else { return tally.add(TORN) };
        if next.begin(schema) {
            next.load(levels, random, tally);
            begun.push(next);
        }
    } else if !begun.is_empty() {
        begun.remove(0).finish(schema, tally);
    }
}

fn torture(run: &mut Run, what: &str, limit: u64, recycle: bool) -> Verdict {
    let wanted = store_of(what, limit, recycle, SAMPLES)?;
    let (store, _) = RecordStore::open(&wanted).map_err(|error| error.to_string())?;
    let schema = Arc::new(Schema::parse(&SCHEMA).map_err(|error| error.to_string())?);
    let tally = Tally::new();
    let (shared, of, counts) = (&store, &schema, &tally);
    adopt_orphans();
    kill(run, &tally, move |random| work(shared, of, random, counts))?;
    wait_for_orphans();
    for i in 0..SAMPLES as usize {
        match store.begin(i) {
            Claim::LoadAndStore => store.abandon(i),
            Claim::Present => {}
            other => return Err(format!("sample {i} is stuck after all died: {other:?}")),
        }
    }
    match store.stats().evicted {
        0 if recycle => Err("nothing was ever evicted: the torture tests nothing".into()),
        evicted => Ok(format!("no torn row, no stuck sample, {evicted} evicted")),
    }
}

/// Regions are recycled all the time.
pub fn recycled(run: &mut Run) -> Verdict {
    torture(run, "batches-lru", 480 << 10, true)
}

/// Rows stay until somebody clears.
pub fn frozen(run: &mut Run) -> Verdict {
    torture(run, "batches", 2 << 20, false)
}
