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
//! user; an abstract socket address serves as the lock under which one is looked for and made.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::segment::claim;
use crate::segment::layout::{self, Budget, Header, Plan};
use crate::segment::name::Backing;
use crate::segment::name::{SHM, backing_of, check_name, file_name, file_prefix, path_of};
use crate::sys::fork::{self, Anchor, Unforked, Unshared};
use crate::sys::huge_pages::{self, HUGE_BYTES, HugePages};
use crate::sys::limits;
use crate::sys::mapping::Mapping;
use crate::sys::private_file::{
    allocate, check_private, is_named, make_private, open_checked, read_header, unlink_same,
    write_all, write_all_parts,
};
use crate::sys::proc::numbers;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CString;
use std::io::IoSlice;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long an attach may meet others who are just creating or removing the same name.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_micros(200);
/// How long to wait for who is making a memfd: it walks /proc, which takes long on a large node.
const CREATION_PATIENCE: Duration = Duration::from_secs(120);

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
    /// Whether this process fills it with huge pages.
    pub huge_pages: HugePages,
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
        limits::check_file_size(header.plan.extent()?.1)?;
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
                format!("remove the old one (on_change=\"clear\", or `stocache rm {}`)", self.name)
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

fn contended(name: &str) -> Error {
    Error::new(
        Kind::State,
        format!(
            "others have been creating and removing the cache {name:?} for at least {} s; \
             use another name",
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
    /// What was asked for, and whether it can be had.
    huge_pages: (HugePages, bool),
    /// Where the states begin.
    pub(super) states_at: u64,
    /// errno of the write that froze it, if it was ours; for the message.
    pub(super) frozen_by: AtomicU32,
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
        limits::check_file_size(total)?;
        let elsewhere = request.join.filter(|_| !active(Fault::JoinByNameOnly));
        if let Some(join) = elsewhere
            && let Some(found) =
                Self::join_at(request.wanted(), join.pid, join.fd, Some(join.instance))?
        {
            return Ok((found, Opened::Joined));
        }
        remove_leftovers();
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
            let made = match choose(request)? {
                Backing::Memfd => Some(Self::create_memfd(request)?),
                _ => Self::create(request)?.map(|segment| (segment, Opened::Created)),
            };
            if let Some(made) = made {
                return Ok(made);
            }
        }
        Err(contended(&request.name))
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

    fn create(request: &Request) -> Result<Option<Self>> {
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

    /// Looks again and, if there is none, makes one, under a lock that ends with its holder. Who does
    /// not get the lock looks until whoever has it is done: one is made, or none.
    fn create_memfd(request: &Request) -> Result<(Self, Opened)> {
        let began = Instant::now();
        let mut alone = None;
        while !request.private && alone.is_none() {
            if began.elapsed() > CREATION_PATIENCE {
                return Err(contended(&request.name));
            }
            alone = creation_lock(&request.name)?;
            // After the lock was asked for: who had it before us may have made one.
            if let Some(found) = Self::find(request.wanted(), None)? {
                return Ok((found, Opened::Joined));
            }
            if active(Fault::SlowWalkUnlocked) {
                break;
            }
            if alone.is_none() {
                std::thread::sleep(RETRY);
            }
        }
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

    /// Who insists on huge pages learns that there are none before anybody can see the segment.
    /// Later it is no error: whoever joins a cache can use it with small pages, too.
    fn check_huge_pages(&self) -> Result<()> {
        if self.huge_pages != (HugePages::Yes, false) || self.mapping.len() < HUGE_BYTES as usize {
            return Ok(());
        }
        let remedy = match self.backing {
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
        let Plan::Slots(g) = &self.header.plan else { return };
        let states = self.mapping.states(self.states_at as usize, g.dataset_len as usize);
        for state in &states[g.capacity as usize..] {
            state.store(claim::BEYOND, Ordering::Relaxed);
        }
    }

    /// Maps and registers; `unforked` was taken before `file` was opened.
    fn assemble(
        unforked: Unforked,
        file: OwnedFd,
        header: Header,
        wanted: Wanted<'_>,
        backing: Backing,
        path: Option<PathBuf>,
    ) -> Result<Self> {
        let (_, total) = header.plan.extent()?;
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
            states_at: header.plan.states_at()?,
            frozen_by: AtomicU32::new(0),
            header,
            backing,
            name: wanted.name.to_string(),
            huge_pages: (asked, huge),
        })
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
        let segment = Self::assemble(unforked, file, header, wanted, Backing::Shm, Some(path))?;
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
        Self::assemble(unforked, file, header, wanted, backing, path).map(Some)
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
        if active(Fault::SlowWalk) || active(Fault::SlowWalkUnlocked) {
            std::thread::sleep(Duration::from_millis(700)); // what was seen may be old by now
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

    pub(crate) fn file(&self) -> (u64, u64) {
        self.anchor.file
    }

    /// How another process finds this very segment.
    pub fn location(&self) -> Join {
        Join { instance: self.header.instance, pid: std::process::id(), fd: self.anchor.fd }
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
        self.populate(at, bytes.len() as u64);
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

enum Attached {
    Open(Segment, Opened),
    Absent,
    /// Somebody is creating or removing it: look again.
    Changing,
}

/// Removes what processes of this user left behind: segments nobody uses and that are not kept.
/// Returns their names. What cannot be looked at is left alone.
pub fn remove_leftovers() -> Vec<String> {
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

/// Detach: if nobody else holds the segment, its name goes. Else a look at exit is asked for: the
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
    Some(|| drop(remove_leftovers()))
}

/// A file such as segments are made of, without a name.
fn open_empty(backing: Backing) -> rustix::io::Result<OwnedFd> {
    if backing == Backing::Memfd {
        return rustix::fs::memfd_create("", rustix::fs::MemfdFlags::CLOEXEC);
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, SHM, flags, Mode::RUSR | Mode::WUSR)
}

fn choose(request: &Request) -> Result<Backing> {
    let Budget { least, likely: need } = request.plan.budget()?;
    let argument = request.plan.size_argument();
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

/// Held while a memfd of that name is looked for and made; the kernel ends it with its holder.
/// `None` if somebody else has it. Not the lock of lock.rs: there is no segment yet.
fn creation_lock(name: &str) -> Result<Option<Unshared>> {
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

fn lock(file: BorrowedFd<'_>, how: FlockOperation) -> Result<()> {
    rustix::fs::flock(file, how).map_err(|errno| Error::system("cannot lock the cache", errno))
}
