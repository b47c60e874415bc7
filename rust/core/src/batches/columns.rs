//! What a batch of many records is made of: its columns, and where their rows lie.
//!
//! One column is one tensor of what default_collate makes of the samples: a tensor or array of every
//! sample, or a number of every sample. Strings are no columns: they become lists, and their bytes are
//! gathered one after the other.
#![allow(unsafe_code)] // records are memory that other processes may write to

use crate::records::schema::kinds::{tensor_itemsize, torch};
use crate::records::schema::{Extent, Kind, Schema};
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

/// One tensor of the batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// torch's number.
    pub dtype: i8,
    /// Its shape; the rows first.
    pub sizes: Vec<i64>,
    /// The bytes of one row.
    pub row_bytes: usize,
    /// Where a row of it begins in its record.
    pub(super) start: Start,
    /// Of bool: a number of 8 bytes becomes one byte.
    pub(super) truth: bool,
}

/// Where a row of a column begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// At this offset of every record.
    Number(u64),
    /// So far into this payload.
    Payload(u32, u64),
}

/// One string of one row, among the gathered bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Text {
    /// Its first byte.
    pub at: usize,
    /// How many.
    pub len: usize,
}

/// The layout of a batch.
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
    pub(super) columns: Vec<Column>,
    pub(super) text_leaves: Vec<u32>,
    /// Row by row.
    pub(super) texts: Vec<Text>,
    pub(super) text_bytes: usize,
}

impl Columns {
    /// Checks what it can about the records and finds out where their parts lie. `None` if there are
    /// none, if shapes differ, if one is damaged, or if the schema holds what default_collate refuses
    /// or treats in a way of its own. Lengths of strings may differ.
    ///
    /// # Safety
    /// The rows must be readable.
    pub unsafe fn plan(schema: Arc<Schema>, rows: &[Row]) -> Option<Self> {
        if rows.is_empty() || !schema.collatable {
            return None;
        }
        let mut made = Self {
            rows: rows.len(),
            words: vec![0; schema.words as usize],
            extents: vec![Extent::default(); schema.leaves.len()],
            stride: 0,
            columns: Vec::new(),
            text_leaves: Vec::new(),
            texts: Vec::new(),
            text_bytes: 0,
            schema,
        };
        // SAFETY: by the caller's promise.
        unsafe { made.lay_out(rows) }.then_some(())?;
        made.make_columns();
        made.make_texts()?;
        Some(made)
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

    /// Whether another record in the place of that row leaves the layout as it is.
    ///
    /// # Safety
    /// The record must be readable.
    pub(super) unsafe fn fits(&self, row: usize, record: Row) -> bool {
        let mut words = vec![0; self.words.len()];
        let mut extents = vec![Extent::default(); self.schema.leaves.len()];
        // SAFETY: by the caller's promise.
        (unsafe { record.read_words(&self.schema, &mut words) })
            && self.has_shapes(&words)
            && self.schema.lay_out(&words, record.len as u64, &mut extents)
            && extents == self.extents(row)
    }

    /// Whether these words say the shapes of the first record.
    fn has_shapes(&self, words: &[u32]) -> bool {
        self.schema.leaves.iter().filter(|leaf| leaf.fixed).all(|leaf| {
            let of_leaf = leaf.word as usize..(leaf.word + leaf.dims) as usize;
            words[of_leaf.clone()] == self.words[of_leaf]
        })
    }

    /// # Safety
    /// As for `plan`.
    unsafe fn lay_out(&mut self, rows: &[Row]) -> bool {
        let leaves = self.extents.len();
        let (schema, len) = (&self.schema, rows[0].len);
        // SAFETY: by the caller's promise.
        if !unsafe { rows[0].read_words(schema, &mut self.words) }
            || !schema.lay_out(&self.words, len as u64, &mut self.extents)
        {
            return false;
        }
        if schema.all_fixed {
            // All are alike or there is no batch. The copy looks at the words: where records are
            // small, a look at each of them costs about as much as its copy, and the copy has threads.
            return rows.iter().all(|row| row.len == len);
        }
        let mut words = vec![0; self.words.len()];
        for (i, row) in rows.iter().enumerate().skip(1) {
            // SAFETY: as above.
            if !unsafe { row.read_words(schema, &mut words) } {
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

    fn make_columns(&mut self) {
        let schema = Arc::clone(&self.schema);
        let rows = self.rows as i64;
        for node in &schema.nodes {
            let number = schema.numbers_at() + 8 * u64::from(node.number);
            let mut add = |dtype, row_bytes, start, dims: &[u32]| {
                let dims = dims.iter().map(|&dim| i64::from(dim));
                self.columns.push(Column {
                    dtype,
                    sizes: std::iter::once(rows).chain(dims).collect(),
                    row_bytes,
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
}
