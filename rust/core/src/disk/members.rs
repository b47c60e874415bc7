//! Who uses a folder: all processes that share one table, and perhaps some with another.
//!
//! Two tables can be for one folder, if the disk is shared and /dev/shm is not (containers). One of them
//! writes: the first to come, for as long as one of its processes lives. The others read what was there
//! when they came; the one that writes next first reads what there is by then (recall.rs). Which table writes is noted in the file `lock`; that its processes live says a lock on
//! the byte of its number, which they share.

use crate::fault::{Fault, active as broken, reached};
use crate::sys::ofd::{is_any_locked, is_locked, lock_byte, share_byte, try_unlock_byte};
use crate::sys::private_file::{is_same, open_private, write_all};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, Timespec, Timestamps, UTIME_NOW};
use rustix::io::Errno;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// The byte that is locked while a table is chosen; numbers of tables are less.
const CHOOSING: u64 = 1 << 62;
/// To choose takes a few system calls. Who takes longer is stopped.
const PATIENCE: Duration = Duration::from_secs(2);

/// This process as one of those with its table.
pub(super) struct Member {
    file: OwnedFd,
    id: u64,
    /// The disk can be written to.
    writable: bool,
}

impl Member {
    /// Joins those with this table. STALE if the folder was removed meanwhile, or its store, which `is_there`
    /// looks for.
    pub(super) fn join(
        folder: &Path,
        instance: u128,
        is_there: impl FnOnce() -> bool,
    ) -> rustix::io::Result<Self> {
        let is_gone = |errno| if errno == Errno::NOENT { Errno::STALE } else { errno };
        let (file, writable) = open(folder).map_err(is_gone)?;
        reached("disk: lock opened");
        let id = (instance as u64 >> 3).max(1); // an offset in a file is at most 2^63
        // Who removes what nobody uses has it meanwhile.
        let alone = writable && wait_to_choose(&file);
        share_byte(&file, id)?;
        let stays = is_lock_of(&file, folder) && is_there() || broken(Fault::JoinRemoved);
        if alone {
            try_unlock_byte(file.as_raw_fd(), CHOOSING);
        }
        if !stays {
            return Err(Errno::STALE);
        }
        let member = Self { file, id, writable };
        member.note_use();
        Ok(member)
    }

    /// The time of change of the file `lock` is when the folder was used last.
    fn note_use(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let _cannot_be_written = rustix::fs::futimens(&self.file, &times);
    }

    /// Whether this table is the one that writes; it becomes so if no other is.
    pub(super) fn writes(&self, folder: &Path) -> bool {
        let choose = |_: &OwnedFd| match self.writer() {
            Ok(writer) if writer == self.id => true,
            Ok(writer) if writer != 0 && is_locked(&self.file, writer) => false,
            Ok(_) if self.writable => {
                write_all(self.file.as_fd(), &self.id.to_le_bytes(), 0).is_ok()
            }
            _ => false,
        };
        choosing(folder, choose).unwrap_or(false)
    }

    fn writer(&self) -> rustix::io::Result<u64> {
        let mut id = [0; 8];
        match rustix::io::pread(&self.file, &mut id[..], 0)? {
            8 => Ok(u64::from_le_bytes(id)).map(|id| if id < CHOOSING { id } else { 0 }),
            _ => Ok(0),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.note_use();
    }
}

/// Runs `act` while nobody else does so, or chooses who writes, if nobody uses the folder.
pub(super) fn alone<R>(folder: &Path, act: impl FnOnce() -> R) -> Option<R> {
    choosing(folder, |lock| (!is_any_locked(lock)).then(act))?
}

/// Whether this is the file `lock` of the folder, and not one that was there before.
fn is_lock_of(file: &OwnedFd, folder: &Path) -> bool {
    match (rustix::fs::fstat(file), rustix::fs::lstat(folder.join("lock"))) {
        (Ok(ours), Ok(named)) => is_same(&ours, &named),
        _ => false,
    }
}

/// Whether the file is locked for who chooses.
fn wait_to_choose(lock: &OwnedFd) -> bool {
    let began = Instant::now();
    while !lock_byte(lock.as_raw_fd(), CHOOSING) {
        if began.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Runs `act` as the only one, with the file `lock`; nothing if that cannot be had, or was removed meanwhile.
fn choosing<R>(folder: &Path, act: impl FnOnce(&OwnedFd) -> R) -> Option<R> {
    // A description of its own: threads of this process may ask at the same time.
    let (lock, true) = open(folder).ok()? else { return None };
    if !wait_to_choose(&lock) || !is_lock_of(&lock, folder) {
        return None;
    }
    let done = act(&lock);
    reached("disk: writer chosen");
    try_unlock_byte(lock.as_raw_fd(), CHOOSING);
    Some(done)
}

/// The file `lock`, and whether it can be written to: where it cannot, what is there can be read.
fn open(folder: &Path) -> rustix::io::Result<(OwnedFd, bool)> {
    let path = folder.join("lock");
    open_private(&path, OFlags::RDWR).map(|file| (file, true)).or_else(|errno| {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|_| errno)?;
        Ok((file, false))
    })
}
