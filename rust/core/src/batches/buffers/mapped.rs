//! One buffer in this process: made or opened, held, and asked whether it is free.
#![allow(unsafe_code)] // system calls without a safe wrapper

use super::header::{DATA_AT, HEADER_BYTES, Header, MAGIC};
use super::{Buffer, Ticket};
use crate::error::{Error, Kind, Result};
use crate::sys::limits;
use crate::sys::mapping::Mapping;
use crate::sys::ofd;
use crate::sys::private_file::{allocate, check_private};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

const NAME: &str = "stocache-batch";
const LINK: &str = "/memfd:stocache-batch (deleted)";

/// Bytes of the file that serve as locks: who holds it, and who made it.
pub(super) const HELD: u64 = 0;
const MADE: u64 = 1;

/// A free buffer that was not used for so many calls is given back.
pub(super) const STALE: u64 = 512;

/// One mapped buffer.
pub(super) struct Mapped {
    pub(super) mapping: Mapping,
    pub(super) fd: RawFd,
    /// Device and inode: a program that closes descriptors it does not know may get our number for
    /// a file of its own.
    pub(super) file: (u64, u64),
    pub(super) instance: u64,
    pub(super) bytes: usize,
    /// Holds in this process.
    pub(super) holds: usize,
    /// Made by this process, which alone gives it out again.
    pub(super) made: bool,
    /// Another process may have come to hold it, by a ticket or a fork. Of another process's
    /// buffer: a ticket may lead to our descriptor.
    pub(super) exposed: bool,
    /// Not to be used again: another process shares our open file description, or we lost the
    /// descriptor, so locks tell nothing. Goes with its last hold here.
    pub(super) unusable: bool,
    /// Was given out a second time: its size is one that comes back.
    pub(super) reused: bool,
    /// The clock when it was last given out.
    pub(super) used: u64,
    /// The descriptor prepared for a child, between prepare and parent/child; else -1.
    pub(super) spare: RawFd,
}

impl Mapped {
    pub(super) fn make(bytes: usize, len: u64) -> Option<Self> {
        limits::check_file_size(len).ok()?; // beyond this limit the kernel sends SIGXFSZ
        let file =
            rustix::fs::memfd_create(NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
        // Others find it through /proc, and may not look there if this process may not be traced.
        // SAFETY: asks, and changes nothing.
        let open_to_others = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) } == 1;
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new());
        if !open_to_others || link.ok()?.as_bytes() != LINK.as_bytes() {
            return None;
        }
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).ok()?;
        allocate(file.as_fd(), 0, len).ok()?;
        rustix::fs::fcntl_add_seals(&file, seals()).ok()?;
        if !ofd::lock_byte(file.as_raw_fd(), MADE) {
            return None;
        }
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).ok()?;
        let instance = u64::from_le_bytes(random);
        let entry = Self::assemble(file, instance, bytes, true).ok()?;
        let header = [MAGIC, instance, bytes as u64];
        for (word, value) in entry.mapping.words(0, HEADER_BYTES / 8).iter().zip(header) {
            word.store(value.to_le(), Ordering::Relaxed); // ordered by the first ticket
        }
        Some(entry)
    }

    /// Opens the buffer of a ticket and believes nothing that is said of it.
    pub(super) fn open(ticket: &Ticket) -> Result<Self> {
        let &Ticket { pid, fd, instance, bytes, .. } = ticket;
        let refused = |why: String| {
            Error::new(
                Kind::Refused,
                format!(
                    "descriptor {fd} of process {pid} is not the batch of this message: {why}; \
                     pass messages on as they were sent"
                ),
            )
        };
        let failed = |doing: &str, errno| match errno {
            Errno::NOENT | Errno::SRCH => Error::new(
                Kind::State,
                format!(
                    "the batch that process {pid} sent is gone; \
                     keep the sender alive until its messages are received"
                ),
            ),
            Errno::MFILE | Errno::NFILE | Errno::NOMEM => {
                Error::system("cannot open a batch of another process", errno)
            }
            _ => refused(format!("cannot {doing} it ({errno})")),
        };
        let len = file_len(bytes)
            .filter(|_| bytes > 0 && fd >= 0)
            .ok_or_else(|| refused(format!("no batch has {bytes} bytes")))?;
        let link = format!("/proc/{pid}/fd/{fd}");
        // Opening some things has effects, so this is asked first.
        let target = rustix::fs::readlink(&link, Vec::new()).map_err(|e| failed("look at", e))?;
        if target.as_bytes() != LINK.as_bytes() {
            return Err(refused(format!("it leads to {target:?}")));
        }
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::openat(CWD, &link, flags, Mode::empty())
            .map_err(|errno| failed("open", errno))?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| failed("look at", errno))?;
        check_private(&stat).map_err(refused)?;
        let sealed = rustix::fs::fcntl_get_seals(&file).map_err(|e| failed("look at", e))?;
        // Without these it could be cut off under us, which is a SIGBUS.
        if !sealed.contains(seals()) {
            return Err(refused("it is not sealed".into()));
        }
        if stat.st_size as u64 != len {
            return Err(refused(format!("it has {} bytes, not {len}", stat.st_size)));
        }
        let mut header = [0; HEADER_BYTES];
        let read = rustix::io::pread(&file, &mut header[..], 0).map_err(|e| failed("read", e))?;
        let said = [MAGIC, instance, bytes].map(u64::to_le_bytes);
        if read != HEADER_BYTES || header[..] != *said.as_flattened() {
            return Err(refused("its header is another one's".into()));
        }
        Self::assemble(file, instance, bytes as usize, false).map_err(|errno| failed("map", errno))
    }

    fn assemble(
        file: OwnedFd,
        instance: u64,
        bytes: usize,
        made: bool,
    ) -> rustix::io::Result<Self> {
        let stat = rustix::fs::fstat(&file)?;
        // Not by a description of its own: a hold lasts as long as the mapping, whoever closes what.
        let mapping = Mapping::map_through(file.as_fd(), stat.st_size as usize)?;
        Ok(Self {
            mapping,
            fd: file.into_raw_fd(),
            file: (stat.st_dev, stat.st_ino),
            instance,
            bytes,
            holds: 0,
            made,
            exposed: false,
            unusable: false,
            reused: false,
            used: 0,
            spare: -1,
        })
    }

    /// A hold that is counted already.
    pub(super) fn as_held(&self) -> Buffer {
        Buffer { data: self.data(), bytes: self.bytes, instance: self.instance }
    }

    pub(super) fn data(&self) -> NonNull<u8> {
        self.mapping.at(DATA_AT, self.bytes)
    }

    pub(super) fn header(&self) -> Header<'_> {
        Header(&self.mapping)
    }

    /// Turns a ticket into a hold of this process.
    pub(super) fn turn_into_hold(&mut self, ticket: &Ticket) -> Result<Buffer> {
        let lock = !self.made && self.holds == 0;
        if lock && !lock_shared(self.fd, HELD) {
            return Err(Error::new(Kind::System, "cannot lock a batch of another process"));
        }
        if self.bytes as u64 == ticket.bytes && self.header().take_ticket(ticket.serial) {
            self.holds += 1;
            return Ok(self.as_held());
        }
        if lock {
            unlock(self.fd, HELD);
        }
        Err(Error::new(
            Kind::State,
            format!(
                "this batch of process {} was received before or never sent; \
                 a message can be received once, send it again",
                ticket.pid
            ),
        ))
    }

    /// Whether nobody holds this buffer of ours, here or elsewhere, and nobody can come to.
    ///
    /// Others come to hold it by a ticket, and only who holds it can send one. If `sends` does not
    /// move, no ticket was entered between the two looks by somebody who could let go meanwhile; so
    /// when no ticket was seen, none was there when the lock was asked for, and whoever had received
    /// one earlier had the lock by then.
    pub(super) fn is_free(&mut self) -> bool {
        if self.holds > 0 || self.unusable {
            return false;
        }
        if !self.exposed {
            return true;
        }
        // SYNC POINT sends, SYNC POINT received: see `enter_ticket` and `take_ticket`.
        let header = self.header();
        let before = header.sends().load(Ordering::SeqCst);
        if header.has_tickets() || ofd::is_locked(&self.fd, HELD) {
            return false;
        }
        fence(Ordering::SeqCst);
        // SYNC POINT let go: Acquire here, Release in `Pool::release`. A process that died instead
        // had stopped reading before the kernel freed its lock.
        header.drops().load(Ordering::Acquire);
        if header.sends().load(Ordering::SeqCst) != before {
            return false;
        }
        if !self.is_ours() {
            self.unusable = true; // another file was asked, and nothing can be any more
            return false;
        }
        self.exposed = false;
        true
    }

    pub(super) fn is_stale(&self, now: u64) -> bool {
        self.holds == 0 && now - self.used > STALE
    }

    /// Nobody here holds it, and no ticket leads to our descriptor.
    pub(super) fn is_idle(&self) -> bool {
        self.holds == 0 && !(self.exposed && self.header().has_tickets())
    }

    /// The maker has ended or given this buffer up.
    pub(super) fn is_gone(&self) -> bool {
        !self.is_ours() || !ofd::is_locked(&self.fd, MADE)
    }

    pub(super) fn is_useless(&self) -> bool {
        self.is_idle() && (self.unusable || !self.made && self.is_gone())
    }

    /// Whether the descriptor still leads to the buffer.
    pub(super) fn is_ours(&self) -> bool {
        // SAFETY: all-zero is a valid stat to be filled in; fstat is async-signal-safe.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            libc::fstat(self.fd, &mut stat) == 0 && (stat.st_dev, stat.st_ino) == self.file
        }
    }
}

/// Closes and unmaps, which frees the locks. Nothing on the heap: a forked child does this too.
impl Drop for Mapped {
    fn drop(&mut self) {
        debug_assert!(self.spare == -1);
        if self.is_ours() {
            // SAFETY: opened for this entry, used by nobody after this.
            unsafe { libc::close(self.fd) };
        }
    }
}

fn seals() -> SealFlags {
    SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL
}

/// The length of the file of a batch; `None` if no address space could hold it.
pub(super) fn file_len(bytes: u64) -> Option<u64> {
    let len = bytes.checked_next_multiple_of(DATA_AT as u64)?.checked_add(DATA_AT as u64)?;
    isize::try_from(len).is_ok().then_some(len)
}

/// Locks a byte as all holders do, together; false if that cannot be had.
pub(super) fn lock_shared(fd: RawFd, at: u64) -> bool {
    ofd::share_byte(&fd, at).is_ok()
}

/// False if the descriptor is not there any more.
pub(super) fn unlock(fd: RawFd, at: u64) -> bool {
    ofd::try_unlock_byte(fd, at)
}
