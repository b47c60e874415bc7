//! Parameters of one row, drawn from its numbers.
//!
//! The same walk through the steps says what becomes of an image ([`output_of`]), which draws nothing,
//! and what is done to a row ([`draw`]).

use super::image::{DType, Form, State};
use super::numbers::{Draws, Number};
use super::steps::{Filter, Margin, Padding, Step, resized};
use crate::error::{Error, Kind, Result};
use serde::Serialize;
use std::sync::Arc;

/// What is done to one row, in this order. The names and numbers are those of torchvision's functions.
/// What leaves an image as it is may cut off what boxes have beyond it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Op {
    Pad {
        padding: Padding,
        fill: Arc<[f32]>,
        mask_fill: Option<f64>,
        padding_mode: Margin,
    },
    Crop {
        top: u32,
        left: u32,
        height: u32,
        width: u32,
    },
    Resize {
        height: u32,
        width: u32,
        interpolation: Filter,
        antialias: bool,
    },
    HorizontalFlip,
    VerticalFlip,
    ToDtype {
        dtype: DType,
        scale: bool,
    },
    Normalize {
        mean: Arc<[f32]>,
        std: Arc<[f32]>,
    },
    /// Without values: normal numbers of this key.
    Erase {
        i: u32,
        j: u32,
        h: u32,
        w: u32,
        v: Option<Arc<[f32]>>,
        key: u64,
    },
    Grayscale {
        channels: u32,
        pil: bool,
    },
    Brightness {
        factor: f64,
        pil: bool,
    },
    Contrast {
        factor: f64,
        pil: bool,
    },
    Saturation {
        factor: f64,
        pil: bool,
    },
    Hue {
        factor: f64,
        pil: bool,
    },
}

/// Parameters of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    pub(super) ops: Vec<Op>,
    pub(super) before: State,
    pub(super) after: State,
}

impl Drawn {
    /// What is done, as JSON: a list with one object for each function of torchvision.
    pub fn describe(&self) -> String {
        serde_json::to_string(&self.ops).unwrap_or_default()
    }
}

/// Takes note of what is drawn; without one, only what becomes of an image is looked at.
struct Note<'a> {
    number: Number,
    ops: &'a mut Vec<Op>,
}

/// What becomes of an image; an error if that is not one thing for all rows.
pub(super) fn output_of(steps: &[Step], before: State) -> Result<State> {
    walk(steps, before, &mut None, 1)
}

/// The parameters of a row.
pub(super) fn draw(steps: &[Step], before: State, number: Number) -> Result<Drawn> {
    let mut ops = Vec::with_capacity(8);
    let after = walk(steps, before, &mut Some(Note { number, ops: &mut ops }), 1)?;
    Ok(Drawn { ops, before, after })
}

/// `place` is that of the steps among all: each draws numbers of its own.
fn walk(steps: &[Step], state: State, note: &mut Option<Note>, place: u64) -> Result<State> {
    steps.iter().zip(1_u64..).try_fold(state, |state, (step, number)| {
        let place = place.wrapping_mul(0x0100_0000_01b3) ^ number;
        one(step, state, note, place)?.within_limits()
    })
}

fn one(step: &Step, state: State, note: &mut Option<Note>, place: u64) -> Result<State> {
    suits(step, &state)?;
    let mut draws = note.as_ref().map(|note| Draws::new(note.number, place));
    let mut then = state;
    let mut add = |op: Op| {
        if let Some(note) = note {
            note.ops.push(op);
        }
    };
    let pil = state.form == Form::Pil;
    let (height, width) = (state.height, state.width);
    match step {
        Step::RandomCrop { size, padding, pad_if_needed, fill, mask_fill, padding_mode } => {
            let mut margins = padding.unwrap_or_default();
            let (mut high, mut wide) = padded(&state, margins);
            if *pad_if_needed {
                for (side, need, [before, after]) in
                    [(&mut high, size[0], [1, 3]), (&mut wide, size[1], [0, 2])]
                {
                    let lacking = u64::from(need).saturating_sub(*side);
                    margins[before] = margins[before].saturating_add(lacking as u32);
                    margins[after] = margins[after].saturating_add(lacking as u32);
                    *side += 2 * lacking;
                }
            }
            if high < u64::from(size[0]) || wide < u64::from(size[1]) {
                return Err(step.refuse(
                    Kind::Argument,
                    format!(
                        "Required crop size ({}, {}) is larger than {}input image size ({high}, \
                         {wide}).",
                        size[0],
                        size[1],
                        if padding.is_some() { "padded " } else { "" }
                    ),
                ));
            }
            if margins != [0; 4] {
                state.of_sides(high, wide)?;
                add(pad(step, &state, margins, (fill, *mask_fill), *padding_mode)?);
            }
            let mut place = |side: u64, need: u32| {
                draws.as_mut().map_or(0, |d| d.below(side - u64::from(need) + 1))
            };
            let (top, left) = (place(high, size[0]) as u32, place(wide, size[1]) as u32);
            (then.height, then.width) = (size[0], size[1]);
            if (high, wide) != (u64::from(size[0]), u64::from(size[1])) {
                add(Op::Crop { top, left, height: size[0], width: size[1] });
            }
        }
        Step::CenterCrop { size } => {
            let lacking = |need: u32, side: u32| need.saturating_sub(side);
            let (high, wide) = (height.max(size[0]), width.max(size[1]));
            state.of_sides(high.into(), wide.into())?;
            let (down, right) = (lacking(size[0], height), lacking(size[1], width));
            if (down, right) != (0, 0) {
                let margins = [right / 2, down / 2, right.div_ceil(2), down.div_ceil(2)];
                add(pad(step, &state, margins, (&[0.0], Some(0.0)), Margin::Constant)?);
            }
            let middle = |side: u32, need: u32| (f64::from(side - need) / 2.0).round_ties_even();
            (then.height, then.width) = (size[0], size[1]);
            add(Op::Crop {
                top: middle(high, size[0]) as u32,
                left: middle(wide, size[1]) as u32,
                height: size[0],
                width: size[1],
            });
        }
        Step::Pad { padding, fill, mask_fill, padding_mode } => {
            let (high, wide) = padded(&state, *padding);
            then = state.of_sides(high, wide)?;
            let with = match *padding {
                [0, 0, 0, 0] => (&[0.0][..], Some(0.0)), // nobody sees what it would be
                _ => (&fill[..], *mask_fill),
            };
            add(pad(step, &state, *padding, with, *padding_mode)?);
        }
        Step::Resize { size, max_size, filter, antialias } => {
            let (high, wide) = resized(&state, size, *max_size);
            then = state.of_sides(high, wide)?;
            if then.height == 0 || then.width == 0 {
                return Err(step.refuse(
                    Kind::Argument,
                    format!("an image of ({height}, {width}) becomes one without pixels"),
                ));
            }
            resize(&mut add, &state, &then, *filter, *antialias);
        }
        Step::RandomResizedCrop { size, scale, ratio, filter, antialias } => {
            let (top, left, high, wide) = match &mut draws {
                Some(draws) => part(draws, height, width, *scale, *ratio),
                None => (0, 0, height, width),
            };
            let part = State { height: high, width: wide, ..state };
            (then.height, then.width) = (size[0], size[1]);
            add(Op::Crop { top, left, height: high, width: wide });
            resize(&mut add, &part, &then, *filter, *antialias);
        }
        Step::RandomHorizontalFlip { p } => {
            if draws.is_some_and(|mut draws| draws.happens(*p)) {
                add(Op::HorizontalFlip);
            }
        }
        Step::RandomVerticalFlip { p } => {
            if draws.is_some_and(|mut draws| draws.happens(*p)) {
                add(Op::VerticalFlip);
            }
        }
        // torchvision leaves PIL images as they are.
        Step::ToDtype { .. } if pil => {}
        Step::ToDtype { dtype, scale } => {
            then.dtype = *dtype;
            if *dtype != state.dtype {
                add(Op::ToDtype { dtype: *dtype, scale: *scale });
            }
        }
        Step::Normalize { mean, std } => {
            if pil {
                return Err(step.refuse(
                    Kind::Type,
                    "Normalize() does not support PIL images: put v2.ToImage() and \
                     v2.ToDtype(torch.float32, scale=True) before it",
                ));
            }
            if !state.dtype.is_float() {
                return Err(step.refuse(
                    Kind::Type,
                    format!(
                        "Input tensor should be a float tensor. Got {}. Put \
                         v2.ToDtype(torch.float32, scale=True) before it",
                        state.dtype.name()
                    ),
                ));
            }
            let values = mean.len().max(std.len()) as u32;
            if values != 1 && values != state.channels {
                return Err(step.refuse(
                    Kind::Argument,
                    format!(
                        "there are {values} values of mean and std, and the image has {} channels; \
                         v2.RGB() before it makes three of one",
                        state.channels
                    ),
                ));
            }
            add(Op::Normalize { mean: floats(mean), std: floats(std) });
        }
        Step::RandomErasing { p, scale, ratio, value } => {
            let values = value.as_ref().map(|value| floats(value));
            match &values {
                Some(values) => {
                    if values.len() != 1 && values.len() as u32 != state.channels {
                        return Err(step.refuse(
                            Kind::Argument,
                            format!(
                                "If value is a sequence, it should have either a single value or {} \
                                 (number of inpt channels)",
                                state.channels
                            ),
                        ));
                    }
                    fits(step, &state, values)?;
                }
                None if state.dtype != DType::Float32 => {
                    return Err(step.refuse(
                        Kind::Type,
                        format!(
                            "value=\"random\" are normal numbers, and the image is {}: put \
                             v2.ToDtype(torch.float32, scale=True) before it",
                            state.dtype.name()
                        ),
                    ));
                }
                None => {}
            }
            let chosen = draws.and_then(|mut draws| {
                if !draws.happens(*p) {
                    return None;
                }
                let (i, j, h, w) = spot(&mut draws, height, width, *scale, *ratio)?;
                Some(Op::Erase { i, j, h, w, v: values, key: draws.word() })
            });
            chosen.into_iter().for_each(add);
        }
        Step::Grayscale { num_output_channels: channels } => {
            then.channels = *channels;
            if then.channels != state.channels || *channels != 1 {
                add(Op::Grayscale { channels: *channels, pil });
            }
        }
        Step::RandomGrayscale { p } => {
            if draws.is_some_and(|mut draws| draws.happens(*p)) && state.channels == 3 {
                add(Op::Grayscale { channels: 3, pil });
            }
        }
        Step::Rgb {} => {
            if state.channels == 1 {
                then.channels = 3;
                add(Op::Grayscale { channels: 3, pil });
            }
        }
        Step::ColorJitter { brightness, contrast, saturation, hue } => {
            if let Some(draws) = &mut draws {
                let mut order = [0_u8, 1, 2, 3];
                for last in (1..4).rev() {
                    order.swap(last, draws.below(last as u64 + 1) as usize);
                }
                let mut factor =
                    |range: &Option<[f64; 2]>| range.map(|[low, high]| draws.between(low, high));
                let factors =
                    [factor(brightness), factor(contrast), factor(saturation), factor(hue)];
                for which in order {
                    let Some(factor) = factors[usize::from(which)] else { continue };
                    match which {
                        0 => add(Op::Brightness { factor, pil }),
                        1 => add(Op::Contrast { factor, pil }),
                        2 if state.channels == 3 => add(Op::Saturation { factor, pil }),
                        3 if state.channels == 3 => add(Op::Hue { factor, pil }),
                        _ => {} // of one channel there is no colour
                    }
                }
            }
        }
        Step::Compose { steps } => return walk(steps, state, note, place),
        Step::RandomApply { steps, p } => {
            if let Some(draws) = &mut draws {
                let happens = draws.happens(*p);
                return if happens { walk(steps, state, note, place) } else { Ok(state) };
            }
            let after = if *p > 0.0 { walk(steps, state, note, place)? } else { state };
            if *p < 1.0 && after != state {
                return Err(differs(step, &state, &after));
            }
            return Ok(after);
        }
        Step::RandomChoice { steps, p } => {
            let all: f64 = p.iter().sum();
            if let Some(draws) = &mut draws {
                let mut rest = draws.unit() * all;
                let likely = p.iter().rposition(|&p| p > 0.0).unwrap_or_default();
                let chosen = p.iter().position(|&p| {
                    rest -= p;
                    rest < 0.0
                });
                let chosen = chosen.unwrap_or(likely);
                let place = place ^ ((chosen as u64 + 1) << 32);
                return walk(&steps[chosen..=chosen], state, note, place);
            }
            let mut found: Option<State> = None;
            for (chosen, p) in p.iter().enumerate().filter(|(_, p)| **p > 0.0) {
                debug_assert!(*p > 0.0);
                let after = walk(&steps[chosen..=chosen], state, note, place)?;
                match found {
                    Some(before) if before != after => return Err(differs(step, &before, &after)),
                    _ => found = Some(after),
                }
            }
            return found.ok_or_else(|| step.refuse(Kind::Argument, "all of p are 0"));
        }
        Step::ToImage {} => then.form = Form::Tensor,
        Step::PILToTensor { v1 } => match state.form {
            Form::Pil => then.form = Form::Tensor,
            Form::Array => return Err(left_alone(step)),
            Form::Tensor if *v1 => return Err(step.refuse(Kind::Type, ONLY_PIL)),
            Form::Tensor => {}
        },
        Step::ToTensor { v1 } => match state.form {
            Form::Tensor if *v1 => return Err(step.refuse(Kind::Type, ONLY_ARRAYS)),
            Form::Tensor => {}
            Form::Pil | Form::Array => {
                then.form = Form::Tensor;
                if state.dtype == DType::UInt8 {
                    then.dtype = DType::Float32;
                    add(Op::ToDtype { dtype: DType::Float32, scale: true });
                }
            }
        },
    }
    Ok(then)
}

const ONLY_PIL: &str =
    "pic should be PIL Image. Got a tensor, which v2.ToImage() takes and leaves as it is";
const ONLY_ARRAYS: &str = "pic should be PIL Image or ndarray. Got a tensor, which v2.ToImage() and \
                           v2.ToDtype(torch.float32, scale=True) take";

/// What a step needs of an image.
fn suits(step: &Step, state: &State) -> Result<()> {
    let passes = matches!(
        step,
        Step::Compose { .. }
            | Step::RandomApply { .. }
            | Step::RandomChoice { .. }
            | Step::ToImage {}
            | Step::PILToTensor { .. }
            | Step::ToTensor { .. }
    );
    if passes {
        return Ok(());
    }
    if state.form == Form::Array {
        return Err(left_alone(step));
    }
    let colours = matches!(
        step,
        Step::ColorJitter { .. }
            | Step::Grayscale { .. }
            | Step::RandomGrayscale { .. }
            | Step::Rgb {}
    );
    if colours && ![1, 3].contains(&state.channels) {
        return Err(step.refuse(
            Kind::Type,
            format!(
                "Input image tensor permitted channel values are 1 or 3, but found {}",
                state.channels
            ),
        ));
    }
    let moves = matches!(
        step,
        Step::RandomHorizontalFlip { .. }
            | Step::RandomVerticalFlip { .. }
            | Step::ToDtype { .. }
            | Step::Normalize { .. }
            | Step::RandomErasing { .. }
    );
    if matches!(state.dtype, DType::Float16 | DType::BFloat16) && !moves {
        return Err(step.refuse(
            Kind::Type,
            format!(
                "the image is {} already, which this step is not fused for: make it so last, with \
                 v2.ToDtype or fuse(dtype=)",
                state.dtype.name()
            ),
        ));
    }
    Ok(())
}

fn left_alone(step: &Step) -> Error {
    step.refuse(
        Kind::Type,
        "torchvision leaves numpy arrays as they are here: put v2.ToImage() before it",
    )
}

fn differs(step: &Step, one: &State, other: &State) -> Error {
    let show = |state: &State| {
        let State { channels, height, width, dtype, .. } = state;
        format!("[{channels}, {height}, {width}] of {}", dtype.name())
    };
    step.refuse(
        Kind::Argument,
        format!(
            "rows would be {} or {}, as it happens, and rows of a batch are alike: make all one size \
             and type after it, with a step inside of it",
            show(one),
            show(other)
        ),
    )
}

fn floats(values: &[f64]) -> Arc<[f32]> {
    values.iter().map(|&value| value as f32).collect()
}

fn padded(state: &State, [left, top, right, bottom]: Padding) -> (u64, u64) {
    let sum =
        |side: u32, before: u32, after: u32| u64::from(side) + u64::from(before) + u64::from(after);
    (sum(state.height, top, bottom), sum(state.width, left, right))
}

fn pad(
    step: &Step,
    state: &State,
    padding: Padding,
    (fill, mask_fill): (&[f64], Option<f64>),
    mode: Margin,
) -> Result<Op> {
    let fill = floats(fill);
    if fill.len() != 1 && fill.len() as u32 != state.channels {
        return Err(step.refuse(
            Kind::Argument,
            format!(
                "The number of elements in 'fill' does not match the number of channels of the image \
                 ({} != {})",
                fill.len(),
                state.channels
            ),
        ));
    }
    fits(step, state, &fill)?;
    let [left, top, right, bottom] = padding;
    let (most_wide, most_high) = match mode {
        Margin::Constant | Margin::Edge => (u32::MAX, u32::MAX),
        Margin::Reflect => (state.width - 1, state.height - 1),
        Margin::Symmetric => (state.width, state.height),
    };
    if left.max(right) > most_wide || top.max(bottom) > most_high {
        return Err(step.refuse(
            Kind::Argument,
            format!(
                "Padding size should be less than the corresponding input dimension, but got: padding \
                 ({left}, {top}, {right}, {bottom}) of an image of ({}, {})",
                state.height, state.width
            ),
        ));
    }
    Ok(Op::Pad { padding, fill, mask_fill, padding_mode: mode })
}

/// Bytes take whole numbers from 0 to 255 only.
fn fits(step: &Step, state: &State, values: &[f32]) -> Result<()> {
    let outside = |value: &&f32| !(0.0..256.0).contains(*value);
    match values.iter().find(outside) {
        Some(value) if state.dtype == DType::UInt8 => Err(step.refuse(
            Kind::Argument,
            format!("the value {value} is outside of 0 to 255, and the image is torch.uint8"),
        )),
        _ => Ok(()),
    }
}

fn resize(add: &mut impl FnMut(Op), from: &State, to: &State, filter: Filter, antialias: bool) {
    if (from.height, from.width) != (to.height, to.width) {
        // PIL knows no other way.
        let antialias = antialias || from.form == Form::Pil;
        add(Op::Resize { height: to.height, width: to.width, interpolation: filter, antialias });
    }
}

/// RandomResizedCrop's part of an image: top, left, height, width.
fn part(
    draws: &mut Draws,
    height: u32,
    width: u32,
    scale: [f64; 2],
    ratio: [f64; 2],
) -> (u32, u32, u32, u32) {
    let area = f64::from(height) * f64::from(width);
    for _ in 0..10 {
        let target = area * draws.between(scale[0], scale[1]);
        let aspect = draws.between(ratio[0].ln(), ratio[1].ln()).exp();
        let wide = (target * aspect).sqrt().round_ties_even();
        let high = (target / aspect).sqrt().round_ties_even();
        let fits = |side: f64, of: u32| 0.0 < side && side <= f64::from(of);
        if fits(wide, width) && fits(high, height) {
            let (wide, high) = (wide as u32, high as u32);
            let top = draws.below(u64::from(height - high) + 1) as u32;
            let left = draws.below(u64::from(width - wide) + 1) as u32;
            return (top, left, high, wide);
        }
    }
    let shape = f64::from(width) / f64::from(height);
    let (high, wide) = if shape < ratio[0] {
        ((f64::from(width) / ratio[0]).round_ties_even() as u32, width)
    } else if shape > ratio[1] {
        (height, (f64::from(height) * ratio[1]).round_ties_even() as u32)
    } else {
        (height, width)
    };
    let (high, wide) = (high.clamp(1, height), wide.clamp(1, width));
    ((height - high) / 2, (width - wide) / 2, high, wide)
}

/// What RandomErasing takes; `None` if it found nothing.
fn spot(
    draws: &mut Draws,
    height: u32,
    width: u32,
    scale: [f64; 2],
    ratio: [f64; 2],
) -> Option<(u32, u32, u32, u32)> {
    let area = f64::from(height) * f64::from(width);
    for _ in 0..10 {
        let target = area * draws.between(scale[0], scale[1]);
        let aspect = draws.between(ratio[0].ln(), ratio[1].ln()).exp();
        let high = (target * aspect).sqrt().round_ties_even();
        let wide = (target / aspect).sqrt().round_ties_even();
        if high < f64::from(height) && wide < f64::from(width) {
            let (high, wide) = (high as u32, wide as u32);
            let top = draws.below(u64::from(height - high) + 1) as u32;
            let left = draws.below(u64::from(width - wide) + 1) as u32;
            return Some((top, left, high, wide));
        }
    }
    None
}
