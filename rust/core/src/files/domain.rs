//! Who else uses the folder.

use crate::fault::{Fault, active, reached};
use crate::files::atomic_box::AtomicBox;
use crate::sys::ofd::{is_locked, is_locked_beside, share_byte, try_unlock_byte};
use crate::sys::private_file::open_private;
use rustix::fd::OwnedFd;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// All processes that share one table. Two tables can be for one folder, if /dev/shm is not shared
/// while the disk is (containers): then neither knows what the other's processes are about to open.
///
/// Byte `id` of the file `lock` is locked, shared, by every process with the table of that number.
/// A process that has no row in the table, because there are too many processes, locks one more byte,
/// so that nothing is removed while it lives: then nobody knows what it is about to open.
///
/// Who removes something locks a byte before it asks whether others are there; who comes locks its own
/// before it asks whether somebody removes, and waits for that. So one of them sees the other: nothing
/// that is given is removed.
pub(crate) struct Domain {
    pub(crate) id: u64,
    path: PathBuf,
    file: OwnedFd,
    /// Open in processes without a row: theirs alone, so that its lock ends with them.
    rowless: AtomicBox<OwnedFd>,
}

/// Added to the number of a table, which is less than any of these: the byte of its processes without
/// a row, and the byte of those that are removing something.
const ROWLESS: u64 = 1 << 61;
const REMOVING: u64 = 1 << 62;
const END: u64 = REMOVING + ROWLESS;

/// To remove something takes as long as one system call. Who takes longer is stopped.
const PATIENCE: Duration = Duration::from_secs(2);

impl Domain {
    pub(crate) fn join(path: &Path, instance: u128) -> rustix::io::Result<Self> {
        let file = open(path)?;
        let id = instance as u64 >> 3; // an offset in a file is at most 2^63
        share_byte(&file, id)?;
        wait_until(|| !is_locked_beside(&file, REMOVING..END, REMOVING + id))?;
        Ok(Self { id, path: path.to_path_buf(), file, rowless: AtomicBox::new() })
    }

    /// The right to remove what nobody with this table uses, for as long as it is kept. `None` if a
    /// process with another table lives, or one without a row.
    pub(crate) fn may_remove(&self) -> Option<Removing> {
        // A description of its own: threads of this process may remove at the same time.
        let removing = Removing { file: open(&self.path).ok()?, at: REMOVING + self.id };
        share_byte(&removing.file, removing.at).ok()?;
        let alone = self.is_alone();
        reached("nobody else is there");
        alone.then_some(removing)
    }

    /// Whether no process with another table lives, and none without a row.
    pub(crate) fn is_alone(&self) -> bool {
        !is_locked_beside(&self.file, 0..REMOVING, self.id) || active(Fault::IgnoreOtherTables)
    }

    /// Lets others know that this process, which has no row, uses files. False if that cannot be.
    pub(crate) fn show_rowless(&self) -> bool {
        if self.rowless.is_empty() {
            let lock = || {
                let file = open(&self.path)?;
                share_byte(&file, ROWLESS + self.id)?;
                wait_until(|| !is_locked(&file, REMOVING + self.id))?;
                Ok::<_, Errno>(file)
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

/// See [`Domain::may_remove`].
pub(crate) struct Removing {
    file: OwnedFd,
    at: u64,
}

impl Drop for Removing {
    fn drop(&mut self) {
        // Not only closed: a child that was forked meanwhile has the same description.
        try_unlock_byte(self.file.as_raw_fd(), self.at);
    }
}

fn wait_until(done: impl Fn() -> bool) -> rustix::io::Result<()> {
    let began = Instant::now();
    while !done() && !active(Fault::JoinAtOnce) {
        if began.elapsed() > PATIENCE {
            return Err(Errno::BUSY);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn open(path: &Path) -> rustix::io::Result<OwnedFd> {
    // Not for writing: that would keep the disk from being made read-only.
    open_private(path, OFlags::RDONLY).or_else(|errno| {
        // Where nothing can be written, what is there can be read.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|_| errno)
    })
}
