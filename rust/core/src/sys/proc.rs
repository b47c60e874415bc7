//! What /proc says about processes.

use crate::fault::{Fault, active};
use crate::sys::fork;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A process as others can name it: its number means something in its own namespace only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    number: u32,
    /// The inode of the namespace; 0 where it cannot be told.
    namespace: u32,
}

impl Process {
    pub(crate) fn this() -> Self {
        Self { number: fork::process(), namespace: namespace() }
    }

    /// Never 0: no process has the number 0.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.namespace) << 32 | u64::from(self.number)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self { number: word as u32, namespace: (word >> 32) as u32 }
    }

    /// Whether it is seen to be stopped, by a signal or a debugger.
    pub(crate) fn is_stopped(self) -> bool {
        let here = self.number != 0 && self.namespace == namespace();
        here && is_stopped(self.number) && !active(Fault::IgnoreStopped)
    }
}

fn namespace() -> u32 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino() as u32)
}

fn is_stopped(pid: u32) -> bool {
    // "pid (name) state ...", and the name may be anything.
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.iter().rposition(|&byte| byte == b')').map_or(0, |at| at + 2);
    matches!(stat.get(after), Some(b'T' | b't'))
}

/// The entries of a folder of /proc that are numbers: processes, descriptors.
pub(crate) fn numbers(dir: &Path) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends with the test, also where that fails: a stopped process would hold its output open.
    struct Sleeper(std::process::Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let ended = self.0.kill().and_then(|()| self.0.wait());
            debug_assert!(ended.is_ok());
        }
    }

    #[test]
    fn a_stopped_process_is_seen_and_one_of_another_namespace_never_is() {
        let sleeper = Sleeper(std::process::Command::new("sleep").arg("1000").spawn().unwrap());
        let child = &sleeper.0;
        let ours = Process { number: child.id(), namespace: namespace() };
        assert_eq!(Process::from_word(ours.to_word()), ours);
        let theirs = Process { namespace: ours.namespace ^ 1, ..ours };
        assert!(!ours.is_stopped());
        let pid = rustix::process::Pid::from_child(child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        while !is_stopped(child.id()) {
            std::thread::yield_now();
        }
        assert!(ours.is_stopped() && !theirs.is_stopped());
        assert!(!Process::from_word(0).is_stopped());
    }
}
