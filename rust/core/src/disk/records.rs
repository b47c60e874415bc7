//! Single records: found, read, taken to be written.

use super::behind::Behind;
use super::files::OpenFiles;
use super::log::{self, LONGEST};
use super::schemas;
use super::store::DiskStore;
use crate::fault::{Fault, active as broken, reached};
use crate::segment::claim::{self, Orphans, is_claimed, lease_of};
use crate::segment::counters::Count;
use crate::segment::lease::Leases;
use crate::space::Record;
use crate::sys::pages::PAGE;
use rustix::io::Errno;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who wants a record that another process is about to write waits for so long.
const PATIENCE: Duration = Duration::from_millis(200);
/// And looks again after this time.
const NAP: Duration = Duration::from_millis(2);

/// Where a record is, and what must be read for it.
pub(crate) struct Found {
    record: Record,
    /// From the start of the file.
    at: u64,
    /// With its head.
    pub(crate) len: usize,
}

impl Found {
    /// Bytes of the pages that it lies in.
    pub(crate) fn room(&self) -> usize {
        (self.offset() + self.len).next_multiple_of(PAGE)
    }

    /// Where it begins in its first page.
    fn offset(&self) -> usize {
        (self.at % PAGE as u64) as usize
    }
}

impl DiskStore {
    /// Whether the record of sample `i` can be read.
    pub fn has(&self, i: usize) -> bool {
        self.space().find(i).is_some()
    }

    /// Whether it is not there, and nobody is about to write it.
    pub(crate) fn lacks(&self, i: usize) -> bool {
        // In this order: who writes ends its claim when the record is there.
        !is_claimed(self.space().slots().state(i)) && !self.has(i)
    }

    /// Where the record of sample `i` is. One that is about to be written is waited for, for a moment.
    pub(crate) fn find(&self, i: usize, deadline: Instant) -> Option<Found> {
        let record = self
            .space()
            .find(i)
            .or_else(|| self.is_coming(i, deadline).then(|| self.space().find(i)).flatten())?;
        let at = record.at as u64 - u64::from(record.region) * self.geometry().region_bytes;
        Some(Found { record, at, len: record.len })
    }

    /// Waits for who is about to write the record; whether it is worth to look again.
    fn is_coming(&self, i: usize, deadline: Instant) -> bool {
        let space = self.space();
        if !is_claimed(space.slots().state(i)) {
            return false;
        }
        let patience = PATIENCE.min(deadline.saturating_duration_since(Instant::now()));
        if space.leases().taken().is_some_and(|mine| lease_of(space.slots().state(i)) == Some(mine))
        {
            return self.behind.get().is_none_or(|behind| behind.wait_for(i, patience));
        }
        if !broken(Fault::WaitSilently) {
            space.call();
        }
        let began = Instant::now();
        while let Some(lease) = lease_of(space.slots().state(i)) {
            // Who died, or is stopped, may have left many: one look at each, and no wait.
            let is_dead = || space.leases().while_orphaned(lease, || ()).is_some();
            if began.elapsed() > patience
                || is_dead()
                || Leases::is_writer_stopped(&space.slots(), i)
            {
                return false;
            }
            std::thread::sleep(NAP);
        }
        true
    }

    /// What this process reads from: asked for once for many records.
    pub(crate) fn open_files(&self) -> &OpenFiles {
        self.files.here()
    }

    /// Reads the pages of a record: where it begins in them; `None` if it is gone. Whatever was read is
    /// believed only when its seal is checked.
    pub(crate) fn read(
        &self,
        files: &OpenFiles,
        found: &Found,
        pages: &mut [u8],
    ) -> rustix::io::Result<Option<usize>> {
        let (r, generation) = (u64::from(found.record.region), found.record.generation);
        let (start, room) = (found.offset(), found.room());
        // A file that was removed is cut. If others wrote here before this table did, they may have made
        // another one of that name.
        for anew in [false, true] {
            let (file, at) = ((r, generation, anew), found.at - start as u64);
            let got = match files.read(&self.folder, file, &mut pages[..room], at) {
                Ok(got) => got,
                // Its region was emptied, or somebody removed the folder.
                Err(Errno::NOENT) => return Ok(None),
                Err(errno) => return Err(errno),
            };
            if got >= start + found.len {
                return Ok(Some(start));
            }
        }
        Ok(None)
    }

    /// Forgets a record that was found and was none, so that it is loaded and written once more. If its
    /// region was emptied, or somebody is at it, there is nothing to forget.
    pub(crate) fn forget(&self, i: usize, found: &Found) {
        let space = self.space();
        let Some(lease) = space.lease().filter(|_| !broken(Fault::KeepDamaged)) else { return };
        if space.slots().claim(i, lease, false, &space.leases()) != claim::Claim::Claimed {
            return;
        }
        if space.find(i) == Some(found.record) {
            space.withdraw(i);
            reached("disk: withdrawn");
            space.uncount_record(found.record.region.into(), found.record.generation);
        }
        space.slots().abandon(i, lease);
    }

    /// Whether a record is there, or cannot be taken now; nothing if it is to be put.
    pub(crate) fn is_settled(&self, i: usize) -> Option<bool> {
        let space = self.space();
        if space.find(i).is_some() {
            return Some(true);
        }
        (space.is_full() || self.is_resting() || !self.writes()).then_some(false)
    }

    /// The longest record, with its head: a file has room for it and the first page of the log.
    pub fn longest(&self) -> u64 {
        self.geometry().region_bytes.saturating_sub(log::bytes(1)).min(LONGEST)
    }

    /// How often all was emptied.
    pub(crate) fn emptied(&self) -> u64 {
        self.space().emptied()
    }

    /// Takes a sealed record to be written; whether it is, or will be. It is not if all was emptied since
    /// `emptied` was this.
    pub(crate) fn put(
        self: &Arc<Self>,
        i: usize,
        since: u64,
        head: &[u8],
        parts: &[IoSlice<'_>],
        deadline: Instant,
    ) -> bool {
        if let Some(settled) = self.is_settled(i) {
            return settled;
        }
        let space = self.space();
        let len = head.len() as u64 + parts.iter().map(|part| part.len() as u64).sum::<u64>();
        if len > self.longest() {
            space.counters().add(Count::TooLarge, 1);
            return false;
        }
        let Some(lease) = space.lease() else { return false };
        match space.slots().claim(i, lease, false, &space.leases()) {
            claim::Claim::Claimed => {}
            claim::Claim::Busy => return true, // somebody is at it
            claim::Claim::Occupied | claim::Claim::Beyond => return false,
        }
        // What does not fit the rest of a region is room that nobody uses: little of it.
        let group_bytes = (self.geometry().region_bytes / 16) as usize;
        let behind = self.behind.get_or_make(|| Behind::new(group_bytes, self.calls()));
        let taken = space.find(i).is_none() && behind.push(self, i, since, head, parts, deadline);
        if !taken {
            space.slots().abandon(i, lease);
        }
        taken || space.find(i).is_some()
    }

    /// What records are made of.
    pub(crate) fn schemas(&self) -> Vec<Vec<u8>> {
        schemas::read(&self.folder.path.join("schemas"))
    }

    pub(crate) fn add_schema(&self, schema: &[u8]) -> rustix::io::Result<()> {
        if !self.writes() {
            return Err(Errno::ROFS);
        }
        schemas::append(&self.folder.path.join("schemas"), schema, self.budget())
    }

    /// Counts records that were asked for.
    pub(crate) fn note_reads(&self, hits: u64, misses: u64) {
        self.space().counters().add(Count::Hits, hits);
        self.space().counters().add(Count::Misses, misses);
    }
}
