//! The state byte of a slot: who may read it, who may write it.
//!
//! ```text
//!   value   meaning                                   who may leave this state
//!   0       empty                                     any writer, by claiming it
//!   1       set: the bytes are whole and readable     an overwriting writer or clear()
//!   2       beyond the cache: never holds bytes       nobody
//!   3 + k   being written by the holder of lease k    that holder; anybody once lease k is free
//! ```
//!
//! | state    | load | claim                    | claim, overwriting       |
//! | -------- | ---- | ------------------------ | ------------------------ |
//! | empty    | miss | claimed                  | claimed                  |
//! | set      | hit  | occupied                 | claimed, epoch raised    |
//! | beyond   | miss | beyond                   | beyond                   |
//! | 3 + k    | miss | holder alive: busy; dead: claimed, epoch raised     ||
//!
//! Bytes that were readable change only after the *epoch* was raised, and the epoch is raised only
//! while the slot is claimed. Whoever copies bytes out reads the epoch before and after: if it did
//! not move, the copy is whole.
//!
//! Time is never evidence of death: only a lease that the kernel has freed is.

use crate::fault::{self, Fault};
use crate::primitive::{AtomicU8, AtomicU64, Ordering, fence};

/// Nothing is stored.
pub const EMPTY: u8 = 0;
/// The bytes are whole.
pub const SET: u8 = 1;
/// Inside the dataset, beyond the capacity of the cache.
pub const BEYOND: u8 = 2;
/// The first of the states that mean "being written".
pub const FIRST_LEASE: u8 = 3;
/// How many processes can write at the same time.
pub const LEASES: u8 = u8::MAX - FIRST_LEASE + 1;

/// What a claim found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The slot is the caller's to write; publish or abandon it.
    Claimed,
    /// The slot holds a value, and overwriting was not asked for.
    Occupied,
    /// A living process is writing it.
    Busy,
    /// The slot lies beyond the cache.
    Beyond,
}

/// The question the protocol asks about writers.
pub trait Orphans {
    /// Runs `act` while lease `k` is certainly held by nobody, and keeps it unheld meanwhile.
    /// `None` if somebody holds it.
    fn while_orphaned<R>(&self, k: u8, act: impl FnOnce() -> R) -> Option<R>;
}

/// The state bytes of a cache and the epoch that guards copies.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    states: &'a [AtomicU8],
    epoch: &'a AtomicU64,
}

impl<'a> Slots<'a> {
    /// The protocol over these state bytes.
    pub fn new(states: &'a [AtomicU8], epoch: &'a AtomicU64) -> Self {
        Self { states, epoch }
    }

    /// The state of slot `i`. If it is [`SET`], the bytes published with it are visible.
    #[inline]
    pub fn state(&self, i: usize) -> u8 {
        // SYNC POINT publish: Acquire here, Release in `publish`.
        self.states[i].load(Ordering::Acquire)
    }

    /// Tries to become the only writer of slot `i` in the name of `lease`.
    pub fn claim(&self, i: usize, lease: u8, overwrite: bool, orphans: &impl Orphans) -> Claim {
        let mine = FIRST_LEASE + lease;
        loop {
            let seen = self.states[i].load(Ordering::Relaxed);
            let won = match seen {
                // SYNC POINT empty: Acquire here, Release in `abandon`: whoever emptied a readable
                // slot raised the epoch before.
                EMPTY => self.exchange(i, EMPTY, mine),
                SET if overwrite => self.exchange(i, SET, mine) && self.raise_epoch(),
                SET => return Claim::Occupied,
                BEYOND => return Claim::Beyond,
                _ if seen == mine => return Claim::Busy, // another thread of this process
                _ if fault::active(Fault::NoTakeover) => return Claim::Busy,
                _ if fault::active(Fault::StealFromLiving) => self.exchange(i, seen, mine),
                _ => {
                    let take = || self.exchange(i, seen, mine) && self.raise_epoch();
                    match orphans.while_orphaned(seen - FIRST_LEASE, take) {
                        Some(won) => won,
                        // Held again: by its new owner, who empties what the dead one left.
                        None if self.states[i].load(Ordering::Relaxed) == seen => {
                            return Claim::Busy;
                        }
                        None => false,
                    }
                }
            };
            if won {
                // SYNC POINT changed: Release fence here, Acquire fence in `read_stable`: who sees
                // one of our bytes also sees every raise that we have seen.
                fence(Ordering::Release);
                return Claim::Claimed;
            }
        }
    }

    /// Makes the bytes of a claimed slot readable. `false` if the claim was not ours any more.
    pub fn publish(&self, i: usize, lease: u8) -> bool {
        // SYNC POINT publish: Release here, Acquire in `state`.
        self.states[i]
            .compare_exchange(FIRST_LEASE + lease, SET, Ordering::Release, Ordering::Relaxed)
            .is_ok()
    }

    /// Gives a claimed slot back, empty.
    pub fn abandon(&self, i: usize, lease: u8) {
        // SYNC POINT empty: Release here, Acquire in `claim`. A lost claim needs no action.
        let _lost = self.states[i].compare_exchange(
            FIRST_LEASE + lease,
            EMPTY,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    /// Empties every slot that an earlier, dead holder of `lease` left behind.
    ///
    /// Must run after the lease was acquired and before its first claim.
    pub fn sweep(&self, lease: u8) {
        let dead = FIRST_LEASE + lease;
        for (i, state) in self.states.iter().enumerate() {
            if state.load(Ordering::Relaxed) == dead {
                // The dead may have stopped between claiming a set slot and raising the epoch.
                self.raise_epoch();
                self.abandon(i, lease);
            }
        }
    }

    /// Empties the set slots that are `doomed`; `scrub` may wipe the bytes of a slot while it is
    /// claimed.
    ///
    /// Slots that others are writing keep what they are being given: that write counts as later.
    pub fn clear(
        &self,
        lease: u8,
        mut doomed: impl FnMut(usize) -> bool,
        mut scrub: impl FnMut(usize),
    ) {
        const CHUNK: usize = 1024;
        let mut claimed = [0usize; CHUNK];
        let mut next = 0;
        while next < self.states.len() {
            let mut n = 0;
            while next < self.states.len() && n < CHUNK {
                if self.state(next) == SET
                    && doomed(next)
                    && self.exchange(next, SET, FIRST_LEASE + lease)
                {
                    claimed[n] = next;
                    n += 1;
                }
                next += 1;
            }
            if n > 0 {
                self.raise_epoch();
                for &i in &claimed[..n] {
                    scrub(i);
                    self.abandon(i, lease);
                }
            }
        }
    }

    /// How many slots are set.
    pub fn filled(&self) -> u64 {
        self.states.iter().filter(|s| s.load(Ordering::Relaxed) == SET).count() as u64
    }

    /// Runs `copy` on the bytes of slot `i` if it is set; `Some` only if they did not change
    /// meanwhile. Gives up, as a miss, if others keep overwriting.
    #[inline]
    pub fn read_stable<R>(&self, i: usize, mut copy: impl FnMut() -> R) -> Option<R> {
        const TRIES: usize = 8;
        for _ in 0..TRIES {
            // SYNC POINT epoch: Acquire here, AcqRel in `raise_epoch`: who sees a raised epoch
            // also sees the claim before it, so `state` below is not a stale SET.
            let before = self.epoch.load(Ordering::Acquire);
            if self.state(i) != SET {
                return None;
            }
            let copied = copy();
            // SYNC POINT changed: Acquire fence here, Release fence in `claim` and SeqCst fence in
            // `raise_epoch`: if `copy` saw one new byte, the load below sees the raise before it.
            fence(Ordering::Acquire);
            if self.epoch.load(Ordering::Relaxed) == before || fault::active(Fault::IgnoreEpoch) {
                return Some(copied);
            }
        }
        None
    }

    #[inline]
    fn exchange(&self, i: usize, from: u8, to: u8) -> bool {
        self.states[i].compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Announces that readable bytes are about to change. Always true, to chain after a claim.
    fn raise_epoch(&self) -> bool {
        // SYNC POINT epoch: Release half here, Acquire in `read_stable`.
        self.epoch.fetch_add(1, Ordering::AcqRel);
        // SYNC POINT changed: orders the raise before the bytes, also those the kernel copies.
        fence(Ordering::SeqCst);
        true
    }
}

#[cfg(all(test, loom))]
mod models;
