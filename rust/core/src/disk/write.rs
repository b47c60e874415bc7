//! Records on their way to a file, many in one write.

use super::behind::{Group, Item, Last, Writer};
use super::log::{self, ENTRY};
use super::store::DiskStore;
use crate::error::{Error, Kind};
use crate::fault::{Fault, active as broken, reached};
use crate::segment::counters::Count;
use crate::segment::lease::now;
use crate::space::{Ground, Reserved, pack};
use crate::sys::direct::DirectFile;
use crate::sys::private_file::{allocate, open_private, write_all};
use rustix::fd::AsFd;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// For so long nothing is written after it went wrong.
const REST: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Files as the ground of regions. A file is made while the one before it is there, and gets its room when
/// that has gone: so nothing goes where no file can be made, and there is never more than the budget.
struct FileGround<'a> {
    store: &'a DiskStore,
    /// Why the last file could not be had.
    failed: Cell<Option<Errno>>,
}

impl<'a> FileGround<'a> {
    fn new(store: &'a DiskStore) -> Self {
        Self { store, failed: Cell::new(None) }
    }

    /// Whether it was done; else what there is of the file goes.
    fn is_done(&self, done: rustix::io::Result<()>, r: u64, generation: u32) -> bool {
        if let Err(errno) = done {
            self.store.folder.remove(r, generation);
            self.failed.set(Some(errno));
        }
        done.is_ok()
    }

    /// An empty file for a region, and its log.
    fn make_files(&self, r: u64, generation: u32) -> rustix::io::Result<()> {
        let folder = &self.store.folder;
        for path in [folder.data(r, generation), folder.log(r, generation)] {
            open_private(&path, OFlags::WRONLY | OFlags::EXCL)?;
            reached("disk: file made");
        }
        Ok(())
    }

    /// All the room that a region will need.
    fn allocate(&self, r: u64, generation: u32) -> rustix::io::Result<()> {
        let data = open_private(&self.store.folder.data(r, generation), OFlags::WRONLY)?;
        let bytes = self.store.geometry().region_bytes;
        match allocate(data.as_fd(), 0, bytes) {
            // Then the budget holds by length alone, and a full disk is noticed later.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => rustix::fs::ftruncate(&data, bytes),
            done => done,
        }
    }
}

impl Ground for FileGround<'_> {
    fn prepare(&self, r: u64, next: u32) -> bool {
        if !self.store.folder.is_ours() {
            self.failed.set(Some(Errno::STALE));
            return false;
        }
        self.store.folder.remove(r, next); // of somebody who was killed right here
        self.is_done(self.make_files(r, next), r, next)
    }

    fn settle(&self, r: u64, generation: u32) -> bool {
        for (region, old, _) in self.store.folder.files() {
            if region == r && old != generation {
                self.store.folder.remove(region, old);
            }
        }
        let allocated = self.allocate(r, generation);
        reached("disk: allocated");
        self.is_done(allocated, r, generation)
    }

    fn log_bytes(&self, places: u64) -> u64 {
        if broken(Fault::LogBesides) { 0 } else { log::bytes(places) }
    }

    /// A region that was emptied has no file.
    fn is_firm(&self) -> bool {
        false
    }
}

impl Writer for DiskStore {
    fn write(&self, group: &mut Group, last: &mut Last) {
        let written = self.try_write(group, last);
        let space = self.space();
        let Err(errno) = written else { return self.end_claims(group) };
        if let Some(errno) = errno {
            *last = None;
            self.note_trouble("write to", errno);
            space.rest(now() + REST.as_nanos() as u64);
        }
        self.give_up(group);
    }

    fn give_up(&self, group: &Group) {
        self.space().counters().add(Count::Dropped, group.items.len() as u64);
        self.end_claims(group);
    }
}

impl DiskStore {
    fn end_claims(&self, group: &Group) {
        let space = self.space();
        if let Some(lease) = space.lease() {
            let slots = space.slots();
            group.items.iter().for_each(|item| slots.abandon(item.index, lease));
        }
    }

    /// Empties the store: all files go.
    pub fn clear(&self) -> crate::Result<()> {
        let busy = || {
            let message = "others keep this disk level from being cleared; try again later";
            Error::new(Kind::State, message)
        };
        if !self.writes() {
            let path = self.folder.path.display();
            let message = format!(
                "others write to {path}: with another policy or other keys, or where this node does not \
                 see them; end them first"
            );
            return Err(Error::new(Kind::State, message));
        }
        let space = self.space();
        let lease = space.lease().ok_or_else(busy)?;
        self.flush(Duration::from_secs(10));
        space.empty_all(lease, &FileGround::new(self)).ok_or_else(busy)?;
        for (region, generation, _) in self.folder.files() {
            if self.folder.is_ours() && self.is_past(region, generation) {
                self.folder.remove(region, generation);
            }
        }
        self.files.close_old(|r| space.generation(r, Ordering::Acquire));
        Ok(())
    }

    /// Whether a file is of an earlier generation of its region, or of no region. One of a later generation
    /// is being made.
    fn is_past(&self, region: u64, generation: u32) -> bool {
        region >= self.geometry().regions
            || generation < self.space().generation(region, Ordering::Acquire)
    }

    /// Whether nothing is written for a while, because it went wrong lately.
    pub(super) fn is_resting(&self) -> bool {
        self.space().resting() > now()
    }

    /// An error is that of the disk, or none if the disk has none and there is no room.
    fn try_write(&self, group: &mut Group, last: &mut Last) -> Result<(), Option<Errno>> {
        if group.items.is_empty() {
            return Ok(());
        }
        // What was queued before it went wrong would go wrong, too, each group after its own while.
        if self.is_resting() {
            return Err(None);
        }
        let space = self.space();
        let lease = space.lease().ok_or(None)?;
        let ground = FileGround::new(self);
        let (bytes, places) = (group.close() as u64, group.items.len() as u64);
        let reserved =
            space.reserve(lease, bytes, places, &ground).map_err(|_no_room| ground.failed.get())?;
        let (r, generation) = (reserved.region, reserved.generation);
        let written = self.write_to(&reserved, group, last);
        drop(reserved);
        if space.generation(r, Ordering::Acquire) != generation {
            *last = None; // a file that is open takes room
            // Emptied meanwhile: that its files are gone is no trouble.
            return written.map_err(|_gone| None);
        }
        written.map_err(Some)
    }

    /// Writes the records of a group to where there is room for them.
    fn write_to(
        &self,
        reserved: &Reserved<'_>,
        group: &Group,
        last: &mut Last,
    ) -> rustix::io::Result<()> {
        let space = self.space();
        let (r, generation) = (reserved.region, reserved.generation);
        // Files are known by their names, which others may have given to theirs.
        if !self.folder.is_ours() {
            return Err(Errno::STALE);
        }
        let start = reserved.at - r * self.geometry().region_bytes;
        let seed = log::seed(self.fingerprint(), r, generation);
        // What was brought before others emptied all is not of now, and its room a gap.
        let now = space.emptied();
        let of_now = |item: &&Item| item.since == now || broken(Fault::OutliveClear);
        let entries: Vec<u8> = group
            .items
            .iter()
            .filter(of_now)
            .flat_map(|item| {
                let (key, _) = self.identity(item.index);
                log::Entry { key, at: start + item.at as u64, len: item.len as u64 }.encode(seed)
            })
            .collect();
        if broken(Fault::LogFirst) {
            self.write_log(reserved, &entries)?;
        }
        reached("disk: reserved");
        if last.as_ref().is_none_or(|(region, of, _)| (*region, *of) != (r, generation)) {
            let file = DirectFile::open(&self.folder.data(r, generation), true)?;
            *last = Some((r, generation, file));
        }
        if let Some((_, _, file)) = last {
            file.write(group.pages(), start)?;
            reached("disk: written");
            self.give_to_log(file, reserved.place, group.items.len() as u64)?;
        }
        if !broken(Fault::LogFirst) {
            self.write_log(reserved, &entries)?;
        }
        reached("disk: logged");
        for item in group.items.iter().filter(of_now) {
            let words = pack(reserved.at + item.at as u64, item.len as u64, 0, generation);
            space.announce(item.index, words);
            space.count_record(r, generation);
            reached("disk: announced");
            space.publish(item.index, words);
            space.counters().add(Count::Bytes, item.len as u64);
        }
        space.counters().add(Count::Fills, (entries.len() / ENTRY) as u64);
        Ok(())
    }

    /// Has the end of a file, which nobody writes to, make room for what its log grows by.
    fn give_to_log(&self, file: &DirectFile, place: u64, places: u64) -> rustix::io::Result<()> {
        let (before, after) = (log::bytes(place), log::bytes(place + places));
        if before == after || broken(Fault::LogBesides) {
            return Ok(());
        }
        file.give_back(self.geometry().region_bytes - after, after - before)
    }

    fn write_log(&self, reserved: &Reserved<'_>, entries: &[u8]) -> rustix::io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let path = self.folder.log(reserved.region, reserved.generation);
        let log = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        write_all(log.as_fd(), entries, reserved.place * ENTRY as u64)
    }
}
