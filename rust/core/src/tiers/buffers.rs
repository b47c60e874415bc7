//! Memory that records from below were read into, kept for the next ones: its pages are there.

use crate::sys::pages::{PAGE, Pages};
use std::collections::BTreeMap;

/// So many bytes are kept at most.
const KEPT_BYTES: usize = 64 << 20;
/// A buffer may be so many times as long as what is read into it: the rest is memory for nothing, for as long
/// as somebody has the record.
const MOST_TIMES: usize = 2;

/// Buffers of any lengths.
#[derive(Default)]
pub(super) struct Buffers {
    /// By length, then by age.
    kept: BTreeMap<(usize, u64), Pages>,
    /// The length of each, by age.
    lengths: BTreeMap<u64, usize>,
    bytes: usize,
    /// What the next one's age is called.
    next: u64,
}

impl Buffers {
    /// The shortest that holds so many bytes, and the newest of these; none if it is much too long.
    pub(super) fn take(&mut self, len: usize) -> Option<Pages> {
        let longest = len.max(PAGE).saturating_mul(MOST_TIMES);
        let (&(fits, _), _) = self.kept.range((len, 0)..=(longest, u64::MAX)).next()?;
        let (&(_, age), _) = self.kept.range((fits, 0)..=(fits, u64::MAX)).next_back()?;
        self.remove(age)
    }

    /// Keeps one for later; the oldest go to make room.
    pub(super) fn keep(&mut self, buffer: Pages) {
        let len = buffer.len();
        if len > KEPT_BYTES {
            return;
        }
        while self.bytes + len > KEPT_BYTES {
            let Some((&oldest, _)) = self.lengths.first_key_value() else { break };
            self.remove(oldest);
        }
        self.lengths.insert(self.next, len);
        self.kept.insert((len, self.next), buffer);
        self.bytes += len;
        self.next += 1;
    }

    fn remove(&mut self, age: u64) -> Option<Pages> {
        let len = self.lengths.remove(&age)?;
        self.bytes -= len;
        self.kept.remove(&(len, age))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pages(count: usize) -> Pages {
        Pages::new(count * PAGE).unwrap()
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let mut buffers = Buffers::default();
        (0..100).for_each(|_| buffers.keep(pages(16)));
        (0..20).for_each(|_| buffers.keep(Pages::new(10 << 20).unwrap()));
        buffers.keep(Pages::new(KEPT_BYTES + 1).unwrap());
        let all: usize = buffers.kept.values().map(|kept| kept.len()).sum();
        assert_eq!((all, buffers.kept.len()), (60 << 20, 6), "the newest that fit");
        assert_eq!((buffers.bytes, buffers.lengths.len()), (all, 6));
    }

    #[test]
    fn what_is_given_fits_and_is_not_much_too_long() {
        let mut buffers = Buffers::default();
        [100, 4, 6, 5, 1].into_iter().for_each(|count| buffers.keep(pages(count)));
        let mut take = |len: usize| buffers.take(len).map(|buffer| buffer.len() / PAGE);
        assert_eq!(take(3 * PAGE + 1), Some(4), "the shortest that fits");
        assert_eq!(take(3 * PAGE + 1), Some(5));
        assert_eq!(take(3 * PAGE + 1), Some(6));
        assert_eq!(take(3 * PAGE + 1), None, "rather a new one than one of a hundred pages");
        assert_eq!((take(10), take(10)), (Some(1), None));
        assert_eq!((take(60 * PAGE), take(60 * PAGE)), (Some(100), None));
    }
}
