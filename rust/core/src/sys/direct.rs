//! Reads and writes past the page cache, so that what the rest of the job has there stays; where the file
//! system allows it. What lies in the page cache anyway is read from there, which is faster.
#![allow(unsafe_code)] // cachestat(2) has no safe wrapper

use crate::sys::fork::{self, Unshared};
use crate::sys::pages::PAGE;
use crate::sys::private_file::write_all;
use rustix::fs::{Advice, CWD, FallocateFlags, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSliceMut;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A file that is read and written in whole pages, by this process: a forked child does not have it. One
/// descriptor, and a second one where both ways are used, until `close_one`.
pub(crate) struct DirectFile {
    access: OFlags,
    ways: Mutex<Ways>,
    /// The file system has no direct reads, or not of this file.
    refused: AtomicBool,
}

/// Descriptors; one of them is open. Whoever uses one keeps it open meanwhile.
#[derive(Default)]
struct Ways {
    direct: Option<Arc<Unshared>>,
    plain: Option<Arc<Unshared>>,
    /// Which was used last.
    was_plain: bool,
}

impl DirectFile {
    /// Opens a file that is there, for reading or also for writing.
    pub(crate) fn open(path: &Path, writable: bool) -> rustix::io::Result<Self> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let mut ways = Ways::default();
        match open(path, access | OFlags::NOFOLLOW | OFlags::DIRECT) {
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                ways.plain = Some(Arc::new(open_plain(path, access | OFlags::NOFOLLOW)?));
            }
            opened => ways.direct = Some(Arc::new(opened?)),
        }
        let refused = AtomicBool::new(ways.direct.is_none());
        Ok(Self { access, ways: Mutex::new(ways), refused })
    }

    /// Reads whole pages from `at` on, which is a multiple of a page, as far as the file goes: how many
    /// bytes.
    pub(crate) fn read(&self, to: &mut [u8], at: u64) -> rustix::io::Result<usize> {
        debug_assert!(to.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64));
        if self.is_direct() {
            // What is read now is mostly where the last was: then one call says so and reads it.
            if self.plain_if_last().is_some_and(|plain| read_from_cache(plain.as_fd(), to, at)) {
                return Ok(to.len());
            }
            let range = at..at + to.len() as u64;
            if is_cached(self.any()?.as_fd(), range) != Some(true) {
                match read_all(self.get(false)?.as_fd(), to, at) {
                    // Some say so only when it is tried.
                    Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                        self.refused.store(true, Ordering::Relaxed);
                    }
                    done => return done,
                }
            }
        }
        read_all(self.get(true)?.as_fd(), to, at)
    }

    /// Has the kernel begin to read a stretch of the file into the page cache, unless these bytes of it are
    /// there, or on their way; who reads them then waits for them there. Nothing where the kernel does not say
    /// what is there.
    pub(crate) fn ask_for(&self, bytes: Range<u64>, stretch: Range<u64>) -> rustix::io::Result<()> {
        let file = self.any()?;
        if is_cached(file.as_fd(), bytes) != Some(false) {
            return Ok(());
        }
        // The kernel may cut what it is asked for, to what its disk takes in one read: half a MiB or more.
        let (start, len) =
            (stretch.start, NonZeroU64::new(stretch.end.saturating_sub(stretch.start)));
        len.map_or(Ok(()), |len| {
            rustix::fs::fadvise(file.as_fd(), start, Some(len), Advice::WillNeed)
        })
    }

    /// Writes whole pages from `at` on.
    pub(crate) fn write(&self, pages: &[u8], at: u64) -> rustix::io::Result<()> {
        debug_assert!(pages.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64));
        if self.is_direct() {
            match write_all(self.get(false)?.as_fd(), pages, at) {
                Err(Errno::INVAL | Errno::OPNOTSUPP) => self.refused.store(true, Ordering::Relaxed),
                done => return done,
            }
        }
        write_all(self.get(true)?.as_fd(), pages, at)
    }

    /// Gives the room of these bytes back. Where that cannot be, it was never taken.
    pub(crate) fn give_back(&self, at: u64, len: u64) -> rustix::io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self.any()?.as_fd(), how, at, len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            done => done,
        }
    }

    /// Whether both ways are open.
    pub(crate) fn has_both(&self) -> bool {
        let ways = self.ways();
        ways.direct.is_some() && ways.plain.is_some()
    }

    /// Closes the way that was not used last, if both are open.
    pub(crate) fn close_one(&self) {
        let mut ways = self.ways();
        if ways.direct.is_some() && ways.plain.is_some() {
            let unused = if ways.was_plain { &mut ways.direct } else { &mut ways.plain };
            *unused = None;
        }
    }

    fn ways(&self) -> MutexGuard<'_, Ways> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_direct(&self) -> bool {
        !self.refused.load(Ordering::Relaxed)
    }

    fn any(&self) -> rustix::io::Result<Arc<Unshared>> {
        let ways = self.ways();
        ways.direct.as_ref().or(ways.plain.as_ref()).cloned().ok_or(Errno::BADF)
    }

    /// The descriptor of reads from the page cache, if that was the last.
    fn plain_if_last(&self) -> Option<Arc<Unshared>> {
        let ways = self.ways();
        ways.plain.as_ref().filter(|_| ways.was_plain).cloned()
    }

    /// The descriptor of that way, opened if it is not.
    fn get(&self, plain: bool) -> rustix::io::Result<Arc<Unshared>> {
        let mut ways = self.ways();
        ways.was_plain = plain;
        let Ways { direct, plain: buffered, .. } = &mut *ways;
        let (wanted, other) = if plain { (buffered, direct) } else { (direct, buffered) };
        if let Some(open) = wanted {
            return Ok(Arc::clone(open));
        }
        let fd = other.as_ref().ok_or(Errno::BADF)?.as_fd().as_raw_fd();
        let path = format!("/proc/self/fd/{fd}");
        let made = if plain {
            open_plain(Path::new(&path), self.access)?
        } else {
            open(Path::new(&path), self.access | OFlags::DIRECT)?
        };
        Ok(Arc::clone(wanted.insert(Arc::new(made))))
    }
}

/// Without the kernel's reading ahead: nobody asks for what comes after a record.
fn open_plain(path: &Path, flags: OFlags) -> rustix::io::Result<Unshared> {
    let file = open(path, flags)?;
    let _only_a_hint = rustix::fs::fadvise(file.as_fd(), 0, None, Advice::Random);
    Ok(file)
}

fn open(path: &Path, flags: OFlags) -> rustix::io::Result<Unshared> {
    let unforked = fork::hold();
    Ok(unforked.keep(rustix::fs::openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty())?))
}

fn read_all(file: BorrowedFd<'_>, mut to: &mut [u8], mut at: u64) -> rustix::io::Result<usize> {
    let mut all = 0;
    while !to.is_empty() {
        match rustix::io::pread(file, &mut *to, at) {
            Ok(0) => break,
            Ok(n) => {
                (all, at) = (all + n, at + n as u64);
                to = &mut to[n..];
                // The end of a file need not be that of a page, and a direct read ends there.
                if !n.is_multiple_of(PAGE) {
                    break;
                }
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(all)
}

/// Reads all of these bytes, if they are in the page cache; whether it did.
fn read_from_cache(file: BorrowedFd<'_>, to: &mut [u8], at: u64) -> bool {
    let len = to.len();
    let got = rustix::io::preadv2(file, &mut [IoSliceMut::new(to)], at, ReadWriteFlags::NOWAIT);
    got == Ok(len) // what failed, or came in part, is read in another way
}

/// Whether all pages of these bytes are in the page cache, as `cached_pages`.
fn is_cached(file: BorrowedFd<'_>, bytes: Range<u64>) -> Option<bool> {
    let pages = bytes.end.div_ceil(PAGE as u64) - bytes.start / PAGE as u64;
    cached_pages(file, bytes).map(|there| there >= pages)
}

/// How many pages of these bytes are in the page cache, or on their way there. Nothing where the kernel (before
/// 6.5) does not tell.
fn cached_pages(file: BorrowedFd<'_>, bytes: Range<u64>) -> Option<u64> {
    const CACHESTAT: libc::c_long = 451;
    static ABSENT: AtomicBool = AtomicBool::new(false);
    if ABSENT.load(Ordering::Relaxed) {
        return None;
    }
    let (range, mut found) = ([bytes.start, bytes.end - bytes.start], [0u64; 5]);
    // SAFETY: the kernel reads a range of two words and writes five, all of which outlive the call.
    let done = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0)
    };
    if done != 0 {
        ABSENT.store(true, Ordering::Relaxed);
        return None;
    }
    Some(found[0])
}

/// How many pages of a file are in the page cache.
#[cfg(test)]
pub(crate) fn pages_in_cache(file: &std::fs::File) -> Option<u64> {
    use std::os::fd::AsFd;
    cached_pages(file.as_fd(), 0..file.metadata().ok()?.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::pages::Pages;

    #[test]
    fn what_was_written_is_read_wherever_the_file_lies() {
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let path = folder.join(format!("stocache-direct-{}", std::process::id()));
            std::fs::write(&path, []).unwrap();
            let file = DirectFile::open(&path, true).unwrap();
            let mut pages = Pages::new(3 * PAGE).unwrap();
            pages.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
            file.write(&pages, PAGE as u64).unwrap();
            let mut again = Pages::new(3 * PAGE).unwrap();
            assert_eq!(file.read(&mut again, PAGE as u64), Ok(3 * PAGE));
            assert!(*again == *pages);
            // Beyond the end there is less, and no error.
            assert_eq!(file.read(&mut again, 3 * PAGE as u64), Ok(PAGE));
            assert_eq!(file.read(&mut again, 9 * PAGE as u64), Ok(0));
            std::fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(2 * PAGE as u64 + 5)
                .unwrap();
            let (again, before) = (&mut again[..], &pages[..]);
            assert_eq!(file.read(again, PAGE as u64), Ok(PAGE + 5));
            assert_eq!(again[..PAGE + 5], before[..PAGE + 5]);
            std::fs::remove_file(&path).unwrap();
        }
    }
}
