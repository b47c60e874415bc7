//! Records of any size, one per sample: the cache under a dataset.
//!
//! | module | role |
//! | --- | --- |
//! | `store` | the store itself: who loads what, reading, writing, clearing |
//! | `waiting` | for how long another process's load is waited for |
//! | `schemas` | what records are made of, kept once per store |
//! | `regions` | where records are laid down, and how regions are emptied |
//! | `index` | which record is a sample's |
//! | `base` | the store as it lies in its segment: its parts, its lease, its locks |
//! | `format` | the words of the index |
//! | [`portable`] | a record that can travel: sealed, and believed only when its checksum says so |
//! | [`schema`] | a schema, parsed: where the parts of a sample lie in its record |

mod base;
mod format;
mod index;
pub mod portable;
mod regions;
pub mod schema;
mod schemas;
mod store;
#[cfg(test)]
mod tests;
mod waiting;

pub use base::RecordStore;
pub use format::{MAX_RECORD, Record};
pub use regions::count_records;
pub use schemas::INLINE;
pub use store::{Claim, Put, StoreStats};
