//! Where the values of an image lie, and rows of them.
//!
//! A crop or a flip is another view of the same bytes. They may lie in memory that other processes
//! write to meanwhile: what is read then is nonsense, which the caller throws away.
#![allow(unsafe_code)] // copies from raw addresses

use super::image::{Image, State};
use super::kernels::{self, Level};
use crate::error::{Error, Kind, Result};
use crate::sys::prefetch;

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

    /// Values of a row lie one after the other, or the last first.
    pub fn has_rows(&self) -> bool {
        self.pixel.unsigned_abs() == self.item
    }

    /// Whether the last value of a row lies first.
    pub fn is_mirrored(&self) -> bool {
        self.pixel < 0
    }

    /// Has a row fetched that is some rows behind this one. A processor foresees what comes next in a
    /// page of memory, but not the next page.
    pub fn fetch_ahead(&self, channel: usize, y: usize) {
        const AHEAD: usize = 4096;
        let bytes = self.row.unsigned_abs();
        let y = y + AHEAD.div_ceil(bytes.max(1));
        if y < self.height {
            // Of pixels that lie together, one channel is all of them.
            let row = self.at(channel, y, if self.is_mirrored() { self.width - 1 } else { 0 });
            prefetch::bytes(row, self.width * self.pixel.unsigned_abs());
        }
    }

    /// The bytes of a row of a channel, as they lie there.
    ///
    /// # Safety
    /// The image must be readable, and `has_rows`.
    pub unsafe fn row_of<'a>(&self, channel: usize, y: usize) -> &'a [u8] {
        // SAFETY: within the image, by the caller's promise.
        unsafe { self.bytes_of(channel, y, self.width * self.item) }
    }

    /// A row, pixel by pixel, as it lies there.
    ///
    /// # Safety
    /// The image must be readable, and `is_interleaved`.
    pub unsafe fn pixels_of<'a>(&self, y: usize) -> &'a [u8] {
        // SAFETY: within the image, by the caller's promise.
        unsafe { self.bytes_of(0, y, self.width * self.channels * self.item) }
    }

    /// So many bytes of a row, from its leftmost on. What others write there meanwhile makes them
    /// nonsense, which is thrown away.
    ///
    /// # Safety
    /// They must lie within the image, which must be readable.
    unsafe fn bytes_of<'a>(&self, channel: usize, y: usize, len: usize) -> &'a [u8] {
        let first = if self.is_mirrored() { self.width - 1 } else { 0 };
        // SAFETY: by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at(channel, y, first), len) }
    }

    /// All channels of a row, one after the other, as they are to be seen.
    ///
    /// # Safety
    /// The image must be readable.
    pub unsafe fn copy_row(&self, y: usize, to: &mut [u8], level: Level) {
        let bytes = self.width * self.item;
        if self.item == 1 && self.channels == 3 && self.is_interleaved() {
            // SAFETY: all pixels of the row.
            let row = unsafe { self.bytes_of(0, y, 3 * self.width) };
            let (r, rest) = to.split_at_mut(bytes);
            let (g, b) = rest.split_at_mut(bytes);
            kernels::split_pixels(level, row, self.is_mirrored(), r, g, &mut b[..bytes]);
            return;
        }
        for (channel, to) in to.chunks_exact_mut(bytes).take(self.channels).enumerate() {
            // SAFETY: by the caller's promise.
            unsafe { self.copy_channel(channel, y, to, level) };
        }
    }

    /// # Safety
    /// As for `copy_row`.
    unsafe fn copy_channel(&self, channel: usize, y: usize, to: &mut [u8], level: Level) {
        if self.has_rows() {
            // SAFETY: by the caller's promise.
            let row = unsafe { self.row_of(channel, y) };
            match self.item {
                1 => kernels::copy_bytes(level, row, self.is_mirrored(), to),
                _ => {
                    let ((row, _), (to, _)) = (row.as_chunks::<4>(), to.as_chunks_mut::<4>());
                    kernels::copy_words(level, row, self.is_mirrored(), to);
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
        if self.pixel.unsigned_abs() == pixel && (self.is_interleaved() || self.channels == 1) {
            // SAFETY: all pixels of the row.
            let row = unsafe { self.bytes_of(0, y, to.len()) };
            match pixel {
                _ if !self.is_mirrored() => to.copy_from_slice(row),
                3 => {
                    let ((row, _), (to, _)) = (row.as_chunks::<3>(), to.as_chunks_mut::<3>());
                    kernels::mirror_pixels(level, row, to);
                }
                _ => {
                    let pixels = row.chunks_exact(pixel).rev();
                    to.chunks_exact_mut(pixel)
                        .zip(pixels)
                        .for_each(|(to, of)| to.copy_from_slice(of));
                }
            }
            return;
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
