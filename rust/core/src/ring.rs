//! Batch buffers that cross processes without a copy.
//!
//! A worker fills a buffer and sends a [`Ticket`], five numbers, to the training process, which maps
//! the same memory. When nobody holds the buffer any more, in whatever process, its maker gives it
//! out again. Page faults of fresh memory cost more than the copy into it, so the maker keeps its
//! buffers, and a receiver keeps its mappings of them.
//!
//! A buffer is a memfd of fixed length, allocated before anybody touches it and sealed, so that no
//! access to it can fail:
//!
//! ```text
//!   0      magic, instance (random), bytes: never change
//!   64     sends     raised as a ticket is made
//!   128    drops     raised as a process lets go
//!   256    flights   one word per ticket that was sent and not yet received: its serial number
//!   4096   the batch
//! ```
//!
//! Who holds a buffer is known to the kernel: locks on bytes of the file (F_OFD_SETLK), which it
//! frees when their owner dies, however that happens. The bytes themselves are only labels.
//!
//! | lock   | who has it                                              | who asks                    |
//! | ------ | ------------------------------------------------------- | --------------------------- |
//! | `HELD` | every process that holds the buffer, except its maker   | the maker, before reuse     |
//! | `MADE` | the maker, as long as it keeps the buffer               | receivers, before they keep an unheld mapping |
//!
//! ```text
//!   take      a buffer of ours that nobody holds, or a new one
//!   send      while holding: enter a serial number into `flights`; the ticket carries it
//!   receive   lock `HELD`, then take the serial number out of `flights`, once
//!   drop      the last hold in a process: unlock `HELD`; keep the mapping if `MADE` is locked
//! ```
//!
//! A hold never disappears on its way: the ticket is entered before the sender lets go, and taken
//! out after the receiver has its lock. Only the maker gives a buffer out again, after it has seen
//! no hold of its own, no ticket and no lock, while nothing was sent (`Entry::is_free`).
//!
//! **Death.** A process that dies lets go of what it held. A maker that dies takes with it what it
//! had sent and nobody had received; what was received stays valid. A ticket that nobody will ever
//! receive cannot be told from one that waits in a queue, so it keeps its buffer, and the maker
//! makes others: up to [`BUFFERS`], then [`take`] returns nothing and batches go through ordinary
//! memory. A sender who knows that a ticket is lost says so with [`cancel`].
//!
//! **Fork.** A lock belongs to an open file description, and a child shares those of its parent, by
//! descriptors and by mappings. So before a fork every buffer that is held is opened and locked
//! anew; the child maps that in place of what it inherited, and drops the rest. Its holds are its
//! own from the start: neither process can let go for the other, and what a child holds is not
//! written to either. A child that never lets go, as a worker that inherited a variable of its
//! parent, costs the maker that buffer for as long as it lives.
//!
//! Not promised: defence against a hostile process of the same user.
#![allow(unsafe_code)] // OFD locks, pthread_atfork, and mappings replaced in a child

use crate::error::{Error, Kind, Result};
use crate::file::{allocate, check_private};
use crate::fork::{ForkGuard, ForkLock, at_load};
use crate::layout::Bytes;
use crate::memory::Mapping;
use crate::space;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The most buffers a process makes.
pub const BUFFERS: usize = 32;
/// The most tickets of one buffer that can be in flight.
pub const FLIGHTS: usize = 64;

/// A new buffer takes at most this part of the memory that is left: others look at the same time.
const PART_OF_LEFT: u64 = 16;
/// All buffers of a process take at most this part of the memory that they and others leave.
const PART_OF_ALL: u64 = 8;
/// After a refusal for lack of memory, so many calls do not ask again: asking reads several files.
const PAUSE: u32 = 16;
/// A free buffer that was not used for so many calls is given back.
const STALE: u64 = 512;
/// So many free buffers are kept whose size was asked for only once.
const UNPROVEN: usize = 4;
/// The most mappings of other processes' buffers that are kept while nobody here holds them.
const KEPT: u64 = 256;

const NAME: &str = "stocache-batch";
const LINK: &str = "/memfd:stocache-batch (deleted)";
const MAGIC: u64 = u64::from_le_bytes(*b"stobatch");
const HEADER_BYTES: usize = 24;
const SENDS_AT: usize = 64;
const DROPS_AT: usize = 128;
const FLIGHTS_AT: usize = 256;
const DATA_AT: usize = 4096;

/// Bytes of the file that serve as locks.
const HELD: libc::off_t = 0;
const MADE: libc::off_t = 1;

const _: () = assert!(FLIGHTS_AT + FLIGHTS * 8 <= DATA_AT);

/// Where another process finds a buffer: plain numbers, to be sent in a message. Each can be
/// received once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The process that sent it; it must live until the ticket is received.
    pub pid: u32,
    /// The buffer's descriptor in that process.
    pub fd: i32,
    /// The buffer's random number.
    pub instance: u64,
    /// The length of the batch.
    pub bytes: u64,
    /// Tells the tickets of one buffer apart.
    pub serial: u64,
}

/// A hold on a buffer. While one exists, in any process, the buffer is not given out again.
pub struct Buffer {
    data: NonNull<u8>,
    bytes: usize,
    instance: u64,
}

// SAFETY: a hold is a number in a table that any thread may change; the bytes are reached through
// raw pointers only.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// What the ring of this process keeps at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Buffers made by this process.
    pub made: usize,
    /// Their bytes.
    pub made_bytes: u64,
    /// Mappings of other processes' buffers.
    pub received: usize,
    /// Holds in this process.
    pub holds: usize,
}

/// A buffer of exactly `bytes` bytes that nobody else holds: one that is free again, or a new one.
/// Its contents are undefined. `None` if no more may be had; ordinary memory must do then.
pub fn take(bytes: usize) -> Option<Buffer> {
    ring().take(bytes)
}

/// The buffer of a ticket. It takes over the ticket's hold, so a second call is an error.
pub fn receive(ticket: &Ticket) -> Result<Buffer> {
    ring().receive(ticket)
}

/// One more hold on the buffer that `address` lies in, if somebody in this process holds one.
pub fn holding(address: *const u8) -> Option<Buffer> {
    ring().holding(address as usize)
}

/// Takes back a ticket that this process sent and that will not be received, because the message
/// was not sent or its receiver has died. False if it was received before.
pub fn cancel(ticket: &Ticket) -> bool {
    ring().cancel(ticket)
}

/// Gives back mappings whose makers are gone or gave the buffer up. [`receive`] and the drop of a
/// hold do this too; this is for a process that does neither any more.
pub fn sweep() {
    ring().sweep();
}

/// What the ring of this process keeps at this moment.
pub fn usage() -> Usage {
    let ring = ring();
    let made = || ring.entries.iter().filter(|entry| entry.made);
    Usage {
        made: made().count(),
        made_bytes: made().map(|entry| entry.bytes as u64).sum(),
        received: ring.entries.len() - made().count(),
        holds: ring.entries.iter().map(|entry| entry.holds).sum(),
    }
}

impl Buffer {
    /// The first byte; page-aligned.
    pub fn address(&self) -> NonNull<u8> {
        self.data
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes; never, but clippy asks.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The buffer's random number; the same in all processes.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// A ticket with a hold of its own. What was written to the buffer before, the receiver sees.
    pub fn send(&self) -> Result<Ticket> {
        let mut ring = ring();
        let entry = ring.find(self.data).ok_or_else(unknown)?;
        if !entry.is_ours() {
            return Err(Error::new(
                Kind::State,
                "another part of the program closed the descriptor of this batch; send a copy of it",
            ));
        }
        let serial = entry.header().depart().ok_or_else(|| {
            Error::new(
                Kind::State,
                format!(
                    "{FLIGHTS} messages with this batch were not received yet; send a copy of it"
                ),
            )
        })?;
        entry.exposed = true;
        Ok(Ticket {
            pid: std::process::id(),
            fd: entry.fd,
            instance: self.instance,
            bytes: self.bytes as u64,
            serial,
        })
    }

    /// The hold as a pointer, for the deleter of a tensor: the address of the batch. Nothing is
    /// released until it goes through [`Buffer::from_raw`].
    pub fn into_raw(self) -> *mut c_void {
        let data = self.data.as_ptr().cast();
        std::mem::forget(self);
        data
    }

    /// The hold that `into_raw` gave out. `None` if there is no such hold.
    ///
    /// # Safety
    /// `raw` must come from `into_raw`, in this process or before it was forked, and be used once.
    pub unsafe fn from_raw(raw: *mut c_void) -> Option<Self> {
        let mut ring = ring();
        let entry = ring.find(NonNull::new(raw.cast())?)?;
        (entry.holds > 0).then(|| entry.as_held())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        ring().release(self.data);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} at {:p}, {:016x})", Bytes(self.bytes as u64), self.data, self.instance)
    }
}

fn unknown() -> Error {
    Error::new(Kind::State, "this batch is not held by this process; take or receive one")
}

/// The buffers of this process, its own and those of others.
struct Ring {
    entries: Vec<Entry>,
    /// Counts the calls of `take` and `receive`; the only notion of time here.
    clock: u64,
    /// How many calls will not ask for memory.
    pause: u32,
    /// The entry that is asked next whether its maker lives.
    turn: usize,
}

/// One mapped buffer.
struct Entry {
    mapping: Mapping,
    fd: RawFd,
    /// Device and inode: a program that closes descriptors it does not know may get our number for
    /// a file of its own.
    file: (u64, u64),
    instance: u64,
    bytes: usize,
    /// Holds in this process.
    holds: usize,
    /// Made by this process, which alone gives it out again.
    made: bool,
    /// Another process may have come to hold it, by a ticket or a fork. Of another process's
    /// buffer: a ticket may lead to our descriptor.
    exposed: bool,
    /// Not to be used again: another process shares our open file description, or we lost the
    /// descriptor, so locks tell nothing. Goes with its last hold here.
    spoiled: bool,
    /// Was given out a second time: its size is one that comes back.
    proven: bool,
    /// The clock when it was last given out.
    used: u64,
    /// The descriptor prepared for a child, between prepare and parent/child; else -1.
    spare: RawFd,
}

impl Ring {
    const fn new() -> Self {
        Self { entries: Vec::new(), clock: 0, pause: 0, turn: 0 }
    }

    fn find(&mut self, data: NonNull<u8>) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.data() == data)
    }

    fn take(&mut self, bytes: usize) -> Option<Buffer> {
        self.clock += 1;
        self.tidy();
        let at = match self.free_one(bytes) {
            Some(at) => {
                self.entries[at].proven = true;
                at
            }
            None => {
                let need = (bytes > 0).then(|| file_len(bytes as u64)).flatten()?;
                if !self.make_room(need) {
                    return None;
                }
                self.entries.push(Entry::make(bytes, need)?);
                self.entries.len() - 1
            }
        };
        let entry = &mut self.entries[at];
        entry.used = self.clock;
        entry.holds = 1;
        Some(entry.as_held())
    }

    /// The free buffer of that size that was used last: the others grow stale if they are too many.
    fn free_one(&mut self, bytes: usize) -> Option<usize> {
        let mut before = u64::MAX;
        loop {
            let (at, entry) = self
                .entries
                .iter_mut()
                .enumerate()
                .filter(|(_, e)| e.made && e.bytes == bytes && e.holds == 0 && e.used < before)
                .max_by_key(|(_, e)| e.used)?;
            if entry.is_free() {
                return Some(at);
            }
            before = entry.used;
        }
    }

    /// Gives back what is of no use any more.
    fn tidy(&mut self) {
        // The rest takes system calls for every buffer, so not every time.
        if self.clock.is_multiple_of(64) {
            for entry in self.entries.iter_mut().filter(|entry| entry.made && entry.holds == 0) {
                entry.spoiled |= !entry.is_ours();
            }
            while self.give_back(|entry, now| entry.is_stale(now)) {}
        }
        self.entries.retain(|entry| !(entry.spoiled && entry.is_idle()));
    }

    /// Gives back the free buffer that was not used for longest, of those that `may` go.
    fn give_back(&mut self, may: impl Fn(&Entry, u64) -> bool) -> bool {
        let now = self.clock;
        let oldest = self
            .entries
            .iter_mut()
            .enumerate()
            .filter(|(_, entry)| entry.made && may(entry, now))
            .filter_map(|(at, entry)| entry.is_free().then_some((at, entry.used)))
            .min_by_key(|&(_, used)| used);
        oldest.map(|(at, _)| self.entries.remove(at)).is_some()
    }

    /// Whether `need` bytes may be had, after giving back what is not worth keeping. A size that
    /// comes back keeps its buffers: the smaller last batch of an epoch does not cost the others
    /// theirs. It keeps one itself, too, until it is stale.
    fn make_room(&mut self, need: u64) -> bool {
        let idle = |entry: &Entry, now| !entry.proven || entry.is_stale(now);
        let unproven = |entry: &mut Entry| entry.made && !entry.proven && entry.is_free();
        let many = self.entries.iter_mut().filter_map(|e| unproven(e).then_some(())).count();
        for _ in UNPROVEN..many {
            self.give_back(|entry, _| !entry.proven);
        }
        while self.entries.iter().filter(|entry| entry.made).count() >= BUFFERS {
            if !self.give_back(idle) {
                return false;
            }
        }
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        loop {
            // A full memory cgroup kills, so this is asked before anything is allocated. Not to know
            // is no.
            let left = Some(space::memory().free).filter(|&left| left < u64::MAX).unwrap_or(0);
            let made = self.entries.iter().filter(|entry| entry.made);
            let total: u64 = made.map(|entry| entry.mapping.len() as u64).sum();
            if need <= left / PART_OF_LEFT && total + need <= (left + total) / PART_OF_ALL {
                return true;
            }
            if !self.give_back(idle) {
                self.pause = PAUSE;
                return false;
            }
        }
    }

    fn receive(&mut self, ticket: &Ticket) -> Result<Buffer> {
        self.clock += 1;
        let received = self.find_or_open(ticket);
        self.look_at_one(); // after it: a mapping that is kept serves its last ticket, too
        received
    }

    fn find_or_open(&mut self, ticket: &Ticket) -> Result<Buffer> {
        let known = self.entries.iter().position(|entry| entry.instance == ticket.instance);
        if let Some(at) = known {
            let entry = &mut self.entries[at];
            // A mapping that nobody holds here can be locked only with its descriptor.
            if entry.made || entry.holds > 0 || entry.is_ours() {
                entry.used = self.clock;
                return entry.land(ticket);
            }
            self.entries.remove(at);
        }
        let mut entry = match Entry::open(ticket) {
            // What is only kept makes room for what is needed.
            Err(error) if error.kind() == Kind::Space => {
                self.entries.retain(|entry| entry.made || !entry.is_idle());
                Entry::open(ticket)
            }
            entry => entry,
        }?;
        entry.used = self.clock;
        let buffer = entry.land(ticket)?;
        self.entries.push(entry);
        Ok(buffer)
    }

    fn holding(&mut self, address: usize) -> Option<Buffer> {
        let entry = self.entries.iter_mut().find(|entry| {
            let offset = address.wrapping_sub(entry.data().as_ptr() as usize);
            entry.holds > 0 && offset < entry.bytes
        })?;
        entry.holds += 1;
        Some(entry.as_held())
    }

    fn cancel(&mut self, ticket: &Ticket) -> bool {
        let entry = self.entries.iter().find(|entry| entry.instance == ticket.instance);
        entry.is_some_and(|entry| entry.header().arrive(ticket.serial))
    }

    /// Ends one hold.
    fn release(&mut self, data: NonNull<u8>) {
        let Some(at) = self.entries.iter().rposition(|entry| entry.data() == data) else {
            debug_assert!(false, "a hold on a buffer that is not there");
            return;
        };
        let entry = &mut self.entries[at];
        entry.holds -= 1;
        if entry.holds > 0 || (entry.made && !entry.spoiled) {
            return;
        }
        // SYNC POINT let go: Release here, Acquire in `is_free`: what this process read, it read
        // before the maker writes again.
        entry.header().drops().fetch_add(1, Ordering::Release);
        entry.exposed &= entry.header().in_flight();
        // Without its descriptor or its maker the mapping goes, and the lock with it; unless a ticket
        // of ours leads here.
        let gone = !entry.spoiled && (entry.is_gone() || !set_lock(entry.fd, HELD, libc::F_UNLCK));
        entry.spoiled |= gone;
        if entry.spoiled && entry.is_idle() {
            self.entries.remove(at);
        }
        if gone {
            self.sweep(); // where one maker has ended, others may have
        }
        self.keep_few();
    }

    /// Bounds the mappings that are only kept.
    fn keep_few(&mut self) {
        let kept = |entry: &&Entry| !entry.made && entry.holds == 0;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let few = KEPT.min(limit.unwrap_or(u64::MAX) / 4) as usize;
        if self.entries.iter().filter(kept).count() > few {
            // One that a ticket leads to only if there is no other.
            let order = |entry: &Entry| (!entry.is_idle(), entry.used);
            let all = self.entries.iter().enumerate().filter(|(_, entry)| kept(entry));
            if let Some((at, _)) = all.min_by_key(|(_, entry)| order(entry)) {
                self.entries.remove(at);
            }
        }
    }

    /// Asks about one mapping per call, in turn; if it is of no use any more, about all.
    fn look_at_one(&mut self) {
        self.turn = (self.turn + 1) % self.entries.len().max(1);
        if self.entries.get(self.turn).is_some_and(Entry::is_useless) {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        self.entries.retain(|entry| !entry.is_useless());
    }
}

/// The words of a buffer that processes share.
#[derive(Clone, Copy)]
struct Header<'a>(&'a Mapping);

impl<'a> Header<'a> {
    fn sends(self) -> &'a AtomicU64 {
        &self.0.words(SENDS_AT, 1)[0]
    }

    fn drops(self) -> &'a AtomicU64 {
        &self.0.words(DROPS_AT, 1)[0]
    }

    fn flights(self) -> &'a [AtomicU64] {
        self.0.words(FLIGHTS_AT, FLIGHTS)
    }

    fn in_flight(self) -> bool {
        // SYNC POINT landed: SeqCst here and in `arrive`.
        self.flights().iter().any(|flight| flight.load(Ordering::SeqCst) != 0)
    }

    /// Enters a ticket and returns its serial number; `None` if too many are in flight.
    fn depart(self) -> Option<u64> {
        // Relaxed: only makes the number another one than before.
        let serial = self.sends().fetch_add(1, Ordering::Relaxed).wrapping_add(1).max(1);
        // SYNC POINT ticket: Release here, Acquire in `arrive`: the batch is there before its
        // ticket. SeqCst for `sends`, below.
        let entered = self.flights().iter().any(|flight| {
            flight.compare_exchange(0, serial, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        });
        // SYNC POINT sends: SeqCst here and in `is_free`: raised after the ticket is entered and
        // before the sender lets go.
        self.sends().fetch_add(1, Ordering::SeqCst);
        entered.then_some(serial)
    }

    /// Takes a ticket out; false if it is not there, or no longer.
    fn arrive(self, serial: u64) -> bool {
        // SYNC POINT ticket: Acquire here, Release in `depart`. SYNC POINT landed: Release here,
        // Acquire in `in_flight`: who does not see the ticket sees the receiver's lock.
        let out = |flight: &AtomicU64| {
            flight.compare_exchange(serial, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        };
        let mut flights = self.flights().iter();
        serial != 0 && flights.any(|flight| flight.load(Ordering::Relaxed) == serial && out(flight))
    }
}

impl Entry {
    fn make(bytes: usize, len: u64) -> Option<Self> {
        space::check_file_size(len).ok()?; // beyond this limit the kernel sends SIGXFSZ
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
        if !set_lock(file.as_raw_fd(), MADE, libc::F_WRLCK) {
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
    fn open(ticket: &Ticket) -> Result<Self> {
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
        let mapping = Mapping::map(file.as_fd(), stat.st_size as usize)?;
        Ok(Self {
            mapping,
            fd: file.into_raw_fd(),
            file: (stat.st_dev, stat.st_ino),
            instance,
            bytes,
            holds: 0,
            made,
            exposed: false,
            spoiled: false,
            proven: false,
            used: 0,
            spare: -1,
        })
    }

    /// A hold that is counted already.
    fn as_held(&self) -> Buffer {
        Buffer { data: self.data(), bytes: self.bytes, instance: self.instance }
    }

    fn data(&self) -> NonNull<u8> {
        self.mapping.at(DATA_AT, self.bytes)
    }

    fn header(&self) -> Header<'_> {
        Header(&self.mapping)
    }

    /// Turns a ticket into a hold of this process.
    fn land(&mut self, ticket: &Ticket) -> Result<Buffer> {
        let lock = !self.made && self.holds == 0;
        if lock && !set_lock(self.fd, HELD, libc::F_RDLCK) {
            return Err(Error::new(Kind::System, "cannot lock a batch of another process"));
        }
        if self.bytes as u64 == ticket.bytes && self.header().arrive(ticket.serial) {
            self.holds += 1;
            return Ok(self.as_held());
        }
        if lock {
            set_lock(self.fd, HELD, libc::F_UNLCK);
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
    fn is_free(&mut self) -> bool {
        if self.holds > 0 || self.spoiled {
            return false;
        }
        if !self.exposed {
            return true;
        }
        // SYNC POINT sends, SYNC POINT landed: see `depart` and `arrive`.
        let header = self.header();
        let before = header.sends().load(Ordering::SeqCst);
        if header.in_flight() || is_locked(self.fd, HELD) {
            return false;
        }
        fence(Ordering::SeqCst);
        // SYNC POINT let go: Acquire here, Release in `Ring::release`. A process that died instead
        // had stopped reading before the kernel freed its lock.
        header.drops().load(Ordering::Acquire);
        if header.sends().load(Ordering::SeqCst) != before {
            return false;
        }
        if !self.is_ours() {
            self.spoiled = true; // another file was asked, and nothing can be any more
            return false;
        }
        self.exposed = false;
        true
    }

    fn is_stale(&self, now: u64) -> bool {
        self.holds == 0 && now - self.used > STALE
    }

    /// Nobody here holds it, and no ticket leads to our descriptor.
    fn is_idle(&self) -> bool {
        self.holds == 0 && !(self.exposed && self.header().in_flight())
    }

    /// The maker has ended or given this buffer up.
    fn is_gone(&self) -> bool {
        !self.is_ours() || !is_locked(self.fd, MADE)
    }

    fn is_useless(&self) -> bool {
        self.is_idle() && (self.spoiled || !self.made && self.is_gone())
    }

    /// Whether the descriptor still leads to the buffer.
    fn is_ours(&self) -> bool {
        // SAFETY: all-zero is a valid stat to be filled in; fstat is async-signal-safe.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            libc::fstat(self.fd, &mut stat) == 0 && (stat.st_dev, stat.st_ino) == self.file
        }
    }

    /// An open file description for a child, with a lock of its own; -1 if that cannot be had.
    /// Allocates nothing.
    fn open_for_child(&self) -> RawFd {
        use std::io::Write;
        let mut path = [0; 32];
        if !self.is_ours() || write!(&mut path[..31], "/proc/self/fd/{}", self.fd).is_err() {
            return -1;
        }
        // SAFETY: a NUL-terminated path on our stack.
        let spare = unsafe { libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC) };
        if spare >= 0 && !set_lock(spare, HELD, libc::F_RDLCK) {
            // SAFETY: opened just now, known to nobody else.
            unsafe { libc::close(spare) };
            return -1;
        }
        spare
    }

    /// In a child: puts the spare description in place of the inherited one, whose locks are the
    /// parent's. False if that cannot be done.
    fn replace(&mut self) -> bool {
        let spare = std::mem::replace(&mut self.spare, -1);
        if spare < 0 {
            return false;
        }
        let (start, len) = (self.mapping.at(0, 0).as_ptr(), self.mapping.len());
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: exactly our own mapping is replaced, by the same bytes of the same file, while
        // the child has no other thread: no pointer into it can tell.
        let mapped = unsafe { libc::mmap(start.cast(), len, access, flags, spare, 0) };
        let done = mapped != libc::MAP_FAILED;
        let unwanted = if done { std::mem::replace(&mut self.fd, spare) } else { spare };
        // SAFETY: a descriptor of this entry (`open_for_child` checked it) that it uses no more.
        unsafe { libc::close(unwanted) };
        done
    }
}

/// Closes and unmaps, which frees the locks. Nothing on the heap: a forked child does this too.
impl Drop for Entry {
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
fn file_len(bytes: u64) -> Option<u64> {
    let len = bytes.checked_next_multiple_of(DATA_AT as u64)?.checked_add(DATA_AT as u64)?;
    isize::try_from(len).is_ok().then_some(len)
}

fn range(kind: libc::c_int, at: libc::off_t) -> libc::flock {
    // SAFETY: all-zero is a valid flock, and l_pid must be zero for OFD locks.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = kind as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = at;
    range.l_len = 1;
    range
}

fn set_lock(fd: RawFd, at: libc::off_t, kind: libc::c_int) -> bool {
    // SAFETY: the range outlives the call; a descriptor that is not open is an error.
    unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &range(kind, at)) == 0 }
}

/// Whether another open file description has this lock. Not to know counts as yes.
fn is_locked(fd: RawFd, at: libc::off_t) -> bool {
    let mut range = range(libc::F_WRLCK, at);
    // SAFETY: as above, and the range is ours to be written.
    let asked = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &mut range) };
    asked != 0 || range.l_type != libc::F_UNLCK as libc::c_short
}

/// Taken around a fork, so that a child finds it free and what it guards whole. Everything that
/// opens, maps, locks or closes a buffer happens under it: a child inherits nothing unknowingly.
static RING: ForkLock<Ring> = ForkLock::new(Ring::new());

/// The ring of this process.
fn ring() -> ForkGuard<'static, Ring> {
    register();
    RING.lock()
}

at_load!(register, {
    // SAFETY: plain functions that live as long as the library, which is never unloaded, and do
    // only what is allowed between fork and exec.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
});

/// The guard of `RING` between prepare and parent/child.
struct AcrossFork(UnsafeCell<Option<ForkGuard<'static, Ring>>>);
// SAFETY: touched only by the thread that forks, which holds the lock of `RING` as it does so.
unsafe impl Sync for AcrossFork {}
static ACROSS_FORK: AcrossFork = AcrossFork(UnsafeCell::new(None));

extern "C" fn prepare() {
    let mut ring = RING.lock();
    for entry in ring.entries.iter_mut().filter(|entry| entry.holds > 0) {
        entry.exposed |= entry.made;
        entry.spare = entry.open_for_child();
    }
    // SAFETY: we hold the lock, so no other thread is here; nothing was there to be dropped.
    unsafe { *ACROSS_FORK.0.get() = Some(ring) };
}

extern "C" fn parent() {
    // SAFETY: as in `prepare`, whose lock we still hold.
    let Some(mut ring) = (unsafe { (*ACROSS_FORK.0.get()).take() }) else { return };
    for entry in ring.entries.iter_mut().filter(|entry| entry.holds > 0) {
        match std::mem::replace(&mut entry.spare, -1) {
            -1 => entry.spoiled = true, // the child shares our open file description
            // SAFETY: a descriptor opened by `prepare`; the child has it now.
            spare => drop(unsafe { libc::close(spare) }),
        }
    }
}

extern "C" fn child() {
    // SAFETY: as in `parent`; the child has a copy of the lock and of the guard.
    let Some(mut ring) = (unsafe { (*ACROSS_FORK.0.get()).take() }) else { return };
    ring.entries.retain(|entry| entry.holds > 0);
    for entry in &mut ring.entries {
        entry.made = false;
        entry.exposed = false; // what the parent sent leads to the parent
        entry.spoiled = !entry.replace();
    }
}

#[cfg(test)]
mod tests {
    //! Rings of their own, not that of the process: `Buffer`s are turned into addresses at once.
    use super::*;

    const SIZE: usize = 64 << 10;

    fn hold(ring: &mut Ring, bytes: usize) -> Option<NonNull<u8>> {
        ring.take(bytes).and_then(|buffer| NonNull::new(buffer.into_raw().cast()))
    }

    /// Takes a buffer, lets go of it, and says which it was.
    fn use_once(ring: &mut Ring, bytes: usize) -> u64 {
        let data = hold(ring, bytes).unwrap();
        let instance = ring.find(data).unwrap().instance;
        ring.release(data);
        instance
    }

    #[test]
    fn heap_a_ticket_arrives_once() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        assert!(!header.in_flight() && !header.arrive(0) && !header.arrive(7));
        let (first, second) = (header.depart().unwrap(), header.depart().unwrap());
        assert_ne!(first, second);
        assert!(header.in_flight());
        assert!(header.arrive(second) && !header.arrive(second));
        assert!(header.in_flight());
        assert!(header.arrive(first) && !header.in_flight());
        // A number is not used again, so an old ticket does not get a new one's place.
        let third = header.depart().unwrap();
        assert!(!header.arrive(first) && !header.arrive(second) && header.arrive(third));
    }

    #[test]
    fn heap_tickets_in_flight_are_limited() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        let tickets: Vec<u64> = (0..FLIGHTS).map(|_| header.depart().unwrap()).collect();
        let sends = header.sends().load(Ordering::Relaxed);
        assert_eq!(header.depart(), None);
        assert!(header.sends().load(Ordering::Relaxed) > sends);
        assert!(tickets.iter().all(|&serial| header.arrive(serial)));
        assert!(!header.in_flight());
    }

    #[test]
    fn heap_tickets_of_threads_arrive_once_each() {
        let mapping = Mapping::heap(DATA_AT);
        let header = Header(&mapping);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let serial = header.depart().unwrap();
                        assert!(header.arrive(serial));
                    }
                });
            }
        });
        assert!(!header.in_flight());
        assert_eq!(header.sends().load(Ordering::Relaxed), 8000);
    }

    /// A buffer that is passed on and on: each holder enters a ticket, raises `sends` and may then
    /// let go; the next one locks and takes the ticket out. The maker asks meanwhile.
    #[derive(Clone, Copy)]
    struct Passing {
        /// What each holder does, and its successor, in that order.
        order: [Step; 4],
        /// Whether the maker looks at `sends` again.
        again: bool,
        steps: usize,
        may_let_go: u8,
        locks: u8,
        flight: bool,
        sends: u8,
        asked: u8,
        before: u8,
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Step {
        Enter,
        Raise,
        Lock,
        Out,
    }

    impl Passing {
        const STEPS: usize = 4 * 3;

        fn new(order: [Step; 4], again: bool) -> Self {
            let (steps, may_let_go, locks, flight) = (0, 0, 1, false);
            Self { order, again, steps, may_let_go, locks, flight, sends: 0, asked: 0, before: 0 }
        }

        /// Whether some order of the steps of all ends with a held buffer taken for free.
        fn goes_wrong(self) -> bool {
            self.pass_on().is_some_and(Self::goes_wrong)
                || self.let_go().is_some_and(Self::goes_wrong)
                || match self.ask() {
                    Some(next) if next.asked == 4 => next.flight || next.locks > 0,
                    next => next.is_some_and(Self::goes_wrong),
                }
        }

        fn pass_on(mut self) -> Option<Self> {
            match self.order[self.steps % 4] {
                _ if self.steps == Self::STEPS => return None,
                Step::Enter => self.flight = true,
                Step::Raise => self.sends += 1,
                Step::Lock => self.locks += 1,
                Step::Out => self.flight = false,
            }
            self.steps += 1;
            // The sender once its ticket is made, the last receiver when it likes.
            self.may_let_go += u8::from(self.steps % 4 == 2 || self.steps == Self::STEPS);
            Some(self)
        }

        fn let_go(mut self) -> Option<Self> {
            self.may_let_go = self.may_let_go.checked_sub(1)?;
            self.locks -= 1;
            Some(self)
        }

        /// `Entry::is_free`, one look at a time; `None` when it says no.
        fn ask(mut self) -> Option<Self> {
            match self.asked {
                0 => self.before = self.sends,
                1 if self.flight => return None,
                2 if self.locks > 0 => return None,
                3 if self.again && self.sends != self.before => return None,
                _ => {}
            }
            self.asked += 1;
            Some(self)
        }
    }

    #[test]
    fn no_order_of_steps_frees_a_buffer_that_is_held() {
        use Step::{Enter, Lock, Out, Raise};
        assert!(!Passing::new([Enter, Raise, Lock, Out], true).goes_wrong());
        // Controls: each rule is needed.
        assert!(Passing::new([Enter, Raise, Lock, Out], false).goes_wrong());
        assert!(Passing::new([Raise, Enter, Lock, Out], true).goes_wrong());
        assert!(Passing::new([Enter, Raise, Out, Lock], true).goes_wrong());
    }

    #[test]
    fn lengths_are_whole_pages_and_do_not_overflow() {
        assert_eq!(file_len(1), Some(8192));
        assert_eq!(file_len(4096), Some(8192));
        assert_eq!(file_len(4097), Some(12288));
        assert_eq!(file_len(u64::MAX), None);
        assert_eq!(file_len(i64::MAX as u64), None);
        assert!(Ring::new().take(0).is_none());
        assert!(Ring::new().take(usize::MAX).is_none());
    }

    #[test]
    fn a_free_buffer_is_given_out_again_and_a_held_one_is_not() {
        let mut ring = Ring::new();
        let (a, b) = (hold(&mut ring, SIZE).unwrap(), hold(&mut ring, SIZE).unwrap());
        assert_ne!(a, b);
        ring.release(a);
        assert_eq!(hold(&mut ring, SIZE), Some(a));
        assert_eq!(hold(&mut ring, SIZE - 1).map(|other| other == b), Some(false));
        ring.release(b);
        assert_eq!(hold(&mut ring, SIZE), Some(b));
    }

    #[test]
    fn a_buffer_in_flight_is_not_given_out() {
        let mut ring = Ring::new();
        let data = hold(&mut ring, SIZE).unwrap();
        let entry = ring.find(data).unwrap();
        let serial = entry.header().depart().unwrap();
        entry.exposed = true;
        let ticket = Ticket {
            pid: std::process::id(),
            fd: entry.fd,
            instance: entry.instance,
            bytes: SIZE as u64,
            serial,
        };
        ring.release(data);
        assert_ne!(hold(&mut ring, SIZE), Some(data));
        assert!(ring.receive(&Ticket { bytes: 1, ..ticket }).is_err());
        // It came back: the same mapping, once.
        std::mem::forget(ring.receive(&ticket).unwrap());
        assert!(ring.receive(&ticket).is_err() && !ring.cancel(&ticket));
        assert_eq!(ring.entries.len(), 2);
        assert_eq!(ring.find(data).unwrap().holds, 1);
        ring.release(data);
        assert_eq!(hold(&mut ring, SIZE), Some(data));
    }

    #[test]
    fn an_address_finds_its_buffer_while_it_is_held() {
        let mut ring = Ring::new();
        let data = hold(&mut ring, SIZE).unwrap();
        let address = data.as_ptr() as usize;
        for inside in [address, address + SIZE - 1] {
            std::mem::forget(ring.holding(inside).unwrap());
        }
        for outside in [0, address - 1, address + SIZE, usize::MAX] {
            assert!(ring.holding(outside).is_none());
        }
        assert_eq!(ring.find(data).unwrap().holds, 3);
        (0..3).for_each(|_| ring.release(data));
        assert!(ring.holding(address).is_none());
    }

    #[test]
    fn the_smaller_last_batch_of_an_epoch_costs_no_other_its_buffer() {
        let mut ring = Ring::new();
        let mut made = std::collections::HashSet::new();
        for _epoch in 0..10 {
            // Two are held at a time, as with a queue.
            for _batch in 0..100 {
                let (a, b) = (hold(&mut ring, SIZE).unwrap(), hold(&mut ring, SIZE).unwrap());
                made.extend([a, b].map(|data| ring.find(data).unwrap().instance));
                ring.release(a);
                ring.release(b);
            }
            use_once(&mut ring, SIZE / 2);
        }
        assert_eq!(made.len(), 2);
        assert!(ring.entries.len() <= 3);
    }

    #[test]
    fn short_epochs_of_two_sizes_keep_a_buffer_of_each() {
        let mut ring = Ring::new();
        let first = [SIZE, SIZE / 2].map(|bytes| use_once(&mut ring, bytes));
        for _ in 0..100 {
            assert_eq!([SIZE, SIZE / 2].map(|bytes| use_once(&mut ring, bytes)), first);
        }
    }

    #[test]
    fn sizes_that_never_come_back_pile_up_nothing() {
        let mut ring = Ring::new();
        for i in 1..=500 {
            use_once(&mut ring, i * 4096);
            assert!(ring.entries.len() <= UNPROVEN + 1, "{} buffers", ring.entries.len());
        }
    }

    #[test]
    fn what_a_burst_made_is_given_back() {
        let mut ring = Ring::new();
        let burst: Vec<_> = (0..20).map(|_| hold(&mut ring, SIZE).unwrap()).collect();
        burst.into_iter().for_each(|data| ring.release(data));
        for _ in 0..3 * STALE {
            use_once(&mut ring, SIZE);
        }
        assert_eq!(ring.entries.len(), 1);
    }

    #[test]
    fn the_number_of_buffers_is_limited() {
        let mut ring = Ring::new();
        let all: Vec<_> = (0..BUFFERS).map(|_| hold(&mut ring, SIZE).unwrap()).collect();
        assert_eq!(hold(&mut ring, SIZE), None);
        assert_eq!(hold(&mut ring, SIZE / 2), None);
        ring.release(all[7]);
        assert_eq!(hold(&mut ring, SIZE), Some(all[7]));
        // One of another size takes the place of one that never came back, not of one that did.
        ring.release(all[7]);
        assert_eq!(hold(&mut ring, SIZE / 2), None);
        ring.release(all[8]);
        assert!(hold(&mut ring, SIZE / 2).is_some());
        assert_eq!(ring.entries.len(), BUFFERS);
    }

    #[test]
    fn a_descriptor_that_somebody_closed_is_not_used() {
        let mut ring = Ring::new();
        let data = hold(&mut ring, SIZE).unwrap();
        let entry = ring.find(data).unwrap();
        entry.exposed = true;
        let fd = entry.fd;
        // SAFETY: the entry's own descriptor. Its number now leads to a file that is not ours.
        unsafe {
            let other = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
            libc::dup3(other, fd, libc::O_CLOEXEC);
            libc::close(other);
        }
        ring.release(data);
        for _ in 0..100 {
            let other = hold(&mut ring, SIZE).unwrap();
            assert_ne!(other, data);
            ring.release(other);
        }
        assert_eq!(ring.entries.len(), 1);
        // SAFETY: the number that was put there above; closing it says whether it still is.
        assert_eq!(unsafe { libc::close(fd) }, 0);
    }
}
