//! Schemas as C++ reads them: parsed once, then looked at without a call.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use std::sync::Arc;
use stocache::records::schema::kinds;
use stocache::records::schema::{self, Kind, Span};

/// A schema, parsed, with its tables in the form that crosses.
pub struct Schema {
    parsed: Arc<schema::Schema>,
    nodes: Vec<ffi::Node>,
    keys: Vec<ffi::Key>,
    classes: Vec<ffi::Class>,
    dtypes: Vec<ffi::NumpyType>,
    images: Vec<ffi::Image>,
    names: Vec<ffi::Span>,
}

/// Both sides say the same of every kind.
macro_rules! same {
    ($($kind:ident),*) => {
        $(const _: () = assert!(ffi::Kind::$kind.repr == Kind::$kind as u8);)*
        const _: () = assert!([$(Kind::$kind),*].len() == Kind::ALL.len());
    };
}
same!(
    None,
    Bool,
    Int,
    BigInt,
    Float,
    Complex,
    Str,
    Bytes,
    ByteArray,
    Tensor,
    Array,
    NumpyScalar,
    NumpyStr,
    NumpyBytes,
    Image,
    Tuple,
    List,
    Ints,
    Floats,
    Size,
    Dict,
    OrderedDict,
    NamedTuple,
    DataClass,
    Enum,
    Pairs,
    Object,
    Pickle,
    Missing
);

fn kind(kind: Kind) -> ffi::Kind {
    ffi::Kind { repr: kind as u8 }
}

fn span(span: Span) -> ffi::Span {
    ffi::Span { at: span.at, len: span.len }
}

fn dtype(dtype: kinds::DType) -> ffi::DType {
    let kinds::DType { itemsize, flexible, torch } = dtype;
    ffi::DType { itemsize, flexible, torch }
}

/// An error for everything that no encoder can have written.
pub fn parse_schema(bytes: &[u8]) -> Result<Box<Schema>, Crossing> {
    guard(|| {
        let parsed = schema::Schema::parse(bytes)?;
        let node = |node: &schema::Node| ffi::Node {
            kind: kind(node.kind),
            dtype: node.dtype,
            count: node.count,
            entry: node.entry,
            word: node.word,
            number: node.number,
            leaf: node.leaf,
            key: node.key,
            names: node.names,
            more: node.more,
            after: node.after,
            stacked: node.stacked,
        };
        let key = |key: &schema::Key| ffi::Key {
            kind: key.kind,
            count: key.count,
            bits: key.bits,
            text: span(key.text),
        };
        let class = |class: &schema::Class| ffi::Class {
            kind: kind(class.kind),
            module: span(class.module),
            qualified: span(class.qualified),
            fields: span(class.fields),
        };
        let numpy = |found: &schema::NumpyType| ffi::NumpyType {
            text: span(found.text),
            dtype: dtype(found.dtype),
        };
        let image = |image: &schema::Image| ffi::Image {
            mode: span(image.mode),
            palette: span(image.palette),
        };
        Ok(Box::new(Schema {
            nodes: parsed.nodes.iter().map(node).collect(),
            keys: parsed.keys.iter().map(key).collect(),
            classes: parsed.classes.iter().map(class).collect(),
            dtypes: parsed.dtypes.iter().map(numpy).collect(),
            images: parsed.images.iter().map(image).collect(),
            names: parsed.names.iter().copied().map(span).collect(),
            parsed: Arc::new(parsed),
        }))
    })
}

impl Schema {
    pub fn parsed(&self) -> &Arc<schema::Schema> {
        &self.parsed
    }

    pub fn sums(&self) -> ffi::SchemaSums {
        ffi::SchemaSums {
            words: self.parsed.words as usize,
            leaves: self.parsed.leaves.len(),
            numbers_at: self.parsed.numbers_at(),
            head: self.parsed.head(),
            needs_pickle: self.parsed.needs_pickle,
            collatable: self.parsed.collatable,
            fusible: self.parsed.fusible,
            has_rest: self.parsed.has_rest,
        }
    }

    pub fn is_like(&self, other: &Schema) -> bool {
        calm(false, || self.parsed.is_like(&other.parsed))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.parsed.bytes
    }

    pub fn nodes(&self) -> &[ffi::Node] {
        &self.nodes
    }

    pub fn keys(&self) -> &[ffi::Key] {
        &self.keys
    }

    pub fn classes(&self) -> &[ffi::Class] {
        &self.classes
    }

    pub fn dtypes(&self) -> &[ffi::NumpyType] {
        &self.dtypes
    }

    pub fn images(&self) -> &[ffi::Image] {
        &self.images
    }

    pub fn names(&self) -> &[ffi::Span] {
        &self.names
    }

    /// Reads the words of a record, which must belong to the caller alone, and finds its payloads.
    pub fn lay_out(&self, record: &[u8], words: &mut [u32], extents: &mut [ffi::Extent]) -> bool {
        let len = record.len() as u64;
        self.read_words(record, words, extents.len())
            && calm(false, || self.parsed.each_payload(words, len, noted_in(extents)))
    }

    /// The same for what a batch keeps of a record beside its columns.
    pub fn lay_out_rest(
        &self,
        rest: &[u8],
        words: &mut [u32],
        extents: &mut [ffi::Extent],
    ) -> bool {
        let len = rest.len() as u64;
        self.read_words(rest, words, extents.len())
            && calm(false, || self.parsed.each_payload_apart(words, len, noted_in(extents)))
    }

    fn read_words(&self, record: &[u8], words: &mut [u32], extents: usize) -> bool {
        let (stored, _) = record.as_chunks();
        if words.len() != self.parsed.words as usize
            || extents != self.parsed.leaves.len()
            || stored.len() < words.len()
        {
            return false;
        }
        for (word, stored) in words.iter_mut().zip(stored) {
            *word = u32::from_le_bytes(*stored);
        }
        true
    }
}

/// Writes what it is told to one after the other.
fn noted_in(extents: &mut [ffi::Extent]) -> impl FnMut(schema::Extent) {
    let mut extents = extents.iter_mut();
    move |found| {
        if let Some(extent) = extents.next() {
            *extent = ffi::Extent { at: found.at, len: found.len };
        }
    }
}

pub fn numpy_dtype(text: &[u8]) -> ffi::DType {
    let unknown = kinds::DType { itemsize: 0, flexible: false, torch: kinds::torch::NONE };
    dtype(calm(None, || kinds::DType::parse(text)).unwrap_or(unknown))
}

pub fn tensor_itemsize(dtype: i8) -> u32 {
    kinds::tensor_itemsize(dtype)
}

pub fn image_mode(name: &[u8]) -> ffi::ImageMode {
    let found = kinds::ImageMode::of(name);
    ffi::ImageMode {
        bits: found.map_or(0, |mode| mode.bits),
        palette: found.is_some_and(|mode| mode.palette),
    }
}

pub fn is_palette_mode(name: &[u8]) -> bool {
    kinds::is_palette_mode(name)
}

pub fn dims_bytes(dims: &[u32], itemsize: u64, bytes: &mut u64) -> bool {
    kinds::dims_bytes(dims, itemsize).inspect(|&found| *bytes = found).is_some()
}

pub fn pixels_bytes(width: u32, height: u32, bits: u8, bytes: &mut u64) -> bool {
    kinds::pixels_bytes(width, height, bits).inspect(|&found| *bytes = found).is_some()
}
