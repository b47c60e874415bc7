//! Reads records for benches/python/disk.py, as it asks for them.
//!
//! ```text
//!   readers fill FOLDER SIZE   stdin: values of that size, one after the other, for a redb in that folder
//!   readers redb FOLDER        stdin: how many (u64), then so many numbers (u64); stdout: the first byte of each value
//!   readers level FOLDER       the same of a disk level: batch by batch, two of them on their way
//!   readers ways FOLDER        compares ways to read past the page cache, in a file of 1 GiB that it makes there
//!   readers write FOLDER SIZE COUNT   makes a level; stdout: a byte; stdin: a byte; writes so many samples; stdout: a byte
//! ```

mod ways;

use redb::{Database, ReadableDatabase, TableDefinition};
use std::collections::VecDeque;
use std::error::Error;
use std::io::{BufReader, ErrorKind, IoSlice, Read, Write, stdin, stdout};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use stocache::disk::{Compression, DiskOptions, DiskStore, Keys, inspect};
use stocache::tiers::{Disk, Fetching, Levels};
use stocache::{Backing, Geometry, RecordStore, RecordsGeometry, Request, random_name};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const TABLE: TableDefinition<u64, &[u8]> = TableDefinition::new("samples");
const BATCH: usize = 64;
/// Nobody reads a value twice; and memory may be small.
const REDB_CACHE: usize = 16 << 20;
/// Where the bytes of a tensor begin in its record: sizes come first.
const PAYLOAD: usize = 16;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        ["fill", folder, size] => fill(&Path::new(folder).join("redb"), size.parse()?),
        ["redb", folder] => {
            let database = Database::builder()
                .set_cache_size(REDB_CACHE)
                .open_read_only(Path::new(folder).join("redb"))?;
            let table = database.begin_read()?.open_table(TABLE)?;
            let mut batch = Vec::new();
            answer(|indices| {
                let mut first = Vec::with_capacity(indices.len());
                batch.clear();
                for &index in indices {
                    let value = table.get(index)?.ok_or("a value is missing")?;
                    first.push(value.value()[0]);
                    batch.extend_from_slice(value.value()); // as the others bring theirs into one
                }
                Ok(first)
            })
        }
        ["level", folder] => {
            let levels = open(Path::new(folder))?;
            answer(|indices| read(&levels, indices))
        }
        ["ways", folder] => ways::compare(Path::new(folder)),
        ["write", folder, size, count] => write(Path::new(folder), size.parse()?, count.parse()?),
        _ => Err("see the head of benches/readers/src/main.rs".into()),
    }
}

fn fill(path: &Path, size: usize) -> Result<()> {
    let database = Database::create(path)?;
    let writing = database.begin_write()?;
    {
        let mut table = writing.open_table(TABLE)?;
        let (mut values, mut value) =
            (BufReader::with_capacity(1 << 20, stdin().lock()), vec![0; size]);
        for index in 0.. {
            match values.read_exact(&mut value) {
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                done => done?,
            }
            table.insert(index, &value[..])?;
        }
    }
    writing.commit()?;
    Ok(())
}

/// Answers questions until there are no more.
fn answer(mut read: impl FnMut(&[u64]) -> Result<Vec<u8>>) -> Result<()> {
    let (mut questions, mut answers) = (stdin().lock(), stdout().lock());
    let mut word = [0; 8];
    while questions.read_exact(&mut word).is_ok() {
        let mut bytes = vec![0; 8 * u64::from_le_bytes(word) as usize];
        questions.read_exact(&mut bytes)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        let indices: Vec<u64> = bytes.chunks_exact(8).map(number).collect();
        answers.write_all(&read(&indices)?)?;
        answers.flush()?;
    }
    Ok(())
}

/// A level that is there, below memory that has room for nothing.
fn open(folder: &Path) -> Result<Arc<Levels>> {
    let found = inspect(folder).ok_or("no disk level is there")?;
    levels(folder, found.bytes, found.samples, found.fingerprint)
}

fn levels(path: &Path, budget: u64, samples: u64, fingerprint: u128) -> Result<Arc<Levels>> {
    let (path, keys) = (path.to_path_buf(), Keys::Numbers);
    let options =
        DiskOptions { path, budget, dataset_len: samples, fingerprint, recycles: false, keys };
    let room = RecordsGeometry::least(samples, false)?;
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        fingerprint,
        ..Request::new(
            random_name()?,
            Geometry::Records(RecordsGeometry::plan(room, samples, false)?),
        )
    };
    let (memory, _) = RecordStore::open(&request)?;
    let disk = Disk::new(DiskStore::open(&options)?, Compression::None);
    Ok(Levels::new(memory, vec![Box::new(disk)]))
}

/// As who loads samples does: claims some, and fills them.
fn write(folder: &Path, size: usize, count: usize) -> Result<()> {
    let levels = levels(folder, (count * (size + 1024) + (64 << 20)) as u64, count as u64, 1)?;
    let schema = levels.memory().intern(b"\x01i").ok_or("no room for a schema")?;
    let mut noise = vec![0; size + count];
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for byte in &mut noise {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        *byte = random as u8;
    }
    stdout().write_all(&[0])?;
    stdout().flush()?;
    stdin().lock().read_exact(&mut [0])?;
    for first in (0..count).step_by(BATCH) {
        let batch: Vec<usize> = (first..count.min(first + BATCH)).collect();
        let mut acquiring = levels.acquire(&batch, Duration::from_secs(60));
        for index in acquiring.next_to_load() {
            acquiring.fill(index, schema, &[IoSlice::new(&noise[index..index + size])])?;
        }
    }
    if !levels.flush(Duration::from_secs(600)) {
        return Err("not all of it is written".into());
    }
    stdout().write_all(&[0])?;
    stdout().flush()?;
    let written = levels.stats()[0].tier.records;
    if written == count as u64 { Ok(()) } else { Err(format!("{written} are there").into()) }
}

fn read(levels: &Arc<Levels>, indices: &[u64]) -> Result<Vec<u8>> {
    let mut first = Vec::with_capacity(indices.len());
    let mut wait = |fetching: Fetching| -> Result<()> {
        for fetched in fetching.wait() {
            let fetched = fetched.ok_or("a record is missing")?;
            first.push(fetched.bytes()[PAYLOAD]);
            levels.reuse(fetched);
        }
        Ok(())
    };
    let mut coming = VecDeque::new();
    for batch in indices.chunks(BATCH) {
        coming.push_back(levels.begin_fetch(batch.iter().map(|&i| i as usize).collect()));
        if coming.len() > 2 {
            coming.pop_front().map_or(Ok(()), &mut wait)?;
        }
    }
    coming.into_iter().try_for_each(wait)?;
    Ok(first)
}
