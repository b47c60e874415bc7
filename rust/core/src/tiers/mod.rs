//! Who loads a sample: memory, then the levels below it, then the caller.
//!
//! | module | role |
//! | --- | --- |
//! | [`acquire`] | the way of a sample from where it is to the caller: claim, memory, levels below, load, fill |
//! | `moves` | records that change their level |
//! | `ahead` | records that are read before they are asked for |
//! | [`fetch`] | records of many samples from below, asked for by several threads |
//! | [`levels`] | memory and what is below it |
//! | `classes` | which schemas may come from below |
//! | `buffers` | memory that records are read into |
//! | [`cluster`] | servers that all nodes reach as a level |
//! | [`disk`] | files of a near disk as a level |
//! | [`memory`] | memory as a level |
//! | [`tier`] | what a level must do |

pub mod acquire;
mod ahead;
mod buffers;
mod classes;
pub mod cluster;
pub mod disk;
pub mod fetch;
pub mod levels;
pub mod memory;
mod moves;
#[cfg(test)]
mod tests;
pub mod tier;

pub use acquire::{Acquiring, Filled};
pub use cluster::Cluster;
pub use disk::Disk;
pub use fetch::{Fetching, Taker};
pub use levels::{Fetched, Levels};
pub use tier::{Lent, Sealed, Sink, Tier, TierStats};
