//! The format of a dense cache (kind 0): where everything lies.

use crate::bytes::Bytes;
use crate::error::{Error, Kind, Result};
use crate::segment::parts::{PAGE, STATES_AT};

/// The most dimensions a sample can have.
pub const MAX_DIMS: usize = 16;

const _: () = assert!(64 + 8 * MAX_DIMS == 192); // the dims in the header end where the offsets begin

/// What is cached: how many samples of which shape, and how many of them fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotsGeometry {
    /// Samples in the dataset.
    pub dataset_len: u64,
    /// Samples that fit in the cache: the first `capacity` by index.
    pub capacity: u64,
    /// Bytes of one sample.
    pub slot_bytes: u64,
    /// torch's ScalarType number.
    pub dtype: i32,
    /// Dimensions of one sample.
    pub dims: Vec<u64>,
    /// A checksum per slot.
    pub verify: bool,
}

impl SlotsGeometry {
    /// As many samples of `dims` as `limit_bytes` hold, after one byte per sample of the dataset,
    /// as in stocaching.
    pub fn plan(
        limit_bytes: u64,
        dataset_len: u64,
        dims: &[u64],
        dtype: i32,
        item_bytes: u64,
        verify: bool,
    ) -> Result<Self> {
        if dims.len() > MAX_DIMS {
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "data_dims has {} dimensions, at most {MAX_DIMS} are allowed; flatten some of them",
                    dims.len()
                ),
            ));
        }
        if dataset_len == 0 {
            return Err(Error::new(Kind::Argument, "dataset_len is 0, it must be at least 1"));
        }
        let slot_bytes = dims
            .iter()
            .try_fold(item_bytes, |bytes, &dim| bytes.checked_mul(dim))
            .filter(|&bytes| bytes <= i64::MAX as u64)
            .ok_or_else(|| {
                Error::new(
                    Kind::Argument,
                    format!(
                        "data_dims {dims:?} is more than 2^63 bytes a sample; make them smaller"
                    ),
                )
            })?;
        if slot_bytes == 0 {
            return Err(Error::new(
                Kind::Argument,
                format!("data_dims {dims:?} holds no element, every dimension must be at least 1"),
            ));
        }
        let geometry = Self {
            dataset_len,
            capacity: (limit_bytes.saturating_sub(dataset_len) / slot_bytes).min(dataset_len),
            slot_bytes,
            dtype,
            dims: dims.to_vec(),
            verify,
        };
        geometry.layout().map(|_| geometry)
    }

    /// Where everything lies.
    pub fn layout(&self) -> Result<SlotsLayout> {
        let too_large = || {
            Error::new(
                Kind::Argument,
                format!("a cache of {self} is beyond what one file can hold; lower size_limit_gib"),
            )
        };
        SlotsLayout::of(self).ok_or_else(too_large)
    }
}

impl std::fmt::Display for SlotsGeometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {} samples, data_dims {:?}, dtype {}, {} a sample{}",
            self.capacity,
            self.dataset_len,
            self.dims,
            dtype_name(self.dtype),
            Bytes(self.slot_bytes),
            if self.verify { ", verified" } else { "" }
        )
    }
}

/// torch's name for a ScalarType number; the numbers are part of torch's own file formats.
fn dtype_name(dtype: i32) -> String {
    let name = match dtype {
        0 => "uint8",
        1 => "int8",
        2 => "int16",
        3 => "int32",
        4 => "int64",
        5 => "float16",
        6 => "float32",
        7 => "float64",
        9 => "complex64",
        10 => "complex128",
        11 => "bool",
        15 => "bfloat16",
        23 => "float8_e5m2",
        24 => "float8_e4m3fn",
        27 => "uint16",
        28 => "uint32",
        29 => "uint64",
        other => return format!("number {other}"),
    };
    name.to_string()
}

/// Offsets of the parts of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotsLayout {
    /// The states.
    pub states_at: u64,
    /// The checksums; equal to `data_at` without verify.
    pub checks_at: u64,
    /// The slots. Everything before is metadata, allocated at creation.
    pub data_at: u64,
    /// Length of the segment.
    pub total: u64,
}

impl SlotsLayout {
    pub(crate) fn of(geometry: &SlotsGeometry) -> Option<Self> {
        let pages = |at: u64| at.checked_next_multiple_of(PAGE as u64);
        let states_at = STATES_AT;
        let checks_at = pages(states_at.checked_add(geometry.dataset_len.checked_mul(2)?)?)?;
        let checks = if geometry.verify { geometry.capacity.checked_mul(8)? } else { 0 };
        let data_at = pages(checks_at.checked_add(checks)?)?;
        let total = data_at.checked_add(geometry.capacity.checked_mul(geometry.slot_bytes)?)?;
        (total <= i64::MAX as u64).then_some(Self { states_at, checks_at, data_at, total })
    }

    /// Where slot `i` begins.
    #[inline]
    pub(crate) fn slot_at(&self, geometry: &SlotsGeometry, i: u64) -> u64 {
        debug_assert!(i < geometry.capacity);
        self.data_at + i * geometry.slot_bytes
    }
}
