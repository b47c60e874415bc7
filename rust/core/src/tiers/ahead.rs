//! Records that are read before they are asked for, where somebody said in which order they will be.
//!
//! ```text
//!   to come ── begin, some at a time ──► on their way ── who asks for one of them waits ──► there ──► asked for
//! ```
//!
//! What is on its way or there has a bound; each record that is asked for makes room for the next ones. A
//! record that comes up into memory is not kept here. One order at a time: the next call ends the last.

use super::fetch::Fetching;
use super::levels::{Fetched, Levels, ReadAhead};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Bytes that are on their way or there, about; and so many records at least and at most.
const BYTES: u64 = 64 << 20;
const FEWEST: u64 = 32;
const MOST: u64 = 4096;
/// So many are begun together.
const TOGETHER: usize = 16;

/// What this process reads ahead.
#[derive(Default)]
struct Ahead {
    levels: Weak<Levels>,
    plan: Mutex<Plan>,
}

#[derive(Default)]
struct Plan {
    to_come: VecDeque<usize>,
    on_their_way: VecDeque<(Vec<usize>, Fetching)>,
    there: HashMap<usize, Fetched>,
    /// Of the two, records at the most.
    most: usize,
}

impl Levels {
    /// Begins to read what levels below have of these samples, in this order. A process has one order: what
    /// is left of the one before is given up.
    pub fn prefetch(self: &Arc<Self>, indices: &[usize]) {
        if !self.has_more() {
            return;
        }
        let levels = Arc::downgrade(self);
        let ahead = self
            .ahead
            .get_or_make(|| Box::new(Ahead { levels: levels.clone(), ..Ahead::default() }));
        let most = self.filling_below().map_or(FEWEST, |below| {
            let each = below.bytes.div_ceil(below.records.max(1)).max(1);
            (BYTES / each).clamp(FEWEST, MOST)
        });
        let wanted =
            |&i: &usize| i < self.memory().geometry().dataset_len as usize && self.is_below(i);
        let to_come = indices.iter().copied().filter(wanted).collect();
        ahead.follow(to_come, most as usize);
    }
}

impl ReadAhead for Ahead {
    fn follow(&self, order: VecDeque<usize>, most: usize) {
        let plan = Plan { to_come: order, most, ..Plan::default() };
        let before = std::mem::replace(&mut *self.lock(), plan);
        drop(before); // waits for threads that are at it, and so without the lock
        self.begin_more();
    }

    fn take(&self, levels: &Levels, index: usize) -> Option<Fetched> {
        let mut plan = self.lock();
        let mut found = plan.there.remove(&index);
        if found.is_none() {
            let has = |(indices, _): &(Vec<usize>, Fetching)| indices.contains(&index);
            let which = plan.on_their_way.iter().position(has)?;
            let (indices, fetching) = plan.on_their_way.remove(which)?;
            drop(plan); // others read for themselves what they want of these
            let came = fetching.wait();
            plan = self.lock();
            for (i, fetched) in indices.into_iter().zip(came) {
                let Some(fetched) = fetched else { continue };
                if i == index {
                    found = Some(fetched);
                } else if levels.memory().find(i).is_some() || plan.most == 0 {
                    levels.reuse(fetched);
                } else {
                    plan.there.insert(i, fetched);
                }
            }
        }
        drop(plan);
        self.begin_more();
        found.filter(|fetched| levels.is_below(index) && levels.is_of_now(fetched))
    }
}

impl Ahead {
    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with as many of those to come as there is room for.
    fn begin_more(&self) {
        let Some(levels) = self.levels.upgrade() else { return };
        let mut plan = self.lock();
        loop {
            let waiting: usize = plan.on_their_way.iter().map(|(indices, _)| indices.len()).sum();
            let few = TOGETHER.min(plan.to_come.len());
            if few == 0 || waiting + plan.there.len() + few > plan.most {
                return;
            }
            let mut next: Vec<usize> = plan.to_come.drain(..few).collect();
            next.retain(|&i| levels.memory().find(i).is_none());
            if !next.is_empty() {
                let fetching = levels.begin_fetch_now(next.clone());
                plan.on_their_way.push_back((next, fetching));
            }
        }
    }
}
