//! How long a server may be waited for: all of one operation together, connecting included; and of operations one
//! after the other no more than it earns.
//!
//! ```text
//!   a purse for each server ── the next operation may wait for so long ── what is left, and was earned ──┐
//!              ▲ fills by itself, in five seconds ◄──────────────────────────────────────────────────────┘
//! ```
//!
//! What comes earns more time, so that a slow link is used as fast as it is; a server that sends a byte now
//! and then is not waited for any longer than one that is silent, and one that lets each operation wait for
//! nearly as long as it may is soon not waited for at all.

use crate::fault::{Fault, active as broken, reached};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// One wait of 250 ms in five seconds is 5 %.
pub(super) const PURSE_FILLS: Duration =
    Duration::from_millis(if cfg!(test) { 400 } else { 5_000 });
/// For one operation, unless people say otherwise. Tests run on machines that have other things to do.
const WAIT: Duration = Duration::from_millis(if cfg!(test) { 3_000 } else { 250 });
/// How people say it, in seconds.
const VARIABLE: &str = "STOCACHE_CLUSTER_TIMEOUT";
/// A server may be waited for so much shorter where others made the same operation wait: meanwhile it could have
/// answered, and many that hang together must not cost many waits.
const AFTER_OTHERS: u32 = 16;
/// So many late servers of one operation halve that, so that they take two waits in all, however many they are.
const HALVED_BY: usize = 8;
/// An operation that was answered may have waited for so much of a wait: answers of no bytes come from afar, too.
const FOR_AN_ANSWER: u32 = 25;
/// So many waits for one operation, whatever came: then it is the server for which there was no time.
const TOO_MANY: u32 = 4;
/// Bytes that earn a second: a server, or a link, that is slower than this is of no use.
const LEAST_BYTES_PER_SECOND: u64 = 16 << 20;

/// Why a server is done with, for a while.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It did not answer in time.
    Late,
    /// Nothing of it: the caller has no time left.
    OutOfTime,
    /// The caller waited for it until there was no time left.
    Slow,
    /// It ended the connection, or there is no way to it.
    Gone(String),
    /// It says what no server says.
    Nonsense(&'static str),
    /// What it has was written by somebody else.
    Strangers,
    /// It does not let us in, or does not do what it is asked for.
    Refusal(String),
}

impl Trouble {
    pub(super) fn of(error: &std::io::Error) -> Self {
        Self::Gone(error.to_string())
    }

    pub(super) fn in_words(&self) -> String {
        match self {
            Self::Late => "does not answer in time".into(),
            Self::OutOfTime => "was not waited for any longer".into(),
            Self::Slow => "is too slow for what is asked of it".into(),
            Self::Gone(why) => format!("cannot be reached: {why}"),
            Self::Nonsense(what) => format!("answers {what}: it is no Redis or Valkey"),
            Self::Strangers => "has nothing but values of another secret".into(),
            Self::Refusal(words) => format!("says {words:?}"),
        }
    }
}

/// What the environment says, if it is a time that makes sense.
pub(super) fn wait_of_environment() -> Duration {
    let seconds = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<f64>().ok());
    match seconds {
        Some(seconds) if (0.001..=600.0).contains(&seconds) => Duration::from_secs_f64(seconds),
        _ => WAIT,
    }
}

#[cfg(test)]
thread_local! {
    /// What this thread has taken from budgets: tests count that, and look at no clock.
    pub(super) static TAKEN: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
}

/// What a server may be waited for by the next operation.
pub(super) struct Purse {
    left: Duration,
    wait: Duration,
    since: Instant,
}

impl Purse {
    pub(super) fn new(wait: Duration) -> Self {
        Self { left: wait, wait, since: Instant::now() }
    }

    /// For an operation that ends then, after so many servers made it wait.
    pub(super) fn budget(&mut self, until: Instant, others: usize) -> Budget {
        let now = Instant::now();
        let rests = (now - self.since).as_secs_f64() / PURSE_FILLS.as_secs_f64();
        self.since = now;
        self.left = (self.left + self.wait.mul_f64(rests.min(1.0))).min(self.wait);
        if broken(Fault::FreshBudgets) {
            self.left = self.wait;
        }
        let mut budget = Budget { left: self.left, ..Budget::new(self.wait, until) };
        budget.shorten(others);
        budget
    }

    /// Takes back what was not waited.
    pub(super) fn put_back(&mut self, budget: &Budget) {
        self.left = (budget.left + budget.spare).min(self.wait);
    }
}

/// Waiting that is left.
pub(super) struct Budget {
    left: Duration,
    /// What is not for this operation.
    spare: Duration,
    waited: Duration,
    /// At the most.
    wait: Duration,
    /// What the caller has.
    until: Instant,
    /// It was over when the server was seen to have answered.
    was_over: bool,
}

impl Budget {
    pub(super) fn new(wait: Duration, until: Instant) -> Self {
        let (spare, waited) = (Duration::ZERO, Duration::ZERO);
        Self { left: wait, spare, waited, wait, until, was_over: false }
    }

    /// No more of it than is due after other servers made this operation wait; what comes earns it back.
    pub(super) fn shorten(&mut self, others: usize) {
        if others > 0 && !broken(Fault::WaitForEach) {
            let halves = (others - 1) / HALVED_BY;
            let due =
                self.wait / AFTER_OTHERS / 1u32.checked_shl(halves as u32).unwrap_or(u32::MAX);
            let more = self.left.saturating_sub(due);
            self.left -= more;
            self.spare += more;
        }
    }

    /// More, for bytes that came or went.
    pub(super) fn earn(&mut self, bytes: usize) {
        if broken(Fault::WaitForEachByte) {
            self.left = self.wait;
        }
        self.add(Duration::from_nanos(bytes as u64 * 1_000_000_000 / LEAST_BYTES_PER_SECOND));
    }

    /// More, because all was answered that was asked.
    pub(super) fn earn_an_answer(&mut self) {
        self.add(self.wait / FOR_AN_ANSWER);
    }

    fn add(&mut self, earned: Duration) {
        self.left = (self.left + earned).min(self.wait);
    }

    /// The longest wait that may begin now.
    pub(super) fn left(&self) -> Result<Duration, Trouble> {
        let callers = self.until.saturating_duration_since(Instant::now());
        match self.left.min(callers) {
            Duration::ZERO if !callers.is_zero() => Err(Trouble::Late),
            Duration::ZERO if self.waited > self.wait * TOO_MANY => Err(Trouble::Slow),
            Duration::ZERO => Err(Trouble::OutOfTime),
            left => Ok(left),
        }
    }

    /// Whether the caller has time, also where nothing had to be waited for.
    pub(super) fn is_not_over(&self) -> Result<(), Trouble> {
        if Instant::now() < self.until { Ok(()) } else { Err(Trouble::OutOfTime) }
    }

    /// Takes what was waited.
    pub(super) fn spend(&mut self, began: Instant) {
        let spent = began.elapsed();
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + spent.min(self.left));
        self.waited += spent;
        self.left = self.left.saturating_sub(spent);
    }

    /// Waits until the socket is ready for one of these.
    pub(super) fn wait(&mut self, socket: &TcpStream, events: PollFlags) -> Result<(), Trouble> {
        let began = Instant::now();
        let left = self.left()?;
        let time = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()).max(1),
        };
        reached("cluster: waiting");
        let polled = poll(&mut [PollFd::new(socket, events)], Some(&time));
        self.spend(began);
        // Who was stopped meanwhile, or got no processor, has not waited for the server.
        if matches!(polled, Ok(1))
            && self.left.is_zero()
            && !std::mem::replace(&mut self.was_over, true)
        {
            self.left = self.wait / AFTER_OTHERS;
        }
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()), // what is left is asked for next time
            Err(errno) => Err(Trouble::Gone(errno.to_string())),
        }
    }
}
