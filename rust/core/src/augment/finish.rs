//! The last pass: bytes or numbers of a view into the row.
#![allow(unsafe_code)] // reads of an image that others may write to, and writes to raw memory

use super::apply::Rows;
use super::image::DType;
use super::kernels::{self, Level};
use super::numbers::normal_at;
use super::points::{Point, Recipe, of_channel, rounded, through};
use super::view::View;
use crate::error::Result;
use half::slice::HalfFloatSliceExt;
use std::sync::Arc;

/// A rectangle that is erased, after so many points of the chain.
#[derive(Clone, Debug)]
pub(super) struct Erased {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
    /// None: normal numbers of the key.
    pub values: Option<Arc<[f32]>>,
    pub key: u64,
    /// How much of the chain it has behind it, and the type there.
    pub after: usize,
    pub dtype: DType,
}

/// Where a row goes: channel by channel, or pixel by pixel.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub to: *mut u8,
    pub dtype: DType,
    pub pixels: bool,
}

/// What makes values of bytes, kept from row to row: most rows of a batch want the same.
#[derive(Default)]
pub(super) struct Kept {
    of: Option<(Vec<Point>, usize, DType)>,
    recipe: Option<Arc<Recipe>>,
}

impl Kept {
    fn recipe(&mut self, chain: &[Point], channels: usize, to: DType, level: Level) -> Arc<Recipe> {
        let same = self
            .of
            .as_ref()
            .is_some_and(|(of, count, dtype)| of == chain && (*count, *dtype) == (channels, to));
        if !same {
            self.of = Some((chain.to_vec(), channels, to));
            self.recipe = None;
        }
        let make = || Arc::new(Recipe::of(chain, channels, to, level.fuses()));
        Arc::clone(self.recipe.get_or_insert_with(make))
    }
}

/// Writes what the chain makes of the view, then what was erased.
///
/// # Safety
/// The image must be readable, and the target writable for all values of the view; nobody else's, and
/// aligned for its type.
pub(super) unsafe fn finish(
    view: &View,
    chain: &[Point],
    erased: &[Erased],
    target: Target,
    rows: &mut Rows,
) -> Result<()> {
    let pixels = target.pixels && view.channels > 1;
    let (lines, per_line) = if pixels {
        (view.height, view.width * view.channels)
    } else {
        (view.height * view.channels, view.width)
    };
    // SAFETY: the whole of the target, by the caller's promise.
    unsafe {
        let (to, len) = (target.to, lines * per_line);
        match target.dtype {
            DType::UInt8 => {
                let to = std::slice::from_raw_parts_mut(to, len);
                fill(view, chain, to, pixels, rows, DType::UInt8)?;
                erase(view, chain, erased, to, pixels, |value| value as i64 as u8);
            }
            DType::Float32 => {
                let to = std::slice::from_raw_parts_mut(to.cast::<f32>(), len);
                fill(view, chain, to, pixels, rows, DType::Float32)?;
                erase(view, chain, erased, to, pixels, |value| value);
            }
            DType::BFloat16 => {
                let to = std::slice::from_raw_parts_mut(to.cast::<half::bf16>(), len);
                fill(view, chain, to, pixels, rows, DType::BFloat16)?;
                erase(view, chain, erased, to, pixels, half::bf16::from_f32);
            }
            DType::Float16 => {
                let to = std::slice::from_raw_parts_mut(to.cast::<half::f16>(), len);
                fill(view, chain, to, pixels, rows, DType::Float16)?;
                erase(view, chain, erased, to, pixels, half::f16::from_f32);
            }
        }
    }
    Ok(())
}

/// A type of values that rows are written in.
trait Value: Copy {
    fn of(value: f32) -> Self;
    /// A line of bytes, by lines of that recipe.
    fn by_lines(
        level: Level,
        from: &[u8],
        lines: &kernels::Lines,
        to: &mut [Self],
        spare: &mut [f32],
    );
    /// A line of numbers.
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        from.iter().zip(to).for_each(|(from, to)| *to = Self::of(*from));
    }
    fn same(_from: &[u8], _to: &mut [Self]) {}
}

impl Value for u8 {
    fn of(value: f32) -> Self {
        value as i64 as u8
    }
    fn by_lines(_: Level, from: &[u8], _: &kernels::Lines, to: &mut [Self], _: &mut [f32]) {
        Self::same(from, to); // never asked for
    }
    fn same(from: &[u8], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Value for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn by_lines(level: Level, from: &[u8], lines: &kernels::Lines, to: &mut [Self], _: &mut [f32]) {
        kernels::lines_to_float(level, from, lines, to);
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Value for half::bf16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn by_lines(level: Level, from: &[u8], lines: &kernels::Lines, to: &mut [Self], _: &mut [f32]) {
        kernels::lines_to_bfloat16(level, from, lines, to.reinterpret_cast_mut());
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl Value for half::f16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn by_lines(
        level: Level,
        from: &[u8],
        lines: &kernels::Lines,
        to: &mut [Self],
        spare: &mut [f32],
    ) {
        let spare = &mut spare[..from.len()];
        kernels::lines_to_float(level, from, lines, spare);
        to.convert_from_f32_slice(spare);
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// # Safety
/// The image must be readable.
unsafe fn fill<V: Value>(
    view: &View,
    chain: &[Point],
    to: &mut [V],
    pixels: bool,
    rows: &mut Rows,
    dtype: DType,
) -> Result<()> {
    let (channels, height, width) = (view.channels, view.height, view.width);
    if view.is_float() {
        // SAFETY: by the caller's promise.
        return unsafe { fill_from_numbers(view, chain, to, pixels, rows) };
    }
    let level = rows.level;
    let recipe = rows.kept.recipe(chain, channels, dtype, level);
    let (bytes, spare, numbers) = rows.lines(channels * width)?;
    let write =
        |which: Option<usize>, from: &[u8], to: &mut [V], numbers: &mut [f32]| match &*recipe {
            Recipe::Same => V::same(from, to),
            Recipe::Lines { rows, pixels, at_once } => match which {
                Some(channel) => V::by_lines(level, from, &rows[channel], to, numbers),
                None => {
                    for (from, to) in from.chunks(*at_once).zip(to.chunks_mut(*at_once)) {
                        V::by_lines(level, from, pixels, to, numbers);
                    }
                }
            },
            Recipe::Table(table) => match which {
                Some(channel) => {
                    let (table, _) = table[channel * 256..].as_chunks::<256>();
                    let table = &table[0];
                    for (from, to) in from.iter().zip(to) {
                        *to = V::of(table[usize::from(*from)]);
                    }
                }
                None => {
                    for (from, to) in from.chunks_exact(channels).zip(to.chunks_exact_mut(channels))
                    {
                        for channel in 0..channels {
                            to[channel] = V::of(table[channel * 256 + usize::from(from[channel])]);
                        }
                    }
                }
            },
        };
    if pixels {
        let plain = view.is_interleaved() && view.pixel > 0;
        for (y, to) in to.chunks_exact_mut(width * channels).enumerate() {
            if plain {
                // SAFETY: a row, pixel by pixel; by the caller's promise.
                let from =
                    unsafe { std::slice::from_raw_parts(view.at(0, y, 0), width * channels) };
                write(None, from, to, numbers);
            } else {
                // SAFETY: by the caller's promise.
                unsafe { view.copy_pixels(y, bytes, spare, level) };
                write(None, bytes, to, numbers);
            }
        }
    } else if view.has_plain_rows() {
        for (line, to) in to.chunks_exact_mut(width).enumerate() {
            let channel = line / height;
            // SAFETY: by the caller's promise; rows are plain.
            let from = unsafe { view.row_of(channel, line % height) };
            write(Some(channel), from, to, numbers);
        }
    } else {
        for y in 0..height {
            // SAFETY: by the caller's promise.
            unsafe { view.copy_row(y, bytes, level) };
            for (channel, from) in bytes.chunks_exact(width).enumerate() {
                let at = (channel * height + y) * width;
                write(Some(channel), from, &mut to[at..at + width], numbers);
            }
        }
    }
    Ok(())
}

/// # Safety
/// The image must be readable.
unsafe fn fill_from_numbers<V: Value>(
    view: &View,
    chain: &[Point],
    to: &mut [V],
    pixels: bool,
    rows: &mut Rows,
) -> Result<()> {
    let (channels, height, width) = (view.channels, view.height, view.width);
    let level = rows.level;
    let (bytes, _, numbers) = rows.lines(channels * width * 4)?;
    for y in 0..height {
        // SAFETY: by the caller's promise.
        unsafe { view.copy_row(y, bytes, level) };
        let (stored, _) = bytes.as_chunks::<4>();
        let numbers = &mut numbers[..channels * width];
        for (to, from) in numbers.iter_mut().zip(stored) {
            *to = f32::from_ne_bytes(*from);
        }
        for (channel, line) in numbers.chunks_exact_mut(width).enumerate() {
            through_line(chain, channel, line);
        }
        if pixels {
            let to = &mut to[y * width * channels..][..width * channels];
            for (x, to) in to.chunks_exact_mut(channels).enumerate() {
                for channel in 0..channels {
                    to[channel] = V::of(numbers[channel * width + x]);
                }
            }
        } else {
            for (channel, line) in numbers.chunks_exact(width).enumerate() {
                V::by_numbers(line, &mut to[(channel * height + y) * width..][..width]);
            }
        }
    }
    Ok(())
}

/// The same as `through` for a line of float32, faster where all of it is float32.
fn through_line(chain: &[Point], channel: usize, line: &mut [f32]) {
    for (place, point) in chain.iter().enumerate() {
        match point {
            Point::To { dtype: DType::Float32, .. } => {}
            Point::Normalize { mean, std } => {
                let (mean, std) = (of_channel(mean, channel), of_channel(std, channel));
                line.iter_mut().for_each(|value| *value = (*value - mean) / std);
            }
            Point::To { .. } => {
                for value in line {
                    (*value, _) = through(&chain[place..], channel, *value, DType::Float32);
                }
                return;
            }
        }
    }
}

fn erase<V: Value>(
    view: &View,
    chain: &[Point],
    erased: &[Erased],
    to: &mut [V],
    pixels: bool,
    make: impl Fn(f32) -> V,
) {
    let (channels, height, width) = (view.channels, view.height, view.width);
    for spot in erased {
        let rest = &chain[spot.after.min(chain.len())..];
        for channel in 0..channels {
            let value = spot.values.as_ref().map(|values| {
                let value = rounded(of_channel(values, channel), spot.dtype);
                make(through(rest, channel, value, spot.dtype).0)
            });
            for y in 0..spot.height {
                for x in 0..spot.width {
                    let (row, column) = (spot.top + y, spot.left + x);
                    let place = if pixels {
                        (row * width + column) * channels + channel
                    } else {
                        (channel * height + row) * width + column
                    };
                    to[place] = value.unwrap_or_else(|| {
                        let number = (channel * spot.height + y) * spot.width + x;
                        let value = normal_at(spot.key, number as u64);
                        make(through(rest, channel, value, spot.dtype).0)
                    });
                }
            }
        }
    }
}
