//! Children, and what they inherit.

use crate::processes::{Child, Random};
use crate::world::{
    Bell, HANG, Line, Message, SIZE, batch, count, ended, exhaust_descriptors, fill, holds_word,
    kill, traces, world,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stocache::Kind;
use stocache::batches::{self, BUFFERS, Buffer};

#[test]
fn what_a_child_inherits_stays_whole_until_it_lets_go() {
    world(what_a_child_inherits_stays_whole_until_it_lets_go, |_| {
        let (go, told) = (Bell::new(), Bell::new());
        for round in 0..count(50, 1_000) {
            let buffer = batches::take(SIZE).unwrap();
            fill(&buffer, round);
            let instance = buffer.instance();
            let mut inherited = Some(buffer);
            let child = Child::fork(|| {
                assert_eq!(traces(), (1, 1), "more than what is held");
                go.wait();
                let buffer = inherited.take().unwrap();
                assert!(holds_word(&buffer, round), "what a child held was written to");
                // What its parent made is not the child's to give out.
                let own = batches::take(SIZE).unwrap();
                assert_eq!(batches::usage().made, 1);
                fill(&own, !0);
                assert!(holds_word(&buffer, round));
                drop((own, buffer));
                told.ring();
                go.wait();
            });
            drop(inherited.take());
            // While the child holds it, it is not given out here.
            for _ in 0..3 {
                let other = batches::take(SIZE).unwrap();
                assert_ne!(other.instance(), instance);
                fill(&other, !0);
            }
            go.ring();
            told.wait();
            // The child lives, but let go.
            let made = batches::usage().made;
            let all: Vec<Buffer> = (0..made).map(|_| batches::take(SIZE).unwrap()).collect();
            assert!(all.iter().any(|buffer| buffer.instance() == instance));
            go.ring();
            ended(child);
        }
        let made = batches::usage().made;
        assert!(made <= 4, "{made} buffers");
        format!("{made} buffers in the parent")
    });
}

#[test]
fn a_child_cannot_let_go_for_its_parent() {
    world(a_child_cannot_let_go_for_its_parent, |_| {
        let (line, told) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            let (buffer, message) = batch(SIZE, 5).unwrap();
            let instance = buffer.instance();
            assert!(line.put(message));
            drop(buffer);
            // The receiver and its children come and go; then all are gone.
            told.wait();
            for _ in 0..10 {
                let other = batches::take(SIZE).unwrap();
                assert_ne!(other.instance(), instance, "given out while the receiver held it");
                fill(&other, 6);
            }
            assert!(line.put(message));
            told.wait();
            let both = [batches::take(SIZE).unwrap(), batches::take(SIZE).unwrap()];
            assert!(both.iter().any(|buffer| buffer.instance() == instance));
        });
        let received = batches::receive(&line.wait().ticket).unwrap();
        let mut mine = Some(received);
        // One lets go, one is killed, one stays.
        ended(Child::fork(|| drop(mine.take())));
        let child = Child::fork(|| std::thread::sleep(HANG));
        kill(child);
        let last = Child::fork(|| {
            std::thread::sleep(Duration::from_millis(20));
            assert!(holds_word(mine.as_ref().unwrap(), 5));
            drop(mine.take());
        });
        told.ring();
        let second = line.wait(); // a ticket that was used already
        assert_eq!(batches::receive(&second.ticket).unwrap_err().kind(), Kind::State);
        assert!(holds_word(mine.as_ref().unwrap(), 5));
        ended(last);
        drop(mine.take());
        told.ring();
        ended(maker);
        "the parent's hold stayed".into()
    });
}

#[test]
fn a_fork_without_a_descriptor_to_spare_costs_the_buffer_and_nothing_else() {
    world(a_fork_without_a_descriptor_to_spare_costs_the_buffer_and_nothing_else, |_| {
        let (go, told, line) = (Bell::new(), Bell::new(), Line::new());
        let buffer = batches::take(SIZE).unwrap();
        fill(&buffer, 3);
        let (instance, mut inherited) = (buffer.instance(), Some(buffer));
        let before = exhaust_descriptors();
        let child = Child::fork(|| {
            go.wait();
            assert!(holds_word(inherited.as_ref().unwrap(), 3));
            drop(inherited.take());
            told.ring();
            go.wait();
        });
        // SAFETY: the limit that was there before.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &before) }, 0);
        // A ticket keeps it open, even so.
        let ticket = inherited.as_ref().unwrap().send().unwrap();
        assert!(line.put(Message { ticket, word: 3 }));
        drop(inherited.take());
        let reader = Child::fork(|| {
            let Message { ticket, word } = line.wait();
            assert!(holds_word(&batches::receive(&ticket).unwrap(), word));
        });
        ended(reader);
        for _ in 0..BUFFERS {
            let other = batches::take(SIZE).unwrap();
            assert_ne!(other.instance(), instance);
            fill(&other, 4);
        }
        go.ring();
        told.wait();
        assert_ne!(batches::take(SIZE).unwrap().instance(), instance);
        assert_eq!(traces(), (1, 1));
        go.ring();
        ended(child);
        "the buffer was replaced".into()
    });
}

#[test]
fn children_forked_while_threads_use_the_ring_all_work() {
    world(children_forked_while_threads_use_the_ring_all_work, |mut random| {
        let (stop, forks) = (AtomicBool::new(false), count(300, 3_000));
        let once = |random: &mut Random| {
            let word = random.next();
            let (buffer, message) = batch(SIZE, word).expect("a buffer");
            let other = batches::receive(&message.ticket).unwrap();
            let third = batches::holding(other.address().as_ptr()).unwrap();
            drop(buffer);
            assert!(holds_word(&third, word));
        };
        std::thread::scope(|scope| {
            for t in 0..3 {
                let (once, stop) = (&once, &stop);
                scope.spawn(move || {
                    let mut random = Random::new(t + 1);
                    while !stop.load(Ordering::Relaxed) {
                        once(&mut random);
                    }
                });
            }
            for _ in 0..forks {
                let seed = random.next();
                let child = Child::fork(|| {
                    let mut random = Random::new(seed);
                    (0..5).for_each(|_| once(&mut random));
                });
                let status = child.wait_at_most(HANG);
                if status != Ok(0) {
                    stop.store(true, Ordering::Relaxed);
                    panic!("a child: {status:?}");
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let usage = batches::usage();
        assert!(usage.made <= BUFFERS && usage.received == 0, "{usage:?}");
        format!("{forks} children, {} buffers", usage.made)
    });
}

#[test]
fn a_fork_during_the_first_use_leaves_the_child_a_ring_that_works() {
    world(a_fork_during_the_first_use_leaves_the_child_a_ring_that_works, |mut random| {
        let rounds = count(300, 5_000);
        for _ in 0..rounds {
            let wait = random.below(20_000);
            // Nobody has used the ring here, so each child is about to use it for the first time.
            ended(Child::fork(|| {
                std::thread::scope(|scope| {
                    scope.spawn(|| (0..20).for_each(|_| drop(batches::take(4096))));
                    (0..wait).for_each(|_| std::hint::spin_loop());
                    for _ in 0..3 {
                        ended(Child::fork(|| drop(batches::take(4096).unwrap())));
                    }
                });
            }));
        }
        format!("{rounds} first uses")
    });
}
