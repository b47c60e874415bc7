//! Servers as people write them: `redis://user:password@host:port,host:port`.

use crate::error::{Error, Kind, Result};
use std::fmt;

const PORT: u16 = 6379;

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

/// The servers of such a text, each once. Who is let in stands before the first of them, or before each.
pub fn parse_addresses(text: &str) -> Result<Vec<Address>> {
    let wrong = |what: &str| {
        let message = format!(
            "{what} in the cluster {:?}; use redis://host:port,host:port, or \
             redis://user:password@host:port,host:port",
            without_passwords(text)
        );
        Error::new(Kind::Argument, message)
    };
    if text.starts_with("rediss://") {
        return Err(wrong("TLS (rediss://) is not supported"));
    }
    let Some(list) = text.strip_prefix("redis://") else {
        return Err(wrong("there is no redis://"));
    };
    let mut found: Vec<Address> = Vec::new();
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
                Ok(0) | Err(_) => return Err(wrong(&format!("the port {port:?} is none"))),
                Ok(port) => port,
            },
        };
        if host.is_empty()
            || host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/')
        {
            return Err(wrong("there is no host"));
        }
        let address =
            Address { host: host.into(), port, user: user.clone(), password: password.clone() };
        if found.iter().any(|other| other.to_string() == address.to_string()) {
            return Err(wrong(&format!("{address} stands twice")));
        }
        found.push(address);
    }
    Ok(found)
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

fn without_passwords(text: &str) -> String {
    let shown = |one: &str| match one.rsplit_once('@') {
        Some((_, place)) => format!("…@{place}"),
        None => one.to_string(),
    };
    let (scheme, list) = text.split_once("://").unwrap_or(("", text));
    let list: Vec<String> = list.split(',').map(shown).collect();
    if scheme.is_empty() { list.join(",") } else { format!("{scheme}://{}", list.join(",")) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn shown(text: &str) -> Vec<String> {
        let full = |a: &Address| format!("{a} {} {}", a.user, a.password);
        parse_addresses(text).unwrap().iter().map(full).collect()
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
            "rediss://u:secret@a:1",
            "redis://[::1]x",
            "redis://:secret@a:99999",
        ];
        for text in all {
            let error = parse_addresses(text).unwrap_err().to_string();
            assert!(error.contains("use redis://host:port"), "{text}: {error}");
            assert!(!error.contains("secret"), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
