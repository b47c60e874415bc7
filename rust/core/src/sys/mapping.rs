//! The mapped bytes of a segment, and typed access to the parts that are shared.
#![allow(unsafe_code)] // mapping memory, and atomics over it, cannot be done without

use super::prefetch;
use crate::fault::{Fault, active};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Bytes that other processes may share. Whoever holds one keeps them mapped: a view of a slot
/// holds the mapping, not the cache, so it outlives the cache safely.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
    heap: bool,
}

// SAFETY: the bytes are reached through atomics, or through raw pointers under the slot protocol;
// the fields themselves never change.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `file`, shared. Touches nothing.
    ///
    /// A mapping keeps its open file description, and a lock lives as long as its description. So
    /// the mapping gets a description of its own, which never has a lock: neither a forked child's
    /// copy of the mapping nor a view that outlives the cache holds a lock of this process.
    pub(crate) fn map(file: BorrowedFd<'_>, len: usize) -> rustix::io::Result<Self> {
        if active(Fault::MapLockedDescription) {
            return Self::map_through(file, len);
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let unlocked =
            rustix::fs::openat(CWD, path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Self::map_through(unlocked.as_fd(), len)
    }

    /// Maps `file` itself: its locks live until both the descriptor and the mapping are gone. For
    /// who sees to forked children, and must not lose a lock to somebody who closes the descriptor.
    pub(crate) fn map_through(file: BorrowedFd<'_>, len: usize) -> rustix::io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no Rust object.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { start, len, heap: false })
    }

    /// Pages that are allocated through this mapping from now on are huge, if the kernel has and
    /// gives them and the whole of one lies in the mapping; else small, as ever.
    pub(crate) fn ask_for_huge_pages(&self) -> rustix::io::Result<()> {
        // SAFETY: our own mapping; advice on the size of its pages changes none of its bytes.
        unsafe { madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) }
    }

    /// Allocates the page that holds the byte at `at`. A full mount is an error, not the SIGBUS of
    /// touching it.
    pub(crate) fn populate(&self, at: usize) -> rustix::io::Result<()> {
        const PAGE: usize = 4096;
        if active(Fault::TouchHugePages) {
            let byte = &self.bytes(at, 1)[0];
            std::hint::black_box(byte.load(std::sync::atomic::Ordering::Relaxed));
            return Ok(());
        }
        let page = self.at(at / PAGE * PAGE, 1).as_ptr().cast();
        // SAFETY: a page of our own mapping; populating it leaves its bytes as they are.
        unsafe { madvise(page, PAGE, Advice::LinuxPopulateWrite) }
    }

    /// Zeroed private memory with the same interface, for tests without a kernel (Miri).
    #[cfg(test)]
    pub(crate) fn heap(len: usize) -> Self {
        // SAFETY: the layout has a non-zero size (asserted) and a valid alignment.
        let start = unsafe { std::alloc::alloc_zeroed(Self::heap_layout(len)) };
        let start = NonNull::new(start).expect("memory for a test segment");
        Self { start, len, heap: true }
    }

    #[cfg(test)]
    fn heap_layout(len: usize) -> std::alloc::Layout {
        assert!(len > 0);
        std::alloc::Layout::from_size_align(len, 4096).expect("a test segment's layout")
    }

    /// How many bytes are mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped; never, but clippy asks.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the `len` bytes at `at`. Panics outside the mapping.
    #[inline]
    pub fn at(&self, at: usize, len: usize) -> NonNull<u8> {
        assert!(at <= self.len && len <= self.len - at, "{at}+{len} lies outside the segment");
        // SAFETY: `at` is at most `len`, so the address is inside the mapping or one past it.
        unsafe { self.start.add(at) }
    }

    pub(crate) fn bytes(&self, at: usize, len: usize) -> &[AtomicU8] {
        let start = self.at(at, len);
        // SAFETY: in bounds (`at`), AtomicU8 has no alignment and no invalid value, and every
        // process that writes these bytes does so atomically. Lives as long as the mapping.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), len) }
    }

    pub(crate) fn states(&self, at: usize, count: usize) -> &[AtomicU16] {
        let start = self.at(at, count * 2);
        assert!(at.is_multiple_of(2));
        // SAFETY: as in `bytes`; the mapping is page-aligned and `at` a multiple of 2.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), count) }
    }

    pub(crate) fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        let start = self.at(at, count * 8);
        assert!(at.is_multiple_of(8));
        // SAFETY: as in `bytes`; the mapping is page-aligned and `at` a multiple of 8.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), count) }
    }

    /// Has the processor fetch what lies at `at`, where it can.
    #[inline]
    pub(crate) fn prefetch(&self, at: usize) {
        prefetch::word(self.at(at, 1).as_ptr());
    }

    pub(crate) fn half_word(&self, at: usize) -> &AtomicU32 {
        let start = self.at(at, 4);
        assert!(at.is_multiple_of(4));
        // SAFETY: as in `words`, with 4 for 8.
        unsafe { start.cast().as_ref() }
    }

    /// Copies `len` bytes at `at` to `to`. Another process may write them meanwhile: the caller
    /// must treat the copy as meaningless unless the slot protocol says it is whole.
    ///
    /// # Safety
    /// `to` must be valid for writes of `len` bytes and not overlap the mapping's range.
    #[inline]
    pub(crate) unsafe fn copy_out(&self, at: usize, to: *mut u8, len: usize) {
        let from = self.at(at, len).as_ptr();
        // SAFETY: the source is in bounds (`at`); the rest is the caller's obligation.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
    }

    /// Writes through the mapping: the way that is a SIGBUS on a full mount. For controls, and
    /// for the heap-backed segment.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        let to = self.at(at, bytes.len()).as_ptr();
        // SAFETY: the target is in bounds (`at`) and `bytes` is a live slice elsewhere.
        unsafe { std::ptr::copy(bytes.as_ptr(), to, bytes.len()) }
    }

    /// The checksum of the `len` bytes at `at`, which may change meanwhile (see `copy_out`).
    pub(crate) fn checksum(&self, at: usize, len: usize) -> u64 {
        let start = self.at(at, len).as_ptr();
        // SAFETY: in bounds. A concurrent write can only make the result meaningless, and the
        // caller discards it then (segment/claim.rs, `read_stable`).
        checksum(unsafe { std::slice::from_raw_parts(start, len) })
    }
}

/// The checksum of the bytes of a sample.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(test)]
        if self.heap {
            // SAFETY: allocated in `heap` with this very layout.
            unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::heap_layout(self.len)) };
            return;
        }
        debug_assert!(!self.heap);
        // SAFETY: mapped in `map` with this length; nobody can reach it after the last owner.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}
