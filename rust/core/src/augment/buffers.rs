//! Memory between two steps, used again.
#![allow(unsafe_code)] // bytes seen as numbers

use crate::error::{Error, Kind, Result};

/// Bytes at an address that suits numbers.
#[derive(Default)]
pub(super) struct Buffer {
    words: Vec<u64>,
    /// So many of them were asked for.
    used: usize,
}

impl Buffer {
    /// The bytes that there are, and how many were asked for since the last time.
    pub fn room(&mut self) -> (usize, usize) {
        (self.words.capacity() * 8, std::mem::take(&mut self.used) * 8)
    }

    /// An error where there is not so much memory: between two small images may be a large one.
    pub fn bytes(&mut self, len: usize) -> Result<&mut [u8]> {
        let words = len.div_ceil(8);
        self.used = self.used.max(words);
        if self.words.len() < words {
            self.words.clear(); // nobody wants what is in it, so it need not be moved
            self.words.try_reserve(words).map_err(|_| out_of_memory(len))?;
            self.words.resize(words, 0);
        }
        // SAFETY: a u64 is eight bytes, of any value.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), len) })
    }

    pub fn floats(&mut self, len: usize) -> Result<&mut [f32]> {
        let bytes = self.bytes(len * 4)?;
        // SAFETY: aligned for u64, and of any value.
        Ok(unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) })
    }
}

pub(super) fn out_of_memory(bytes: usize) -> Error {
    Error::new(
        Kind::Space,
        format!("there is no memory for the {bytes} bytes that an image takes between two steps"),
    )
}
