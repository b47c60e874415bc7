//! How long a server may be waited for: all of one operation together, connecting included.
//!
//! What comes earns more time, so that a slow link is used as fast as it is; a server that sends a byte now
//! and then is not waited for any longer than one that is silent.

use crate::fault::{Fault, active as broken};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// For one operation, unless people say otherwise. Tests run on machines that have other things to do.
const WAIT: Duration = Duration::from_millis(if cfg!(test) { 3_000 } else { 250 });
/// How people say it, in seconds.
const VARIABLE: &str = "STOCACHE_CLUSTER_TIMEOUT";
/// A server may be waited for so much shorter where others made the same operation wait: meanwhile it could have
/// answered, and many that hang together must not cost many waits.
const AFTER_OTHERS: u32 = 16;
/// Bytes that earn a second: a server, or a link, that is slower than this is of no use.
const LEAST_BYTES_PER_SECOND: u64 = 16 << 20;

/// Why a server is done with, for a while.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It did not answer in time.
    Late,
    /// Nothing of it: the caller has no time left.
    OutOfTime,
    /// It ended the connection, or there is no way to it.
    Gone(String),
    /// It says what no server says.
    Nonsense(&'static str),
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
            Self::Gone(why) => format!("cannot be reached: {why}"),
            Self::Nonsense(what) => format!("answers {what}: it is no Redis or Valkey"),
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

/// Waiting that is left.
pub(super) struct Budget {
    left: Duration,
    /// At the most.
    wait: Duration,
    /// What the caller has.
    until: Instant,
}

impl Budget {
    pub(super) fn new(wait: Duration, until: Instant) -> Self {
        Self { left: wait, wait, until }
    }

    /// No more of it than is due after other servers made this operation wait; what comes earns it back.
    pub(super) fn shorten(&mut self, others: usize) {
        if others > 0 && !broken(Fault::WaitForEach) {
            self.left = self.left.min(self.wait / AFTER_OTHERS);
        }
    }

    /// More, for bytes that came or went.
    pub(super) fn earn(&mut self, bytes: usize) {
        if broken(Fault::WaitForEachByte) {
            self.left = self.wait;
        }
        let earned = Duration::from_nanos(bytes as u64 * 1_000_000_000 / LEAST_BYTES_PER_SECOND);
        self.left = (self.left + earned).min(self.wait);
    }

    /// The longest wait that may begin now.
    pub(super) fn left(&self) -> Result<Duration, Trouble> {
        let callers = self.until.saturating_duration_since(Instant::now());
        match self.left.min(callers) {
            Duration::ZERO if callers.is_zero() => Err(Trouble::OutOfTime),
            Duration::ZERO => Err(Trouble::Late),
            left => Ok(left),
        }
    }

    /// Takes what was waited.
    pub(super) fn spend(&mut self, began: Instant) {
        let left = self.left.saturating_sub(began.elapsed());
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + (self.left - left));
        self.left = left;
    }

    /// Waits until the socket is ready for one of these.
    pub(super) fn wait(&mut self, socket: &TcpStream, events: PollFlags) -> Result<(), Trouble> {
        let began = Instant::now();
        let left = self.left()?;
        let time = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()).max(1),
        };
        let polled = poll(&mut [PollFd::new(socket, events)], Some(&time));
        self.spend(began);
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()), // what is left is asked for next time
            Err(errno) => Err(Trouble::Gone(errno.to_string())),
        }
    }
}
