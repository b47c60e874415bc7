//! Reads and writes past the page cache, so that what the rest of the job has there stays; where the file
//! system allows it. What lies in the page cache anyway is read from there, which is faster.
#![allow(unsafe_code)] // cachestat(2) has no safe wrapper

use crate::sys::fork::{self, Unshared};
use crate::sys::pages::PAGE;
use crate::sys::private_file::write_all;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file that is read and written in whole pages, by this process: a forked child does not have it. One
/// descriptor, and a second one where both ways of reading are used.
pub(crate) struct DirectFile {
    access: OFlags,
    /// None where the file system has no such reads.
    direct: Option<Unshared>,
    plain: OnceLock<Unshared>,
}

impl DirectFile {
    /// Opens a file that is there, for reading or also for writing.
    pub(crate) fn open(path: &Path, writable: bool) -> rustix::io::Result<Self> {
        let access = if writable { OFlags::RDWR } else { OFlags::RDONLY };
        let file = match open(path, access | OFlags::NOFOLLOW | OFlags::DIRECT) {
            Err(Errno::INVAL | Errno::OPNOTSUPP) => None,
            opened => Some(opened?),
        };
        let made = Self { access, direct: file, plain: OnceLock::new() };
        if made.direct.is_none() {
            let _first = made.plain.set(open(path, access | OFlags::NOFOLLOW)?);
        }
        Ok(made)
    }

    /// Reads whole pages from `at` on, which is a multiple of a page, as far as the file goes: how many
    /// bytes.
    pub(crate) fn read(&self, to: &mut [u8], at: u64) -> rustix::io::Result<usize> {
        debug_assert!(to.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64));
        if let Some(direct) = &self.direct
            && !is_cached(direct.as_fd(), at, to.len() as u64)
        {
            match read_all(direct.as_fd(), to, at) {
                // Some say so only when it is tried.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
                done => return done,
            }
        }
        read_all(self.plain()?, to, at)
    }

    /// Writes whole pages from `at` on.
    pub(crate) fn write(&self, pages: &[u8], at: u64) -> rustix::io::Result<()> {
        debug_assert!(pages.len().is_multiple_of(PAGE) && at.is_multiple_of(PAGE as u64));
        if let Some(direct) = &self.direct {
            match write_all(direct.as_fd(), pages, at) {
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
                done => return done,
            }
        }
        write_all(self.plain()?, pages, at)
    }

    fn plain(&self) -> rustix::io::Result<BorrowedFd<'_>> {
        if let Some(plain) = self.plain.get() {
            return Ok(plain.as_fd());
        }
        let direct = self.direct.as_ref().ok_or(Errno::BADF)?;
        let again =
            open(Path::new(&format!("/proc/self/fd/{}", direct.as_fd().as_raw_fd())), self.access)?;
        Ok(self.plain.get_or_init(|| again).as_fd())
    }
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

/// Whether these bytes are in the page cache. False where the kernel (before 6.5) does not tell.
fn is_cached(file: BorrowedFd<'_>, at: u64, len: u64) -> bool {
    const CACHESTAT: libc::c_long = 451;
    static ABSENT: AtomicBool = AtomicBool::new(false);
    if ABSENT.load(Ordering::Relaxed) {
        return false;
    }
    let (range, mut found) = ([at, len], [0u64; 5]);
    // SAFETY: the kernel reads a range of two words and writes five, all of which outlive the call.
    let done = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0)
    };
    if done != 0 {
        ABSENT.store(true, Ordering::Relaxed);
        return false;
    }
    found[0] * PAGE as u64 >= len // pages in the cache
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
