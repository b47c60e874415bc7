//! Rows that come from a level which must be asked.

use super::*;
use crate::error::Result;
use crate::records::portable::{self, Head};
use crate::tiers::{Acquiring, Sealed, Sink, Tier, TierStats};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(super) const SAMPLES: usize = 40;
pub(super) const ROW: usize = 60_000;
/// For the index alone.
pub(super) const NO_ROOM: u64 = 186 << 10;

/// What others have put somewhere, and what it was asked for.
#[derive(Default)]
pub(super) struct Far {
    records: BTreeMap<u64, Vec<u8>>,
    asked: Mutex<Vec<u64>>,
    /// Where the memory was that it read into.
    pub(super) lent: Mutex<BTreeSet<usize>>,
    /// One of its servers hangs.
    in_vain: bool,
    /// It takes all the time that there is.
    late: bool,
    /// It is a level of this node, and says what it has.
    says: bool,
    /// Nobody gets anything while somebody holds this.
    pub(super) gate: Mutex<()>,
}

impl Far {
    pub(super) fn of_this_node() -> Self {
        Self { says: true, ..Self::default() }
    }
}

impl Tier for Arc<Far> {
    fn get_many(&self, keys: &[u64], sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        drop(self.gate.lock().unwrap());
        self.asked.lock().unwrap().extend_from_slice(keys);
        if self.in_vain {
            sink.was_in_vain();
        }
        if self.late {
            std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        }
        for (which, key) in keys.iter().enumerate() {
            let Some(record) = self.records.get(key) else { continue };
            let mut lent = sink.lend(which, record.len(), record.len()).unwrap();
            self.lent.lock().unwrap().insert(lent.as_ptr().addr());
            lent.copy_from_slice(record);
            assert!(sink.done(lent));
        }
        Ok(())
    }

    fn put_many(&self, _: &[Sealed<'_>], _: &mut [bool], _: Instant) -> Result<()> {
        Ok(())
    }

    fn schema(&self, _: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put_schema(&self, _: u128, _: &[u8], _: Instant) -> Result<()> {
        Ok(())
    }

    fn stats(&self) -> TierStats {
        TierStats::default()
    }

    fn is_of_all_nodes(&self) -> bool {
        !self.says
    }

    fn has(&self, key: u64) -> Option<bool> {
        self.says.then(|| self.records.contains_key(&key))
    }
}

/// A level of this node, which takes all and says what it has.
#[derive(Default)]
pub(super) struct Near {
    records: Mutex<BTreeMap<u64, Vec<u8>>>,
    asked: Mutex<Vec<u64>>,
}

impl Tier for Arc<Near> {
    fn get_many(&self, keys: &[u64], _: &mut dyn Sink, _: Instant) -> Result<()> {
        let records = self.records.lock().unwrap();
        self.asked.lock().unwrap().extend(keys.iter().filter(|key| records.contains_key(key)));
        Ok(())
    }

    fn put_many(&self, records: &[Sealed<'_>], taken: &mut [bool], _: Instant) -> Result<()> {
        for record in records {
            self.records.lock().unwrap().insert(record.key, record.head.to_vec());
        }
        taken.fill(true);
        Ok(())
    }

    fn schema(&self, _: u128, _: Instant) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn put_schema(&self, _: u128, _: &[u8], _: Instant) -> Result<()> {
        Ok(())
    }

    fn stats(&self) -> TierStats {
        TierStats::default()
    }

    fn has(&self, key: u64) -> Option<bool> {
        Some(self.records.lock().unwrap().contains_key(&key))
    }
}

/// Memory of so many bytes over a level that has these samples, and the schema of the first.
fn over(samples: &[(usize, Value)], bytes: u64) -> (Arc<Levels>, Arc<Far>, Arc<Schema>) {
    over_far(samples, bytes, Far::default(), None)
}

/// The same, and with a level of this node between them.
pub(super) fn over_far(
    samples: &[(usize, Value)],
    bytes: u64,
    mut far: Far,
    near: Option<&Arc<Near>>,
) -> (Arc<Levels>, Arc<Far>, Arc<Schema>) {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(
            random_name().unwrap(),
            Geometry::Records(RecordsGeometry::plan(bytes, SAMPLES as u64, false).unwrap()),
        )
    };
    let memory = RecordStore::open(&request).unwrap().0;
    for (i, value) in samples {
        let (schema, bytes) = Writer::encode(value);
        memory.intern(&schema).unwrap();
        let schema = Some(portable::schema_hash(&schema));
        let head = Head { key: *i as u64, fingerprint: 0, schema, len: bytes.len() as u64 };
        let mut record = portable::seal(&head, &[IoSlice::new(&bytes)]).to_vec();
        record.extend_from_slice(&bytes);
        far.records.insert(*i as u64, record);
    }
    let schema = Arc::new(Schema::parse(&Writer::encode(&samples[0].1).0).unwrap());
    let far = Arc::new(far);
    let mut below: Vec<Box<dyn Tier>> = vec![Box::new(Arc::clone(&far))];
    if let Some(near) = near {
        below.insert(0, Box::new(Arc::clone(near)));
    }
    (Levels::new(memory, below), far, schema)
}

pub(super) fn samples(which: impl Iterator<Item = usize>) -> Vec<(usize, Value)> {
    which.map(|i| (i, sample(i as i64, ROW))).collect()
}

/// A batch that took what came; the first rows lie in this memory.
fn received(
    levels: &Arc<Levels>,
    schema: &Arc<Schema>,
    indices: &[i64],
) -> (Batch, Acquiring, Vec<Vec<u8>>) {
    let mut batch = Batch::find(vec![Arc::clone(levels)], &[], indices).unwrap();
    let wanted: Vec<usize> =
        batch.absent().iter().map(|&row| indices[row as usize] as usize).collect();
    let mut acquiring = levels.acquire(&wanted, Duration::from_secs(1_000_000));
    assert!(batch.lend(&mut acquiring));
    assert!(batch.lay_out(Arc::clone(schema)));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
    batch.keep_lent(&mut acquiring);
    batch.receive(&mut acquiring);
    (batch, acquiring, memory)
}

pub(super) fn is_right(memory: &[Vec<u8>], indices: &[i64]) -> bool {
    indices.iter().zip(memory[0].chunks(ROW)).all(|(&i, row)| {
        row.iter().enumerate().all(|(at, &byte)| byte == (at as i64 * 7 + i) as u8)
    })
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_are_copied_as_they_come_out_of_little_memory() {
    for room in [8 << 20, NO_ROOM] {
        let (levels, far, schema) = over(&samples(0..SAMPLES), room);
        let indices: Vec<i64> = (0..SAMPLES as i64).rev().chain([7, 39, 7]).collect();
        let (mut batch, mut acquiring, memory) = received(&levels, &schema, &indices);
        assert!(batch.absent().is_empty());
        assert_eq!(batch.present().len(), indices.len());
        assert!(acquiring.next_to_load().is_empty());
        let (gathered, labels) = finish(&mut batch, &memory);
        assert_eq!((gathered, labels), (Gathered::Whole, indices.clone()));
        assert!(is_right(&memory, &indices) && batch.is_current());
        let mut asked = far.asked.lock().unwrap().clone();
        asked.sort_unstable();
        assert_eq!(asked, (0..SAMPLES as u64).collect::<Vec<_>>(), "once each");
        let lent = far.lent.lock().unwrap().len();
        assert!(lent <= 12, "{lent} pieces of memory for {SAMPLES} records");
        let in_memory = (0..SAMPLES).filter(|&i| levels.memory().find(i).is_some()).count();
        assert_eq!(in_memory, if room == NO_ROOM { 0 } else { SAMPLES });
        // Claims have ended.
        drop((batch, acquiring));
        let claimed = |i: &usize| levels.memory().begin(*i) == Claim::LoadingElsewhere;
        assert_eq!((0..SAMPLES).find(claimed), None);
    }
}

/// The control: what is kept for the caller takes as many pieces of memory as there are records.
#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn control_what_is_given_one_by_one_takes_much_memory() {
    let (levels, far, _) = over(&samples(0..SAMPLES), NO_ROOM);
    let all: Vec<usize> = (0..SAMPLES).collect();
    let mut acquiring = levels.acquire(&all, Duration::from_secs(1_000_000));
    assert!(acquiring.next_to_load().is_empty());
    assert!(acquiring.all_given().count() == SAMPLES);
    assert!(far.lent.lock().unwrap().len() > 30);
    // Which is used again, once nobody has the records.
    let before = far.lent.lock().unwrap().len();
    drop(acquiring);
    for _ in 0..3 {
        let mut acquiring = levels.acquire(&all, Duration::from_secs(1_000_000));
        assert!(acquiring.next_to_load().is_empty());
    }
    assert!(far.lent.lock().unwrap().len() <= before + 2);
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_is_not_below_is_the_callers_to_load_and_not_asked_for_again() {
    for missing in [vec![3], vec![0, 1, 2, 3, 4], (0..39).collect(), vec![39, 20]] {
        let (levels, far, schema) =
            over(&samples((0..SAMPLES).filter(|i| !missing.contains(i))), NO_ROOM);
        let indices: Vec<i64> = (0..SAMPLES as i64).collect();
        let (mut batch, mut acquiring, memory) = received(&levels, &schema, &indices);
        let absent: Vec<u32> = missing.iter().map(|&i| i as u32).collect();
        let mut sorted = missing.clone();
        sorted.sort_unstable();
        assert_eq!(acquiring.next_to_load(), sorted);
        let asked = far.asked.lock().unwrap().len();
        assert_eq!(asked, SAMPLES, "once each");
        assert_eq!(batch.absent().len(), absent.len());
        let records: Vec<_> =
            sorted.iter().map(|&i| Writer::encode(&sample(i as i64, ROW)).1).collect();
        for (&i, record) in sorted.iter().zip(&records) {
            // SAFETY: kept until the end.
            assert!(unsafe { batch.give(i, cut(record, &[])) });
        }
        assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, indices.clone()));
        assert!(is_right(&memory, &indices));
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_is_not_of_the_batch_is_left_to_the_caller() {
    let (shape, schema_of) =
        (sample(30, ROW / 2), Value::Tensor(0, vec![ROW as u32], vec![31; ROW]));
    let mut all = samples(0..SAMPLES);
    all[30].1 = shape;
    all[31].1 = schema_of;
    let (levels, _, schema) = over(&all, NO_ROOM);
    let indices: Vec<i64> = (0..SAMPLES as i64).collect();
    let (mut batch, mut acquiring, memory) = received(&levels, &schema, &indices);
    assert!(batch.absent().contains(&30) && batch.absent().contains(&31));
    assert!(acquiring.next_to_load().is_empty());
    for row in batch.absent() {
        let record = Writer::encode(&all[row as usize].1).1;
        assert_eq!(acquiring.given(row as usize).unwrap().bytes(), record);
    }
    assert_eq!(finish(&mut batch, &memory).0, Gathered::Gone);
    // The first ones are of two schemas.
    let mut batch = Batch::find(vec![Arc::clone(&levels)], &[], &[31, 5]).unwrap();
    let mut acquiring = levels.acquire(&[31, 5], Duration::from_secs(1_000_000));
    assert!(!batch.lend(&mut acquiring));
    assert_eq!(batch.absent(), [0, 1]);
    assert!(acquiring.given(31).is_some() && acquiring.given(5).is_some());
}

/// The first question of a batch is for a few records; whoever hangs then is not waited for once more.
#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn a_level_that_let_us_wait_in_vain_is_not_asked_again() {
    for (in_vain, late) in [(true, false), (false, true)] {
        let far = Far { in_vain, late, ..Far::default() };
        let (levels, far, schema) = over_far(&samples(0..SAMPLES), NO_ROOM, far, None);
        let indices: Vec<i64> = (0..SAMPLES as i64).collect();
        let (batch, mut acquiring, _) = received(&levels, &schema, &indices);
        let came = far.asked.lock().unwrap().len();
        assert!((1..SAMPLES).contains(&came), "{came}");
        assert_eq!(batch.absent().len(), SAMPLES - came, "what came is used");
        assert_eq!(acquiring.next_to_load().len(), SAMPLES - came, "the rest is loaded");
        assert_eq!(far.asked.lock().unwrap().len(), came);
        drop(acquiring);
        levels.acquire(&[SAMPLES - 1], Duration::ZERO).next_to_load();
        assert_eq!(far.asked.lock().unwrap().len(), came + 1, "the next batch asks");
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_comes_from_afar_and_goes_to_disk_is_not_read_from_there() {
    let near = Arc::new(Near::default());
    let (levels, far, schema) =
        over_far(&samples(0..SAMPLES), NO_ROOM, Far::default(), Some(&near));
    let indices: Vec<i64> = (0..SAMPLES as i64).collect();
    let (mut batch, _acquiring, memory) = received(&levels, &schema, &indices);
    assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, indices.clone()));
    assert!(is_right(&memory, &indices));
    assert_eq!(near.records.lock().unwrap().len(), SAMPLES);
    assert_eq!(*near.asked.lock().unwrap(), [0; 0]);
    assert_eq!(far.asked.lock().unwrap().len(), SAMPLES);
}

/// What was being copied may have moved meanwhile, and nobody has asked.
#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_is_returned_while_it_is_copied_is_no_batch() {
    let (levels, _, schema) = over(&samples(0..SAMPLES), NO_ROOM);
    let mut batch = Batch::find(vec![Arc::clone(&levels)], &[], &[1, 2]).unwrap();
    let mut acquiring = levels.acquire(&[1, 2], Duration::from_secs(1_000_000));
    assert!(batch.lend(&mut acquiring) && batch.lay_out(schema));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
    batch.return_lent();
    batch.receive(&mut acquiring);
    assert_eq!(batch.finish(), Gathered::Unlike);
}
