//! All servers of a cluster, as this process uses them.

use super::address::{Address, Servers};
use super::budget::{Budget, Trouble, wait_of_environment};
use super::connection::{Connection, Reply};
use super::link::{Arrivals, Link, MAX_VALUE, Outcome, ServerStats, Tally};
use super::placement::Placement;
use super::questions::Wanted;
use super::rests::Circumstances;
use super::routes::{Node, Routes, Table, locked};
use super::slots::{Elsewhere, Refused};
use super::tags::{CHUNK, CHUNKS};
use super::value::{FRONT, Front, Secret, completed, tagged};
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::records::RecordStore;
use crate::records::portable::{self, HEAD, Head, schema_hash};
use crate::sys::per_process::PerProcess;
use std::collections::{HashMap, HashSet};
use std::io::IoSlice;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// What all names of ours begin with.
const ALL: &str = "stocache:";
/// Names that a server is asked for, or told, at once.
const NAMES_AT_ONCE: usize = 1000;
/// Lists of names that a server may give: a thousand million names. Who gives more has no end.
const MOST_LISTS: usize = if cfg!(test) { 1_000 } else { 1 << 20 };
/// No name of ours is longer, nor is what a server says of itself.
const LONGEST_NAME: usize = 1 << 10;
const LONGEST_INFO: usize = 1 << 20;
/// Schemas that are kept until memory knows them.
const MOST_SCHEMAS: usize = 4096;
/// What is not for a batch may take so long, beside lists of all names.
const STEP: Duration = Duration::from_secs(5);
/// The names of one server may take so long.
const LIST: Duration = Duration::from_secs(60);
/// How often servers may send us elsewhere for one value: a slot that moves once more meanwhile is a miss.
const MOST_TURNS: usize = 3;
/// How often all servers are looked through for what has moved meanwhile.
const MOST_SWEEPS: usize = 3;

/// A dataset on servers.
#[derive(Clone)]
pub struct ClusterOptions {
    /// And of which cell this node is.
    pub servers: Servers,
    /// Of the dataset; people see it in the names of values.
    pub name: String,
    /// What its samples depend on.
    pub fingerprint: u128,
    /// Who has it writes values that count.
    pub secret: Vec<u8>,
    /// How long a value stays; zero: for ever.
    pub ttl: Duration,
}

/// Where values are read to.
pub trait Receiver {
    /// Memory for one record.
    type Memory: DerefMut<Target = [u8]>;
    /// Memory for a record of so many bytes, of the sample at this position, in `room` bytes; None if it is not
    /// wanted.
    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Self::Memory>;
    /// All of that memory: the record lies at its start.
    fn room(memory: &mut Self::Memory) -> &mut [u8];
    /// A record that somebody with the secret wrote; false if it is not the one that was asked for.
    fn done(&mut self, memory: Self::Memory) -> bool;
    /// Memory that was not needed.
    fn take_back(&mut self, memory: Self::Memory);
}

/// What became of samples that were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Records that were given.
    pub hits: u64,
    /// Servers that were in trouble.
    pub errors: u64,
}

/// What a server holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub struct Holding {
    pub address: String,
    /// Of this dataset. None: it does not answer.
    pub samples: Option<u64>,
    /// Of all datasets and stores of stocache's.
    pub values: u64,
    pub used_bytes: u64,
    /// 0: it has no bound.
    pub max_bytes: u64,
    pub version: String,
}

/// Keeps the values that come, by position.
struct Values(Vec<Option<Vec<u8>>>);

/// Memory for the value of that position, and how long that is.
struct Value(usize, Vec<u8>, usize);

impl Deref for Value {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.1[..self.2]
    }
}

impl DerefMut for Value {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.1[..self.2]
    }
}

impl Receiver for Values {
    type Memory = Value;

    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Value> {
        // Whether there is so much; what is taken then is not touched before bytes come.
        Vec::<u8>::new().try_reserve_exact(room).ok()?;
        Some(Value(which, vec![0; room], len))
    }

    fn room(memory: &mut Value) -> &mut [u8] {
        &mut memory.1
    }

    fn done(&mut self, Value(which, mut memory, len): Value) -> bool {
        memory.truncate(len);
        self.0[which] = Some(memory);
        true
    }

    fn take_back(&mut self, _: Value) {}
}

/// Values on their way: short ones are looked at together, for that is faster.
struct Arriving<'a, R: Receiver> {
    store: &'a ClusterStore,
    receiver: &'a mut R,
    /// Values that were read, of which nobody knows yet who wrote them; of one length.
    pending: Vec<Pending<R::Memory>>,
    /// Memory for the next schema, and the last that was kept.
    schema: Vec<u8>,
    last_schema: Vec<u8>,
    tally: Tally,
}

struct Pending<M> {
    front: Front,
    /// The record, and behind it all that is tagged, so many bytes together.
    memory: M,
    tagged: usize,
}

impl<R: Receiver> Arriving<'_, R> {
    /// Gives what the job's secret has written, and takes back the rest.
    fn look_at_pending(&mut self) {
        let mut pending = std::mem::take(&mut self.pending);
        let values: Vec<(&[u8], &Front)> = pending
            .iter_mut()
            .map(|one| (&R::room(&mut one.memory)[..one.tagged], &one.front))
            .collect();
        let are_ours = self.store.secret.are_ours(&values);
        for (mut one, is_ours) in pending.drain(..).zip(are_ours) {
            if !is_ours {
                self.receiver.take_back(one.memory);
                self.tally.forged += 1;
                continue;
            }
            let schema = &R::room(&mut one.memory)[one.front.record_len..][..one.front.schema_len];
            if schema != self.last_schema {
                self.store.keep_schema(schema);
                self.last_schema.clear();
                self.last_schema.extend_from_slice(schema);
            }
            let taken = self.receiver.done(one.memory);
            self.tally.ours += u64::from(taken);
            self.tally.unwanted += u64::from(!taken);
        }
        self.pending = pending;
    }

    fn tally(&mut self) -> Tally {
        self.look_at_pending();
        std::mem::take(&mut self.tally)
    }
}

impl<R: Receiver> Arrivals for Arriving<'_, R> {
    fn read(
        &mut self,
        connection: &mut Connection,
        wanted: &Wanted,
        len: usize,
        budget: &mut Budget,
    ) -> Outcome<()> {
        let mut front = [0; FRONT];
        let here = len.min(FRONT);
        connection.read(&mut front[..here], budget)?;
        let Some(front) = Front::parse(&front, len) else {
            connection.skip(len - here, budget)?;
            connection.end_of_bulk(budget)?;
            self.tally.forged += 1;
            return Ok(());
        };
        self.schema.resize(front.schema_len, 0);
        connection.read(&mut self.schema, budget)?;
        let tagged = tagged(front.record_len, front.schema_len, wanted.name.len());
        let Some(mut memory) = self.receiver.lend(wanted.which, front.record_len, tagged) else {
            connection.skip(front.record_len, budget)?;
            connection.end_of_bulk(budget)?;
            self.tally.unwanted += 1;
            return Ok(());
        };
        connection.read(&mut memory, budget)?;
        connection.end_of_bulk(budget)?;
        completed(&front, &wanted.name, &self.schema, R::room(&mut memory));
        if self.pending.first().is_some_and(|first| first.tagged != tagged) {
            self.look_at_pending();
        }
        self.pending.push(Pending { front, memory, tagged });
        if tagged >= CHUNKS * CHUNK || self.pending.len() == CHUNKS {
            self.look_at_pending();
        }
        Ok(())
    }
}

/// Does something with names on a server.
type TakeNames<'a> = dyn FnMut(&mut Link, &[Vec<u8>]) -> Outcome<()> + 'a;

/// So many servers did not answer in time.
#[derive(Default)]
struct Late(usize);

impl Late {
    fn note<T>(&mut self, outcome: &Outcome<T>) {
        self.0 += usize::from(matches!(outcome, Err(Trouble::Late)));
    }
}

/// What is wanted of each server, by its position in a table.
type PerServer = Vec<Vec<Wanted>>;

/// The servers.
pub struct ClusterStore {
    options: ClusterOptions,
    placement: Placement,
    secret: Secret,
    /// How long a server may be waited for.
    wait: Duration,
    /// In front of the number of a sample.
    prefix: String,
    /// Where processes of the node tell each other which servers they leave alone.
    memory: OnceLock<Weak<RecordStore>>,
    routes: PerProcess<Routes>,
    /// Those of the first process, for the control that shares them.
    inherited: OnceLock<Routes>,
    /// Schemas that came with values, by their hash.
    schemas: PerProcess<Mutex<HashMap<u128, Vec<u8>>>>,
}

impl ClusterStore {
    /// Connects to nobody: that is done when something is asked for.
    pub fn new(options: ClusterOptions) -> Result<Self> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if options.name.is_empty() || options.name.len() > 100 || !options.name.chars().all(plain) {
            let message = format!(
                "name {:?} is not allowed: use 1 to 100 letters, digits, dots, dashes and underscores",
                options.name
            );
            return Err(Error::new(Kind::Argument, message));
        }
        let Servers { all, cell } = &options.servers;
        if cell.is_empty() || cell.end > all.len() {
            return Err(Error::new(Kind::Argument, "there is no server; give one at least"));
        }
        Ok(Self {
            placement: Placement::new(&options.servers),
            secret: Secret::new(&options.secret),
            wait: wait_of_environment(),
            prefix: format!("{ALL}{}:{:032x}:", options.name, options.fingerprint),
            memory: OnceLock::new(),
            routes: PerProcess::new(),
            inherited: OnceLock::new(),
            schemas: PerProcess::new(),
            options,
        })
    }

    /// Says which memory the processes of this node share, before the first use: then a server in trouble costs
    /// the node one wait, and not each process.
    pub fn share_rests(&self, memory: &Arc<RecordStore>) {
        let _once = self.memory.set(Arc::downgrade(memory));
    }

    /// What leads to the same servers and the same dataset in another process.
    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }

    /// A forked child makes its own: on its parent's connection each would get the other's answers.
    fn routes(&self) -> &Routes {
        let make = || {
            let memory = self.memory.get().cloned().unwrap_or_default();
            let common = Circumstances { memory, wait: self.wait, ..Circumstances::default() };
            Routes::new(&self.options.servers, common)
        };
        if broken(Fault::InheritConnections) {
            return self.inherited.get_or_init(make);
        }
        self.routes.get_or_make(make)
    }

    fn budget(&self, until: Instant) -> Budget {
        Budget::new(self.wait, until)
    }

    /// The server of the list for this sample.
    fn server(&self, key: u64) -> usize {
        self.placement.of(key, self.options.fingerprint)
    }

    fn name_of(&self, key: u64) -> Vec<u8> {
        format!("{}{key}", self.prefix).into_bytes()
    }

    /// The same with another wait.
    #[cfg(test)]
    pub(super) fn waiting(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    #[cfg(test)]
    pub(super) fn name_of_test(&self, key: u64) -> Vec<u8> {
        self.name_of(key)
    }

    // Samples

    /// Reads what there is of these samples. All servers are asked before the first answer is read.
    pub fn get_many<R: Receiver>(
        &self,
        keys: &[u64],
        receiver: &mut R,
        deadline: Instant,
    ) -> Received {
        let wanted = keys.iter().map(|&key| (self.server(key), self.name_of(key)));
        self.get_named(wanted, receiver, deadline)
    }

    /// The same by server of the list and name.
    fn get_named<R: Receiver>(
        &self,
        all: impl Iterator<Item = (usize, Vec<u8>)>,
        receiver: &mut R,
        deadline: Instant,
    ) -> Received {
        let mut received = Received::default();
        if Instant::now() >= deadline {
            return received;
        }
        let routes = self.routes();
        let mut table = routes.current(deadline);
        let mut wanted: PerServer = table.nodes().iter().map(|_| Vec::new()).collect();
        for (which, (listed, name)) in all.enumerate() {
            match table.server(listed, &name) {
                Some(at) => wanted[at].push(Wanted { which, name, asking: false }),
                None => routes.doubt(),
            }
        }
        let mut late = Late::default();
        for turn in 1..=MOST_TURNS {
            let sent = self.get_once(&table, &wanted, receiver, &mut late, &mut received, deadline);
            if sent.is_empty() || turn == MOST_TURNS || broken(Fault::IgnoreMoved) {
                break;
            }
            (table, wanted) = self.turned(&table, &wanted, &sent, deadline);
        }
        received
    }

    /// Asks each server for what is wanted of it; says what is elsewhere, by server and position there.
    fn get_once<R: Receiver>(
        &self,
        table: &Table,
        wanted: &PerServer,
        receiver: &mut R,
        late: &mut Late,
        received: &mut Received,
        deadline: Instant,
    ) -> Vec<(usize, usize, Elsewhere)> {
        let routes = self.routes();
        let mut asked = Vec::new();
        // In the order of servers, so that no two threads wait for each other.
        for (at, wanted) in wanted.iter().enumerate().filter(|(_, wanted)| !wanted.is_empty()) {
            let node = &table.nodes()[at];
            let mut link = locked(&node.link);
            if !link.may_be_asked() {
                if table.is_native() {
                    routes.doubt_now_and_then();
                }
                continue;
            }
            let mut budget = link.budget(deadline, late.0);
            let outcome = link.ask(&node.address, wanted, table.is_native(), &mut budget);
            link.put_back(&budget);
            late.note(&outcome);
            match link.settle(outcome) {
                Some(questions) => asked.push((at, link, questions)),
                None => received.errors += 1,
            }
        }
        let mut first = true;
        let mut all_sent = Vec::new();
        let mut arriving = Arriving {
            store: self,
            receiver,
            pending: Vec::new(),
            schema: Vec::new(),
            last_schema: Vec::new(),
            tally: Tally::default(),
        };
        for (at, mut link, questions) in asked {
            let mut sent = Vec::new();
            let mut budget = link.budget(deadline, late.0);
            let outcome = link.receive(questions, &mut budget, &mut arriving, &mut sent, first);
            let tally = arriving.tally();
            received.hits += tally.ours;
            let outcome = outcome.and(link.note(&tally));
            link.put_back(&budget);
            late.note(&outcome);
            first = false;
            let trouble = link.settle(outcome).is_none();
            received.errors += u64::from(trouble);
            if link.was_turned_away() || trouble && table.is_native() {
                routes.doubt();
            }
            all_sent.extend(sent.into_iter().map(|(which, to)| (at, which, to)));
        }
        all_sent
    }

    /// What is wanted of whom, after servers sent us elsewhere.
    fn turned(
        &self,
        table: &Table,
        wanted: &PerServer,
        sent: &[(usize, usize, Elsewhere)],
        deadline: Instant,
    ) -> (Arc<Table>, PerServer) {
        let by_node: Vec<(Arc<Node>, Elsewhere)> =
            sent.iter().map(|(at, _, to)| (Arc::clone(&table.nodes()[*at]), to.clone())).collect();
        let (new, ways) = self.routes().follow(&by_node, deadline);
        let mut next: PerServer = new.nodes().iter().map(|_| Vec::new()).collect();
        for ((at, which, to), way) in sent.iter().zip(ways) {
            if let Some(way) = way {
                let asking = to.this_time;
                next[way].push(Wanted { asking, ..wanted[*at][*which].clone() });
            }
        }
        (new, next)
    }

    /// Takes a record to be written, with its schema; false if its server takes nothing now.
    pub fn put(
        &self,
        key: u64,
        schema: &[u8],
        head: &[u8; HEAD],
        parts: &[IoSlice<'_>],
        deadline: Instant,
    ) -> bool {
        let record: Vec<&[u8]> =
            std::iter::once(&head[..]).chain(parts.iter().map(|part| &**part)).collect();
        self.put_named(self.server(key), &self.name_of(key), schema, &record, deadline)
    }

    fn put_named(
        &self,
        listed: usize,
        name: &[u8],
        schema: &[u8],
        record: &[&[u8]],
        deadline: Instant,
    ) -> bool {
        let len: usize = record.iter().map(|part| part.len()).sum();
        if FRONT + schema.len() + len > MAX_VALUE {
            return false;
        }
        let routes = self.routes();
        let table = routes.known(deadline);
        let Some(at) = table.server(listed, name) else {
            routes.doubt();
            return false;
        };
        let node = &table.nodes()[at];
        // Looked at first without a word to others: the tag takes a while.
        if !locked(&node.link).takes() {
            return false;
        }
        let front = self.secret.front(name, schema, len, record.iter().copied());
        let value: Vec<&[u8]> =
            [&front[..], schema].into_iter().chain(record.iter().copied()).collect();
        let mut link = locked(&node.link);
        if !link.takes() {
            return false;
        }
        let ttl = self.options.ttl.as_millis() as u64;
        let mut budget = link.budget(deadline, 0);
        let outcome = link.set(&node.address, name, &value, ttl, &mut budget);
        link.put_back(&budget);
        let taken = link.settle(outcome);
        if link.was_turned_away() || taken.is_none() && table.is_native() {
            routes.doubt();
        }
        taken.unwrap_or(false)
    }

    /// Values that are known by digests of their keys: the schema and the bytes of each that is there.
    pub fn get_values(&self, keys: &[u128], deadline: Instant) -> Vec<Option<(Vec<u8>, Vec<u8>)>> {
        let mut values = Values(vec![None; keys.len()]);
        let wanted = keys.iter().map(|&key| {
            (self.server(key as u64), format!("{}{key:032x}", self.prefix).into_bytes())
        });
        self.get_named(wanted, &mut values, deadline);
        let opened = |(&key, value): (&u128, Option<Vec<u8>>)| {
            let mut value = value?;
            let opened = portable::open_vouched(&value, key as u64, self.options.fingerprint);
            let schema = self.schema(opened.ok()?.0.schema?)?;
            value.drain(..HEAD);
            Some((schema, value))
        };
        keys.iter().zip(values.0).map(opened).collect()
    }

    /// One such value.
    pub fn get_value(&self, key: u128, deadline: Instant) -> Option<(Vec<u8>, Vec<u8>)> {
        self.get_values(&[key], deadline).pop().flatten()
    }

    /// The server that such a value is on.
    pub fn address_of(&self, key: u128) -> String {
        self.options.servers.all[self.server(key as u64)].to_string()
    }

    /// Takes such a value to be written; false if its server takes nothing now.
    pub fn put_value(&self, key: u128, schema: &[u8], bytes: &[u8], deadline: Instant) -> bool {
        let (low, fingerprint) = (key as u64, self.options.fingerprint);
        let (hash, len) = (Some(schema_hash(schema)), bytes.len() as u64);
        let head = Head { key: low, fingerprint, schema: hash, len };
        let sealed = portable::seal(&head, &[IoSlice::new(bytes)]);
        let name = format!("{}{key:032x}", self.prefix);
        self.put_named(self.server(low), name.as_bytes(), schema, &[&sealed, bytes], deadline)
    }

    /// Waits until what this process gave is answered; whether all of it is. A server that hangs takes its part of
    /// the time from the others, and no more.
    pub fn flush(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut good = true;
        let Some(routes) = self.routes.get() else { return good };
        let table = routes.table();
        let mut behind: Vec<&Arc<Node>> = table.nodes().iter().collect();
        behind.retain(|node| locked(&node.link).behind() > 0);
        for (at, node) in behind.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            let part = left / (behind.len() - at) as u32;
            let mut link = locked(&node.link);
            let outcome = link.flush(&mut Budget::new(part, Instant::now() + part));
            good &= match outcome {
                Err(Trouble::Late | Trouble::Slow | Trouble::OutOfTime) => {
                    link.tell_lost(patience);
                    false
                }
                outcome => link.settle(outcome).is_some(),
            };
            if link.was_turned_away() {
                routes.doubt();
            }
        }
        good
    }

    /// What servers answered since this was asked last: values that they took, values that are lost, times of
    /// trouble.
    pub fn take_counts(&self) -> (u64, u64, u64) {
        let Some(routes) = self.routes.get() else { return (0, 0, 0) };
        let counts = &routes.common.counts;
        let take = |count: &AtomicU64| count.swap(0, Relaxed);
        (take(&counts.fills), take(&counts.dropped), take(&counts.errors))
    }

    // Schemas

    /// A schema that came with a value, or was kept.
    pub fn schema(&self, hash: u128) -> Option<Vec<u8>> {
        locked(self.schemas.get()?).get(&hash).cloned()
    }

    /// Keeps a schema for the records of this process.
    pub fn keep_schema(&self, schema: &[u8]) {
        if schema.is_empty() {
            return; // the record brings it
        }
        let mut schemas = locked(self.schemas.get_or_make(Mutex::default));
        if schemas.len() >= MOST_SCHEMAS {
            schemas.clear();
        }
        schemas.entry(schema_hash(schema)).or_insert_with(|| schema.to_vec());
    }

    // All samples

    /// Removes all values of this dataset from all servers, those of other cells, too.
    pub fn clear(&self) -> Result<()> {
        let began = Instant::now();
        let mut last = None;
        for _ in 0..MOST_SWEEPS {
            let mut moved = None;
            for node in self.routes().known(Instant::now() + STEP).holders() {
                let mut link = locked(&node.link);
                if link.was_in_trouble_since(began) {
                    let message = format!(
                        "not all is cleared: the server {} does not answer; try again when it does",
                        node.address
                    );
                    return Err(Error::new(Kind::State, message));
                }
                let until = Instant::now() + LIST;
                let outcome = self.each_name(
                    &mut link,
                    &node.address,
                    &self.prefix,
                    until,
                    &mut |link, names| {
                        moved = self.unlink(link, &node.address, names, until)?.or(moved.take());
                        Ok(())
                    },
                );
                if let Err(trouble) = outcome {
                    let (address, words) = (&node.address, trouble.in_words());
                    link.settle::<()>(Err(trouble));
                    let message = format!("not all is cleared: the server {address} {words}");
                    return Err(Error::new(Kind::State, message));
                }
            }
            if moved.is_none() {
                return Ok(());
            }
            last = moved;
            self.routes().doubt();
        }
        let message = format!(
            "not all is cleared: slots are moving (a server says {:?}); try again when they have",
            last.unwrap_or_default()
        );
        Err(Error::new(Kind::State, message))
    }

    /// Removes these values; says the words if one has another server meanwhile. One by one: names of several
    /// slots are refused.
    fn unlink(
        &self,
        link: &mut Link,
        address: &Address,
        names: &[Vec<u8>],
        until: Instant,
    ) -> Outcome<Option<String>> {
        let mut moved = None;
        for names in names.chunks(NAMES_AT_ONCE) {
            let mut budget = self.budget(until);
            let connection = link.clean(address, &mut budget)?;
            names.iter().for_each(|name| connection.queue(&[b"UNLINK", name]));
            connection.send(&mut budget)?;
            for _ in names {
                match connection.reply(&mut budget)? {
                    Reply::Number(_) => {}
                    Reply::Error(words) if Refused::parse(&words) != Refused::Wholly => {
                        moved = Some(words);
                    }
                    Reply::Error(words) => return Err(Trouble::Refusal(words)),
                    _ => return Err(Trouble::Nonsense("a removal with something else")),
                }
            }
        }
        Ok(moved)
    }

    /// What each server of the cell holds of this dataset, and in all. Looks through all names there.
    pub fn holdings(&self) -> Vec<Holding> {
        let of = |node: &Arc<Node>| {
            let mut link = locked(&node.link);
            let nothing = Holding { address: node.address.to_string(), ..Holding::default() };
            if !link.may_be_asked() {
                return nothing;
            }
            let outcome = self.holding(&mut link, &node.address);
            link.settle(outcome).unwrap_or(nothing)
        };
        self.routes().known(Instant::now() + STEP).of_the_cell().iter().map(of).collect()
    }

    fn holding(&self, link: &mut Link, address: &Address) -> Outcome<Holding> {
        let until = Instant::now() + LIST;
        let (mut seen, mut samples) = (HashSet::new(), 0);
        self.each_name(link, address, ALL, until, &mut |_, names| {
            // A name may come twice.
            let mut new: Vec<_> = names.iter().filter(|name| seen.insert(xxh3_64(name))).collect();
            new.retain(|name| name.starts_with(self.prefix.as_bytes()));
            samples += new.len() as u64;
            Ok(())
        })?;
        let mut budget = self.budget(until);
        let connection = link.clean(address, &mut budget)?;
        connection.queue(&[b"INFO"]);
        connection.send(&mut budget)?;
        let info = match connection.reply(&mut budget)? {
            Reply::Bulk(len) => connection.bulk(len, LONGEST_INFO, &mut budget)?,
            Reply::Error(_) => Vec::new(), // not everybody may ask
            _ => return Err(Trouble::Nonsense("a question with something else")),
        };
        let info = String::from_utf8_lossy(&info);
        let field = |name: &str| {
            let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix(':')?.to_string());
            info.lines().find_map(value).unwrap_or_default()
        };
        let version = match field("valkey_version") {
            none if none.is_empty() => format!("Redis {}", field("redis_version")),
            version => format!("Valkey {version}"),
        };
        Ok(Holding {
            address: address.to_string(),
            samples: Some(samples),
            values: seen.len() as u64,
            used_bytes: field("used_memory").parse().unwrap_or(0),
            max_bytes: field("maxmemory").parse().unwrap_or(0),
            version,
        })
    }

    /// Every name on a server that begins so, some at a time; a name may come twice.
    fn each_name(
        &self,
        link: &mut Link,
        address: &Address,
        prefix: &str,
        until: Instant,
        take: &mut TakeNames<'_>,
    ) -> Outcome<()> {
        let pattern = format!("{prefix}*");
        let mut cursor = b"0".to_vec();
        for _ in 0..MOST_LISTS {
            let mut budget = self.budget(until);
            let connection = link.clean(address, &mut budget)?;
            let count = NAMES_AT_ONCE.to_string();
            connection.queue(&[
                b"SCAN",
                &cursor,
                b"MATCH",
                pattern.as_bytes(),
                b"COUNT",
                count.as_bytes(),
            ]);
            connection.send(&mut budget)?;
            match connection.reply(&mut budget)? {
                Reply::Array(2) => {}
                Reply::Error(words) => return Err(Trouble::Refusal(words)),
                _ => return Err(Trouble::Nonsense("a list with something else")),
            }
            let one = |connection: &mut Connection, budget: &mut Budget| match connection
                .reply(budget)?
            {
                Reply::Bulk(len) => connection.bulk(len, LONGEST_NAME, budget),
                _ => Err(Trouble::Nonsense("a list with something else")),
            };
            cursor = one(connection, &mut budget)?;
            let count = match connection.reply(&mut budget)? {
                Reply::Array(count) if count <= 1000 * NAMES_AT_ONCE => count,
                _ => return Err(Trouble::Nonsense("a list with something else")),
            };
            let mut names = Vec::new();
            for _ in 0..count {
                names.push(one(connection, &mut budget)?);
            }
            if !names.is_empty() {
                take(link, &names)?;
            }
            if cursor == b"0" {
                link.answered();
                return Ok(());
            }
        }
        Err(Trouble::Nonsense("with a list that has no end"))
    }

    // What this process saw

    /// Of each server of the cell.
    pub fn stats(&self) -> Vec<ServerStats> {
        let of = |node: &Arc<Node>| locked(&node.link).stats();
        self.routes().table().of_the_cell().iter().map(of).collect()
    }

    /// What people should know, once each.
    pub fn news(&self) -> Option<String> {
        let table = self.routes.get()?.table();
        table.nodes().iter().find_map(|node| node.link.try_lock().ok()?.news.take())
    }
}

impl Drop for ClusterStore {
    fn drop(&mut self) {
        self.flush(self.wait);
    }
}
