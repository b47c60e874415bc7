//! What a batch of many records is made of: its columns, and where their rows lie.
//!
//! One column is one tensor of what default_collate makes of the samples: a tensor or array of every
//! sample, or a number of every sample. Strings are no columns: they become lists, and their bytes are
//! gathered one after the other.
#![allow(unsafe_code)] // records are memory that other processes may write to

use super::images::{Fused, Images};
use crate::records::schema::kinds::{tensor_itemsize, torch};
use crate::records::schema::{Extent, Kind, PAYLOAD_ALIGN, Schema};
use std::sync::Arc;

/// A record in memory. Others may write to it: what is read of it is believed only after a check.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Its first byte.
    pub data: *const u8,
    /// How many.
    pub len: usize,
}

// SAFETY: an address; who reads there answers for it.
unsafe impl Send for Row {}
// SAFETY: as above.
unsafe impl Sync for Row {}

impl Row {
    /// Copies the words of a record to private memory, where nobody changes them any more; false if
    /// it is too short for its schema.
    ///
    /// # Safety
    /// The record must be readable.
    unsafe fn read_words(&self, schema: &Schema, words: &mut [u32]) -> bool {
        if (self.len as u64) < schema.head() {
            return false;
        }
        // SAFETY: `words` is as long as the schema says, which the head includes.
        unsafe {
            std::ptr::copy_nonoverlapping(self.data, words.as_mut_ptr().cast(), 4 * words.len());
        }
        true
    }
}

/// A record in pieces, one after the other: a sample that was just loaded, whose large parts still lie
/// where its loader put them.
pub struct Pieces(pub Vec<Row>);

impl Pieces {
    /// The record as far as it has one address: at that of the first piece, and as long as all are.
    pub(super) fn row(&self) -> Row {
        let data = self.0.first().map_or(std::ptr::null(), |piece| piece.data);
        Row { data, len: self.0.iter().map(|piece| piece.len).sum() }
    }

    /// Whether the first piece holds all but payloads.
    fn has_head(&self, schema: &Schema) -> bool {
        self.0.first().map_or(0, |piece| piece.len as u64) >= schema.head()
    }

    /// Where these bytes of the record lie; `None` unless that is within one piece.
    fn find(&self, extent: Extent) -> Option<Row> {
        let mut at = extent.at as usize;
        for piece in &self.0 {
            if at < piece.len || (at == piece.len && extent.len == 0) {
                let len = usize::try_from(extent.len).ok()?;
                // SAFETY: at most the end of the piece.
                let data = unsafe { piece.data.add(at) };
                return (len <= piece.len - at).then_some(Row { data, len });
            }
            at -= piece.len;
        }
        None
    }
}

/// One tensor of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// torch's number.
    pub dtype: i8,
    /// The shape of one row.
    pub dims: Vec<i64>,
    /// The bytes of one row.
    pub row_bytes: usize,
    /// Of an image: in memory the first dim comes last.
    pub channels_last: bool,
    /// Where a row of it begins in its record.
    pub(super) start: Start,
    /// Of bool: a number of 8 bytes becomes one byte.
    pub(super) truth: bool,
}

impl Column {
    /// Whether rows of both are rows of one tensor, wherever they lie in their records.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (self.dtype, &self.dims, self.row_bytes, self.channels_last, self.truth)
            == (other.dtype, &other.dims, other.row_bytes, other.channels_last, other.truth)
    }
}

/// Where a row of a column begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// At this offset of every record.
    Number(u64),
    /// So far into this payload.
    Payload(u32, u64),
    /// It is made of this payload, the how-manieth of the images.
    Image(u32, usize),
}

/// One string of one row, among the gathered bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    /// Its first byte.
    pub at: usize,
    /// How many.
    pub len: usize,
}

/// The layout of rows of a batch, and of their records.
#[derive(Debug)]
pub struct Columns {
    pub(super) schema: Arc<Schema>,
    pub(super) rows: usize,
    /// The words of the first record.
    pub(super) words: Vec<u32>,
    /// Of one row, or of all if they differ.
    extents: Vec<Extent>,
    /// From one row to the next; 0 if all are alike.
    stride: usize,
    /// The payloads of every row, if a record of them is in pieces.
    payloads: Vec<Row>,
    pub(super) columns: Vec<Column>,
    pub(super) text_leaves: Vec<u32>,
    /// Row by row.
    pub(super) texts: Vec<Text>,
    /// What each row keeps beside its columns, if they keep anything: see `Schema::each_payload_apart`.
    pub(super) rests: Vec<Text>,
    pub(super) text_bytes: usize,
    /// Those that are made anew.
    pub(super) images: Option<Images>,
}

impl Columns {
    /// Checks what it can about the records and finds out where their parts lie. `None` if there are
    /// none, if shapes differ, if one is damaged, or if the schema holds what default_collate refuses
    /// or treats in a way of its own. Lengths of strings may differ. Some rows may be in `pieces`. Images
    /// may be `fused`: then rows have `numbers`, and sizes may differ as long as what they become is of
    /// one.
    ///
    /// # Safety
    /// The rows must be readable, those in pieces as far as their first piece goes; so must the pieces.
    pub unsafe fn plan(
        schema: Arc<Schema>,
        rows: &[Row],
        pieces: &[(usize, &Pieces)],
        fused: Option<(&Fused, &[u64])>,
    ) -> Option<Self> {
        let collatable = if fused.is_some() { schema.fusible } else { schema.collatable };
        if rows.is_empty() || !collatable {
            return None;
        }
        let (fused, numbers) = fused.unzip();
        let images = match fused {
            Some(fused) => Some(Images::of(&schema, fused)?),
            None => None,
        };
        if !pieces.iter().all(|(_, pieces)| pieces.has_head(&schema)) {
            return None;
        }
        let mut made = Self {
            rows: rows.len(),
            words: vec![0; schema.words as usize],
            extents: vec![Extent::default(); schema.leaves.len()],
            stride: 0,
            payloads: Vec::new(),
            columns: Vec::new(),
            text_leaves: Vec::new(),
            texts: Vec::new(),
            rests: Vec::new(),
            text_bytes: 0,
            images,
            schema,
        };
        // SAFETY: by the caller's promise.
        unsafe { made.lay_out(rows, numbers.unwrap_or_default()) }.then_some(())?;
        made.find_payloads(rows, pieces)?;
        made.make_columns();
        made.make_texts()?;
        made.make_rests()?;
        Some(made)
    }

    /// The same, of no row: what rows of another batch are compared with.
    pub(super) fn without_rows(&self) -> Self {
        Self {
            schema: Arc::clone(&self.schema),
            rows: 0,
            words: self.words.clone(),
            extents: Vec::new(),
            stride: 0,
            payloads: Vec::new(),
            columns: self.columns.clone(),
            text_leaves: self.text_leaves.clone(),
            texts: Vec::new(),
            rests: Vec::new(),
            text_bytes: 0,
            images: None,
        }
    }

    /// What `copy` moves for all rows.
    pub fn bytes(&self) -> usize {
        let row: usize = self.columns.iter().map(|column| column.row_bytes).sum();
        self.text_bytes + row * self.rows
    }

    /// Where the payloads of that row lie.
    #[inline]
    pub(super) fn extents(&self, row: usize) -> &[Extent] {
        &self.extents[row * self.stride..][..self.schema.leaves.len()]
    }

    /// Where that payload of that row lies.
    ///
    /// # Safety
    /// The rows must be those of the plan, or fit it.
    #[inline(always)]
    pub(super) unsafe fn payload(&self, rows: &[Row], row: usize, leaf: u32) -> *const u8 {
        if self.payloads.is_empty() {
            // SAFETY: the plan found these bytes inside the record.
            return unsafe { rows[row].data.add(self.extents(row)[leaf as usize].at as usize) };
        }
        self.payloads[row * self.schema.leaves.len() + leaf as usize].data
    }

    /// Whether these words, of a record of the same schema, say the shapes of the first record.
    pub(super) fn has_shapes(&self, words: &[u32]) -> bool {
        self.fixed(words).eq(self.fixed(&self.words))
    }

    /// Whether rows of both are rows of one batch; of columns of one schema.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let alike = |(one, other): (&Column, &Column)| one.is_like(other);
        self.columns.len() == other.columns.len()
            && self.columns.iter().zip(&other.columns).all(alike)
            // Equal columns are not enough: two lists of two and one numbers have those of one and two.
            && self.has_shapes_of(other)
    }

    /// Whether the first record of the other has them, which may be of a schema that is like this one.
    pub(super) fn has_shapes_of(&self, other: &Self) -> bool {
        self.fixed(&self.words).eq(other.fixed(&other.words))
    }

    /// What words say of the payloads that are of the same size in every row of a batch.
    fn fixed<'a>(&'a self, words: &'a [u32]) -> impl Iterator<Item = &'a [u32]> {
        let is_image = |at: usize| self.images.as_ref().is_some_and(|of| of.has(at as u32));
        let leaves = self.schema.leaves.iter().enumerate();
        leaves
            .filter(move |(at, leaf)| leaf.fixed && !is_image(*at))
            .map(|(_, leaf)| &words[leaf.word as usize..(leaf.word + leaf.dims) as usize])
    }

    /// Whether the first row says all of the others' shapes: whoever copies looks at their words.
    pub(super) fn all_fixed(&self) -> bool {
        self.schema.all_fixed && self.images.is_none()
    }

    /// # Safety
    /// As for `plan`.
    unsafe fn lay_out(&mut self, rows: &[Row], numbers: &[u64]) -> bool {
        let leaves = self.extents.len();
        let (schema, len) = (Arc::clone(&self.schema), rows[0].len);
        // SAFETY: by the caller's promise.
        if !unsafe { rows[0].read_words(&schema, &mut self.words) }
            || !schema.lay_out(&self.words, len as u64, &mut self.extents)
        {
            return false;
        }
        if let Some(images) = &mut self.images
            && (numbers.len() != rows.len() || !images.add(&self.words, numbers[0]))
        {
            return false;
        }
        if self.all_fixed() {
            // All are alike or there is no batch. The copy looks at the words: where records are
            // small, a look at each of them costs about as much as its copy, and the copy has threads.
            return rows.iter().all(|row| row.len == len);
        }
        let mut words = vec![0; self.words.len()];
        for (i, row) in rows.iter().enumerate().skip(1) {
            // SAFETY: as above.
            if !unsafe { row.read_words(&schema, &mut words) } {
                return false;
            }
            if let Some(images) = &mut self.images
                && !images.add(&words, numbers[i])
            {
                return false;
            }
            if self.stride == 0 {
                if row.len == len && words == self.words {
                    continue;
                }
                self.stride = leaves;
                let first = std::mem::take(&mut self.extents);
                self.extents = first.repeat(rows.len());
            }
            let extents = &mut self.extents[i * leaves..][..leaves];
            if !schema.lay_out(&words, row.len as u64, extents) || !self.has_shapes(&words) {
                return false;
            }
        }
        true
    }

    /// Fills `payloads`, if need be; `None` if one is not within one piece.
    fn find_payloads(&mut self, rows: &[Row], pieces: &[(usize, &Pieces)]) -> Option<()> {
        if pieces.is_empty() {
            return Some(());
        }
        let leaves = self.schema.leaves.len();
        let mut payloads = Vec::with_capacity(leaves * rows.len());
        for (row, &record) in rows.iter().enumerate() {
            payloads.extend(self.extents(row).iter().map(|&extent| within(record, extent)));
        }
        for (row, pieces) in pieces {
            for (leaf, &extent) in self.extents(*row).iter().enumerate() {
                payloads[row * leaves + leaf] = pieces.find(extent)?;
            }
        }
        self.payloads = payloads;
        Some(())
    }

    fn make_columns(&mut self) {
        let schema = Arc::clone(&self.schema);
        for (at, node) in schema.nodes.iter().enumerate().filter(|(_, node)| !node.apart) {
            if let Some(images) = &self.images
                && let Some(part) = images.parts.iter().position(|part| part.node == at)
            {
                let made = &images.outputs[part];
                self.columns.push(Column {
                    dtype: made.dtype,
                    dims: made.dims.clone(),
                    row_bytes: made.bytes,
                    channels_last: made.channels_last,
                    start: Start::Image(images.parts[part].leaf, part),
                    truth: false,
                });
                continue;
            }
            let number = schema.numbers_at() + 8 * u64::from(node.number);
            let mut add = |dtype, row_bytes, start, dims: &[u32]| {
                self.columns.push(Column {
                    dtype,
                    dims: dims.iter().map(|&dim| i64::from(dim)).collect(),
                    row_bytes,
                    channels_last: false,
                    start,
                    truth: false,
                });
            };
            match node.kind {
                Kind::Int => add(torch::LONG, 8, Start::Number(number), &[]),
                Kind::Float => add(torch::DOUBLE, 8, Start::Number(number), &[]),
                Kind::Bool => {
                    add(torch::BOOL, 1, Start::Number(number), &[]);
                    self.columns.last_mut().expect("just added").truth = true;
                }
                Kind::NumpyScalar => {
                    let itemsize = tensor_itemsize(node.dtype) as usize;
                    add(node.dtype, itemsize, Start::Number(number), &[]);
                }
                Kind::Size => {
                    for i in 0..u64::from(node.count) {
                        add(torch::LONG, 8, Start::Number(number + 8 * i), &[]);
                    }
                }
                Kind::Tensor | Kind::Array => {
                    let dims = &self.words[node.word as usize..][..node.count as usize];
                    let bytes = self.extents[node.leaf as usize].len as usize;
                    add(node.dtype, bytes, Start::Payload(node.leaf, 0), dims);
                }
                Kind::Ints | Kind::Floats => {
                    let dtype = if node.kind == Kind::Ints { torch::LONG } else { torch::DOUBLE };
                    for at in (0..self.extents[node.leaf as usize].len).step_by(8) {
                        add(dtype, 8, Start::Payload(node.leaf, at), &[]);
                    }
                }
                Kind::Str | Kind::Bytes => self.text_leaves.push(node.leaf),
                _ => {}
            }
        }
    }

    /// `None` if the strings of all rows are more than memory can hold.
    fn make_texts(&mut self) -> Option<()> {
        let mut texts = Vec::with_capacity(self.text_leaves.len() * self.rows);
        for row in 0..if self.text_leaves.is_empty() { 0 } else { self.rows } {
            for &leaf in &self.text_leaves {
                let len = self.extents(row)[leaf as usize].len as usize;
                texts.push(Text { at: self.text_bytes, len });
                self.text_bytes = self.text_bytes.checked_add(len)?;
            }
        }
        self.texts = texts;
        Some(())
    }

    /// Likewise.
    fn make_rests(&mut self) -> Option<()> {
        for row in 0..if self.schema.has_rest { self.rows } else { 0 } {
            let leaves = self.schema.leaves.iter().zip(self.extents(row));
            let len = leaves
                .filter(|(leaf, _)| leaf.apart)
                .map(|(_, extent)| extent.len.next_multiple_of(PAYLOAD_ALIGN))
                .sum::<u64>()
                + self.schema.head().next_multiple_of(PAYLOAD_ALIGN);
            self.rests.push(Text { at: self.text_bytes, len: len as usize });
            self.text_bytes = self.text_bytes.checked_add(len as usize)?;
        }
        Some(())
    }
}

/// These bytes of a record. An address only: nothing is read.
fn within(record: Row, extent: Extent) -> Row {
    Row { data: record.data.wrapping_add(extent.at as usize), len: extent.len as usize }
}
