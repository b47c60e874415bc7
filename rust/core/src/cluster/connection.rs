//! Bytes to and from a server.
//!
//! The socket never blocks; whoever has to wait does so on a budget. Replies are read into memory that is used
//! again: small ones many at a time into one buffer, the bytes of a large one past it to where they belong.

use super::address::Address;
use super::budget::{Budget, Trouble};
use super::stream::Stream;
use rustix::event::PollFlags;
use rustix::net::sockopt::set_socket_keepalive;
use std::io::{ErrorKind, IoSliceMut, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

const BUFFER: usize = 64 << 10;
/// Of a value from this length on, so much is read into the buffer.
pub(super) const LONG: usize = 16 << 10;
const AHEAD: usize = 4 << 10;
/// No line of a reply that we ask for is longer, save the words of an error, which may be cut.
const LONGEST_LINE: usize = 4 << 10;
/// Of the words of an error: a name of a host fits.
const LONGEST_WORDS: usize = 300;
/// Memory for commands that is kept; and of what has gone.
const KEPT_OUT: usize = 8 << 20;
const KEPT_SENT: usize = 1 << 20;

/// What a reply begins with.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// `+OK`
    Simple,
    /// `-ERR words`
    Error(String),
    /// `:7`
    Number(i64),
    /// So many bytes follow, then a line end.
    Bulk(usize),
    /// There is nothing under that name.
    Nil,
    /// So many replies follow.
    Array(usize),
}

/// A server that let us in.
pub(super) struct Connection {
    stream: Stream,
    buffer: Box<[u8]>,
    /// What was read and not yet taken.
    start: usize,
    end: usize,
    /// Commands, and how much of them has gone.
    out: Vec<u8>,
    sent: usize,
    /// So much is read into the buffer at once.
    ahead: usize,
}

impl Connection {
    pub(super) fn open(address: &Address, budget: &mut Budget) -> Result<Self, Trouble> {
        let began = Instant::now();
        let socket =
            resolved(address, budget, by_name).and_then(|places| connected(&places, budget, began));
        budget.spend(began);
        let socket = socket?;
        let prepared = socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true));
        prepared.map_err(|error| Trouble::of(&error))?;
        // So that who forgets idle connections on the way does not; a comfort, no more.
        let _kept_alive = set_socket_keepalive(&socket, true);
        let stream = Stream::open(socket, address, budget)?;
        let buffer = vec![0; BUFFER].into_boxed_slice();
        let mut made =
            Self { stream, buffer, start: 0, end: 0, out: Vec::new(), sent: 0, ahead: BUFFER };
        let word = address.password.as_bytes();
        let given: &[&[u8]] = match (address.user.is_empty(), word.is_empty()) {
            (true, true) => return Ok(made),
            (true, false) => &[b"AUTH", word],
            (false, _) => &[b"AUTH", address.user.as_bytes(), word],
        };
        made.queue(given);
        made.send(budget)?;
        match made.reply(budget)? {
            Reply::Simple => Ok(made),
            Reply::Error(words) => Err(Trouble::Refusal(of_login(&words, address))),
            _ => Err(Trouble::Nonsense("a login with something else")),
        }
    }

    // Commands

    /// Takes a command, to be sent.
    pub(super) fn queue(&mut self, words: &[&[u8]]) {
        self.begin(words.len());
        words.iter().for_each(|word| self.word(&[word]));
    }

    /// Begins a command of so many words.
    pub(super) fn begin(&mut self, words: usize) {
        self.number(b'*', words);
    }

    /// The next word of a command, in parts.
    pub(super) fn word(&mut self, parts: &[&[u8]]) {
        self.number(b'$', parts.iter().map(|part| part.len()).sum());
        parts.iter().for_each(|part| self.out.extend_from_slice(part));
        self.out.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, kind: u8, number: usize) {
        self.out.push(kind);
        // Into a Vec, which takes all.
        let _ = write!(self.out, "{number}\r\n");
    }

    /// Bytes that wait to be sent.
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent + usize::from(self.stream.is_behind())
    }

    #[cfg(test)]
    pub(super) fn queue_capacity(&self) -> usize {
        self.out.capacity()
    }

    /// Sends what goes without waiting.
    pub(super) fn try_send(&mut self) -> Result<(), Trouble> {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(0) => return Err(Trouble::Gone("the connection was closed".into())),
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // A queue that is never empty would grow for ever.
                    if self.sent > KEPT_SENT {
                        self.out.drain(..std::mem::take(&mut self.sent));
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Trouble::of(&error)),
            }
        }
        self.out.clear();
        self.out.shrink_to(KEPT_OUT);
        self.sent = 0;
        self.stream.flush().map(|_| ()).map_err(|error| Trouble::of(&error))
    }

    /// Sends all.
    pub(super) fn send(&mut self, budget: &mut Budget) -> Result<(), Trouble> {
        loop {
            let before = self.unsent();
            self.try_send()?;
            if self.unsent() == 0 {
                return Ok(());
            }
            budget.earn(before.saturating_sub(self.unsent()));
            budget.wait(self.stream.socket(), PollFlags::OUT)?;
        }
    }

    /// Says about how long the next values are: of long ones little is read into the buffer, from where it would
    /// have to be copied.
    pub(super) fn expect(&mut self, typical: usize) {
        self.ahead = if typical < LONG { BUFFER } else { AHEAD };
    }

    // Replies

    /// Whether a reply, or a part of one, is there without waiting.
    pub(super) fn has_reply(&mut self) -> Result<bool, Trouble> {
        Ok(self.start < self.end || self.try_fill()? > 0)
    }

    /// Whether the server has ended it, as far as that is known without waiting; where no reply is owed.
    pub(super) fn is_over(&mut self) -> bool {
        self.unsent() == 0 && self.has_reply().is_err()
    }

    /// What the next reply begins with.
    pub(super) fn reply(&mut self, budget: &mut Budget) -> Result<Reply, Trouble> {
        let line = self.line(budget)?;
        let (&kind, rest) = line.split_first().ok_or(Trouble::Nonsense("an empty line"))?;
        let text = std::str::from_utf8(rest).unwrap_or("?");
        let number = || text.parse::<i64>().map_err(|_| Trouble::Nonsense("a length that is none"));
        let length = |number: i64| {
            usize::try_from(number).map_err(|_| Trouble::Nonsense("a length that is none"))
        };
        match kind {
            b'+' => Ok(Reply::Simple),
            b'-' => Ok(Reply::Error(
                text.chars().filter(|c| !c.is_control()).take(LONGEST_WORDS).collect(),
            )),
            b':' => Ok(Reply::Number(number()?)),
            b'$' if rest == b"-1" => Ok(Reply::Nil),
            b'$' => Ok(Reply::Bulk(length(number()?)?)),
            b'*' => Ok(Reply::Array(length(number()?)?)),
            _ => Err(Trouble::Nonsense("in another protocol")),
        }
    }

    /// The bytes of a bulk, or the next of them.
    pub(super) fn read(&mut self, mut into: &mut [u8], budget: &mut Budget) -> Result<(), Trouble> {
        loop {
            let here = into.len().min(self.end - self.start);
            into[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
            self.start += here;
            into = &mut into[here..];
            if into.is_empty() {
                return Ok(());
            }
            // The buffer is empty: the rest, and what follows it.
            let want = into.len();
            let mut both = [IoSliceMut::new(into), IoSliceMut::new(&mut self.buffer[..self.ahead])];
            match self.stream.read_vectored(&mut both) {
                Ok(0) => return Err(Trouble::Gone("the connection was closed".into())),
                Ok(n) => {
                    budget.earn(n);
                    (self.start, self.end) = (0, n.saturating_sub(want));
                    into = &mut into[n.min(want)..];
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    budget.wait(self.stream.socket(), PollFlags::IN)?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Trouble::of(&error)),
            }
        }
    }

    /// Leaves out so many bytes of a bulk.
    pub(super) fn skip(&mut self, mut len: usize, budget: &mut Budget) -> Result<(), Trouble> {
        while len > 0 {
            if self.start == self.end {
                self.fill(budget)?;
            }
            let here = len.min(self.end - self.start);
            self.start += here;
            len -= here;
        }
        Ok(())
    }

    /// The end of a bulk.
    pub(super) fn end_of_bulk(&mut self, budget: &mut Budget) -> Result<(), Trouble> {
        let mut end = [0; 2];
        self.read(&mut end, budget)?;
        if end == *b"\r\n" { Ok(()) } else { Err(Trouble::Nonsense("more than it announced")) }
    }

    /// A bulk of so many bytes, copied.
    pub(super) fn bulk(
        &mut self,
        len: usize,
        most: usize,
        budget: &mut Budget,
    ) -> Result<Vec<u8>, Trouble> {
        if len > most {
            return Err(Trouble::Nonsense("more than anybody asked for"));
        }
        let mut bytes = vec![0; len];
        self.read(&mut bytes, budget)?;
        self.end_of_bulk(budget)?;
        Ok(bytes)
    }

    fn line(&mut self, budget: &mut Budget) -> Result<&[u8], Trouble> {
        let mut seen = 0;
        loop {
            let have = &self.buffer[self.start..self.end];
            if let Some(at) = have[seen..].iter().position(|&byte| byte == b'\n') {
                let (from, to) = (self.start, self.start + seen + at);
                self.start = to + 1;
                let line = &self.buffer[from..to];
                return line.strip_suffix(b"\r").ok_or(Trouble::Nonsense("a line without an end"));
            }
            seen = have.len();
            if seen > LONGEST_LINE {
                return Err(Trouble::Nonsense("a line without an end"));
            }
            self.fill(budget)?;
        }
    }

    /// Reads more; at least a byte.
    fn fill(&mut self, budget: &mut Budget) -> Result<(), Trouble> {
        loop {
            match self.try_fill()? {
                0 => budget.wait(self.stream.socket(), PollFlags::IN)?,
                n => {
                    budget.earn(n);
                    return Ok(());
                }
            }
        }
    }

    /// Reads what is there without waiting: so many bytes.
    fn try_fill(&mut self) -> Result<usize, Trouble> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        loop {
            let to = BUFFER.min(self.end + self.ahead);
            match self.stream.read(&mut self.buffer[self.end..to]) {
                Ok(0) => return Err(Trouble::Gone("the connection was closed".into())),
                Ok(n) => {
                    self.end += n;
                    return Ok(n);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(0),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Trouble::of(&error)),
            }
        }
    }
}

/// What a server says to a login, without what it may repeat of it.
fn of_login(words: &str, address: &Address) -> String {
    let code = words.split(' ').next().unwrap_or_default();
    let is_code = !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_uppercase());
    let is_known = |word: &str| word.contains(code);
    if is_code && !is_known(&address.user) && !is_known(&address.password) {
        format!("{code} to the login")
    } else {
        "no to the login".into()
    }
}

/// Where a server is now. Names are looked up anew for each connection, on a thread that may be given up:
/// nobody can say how long that takes.
pub(super) fn resolved(
    address: &Address,
    budget: &Budget,
    look_up: fn(&str, u16) -> std::io::Result<Vec<SocketAddr>>,
) -> Result<Vec<SocketAddr>, Trouble> {
    let port = address.port;
    if let Ok(number) = address.host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(number, port)]);
    }
    let (answer, answered) = mpsc::channel();
    let host = address.host.clone();
    let tell = move || {
        let _given_up = answer.send(look_up(&host, port));
    };
    let thread = std::thread::Builder::new().name("stocache-name".into()).spawn(tell);
    thread.map_err(|error| Trouble::of(&error))?;
    match answered.recv_timeout(budget.left()?) {
        Ok(Ok(places)) => Ok(places),
        Ok(Err(error)) => Err(Trouble::of(&error)),
        Err(_) => Err(Trouble::Late),
    }
}

fn by_name(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    (host, port).to_socket_addrs().map(Iterator::collect)
}

/// A connection to the first of these that takes one; each gets its part of the time that is left.
pub(super) fn connected(
    places: &[SocketAddr],
    budget: &Budget,
    began: Instant,
) -> Result<TcpStream, Trouble> {
    let mut last = Trouble::Gone("its name leads nowhere".into());
    for (at, place) in places.iter().enumerate() {
        let left = budget.left()?.saturating_sub(began.elapsed()) / (places.len() - at) as u32;
        if left.is_zero() {
            return Err(Trouble::Late);
        }
        match TcpStream::connect_timeout(place, left) {
            Ok(socket) => return Ok(socket),
            Err(error) if error.kind() == ErrorKind::TimedOut => last = Trouble::Late,
            // What was waited for another one counts.
            Err(error) if !matches!(last, Trouble::Late) => last = Trouble::of(&error),
            Err(_) => {}
        }
    }
    Err(last)
}
