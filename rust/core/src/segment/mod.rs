//! One piece of shared memory: its life, its format, and who may write what in it.
//!
//! | module | role |
//! | --- | --- |
//! | `list` | what is on this node, whose it is and who uses it; removal by name |
//! | `access` | the parts that all segments have, of one that is open |
//! | `lock` | a lock that ends with its holder |
//! | `lease` | proof that a writer lives: a locked byte the kernel frees |
//! | `counters` | hits, misses and the like, without contention |
//! | `lifecycle` | create, attach, detach, remove what was left |
//! | `name` | what names are allowed, and how they appear in /dev/shm and /proc |
//! | [`layout`] | the format: the picture, the header, what a segment can hold |
//! | [`slots_layout`] | its part for dense caches |
//! | [`records_layout`] | its part for records |
//! | [`table_layout`] | its part for tables of files |
//! | `parts` | its part that all have |
//! | [`claim`] | the state of a slot: claim, publish, take over |

#[cfg(not(loom))]
mod access;
pub mod claim;
#[cfg(not(loom))]
pub(crate) mod counters;
pub mod layout;
#[cfg(not(loom))]
pub(crate) mod lease;
#[cfg(not(loom))]
mod lifecycle;
#[cfg(not(loom))]
mod list;
pub(crate) mod lock;
#[cfg(not(loom))]
pub(crate) mod name;
pub(crate) mod parts;
pub mod records_layout;
pub mod slots_layout;
pub mod table_layout;

#[cfg(not(loom))]
pub use lifecycle::{Join, Opened, Request, Segment, remove_leftovers};
#[cfg(not(loom))]
pub use list::{CountRecords, Listed, describe, list, remove};
#[cfg(not(loom))]
pub use name::{Backing, random_name};
