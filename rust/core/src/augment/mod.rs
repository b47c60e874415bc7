//! Augmentation: the steps that random transforms of images consist of, fused, while a row is written.
//!
//! A pipeline is parsed once from the description that Python writes. For every row its parameters are
//! drawn, a pure function of (seed, epoch, index) and the size of the image, and then the row is
//! written in as few passes as they allow: crops and flips only move the view of the image, and what
//! makes numbers of its bytes is one table or one multiplication in the last pass.
//!
//! | module | role |
//! | --- | --- |
//! | `pipeline` | steps that were fused: what becomes of an image, drawn, applied |
//! | `apply` | one row, written as its parameters say |
//! | `finish` | the last pass: bytes or numbers of a view into the row |
//! | `pad` | margins, in the four ways of torchvision |
//! | `points` | what happens to each value by itself: types, scales, means |
//! | `colour` | brightness, contrast, saturation, hue, grey |
//! | `resize` | bilinear and bicubic as torch does them: along the rows, then across them |
//! | `passes` | those two passes, compiled for several processors |
//! | `weights` | what a resize takes of which places |
//! | `view` | where the values of an image lie, and rows of them |
//! | `kernels` | loops over rows, compiled for several processors and chosen at run time |
//! | `buffers` | memory between two steps, used again |
//! | `draw` | parameters of one row, drawn from its numbers |
//! | `steps` | what Python describes, checked |
//! | `numbers` | random numbers as a function of (seed, epoch, index) |
//! | `image` | what an image is: its size, its type, how its values lie |

mod apply;
mod buffers;
mod colour;
mod draw;
mod finish;
mod image;
mod kernels;
mod numbers;
mod pad;
mod passes;
mod pipeline;
mod points;
mod resize;
mod steps;
#[cfg(test)]
mod tests;
mod view;
mod weights;

pub use apply::Scratch;
pub use draw::Drawn;
pub use image::{Holder, Image, Output, Shape};
pub use numbers::Number;
pub use pipeline::Pipeline;
