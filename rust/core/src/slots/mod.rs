//! The dense cache: one slot per sample, loaded and stored by index.
//!
//! | module | role |
//! | --- | --- |
//! | `many` | many slots in one call, into one buffer |
//! | `store` | writing one slot, and emptying all |
//! | `load` | reading one slot |
//! | `cache` | a cache as this process has it open |
//! | `outcome` | what became of a load or a store |
//! | `seen` | what this process has seen to be set |

mod cache;
mod load;
mod many;
mod outcome;
mod seen;
mod store;
#[cfg(test)]
mod tests;

pub use cache::Cache;
pub use outcome::{Load, Stats, Stored};
