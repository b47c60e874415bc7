//! How long a server is left alone after trouble: by all processes of a node, where they share memory.
//!
//! ```text
//!   a word for a server:  63  which server  44 | 43  failures  40 | 39  until when, in milliseconds  0
//! ```
//!
//! Which word is a server's follows from its address. Two servers may meet in one: then the later trouble counts,
//! and that of the other is noticed once more. When a rest is over one process takes the next one, a short one, and
//! tries the server while the others still leave it alone. A process that dies at it is not waited for.

use crate::fault::{Fault, active as broken};
use crate::records::RecordStore;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// At first and at most: one wait of 250 ms in five seconds is 5 %.
const FIRST: Duration = Duration::from_millis(if cfg!(test) { 400 } else { 5_000 });
const LONGEST: Duration = Duration::from_secs(60);

const FAILURES_AT: u32 = 40;
const SERVER_AT: u32 = 44;
const UNTIL: u64 = (1 << FAILURES_AT) - 1;
const MOST_FAILURES: u64 = (1 << (SERVER_AT - FAILURES_AT)) - 1;

/// The rest of one server.
pub(super) enum Rest {
    /// Of this process alone.
    Own { next: Duration, until: Option<Instant> },
    /// Of the node. `tries`: this process finds out whether it is over.
    Shared { memory: Weak<RecordStore>, word: usize, server: u64, tries: bool },
}

impl Rest {
    pub(super) fn new(address: &str, memory: &Weak<RecordStore>) -> Self {
        let Some(count) = memory.upgrade().map(|memory| memory.segment().rests().len()) else {
            return Self::own();
        };
        if broken(Fault::RestAlone) {
            return Self::own();
        }
        let hash = xxh3_64(address.as_bytes());
        // Never that of no server, which is zero.
        let server = hash >> SERVER_AT | 1;
        Self::Shared {
            memory: Weak::clone(memory),
            word: (hash % count as u64) as usize,
            server,
            tries: false,
        }
    }

    fn own() -> Self {
        Self::Own { next: FIRST, until: None }
    }

    /// Whether the server is left alone now.
    pub(super) fn is_on(&self) -> bool {
        match self {
            Self::Own { until, .. } => until.is_some_and(|until| Instant::now() < until),
            Self::Shared { tries: true, .. } => false,
            Self::Shared { memory, word, server, .. } => memory.upgrade().is_some_and(|memory| {
                is_ahead(word_of(&memory, *word).load(Ordering::Relaxed), *server, now())
            }),
        }
    }

    /// Whether an operation of this process may ask the server now.
    pub(super) fn lets_ask(&mut self) -> bool {
        let Self::Shared { memory, word, server, tries } = self else { return !self.is_on() };
        let Some(memory) = memory.upgrade().filter(|_| !*tries) else { return true };
        let (word, now) = (word_of(&memory, *word), now());
        let seen = word.load(Ordering::Relaxed);
        if of(seen) != *server {
            return true;
        }
        if is_ahead(seen, *server, now) {
            return false;
        }
        let taken = made(*server, failures(seen), now + FIRST.as_millis() as u64);
        *tries = word.compare_exchange(seen, taken, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        *tries
    }

    /// The server did what it was asked for.
    pub(super) fn end(&mut self) {
        match self {
            Self::Own { next, until } => (*next, *until) = (FIRST, None),
            Self::Shared { memory, word, server, tries } => {
                if std::mem::take(tries)
                    && let Some(memory) = memory.upgrade()
                {
                    let word = word_of(&memory, *word);
                    let seen = word.load(Ordering::Relaxed);
                    if of(seen) == *server {
                        // Who comes in between has seen trouble of today, which counts.
                        let _ =
                            word.compare_exchange(seen, 0, Ordering::Relaxed, Ordering::Relaxed);
                    }
                }
            }
        }
    }

    /// The server was in trouble.
    pub(super) fn begin(&mut self) {
        match self {
            Self::Own { next, until } => {
                *until = Some(Instant::now() + *next);
                *next = (*next * 2).min(LONGEST);
            }
            Self::Shared { memory, word, server, tries } => {
                let Some(memory) = memory.upgrade() else { return };
                let tried = std::mem::take(tries);
                let (word, now) = (word_of(&memory, *word), now());
                let seen = word.load(Ordering::Relaxed);
                if is_ahead(seen, *server, now) && !tried {
                    return; // another process has noticed the same
                }
                let before = if of(seen) == *server { Some(failures(seen)) } else { None };
                let failures = before.map_or(0, |before| (before + 1).min(MOST_FAILURES));
                let rest = FIRST.saturating_mul(1 << failures).min(LONGEST);
                let until = now + rest.as_millis() as u64;
                // Whoever was faster has seen the same.
                let _ = word.compare_exchange(
                    seen,
                    made(*server, failures, until),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
        }
    }
}

// Relaxed: nothing but who asks whom depends on these words.

fn word_of(memory: &Arc<RecordStore>, word: usize) -> &AtomicU64 {
    &memory.segment().rests()[word]
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

/// Whether it says that this server is left alone. An end that is further away than any rest is none: it was
/// written with another clock.
fn is_ahead(word: u64, server: u64, now: u64) -> bool {
    let until = word & UNTIL;
    of(word) == server && until > now && until - now <= LONGEST.as_millis() as u64
}

/// Milliseconds of a clock that all processes of the machine share.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    (time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000) & UNTIL
}
