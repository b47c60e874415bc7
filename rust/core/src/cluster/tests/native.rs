//! Servers that run as a native cluster.

use super::*;
use crate::cluster::slots::slot_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

const SAMPLES: u64 = 500;

/// A server of a native cluster, with a folder for what it knows of the others.
struct Member {
    server: Server,
    id: String,
    folder: PathBuf,
}

impl Drop for Member {
    fn drop(&mut self) {
        let _gone = self.server.process.kill();
        let _gone = self.server.process.wait();
        let _gone = std::fs::remove_dir_all(&self.folder);
    }
}

/// A port that is free, as is the one of its talks with others, ten thousand above.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    for _ in 0..1_000 {
        let step = NEXT.fetch_add(1, Relaxed);
        let port = 20_000 + (std::process::id() as u16 % 1_200 * 10 + step) % 12_000;
        let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + 10_000) {
            return port;
        }
    }
    panic!("no port is free");
}

impl Member {
    fn start(config: &str) -> Option<Self> {
        program_or_word()?;
        let port = port();
        let folder = std::env::temp_dir().join(format!("stocache-native-{port}"));
        std::fs::create_dir_all(&folder).unwrap();
        let config = format!(
            "port {port}\nbind 127.0.0.1\nsave \"\"\nappendonly no\ndir {}\ncluster-enabled yes\n\
             cluster-node-timeout 2000\ncluster-require-full-coverage no\n{config}\n",
            folder.display()
        );
        let server = Server { process: Server::run(&config), port, config };
        let mut member = Self { server, id: String::new(), folder };
        member.server.wait();
        member.id = member.ask(&["CLUSTER", "MYID"]);
        Some(member)
    }

    /// What it says, in one line; the lengths of lists are left out.
    fn ask(&self, words: &[&str]) -> String {
        let (mut raw, mut budget) = self.server.raw();
        raw.queue(&words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>());
        raw.send(&mut budget).unwrap();
        match raw.reply(&mut budget).unwrap() {
            Reply::Bulk(len) => {
                String::from_utf8(raw.bulk(len, 1 << 20, &mut budget).unwrap()).unwrap()
            }
            Reply::Error(words) => panic!("{words}"),
            other => format!("{other:?}"),
        }
    }

    fn owns(&self, first: u16, last: u16) {
        self.ask(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
    }

    fn port(&self) -> String {
        self.server.port.to_string()
    }
}

/// Until all agree.
fn agree(members: &[Member], lines: usize) {
    for _ in 0..1_500 {
        let knows = |member: &Member| {
            let nodes = member.ask(&["CLUSTER", "NODES"]);
            let good = |line: &str| line.contains(" connected") && !line.contains("handshake");
            nodes.lines().filter(|line| good(line) && line.split(' ').count() > 8).count() == lines
                && member.ask(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        };
        if members.iter().all(knows) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("the servers do not make a cluster");
}

/// Three servers with a third of the slots each.
fn three(config: &str) -> Option<Vec<Member>> {
    let members: Vec<Member> = (0..3).map_while(|_| Member::start(config)).collect();
    let [a, b, c] = &members[..] else { return None };
    a.owns(0, 5_460);
    b.owns(5_461, 10_922);
    c.owns(10_923, 16_383);
    for (epoch, member) in members.iter().enumerate() {
        member.ask(&["CLUSTER", "SET-CONFIG-EPOCH", &(epoch + 1).to_string()]);
        a.ask(&["CLUSTER", "MEET", "127.0.0.1", &member.port()]);
    }
    agree(&members, 3);
    Some(members)
}

fn of_seed(member: &Member) -> ClusterStore {
    of(&member.server)
}

fn filled(store: &ClusterStore) -> Vec<u64> {
    let keys: Vec<u64> = (0..SAMPLES).collect();
    assert!(keys.iter().all(|&key| put(store, key, &value(key))));
    assert!(store.flush(Duration::from_secs(10)));
    assert_eq!(store.stats().iter().map(|seen| seen.fills).sum::<u64>(), SAMPLES);
    keys
}

#[test]
fn servers_of_a_native_cluster_are_one_store() {
    let Some(members) = three("") else { return };
    let writer = of_seed(&members[0]);
    let keys = filled(&writer);
    // Each by another server to start with; by what it is told, not by what it asked before.
    for member in &members {
        let reader = of_seed(member);
        assert_eq!(get(&reader, &keys).1, Received { hits: SAMPLES, errors: 0 });
        assert_eq!(reader.news(), None);
        let seen = reader.stats();
        assert!(seen.len() == 3 && seen.iter().all(|it| it.hits > 100), "{seen:?}");
        assert_eq!(get(&reader, &keys).1.hits, SAMPLES);
    }
    let counted = of_seed(&members[1]);
    let held: Vec<u64> = counted.holdings().iter().map(|it| it.samples.unwrap()).collect();
    assert!(held.len() == 3 && held.iter().sum::<u64>() == SAMPLES, "{held:?}");
    let both = url(&[members[0].server.port, members[2].server.port]);
    let reader = store(&both, b"secret", FINGERPRINT);
    assert_eq!(get(&reader, &keys).1, Received { hits: SAMPLES, errors: 0 });
    assert!(reader.put_value(9, SCHEMA, b"bytes", soon()));
    assert_eq!(writer.get_value(9, soon()).unwrap().1, b"bytes");
    let other = store(&both, b"secret", FINGERPRINT + 1);
    other.clear().unwrap();
    assert_eq!(get(&reader, &keys).1.hits, SAMPLES);
    of_seed(&members[2]).clear().unwrap();
    assert_eq!(get(&reader, &keys).1, NONE);
    assert_eq!(reader.holdings().iter().map(|it| it.samples.unwrap()).sum::<u64>(), 0);
}

/// Moves the values of a slot one by one, as tools do it; the slot itself when they are there.
fn move_slot(from: &Member, to: &Member, slot: u16, names: &[String], between: impl Fn()) {
    let text = slot.to_string();
    to.ask(&["CLUSTER", "SETSLOT", &text, "IMPORTING", &from.id]);
    from.ask(&["CLUSTER", "SETSLOT", &text, "MIGRATING", &to.id]);
    for name in names {
        from.ask(&["MIGRATE", "127.0.0.1", &to.port(), name, "0", "5000"]);
        between();
    }
    to.ask(&["CLUSTER", "SETSLOT", &text, "NODE", &to.id]);
    from.ask(&["CLUSTER", "SETSLOT", &text, "NODE", &to.id]);
}

#[test]
fn slots_that_move_while_they_are_read_are_found() {
    let Some(members) = three("") else { return };
    let (from, to) = (&members[0], &members[2]);
    let writer = of_seed(from);
    let keys = filled(&writer);
    let name = |key: u64| String::from_utf8(writer.name_of_test(key)).unwrap();
    let mut moving: BTreeMap<u16, Vec<String>> = BTreeMap::new();
    for &key in &keys {
        let slot = slot_of(name(key).as_bytes());
        if slot <= 1_500 {
            moving.entry(slot).or_default().push(name(key));
        }
    }
    assert!(moving.len() > 10, "some are on their way");
    let careful = of_seed(from);
    assert_eq!(get(&careful, &keys).1.hits, SAMPLES);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let read = scope.spawn(|| {
            let reader = of_seed(&members[1]);
            let mut rounds = 0;
            while rounds < 3 || !done.load(Ordering::Relaxed) {
                let found = get(&reader, &keys).1;
                assert_eq!(found, Received { hits: SAMPLES, errors: 0 }, "round {rounds}");
                rounds += 1;
            }
            reader.news()
        });
        for (&slot, names) in &moving {
            // While the values are on their way the old server says ASK.
            let ask = || assert_eq!(get(&careful, &keys).1.hits, SAMPLES);
            move_slot(from, to, slot, names, ask);
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(read.join().unwrap(), None);
    });
    // What was written with an old map is dropped and counted, and the next finds its way.
    let old = of_seed(from);
    assert_eq!(get(&old, &keys).1.hits, SAMPLES);
    let (&slot, names) = moving.iter().next().unwrap();
    move_slot(to, from, slot, names, || ());
    let key = *keys.iter().find(|&&key| slot_of(name(key).as_bytes()) == slot).unwrap();
    put(&old, key, &value(key));
    assert!(old.flush(Duration::from_secs(10)));
    assert_eq!(old.stats().iter().map(|seen| seen.dropped).sum::<u64>(), 1);
    rest();
    assert!(put(&old, key, &value(key)));
    assert!(old.flush(Duration::from_secs(10)));
    assert_eq!(old.stats().iter().map(|seen| seen.dropped).sum::<u64>(), 1);
    assert_eq!((get(&old, &keys).1.hits, old.news()), (SAMPLES, None));
}

#[test]
fn a_killed_server_of_a_cluster_takes_its_own_values_only() {
    let Some(mut members) = three("") else { return };
    let store = of_seed(&members[0]);
    let keys = filled(&store);
    let of_killed = |key: &u64| slot_of(&store.name_of_test(*key)) > 10_922;
    let lost = keys.iter().copied().filter(of_killed).count() as u64;
    members[2].server.kill();
    assert_eq!(get(&store, &keys).1, Received { hits: SAMPLES - lost, errors: 1 });
    assert!(store.news().unwrap().contains("cannot be reached"));
    // It is tried again now and then, however slow this machine is meanwhile.
    let errors: u64 = (0..20)
        .map(|_| {
            let found = get(&store, &keys).1;
            assert_eq!(found.hits, SAMPLES - lost);
            found.errors
        })
        .sum();
    assert!(errors < 10, "{errors}: it is left alone");
    let (down, up): (Vec<u64>, Vec<u64>) = keys.iter().partition(|key| of_killed(key));
    assert!(up.iter().all(|&key| put(&store, key, &value(key))));
    assert!(!put(&store, down[0], &value(down[0])), "it rests");
    rest();
    assert!(get(&store, &keys).1.hits == SAMPLES - lost);
    assert_eq!(store.news(), None, "told once");
    // A new process that starts with the dead one and another.
    let reader = super::store(
        &url(&[members[2].server.port, members[1].server.port]),
        b"secret",
        FINGERPRINT,
    );
    get(&reader, &keys);
    assert_eq!(get(&reader, &keys).1.hits, SAMPLES - lost);
}

#[test]
fn slots_that_nobody_has_are_misses_and_lose_no_step() {
    let Some(member) = Member::start("") else { return };
    member.owns(0, 8_191);
    agree(std::slice::from_ref(&member), 1);
    // Nobody asked for the slots: what the server says to each question counts.
    let store = of_seed(&member);
    let keys: Vec<u64> = (0..SAMPLES).collect();
    assert_eq!(get(&store, &keys).1, NONE, "CLUSTERDOWN");
    assert_eq!(store.news(), None);
    let here = |key: u64| slot_of(&store.name_of_test(key)) <= 8_191;
    for &key in &keys {
        assert_eq!(put(&store, key, &value(key)), here(key));
    }
    let there = keys.iter().filter(|&&key| here(key)).count() as u64;
    assert_eq!(get(&store, &keys).1, Received { hits: there, errors: 0 });
    let fresh = of_seed(&member);
    assert_eq!(get(&fresh, &keys).1, Received { hits: there, errors: 0 }, "some CLUSTERDOWN");
    member.owns(8_192, 16_383);
    rest();
    for _ in 0..100 {
        if keys.iter().all(|&key| put(&fresh, key, &value(key))) {
            break;
        }
        rest();
    }
    assert_eq!(get(&fresh, &keys).1, Received { hits: SAMPLES, errors: 0 });
}

#[test]
fn a_user_that_may_not_ask_for_slots_is_told() {
    let config = "user us on >word ~stocache:* -@all +get +set";
    let Some(members) = three(config) else { return };
    let keys = filled(&of_seed(&members[0]));
    let login = format!("redis://us:word@127.0.0.1:{}", members[1].server.port);
    let store = store(&login, b"secret", FINGERPRINT);
    let found = get(&store, &keys).1;
    assert!(found.errors == 0 && (100..SAMPLES).contains(&found.hits), "{found:?}");
    let news = store.news().unwrap();
    assert!(news.contains("CLUSTER SLOTS") && !news.contains("word@"), "{news}");
}

/// Each question is answered by this, on one connection.
fn answering(answer: impl Fn(&[u8]) -> Vec<u8> + Send + 'static) -> u16 {
    pretended_by(move |stream, first| {
        let mut asked = first.to_vec();
        let mut buffer = [0; 4096];
        loop {
            // Commands end where the next begins.
            for command in asked.split(|&byte| byte == b'*').filter(|it| !it.is_empty()) {
                if stream.write_all(&answer(command)).is_err() {
                    return;
                }
            }
            match stream.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(n) => asked = buffer[..n].to_vec(),
            }
        }
    })
}

#[test]
fn servers_that_send_us_in_circles_are_not_followed_for_ever() {
    let port = std::sync::Arc::new(AtomicU16::new(0));
    let asked = std::sync::Arc::new(AtomicU16::new(0));
    let (own, count) = (port.clone(), asked.clone());
    port.store(
        answering(move |command| {
            let port = own.load(Relaxed);
            if command.windows(5).any(|part| part == b"SLOTS") {
                let host = "$9\r\n127.0.0.1\r\n";
                let map = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n{host}:{port}\r\n");
                return map.into_bytes();
            }
            count.fetch_add(1, Relaxed);
            let kind = if count.load(Relaxed) % 2 == 0 { "ASK" } else { "MOVED" };
            format!("-{kind} 1 127.0.0.1:{port}\r\n").into_bytes()
        }),
        Relaxed,
    );
    let store = store(&url(&[port.load(Relaxed)]), b"secret", FINGERPRINT);
    assert_eq!(get(&store, &[1]).0.len(), 0);
    assert!((1..=5).contains(&asked.load(Relaxed)), "{asked:?}");
}

#[test]
fn no_map_is_believed() {
    let maps: [&[u8]; 12] = [
        b"*99999999\r\n",
        b"*1\r\n*1\r\n:0\r\n",
        b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:-1\r\n:5\r\n*2\r\n$1\r\na\r\n:1\r\n",
        b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$99999999\r\n",
        b"*1\r\n*3\r\n:0\r\n:5\r\n$1\r\na\r\n",
        b"*1\r\n*4\r\n:0\r\n:5\r\n*2\r\n$1\r\na\r\n:1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n",
        b"*1\r\n*4\r\n:0\r\n:5\r\n*2\r\n$1\r\na\r\n:1\r\n*9999999999\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"$3\r\nabc\r\n",
        b"*-1\r\n",
    ];
    for map in maps {
        let words = String::from_utf8_lossy(map).into_owned();
        let port = answering(move |command| {
            if command.windows(5).any(|part| part == b"SLOTS") {
                return map.to_vec();
            }
            b"-MOVED 1 127.0.0.1:1\r\n".to_vec()
        });
        let store = store(&url(&[port]), b"secret", FINGERPRINT);
        assert_eq!(get(&store, &[1, 2]).0.len(), 0, "{words:?}");
        assert!(store.news().is_some(), "{words:?}");
        assert!(!put(&store, 1, b"bytes"), "{words:?}: it is left alone");
    }
}
