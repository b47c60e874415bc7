//! One server, as one process uses it.
//!
//! ```text
//!   connection    SET a  SET b  GET c  GET d  ───────► the server does them in this order
//!                 owed: +OK  +OK  $… c  $… d  ◄───────
//! ```
//!
//! Values to be written are sent without waiting, and their replies read later; who asks for a value on the same
//! connection finds what was sent before. After trouble the connection is closed and the server left alone for a
//! while, longer each time; then one operation tries again (`rests`), and only an answer ends that. A server that is
//! full is still read from.

use super::address::Address;
use super::budget::{Budget, Purse, Trouble};
use super::connection::{Connection, LONG, Reply};
use super::latency::Latency;
use super::questions::{Question, Questions, TOGETHER, Wanted};
use super::rests::{Circumstances, Rest};
use super::slots::{Elsewhere, Map, Refused, read_map};
use crate::fault::{Fault, active as broken};
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
/// So many of a server that answers so soon: who reads them meanwhile does not wait for all of them first.
const MOST_NEARBY: usize = 2 * TOGETHER;
const NEAR: Duration = Duration::from_micros(500);
/// Values in a row that somebody else wrote, without one of ours: what we write there is not what others read.
const MOST_FORGED: u64 = 1000;
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

/// What values were.
#[derive(Default)]
pub(super) struct Tally {
    /// Records that were asked for.
    pub(super) ours: u64,
    /// Nobody with the secret wrote them for these samples.
    pub(super) forged: u64,
    /// The caller has no use for them.
    pub(super) unwanted: u64,
}

/// Where values are read to.
pub(super) trait Arrivals {
    /// Reads a value of so many bytes, all of it.
    fn read(
        &mut self,
        connection: &mut Connection,
        wanted: &Wanted,
        len: usize,
        budget: &mut Budget,
    ) -> Outcome<()>;
}

/// How an operation went on.
pub(super) type Outcome<T> = Result<T, Trouble>;

pub(super) struct Link {
    connection: Option<Connection>,
    /// Values that were sent and not answered.
    owed: u64,
    rest: Rest,
    /// How long operations may wait for it.
    purse: Purse,
    common: Arc<Circumstances>,
    forged_in_a_row: u64,
    /// When it was in trouble last.
    troubled: Option<Instant>,
    full_until: Option<Instant>,
    /// What a value takes, about.
    typical: usize,
    asked: Option<Instant>,
    latency: Latency,
    /// In what time it answers, about.
    answers_in: Duration,
    /// It does not tell several values at once.
    one_by_one: bool,
    /// Whether it did not take or have a value because of its slot.
    turned_away: bool,
    pub(super) seen: ServerStats,
    /// What people should know, until somebody tells them; each kind of it once.
    pub(super) news: Option<String>,
    told: [bool; 5],
}

/// Kinds of news.
#[derive(Clone, Copy)]
pub(super) enum Told {
    Trouble,
    Full,
    Forged,
    NoSlots,
    Lost,
}

impl Link {
    pub(super) fn new(address: &Address, common: &Arc<Circumstances>) -> Self {
        let written = address.to_string();
        Self {
            connection: None,
            owed: 0,
            rest: Rest::new(&written, address.tls.is_some(), common),
            purse: Purse::new(common.wait),
            common: Arc::clone(common),
            forged_in_a_row: 0,
            troubled: None,
            full_until: None,
            typical: IN_FLIGHT / 4,
            asked: None,
            latency: Latency::new(),
            answers_in: Duration::ZERO,
            one_by_one: false,
            turned_away: false,
            seen: ServerStats { address: written, ..ServerStats::default() },
            news: None,
            told: [false; 5],
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

    /// What an operation may wait for it that ends then, after so many servers made it wait.
    pub(super) fn budget(&mut self, until: Instant, others: usize) -> Budget {
        self.purse.budget(until, others)
    }

    /// Takes back what was left of it.
    pub(super) fn put_back(&mut self, budget: &Budget) {
        self.purse.put_back(budget);
    }

    /// The end of an operation: trouble closes the connection and begins a rest.
    pub(super) fn settle<T>(&mut self, outcome: Outcome<T>) -> Option<T> {
        match outcome {
            Ok(done) => {
                if broken(Fault::EndRestUnanswered) {
                    self.rest.end();
                }
                Some(done)
            }
            Err(trouble) => {
                self.connection = None;
                self.drop_owed();
                if !matches!(trouble, Trouble::OutOfTime) {
                    self.seen.errors += 1;
                    self.common.counts.errors.fetch_add(1, Ordering::Relaxed);
                    self.troubled = Some(Instant::now());
                    self.rest.begin(&trouble);
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

    /// Nobody will know what became of values that were sent.
    fn drop_owed(&mut self) {
        let owed = std::mem::take(&mut self.owed);
        self.note_dropped(owed);
    }

    fn note_dropped(&mut self, values: u64) {
        self.seen.dropped += values;
        self.common.counts.dropped.fetch_add(values, Ordering::Relaxed);
    }

    /// The connection, made now if need be.
    fn connected(&mut self, address: &Address, budget: &mut Budget) -> Outcome<&mut Connection> {
        // Servers, and what stands in front of them, close connections that nobody uses.
        if self.owed == 0 && self.connection.as_mut().is_some_and(Connection::is_over) {
            self.connection = None;
        }
        if self.connection.is_none() {
            self.drop_owed(); // of one that a panic has ended
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
            Reply::Simple => {
                self.seen.fills += 1;
                self.common.counts.fills.fetch_add(1, Ordering::Relaxed);
            }
            // The value is gone: what was sent is not kept.
            Reply::Error(words) if Refused::parse(&words) != Refused::Wholly => {
                self.note_dropped(1);
                self.turned_away = true;
            }
            Reply::Error(words) => {
                self.note_dropped(1);
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
        self.rest.end();
        Ok(())
    }

    /// Waits until all that was sent is answered. Where the time does not suffice, the rest may be waited for again.
    pub(super) fn flush(&mut self, budget: &mut Budget) -> Outcome<()> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.send(budget)?;
        self.read_owed(budget)
    }

    /// Says of values that were sent and not answered that they may not be there.
    pub(super) fn tell_lost(&mut self, waited: Duration) {
        let (lost, seconds) = (self.owed, waited.as_secs_f64());
        self.tell(Told::Lost, |server| {
            format!(
                "{lost} samples that were sent to the server {server} may not be there: it did not say \
                 so within {seconds:.1} s; they are loaded and sent again when they are missed"
            )
        });
    }

    /// How many values were sent and not answered.
    pub(super) fn behind(&self) -> u64 {
        self.owed
    }

    // Reading

    /// Asks for the first of these values, without waiting for the answers. `alone`: each by itself, since it may be
    /// that another server has it.
    pub(super) fn ask<'w>(
        &mut self,
        address: &Address,
        wanted: &'w [Wanted],
        alone: bool,
        budget: &mut Budget,
    ) -> Outcome<Questions<'w>> {
        let window = self.window();
        let together = if alone || self.one_by_one || self.typical >= LONG { 1 } else { TOGETHER };
        let connection = self.connected(address, budget)?;
        let mut questions = Questions::new(wanted, together);
        questions.ask_more(connection, window);
        connection.try_send()?;
        self.asked = Some(Instant::now());
        Ok(questions)
    }

    /// How many values may be asked for and not read.
    fn window(&self) -> usize {
        if broken(Fault::AskForAll) {
            return usize::MAX;
        }
        let most = if self.answers_in < NEAR { MOST_NEARBY } else { MOST_IN_FLIGHT };
        (IN_FLIGHT / self.typical.max(1)).clamp(2, most)
    }

    /// Gets these values. `arrivals` reads each that is there; `sent` is told which of them are elsewhere. `first`:
    /// no answer of another server was read meanwhile.
    pub(super) fn receive(
        &mut self,
        mut questions: Questions<'_>,
        budget: &mut Budget,
        arrivals: &mut dyn Arrivals,
        sent: &mut Vec<(usize, Elsewhere)>,
        first: bool,
    ) -> Outcome<()> {
        // An answer that lies here already may have come long ago.
        let is_fresh = first || !self.catch_up(budget)?.has_reply()?;
        self.catch_up(budget)?;
        if !is_fresh {
            self.asked = None;
        }
        // Whatever ends this in the middle of an answer ends the connection.
        let Some(mut connection) = self.connection.take() else { return Err(Trouble::Late) };
        connection.expect(self.typical);
        while let Some(question) = questions.next() {
            if questions.ask_more_if_few(&mut connection, self.window()) {
                connection.send(budget)?;
            }
            let of = match question {
                Question::One(at) if questions.wanted[at].asking => {
                    match connection.reply(budget)? {
                        Reply::Simple | Reply::Error(_) => at..at + 1, // what follows is answered in any case
                        _ => return Err(Trouble::Nonsense("a question with something else")),
                    }
                }
                Question::One(at) => at..at + 1,
                Question::Some(all) => match connection.reply(budget)? {
                    Reply::Array(count) if count == all.len() => all,
                    // It is not allowed, or they are of several slots.
                    Reply::Error(_) => {
                        self.one_by_one = true;
                        questions.ask_again(&mut connection, all);
                        connection.send(budget)?;
                        continue;
                    }
                    _ => return Err(Trouble::Nonsense("a question with something else")),
                },
            };
            for at in of {
                budget.is_not_over()?;
                let reply = connection.reply(budget)?;
                self.note_answer();
                let one = &questions.wanted[at];
                self.take(&mut connection, reply, one, budget, arrivals, &mut |to| {
                    sent.push((at, to))
                })?;
                questions.is_answered();
            }
        }
        self.connection = Some(connection);
        budget.earn_an_answer();
        self.rest.end();
        Ok(())
    }

    fn note_answer(&mut self) {
        let Some(asked) = self.asked.take() else { return };
        let took = asked.elapsed();
        self.latency.note(took);
        self.answers_in = (self.answers_in * 7 + took) / 8;
    }

    /// Takes what is answered for a value.
    fn take(
        &mut self,
        connection: &mut Connection,
        reply: Reply,
        one: &Wanted,
        budget: &mut Budget,
        arrivals: &mut dyn Arrivals,
        elsewhere: &mut dyn FnMut(Elsewhere),
    ) -> Outcome<()> {
        match reply {
            Reply::Nil => self.seen.misses += 1,
            Reply::Bulk(len) if len <= MAX_VALUE => {
                arrivals.read(connection, one, len, budget)?;
                self.typical = (self.typical * 7 + len) / 8;
                self.seen.bytes_read += len as u64;
            }
            Reply::Bulk(_) => return Err(Trouble::Nonsense("more than there can be")),
            // The answers to what was asked for after it follow all the same.
            Reply::Error(words) => match Refused::parse(&words) {
                Refused::Elsewhere(to) => elsewhere(to),
                Refused::Nowhere => {
                    self.seen.misses += 1;
                    self.turned_away = true;
                }
                Refused::Wholly => return Err(Trouble::Refusal(words)),
            },
            _ => return Err(Trouble::Nonsense("a question with something else")),
        }
        Ok(())
    }

    /// Who has which slots, as this server says.
    pub(super) fn map(&mut self, address: &Address, budget: &mut Budget) -> Outcome<Map> {
        let connection = self.clean(address, budget)?;
        connection.queue(&[b"CLUSTER", b"SLOTS"]);
        connection.send(budget)?;
        let map = read_map(connection, budget)?;
        budget.earn_an_answer();
        self.rest.end();
        Ok(map)
    }

    /// It answered what others asked on the `clean` connection.
    pub(super) fn answered(&mut self) {
        self.rest.end();
    }

    /// Counts what values were that were read; trouble if they are all somebody else's.
    pub(super) fn note(&mut self, tally: &Tally) -> Outcome<()> {
        self.seen.hits += tally.ours;
        self.seen.misses += tally.unwanted + tally.forged;
        self.seen.forged += tally.forged;
        let before = if tally.ours > 0 { 0 } else { self.forged_in_a_row };
        self.forged_in_a_row = before + tally.forged;
        if tally.forged > 0 {
            self.tell_forged();
        }
        if self.forged_in_a_row >= MOST_FORGED { Err(Trouble::Strangers) } else { Ok(()) }
    }

    fn tell_forged(&mut self) {
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
