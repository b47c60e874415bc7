//! What happens to each value by itself: types, scales, means.
//!
//! Of bytes there are 256 for each channel, so a chain of such steps is a table, calculated exactly as
//! torch does, step by step. Where one line (scale × byte + bias, rounded once) is as good as the table,
//! it is used instead, for it is faster.

use super::buffers::out_of_memory;
use super::draw::Op;
use super::image::DType;
use super::kernels::{Line, TURN, Turn, to_bfloat16};
use crate::error::Result;
use crate::fault::{Fault, active};
use std::sync::Arc;

/// A step of a chain.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Point {
    To { dtype: DType, scale: bool },
    Normalize { mean: Arc<[f32]>, std: Arc<[f32]> },
}

impl Point {
    pub fn of(op: &Op) -> Option<Self> {
        match op {
            Op::ToDtype { dtype, scale } => Some(Point::To { dtype: *dtype, scale: *scale }),
            Op::Normalize { mean, std } => {
                Some(Point::Normalize { mean: mean.clone(), std: std.clone() })
            }
            _ => None,
        }
    }
}

/// What of a list of one or of one for each channel belongs to a channel.
pub(super) fn of_channel(values: &[f32], channel: usize) -> f32 {
    values.get(channel).or(values.first()).copied().unwrap_or_default()
}

/// The nearest value that a type has.
pub(super) fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::UInt8 => f32::from(value as i64 as u8),
        DType::Float16 => half::f16::from_f32(value).to_f32(),
        DType::BFloat16 => f32::from_bits(u32::from(to_bfloat16(value)) << 16),
        DType::Float32 => value,
    }
}

/// What a chain makes of a value of that type: the value, and its type.
pub(super) fn through(
    chain: &[Point],
    channel: usize,
    mut value: f32,
    mut dtype: DType,
) -> (f32, DType) {
    for point in chain {
        match point {
            Point::To { dtype: to, .. } if *to == dtype => {}
            Point::To { dtype: to, scale } => {
                let (from_float, to_float) = (dtype.is_float(), to.is_float());
                value = match (from_float, to_float) {
                    (false, true) if *scale => {
                        rounded(rounded(value, *to) * (1.0 / 255.0_f64) as f32, *to)
                    }
                    (true, false) if *scale => {
                        rounded(rounded(value * (255.0_f64 + 1.0 - 1e-3) as f32, dtype), *to)
                    }
                    _ => rounded(value, *to),
                };
                dtype = *to;
            }
            Point::Normalize { mean, std } => {
                let mean = rounded(of_channel(mean, channel), dtype);
                let std = rounded(of_channel(std, channel), dtype);
                value = rounded(rounded(value - mean, dtype) / std, dtype);
            }
        }
    }
    (value, dtype)
}

/// How bytes become values, in the fastest way that is good enough.
#[derive(Debug)]
pub(super) enum Recipe {
    /// They stay.
    Same,
    /// For each channel; and for the channels of pixels in turn, `at_once` values from the first on.
    Lines { channels: Vec<Line>, pixels: Box<Turn>, at_once: usize },
    /// 256 of each channel.
    Table(Vec<f32>),
}

impl Recipe {
    /// Of bytes, through a chain, to values of that type.
    pub fn of(chain: &[Point], channels: usize, to: DType, fuses: bool) -> Result<Self> {
        if chain.is_empty() && to == DType::UInt8 {
            return Ok(Recipe::Same);
        }
        let mut table = Vec::new();
        table.try_reserve_exact(256 * channels).map_err(|_| out_of_memory(1024 * channels))?;
        for channel in 0..channels {
            for value in 0..=255_u8 {
                let (value, _) = through(chain, channel, f32::from(value), DType::UInt8);
                table.push(rounded(value, to));
            }
        }
        if !fuses || to == DType::UInt8 || channels > TURN {
            return Ok(Recipe::Table(table));
        }
        let lines: Vec<Line> = (0..channels).map(|channel| line(chain, channel)).collect();
        let good = table.iter().enumerate().all(|(place, &exact)| {
            let (scale, bias) = lines[place / 256];
            let made = rounded(((place % 256) as f32).mul_add(scale, bias), to);
            match to {
                DType::Float32 => (made - exact).abs() <= 4e-7 * exact.abs().max(1.0),
                _ => made == exact,
            }
        });
        if !good {
            return Ok(Recipe::Table(table));
        }
        let mut pixels = Box::new(([0.0; TURN], [0.0; TURN]));
        for place in 0..TURN {
            (pixels.0[place], pixels.1[place]) = lines[place % channels];
        }
        // Behind the last whole pixel of a turn the next one would begin with another channel.
        let divides = TURN.is_multiple_of(channels) || active(Fault::TurnOver);
        let at_once = if divides { usize::MAX } else { TURN - TURN % channels };
        Ok(Recipe::Lines { channels: lines, pixels, at_once })
    }
}

/// Scale and bias that a chain of float32 amounts to; of no use for another.
fn line(chain: &[Point], channel: usize) -> Line {
    let (mut scale, mut bias) = (1.0_f64, 0.0_f64);
    let mut was_bytes = true;
    for point in chain {
        match point {
            Point::To { dtype, scale: scaled } => {
                if was_bytes && dtype.is_float() && *scaled {
                    scale /= 255.0;
                    bias /= 255.0;
                }
                was_bytes = !dtype.is_float();
            }
            Point::Normalize { mean, std } => {
                let (mean, std) = (of_channel(mean, channel), of_channel(std, channel));
                scale /= f64::from(std);
                bias = (bias - f64::from(mean)) / f64::from(std);
            }
        }
    }
    (scale as f32, bias as f32)
}
