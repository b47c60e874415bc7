//! The core of stocache: training samples in shared memory, safe with any number of processes.
//!
//! No torch and no Python here. Each module knows only those below it in this list:
//!
//! | module | role |
//! | --- | --- |
//! | [`files`] | copies of a far folder's files on a near disk |
//! | [`pool`] | threads that copy files behind the caller's back |
//! | [`near`] | the folder on the near disk |
//! | [`table`] | what the processes of a node know together about files |
//! | [`journal`] | which files are ours, on disk |
//! | [`copy`] | one file copied whole, or not at all |
//! | [`shelf`] | one value that threads take and put back |
//! | [`store`] | records of any size, one per sample |
//! | [`cache`] | the dense cache: one slot per sample, loaded and stored by index |
//! | [`gather`] | many slots at once, into one buffer |
//! | [`ring`] | batch buffers that cross processes without a copy |
//! | [`known`] | what this process already knows to be set |
//! | [`slot`] | the state byte of a slot: claim, publish, take over |
//! | [`lease`] | proof that a writer lives: a locked byte the kernel frees |
//! | [`counters`] | hits, misses and the like, without contention |
//! | [`segment`] | one piece of shared memory: create, attach, detach, sweep |
//! | [`name`] | what names are allowed, and how they appear in /dev/shm and /proc |
//! | [`file`] | files that can only be ours: opened, written, removed |
//! | [`space`] | what the mount, the cgroup and the machine really leave |
//! | [`fork`] | what happens to open segments when the process forks or exits |
//! | [`memory`] | the mapped bytes |
//! | [`guard`] | a panic becomes an error, for callers of other languages |
//! | [`layout`] | the format, written down once |
//! | [`primitive`] | atomics, real or modelled |
#![deny(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(loom, allow(dead_code))]

mod fault;
mod primitive;
pub mod slot;

mod error;
mod guard;
pub mod layout;

#[cfg(not(loom))]
pub mod cache;
#[cfg(not(loom))]
mod copy;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod file;
#[cfg(not(loom))]
pub mod files;
#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
mod gather;
#[cfg(not(loom))]
mod journal;
#[cfg(not(loom))]
mod known;
#[cfg(not(loom))]
mod lease;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod name;
#[cfg(not(loom))]
mod near;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
pub mod ring;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
mod shelf;
#[cfg(not(loom))]
pub mod space;
#[cfg(not(loom))]
pub mod store;
#[cfg(not(loom))]
mod table;

#[cfg(not(loom))]
pub use cache::{Cache, Load, Stats, Store};
#[cfg(not(loom))]
pub use files::{Check, FileCache, FileOptions, FileStats, Served, Verdict};
#[cfg(not(loom))]
pub use memory::Mapping;
#[cfg(not(loom))]
pub use name::random_name;
#[cfg(not(loom))]
pub use segment::{Backing, Join, Opened, Request, sweep};
#[cfg(not(loom))]
pub use store::{Begin, Filled, Record, RecordStore, StoreStats};

pub use error::{Error, Kind, Result};
pub use guard::guard;
pub use layout::{Geometry, Plan, Room};
