//! The kernel's side of things.
//!
//! | module | role |
//! | --- | --- |
//! | [`limits`] | what the mount, the cgroup and the machine really leave |
//! | `direct` | reads and writes past the page cache |
//! | [`pages`] | memory in whole pages |
//! | `per_process` | what a process makes for itself, and a forked child anew |
//! | `recent` | an answer that is good for a second |
//! | `private_file` | files that can only be ours: opened, written, removed |
//! | `proc` | what /proc says about processes |
//! | `thread_pool` | threads that wait for work |
//! | `fork` | what happens to open segments when the process forks or exits |
//! | `ofd` | locks on bytes of a file, which end with their holder |
//! | [`huge_pages`] | whether shared memory gets huge pages |
//! | [`mapping`] | the mapped bytes and typed access to them |
//! | `prefetch` | bytes brought near the processor before they are wanted |
//! | [`stores`] | writing past the processor's caches |
//! | [`interrupt`] | whether the caller wants to be let go |
//! | `atomics` | atomics: those of std, or loom's |

pub(crate) mod atomics;
#[cfg(not(loom))]
pub(crate) mod direct;
#[cfg(not(loom))]
pub(crate) mod fork;
#[cfg(not(loom))]
pub mod huge_pages;
pub mod interrupt;
#[cfg(not(loom))]
pub mod limits;
#[cfg(not(loom))]
pub mod mapping;
#[cfg(not(loom))]
pub(crate) mod ofd;
#[cfg(not(loom))]
pub mod pages;
#[cfg(not(loom))]
pub(crate) mod per_process;
#[cfg(not(loom))]
pub(crate) mod prefetch;
#[cfg(not(loom))]
pub(crate) mod private_file;
#[cfg(not(loom))]
pub(crate) mod proc;
#[cfg(not(loom))]
pub(crate) mod recent;
#[cfg(not(loom))]
pub mod stores;
pub(crate) mod thread_pool;
