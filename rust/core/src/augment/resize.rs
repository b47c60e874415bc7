//! Bilinear and bicubic, by the crate `fast_image_resize`.
#![allow(unsafe_code)] // rows of an image that others may write to

use super::steps::Filter;
use super::view::View;
use crate::error::{Error, Kind, Result};
use fast_image_resize::images::TypedImage;
use fast_image_resize::pixels::{F32, F32x3, InnerPixel, U8, U8x3};
use fast_image_resize::{FilterType, ImageView, PixelTrait, ResizeAlg, ResizeOptions, Resizer};
use std::marker::PhantomData;

/// One plane of a view, or all of one whose pixels lie together.
struct Plane<P> {
    data: *const u8,
    row: isize,
    width: usize,
    height: usize,
    pixel: PhantomData<P>,
}

// SAFETY: it only reads; who made it answers for the memory.
unsafe impl<P> Send for Plane<P> {}
// SAFETY: as above.
unsafe impl<P> Sync for Plane<P> {}

// SAFETY: rows are as long as the width.
unsafe impl<P: InnerPixel> ImageView for Plane<P> {
    type Pixel = P;

    fn width(&self) -> u32 {
        self.width as u32
    }

    fn height(&self) -> u32 {
        self.height as u32
    }

    fn iter_rows(&self, start: u32) -> impl Iterator<Item = &[P]> {
        (start as usize..self.height).map(|y| {
            let row = self.data.wrapping_offset(self.row * y as isize);
            // SAFETY: a row of the view, which is readable while this lives, and aligned: `resize` looked.
            unsafe { std::slice::from_raw_parts(row.cast::<P>(), self.width) }
        })
    }
}

/// Whether `resize` takes a view as it is.
pub(super) fn takes(view: &View) -> bool {
    let aligned = |far: isize| far.unsigned_abs().is_multiple_of(view.item);
    let places = [view.data as isize, view.row, view.plane].into_iter().all(aligned);
    places && (view.has_plain_rows() || is_of_three(view))
}

fn is_of_three(view: &View) -> bool {
    view.channels == 3 && view.is_interleaved() && view.pixel > 0
}

/// Writes the view, without margins of so many rows and columns, in another size: a view of `to`, whose
/// values lie as those of the first do.
///
/// # Safety
/// The image must be readable.
pub(super) unsafe fn resize(
    resizer: &mut Resizer,
    view: &View,
    (height, width): (usize, usize),
    (rows, columns): (usize, usize),
    filter: Filter,
    antialias: bool,
    to: &mut [u8],
) -> Result<View> {
    debug_assert!(takes(view));
    let kernel = match (filter, antialias) {
        (Filter::Bilinear, _) => FilterType::Bilinear,
        (Filter::Bicubic, true) => FilterType::CatmullRom,
        (Filter::Bicubic, false) => sharper(),
    };
    let algorithm = match antialias {
        true => ResizeAlg::Convolution(kernel),
        false => ResizeAlg::Interpolation(kernel),
    };
    let (wide, high) = (view.width - 2 * columns, view.height - 2 * rows);
    let options = ResizeOptions::new().resize_alg(algorithm).use_alpha(false).crop(
        columns as f64,
        rows as f64,
        wide as f64,
        high as f64,
    );
    let made = View::planar(to.as_ptr(), view.item, view.channels, height, width);
    if is_of_three(view) {
        let size = (height, width);
        // SAFETY: by the caller's promise.
        unsafe {
            match view.is_float() {
                true => plane::<F32x3>(resizer, view, 0, size, &options, to)?,
                false => plane::<U8x3>(resizer, view, 0, size, &options, to)?,
            }
        }
        let pixel = (view.item * 3) as isize;
        return Ok(View { plane: view.item as isize, row: pixel * width as isize, pixel, ..made });
    }
    let bytes = width * height * view.item;
    for (channel, to) in to.chunks_exact_mut(bytes).take(view.channels).enumerate() {
        // SAFETY: by the caller's promise.
        unsafe {
            match view.is_float() {
                true => plane::<F32>(resizer, view, channel, (height, width), &options, to)?,
                false => plane::<U8>(resizer, view, channel, (height, width), &options, to)?,
            }
        }
    }
    Ok(made)
}

/// # Safety
/// The image must be readable.
unsafe fn plane<P: PixelTrait + Default>(
    resizer: &mut Resizer,
    view: &View,
    channel: usize,
    (height, width): (usize, usize),
    options: &ResizeOptions,
    to: &mut [u8],
) -> Result<()> {
    let from = Plane::<P> {
        data: view.at(channel, 0, 0),
        row: view.row,
        width: view.width,
        height: view.height,
        pixel: PhantomData,
    };
    let refused = |why: &dyn std::fmt::Display| {
        Error::new(Kind::State, format!("an image could not be resized: {why}"))
    };
    let mut made = TypedImage::<P>::from_buffer(width as u32, height as u32, to)
        .map_err(|error| refused(&error))?;
    resizer.resize_typed(&from, &mut made, options).map_err(|error| refused(&error))
}

/// torch's bicubic filter without antialias has another number than that with.
fn sharper() -> FilterType {
    fn cubic(x: f64) -> f64 {
        const A: f64 = -0.75;
        let x = x.abs();
        if x < 1.0 {
            ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
        } else if x < 2.0 {
            (((x - 5.0) * x + 8.0) * x - 4.0) * A
        } else {
            0.0
        }
    }
    fast_image_resize::Filter::new("torch's bicubic", cubic, 2.0)
        .map_or(FilterType::CatmullRom, FilterType::Custom)
}
