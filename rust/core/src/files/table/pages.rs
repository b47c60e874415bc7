//! Pages of the table that are taken as they are needed.
//!
//! Most of a table is a hole of its file. To touch a hole through the mapping takes a page, also to
//! read from it, and where there is none left that is a SIGBUS. So a page is allocated by a call that
//! can say no, then its bit is set, and nobody touches a page whose bit is not set.

use crate::fault::{Fault, active as broken};
use crate::files::table::FileTable;
use crate::segment::parts::PAGE;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why nothing more can be noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The table has no more entries.
    Table,
    /// There is no more memory for it.
    Memory(Errno),
}

impl FileTable {
    /// Whether the page at `at` can be touched.
    #[inline]
    pub(super) fn is_present(&self, at: u64) -> bool {
        let (word, bit) = self.bit_of(at);
        // SYNC POINT present: Acquire here, Release in `take_pages`.
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Makes sure that `len` bytes at `at` can be touched.
    pub(super) fn take_pages(&self, at: u64, len: u64) -> Result<(), NoRoom> {
        let page = PAGE as u64;
        for at in (at / page * page..at + len).step_by(PAGE) {
            if self.is_present(at) {
                continue;
            }
            // Again what somebody has allocated already does no harm, and keeps what is there.
            if !broken(Fault::TouchHoles) {
                self.segment.reserve(at, page).map_err(NoRoom::Memory)?;
            }
            let (word, bit) = self.bit_of(at);
            word.fetch_or(bit, Ordering::Release);
        }
        Ok(())
    }

    #[inline]
    fn bit_of(&self, at: u64) -> (&AtomicU64, u64) {
        let page = at as usize / PAGE;
        let at = self.layout.present_at as usize + page / 64 * 8;
        (&self.segment.mapping().words(at, 1)[0], 1 << (page % 64))
    }
}
