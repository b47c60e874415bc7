//! A segment as this process has it open: mapped, locked shared, and written to with pwrite.

use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::fault::{Fault, active};
use crate::segment::layout::{Extent, Header};
use crate::segment::leftovers::remove_if_last;
use crate::segment::name::{Backing, SHM, path_of};
use crate::segment::request::{Join, Wanted};
use crate::sys::fork::{self, Anchor, Unforked};
use crate::sys::huge_pages::{self, HUGE_BYTES, HugePages};
use crate::sys::mapping::Mapping;
use crate::sys::private_file::{allocate, write_all, write_all_parts};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::io::IoSlice;
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// An open segment. Dropping it detaches; the mapping lives on in the views that hold it.
pub struct Segment {
    anchor: Arc<Anchor>,
    mapping: Arc<Mapping>,
    header: Header,
    backing: Backing,
    name: String,
    /// What was asked for, and whether it can be had.
    pub(super) huge_pages: (HugePages, bool),
    /// Where the states begin.
    pub(super) states_at: u64,
    /// errno of the write that froze it, if it was ours; for the message.
    pub(super) frozen_by: AtomicU32,
}

impl Segment {
    /// Maps and registers; `unforked` was taken before `file` was opened.
    pub(super) fn assemble(
        unforked: Unforked,
        file: OwnedFd,
        header: Header,
        wanted: Wanted<'_>,
        backing: Backing,
        path: Option<PathBuf>,
    ) -> Result<Self> {
        let Extent { states_at, total, .. } = header.geometry.extent()?;
        let stat = rustix::fs::fstat(&file)
            .map_err(|errno| Error::system("cannot look at the segment", errno))?;
        let mapping = Mapping::map(file.as_fd(), total as usize)
            .map_err(|errno| Error::system(&format!("cannot map {}", Bytes(total)), errno))?;
        let asked = wanted.like.map_or(HugePages::No, |request| request.huge_pages);
        let huge = asked != HugePages::No
            && total >= HUGE_BYTES
            && open_empty(backing).is_ok_and(huge_pages::are_given_to)
            && mapping.ask_for_huge_pages().is_ok();
        let removable = path
            .filter(|_| !header.keep)
            .and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let id = (stat.st_dev, stat.st_ino);
        let anchor = Arc::new(Anchor::new(file.into_raw_fd(), id, removable, remove_if_last));
        unforked.register(anchor.clone());
        Ok(Self {
            anchor,
            mapping: Arc::new(mapping),
            states_at,
            frozen_by: AtomicU32::new(0),
            header,
            backing,
            name: wanted.name.to_string(),
            huge_pages: (asked, huge),
        })
    }

    /// The shared bytes. Keep this to keep them mapped.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(crate) fn anchor(&self) -> &Arc<Anchor> {
        &self.anchor
    }

    /// What the segment says of itself.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Where its bytes live; never [`Backing::Auto`].
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// What was asked for.
    pub fn huge_pages(&self) -> HugePages {
        self.huge_pages.0
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, if it has one.
    pub fn path(&self) -> Option<PathBuf> {
        (self.backing == Backing::Shm).then(|| path_of(&self.name))
    }

    /// How another process finds this very segment.
    pub fn location(&self) -> Join {
        Join { instance: self.header.instance, pid: std::process::id(), fd: self.anchor.fd }
    }

    /// Writes `bytes` at `at` with pwrite: faster than through a fresh mapping, and a full mount is
    /// an error instead of a SIGBUS. Who writes has just asked for its lease, which says whether the
    /// descriptor still leads here: the difference between a lost sample and somebody else's file
    /// overwritten.
    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> rustix::io::Result<()> {
        if active(Fault::WriteThroughMapping) {
            self.mapping.write(at as usize, bytes);
            return Ok(());
        }
        self.populate(at, bytes.len() as u64);
        write_all(self.fd(), bytes, at)
    }

    /// Reads what is at `at` with pread, which leaves a hole a hole: to touch one through the mapping
    /// takes memory, and is a SIGBUS where there is none. How many bytes; 0 if the descriptor is not
    /// ours any more.
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> usize {
        if !self.anchor.is_ours() {
            return 0;
        }
        rustix::io::pread(self.fd(), bytes, at).unwrap_or(0)
    }

    /// As `write`, of several parts that follow each other.
    pub(crate) fn write_parts(&self, parts: &[IoSlice<'_>], at: u64) -> rustix::io::Result<()> {
        if active(Fault::WriteThroughMapping) {
            let mut at = at as usize;
            for part in parts {
                self.mapping.write(at, part);
                at += part.len();
            }
            return Ok(());
        }
        self.populate(at, parts.iter().map(|part| part.len() as u64).sum());
        write_all_parts(self.fd(), parts, at)
    }

    /// Huge pages for `len` bytes that are about to be written: pwrite alone takes small ones where
    /// huge ones are given on request only. What cannot be had is no matter: pwrite allocates what
    /// is missing, or says why not.
    fn populate(&self, at: u64, len: u64) {
        if !self.huge_pages.1 || len == 0 {
            return;
        }
        for page in at / HUGE_BYTES..=(at + len - 1) / HUGE_BYTES {
            let _ = self.mapping.populate(at.max(page * HUGE_BYTES) as usize);
        }
    }

    /// Makes sure that touching `len` bytes at `at` cannot fail any more.
    pub(crate) fn reserve(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        if !self.anchor.is_ours() {
            return Err(Errno::BADF);
        }
        allocate(self.fd(), at, len)
    }

    #[allow(unsafe_code)] // borrowing the number that the anchor owns
    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open from `assemble` to `drop`, and `self` outlives the borrow.
        unsafe { BorrowedFd::borrow_raw(self.anchor.fd) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        fork::close(&self.anchor);
    }
}

/// A file such as segments are made of, without a name.
pub(super) fn open_empty(backing: Backing) -> rustix::io::Result<OwnedFd> {
    if backing == Backing::Memfd {
        return rustix::fs::memfd_create("", rustix::fs::MemfdFlags::CLOEXEC);
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, SHM, flags, Mode::RUSR | Mode::WUSR)
}

pub(super) fn lock(file: BorrowedFd<'_>, how: FlockOperation) -> Result<()> {
    rustix::fs::flock(file, how).map_err(|errno| Error::system("cannot lock the cache", errno))
}
