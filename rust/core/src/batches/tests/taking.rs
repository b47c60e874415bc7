//! Rows that are copied by who reads their records.

use super::receive::{Far, NO_ROOM, ROW, SAMPLES, is_right, over_far, samples};
use super::*;
use crate::batches::Layout;
use crate::batches::batch::State;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Over a level of this node, which has these samples; and how a batch of the first ones is laid out.
fn over_near(samples: &[(usize, Value)]) -> (Arc<Levels>, Arc<Far>, Layout) {
    let (levels, near, schema) = over_far(samples, NO_ROOM, Far::of_this_node(), None);
    let mut batch = Batch::find(vec![Arc::clone(&levels)], &[], &[0, 1]).unwrap();
    assert!(batch.arrive() && batch.lay_out(schema));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
    assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, vec![0, 1]));
    let layout = batch.layout().unwrap();
    (levels, near, layout)
}

/// A batch that had columns before anything was read of it.
fn laid_out(
    levels: &Arc<Levels>,
    near: &Far,
    layout: &Layout,
    indices: &[i64],
) -> (Batch, Vec<Vec<u8>>) {
    let gate = near.gate.lock().unwrap();
    let mut batch = Batch::find(vec![Arc::clone(levels)], &[], indices).unwrap();
    assert!(batch.is_coming() && batch.lay_out_like(layout));
    let mut memory = memory_for(&batch);
    // SAFETY: memory of our own.
    unsafe { batch.begin(&addresses(&mut memory), 1) }.unwrap();
    drop(gate);
    (batch, memory)
}

fn received(batch: &Batch) -> usize {
    batch.rows.iter().filter(|row| matches!(row.state, State::Received)).count()
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn rows_are_copied_by_who_reads_their_records() {
    let (levels, near, layout) = over_near(&samples(0..SAMPLES));
    near.lent.lock().unwrap().clear();
    let indices: Vec<i64> = (0..SAMPLES as i64).rev().chain([7, 39, 7]).collect();
    let (mut batch, memory) = laid_out(&levels, &near, &layout, &indices);
    assert!(batch.arrive());
    assert_eq!(received(&batch), indices.len());
    assert_eq!(finish(&mut batch, &memory), (Gathered::Whole, indices.clone()));
    assert!(is_right(&memory, &indices) && batch.is_current());
    let lent = near.lent.lock().unwrap().len();
    assert!(lent < 30, "{lent} pieces of memory for {SAMPLES} records");
    levels.clear().unwrap();
    assert!(!batch.is_current());
}

#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn what_is_not_of_the_batch_is_not_taken() {
    for other in [sample(30, ROW / 2), Value::Tensor(0, vec![ROW as u32], vec![31; ROW])] {
        let mut all = samples(0..SAMPLES);
        all[30].1 = other;
        let (levels, near, layout) = over_near(&all);
        let indices: Vec<i64> = (0..SAMPLES as i64).collect();
        let (mut batch, _memory) = laid_out(&levels, &near, &layout, &indices);
        batch.arrive();
        assert!(matches!(batch.rows[30].state, State::Fetched(..)));
        assert!((1..SAMPLES).contains(&received(&batch)));
        assert_eq!(batch.finish(), Gathered::Unlike);
    }
}

/// What was being read when a process forked is read once more by its child, whose batch is its parent's.
#[test]
#[cfg_attr(miri, ignore = "a segment is a file")]
fn a_child_does_not_write_into_the_batch_of_its_parent() {
    let (levels, near, layout) = over_near(&samples(0..SAMPLES));
    let gate = near.gate.lock().unwrap();
    let indices: Vec<i64> = (0..SAMPLES as i64).collect();
    let mut batch = Batch::find(vec![Arc::clone(&levels)], &[], &indices).unwrap();
    assert!(batch.lay_out_like(&layout));
    let mut memory = memory_for(&batch);
    let len = memory[0].len();
    // SAFETY: fresh memory, which nobody else knows.
    let shared = unsafe {
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        mmap_anonymous(std::ptr::null_mut(), len, flags.0, flags.1).unwrap()
    };
    let mut targets = addresses(&mut memory);
    targets[0].0 = shared.cast();
    // SAFETY: memory of our own.
    unsafe { batch.begin(&targets, 1) }.unwrap();
    // SAFETY: the child ends without a return to the test.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(gate);
        batch.arrive();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: our child, and a status of our own.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    // SAFETY: nobody writes: what this process reads waits for the gate.
    let seen = unsafe { std::slice::from_raw_parts(shared.cast::<u8>(), len) }.to_vec();
    drop(gate); // first, or a batch that is dropped would wait for it
    assert!(batch.arrive());
    assert!(status == 0 && seen.iter().all(|&byte| byte == 0), "{status}");
    assert_eq!((received(&batch), batch.finish()), (SAMPLES, Gathered::Whole));
    // SAFETY: as above, and all is there.
    let rows = unsafe { std::slice::from_raw_parts(shared.cast::<u8>(), len) }.to_vec();
    assert!(is_right(&[rows], &indices));
}
