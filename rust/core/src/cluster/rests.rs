//! How long a server is left alone after trouble: by all processes of a node, where they share memory.
//!
//! ```text
//!   a word for a server:  63  which server  44 | 43  failures  40 | 39  until when, in milliseconds  0
//! ```
//!
//! Only that a server does not answer is told to others, for only that costs them a wait; whoever is not let in, or
//! cannot make a connection, may be alone with it. Which words may be a server's follows from its address: the
//! first of a few that nobody needs. Where there is none, or no shared memory, a process rests by itself. When a
//! rest is over one process takes the next one, a short one, and tries the server while the others still leave
//! it alone. A process that dies at it is not waited for.

use super::budget::{PURSE_FILLS, Trouble};
use crate::fault::{Fault, active as broken};
use crate::records::RecordStore;
use rustix::time::{ClockId, clock_gettime};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// The first rest is as long as a purse needs; the longest:
const LONGEST: Duration = Duration::from_secs(60);
/// So many words may be those of a server.
const PLACES: usize = 8;

const FAILURES_AT: u32 = 40;
const SERVER_AT: u32 = 44;
const UNTIL: u64 = (1 << FAILURES_AT) - 1;
const MOST_FAILURES: u64 = (1 << (SERVER_AT - FAILURES_AT)) - 1;

/// What the servers of a process have in common.
#[derive(Default)]
pub(super) struct Circumstances {
    /// Where processes of the node tell each other which servers they leave alone.
    pub(super) memory: Weak<RecordStore>,
    /// How long a server may be waited for.
    pub(super) wait: Duration,
    pub(super) counts: Counts,
}

/// What servers answered, until somebody counts it for the node.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) fills: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) errors: AtomicU64,
}

/// The rest of one server.
pub(super) struct Rest {
    /// Of this process alone.
    until: Option<Instant>,
    /// How often in a row the server was in trouble here.
    failures: u64,
    memory: Weak<RecordStore>,
    /// The server as words call it, and those that may be its.
    server: u64,
    places: [usize; PLACES],
    /// This process finds out whether the rest is over.
    tries: bool,
}

impl Rest {
    /// `address` has no password.
    pub(super) fn new(address: &str, is_encrypted: bool, common: &Circumstances) -> Self {
        let memory = if broken(Fault::RestAlone) { Weak::new() } else { common.memory.clone() };
        let count = memory.upgrade().map_or(1, |memory| memory.segment().rests().len().max(1));
        // Who talks to it otherwise, waits for another time, or has another network, may see another server.
        let network = std::fs::metadata("/proc/self/ns/net").map_or(0, |found| found.ino());
        let seen = format!("{address} {is_encrypted} {:?} {network}", common.wait);
        let hash = xxh3_64(seen.as_bytes());
        // Never that of no server, which is zero.
        let server = hash >> SERVER_AT | 1;
        let places = std::array::from_fn(|k| ((hash % count as u64) as usize + k) % count);
        Self { until: None, failures: 0, memory, server, places, tries: false }
    }

    /// Whether the server is left alone now.
    pub(super) fn is_on(&self) -> bool {
        if self.until.is_some_and(|until| Instant::now() < until) {
            return true;
        }
        let is_on = |memory: Arc<RecordStore>| {
            self.word(&memory).is_some_and(|(_, seen)| is_ahead(seen, now()))
        };
        !self.tries && self.memory.upgrade().is_some_and(is_on)
    }

    /// Whether an operation of this process may ask the server now.
    pub(super) fn lets_ask(&mut self) -> bool {
        if self.until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        let Some(memory) = self.memory.upgrade().filter(|_| !self.tries) else { return true };
        let Some((word, seen)) = self.word(&memory) else { return true };
        let now = now();
        if is_ahead(seen, now) {
            return false;
        }
        let taken = made(self.server, failures(seen), now + PURSE_FILLS.as_millis() as u64);
        self.tries =
            word.compare_exchange(seen, taken, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        self.tries
    }

    /// The server answered.
    pub(super) fn end(&mut self) {
        (self.until, self.failures) = (None, 0);
        if std::mem::take(&mut self.tries)
            && let Some(memory) = self.memory.upgrade()
            && let Some((word, seen)) = self.word(&memory)
        {
            // Who comes in between has seen trouble of today, which counts.
            let _ = word.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// The server was in trouble.
    pub(super) fn begin(&mut self, trouble: &Trouble) {
        let before = self.failures;
        self.failures = (before + 1).min(MOST_FAILURES);
        let concerns_all = matches!(trouble, Trouble::Late) || broken(Fault::ShareAllTrouble);
        let is_noted = concerns_all && self.note(before);
        self.tries = false;
        let by_itself = !is_noted && !broken(Fault::RestByWordsAlone);
        self.until = by_itself.then(|| Instant::now() + length(before));
    }

    /// Tells other processes; false if they cannot be told.
    fn note(&self, before: u64) -> bool {
        let Some(memory) = self.memory.upgrade() else { return false };
        let now = now();
        let own = self.word(&memory);
        if own.is_some_and(|(_, seen)| is_ahead(seen, now)) && !self.tries {
            return true; // another process has noticed the same
        }
        let words = self.places.iter().map(|&place| &memory.segment().rests()[place]);
        let mut free = words.map(|word| (word, word.load(Ordering::Relaxed)));
        let Some((word, seen)) = own.or_else(|| free.find(|(_, seen)| !is_ahead(*seen, now)))
        else {
            return false; // all of them are of others
        };
        let failures = own.map_or(before, |(_, seen)| (failures(seen) + 1).max(before));
        let failures = failures.min(MOST_FAILURES);
        let until = now + length(failures).as_millis() as u64;
        let made = made(self.server, failures, until);
        word.compare_exchange(seen, made, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// The word that is this server's, and what it says.
    fn word<'m>(&self, memory: &'m RecordStore) -> Option<(&'m AtomicU64, u64)> {
        let words = self.places.iter().map(|&place| &memory.segment().rests()[place]);
        words
            .map(|word| (word, word.load(Ordering::Relaxed)))
            .find(|(_, seen)| of(*seen) == self.server)
    }
}

// Relaxed: nothing but who asks whom depends on these words.

/// After so many failures before.
fn length(failures: u64) -> Duration {
    PURSE_FILLS.saturating_mul(1 << failures).min(LONGEST)
}

fn made(server: u64, failures: u64, until: u64) -> u64 {
    server << SERVER_AT | failures << FAILURES_AT | until & UNTIL
}

fn of(word: u64) -> u64 {
    word >> SERVER_AT
}

fn failures(word: u64) -> u64 {
    word >> FAILURES_AT & MOST_FAILURES
}

/// Whether the rest that it says is not over. An end that is further away than any rest is none: it was written
/// with another clock.
fn is_ahead(word: u64, now: u64) -> bool {
    let until = word & UNTIL;
    until > now && until - now <= LONGEST.as_millis() as u64
}

/// Milliseconds of a clock that all processes of the machine share.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000) & UNTIL
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::tests::node_memory;
    use super::*;

    fn of_process(address: &str, memory: &Arc<RecordStore>) -> Rest {
        let wait = Duration::from_millis(250);
        let memory = Arc::downgrade(memory);
        Rest::new(address, false, &Circumstances { memory, wait, ..Circumstances::default() })
    }

    #[test]
    fn servers_whose_words_are_the_same_rest_both_in_all_processes() {
        let memory = node_memory();
        let places = of_process("node:0", &memory).places;
        let alike = |address: String| {
            let rest = of_process(&address, &memory);
            (rest.places == places).then_some((address, rest))
        };
        let mut all: Vec<_> = (0..).filter_map(|n| alike(format!("node:{n}"))).take(3).collect();
        for _ in 0..20 {
            for (_, rest) in &mut all {
                if rest.lets_ask() {
                    rest.begin(&Trouble::Late);
                }
            }
            assert!(all.iter_mut().all(|(_, rest)| rest.is_on() && !rest.lets_ask()));
        }
        assert!(all.iter().all(|(_, rest)| rest.failures == 1), "one wait for each");
        for (address, _) in &all {
            assert!(!of_process(address, &memory).lets_ask(), "another process knows");
        }
        let words = memory.segment().rests();
        assert_eq!(words.iter().filter(|word| word.load(Ordering::Relaxed) != 0).count(), 3);
    }

    #[test]
    fn a_process_rests_by_itself_where_all_words_are_taken() {
        let memory = node_memory();
        let until = now() + LONGEST.as_millis() as u64;
        let taken = |word: &AtomicU64| word.store(made(77, 3, until), Ordering::Relaxed);
        memory.segment().rests().iter().for_each(taken);
        let mut rest = of_process("node:1", &memory);
        assert!(rest.lets_ask());
        rest.begin(&Trouble::Late);
        assert!(rest.is_on() && !rest.lets_ask());
        assert!(of_process("node:1", &memory).lets_ask(), "nobody else knows");
        std::thread::sleep(PURSE_FILLS + PURSE_FILLS / 4);
        assert!(rest.lets_ask());
        rest.begin(&Trouble::Late);
        std::thread::sleep(PURSE_FILLS + PURSE_FILLS / 4);
        assert!(!rest.lets_ask(), "the second is longer");
        rest.end();
        assert!(rest.lets_ask() && rest.failures == 0);
    }

    #[test]
    fn who_sees_a_server_otherwise_rests_by_another_word() {
        let memory = node_memory();
        let other = Circumstances {
            memory: Arc::downgrade(&memory),
            wait: Duration::from_millis(10),
            ..Circumstances::default()
        };
        let mut hasty = Rest::new("node:1", false, &other);
        hasty.begin(&Trouble::Late);
        assert!(!hasty.lets_ask());
        let mut patient = of_process("node:1", &memory);
        assert!(patient.lets_ask());
        patient.begin(&Trouble::Gone("too many open files".into()));
        assert!(!patient.lets_ask() && of_process("node:1", &memory).lets_ask());
    }
}
