//! The files of regions, as this process has them open.

use super::folder::Folder;
use crate::sys::direct::DirectFile;
use crate::sys::per_process::PerProcess;
use std::sync::{Arc, Mutex, PoisonError};

/// One file per region, of its present generation.
pub(super) struct Files {
    open: PerProcess<Box<[Region]>>,
    regions: usize,
}

/// The generation, and its file.
type Region = Mutex<Option<(u32, Arc<DirectFile>)>>;

impl Files {
    pub(super) fn new(regions: u64) -> Self {
        Self { open: PerProcess::new(), regions: regions as usize }
    }

    /// The file of region `r` in that generation, opened `anew` or as it is. That of another, if it is open,
    /// is closed: nobody wants what was there.
    pub(super) fn get(
        &self,
        folder: &Folder,
        r: u64,
        generation: u32,
        anew: bool,
    ) -> rustix::io::Result<Arc<DirectFile>> {
        let open = self.open.get_or_make(|| (0..self.regions).map(|_| Mutex::default()).collect());
        let mut slot = open[r as usize].lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Closes files of regions that have another generation by now: nobody wants them.
    pub(super) fn close_old(&self, generation: impl Fn(u64) -> u32) {
        for (r, slot) in self.open.get().into_iter().flatten().enumerate() {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if slot.as_ref().is_some_and(|(is, _)| *is != generation(r as u64)) {
                *slot = None;
            }
        }
    }
}
