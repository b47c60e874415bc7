//! Why two packages that suggest themselves are not used across processes (docs/decisions.md).
//!
//! These tests fail on the day the packages change, and the decision can be taken anew.

use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A word that this process and its forks share.
fn shared_word() -> &'static AtomicU32 {
    // SAFETY: anonymous shared memory, zeroed and aligned to a page, never unmapped.
    unsafe {
        let memory = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        assert!(memory != libc::MAP_FAILED);
        &*memory.cast::<AtomicU32>()
    }
}

fn fork(child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child only makes system calls and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            child();
            // SAFETY: ends the child here.
            unsafe { libc::_exit(0) }
        }
        pid => pid,
    }
}

/// Whether a forked waiter is gone a while after `wake`; it is killed if not.
fn waiter_is_woken(wait: impl FnOnce(&AtomicU32), wake: impl FnOnce(&AtomicU32)) -> bool {
    let word = shared_word();
    let pid = fork(|| wait(word));
    // Until the child sleeps in the futex; /proc says so with state S.
    while !std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| stat.contains(") S "))
    {
        std::thread::yield_now();
    }
    // The value stays as it is: only a wake-up can end the wait.
    wake(word);
    let woken = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        // SAFETY: our own child.
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) == pid }
    });
    if !woken {
        // SAFETY: our own child, still there.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
    }
    woken
}

#[test]
fn atomic_wait_does_not_wake_another_process() {
    assert!(!waiter_is_woken(
        |word| atomic_wait::wait(word, 0),
        |word| atomic_wait::wake_all(word)
    ));
}

#[test]
fn a_shared_futex_wakes_another_process() {
    use rustix::thread::futex::{Flags, wait, wake};
    assert!(waiter_is_woken(
        |word| assert!(wait(word, Flags::empty(), 0, None).is_ok()),
        |word| assert!(wake(word, Flags::empty(), u32::MAX >> 1).is_ok()),
    ));
}

#[test]
fn atomic_wait_wakes_a_thread_of_the_same_process() {
    let word = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while word.load(Ordering::Acquire) == 0 {
                atomic_wait::wait(&word, 0);
            }
        });
        word.store(1, Ordering::Release);
        atomic_wait::wake_all(&word);
    });
}

const ROLE: &str = "STOCACHE_EVIDENCE_ROLE";

#[test]
fn shared_memory_dies_on_a_full_mount() {
    use std::os::unix::process::ExitStatusExt;
    if std::env::var_os(ROLE).is_some() {
        let segment = shared_memory::ShmemConf::new()
            .size(8 << 20)
            .create()
            .expect("created, though it cannot fit");
        // SAFETY: inside the mapping that was just made.
        unsafe { std::ptr::write_bytes(segment.as_ptr(), 1, 8 << 20) };
        return;
    }
    let Some(status) = in_tiny_shm("shared_memory_dies_on_a_full_mount") else { return };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

/// Runs one test of this file with 1 MiB of /dev/shm, in a mount namespace of its own.
fn in_tiny_shm(test: &str) -> Option<ExitStatus> {
    let allowed =
        Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success());
    if !allowed {
        eprintln!(
            "skipped: no right to make a mount namespace here, so shared_memory on a full mount is not covered"
        );
        return None;
    }
    let me = std::env::current_exe().expect("this test");
    let script =
        format!("mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {} --exact {test}", me.display());
    let mut command = Command::new("unshare");
    Some(command.args(["-m", "sh", "-c", &script]).env(ROLE, "1").status().expect("unshare runs"))
}

#[test]
fn shared_memory_is_unlinked_by_a_forked_child() {
    let segment = shared_memory::ShmemConf::new().size(4096).create().expect("a segment");
    let name = segment.get_os_id().to_string();
    assert!(shared_memory::ShmemConf::new().os_id(&name).open().is_ok());
    let segment = std::mem::ManuallyDrop::new(segment);
    let pid = fork(|| {
        // What a worker does that drops its copy of the dataset.
        // SAFETY: the child's own copy of the value; the parent's is never dropped.
        drop(unsafe { std::ptr::read(&*segment) });
    });
    // SAFETY: our own child.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    assert!(
        shared_memory::ShmemConf::new().os_id(&name).open().is_err(),
        "the name is still there"
    );
}
