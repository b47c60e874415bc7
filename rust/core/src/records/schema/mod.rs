//! A schema, parsed: what a sample is made of, and where its parts lie in a record.
//!
//! A schema is a version byte and one node, whose children follow it. A node is its [`Kind`] and what
//! that asks for; numbers are in groups of seven bits, texts are a number and their bytes.
//!
//! ```text
//!   01  (  02  T 04 01  s          a tuple of two: a tensor of int64 with one dimension, a str
//! ```
//!
//! A record is the rest:
//!
//! ```text
//!   words     u32 each: sizes of tensors, arrays and images, lengths of strings
//!   numbers   8 bytes each, from the next multiple of 8: int, float, bool, complex, numpy scalars
//!   payloads  in the order of the leaves, each from the next multiple of 16; empty ones take no place
//! ```
//!
//! All integers are little endian. Whoever writes samples is in C++ (`csrc/codec/encode.cpp`); what is
//! read here may come from anywhere, and is believed nowhere.
//!
//! | module | role |
//! | --- | --- |
//! | `parse` | bytes to a [`Schema`] |
//! | [`kinds`] | what parts there are, and how large they can be |

pub mod kinds;
mod parse;
#[cfg(test)]
pub(crate) mod tests;

use crate::error::Result;
use kinds::DType;
pub use kinds::Kind;

/// The first byte of a schema.
pub const VERSION: u8 = 1;
/// Payloads begin at multiples of this.
pub const PAYLOAD_ALIGN: u64 = 16;

/// Where a text lies in the bytes of the schema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Its first byte.
    pub at: u32,
    /// How many.
    pub len: u32,
}

/// One part of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// What it is.
    pub kind: Kind,
    /// Of a tensor, array or numpy scalar: torch's number of what it becomes, or `torch::NONE`.
    pub dtype: i8,
    /// How many children; dims of a tensor or array.
    pub count: u32,
    /// In `classes`, `dtypes` or `images`.
    pub entry: u32,
    /// Its first word.
    pub word: u32,
    /// Its first number.
    pub number: u32,
    /// Its first payload.
    pub leaf: u32,
    /// The key of this child in the dict around it: the first of `keys`.
    pub key: u32,
    /// Of a dataclass: the first in `names`.
    pub names: u32,
    /// How many of them.
    pub more: u32,
    /// The next part that is no part of this one.
    pub after: u32,
    /// Of an object: batches are made of its first part, a tensor.
    pub stacked: bool,
    /// In another part of such an object: no column of a batch.
    pub apart: bool,
}

impl Node {
    fn new(kind: Kind) -> Self {
        let dtype = kinds::torch::NONE;
        Self {
            kind,
            dtype,
            count: 0,
            entry: 0,
            word: 0,
            number: 0,
            leaf: 0,
            key: 0,
            names: 0,
            more: 0,
            after: 0,
            stacked: false,
            apart: false,
        }
    }
}

/// A payload. Its size follows from words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The first.
    pub word: u32,
    /// How many words to multiply.
    pub dims: u32,
    /// And by how much.
    pub itemsize: u32,
    /// Of an image: per pixel; else 0.
    pub bits: u8,
    /// The same size in every row of a batch.
    pub fixed: bool,
    /// Of a part that is no column of a batch.
    pub apart: bool,
}

impl Leaf {
    /// Its bytes in a record with these words; `None` if there is no such record.
    #[inline]
    fn size(&self, words: &[u32]) -> Option<u64> {
        let dims = &words[self.word as usize..][..self.dims as usize];
        match (self.bits, dims) {
            (0, _) => kinds::dims_bytes(dims, self.itemsize.into()),
            (bits, &[width, height]) => kinds::pixels_bytes(width, height, bits),
            _ => None,
        }
    }
}

/// A key of a dict. Those in a tuple follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// 'n' None, '0' False, '1' True, 'i' int, 'f' float, 's' str, 'y' bytes, '(' tuple.
    pub kind: u8,
    /// How many keys are in the tuple.
    pub count: u32,
    /// The int or float.
    pub bits: u64,
    /// The str or bytes.
    pub text: Span,
}

/// A class, as it was when the sample was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Class {
    /// NamedTuple, DataClass, Enum or Object.
    pub kind: Kind,
    /// The module it is found in.
    pub module: Span,
    /// Its name there.
    pub qualified: Span,
    /// How many fields and slots, and their names: compared as they stand.
    pub fields: Span,
}

/// A dtype of numpy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumpyType {
    /// As numpy writes it.
    pub text: Span,
    /// What that says.
    pub dtype: DType,
}

/// Modes of an image and of its palette.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// PIL's name.
    pub mode: Span,
    /// The same; empty if there is no palette.
    pub palette: Span,
}

/// Where a payload lies in a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Its first byte; 0 if it is empty.
    pub at: u64,
    /// How many.
    pub len: u64,
}

/// A schema, parsed. Every number in it was checked against the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schema {
    /// The schema itself.
    pub bytes: Vec<u8>,
    /// All parts, parents before their children.
    pub nodes: Vec<Node>,
    /// All payloads.
    pub leaves: Vec<Leaf>,
    /// All keys of dicts.
    pub keys: Vec<Key>,
    /// One per node that has one.
    pub classes: Vec<Class>,
    /// One per node that has one.
    pub dtypes: Vec<NumpyType>,
    /// One per node that has one.
    pub images: Vec<Image>,
    /// Attributes of dataclasses that are no fields.
    pub names: Vec<Span>,
    /// How many words a record has.
    pub words: u32,
    /// How many numbers.
    pub numbers: u32,
    /// Whether a part is a pickle.
    pub needs_pickle: bool,
    /// Whether there are batches of such samples that can be gathered natively.
    pub collatable: bool,
    /// The same where something makes tensors of their images of PIL.
    pub fusible: bool,
    /// Where images say what is beside their pixels, their modes included.
    pub images_at: Vec<Span>,
    /// Whether all records of a batch must be of one layout.
    pub all_fixed: bool,
    /// Whether there are parts that are no columns of a batch.
    pub has_rest: bool,
}

impl Schema {
    /// An error for everything that no encoder can have written.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        parse::parse(bytes)
    }

    /// Whether batches of both are made of the same parts, but for what is beside the pixels of images.
    pub fn is_like(&self, other: &Self) -> bool {
        let common = |schema: &Self| {
            let mut bytes = schema.bytes.clone();
            for span in schema.images_at.iter().rev() {
                bytes.drain(span.at as usize..(span.at + span.len) as usize);
            }
            bytes
        };
        self.bytes == other.bytes || common(self) == common(other)
    }

    /// The bytes of a span of this schema.
    pub fn text(&self, span: Span) -> &[u8] {
        &self.bytes[span.at as usize..][..span.len as usize]
    }

    /// Where the numbers begin in a record.
    #[inline]
    pub fn numbers_at(&self) -> u64 {
        (4 * u64::from(self.words)).next_multiple_of(8)
    }

    /// Where the words and numbers of a record end.
    #[inline]
    pub fn head(&self) -> u64 {
        match self.numbers {
            0 => 4 * u64::from(self.words),
            numbers => self.numbers_at() + 8 * u64::from(numbers),
        }
    }

    /// Finds out where the payloads lie in a record of `len` bytes with these words, one per entry of
    /// `extents`. False: there is no such record.
    #[inline]
    pub fn lay_out(&self, words: &[u32], len: u64, extents: &mut [Extent]) -> bool {
        let mut entries = extents.iter_mut();
        self.each_payload(words, len, |extent| {
            if let Some(entry) = entries.next() {
                *entry = extent;
            }
        })
    }

    /// Tells `found` where the payloads lie, one after the other; false if there is no such record.
    #[inline]
    pub fn each_payload(&self, words: &[u32], len: u64, mut found: impl FnMut(Extent)) -> bool {
        let mut at = self.head();
        if at > len || words.len() != self.words as usize {
            return false;
        }
        for leaf in &self.leaves {
            match leaf.size(words) {
                None => return false,
                Some(0) => found(Extent::default()),
                Some(size) => {
                    at = at.next_multiple_of(PAYLOAD_ALIGN);
                    if at > len || size > len - at {
                        return false;
                    }
                    found(Extent { at, len: size });
                    at += size;
                }
            }
        }
        at == len
    }

    /// The same for what a batch keeps of a record beside its columns: the head, then the payloads that
    /// are `apart`, each from the next multiple of 16. The others have no extent.
    pub fn each_payload_apart(
        &self,
        words: &[u32],
        len: u64,
        mut found: impl FnMut(Extent),
    ) -> bool {
        let mut at = self.head().next_multiple_of(PAYLOAD_ALIGN);
        if at > len || words.len() != self.words as usize {
            return false;
        }
        for leaf in &self.leaves {
            let size = if leaf.apart { leaf.size(words) } else { Some(0) };
            match size {
                None => return false,
                Some(0) => found(Extent::default()),
                Some(size) if size > len - at => return false,
                Some(size) => {
                    found(Extent { at, len: size });
                    at = (at + size).next_multiple_of(PAYLOAD_ALIGN).min(len);
                }
            }
        }
        at == len
    }
}
