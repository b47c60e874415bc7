//! How long servers are waited for, and by whom.

use super::super::budget::Purse;
use super::*;
use crate::fault::meeting;
use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

fn hangs() -> u16 {
    pretended(|_| std::thread::sleep(Duration::from_secs(600)))
}

fn taken<R>(what: impl FnOnce() -> R) -> (R, Duration) {
    TAKEN.set(Duration::ZERO);
    let done = what();
    (done, TAKEN.get())
}

/// Answers each question after a while, with nothing.
fn slow(pause: Duration) -> u16 {
    pretended(move |stream| {
        let mut asked = [0; 4096];
        loop {
            std::thread::sleep(pause);
            if stream.write_all(b"$-1\r\n").is_err() || stream.read(&mut asked).unwrap_or(0) == 0 {
                return;
            }
        }
    })
}

#[test]
fn a_server_that_is_nearly_late_each_time_is_given_up() {
    const WAIT: Duration = Duration::from_millis(250);
    let store = store(&url(&[slow(WAIT * 4 / 5)]), b"secret", FINGERPRINT).waiting(WAIT);
    let (_, taken) = taken(|| (0..20).for_each(|_| _ = get(&store, &[1])));
    assert!(taken > WAIT / 2 && taken <= WAIT * 2, "{taken:?}");
    assert_eq!(store.stats()[0].errors, 1);
    assert!(store.news().unwrap().contains("does not answer in time"));
}

/// One whose answers come soon is never given up, however many have no bytes.
#[test]
fn a_server_that_has_nothing_is_asked_for_ever() {
    let store = store(&url(&[slow(Duration::from_millis(1))]), b"secret", FINGERPRINT);
    let store = store.waiting(Duration::from_millis(500));
    for _ in 0..1000 {
        assert_eq!(get(&store, &[1]).1, NONE);
    }
    assert_eq!((store.stats()[0].misses, store.stats()[0].errors), (1000, 0));
}

/// Those that tell the others of a server do so until it answers; that it takes a question says nothing.
#[test]
fn while_one_tries_a_server_the_others_leave_it_alone() {
    const WAIT: Duration = Duration::from_millis(300);
    let (port, memory) = (hangs(), node_memory());
    let of_process = || {
        let store = store(&url(&[port]), b"secret", FINGERPRINT).waiting(WAIT);
        store.share_rests(&memory);
        store
    };
    let (one, other) = (of_process(), of_process());
    assert_eq!(get(&one, &[1]).1, TROUBLE);
    rest();
    std::thread::scope(|scope| {
        let tries = scope.spawn(|| get(&one, &[1]).1);
        std::thread::sleep(WAIT / 3);
        let (received, taken) = taken(|| get(&other, &[1]).1);
        assert_eq!((received, taken), (NONE, Duration::ZERO));
        assert_eq!(tries.join().unwrap(), TROUBLE);
    });
    let word = memory.segment().rests().iter().map(|word| word.load(Relaxed)).find(|&it| it != 0);
    assert_eq!(word.unwrap() >> 40 & 15, 1, "the second rest is a longer one");
}

/// A wrong password, another signer, no descriptor left: who shares memory with such a process is none.
#[test]
fn trouble_of_one_process_is_its_own() {
    let Some(server) = Server::start("requirepass word") else { return };
    let memory = node_memory();
    let with = |login: &str| {
        let url = format!("redis://{login}127.0.0.1:{}", server.port);
        let store = store(&url, b"secret", FINGERPRINT);
        store.share_rests(&memory);
        store
    };
    let (good, bad) = (with(":word@"), with(":another@"));
    assert!(put(&good, 5, &value(5)));
    assert_eq!(get(&bad, &[5]).1, TROUBLE);
    assert_eq!(get(&bad, &[5]).1, NONE, "it rests");
    assert_eq!(get(&good, &[5]).0.len(), 1);
}

/// Who looks what a server holds while it is left alone keeps its connection, and what it sent there.
#[test]
fn looking_at_a_server_that_is_left_alone_ends_nothing() {
    let Some(server) = Server::start("") else { return };
    let memory = node_memory();
    let (store, other) = (of(&server), of(&server).waiting(Duration::from_millis(100)));
    store.share_rests(&memory);
    // Of another process, which sees the same server: of the same wait, and hung for a while.
    other.share_rests(&memory);
    let store = store.waiting(Duration::from_millis(100));
    assert!(put(&store, 5, &value(5)));
    server.signal(libc::SIGSTOP);
    assert_eq!(get(&other, &[5]).1, TROUBLE);
    server.signal(libc::SIGCONT);
    assert_eq!(store.holdings()[0].samples, None, "it is left alone");
    assert!(store.flush(Duration::from_secs(60)));
    let seen = &store.stats()[0];
    assert_eq!((seen.fills, seen.dropped, seen.errors), (1, 0, 0));
}

#[test]
fn who_flushes_waits_as_long_as_was_said_and_loses_nothing_by_it() {
    let Some(server) = Server::start("") else { return };
    let store = of(&server).waiting(Duration::from_millis(50));
    assert!(put(&store, 5, &value(5)) && store.flush(Duration::from_secs(60)));
    server.signal(libc::SIGSTOP);
    for key in 6..16 {
        assert!(put(&store, key, &value(key)));
    }
    assert!(!store.flush(Duration::from_millis(200)));
    let news = store.news().unwrap();
    assert!(news.contains("10 samples that were sent"), "{news}");
    let flushed = std::thread::scope(|scope| {
        let flushes = scope.spawn(|| store.flush(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(500));
        server.signal(libc::SIGCONT);
        flushes.join().unwrap()
    });
    let seen = &store.stats()[0];
    assert_eq!((flushed, seen.fills, seen.dropped, seen.errors), (true, 11, 0, 0));
}

/// A server that hangs has its part of the time, and the others theirs.
#[test]
fn a_hung_server_does_not_keep_others_from_being_flushed() {
    let Some(server) = Server::start("") else { return };
    let deaf = pretended_by(|stream, asked| {
        if asked.windows(5).any(|word| word == b"SLOTS") {
            let _ = stream.write_all(b"-ERR This instance has cluster support disabled\r\n");
        }
        std::thread::sleep(Duration::from_secs(600));
    });
    let store = store(&url(&[deaf, server.port]), b"secret", FINGERPRINT);
    (0..40).for_each(|key| assert!(put(&store, key, &value(key))));
    assert!(!store.flush(Duration::from_secs(1)));
    let fills: Vec<u64> = store.stats().iter().map(|seen| seen.fills).collect();
    assert!(fills[0] == 0 && fills[1] > 5, "{fills:?}");
}

/// What was read of an answer when somebody's memory panicked is not taken for the next answer.
#[test]
fn a_panic_in_the_middle_of_answers_ends_the_connection() {
    struct Panics<'a>(Keeps<'a>, usize);
    impl Receiver for Panics<'_> {
        type Memory = Memory;
        fn lend(&mut self, which: usize, len: usize, room: usize) -> Option<Memory> {
            self.1 += 1;
            assert!(self.1 < 3, "a panic on purpose");
            self.0.lend(which, len, room)
        }
        fn room(memory: &mut Memory) -> &mut [u8] {
            Keeps::room(memory)
        }
        fn done(&mut self, memory: Memory) -> bool {
            self.0.done(memory)
        }
        fn take_back(&mut self, memory: Memory) {
            self.0.take_back(memory);
        }
    }
    let Some(server) = Server::start("") else { return };
    let store = of(&server);
    let keys: Vec<u64> = (1..60).collect();
    keys.iter().for_each(|&key| assert!(put(&store, key, &value(key))));
    let mut panics = Panics(Keeps { keys: &keys, got: BTreeMap::new() }, 0);
    let asks = std::panic::AssertUnwindSafe(|| store.get_many(&keys, &mut panics, soon()));
    assert!(std::panic::catch_unwind(asks).is_err());
    assert_eq!(get(&store, &keys).0.len(), keys.len());
    let seen = &store.stats()[0];
    assert_eq!((seen.forged, seen.errors), (0, 0));
}

/// Who got no processor meanwhile has not waited: what came until then is read, and the rest is waited for.
#[test]
fn who_was_held_up_does_not_blame_the_server() {
    const WAIT: Duration = Duration::from_millis(320);
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = &parse_servers(&url(&[server.local_addr().unwrap().port()])).unwrap().all[0];
    let mut budget = Budget::new(WAIT, soon());
    let mut connection = Connection::open(address, &mut budget).unwrap();
    let mut answers = server.accept().unwrap().0;
    let mut times = 0;
    meeting::at(move |place| {
        if place == "cluster: waiting" {
            times += 1;
            let parts: [&[u8]; 3] = [b"$3\r\nab", b"c\r\n", b""];
            answers.write_all(parts[2.min(times - 1)]).unwrap();
            std::thread::sleep(if times == 1 { WAIT * 2 } else { Duration::ZERO });
        }
    });
    assert_eq!(connection.reply(&mut budget).unwrap(), Reply::Bulk(3));
    assert_eq!(connection.bulk(3, 3, &mut budget).unwrap(), b"abc");
    // Once: nobody is held up for ever.
    assert!(matches!(connection.reply(&mut budget), Err(Trouble::Late)));
}

#[test]
fn a_purse_fills_by_itself_and_by_what_comes() {
    const WAIT: Duration = Duration::from_secs(1000);
    let mut purse = Purse::new(WAIT);
    let mut spends = |shortened: usize, bytes: usize, waits: Duration| {
        let mut budget = purse.budget(Instant::now() + 2 * WAIT, shortened);
        let left = budget.left().unwrap();
        budget.spend(Instant::now().checked_sub(waits).unwrap());
        budget.earn(bytes);
        purse.put_back(&budget);
        left
    };
    let near = |left: Duration, wanted: Duration| {
        assert!(left + WAIT / 100 > wanted && left < wanted + WAIT / 10, "{left:?} {wanted:?}");
    };
    near(spends(0, 0, WAIT / 2), WAIT);
    near(spends(0, 0, WAIT / 4), WAIT / 2);
    near(spends(1, 0, Duration::ZERO), WAIT / 16);
    near(spends(9, 0, Duration::ZERO), WAIT / 32);
    near(spends(0, 4 << 30, Duration::ZERO), WAIT / 4); // others' shortness is not kept
    near(spends(0, 0, Duration::ZERO), WAIT / 2);
    std::thread::sleep(Duration::from_millis(500)); // longer than the first rest
    near(spends(0, 0, Duration::ZERO), WAIT);
}

#[test]
fn names_that_nobody_looks_up_and_addresses_where_nobody_is() {
    use super::super::connection::{connected, resolved};
    const WAIT: Duration = Duration::from_millis(400);
    let address = &parse_servers("redis://somewhere:7").unwrap().all[0];
    let late = |_: &str, _| {
        std::thread::sleep(Duration::from_secs(600));
        Ok(Vec::new())
    };
    let budget = Budget::new(WAIT, soon());
    assert!(matches!(resolved(address, &budget, late), Err(Trouble::Late)));
    let none = |_: &str, _| Err(std::io::Error::other("no such name"));
    assert!(matches!(resolved(address, &budget, none), Err(Trouble::Gone(_))));
    // A place that never answers: its queue of connections is full.
    let hole = TcpListener::bind("127.0.0.1:0").unwrap();
    // SAFETY: a socket of our own.
    assert_eq!(unsafe { libc::listen(hole.as_raw_fd(), 0) }, 0);
    let hole_at: SocketAddr = hole.local_addr().unwrap();
    let tries = || TcpStream::connect_timeout(&hole_at, Duration::from_millis(200));
    let _full: Vec<TcpStream> = std::iter::from_fn(|| tries().ok()).take(50).collect();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let good = server.local_addr().unwrap();
    let (now, nobody) = (Instant::now, SocketAddr::from(([127, 0, 0, 1], 1)));
    assert!(connected(&[hole_at, good], &budget, now()).is_ok(), "the next address has its time");
    assert!(matches!(connected(&[hole_at, nobody], &budget, now()), Err(Trouble::Late)));
    assert!(matches!(connected(&[nobody], &budget, now()), Err(Trouble::Gone(_))));
}

/// A server reads what it is sent as slowly as it likes: what has gone is not kept.
#[test]
fn a_queue_that_is_never_empty_does_not_grow() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = &parse_servers(&url(&[server.local_addr().unwrap().port()])).unwrap().all[0];
    let mut budget = Budget::new(Duration::from_secs(60), soon());
    let mut connection = Connection::open(address, &mut budget).unwrap();
    let mut reads = server.accept().unwrap().0;
    let value = vec![7; 1 << 20];
    let mut read = vec![0; 1 << 20];
    for _ in 0..200 {
        connection.queue(&[&value]);
        connection.try_send().unwrap();
        while connection.unsent() > 16 << 20 {
            reads.read_exact(&mut read).unwrap();
            connection.try_send().unwrap();
        }
    }
    assert!(connection.unsent() > 0, "it is never empty");
    assert!(connection.queue_capacity() < 64 << 20, "{}", connection.queue_capacity());
}

#[test]
fn a_server_that_repeats_the_login_is_not_repeated() {
    for (login, code) in [("HUSH:HUSH@", ""), ("user:word@", "WRONGPASS"), (":word@", "ERR")] {
        let answer = format!("-{code} unknown command 'AUTH', with args: 'word' 'HUSH'\r\n");
        let port = pretended(move |stream| _ = stream.write_all(answer.as_bytes()));
        let store = store(&format!("redis://{login}127.0.0.1:{port}"), b"secret", FINGERPRINT);
        assert_eq!(get(&store, &[1]).1, TROUBLE);
        let news = store.news().unwrap();
        assert!(!news.contains("word") && !news.contains("HUSH"), "{news}");
        assert!(news.contains(code), "{news}");
    }
    let port = pretended(|stream| _ = stream.write_all(b"-HUSH\r\n"));
    let store = store(&format!("redis://:xHUSHx@127.0.0.1:{port}"), b"secret", FINGERPRINT);
    assert_eq!(get(&store, &[1]).1, TROUBLE);
    assert!(!store.news().unwrap().contains("HUSH"));
}

/// 500 MB, as whoever has no secret may say.
#[test]
fn a_value_that_is_announced_and_never_comes_takes_no_memory() {
    use crate::tiers::{Cluster, Levels};
    let port = pretended(|stream| {
        let mut front = b"$500000000\r\nsto2\0\0\0\0".to_vec();
        front.resize(front.len() + 5000, 7);
        let _ = stream.write_all(&front);
        std::thread::sleep(Duration::from_secs(600));
    });
    let store = store(&url(&[port]), b"secret", FINGERPRINT).waiting(Duration::from_millis(100));
    let store = Arc::new(store);
    let memory = node_memory();
    let levels =
        Levels::new(Arc::clone(&memory), vec![Box::new(Cluster::new(Arc::clone(&store), memory))]);
    let most = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    };
    let before = most();
    assert_eq!(levels.acquire(&[1], Duration::ZERO).next_to_load(), [1]);
    assert_eq!(store.stats()[0].errors, 1);
    assert!(most() - before < 50 << 20, "{} {before}", most());
}

/// Servers are slower with more: so many bytes are asked for and not read, whatever a batch wants.
#[test]
fn bytes_on_their_way_have_a_bound() {
    const LEN: usize = 150_000;
    let most = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&most);
    let port = pretended_by(move |stream, first| {
        stream.set_nonblocking(true).unwrap();
        let (mut text, mut answered) = (first.to_vec(), 0);
        let value = [format!("${LEN}\r\n").into_bytes(), vec![7; LEN], b"\r\n".to_vec()].concat();
        for _ in 0..60 {
            // All that was asked by now.
            std::thread::sleep(Duration::from_millis(20));
            let mut more = [0; 1 << 16];
            while let Ok(len @ 1..) = stream.read(&mut more) {
                text.extend_from_slice(&more[..len]);
            }
            let asked = text.windows(5).filter(|word| word == b"\nGET\r").count();
            if asked == answered {
                continue;
            }
            seen.fetch_max(asked - answered, Relaxed);
            stream.set_nonblocking(false).unwrap();
            stream.write_all(&value).unwrap();
            stream.set_nonblocking(true).unwrap();
            answered += 1;
        }
    });
    let store = store(&url(&[port]), b"secret", FINGERPRINT);
    let keys: Vec<u64> = (0..40).collect();
    assert_eq!(get(&store, &keys).1, NONE);
    assert_eq!(store.stats()[0].forged, 40, "all were answered");
    let most = most.load(Relaxed);
    assert!((2..=4).contains(&most), "{most} values of {LEN} bytes at once");
}

/// Nothing of such a server is read any more.
#[test]
fn an_answer_that_is_out_of_step_ends_the_connection() {
    let answers: [&[u8]; 4] =
        [b"$3\r\nabcdef\r\n", b"+OK\r\n", b"*2\r\n$-1\r\n$-1\r\n", b"$3\r\nab\r\n$-1\r\n$-1\r\n"];
    for answer in answers {
        let (tell, ended) = std::sync::mpsc::channel();
        let port = pretended(move |stream| {
            let _ = stream.write_all(answer);
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let mut more = [0; 1000];
            while stream.read(&mut more).is_ok_and(|len| len > 0) {}
            let _ = tell.send(stream.write_all(b"$-1\r\n").is_ok());
        });
        let store = store(&url(&[port]), b"secret", FINGERPRINT);
        assert_eq!(get(&store, &[1]).1, TROUBLE, "{}", String::from_utf8_lossy(answer));
        ended.recv_timeout(Duration::from_secs(60)).expect("it is closed");
    }
}

/// Short values come several at once, where that is allowed; the others are asked for one by one, once.
#[test]
fn short_values_are_asked_for_together_where_that_is_allowed() {
    let config = "user default off\nuser all on >word ~* +@all\n\
                  user few on >word ~stocache:* -@all +get +set +auth";
    let Some(server) = Server::start(config) else { return };
    let with = |user: &str| {
        store(&format!("redis://{user}:word@127.0.0.1:{}", server.port), b"secret", FINGERPRINT)
    };
    let calls = |command: &str| {
        let address =
            &parse_servers(&format!("redis://all:word@127.0.0.1:{}", server.port)).unwrap().all[0];
        let mut budget = Budget::new(Duration::from_secs(10), soon());
        let mut raw = Connection::open(address, &mut budget).unwrap();
        raw.queue(&[b"INFO", b"commandstats"]);
        raw.send(&mut budget).unwrap();
        let Reply::Bulk(len) = raw.reply(&mut budget).unwrap() else { panic!("no answer") };
        let text = String::from_utf8(raw.bulk(len, 1 << 20, &mut budget).unwrap()).unwrap();
        let of = |line: &str| {
            let rest = line.strip_prefix("cmdstat_")?.strip_prefix(command)?;
            rest.strip_prefix(":calls=")?.split(',').next()?.parse::<usize>().ok()
        };
        text.lines().find_map(of).unwrap_or(0)
    };
    let keys: Vec<u64> = (0..200).collect();
    let missing: Vec<u64> = (100..300).collect();
    let writer = with("all");
    keys.iter().for_each(|&key| assert!(put(&writer, key, &value(key))));
    assert!(writer.flush(Duration::from_secs(60)));
    for (user, together) in [("all", true), ("few", false)] {
        let reader = with(user);
        for _ in 0..3 {
            assert_eq!(get(&reader, &keys).0.len(), 200, "it learns how long they are");
        }
        let before = (calls("get"), calls("mget"));
        assert_eq!(get(&reader, &keys).0.len(), 200);
        assert_eq!(get(&reader, &missing).0.len(), 100);
        let (gets, mgets) = (calls("get") - before.0, calls("mget") - before.1);
        if together {
            assert!(gets < 30 && (25..60).contains(&mgets), "{gets} {mgets}");
        } else {
            assert_eq!((gets, mgets), (400, 0));
        }
        let seen = &reader.stats()[0];
        assert_eq!((seen.errors, seen.hits, seen.misses), (0, 900, 100));
    }
}
