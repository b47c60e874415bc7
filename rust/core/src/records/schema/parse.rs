//! Reads schemas, and believes nothing they say.

use super::kinds::{
    ARRAY_DIMS, DEPTH_LIMIT, DType, ImageMode, RECORD_LIMIT, SCHEMA_LIMIT, TENSOR_DIMS,
    is_palette_mode, tensor_itemsize, torch,
};
use super::{Class, Image, Key, Kind, Leaf, Node, NumpyType, Schema, Span, VERSION};
use crate::error::{self, Error};

type Result<T> = std::result::Result<T, &'static str>;

const ENDS_EARLY: &str = "it ends early";
const TOO_DEEP: &str = "it is nested too deep";
const UNKNOWN_DTYPE: &str = "an unknown dtype";

pub(super) fn parse(bytes: &[u8]) -> error::Result<Schema> {
    let parsed = match bytes.len() <= SCHEMA_LIMIT {
        true => Parser::new(bytes).schema(),
        false => Err("it is too long"),
    };
    parsed.map_err(|why| Error::new(error::Kind::Argument, format!("malformed schema: {why}")))
}

struct Parser<'a> {
    bytes: &'a [u8],
    at: usize,
    /// In a part that is no column of a batch.
    apart: bool,
    made: Schema,
}

impl<'a> Parser<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let made = Schema {
            bytes: bytes.to_vec(),
            collatable: true,
            all_fixed: true,
            ..Schema::default()
        };
        Self { bytes, at: 0, apart: false, made }
    }

    fn schema(mut self) -> Result<Schema> {
        if self.byte()? != VERSION {
            return Err("it is of another version");
        }
        self.node(0, 0, false)?;
        if self.left() > 0 {
            return Err("bytes follow its end");
        }
        self.made.fusible = self.made.collatable;
        self.made.collatable &= self.made.images_at.is_empty();
        Ok(self.made)
    }

    // Bytes, numbers, texts

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(len).ok_or(ENDS_EARLY)?;
        let taken = self.bytes.get(self.at..end).ok_or(ENDS_EARLY)?;
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn word(&mut self) -> Result<[u8; 8]> {
        self.take(8)?.try_into().map_err(|_| ENDS_EARLY)
    }

    /// A number in groups of seven bits, the lowest first.
    fn count(&mut self) -> Result<u32> {
        let mut value = 0u64;
        for shift in (0..35).step_by(7) {
            let part = self.byte()?;
            value |= u64::from(part & 0x7f) << shift;
            if part < 0x80 {
                return value.try_into().map_err(|_| "a number is too large");
            }
        }
        Err("a number is too large")
    }

    fn text(&mut self) -> Result<(Span, &'a [u8])> {
        let len = self.count()?;
        let span = Span { at: self.at as u32, len };
        Ok((span, self.take(len as usize)?))
    }

    // Parts of nodes

    /// The number of children of a container, which take at least a byte each.
    fn child_count(&mut self, depth: usize) -> Result<u32> {
        deeper(depth)?;
        let count = self.count()?;
        if count as usize > self.left() { Err(ENDS_EARLY) } else { Ok(count) }
    }

    fn add_leaf(&mut self, dims: u32, itemsize: u32, bits: u8, fixed: bool) -> Result<()> {
        let (word, apart) = (self.made.words, self.apart);
        let fixed = fixed && !apart;
        self.made.leaves.push(Leaf { word, dims, itemsize, bits, fixed, apart });
        let words = u64::from(self.made.words) + u64::from(dims);
        if words > RECORD_LIMIT / 4 {
            return Err("too many words");
        }
        self.made.words = words as u32;
        self.made.all_fixed &= fixed;
        Ok(())
    }

    /// A few bytes can ask for many: no record has more than fit into it.
    fn add_numbers(&mut self, count: u32) -> Result<()> {
        let numbers = u64::from(self.made.numbers) + u64::from(count);
        if numbers > RECORD_LIMIT / 8 {
            return Err("too many numbers");
        }
        self.made.numbers = numbers as u32;
        Ok(())
    }

    fn dims(&mut self, limit: u32) -> Result<u32> {
        let count = self.count()?;
        if count > limit { Err("too many dimensions") } else { Ok(count) }
    }

    fn numpy_type(&mut self) -> Result<(u32, DType)> {
        let (text, bytes) = self.text()?;
        let dtype = DType::parse(bytes).ok_or(UNKNOWN_DTYPE)?;
        self.made.dtypes.push(NumpyType { text, dtype });
        Ok((self.made.dtypes.len() as u32 - 1, dtype))
    }

    /// The number of the class, and of its fields and slots.
    fn class(&mut self, kind: Kind) -> Result<(u32, u32)> {
        let (module, _) = self.text()?;
        let (qualified, _) = self.text()?;
        let first = self.at;
        let (fields, slots) = (self.count()?, self.count()?);
        let has_fields = matches!(kind, Kind::NamedTuple | Kind::DataClass);
        if (kind != Kind::DataClass && slots > 0) || (!has_fields && fields > 0) {
            return Err("a class has fields of another kind");
        }
        for count in [fields, slots] {
            if count as usize > self.left() {
                return Err(ENDS_EARLY);
            }
            for _ in 0..count {
                self.text()?;
            }
        }
        let count = fields + slots; // each is at most the length of the schema
        let fields = Span { at: first as u32, len: (self.at - first) as u32 };
        self.made.classes.push(Class { kind, module, qualified, fields });
        Ok((self.made.classes.len() as u32 - 1, count))
    }

    /// A key of a dict, and of a tuple all that is in it behind it.
    fn key(&mut self, depth: usize) -> Result<()> {
        let kind = self.byte()?;
        let mut key = Key { kind, count: 0, bits: 0, text: Span::default() };
        let slot = self.made.keys.len();
        self.made.keys.push(key);
        match kind {
            b'n' | b'0' | b'1' => {}
            b'i' => key.bits = u64::from_le_bytes(self.word()?),
            b'f' => {
                key.bits = u64::from_le_bytes(self.word()?);
                // A NaN is found only by identity, so default_collate does not find it in the other
                // samples.
                self.made.collatable &= !f64::from_bits(key.bits).is_nan();
            }
            b's' | b'y' => key.text = self.text()?.0,
            b'(' => {
                key.count = self.child_count(depth)?;
                for _ in 0..key.count {
                    self.key(depth + 1)?;
                }
            }
            _ => return Err("an unknown kind of key"),
        }
        self.made.keys[slot] = key;
        Ok(())
    }

    // Nodes

    fn children(&mut self, count: u32, depth: usize, may_miss: bool) -> Result<()> {
        (0..count).try_for_each(|_| self.node(depth + 1, 0, may_miss))
    }

    fn node(&mut self, depth: usize, key: u32, may_miss: bool) -> Result<()> {
        let kind = Kind::of(self.byte()?).ok_or("an unknown kind of part")?;
        let mut node = Node {
            key,
            word: self.made.words,
            number: self.made.numbers,
            leaf: self.made.leaves.len() as u32,
            apart: self.apart,
            ..Node::new(kind)
        };
        // Before its children, in whose turn it is filled in.
        let slot = self.made.nodes.len();
        self.made.nodes.push(node);
        match kind {
            Kind::Bool | Kind::Int | Kind::Float => self.add_numbers(1)?,
            Kind::None => self.made.collatable = false,
            Kind::Complex => {
                self.add_numbers(2)?;
                self.made.collatable = false;
            }
            Kind::Str | Kind::Bytes => self.add_leaf(1, 1, 0, false)?,
            Kind::BigInt | Kind::ByteArray | Kind::NumpyStr | Kind::NumpyBytes | Kind::Pickle => {
                self.add_leaf(1, 1, 0, false)?;
                self.made.collatable = false;
                self.made.needs_pickle |= kind == Kind::Pickle;
            }
            Kind::Ints | Kind::Floats => self.add_leaf(1, 8, 0, true)?,
            Kind::Tensor => {
                node.dtype = self.byte()? as i8;
                let itemsize = tensor_itemsize(node.dtype);
                if itemsize == 0 {
                    return Err(UNKNOWN_DTYPE);
                }
                node.count = self.dims(TENSOR_DIMS)?;
                self.add_leaf(node.count, itemsize, 0, true)?;
            }
            Kind::Array => {
                let (entry, dtype) = self.numpy_type()?;
                node.entry = entry;
                node.count = self.dims(ARRAY_DIMS)?;
                node.dtype = dtype.torch;
                self.made.collatable &= dtype.torch != torch::NONE;
                self.add_leaf(node.count + u32::from(dtype.flexible), dtype.itemsize, 0, true)?;
            }
            Kind::NumpyScalar => {
                let (entry, dtype) = self.numpy_type()?;
                if dtype.flexible {
                    return Err(UNKNOWN_DTYPE);
                }
                node.entry = entry;
                node.dtype = dtype.torch;
                // torch.as_tensor refuses a list of numpy.uint64.
                self.made.collatable &= ![torch::NONE, torch::UINT64].contains(&dtype.torch);
                self.add_numbers(dtype.itemsize.div_ceil(8))?;
            }
            Kind::Image => {
                deeper(depth)?;
                let at = self.at as u32;
                node.entry = self.image()?;
                self.beside(|parser| parser.children(1, depth, true))?;
                if !self.apart {
                    let len = self.at as u32 - at;
                    self.made.images_at.push(Span { at, len });
                }
            }
            Kind::Tuple | Kind::List => {
                node.count = self.child_count(depth)?;
                self.children(node.count, depth, false)?;
            }
            Kind::Size => {
                node.count = self.count()?;
                self.add_numbers(node.count)?;
            }
            Kind::Dict | Kind::OrderedDict => {
                node.count = self.child_count(depth)?;
                for _ in 0..node.count {
                    let key = self.made.keys.len() as u32;
                    self.key(depth)?;
                    self.node(depth + 1, key, false)?;
                }
            }
            Kind::NamedTuple => {
                deeper(depth)?;
                (node.entry, node.count) = self.class(kind)?;
                self.children(node.count, depth, false)?;
            }
            Kind::DataClass => {
                deeper(depth)?;
                self.made.collatable = false;
                (node.entry, node.count) = self.class(kind)?;
                node.names = self.made.names.len() as u32;
                node.more = self.child_count(depth)?;
                for _ in 0..node.more {
                    let name = self.text()?.0;
                    self.made.names.push(name);
                }
                self.children(node.count, depth, true)?;
                self.children(node.more, depth, false)?;
            }
            Kind::Enum => {
                node.entry = self.class(kind)?.0;
                self.add_leaf(1, 1, 0, false)?;
                self.made.collatable = false;
            }
            Kind::Pairs => {
                self.made.collatable = false;
                node.count = self.child_count(depth)?;
                for _ in 0..node.count {
                    self.children(2, depth, false)?;
                }
            }
            Kind::Object => {
                deeper(depth)?;
                node.entry = self.class(kind)?.0;
                node.stacked = match self.byte()? {
                    0 => false,
                    1 => true,
                    _ => return Err("an object of an unknown kind"),
                };
                node.count = self.child_count(depth)?;
                self.object(&node, depth)?;
            }
            Kind::Missing if may_miss => {}
            Kind::Missing => return Err("a part is missing"),
        }
        node.after = self.made.nodes.len() as u32;
        self.made.nodes[slot] = node;
        Ok(())
    }

    /// The parts of an object. A batch has the first of one that is stacked as a column; it keeps the
    /// others row by row, whatever they are, but for pickles.
    fn object(&mut self, node: &Node, depth: usize) -> Result<()> {
        if !node.stacked {
            self.made.collatable = false;
            return self.children(node.count, depth, false);
        }
        if node.count == 0 || self.bytes.get(self.at) != Some(&(Kind::Tensor as u8)) {
            return Err("an object that is stacked begins with a tensor");
        }
        self.children(1, depth, false)?;
        self.made.has_rest |= node.count > 1;
        self.beside(|parser| parser.children(node.count - 1, depth, false))
    }

    /// Parts that are no column of a batch, whatever they are, but for pickles.
    fn beside(&mut self, parts: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let (collatable, apart) = (self.made.collatable, self.apart);
        self.apart = true;
        parts(self)?;
        self.apart = apart;
        self.made.collatable = collatable && !self.made.needs_pickle;
        Ok(())
    }

    /// The mode of an image and that of its palette, and the payloads of both.
    fn image(&mut self) -> Result<u32> {
        let (mode, name) = self.text()?;
        let (palette, palette_name) = self.text()?;
        let known = ImageMode::of(name)
            .filter(|known| palette.len == 0 || (known.palette && is_palette_mode(palette_name)))
            .ok_or("an unknown mode of an image")?;
        self.add_leaf(2, 0, known.bits, true)?;
        if palette.len > 0 {
            self.add_leaf(1, 1, 0, false)?;
        }
        self.made.images.push(Image { mode, palette });
        Ok(self.made.images.len() as u32 - 1)
    }
}

fn deeper(depth: usize) -> Result<()> {
    if depth >= DEPTH_LIMIT { Err(TOO_DEEP) } else { Ok(()) }
}
