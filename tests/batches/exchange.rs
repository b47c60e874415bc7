//! Batches that arrive, are held, dropped and come back.

use crate::processes::{Child, Random};
use crate::world::{
    Bell, Line, Message, SIZE, batch, count, ended, holds_word, is_whole, traces, world,
};
use std::collections::{HashMap, HashSet};
use stocache::batches::{self, BUFFERS, Buffer};

#[test]
fn a_batch_arrives_and_the_next_one_uses_the_same_memory_and_mapping() {
    world(a_batch_arrives_and_the_next_one_uses_the_same_memory_and_mapping, |mut random| {
        let (line, bell) = (Line::new(), Bell::new());
        let rounds = count(300, 10_000);
        let sizes = [8, 4096, SIZE, SIZE + 8, 1 << 20];
        let seed = random.next();
        let maker = Child::fork(|| {
            let mut random = Random::new(seed);
            for i in 0..rounds {
                let (buffer, message) = batch(sizes[i as usize % 5], random.next()).unwrap();
                assert!(line.put(message));
                drop(buffer);
                bell.wait();
            }
        });
        let mut known: HashMap<u64, usize> = HashMap::new();
        for _ in 0..rounds {
            let Message { ticket, word } = line.wait();
            let buffer = batches::receive(&ticket).unwrap();
            assert_eq!((buffer.len() as u64, buffer.instance()), (ticket.bytes, ticket.instance));
            assert!(holds_word(&buffer, word));
            let address = buffer.address().as_ptr() as usize;
            assert_eq!(address % 4096, 0);
            assert_eq!(*known.entry(ticket.instance).or_insert(address), address);
            drop(buffer);
            bell.ring();
        }
        assert_eq!(known.len(), sizes.len());
        assert_eq!(batches::usage().received, sizes.len());
        ended(maker);
        format!("{rounds} batches through {} buffers", known.len())
    });
}

struct Exchange {
    rounds: u64,
    overwritten: u64,
    buffers: usize,
    most: usize,
}

/// A maker and a receiver that holds some batches and drops others, in random order. With `early`,
/// the receiver lets go at once and goes on reading: the mistake that must be noticed.
fn exchange(rounds: u64, mut random: Random, early: bool) -> Exchange {
    const HELD: usize = 10;
    let (line, credit, done) = (Line::new(), Bell::new(), Bell::new());
    let seed = random.next();
    let maker = Child::fork(|| {
        let mut random = Random::new(seed);
        let mut own: Vec<(Buffer, u64)> = Vec::new();
        for i in 0..rounds {
            credit.wait();
            let (buffer, message) = batch(SIZE, i).expect("a buffer");
            assert!(line.put(message));
            // The maker, too, may go on holding what it sent.
            if random.below(4) == 0 {
                own.push((buffer, i));
            }
            if own.len() > 3 {
                let (buffer, word) = own.swap_remove(random.below(4) as usize);
                assert!(holds_word(&buffer, word), "the maker's own hold was written to");
            }
        }
        done.wait();
    });
    (0..4).for_each(|_| credit.ring());
    let mut held: Vec<(Option<Buffer>, usize, u64)> = Vec::new();
    let (mut overwritten, mut most) = (0, 0);
    let mut instances = HashSet::new();
    let broken = |&(_, address, word): &(Option<Buffer>, usize, u64)| {
        u64::from(!is_whole(address as *const u8, SIZE, word))
    };
    for round in 0..rounds {
        let Message { ticket, word } = line.wait();
        let buffer = batches::receive(&ticket).unwrap();
        let address = buffer.address().as_ptr() as usize;
        instances.insert(ticket.instance);
        held.push(((!early).then_some(buffer), address, word));
        if random.below(16) == 0 {
            overwritten += held.iter().map(broken).sum::<u64>();
        }
        while held.len() > HELD || (!held.is_empty() && random.below(2) == 0) {
            let gone = held.swap_remove(random.below(held.len() as u64) as usize);
            overwritten += broken(&gone);
        }
        most = most.max(held.len());
        if round + 4 < rounds {
            credit.ring();
        }
    }
    overwritten += held.iter().map(broken).sum::<u64>();
    done.ring();
    ended(maker);
    Exchange { rounds, overwritten, buffers: instances.len(), most }
}

#[test]
fn what_somebody_holds_is_never_written_to() {
    world(what_somebody_holds_is_never_written_to, |random| {
        let done = exchange(count(10_000, 500_000), random, false);
        assert_eq!(done.overwritten, 0);
        // As many as were ever in use at a time, not as many as there were batches.
        let enough = 24 + done.rounds / 200;
        assert!((done.buffers as u64) < enough, "{} buffers", done.buffers);
        let Exchange { rounds, buffers, most, .. } = done;
        format!("{rounds} batches through {buffers} buffers, up to {most} held at a time")
    });
}

#[test]
fn control_reading_after_letting_go_is_noticed() {
    world(control_reading_after_letting_go_is_noticed, |random| {
        let done = exchange(2_000, random, true);
        assert!(done.overwritten > 0, "the harness is blind");
        format!("{} of {} batches were seen to change", done.overwritten, done.rounds)
    });
}

#[test]
fn tickets_that_nobody_receives_cost_a_bounded_number_of_buffers() {
    world(tickets_that_nobody_receives_cost_a_bounded_number_of_buffers, |_| {
        let mut lost = Vec::new();
        let (mut none, rounds) = (0, 10 * BUFFERS);
        for i in 0..rounds {
            match batch(SIZE, i as u64) {
                Some((_buffer, message)) => lost.push(message.ticket),
                None => none += 1,
            }
        }
        assert_eq!((lost.len(), none), (BUFFERS, rounds - BUFFERS));
        assert_eq!(traces(), (BUFFERS, BUFFERS));
        assert!(lost.iter().all(batches::cancel) && !lost.iter().any(batches::cancel));
        assert!(batches::take(SIZE).is_some());
        format!("{BUFFERS} buffers at most, {none} batches through ordinary memory")
    });
}

#[test]
fn a_message_that_comes_back_is_the_same_memory() {
    world(a_message_that_comes_back_is_the_same_memory, |_| {
        let (there, back) = (Line::new(), Line::new());
        let other = Child::fork(|| {
            for _ in 0..100 {
                let Message { ticket, word } = there.wait();
                let buffer = batches::receive(&ticket).unwrap();
                let ticket = buffer.send().unwrap();
                drop(buffer);
                assert!(back.put(Message { ticket, word }));
            }
        });
        let mut instances = HashSet::new();
        for i in 0..100 {
            let (buffer, message) = batch(SIZE, i).unwrap();
            let (address, instance) = (buffer.address(), buffer.instance());
            instances.insert(instance);
            assert!(there.put(message));
            drop(buffer);
            let Message { ticket, word } = back.wait();
            assert_ne!(ticket.pid, std::process::id());
            // The one in flight is not given out.
            assert_ne!(batches::take(SIZE).unwrap().instance(), instance);
            let buffer = batches::receive(&ticket).unwrap();
            assert_eq!((buffer.address(), buffer.instance()), (address, instance));
            assert!(holds_word(&buffer, word));
        }
        ended(other);
        assert_eq!(batches::usage().received, 0);
        // Without any other process it is the same.
        let (buffer, message) = batch(SIZE, 1).unwrap();
        let again = batches::receive(&message.ticket).unwrap();
        assert_eq!(again.address(), buffer.address());
        let found = batches::holding(buffer.address().as_ptr()).unwrap();
        let raw = buffer.into_raw();
        drop((again, found));
        assert_eq!(batches::usage().holds, 1);
        // SAFETY: from `into_raw`, used once.
        drop(unsafe { Buffer::from_raw(raw) }.unwrap());
        // SAFETY: wrong on purpose, and harmless while nothing was taken since: there is no hold.
        assert!(unsafe { Buffer::from_raw(raw) }.is_none());
        format!("100 messages through {} buffers", instances.len())
    });
}
