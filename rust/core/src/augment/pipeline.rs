//! Steps that were fused: what becomes of an image, drawn, applied.
#![allow(unsafe_code)] // forwards raw memory

use super::apply::{Scratch, apply};
use super::draw::{Drawn, draw, output_of};
use super::finish::Target;
use super::image::{DType, Form, Holder, Image, Output, Shape, State};
use super::numbers::Number;
use super::steps::Description;
use crate::error::{Error, Kind, Result};
use crate::sys::stores::Stores;
use crate::sys::thread_pool::{Threads, post};
use std::sync::{Arc, Mutex, PoisonError};

/// Steps that were fused, checked once; the same for every thread and every row.
#[derive(Clone, Debug)]
pub struct Pipeline {
    description: Description,
}

impl Pipeline {
    /// From the description that Python's `fuse` writes. Errors name the step and what to do.
    pub fn parse(description: &str) -> Result<Self> {
        Ok(Self { description: Description::parse(description)? })
    }

    /// Whether this is what the steps do to images that are held so.
    pub fn takes(&self, holder: Holder) -> bool {
        self.description.takes.contains(&holder)
    }

    /// Whether torchvision does all steps to the same parts of samples with so many images, with a plain
    /// tensor before the first, with an array that is none. In doubt it does not.
    pub fn is_of_same(&self, images: usize, tensor_before: bool, array_beside: bool) -> bool {
        let Description { arrays, first, .. } = self.description;
        !(arrays && array_beside) && !(first && (images > 1 || tensor_before))
    }

    /// What an image of this kind becomes; an error if that is not one size and type for all rows.
    pub fn output(&self, image: &Shape) -> Result<Output> {
        let state = output_of(&self.description.steps, State::of(image)?)?;
        let dtype = self.dtype_of(&state)?;
        let dims = [state.channels, state.height, state.width].map(i64::from).to_vec();
        let bytes = state.values() * dtype.bytes();
        Ok(Output { dtype: dtype.number(), dims, bytes, channels_last: self.channels_last(&state) })
    }

    /// The parameters of one row: a function of its number and of the image's size. For an image that
    /// `output` refuses, an error as there.
    pub fn draw(&self, number: Number, image: &Shape) -> Result<Drawn> {
        draw(&self.description.steps, State::of(image)?, number)
    }

    /// Writes the row.
    ///
    /// # Safety
    /// The image must be readable as its shape says, without gaps, and `to` be valid for writes of the
    /// bytes that `output` says; nobody else's meanwhile, and aligned for its type. Others may write to
    /// the image meanwhile: then what is written is nonsense.
    pub unsafe fn apply(
        &self,
        drawn: &Drawn,
        image: Image,
        to: *mut u8,
        stores: Stores,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let dtype = self.dtype_of(&drawn.after)?;
        let target = Target { to, dtype, pixels: self.channels_last(&drawn.after), stores };
        // SAFETY: by the caller's promise.
        unsafe { apply(drawn, &image, target, scratch) }
    }

    /// Writes rows of images that lie one after the other, on up to that many threads, this one
    /// included.
    ///
    /// # Safety
    /// As for `apply`, of as many images and rows as there are numbers.
    pub unsafe fn apply_many(
        self: &Arc<Self>,
        numbers: Vec<Number>,
        images: Image,
        to: *mut u8,
        threads: usize,
    ) -> Result<()> {
        let (bytes, count) = (self.output(&images.shape)?.bytes, numbers.len());
        let image_bytes = State::of(&images.shape)?.bytes();
        let (from, to) = (images.data as usize, to as usize);
        let (pipeline, shape) = (Arc::clone(self), images.shape);
        let stores = Stores::of(count * bytes);
        let failed = Arc::new(Mutex::new(None));
        let found = Arc::clone(&failed);
        let work = move |row: usize| {
            let image = Image { data: (from + row * image_bytes) as *const u8, shape };
            let to = (to + row * bytes) as *mut u8;
            let done = pipeline.draw(numbers[row], &shape).and_then(|drawn| {
                // SAFETY: by the caller's promise; each row is written by one thread.
                Scratch::here(|scratch| unsafe {
                    pipeline.apply(&drawn, image, to, stores, scratch)
                })
            });
            if let Err(error) = done {
                found.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        let helpers = threads.saturating_sub(1).min(count.saturating_sub(1));
        // After a fork all of them are done once more, which changes nothing.
        let _ = post(Threads::Copying, count, helpers, Box::new(work)).wait();
        match failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn channels_last(&self, state: &State) -> bool {
        self.description.channels_last && state.channels > 1
    }

    fn dtype_of(&self, state: &State) -> Result<DType> {
        if state.form != Form::Tensor {
            return Err(Error::new(
                Kind::Type,
                "the steps leave the image what it is, and batches are of tensors: add v2.ToImage(), \
                 and v2.ToDtype(torch.float32, scale=True) if the model wants numbers from 0 to 1",
            ));
        }
        match self.description.dtype {
            Some(dtype) if dtype.is_float() != state.dtype.is_float() => Err(Error::new(
                Kind::Type,
                format!(
                    "the steps end with {}, and dtype={} is asked for, which they do not say how to \
                     scale: add v2.ToDtype({}, scale=True)",
                    state.dtype.name(),
                    dtype.name(),
                    dtype.name()
                ),
            )),
            Some(dtype) => Ok(dtype),
            None => Ok(state.dtype),
        }
    }
}
