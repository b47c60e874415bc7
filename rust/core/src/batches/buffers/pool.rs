//! Which buffers are kept, given out again and given back.

use super::mapped::{HELD, Mapped, file_len, unlock};
use super::{Buffer, Ticket};
use crate::error::{Kind, Result};
use crate::sys::limits;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// The most buffers a process makes.
pub const BUFFERS: usize = 32;

/// A new buffer takes at most this part of the memory that is left: others look at the same time.
const PART_OF_LEFT: u64 = 16;
/// All buffers of a process take at most this part of the memory that they and others leave.
const PART_OF_ALL: u64 = 8;
/// After a refusal for lack of memory, so many calls do not ask again: asking reads several files.
const PAUSE: u32 = 16;
/// So many free buffers are kept whose size was asked for only once.
pub(super) const NOT_REUSED: usize = 4;
/// The most mappings of other processes' buffers that are kept while nobody here holds them.
const KEPT: u64 = 256;

/// The buffers of this process, its own and those of others.
pub(super) struct Pool {
    pub(super) entries: Vec<Mapped>,
    /// Counts the calls of `take` and `receive`; the only notion of time here.
    clock: u64,
    /// How many calls will not ask for memory.
    pause: u32,
    /// The entry that is asked next whether its maker lives.
    turn: usize,
}

impl Pool {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), clock: 0, pause: 0, turn: 0 }
    }

    pub(super) fn find(&mut self, data: NonNull<u8>) -> Option<&mut Mapped> {
        self.entries.iter_mut().find(|entry| entry.data() == data)
    }

    pub(super) fn take(&mut self, bytes: usize) -> Option<Buffer> {
        self.clock += 1;
        self.tidy();
        let at = match self.free_one(bytes) {
            Some(at) => {
                self.entries[at].reused = true;
                at
            }
            None => {
                let need = (bytes > 0).then(|| file_len(bytes as u64)).flatten()?;
                if !self.make_room(need) {
                    return None;
                }
                self.entries.push(Mapped::make(bytes, need)?);
                self.entries.len() - 1
            }
        };
        let entry = &mut self.entries[at];
        entry.used = self.clock;
        entry.holds = 1;
        Some(entry.as_held())
    }

    /// The free buffer of that size that was used last: the others grow stale if they are too many.
    fn free_one(&mut self, bytes: usize) -> Option<usize> {
        let mut before = u64::MAX;
        loop {
            let (at, entry) = self
                .entries
                .iter_mut()
                .enumerate()
                .filter(|(_, e)| e.made && e.bytes == bytes && e.holds == 0 && e.used < before)
                .max_by_key(|(_, e)| e.used)?;
            if entry.is_free() {
                return Some(at);
            }
            before = entry.used;
        }
    }

    /// Gives back what is of no use any more.
    fn tidy(&mut self) {
        // The rest takes system calls for every buffer, so not every time.
        if self.clock.is_multiple_of(64) {
            for entry in self.entries.iter_mut().filter(|entry| entry.made && entry.holds == 0) {
                entry.unusable |= !entry.is_ours();
            }
            while self.give_back(|entry, now| entry.is_stale(now)) {}
        }
        self.entries.retain(|entry| !(entry.unusable && entry.is_idle()));
    }

    /// Gives back the free buffer that was not used for longest, of those that `may` go.
    fn give_back(&mut self, may: impl Fn(&Mapped, u64) -> bool) -> bool {
        let now = self.clock;
        let oldest = self
            .entries
            .iter_mut()
            .enumerate()
            .filter(|(_, entry)| entry.made && may(entry, now))
            .filter_map(|(at, entry)| entry.is_free().then_some((at, entry.used)))
            .min_by_key(|&(_, used)| used);
        oldest.map(|(at, _)| self.entries.remove(at)).is_some()
    }

    /// Whether `need` bytes may be had, after giving back what is not worth keeping. A size that
    /// comes back keeps its buffers: the smaller last batch of an epoch does not cost the others
    /// theirs. It keeps one itself, too, until it is stale.
    fn make_room(&mut self, need: u64) -> bool {
        let idle = |entry: &Mapped, now| !entry.reused || entry.is_stale(now);
        let not_reused = |entry: &mut Mapped| entry.made && !entry.reused && entry.is_free();
        let many = self.entries.iter_mut().filter_map(|e| not_reused(e).then_some(())).count();
        for _ in NOT_REUSED..many {
            self.give_back(|entry, _| !entry.reused);
        }
        while self.entries.iter().filter(|entry| entry.made).count() >= BUFFERS {
            if !self.give_back(idle) {
                return false;
            }
        }
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        loop {
            // A full memory cgroup kills, so this is asked before anything is allocated. Not to know
            // is no.
            let left = Some(limits::memory().free).filter(|&left| left < u64::MAX).unwrap_or(0);
            let made = self.entries.iter().filter(|entry| entry.made);
            let total: u64 = made.map(|entry| entry.mapping.len() as u64).sum();
            if need <= left / PART_OF_LEFT && total + need <= (left + total) / PART_OF_ALL {
                return true;
            }
            if !self.give_back(idle) {
                self.pause = PAUSE;
                return false;
            }
        }
    }

    pub(super) fn receive(&mut self, ticket: &Ticket) -> Result<Buffer> {
        self.clock += 1;
        let received = self.find_or_open(ticket);
        self.look_at_one(); // after it: a mapping that is kept serves its last ticket, too
        received
    }

    fn find_or_open(&mut self, ticket: &Ticket) -> Result<Buffer> {
        let known = self.entries.iter().position(|entry| entry.instance == ticket.instance);
        if let Some(at) = known {
            let entry = &mut self.entries[at];
            // A mapping that nobody holds here can be locked only with its descriptor.
            if entry.made || entry.holds > 0 || entry.is_ours() {
                entry.used = self.clock;
                return entry.turn_into_hold(ticket);
            }
            self.entries.remove(at);
        }
        let mut entry = match Mapped::open(ticket) {
            // What is only kept makes room for what is needed.
            Err(error) if error.kind() == Kind::Space => {
                self.entries.retain(|entry| entry.made || !entry.is_idle());
                Mapped::open(ticket)
            }
            entry => entry,
        }?;
        entry.used = self.clock;
        let buffer = entry.turn_into_hold(ticket)?;
        self.entries.push(entry);
        Ok(buffer)
    }

    pub(super) fn holding(&mut self, address: usize) -> Option<Buffer> {
        let entry = self.entries.iter_mut().find(|entry| {
            let offset = address.wrapping_sub(entry.data().as_ptr() as usize);
            entry.holds > 0 && offset < entry.bytes
        })?;
        entry.holds += 1;
        Some(entry.as_held())
    }

    pub(super) fn cancel(&mut self, ticket: &Ticket) -> bool {
        let entry = self.entries.iter().find(|entry| entry.instance == ticket.instance);
        entry.is_some_and(|entry| entry.header().take_ticket(ticket.serial))
    }

    /// Ends one hold.
    pub(super) fn release(&mut self, data: NonNull<u8>) {
        let Some(at) = self.entries.iter().rposition(|entry| entry.data() == data) else {
            debug_assert!(false, "a hold on a buffer that is not there");
            return;
        };
        let entry = &mut self.entries[at];
        entry.holds -= 1;
        if entry.holds > 0 || (entry.made && !entry.unusable) {
            return;
        }
        // SYNC POINT let go: Release here, Acquire in `is_free`: what this process read, it read
        // before the maker writes again.
        entry.header().drops().fetch_add(1, Ordering::Release);
        entry.exposed &= entry.header().has_tickets();
        // Without its descriptor or its maker the mapping goes, and the lock with it; unless a ticket
        // of ours leads here.
        let gone = !entry.unusable && (entry.is_gone() || !unlock(entry.fd, HELD));
        entry.unusable |= gone;
        if entry.unusable && entry.is_idle() {
            self.entries.remove(at);
        }
        if gone {
            self.give_back_useless(); // where one maker has ended, others may have
        }
        self.keep_few();
    }

    /// Bounds the mappings that are only kept.
    fn keep_few(&mut self) {
        let kept = |entry: &&Mapped| !entry.made && entry.holds == 0;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let few = KEPT.min(limit.unwrap_or(u64::MAX) / 4) as usize;
        if self.entries.iter().filter(kept).count() > few {
            // One that a ticket leads to only if there is no other.
            let order = |entry: &Mapped| (!entry.is_idle(), entry.used);
            let all = self.entries.iter().enumerate().filter(|(_, entry)| kept(entry));
            if let Some((at, _)) = all.min_by_key(|(_, entry)| order(entry)) {
                self.entries.remove(at);
            }
        }
    }

    /// Asks about one mapping per call, in turn; if it is of no use any more, about all.
    fn look_at_one(&mut self) {
        self.turn = (self.turn + 1) % self.entries.len().max(1);
        if self.entries.get(self.turn).is_some_and(Mapped::is_useless) {
            self.give_back_useless();
        }
    }

    pub(super) fn give_back_useless(&mut self) {
        self.entries.retain(|entry| !entry.is_useless());
    }
}
