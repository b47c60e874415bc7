//! Whether the caller wants to be let go, asked wherever it waits or something takes long.
//!
//! Under Python a signal is not handled before native code returns or asks: a Ctrl-C would seem to do
//! nothing for as long as a wait takes. Who calls this crate from such a language says how to ask.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long a signal may lie unseen. What is done sooner never asks, but in tests, which have no time.
const ASK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 100 });

static ASK: OnceLock<fn() -> bool> = OnceLock::new();

/// From now on `ask` says whether the calling thread is to be let go. It may run any code, so nobody
/// asks who holds a lock that others wait for without an end.
pub fn ask_with(ask: fn() -> bool) {
    // The first one stays: a process has one interpreter.
    ASK.get_or_init(|| ask);
}

/// One wait, or one piece of work that may take long.
pub(crate) struct Patience(Instant);

impl Patience {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Whether to give up.
    pub(crate) fn is_interrupted(&mut self) -> bool {
        if self.0.elapsed() < ASK_EVERY {
            return false;
        }
        let interrupted = ASK.get().is_some_and(|ask| ask());
        self.0 = Instant::now();
        interrupted
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    thread_local! {
        static INTERRUPTED: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs `act` in a thread that wants to be let go.
    pub(crate) fn interrupted<R>(act: impl FnOnce() -> R) -> R {
        super::ask_with(|| INTERRUPTED.get());
        INTERRUPTED.set(true);
        let result = act();
        INTERRUPTED.set(false);
        result
    }
}
