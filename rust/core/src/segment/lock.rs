//! A lock in shared memory that ends with its holder.
//!
//! It is one state (claim.rs) that is empty or claimed, and never set.
//!
//! # Why the death of a holder, at any instruction, does no harm
//! - *One at a time.* The lock is taken by one compare-and-swap from "empty" to "claimed by lease k",
//!   and given back by one from "claimed by lease k" to "empty". Threads of a process share its
//!   lease: who finds it claimed by its own has not got it.
//! - *It is not lost with its holder.* The kernel frees lease k when its holder ends, and nothing else
//!   does. Who finds the lock claimed by k tries to lock k. If that succeeds, the holder is dead, and
//!   as long as we have k nobody can become its next owner: the swap to our own lease meets what the
//!   dead one left, or fails because somebody was faster. Then k is let go.
//! - *It is not taken from the living.* One that is stopped keeps its lease and with it the lock. So
//!   nobody waits without a bound.
//! - *A lease that is used again brings no lock along.* Its new owner first empties what was claimed
//!   in its name, before its first claim.
//! - *A forked child has none of its parent's locks.* It has no lease until it takes one of its own,
//!   and the thread that would give the lock back is not in it: no code of users runs under a lock,
//!   so the thread that forks has none. (But one: a handler of signals, while a file is copied. If it
//!   forks, and the child returns from it, the child gives back what is its parent's.)
//!
//! What was half done under the lock is another matter, and each user of it says what that leaves:
//! a region without records (space/regions.rs), bytes that no length covers (records/schemas.rs),
//! sums to be counted anew (files/table/room.rs), a copy without a name (files/make.rs).
//!
//! # Locks that are not this one
//! - That a segment is used is a shared flock(2) on it, and that a process lives a locked byte, as a
//!   lease is, a folder's domain (files/domain.rs) and the holder of a batch buffer
//!   (batches/buffers/mapped.rs). Those are what this lock is made of: they say who lives, to many at
//!   a time.
//! - The making of a memfd (`creation_lock`): there is no segment yet to have a state in.
//! - The log of a folder (files/journal.rs): a file on a disk that processes share which need not
//!   share a /dev/shm.
//! - `ForkLock` (sys/fork.rs): among threads of one process, which die together.
//!
//! The words `told`, `frozen` and `present` are no locks: one instruction changes them, and it is
//! done or not.

use crate::fault::{Fault, active};
use crate::segment::claim::{Claim, Lease, Orphans, Slots};
use std::time::{Duration, Instant};

/// So often a lock is asked for in a row: most are held for a few instructions.
const SPINS: u32 = 16;
/// Then it is asked for after such a nap: each look at a holder is a system call.
const NAP: Duration = Duration::from_micros(50);

/// The right to be the only one; ends when this goes, or with its process.
pub(crate) struct StateLock<'a> {
    slots: Slots<'a>,
    state: usize,
    lease: Lease,
}

impl<'a> StateLock<'a> {
    /// The lock that is state `state`, in the name of `lease`. None if somebody who lives has it.
    pub(crate) fn take(
        slots: Slots<'a>,
        state: usize,
        lease: Lease,
        orphans: &impl Orphans,
    ) -> Option<Self> {
        let claim = slots.claim(state, lease, false, orphans);
        let got = claim == Claim::Claimed || active(Fault::IgnoreLock);
        // Not `then_some`: a lock that is made gives back what it locks.
        got.then(|| Self { slots, state, lease })
    }

    /// As `take`, but waits for who has it. None if that one lives and keeps it for longer.
    pub(crate) fn wait(
        slots: Slots<'a>,
        state: usize,
        lease: Lease,
        orphans: &impl Orphans,
        patience: Duration,
    ) -> Option<Self> {
        let (began, mut tries) = (Instant::now(), 0);
        loop {
            let lock = Self::take(slots, state, lease, orphans);
            if lock.is_some() || began.elapsed() > patience {
                return lock;
            }
            tries += 1;
            if tries < SPINS { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
    }
}

impl Drop for StateLock<'_> {
    fn drop(&mut self) {
        self.slots.abandon(self.state, self.lease);
    }
}
