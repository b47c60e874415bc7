//! Batch buffers between real processes, under kills, forks and forged tickets.
//!
//! Every test runs in a process of its own (`world`), because a process has one ring. Every batch is
//! one word repeated, and the message carries the word: a batch that was written to while somebody
//! held it is seen. `STOCACHE_LONG=1` raises the counts, `STOCACHE_TEST_SEED` repeats a run.
#![cfg(not(feature = "faults"))]

#[allow(dead_code)] // shared with the torture program
#[path = "torture/processes.rs"]
mod processes;

use processes::{Child, Random, Tally};
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stocache::Kind;
use stocache::batches::{self, BUFFERS, Buffer, TICKETS, Ticket};

const SIZE: usize = 64 << 10;
const HANG: Duration = Duration::from_secs(60);

fn count(quick: u64, full: u64) -> u64 {
    if std::env::var_os("STOCACHE_LONG").is_some() { full } else { quick }
}

/// Runs `body` in a process of its own, with an empty ring and no threads: this program again, with
/// `test` alone. Its last line is printed.
fn world<T: Fn()>(test: T, body: impl FnOnce(Random) -> String) {
    const MARK: &str = "STOCACHE_RING_WORLD";
    let name = std::any::type_name_of_val(&test).rsplit("::").next().unwrap();
    if std::env::var_os(MARK).is_some() {
        // SAFETY: a world must not outlive a harness that was killed.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let given = std::env::var("STOCACHE_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x9e37_79b9);
        println!("{name}: seed {seed}");
        let line = body(Random::new(seed));
        assert_eq!(batches::usage().holds, 0, "holds are left");
        println!("{name}: {line}");
        return;
    }
    let mut this = std::process::Command::new(std::env::current_exe().unwrap());
    this.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(MARK, "1");
    let mut world = this.stdout(std::process::Stdio::piped()).spawn().expect("this program runs");
    let began = Instant::now();
    let status = loop {
        match world.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > 30 * HANG => {
                world.kill().unwrap();
                world.wait().unwrap();
                panic!("{name} hangs since {:?}", 30 * HANG);
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut lines = String::new();
    world.stdout.take().unwrap().read_to_string(&mut lines).unwrap();
    lines.lines().filter(|line| line.contains(name)).for_each(|line| println!("{line}"));
    assert!(status.success(), "{name}: {status}");
}

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: two descriptors that are ours from here on.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// A batch on its way.
#[derive(Clone, Copy, Debug)]
struct Message {
    ticket: Ticket,
    word: u64,
}

/// A pipe for messages; each is written and read in one piece.
struct Line {
    from: OwnedFd,
    to: OwnedFd,
}

impl Line {
    fn new() -> Self {
        let (from, to) = pipe();
        Self { from, to }
    }

    /// False if the pipe is full.
    fn put(&self, message: Message) -> bool {
        let Ticket { pid, fd, instance, bytes, serial } = message.ticket;
        let words = [u64::from(pid), fd as u64, instance, bytes, serial, message.word, 0, 0];
        let mut ready = libc::pollfd { fd: self.to.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one pollfd; 64 bytes of an array to a pipe that has room for a page.
        unsafe {
            libc::poll(&mut ready, 1, 0) == 1
                && libc::write(self.to.as_raw_fd(), words.as_ptr().cast(), 64) == 64
        }
    }

    /// Waits for the next one at most that long.
    fn get(&self, milliseconds: i32) -> Option<Message> {
        let mut words = [0u64; 8];
        let mut ready =
            libc::pollfd { fd: self.from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd; 64 bytes into an array of that size.
        let read = unsafe {
            if libc::poll(&mut ready, 1, milliseconds) != 1 {
                return None;
            }
            libc::read(self.from.as_raw_fd(), words.as_mut_ptr().cast(), 64)
        };
        assert_eq!(read, 64);
        let [pid, fd, instance, bytes, serial, word, ..] = words;
        let ticket = Ticket { pid: pid as u32, fd: fd as i32, instance, bytes, serial };
        Some(Message { ticket, word })
    }

    fn wait(&self) -> Message {
        self.get(HANG.as_millis() as i32).expect("a message")
    }
}

/// Tells other processes to go on, one byte each time.
struct Bell(OwnedFd, OwnedFd);

impl Bell {
    fn new() -> Self {
        let (from, to) = pipe();
        Self(from, to)
    }

    fn ring(&self) {
        // SAFETY: one byte to an open pipe.
        assert_eq!(unsafe { libc::write(self.1.as_raw_fd(), [1u8].as_ptr().cast(), 1) }, 1);
    }

    fn wait(&self) {
        let mut byte = [0u8];
        // SAFETY: one byte from an open pipe.
        assert_eq!(unsafe { libc::read(self.0.as_raw_fd(), byte.as_mut_ptr().cast(), 1) }, 1);
    }
}

fn fill(buffer: &Buffer, word: u64) {
    let start = buffer.address().as_ptr().cast::<u64>();
    for i in 0..buffer.len() / 8 {
        // SAFETY: inside the buffer, which is page-aligned.
        unsafe { start.add(i).write_volatile(word) };
    }
}

fn is_whole(address: *const u8, bytes: usize, word: u64) -> bool {
    let start = address.cast::<u64>();
    // SAFETY: inside a buffer that is mapped; others may write it, hence volatile.
    (0..bytes / 8).all(|i| unsafe { start.add(i).read_volatile() } == word)
}

fn holds_word(buffer: &Buffer, word: u64) -> bool {
    is_whole(buffer.address().as_ptr(), buffer.len(), word)
}

/// A new batch, filled and sent.
fn batch(bytes: usize, word: u64) -> Option<(Buffer, Message)> {
    let buffer = batches::take(bytes)?;
    fill(&buffer, word);
    let ticket = buffer.send().expect("a ticket");
    Some((buffer, Message { ticket, word }))
}

/// Descriptors and mappings of batches in this process.
fn traces() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
        let target = std::fs::read_link(entry.as_ref().unwrap().path());
        target.is_ok_and(|to| to.to_string_lossy().contains("stocache-batch"))
    });
    let descriptors = descriptors.count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.lines().filter(|line| line.contains("stocache-batch")).count())
}

/// Kills a child, which must have lived until then: a failed assertion would have ended it.
fn kill(child: Child) {
    child.signal(libc::SIGKILL);
    let status = child.wait();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
}

fn ended(child: Child) {
    assert_eq!(child.wait_at_most(HANG).unwrap(), 0, "a child failed");
}

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

#[test]
fn a_receiver_that_stands_still_keeps_what_it_holds() {
    world(a_receiver_that_stands_still_keeps_what_it_holds, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let receiver = Child::fork(|| {
            let message = line.wait();
            let buffer = batches::receive(&message.ticket).unwrap();
            bell.ring();
            std::thread::sleep(HANG);
            drop(buffer);
        });
        let (buffer, message) = batch(SIZE, 7).unwrap();
        let instance = buffer.instance();
        assert!(line.put(message));
        drop(buffer);
        bell.wait();
        receiver.stop();
        for _ in 0..200 {
            assert_ne!(batches::take(SIZE).unwrap().instance(), instance);
        }
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
        let (line, bell) = (Line::new(), Bell::new());
        let receiver = Child::fork(|| {
            let message = line.wait();
            let buffer = batches::receive(&message.ticket).unwrap();
            assert_eq!(close_descriptors_of_batches(), 1);
            bell.ring();
            std::thread::sleep(HANG);
            drop(buffer);
        });
        let (buffer, message) = batch(SIZE, 7).unwrap();
        let instance = buffer.instance();
        assert!(line.put(message));
        drop(buffer);
        bell.wait();
        for _ in 0..200 {
            assert_ne!(batches::take(SIZE).unwrap().instance(), instance);
        }
        kill(receiver);
        "kept without its descriptor".into()
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

/// Leaves this process no descriptor to open.
fn exhaust_descriptors() -> libc::rlimit {
    // SAFETY: plain calls with values of our own; the null device is opened until it fails.
    unsafe {
        let mut before: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut before), 0);
        let few = libc::rlimit { rlim_cur: 64, ..before };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &few), 0);
        while libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) >= 0 {}
        before
    }
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
fn without_descriptors_or_address_space_there_is_no_buffer_and_a_clear_error() {
    world(without_descriptors_or_address_space_there_is_no_buffer_and_a_clear_error, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            let (_buffer, message) = batch(SIZE, 1).unwrap();
            assert!(line.put(message));
            bell.wait();
        });
        let message = line.wait();
        let before = exhaust_descriptors();
        assert!(batches::take(SIZE).is_none());
        let error = batches::receive(&message.ticket).unwrap_err();
        assert_eq!(error.kind(), Kind::Space, "{error}");
        assert!(error.to_string().contains("ulimit -n"), "{error}");
        // SAFETY: the limit that was there before.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &before) }, 0);
        assert!(holds_word(&batches::receive(&message.ticket).unwrap(), 1));
        bell.ring();
        ended(maker);
        for (resource, bytes) in [(libc::RLIMIT_FSIZE, 1 << 20), (libc::RLIMIT_AS, 1 << 20)] {
            // SAFETY: a limit of this process only, put back below.
            unsafe {
                let mut before: libc::rlimit = std::mem::zeroed();
                libc::getrlimit(resource, &mut before);
                libc::setrlimit(resource, &libc::rlimit { rlim_cur: bytes, ..before });
                let taken = batches::take(2 << 20);
                libc::setrlimit(resource, &before);
                assert!(taken.is_none());
            }
        }
        // After a refusal it pauses.
        assert!((0..40).any(|_| batches::take(2 << 20).is_some()));
        "refused, and possible again".into()
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

/// A memfd of the right name and length; `fill` says what is in it.
fn forged(seals: libc::c_int, mode: libc::mode_t, header: &[u64]) -> OwnedFd {
    // SAFETY: a new descriptor that is ours; the header is a live slice.
    unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        let fd = OwnedFd::from_raw_fd(libc::memfd_create(c"stocache-batch".as_ptr(), flags));
        assert_eq!(libc::fchmod(fd.as_raw_fd(), mode), 0);
        assert_eq!(libc::fallocate(fd.as_raw_fd(), 0, 0, 8192), 0);
        let bytes = size_of_val(header);
        let written = libc::pwrite(fd.as_raw_fd(), header.as_ptr().cast(), bytes, 0);
        assert_eq!(written, bytes as isize);
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals), 0);
        fd
    }
}

#[test]
fn forged_and_damaged_tickets_are_refused() {
    world(forged_and_damaged_tickets_are_refused, |mut random| {
        let magic = u64::from_le_bytes(*b"stobatch");
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let pid = std::process::id();
        let refused = |ticket: Ticket, kind: Kind, why: &str| {
            let error = batches::receive(&ticket).expect_err(why);
            let text = error.to_string();
            assert_eq!(error.kind(), kind, "{text}");
            assert!(text.contains(why) && !text.contains('\n'), "{why:?} is not in {text:?}");
        };
        let at =
            |fd: &OwnedFd| Ticket { pid, fd: fd.as_raw_fd(), instance: 9, bytes: 8, serial: 1 };

        // What is no batch at all.
        let path = std::env::temp_dir().join(format!("stocache-ring-{pid}\nline"));
        let file: OwnedFd = std::fs::File::create_new(&path).unwrap().into();
        let folder: OwnedFd = std::fs::File::open("/proc").unwrap().into();
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let (from, to) = pipe();
        // SAFETY: two new descriptors that are ours.
        let (memfd, socket) = unsafe {
            let memfd = libc::memfd_create(c"another".as_ptr(), libc::MFD_CLOEXEC);
            let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
            (OwnedFd::from_raw_fd(memfd), OwnedFd::from_raw_fd(socket))
        };
        for fd in [&file, &folder, &null, &from, &to, &memfd, &socket] {
            refused(at(fd), Kind::Refused, "it leads to");
        }
        std::fs::remove_file(&path).unwrap();
        refused(at(&file), Kind::Refused, "it leads to");

        // What looks like one.
        refused(at(&forged(0, 0o600, &[magic, 9, 8])), Kind::Refused, "not sealed");
        let writable = libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        refused(at(&forged(writable, 0o600, &[magic, 9, 8])), Kind::Refused, "not sealed");
        refused(at(&forged(seals, 0o644, &[magic, 9, 8])), Kind::Refused, "mode");
        for header in [[0, 9, 8], [magic, 8, 8], [magic, 9, 9], [!0, !0, !0]] {
            refused(at(&forged(seals, 0o600, &header)), Kind::Refused, "header");
        }
        let real = forged(seals, 0o600, &[magic, 9, 8]);
        refused(Ticket { bytes: 4097, ..at(&real) }, Kind::Refused, "8192 bytes, not 12288");
        refused(Ticket { bytes: 0, ..at(&real) }, Kind::Refused, "0 bytes");
        refused(Ticket { bytes: !0, ..at(&real) }, Kind::Refused, "no batch has");
        refused(Ticket { fd: -1, ..at(&real) }, Kind::Refused, "descriptor -1");
        refused(Ticket { serial: 0, ..at(&real) }, Kind::State, "received before");
        refused(at(&real), Kind::State, "received before");
        let closed = Ticket { fd: real.into_raw_fd(), pid, instance: 9, bytes: 8, serial: 1 };
        // SAFETY: its owner gave it up above.
        unsafe { libc::close(closed.fd) };
        refused(closed, Kind::State, "is gone");
        refused(Ticket { pid: 0, ..closed }, Kind::State, "is gone");
        refused(Ticket { pid: u32::MAX, ..closed }, Kind::State, "is gone");

        // A real one, damaged in every bit; each of these is refused, and the real one then works.
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            let (_buffer, message) = batch(SIZE, 77).unwrap();
            assert!(line.put(message));
            bell.wait();
        });
        let Message { ticket, word } = line.wait();
        for bit in 0..64 {
            let flip = 1u64 << bit;
            let mut damaged = vec![
                Ticket { instance: ticket.instance ^ flip, ..ticket },
                Ticket { bytes: ticket.bytes ^ flip, ..ticket },
                Ticket { serial: ticket.serial ^ flip, ..ticket },
            ];
            if bit < 32 {
                damaged.push(Ticket { pid: ticket.pid ^ flip as u32, ..ticket });
                damaged.push(Ticket { fd: ticket.fd ^ flip as i32, ..ticket });
            }
            for damaged in damaged {
                assert!(batches::receive(&damaged).is_err(), "{damaged:?} for {ticket:?}");
            }
        }
        let rounds = count(5_000, 200_000);
        for _ in 0..rounds {
            let number = |random: &mut Random, near: u64| match random.below(3) {
                0 => near,
                1 => random.below(64),
                _ => random.next(),
            };
            let forged = Ticket {
                pid: number(&mut random, u64::from(pid)) as u32,
                fd: number(&mut random, 3) as i32,
                instance: random.next(),
                bytes: number(&mut random, SIZE as u64),
                serial: number(&mut random, 1),
            };
            assert!(batches::receive(&forged).is_err());
        }
        assert_eq!(batches::usage(), batches::Usage::default());
        assert!(holds_word(&batches::receive(&ticket).unwrap(), word));
        refused(ticket, Kind::State, "received before");
        bell.ring();
        ended(maker);
        format!("{rounds} random tickets")
    });
}

#[test]
fn a_batch_of_another_user_is_refused() {
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: not root, so batches of other users are not covered");
        return;
    }
    world(a_batch_of_another_user_is_refused, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            // SAFETY: becomes nobody, for good.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            assert!(batches::take(SIZE).is_none(), "nobody could open it");
            // SAFETY: as before it became another user.
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }, 0);
            let (_buffer, message) = batch(SIZE, 1).unwrap();
            assert!(line.put(message));
            bell.wait();
        });
        let error = batches::receive(&line.wait().ticket).unwrap_err();
        assert_eq!(error.kind(), Kind::Refused);
        assert!(error.to_string().contains("owner"), "{error}");
        bell.ring();
        ended(maker);
        error.to_string()
    });
}

#[test]
fn too_many_messages_of_one_batch_are_an_error() {
    world(too_many_messages_of_one_batch_are_an_error, |_| {
        let buffer = batches::take(SIZE).unwrap();
        let tickets: Vec<Ticket> = (0..TICKETS).map(|_| buffer.send().unwrap()).collect();
        let error = buffer.send().unwrap_err();
        assert_eq!(error.kind(), Kind::State, "{error}");
        let all: Vec<Buffer> = tickets.iter().map(|t| batches::receive(t).unwrap()).collect();
        assert_eq!(batches::usage().holds, TICKETS + 1);
        drop(all);
        drop(batches::receive(&buffer.send().unwrap()).unwrap());
        "one more after they were received".into()
    });
}

#[test]
fn descriptors_are_not_inherited_by_programs() {
    world(descriptors_are_not_inherited_by_programs, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            let (_buffer, message) = batch(SIZE, 1).unwrap();
            assert!(line.put(message));
            bell.wait();
        });
        let theirs = batches::receive(&line.wait().ticket).unwrap();
        let mine = batches::take(SIZE).unwrap();
        assert_eq!(traces(), (2, 2));
        let listed = std::process::Command::new("ls").args(["-l", "/proc/self/fd"]).output();
        let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
        assert!(listed.contains("/proc") && !listed.contains("memfd:stocache"), "{listed}");
        drop((theirs, mine));
        bell.ring();
        ended(maker);
        "none".into()
    });
}

/// A memory cgroup that is removed with the value.
struct Group(std::path::PathBuf, &'static str);

impl Group {
    fn new() -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let found = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
            let root = std::path::Path::new("/sys/fs/cgroup");
            let name = format!("stocache-ring-{}", std::process::id());
            if controllers.split(',').any(|c| c == "memory") {
                let own = root.join("memory").join(path);
                let own = if own.exists() { own } else { root.join("memory") };
                Some(Self(own.join(name), "memory.limit_in_bytes"))
            } else {
                let own = root.join(path);
                (controllers.is_empty() && own.join("cgroup.controllers").exists())
                    .then(|| Self(own.join(name), "memory.max"))
            }
        })?;
        std::fs::create_dir(&found.0).ok()?;
        found.0.join(found.1).exists().then_some(found)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_memory_cgroup_is_never_filled() {
    const LIMIT: usize = 256 << 20;
    world(a_memory_cgroup_is_never_filled, |_| {
        let group = Group::new()
            .filter(|group| std::fs::write(group.0.join(group.1), LIMIT.to_string()).is_ok());
        let Some(group) = group else {
            return "skipped: no right to make a memory cgroup, so its limit is not covered".into();
        };
        let member = Child::fork(|| {
            std::fs::write(group.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
            assert!(batches::take(LIMIT / 2).is_none(), "too large a part of what is left");
            let mut held = Vec::new();
            // Several tries: after a refusal it pauses.
            while let Some(buffer) = (0..40).find_map(|_| batches::take(2 << 20)) {
                fill(&buffer, 1);
                held.push(buffer);
            }
            let made = batches::usage().made_bytes as usize;
            assert!((4 << 20..=LIMIT / 8).contains(&made), "{made} bytes");
            // Now other parts of the program leave less, and it is still not filled.
            let hog = vec![1u8; LIMIT / 2];
            held.clear();
            let sizes = (0..200).map(|i| (1 << 20) + i * 4096);
            let many: Vec<Buffer> = sizes.filter_map(batches::take).collect();
            many.iter().for_each(|buffer| fill(buffer, 2));
            let made = batches::usage().made_bytes as usize;
            assert!(made <= LIMIT / 8, "{made} bytes");
            assert!(hog.iter().all(|&byte| byte == 1));
        });
        ended(member);
        let path = group.0.clone();
        drop(group);
        assert!(!path.exists(), "{path:?} is left");
        "not filled, and nobody was killed".into()
    });
}
