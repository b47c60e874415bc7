//! A new segment: where it goes, how it is laid out, and that nobody sees it before it is done.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::claim;
use crate::segment::geometry::{Budget, Extent, Geometry};
use crate::segment::handle::{Segment, lock, open_empty};
use crate::segment::layout::Header;
use crate::segment::name::{Backing, SHM, file_name, file_prefix, path_of};
use crate::segment::request::Request;
use crate::sys::fork::{self, Unshared};
use crate::sys::huge_pages::{HUGE_BYTES, HugePages};
use crate::sys::limits;
use crate::sys::private_file::{allocate, make_private, write_all};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{AtFlags, CWD, FlockOperation};
use rustix::io::Errno;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long to wait for who is making a segment: it may walk /proc, which takes long on a large node.
pub(super) const CREATION_PATIENCE: Duration =
    Duration::from_secs(if cfg!(test) { 5 } else { 120 });

impl Segment {
    pub(super) fn create(request: &Request) -> Result<Option<Self>> {
        let unforked = fork::hold();
        let file = open_empty(Backing::Shm)
            .map_err(|errno| Error::system("cannot create a file in /dev/shm", errno))?;
        let header = Self::lay_out(file.as_fd(), request)?;
        lock(file.as_fd(), FlockOperation::NonBlockingLockShared)?;
        let path = path_of(&request.name);
        let magic = format!("/proc/self/fd/{}", file.as_raw_fd());
        // The name is removed on detach unless it is kept, so the anchor learns it before it exists.
        let path_too = Some(path.clone());
        let segment =
            Self::assemble(unforked, file, header, request.wanted(), Backing::Shm, path_too)?;
        segment.check_huge_pages()?;
        segment.mark_beyond();
        match rustix::fs::linkat(CWD, magic, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => Ok(Some(segment)),
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(Error::system(&format!("cannot name {}", path.display()), errno)),
        }
    }

    /// To be called with the creation locked, after a look that found none.
    pub(super) fn create_memfd(request: &Request) -> Result<Self> {
        let unforked = fork::hold();
        let file =
            rustix::fs::memfd_create(file_name(&request.name), rustix::fs::MemfdFlags::CLOEXEC)
                .map_err(|errno| Error::system("cannot create a memfd", errno))?;
        let header = Self::lay_out(file.as_fd(), request)?;
        lock(file.as_fd(), FlockOperation::NonBlockingLockShared)?;
        let segment =
            Self::assemble(unforked, file, header, request.wanted(), Backing::Memfd, None)?;
        segment.check_huge_pages()?;
        segment.mark_beyond();
        Ok(segment)
    }

    /// Gives a new file its mode, its metadata and its length. The data stay a hole.
    fn lay_out(file: BorrowedFd<'_>, request: &Request) -> Result<Header> {
        let Extent { data_at, total, .. } = request.geometry.extent()?;
        let mut instance = [0; 16];
        rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::system("no random numbers", errno))?;
        let header = Header {
            instance: u128::from_le_bytes(instance),
            keep: request.keep,
            fingerprint: request.fingerprint,
            geometry: request.geometry.clone(),
        };
        let sized = || -> rustix::io::Result<()> {
            make_private(file)?;
            allocate(file, 0, data_at)?;
            rustix::fs::ftruncate(file, total)
        };
        sized().map_err(|errno| {
            let doing = format!(
                "cannot reserve {} for the states of {} samples",
                Bytes(data_at),
                request.geometry.dataset_len()
            );
            Error::system(&doing, errno)
        })?;
        write_all(file, &header.encode()?, 0)
            .map_err(|errno| Error::system("cannot write the header", errno))?;
        Ok(header)
    }

    /// Who insists on huge pages learns that there are none before anybody can see the segment.
    /// Later it is no error: whoever joins a cache can use it with small pages, too.
    fn check_huge_pages(&self) -> Result<()> {
        if self.huge_pages != (HugePages::Yes, false) || self.mapping().len() < HUGE_BYTES as usize
        {
            return Ok(());
        }
        let remedy = match self.backing() {
            Backing::Memfd => {
                "a memfd gets none here; write advise to \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled (Linux 5.14 or later)"
            }
            _ => {
                "/dev/shm gives none; mount -o remount,huge=advise /dev/shm (Linux 5.14 or later), \
                 use backing=\"memfd\""
            }
        };
        Err(Error::new(
            Kind::State,
            format!("huge_pages=True: {remedy} or use huge_pages=\"auto\""),
        ))
    }

    /// The states beyond the capacity say so, before anybody can see them.
    fn mark_beyond(&self) {
        let Geometry::Slots(g) = &self.header().geometry else { return };
        let states = self.mapping().states(self.states_at as usize, g.dataset_len as usize);
        for state in &states[g.capacity as usize..] {
            state.store(claim::BEYOND, Ordering::Relaxed);
        }
    }
}

pub(super) fn choose(request: &Request) -> Result<Backing> {
    let Budget { least, likely: need } = request.geometry.budget()?;
    let argument = request.geometry.size_argument();
    limits::check_memory(least, argument)?;
    if request.backing == Backing::Memfd {
        return Ok(Backing::Memfd);
    }
    let mount = match limits::mount(Path::new(SHM)) {
        Ok(mount) => mount,
        Err(_) if request.backing == Backing::Auto && !request.keep => return Ok(Backing::Memfd),
        Err(error) => return Err(error),
    };
    let forced = request.backing == Backing::Shm;
    let reserve = if forced { 0 } else { limits::headroom(mount.size) };
    if need.saturating_add(reserve) <= mount.free {
        return Ok(Backing::Shm);
    }
    if !forced && !request.keep {
        return Ok(Backing::Memfd);
    }
    let room = match reserve {
        0 => String::new(),
        others => format!(" and leaves {} to other programs", Bytes(others)),
    };
    let instead = match (request.keep, need <= mount.free) {
        (false, _) => "use backing=\"memfd\"",
        (true, true) => "use backing=\"shm\", which leaves nothing to others",
        (true, false) => "give up keep=True",
    };
    Err(Error::new(
        Kind::Space,
        format!(
            "the cache needs {}{room}, but /dev/shm has {} free; lower {argument}, make it larger \
             (mount -o remount,size=… /dev/shm) or {instead}",
            Bytes(need),
            Bytes(mount.free),
        ),
    ))
}

/// Held while a segment of that name is looked for and made; the kernel ends it with its holder.
/// `None` if somebody else has it. Not the lock of lock.rs: there is no segment yet.
pub(super) fn creation_lock(name: &str) -> Result<Option<Unshared>> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
    // The address is at most 107 bytes, a name may be longer.
    let address = format!("{}{:032x}", file_prefix(), xxhash_rust::xxh3::xxh3_128(name.as_bytes()));
    let lock = || -> rustix::io::Result<Unshared> {
        // A child that another thread forks would have the lock too, for as long as it lives.
        let unforked = fork::hold();
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(address.as_bytes())?)?;
        Ok(unforked.keep(socket))
    };
    match lock() {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::ADDRINUSE) => Ok(None),
        Err(errno) => Err(Error::system(&format!("cannot lock the creation of {name:?}"), errno)),
    }
}
