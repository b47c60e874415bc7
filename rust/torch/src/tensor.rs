//! How tensors cross the boundary.
#![allow(unsafe_code)] // pointers of libtorch

use crate::bridge::ffi;
use crate::guard::Crossing;
use stocache::{Error, Kind};

/// The same tensor as tch knows it. `*mut C_tensor` is `at::Tensor*`, and `clone_from_ptr` makes a
/// new reference; `from_ptr` would take the caller's away.
pub fn borrow(tensor: &ffi::Tensor) -> tch::Tensor {
    let pointer: *const ffi::Tensor = tensor;
    // SAFETY: a live at::Tensor for the length of the call.
    unsafe { tch::Tensor::clone_from_ptr(pointer.cast_mut().cast()) }
}

/// The bytes of a tensor, contiguous; copies only if they are not.
pub struct Contents {
    /// Keeps the bytes alive.
    tensor: tch::Tensor,
    len: usize,
}

impl Contents {
    /// Of a dense CPU tensor; the boundary's C++ side has checked that it is one.
    pub fn of(tensor: &ffi::Tensor, item_bytes: usize) -> Result<Self, Crossing> {
        let tensor = borrow(tensor).f_contiguous()?;
        let len = tensor.numel() * item_bytes;
        Ok(Self { tensor, len })
    }

    /// The bytes. Whoever changes the tensor meanwhile, from another thread, gets what they wrote.
    pub fn bytes(&self) -> &[u8] {
        match self.len {
            0 => &[],
            // SAFETY: contiguous with `len` bytes, alive as long as `self`.
            len => unsafe { std::slice::from_raw_parts(self.tensor.data_ptr().cast::<u8>(), len) },
        }
    }
}

/// The elements of a contiguous int64 tensor.
pub fn indices(tensor: &tch::Tensor) -> Result<&[i64], Crossing> {
    if tensor.f_kind()? != tch::Kind::Int64 || !tensor.is_contiguous() {
        return Err(Error::new(Kind::Type, "indices must be a contiguous int64 tensor").into());
    }
    match tensor.numel() {
        0 => Ok(&[]),
        // SAFETY: int64, contiguous and alive as long as the borrow.
        n => Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<i64>(), n) }),
    }
}

/// The elements of a contiguous bool tensor that the caller made for us.
pub fn flags(tensor: &mut tch::Tensor) -> Result<&mut [bool], Crossing> {
    if tensor.f_kind()? != tch::Kind::Bool || !tensor.is_contiguous() {
        return Err(Error::new(Kind::Type, "flags must be a contiguous bool tensor").into());
    }
    match tensor.numel() {
        0 => Ok(&mut []),
        // SAFETY: bool, contiguous, made by the caller for this call alone, and torch stores only
        // 0 and 1 in it.
        n => Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<bool>(), n) }),
    }
}
