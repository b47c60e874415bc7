//! A segment that has no name, found among the descriptors of all processes.

use crate::error::Result;
use crate::fault::{Fault, active};
use crate::segment::handle::{Segment, lock};
use crate::segment::layout::Header;
use crate::segment::name::{Backing, backing_of, path_of};
use crate::segment::request::Wanted;
use crate::sys::fork;
use crate::sys::private_file::{check_private, is_named, read_header};
use crate::sys::proc::numbers;
use rustix::fd::AsFd;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use std::path::{Path, PathBuf};
use std::time::Duration;

impl Segment {
    /// The segment that process `pid` has open as `fd`, if it is the one we look for.
    pub(super) fn join_at(
        wanted: Wanted<'_>,
        pid: u32,
        fd: i32,
        instance: Option<u128>,
    ) -> Result<Option<Self>> {
        let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
        let Ok(target) = std::fs::read_link(&link) else { return Ok(None) };
        let Some(backing) = backing_of(&target, wanted.name) else { return Ok(None) };
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let unforked = fork::hold();
        let Ok(file) = rustix::fs::openat(CWD, &link, flags, Mode::empty()) else {
            return Ok(None);
        };
        // Root can open what other users offer; a segment is one's own or nobody's.
        if !rustix::fs::fstat(&file).is_ok_and(|stat| check_private(&stat).is_ok()) {
            return Ok(None);
        }
        let Ok((bytes, len)) = read_header(file.as_fd()) else { return Ok(None) };
        let Ok(header) = Header::decode(&bytes, len) else { return Ok(None) };
        let same = instance.is_none_or(|instance| instance == header.instance);
        if !same || lock(file.as_fd(), FlockOperation::NonBlockingLockShared).is_err() {
            return Ok(None);
        }
        wanted.check(&header)?;
        let path =
            (backing == Backing::Shm && is_named(file.as_fd())).then(|| path_of(wanted.name));
        Self::assemble(unforked, file, header, wanted, backing, path).map(Some)
    }

    /// Walks the descriptors of all processes of this user. With an instance any backing will do,
    /// without one only a memfd: a file in /dev/shm that lost its name is joined by its own only.
    pub(super) fn find(wanted: Wanted<'_>, instance: Option<u128>) -> Result<Option<Self>> {
        for pid in numbers(Path::new("/proc")) {
            for fd in numbers(&PathBuf::from(format!("/proc/{pid}/fd"))) {
                let link = format!("/proc/{pid}/fd/{fd}");
                let backing =
                    std::fs::read_link(link).ok().and_then(|to| backing_of(&to, wanted.name));
                let candidate = match backing {
                    Some(Backing::Memfd) => true,
                    Some(_) => instance.is_some(),
                    None => false,
                };
                if candidate && let Some(found) = Self::join_at(wanted, pid, fd as i32, instance)? {
                    return Ok(Some(found));
                }
            }
        }
        if active(Fault::SlowWalk) || active(Fault::SlowWalkUnlocked) {
            std::thread::sleep(Duration::from_millis(700)); // what was seen may be old by now
        }
        Ok(None)
    }
}
