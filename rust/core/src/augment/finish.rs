//! The last pass: bytes or numbers of a view into the row.
#![allow(unsafe_code)] // reads of an image that others may write to, and writes to raw memory

use super::buffers::Buffer;
use super::image::DType;
use super::kernels::{self, Level, Line, TURN, Turn};
use super::numbers::normal_at;
use super::points::{Point, Recipe, of_channel, rounded, through};
use super::view::View;
use crate::error::Result;
use crate::sys::stores::{Stores, are_streamed, stream};
use half::slice::HalfFloatSliceExt;
use std::ops::Range;
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
    pub stores: Stores,
}

/// What makes values of bytes, kept from row to row: most rows of a batch want the same few.
#[derive(Default)]
pub(super) struct Kept(Vec<Known>);

struct Known {
    chain: Vec<Point>,
    channels: usize,
    dtype: DType,
    recipe: Arc<Recipe>,
}

impl Kept {
    const MOST: usize = 4;

    fn recipe(
        &mut self,
        chain: &[Point],
        channels: usize,
        dtype: DType,
        level: Level,
    ) -> Result<Arc<Recipe>> {
        let wanted = |known: &&Known| {
            (&*known.chain, known.channels, known.dtype) == (chain, channels, dtype)
        };
        if let Some(known) = self.0.iter().find(wanted) {
            return Ok(Arc::clone(&known.recipe));
        }
        let recipe = Arc::new(Recipe::of(chain, channels, dtype, level.fuses())?);
        self.0.truncate(Self::MOST - 1);
        let chain = chain.to_vec();
        self.0.insert(0, Known { chain, channels, dtype, recipe: Arc::clone(&recipe) });
        Ok(recipe)
    }
}

/// What passes over rows need.
#[derive(Default)]
pub(super) struct Rows {
    pub level: Level,
    pub kept: Kept,
    /// Lines as they are read.
    pub bytes: Buffer,
    pub spare: Buffer,
    pub numbers: Buffer,
    /// Lines as they are written.
    pub made: Buffer,
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
    let target = Target { pixels: target.pixels && view.channels > 1, ..target };
    // SAFETY: the target is of that type, by the caller's promise.
    unsafe {
        match target.dtype {
            DType::UInt8 => write::<u8>(view, chain, erased, target, rows),
            DType::Float32 => write::<f32>(view, chain, erased, target, rows),
            DType::BFloat16 => write::<half::bf16>(view, chain, erased, target, rows),
            DType::Float16 => write::<half::f16>(view, chain, erased, target, rows),
        }
    }
}

/// A type of values that rows are written in; any bytes are one.
trait Value: Copy {
    fn of(value: f32) -> Self;
    /// Of bytes of a channel, by its line; the last first if they are mirrored.
    fn by_line(level: Level, from: &[u8], line: Line, mirrored: bool, to: &mut [Self]);
    /// Of bytes of pixels.
    fn by_turns(level: Level, from: &[u8], turn: &Turn, to: &mut [Self]);
    /// Of numbers.
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        from.iter().zip(to).for_each(|(from, to)| *to = Self::of(*from));
    }
    /// Of bytes that stay.
    fn same(_: Level, _from: &[u8], _mirrored: bool, _to: &mut [Self]) {}

    /// Of a line of bytes: of a channel, or of pixels.
    fn line(
        recipe: &Recipe,
        level: Level,
        channel: Option<usize>,
        from: &[u8],
        mirrored: bool,
        to: &mut [Self],
    ) {
        match (recipe, channel) {
            (Recipe::Same, _) => Self::same(level, from, mirrored, to),
            (Recipe::Lines { channels, .. }, Some(channel)) => {
                Self::by_line(level, from, channels[channel], mirrored, to);
            }
            (Recipe::Lines { pixels, at_once, .. }, None) => {
                for (from, to) in from.chunks(*at_once).zip(to.chunks_mut(*at_once)) {
                    Self::by_turns(level, from, pixels, to);
                }
            }
            (Recipe::Table(table), Some(channel)) => {
                let (table, _) = table[channel * 256..].as_chunks::<256>();
                let table = &table[0];
                let look_up = |(to, from): (&mut Self, &u8)| {
                    *to = Self::of(table[usize::from(*from)]);
                };
                match mirrored {
                    true => to.iter_mut().zip(from.iter().rev()).for_each(look_up),
                    false => to.iter_mut().zip(from).for_each(look_up),
                }
            }
            (Recipe::Table(table), None) => {
                let channels = table.len() / 256;
                for (from, to) in from.chunks_exact(channels).zip(to.chunks_exact_mut(channels)) {
                    for channel in 0..channels {
                        to[channel] = Self::of(table[channel * 256 + usize::from(from[channel])]);
                    }
                }
            }
        }
    }
}

impl Value for u8 {
    fn of(value: f32) -> Self {
        value as i64 as u8
    }
    // No line leads to bytes.
    fn by_line(_: Level, _: &[u8], _: Line, _: bool, _: &mut [Self]) {}
    fn by_turns(_: Level, _: &[u8], _: &Turn, _: &mut [Self]) {}
    fn same(level: Level, from: &[u8], mirrored: bool, to: &mut [Self]) {
        kernels::copy_bytes(level, from, mirrored, to);
    }
}

impl Value for f32 {
    fn of(value: f32) -> Self {
        value
    }
    fn by_line(level: Level, from: &[u8], line: Line, mirrored: bool, to: &mut [Self]) {
        kernels::line_to_float(level, from, line, mirrored, to);
    }
    fn by_turns(level: Level, from: &[u8], turn: &Turn, to: &mut [Self]) {
        kernels::pixels_to_float(level, from, turn, to);
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl Value for half::bf16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn by_line(level: Level, from: &[u8], line: Line, mirrored: bool, to: &mut [Self]) {
        kernels::line_to_bfloat16(level, from, line, mirrored, to.reinterpret_cast_mut());
    }
    fn by_turns(level: Level, from: &[u8], turn: &Turn, to: &mut [Self]) {
        kernels::pixels_to_bfloat16(level, from, turn, to.reinterpret_cast_mut());
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// By way of float32, so many at a time.
const NUMBERS: usize = 5 * TURN;

impl Value for half::f16 {
    fn of(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn by_line(level: Level, from: &[u8], line: Line, mirrored: bool, to: &mut [Self]) {
        let mut numbers = [0.0; NUMBERS];
        for (at, to) in to.chunks_mut(NUMBERS).enumerate() {
            let (before, len) = (at * NUMBERS, to.len());
            let first = if mirrored { from.len() - before - len } else { before };
            let numbers = &mut numbers[..len];
            kernels::line_to_float(level, &from[first..][..len], line, mirrored, numbers);
            to.convert_from_f32_slice(numbers);
        }
    }
    fn by_turns(level: Level, from: &[u8], turn: &Turn, to: &mut [Self]) {
        let mut numbers = [0.0; NUMBERS];
        for (from, to) in from.chunks(NUMBERS).zip(to.chunks_mut(NUMBERS)) {
            let numbers = &mut numbers[..to.len()];
            kernels::pixels_to_float(level, from, turn, numbers);
            to.convert_from_f32_slice(numbers);
        }
    }
    fn by_numbers(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// # Safety
/// As for `finish`; the target is of that type.
unsafe fn write<V: Value>(
    view: &View,
    chain: &[Point],
    erased: &[Erased],
    target: Target,
    rows: &mut Rows,
) -> Result<()> {
    let Target { to, pixels, stores, .. } = target;
    let (planes, width) =
        if pixels { (1, view.width * view.channels) } else { (view.channels, view.width) };
    // SAFETY: the whole of the target, by the caller's promise.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<V>(), view.values()) };
    let mut sink = Sink { to, planes, height: view.height, width, buffer: None };
    let mut buffer = std::mem::take(&mut rows.made);
    if stores == Stores::Streamed {
        let len = sink.band(1) * width;
        let buffer = buffer.bytes(len * size_of::<V>())?.as_mut_ptr();
        // SAFETY: so many bytes, aligned for u64; a value is of any bytes.
        sink.buffer = Some(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) });
    }
    // SAFETY: by the caller's promise.
    unsafe {
        match view.is_float() {
            true => numbers_into(&mut sink, view, chain, pixels, rows)?,
            false => bytes_into(&mut sink, view, chain, target, rows)?,
        }
    }
    if stores == Stores::Streamed {
        are_streamed();
    }
    erase(view, chain, erased, sink.to, pixels);
    rows.made = buffer;
    Ok(())
}

/// So many values are made at a time: they stay in the processor's nearest cache.
const AT_ONCE: usize = 4096;

/// Where lines go: into the row, or past the caches by way of a buffer. Pixels are lines of one plane.
struct Sink<'a, V> {
    to: &'a mut [V],
    planes: usize,
    height: usize,
    width: usize,
    buffer: Option<&'a mut [V]>,
}

impl<V> Sink<'_, V> {
    /// How many lines are made at a time, of so many planes.
    fn band(&self, planes: usize) -> usize {
        (AT_ONCE / (planes * self.width)).clamp(1, self.height)
    }

    /// All lines, so many at a time.
    fn bands(&self, planes: usize) -> impl Iterator<Item = Range<usize>> + use<V> {
        let (each, height) = (self.band(planes), self.height);
        (0..height).step_by(each).map(move |first| first..height.min(first + each))
    }

    /// Some lines of a plane.
    fn write(&mut self, plane: usize, lines: Range<usize>, make: impl Fn(usize, &mut [V])) {
        let (first, len) = (plane * self.height + lines.start, lines.len() * self.width);
        let to = &mut self.to[first * self.width..][..len];
        let all = |to: &mut [V]| {
            lines.zip(to.chunks_exact_mut(self.width)).for_each(|(y, to)| make(y, to));
        };
        match &mut self.buffer {
            None => all(to),
            Some(buffer) => {
                let made = &mut buffer[..len];
                all(made);
                // SAFETY: as many values as there are.
                unsafe {
                    stream(made.as_ptr().cast(), to.as_mut_ptr().cast(), size_of_val(made));
                }
            }
        }
    }
}

/// # Safety
/// The image must be readable.
unsafe fn bytes_into<V: Value>(
    sink: &mut Sink<'_, V>,
    view: &View,
    chain: &[Point],
    Target { dtype, pixels, .. }: Target,
    rows: &mut Rows,
) -> Result<()> {
    let Rows { level, kept, bytes, spare, .. } = rows;
    let (level, planes, width) = (*level, sink.planes, sink.width);
    let recipe = kept.recipe(chain, view.channels, dtype, level)?;
    let channel_of = |plane| (!pixels).then_some(plane);
    let lie_there =
        if pixels { view.is_interleaved() && !view.is_mirrored() } else { view.has_rows() };
    if lie_there {
        let mirrored = view.is_mirrored();
        for plane in 0..planes {
            for band in sink.bands(1) {
                sink.write(plane, band, |y, to| {
                    view.fetch_ahead(plane, y);
                    // SAFETY: by the caller's promise; `lie_there` says which of both they do.
                    let from =
                        unsafe { if pixels { view.pixels_of(y) } else { view.row_of(plane, y) } };
                    V::line(&recipe, level, channel_of(plane), from, mirrored, to);
                });
            }
        }
        return Ok(());
    }
    let all = planes * width;
    let bytes = bytes.bytes(sink.band(planes) * all)?;
    let spare = spare.bytes(all)?;
    for band in sink.bands(planes) {
        for (y, to) in band.clone().zip(bytes.chunks_exact_mut(all)) {
            view.fetch_ahead(0, y);
            // SAFETY: by the caller's promise.
            unsafe {
                match pixels {
                    true => view.copy_pixels(y, to, spare, level),
                    false => view.copy_row(y, to, level),
                }
            }
        }
        for plane in 0..planes {
            sink.write(plane, band.clone(), |y, to| {
                let from = &bytes[(y - band.start) * all + plane * width..][..width];
                V::line(&recipe, level, channel_of(plane), from, false, to);
            });
        }
    }
    Ok(())
}

/// # Safety
/// The image must be readable.
unsafe fn numbers_into<V: Value>(
    sink: &mut Sink<'_, V>,
    view: &View,
    chain: &[Point],
    pixels: bool,
    rows: &mut Rows,
) -> Result<()> {
    let Rows { level, bytes, numbers, .. } = rows;
    let (channels, width, planes) = (view.channels, view.width, sink.planes);
    let all = channels * width;
    let bytes = bytes.bytes(all * 4)?;
    let numbers = numbers.floats(sink.band(planes) * all)?;
    for band in sink.bands(planes) {
        for (y, numbers) in band.clone().zip(numbers.chunks_exact_mut(all)) {
            // SAFETY: by the caller's promise.
            unsafe { view.copy_row(y, bytes, *level) };
            let (stored, _) = bytes.as_chunks::<4>();
            for (to, from) in numbers.iter_mut().zip(stored) {
                *to = f32::from_ne_bytes(*from);
            }
            for (channel, line) in numbers.chunks_exact_mut(width).enumerate() {
                through_line(chain, channel, line);
            }
        }
        for plane in 0..planes {
            sink.write(plane, band.clone(), |y, to| {
                let numbers = &numbers[(y - band.start) * all..][..all];
                if !pixels {
                    V::by_numbers(&numbers[plane * width..][..width], to);
                    return;
                }
                for (x, to) in to.chunks_exact_mut(channels).enumerate() {
                    for channel in 0..channels {
                        to[channel] = V::of(numbers[channel * width + x]);
                    }
                }
            });
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

fn erase<V: Value>(view: &View, chain: &[Point], erased: &[Erased], to: &mut [V], pixels: bool) {
    let (channels, height, width) = (view.channels, view.height, view.width);
    for spot in erased {
        let rest = &chain[spot.after.min(chain.len())..];
        for channel in 0..channels {
            let value = spot.values.as_ref().map(|values| {
                let value = rounded(of_channel(values, channel), spot.dtype);
                V::of(through(rest, channel, value, spot.dtype).0)
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
                        V::of(through(rest, channel, value, spot.dtype).0)
                    });
                }
            }
        }
    }
}
