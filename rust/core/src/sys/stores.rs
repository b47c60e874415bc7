//! Stores past the processor's caches.
//!
//! Memory that is only written is not read first, and what nobody reads soon pushes nothing out.
#![allow(unsafe_code)] // copies between raw addresses

/// What is larger is out of the processor's caches before anybody reads it.
const BEYOND_CACHES: usize = 16 << 20;

/// How memory is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stores {
    /// By way of the caches.
    Cached,
    /// Past them.
    Streamed,
}

impl Stores {
    /// As suits so many bytes that are written one after the other.
    pub fn of(bytes: usize) -> Self {
        if bytes >= BEYOND_CACHES { Self::Streamed } else { Self::Cached }
    }
}

/// Copies past the caches. Others see it once this thread has called [`are_streamed`].
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) unsafe fn stream(mut from: *const u8, mut to: *mut u8, mut size: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;
    let head = to.align_offset(16).min(size);
    // SAFETY: every step is within `size`, and the streaming stores are aligned after the head.
    unsafe {
        copy_nonoverlapping(from, to, head);
        (from, to, size) = (from.add(head), to.add(head), size - head);
        while size >= 64 {
            let source = from.cast::<__m128i>();
            let target = to.cast::<__m128i>();
            let parts = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
            for (i, part) in parts.into_iter().enumerate() {
                _mm_stream_si128(target.add(i), part);
            }
            (from, to, size) = (from.add(64), to.add(64), size - 64);
        }
        copy_nonoverlapping(from, to, size);
    }
}

/// # Safety
/// As for `copy_nonoverlapping`.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) unsafe fn stream(from: *const u8, to: *mut u8, size: usize) {
    // SAFETY: by the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, size) }
}

/// Others see what this thread has streamed once they see that it is done.
pub(crate) fn are_streamed() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every processor of the architecture has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_wherever_they_begin_and_end() {
        let from: Vec<u8> = (0..400_u32).map(|at| (at * 37 % 251) as u8).collect();
        for begin in 0..20 {
            for size in [0, 1, 15, 16, 63, 64, 65, 127, 128, 300, 370] {
                let mut to = vec![0xee; 400];
                // SAFETY: both have more bytes than that.
                unsafe { stream(from.as_ptr().add(3), to.as_mut_ptr().add(begin), size) };
                are_streamed();
                assert_eq!(to[begin..begin + size], from[3..3 + size]);
                assert!(to[..begin].iter().chain(&to[begin + size..]).all(|&byte| byte == 0xee));
            }
        }
    }
}
