//! Who loads a sample: memory, then the levels below it, then the caller.
//!
//! | module | role |
//! | --- | --- |
//! | [`acquire`] | the way of a sample from where it is to the caller: claim, memory, levels below, load, fill |
//! | [`levels`] | memory and what is below it |
//! | [`memory`] | memory as a level |
//! | [`tier`] | what a level must do |

pub mod acquire;
pub mod levels;
pub mod memory;
#[cfg(test)]
mod tests;
pub mod tier;

pub use acquire::{Acquiring, Filled};
pub use levels::Levels;
pub use tier::{Lent, Sealed, Sink, Tier, TierStats};
