//! A fused pipeline as C++ holds it.
#![allow(unsafe_code)] // images and rows come as addresses

use crate::bridge::ffi;
use crate::guard::{Crossing, guard};
use std::sync::Arc;
use stocache::augment::{self, Image, Number, Scratch, Shape};
use stocache::sys::stores::Stores;
use stocache::{Error, Kind};

type Result<T> = std::result::Result<T, Crossing>;

/// Steps that were fused.
pub struct Pipeline(Arc<augment::Pipeline>);

pub fn new_pipeline(description: &str) -> Result<Box<Pipeline>> {
    guard(|| Ok(Box::new(Pipeline(Arc::new(augment::Pipeline::parse(description)?)))))
}

fn shape_of(shape: &ffi::ImageShape) -> Shape {
    let ffi::ImageShape { channels, height, width, dtype, interleaved, pil, array } = *shape;
    Shape { channels, height, width, dtype, interleaved, pil, array }
}

fn number_of(number: &ffi::RowNumber) -> Number {
    let ffi::RowNumber { seed, epoch, index } = *number;
    Number { seed, epoch, index }
}

impl Pipeline {
    pub(crate) fn parsed(&self) -> &Arc<augment::Pipeline> {
        &self.0
    }

    pub fn output(&self, shape: &ffi::ImageShape) -> Result<ffi::ImageOutput> {
        guard(|| {
            let augment::Output { dtype, dims, bytes, channels_last } =
                self.0.output(&shape_of(shape))?;
            Ok(ffi::ImageOutput { dtype, dims, bytes, channels_last })
        })
    }

    pub fn drawn(&self, number: &ffi::RowNumber, shape: &ffi::ImageShape) -> Result<String> {
        guard(|| Ok(self.0.draw(number_of(number), &shape_of(shape))?.describe()))
    }

    /// # Safety
    /// The images must be readable as the shape says, one after the other, and `to` writable for as many
    /// rows as there are indices.
    pub unsafe fn apply(
        &self,
        number: &ffi::RowNumber,
        indices: &[u64],
        shape: &ffi::ImageShape,
        data: *const u8,
        to: *mut u8,
        threads: usize,
    ) -> Result<()> {
        let image = Image { data, shape: shape_of(shape) };
        // SAFETY: by the caller's promise.
        guard(|| Ok(unsafe { self.write(number_of(number), indices, image, to, threads) }?))
    }

    /// # Safety
    /// As for `apply`.
    unsafe fn write(
        &self,
        number: Number,
        indices: &[u64],
        image: Image,
        to: *mut u8,
        threads: usize,
    ) -> stocache::Result<()> {
        if image.data.is_null() || to.is_null() {
            return Err(Error::new(Kind::Argument, "the image has no memory"));
        }
        if let &[index] = indices {
            let drawn = self.0.draw(Number { index, ..number }, &image.shape)?;
            // SAFETY: by the caller's promise.
            return Scratch::here(|scratch| unsafe {
                self.0.apply(&drawn, image, to, Stores::Cached, scratch)
            });
        }
        let numbers = indices.iter().map(|&index| Number { index, ..number }).collect();
        // SAFETY: by the caller's promise.
        unsafe { self.0.apply_many(numbers, image, to, threads) }
    }
}
