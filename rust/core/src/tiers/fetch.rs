//! Records of many samples from the levels below, asked for by several threads at once.
//!
//! ```text
//!   asked for ── part by part, each by one thread ──► read ──┬─ taken: where it was read, by that thread
//!                                                            └─ found: for who waits
//! ```
#![allow(unsafe_code)] // threads write different places of one list

use super::levels::{Fetched, Levels};
use crate::sys::thread_pool::{Posted, Threads, post};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// So many parts for each thread, so that one that waits does not keep the others waiting at the end.
const PARTS_PER_READER: usize = 4;
/// So many samples in a part at most: what is read of them is soon done with.
const MOST: usize = 16;

/// Records that are on their way. They come whether somebody waits or not.
pub struct Fetching {
    posted: Posted,
    found: Arc<Found>,
    taker: Arc<OnceLock<Arc<dyn Taker>>>,
}

/// Has use for records as soon as they are read, while they lie in the caches of the processor that read them.
pub trait Taker: Send + Sync {
    /// Takes of these records, each with its position, what it has use for; the rest is for who waits. Threads
    /// that read call it, several at the same time; in a forked child who waits calls it for all of them again.
    fn take(&self, records: &mut Vec<(usize, Fetched)>);
}

/// What has come, by position.
struct Found(Box<[UnsafeCell<Option<Fetched>>]>);

// SAFETY: each place is written by the thread that does its part, and read when all are done.
unsafe impl Sync for Found {}
// SAFETY: as above.
unsafe impl Send for Found {}

/// A way to ask the levels below.
type Fetch = fn(&Levels, &[usize], &mut dyn FnMut(usize, Fetched) -> Option<Fetched>);

impl Levels {
    /// Asks the levels below for these samples, on threads that go on by themselves. What should be in memory
    /// is put there.
    pub fn begin_fetch(self: &Arc<Self>, indices: Vec<usize>) -> Fetching {
        self.begin(indices, true, Self::fetch)
    }

    /// The same, whatever was read ahead of them: for who reads ahead.
    pub(super) fn begin_fetch_now(self: &Arc<Self>, indices: Vec<usize>) -> Fetching {
        self.begin(indices, true, Self::fetch_now)
    }

    /// The same for samples that are claimed: whoever claimed them puts them where they belong.
    pub(super) fn begin_claimed(self: &Arc<Self>, indices: Vec<usize>) -> Fetching {
        self.begin(indices, false, Self::fetch)
    }

    fn begin(self: &Arc<Self>, indices: Vec<usize>, rise: bool, fetch: Fetch) -> Fetching {
        let readers = self.readers();
        let each = indices.len().div_ceil(readers * PARTS_PER_READER).clamp(1, MOST);
        let parts = indices.len().div_ceil(each);
        let found: Arc<Found> =
            Arc::new(Found(indices.iter().map(|_| UnsafeCell::new(None)).collect()));
        let taker: Arc<OnceLock<Arc<dyn Taker>>> = Arc::default();
        let (levels, into, takes) = (Arc::clone(self), Arc::clone(&found), Arc::clone(&taker));
        let work = move |part: usize| {
            let range = part * each..indices.len().min((part + 1) * each);
            let Range { start, .. } = range;
            if indices.len() > 1 {
                levels.expect(&indices[range.clone()]);
            }
            let mut came = Vec::with_capacity(range.len());
            fetch(&levels, &indices[range], &mut |which, fetched| {
                if rise {
                    levels.claim_and_rise(indices[start + which], &fetched);
                }
                came.push((start + which, fetched));
                None
            });
            if let Some(taker) = takes.get() {
                taker.take(&mut came);
            }
            for (at, fetched) in came {
                // SAFETY: a place of this part, which one thread does.
                unsafe { *into.0[at].get() = Some(fetched) };
            }
        };
        Fetching { posted: post(Threads::Reading, parts, readers, Box::new(work)), found, taker }
    }
}

impl Fetching {
    /// From now on, what is read is offered to this one first.
    pub fn offer_to(&self, taker: Arc<dyn Taker>) {
        let _only_the_first = self.taker.set(taker);
    }

    /// What was found and nobody took, by position; the caller helps to get it.
    pub fn wait(self) -> Vec<Option<Fetched>> {
        self.posted.wait();
        // SAFETY: all parts are done, and nobody comes back to them.
        self.found.0.iter().map(|place| unsafe { (*place.get()).take() }).collect()
    }
}
