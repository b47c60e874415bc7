//! Bytes brought near the processor before they are wanted.
//!
//! Shuffled samples lie anywhere in memory, so the processor does not foresee the next one: a copy of small
//! ones waits for memory at the beginning of each. To ask for about [`BYTES_AHEAD`] of those to come, while
//! others are copied, makes it about twice as fast. Longer ones it soon foresees by itself.
//!
//! Where a sample has several lines of a cache, one of another is asked for with each that is copied: many at
//! once would wait for each other.
#![allow(unsafe_code)] // hints of the processor's, and copies between raw addresses

/// So much is asked for ahead: more would push out what was asked for before.
pub(crate) const BYTES_AHEAD: usize = 4096;
/// Longer samples are left to the processor.
const FORESEEN: usize = 16 << 10;
/// From this size on samples are fetched line by line.
const SEVERAL_LINES: usize = 512;
/// What the processor fetches at a time.
const LINE: usize = 64;

/// How many samples of this size to ask for ahead.
pub(crate) fn samples_ahead(bytes: usize) -> usize {
    (BYTES_AHEAD / bytes.max(1)).max(1)
}

/// Has the beginning of a sample fetched that is about to be copied.
#[inline(always)]
pub(crate) fn sample(from: *const u8, bytes: usize) {
    if bytes <= FORESEEN {
        for at in (0..bytes.min(BYTES_AHEAD)).step_by(LINE) {
            // To the second cache: the first has too few places for what is on its way.
            hint::<false>(from.wrapping_add(at));
        }
    }
}

/// For samples of this size that are fetched line by line, how many to copy before one that is fetched
/// meanwhile; `None` where they are not.
pub(crate) fn samples_between(bytes: usize) -> Option<usize> {
    (SEVERAL_LINES..=FORESEEN).contains(&bytes).then(|| (6144 / bytes).max(2))
}

/// Copies a sample, or a part of it, and meanwhile has as many bytes fetched from elsewhere.
///
/// # Safety
/// As for `copy_nonoverlapping`. What is fetched may be anywhere.
#[inline(always)]
pub(crate) unsafe fn copy_and_fetch(from: *const u8, to: *mut u8, size: usize, next: *const u8) {
    let mut at = 0;
    while at + LINE <= size {
        hint::<true>(next.wrapping_add(at));
        // SAFETY: a line within `size`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), LINE) };
        at += LINE;
    }
    hint::<true>(next.wrapping_add(size)); // wherever in a line it begins
    // SAFETY: the rest.
    unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), size - at) };
}

/// Has these bytes fetched, which are to be read soon.
#[inline(always)]
pub(crate) fn bytes(from: *const u8, count: usize) {
    (0..count).step_by(LINE).for_each(|at| hint::<true>(from.wrapping_add(at)));
}

/// Has a word fetched that is about to be read.
#[inline(always)]
pub(crate) fn word(from: *const u8) {
    hint::<true>(from);
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn hint<const NEAREST: bool>(from: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a hint, of any address; nothing is read that the program sees.
    unsafe {
        if NEAREST {
            _mm_prefetch::<_MM_HINT_T0>(from.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T1>(from.cast());
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
#[inline(always)]
fn hint<const NEAREST: bool>(_: *const u8) {}
