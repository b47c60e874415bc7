//! The slots of servers that run as a native cluster: which one a name has, who has which, and where a server
//! sends those who ask it for what another has.
//!
//! ```text
//!   GET name   ──►  -MOVED 3999 10.0.0.2:7000   the slot is there now
//!              ──►  -ASK 3999 10.0.0.2:7000     it is on its way there: ask there this time, after ASKING
//!              ──►  -CLUSTERDOWN …              nobody has it now
//! ```

use super::budget::{Budget, Trouble};
use super::connection::{Connection, Reply};
use std::net::Ipv6Addr;

/// Of a cluster, however many servers it has.
pub(super) const SLOTS: usize = 16_384;
/// No host that a server names is longer, nor is anything else in its map.
const LONGEST_WORD: usize = 1 << 10;
/// What a map may consist of: slots one by one, with many replicas each, are less.
const MOST_PARTS: usize = 1 << 20;
const DEEPEST: usize = 5;

/// CRC-16/XMODEM of each byte.
const CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// The slot of a name. Names of ours have no `{`, with which a part alone would count.
pub(super) fn slot_of(name: &[u8]) -> u16 {
    debug_assert!(!name.contains(&b'{'));
    let next = |crc: u16, &byte: &u8| crc << 8 ^ CRC[usize::from(crc >> 8) ^ usize::from(byte)];
    name.iter().fold(0, next) % SLOTS as u16
}

/// Where a server is, as another one says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// None: where that one is.
    pub(super) host: Option<String>,
    pub(super) port: u16,
}

impl Place {
    /// None if nobody could be there.
    fn new(host: &str, port: i64) -> Option<Self> {
        let port = u16::try_from(port).ok().filter(|&port| port != 0)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let good = host.chars().all(plain) || host.parse::<Ipv6Addr>().is_ok();
        good.then(|| Self { host: (!host.is_empty()).then(|| host.to_string()), port })
    }
}

/// Where a server sends us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Elsewhere {
    pub(super) slot: u16,
    pub(super) place: Place,
    /// ASK: the slot is on its way.
    pub(super) this_time: bool,
}

/// What an error that answers a question means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    Elsewhere(Elsewhere),
    /// Nobody has it now.
    Nowhere,
    /// The server does not do what it is asked for.
    Wholly,
}

impl Refused {
    pub(super) fn parse(words: &str) -> Self {
        let mut parts = words.split(' ');
        match parts.next() {
            Some(kind @ ("MOVED" | "ASK")) => {
                let slot = parts.next().and_then(|slot| slot.parse().ok());
                let slot = slot.filter(|&slot: &u16| usize::from(slot) < SLOTS);
                let place = parts.next().and_then(|place| place.rsplit_once(':'));
                let place = place.and_then(|(host, port)| Place::new(host, port.parse().ok()?));
                match (slot, place) {
                    (Some(slot), Some(place)) => {
                        Self::Elsewhere(Elsewhere { slot, place, this_time: kind == "ASK" })
                    }
                    _ => Self::Nowhere, // it does not know where
                }
            }
            Some("CLUSTERDOWN" | "TRYAGAIN") => Self::Nowhere,
            _ => Self::Wholly,
        }
    }
}

/// Slots next to each other, and who has them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) place: Place,
}

/// What a server says of slots.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Map {
    Runs(Vec<Run>),
    /// It knows of none, in these words.
    Without(String),
}

const NO_MAP: Trouble = Trouble::Nonsense("a question for its slots with something else");

/// The answer to CLUSTER SLOTS: `[[first, last, [host, port, …], replicas…], …]`.
pub(super) fn read_map(connection: &mut Connection, budget: &mut Budget) -> Result<Map, Trouble> {
    let count = match connection.reply(budget)? {
        Reply::Error(words) => return Ok(Map::Without(words)),
        Reply::Array(count) if count <= SLOTS => count,
        _ => return Err(NO_MAP),
    };
    let mut runs = Vec::new();
    let mut parts = MOST_PARTS;
    for _ in 0..count {
        let Reply::Array(fields) = connection.reply(budget)? else { return Err(NO_MAP) };
        if fields < 2 {
            return Err(NO_MAP);
        }
        let (first, last) = (slot(connection, budget)?, slot(connection, budget)?);
        let mut place = None;
        for field in 2..fields {
            if field == 2 {
                place = read_place(connection, &mut parts, budget)?;
            } else {
                leave_out(connection, &mut parts, DEEPEST, budget)?;
            }
        }
        if let Some(place) = place.filter(|_| first <= last) {
            runs.push(Run { first, last, place });
        }
    }
    Ok(Map::Runs(runs))
}

fn slot(connection: &mut Connection, budget: &mut Budget) -> Result<u16, Trouble> {
    match connection.reply(budget)? {
        Reply::Number(slot @ 0..16_384) => Ok(slot as u16),
        _ => Err(NO_MAP),
    }
}

fn read_place(
    connection: &mut Connection,
    parts: &mut usize,
    budget: &mut Budget,
) -> Result<Option<Place>, Trouble> {
    let fields = match connection.reply(budget)? {
        Reply::Array(fields) if fields >= 2 => fields,
        _ => return Err(NO_MAP),
    };
    let host = match connection.reply(budget)? {
        Reply::Bulk(len) => connection.bulk(len, LONGEST_WORD, budget)?,
        Reply::Nil => Vec::new(),
        _ => return Err(NO_MAP),
    };
    let Reply::Number(port) = connection.reply(budget)? else { return Err(NO_MAP) };
    for _ in 2..fields {
        leave_out(connection, parts, DEEPEST, budget)?;
    }
    Ok(std::str::from_utf8(&host).ok().and_then(|host| Place::new(host, port)))
}

/// Reads on over a reply, whatever it consists of.
fn leave_out(
    connection: &mut Connection,
    parts: &mut usize,
    depth: usize,
    budget: &mut Budget,
) -> Result<(), Trouble> {
    *parts = parts.checked_sub(1).ok_or(NO_MAP)?;
    match connection.reply(budget)? {
        Reply::Simple | Reply::Number(_) | Reply::Nil => Ok(()),
        Reply::Bulk(len) if len <= LONGEST_WORD => {
            connection.skip(len, budget)?;
            connection.end_of_bulk(budget)
        }
        Reply::Array(count) if depth > 0 => {
            (0..count).try_for_each(|_| leave_out(connection, parts, depth - 1, budget))
        }
        _ => Err(NO_MAP),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_that_servers_compute() {
        // From the specification, and from CLUSTER KEYSLOT of a server.
        assert_eq!(CRC[1], 0x1021);
        assert_eq!(slot_of(b"123456789"), 0x31c3);
        assert_eq!([slot_of(b"foo"), slot_of(b"somekey"), slot_of(b"")], [12_182, 11_058, 0]);
    }

    #[test]
    fn servers_say_where_to_ask() {
        let sent = |words: &str| match Refused::parse(words) {
            Refused::Elsewhere(to) => (to.slot, to.place.host, to.place.port, to.this_time),
            other => panic!("{words}: {other:?}"),
        };
        let host = |host: &str| Some(host.to_string());
        assert_eq!(sent("MOVED 3999 127.0.0.1:6381"), (3999, host("127.0.0.1"), 6381, false));
        assert_eq!(sent("ASK 0 node-2.example:1"), (0, host("node-2.example"), 1, true));
        assert_eq!(sent("MOVED 1 ::1:7000"), (1, host("::1"), 7000, false));
        assert_eq!(sent("MOVED 16383 :7000"), (16_383, None, 7000, false));
        for words in [
            "MOVED",
            "MOVED 1",
            "MOVED 1 ?:7000",
            "MOVED 16384 a:1",
            "MOVED 1 a:0",
            "MOVED 1 a:70000",
            "ASK 1 a",
            "ASK -1 a:1",
            "MOVED 1 a/b:1",
            "MOVED 1 a@b:1",
            "CLUSTERDOWN Hash slot not served",
            "TRYAGAIN Multiple keys",
        ] {
            assert_eq!(Refused::parse(words), Refused::Nowhere, "{words}");
        }
        for words in ["", "ERR unknown command", "NOAUTH", "moved 1 a:1", "LOADING", "OOM"] {
            assert_eq!(Refused::parse(words), Refused::Wholly, "{words}");
        }
    }
}
