//! P1 and P2 for batches: rows are those of their samples, whoever clears, evicts, forks and dies while
//! they are gathered.
//!
//! Processes acquire what is missing of a batch, store some of it and give the rest to the batch
//! themselves; they begin several batches before they finish one, leave some unfinished, clear, fork with
//! batches under way, and are killed at any time. Batches are large enough to be copied by helpers.
//!
//! A sample is its number and a tensor of one word repeated, with that number in its upper half; or, where
//! images are made by a pipeline, an image of one value, from which every row that is made of it follows.

use crate::processes::{Child, Random, Tally, adopt_orphans, wait_for_orphans};
use crate::records::store_of;
use crate::tear::{FILLS, READS, TORN, kill};
use crate::{Run, Verdict};
use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;
use stocache::augment::Pipeline;
use stocache::batches::{Batch, Fused, Gathered, Pieces, Row};
use stocache::records::schema::Schema;
use stocache::tiers::{Acquiring, Levels};
use stocache::{Claim, Put, RecordStore};

const SAMPLES: u64 = 60;
const WORDS: usize = 1 << 10;
/// Of an image, and of what becomes of it.
const SIDE: usize = 52;
const MADE: usize = 32;
/// A part of each image, larger or smaller, mirrored or not, as numbers.
const STEPS: &str = r#"{"steps": [
    {"step": "RandomResizedCrop", "size": [32, 32], "scale": [0.1, 1.0], "ratio": [0.75, 1.3333],
     "filter": "bilinear", "antialias": true},
    {"step": "RandomHorizontalFlip", "p": 0.5},
    {"step": "ToDtype", "dtype": "float32", "scale": true}], "dtype": null, "channels_last": false}"#;

/// What the samples are.
struct Kind {
    schema: Arc<Schema>,
    fused: Option<Fused>,
    /// Where the payload begins, and how much of a batch's memory a row takes.
    payload: usize,
    row_words: usize,
}

impl Kind {
    fn new(images: bool) -> Result<Self, String> {
        // A tuple of an int and a tensor: of int64 with one dimension, or of bytes with three.
        let (tensor, payload, row_words) =
            if images { ([0, 3], 32, 3 * MADE * MADE / 2) } else { ([4, 1], 16, WORDS) };
        let schema = [1, b'(', 2, b'i', b'T', tensor[0], tensor[1]];
        let told = |error: stocache::Error| error.to_string();
        let pipeline = Arc::new(Pipeline::parse(STEPS).map_err(told)?);
        let fused = Fused { pipeline, seed: 1, epoch: 2, numbers: Vec::new() };
        let schema = Arc::new(Schema::parse(&schema).map_err(told)?);
        Ok(Self { schema, fused: images.then_some(fused), payload, row_words })
    }

    fn record(&self, index: usize, salt: u64) -> Vec<u8> {
        let word = (index as u64) << 32 | (salt & 0xffff_ffff);
        let mut bytes = Vec::with_capacity(self.payload + 3 * SIDE * SIDE);
        if self.fused.is_some() {
            let sizes = [3, SIDE as u32, SIDE as u32, 0];
            bytes.extend(sizes.iter().flat_map(|size| size.to_le_bytes()));
            bytes.extend((index as u64).to_le_bytes());
            bytes.resize(self.payload, 0);
            bytes.resize(self.payload + 3 * SIDE * SIDE, (4 * index as u64 + salt % 4) as u8);
        } else {
            bytes.extend((WORDS as u64).to_le_bytes());
            bytes.extend((index as u64).to_le_bytes());
            bytes.extend(std::iter::repeat_n(word.to_le_bytes(), WORDS).flatten());
        }
        bytes
    }

    /// Whether a row is all of one record of that sample.
    fn is_whole(&self, row: &[u64], index: u64) -> bool {
        if !row.iter().all(|&word| word == row[0]) {
            return false;
        }
        if self.fused.is_none() {
            return row[0] >> 32 == index;
        }
        let value = f32::from_bits(row[0] as u32);
        row[0] >> 32 == row[0] & 0xffff_ffff && (value * 255.0).round() as u64 / 4 == index
    }
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
    fn find(store: &Arc<RecordStore>, kind: &Kind, random: &mut Random) -> Option<Self> {
        let count = 1 + random.below(50) as usize;
        let indices: Vec<i64> = (0..count).map(|_| random.below(SAMPLES) as i64).collect();
        let levels = vec![Levels::new(Arc::clone(store), Vec::new())];
        let batch = Batch::find_for(kind.fused.clone(), levels, &[], &indices)?;
        let (numbers, rows) = (vec![u64::MAX; count], vec![u64::MAX; count * kind.row_words]);
        Some(Self { batch, indices, numbers, rows, given: Vec::new() })
    }

    /// Lays it out and begins, if a row is there; false if it is no batch, for a record moved.
    fn begin(&mut self, kind: &Kind) -> bool {
        if self.batch.absent().len() == self.indices.len() {
            return true;
        }
        if !self.batch.lay_out(Arc::clone(&kind.schema)) {
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
    fn load(&mut self, levels: &Arc<Levels>, kind: &Kind, random: &mut Random, tally: &Tally) {
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
                let bytes = kind.record(index, random.next());
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
            let cut = if random.below(2) == 0 { kind.payload } else { bytes.len() };
            let piece = |part: &[u8]| Row { data: part.as_ptr(), len: part.len() };
            let pieces = Pieces(vec![piece(&bytes[..cut]), piece(&bytes[cut..])]);
            // SAFETY: kept as long as the batch.
            unsafe { self.batch.give(row as usize, pieces) };
        }
    }

    fn finish(mut self, kind: &Kind, tally: &Tally) {
        if !self.batch.look_again() {
            return tally.add(TORN); // there is one schema
        }
        if self.batch.columns().is_empty() && !self.begin(kind) {
            return; // what was found has moved
        }
        if self.batch.finish() != Gathered::Whole {
            return; // a sample that nobody brought, or one that others cleared
        }
        for (row, &index) in self.indices.iter().enumerate() {
            let words = &self.rows[row * kind.row_words..][..kind.row_words];
            let whole = self.numbers[row] == index as u64 && kind.is_whole(words, index as u64);
            tally.add(if whole { READS } else { TORN });
        }
    }
}

fn work(store: &Arc<RecordStore>, kind: &Kind, mut random: Random, tally: &Tally) {
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
                        one_more(store, kind, &levels, &mut inherited, &mut theirs, tally);
                    }
                });
                begun = inherited;
                if child.wait() != 0 {
                    tally.add(TORN);
                }
            }
            _ => one_more(store, kind, &levels, &mut begun, &mut random, tally),
        }
    }
}

/// Begins with a batch, or finishes the oldest.
fn one_more(
    store: &Arc<RecordStore>,
    kind: &Kind,
    levels: &Arc<Levels>,
    begun: &mut Vec<Begun>,
    random: &mut Random,
    tally: &Tally,
) {
    if begun.len() < 4 && random.below(2) == 0 {
        let Some(mut next) = Begun::find(store, kind, random) else { return tally.add(TORN) };
        if next.begin(kind) {
            next.load(levels, kind, random, tally);
            begun.push(next);
        }
    } else if !begun.is_empty() {
        begun.remove(0).finish(kind, tally);
    }
}

fn torture(run: &mut Run, what: &str, limit: u64, recycle: bool, images: bool) -> Verdict {
    let wanted = store_of(what, limit, recycle, SAMPLES)?;
    let (store, _) = RecordStore::open(&wanted).map_err(|error| error.to_string())?;
    let kind = Kind::new(images)?;
    let tally = Tally::new();
    let (shared, of, counts) = (&store, &kind, &tally);
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
    torture(run, "batches-lru", 480 << 10, true, false)
}

/// Rows stay until somebody clears.
pub fn frozen(run: &mut Run) -> Verdict {
    torture(run, "batches", 2 << 20, false, false)
}

/// The same of images that a pipeline makes.
pub fn fused(run: &mut Run) -> Verdict {
    torture(run, "batches-fused", 480 << 10, true, true)
}
