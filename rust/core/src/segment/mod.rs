//! One piece of shared memory: its life, its format, and who may write what in it.
//!
//! | module | role |
//! | --- | --- |
//! | `list` | what is on this node, whose it is and who uses it; removal by name |
//! | `open` | join the segment of a name, or make it |
//! | `create` | a new one, which nobody sees before it is done |
//! | `attach` | one look at a name in /dev/shm |
//! | `find` | one without a name, among the descriptors of all processes |
//! | `access` | the parts that all segments have, of one that is open |
//! | `lock` | a lock that ends with its holder |
//! | `lease` | proof that a writer lives: a locked byte the kernel frees |
//! | `counters` | hits, misses and the like, without contention |
//! | `handle` | a segment as this process has it open; writing to it |
//! | `leftovers` | what goes when nobody uses it any more |
//! | `request` | what to open, and whether what is there will do |
//! | `name` | what names are allowed, and how they appear in /dev/shm and /proc |
//! | [`layout`] | the format: the picture and the header |
//! | [`geometry`] | what a segment holds and how much of it, whichever kind it is |
//! | [`slots_layout`] | its part for dense caches |
//! | [`records_layout`] | its part for records |
//! | [`table_layout`] | its part for tables of files |
//! | [`disk_layout`] | its part for tables of disk stores |
//! | [`space_layout`] | the words of a space of records |
//! | `parts` | its part that all have |
//! | [`claim`] | the state of a slot: claim, publish, take over |

#[cfg(not(loom))]
mod access;
#[cfg(not(loom))]
mod attach;
pub mod claim;
#[cfg(not(loom))]
pub(crate) mod counters;
#[cfg(not(loom))]
mod create;
pub mod disk_layout;
#[cfg(not(loom))]
mod find;
pub mod geometry;
#[cfg(not(loom))]
mod handle;
pub mod layout;
#[cfg(not(loom))]
pub(crate) mod lease;
#[cfg(not(loom))]
mod leftovers;
#[cfg(not(loom))]
mod list;
pub(crate) mod lock;
#[cfg(not(loom))]
pub(crate) mod name;
#[cfg(not(loom))]
mod open;
pub(crate) mod parts;
pub mod records_layout;
#[cfg(not(loom))]
mod request;
pub mod slots_layout;
pub mod space_layout;
pub mod table_layout;

#[cfg(not(loom))]
pub use counters::count_for;
#[cfg(not(loom))]
pub use handle::Segment;
#[cfg(not(loom))]
pub use leftovers::remove_leftovers;
#[cfg(not(loom))]
pub use list::{CountRecords, Listed, describe, list, remove};
#[cfg(not(loom))]
pub use name::{Backing, random_name};
#[cfg(not(loom))]
pub use request::{Join, Opened, Request};
