//! What Python describes, checked.

use super::image::{DType, Holder, State};
use crate::error::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

/// How margins are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Margin {
    Constant,
    Edge,
    Reflect,
    Symmetric,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Filter {
    Bilinear,
    Bicubic,
}

/// Left, top, right, bottom.
pub(super) type Padding = [u32; 4];

/// A step as it was described, with the arguments of torchvision's class of that name.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "step", deny_unknown_fields)]
pub(super) enum Step {
    RandomCrop {
        size: [u32; 2],
        padding: Option<Padding>,
        pad_if_needed: bool,
        fill: Vec<f64>,
        /// Of masks, which Python pads.
        mask_fill: Option<f64>,
        padding_mode: Margin,
    },
    CenterCrop {
        size: [u32; 2],
    },
    Pad {
        padding: Padding,
        fill: Vec<f64>,
        mask_fill: Option<f64>,
        padding_mode: Margin,
    },
    /// Of one number or two; of none, if `max_size` says it all.
    Resize {
        size: Vec<u32>,
        max_size: Option<u32>,
        filter: Filter,
        antialias: bool,
    },
    RandomResizedCrop {
        size: [u32; 2],
        scale: [f64; 2],
        ratio: [f64; 2],
        filter: Filter,
        antialias: bool,
    },
    RandomHorizontalFlip {
        p: f64,
    },
    RandomVerticalFlip {
        p: f64,
    },
    ToDtype {
        dtype: DType,
        scale: bool,
    },
    Normalize {
        mean: Vec<f64>,
        std: Vec<f64>,
    },
    /// No value: random ones.
    RandomErasing {
        p: f64,
        scale: [f64; 2],
        ratio: [f64; 2],
        value: Option<Vec<f64>>,
    },
    Grayscale {
        num_output_channels: u32,
    },
    RandomGrayscale {
        p: f64,
    },
    #[serde(rename = "RGB")]
    Rgb {},
    ColorJitter {
        brightness: Option<[f64; 2]>,
        contrast: Option<[f64; 2]>,
        saturation: Option<[f64; 2]>,
        hue: Option<[f64; 2]>,
    },
    Compose {
        steps: Vec<Step>,
    },
    RandomApply {
        steps: Vec<Step>,
        p: f64,
    },
    RandomChoice {
        steps: Vec<Step>,
        p: Vec<f64>,
    },
    /// To a tensor, as it is.
    ToImage {},
    /// PIL images to a tensor; the first version of torchvision takes nothing else.
    PILToTensor {
        v1: bool,
    },
    /// PIL images and arrays to float32 from 0 to 1; the first version takes nothing else.
    ToTensor {
        v1: bool,
    },
}

/// What `fuse` writes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    pub steps: Vec<Step>,
    /// Of which images this is true.
    #[serde(default = "Holder::all")]
    pub takes: Vec<Holder>,
    /// Arrays beside an image would become images as well.
    #[serde(default)]
    pub arrays: bool,
    /// Of several plain tensors the first would go on alone.
    #[serde(default)]
    pub first: bool,
    /// The type of what comes out, if the steps' own is another.
    pub dtype: Option<DType>,
    pub channels_last: bool,
}

fn wrong(step: &Step, why: impl std::fmt::Display) -> Error {
    Error::new(Kind::Argument, format!("{}: {why}", step.name()))
}

impl Description {
    pub fn parse(text: &str) -> Result<Self> {
        let found: Self = serde_json::from_str(text).map_err(|error| {
            Error::new(Kind::Argument, format!("the description of the steps is damaged: {error}"))
        })?;
        found.steps.iter().try_for_each(Step::check)?;
        Ok(found)
    }
}

impl Step {
    /// As torchvision names it.
    pub fn name(&self) -> &'static str {
        match self {
            Step::RandomCrop { .. } => "RandomCrop",
            Step::CenterCrop { .. } => "CenterCrop",
            Step::Pad { .. } => "Pad",
            Step::Resize { .. } => "Resize",
            Step::RandomResizedCrop { .. } => "RandomResizedCrop",
            Step::RandomHorizontalFlip { .. } => "RandomHorizontalFlip",
            Step::RandomVerticalFlip { .. } => "RandomVerticalFlip",
            Step::ToDtype { .. } => "ToDtype",
            Step::Normalize { .. } => "Normalize",
            Step::RandomErasing { .. } => "RandomErasing",
            Step::Grayscale { .. } => "Grayscale",
            Step::RandomGrayscale { .. } => "RandomGrayscale",
            Step::Rgb {} => "RGB",
            Step::ColorJitter { .. } => "ColorJitter",
            Step::Compose { .. } => "Compose",
            Step::RandomApply { .. } => "RandomApply",
            Step::RandomChoice { .. } => "RandomChoice",
            Step::ToImage {} => "ToImage",
            Step::PILToTensor { .. } => "PILToTensor",
            Step::ToTensor { .. } => "ToTensor",
        }
    }

    /// Values that no image can make right.
    fn check(&self) -> Result<()> {
        let positive = |size: &[u32]| match size.contains(&0) {
            true => Err(wrong(self, format!("size is {size:?}; sides of 1 or more are needed"))),
            false => Ok(()),
        };
        let chance = |p: f64| match (0.0..=1.0).contains(&p) {
            true => Ok(()),
            false => {
                Err(wrong(self, "`p` should be a floating point value in the interval [0.0, 1.0]."))
            }
        };
        let ordered = |what: &str, range: [f64; 2], least: f64, most: f64| {
            let good = least <= range[0] && range[0] <= range[1] && range[1] <= most;
            if good && range.iter().all(|value| value.is_finite()) {
                return Ok(());
            }
            let reason = format!("{what} is {range:?}; two numbers in order are needed, ");
            Err(wrong(self, reason + &format!("from {least} to {most}")))
        };
        let margin = |fill: &[f64], mode: Margin| {
            if fill.is_empty() || !fill.iter().all(|value| value.is_finite()) {
                return Err(wrong(self, "fill is no number"));
            }
            match fill.len() > 1 && mode != Margin::Constant {
                true => Err(wrong(self, "the padding mode is not supported if fill is not scalar")),
                false => Ok(()),
            }
        };
        const LEAST: f64 = f64::MIN_POSITIVE;
        match self {
            Step::RandomCrop { size, fill, padding_mode, .. } => {
                positive(size)?;
                margin(fill, *padding_mode)
            }
            Step::CenterCrop { size } => positive(size),
            Step::Pad { fill, padding_mode, .. } => margin(fill, *padding_mode),
            Step::Resize { size, max_size, .. } => {
                positive(size)?;
                positive(max_size.as_slice())?;
                match (size.len(), max_size) {
                    (0, None) => Err(wrong(self, "max_size must be an integer when size is None")),
                    (2, Some(_)) => Err(wrong(
                        self,
                        "max_size should only be passed if size is None or specifies the length of \
                         the smaller edge",
                    )),
                    (3.., _) => Err(wrong(self, "size has more than two numbers")),
                    (1, Some(most)) if *most <= size[0] => Err(wrong(
                        self,
                        format!(
                            "max_size = {most} must be strictly greater than the requested size \
                             for the smaller edge size = {}",
                            size[0]
                        ),
                    )),
                    _ => Ok(()),
                }
            }
            Step::RandomResizedCrop { size, scale, ratio, .. } => {
                positive(size)?;
                ordered("scale", *scale, 0.0, f64::MAX)?;
                ordered("ratio", *ratio, LEAST, f64::MAX)
            }
            Step::RandomHorizontalFlip { p }
            | Step::RandomVerticalFlip { p }
            | Step::RandomGrayscale { p } => chance(*p),
            Step::Normalize { mean, std } => {
                let one = mean.len() == 1 || std.len() == 1 || mean.len() == std.len();
                if mean.is_empty() || std.is_empty() || !one {
                    return Err(wrong(
                        self,
                        format!("{} means and {} stds", mean.len(), std.len()),
                    ));
                }
                match std.contains(&0.0) {
                    true => Err(wrong(self, "std evaluated to zero, leading to division by zero.")),
                    false => Ok(()),
                }
            }
            Step::RandomErasing { p, scale, ratio, .. } => {
                chance(*p)?;
                ordered("scale", *scale, 0.0, 1.0)?;
                ordered("ratio", *ratio, LEAST, f64::MAX)
            }
            Step::Grayscale { num_output_channels } => match num_output_channels {
                1 | 3 => Ok(()),
                other => {
                    Err(wrong(self, format!("num_output_channels must be 1 or 3, got {other}.")))
                }
            },
            Step::ColorJitter { brightness, contrast, saturation, hue } => {
                let factors = [
                    ("brightness", brightness),
                    ("contrast", contrast),
                    ("saturation", saturation),
                ];
                for (what, range) in factors {
                    range.map_or(Ok(()), |range| ordered(what, range, 0.0, f64::MAX))?;
                }
                hue.map_or(Ok(()), |range| ordered("hue", range, -0.5, 0.5))
            }
            Step::Compose { steps } => steps.iter().try_for_each(Step::check),
            Step::RandomApply { steps, p } => {
                chance(*p)?;
                steps.iter().try_for_each(Step::check)
            }
            Step::RandomChoice { steps, p } => {
                let good = steps.len() == p.len() && !p.is_empty();
                if !good || !p.iter().all(|&p| p >= 0.0 && p.is_finite()) {
                    return Err(wrong(
                        self,
                        "Length of p doesn't match the number of transforms, or it is negative",
                    ));
                }
                steps.iter().try_for_each(Step::check)
            }
            Step::ToDtype { .. }
            | Step::Rgb {}
            | Step::ToImage {}
            | Step::PILToTensor { .. }
            | Step::ToTensor { .. } => Ok(()),
        }
    }

    /// What was said of a step that an image does not suit.
    pub fn refuse(&self, kind: Kind, why: impl std::fmt::Display) -> Error {
        Error::new(kind, format!("{}: {why}", self.name()))
    }
}

/// The sides that Resize gives an image.
pub(super) fn resized(state: &State, size: &[u32], max_size: Option<u32>) -> (u64, u64) {
    let (height, width) = (u64::from(state.height), u64::from(state.width));
    if let [high, wide] = size {
        return (u64::from(*high), u64::from(*wide));
    }
    let (short, long) = (height.min(width), height.max(width));
    // Both below 2^32, or sizes below 2^20 times such: no product is too large.
    let scaled = |side: u64, to: u64, of: u64| side * to / of;
    let (size, most) = (size.first().map(|&size| u64::from(size)), max_size.map(u64::from));
    let (new_short, new_long) = match (size, most) {
        (Some(size), most) => {
            let long = scaled(long, size, short);
            match most {
                Some(most) if long > most => (scaled(most, size, long), most),
                _ => (size, long),
            }
        }
        (None, most) => {
            let most = most.unwrap_or(long);
            (scaled(most, short, long), most)
        }
    };
    if width <= height { (new_long, new_short) } else { (new_short, new_long) }
}
