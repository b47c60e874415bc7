//! Batches: gathered from records, and on their way from a worker to the trainer.
//!
//! | module | role |
//! | --- | --- |
//! | `receive` | rows that come from levels which must be asked |
//! | `batch` | a batch in the making: found, laid out, copied out whole |
//! | `taking` | rows that are copied by who reads their records |
//! | `gather` | the copies: rows of records into columns |
//! | `columns` | what a batch is made of, and where its rows lie |
//! | `images` | rows that a pipeline makes of images |
//! | `buffers` | buffers that cross processes without a copy |

mod batch;
mod buffers;
mod columns;
mod gather;
mod images;
mod receive;
mod taking;
#[cfg(test)]
mod tests;

pub use batch::{Batch, Gathered, Layout};
pub use buffers::*;
pub use columns::{Column, Pieces, Row};
pub use images::Fused;
