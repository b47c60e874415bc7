//! Which files were just given to whom.
//!
//! A row per lease: which two files each thread of its holder was given last. A row is there once
//! somebody has its lease.
//!
//! # When is it safe to remove a file?
//! When nobody is about to open it. A reader notes the file in its row, then looks at the flags; who
//! removes a file sets EVICTING, then looks at the rows of all living processes. One of the two sees
//! the other (both use SeqCst). A file that is open already may be removed: its reader keeps it.
//! Who has no row makes itself seen in another way: see domain.rs.

use crate::files::table::FileTable;
use crate::segment::claim::{LEASES, Lease, Orphans};
use crate::segment::parts::PAGE;
use crate::segment::table_layout::{ROW_THREADS, ROW_WORDS};
use crate::sys::fork;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

impl FileTable {
    /// Notes that this thread is about to use file `i`, so that nobody removes it. It keeps the last
    /// two files of every thread. False if this process has no row.
    #[inline]
    pub(crate) fn give_out(&self, i: usize) -> bool {
        // On the path of every hit.
        let lease = self.leases().taken().or_else(|| self.lease());
        let Some(row) = lease.and_then(|lease| self.row(lease)) else { return false };
        let column = 2 * thread();
        let (last, before) = (&row[column], &row[column + 1]);
        let (note, seen) = (i as u64 + 1, last.load(Ordering::Relaxed));
        if seen != note {
            before.store(seen, Ordering::SeqCst);
            // SYNC POINT given: SeqCst here and in `is_given_out`; see "When is it safe".
            last.store(note, Ordering::SeqCst);
        }
        true
    }

    /// Whether a living process was given file `i` and may be about to open it.
    pub(crate) fn is_given_out(&self, i: usize) -> bool {
        let note = i as u64 + 1;
        let mine = self.lease();
        (0..LEASES).any(|lease| {
            let Some(row) = self.row(lease) else { return false };
            row.iter().any(|word| word.load(Ordering::SeqCst) == note)
                && (mine == Some(lease) || self.leases().while_orphaned(lease, || ()).is_none())
        })
    }

    /// This process's lease; its row is there, if there is room for it, and empty when it gets one.
    #[inline]
    pub(super) fn lease(&self) -> Option<Lease> {
        let clean = |lease| {
            let _no_room = self.take_pages(self.row_at(lease), 8 * ROW_WORDS);
            let row = self.row(lease).unwrap_or_default();
            row.iter().for_each(|word| word.store(0, Ordering::SeqCst));
        };
        self.leases().mine_after(|| self.slots(), clean)
    }

    /// Whether this process can lock. Else it may read what is there, and no more.
    pub(crate) fn can_lock(&self) -> bool {
        self.lease().is_some()
    }

    fn row_at(&self, lease: Lease) -> u64 {
        self.layout.rows_at + u64::from(lease) * 8 * ROW_WORDS
    }

    #[inline]
    pub(super) fn row(&self, lease: Lease) -> Option<&[AtomicU64]> {
        let at = self.row_at(lease);
        // A row does not cross a page.
        self.is_present(at).then(|| self.segment.mapping().words(at as usize, ROW_WORDS as usize))
    }
}

const _: () = assert!((PAGE as u64).is_multiple_of(8 * ROW_WORDS));

/// The columns of a row that threads of this process have, as bits; above them the number of the
/// process that this is about: a forked child has none of its parent's threads.
static TAKEN: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(ROW_THREADS == 32);

/// A thread's column, given back when the thread ends.
struct Column {
    /// As in `TAKEN`: the process, then the bit of the column; 0 for a column that others may have too.
    taken: Cell<u64>,
    column: Cell<usize>,
}

/// The column of this thread in a row. More threads than columns share them, which protects less.
fn thread() -> usize {
    thread_local! {
        static COLUMN: Column = const { Column { taken: Cell::new(0), column: Cell::new(0) } };
    }
    let found = COLUMN.try_with(|mine| {
        if mine.taken.get() >> 32 != u64::from(fork::process()) {
            mine.take();
        }
        mine.column.get()
    });
    found.unwrap_or(0) // a thread that is ending
}

impl Column {
    #[cold]
    fn take(&self) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        // One after the other, so that what a thread was given stays a while after its end.
        let first = NEXT.fetch_add(1, Ordering::Relaxed) % ROW_THREADS as usize;
        let process = u64::from(fork::process()) << 32;
        self.column.set(first);
        self.taken.set(process);
        let free = |taken: u64| {
            let taken = if taken >> 32 == process >> 32 { taken as u32 } else { 0 };
            let next = taken.rotate_right(first as u32).trailing_ones() as usize;
            (next < ROW_THREADS as usize).then(|| (taken, (first + next) % ROW_THREADS as usize))
        };
        let more =
            |all: u64| free(all).map(|(taken, column)| process | u64::from(taken) | 1 << column);
        if let Ok(before) = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            && let Some((_, column)) = free(before)
        {
            self.column.set(column);
            self.taken.set(process | 1 << column);
        }
    }
}

impl Drop for Column {
    fn drop(&mut self) {
        let (process, bit) = (self.taken.get() >> 32, self.taken.get() & u64::from(u32::MAX));
        let less = |all: u64| (all >> 32 == process).then_some(all & !bit);
        let _others = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}
