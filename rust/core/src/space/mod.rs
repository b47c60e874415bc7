//! A space that records are laid down in, one after the other, and the index that says where: memory
//! (`records`) or files (`disk`). This is what processes share of it; the bytes are elsewhere.
//!
//! | module | role |
//! | --- | --- |
//! | `regions` | where records are laid down, and how regions are emptied |
//! | `index` | which record is a sample's |
//! | `base` | the words of a space in its segment |
//! | `format` | what the words of the index say |

mod base;
mod format;
mod index;
mod regions;

pub(crate) use base::Space;
pub(crate) use format::{LAST_GENERATION, LENGTH_BITS, pack};
pub use format::{MAX_RECORD, Record};
pub use regions::count_records;
pub(crate) use regions::{Firm, Ground, Reserved, calls};
