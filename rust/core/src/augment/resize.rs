//! Bilinear and bicubic as torch does them: along the rows, then across them.
#![allow(unsafe_code)] // rows of an image that others may write to

use super::buffers::Buffer;
use super::kernels::Level;
use super::passes::{across_bytes, across_numbers, along_bytes, along_numbers};
use super::steps::Filter;
use super::view::View;
use super::weights::{Known, Sides, Weights};
use crate::error::Result;

/// What is used again from image to image.
#[derive(Default)]
pub(super) struct Resizer {
    known: Known,
    /// A row of the image, where its values do not lie one after the other.
    row: Buffer,
    /// The rows in their new width, plane by plane, with room behind each.
    between: Buffer,
}

impl Resizer {
    pub fn buffers(&mut self) -> [&mut Buffer; 2] {
        [&mut self.row, &mut self.between]
    }

    /// Writes the view in another size, plane by plane: a view of `to`.
    ///
    /// # Safety
    /// The image must be readable.
    pub unsafe fn resize(
        &mut self,
        view: &View,
        (height, width): (usize, usize),
        (filter, antialias): (Filter, bool),
        to: &mut [u8],
        level: Level,
    ) -> Result<View> {
        let bytes = !view.is_float();
        let sides = |from, to| Sides { from, to, filter, antialias, bytes };
        let along = self.known.weights(sides(view.width, width), level)?;
        let across = self.known.weights(sides(view.height, height), level)?;
        let made = View::planar(to.as_ptr(), view.item, view.channels, height, width);
        // SAFETY: by the caller's promise.
        unsafe {
            match bytes {
                true => self.bytes(view, (&along, &across), &made, to, level)?,
                false => self.numbers(view, (&along, &across), &made, to, level)?,
            }
        }
        Ok(made)
    }

    /// # Safety
    /// As above.
    unsafe fn bytes(
        &mut self,
        view: &View,
        (along, across): (&Weights, &Weights),
        made: &View,
        to: &mut [u8],
        level: Level,
    ) -> Result<()> {
        let Self { row, between, .. } = self;
        let (rows, room) = (across.reach(), along.room());
        let between = between.bytes(view.channels * rows.len() * room)?;
        let row = row.bytes(view.channels * view.width)?;
        for (at, y) in rows.clone().enumerate() {
            if !view.has_rows() {
                view.fetch_ahead(0, y);
                // SAFETY: by the caller's promise.
                unsafe { view.copy_row(y, row, level) };
            }
            for channel in 0..view.channels {
                let from = match view.has_rows() {
                    true => {
                        view.fetch_ahead(channel, y);
                        // SAFETY: as above; who resizes mirrors afterwards.
                        unsafe { view.row_of(channel, y) }
                    }
                    false => &row[channel * view.width..][..view.width],
                };
                let to = &mut between[(channel * rows.len() + at) * room..][..room];
                along_bytes(level, from, along, to);
            }
        }
        for (line, to) in to.chunks_exact_mut(made.width).take(made.lines()).enumerate() {
            let (first, weights) = across.seen(&across.whole, line % made.height);
            let at = line / made.height * rows.len() + first - rows.start;
            across_bytes(level, &between[at * room..], room, weights, across.precision, to);
        }
        Ok(())
    }

    /// # Safety
    /// As above.
    unsafe fn numbers(
        &mut self,
        view: &View,
        (along, across): (&Weights, &Weights),
        made: &View,
        to: &mut [u8],
        level: Level,
    ) -> Result<()> {
        let Self { row, between, .. } = self;
        let (rows, room) = (across.reach(), along.room());
        let between = between.floats(view.channels * rows.len() * room)?;
        for (at, y) in rows.clone().enumerate() {
            // SAFETY: by the caller's promise.
            unsafe { view.copy_row(y, row.bytes(view.channels * view.width * 4)?, level) };
            let row = row.floats(view.channels * view.width)?;
            for (channel, from) in row.chunks_exact(view.width).enumerate() {
                let to = &mut between[(channel * rows.len() + at) * room..][..room];
                along_numbers(level, from, &along.starts, &along.numbers, along.taps, to);
            }
        }
        let row = row.floats(made.width)?;
        for (line, to) in to.chunks_exact_mut(4 * made.width).take(made.lines()).enumerate() {
            let (first, weights) = across.seen(&across.numbers, line % made.height);
            let at = line / made.height * rows.len() + first - rows.start;
            across_numbers(level, &between[at * room..], room, weights, row);
            let (to, _) = to.as_chunks_mut::<4>();
            to.iter_mut().zip(&*row).for_each(|(to, value)| *to = value.to_ne_bytes());
        }
        Ok(())
    }
}
