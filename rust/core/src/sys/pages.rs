//! Memory in whole pages, for reads and writes past the page cache.
#![allow(unsafe_code)] // std has no aligned bytes

use crate::fault::{Fault, active as broken};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::alloc::{Layout, alloc, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// What offsets, lengths and addresses of direct reads and writes are multiples of. Disks ask for 512 or
/// 4096.
pub(crate) const PAGE: usize = 4096;

/// From here on memory is taken as it is touched: its length may be what somebody says who never sends so much.
const LARGE: usize = 4 << 20;

/// Bytes that begin at a page and are whole pages.
pub struct Pages {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: memory that this owns alone.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least so many bytes, whatever is in them; `None` if there is no memory.
    pub fn new(len: usize) -> Option<Self> {
        let len = len.max(1).checked_next_multiple_of(PAGE)?;
        if len >= LARGE {
            return Self::untouched(len);
        }
        let layout = Layout::from_size_align(len, PAGE).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        // SAFETY: just allocated. Zeroed, because a slice must not be of uninitialised bytes; pages that are
        // used again pay it once.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Some(Self { start, len })
    }

    fn untouched(len: usize) -> Option<Self> {
        let (rights, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: new memory, at no address that anybody has; zeros, as the system gives them.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, flags) }.ok()?;
        let mut made = Self { start: NonNull::new(start.cast())?, len };
        if broken(Fault::TouchPages) {
            made.fill(0);
        }
        Some(made)
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `new`, and ours.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len >= LARGE {
            // SAFETY: mapped in `untouched`, of this length; nobody borrows it any more.
            let _unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
            return;
        }
        // SAFETY: allocated in `new` with this very layout.
        unsafe {
            dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, PAGE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_and_begin_where_one_does() {
        for len in [0, 1, PAGE, PAGE + 1, 10 * PAGE, LARGE - PAGE, LARGE, LARGE + 1] {
            let mut pages = Pages::new(len).unwrap();
            assert!(pages.len() >= len.max(1) && pages.len().is_multiple_of(PAGE));
            assert!(pages.as_ptr().addr().is_multiple_of(PAGE) && pages.iter().all(|&it| it == 0));
            pages.fill(7);
            assert!(pages.iter().all(|&byte| byte == 7));
        }
        assert!(Pages::new(usize::MAX).is_none());
    }
}
