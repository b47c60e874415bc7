//! Where the values of an image lie, and rows of them.
//!
//! A crop or a flip is another view of the same bytes. They may lie in memory that other processes
//! write to meanwhile: what is read then is nonsense, which the caller throws away.
#![allow(unsafe_code)] // copies from raw addresses

use super::image::{Image, State};
use super::kernels::{self, Level};
use crate::error::{Error, Kind, Result};

/// The values of an image: bytes, or float32. Distances are in bytes, and may be negative.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    /// The first value of the first row of the first channel.
    pub data: *const u8,
    /// Bytes of a value: 1 or 4.
    pub item: usize,
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    /// From a channel to the next.
    pub plane: isize,
    pub row: isize,
    pub pixel: isize,
}

impl View {
    pub fn of(image: &Image, state: &State) -> Self {
        let shape = &image.shape;
        let item = state.dtype.bytes();
        let (channels, height, width) =
            (shape.channels as usize, shape.height as usize, shape.width as usize);
        let view = Self::planar(image.data, item, channels, height, width);
        if !shape.interleaved {
            return view;
        }
        let pixel = (item * channels) as isize;
        Self { plane: item as isize, row: pixel * width as isize, pixel, ..view }
    }

    pub fn planar(
        data: *const u8,
        item: usize,
        channels: usize,
        height: usize,
        width: usize,
    ) -> Self {
        let row = item * width;
        let plane = (row * height) as isize;
        let (row, pixel) = (row as isize, item as isize);
        Self { data, item, channels, height, width, plane, row, pixel }
    }

    pub fn is_float(&self) -> bool {
        self.item == 4
    }

    /// Rows of all channels.
    pub fn lines(&self) -> usize {
        self.channels * self.height
    }

    pub fn values(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// A part of it.
    pub fn crop(self, top: u32, left: u32, height: u32, width: u32) -> Result<Self> {
        let [top, left, height, width] = [top, left, height, width].map(|side| side as usize);
        if top + height > self.height || left + width > self.width || height == 0 || width == 0 {
            return Err(Error::new(Kind::State, "a crop lies outside of its image"));
        }
        Ok(Self { data: self.at(0, top, left), height, width, ..self })
    }

    pub fn mirrored(self) -> Self {
        Self { data: self.at(0, 0, self.width - 1), pixel: -self.pixel, ..self }
    }

    pub fn upside_down(self) -> Self {
        Self { data: self.at(0, self.height - 1, 0), row: -self.row, ..self }
    }

    /// The address of a value; `wrapping_offset`, since a view of nothing is never read.
    pub fn at(&self, channel: usize, y: usize, x: usize) -> *const u8 {
        let far = self.plane * channel as isize + self.row * y as isize + self.pixel * x as isize;
        self.data.wrapping_offset(far)
    }

    /// Whether all three channels of a pixel are neighbours.
    pub fn is_interleaved(&self) -> bool {
        self.channels > 1
            && self.plane == self.item as isize
            && self.pixel.unsigned_abs() == self.item * self.channels
    }

    /// Values of a row lie one after the other.
    pub fn has_plain_rows(&self) -> bool {
        self.pixel == self.item as isize
    }

    /// The bytes of a row of a channel, where they lie one after the other.
    ///
    /// # Safety
    /// The image must be readable, and `has_plain_rows`.
    pub unsafe fn row_of<'a>(&self, channel: usize, y: usize) -> &'a [u8] {
        // SAFETY: within the image, by the caller's promise. What others write there meanwhile makes the
        // row nonsense, which is thrown away.
        unsafe { std::slice::from_raw_parts(self.at(channel, y, 0), self.width * self.item) }
    }

    /// All channels of a row, one after the other, as they are to be seen.
    ///
    /// # Safety
    /// The image must be readable.
    pub unsafe fn copy_row(&self, y: usize, to: &mut [u8], level: Level) {
        let bytes = self.width * self.item;
        if self.item == 1 && self.channels == 3 && self.is_interleaved() {
            let first =
                if self.pixel < 0 { self.at(0, y, self.width - 1) } else { self.at(0, y, 0) };
            // SAFETY: all pixels of the row, from its leftmost byte.
            let row = unsafe { std::slice::from_raw_parts(first, 3 * self.width) };
            let (r, rest) = to.split_at_mut(bytes);
            let (g, b) = rest.split_at_mut(bytes);
            let b = &mut b[..bytes];
            kernels::split_pixels(level, row, r, g, b);
            if self.pixel < 0 {
                [r, g, b].into_iter().for_each(<[u8]>::reverse);
            }
            return;
        }
        for (channel, to) in to.chunks_exact_mut(bytes).take(self.channels).enumerate() {
            // SAFETY: by the caller's promise.
            unsafe { self.copy_channel(channel, y, to) };
        }
    }

    /// # Safety
    /// As for `copy_row`.
    unsafe fn copy_channel(&self, channel: usize, y: usize, to: &mut [u8]) {
        if self.pixel.unsigned_abs() == self.item {
            let mirrored = self.pixel < 0;
            let first = if mirrored { self.width - 1 } else { 0 };
            // SAFETY: the row from its leftmost byte.
            let row = unsafe { std::slice::from_raw_parts(self.at(channel, y, first), to.len()) };
            to.copy_from_slice(row);
            if mirrored {
                match self.item {
                    1 => to.reverse(),
                    _ => {
                        let (values, _) = to.as_chunks_mut::<4>();
                        values.reverse();
                    }
                }
            }
            return;
        }
        for (x, to) in to.chunks_exact_mut(self.item).enumerate() {
            // SAFETY: one value of the image, and room for it.
            unsafe {
                std::ptr::copy_nonoverlapping(self.at(channel, y, x), to.as_mut_ptr(), self.item)
            };
        }
    }

    /// A row pixel by pixel, all channels of each, as they are to be seen.
    ///
    /// # Safety
    /// The image must be readable.
    pub unsafe fn copy_pixels(&self, y: usize, to: &mut [u8], rows: &mut [u8], level: Level) {
        let (pixel, bytes) = (self.item * self.channels, self.width * self.item);
        let to = &mut to[..self.width * pixel];
        if self.is_interleaved() || self.channels == 1 {
            let mirrored = self.pixel < 0;
            if self.pixel.unsigned_abs() == pixel {
                let first = if mirrored { self.width - 1 } else { 0 };
                // SAFETY: the row from its leftmost byte.
                let row = unsafe { std::slice::from_raw_parts(self.at(0, y, first), to.len()) };
                if !mirrored {
                    to.copy_from_slice(row);
                    return;
                }
                for (to, from) in to.chunks_exact_mut(pixel).zip(row.chunks_exact(pixel).rev()) {
                    to.copy_from_slice(from);
                }
                return;
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { self.copy_row(y, rows, level) };
        if self.item == 1 && self.channels == 3 {
            let (r, rest) = rows.split_at(bytes);
            let (g, b) = rest.split_at(bytes);
            kernels::join_pixels(level, r, g, &b[..bytes], to);
            return;
        }
        for (channel, row) in rows.chunks_exact(bytes).take(self.channels).enumerate() {
            let mut place = channel * self.item;
            for value in row.chunks_exact(self.item) {
                to[place..place + self.item].copy_from_slice(value);
                place += pixel;
            }
        }
    }
}
