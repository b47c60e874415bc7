//! One server, as one process uses it.
//!
//! ```text
//!   connection    SET a  SET b  GET c  GET d  ───────► the server does them in this order
//!                 owed: +OK  +OK  $… c  $… d  ◄───────
//! ```
//!
//! Values to be written are sent without waiting, and their replies read later; who asks for a value on the same
//! connection finds what was sent before. After trouble the connection is closed and the server left alone for a
//! while, longer each time; then one operation tries again (`rests`). A server that is full is still read from.

use super::address::Address;
use super::budget::{Budget, Trouble};
use super::connection::{Connection, Reply};
use super::latency::Latency;
use super::rests::Rest;
use super::slots::{Elsewhere, Map, Refused, read_map};
use crate::records::RecordStore;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long nothing is written after a server did not take a value.
const FULL_REST: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Bytes that may wait to be sent to one server.
const MOST_BEHIND: usize = 4 << 20;
/// Values that may be sent and not answered.
const MOST_OWED: u64 = 10_000;
/// Bytes of values that are asked for and not read: some servers are half as fast with ten times as many.
const IN_FLIGHT: usize = 600 << 10;
const MOST_IN_FLIGHT: usize = 256;
/// The longest value that servers take.
pub const MAX_VALUE: usize = 512 << 20;

/// What this process saw of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub struct ServerStats {
    pub address: String,
    pub hits: u64,
    pub misses: u64,
    pub fills: u64,
    /// Values that were not written, or of which nobody knows.
    pub dropped: u64,
    /// Values that nobody with the secret wrote for that sample.
    pub forged: u64,
    /// Times that it was in trouble.
    pub errors: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// How long half of its answers took, nine of ten, and 99 of 100, at the most: from a question for samples
    /// to the first of them. Zero: it was not asked.
    pub latency: [Duration; 3],
    /// Whether it is left alone now.
    pub resting: bool,
}

/// What a value was.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// The record that was asked for.
    Ours,
    /// Nobody with the secret wrote it for that sample.
    Forged,
    /// A record that the caller has no use for.
    Unwanted,
}

/// A sample that is wanted.
#[derive(Clone)]
pub(super) struct Wanted {
    /// Its position among all that are.
    pub(super) which: usize,
    /// Of its value.
    pub(super) name: Vec<u8>,
    /// Another server sent us, for this time: its slot is on its way here.
    pub(super) asking: bool,
}

impl Wanted {
    fn ask(&self, connection: &mut Connection) {
        if self.asking {
            connection.queue(&[b"ASKING"]);
        }
        connection.queue(&[b"GET", &self.name]);
    }
}

/// Reads a value of so many bytes, all of it.
pub(super) type Arrived<'a> =
    dyn FnMut(&mut Connection, &Wanted, usize, &mut Budget) -> Outcome<Found> + 'a;

/// How an operation went on.
pub(super) type Outcome<T> = Result<T, Trouble>;

pub(super) struct Link {
    connection: Option<Connection>,
    /// Values that were sent and not answered.
    owed: u64,
    rest: Rest,
    /// When it was in trouble last.
    troubled: Option<Instant>,
    full_until: Option<Instant>,
    /// What a value takes, about.
    typical: usize,
    asked: Option<Instant>,
    latency: Latency,
    /// Whether it did not take or have a value because of its slot.
    turned_away: bool,
    pub(super) seen: ServerStats,
    /// What people should know, until somebody tells them; each kind of it once.
    pub(super) news: Option<String>,
    told: [bool; 4],
}

/// Kinds of news.
#[derive(Clone, Copy)]
pub(super) enum Told {
    Trouble,
    Full,
    Forged,
    NoSlots,
}

impl Link {
    /// `memory`: where processes of the node tell each other what they leave alone.
    pub(super) fn new(address: &Address, memory: &Weak<RecordStore>) -> Self {
        let written = address.to_string();
        Self {
            connection: None,
            owed: 0,
            rest: Rest::new(&written, memory),
            troubled: None,
            full_until: None,
            typical: IN_FLIGHT / 4,
            asked: None,
            latency: Latency::new(),
            turned_away: false,
            seen: ServerStats { address: written, ..ServerStats::default() },
            news: None,
            told: [false; 4],
        }
    }

    /// What was seen of it.
    pub(super) fn stats(&self) -> ServerStats {
        let latency = [50, 90, 99].map(|percent| self.latency.percentile(percent));
        ServerStats { resting: self.is_resting(), latency, ..self.seen.clone() }
    }

    pub(super) fn is_resting(&self) -> bool {
        self.rest.is_on()
    }

    /// Whether an operation may ask it now: who may, does.
    pub(super) fn may_be_asked(&mut self) -> bool {
        self.rest.lets_ask()
    }

    /// Whether it was in trouble since then: one operation waits for it once.
    pub(super) fn was_in_trouble_since(&self, began: Instant) -> bool {
        self.troubled.is_some_and(|at| at >= began)
    }

    /// Whether the server takes values now.
    pub(super) fn takes(&mut self) -> bool {
        self.full_until.is_none_or(|until| Instant::now() >= until) && self.may_be_asked()
    }

    /// Whether what is known of slots was wrong, since this was asked last.
    pub(super) fn was_turned_away(&mut self) -> bool {
        std::mem::take(&mut self.turned_away)
    }

    pub(super) fn tell(&mut self, what: Told, words: impl FnOnce(&str) -> String) {
        if !std::mem::replace(&mut self.told[what as usize], true) {
            self.news = Some(words(&self.seen.address));
        }
    }

    /// The end of an operation: trouble closes the connection and begins a rest.
    pub(super) fn settle<T>(&mut self, outcome: Outcome<T>) -> Option<T> {
        match outcome {
            Ok(done) => {
                self.rest.end();
                Some(done)
            }
            Err(trouble) => {
                self.connection = None;
                self.seen.dropped += std::mem::take(&mut self.owed);
                if !matches!(trouble, Trouble::OutOfTime) {
                    self.seen.errors += 1;
                    self.troubled = Some(Instant::now());
                    self.rest.begin();
                    let words = trouble.in_words();
                    self.tell(Told::Trouble, |server| {
                        format!(
                            "the server {server} {words}; samples are loaded without it, and it is \
                             tried again now and then"
                        )
                    });
                }
                None
            }
        }
    }

    /// The connection, made now if need be.
    fn connected(&mut self, address: &Address, budget: &mut Budget) -> Outcome<&mut Connection> {
        if self.connection.is_none() {
            self.connection = Some(Connection::open(address, budget)?);
        }
        self.connection.as_mut().ok_or(Trouble::Late)
    }

    // Writing

    /// Takes a value to be written: its name, and the value in parts. False if the server is full.
    pub(super) fn set(
        &mut self,
        address: &Address,
        name: &[u8],
        parts: &[&[u8]],
        ttl_ms: u64,
        budget: &mut Budget,
    ) -> Outcome<bool> {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        self.connected(address, budget)?;
        loop {
            self.settle_owed(budget)?;
            let Some(connection) = &mut self.connection else { return Err(Trouble::Late) };
            let unsent = connection.unsent();
            let behind = unsent > 0 && unsent + len > MOST_BEHIND;
            if !behind && self.owed < MOST_OWED {
                break;
            }
            // Room by waiting: for what is to be sent, or for answers.
            connection.send(budget)?;
            if self.owed >= MOST_OWED {
                self.read_owed(budget)?;
            }
        }
        if !self.takes() {
            return Ok(false);
        }
        let Some(connection) = &mut self.connection else { return Err(Trouble::Late) };
        let ttl = ttl_ms.to_string();
        connection.begin(if ttl_ms == 0 { 3 } else { 5 });
        connection.word(&[b"SET"]);
        connection.word(&[name]);
        connection.word(parts);
        if ttl_ms != 0 {
            connection.word(&[b"PX"]);
            connection.word(&[ttl.as_bytes()]);
        }
        self.owed += 1;
        self.seen.bytes_written += len as u64;
        connection.try_send()?;
        Ok(true)
    }

    /// Reads answers to what was written, as far as they are there.
    fn settle_owed(&mut self, budget: &mut Budget) -> Outcome<()> {
        while self.owed > 0 {
            let Some(connection) = &mut self.connection else { return Ok(()) };
            if !connection.has_reply()? {
                return Ok(());
            }
            self.read_one_owed(budget)?; // the rest of a short line is there, or is about to be
        }
        Ok(())
    }

    fn read_owed(&mut self, budget: &mut Budget) -> Outcome<()> {
        while self.owed > 0 {
            self.read_one_owed(budget)?;
        }
        Ok(())
    }

    fn read_one_owed(&mut self, budget: &mut Budget) -> Outcome<()> {
        let Some(connection) = &mut self.connection else { return Err(Trouble::Late) };
        match connection.reply(budget)? {
            Reply::Simple => self.seen.fills += 1,
            // The value is gone: what was sent is not kept.
            Reply::Error(words) if Refused::parse(&words) != Refused::Wholly => {
                self.seen.dropped += 1;
                self.turned_away = true;
            }
            Reply::Error(words) => {
                self.seen.dropped += 1;
                self.full_until = Some(Instant::now() + FULL_REST);
                self.tell(Told::Full, |server| {
                    format!(
                        "the server {server} takes no more samples (it says {words:?}); what it has \
                         is used"
                    )
                });
            }
            _ => return Err(Trouble::Nonsense("a value with something else")),
        }
        self.owed -= 1;
        Ok(())
    }

    /// Waits until all that was sent is answered.
    pub(super) fn flush(&mut self, budget: &mut Budget) -> Outcome<()> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.send(budget)?;
        self.read_owed(budget)
    }

    /// Whether anything was sent and not answered.
    pub(super) fn is_behind(&self) -> bool {
        self.owed > 0
    }

    // Reading

    /// Asks for the first of these values, without waiting for the answers: how many.
    pub(super) fn ask(
        &mut self,
        address: &Address,
        wanted: &[Wanted],
        budget: &mut Budget,
    ) -> Outcome<usize> {
        let asked = self.window().min(wanted.len());
        let connection = self.connected(address, budget)?;
        wanted[..asked].iter().for_each(|one| one.ask(connection));
        connection.try_send()?;
        self.asked = Some(Instant::now());
        Ok(asked)
    }

    /// How many values may be asked for and not read.
    fn window(&self) -> usize {
        (IN_FLIGHT / self.typical.max(1)).clamp(2, MOST_IN_FLIGHT)
    }

    /// Gets these values, of which so many were asked for. `arrived` reads each that is there, all of it;
    /// `sent` is told which of them are elsewhere. `first`: no answer of another server was read meanwhile.
    pub(super) fn receive(
        &mut self,
        wanted: &[Wanted],
        mut asked: usize,
        budget: &mut Budget,
        arrived: &mut Arrived<'_>,
        sent: &mut Vec<(usize, Elsewhere)>,
        first: bool,
    ) -> Outcome<()> {
        // An answer that lies here already may have come long ago.
        let is_fresh = first || !self.catch_up(budget)?.has_reply()?;
        self.catch_up(budget)?;
        for (got, one) in wanted.iter().enumerate() {
            let window = self.window();
            let Some(connection) = &mut self.connection else { return Err(Trouble::Late) };
            if asked < wanted.len() && asked - got <= window / 2 {
                let more = wanted.len().min(got + window);
                wanted[asked..more].iter().for_each(|one| one.ask(connection));
                asked = more;
                connection.send(budget)?;
            }
            if one.asking {
                match connection.reply(budget)? {
                    Reply::Simple | Reply::Error(_) => {} // what was asked for is answered in any case
                    _ => return Err(Trouble::Nonsense("a question with something else")),
                }
            }
            let reply = connection.reply(budget)?;
            if let Some(asked) = self.asked.take().filter(|_| is_fresh) {
                self.latency.note(asked.elapsed());
            }
            match reply {
                Reply::Nil => self.seen.misses += 1,
                Reply::Bulk(len) if len <= MAX_VALUE => {
                    let found = arrived(connection, one, len, budget)?;
                    self.typical = (self.typical * 7 + len) / 8;
                    self.seen.bytes_read += len as u64;
                    match found {
                        Found::Ours => self.seen.hits += 1,
                        Found::Unwanted => self.seen.misses += 1,
                        Found::Forged => self.note_forged(),
                    }
                }
                Reply::Bulk(_) => return Err(Trouble::Nonsense("more than there can be")),
                // The answers to what was asked for after it follow all the same.
                Reply::Error(words) => match Refused::parse(&words) {
                    Refused::Elsewhere(to) => sent.push((got, to)),
                    Refused::Nowhere => {
                        self.seen.misses += 1;
                        self.turned_away = true;
                    }
                    Refused::Wholly => return Err(Trouble::Refusal(words)),
                },
                _ => return Err(Trouble::Nonsense("a question with something else")),
            }
        }
        Ok(())
    }

    /// Who has which slots, as this server says.
    pub(super) fn map(&mut self, address: &Address, budget: &mut Budget) -> Outcome<Map> {
        let connection = self.clean(address, budget)?;
        connection.queue(&[b"CLUSTER", b"SLOTS"]);
        connection.send(budget)?;
        read_map(connection, budget)
    }

    fn note_forged(&mut self) {
        self.seen.misses += 1;
        self.seen.forged += 1;
        self.tell(Told::Forged, |server| {
            format!(
                "the server {server} has values under our names that nobody with this job's secret \
                 wrote; they are left alone, and such samples loaded: give all nodes the same secret \
                 (STOCACHE_SECRET, or the same file)"
            )
        });
    }

    /// Sends what is left, and reads the answers to all that was written before: what comes next is the first
    /// value.
    fn catch_up(&mut self, budget: &mut Budget) -> Outcome<&mut Connection> {
        let Some(connection) = &mut self.connection else { return Err(Trouble::Late) };
        connection.send(budget)?;
        self.read_owed(budget)?;
        self.connection.as_mut().ok_or(Trouble::Late)
    }

    /// The connection for a command of another kind, with nothing owed on it.
    pub(super) fn clean(
        &mut self,
        address: &Address,
        budget: &mut Budget,
    ) -> Outcome<&mut Connection> {
        self.connected(address, budget)?;
        self.catch_up(budget)
    }
}
