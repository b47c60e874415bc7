//! All servers of a cluster, as this process uses them.

use super::address::Address;
use super::budget::{Budget, Trouble, wait_of_environment};
use super::connection::{Connection, Reply};
use super::link::{Found, Link, MAX_VALUE, Outcome, ServerStats, Wanted};
use super::placement::Placement;
use super::value::{FRONT, Front, Secret};
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active as broken};
use crate::records::portable::{self, HEAD, Head, schema_hash};
use crate::sys::per_process::PerProcess;
use std::collections::HashMap;
use std::io::IoSlice;
use std::ops::DerefMut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Names that a server is asked for, or told, at once.
const NAMES_AT_ONCE: usize = 1000;
/// No name of ours is longer, nor is what a server says of itself.
const LONGEST_NAME: usize = 1 << 10;
const LONGEST_INFO: usize = 1 << 20;
/// Schemas that are kept until memory knows them.
const MOST_SCHEMAS: usize = 4096;
/// Each step of what is not for a batch may take so long.
const STEP: Duration = Duration::from_secs(5);

/// A dataset on servers.
#[derive(Clone)]
pub struct ClusterOptions {
    /// One at least.
    pub servers: Vec<Address>,
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
    /// Memory for a record of so many bytes, of the sample at this position; None if it is not wanted.
    fn lend(&mut self, which: usize, len: usize) -> Option<Self::Memory>;
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
    /// None: it does not answer.
    pub samples: Option<u64>,
    pub used_bytes: u64,
    /// 0: it has no bound.
    pub max_bytes: u64,
    pub version: String,
}

/// Keeps the one value that comes.
#[derive(Default)]
struct OneValue(Option<Vec<u8>>);

impl Receiver for OneValue {
    type Memory = Vec<u8>;

    fn lend(&mut self, _: usize, len: usize) -> Option<Vec<u8>> {
        let mut memory = Vec::new();
        memory.try_reserve_exact(len).ok()?;
        memory.resize(len, 0);
        Some(memory)
    }

    fn done(&mut self, memory: Vec<u8>) -> bool {
        self.0 = Some(memory);
        true
    }

    fn take_back(&mut self, _: Vec<u8>) {}
}

/// Does something with names on a server.
type TakeNames<'a> = dyn FnMut(&mut Link, &[Vec<u8>]) -> Outcome<()> + 'a;

type Links = Box<[Mutex<Link>]>;

/// The servers.
pub struct ClusterStore {
    options: ClusterOptions,
    placement: Placement,
    secret: Secret,
    /// How long a server may be waited for.
    wait: Duration,
    /// In front of the number of a sample.
    prefix: String,
    links: PerProcess<Links>,
    /// Those of the first process, for the control that shares them.
    inherited: OnceLock<Links>,
    /// Schemas that came with values, by their hash.
    schemas: PerProcess<Mutex<HashMap<u128, Vec<u8>>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        if options.servers.is_empty() {
            return Err(Error::new(Kind::Argument, "there is no server; give one at least"));
        }
        Ok(Self {
            placement: Placement::new(&options.servers),
            secret: Secret::new(&options.secret),
            wait: wait_of_environment(),
            prefix: format!("stocache:{}:{:032x}:", options.name, options.fingerprint),
            links: PerProcess::new(),
            inherited: OnceLock::new(),
            schemas: PerProcess::new(),
            options,
        })
    }

    /// What leads to the same servers and the same dataset in another process.
    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }

    /// A forked child makes its own: on its parent's connection each would get the other's answers.
    fn links(&self) -> &Links {
        let make = || self.options.servers.iter().map(|it| Mutex::new(Link::new(it))).collect();
        if broken(Fault::InheritConnections) {
            return self.inherited.get_or_init(make);
        }
        self.links.get_or_make(make)
    }

    fn budget(&self, until: Instant) -> Budget {
        Budget::new(self.wait, until)
    }

    fn server(&self, key: u64) -> usize {
        self.placement.of(key, self.options.fingerprint)
    }

    fn name_of(&self, key: u64) -> Vec<u8> {
        format!("{}{key}", self.prefix).into_bytes()
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

    /// The same by server and name.
    fn get_named<R: Receiver>(
        &self,
        all: impl Iterator<Item = (usize, Vec<u8>)>,
        receiver: &mut R,
        deadline: Instant,
    ) -> Received {
        if Instant::now() >= deadline {
            return Received::default();
        }
        let servers = &self.options.servers;
        let mut wanted: Vec<Vec<Wanted>> = servers.iter().map(|_| Vec::new()).collect();
        for (which, (server, name)) in all.enumerate() {
            wanted[server].push((which, name));
        }
        let mut received = Received::default();
        let mut asked = Vec::new();
        // In the order of servers, so that no two threads wait for each other.
        for (at, wanted) in wanted.iter().enumerate().filter(|(_, wanted)| !wanted.is_empty()) {
            let mut link = locked(&self.links()[at]);
            if link.is_resting() {
                continue;
            }
            let mut budget = self.budget(deadline);
            let outcome = link.ask(&servers[at], wanted, &mut budget);
            match link.settle(outcome) {
                Some(count) => asked.push((link, wanted, count, budget)),
                None => received.errors += 1,
            }
        }
        let mut schema = (Vec::new(), Vec::new());
        for (mut link, wanted, count, mut budget) in asked {
            let mut arrived =
                |connection: &mut Connection, one: &Wanted, len: usize, budget: &mut Budget| {
                    let found = self.read(connection, one, len, budget, receiver, &mut schema)?;
                    received.hits += u64::from(found == Found::Ours);
                    Ok(found)
                };
            let outcome = link.receive(wanted, count, &mut budget, &mut arrived);
            received.errors += u64::from(link.settle(outcome).is_none());
        }
        received
    }

    /// Reads a value of so many bytes, all of it. `schemas` are the last that was kept and memory for the next.
    fn read<R: Receiver>(
        &self,
        connection: &mut Connection,
        (which, name): &Wanted,
        len: usize,
        budget: &mut Budget,
        receiver: &mut R,
        (last, schema): &mut (Vec<u8>, Vec<u8>),
    ) -> Outcome<Found> {
        let mut front = [0; FRONT];
        let here = len.min(FRONT);
        connection.read(&mut front[..here], budget)?;
        let Some(front) = Front::parse(&front, len) else {
            connection.skip(len - here, budget)?;
            connection.end_of_bulk(budget)?;
            return Ok(Found::Forged);
        };
        schema.resize(front.schema_len, 0);
        connection.read(schema, budget)?;
        let Some(mut memory) = receiver.lend(*which, front.record_len) else {
            connection.skip(front.record_len, budget)?;
            connection.end_of_bulk(budget)?;
            return Ok(Found::Unwanted);
        };
        connection.read(&mut memory, budget)?;
        connection.end_of_bulk(budget)?;
        if !self.secret.is_ours(&front, name, schema, &memory) {
            receiver.take_back(memory);
            return Ok(Found::Forged);
        }
        if schema != last {
            self.keep_schema(schema);
            last.clone_from(schema);
        }
        Ok(if receiver.done(memory) { Found::Ours } else { Found::Unwanted })
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
        at: usize,
        name: &[u8],
        schema: &[u8],
        record: &[&[u8]],
        deadline: Instant,
    ) -> bool {
        let len: usize = record.iter().map(|part| part.len()).sum();
        // Looked at first without a word to others: the tag takes a while.
        if FRONT + schema.len() + len > MAX_VALUE || !locked(&self.links()[at]).takes() {
            return false;
        }
        let front = self.secret.front(name, schema, len, record.iter().copied());
        let value: Vec<&[u8]> =
            [&front[..], schema].into_iter().chain(record.iter().copied()).collect();
        let mut link = locked(&self.links()[at]);
        if !link.takes() {
            return false;
        }
        let ttl = self.options.ttl.as_millis() as u64;
        let mut budget = self.budget(deadline);
        let outcome = link.set(&self.options.servers[at], name, &value, ttl, &mut budget);
        link.settle(outcome).unwrap_or(false)
    }

    /// A value that is known by a digest of its key: its schema and its bytes.
    pub fn get_value(&self, key: u128, deadline: Instant) -> Option<(Vec<u8>, Vec<u8>)> {
        let (low, fingerprint) = (key as u64, self.options.fingerprint);
        let mut one = OneValue::default();
        let wanted = std::iter::once((self.server(low), format!("{}{key:032x}", self.prefix)));
        self.get_named(wanted.map(|(at, name)| (at, name.into_bytes())), &mut one, deadline);
        let (head, bytes) = portable::open(one.0.as_ref()?, low, fingerprint).ok()?;
        Some((self.schema(head.schema?)?, bytes.to_vec()))
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

    /// Waits until what this process gave is answered; whether all of it is.
    pub fn flush(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut good = true;
        for link in self.made() {
            let mut link = locked(link);
            if link.is_behind() {
                let mut budget = self.budget(until);
                let outcome = link.flush(&mut budget);
                good &= link.settle(outcome).is_some();
            }
        }
        good
    }

    /// Connections of this process, if it has used any.
    fn made(&self) -> &[Mutex<Link>] {
        self.links.get().map_or(&[], |links| links)
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

    /// Removes all values of this dataset from the servers.
    pub fn clear(&self) -> Result<()> {
        for (at, address) in self.options.servers.iter().enumerate() {
            let mut link = locked(&self.links()[at]);
            let outcome = self.each_name(&mut link, address, &mut |link, names| {
                let mut words: Vec<&[u8]> = vec![b"UNLINK"];
                words.extend(names.iter().map(|name| &name[..]));
                let mut budget = self.budget(Instant::now() + STEP);
                let connection = link.clean(address, &mut budget)?;
                connection.queue(&words);
                connection.send(&mut budget)?;
                match connection.reply(&mut budget)? {
                    Reply::Number(_) => Ok(()),
                    Reply::Error(words) => Err(Trouble::Refusal(words)),
                    _ => Err(Trouble::Nonsense("a removal with something else")),
                }
            });
            if let Err(trouble) = outcome {
                let words = trouble.in_words();
                link.settle::<()>(Err(trouble));
                let message = format!("not all is cleared: the server {address} {words}");
                return Err(Error::new(Kind::State, message));
            }
        }
        Ok(())
    }

    /// What each server holds of this dataset, and in all. Looks through all names there.
    pub fn holdings(&self) -> Vec<Holding> {
        let of = |(at, address): (usize, &Address)| {
            let mut link = locked(&self.links()[at]);
            let outcome = if link.is_resting() {
                Err(Trouble::OutOfTime)
            } else {
                self.holding(&mut link, address)
            };
            let nothing = Holding { address: address.to_string(), ..Holding::default() };
            link.settle(outcome).unwrap_or(nothing)
        };
        self.options.servers.iter().enumerate().map(of).collect()
    }

    fn holding(&self, link: &mut Link, address: &Address) -> Outcome<Holding> {
        let mut samples = 0;
        self.each_name(link, address, &mut |_, names| {
            samples += names.len() as u64;
            Ok(())
        })?;
        let mut budget = self.budget(Instant::now() + STEP);
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
            used_bytes: field("used_memory").parse().unwrap_or(0),
            max_bytes: field("maxmemory").parse().unwrap_or(0),
            version,
        })
    }

    /// Every name of this dataset on a server, some at a time; a name may come twice.
    fn each_name(
        &self,
        link: &mut Link,
        address: &Address,
        take: &mut TakeNames<'_>,
    ) -> Outcome<()> {
        let pattern = format!("{}*", self.prefix);
        let mut cursor = b"0".to_vec();
        loop {
            let mut budget = self.budget(Instant::now() + STEP);
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
                return Ok(());
            }
        }
    }

    // What this process saw

    /// Of each server.
    pub fn stats(&self) -> Vec<ServerStats> {
        let of = |link: &Mutex<Link>| {
            let link = locked(link);
            ServerStats { resting: link.is_resting(), ..link.seen.clone() }
        };
        self.links().iter().map(of).collect()
    }

    /// What people should know, once each.
    pub fn news(&self) -> Option<String> {
        self.made().iter().find_map(|link| link.try_lock().ok()?.news.take())
    }
}

impl Drop for ClusterStore {
    fn drop(&mut self) {
        self.flush(self.wait);
    }
}
