//! Forged tickets, and limits of the process and the machine.

use crate::processes::{Child, Random};
use crate::world::{
    Bell, Line, Message, SIZE, batch, count, ended, exhaust_descriptors, fill, holds_word, pipe,
    send_one_and_wait, traces, world,
};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use stocache::Kind;
use stocache::batches::{self, Buffer, TICKETS, Ticket};

/// A memfd of the right name and length; `fill` says what is in it.
fn forged(seals: libc::c_int, mode: libc::mode_t, header: &[u64]) -> OwnedFd {
    // SAFETY: a new descriptor that is ours; the header is a live slice.
    unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        let fd = OwnedFd::from_raw_fd(libc::memfd_create(c"stocache-batch".as_ptr(), flags));
        assert_eq!(libc::fchmod(fd.as_raw_fd(), mode), 0);
        assert_eq!(libc::fallocate(fd.as_raw_fd(), 0, 0, 8192), 0);
        let bytes = size_of_val(header);
        let written = libc::pwrite(fd.as_raw_fd(), header.as_ptr().cast(), bytes, 0);
        assert_eq!(written, bytes as isize);
        assert_eq!(libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals), 0);
        fd
    }
}

#[test]
fn forged_and_damaged_tickets_are_refused() {
    world(forged_and_damaged_tickets_are_refused, |mut random| {
        let magic = u64::from_le_bytes(*b"stobatch");
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let pid = std::process::id();
        let refused = |ticket: Ticket, kind: Kind, why: &str| {
            let error = batches::receive(&ticket).expect_err(why);
            let text = error.to_string();
            assert_eq!(error.kind(), kind, "{text}");
            assert!(text.contains(why) && !text.contains('\n'), "{why:?} is not in {text:?}");
        };
        let at =
            |fd: &OwnedFd| Ticket { pid, fd: fd.as_raw_fd(), instance: 9, bytes: 8, serial: 1 };

        // What is no batch at all.
        let path = std::env::temp_dir().join(format!("stocache-ring-{pid}\nline"));
        let file: OwnedFd = std::fs::File::create_new(&path).unwrap().into();
        let folder: OwnedFd = std::fs::File::open("/proc").unwrap().into();
        let null: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let (from, to) = pipe();
        // SAFETY: two new descriptors that are ours.
        let (memfd, socket) = unsafe {
            let memfd = libc::memfd_create(c"another".as_ptr(), libc::MFD_CLOEXEC);
            let socket = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
            (OwnedFd::from_raw_fd(memfd), OwnedFd::from_raw_fd(socket))
        };
        for fd in [&file, &folder, &null, &from, &to, &memfd, &socket] {
            refused(at(fd), Kind::Refused, "it leads to");
        }
        std::fs::remove_file(&path).unwrap();
        refused(at(&file), Kind::Refused, "it leads to");

        // What looks like one.
        refused(at(&forged(0, 0o600, &[magic, 9, 8])), Kind::Refused, "not sealed");
        let writable = libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        refused(at(&forged(writable, 0o600, &[magic, 9, 8])), Kind::Refused, "not sealed");
        refused(at(&forged(seals, 0o644, &[magic, 9, 8])), Kind::Refused, "mode");
        for header in [[0, 9, 8], [magic, 8, 8], [magic, 9, 9], [!0, !0, !0]] {
            refused(at(&forged(seals, 0o600, &header)), Kind::Refused, "header");
        }
        let real = forged(seals, 0o600, &[magic, 9, 8]);
        refused(Ticket { bytes: 4097, ..at(&real) }, Kind::Refused, "8192 bytes, not 12288");
        refused(Ticket { bytes: 0, ..at(&real) }, Kind::Refused, "0 bytes");
        refused(Ticket { bytes: !0, ..at(&real) }, Kind::Refused, "no batch has");
        refused(Ticket { fd: -1, ..at(&real) }, Kind::Refused, "descriptor -1");
        refused(Ticket { serial: 0, ..at(&real) }, Kind::State, "received before");
        refused(at(&real), Kind::State, "received before");
        let closed = Ticket { fd: real.into_raw_fd(), pid, instance: 9, bytes: 8, serial: 1 };
        // SAFETY: its owner gave it up above.
        unsafe { libc::close(closed.fd) };
        refused(closed, Kind::State, "is gone");
        refused(Ticket { pid: 0, ..closed }, Kind::State, "is gone");
        refused(Ticket { pid: u32::MAX, ..closed }, Kind::State, "is gone");

        // A real one, damaged in every bit; each of these is refused, and the real one then works.
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            let (_buffer, message) = batch(SIZE, 77).unwrap();
            assert!(line.put(message));
            bell.wait();
        });
        let Message { ticket, word } = line.wait();
        for bit in 0..64 {
            let flip = 1u64 << bit;
            let mut damaged = vec![
                Ticket { instance: ticket.instance ^ flip, ..ticket },
                Ticket { bytes: ticket.bytes ^ flip, ..ticket },
                Ticket { serial: ticket.serial ^ flip, ..ticket },
            ];
            if bit < 32 {
                damaged.push(Ticket { pid: ticket.pid ^ flip as u32, ..ticket });
                damaged.push(Ticket { fd: ticket.fd ^ flip as i32, ..ticket });
            }
            for damaged in damaged {
                assert!(batches::receive(&damaged).is_err(), "{damaged:?} for {ticket:?}");
            }
        }
        let rounds = count(5_000, 200_000);
        for _ in 0..rounds {
            let number = |random: &mut Random, near: u64| match random.below(3) {
                0 => near,
                1 => random.below(64),
                _ => random.next(),
            };
            let forged = Ticket {
                pid: number(&mut random, u64::from(pid)) as u32,
                fd: number(&mut random, 3) as i32,
                instance: random.next(),
                bytes: number(&mut random, SIZE as u64),
                serial: number(&mut random, 1),
            };
            assert!(batches::receive(&forged).is_err());
        }
        assert_eq!(batches::usage(), batches::Usage::default());
        assert!(holds_word(&batches::receive(&ticket).unwrap(), word));
        refused(ticket, Kind::State, "received before");
        bell.ring();
        ended(maker);
        format!("{rounds} random tickets")
    });
}

#[test]
fn a_batch_of_another_user_is_refused() {
    // SAFETY: cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: not root, so batches of other users are not covered");
        return;
    }
    world(a_batch_of_another_user_is_refused, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| {
            // SAFETY: becomes nobody, for good.
            assert_eq!(unsafe { libc::setuid(65534) }, 0);
            assert!(batches::take(SIZE).is_none(), "nobody could open it");
            // SAFETY: as before it became another user.
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }, 0);
            send_one_and_wait(&line, &bell);
        });
        let error = batches::receive(&line.wait().ticket).unwrap_err();
        assert_eq!(error.kind(), Kind::Refused);
        assert!(error.to_string().contains("owner"), "{error}");
        bell.ring();
        ended(maker);
        error.to_string()
    });
}

#[test]
fn too_many_messages_of_one_batch_are_an_error() {
    world(too_many_messages_of_one_batch_are_an_error, |_| {
        let buffer = batches::take(SIZE).unwrap();
        let tickets: Vec<Ticket> = (0..TICKETS).map(|_| buffer.send().unwrap()).collect();
        let error = buffer.send().unwrap_err();
        assert_eq!(error.kind(), Kind::State, "{error}");
        let all: Vec<Buffer> = tickets.iter().map(|t| batches::receive(t).unwrap()).collect();
        assert_eq!(batches::usage().holds, TICKETS + 1);
        drop(all);
        drop(batches::receive(&buffer.send().unwrap()).unwrap());
        "one more after they were received".into()
    });
}

#[test]
fn descriptors_are_not_inherited_by_programs() {
    world(descriptors_are_not_inherited_by_programs, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| send_one_and_wait(&line, &bell));
        let theirs = batches::receive(&line.wait().ticket).unwrap();
        let mine = batches::take(SIZE).unwrap();
        assert_eq!(traces(), (2, 2));
        let listed = std::process::Command::new("ls").args(["-l", "/proc/self/fd"]).output();
        let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
        assert!(listed.contains("/proc") && !listed.contains("memfd:stocache"), "{listed}");
        drop((theirs, mine));
        bell.ring();
        ended(maker);
        "none".into()
    });
}

/// A memory cgroup that is removed with the value.
struct Group(std::path::PathBuf, &'static str);

impl Group {
    fn new() -> Option<Self> {
        let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let found = own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
            let root = std::path::Path::new("/sys/fs/cgroup");
            let name = format!("stocache-ring-{}", std::process::id());
            if controllers.split(',').any(|c| c == "memory") {
                let own = root.join("memory").join(path);
                let own = if own.exists() { own } else { root.join("memory") };
                Some(Self(own.join(name), "memory.limit_in_bytes"))
            } else {
                let own = root.join(path);
                (controllers.is_empty() && own.join("cgroup.controllers").exists())
                    .then(|| Self(own.join(name), "memory.max"))
            }
        })?;
        std::fs::create_dir(&found.0).ok()?;
        found.0.join(found.1).exists().then_some(found)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_memory_cgroup_is_never_filled() {
    const LIMIT: usize = 256 << 20;
    world(a_memory_cgroup_is_never_filled, |_| {
        let group = Group::new()
            .filter(|group| std::fs::write(group.0.join(group.1), LIMIT.to_string()).is_ok());
        let Some(group) = group else {
            return "skipped: no right to make a memory cgroup, so its limit is not covered".into();
        };
        let member = Child::fork(|| {
            std::fs::write(group.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
            assert!(batches::take(LIMIT / 2).is_none(), "too large a part of what is left");
            let mut held = Vec::new();
            // Several tries: after a refusal it pauses.
            while let Some(buffer) = (0..40).find_map(|_| batches::take(2 << 20)) {
                fill(&buffer, 1);
                held.push(buffer);
            }
            let made = batches::usage().made_bytes as usize;
            assert!((4 << 20..=LIMIT / 8).contains(&made), "{made} bytes");
            // Now other parts of the program leave less, and it is still not filled.
            let hog = vec![1u8; LIMIT / 2];
            held.clear();
            let sizes = (0..200).map(|i| (1 << 20) + i * 4096);
            let many: Vec<Buffer> = sizes.filter_map(batches::take).collect();
            many.iter().for_each(|buffer| fill(buffer, 2));
            let made = batches::usage().made_bytes as usize;
            assert!(made <= LIMIT / 8, "{made} bytes");
            assert!(hog.iter().all(|&byte| byte == 1));
        });
        ended(member);
        let path = group.0.clone();
        drop(group);
        assert!(!path.exists(), "{path:?} is left");
        "not filled, and nobody was killed".into()
    });
}

#[test]
fn without_descriptors_or_address_space_there_is_no_buffer_and_a_clear_error() {
    world(without_descriptors_or_address_space_there_is_no_buffer_and_a_clear_error, |_| {
        let (line, bell) = (Line::new(), Bell::new());
        let maker = Child::fork(|| send_one_and_wait(&line, &bell));
        let message = line.wait();
        let before = exhaust_descriptors();
        assert!(batches::take(SIZE).is_none());
        let error = batches::receive(&message.ticket).unwrap_err();
        assert_eq!(error.kind(), Kind::Space, "{error}");
        assert!(error.to_string().contains("ulimit -n"), "{error}");
        // SAFETY: the limit that was there before.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &before) }, 0);
        assert!(holds_word(&batches::receive(&message.ticket).unwrap(), 1));
        bell.ring();
        ended(maker);
        for (resource, bytes) in [(libc::RLIMIT_FSIZE, 1 << 20), (libc::RLIMIT_AS, 1 << 20)] {
            // SAFETY: a limit of this process only, put back below.
            unsafe {
                let mut before: libc::rlimit = std::mem::zeroed();
                libc::getrlimit(resource, &mut before);
                libc::setrlimit(resource, &libc::rlimit { rlim_cur: bytes, ..before });
                let taken = batches::take(2 << 20);
                libc::setrlimit(resource, &before);
                assert!(taken.is_none());
            }
        }
        // After a refusal it pauses.
        assert!((0..40).any(|_| batches::take(2 << 20).is_some()));
        "refused, and possible again".into()
    });
}
