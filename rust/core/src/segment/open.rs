//! One piece of shared memory per cache and node: create, attach, detach, remove what was left.
//!
//! A segment is a file in /dev/shm, or a memfd where /dev/shm is too small. Whoever uses it holds
//! a shared flock on it, so "does anybody live?" is one question to the kernel: an exclusive lock
//! can be had only if nobody does.
//!
//! ```text
//!   create   O_TMPFILE, size, header, lock shared, then linkat: a kill before leaves nothing,
//!            and a name never shows an unfinished segment
//!   attach   open, check what it is; lock exclusive succeeds: a leftover, removed and made anew
//!            (or, if kept, used again); else lock shared; no name any more: start over
//!   detach   lock exclusive succeeds: we are the last, remove the name unless it is kept;
//!            else look again at exit: the others may have ended without a word by then
//!   left     the same test on all files of this user: never by age, never by pid
//! ```
//!
//! A memfd has no name to leave behind. Others find it by walking /proc/<pid>/fd of the same
//! user.
//!
//! An abstract socket address serves as the lock under which a segment is looked for once more and
//! made, so that ranks that start together make one. Without it two memfds could be made; and who
//! is about to make a file in /dev/shm would find the room taken that others, who are just making the
//! same one, have set aside for its states.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::attach::{Attached, PATIENCE, RETRY, contended};
use crate::segment::create::{CREATION_PATIENCE, choose, creation_lock};
use crate::segment::handle::Segment;
use crate::segment::leftovers::remove_leftovers;
use crate::segment::name::{Backing, check_name};
use crate::segment::request::{Opened, Request, Wanted};
use crate::sys::limits;
use std::time::{Duration, Instant};

/// How long to wait for who is making a file of the same name, before making it too: one of both wins.
const ALONE_PATIENCE: Duration = Duration::from_secs(2);

impl Segment {
    /// Joins the segment of that name, or makes it.
    pub fn open(request: &Request) -> Result<(Self, Opened)> {
        check_name(&request.name)?;
        if request.keep && request.backing == Backing::Memfd {
            return Err(Error::new(
                Kind::Argument,
                "keep=True needs backing=\"shm\": a memfd ends with its last process",
            ));
        }
        limits::check_file_size(request.geometry.extent()?.total)?;
        let elsewhere = request.join.filter(|_| !active(Fault::JoinByNameOnly));
        if let Some(join) = elsewhere
            && let Some(found) =
                Self::join_at(request.wanted(), join.pid, join.fd, Some(join.instance))?
        {
            return Ok((found, Opened::Joined));
        }
        remove_leftovers();
        let started = Instant::now();
        let mut changing = None;
        let mut alone = None;
        while started.elapsed() < CREATION_PATIENCE {
            match Self::attach(request.wanted())? {
                Attached::Open(segment, how) => return Ok((segment, how)),
                Attached::Absent => changing = None,
                Attached::Changing => {
                    if changing.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                        break;
                    }
                    std::thread::sleep(RETRY);
                    continue;
                }
            }
            // The name may be gone while the segment lives (somebody removed it).
            if let Some(join) = elsewhere
                && let Some(found) = Self::find(request.wanted(), Some(join.instance))?
            {
                return Ok((found, Opened::Joined));
            }
            if request.backing != Backing::Shm
                && !request.private
                && let Some(found) = Self::find(request.wanted(), None)?
            {
                return Ok((found, Opened::Joined));
            }
            let unlocked = active(Fault::SlowWalkUnlocked) || active(Fault::CreateUnlocked);
            if !request.private && alone.is_none() && !unlocked {
                let asked = creation_lock(&request.name);
                // A file has one maker in any case. So who has the lock and is stopped, or a kernel
                // that gives none, is a reason to wait only for who makes a memfd.
                let enough = asked.is_err() || started.elapsed() > ALONE_PATIENCE;
                if !enough || !matches!(choose(request), Ok(Backing::Shm)) {
                    alone = asked?;
                    if alone.is_none() {
                        std::thread::sleep(RETRY);
                    }
                    continue; // who had it before us may have made one
                }
            }
            let made = match choose(request)? {
                Backing::Memfd => Some(Self::create_memfd(request)?),
                _ => Self::create(request)?,
            };
            if let Some(segment) = made {
                return Ok((segment, Opened::Created));
            }
        }
        if request.private || alone.is_some() || changing.is_some() {
            return Err(contended(&request.name));
        }
        Err(Error::new(
            Kind::State,
            format!(
                "another process has been making the cache {:?} for {} s, and is perhaps stopped; end \
                 it, or use another name",
                request.name,
                CREATION_PATIENCE.as_secs()
            ),
        ))
    }

    /// Joins the segment of that name, which must exist and, if given, be what `like` asks for.
    pub fn join(name: &str, like: Option<&Request>) -> Result<(Self, Opened)> {
        check_name(name)?;
        let wanted = Wanted { name, like };
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            match Self::attach(wanted)? {
                Attached::Open(segment, how) => return Ok((segment, how)),
                Attached::Absent => {
                    return match Self::find(wanted, None)? {
                        Some(segment) => Ok((segment, Opened::Joined)),
                        None => Err(Error::new(
                            Kind::State,
                            format!(
                                "no cache named {name:?} is open on this node; start the program \
                                 that makes it first, or make an empty one here \
                                 (SharedCache(..., name=...); if_gone=\"empty\" in a saved module)"
                            ),
                        )),
                    };
                }
                Attached::Changing => std::thread::sleep(RETRY),
            }
        }
        Err(contended(name))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::segment::geometry::Geometry;
    use crate::segment::layout::SlotsGeometry;
    use crate::segment::random_name;

    /// As if its maker were stopped.
    #[test]
    fn who_is_stopped_while_making_a_file_stops_nobody() {
        let name = random_name().unwrap();
        let _stopped = creation_lock(&name).unwrap().unwrap();
        let plan = SlotsGeometry::plan(1 << 20, 8, &[16], 0, 1, false).unwrap();
        let request =
            Request { backing: Backing::Shm, ..Request::new(&name, Geometry::Slots(plan)) };
        let (segment, how) = Segment::open(&request).unwrap();
        assert_eq!((segment.backing(), how), (Backing::Shm, Opened::Created));
    }

    /// Two memfds of one name would be two caches: there is one, or an error.
    #[test]
    fn who_is_stopped_while_making_a_memfd_is_waited_for_and_then_named() {
        let name = random_name().unwrap();
        let stopped = creation_lock(&name).unwrap().unwrap();
        let plan = SlotsGeometry::plan(1 << 20, 8, &[16], 0, 1, false).unwrap();
        let request =
            Request { backing: Backing::Memfd, ..Request::new(&name, Geometry::Slots(plan)) };
        let error = Segment::open(&request).err().expect("somebody makes it").to_string();
        assert!(error.contains("another process has been making") && error.contains(&name));
        assert!(Segment::find(request.wanted(), None).unwrap().is_none());
        drop(stopped);
        assert_eq!(Segment::open(&request).unwrap().1, Opened::Created);
    }
}
