//! Who else uses the folder.

use crate::fault::{Fault, active};
use crate::files::atomic_box::AtomicBox;
use crate::sys::ofd::{is_locked, is_locked_elsewhere, share_byte};
use crate::sys::private_file::open_private;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags};
use std::path::{Path, PathBuf};

/// All processes that share one table. Two tables can be for one folder, if /dev/shm is not shared
/// while the disk is (containers): then neither knows what the other's processes are about to open.
///
/// Byte `id` of the file `lock` is locked, shared, by every process with the table of that number.
/// A process that has no row in the table, because there are too many processes, locks one more byte,
/// so that nothing is removed while it lives: then nobody knows what it is about to open.
pub(crate) struct Domain {
    pub(crate) id: u64,
    path: PathBuf,
    file: OwnedFd,
    /// Open in processes without a row: theirs alone, so that its lock ends with them.
    rowless: AtomicBox<OwnedFd>,
}

/// Added to the number of a table: the byte of its processes without a row.
const ROWLESS: u64 = 1 << 62;

impl Domain {
    pub(crate) fn join(path: &Path, instance: u128) -> rustix::io::Result<Self> {
        let file = open(path)?;
        let id = instance as u64 >> 2; // an offset in a file is at most 2^63
        share_byte(&file, id)?;
        Ok(Self { id, path: path.to_path_buf(), file, rowless: AtomicBox::new() })
    }

    /// Whether no process with another table lives, and none without a row.
    pub(crate) fn is_alone(&self) -> bool {
        !is_locked_elsewhere(&self.file, self.id) || active(Fault::IgnoreOtherTables)
    }

    /// Lets others know that this process, which has no row, uses files. False if that cannot be.
    pub(crate) fn show_rowless(&self) -> bool {
        if self.rowless.is_empty() {
            let lock = || {
                let file = open(&self.path)?;
                share_byte(&file, ROWLESS + self.id).map(|()| file)
            };
            let Ok(file) = lock() else { return false };
            let _another_thread_was_faster = self.rowless.put(Box::new(file));
        }
        true
    }

    /// Whether a process without a row lives.
    pub(crate) fn has_rowless(&self) -> bool {
        is_locked(&self.file, ROWLESS + self.id)
    }
}

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    // Not for writing: that would keep the disk from being made read-only.
    open_private(path, OFlags::RDONLY).or_else(|errno| {
        // Where nothing can be written, what is there can be read.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|_| errno)
    })
}
