//! The dense cache for Rust that holds `tch::Tensor`s. It needs the feature `tch` and the libtorch
//! that this tch is made for; the Python package does without either.
#![allow(unsafe_code)] // the memory of tensors

use crate::error::{Error, Kind as Trouble, Result};
use crate::segment::Request;
use crate::segment::layout::{Geometry, SlotsGeometry};
use crate::slots::{Cache, Stored};
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// A cache of tensors of one shape and kind, which every process of the node finds by its name,
/// Python's `stocache.SharedCache` included.
///
/// ```no_run
/// use stocache::tensors::TensorCache;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> stocache::Result<()> {
/// let cache = TensorCache::open("imagenet", 32 << 30, 1_281_167, &[3, 224, 224], Kind::Uint8)?;
/// let sample = match cache.get(7)? {
///     Some(sample) => sample,
///     None => {
///         let sample = Tensor::zeros([3, 224, 224], (Kind::Uint8, Device::Cpu)); // slow
///         cache.set(7, &sample, false)?;
///         sample
///     }
/// };
/// # drop(sample);
/// # Ok(())
/// # }
/// ```
pub struct TensorCache {
    cache: Arc<Cache>,
    kind: Kind,
}

impl TensorCache {
    /// Joins the cache of that name, or makes it: as many of `len` samples of `dims` and `kind` as
    /// `limit_bytes` hold. It goes with the last process that has it open.
    pub fn open(name: &str, limit_bytes: u64, len: u64, dims: &[u64], kind: Kind) -> Result<Self> {
        let item = kind.elt_size_in_bytes() as u64;
        let geometry = SlotsGeometry::plan(limit_bytes, len, dims, dtype_of(kind)?, item, false)?;
        let (cache, _) = Cache::open(&Request::new(name, Geometry::Slots(geometry)))?;
        Self::over(cache)
    }

    /// Joins the cache of that name, which some process must have open.
    pub fn join(name: &str) -> Result<Self> {
        Self::over(Cache::join(name, None)?.0)
    }

    /// A cache that was opened with other options.
    pub fn over(cache: Arc<Cache>) -> Result<Self> {
        let dtype = cache.geometry().dtype;
        match DTYPES.iter().find(|&&(_, number)| number == dtype) {
            Some(&(kind, _)) => Ok(Self { cache, kind }),
            None => Err(Error::new(
                Trouble::Type,
                format!("tch has no kind for torch's dtype {dtype}; read the cache as bytes"),
            )),
        }
    }

    /// The cache itself: counts, names, `clear`.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// What its samples are made of.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// A copy of the sample, if it is there.
    pub fn get(&self, index: i64) -> Result<Option<Tensor>> {
        let (batch, found) = self.get_many(&[index])?;
        found[0].then(|| batch.f_squeeze_dim(0)).transpose().map_err(of_libtorch)
    }

    /// Copies of samples, one row each, and which of them were there; the other rows are zeros.
    pub fn get_many(&self, indices: &[i64]) -> Result<(Tensor, Vec<bool>)> {
        let batch = Tensor::f_empty(self.shape(Some(indices.len())), (self.kind, Device::Cpu));
        let batch = batch.map_err(of_libtorch)?;
        let mut found = vec![false; indices.len()];
        // SAFETY: a tensor of its own, contiguous, with one row for each index.
        unsafe { self.cache.load_many(indices, batch.data_ptr().cast(), &mut found, 1)? };
        Ok((batch, found))
    }

    /// Stores a sample. A slot that is filled stays as it is without `overwrite`.
    pub fn set(&self, index: i64, sample: &Tensor, overwrite: bool) -> Result<Stored> {
        let sample = self.bytes(sample, None)?;
        self.cache.store(index, sample.as_slice(), overwrite)
    }

    /// Stores one row for each index, and says which were stored.
    pub fn set_many(&self, indices: &[i64], rows: &Tensor, overwrite: bool) -> Result<Vec<bool>> {
        let rows = self.bytes(rows, Some(indices.len()))?;
        let mut stored = vec![false; indices.len()];
        self.cache.store_many(indices, rows.as_slice(), overwrite, &mut stored)?;
        Ok(stored)
    }

    /// Of one sample, or of so many rows.
    fn shape(&self, rows: Option<usize>) -> Vec<i64> {
        let dims = self.cache.geometry().dims.iter().map(|&dim| dim as i64);
        rows.map(|rows| rows as i64).into_iter().chain(dims).collect()
    }

    fn bytes(&self, given: &Tensor, rows: Option<usize>) -> Result<Bytes> {
        let (shape, wanted) = (given.size(), self.shape(rows));
        let kind = given.f_kind().map_err(of_libtorch)?;
        if kind != self.kind || shape != wanted || given.device() != Device::Cpu {
            return Err(Error::new(
                Trouble::Argument,
                format!(
                    "a {kind:?} tensor of {shape:?} on {:?} was given; this cache takes {:?} of \
                     {wanted:?} on Cpu",
                    given.device(),
                    self.kind
                ),
            ));
        }
        let tensor = given.f_contiguous().map_err(of_libtorch)?;
        Ok(Bytes { len: tensor.numel() * kind.elt_size_in_bytes(), tensor })
    }
}

/// The bytes of a contiguous tensor, which keeps them.
struct Bytes {
    tensor: Tensor,
    len: usize,
}

impl Bytes {
    fn as_slice(&self) -> &[u8] {
        match self.len {
            0 => &[],
            // SAFETY: contiguous with `len` bytes, alive as long as `self`.
            len => unsafe { std::slice::from_raw_parts(self.tensor.data_ptr().cast::<u8>(), len) },
        }
    }
}

fn of_libtorch(error: tch::TchError) -> Error {
    Error::new(Trouble::System, format!("libtorch: {error}"))
}

fn dtype_of(kind: Kind) -> Result<i32> {
    match DTYPES.iter().find(|(known, _)| *known == kind) {
        Some((_, dtype)) => Ok(*dtype),
        None => Err(Error::new(
            Trouble::Type,
            format!("{kind:?} is more than bytes; store what int_repr gives, and the scale"),
        )),
    }
}

/// The kinds that are nothing but bytes, with torch's numbers of them, which tch keeps to itself.
const DTYPES: [(Kind, i32); 17] = [
    (Kind::Uint8, 0),
    (Kind::Int8, 1),
    (Kind::Int16, 2),
    (Kind::Int, 3),
    (Kind::Int64, 4),
    (Kind::Half, 5),
    (Kind::Float, 6),
    (Kind::Double, 7),
    (Kind::ComplexHalf, 8),
    (Kind::ComplexFloat, 9),
    (Kind::ComplexDouble, 10),
    (Kind::Bool, 11),
    (Kind::BFloat16, 15),
    (Kind::Float8e5m2, 23),
    (Kind::Float8e4m3fn, 24),
    (Kind::Float8e5m2fnuz, 25),
    (Kind::Float8e4m3fnuz, 26),
];
