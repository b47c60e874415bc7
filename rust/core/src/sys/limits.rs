//! What the mount, the memory cgroup and the machine really leave.
//!
//! A full mount can be refused (ENOSPC), but a full memory cgroup kills, so both are looked at
//! before a segment is made.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use std::path::{Path, PathBuf};

/// Left to others in /dev/shm (NCCL, DataLoader batches) unless the backing is forced.
pub fn headroom(mount_bytes: u64) -> u64 {
    (mount_bytes / 10).max(256 << 20)
}

/// Size and free bytes of the mount of `path`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mount {
    /// All bytes.
    pub size: u64,
    /// Bytes this user can still use.
    pub free: u64,
}

/// Asks the mount of `path`.
pub fn mount(path: &Path) -> Result<Mount> {
    let stat = rustix::fs::statvfs(path)
        .map_err(|errno| Error::system(&format!("cannot look at {}", path.display()), errno))?;
    // A tmpfs without a size limit reports no blocks at all.
    if stat.f_blocks == 0 {
        return Ok(Mount { size: u64::MAX, free: u64::MAX });
    }
    Ok(Mount {
        size: stat.f_blocks.saturating_mul(stat.f_frsize),
        free: stat.f_bavail.saturating_mul(stat.f_frsize),
    })
}

/// Memory that can still be used, and what sets the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Bytes.
    pub free: u64,
    /// In words, for the message.
    pub set_by: String,
}

/// The memory this process can still use.
pub fn memory() -> Memory {
    memory_in(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
}

/// As [`memory`], with other roots: the fixture trees of tests.
pub fn memory_in(proc: &Path, cgroup: &Path) -> Memory {
    let machine = Memory {
        free: read(&proc.join("meminfo"))
            .and_then(|text| keyed(&text, "MemAvailable:"))
            .map_or(u64::MAX, |kib| kib.saturating_mul(1024)),
        set_by: "free memory of the machine".into(),
    };
    let own = read(&proc.join("self/cgroup")).unwrap_or_default();
    own.lines()
        .filter_map(|line| {
            // "0::/path" is version 2, "4:memory:/path" version 1.
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let path = path.trim_start_matches('/');
            match controllers {
                "" => ["", "unified"]
                    .into_iter()
                    .map(|mount| cgroup.join(mount))
                    .find(|root| root.join("cgroup.controllers").exists())
                    .and_then(|root| tightest(&root, path, &V2)),
                list if list.split(',').any(|c| c == "memory") => {
                    tightest(&cgroup.join("memory"), path, &V1)
                }
                _ => None,
            }
        })
        .filter(|_| !active(Fault::IgnoreCgroup))
        .chain([machine])
        .min_by_key(|memory| memory.free)
        .unwrap_or(Memory { free: u64::MAX, set_by: "nothing".into() })
}

struct Version {
    limit: &'static str,
    usage: &'static str,
    /// Page cache that the kernel drops before it kills.
    reclaimable: &'static str,
}

const V1: Version = Version {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Version =
    Version { limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file" };

/// The smallest remainder of a cgroup and its ancestors. Inside a container the path of the host
/// may not exist; then the visible root is the container's own group.
fn tightest(root: &Path, path: &str, version: &Version) -> Option<Memory> {
    let mut dir = root.join(path);
    if !dir.exists() {
        dir = root.to_path_buf();
    }
    let mut groups: Vec<PathBuf> = dir.ancestors().map(Path::to_path_buf).collect();
    groups.retain(|group| group.starts_with(root));
    groups.iter().filter_map(|group| remainder(group, version)).min_by_key(|memory| memory.free)
}

fn remainder(group: &Path, version: &Version) -> Option<Memory> {
    let limit: u64 = read(&group.join(version.limit))?.trim().parse().ok()?; // "max" is no limit
    let usage: u64 = read(&group.join(version.usage))?.trim().parse().ok()?;
    let reclaimable = read(&group.join("memory.stat"))
        .and_then(|text| keyed(&text, version.reclaimable))
        .unwrap_or(0);
    let free = limit.saturating_sub(usage.saturating_sub(reclaimable));
    // Version 1 says "no limit" with a number near 2^63.
    (limit < 1 << 62)
        .then(|| Memory { free, set_by: format!("memory cgroup limit of {}", Bytes(limit)) })
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

/// Refuses a segment of `need` bytes that memory cannot hold; `argument` is what says how large it is.
pub fn check_memory(need: u64, argument: &str) -> Result<()> {
    let memory = memory();
    if need <= memory.free {
        return Ok(());
    }
    // A sample's worth of rounding must not make the advice wrong.
    let most = (memory.free as f64 * 0.99) as u64;
    let most = if argument.ends_with("_gib") {
        format!("{:.2}", (most as f64 / f64::from(1u32 << 30) * 100.0).floor() / 100.0)
    } else {
        format!("{:?}", format!("{}MiB", most >> 20))
    };
    Err(Error::new(
        Kind::Space,
        format!(
            "the cache needs {} but only {} can be used ({}); lower {argument} to at most {most}",
            Bytes(need),
            Bytes(memory.free),
            memory.set_by,
        ),
    ))
}

/// Refuses a file longer than this process may write: the kernel would answer with SIGXFSZ.
pub fn check_file_size(need: u64) -> Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit {
        Some(limit) if limit < need => Err(Error::new(
            Kind::Space,
            format!(
                "the cache needs a file of {} but this process may write only {}; raise the limit (ulimit -f)",
                Bytes(need),
                Bytes(limit)
            ),
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of small files in a temporary folder that goes away with the value.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root =
                std::env::temp_dir().join(format!("stocache-space-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, text).unwrap();
            }
            Self(root)
        }

        fn memory(&self) -> Memory {
            memory_in(&self.0.join("proc"), &self.0.join("cgroup"))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable:    4096 kB\n");

    #[test]
    fn without_a_cgroup_the_machine_decides() {
        let tree = Tree::new("none", &[MEMINFO, ("proc/self/cgroup", "0::/\n")]);
        assert_eq!(tree.memory().free, 4096 * 1024);
        assert!(tree.memory().set_by.contains("machine"));
    }

    #[test]
    fn version_2_takes_the_tightest_ancestor_and_counts_page_cache_as_free() {
        let tree = Tree::new(
            "v2",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/job/step\n"),
                ("cgroup/cgroup.controllers", "memory"),
                ("cgroup/job/memory.max", "1000000\n"),
                ("cgroup/job/memory.current", "900000\n"),
                ("cgroup/job/memory.stat", "anon 5\ninactive_file 50000\n"),
                ("cgroup/job/step/memory.max", "max\n"),
                ("cgroup/job/step/memory.current", "10\n"),
            ],
        );
        assert_eq!(tree.memory().free, 150_000);
        assert!(tree.memory().set_by.contains("cgroup"));
    }

    #[test]
    fn version_1_reads_its_own_files_and_ignores_no_limit() {
        let tree = Tree::new(
            "v1",
            &[
                MEMINFO,
                ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"),
                ("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("cgroup/memory/memory.usage_in_bytes", "1\n"),
                ("cgroup/memory/job/memory.limit_in_bytes", "2000000\n"),
                ("cgroup/memory/job/memory.usage_in_bytes", "500000\n"),
                ("cgroup/memory/job/memory.stat", "total_inactive_file 100\n"),
            ],
        );
        assert_eq!(tree.memory().free, 1_500_100);
    }

    #[test]
    fn a_path_of_the_host_that_is_not_here_means_the_visible_root() {
        let tree = Tree::new(
            "container",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/../host/path\n"),
                ("cgroup/cgroup.controllers", "memory"),
                ("cgroup/memory.max", "3000000\n"),
                ("cgroup/memory.current", "0\n"),
            ],
        );
        assert_eq!(tree.memory().free, 3_000_000);
    }
}
