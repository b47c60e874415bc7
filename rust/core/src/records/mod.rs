//! Records of any size, one per sample: the cache under a dataset.
//!
//! | module | role |
//! | --- | --- |
//! | `store` | the store itself: who loads what, reading, writing, clearing |
//! | `waiting` | for how long another process's load is waited for |
//! | `schemas` | what records are made of, kept once per store |
//! | `heads` | what stands in front of a record, and the records of a region |
//! | `base` | the store as it lies in its segment: its parts, its lease |
//! | [`portable`] | a record that can travel: sealed, and believed only when its checksum says so |
//! | [`schema`] | a schema, parsed: where the parts of a sample lie in its record |

mod base;
mod heads;
pub mod portable;
pub mod schema;
mod schemas;
mod store;
#[cfg(test)]
mod tests;
mod waiting;

pub use base::RecordStore;
pub use schemas::INLINE;
pub use store::{Claim, Put, StoreStats};

pub use crate::space::{MAX_RECORD, Record};
