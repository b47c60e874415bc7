//! A process of its own for each test, and what processes say to each other.

use crate::processes::{Child, Random};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};
use stocache::batches::{self, Buffer, Ticket};

pub const SIZE: usize = 64 << 10;
pub const HANG: Duration = Duration::from_secs(60);

pub fn count(quick: u64, full: u64) -> u64 {
    if std::env::var_os("STOCACHE_LONG").is_some() { full } else { quick }
}

/// Runs `body` in a process of its own, with an empty ring and no threads: this program again, with
/// `test` alone. Its last line is printed.
pub fn world<T: Fn()>(test: T, body: impl FnOnce(Random) -> String) {
    const MARK: &str = "STOCACHE_RING_WORLD";
    let (_, name) = std::any::type_name_of_val(&test).split_once("::").unwrap();
    if std::env::var_os(MARK).is_some() {
        // SAFETY: a world must not outlive a harness that was killed.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let given = std::env::var("STOCACHE_TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = given.unwrap_or_else(|| u64::from(std::process::id()) ^ 0x9e37_79b9);
        println!("{name}: seed {seed}");
        let line = body(Random::new(seed));
        assert_eq!(batches::usage().holds, 0, "holds are left");
        println!("{name}: {line}");
        return;
    }
    let mut this = std::process::Command::new(std::env::current_exe().unwrap());
    this.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(MARK, "1");
    let mut world = this.stdout(std::process::Stdio::piped()).spawn().expect("this program runs");
    let began = Instant::now();
    let status = loop {
        match world.try_wait().unwrap() {
            Some(status) => break status,
            None if began.elapsed() > 30 * HANG => {
                world.kill().unwrap();
                world.wait().unwrap();
                panic!("{name} hangs since {:?}", 30 * HANG);
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let mut lines = String::new();
    world.stdout.take().unwrap().read_to_string(&mut lines).unwrap();
    lines.lines().filter(|line| line.contains(name)).for_each(|line| println!("{line}"));
    assert!(status.success(), "{name}: {status}");
}

pub fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: two descriptors that are ours from here on.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// A batch on its way.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub ticket: Ticket,
    pub word: u64,
}

/// A pipe for messages; each is written and read in one piece.
pub struct Line {
    pub from: OwnedFd,
    pub to: OwnedFd,
}

impl Line {
    pub fn new() -> Self {
        let (from, to) = pipe();
        Self { from, to }
    }

    /// False if the pipe is full.
    pub fn put(&self, message: Message) -> bool {
        let Ticket { pid, fd, instance, bytes, serial } = message.ticket;
        let words = [u64::from(pid), fd as u64, instance, bytes, serial, message.word, 0, 0];
        let mut ready = libc::pollfd { fd: self.to.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one pollfd; 64 bytes of an array to a pipe that has room for a page.
        unsafe {
            libc::poll(&mut ready, 1, 0) == 1
                && libc::write(self.to.as_raw_fd(), words.as_ptr().cast(), 64) == 64
        }
    }

    /// Waits for the next one at most that long.
    pub fn get(&self, milliseconds: i32) -> Option<Message> {
        let mut words = [0u64; 8];
        let mut ready =
            libc::pollfd { fd: self.from.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd; 64 bytes into an array of that size.
        let read = unsafe {
            if libc::poll(&mut ready, 1, milliseconds) != 1 {
                return None;
            }
            libc::read(self.from.as_raw_fd(), words.as_mut_ptr().cast(), 64)
        };
        assert_eq!(read, 64);
        let [pid, fd, instance, bytes, serial, word, ..] = words;
        let ticket = Ticket { pid: pid as u32, fd: fd as i32, instance, bytes, serial };
        Some(Message { ticket, word })
    }

    pub fn wait(&self) -> Message {
        self.get(HANG.as_millis() as i32).expect("a message")
    }
}

/// Tells other processes to go on, one byte each time.
pub struct Bell(OwnedFd, OwnedFd);

impl Bell {
    pub fn new() -> Self {
        let (from, to) = pipe();
        Self(from, to)
    }

    pub fn ring(&self) {
        // SAFETY: one byte to an open pipe.
        assert_eq!(unsafe { libc::write(self.1.as_raw_fd(), [1u8].as_ptr().cast(), 1) }, 1);
    }

    pub fn wait(&self) {
        let mut byte = [0u8];
        // SAFETY: one byte from an open pipe.
        assert_eq!(unsafe { libc::read(self.0.as_raw_fd(), byte.as_mut_ptr().cast(), 1) }, 1);
    }
}

pub fn fill(buffer: &Buffer, word: u64) {
    let start = buffer.address().as_ptr().cast::<u64>();
    for i in 0..buffer.len() / 8 {
        // SAFETY: inside the buffer, which is page-aligned.
        unsafe { start.add(i).write_volatile(word) };
    }
}

pub fn is_whole(address: *const u8, bytes: usize, word: u64) -> bool {
    let start = address.cast::<u64>();
    // SAFETY: inside a buffer that is mapped; others may write it, hence volatile.
    (0..bytes / 8).all(|i| unsafe { start.add(i).read_volatile() } == word)
}

pub fn holds_word(buffer: &Buffer, word: u64) -> bool {
    is_whole(buffer.address().as_ptr(), buffer.len(), word)
}

/// A new batch, filled and sent.
pub fn batch(bytes: usize, word: u64) -> Option<(Buffer, Message)> {
    let buffer = batches::take(bytes)?;
    fill(&buffer, word);
    let ticket = buffer.send().expect("a ticket");
    Some((buffer, Message { ticket, word }))
}

/// A maker of one batch, which it holds until the bell rings.
pub fn send_one_and_wait(line: &Line, bell: &Bell) {
    let (_buffer, message) = batch(SIZE, 1).unwrap();
    assert!(line.put(message));
    bell.wait();
}

/// Descriptors and mappings of batches in this process.
pub fn traces() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
        let target = std::fs::read_link(entry.as_ref().unwrap().path());
        target.is_ok_and(|to| to.to_string_lossy().contains("stocache-batch"))
    });
    let descriptors = descriptors.count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (descriptors, maps.lines().filter(|line| line.contains("stocache-batch")).count())
}

/// Kills a child, which must have lived until then: a failed assertion would have ended it.
pub fn kill(child: Child) {
    child.signal(libc::SIGKILL);
    let status = child.wait();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
}

pub fn ended(child: Child) {
    assert_eq!(child.wait_at_most(HANG).unwrap(), 0, "a child failed");
}

/// Leaves this process no descriptor to open.
pub fn exhaust_descriptors() -> libc::rlimit {
    // SAFETY: plain calls with values of our own; the null device is opened until it fails.
    unsafe {
        let mut before: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut before), 0);
        let few = libc::rlimit { rlim_cur: 64, ..before };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &few), 0);
        while libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) >= 0 {}
        before
    }
}
