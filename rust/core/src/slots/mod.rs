//! The dense cache: one slot per sample, loaded and stored by index.
//!
//! | module | role |
//! | --- | --- |
//! | `many` | many slots in one call, into one buffer |
//! | `cache` | one slot: load, store, clear |
//! | `seen` | what this process has seen to be set |

mod cache;
mod many;
mod seen;

pub use cache::{Cache, Load, Stats, Stored};
