//! One row, written as its parameters say.
//!
//! Crops and flips move the view; types and means wait in a chain; what cannot be put off is done into
//! one of two buffers, of which the view then is. The last pass does all that waits.
#![allow(unsafe_code)] // images in memory that others may write to, and rows that are raw memory

use super::buffers::Buffer;
use super::colour::Planes;
use super::draw::{Drawn, Op};
use super::finish::{Erased, Rows, Target, finish};
use super::image::{DType, Image, State};
use super::kernels::Level;
use super::pad::pad;
use super::points::Point;
use super::resize::Resizer;
use super::steps::{Filter, Margin, Padding};
use super::view::View;
use crate::error::{Error, Kind, Result};
use crate::fault::{Fault, active};
use crate::sys::stores::Stores;
use std::cell::RefCell;

/// What a thread keeps of buffers whatever comes next. Of more it keeps what was of use: one large picture
/// among many small ones would else take its room for ever.
const KEPT: usize = 32 << 20;

/// What one thread needs beside the image and the row: buffers that are used again.
pub struct Scratch {
    resizer: Resizer,
    buffers: [Buffer; 2],
    rows: Rows,
}

thread_local! {
    static OF_THREAD: RefCell<Scratch> = RefCell::new(Scratch::new());
}

impl Scratch {
    /// Empty; it grows with what is done.
    pub fn new() -> Self {
        Self::at(Level::here())
    }

    /// That of this thread.
    pub fn here<T>(act: impl FnOnce(&mut Self) -> T) -> T {
        OF_THREAD.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut scratch) => {
                let done = act(&mut scratch);
                let (capacity, used) = scratch.room();
                if capacity > KEPT && used < capacity / 2 {
                    *scratch = Self::new();
                }
                done
            }
            Err(_) => act(&mut Self::new()), // called from within itself
        })
    }

    /// What its buffers take of memory, and how much of it was of use since this was asked last.
    fn room(&mut self) -> (usize, usize) {
        let Self { resizer, buffers: [one, other], rows } = self;
        let Rows { bytes, spare, numbers, made, .. } = rows;
        let all = [one, other, bytes, spare, numbers, made].into_iter().chain(resizer.buffers());
        all.map(Buffer::room).fold((0, 0), |(a, b), (c, d)| (a + c, b + d))
    }

    /// What this thread keeps.
    #[cfg(test)]
    pub(super) fn kept() -> usize {
        OF_THREAD.with_borrow_mut(|scratch| scratch.room().0)
    }

    pub(super) fn at(level: Level) -> Self {
        let rows = Rows { level, ..Rows::default() };
        Self { resizer: Resizer::default(), buffers: Default::default(), rows }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// A row in the making.
struct Work<'a> {
    scratch: &'a mut Scratch,
    view: View,
    /// Of what the chain makes of the view.
    dtype: DType,
    chain: Vec<Point>,
    erased: Vec<Erased>,
    /// The buffer that the view is of, plane by plane: all of it, in whatever order. None if it is of the
    /// image, or of a part.
    whole: Option<usize>,
    /// The buffer that is free.
    free: usize,
}

/// Writes a row.
///
/// # Safety
/// The image must be readable as its shape says, and the target valid for writes of all of the row; nobody
/// else's.
pub(super) unsafe fn apply(
    drawn: &Drawn,
    image: &Image,
    target: Target,
    scratch: &mut Scratch,
) -> Result<()> {
    let dtype = target.dtype;
    let before = State::of(&image.shape)?;
    if before != drawn.before {
        return Err(Error::new(Kind::State, "parameters of a row are used for another image"));
    }
    if !(target.to as usize).is_multiple_of(dtype.bytes()) {
        return Err(Error::new(Kind::State, "a row is at an address that does not suit its type"));
    }
    let mut work = Work {
        view: View::of(image, &before),
        dtype: before.dtype,
        chain: Vec::new(),
        erased: Vec::new(),
        whole: None,
        free: 0,
        scratch,
    };
    for op in &drawn.ops {
        // SAFETY: by the caller's promise.
        unsafe { work.step(op)? };
    }
    if dtype != work.dtype {
        work.chain.push(Point::To { dtype, scale: false });
    }
    if work.view.values() != drawn.after.values() {
        return Err(Error::new(Kind::State, "a row has become of another size than was drawn"));
    }
    // SAFETY: the row has room for as many values as `drawn.after` says.
    unsafe { finish(&work.view, &work.chain, &work.erased, target, &mut work.scratch.rows) }
}

impl Work<'_> {
    /// # Safety
    /// The image must be readable.
    unsafe fn step(&mut self, op: &Op) -> Result<()> {
        if let Some(point) = Point::of(op) {
            if let Op::ToDtype { dtype, .. } = op {
                self.dtype = *dtype;
            }
            self.chain.push(point);
            return Ok(());
        }
        let is_none = match op {
            Op::Crop { height, width, .. } => {
                (*height as usize, *width as usize) == (self.view.height, self.view.width)
            }
            Op::Pad { padding, .. } => *padding == [0; 4],
            _ => false,
        };
        if is_none {
            return Ok(());
        }
        // What was erased is at its place only while nothing moves.
        let moves = !matches!(op, Op::Erase { .. }) && !active(Fault::LeaveErased);
        if moves && !self.erased.is_empty() {
            // SAFETY: by the caller's promise.
            unsafe { self.settle()? };
        }
        match op {
            Op::Crop { top, left, height, width } => {
                self.view = self.view.crop(*top, *left, *height, *width)?;
                self.whole = None;
            }
            Op::HorizontalFlip => {
                self.view = self.view.mirrored();
            }
            Op::VerticalFlip => {
                self.view = self.view.upside_down();
            }
            Op::Erase { i, j, h, w, v, key } => {
                let [top, left, height, width] = [i, j, h, w].map(|side| *side as usize);
                if top + height > self.view.height || left + width > self.view.width {
                    return Err(Error::new(
                        Kind::State,
                        "what is erased lies outside of its image",
                    ));
                }
                self.erased.push(Erased {
                    top,
                    left,
                    height,
                    width,
                    values: v.clone(),
                    key: *key,
                    after: self.chain.len(),
                    dtype: self.dtype,
                });
            }
            Op::Pad { padding, fill, padding_mode, .. } => {
                // SAFETY: by the caller's promise.
                unsafe { self.pad(*padding, fill, *padding_mode)? };
            }
            Op::Resize { height, width, interpolation, antialias } => {
                // SAFETY: by the caller's promise.
                unsafe { self.resize((*height, *width), (*interpolation, *antialias))? };
            }
            Op::Grayscale { channels, pil } => {
                if self.view.channels == 3 {
                    let level = self.scratch.rows.level;
                    // SAFETY: by the caller's promise.
                    let (planes, len) = unsafe { self.planes()? };
                    planes.grey(len, *pil, level);
                    self.view.channels = 1;
                }
                if *channels == 3 {
                    (self.view.channels, self.view.plane) = (3, 0); // the one three times
                    self.whole = None;
                }
            }
            Op::Brightness { factor, pil } => {
                let level = self.scratch.rows.level;
                // SAFETY: by the caller's promise.
                let (planes, _) = unsafe { self.planes()? };
                planes.brightness(*factor, *pil, level);
            }
            Op::Contrast { factor, pil } => {
                let level = self.scratch.rows.level;
                // SAFETY: by the caller's promise.
                let (planes, len) = unsafe { self.planes()? };
                planes.contrast(len, *factor, *pil, level);
            }
            Op::Saturation { factor, pil } => {
                let level = self.scratch.rows.level;
                // SAFETY: by the caller's promise.
                let (planes, len) = unsafe { self.planes()? };
                planes.saturation(len, *factor, *pil, level);
            }
            Op::Hue { factor, pil } => {
                let level = self.scratch.rows.level;
                // SAFETY: by the caller's promise.
                let (planes, len) = unsafe { self.planes()? };
                planes.hue(len, *factor, *pil, level);
            }
            Op::ToDtype { .. } | Op::Normalize { .. } => {}
        }
        Ok(())
    }

    /// # Safety
    /// The image must be readable.
    unsafe fn pad(&mut self, padding: Padding, fill: &[f32], mode: Margin) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.unchain()? };
        let [left, top, right, bottom] = padding.map(|side| side as usize);
        let view = self.view;
        let (height, width) = (view.height + top + bottom, view.width + left + right);
        let bytes = view.channels * height * width * view.item;
        let Scratch { buffers, rows, .. } = &mut *self.scratch;
        let level = rows.level;
        let row = rows.bytes.bytes(view.channels * view.width * view.item)?;
        let to = buffers[self.free].bytes(bytes)?;
        // SAFETY: as above.
        unsafe { pad(&view, padding, fill, mode, to, row, level)? };
        let made = View::planar(to.as_ptr(), view.item, view.channels, height, width);
        self.take(made);
        Ok(())
    }

    /// # Safety
    /// The image must be readable.
    unsafe fn resize(&mut self, to: (u32, u32), how: (Filter, bool)) -> Result<()> {
        // SAFETY: by the caller's promise.
        unsafe { self.unchain()? };
        // Resized and then mirrored is within a level the same as mirrored and then resized, and bytes
        // are read faster as they lie there. Of numbers the last bits would be others.
        let bytes = !self.view.is_float();
        let (mirrored, upside_down) = (bytes && self.view.pixel < 0, bytes && self.view.row < 0);
        if mirrored {
            self.view = self.view.mirrored();
        }
        if upside_down {
            self.view = self.view.upside_down();
        }
        let (view, size) = (self.view, (to.0 as usize, to.1 as usize));
        let Scratch { buffers, resizer, rows } = &mut *self.scratch;
        let to = buffers[self.free].bytes(view.channels * size.0 * size.1 * view.item)?;
        // SAFETY: by the caller's promise.
        let made = unsafe { resizer.resize(&view, size, how, to, rows.level)? };
        self.take(made);
        if mirrored {
            self.view = self.view.mirrored();
        }
        if upside_down {
            self.view = self.view.upside_down();
        }
        Ok(())
    }

    /// The view is now of the buffer that was free, all of it.
    fn take(&mut self, made: View) {
        self.view = made;
        self.whole = Some(self.free);
        self.free = 1 - self.free;
    }

    /// Does what waits in the chain, if anything does.
    ///
    /// # Safety
    /// The image must be readable.
    unsafe fn unchain(&mut self) -> Result<()> {
        if self.chain.is_empty() {
            return Ok(());
        }
        // SAFETY: by the caller's promise.
        unsafe { self.settle() }
    }

    /// Does all that waits, into the buffer that is free, plane by plane.
    ///
    /// # Safety
    /// The image must be readable.
    unsafe fn settle(&mut self) -> Result<()> {
        let dtype = if self.dtype.is_float() { DType::Float32 } else { DType::UInt8 };
        let view = self.view;
        let Scratch { buffers, rows, .. } = &mut *self.scratch;
        let to = buffers[self.free].bytes(view.values() * dtype.bytes())?.as_mut_ptr();
        let target = Target { to, dtype, pixels: false, stores: Stores::Cached };
        // SAFETY: by the caller's promise; the buffer has room, and is not the one that is read.
        unsafe { finish(&view, &self.chain, &self.erased, target, rows)? };
        let made = View::planar(to, dtype.bytes(), view.channels, view.height, view.width);
        self.chain.clear();
        self.erased.clear();
        if self.dtype != dtype {
            // They are of the narrower type still; what follows is calculated in it.
            self.chain.push(Point::To { dtype: self.dtype, scale: false });
        }
        self.take(made);
        Ok(())
    }

    /// All values, in a buffer of ours, plane by plane, and how many a plane has.
    ///
    /// # Safety
    /// The image must be readable.
    unsafe fn planes(&mut self) -> Result<(Planes<'_>, usize)> {
        // SAFETY: by the caller's promise.
        unsafe { self.unchain()? };
        let which = match self.whole {
            Some(which) => which,
            None => {
                // SAFETY: as above.
                unsafe { self.settle()? };
                1 - self.free
            }
        };
        let len = self.view.height * self.view.width;
        let buffer = &mut self.scratch.buffers[which];
        let planes = match self.view.is_float() {
            true => Planes::Floats(buffer.floats(self.view.values())?),
            false => Planes::Bytes(buffer.bytes(self.view.values())?),
        };
        Ok((planes, len))
    }
}
