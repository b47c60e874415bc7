//! One look at a name in /dev/shm: join what is there, use again what was kept, remove what was left.

use crate::error::{Error, Kind, Result};
use crate::segment::handle::{Segment, lock};
use crate::segment::layout::Header;
use crate::segment::name::{Backing, path_of};
use crate::segment::request::{Opened, Wanted};
use crate::sys::fork;
use crate::sys::private_file::{is_named, open_checked, read_header, unlink_same};
use rustix::fd::AsFd;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use std::time::Duration;

/// How long an attach may meet others who are just creating or removing the same name.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// How long to rest between two looks.
pub(super) const RETRY: Duration = Duration::from_micros(200);

pub(super) enum Attached {
    Open(Segment, Opened),
    Absent,
    /// Somebody is creating or removing it: look again.
    Changing,
}

impl Segment {
    /// One look at the name in /dev/shm.
    pub(super) fn attach(wanted: Wanted<'_>) -> Result<Attached> {
        let path = path_of(wanted.name);
        let refused = |why: &dyn std::fmt::Display| {
            Error::new(
                Kind::Refused,
                format!(
                    "{} is not a cache we can use: {why}; remove it or use another name",
                    path.display()
                ),
            )
        };
        let unforked = fork::hold();
        let Some(file) = open_checked(&path).map_err(|why| refused(&why))? else {
            return Ok(Attached::Absent);
        };
        let (bytes, len) = read_header(file.as_fd()).map_err(|why| refused(&why))?;
        let header = Header::decode(&bytes, len).map_err(|why| refused(&why))?;
        let how = match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if header.keep => Opened::Resumed,
            Ok(()) => {
                unlink_same(file.as_fd(), &path);
                return Ok(Attached::Absent);
            }
            Err(Errno::WOULDBLOCK) => Opened::Joined,
            Err(errno) => return Err(Error::system("cannot lock the cache", errno)),
        };
        if lock(file.as_fd(), FlockOperation::NonBlockingLockShared).is_err()
            || !is_named(file.as_fd())
        {
            return Ok(Attached::Changing);
        }
        wanted.check(&header)?;
        let segment = Self::assemble(unforked, file, header, wanted, Backing::Shm, Some(path))?;
        Ok(Attached::Open(segment, how))
    }
}

pub(super) fn contended(name: &str) -> Error {
    Error::new(
        Kind::State,
        format!(
            "others have been creating and removing the cache {name:?} for at least {} s; \
             use another name",
            PATIENCE.as_secs()
        ),
    )
}
