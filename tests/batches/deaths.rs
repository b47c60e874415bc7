//! Makers and receivers that die, stop, or lose their descriptors.

use crate::processes::{Child, Random, Tally};
use crate::world::{
    Bell, HANG, Line, Message, SIZE, batch, count, holds_word, kill, traces, world,
};
use std::time::{Duration, Instant};
use stocache::Kind;
use stocache::batches::{self, BUFFERS, Buffer};

const CHECKED: usize = 0;
const BROKEN: usize = 1;
const REFUSED: usize = 2;
const NONE: usize = 3;

/// Makers and receivers around one queue; receivers pass some batches on. All are killed at random.
#[test]
fn makers_and_receivers_die_and_no_batch_is_torn() {
    const MAKERS: usize = 3;
    const RECEIVERS: usize = 3;
    world(makers_and_receivers_die_and_no_batch_is_torn, |mut random| {
        let (line, tally) = (Line::new(), Tally::new());
        let make = |mut random: Random| {
            loop {
                match batch(SIZE, random.next()) {
                    Some((_buffer, message)) if line.put(message) => {}
                    Some((_buffer, message)) => assert!(batches::cancel(&message.ticket)),
                    None => {
                        tally.add(NONE);
                        std::thread::sleep(Duration::from_micros(100));
                    }
                }
            }
        };
        let read = |mut random: Random| {
            let mut held: Vec<(Buffer, u64)> = Vec::new();
            let check = |buffer: &Buffer, word| {
                tally.add(if holds_word(buffer, word) { CHECKED } else { BROKEN });
            };
            loop {
                let Message { ticket, word } = line.wait();
                match batches::receive(&ticket) {
                    Ok(buffer) => {
                        check(&buffer, word);
                        if random.below(4) == 0
                            && let Ok(ticket) = buffer.send()
                            && !line.put(Message { ticket, word })
                        {
                            assert!(batches::cancel(&ticket));
                        }
                        held.push((buffer, word));
                    }
                    // The sender died first.
                    Err(error) => {
                        assert!(matches!(error.kind(), Kind::State | Kind::Refused), "{error}");
                        tally.add(REFUSED);
                    }
                }
                while held.len() > 6 || (!held.is_empty() && random.below(2) == 0) {
                    let (buffer, word) = held.swap_remove(random.below(held.len() as u64) as usize);
                    check(&buffer, word);
                }
                // Mappings of the dead do not pile up.
                let received = batches::usage().received;
                assert!(received <= MAKERS * BUFFERS + 40, "{received} mappings");
            }
        };
        let spawn = |i: usize, random: &mut Random| {
            let theirs = Random::new(random.next());
            Child::fork(|| if i < MAKERS { make(theirs) } else { read(theirs) })
        };
        let all = MAKERS + RECEIVERS;
        let mut children: Vec<Child> = (0..all).map(|i| spawn(i, &mut random)).collect();
        let kills = count(300, 10_000);
        let (mut killed, began) = (0, Instant::now());
        while killed < kills && tally.get(BROKEN) == 0 {
            assert!(began.elapsed() < HANG * 20, "nothing gets done any more");
            if tally.get(CHECKED) < killed * 50 {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            std::thread::sleep(Duration::from_micros(random.below(2_000)));
            let victim = random.below(all as u64) as usize;
            let next = spawn(victim, &mut random);
            kill(std::mem::replace(&mut children[victim], next));
            killed += 1;
        }
        children.into_iter().for_each(kill);
        assert_eq!(tally.get(BROKEN), 0, "batches were written to while they were held");
        format!(
            "{killed} kills, {} checks, {} messages of the dead, {} without a buffer",
            tally.get(CHECKED),
            tally.get(REFUSED),
            tally.get(NONE)
        )
    });
}

#[test]
fn a_receiver_that_is_killed_gives_everything_back() {
    world(a_receiver_that_is_killed_gives_everything_back, |mut random| {
        const BATCHES: usize = 8;
        let rounds = count(100, 2_000);
        let mut cancelled = 0;
        for round in 0..rounds {
            let line = Line::new();
            let receiver = Child::fork(|| {
                let mut held = Vec::new();
                while let Some(message) = line.get(10_000) {
                    held.push(batches::receive(&message.ticket).unwrap());
                }
            });
            let sent: Vec<Message> = (0..BATCHES as u64)
                .map(|i| {
                    let (_buffer, message) = batch(SIZE, round << 8 | i).expect("a buffer");
                    assert!(line.put(message));
                    message
                })
                .collect();
            std::thread::sleep(Duration::from_micros(random.below(1_500)));
            kill(receiver);
            // What it had received the kernel knows; what it had not, the sender does.
            cancelled += sent.iter().filter(|message| batches::cancel(&message.ticket)).count();
            let usage = batches::usage();
            assert!(usage.made <= BATCHES, "{usage:?} after {round} rounds");
            let again: Vec<Buffer> = (0..BATCHES).map(|_| batches::take(SIZE).unwrap()).collect();
            assert_eq!(batches::usage().made, BATCHES, "a buffer of the dead was not free");
            drop(again);
        }
        format!("{rounds} kills, {cancelled} of {} tickets unreceived", rounds * BATCHES as u64)
    });
}

/// A process that has received a batch, done this, and now holds it; and whose batch that is.
fn a_receiver_that(does: impl FnOnce()) -> (Child, u64) {
    let (line, bell) = (Line::new(), Bell::new());
    let receiver = Child::fork(|| {
        let message = line.wait();
        let buffer = batches::receive(&message.ticket).unwrap();
        does();
        bell.ring();
        std::thread::sleep(HANG);
        drop(buffer);
    });
    let (buffer, message) = batch(SIZE, 7).unwrap();
    let instance = buffer.instance();
    assert!(line.put(message));
    drop(buffer);
    bell.wait();
    (receiver, instance)
}

fn is_not_used_again(instance: u64) {
    for _ in 0..200 {
        assert_ne!(batches::take(SIZE).unwrap().instance(), instance);
    }
}

#[test]
fn a_receiver_that_stands_still_keeps_what_it_holds() {
    world(a_receiver_that_stands_still_keeps_what_it_holds, |_| {
        let (receiver, instance) = a_receiver_that(|| ());
        receiver.stop();
        is_not_used_again(instance);
        kill(receiver);
        let both = [batches::take(SIZE).unwrap(), batches::take(SIZE).unwrap()];
        assert!(both.iter().any(|buffer| buffer.instance() == instance));
        "kept, and given back at its death".into()
    });
}

/// Every descriptor of a batch in this process, closed under the ring's feet.
fn close_descriptors_of_batches() -> usize {
    let mut closed = 0;
    for fd in 3..1024 {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}"));
        if link.is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:stocache-batch")) {
            // SAFETY: what a program does that closes descriptors it does not know.
            closed += usize::from(unsafe { libc::close(fd) } == 0);
        }
    }
    closed
}

#[test]
fn a_receiver_whose_descriptors_somebody_closed_keeps_what_it_holds() {
    world(a_receiver_whose_descriptors_somebody_closed_keeps_what_it_holds, |_| {
        let (receiver, instance) =
            a_receiver_that(|| assert_eq!(close_descriptors_of_batches(), 1));
        is_not_used_again(instance);
        kill(receiver);
        "kept without its descriptor".into()
    });
}

#[test]
fn after_the_death_of_a_maker_its_batches_are_whole_and_its_memory_is_given_back() {
    world(
        after_the_death_of_a_maker_its_batches_are_whole_and_its_memory_is_given_back,
        |mut random| {
            let rounds = count(100, 2_000);
            let (mut held_at_death, mut gone) = (0, 0);
            for round in 0..rounds {
                let line = Line::new();
                let maker = Child::fork(|| {
                    let mut i = 0;
                    loop {
                        match batch(1 << 20, round << 32 | i) {
                            Some((_buffer, message)) if line.put(message) => i += 1,
                            Some((_buffer, message)) => assert!(batches::cancel(&message.ticket)),
                            None => std::thread::sleep(Duration::from_micros(50)),
                        }
                    }
                });
                let mut held = Vec::new();
                for _ in 0..1 + random.below(20) {
                    let Message { ticket, word } = line.wait();
                    let buffer = batches::receive(&ticket).unwrap();
                    if random.below(2) == 0 {
                        held.push((buffer, word));
                    }
                }
                kill(maker);
                held_at_death += held.len();
                assert!(held.iter().all(|(buffer, word)| holds_word(buffer, *word)));
                while let Some(message) = line.get(0) {
                    // A mapping that is kept serves a last ticket; nothing else is left of the dead.
                    match batches::receive(&message.ticket) {
                        Ok(buffer) => assert!(holds_word(&buffer, message.word)),
                        Err(error) => {
                            assert_eq!(error.kind(), Kind::State, "{error}");
                            gone += 1;
                        }
                    }
                }
                batches::give_back();
                let before = batches::usage().received;
                assert!(before <= held.len(), "{before} mappings, {} held", held.len());
                assert!(held.iter().all(|(buffer, word)| holds_word(buffer, *word)));
                while !held.is_empty() {
                    held.swap_remove(random.below(held.len() as u64) as usize);
                    assert_eq!(traces(), (held.len(), held.len()));
                }
            }
            assert_eq!((batches::usage(), traces()), (batches::Usage::default(), (0, 0)));
            format!("{rounds} kills, {held_at_death} batches outlived them, {gone} were lost")
        },
    );
}

#[test]
fn the_last_hold_of_a_dead_maker_gives_back_what_was_only_kept() {
    world(the_last_hold_of_a_dead_maker_gives_back_what_was_only_kept, |_| {
        let line = Line::new();
        let maker = Child::fork(|| {
            let all: Vec<_> = (0..6).map(|i| batch(SIZE, i).unwrap()).collect();
            assert!(all.iter().all(|(_, message)| line.put(*message)));
            std::thread::sleep(HANG);
        });
        let mut held: Vec<Buffer> =
            (0..6).map(|_| batches::receive(&line.wait().ticket).unwrap()).collect();
        let last = held.pop().unwrap();
        drop(held);
        assert_eq!(traces(), (6, 6));
        kill(maker);
        drop(last);
        assert_eq!(traces(), (0, 0));
        "nothing is kept".into()
    });
}

#[test]
fn a_buffer_that_its_maker_gave_up_is_not_kept_by_receivers() {
    world(a_buffer_that_its_maker_gave_up_is_not_kept_by_receivers, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            for bytes in [SIZE, 2 * SIZE] {
                for i in 0..1_000 {
                    let (_buffer, message) = batch(bytes, i).unwrap();
                    assert!(line.put(message));
                    bell.wait();
                }
            }
            std::thread::sleep(HANG);
        });
        for _ in 0..2_000 {
            drop(batches::receive(&line.wait().ticket).unwrap());
            bell.ring();
        }
        // Of the first size the maker has none any more, and nor have we.
        assert_eq!(traces(), (1, 1));
        kill(maker);
        batches::give_back();
        assert_eq!(traces(), (0, 0));
        "one mapping at the end".into()
    });
}
