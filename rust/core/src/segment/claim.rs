//! The state of a slot: who may read it, who may write it.
//!
//! ```text
//!    15                   4 3       0
//!   +----------------------+---------+
//!   |       lease k        |   tag   |
//!   +----------------------+---------+
//!
//!   tag   meaning                                   who may leave this state
//!   0     empty                                     any writer, by claiming it
//!   1     set: the bytes are whole and readable     an overwriting writer or clear()
//!   2     beyond the cache: never holds bytes       nobody
//!   3     being written by the holder of lease k    that holder; anybody once lease k is free
//! ```
//!
//! The lease is 0 unless the tag is 3. So the lower byte alone says as much as the state of
//! stocaching's aux_array: 0, 1, 2, or something above.
//!
//! | state    | load | claim                    | claim, overwriting       |
//! | -------- | ---- | ------------------------ | ------------------------ |
//! | empty    | miss | claimed                  | claimed                  |
//! | set      | hit  | occupied                 | claimed, epoch raised    |
//! | beyond   | miss | beyond                   | beyond                   |
//! | claimed  | miss | holder alive: busy; dead: claimed, epoch raised     ||
//!
//! Bytes that were readable change only after the *epoch* was raised, and the epoch is raised only
//! while the slot is claimed. Whoever copies bytes out reads the epoch before and after: if it did
//! not move, the copy is whole.
//!
//! Time is never evidence of death: only a lease that the kernel has freed is.

use crate::fault::{self, Fault};
use crate::sys::atomics::{AtomicU16, AtomicU64, Ordering, fence};

/// The state of a slot.
pub type State = u16;
/// The number of a lease.
pub type Lease = u16;

/// Nothing is stored.
pub const EMPTY: State = 0;
/// The bytes are whole.
pub const SET: State = 1;
/// Inside the dataset, beyond the capacity of the cache.
pub const BEYOND: State = 2;
/// The tag of the states that mean "being written".
const CLAIMED: State = 3;
const TAG_BITS: u32 = 4;
const TAG: State = (1 << TAG_BITS) - 1;
/// How many processes can write at the same time.
pub const LEASES: Lease = 1 << (State::BITS - TAG_BITS);

/// The state of a slot that the holder of `lease` is writing.
#[inline]
pub const fn claimed_by(lease: Lease) -> State {
    lease << TAG_BITS | CLAIMED
}

/// Whether a state means "being written".
#[inline]
pub const fn is_claimed(state: State) -> bool {
    state & TAG == CLAIMED
}

/// In whose name a slot is being written.
#[inline]
pub const fn lease_of(state: State) -> Option<Lease> {
    if is_claimed(state) { Some(state >> TAG_BITS) } else { None }
}

/// What is noted beside a lease. Its holder writes it, others read it; it says nothing about whether
/// the holder lives, which only the lock on the lease does.
pub struct Entry<'a> {
    /// The process number of whoever took the lease last, and above it the number of its process
    /// namespace; 0 before the first.
    pub holder: &'a AtomicU64,
    /// How many slots are claimed in its name. What the dead leave is more than 0.
    pub claims: &'a AtomicU64,
}

/// Words of an [`Entry`].
pub const ENTRY_WORDS: usize = 2;

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
    fn while_orphaned<R>(&self, k: Lease, act: impl FnOnce() -> R) -> Option<R>;
}

/// The states of a cache, the epoch that guards copies, and what is noted beside the leases.
#[derive(Clone, Copy)]
pub struct Slots<'a> {
    states: &'a [AtomicU16],
    epoch: &'a AtomicU64,
    leases: &'a [AtomicU64],
}

impl<'a> Slots<'a> {
    /// The protocol over these states.
    pub fn new(states: &'a [AtomicU16], epoch: &'a AtomicU64, leases: &'a [AtomicU64]) -> Self {
        Self { states, epoch, leases }
    }

    /// What is noted beside `lease`.
    #[inline]
    pub fn entry(&self, lease: Lease) -> Entry<'a> {
        let at = usize::from(lease) * ENTRY_WORDS;
        Entry { holder: &self.leases[at], claims: &self.leases[at + 1] }
    }

    /// The state of slot `i`. If it is [`SET`], the bytes published with it are visible.
    #[inline]
    pub fn state(&self, i: usize) -> State {
        // SYNC POINT publish: Acquire here, Release in `publish`.
        self.states[i].load(Ordering::Acquire)
    }

    /// Tries to become the only writer of slot `i` in the name of `lease`.
    pub fn claim(&self, i: usize, lease: Lease, overwrite: bool, orphans: &impl Orphans) -> Claim {
        let mine = claimed_by(lease);
        loop {
            let seen = self.states[i].load(Ordering::Relaxed);
            let won = match seen {
                // SYNC POINT empty: Acquire here, Release in `abandon`: whoever emptied a readable
                // slot raised the epoch before.
                EMPTY => self.take(i, EMPTY, lease),
                SET if overwrite => self.take(i, SET, lease) && self.raise_epoch(),
                SET => return Claim::Occupied,
                BEYOND => return Claim::Beyond,
                _ if seen == mine => return Claim::Busy, // another thread of this process
                _ if fault::active(Fault::NoTakeover) => return Claim::Busy,
                _ if fault::active(Fault::StealFromLiving) => self.take(i, seen, lease),
                _ => {
                    let take = || self.take(i, seen, lease) && self.raise_epoch();
                    match orphans.while_orphaned(seen >> TAG_BITS, take) {
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
    pub fn publish(&self, i: usize, lease: Lease) -> bool {
        // SYNC POINT publish: Release here, Acquire in `state`.
        self.end(i, lease, SET)
    }

    /// Gives a claimed slot back, empty.
    pub fn abandon(&self, i: usize, lease: Lease) {
        // SYNC POINT empty: Release here, Acquire in `claim`. A lost claim needs no action.
        let _lost = self.end(i, lease, EMPTY);
    }

    /// Empties every slot that an earlier, dead holder of `lease` left behind.
    ///
    /// Must run after the lease was acquired and before its first claim.
    pub fn empty_claims_of_the_dead(&self, lease: Lease) {
        let claims = self.entry(lease).claims;
        if claims.load(Ordering::Relaxed) == 0 {
            return; // a walk over 10^8 states takes long, and most end in order
        }
        let dead = claimed_by(lease);
        for (i, state) in self.states.iter().enumerate() {
            if state.load(Ordering::Relaxed) == dead {
                // The dead may have stopped between claiming a set slot and raising the epoch.
                self.raise_epoch();
                self.abandon(i, lease);
            }
        }
        // What others took over was counted too.
        claims.store(0, Ordering::Relaxed);
    }

    /// Empties the set slots that are `doomed`; `scrub` may wipe the bytes of a slot while it is
    /// claimed.
    ///
    /// Slots that others are writing keep what they are being given: that write counts as later.
    pub fn clear(
        &self,
        lease: Lease,
        mut doomed: impl FnMut(usize) -> bool,
        mut scrub: impl FnMut(usize),
    ) {
        const CHUNK: usize = 1024;
        let mut claimed = [0usize; CHUNK];
        let mut next = 0;
        while next < self.states.len() {
            let mut n = 0;
            while next < self.states.len() && n < CHUNK {
                if self.state(next) == SET && doomed(next) && self.take(next, SET, lease) {
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

    /// Claims slot `i`, which is in state `from`. Counted before: who dies in between leaves a count
    /// that is too high, which costs its heir a walk, and never one that is too low.
    #[inline]
    fn take(&self, i: usize, from: State, lease: Lease) -> bool {
        let claims = self.entry(lease).claims;
        claims.fetch_add(1, Ordering::Relaxed);
        let (to, order) = (claimed_by(lease), Ordering::Acquire);
        let taken = self.states[i].compare_exchange(from, to, order, Ordering::Relaxed).is_ok();
        if !taken {
            claims.fetch_sub(1, Ordering::Relaxed);
        }
        taken
    }

    /// Ends a claim on slot `i`; false if it was not ours any more.
    #[inline]
    fn end(&self, i: usize, lease: Lease, to: State) -> bool {
        let (from, order) = (claimed_by(lease), Ordering::Release);
        let ended = self.states[i].compare_exchange(from, to, order, Ordering::Relaxed).is_ok();
        if ended {
            self.entry(lease).claims.fetch_sub(1, Ordering::Relaxed);
        }
        ended
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
#[path = "models.rs"]
mod models;
