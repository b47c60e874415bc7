//! Huge pages for shared memory. Which files get them is up to settings of the kernel, of the mount
//! and of each size of page, so it is tried.

use crate::sys::mapping::Mapping;
use rustix::fd::{AsFd, OwnedFd};

/// Of a huge page. Where they are larger (64 KiB pages on Arm) none is found, and all stay small.
pub(crate) const HUGE_BYTES: u64 = 2 << 20;

/// Whether to use huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Ask for none.
    No,
    /// Where they are to be had.
    Auto,
    /// An error at creation where they are not to be had.
    Yes,
}

/// Whether files such as `empty`, which has no bytes yet, get huge pages from whoever asks.
pub(crate) fn are_given_to(empty: OwnedFd) -> bool {
    let tried = || -> rustix::io::Result<bool> {
        rustix::fs::ftruncate(&empty, HUGE_BYTES)?;
        let mapping = Mapping::map(empty.as_fd(), HUGE_BYTES as usize)?;
        mapping.ask_for_huge_pages()?;
        mapping.populate(0)?;
        Ok(rustix::fs::fstat(&empty)?.st_blocks as u64 * 512 >= HUGE_BYTES)
    };
    tried().unwrap_or(false)
}
