//! What goes when nobody uses it any more: the name of a segment whose last process ends, and what the
//! dead left.

use crate::fault::{Fault, active};
use crate::segment::layout;
use crate::segment::name::{SHM, file_prefix};
use crate::sys::fork::{self, Anchor};
use crate::sys::private_file::{open_checked, read_header, unlink_same};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::FlockOperation;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Removes what processes of this user left behind: segments nobody uses and that are not kept.
/// Returns their names. What cannot be looked at is left alone.
pub fn remove_leftovers() -> Vec<String> {
    if active(Fault::NoSweep) {
        return Vec::new();
    }
    let prefix = file_prefix();
    let Ok(entries) = std::fs::read_dir(SHM) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let path = Path::new(SHM).join(name.strip_prefix(&prefix).map(|_| &name)?);
            // A child must not inherit the lock that is tried below.
            let _unforked = fork::hold();
            let file = open_checked(&path).ok()??;
            let (bytes, len) = read_header(file.as_fd()).ok()?;
            // A damaged header may have lost its wish to be kept: whoever opens it is told.
            let leftover = layout::is_ours(&bytes)
                && layout::is_intact(&bytes, len)
                && !layout::is_kept(&bytes)
                && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            (leftover && unlink_same(file.as_fd(), &path)).then_some(name)
        })
        .collect()
}

/// Detach: if nobody else holds the segment, its name goes. Else a look at exit is asked for: the
/// others may end before this process, and without a word.
pub(super) fn remove_if_last(anchor: &Anchor) -> Option<fn()> {
    let path = anchor.path.as_ref().filter(|_| !active(Fault::KeepName))?;
    #[allow(unsafe_code)] // borrowing the anchor's descriptor
    // SAFETY: open while the anchor is registered; released before it is closed.
    let file = unsafe { BorrowedFd::borrow_raw(anchor.fd) };
    // If another process shares our open file description, a lock of ours would say nothing.
    let last = !anchor.inherited.load(Ordering::Relaxed)
        && rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if last || active(Fault::UnlinkLive) {
        unlink_same(file, Path::new(&*path.to_string_lossy()));
        return None;
    }
    Some(|| drop(remove_leftovers()))
}
