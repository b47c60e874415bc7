//! Which samples of a dataset each holder of a part keeps: computed when asked for, never listed.
//!
//! ```text
//!   samples     0 1 2 3 4 5 6 7 8 9      of the dataset
//!               dealt out in chunks, in an order that the seed gives
//!   positions   4 5 | 0 1 8 9 | 2 3 6 7  a stretch of them for each holder: a rank, or a node
//!               shuffled anew in every epoch, within a holder
//!   visits      5 4 | 9 0 1 8 | 3 7 2 6
//! ```
//!
//! | module | role |
//! | --- | --- |
//! | `plan` | who holds which stretch of positions |
//! | `permutation` | an order of the numbers below a length, given by a key |
//! | `visits` | the positions of one rank in one epoch |

mod permutation;
mod plan;
mod visits;

pub use permutation::Permutation;
pub use plan::{Holder, Stretch, deal_out};
pub use visits::{Order, Visits};
