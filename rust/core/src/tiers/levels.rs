//! Memory and what is below it.
//!
//! A record comes up checked: the seal (unless its tier has compared all of it with a tag, which is more), the key,
//! the dataset, and that its schema asks for no pickle and for no class that is not known here (`classes.rs`),
//! whatever wrote it. A record goes down sealed, if its schema asks for no pickle. The seal finds damage; it is no
//! proof of who wrote a record.
//! Trouble of a tier is a miss that is counted; its first words are kept for whoever tells people.

use super::buffers::Buffers;
use super::classes::{KnownClasses, Verdict, travels};
use super::tier::{Filling, Lent, Sealed, Sink, Tier, TierStats};
use crate::fault::{Fault, active as broken};
use crate::records::portable::{self, HEAD, Head};
use crate::records::{INLINE, MAX_RECORD, RecordStore};
use crate::sys::pages::Pages;
use crate::sys::per_process::PerProcess;
use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Memory, and the tiers below it, the nearest first.
pub struct Levels {
    memory: Arc<RecordStore>,
    below: Vec<Level>,
    /// Memory that records were read into before. Only tried to lock, because a forked child may find it
    /// locked by a thread that it does not have.
    buffers: Mutex<Buffers>,
    /// Schemas that may come up, by content hash, with their numbers in memory. As above.
    known: Mutex<HashMap<u128, u16>>,
    /// Classes that may come up. As above.
    classes: Mutex<KnownClasses>,
    /// What a record from below takes, about; 0 before the first.
    typical: AtomicUsize,
    /// What this process reads before it is asked for.
    pub(super) ahead: PerProcess<Box<dyn ReadAhead>>,
}

/// Records that are read before they are asked for.
pub(super) trait ReadAhead: Send + Sync {
    /// From here on these samples, in this order; so many records at the most are on their way or there.
    fn follow(&self, order: VecDeque<usize>, most: usize);

    /// The record of a sample, if it was read ahead, is still below, and nothing was emptied since.
    fn take(&self, levels: &Levels, index: usize) -> Option<Fetched>;
}

/// One tier, and what this process saw of it.
struct Level {
    tier: Box<dyn Tier>,
    /// As the tier says it.
    of_all_nodes: bool,
    /// Schemas that this process gave to it, by their numbers in memory. Only tried to lock, as above.
    told: Mutex<HashMap<u16, u128>>,
    fetched: AtomicU64,
    damaged: AtomicU64,
    errors: AtomicU64,
    passed_down: AtomicU64,
    news: Mutex<Option<String>>,
}

/// What this process saw of a tier, beside what that says itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelStats {
    /// What the tier says.
    pub tier: TierStats,
    /// Records that came from it and were whole.
    pub fetched: u64,
    /// Records that came from it and were something else.
    pub damaged: u64,
    /// Calls that failed.
    pub errors: u64,
    /// Records that it took.
    pub passed_down: u64,
}

/// A record from below, for the caller: it did not find room in memory, or nobody may store it now.
pub struct Fetched {
    /// The number of its schema in memory, or INLINE.
    pub schema: u16,
    memory: Pages,
    /// Where its bytes lie.
    at: Range<usize>,
    /// Which of the levels below it came from.
    from: usize,
    /// How often memory had been emptied before it was asked for.
    pub(super) since: u64,
}

/// How often memory and the tiers below it had been emptied at a moment.
#[derive(Clone, Default)]
pub(super) struct Since {
    pub(super) memory: u64,
    below: Vec<u64>,
}

impl Fetched {
    /// The bytes of the record.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.at.clone()]
    }
}

impl Levels {
    /// How long a level may take for what a batch lacks, before the samples are loaded instead.
    pub(super) const DEADLINE: Duration =
        Duration::from_millis(if cfg!(test) { 300 } else { 10_000 });

    /// Memory alone, or with these tiers below it, the nearest first.
    pub fn new(memory: Arc<RecordStore>, below: Vec<Box<dyn Tier>>) -> Arc<Self> {
        let level = |tier: Box<dyn Tier>| Level {
            of_all_nodes: tier.is_of_all_nodes(),
            tier,
            told: Mutex::default(),
            fetched: AtomicU64::new(0),
            damaged: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            passed_down: AtomicU64::new(0),
            news: Mutex::default(),
        };
        let below = below.into_iter().map(level).collect();
        let (buffers, known, classes) = Default::default();
        let (typical, ahead) = (AtomicUsize::new(0), PerProcess::new());
        Arc::new(Self { memory, below, buffers, known, classes, typical, ahead })
    }

    /// The first level.
    pub fn memory(&self) -> &Arc<RecordStore> {
        &self.memory
    }

    /// Whether there is anything below memory.
    pub fn has_more(&self) -> bool {
        !self.below.is_empty()
    }

    /// Of each tier, the nearest first.
    pub fn stats(&self) -> Vec<LevelStats> {
        let of = |level: &Level| LevelStats {
            tier: level.tier.stats(),
            fetched: level.fetched.load(Ordering::Relaxed),
            damaged: level.damaged.load(Ordering::Relaxed),
            errors: level.errors.load(Ordering::Relaxed),
            passed_down: level.passed_down.load(Ordering::Relaxed),
        };
        self.below.iter().map(of).collect()
    }

    /// What a tier said when it first failed, once: for one warning.
    pub fn news(&self) -> Option<String> {
        let said = |level: &Level| level.tier.news().or_else(|| level.news.try_lock().ok()?.take());
        self.below.iter().find_map(said)
    }

    /// Empties all levels. Memory first: what is older goes down no more. And last: what is read from below
    /// before that comes up no more.
    pub fn clear(&self) -> crate::Result<()> {
        self.end_prefetch();
        self.memory.clear()?;
        self.below.iter().rev().try_for_each(|level| level.tier.clear())?;
        self.memory.clear()
    }

    /// Ends what `prefetch` began. Whoever has these levels says so before it lets them go: what is on its
    /// way keeps them.
    pub fn end_prefetch(&self) {
        if let Some(ahead) = self.ahead.get() {
            ahead.follow(VecDeque::new(), 0);
        }
    }

    /// Whether nothing was emptied since a record was asked for.
    pub(super) fn is_of_now(&self, fetched: &Fetched) -> bool {
        fetched.since == self.memory.emptied() || broken(Fault::OutliveClear)
    }

    /// What to note before anything is loaded, or read from one level for another.
    pub(super) fn since(&self) -> Since {
        let memory = self.memory.emptied();
        Since { memory, below: self.below.iter().map(|level| level.tier.emptied()).collect() }
    }

    /// Waits until what this process gave to levels below is where it belongs; whether it is. Each is asked, also
    /// where one before it took all of the time.
    pub fn flush(&self, patience: Duration) -> bool {
        let began = Instant::now();
        let left = || patience.saturating_sub(began.elapsed());
        let mut done = true;
        for level in &self.below {
            done &= level.tier.flush(left());
        }
        done
    }

    /// Whether a level below has this sample, and says so without asking anybody.
    pub fn is_below(&self, index: usize) -> bool {
        self.below.iter().any(|level| level.tier.has(index as u64) == Some(true))
    }

    /// Whether no level below need be asked for this sample.
    pub(super) fn is_nowhere_below(&self, index: usize) -> bool {
        self.below.iter().all(|level| level.tier.lacks(index as u64))
    }

    /// Whether every sample is in memory, or in a level below that says so without asking anybody.
    pub fn is_complete(&self) -> bool {
        let samples = self.memory.geometry().dataset_len;
        let filled = self.memory.stats().filled;
        if filled == samples {
            return true;
        }
        let below = self.filling_below().map_or(0, |below| below.records);
        let is_there = |i: usize| self.memory.find(i).is_some() || self.is_below(i);
        filled + below >= samples && (0..samples as usize).all(is_there)
    }

    /// How many threads may ask the levels below at the same time with profit.
    pub(super) fn readers(&self) -> usize {
        self.below.iter().map(|level| level.tier.readers()).max().unwrap_or(1)
    }

    /// How full the level below memory is, if that is one of this node.
    pub(super) fn filling_below(&self) -> Option<Filling> {
        self.below.first().and_then(|level| level.tier.filling())
    }

    /// Whether the level below has room for all samples, also for those in memory. Then all go there, so
    /// that the next run finds them, and what comes up stays in memory while there is room. If not, both
    /// together are the room there is, and a sample is in one of them.
    ///
    /// Where memory is recycled, what leaves it goes down, and what comes up comes in.
    pub(super) fn holds_all_below(&self) -> bool {
        const FEW: u64 = 16; // too few to know what a sample takes
        let Some(below) = self.filling_below().filter(|_| !self.memory.recycles()) else {
            return false;
        };
        let space = self.memory.space();
        // What they take below, where that is known: there they may be packed.
        let (known, bytes) = match below.records {
            FEW.. => (below.records, below.bytes),
            few => (space.about_filled() + few, space.used_bytes() + below.bytes),
        };
        if known < FEW {
            return true;
        }
        let each = bytes.div_ceil(known);
        let to_come = self.memory.geometry().dataset_len.saturating_sub(below.records);
        // A little more, because groups of records are whole pages; and the more, the less is known of what
        // samples take.
        let spare = 1.0 / 32.0 + 2.0 / (known as f64).sqrt();
        let need = to_come as f64 * each as f64 * (1.0 + spare);
        need <= below.capacity.saturating_sub(below.bytes) as f64
    }

    /// Asks the levels below for these samples, as far as they were not read ahead. `arrived` gets each that is
    /// found, by its position, and gives back what it does not keep.
    pub(super) fn fetch(
        &self,
        indices: &[usize],
        arrived: &mut dyn FnMut(usize, Fetched) -> Option<Fetched>,
    ) {
        let Some(ahead) = self.ahead.get() else { return self.fetch_now(indices, arrived) };
        let mut rest = Vec::new();
        for (which, &index) in indices.iter().enumerate() {
            match ahead.take(self, index) {
                Some(fetched) => arrived(which, fetched).into_iter().for_each(|it| self.reuse(it)),
                None => rest.push(which),
            }
        }
        let left: Vec<usize> = rest.iter().map(|&which| indices[which]).collect();
        self.fetch_now(&left, &mut |which, fetched| arrived(rest[which], fetched));
    }

    /// Tells the level below memory that these samples are about to be asked for, with others.
    pub(super) fn expect(&self, indices: &[usize]) {
        let Some(level) = self.below.first() else { return };
        let keys: Vec<u64> = indices.iter().map(|&index| index as u64).collect();
        level.tier.expect(&keys);
    }

    /// Asks the levels below.
    pub(super) fn fetch_now(
        &self,
        indices: &[usize],
        arrived: &mut dyn FnMut(usize, Fetched) -> Option<Fetched>,
    ) {
        self.fetch_until(indices, Self::deadline(), arrived);
    }

    /// The same until then; false if a level let us wait in vain.
    pub(super) fn fetch_until(
        &self,
        indices: &[usize],
        deadline: Instant,
        arrived: &mut dyn FnMut(usize, Fetched) -> Option<Fetched>,
    ) -> bool {
        let (since, mut in_vain) = (self.memory.emptied(), false);
        let mut missing: Vec<usize> = (0..indices.len()).collect();
        for (from, level) in self.below.iter().enumerate() {
            if missing.is_empty() {
                break;
            }
            let keys: Vec<u64> = missing.iter().map(|&which| indices[which] as u64).collect();
            let mut arriving = Arriving {
                levels: self,
                tier: &*level.tier,
                from,
                wanted: vec![true; keys.len()],
                keys: &keys,
                deadline,
                since,
                unknown: Vec::new(),
                damaged: 0,
                in_vain: false,
                arrived: &mut |which, fetched| arrived(missing[which], fetched),
            };
            level.count_error(level.tier.get_many(&keys, &mut arriving, deadline));
            arriving.learn_schemas(level);
            in_vain |= arriving.in_vain;
            let Arriving { wanted, damaged, .. } = arriving;
            level.damaged.fetch_add(damaged, Ordering::Relaxed);
            let found = wanted.iter().filter(|&&wanted| !wanted).count();
            level.fetched.fetch_add(found as u64, Ordering::Relaxed);
            missing = missing.iter().zip(&wanted).filter(|(_, w)| **w).map(|(&m, _)| m).collect();
        }
        !in_vain
    }

    /// Until when levels below may take what they are given now.
    pub(super) fn deadline() -> Instant {
        Instant::now() + Self::DEADLINE
    }

    /// Gives records to the levels of this node, each to the first that takes it; whether one did. None does
    /// if it was emptied since.
    pub(super) fn pass_down(
        &self,
        records: &[(usize, u16, &[IoSlice<'_>])],
        since: &Since,
        deadline: Instant,
    ) -> Vec<bool> {
        self.give_to(false, records, since, deadline)
    }

    /// Gives records to the levels of all nodes; whether one took it.
    pub(super) fn pass_on(
        &self,
        records: &[(usize, u16, &[IoSlice<'_>])],
        since: &Since,
        deadline: Instant,
    ) -> Vec<bool> {
        self.give_to(true, records, since, deadline)
    }

    /// Puts a record that came from a level of all nodes, and found no room in memory, into those of this
    /// node in front of it.
    pub(super) fn keep_near(&self, index: usize, fetched: &Fetched) {
        if self.is_from_afar(fetched) && fetched.from > 0 {
            let since = Since { memory: fetched.since, ..self.since() };
            let parts = [IoSlice::new(fetched.bytes())];
            self.pass_down(&[(index, fetched.schema, &parts)], &since, Self::deadline());
        }
    }

    /// Whether no level of this node has it.
    pub(super) fn is_from_afar(&self, fetched: &Fetched) -> bool {
        self.below[fetched.from].of_all_nodes
    }

    /// Whether there is a level of all nodes.
    pub(super) fn has_all_nodes(&self) -> bool {
        self.below.iter().any(|level| level.of_all_nodes)
    }

    fn give_to(
        &self,
        of_all_nodes: bool,
        records: &[(usize, u16, &[IoSlice<'_>])],
        since: &Since,
        deadline: Instant,
    ) -> Vec<bool> {
        let mut taken = vec![false; records.len()];
        // Memory is emptied first: who sees no emptying here has noted the number of the level below in time.
        if since.memory != self.memory.emptied() && !broken(Fault::OutliveClear) {
            return taken;
        }
        let fingerprint = self.memory.segment().header().fingerprint;
        let levels = self.below.iter().zip(&since.below);
        let takes = |level: &Level| level.of_all_nodes == of_all_nodes && level.tier.takes();
        for (level, &since) in levels.filter(|(level, _)| takes(level)) {
            let mut which = Vec::new();
            let mut sealed = Vec::new();
            for (k, &(index, number, parts)) in
                records.iter().enumerate().filter(|(k, _)| !taken[*k])
            {
                let Some(schema) = self.travels(level, number, parts, deadline) else { continue };
                let len = parts.iter().map(|part| part.len() as u64).sum();
                let number = index as u64;
                let (key, fingerprint) =
                    level.tier.identity(number).unwrap_or((number, fingerprint));
                let head = Head { key, fingerprint, schema, len };
                let head = portable::seal(&head, parts);
                sealed.push(Sealed { key: number, head, parts, since });
                which.push(k);
            }
            if sealed.is_empty() {
                continue;
            }
            let mut here = vec![false; sealed.len()];
            level.count_error(level.tier.put_many(&sealed, &mut here, deadline));
            for (&k, _) in which.iter().zip(&here).filter(|(_, here)| **here) {
                taken[k] = true;
                level.passed_down.fetch_add(1, Ordering::Relaxed);
            }
        }
        taken
    }

    /// Under which hash the schema of a record is known below (`Some(None)`: the record brings it).
    /// None if such records do not travel, or the tier does not take the schema.
    fn travels(
        &self,
        level: &Level,
        number: u16,
        parts: &[IoSlice<'_>],
        deadline: Instant,
    ) -> Option<Option<u128>> {
        if number == INLINE {
            // It stands in the first part; more is not looked at.
            return inline_schema(parts.first()?).and_then(travels).map(|_| None);
        }
        let told = level.told.try_lock().ok().and_then(|told| told.get(&number).copied());
        if told.is_some() {
            return Some(told);
        }
        let schema = self.memory.schema(number)?;
        travels(&schema)?;
        let hash = portable::schema_hash(&schema);
        level.count_error(level.tier.put_schema(hash, &schema, deadline)).then_some(())?;
        if let Ok(mut told) = level.told.try_lock() {
            told.insert(number, hash);
        }
        Some(Some(hash))
    }

    /// Whether records of this schema may come from below.
    fn judge(&self, schema: &[u8]) -> Verdict {
        match self.classes.try_lock() {
            Ok(mut known) => known.judge(&self.memory, schema),
            Err(_) => KnownClasses::default().judge(&self.memory, schema),
        }
    }

    /// How many records from below are about so many bytes; few, before one was seen.
    pub(super) fn about_records(&self, bytes: usize) -> usize {
        const FEW: usize = 4;
        bytes.checked_div(self.typical.load(Ordering::Relaxed)).map_or(FEW, |count| count.max(1))
    }

    /// None if there is no memory: a length that a tier says may be anything.
    fn buffer(&self, len: usize) -> Option<Pages> {
        let kept = self.buffers.try_lock().ok().and_then(|mut kept| kept.take(len));
        kept.or_else(|| Pages::new(Buffers::room(len)))
    }

    /// Takes memory back, for the next record.
    pub fn reuse(&self, fetched: Fetched) {
        self.keep(fetched.memory);
    }

    fn keep(&self, buffer: Pages) {
        if let Ok(mut kept) = self.buffers.try_lock() {
            kept.keep(buffer);
        }
    }
}

impl Level {
    /// Counts a failure and keeps the first; whether there was none.
    fn count_error<T>(&self, outcome: crate::Result<T>) -> bool {
        let Err(error) = outcome else { return true };
        // A server that comes back may have forgotten everything.
        if let Ok(mut told) = self.told.try_lock() {
            told.clear();
        }
        if self.errors.fetch_add(1, Ordering::Relaxed) == 0
            && !self.tier.tells()
            && let Ok(mut news) = self.news.try_lock()
        {
            *news = Some(error.to_string());
        }
        false
    }
}

/// The schema that a record brings: a length, and as many bytes.
fn inline_schema(record: &[u8]) -> Option<&[u8]> {
    let (len, rest) = record.split_first_chunk::<4>()?;
    rest.get(..u32::from_le_bytes(*len) as usize)
}

/// Records on their way up.
struct Arriving<'a> {
    levels: &'a Levels,
    tier: &'a dyn Tier,
    /// Which of the levels that is.
    from: usize,
    keys: &'a [u64],
    deadline: Instant,
    since: u64,
    /// What has not come yet.
    wanted: Vec<bool>,
    /// Whole records of schemas that memory does not know.
    unknown: Vec<(Lent, usize, u128)>,
    damaged: u64,
    in_vain: bool,
    arrived: &'a mut dyn FnMut(usize, Fetched) -> Option<Fetched>,
}

impl Sink for Arriving<'_> {
    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Lent> {
        let wanted = *self.wanted.get(which)?;
        let fits = (HEAD..=HEAD + MAX_RECORD as usize).contains(&len);
        if !wanted || !fits {
            return None;
        }
        Some(Lent::new(which, self.levels.buffer(room.max(len))?, len))
    }

    fn done(&mut self, lent: Lent) -> bool {
        let which = lent.which();
        // A tier may say so twice, or of what it was not asked for.
        let Some(true) = self.wanted.get(which).copied() else { return true };
        let number = self.keys[which];
        let (key, fingerprint) = self
            .tier
            .identity(number)
            .unwrap_or_else(|| (number, self.levels.memory.segment().header().fingerprint));
        let opened = if self.tier.vouches() {
            portable::open_vouched(&lent, key, fingerprint)
        } else {
            portable::open(&lent, key, fingerprint)
        };
        let Ok((head, bytes)) = opened else {
            self.damaged += 1;
            self.levels.keep(lent.into_memory().0);
            return false;
        };
        match head.schema {
            None => match inline_schema(bytes).map_or(Verdict::Never, |it| self.levels.judge(it)) {
                Verdict::Welcome => self.give(lent, INLINE),
                Verdict::NotYet => {}
                Verdict::Never => {
                    self.damaged += 1;
                    return false;
                }
            },
            Some(hash) => match self.known(hash) {
                Some(number) => self.give(lent, number),
                None => self.unknown.push((lent, which, hash)),
            },
        }
        true
    }

    fn take_back(&mut self, lent: Lent) {
        self.levels.keep(lent.into_memory().0);
    }

    fn was_in_vain(&mut self) {
        self.in_vain = true;
    }
}

impl Arriving<'_> {
    /// The number of a schema that is known in memory and asks for no pickle. Its classes are known.
    fn known(&self, hash: u128) -> Option<u16> {
        let Levels { memory, known, .. } = self.levels;
        let before = known.try_lock().ok().and_then(|known| known.get(&hash).copied());
        if before.is_some() {
            return before;
        }
        let number = memory.schema_of_hash(hash)?;
        travels(&memory.schema(number)?)?;
        if let Ok(mut known) = known.try_lock() {
            known.insert(hash, number);
        }
        Some(number)
    }

    fn give(&mut self, lent: Lent, schema: u16) {
        let which = lent.which();
        self.wanted[which] = false;
        let (memory, at) = lent.into_memory();
        // Of several threads one may be forgotten.
        let typical = &self.levels.typical;
        let before = match typical.load(Ordering::Relaxed) {
            0 => at.len(),
            before => before,
        };
        typical.store((before * 7 + at.len()).div_ceil(8), Ordering::Relaxed);
        let at = at.start + HEAD..at.end;
        let fetched = Fetched { schema, memory, at, from: self.from, since: self.since };
        if let Some(unused) = (self.arrived)(which, fetched) {
            self.levels.reuse(unused);
        }
    }

    /// Asks the tier for schemas that memory does not know, once it is done with all records: it may
    /// have one connection.
    fn learn_schemas(&mut self, level: &Level) {
        let mut asked = HashMap::new(); // once each, whoever knows it or not
        for (lent, which, hash) in std::mem::take(&mut self.unknown) {
            if !self.wanted[which] {
                continue;
            }
            let mut verdict = Verdict::Never;
            if self.known(hash).is_none() {
                verdict = *asked.entry(hash).or_insert_with(|| self.learn(level, hash));
            }
            match self.known(hash) {
                Some(number) => self.give(lent, number),
                None if verdict == Verdict::NotYet => {}
                None => self.damaged += 1,
            }
        }
    }

    fn learn(&self, level: &Level, hash: u128) -> Verdict {
        let mut verdict = Verdict::Never;
        let schema = level.tier.schema(hash, self.deadline);
        if let Ok(Some(schema)) = &schema
            && portable::schema_hash(schema) == hash
        {
            verdict = self.levels.judge(schema);
            if verdict == Verdict::Welcome {
                let _full = self.levels.memory.intern(schema);
            }
        }
        level.count_error(schema);
        verdict
    }
}
