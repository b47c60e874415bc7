//! The files of regions, as this process has them open: one descriptor each, and a few more.

use super::folder::Folder;
use crate::fault::{Fault, active as broken};
use crate::sys::direct::DirectFile;
use crate::sys::per_process::PerProcess;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// So many files may be read both ways at the same time, past the page cache and from it.
const BOTH_WAYS: usize = 2;

/// One file per region, of its present generation.
pub(super) struct Files {
    open: PerProcess<OpenFiles>,
    regions: usize,
}

/// Files that this process has open.
pub(crate) struct OpenFiles {
    regions: Box<[Region]>,
    /// Those that are read both ways, the oldest first.
    both: Mutex<VecDeque<Arc<DirectFile>>>,
}

/// The generation, and its file.
type Region = Mutex<Option<(u32, Arc<DirectFile>)>>;

impl Files {
    pub(super) fn new(regions: u64) -> Self {
        Self { open: PerProcess::new(), regions: regions as usize }
    }

    /// What this process has open: asked for once for many reads, which takes a system call.
    pub(super) fn here(&self) -> &OpenFiles {
        self.open.get_or_make(|| OpenFiles {
            regions: (0..self.regions).map(|_| Mutex::default()).collect(),
            both: Mutex::default(),
        })
    }

    /// Closes files of regions that have another generation by now: nobody wants them.
    pub(super) fn close_old(&self, generation: impl Fn(u64) -> u32) {
        let Some(open) = self.open.get() else { return };
        open.both.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for (r, slot) in open.regions.iter().enumerate() {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if slot.as_ref().is_some_and(|(is, _)| *is != generation(r as u64)) {
                *slot = None;
            }
        }
    }
}

impl OpenFiles {
    /// Reads pages of region `r` in that generation, from a file that is opened `anew` or as it is. That of
    /// another, if it is open, is closed: nobody wants what was there.
    pub(super) fn read(
        &self,
        folder: &Folder,
        (r, generation, anew): (u64, u32, bool),
        pages: &mut [u8],
        at: u64,
    ) -> rustix::io::Result<usize> {
        let file = self.get(folder, r, generation, anew)?;
        let got = file.read(pages, at);
        if file.has_both() && !broken(Fault::KeepBothWays) {
            self.note_both(file);
        }
        got
    }

    /// Has a stretch of that file read into the page cache, unless the record in it is there.
    pub(super) fn ask_for(
        &self,
        folder: &Folder,
        (r, generation): (u64, u32),
        record: Range<u64>,
        stretch: Range<u64>,
    ) -> rustix::io::Result<()> {
        self.get(folder, r, generation, false)?.ask_for(record, stretch)
    }

    fn get(
        &self,
        folder: &Folder,
        r: u64,
        generation: u32,
        anew: bool,
    ) -> rustix::io::Result<Arc<DirectFile>> {
        let mut slot = self.regions[r as usize].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((is, file)) = &*slot
            && *is == generation
            && !anew
        {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(DirectFile::open(&folder.data(r, generation), false)?);
        *slot = Some((generation, Arc::clone(&file)));
        Ok(file)
    }

    /// Takes note of a file with both ways open; the oldest of these keeps the one that it was read by last.
    fn note_both(&self, file: Arc<DirectFile>) {
        let mut both = self.both.lock().unwrap_or_else(PoisonError::into_inner);
        if both.iter().any(|noted| Arc::ptr_eq(noted, &file)) {
            return;
        }
        both.push_back(file);
        if both.len() > BOTH_WAYS {
            both.pop_front().into_iter().for_each(|oldest| oldest.close_one());
        }
    }
}
