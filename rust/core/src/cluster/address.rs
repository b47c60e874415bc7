//! Servers as people write them: `redis://user:password@host:port,host:port`; with TLS
//! `rediss://host:port?ca=/path&cert=/path&key=/path`; and of many only those of a cell: `?cell=4-7`.

use super::tls::{Files, Tls};
use crate::error::{Error, Kind, Result};
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

const PORT: u16 = 6379;
/// What may stand behind the servers.
const KNOWN: [&str; 4] = ["ca", "cert", "key", "cell"];

/// Where a server is, and how to be let in.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// A name or a number.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Empty: the server's default user.
    pub user: String,
    /// Empty: it asks for none.
    pub password: String,
    /// How it is talked to in secret; None: openly.
    pub tls: Option<Arc<Tls>>,
}

/// The servers of such a text.
#[derive(Clone, Debug)]
pub struct Servers {
    /// Each once.
    pub all: Vec<Address>,
    /// Those which hold together the copy of a dataset that this node uses. One at least.
    pub cell: Range<usize>,
}

/// Without the password: this is what people see, and what a sample's server is chosen by.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads such a text. Who is let in stands before the first of the servers, or before each.
pub fn parse_servers(text: &str) -> Result<Servers> {
    let wrong = |what: &str| {
        let message = format!(
            "{what} in the cluster {:?}; use redis://host:port,host:port, or \
             redis://user:password@host:port,host:port, or rediss:// for TLS",
            without_passwords(text)
        );
        Error::new(Kind::Argument, message)
    };
    let (is_secret, rest) = match (text.strip_prefix("rediss://"), text.strip_prefix("redis://")) {
        (Some(rest), _) => (true, rest),
        (_, Some(rest)) => (false, rest),
        _ => return Err(wrong("there is no redis://")),
    };
    // A password may have a question mark, too.
    let is_query = |text: &str| {
        !text.contains('@') || KNOWN.iter().any(|known| text.starts_with(&format!("{known}=")))
    };
    let query = rest.match_indices('?').find(|(at, _)| is_query(&rest[at + 1..]));
    let (list, query) = query.map_or((rest, ""), |(at, _)| (&rest[..at], &rest[at + 1..]));
    let mut all: Vec<Address> = Vec::new();
    let (mut user, mut password) = (String::new(), String::new());
    for one in list.trim_end_matches('/').split(',').map(str::trim) {
        let (login, place) = match one.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, one),
        };
        if let Some(login) = login {
            let (name, word) = login.split_once(':').unwrap_or(("", login));
            let plain = |text| unescaped(text).ok_or_else(|| wrong("there is a bad % sign"));
            (user, password) = (plain(name)?, plain(word)?);
        }
        let (host, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, rest)) => {
                (host, Some(rest.strip_prefix(':').ok_or_else(|| wrong("there is no port"))?))
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        let port = match port {
            None => PORT,
            Some(port) => match port.parse() {
                Ok(0) | Err(_) if is_number(port) => {
                    return Err(wrong(&format!("the port {port} is none")));
                }
                // Of what has no @, this may be a password.
                Ok(0) | Err(_) => return Err(wrong("there is a port that is no number")),
                Ok(port) => port,
            },
        };
        if host.is_empty()
            || host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/')
        {
            return Err(wrong("there is no host"));
        }
        let (host, user, password) = (host.into(), user.clone(), password.clone());
        let address = Address { host, port, user, password, tls: None };
        if all.iter().any(|other| other.to_string() == address.to_string()) {
            return Err(wrong(&format!("{address} stands twice")));
        }
        all.push(address);
    }
    let mut cell = 0..all.len();
    let mut files = Files::default();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (what, value) = part.split_once('=').unwrap_or((part, ""));
        let value = unescaped(value).filter(|value| !value.is_empty());
        let value = value.ok_or_else(|| wrong("a word behind ? has no value that can be read"))?;
        match what {
            "ca" => files.ca = Some(PathBuf::from(value)),
            "cert" => files.cert = Some(PathBuf::from(value)),
            "key" => files.key = Some(PathBuf::from(value)),
            "cell" => {
                let range = cell_of(&value, all.len());
                cell = range.ok_or_else(|| wrong("there is no such cell"))?;
            }
            _ => return Err(wrong("there is a word behind ? that nobody knows")),
        }
    }
    if is_secret {
        let tls = Arc::new(Tls::new(files)?);
        all.iter_mut().for_each(|address| address.tls = Some(Arc::clone(&tls)));
    } else if files != Files::default() {
        return Err(wrong("files for TLS, which is rediss://, are given without it"));
    }
    Ok(Servers { all, cell })
}

/// `4-7`: from the fifth server to the eighth.
fn cell_of(text: &str, servers: usize) -> Option<Range<usize>> {
    let (first, last) = text.split_once('-')?;
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < servers).then(|| first..last + 1)
}

/// `%40` is an @.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

/// What is surely none of a password: hosts and ports behind the last login. Passwords may have commas, and may
/// stand where somebody forgot the host.
fn without_passwords(text: &str) -> String {
    let (scheme, list) = text.split_once("://").unwrap_or(("", text));
    let scheme = if ["redis", "rediss"].contains(&scheme) { scheme } else { "…" };
    let (login, places) = list.rsplit_once('@').map_or(("", list), |(_, places)| ("…@", places));
    let places = places.split('?').next().unwrap_or_default().trim_end_matches('/');
    let is_place = |place: &str| place.rsplit_once(':').is_none_or(|(_, port)| is_number(port));
    let shown = |place| if is_place(place) { place } else { "…" };
    let places: Vec<&str> = places.split(',').map(shown).collect();
    format!("{scheme}://{login}{}", places.join(","))
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<String> {
        let full = |a: &Address| format!("{a} {} {}", a.user, a.password);
        parse_servers(text).unwrap().all.iter().map(full).collect()
    }

    #[test]
    fn servers_are_read_as_people_write_them() {
        assert_eq!(shown("redis://10.0.0.1:7000,node-2"), ["10.0.0.1:7000  ", "node-2:6379  "]);
        assert_eq!(shown("redis://u:p%40x@a:1,b:2/"), ["a:1 u p@x", "b:2 u p@x"]);
        assert_eq!(
            shown("redis://:word@[::1]:7,[fe80::2]"),
            ["[::1]:7  word", "[fe80::2]:6379  word"]
        );
        assert_eq!(shown("redis://a:x@h:1,b:y@h:2"), ["h:1 a x", "h:2 b y"]);
        assert_eq!(shown("redis://:what?@h:1"), ["h:1  what?"]);
        assert_eq!(shown("redis://:wh?t@g:1,h:1?cell=0-0"), ["g:1  wh?t", "h:1  wh?t"]);
        assert_eq!(parse_servers("redis://a,b,c,d").unwrap().cell, 0..4);
        assert_eq!(parse_servers("redis://a,b,c,d/?cell=1-2").unwrap().cell, 1..3);
        let ca = crate::cluster::tls::signer("address");
        let text = format!("rediss://a:7,b?ca={}&cell=1-1", ca.display());
        let servers = parse_servers(&text).unwrap();
        assert!(servers.all.iter().all(|address| address.tls.is_some()) && servers.cell == (1..2));
        std::fs::remove_file(ca).unwrap();
    }

    #[test]
    fn files_that_are_none_are_told_when_they_are_given() {
        let none = std::env::temp_dir().join(format!("stocache-empty-{}.pem", std::process::id()));
        std::fs::write(&none, "no certificate").unwrap();
        let none = none.display();
        for (query, words) in [
            ("ca=/no/such/file".to_string(), "ca=/no/such/file of the cluster is not used"),
            (format!("ca={none}"), "there is no certificate in it"),
            (format!("cert={none}"), "there is no certificate in it"),
            (format!("key={none}"), "without cert="),
        ] {
            let error = parse_servers(&format!("rediss://u:secret@a:1?{query}")).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(words) && !error.contains("secret"), "{error}");
        }
        std::fs::remove_file(none.to_string()).unwrap();
    }

    #[test]
    fn what_is_no_list_of_servers_is_refused_without_a_word_of_passwords() {
        let all = [
            "",
            "10.0.0.1:7000",
            "redis://",
            "redis://a:0",
            "redis://a:x",
            "redis://a:1,,b:1",
            "redis://a:1,a:1",
            "redis://u:secret%4@a:1",
            "redis://u:secret@a:1?ca=/a@b",
            "redis://u:secret@a:1,b:1?cell=1-2",
            "redis://u:secret@a:1,b:1?cell=1-0",
            "redis://u:secret@a:1?cell",
            "redis://u:secret@a:1?db=0",
            "redis://[::1]x",
            "redis://:secret@a:99999",
            "redis://user:secret",
            "redis://user:secret,a:1",
            "redis://user:also,secret@a:0",
            "redis://user:secret,also@a:0",
            "redis://a:0,user:secret@b:1",
            "redis://user:12?secret",
            "redis://user:12?secret=x",
            "redis://a:1?cell=secret",
            "http://user:secret@a:1",
            "user:secret@a:1",
            "user:secret",
            "redis://user:secret@a:0?ca=/x@y",
        ];
        for text in all {
            let error = parse_servers(text).unwrap_err().to_string();
            assert!(error.contains("use redis://host:port"), "{text}: {error}");
            assert!(!error.contains("secret") && !error.contains("also"), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
