//! What an image is: its size, its type, how its values lie.

use crate::error::{Error, Kind, Result};

/// The types of values that steps know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum DType {
    UInt8,
    Float16,
    Float32,
    BFloat16,
}

impl DType {
    /// torch's own number for it.
    pub const fn number(self) -> i8 {
        match self {
            DType::UInt8 => 0,
            DType::Float16 => 5,
            DType::Float32 => 6,
            DType::BFloat16 => 15,
        }
    }

    pub fn of(number: i8) -> Option<Self> {
        let all = [DType::UInt8, DType::Float16, DType::Float32, DType::BFloat16];
        all.into_iter().find(|dtype| dtype.number() == number)
    }

    pub const fn bytes(self) -> usize {
        match self {
            DType::UInt8 => 1,
            DType::Float16 | DType::BFloat16 => 2,
            DType::Float32 => 4,
        }
    }

    pub const fn is_float(self) -> bool {
        !matches!(self, DType::UInt8)
    }

    /// As torch prints it.
    pub const fn name(self) -> &'static str {
        match self {
            DType::UInt8 => "torch.uint8",
            DType::Float16 => "torch.float16",
            DType::Float32 => "torch.float32",
            DType::BFloat16 => "torch.bfloat16",
        }
    }
}

/// What kind of object holds the image; torchvision treats them differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Tensor,
    Pil,
    Array,
}

/// What holds an image in a sample: torchvision's arguments may say another thing for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// torchvision's own kind of tensor.
    Image,
    /// Any other.
    Tensor,
    /// An image of PIL.
    Pil,
    /// An array of numpy.
    Array,
}

impl Holder {
    pub(super) fn all() -> Vec<Self> {
        vec![Self::Image, Self::Tensor, Self::Pil, Self::Array]
    }
}

/// The size and kind of an image before its augmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// 1 or 3 where a step needs it.
    pub channels: u32,
    /// Rows.
    pub height: u32,
    /// Pixels of a row.
    pub width: u32,
    /// torch's number of the type of its values.
    pub dtype: i8,
    /// The channels of a pixel lie together, as in PIL images, in arrays and in channels_last; else
    /// each channel is a plane.
    pub interleaved: bool,
    /// A PIL image: some steps calculate otherwise for those.
    pub pil: bool,
    /// A numpy array: steps leave it alone until one makes a tensor of it.
    pub array: bool,
}

/// An image in memory, without gaps between its rows.
#[derive(Clone, Copy, Debug)]
pub struct Image {
    /// Its first byte.
    pub data: *const u8,
    /// What lies there.
    pub shape: Shape,
}

/// What becomes of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// torch's number of the type.
    pub dtype: i8,
    /// Channels, height, width.
    pub dims: Vec<i64>,
    /// Of one row.
    pub bytes: usize,
    /// The channels of a pixel lie together.
    pub channels_last: bool,
}

/// The most that a side may have: beyond it sums of pixels would not fit their types.
const LARGEST_SIDE: u32 = 1 << 20;
/// The most values that an image may have.
const LARGEST: u64 = 1 << 34;

/// An image as a step finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub channels: u32,
    pub height: u32,
    pub width: u32,
    pub dtype: DType,
    pub form: Form,
}

impl State {
    pub fn of(shape: &Shape) -> Result<Self> {
        let known = DType::of(shape.dtype);
        let Some(dtype) = known.filter(|dtype| matches!(dtype, DType::UInt8 | DType::Float32))
        else {
            return Err(Error::new(
                Kind::Type,
                "the image is of a dtype that fused steps do not know: they take uint8 and float32; \
                 convert it in the dataset, or give the steps as batch_transform=",
            ));
        };
        let Shape { channels, height, width, .. } = *shape;
        if channels == 0 || height == 0 || width == 0 {
            return Err(Error::new(
                Kind::Argument,
                format!("the image has no pixels: its shape is [{channels}, {height}, {width}]"),
            ));
        }
        let form = if shape.pil {
            Form::Pil
        } else if shape.array {
            Form::Array
        } else {
            Form::Tensor
        };
        Self { channels, height, width, dtype, form }.within_limits()
    }

    /// The same with these sides, if they can be worked with.
    pub fn of_sides(self, height: u64, width: u64) -> Result<Self> {
        let side = |side: u64| u32::try_from(side).unwrap_or(u32::MAX);
        Self { height: side(height), width: side(width), ..self }.within_limits()
    }

    /// The same, if it is of a size that can be worked with.
    pub fn within_limits(self) -> Result<Self> {
        let Self { channels, height, width, .. } = self;
        // Sides that are too large have a product that is no number.
        let sides = height <= LARGEST_SIDE && width <= LARGEST_SIDE && channels <= 1 << 16;
        let values = || u64::from(channels) * u64::from(height) * u64::from(width);
        if !sides || values() > LARGEST {
            return Err(Error::new(
                Kind::Argument,
                format!("an image of [{channels}, {height}, {width}] is too large"),
            ));
        }
        Ok(self)
    }

    pub fn bytes(&self) -> usize {
        self.values() * self.dtype.bytes()
    }

    pub fn values(&self) -> usize {
        self.channels as usize * self.height as usize * self.width as usize
    }
}
