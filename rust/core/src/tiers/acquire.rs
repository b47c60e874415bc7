//! The way of samples from where they are to a caller that wants them.
//!
//! ```text
//!   wanted ── begin ──┬─ in memory ───────────────────────────────────────► there
//!                     ├─ ours ──┬─ found below ──┬─ room in memory ───────► there
//!                     │         │                └─ no room ──────────────► given
//!                     │         └─ not below ── the caller loads it ── fill ──┬──► there
//!                     │                                                       ├─ below
//!                     │                                                       └─ the caller alone has it
//!                     └─ another process loads it ── wait ── begin, once more
//! ```
//!
//! Nobody else decides who loads what. A sample is claimed before anything below memory is asked, so
//! that one process of the node asks, loads and stores it; the claim ends when it is filled, when the
//! caller comes back without it, or with this object, or with this process. What others load is
//! waited for last, when there is nothing else to do, and for a bounded time (`records/waiting.rs`).

use super::levels::{Fetched, Levels, Since};
use crate::error::Result;
use crate::fault::{Fault, active as broken};
use crate::records::{Claim, Put};
use crate::sys::fork::Me;
use std::cell::LazyCell;
use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Samples that somebody wants.
pub struct Acquiring {
    levels: Arc<Levels>,
    wanted: Vec<(usize, State)>,
    /// Where each is among them.
    positions: HashMap<usize, usize>,
    /// Who claims: a forked child has nothing of its parent's.
    process: Me,
    /// What levels of all nodes may take of the caller's time; none once one was asked in vain.
    left: Duration,
    patience: Duration,
    /// Noted before the caller loads what it is given: what is emptied meanwhile is not filled with it.
    since: Since,
}

// Samples that are loaded in a thread are filled in it or in another.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Acquiring>();
};

/// Who stores a sample in memory that is the caller's to load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Storer {
    /// The caller: it is claimed.
    Caller,
    /// The process that was waited for in vain.
    Another,
    /// Nobody: memory takes nothing now.
    Nobody,
}

/// What is known of a sample.
enum State {
    /// Nothing yet.
    New,
    /// Another process is loading it.
    Elsewhere,
    /// It is to be found below, or loaded.
    Ours(Storer),
    /// It is not below, and to be loaded.
    NotBelow(Storer),
    /// The caller loads it.
    Loading(Storer),
    /// In memory, or the caller has it.
    There,
    /// It came from below, and memory did not take it.
    Given(Fetched),
}

/// What became of a sample that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// In memory.
    pub memory: Put,
    /// Whether a level below has taken it.
    pub below: bool,
}

/// What becomes of a sample that the caller is to load, if it puts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// It is stored, if there is room.
    Stored,
    /// Another process stores it.
    StoredElsewhere,
    /// Nobody takes it.
    Refused,
}

impl Levels {
    /// Begins with these samples; one that comes twice is wanted once. `patience` is the least time
    /// that another process's load is waited for.
    pub fn acquire(self: &Arc<Self>, indices: &[usize], patience: Duration) -> Acquiring {
        let mut wanted: Vec<(usize, State)> = Vec::with_capacity(indices.len());
        let mut positions = HashMap::with_capacity(indices.len());
        for &index in indices {
            positions.entry(index).or_insert_with(|| {
                wanted.push((index, State::New));
                wanted.len() - 1
            });
        }
        let (process, left) = (Me::now(), Levels::DEADLINE);
        let (levels, since) = (Arc::clone(self), Since::default());
        Acquiring { levels, wanted, positions, process, left, patience, since }
    }
}

impl Acquiring {
    /// The samples that the caller is to load now. Whoever comes back has filled those that it was
    /// given before, or does not want to. None left: all others are in memory, or `given`; or the
    /// caller wants to be let go, of which it knows (`sys/interrupt.rs`).
    ///
    /// The first call gives all that nobody else is loading; the next one waits for those that
    /// somebody is, and gives what did not come.
    pub fn next_to_load(&mut self) -> Vec<usize> {
        self.check_process();
        self.give_back_if(|state| match state {
            State::Loading(store) => Some(*store),
            _ => None,
        });
        self.begin(true);
        let ours = self.fetch_and_hand_out();
        if !ours.is_empty() {
            return ours;
        }
        for (index, state) in &mut self.wanted {
            if matches!(state, State::Elsewhere) {
                if self.levels.memory().wait(*index, self.patience) {
                    return Vec::new(); // the caller wants to be let go
                }
                *state = State::New;
            }
        }
        self.begin(false);
        self.fetch_and_hand_out()
    }

    /// Stores a sample that was loaded.
    pub fn fill(&mut self, index: usize, schema: u16, parts: &[IoSlice<'_>]) -> Result<Filled> {
        Ok(self.fill_many(&[(index, schema, parts)])?[0])
    }

    /// Stores samples that were loaded. Where one cannot be written, which is an error, the claims of
    /// those after it end with this object.
    pub fn fill_many(&mut self, records: &[(usize, u16, &[IoSlice<'_>])]) -> Result<Vec<Filled>> {
        self.check_process();
        let mut filled = Vec::with_capacity(records.len());
        for &(index, schema, parts) in records {
            // A claim ends when a level below has the sample, too: nobody loads it meanwhile.
            let memory = match self.to_store(index) {
                Storer::Caller if self.levels.has_more() => {
                    let since = Some(self.since.memory);
                    self.levels.memory().fill_claimed(index, schema, parts, since, &*self.levels)?
                }
                Storer::Caller => {
                    self.take(index);
                    self.levels.memory().fill_since(
                        index,
                        schema,
                        parts,
                        Some(self.since.memory),
                    )?
                }
                Storer::Another => Put::StoredElsewhere,
                Storer::Nobody => Put::Refused(false),
            };
            filled.push(Filled { memory, below: false });
        }
        if self.levels.has_more() {
            let all = self.levels.holds_all_below();
            let goes_down = |filled: &Filled| match filled.memory {
                Put::NoRoom | Put::TooLarge | Put::Refused(_) => true,
                Put::Stored => all,
                Put::StoredElsewhere => false,
            };
            let left: Vec<usize> = (0..filled.len()).filter(|&k| goes_down(&filled[k])).collect();
            let rest: Vec<_> = left.iter().map(|&k| records[k]).collect();
            let taken = self.levels.pass_down(&rest, &self.since, Levels::deadline());
            for (&k, taken) in left.iter().zip(taken) {
                filled[k].below = taken;
            }
        }
        if self.levels.has_all_nodes() {
            // Whatever this node has: others find it there.
            let ours: Vec<usize> =
                (0..filled.len()).filter(|&k| filled[k].memory != Put::StoredElsewhere).collect();
            let given: Vec<_> = ours.iter().map(|&k| records[k]).collect();
            let taken = self.levels.pass_on(&given, &self.since, Levels::deadline());
            ours.iter().zip(taken).for_each(|(&k, taken)| filled[k].below |= taken);
        }
        records.iter().for_each(|&(index, ..)| self.abandon(index));
        Ok(filled)
    }

    /// Asks levels below for what is not in memory: first for about so many bytes of it; if nothing of that is
    /// there, for the rest. What comes is `given`, or in memory. What does not, and what was not asked for, is
    /// for `fetch_rest` or `next_to_load`.
    pub fn fetch_some(&mut self, bytes: usize) {
        self.check_process();
        self.begin(true);
        if !self.levels.has_more() {
            return;
        }
        let first = self.levels.about_records(bytes);
        if self.fetch(first, &mut |_, fetched| Some(fetched)) == 0 {
            self.fetch(usize::MAX, &mut |_, fetched| Some(fetched));
        }
    }

    /// The same for all that was not asked for yet. `take` gets each record that comes, whether it is put into
    /// memory or not, and gives back what it has no use for.
    pub fn fetch_rest(&mut self, take: &mut dyn FnMut(usize, Fetched) -> Option<Fetched>) {
        self.check_process();
        self.begin(true);
        if self.levels.has_more() {
            self.fetch(usize::MAX, take);
        }
    }

    /// What came from below and is not in memory.
    pub fn all_given(&self) -> impl Iterator<Item = (usize, &Fetched)> {
        self.wanted.iter().filter_map(|(index, state)| match state {
            State::Given(fetched) => Some((*index, fetched)),
            _ => None,
        })
    }

    /// Says that the caller has a sample that came from below: its memory is used again.
    pub fn has(&mut self, index: usize) {
        let Some(&at) = self.positions.get(&index) else { return };
        let state = &mut self.wanted[at].1;
        if matches!(state, State::Given(_))
            && let State::Given(fetched) = std::mem::replace(state, State::There)
        {
            self.levels.reuse(fetched);
        }
    }

    /// Takes a record back that `fetch_rest` gave, for `given`.
    pub fn keep(&mut self, index: usize, fetched: Fetched) {
        match self.positions.get(&index).map(|&at| &mut self.wanted[at].1) {
            Some(state @ State::There) => *state = State::Given(fetched),
            _ => self.levels.reuse(fetched),
        }
    }

    /// The record of a sample that came from below and is not in memory.
    pub fn given(&self, index: usize) -> Option<&Fetched> {
        match &self.wanted[*self.positions.get(&index)?].1 {
            State::Given(fetched) => Some(fetched),
            _ => None,
        }
    }

    /// What becomes of a sample if it is filled; None unless the caller is to load it.
    pub fn outlook(&self, index: usize) -> Option<Outlook> {
        if self.process != Me::now() {
            return None;
        }
        let State::Loading(store) = self.wanted[*self.positions.get(&index)?].1 else {
            return None;
        };
        Some(match store {
            Storer::Caller => Outlook::Stored,
            Storer::Another => Outlook::StoredElsewhere,
            Storer::Nobody if self.levels.has_more() => Outlook::Stored,
            Storer::Nobody => Outlook::Refused,
        })
    }

    /// Gives one back that was to be loaded and will not be filled.
    pub fn abandon(&mut self, index: usize) {
        self.check_process();
        if self.take(index) == Storer::Caller {
            self.levels.memory().abandon(index);
        }
    }

    /// Gives back what was to be loaded and was not filled.
    pub fn give_back(&mut self) {
        self.give_back_if(|state| match state {
            State::Loading(store) | State::Ours(store) | State::NotBelow(store) => Some(*store),
            _ => None,
        });
    }

    fn give_back_if(&mut self, which: impl Fn(&State) -> Option<Storer>) {
        let ours = self.process == Me::now();
        for (index, state) in &mut self.wanted {
            if let Some(store) = which(state) {
                if store == Storer::Caller && ours && !broken(Fault::KeepClaims) {
                    self.levels.memory().abandon(*index);
                }
                *state = State::There;
            }
        }
    }

    /// In a child, its parent's claims are its parent's.
    fn check_process(&mut self) {
        if self.process == Me::now() {
            return;
        }
        self.process = Me::now();
        for (_, state) in &mut self.wanted {
            if matches!(state, State::Ours(_) | State::NotBelow(_) | State::Loading(_)) {
                *state = State::New;
            }
        }
    }

    fn begin(&mut self, may_wait: bool) {
        let memory = self.levels.memory();
        let lease = LazyCell::new(|| memory.lease());
        for (index, state) in &mut self.wanted {
            if matches!(state, State::New) {
                *state = match memory.begin_as(*index, || *lease) {
                    Claim::Present => State::There,
                    Claim::LoadAndStore => State::Ours(Storer::Caller),
                    Claim::LoadOnly => State::Ours(Storer::Nobody),
                    Claim::LoadingElsewhere if may_wait => State::Elsewhere,
                    Claim::LoadingElsewhere => State::Ours(Storer::Another),
                };
            }
        }
    }

    /// Looks below for what is ours; the rest is the caller's to load.
    fn fetch_and_hand_out(&mut self) -> Vec<usize> {
        if self.levels.has_more() {
            self.fetch(usize::MAX, &mut |_, fetched| Some(fetched));
        }
        let mut handed_out = Vec::new();
        if self.wanted.iter().any(|(_, s)| matches!(s, State::Ours(_) | State::NotBelow(_))) {
            self.since = self.levels.since();
        }
        for (index, state) in &mut self.wanted {
            if let State::Ours(store) | State::NotBelow(store) = *state {
                *state = State::Loading(store);
                handed_out.push(*index);
            }
        }
        handed_out
    }

    /// Asks levels below for so many at the most of those that are ours: how many came. `take` is offered each.
    fn fetch(
        &mut self,
        most: usize,
        take: &mut dyn FnMut(usize, Fetched) -> Option<Fetched>,
    ) -> usize {
        let levels = Arc::clone(&self.levels);
        for (index, state) in &mut self.wanted {
            if let State::Ours(store) = *state
                && levels.is_nowhere_below(*index)
            {
                *state = State::NotBelow(store);
            }
        }
        let positions: Vec<usize> = (0..self.wanted.len())
            .filter(|&k| matches!(self.wanted[k].1, State::Ours(_)))
            .take(most)
            .collect();
        if positions.is_empty() {
            return 0;
        }
        // What is not on this node is asked for all at once, by one thread: answers come in the order of questions.
        let is_near = |k: &usize| !levels.has_all_nodes() || levels.is_below(self.wanted[*k].0);
        let (near, far): (Vec<usize>, Vec<usize>) = positions.iter().partition(|&k| is_near(k));
        let of = |these: &[usize]| these.iter().map(|&k| self.wanted[k].0).collect::<Vec<usize>>();
        let (near_indices, far_indices) = (of(&near), of(&far));
        let mut came = 0;
        let left = &mut self.left;
        let mut arrived = |k: usize, fetched: Fetched| {
            let (index, state) = &mut self.wanted[k];
            let State::Ours(store) = *state else { return Some(fetched) };
            came += 1;
            // A write that fails leaves what came to the caller.
            let stays = store == Storer::Caller && levels.rise(*index, &fetched);
            if !stays && store != Storer::Another {
                levels.keep_near(*index, &fetched);
            }
            if store == Storer::Caller {
                levels.memory().abandon(*index);
            }
            *state = State::There;
            let left = take(*index, fetched)?;
            if stays {
                return Some(left);
            }
            *state = State::Given(left);
            None
        };
        let by_threads = near.len() > 1 && levels.readers() > 1;
        let fetching = by_threads.then(|| levels.begin_claimed(near_indices.clone()));
        if !far.is_empty() && !left.is_zero() {
            let began = Instant::now();
            let mut arrived = |which: usize, fetched| arrived(far[which], fetched);
            let in_time = levels.fetch_until(&far_indices, began + *left, &mut arrived);
            let spent = if in_time || broken(Fault::AskOnInVain) { began.elapsed() } else { *left };
            *left = left.saturating_sub(spent);
        }
        if let Some(fetching) = fetching {
            for (k, fetched) in near.iter().zip(fetching.wait()) {
                if let Some(unused) = fetched.and_then(|fetched| arrived(*k, fetched)) {
                    levels.reuse(unused);
                }
            }
        } else {
            levels.fetch(&near_indices, &mut |which, fetched| arrived(near[which], fetched));
        }
        for k in positions {
            let state = &mut self.wanted[k].1;
            if let State::Ours(store) = *state {
                *state = State::NotBelow(store);
            }
        }
        came
    }

    /// Who stores a sample that the caller was to load.
    fn to_store(&self, index: usize) -> Storer {
        match self.positions.get(&index).map(|&at| &self.wanted[at].1) {
            Some(State::Loading(store)) => *store,
            _ => Storer::Another,
        }
    }

    /// The same, and the caller has it now.
    fn take(&mut self, index: usize) -> Storer {
        let store = self.to_store(index);
        if let Some(&at) = self.positions.get(&index)
            && matches!(self.wanted[at].1, State::Loading(_))
        {
            self.wanted[at].1 = State::There;
        }
        store
    }
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        self.give_back();
        // The next records are read into their memory.
        for (_, state) in self.wanted.drain(..) {
            if let State::Given(fetched) = state {
                self.levels.reuse(fetched);
            }
        }
    }
}
