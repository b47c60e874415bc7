//! Pools of their own, not that of the process: `Buffer`s are turned into addresses at once.
#![allow(unsafe_code)] // closes a descriptor under a buffer

use super::Ticket;
use super::mapped::{STALE, file_len};
use super::pool::{BUFFERS, NOT_REUSED, Pool};
use std::ptr::NonNull;

const SIZE: usize = 64 << 10;

fn hold(pool: &mut Pool, bytes: usize) -> Option<NonNull<u8>> {
    pool.take(bytes).and_then(|buffer| NonNull::new(buffer.into_raw().cast()))
}

/// Takes a buffer, lets go of it, and says which it was.
fn use_once(pool: &mut Pool, bytes: usize) -> u64 {
    let data = hold(pool, bytes).unwrap();
    let instance = pool.find(data).unwrap().instance;
    pool.release(data);
    instance
}

#[test]
fn lengths_are_whole_pages_and_do_not_overflow() {
    assert_eq!(file_len(1), Some(8192));
    assert_eq!(file_len(4096), Some(8192));
    assert_eq!(file_len(4097), Some(12288));
    assert_eq!(file_len(u64::MAX), None);
    assert_eq!(file_len(i64::MAX as u64), None);
    assert!(Pool::new().take(0).is_none());
    assert!(Pool::new().take(usize::MAX).is_none());
}

#[test]
fn a_free_buffer_is_given_out_again_and_a_held_one_is_not() {
    let mut pool = Pool::new();
    let (a, b) = (hold(&mut pool, SIZE).unwrap(), hold(&mut pool, SIZE).unwrap());
    assert_ne!(a, b);
    pool.release(a);
    assert_eq!(hold(&mut pool, SIZE), Some(a));
    assert_eq!(hold(&mut pool, SIZE - 1).map(|other| other == b), Some(false));
    pool.release(b);
    assert_eq!(hold(&mut pool, SIZE), Some(b));
}

#[test]
fn a_buffer_in_ticket_is_not_given_out() {
    let mut pool = Pool::new();
    let data = hold(&mut pool, SIZE).unwrap();
    let entry = pool.find(data).unwrap();
    let serial = entry.header().enter_ticket().unwrap();
    entry.exposed = true;
    let ticket = Ticket {
        pid: std::process::id(),
        fd: entry.fd,
        instance: entry.instance,
        bytes: SIZE as u64,
        serial,
    };
    pool.release(data);
    assert_ne!(hold(&mut pool, SIZE), Some(data));
    assert!(pool.receive(&Ticket { bytes: 1, ..ticket }).is_err());
    // It came back: the same mapping, once.
    std::mem::forget(pool.receive(&ticket).unwrap());
    assert!(pool.receive(&ticket).is_err() && !pool.cancel(&ticket));
    assert_eq!(pool.entries.len(), 2);
    assert_eq!(pool.find(data).unwrap().holds, 1);
    pool.release(data);
    assert_eq!(hold(&mut pool, SIZE), Some(data));
}

#[test]
fn an_address_finds_its_buffer_while_it_is_held() {
    let mut pool = Pool::new();
    let data = hold(&mut pool, SIZE).unwrap();
    let address = data.as_ptr() as usize;
    for inside in [address, address + SIZE - 1] {
        std::mem::forget(pool.holding(inside).unwrap());
    }
    for outside in [0, address - 1, address + SIZE, usize::MAX] {
        assert!(pool.holding(outside).is_none());
    }
    assert_eq!(pool.find(data).unwrap().holds, 3);
    (0..3).for_each(|_| pool.release(data));
    assert!(pool.holding(address).is_none());
}

#[test]
fn the_smaller_last_batch_of_an_epoch_costs_no_other_its_buffer() {
    let mut pool = Pool::new();
    let mut made = std::collections::HashSet::new();
    for _epoch in 0..10 {
        // Two are held at a time, as with a queue.
        for _batch in 0..100 {
            let (a, b) = (hold(&mut pool, SIZE).unwrap(), hold(&mut pool, SIZE).unwrap());
            made.extend([a, b].map(|data| pool.find(data).unwrap().instance));
            pool.release(a);
            pool.release(b);
        }
        use_once(&mut pool, SIZE / 2);
    }
    assert_eq!(made.len(), 2);
    assert!(pool.entries.len() <= 3);
}

#[test]
fn short_epochs_of_two_sizes_keep_a_buffer_of_each() {
    let mut pool = Pool::new();
    let first = [SIZE, SIZE / 2].map(|bytes| use_once(&mut pool, bytes));
    for _ in 0..100 {
        assert_eq!([SIZE, SIZE / 2].map(|bytes| use_once(&mut pool, bytes)), first);
    }
}

#[test]
fn sizes_that_never_come_back_pile_up_nothing() {
    let mut pool = Pool::new();
    for i in 1..=500 {
        use_once(&mut pool, i * 4096);
        assert!(pool.entries.len() <= NOT_REUSED + 1, "{} buffers", pool.entries.len());
    }
}

#[test]
fn what_a_burst_made_is_given_back() {
    let mut pool = Pool::new();
    let burst: Vec<_> = (0..20).map(|_| hold(&mut pool, SIZE).unwrap()).collect();
    burst.into_iter().for_each(|data| pool.release(data));
    for _ in 0..3 * STALE {
        use_once(&mut pool, SIZE);
    }
    assert_eq!(pool.entries.len(), 1);
}

#[test]
fn the_number_of_buffers_is_limited() {
    let mut pool = Pool::new();
    let all: Vec<_> = (0..BUFFERS).map(|_| hold(&mut pool, SIZE).unwrap()).collect();
    assert_eq!(hold(&mut pool, SIZE), None);
    assert_eq!(hold(&mut pool, SIZE / 2), None);
    pool.release(all[7]);
    assert_eq!(hold(&mut pool, SIZE), Some(all[7]));
    // One of another size takes the place of one that never came back, not of one that did.
    pool.release(all[7]);
    assert_eq!(hold(&mut pool, SIZE / 2), None);
    pool.release(all[8]);
    assert!(hold(&mut pool, SIZE / 2).is_some());
    assert_eq!(pool.entries.len(), BUFFERS);
}

#[test]
fn a_descriptor_that_somebody_closed_is_not_used() {
    let mut pool = Pool::new();
    let data = hold(&mut pool, SIZE).unwrap();
    let entry = pool.find(data).unwrap();
    entry.exposed = true;
    let fd = entry.fd;
    // SAFETY: the entry's own descriptor. Its number now leads to a file that is not ours.
    unsafe {
        let other = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        libc::dup3(other, fd, libc::O_CLOEXEC);
        libc::close(other);
    }
    pool.release(data);
    for _ in 0..100 {
        let other = hold(&mut pool, SIZE).unwrap();
        assert_ne!(other, data);
        pool.release(other);
    }
    assert_eq!(pool.entries.len(), 1);
    // SAFETY: the number that was put there above; closing it says whether it still is.
    assert_eq!(unsafe { libc::close(fd) }, 0);
}
