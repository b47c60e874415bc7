//! Records in files of a near disk.
//!
//! | module | role |
//! | --- | --- |
//! | `inspect` | a folder as people see it who use none |
//! | `records` | single records: found, read, taken to be written |
//! | `recall` | what earlier jobs left, read from the logs |
//! | `stats` | what it holds and did |
//! | `stretches` | small levels, read through the page cache a stretch at a time |
//! | `write` | many records in one write; files for regions |
//! | `store` | the store as this process has it open |
//! | `behind` | records that wait to be written, and the thread that writes them |
//! | `files` | the files of regions, as this process has them open |
//! | `mending` | a store whose header is damaged |
//! | `members` | who uses a folder |
//! | `folder` | whose it is, what it is for, the names in it |
//! | `compression` | records made smaller |
//! | `schemas` | what records are made of |
//! | `log` | which records lie in a file |

mod behind;
pub(crate) mod compression;
mod files;
mod folder;
mod inspect;
mod log;
mod members;
mod mending;
mod recall;
mod records;
mod schemas;
mod stats;
mod store;
mod stretches;
#[cfg(test)]
mod tests;
mod write;

pub use compression::Compression;
pub use inspect::{Check, Checked, Inspected, inspect, remove, tidy};
pub use stats::DiskStats;
pub use store::{DiskOptions, DiskStore, Keys};
