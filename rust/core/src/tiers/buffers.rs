//! Memory that records from below were read into, kept for the next ones: its pages are there.
//!
//! ```text
//!   lengths   1 2 3 4 5 6 7 8   10 12 14 16   20 24 28 32   40 …   pages: four from one power of two to the next
//!             ▲ a stack for each: who comes next gets what was kept last, which is in the processor's caches
//! ```

use crate::sys::pages::{PAGE, Pages};

/// So many bytes are kept at most. Every worker has them, and what it has yet to write.
const KEPT_BYTES: usize = 24 << 20;
/// Stacks from one power of two to the next.
const PER_OCTAVE: usize = 4;

/// Buffers of any lengths.
#[derive(Default)]
pub(super) struct Buffers {
    stacks: Vec<Vec<Pages>>,
    bytes: usize,
}

impl Buffers {
    /// What was kept last of those that hold so many bytes and are not much longer: the rest is memory for
    /// nothing, for as long as somebody has the record.
    pub(super) fn take(&mut self, len: usize) -> Option<Pages> {
        let kept = self.stacks.get_mut(stack_of(len))?.pop()?;
        self.bytes -= kept.len();
        Some(kept)
    }

    /// How long a buffer for so many bytes is, so that others of about as many fit into it; not much longer.
    pub(super) fn room(len: usize) -> usize {
        pages_of(stack_of(len)).checked_mul(PAGE).filter(|&room| room >= len).unwrap_or(len)
    }

    /// Keeps one for later; others go to make room, first of lengths of which most is kept.
    pub(super) fn keep(&mut self, buffer: Pages) {
        let (len, stack) = (buffer.len(), stack_of(buffer.len()));
        // Of another length than `room` says, it would not hold what is asked for.
        if len > KEPT_BYTES || len != Self::room(len) {
            return;
        }
        while self.bytes + len > KEPT_BYTES {
            let held = |stack: &&mut Vec<Pages>| stack.iter().map(|kept| kept.len()).sum::<usize>();
            let most = self.stacks.iter_mut().max_by_key(held).and_then(Vec::pop);
            let Some(dropped) = most else { break };
            self.bytes -= dropped.len();
        }
        if self.stacks.len() <= stack {
            self.stacks.resize_with(stack + 1, Vec::new);
        }
        self.stacks[stack].push(buffer);
        self.bytes += len;
    }
}

/// Which stack buffers for so many bytes are on.
fn stack_of(len: usize) -> usize {
    let pages = len.div_ceil(PAGE).max(1);
    if pages <= 2 * PER_OCTAVE {
        return pages - 1;
    }
    // One less, so that a power of two is the last of those before it.
    let octave = (pages - 1).ilog2() as usize;
    let part = ((pages - 1 - (1 << octave)) * PER_OCTAVE) >> octave;
    2 * PER_OCTAVE + (octave - 3) * PER_OCTAVE + part
}

/// How many pages those of a stack have.
fn pages_of(stack: usize) -> usize {
    if stack < 2 * PER_OCTAVE {
        return stack + 1;
    }
    let (octave, part) = ((stack - 2 * PER_OCTAVE) / PER_OCTAVE + 3, stack % PER_OCTAVE);
    (1 << octave) + ((part + 1) << octave) / PER_OCTAVE
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn pages(count: usize) -> Pages {
        Pages::new(Buffers::room(count * PAGE)).unwrap()
    }

    #[test]
    fn a_buffer_is_long_enough_and_not_much_longer() {
        let mut stacks = 0;
        for pages in (1..5000).chain([1 << 14, (1 << 14) + 1, 131_072]) {
            let (room, stack) = (Buffers::room(pages * PAGE) / PAGE, stack_of(pages * PAGE));
            assert!(room >= pages && room <= pages + pages / 4, "{pages} {room}");
            assert_eq!((stack_of(room * PAGE), pages_of(stack)), (stack, room), "{pages}");
            assert!(stack == stacks || stack == stacks + 1 || pages > 5000, "{pages} {stack}");
            stacks = stack;
        }
        assert_eq!((Buffers::room(0), Buffers::room(1)), (PAGE, PAGE));
        assert_eq!(Buffers::room(usize::MAX), usize::MAX);
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let mut buffers = Buffers::default();
        (0..100).for_each(|_| buffers.keep(pages(16)));
        (0..20).for_each(|_| buffers.keep(pages(2560)));
        buffers.keep(Pages::new(KEPT_BYTES + 1).unwrap());
        let all: usize = buffers.stacks.iter().flatten().map(|kept| kept.len()).sum();
        assert_eq!(buffers.bytes, all);
        assert!((KEPT_BYTES - (10 << 20)..=KEPT_BYTES).contains(&all), "{all}");
        assert_eq!(buffers.stacks[stack_of(16 * PAGE)].len(), 100, "of which there is little");
        assert_eq!(buffers.stacks[stack_of(2560 * PAGE)].len(), 1);
    }

    #[test]
    fn what_is_given_fits_and_is_not_much_too_long() {
        let mut buffers = Buffers::default();
        [100, 4, 6, 5, 1].into_iter().for_each(|count| buffers.keep(pages(count)));
        let mut take = |len: usize| buffers.take(len).map(|buffer| buffer.len() / PAGE);
        assert_eq!(take(3 * PAGE + 1), Some(4), "one that fits");
        assert_eq!(take(3 * PAGE + 1), None, "rather a new one than one of six pages");
        assert_eq!((take(10), take(10)), (Some(1), None));
        assert_eq!((take(97 * PAGE), take(97 * PAGE)), (Some(112), None));
    }
}
