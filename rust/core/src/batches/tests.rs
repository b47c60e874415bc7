//! Batches of records on the heap, against the plain way of making them.
#![allow(unsafe_code)] // memory that the tests own

mod receive;
mod taking;

use super::{Batch, Column, Fused, Gathered, Pieces, Row};
use crate::augment::Pipeline;
use crate::records::schema::Schema;
use crate::records::schema::kinds::torch;
use crate::records::schema::tests::{Value, Writer, grey};
use crate::records::{Claim, Put, RecordStore};
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::{Backing, Request, random_name};
use crate::tiers::Levels;
use std::io::IoSlice;
use std::sync::Arc;

fn batch_of(records: &[Vec<u8>]) -> Batch {
    let mut batch = Batch::new(records.len());
    for (row, record) in records.iter().enumerate() {
        // SAFETY: the tests keep their records.
        assert!(unsafe { batch.give(row, cut(record, &[])) });
    }
    batch
}

/// Memory for the columns of a batch.
fn memory_for(batch: &Batch) -> Vec<Vec<u8>> {
    batch.columns().iter().map(|column| vec![0xee; column.row_bytes * batch.rows()]).collect()
}

fn addresses(memory: &mut [Vec<u8>]) -> Vec<(*mut u8, usize)> {
    memory.iter_mut().map(|m| (m.as_mut_ptr(), m.len())).collect()
}

/// Memory with nothing below it.
fn alone(store: &Arc<RecordStore>) -> Vec<Arc<Levels>> {
    vec![Levels::new(Arc::clone(store), Vec::new())]
}

fn find(store: &Arc<RecordStore>, indices: &[i64]) -> Option<Batch> {
    Batch::find(alone(store), &[], indices)
}

fn texts_of(batch: &Batch) -> Vec<Vec<u8>> {
    let text = |row: usize| (0..).map_while(move |k| batch.text(row, k)).map(<[u8]>::to_vec);
    (0..batch.rows()).flat_map(text).collect()
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
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), threads) }.unwrap();
    (batch.finish() == Gathered::Whole).then_some(())?;
    Some((columns.into_iter().zip(memory).collect(), texts_of(&batch)))
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
        (torch::BYTE, vec![row as i64]),
        (torch::LONG, vec![]),
        (torch::BOOL, vec![]),
        (torch::LONG, vec![]),
        (torch::LONG, vec![]),
        (torch::FLOAT, vec![]),
    ];
    for ((column, _), (dtype, dims)) in columns.iter().zip(&expected) {
        assert_eq!((column.dtype, &column.dims), (*dtype, dims));
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

/// A tensor with a rest that differs from row to row, also in shape.
fn with_rest(i: i64) -> Value {
    Value::Object(
        true,
        vec![
            Value::Tensor(4, vec![2], [i, -i].iter().flat_map(|word| word.to_le_bytes()).collect()),
            Value::Dict(vec![
                ("name".into(), Value::Str("x".repeat(i as usize))),
                ("shape".into(), Value::Ints((0..i).collect())),
                ("none".into(), Value::None),
            ]),
            Value::Int(10 * i),
        ],
    )
}

#[test]
fn what_is_no_column_is_kept_row_by_row() {
    let samples: Vec<Value> = (0..5).map(with_rest).collect();
    let encoded: Vec<_> = samples.iter().map(Writer::encode).collect();
    let schema = Arc::new(Schema::parse(&encoded[0].0).unwrap());
    let mut batch = Batch::new(5);
    for (row, (_, record)) in encoded.iter().enumerate() {
        // The head, then the rest in two pieces.
        let cuts = [schema.head().next_multiple_of(16) as usize + 16];
        // SAFETY: the records are kept.
        assert!(unsafe { batch.give(row, cut(record, &cuts[..row % 2])) });
    }
    assert!(batch.lay_out(Arc::clone(&schema)));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
    assert_eq!(batch.finish(), Gathered::Whole);
    assert_eq!(memory.len(), 1, "one column, that of the tensor");
    for i in 0..5i64 {
        let rest = batch.rest(i as usize).unwrap();
        let (words, _) = rest[..4 * schema.words as usize].as_chunks::<4>();
        let words: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        assert_eq!(words, [2, i as u32, i as u32]);
        let number = &rest[schema.numbers_at() as usize..schema.head() as usize];
        assert_eq!(number, (10 * i).to_le_bytes());
        let mut found = Vec::new();
        assert!(schema.each_payload_apart(&words, rest.len() as u64, |extent| found.push(extent)));
        assert!(!schema.each_payload_apart(&words, rest.len() as u64 + 16, |_| ()));
        let text = |k: usize| &rest[found[k].at as usize..][..found[k].len as usize];
        assert_eq!((found[0].len, text(1)), (0, "x".repeat(i as usize).as_bytes()));
        let numbers: Vec<u8> = (0..i).flat_map(i64::to_le_bytes).collect();
        assert_eq!(text(2), numbers);
        assert_eq!(&memory[0][16 * i as usize..][..8], i.to_le_bytes());
    }
    assert!(batch.rest(5).is_none());
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
    assert!(unsafe { batch.begin(&[(memory.as_mut_ptr(), 7)], 1) }.is_err());
    // SAFETY: as above.
    assert!(unsafe { batch.begin(&[], 1) }.is_err());
    assert_eq!(batch.finish(), Gathered::Unlike);
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

fn put(store: &RecordStore, i: usize, schema: u16, value: &Value) {
    assert_eq!(store.begin(i), Claim::LoadAndStore);
    let record = Writer::encode(value).1;
    assert_eq!(store.fill(i, schema, &[IoSlice::new(&record)]).unwrap(), Put::Stored);
}

/// Stores samples of which everything depends on `start`; their schema.
fn put_samples(store: &RecordStore, start: i64, row: usize) -> Arc<Schema> {
    (0..10).for_each(|i| put(store, i, 0, &sample(start + i as i64, row)));
    Arc::new(Schema::parse(&Writer::encode(&sample(start, row)).0).unwrap())
}

/// The labels of a batch that was finished, and what became of it.
fn finish(batch: &mut Batch, memory: &[Vec<u8>]) -> (Gathered, Vec<i64>) {
    let gathered = batch.finish();
    let labels = memory[1].as_chunks().0.iter().map(|label| i64::from_le_bytes(*label));
    (gathered, labels.collect())
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_that_moved_are_copied_again_and_those_that_are_gone_are_no_batch() {
    for recycle in [false, true] {
        let store = store(recycle);
        let schema = put_samples(&store, 0, 100);
        let found = || {
            let mut batch = find(&store, &[3, 1, 4]).unwrap();
            assert!(batch.lay_out(Arc::clone(&schema)));
            batch
        };
        let copy = |batch: &mut Batch| {
            let mut memory = memory_for(batch);
            // SAFETY: memory of our own.
            unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
            finish(batch, &memory)
        };
        assert_eq!(copy(&mut found()), (Gathered::Whole, vec![3, 1, 4]));
        // Filled anew meanwhile, with samples of the same shapes.
        let mut batch = found();
        store.clear().unwrap();
        put_samples(&store, 100, 100);
        assert_eq!(copy(&mut batch), (Gathered::Whole, vec![103, 101, 104]));
        assert!(batch.is_current());
        // After the copy it is not looked at again, unless somebody asks.
        store.clear().unwrap();
        assert!(!batch.is_current());
        // With samples of other shapes.
        put_samples(&store, 100, 100);
        let mut batch = found();
        store.clear().unwrap();
        put_samples(&store, 200, 50);
        assert_eq!(copy(&mut batch).0, Gathered::Gone);
        // Not at all.
        let mut batch = found();
        store.clear().unwrap();
        assert_eq!(copy(&mut batch).0, Gathered::Gone);
        let mut batch = find(&store, &[3, 1, 4]).unwrap();
        assert_eq!((batch.absent(), batch.schemas_in(0)), (vec![0, 1, 2], &[][..]));
        assert!(!batch.lay_out(Arc::clone(&schema)));
        assert!(find(&store, &[-1]).is_none() && find(&store, &[10]).is_none());
        assert!(Batch::find(alone(&store), &[1], &[3]).is_none());
        assert!(Batch::find(alone(&store), &[0], &[3, 4]).is_none());
        assert_eq!(find(&store, &[]).unwrap().rows(), 0);
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_was_copied_in_time_is_whole_whatever_comes_after() {
    let store = store(false);
    // In several parts, which helpers copy.
    let schema = put_samples(&store, 0, 30_000);
    for _ in 0..50 {
        let mut batch = find(&store, &[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        let mut memory = memory_for(&batch);
        // SAFETY: memory of our own.
        unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
        let labels = |memory: &[Vec<u8>]| memory[1].clone();
        let expected: Vec<u8> =
            [3, 1, 4, 1, 5, 9, 2, 6, 5, 3i64].iter().flat_map(|i| i.to_le_bytes()).collect();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !batch.is_copied() {
            assert!(std::time::Instant::now() < deadline, "helpers do not come");
            std::thread::yield_now();
        }
        store.clear().unwrap();
        assert_eq!(batch.finish(), Gathered::Whole);
        assert_eq!(labels(&memory), expected);
        put_samples(&store, 0, 30_000);
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn a_batch_that_is_dropped_while_it_is_copied_leaves_its_memory_alone() {
    let store = store(false);
    let schema = put_samples(&store, 0, 30_000);
    for _ in 0..200 {
        let mut batch = find(&store, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        let mut memory = memory_for(&batch);
        // SAFETY: memory of our own.
        unsafe { batch.begin(&addresses(&mut memory), 3) }.unwrap();
        drop(batch);
        memory.iter_mut().for_each(|column| column.fill(7));
        std::thread::yield_now();
        assert!(memory.iter().flatten().all(|&byte| byte == 7));
    }
    assert_eq!(Arc::strong_count(&store), 1);
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn lists_of_different_lengths_are_no_batch_whenever_they_come() {
    let of = |first: usize, second: usize| {
        Value::Tuple(vec![Value::Ints(vec![1; first]), Value::Ints(vec![2; second])])
    };
    let (schema, unlike) = Writer::encode(&of(1, 2));
    let schema = Arc::new(Schema::parse(&schema).unwrap());
    for (record, expected) in [
        (unlike, Gathered::Unlike), // as many columns, all alike
        (Writer::encode(&of(2, 1)).1, Gathered::Whole),
    ] {
        let store = store(false);
        put(&store, 0, 0, &of(2, 1));
        let mut batch = find(&store, &[0, 1]).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        let mut memory = memory_for(&batch);
        // SAFETY: memory and a record of our own.
        unsafe {
            batch.begin(&addresses(&mut memory), 1).unwrap();
            assert!(batch.give(1, cut(&record, &[])));
        }
        assert_eq!(batch.finish(), expected);
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
fn records_that_are_not_there_can_be_given_in_pieces_before_the_copy_or_after() {
    let store = store(false);
    // With strings, of lengths of their own.
    let of = |i: i64| {
        Value::Tuple(vec![sample(i, 100), Value::Str("x".repeat(i as usize)), Value::Int(-i)])
    };
    let encoded: Vec<_> = (0..10).map(|i| Writer::encode(&of(i))).collect();
    let schema = Arc::new(Schema::parse(&encoded[0].0).unwrap());
    for i in [1, 4, 6] {
        put(&store, i, 0, &of(i as i64));
    }
    let head = schema.head() as usize;
    let payload = head.next_multiple_of(16);
    let gathered =
        |which: &[i64], late: bool, cuts: &dyn Fn(usize) -> Vec<usize>| -> Option<Made> {
            let mut batch = find(&store, which)?;
            let late = late && batch.absent().len() < which.len();
            let mut memory = Vec::new();
            for turn in [late, true] {
                if turn {
                    batch.columns().is_empty().then(|| batch.lay_out(Arc::clone(&schema)));
                    memory = memory_for(&batch);
                    // SAFETY: memory of our own.
                    unsafe { batch.begin(&addresses(&mut memory), 2) }.ok()?;
                }
                for row in batch.absent() {
                    let record = &encoded[which[row as usize] as usize].1;
                    // SAFETY: records are our own.
                    assert!(unsafe { batch.give(row as usize, cut(record, &cuts(record.len()))) });
                }
                if turn {
                    break;
                }
            }
            (batch.finish() == Gathered::Whole).then_some(())?;
            let columns = batch.columns().to_vec();
            Some((columns.into_iter().zip(memory).collect(), texts_of(&batch)))
        };
    let like = |made: Option<Made>| {
        // Where rows lie in their records is no matter.
        made.map(|(columns, texts)| {
            let column = |(column, bytes): (Column, Vec<u8>)| (column.dtype, column.dims, bytes);
            (columns.into_iter().map(column).collect::<Vec<_>>(), texts)
        })
    };
    for which in [&[1, 4, 6][..], &[1, 2, 4], &[2, 1, 3, 3], &[5], &[7, 8, 9, 0]] {
        for late in [false, true] {
            let samples: Vec<Value> = which.iter().map(|&i| of(i)).collect();
            let expected = like(gather(&samples, 1));
            assert!(expected.is_some());
            assert_eq!(like(gathered(which, late, &|_| vec![])), expected);
            assert_eq!(like(gathered(which, late, &|_| vec![payload])), expected);
            // The first payload on its own, then the rest.
            assert_eq!(like(gathered(which, late, &|_| vec![payload, payload + 100])), expected);
            assert_eq!(like(gathered(which, late, &|len| vec![payload, len])), expected);
        }
    }
    for late in [false, true] {
        // A head or a payload that is cut has no address.
        assert_eq!(gathered(&[1, 2], late, &|_| vec![4]), None);
        assert_eq!(gathered(&[1, 2], late, &|_| vec![payload + 50]), None);
    }
    // Shorter than its schema says, or for no row.
    let mut batch = find(&store, &[1, 2]).unwrap();
    // SAFETY: records of our own.
    unsafe {
        assert!(!batch.give(0, cut(&encoded[1].1, &[])), "it is there");
        assert!(!batch.give(2, cut(&encoded[1].1, &[])), "there is no such row");
        assert!(batch.give(1, cut(&encoded[2].1[..payload + 99], &[])));
        assert!(!batch.give(1, cut(&encoded[2].1, &[])));
    }
    assert!(!batch.lay_out(Arc::clone(&schema)));
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_of_another_shape_that_come_late_are_no_batch() {
    let store = store(false);
    put(&store, 0, 0, &sample(0, 100));
    let schema = Arc::new(Schema::parse(&Writer::encode(&sample(0, 100)).0).unwrap());
    for (row, expected) in [(100, Gathered::Whole), (99, Gathered::Unlike), (0, Gathered::Unlike)] {
        let mut batch = find(&store, &[0, 1]).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        let mut memory = memory_for(&batch);
        // SAFETY: memory of our own.
        unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
        let (_, record) = Writer::encode(&sample(1, row));
        // SAFETY: a record of our own.
        assert!(unsafe { batch.give(1, cut(&record, &[])) });
        assert_eq!(batch.finish(), expected);
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_that_come_into_the_store_meanwhile_are_found_there() {
    let store = store(false);
    let schema = Arc::new(Schema::parse(&Writer::encode(&sample(0, 100)).0).unwrap());
    put(&store, 3, 0, &sample(3, 100));
    let mut batch = find(&store, &[2, 3, 4]).unwrap();
    assert!(batch.lay_out(Arc::clone(&schema)));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
    put(&store, 2, 0, &sample(2, 100));
    assert!(batch.look_again());
    assert_eq!(batch.absent(), [2]);
    assert_eq!(batch.finish(), Gathered::Gone);
    put(&store, 4, 0, &sample(4, 100));
    assert!(batch.look_again());
    assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, vec![2, 3, 4]));
    // One of another schema is none of this batch.
    let mut batch = find(&store, &[2, 5]).unwrap();
    put(&store, 5, 1, &sample(5, 100));
    assert!(!batch.look_again());
    assert!(find(&store, &[2, 5]).is_none());
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_of_several_stores_are_one_batch() {
    let stores = [store(false), store(true), store(false)];
    for (k, store) in stores.iter().enumerate() {
        (0..10).for_each(|i| put(store, i, k as u16, &sample((100 * k + i) as i64, 100)));
    }
    let schema = Arc::new(Schema::parse(&Writer::encode(&sample(0, 100)).0).unwrap());
    let found = |which: &[u32], indices: &[i64]| {
        let mut batch =
            Batch::find(stores.iter().flat_map(alone).collect(), which, indices).unwrap();
        assert!(batch.lay_out(Arc::clone(&schema)));
        batch
    };
    let (which, indices) = ([1, 0, 1, 0, 0], [3, 3, 9, 1, 3]);
    let copied = |mut batch: Batch| {
        let mut memory = memory_for(&batch);
        // SAFETY: memory of our own.
        unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
        finish(&mut batch, &memory)
    };
    let batch = found(&which, &indices);
    let schemas = [0, 1, 2, 3].map(|store| batch.schemas_in(store).to_vec());
    assert_eq!(schemas, [vec![0], vec![1], vec![], vec![]], "nothing was found in the third");
    assert_eq!(copied(batch), (Gathered::Whole, vec![103, 3, 109, 1, 3]));
    // Rows of one of them move, and come again.
    let batch = found(&which, &indices);
    stores[1].clear().unwrap();
    (0..10).for_each(|i| put(&stores[1], i, 1, &sample(500 + i as i64, 100)));
    assert_eq!(copied(batch), (Gathered::Whole, vec![503, 3, 509, 1, 3]));
    let batch = found(&which, &indices);
    stores[0].clear().unwrap();
    assert_eq!(copied(batch).0, Gathered::Gone);
    assert!(
        Batch::find(stores.iter().flat_map(alone).collect(), &[3], &[0]).is_none(),
        "there is no such store"
    );
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_that_moved_are_copied_again_beside_given_ones() {
    let store = store(true);
    let schema = put_samples(&store, 0, 100);
    let given = Writer::encode(&sample(77, 100)).1;
    for late in [false, true] {
        store.clear().unwrap();
        for i in [0, 2] {
            put(&store, i, 0, &sample(i as i64, 100));
        }
        let mut batch = find(&store, &[0, 1, 2]).unwrap();
        let payload = (schema.head() as usize).next_multiple_of(16);
        // SAFETY: a record of our own.
        let give = |batch: &mut Batch| assert!(unsafe { batch.give(1, cut(&given, &[payload])) });
        if !late {
            give(&mut batch);
        }
        assert!(batch.lay_out(Arc::clone(&schema)));
        store.clear().unwrap();
        put_samples(&store, 100, 100);
        let mut memory = memory_for(&batch);
        // SAFETY: memory of our own.
        unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
        if late {
            give(&mut batch);
        }
        assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, vec![100, 77, 102]));
        let first = [0, 1, 2].map(|row| memory[0][100 * row]);
        assert_eq!(first, [100, 77, 102]);
    }
}

fn pipeline(steps: &str) -> Arc<Pipeline> {
    let text = format!(r#"{{"steps": [{steps}], "dtype": null, "channels_last": false}}"#);
    Arc::new(Pipeline::parse(&text).unwrap())
}

const CROP: &str = r#"{"step": "ToImage"}, {"step": "CenterCrop", "size": [2, 2]}"#;

/// Images of several sizes, every second with something beside its pixels.
fn photograph(i: usize) -> Value {
    let info = Value::Dict(vec![("exif".into(), Value::Str("x".repeat(i)))]);
    let image = grey([4 + 2 * (i as u32 % 3), 6], (i % 2 == 1).then_some(info));
    Value::Tuple(vec![image, Value::Int(i as i64), Value::Str(format!("{i}"))])
}

/// What a crop of its middle is.
fn middle(i: usize) -> [u8; 4] {
    let width = 4 + 2 * (i as u8 % 3);
    let first = 2 * width + (width - 2) / 2;
    [first, first + 1, first + width, first + width + 1]
}

/// Found in a store under two schemas, or given.
fn photographs(stored: &[usize], fused: Fused) -> Option<(Batch, Vec<Vec<u8>>)> {
    let store = store(false);
    let encoded: Vec<_> = (0..10).map(|i| Writer::encode(&photograph(i))).collect();
    let schemas = [0, 1].map(|k| Arc::new(Schema::parse(&encoded[k].0).unwrap()));
    stored.iter().for_each(|&i| put(&store, i, (i % 2) as u16, &photograph(i)));
    let indices: Vec<i64> = (0..10).collect();
    let mut batch = Batch::find_for(Some(fused), alone(&store), &[], &indices)?;
    if stored.iter().any(|i| i % 2 == 1) {
        batch.know(0, 1, Arc::clone(&schemas[1]));
    }
    for row in batch.absent() {
        let (of, pieces) = (row as usize % 2, cut(&encoded[row as usize].1, &[]));
        // SAFETY: the records outlive the copies, which end here.
        let given = unsafe {
            match of {
                0 => batch.give(row as usize, pieces),
                _ => batch.give_as(row as usize, pieces, Arc::clone(&schemas[1])),
            }
        };
        assert!(given);
    }
    batch.lay_out(Arc::clone(&schemas[0])).then_some(())?;
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 2) }.unwrap();
    (batch.finish() == Gathered::Whole).then_some((batch, memory))
}

fn fused(steps: &str) -> Fused {
    Fused { pipeline: pipeline(steps), seed: 1, epoch: 2, numbers: Vec::new() }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn images_of_several_sizes_and_schemas_become_rows_of_one() {
    for stored in [vec![], vec![0, 3, 4], vec![0, 2, 4], (0..10).collect()] {
        let (batch, memory) = photographs(&stored, fused(CROP)).unwrap();
        assert_eq!((batch.columns()[0].dtype, &*batch.columns()[0].dims), (0, &[1, 2, 2][..]));
        for i in 0..10 {
            assert_eq!(memory[0][4 * i..][..4], middle(i), "{i} where {stored:?} are stored");
            assert_eq!(memory[1][8 * i..][..8], (i as i64).to_le_bytes());
            assert_eq!(batch.text(i, 0).unwrap(), format!("{i}").as_bytes());
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn images_that_become_of_several_sizes_are_no_batch() {
    assert!(photographs(&[], fused(r#"{"step": "ToImage"}"#)).is_none());
    // Larger than some of them: who makes them one by one says of which.
    let crop = r#"{"step": "ToImage"}, {"step": "RandomCrop", "size": [6, 6], "padding": null,
        "pad_if_needed": false, "fill": [0], "mask_fill": 0, "padding_mode": "constant"}"#;
    assert!(photographs(&[], fused(crop)).is_none());
    // Without a pipeline there is no batch of images at all.
    let (schema, record) = Writer::encode(&photograph(0));
    let schema = Arc::new(Schema::parse(&schema).unwrap());
    assert!(gather_records(&schema, &[record.clone(), record], 1).is_none());
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn a_batch_with_an_image_that_cannot_be_made_is_not_handed_out() {
    let store = store(false);
    let indices = [2, 4, 0]; // the last is too narrow
    indices.iter().for_each(|&i| put(&store, i as usize, 0, &photograph(i as usize)));
    let schema = Arc::new(Schema::parse(&Writer::encode(&photograph(0)).0).unwrap());
    let crop = r#"{"step": "ToImage"}, {"step": "RandomCrop", "size": [6, 5], "padding": null,
        "pad_if_needed": false, "fill": [0], "mask_fill": 0, "padding_mode": "constant"}"#;
    for count in [2, 3] {
        let indices = &indices[..count];
        let mut batch = Batch::find_for(Some(fused(crop)), alone(&store), &[], indices).unwrap();
        let mut whole = batch.lay_out(Arc::clone(&schema));
        if whole {
            let mut memory = memory_for(&batch);
            // SAFETY: memory of our own.
            unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
            whole = batch.finish() == Gathered::Whole;
        }
        assert_eq!(whole, count == 2);
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn images_that_the_steps_are_not_true_for_are_no_batch() {
    for (takes, wanted) in [("[\"image\", \"pil\"]", true), ("[\"image\", \"tensor\"]", false)] {
        let text = format!(
            r#"{{"steps": [{CROP}], "takes": {takes}, "dtype": null, "channels_last": false}}"#
        );
        let pipeline = Arc::new(Pipeline::parse(&text).unwrap());
        let made = photographs(&[0, 3], Fused { pipeline, ..fused(CROP) });
        assert_eq!(made.is_some(), wanted, "{takes}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn random_numbers_follow_from_the_sample_or_from_the_number_that_was_given() {
    let flip = r#"{"step": "ToImage"}, {"step": "CenterCrop", "size": [2, 2]},
        {"step": "RandomHorizontalFlip", "p": 0.5}"#;
    let of = |numbers: Vec<u64>| {
        let (_, memory) = photographs(&[], Fused { numbers, ..fused(flip) }).unwrap();
        let mirrored = |i: usize| memory[0][4 * i] != middle(i)[0];
        (0..10).map(mirrored).collect::<Vec<_>>()
    };
    let own = of(Vec::new());
    assert_eq!(of((0..10).collect()), own);
    assert!(own.contains(&true) && own.contains(&false));
    let same = of(vec![7; 10]);
    assert!(same.iter().all(|mirrored| *mirrored == own[7]));
}
