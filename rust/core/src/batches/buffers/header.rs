//! The words of a buffer that processes share, and the tickets among them.

use crate::sys::mapping::Mapping;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most tickets of one buffer that were sent and not yet received.
pub const TICKETS: usize = 64;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"stobatch");
/// Magic, instance and bytes.
pub(super) const HEADER_BYTES: usize = 24;
const SENDS_AT: usize = 64;
const DROPS_AT: usize = 128;
const TICKETS_AT: usize = 256;
/// Where the batch begins.
pub(super) const DATA_AT: usize = 4096;

const _: () = assert!(TICKETS_AT + TICKETS * 8 <= DATA_AT);

/// The words of a buffer that processes share.
#[derive(Clone, Copy)]
pub(super) struct Header<'a>(pub(super) &'a Mapping);

impl<'a> Header<'a> {
    pub(super) fn sends(self) -> &'a AtomicU64 {
        &self.0.words(SENDS_AT, 1)[0]
    }

    pub(super) fn drops(self) -> &'a AtomicU64 {
        &self.0.words(DROPS_AT, 1)[0]
    }

    fn tickets(self) -> &'a [AtomicU64] {
        self.0.words(TICKETS_AT, TICKETS)
    }

    pub(super) fn has_tickets(self) -> bool {
        // SYNC POINT received: SeqCst here and in `take_ticket`.
        self.tickets().iter().any(|ticket| ticket.load(Ordering::SeqCst) != 0)
    }

    /// Enters a ticket and returns its serial number; `None` if there are too many.
    pub(super) fn enter_ticket(self) -> Option<u64> {
        // Relaxed: only makes the number another one than before.
        let serial = self.sends().fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        // SYNC POINT ticket: Release here, Acquire in `take_ticket`: the batch is there before its
        // ticket. SeqCst for `sends`, below.
        let entered = self.tickets().iter().any(|ticket| {
            ticket.compare_exchange(0, serial, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        });
        // SYNC POINT sends: SeqCst here and in `is_free`: raised after the ticket is entered and
        // before the sender lets go.
        self.sends().fetch_add(1, Ordering::SeqCst);
        entered.then_some(serial)
    }

    /// Takes a ticket out; false if it is not there, or no longer.
    pub(super) fn take_ticket(self, serial: u64) -> bool {
        // SYNC POINT ticket: Acquire here, Release in `enter_ticket`. SYNC POINT received: Release here,
        // Acquire in `has_tickets`: who does not see the ticket sees the receiver's lock.
        let out = |ticket: &AtomicU64| {
            ticket.compare_exchange(serial, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let mut tickets = self.tickets().iter();
        serial != 0 && tickets.any(|ticket| ticket.load(Ordering::Relaxed) == serial && out(ticket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_a_ticket_arrives_once() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        assert!(!header.has_tickets() && !header.take_ticket(0) && !header.take_ticket(7));
        let (first, second) = (header.enter_ticket().unwrap(), header.enter_ticket().unwrap());
        assert_ne!(first, second);
        assert!(header.has_tickets());
        assert!(header.take_ticket(second) && !header.take_ticket(second));
        assert!(header.has_tickets());
        assert!(header.take_ticket(first) && !header.has_tickets());
        // A number is not used again, so an old ticket does not get a new one's place.
        let third = header.enter_ticket().unwrap();
        assert!(
            !header.take_ticket(first) && !header.take_ticket(second) && header.take_ticket(third)
        );
    }

    #[test]
    fn heap_tickets_in_ticket_are_limited() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        let tickets: Vec<u64> = (0..TICKETS).map(|_| header.enter_ticket().unwrap()).collect();
        let sends = header.sends().load(Ordering::Relaxed);
        assert_eq!(header.enter_ticket(), None);
        assert!(header.sends().load(Ordering::Relaxed) > sends);
        assert!(tickets.iter().all(|&serial| header.take_ticket(serial)));
        assert!(!header.has_tickets());
    }

    #[test]
    fn heap_tickets_of_threads_arrive_once_each() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let serial = header.enter_ticket().unwrap();
                        assert!(header.take_ticket(serial));
                    }
                });
            }
        });
        assert!(!header.has_tickets());
        assert_eq!(header.sends().load(Ordering::Relaxed), 8000);
    }

    /// A buffer that is passed on and on: each holder enters a ticket, raises `sends` and may then
    /// let go; the next one locks and takes the ticket out. The maker asks meanwhile.
    #[derive(Clone, Copy)]
    struct Passing {
        /// What each holder does, and its successor, in that order.
        order: [Step; 4],
        /// Whether the maker looks at `sends` again.
        again: bool,
        steps: usize,
        may_let_go: u8,
        locks: u8,
        ticket: bool,
        sends: u8,
        asked: u8,
        before: u8,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Step {
        Enter,
        Raise,
        Lock,
        Out,
    }

    impl Passing {
        const STEPS: usize = 4 * 3;

        fn new(order: [Step; 4], again: bool) -> Self {
            let (steps, may_let_go, locks, ticket) = (0, 0, 1, false);
            Self { order, again, steps, may_let_go, locks, ticket, sends: 0, asked: 0, before: 0 }
        }

        /// Whether some order of the steps of all ends with a held buffer taken for free.
        fn goes_wrong(self) -> bool {
            self.pass_on().is_some_and(Self::goes_wrong)
                || self.let_go().is_some_and(Self::goes_wrong)
                || match self.ask() {
                    Some(next) if next.asked == 4 => next.ticket || next.locks > 0,
                    next => next.is_some_and(Self::goes_wrong),
                }
        }

        fn pass_on(mut self) -> Option<Self> {
            match self.order[self.steps % 4] {
                _ if self.steps == Self::STEPS => return None,
                Step::Enter => self.ticket = true,
                Step::Raise => self.sends += 1,
                Step::Lock => self.locks += 1,
                Step::Out => self.ticket = false,
            }
            self.steps += 1;
            // The sender once its ticket is made, the last receiver when it likes.
            self.may_let_go += u8::from(self.steps % 4 == 2 || self.steps == Self::STEPS);
            Some(self)
        }

        fn let_go(mut self) -> Option<Self> {
            self.may_let_go = self.may_let_go.checked_sub(1)?;
            self.locks -= 1;
            Some(self)
        }

        /// `Mapped::is_free`, one look at a time; `None` when it says no.
        fn ask(mut self) -> Option<Self> {
            match self.asked {
                0 => self.before = self.sends,
                1 if self.ticket => return None,
                2 if self.locks > 0 => return None,
                3 if self.again && self.sends != self.before => return None,
                _ => {}
            }
            self.asked += 1;
            Some(self)
        }
    }

    #[test]
    fn no_order_of_steps_frees_a_buffer_that_is_held() {
        use Step::{Enter, Lock, Out, Raise};
        assert!(!Passing::new([Enter, Raise, Lock, Out], true).goes_wrong());
        // Controls: each rule is needed.
        assert!(Passing::new([Enter, Raise, Lock, Out], false).goes_wrong());
        assert!(Passing::new([Raise, Enter, Lock, Out], true).goes_wrong());
        assert!(Passing::new([Enter, Raise, Out, Lock], true).goes_wrong());
    }
}
