//! One piece of shared memory per cache and node: create, attach, detach, sweep.
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
//!            else sweep at exit: the others may have ended without a word by then
//!   sweep    the same test on all leftovers of this user: never by age, never by pid
//! ```
//!
//! A memfd has no name to leave behind. Others find it by walking /proc/<pid>/fd of the same
//! user; an abstract socket address serves as the lock under which one is looked for and made.

use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::file::{
    allocate, check_private, is_named, make_private, open_checked, read_header, unlink_same,
    write_all, write_all_parts,
};
use crate::fork::{self, Anchor, Unforked};
use crate::layout::{self, Bytes, Header, Plan};
use crate::memory::Mapping;
pub use crate::name::Backing;
use crate::name::{SHM, backing_of, check_name, file_name, file_prefix, numbers, path_of};
use crate::{slot, space};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::io::IoSlice;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long an attach may meet others who are just creating or removing the same name.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_micros(200);

/// How a segment was come by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// Made, empty.
    Created,
    /// Others use it already.
    Joined,
    /// Kept from an earlier run.
    Resumed,
}

/// Where another process has the segment open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// The segment's random number.
    pub instance: u128,
    /// A process that has it open.
    pub pid: u32,
    /// Its descriptor there.
    pub fd: i32,
}

/// What to open.
#[derive(Clone, Debug)]
pub struct Request {
    /// The user's name for it, or a generated one.
    pub name: String,
    /// What it holds.
    pub plan: Plan,
    /// What the user says the data are; zero for nothing.
    pub fingerprint: u128,
    /// The name outlives the last process.
    pub keep: bool,
    /// Where the bytes live.
    pub backing: Backing,
    /// The name is random: nobody else can have it, so nobody needs to be looked for.
    pub private: bool,
    /// A process that has it open.
    pub join: Option<Join>,
}

impl Request {
    fn wanted(&self) -> Wanted<'_> {
        Wanted { name: &self.name, like: Some(self) }
    }
}

/// What an existing segment must be to be joined.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    name: &'a str,
    /// None takes whatever has the name.
    like: Option<&'a Request>,
}

impl Wanted<'_> {
    fn check(self, header: &Header) -> Result<()> {
        space::check_file_size(header.plan.extent()?.1)?;
        let Some(request) = self.like else { return Ok(()) };
        let why = if !header.plan.serves(&request.plan) {
            format!(
                "geometry: the cache {:?} exists with {}, but {} was asked for; use another name or the same arguments",
                self.name, header.plan, request.plan
            )
        } else if request.keep && !header.keep {
            format!(
                "keep: the cache {:?} is in use by processes that did not ask to keep it; \
                 use another name, or keep=True in all of them",
                self.name
            )
        } else if header.fingerprint != request.fingerprint {
            let remedy = if header.keep {
                format!("remove the old one (rm {})", path_of(self.name).display())
            } else {
                "end the programs that use it".to_string()
            };
            format!(
                "fingerprint: the cache {:?} was made for other data; use another name or {remedy}",
                self.name
            )
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::Argument, why))
    }
}

fn unsettled(name: &str) -> Error {
    Error::new(
        Kind::State,
        format!(
            "others have been creating and removing the cache {name:?} for {} s; use another name",
            PATIENCE.as_secs()
        ),
    )
}

/// An open segment. Dropping it detaches; the mapping lives on in the views that hold it.
pub struct Segment {
    anchor: Arc<Anchor>,
    mapping: Arc<Mapping>,
    header: Header,
    backing: Backing,
    name: String,
}

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
        let (_, total) = request.plan.extent()?;
        space::check_file_size(total)?;
        let elsewhere = request.join.filter(|_| !active(Fault::JoinByNameOnly));
        if let Some(join) = elsewhere
            && let Some(found) =
                Self::join_at(request.wanted(), join.pid, join.fd, Some(join.instance))?
        {
            return Ok((found, Opened::Joined));
        }
        sweep();
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            match Self::attach(request.wanted())? {
                Attached::Open(segment, how) => return Ok((segment, how)),
                Attached::Absent => {}
                Attached::Changing => {
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
            let made = match choose(request, total)? {
                Backing::Memfd => Some(Self::create_memfd(request, started)?),
                _ => Self::create(request)?.map(|segment| (segment, Opened::Created)),
            };
            if let Some(made) = made {
                return Ok(made);
            }
        }
        Err(unsettled(&request.name))
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
        Err(unsettled(name))
    }

    fn create(request: &Request) -> Result<Option<Self>> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let unforked = fork::hold();
        let file = rustix::fs::openat(CWD, SHM, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| Error::system("cannot create a file in /dev/shm", errno))?;
        let header = Self::lay_out(file.as_fd(), request)?;
        lock(file.as_fd(), FlockOperation::NonBlockingLockShared)?;
        let path = path_of(&request.name);
        let magic = format!("/proc/self/fd/{}", file.as_raw_fd());
        // The name is removed on detach unless it is kept, so the anchor learns it before it exists.
        let path_too = Some(path.clone());
        let segment =
            Self::assemble(unforked, file, header, &request.name, Backing::Shm, path_too)?;
        segment.mark_beyond();
        match rustix::fs::linkat(CWD, magic, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => Ok(Some(segment)),
            Err(Errno::EXIST) => Ok(None),
            Err(errno) => Err(Error::system(&format!("cannot name {}", path.display()), errno)),
        }
    }

    /// Looks again and, if there is none, makes one, under a lock that ends with its holder.
    fn create_memfd(request: &Request, started: Instant) -> Result<(Self, Opened)> {
        let _lock = if request.private { None } else { creation_lock(&request.name, started)? };
        if !request.private
            && let Some(found) = Self::find(request.wanted(), None)?
        {
            return Ok((found, Opened::Joined));
        }
        let unforked = fork::hold();
        let file =
            rustix::fs::memfd_create(file_name(&request.name), rustix::fs::MemfdFlags::CLOEXEC)
                .map_err(|errno| Error::system("cannot create a memfd", errno))?;
        let header = Self::lay_out(file.as_fd(), request)?;
        lock(file.as_fd(), FlockOperation::NonBlockingLockShared)?;
        let segment = Self::assemble(unforked, file, header, &request.name, Backing::Memfd, None)?;
        segment.mark_beyond();
        Ok((segment, Opened::Created))
    }

    /// Gives a new file its mode, its metadata and its length. The data stay a hole.
    fn lay_out(file: BorrowedFd<'_>, request: &Request) -> Result<Header> {
        let (data_at, total) = request.plan.extent()?;
        let mut instance = [0; 16];
        rustix::rand::getrandom(&mut instance, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| Error::system("no random numbers", errno))?;
        let header = Header {
            instance: u128::from_le_bytes(instance),
            keep: request.keep,
            fingerprint: request.fingerprint,
            plan: request.plan.clone(),
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
                request.plan.dataset_len()
            );
            Error::system(&doing, errno)
        })?;
        write_all(file, &header.encode()?, 0)
            .map_err(|errno| Error::system("cannot write the header", errno))?;
        Ok(header)
    }

    /// The state bytes beyond the capacity say so, before anybody can see them.
    fn mark_beyond(&self) {
        let Plan::Slots(g) = &self.header.plan else { return };
        let Ok(layout) = g.layout() else { return };
        let mut at = layout.states_at + g.capacity;
        let end = layout.states_at + g.dataset_len;
        let chunk = [slot::BEYOND; 4096];
        while at < end {
            let n = (end - at).min(chunk.len() as u64);
            self.mapping.write(at as usize, &chunk[..n as usize]);
            at += n;
        }
    }

    /// Maps and registers; `unforked` was taken before `file` was opened.
    fn assemble(
        unforked: Unforked,
        file: OwnedFd,
        header: Header,
        name: &str,
        backing: Backing,
        path: Option<PathBuf>,
    ) -> Result<Self> {
        let (_, total) = header.plan.extent()?;
        let stat = rustix::fs::fstat(&file)
            .map_err(|errno| Error::system("cannot look at the segment", errno))?;
        let mapping = Mapping::map(file.as_fd(), total as usize)
            .map_err(|errno| Error::system(&format!("cannot map {}", Bytes(total)), errno))?;
        let removable = path
            .filter(|_| !header.keep)
            .and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
        let id = (stat.st_dev, stat.st_ino);
        let anchor = Arc::new(Anchor::new(file.into_raw_fd(), id, removable, remove_if_last));
        unforked.register(anchor.clone());
        Ok(Self { anchor, mapping: Arc::new(mapping), header, backing, name: name.to_string() })
    }

    /// One look at the name in /dev/shm.
    fn attach(wanted: Wanted<'_>) -> Result<Attached> {
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
        let segment =
            Self::assemble(unforked, file, header, wanted.name, Backing::Shm, Some(path))?;
        Ok(Attached::Open(segment, how))
    }

    /// The segment that process `pid` has open as `fd`, if it is the one we look for.
    fn join_at(
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
        Self::assemble(unforked, file, header, wanted.name, backing, path).map(Some)
    }

    /// Walks the descriptors of all processes of this user. With an instance any backing will do,
    /// without one only a memfd: a file in /dev/shm that lost its name is joined by its own only.
    fn find(wanted: Wanted<'_>, instance: Option<u128>) -> Result<Option<Self>> {
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
        Ok(None)
    }

    /// The shared bytes. Keep this to keep them mapped.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(crate) fn anchor(&self) -> &Anchor {
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

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its file, if it has one.
    pub fn path(&self) -> Option<PathBuf> {
        (self.backing == Backing::Shm).then(|| path_of(&self.name))
    }

    pub(crate) fn file(&self) -> (u64, u64) {
        self.anchor.file
    }

    /// How another process finds this very segment.
    pub fn whereabouts(&self) -> Join {
        Join { instance: self.header.instance, pid: std::process::id(), fd: self.anchor.fd }
    }

    /// Whether a process that can be seen from here has the segment open and was stopped.
    pub(crate) fn has_stopped_users(&self) -> bool {
        let uses = |pid: u32| {
            let fds = PathBuf::from(format!("/proc/{pid}/fd"));
            numbers(&fds).into_iter().any(|fd| {
                std::fs::metadata(fds.join(fd.to_string()))
                    .is_ok_and(|file| (file.dev(), file.ino()) == self.anchor.file)
            })
        };
        numbers(Path::new("/proc")).into_iter().any(|pid| is_stopped(pid) && uses(pid))
    }

    /// Writes `bytes` at `at` with pwrite: faster than through a fresh mapping, and a full mount is
    /// an error instead of a SIGBUS.
    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> rustix::io::Result<()> {
        if active(Fault::WriteThroughMapping) {
            self.mapping.write(at as usize, bytes);
            return Ok(());
        }
        // A fraction of the write's cost, and the difference between a lost sample and somebody
        // else's file overwritten.
        if !self.anchor.is_ours() {
            return Err(Errno::BADF);
        }
        write_all(self.fd(), bytes, at)
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
        if !self.anchor.is_ours() {
            return Err(Errno::BADF);
        }
        write_all_parts(self.fd(), parts, at)
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

enum Attached {
    Open(Segment, Opened),
    Absent,
    /// Somebody is creating or removing it: look again.
    Changing,
}

/// Removes what processes of this user left behind: segments nobody uses and that are not kept.
/// Returns their names. What cannot be looked at is left alone.
pub fn sweep() -> Vec<String> {
    if active(Fault::NoSweep) {
        return Vec::new();
    }
    let prefix = file_prefix();
    let Ok(entries) = std::fs::read_dir(SHM) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let path = Path::new(SHM).join(name.strip_prefix(&prefix).map(|_| &name)?);
            // A child must not inherit the lock that is tried below.
            let _unforked = fork::hold();
            let file = open_checked(&path).ok()??;
            let (bytes, len) = read_header(file.as_fd()).ok()?;
            // A damaged header may have lost its wish to be kept: whoever opens it is told.
            let leftover = layout::is_ours(&bytes)
                && layout::is_intact(&bytes, len)
                && !layout::is_kept(&bytes)
                && rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
            (leftover && unlink_same(file.as_fd(), &path)).then_some(name)
        })
        .collect()
}

/// Detach: if nobody else holds the segment, its name goes. Else a sweep at exit is asked for: the
/// others may end before this process, and without a word.
fn remove_if_last(anchor: &Anchor) -> Option<fn()> {
    let path = anchor.path.as_ref().filter(|_| !active(Fault::KeepName))?;
    #[allow(unsafe_code)] // borrowing the anchor's descriptor
    // SAFETY: open while the anchor is registered; released before it is closed.
    let file = unsafe { BorrowedFd::borrow_raw(anchor.fd) };
    // If another process shares our open file description, a lock of ours would say nothing.
    let last = !anchor.inherited.load(Ordering::Relaxed)
        && rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok();
    if last || active(Fault::UnlinkLive) {
        unlink_same(file, Path::new(&*path.to_string_lossy()));
        return None;
    }
    Some(|| drop(sweep()))
}

fn choose(request: &Request, need: u64) -> Result<Backing> {
    space::check_memory(need)?;
    if request.backing == Backing::Memfd {
        return Ok(Backing::Memfd);
    }
    let mount = match space::mount(Path::new(SHM)) {
        Ok(mount) => mount,
        Err(_) if request.backing == Backing::Auto && !request.keep => return Ok(Backing::Memfd),
        Err(error) => return Err(error),
    };
    let forced = request.backing == Backing::Shm;
    let reserve = if forced { 0 } else { space::headroom(mount.size) };
    if need.saturating_add(reserve) <= mount.free {
        return Ok(Backing::Shm);
    }
    if !forced && !request.keep {
        return Ok(Backing::Memfd);
    }
    Err(Error::new(
        Kind::Space,
        format!(
            "the cache needs {} but /dev/shm has {} free{}; lower size_limit_gib, remount it larger (mount -o remount,size=… /dev/shm) or use backing=\"memfd\"",
            Bytes(need),
            Bytes(mount.free),
            if reserve > 0 {
                format!(", of which {} stay free for others", Bytes(reserve))
            } else {
                String::new()
            },
        ),
    ))
}

/// By a signal or a debugger.
fn is_stopped(pid: u32) -> bool {
    // "pid (name) state ...", and the name may be anything.
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.iter().rposition(|&byte| byte == b')').map_or(0, |at| at + 2);
    matches!(stat.get(after), Some(b'T' | b't'))
}

/// Held while a memfd of that name is looked for and made; the kernel ends it with its holder.
/// `None` if others hold it for too long: then two may be made, which costs memory but is not wrong.
fn creation_lock(name: &str, started: Instant) -> Result<Option<OwnedFd>> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
    // The address is at most 107 bytes, a name may be longer.
    let address = format!("{}{:032x}", file_prefix(), xxhash_rust::xxh3::xxh3_128(name.as_bytes()));
    let lock = || -> rustix::io::Result<OwnedFd> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(address.as_bytes())?)?;
        Ok(socket)
    };
    loop {
        match lock() {
            Ok(socket) => return Ok(Some(socket)),
            Err(Errno::ADDRINUSE) if started.elapsed() < PATIENCE => std::thread::sleep(RETRY),
            Err(Errno::ADDRINUSE) => return Ok(None),
            Err(errno) => {
                return Err(Error::system(&format!("cannot lock the creation of {name:?}"), errno));
            }
        }
    }
}

fn lock(file: BorrowedFd<'_>, how: FlockOperation) -> Result<()> {
    rustix::fs::flock(file, how).map_err(|errno| Error::system("cannot lock the cache", errno))
}
