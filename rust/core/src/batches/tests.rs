//! Batches of records on the heap, against the plain way of making them.
#![allow(unsafe_code)] // memory that the tests own

use super::{Batch, Column, Gathered, Pieces, Row};
use crate::records::schema::Schema;
use crate::records::schema::kinds::torch;
use crate::records::schema::tests::{Value, Writer};
use crate::records::{Claim, Put, RecordStore};
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::{Backing, Request, random_name};
use std::io::IoSlice;
use std::sync::Arc;

fn batch_of(records: &[Vec<u8>]) -> Batch {
    let rows = records.iter().map(|record| Row { data: record.as_ptr(), len: record.len() });
    // SAFETY: the tests keep their records.
    unsafe { Batch::over(rows.collect()) }
}

/// The columns with their bytes, and the strings.
type Made = (Vec<(Column, Vec<u8>)>, Vec<Vec<u8>>);

/// Gathers samples of one schema.
fn gather(samples: &[Value], threads: usize) -> Option<Made> {
    let encoded: Vec<_> = samples.iter().map(Writer::encode).collect();
    let schema = Arc::new(Schema::parse(&encoded[0].0).unwrap());
    assert!(encoded.iter().all(|(bytes, _)| *bytes == schema.bytes));
    let records: Vec<Vec<u8>> = encoded.into_iter().map(|(_, record)| record).collect();
    gather_records(&schema, &records, threads)
}

fn gather_records(schema: &Arc<Schema>, records: &[Vec<u8>], threads: usize) -> Option<Made> {
    let mut batch = batch_of(records);
    batch.lay_out(Arc::clone(schema)).then_some(())?;
    let columns = batch.columns().to_vec();
    let mut memory: Vec<Vec<u8>> =
        columns.iter().map(|column| vec![0xee; column.row_bytes * records.len()]).collect();
    let to: Vec<_> = memory.iter_mut().map(|m| (m.as_mut_ptr(), m.len())).collect();
    // SAFETY: memory of our own.
    let gathered = unsafe { batch.copy(&to, threads) }.unwrap();
    (gathered == Gathered::Whole).then_some(())?;
    let texts = batch.texts().iter();
    let texts = texts.map(|text| batch.text_bytes()[text.at..][..text.len].to_vec()).collect();
    Some((columns.into_iter().zip(memory).collect(), texts))
}

/// A sample of every kind that can be gathered.
fn sample(i: i64, row: usize) -> Value {
    let data = (0..row).map(|at| (at as i64 * 7 + i) as u8).collect();
    Value::Tuple(vec![
        Value::Tensor(0, vec![row as u32], data),
        Value::Int(i),
        Value::Bool(i % 3 == 0),
        Value::Ints(vec![i, -i]),
        Value::Dict(vec![("k".into(), Value::Tensor(6, vec![], (i as f32).to_le_bytes().into()))]),
    ])
}

fn check(rows: i64, row: usize, threads: usize) {
    let samples: Vec<Value> = (0..rows).map(|i| sample(i, row)).collect();
    let (columns, texts) = gather(&samples, threads).unwrap();
    assert!(texts.is_empty());
    let expected: [(i8, Vec<i64>); 6] = [
        (torch::BYTE, vec![rows, row as i64]),
        (torch::LONG, vec![rows]),
        (torch::BOOL, vec![rows]),
        (torch::LONG, vec![rows]),
        (torch::LONG, vec![rows]),
        (torch::FLOAT, vec![rows]),
    ];
    for ((column, _), (dtype, sizes)) in columns.iter().zip(&expected) {
        assert_eq!((column.dtype, &column.sizes), (*dtype, sizes));
    }
    assert_eq!(columns.len(), expected.len());
    for i in 0..rows {
        let row_of = |column: usize| {
            let (column, bytes) = &columns[column];
            &bytes[i as usize * column.row_bytes..][..column.row_bytes]
        };
        assert!(row_of(0).iter().enumerate().all(|(at, &byte)| byte == (at as i64 * 7 + i) as u8));
        assert_eq!(row_of(1), i.to_le_bytes());
        assert_eq!(row_of(2), [u8::from(i % 3 == 0)]);
        assert_eq!((row_of(3), row_of(4)), (&i.to_le_bytes()[..], &(-i).to_le_bytes()[..]));
        assert_eq!(row_of(5), (i as f32).to_le_bytes());
    }
}

#[test]
fn rows_of_every_size_are_copied_whole() {
    for row in (0..=70).chain([127, 128, 129, 1000]) {
        check(5, row, 1);
    }
}

#[test]
fn batches_of_any_number_of_rows_are_shared_among_threads() {
    for rows in [1, 2, 63, 64, 65, 200] {
        check(rows, 5000, 4);
    }
}

#[test]
#[cfg_attr(miri, ignore = "many megabytes")]
fn large_batches_go_past_the_caches_and_are_whole() {
    check(17, (1 << 20) + 37, 2);
}

#[test]
fn strings_of_different_lengths_are_a_batch() {
    let texts = ["", "a", "some more", "", "äöü"];
    let of = |text: &str| Value::Tuple(vec![Value::Str(text.into()), Value::Int(7)]);
    let samples: Vec<Value> = texts.iter().map(|text| of(text)).collect();
    let (columns, found) = gather(&samples, 2).unwrap();
    assert_eq!(found, texts.map(|text| text.as_bytes().to_vec()));
    assert_eq!(columns[0].1, 7i64.to_le_bytes().repeat(5));
}

#[test]
fn samples_of_different_shapes_are_no_batch() {
    let of = |dims: [u32; 2]| Value::Tensor(0, dims.into(), vec![1; 12]);
    assert!(gather(&[of([3, 4]), of([3, 4])], 1).is_some());
    assert!(gather(&[of([3, 4]), of([4, 3])], 1).is_none(), "as long, but of another shape");
    let of = |n: usize| Value::Tuple(vec![Value::Ints(vec![1; n]), Value::Str("x".into())]);
    assert!(gather(&[of(2), of(3)], 1).is_none());
    assert!(gather(&[Value::None, Value::None], 1).is_none());
}

#[test]
fn records_that_are_damaged_are_no_batch() {
    let (bytes, record) = Writer::encode(&sample(3, 100));
    let schema = Arc::new(Schema::parse(&bytes).unwrap());
    for cut in 0..record.len() {
        let short = vec![record[..cut].to_vec(); 2];
        assert!(gather_records(&schema, &short, 1).is_none());
        assert!(gather_records(&schema, &[record.clone(), record[..cut].to_vec()], 1).is_none());
    }
    assert!(gather_records(&schema, &[], 1).is_none());
    assert!(gather_records(&schema, &[record], 1).is_some());
}

#[test]
fn memory_of_another_size_is_refused() {
    let (bytes, record) = Writer::encode(&Value::Int(1));
    let mut batch = batch_of(std::slice::from_ref(&record));
    assert!(batch.lay_out(Arc::new(Schema::parse(&bytes).unwrap())));
    let mut memory = [0u8; 8];
    // SAFETY: nothing is written.
    assert!(unsafe { batch.copy(&[(memory.as_mut_ptr(), 7)], 1) }.is_err());
    // SAFETY: as above.
    assert!(unsafe { batch.copy(&[], 1) }.is_err());
}

fn store(recycle: bool) -> Arc<RecordStore> {
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(
            random_name().unwrap(),
            Geometry::Records(RecordsGeometry::plan(1 << 20, 10, recycle).unwrap()),
        )
    };
    RecordStore::open(&request).unwrap().0
}

/// Stores samples of which everything depends on `start`; their schema.
fn put_samples(store: &RecordStore, start: i64, row: usize) -> Arc<Schema> {
    let mut schema = Vec::new();
    for i in 0..10 {
        let (bytes, record) = Writer::encode(&sample(start + i, row));
        assert_eq!(store.begin(i as usize), Claim::LoadAndStore);
        assert_eq!(store.fill(i as usize, 0, &[IoSlice::new(&record)]).unwrap(), Put::Stored);
        schema = bytes;
    }
    Arc::new(Schema::parse(&schema).unwrap())
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_that_moved_are_copied_again_and_those_that_are_gone_are_no_batch() {
    for recycle in [false, true] {
        let store = store(recycle);
        let schema = put_samples(&store, 0, 100);
        let find = || {
            let mut batch = Batch::find(&store, &[3, 1, 4]).unwrap();
            assert!(batch.lay_out(Arc::clone(&schema)));
            batch
        };
        let copy = |batch: &mut Batch| {
            let mut memory: Vec<Vec<u8>> =
                batch.columns().iter().map(|column| vec![0; 3 * column.row_bytes]).collect();
            let to: Vec<_> = memory.iter_mut().map(|m| (m.as_mut_ptr(), m.len())).collect();
            // SAFETY: memory of our own.
            let gathered = unsafe { batch.copy(&to, 2) }.unwrap();
            let labels = memory[1].as_chunks().0.iter().map(|label| i64::from_le_bytes(*label));
            (gathered, labels.collect::<Vec<_>>())
        };
        assert_eq!(copy(&mut find()), (Gathered::Whole, vec![3, 1, 4]));
        // Filled anew meanwhile, with samples of the same shapes.
        let mut batch = find();
        store.clear().unwrap();
        put_samples(&store, 100, 100);
        assert_eq!(copy(&mut batch), (Gathered::Whole, vec![103, 101, 104]));
        // With samples of other shapes.
        let mut batch = find();
        store.clear().unwrap();
        put_samples(&store, 200, 50);
        assert_eq!(copy(&mut batch).0, Gathered::Gone);
        // Not at all.
        let mut batch = Batch::find(&store, &[3, 1, 4]).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        store.clear().unwrap();
        assert_eq!(copy(&mut batch).0, Gathered::Gone);
        let mut batch = Batch::find(&store, &[3, 1, 4]).unwrap();
        assert!(batch.absent() == Some(0) && !batch.lay_out(Arc::clone(&schema)));
        assert!(Batch::find(&store, &[-1]).is_none() && Batch::find(&store, &[]).is_none());
    }
}

/// A record cut at these places.
fn cut(record: &[u8], at: &[usize]) -> Pieces {
    let ends = at.iter().copied().chain([record.len()]);
    let starts = std::iter::once(0).chain(at.iter().copied());
    let piece = |(from, to): (usize, usize)| Row { data: record[from..].as_ptr(), len: to - from };
    Pieces(starts.zip(ends).map(piece).collect())
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn records_that_are_not_there_can_be_given_in_pieces() {
    let store = store(false);
    // With strings, of lengths of their own.
    let of = |i: i64| {
        Value::Tuple(vec![sample(i, 100), Value::Str("x".repeat(i as usize)), Value::Int(-i)])
    };
    let encoded: Vec<_> = (0..10).map(|i| Writer::encode(&of(i))).collect();
    let schema = Arc::new(Schema::parse(&encoded[0].0).unwrap());
    for i in [1, 4, 6] {
        assert_eq!(store.begin(i), Claim::LoadAndStore);
        let parts = [IoSlice::new(&encoded[i].1)];
        assert_eq!(store.fill(i, 0, &parts).unwrap(), Put::Stored);
    }
    let head = schema.head() as usize;
    let payload = head.next_multiple_of(16);
    let gathered = |which: &[i64], cuts: &dyn Fn(usize) -> Vec<usize>| -> Option<Made> {
        let mut batch = Batch::find(&store, which)?;
        while let Some(row) = batch.absent() {
            let record = &encoded[which[row] as usize].1;
            // SAFETY: records and memory are our own.
            assert!(unsafe { batch.give(0, cut(record, &cuts(record.len()))) });
        }
        batch.lay_out(Arc::clone(&schema)).then_some(())?;
        let mut columns = batch.columns().to_vec();
        let memory = columns.iter_mut().map(|column| vec![0xee; column.row_bytes * which.len()]);
        let mut memory: Vec<Vec<u8>> = memory.collect();
        let to: Vec<_> = memory.iter_mut().map(|m| (m.as_mut_ptr(), m.len())).collect();
        // SAFETY: as above.
        assert_eq!(unsafe { batch.copy(&to, 2) }.unwrap(), Gathered::Whole);
        let text = |text: &super::Text| batch.text_bytes()[text.at..][..text.len].to_vec();
        let texts = batch.texts().iter().map(text).collect();
        Some((columns.into_iter().zip(memory).collect(), texts))
    };
    for which in [&[1, 4, 6][..], &[1, 2, 4], &[2, 1, 3, 3], &[5], &[7, 8, 9, 0]] {
        let samples: Vec<Value> = which.iter().map(|&i| of(i)).collect();
        let expected = gather(&samples, 1);
        assert!(expected.is_some());
        assert_eq!(gathered(which, &|_| vec![]), expected);
        assert_eq!(gathered(which, &|_| vec![payload]), expected);
        // The first payload on its own, then the rest.
        assert_eq!(gathered(which, &|_| vec![payload, payload + 100]), expected);
        assert_eq!(gathered(which, &|len| vec![payload, len]), expected);
    }
    // A head or a payload that is cut has no address.
    assert_eq!(gathered(&[1, 2], &|_| vec![4]), None);
    assert_eq!(gathered(&[1, 2], &|_| vec![payload + 50]), None);
    // Shorter than its schema says, of another schema, or for no row.
    let mut batch = Batch::find(&store, &[1, 2]).unwrap();
    // SAFETY: records of our own.
    unsafe {
        assert!(!batch.give(1, cut(&encoded[2].1, &[])));
        assert!(!batch.give(u16::MAX, cut(&encoded[2].1, &[])));
        assert!(batch.give(0, cut(&encoded[2].1[..payload + 99], &[])));
        assert!(!batch.give(0, cut(&encoded[2].1, &[])));
    }
    assert!(!batch.lay_out(Arc::clone(&schema)));
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_that_moved_are_copied_again_beside_given_ones() {
    let store = store(true);
    let schema = put_samples(&store, 0, 100);
    let given = Writer::encode(&sample(77, 100)).1;
    store.clear().unwrap();
    for i in [0, 2] {
        let (_, record) = Writer::encode(&sample(i, 100));
        assert_eq!(store.begin(i as usize), Claim::LoadAndStore);
        store.fill(i as usize, 0, &[IoSlice::new(&record)]).unwrap();
    }
    let mut batch = Batch::find(&store, &[0, 1, 2]).unwrap();
    // SAFETY: a record of our own.
    assert!(unsafe { batch.give(0, cut(&given, &[])) });
    assert!(batch.lay_out(schema));
    store.clear().unwrap();
    put_samples(&store, 100, 100);
    let mut memory: Vec<Vec<u8>> =
        batch.columns().iter().map(|column| vec![0; 3 * column.row_bytes]).collect();
    let to: Vec<_> = memory.iter_mut().map(|m| (m.as_mut_ptr(), m.len())).collect();
    // SAFETY: memory of our own.
    assert_eq!(unsafe { batch.copy(&to, 1) }.unwrap(), Gathered::Whole);
    let labels = memory[1].as_chunks().0.iter().map(|label| i64::from_le_bytes(*label));
    assert_eq!(labels.collect::<Vec<_>>(), [100, 77, 102]);
    let first = [0, 1, 2].map(|row| memory[0][100 * row]);
    assert_eq!(first, [100, 77, 102]);
}
