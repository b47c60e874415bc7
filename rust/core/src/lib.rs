//! The core of stocache: training samples in shared memory, safe with any number of processes.
//!
//! No torch (save with the feature `tch`) and no Python here. Three products stand on one substrate;
//! each room knows only those below it in this list, and each module of a room only those below it
//! in the room's own list:
//!
//! | room | what is in it |
//! | --- | --- |
//! | `tensors` | the dense cache for who holds `tch::Tensor`s (feature `tch`) |
//! | [`files`] | copies of a far folder's files on a near disk |
//! | [`batches`] | records gathered into batches; batch buffers that cross processes without a copy |
//! | [`augment`] | the steps of random transforms of images, fused, as rows are written |
//! | [`tiers`] | who loads a sample: memory, the levels below it, the caller |
//! | [`cluster`] | records on servers that all nodes reach |
//! | [`disk`] | records in files of a near disk |
//! | [`records`] | records of any size, one per sample |
//! | [`space`] | regions in which records are laid down, and the index that says where |
//! | [`slots`] | the dense cache: one slot per sample, loaded and stored by index |
//! | [`shards`] | which part of a dataset who keeps: computed, not listed |
//! | [`segment`] | one piece of shared memory: its life, its format, who may write what in it |
//! | [`sys`] | the kernel's side: atomics, mappings, forks, private files, limits |
//!
//! Beside them stand `error`, the one error type, `bytes`, sizes as people read them, `guard`, which
//! makes a panic an error, and `fault`, switches that break one rule each for the tests that must
//! notice. tests/architecture.rs holds all of them to these lists.
//!
//! # Words
//!
//! | word | meaning |
//! | --- | --- |
//! | *segment* | one piece of shared memory: a file in /dev/shm or a memfd, with a header that never changes |
//! | *geometry* | the numbers that say what a segment holds and how much; kept in its header |
//! | *layout* | the offsets of its parts, which follow from the geometry |
//! | *capacity* | how many slots a dense cache has; samples beyond it are not cached |
//! | *instance* | the random number that tells two segments of one name apart |
//! | *anchor* | what a process keeps per open segment, and what a fork must put right: descriptor, lease |
//! | *state* | two bytes per sample: empty, set, beyond the cache, or claimed and by which lease |
//! | *claim* | the right to write one sample, taken by changing its state; ends with publish or abandon |
//! | *lease* | a byte of the file that a process has locked: the proof that the holder of its claims lives |
//! | *lock* | of a region, a file and the like: a state that is claimed for as long; ends with its holder |
//! | *take over* | to claim what a dead process had claimed, while its lease is locked |
//! | *epoch* | a number that is raised before readable bytes change; a copy is whole if it did not move |
//! | *frozen* | takes no more samples, because memory ran out; until `clear` |
//! | *record* | a sample's bytes in a store of records; *schema*: what it is made of, kept once |
//! | *region* | a stretch of records that is filled from its start and emptied as a whole |
//! | *leftover* | a segment that nobody has open and nobody asked to keep |
//! | *hold* | to keep a cache open for those who know it by its name only |
//! | *inherited* | of a segment whose description a forked child shares: it reads, and takes no lease |
#![deny(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(loom, allow(dead_code))]

mod bytes;
mod error;
mod fault;
mod guard;

pub mod segment;
pub mod sys;

#[cfg(not(loom))]
pub mod augment;
#[cfg(not(loom))]
pub mod batches;
#[cfg(not(loom))]
pub mod cluster;
#[cfg(not(loom))]
pub mod disk;
#[cfg(not(loom))]
pub mod files;
#[cfg(not(loom))]
pub mod records;
#[cfg(not(loom))]
pub mod shards;
#[cfg(not(loom))]
pub mod slots;
#[cfg(not(loom))]
pub mod space;
#[cfg(all(feature = "tch", not(loom)))]
pub mod tensors;
#[cfg(not(loom))]
pub mod tiers;

#[cfg(not(loom))]
pub use files::{Check, FileCache, FileOptions, FileStats, Served, Verdict};
#[cfg(not(loom))]
pub use records::{Claim, Put, Record, RecordStore, StoreStats};
#[cfg(not(loom))]
pub use segment::{Backing, Join, Opened, Request, random_name, remove_leftovers};
#[cfg(not(loom))]
pub use slots::{Cache, Load, Stats, Stored};
#[cfg(not(loom))]
pub use sys::fork::leave;
#[cfg(not(loom))]
pub use sys::huge_pages::HugePages;
#[cfg(not(loom))]
pub use sys::mapping::Mapping;

pub use error::{Error, Kind, Result};
pub use guard::{calm, guard};
pub use segment::layout::{Geometry, RecordsGeometry, SlotsGeometry};
