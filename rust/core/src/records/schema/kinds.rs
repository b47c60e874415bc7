//! What parts of samples there are, and how large they can be.

/// The longest schema.
pub const SCHEMA_LIMIT: usize = 4 << 20;
/// Records are shorter than this.
pub const RECORD_LIMIT: u64 = 1 << 32;
/// How deep a sample may be nested.
pub const DEPTH_LIMIT: usize = 100;
/// The most dimensions of a tensor.
pub const TENSOR_DIMS: u32 = 255;
/// The most dimensions of a numpy array.
pub const ARRAY_DIMS: u32 = 64;
/// Images without pixels still cost PIL memory per row.
const EMPTY_IMAGE_LIMIT: u64 = 1 << 20;

/// The first byte of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// None.
    None = b'n',
    /// bool.
    Bool = b'?',
    /// int of 64 bits.
    Int = b'i',
    /// int in two's complement, in as many bytes as it takes.
    BigInt = b'I',
    /// float.
    Float = b'f',
    /// complex.
    Complex = b'c',
    /// str.
    Str = b's',
    /// bytes.
    Bytes = b'y',
    /// bytearray.
    ByteArray = b'Y',
    /// dtype, number of dims.
    Tensor = b'T',
    /// dtype, number of dims.
    Array = b'A',
    /// dtype.
    NumpyScalar = b'a',
    /// numpy.str_.
    NumpyStr = b'u',
    /// numpy.bytes_.
    NumpyBytes = b'v',
    /// mode, mode of the palette; its child is a dict, what is kept of its info.
    Image = b'M',
    /// count.
    Tuple = b'(',
    /// count.
    List = b'[',
    /// A list of int alone: its length is a word, not part of the schema.
    Ints = b'l',
    /// The same of float.
    Floats = b'd',
    /// torch.Size; count.
    Size = b'Z',
    /// count; before each child its key.
    Dict = b'{',
    /// The same.
    OrderedDict = b'O',
    /// class with fields.
    NamedTuple = b'P',
    /// class with fields and other slots, names of other attributes.
    DataClass = b'D',
    /// class; the payload is the name of the member.
    Enum = b'E',
    /// A dict with keys of any kind: count; before each child its key, a part like any other.
    Pairs = b'm',
    /// class, 1 if batches are made of its first part alone or else 0, count; its parts.
    Object = b'R',
    /// A pickle.
    Pickle = b'p',
    /// An attribute that is not set, or an image of whose info nothing is kept.
    Missing = b'x',
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 29] = [
        Kind::None,
        Kind::Bool,
        Kind::Int,
        Kind::BigInt,
        Kind::Float,
        Kind::Complex,
        Kind::Str,
        Kind::Bytes,
        Kind::ByteArray,
        Kind::Tensor,
        Kind::Array,
        Kind::NumpyScalar,
        Kind::NumpyStr,
        Kind::NumpyBytes,
        Kind::Image,
        Kind::Tuple,
        Kind::List,
        Kind::Ints,
        Kind::Floats,
        Kind::Size,
        Kind::Dict,
        Kind::OrderedDict,
        Kind::NamedTuple,
        Kind::DataClass,
        Kind::Enum,
        Kind::Pairs,
        Kind::Object,
        Kind::Pickle,
        Kind::Missing,
    ];

    /// The kind of that byte.
    pub fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == byte)
    }
}

/// torch's own numbers of dtypes (`ScalarType`), as far as they are named here.
#[allow(missing_docs)] // torch's names
pub mod torch {
    pub const BYTE: i8 = 0;
    pub const CHAR: i8 = 1;
    pub const SHORT: i8 = 2;
    pub const INT: i8 = 3;
    pub const LONG: i8 = 4;
    pub const HALF: i8 = 5;
    pub const FLOAT: i8 = 6;
    pub const DOUBLE: i8 = 7;
    pub const COMPLEX_FLOAT: i8 = 9;
    pub const COMPLEX_DOUBLE: i8 = 10;
    pub const BOOL: i8 = 11;
    pub const UINT16: i8 = 27;
    pub const UINT32: i8 = 28;
    pub const UINT64: i8 = 29;
    /// No dtype of torch. Not torch's own number for it, which changes with its version.
    pub const NONE: i8 = -1;
}

/// The bytes of one item of a tensor of that dtype, torch's number; 0 if such tensors are not stored.
pub fn tensor_itemsize(dtype: i8) -> u32 {
    match dtype {
        0 | 1 | 11 => 1,      // uint8, int8, bool
        2 | 5 | 15 | 27 => 2, // int16, half, bfloat16, uint16
        3 | 6 | 8 | 28 => 4,  // int32, float, complex of halves, uint32
        46 => 4,              // complex of bfloat16
        4 | 7 | 9 | 29 => 8,  // int64, double, complex of floats, uint64
        10 => 16,             // complex of doubles
        18..=21 => 1,         // bits1x8 to bits8
        22 => 2,              // bits16
        23..=26 => 1,         // floats of 8 bits
        30..=45 => 1,         // integers of 1 to 7 bits, float8_e8m0fnu, float4_e2m1fn_x2
        _ => 0,               // quantized ones, and what was not there when this was written
    }
}

/// What the text of a numpy dtype says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DType {
    /// Of one character if it is flexible.
    pub itemsize: u32,
    /// The width is a word of the record, behind the dims.
    pub flexible: bool,
    /// What torch.as_tensor makes of it; `torch::NONE` if it refuses.
    pub torch: i8,
}

impl DType {
    /// Any other text is refused here, before numpy sees it: "O" would be an array of pointers.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (swapped, text) = match text {
            [b'>', rest @ ..] => (true, rest),
            [b'<' | b'|', rest @ ..] => (false, rest),
            _ => (false, text),
        };
        let fixed = |itemsize: usize, torch: i8| {
            let torch = if swapped { torch::NONE } else { torch };
            Some(Self { itemsize: itemsize as u32, flexible: false, torch })
        };
        const LONG: usize = size_of::<std::ffi::c_long>();
        const LONG_DOUBLE: usize = 16; // of x86-64 and of 64-bit ARM, in Linux
        match text {
            b"?" => fixed(1, torch::BOOL),
            b"b" => fixed(1, torch::CHAR),
            b"B" => fixed(1, torch::BYTE),
            b"h" => fixed(2, torch::SHORT),
            b"H" => fixed(2, torch::UINT16),
            b"i" => fixed(4, torch::INT),
            b"I" => fixed(4, torch::UINT32),
            b"l" => fixed(LONG, torch::LONG),
            b"L" => fixed(LONG, torch::UINT64),
            b"q" => fixed(8, torch::LONG),
            b"Q" => fixed(8, torch::NONE),
            b"e" => fixed(2, torch::HALF),
            b"f" => fixed(4, torch::FLOAT),
            b"d" => fixed(8, torch::DOUBLE),
            b"g" => fixed(LONG_DOUBLE, torch::NONE),
            b"F" => fixed(8, torch::COMPLEX_FLOAT),
            b"D" => fixed(16, torch::COMPLEX_DOUBLE),
            b"G" => fixed(2 * LONG_DOUBLE, torch::NONE),
            b"S" => Some(Self { itemsize: 1, flexible: true, torch: torch::NONE }),
            b"U" => Some(Self { itemsize: 4, flexible: true, torch: torch::NONE }),
            [b'M' | b'm', b'8', unit @ ..] if is_unit(unit) => fixed(8, torch::NONE),
            _ => None,
        }
    }
}

/// The unit of a date or duration: nothing, [ns], [25s].
fn is_unit(text: &[u8]) -> bool {
    let [b'[', inner @ .., b']'] = text else { return text.is_empty() };
    let digits = inner.iter().take_while(|byte| byte.is_ascii_digit()).count();
    const UNITS: [&[u8]; 13] =
        [b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as"];
    digits <= 9 && UNITS.contains(&&inner[digits..])
}

/// What is known of PIL's modes of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageMode {
    /// Per pixel; rows are whole bytes.
    pub bits: u8,
    /// Whether such an image may have a palette.
    pub palette: bool,
}

impl ImageMode {
    /// The mode of that name.
    pub fn of(name: &[u8]) -> Option<Self> {
        let bits = match name {
            b"1" => 1,
            b"L" | b"P" => 8,
            b"LA" | b"PA" | b"La" | b"I;16" | b"I;16L" | b"I;16B" => 16,
            b"RGB" | b"YCbCr" | b"HSV" | b"LAB" => 24,
            b"RGBA" | b"CMYK" | b"I" | b"F" | b"RGBa" | b"RGBX" => 32,
            _ => return None,
        };
        Some(Self { bits, palette: matches!(name, b"P" | b"PA") })
    }
}

/// Whether a palette can be of this mode.
pub fn is_palette_mode(name: &[u8]) -> bool {
    matches!(name, b"RGB" | b"RGBA" | b"CMYK")
}

/// The bytes of `dims` items of `itemsize`; `None` if no tensor can have these dims.
#[inline]
pub fn dims_bytes(dims: &[u32], itemsize: u64) -> Option<u64> {
    let mut extent = itemsize;
    let mut empty = itemsize == 0;
    for &dim in dims {
        empty |= dim == 0;
        // Zero counts as one: strides are products of all dims, and must not overflow either.
        extent = extent.checked_mul(dim.max(1).into()).filter(|extent| extent >> 62 == 0)?;
    }
    Some(if empty { 0 } else { extent })
}

/// The bytes of the pixels of an image; `None` if there is no such image.
#[inline]
pub fn pixels_bytes(width: u32, height: u32, bits: u8) -> Option<u64> {
    if width == 0 || height == 0 {
        return (u64::from(width) + u64::from(height) <= EMPTY_IMAGE_LIMIT).then_some(0);
    }
    let row = (u64::from(width) * u64::from(bits)).div_ceil(8);
    row.checked_mul(height.into()).filter(|&bytes| bytes < RECORD_LIMIT)
}
