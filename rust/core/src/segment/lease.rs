//! Leases: proof that a writer lives.
//!
//! Lease `k` is byte `k` of the segment, locked with F_OFD_SETLK: the kernel frees it when its
//! holder dies, and nothing else does. A process takes one lease per cache, at its first write,
//! and keeps it. The bytes themselves are not touched: file locks are only labels on a range.

use crate::fault::{Fault, active, reached};
use crate::segment::claim::{ENTRY_WORDS, LEASES, Lease, Orphans, Slots, lease_of};
use crate::segment::parts::{EPOCH_AT, LEASES_AT};
use crate::sys::fork::Anchor;
use crate::sys::mapping::Mapping;
use crate::sys::ofd::{lock_byte, unlock_byte};
use crate::sys::proc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

/// Where no lease was free, one is asked for again after this time: it takes a call for each, and the
/// kernel walks through all that are held.
const REST: Duration = Duration::from_secs(1);

/// Nanoseconds of the clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |t| t.as_nanos() as u64)
}

/// The slot protocol over the `count` states at `at` of a segment.
#[inline]
pub(crate) fn slots(mapping: &Mapping, at: u64, count: u64) -> Slots<'_> {
    Slots::new(
        mapping.states(at as usize, count as usize),
        &mapping.words(EPOCH_AT, 1)[0],
        mapping.words(LEASES_AT, usize::from(LEASES) * ENTRY_WORDS),
    )
}

/// The leases of a segment as this process sees them.
#[derive(Clone, Copy)]
pub(crate) struct Leases<'a>(pub(crate) &'a Anchor);

impl Leases<'_> {
    /// This process's lease; taken at the first call. `None` if all are in use, or if the program
    /// closed our descriptor: to be asked before every claim and every write, which may follow at once.
    #[inline]
    pub(crate) fn mine(&self, slots: &Slots<'_>) -> Option<Lease> {
        self.mine_after(|| *slots, |_| ())
    }

    /// As `mine`; `clean` does away with what else a dead holder left, before the lease is used. The
    /// states are looked up once the lease is ours: where they grow in number, its dead holder may have
    /// claimed one of the newest until then.
    #[inline]
    pub(crate) fn mine_after<'s>(
        &self,
        slots: impl Fn() -> Slots<'s>,
        clean: impl FnOnce(Lease),
    ) -> Option<Lease> {
        // SYNC POINT lease: Acquire here, Release below: who sees the lease sees it clean.
        match self.0.lease.load(Ordering::Acquire) {
            0 => self.take(slots, clean),
            taken if self.0.is_ours() => Some((taken - 1) as Lease),
            // Who closes descriptors that it does not know frees our locks: we hold none any more.
            _ => {
                self.0.lease.store(0, Ordering::Relaxed);
                None
            }
        }
    }

    /// The lease that this process has taken, if it has one, without a system call: for what does
    /// others no harm if the descriptor is not ours any more.
    #[inline]
    pub(crate) fn taken(&self) -> Option<Lease> {
        self.0.lease.load(Ordering::Acquire).checked_sub(1).map(|lease| lease as Lease)
    }

    #[cold]
    fn take<'s>(&self, slots: impl Fn() -> Slots<'s>, clean: impl FnOnce(Lease)) -> Option<Lease> {
        let refused = self.0.refused.load(Ordering::Relaxed);
        if refused != 0 && now().abs_diff(refused) < REST.as_nanos() as u64 {
            return None;
        }
        if self.0.inherited.load(Ordering::Relaxed) || !self.0.is_ours() {
            return None; // the lock would be our parent's too, or on somebody's file
        }
        let looking = self.0.looking.lock();
        if let taken @ 1.. = self.0.lease.load(Ordering::Acquire) {
            return Some((taken - 1) as Lease); // by another thread meanwhile
        }
        // The lowest that is free, so that few are ever used and who looks at all has few to look at.
        let leases = if active(Fault::FewLeases) { 253 } else { LEASES };
        let early = active(Fault::StatesBeforeLease).then(&slots);
        reached("lease: looking");
        let free = (0..leases).find(|&k| lock_byte(self.0.fd, u64::from(k)));
        self.0.refused.store(if free.is_none() { now() } else { 0 }, Ordering::Relaxed);
        let lease = free?;
        let slots = early.unwrap_or_else(slots);
        slots.empty_claims_of_the_dead(lease);
        clean(lease);
        // Relaxed: who sees the number of an earlier holder looks at a process that has ended.
        slots.entry(lease).holder.store(proc::Process::this().to_word(), Ordering::Relaxed);
        self.0.lease.store(u32::from(lease) + 1, Ordering::Release);
        drop(looking);
        Some(lease)
    }

    /// Whether whoever is writing slot `i` is seen to be stopped. One look at one process; what lives
    /// in another process namespace cannot be seen, and is not.
    pub(crate) fn is_writer_stopped(slots: &Slots<'_>, i: usize) -> bool {
        let Some(lease) = lease_of(slots.state(i)) else { return false };
        let holder = slots.entry(lease).holder.load(Ordering::Relaxed);
        proc::Process::from_word(holder).is_stopped()
    }
}

impl Orphans for Leases<'_> {
    fn while_orphaned<R>(&self, k: Lease, act: impl FnOnce() -> R) -> Option<R> {
        if self.0.inherited.load(Ordering::Relaxed) || !self.0.is_ours() {
            return None;
        }
        // All threads of a process share its locks, so only one may look at a time: a second
        // would "get" the lock of the first and lose it when the first unlocks.
        let looking = self.0.looking.lock();
        if self.0.lease.load(Ordering::Acquire) == u32::from(k) + 1
            || !lock_byte(self.0.fd, u64::from(k))
        {
            return None;
        }
        // While we hold the lock nobody can become the owner of lease k, so what `act` sees in
        // its name is a dead process's.
        let result = act();
        unlock_byte(self.0.fd, u64::from(k));
        drop(looking);
        Some(result)
    }
}
