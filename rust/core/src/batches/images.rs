//! Images that a pipeline makes rows of, in the place of a copy.
//!
//! Which parts of a sample are images is torchvision's rule: all that say so of themselves, or else the
//! first tensor, or else the first array. What the rule or the pipeline has another answer to is no
//! batch here: whoever makes the samples one by one says what is wrong with which.
#![allow(unsafe_code)] // rows are memory of others

use crate::augment::{Holder, Image, Number, Output, Pipeline, Scratch, Shape};
use crate::fault::{Fault, active};
use crate::records::schema::kinds::torch;
use crate::records::schema::{Class, Kind, Schema};
use crate::sys::stores::Stores;
use std::sync::Arc;

/// Where torchvision's own kinds of tensors are defined.
const TV_TENSORS: &[u8] = b"torchvision.tv_tensors";

/// A pipeline, and what its random numbers follow from beside the index of each sample.
#[derive(Clone)]
pub struct Fused {
    /// What images become.
    pub pipeline: Arc<Pipeline>,
    /// The same in all processes of a job.
    pub seed: u64,
    /// Another one whenever all samples are asked for again.
    pub epoch: u64,
    /// Of each row of the batch, what it follows from instead of the index of its sample; or none.
    pub numbers: Vec<u64>,
}

/// A part of a sample that is an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its node.
    pub node: usize,
    /// Its payload.
    pub leaf: u32,
    /// Where its sizes begin among the words.
    word: usize,
    form: Form,
    dtype: i8,
}

/// How a part says its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Width and height; so many bytes per pixel.
    Pil(u32),
    /// Channels, height, width: planes.
    Planes,
    /// Height, width, channels.
    Pixels,
    /// Height and width.
    Grey,
}

/// The images of the rows of a batch.
pub(super) struct Images {
    fused: Fused,
    pub(super) parts: Vec<Part>,
    /// What each part becomes.
    pub(super) outputs: Vec<Output>,
    /// Of each row, of each part.
    shapes: Vec<Shape>,
    /// Of each row: what its random numbers follow from.
    numbers: Vec<u64>,
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Images").field("parts", &self.parts).finish_non_exhaustive()
    }
}

impl Images {
    /// `None` if there is none in such samples, or one that is for somebody else.
    pub(super) fn of(schema: &Schema, fused: &Fused) -> Option<Self> {
        let (parts, holders): (Vec<Part>, Vec<_>) = parts_of(schema)?.into_iter().unzip();
        if !holders.into_iter().all(|holder| fused.pipeline.takes(holder)) {
            return None;
        }
        let is_other = |at: &usize| parts.iter().all(|part| part.node != *at);
        let others = |kind| {
            let nodes = schema.nodes.iter().enumerate();
            let of_kind = nodes.filter(move |(_, node)| node.kind == kind && !node.apart);
            of_kind.map(|(at, _)| at).filter(is_other)
        };
        // What is inside an object stands for it.
        let tensor_before = others(Kind::Tensor).any(|at| at < parts[0].node);
        let array_beside = others(Kind::Array).next().is_some();
        if !fused.pipeline.is_of_same(parts.len(), tensor_before, array_beside) {
            return None;
        }
        Some(Self {
            fused: Fused { numbers: Vec::new(), ..fused.clone() },
            parts,
            outputs: Vec::new(),
            shapes: Vec::new(),
            numbers: Vec::new(),
        })
    }

    /// Whether that payload is one of them: its size may be another one in every row.
    pub(super) fn has(&self, leaf: u32) -> bool {
        self.parts.iter().any(|part| part.leaf == leaf)
    }

    /// The next row, by its words; false if it does not become what the others do.
    pub(super) fn add(&mut self, words: &[u32], number: u64) -> bool {
        let first = self.shapes.len();
        for (at, part) in self.parts.iter().enumerate() {
            let Some(shape) = part.shape(words) else { return false };
            // Images of one sample get the same parameters, for which they need the same size.
            if at > 0 && !has_size_of(&shape, &self.shapes[first]) {
                return false;
            }
            let is_known = first > 0 && self.shapes[first - self.parts.len() + at] == shape;
            if !is_known {
                match (self.outputs.get(at), self.fused.pipeline.output(&shape)) {
                    (None, Ok(output)) => self.outputs.push(output),
                    (Some(known), Ok(output)) if *known == output => {}
                    (Some(_), Err(_)) if active(Fault::HandOutHalfMade) => {}
                    _ => return false,
                }
            }
            self.shapes.push(shape);
        }
        self.numbers.push(number);
        true
    }

    /// Writes a row; false if the pipeline cannot.
    ///
    /// # Safety
    /// `from` must be readable for all bytes of that part of that row, and `to` valid for writes of what
    /// it becomes.
    pub(super) unsafe fn make(
        &self,
        row: usize,
        part: usize,
        from: *const u8,
        to: *mut u8,
        stores: Stores,
        scratch: &mut Scratch,
    ) -> bool {
        let Fused { pipeline, seed, epoch, .. } = &self.fused;
        // Of the sample, wherever in the batch it is.
        let index = if active(Fault::NumberByRow) { row as u64 } else { self.numbers[row] };
        let number = Number { seed: *seed, epoch: *epoch, index };
        let shape = self.shapes[row * self.parts.len() + part];
        let Ok(drawn) = pipeline.draw(number, &shape) else {
            return active(Fault::HandOutHalfMade);
        };
        // SAFETY: by the caller's promise; the row was added with this shape.
        unsafe { pipeline.apply(&drawn, Image { data: from, shape }, to, stores, scratch) }.is_ok()
    }
}

impl Part {
    /// In a record with these words; `None` if that is no image.
    fn shape(&self, words: &[u32]) -> Option<Shape> {
        let at = |k: usize| words[self.word + k];
        let (channels, height, width) = match self.form {
            Form::Pil(channels) => (channels, at(1), at(0)),
            Form::Planes => (at(0), at(1), at(2)),
            Form::Pixels => (at(2), at(0), at(1)),
            Form::Grey => (1, at(0), at(1)),
        };
        let is_one = channels > 0 && height > 0 && width > 0;
        is_one.then_some(Shape {
            channels,
            height,
            width,
            dtype: self.dtype,
            interleaved: self.form != Form::Planes,
            pil: matches!(self.form, Form::Pil(_)),
            array: matches!(self.form, Form::Pixels | Form::Grey),
        })
    }
}

fn has_size_of(one: &Shape, other: &Shape) -> bool {
    (one.height, one.width) == (other.height, other.width)
}

/// The parts of such samples that are images; `None` if there is none, or one that is not known here.
fn parts_of(schema: &Schema) -> Option<Vec<(Part, Holder)>> {
    let (mut images, mut first_tensor, mut first_array) = (Vec::new(), None, None);
    let mut inside = None; // of an object: its first part is no tensor of its own
    for (at, node) in schema.nodes.iter().enumerate().filter(|(_, node)| !node.apart) {
        match node.kind {
            Kind::Image => images.push((pil(schema, at)?, Holder::Pil)),
            Kind::Object => {
                let class = &schema.classes[node.entry as usize];
                match is_of_torchvision(schema, class) {
                    true if schema.text(class.qualified) == b"Image" => {
                        images.push((tensor(schema, at + 1)?, Holder::Image));
                    }
                    true => return None,
                    // To torchvision it is a tensor as any other, and stays what it is.
                    false => first_tensor = first_tensor.or(Some(None)),
                }
                inside = Some(at + 1);
            }
            Kind::Tensor if inside != Some(at) => {
                let part = tensor(schema, at).map(|part| (part, Holder::Tensor));
                first_tensor = first_tensor.or(Some(part));
            }
            Kind::Array => {
                let part = array(schema, at).map(|part| (part, Holder::Array));
                first_array = first_array.or(Some(part));
            }
            _ => {}
        }
    }
    if !images.is_empty() {
        return Some(images);
    }
    Some(vec![first_tensor.or(first_array)??])
}

fn is_of_torchvision(schema: &Schema, class: &Class) -> bool {
    schema.text(class.module).starts_with(TV_TENSORS)
}

/// A contiguous tensor of channels, height and width.
fn tensor(schema: &Schema, at: usize) -> Option<Part> {
    let node = &schema.nodes[at];
    let form = (node.kind == Kind::Tensor && node.count == 3).then_some(Form::Planes)?;
    Some(Part { node: at, leaf: node.leaf, word: node.word as usize, form, dtype: node.dtype })
}

/// An array of bytes as torchvision takes them: the channels last, or none.
fn array(schema: &Schema, at: usize) -> Option<Part> {
    let node = &schema.nodes[at];
    let form = match node.count {
        2 => Form::Grey,
        3 => Form::Pixels,
        _ => return None,
    };
    let (leaf, word, dtype) = (node.leaf, node.word as usize, node.dtype);
    (dtype == torch::BYTE).then_some(Part { node: at, leaf, word, form, dtype })
}

/// An image of PIL, of a mode that has one tensor.
fn pil(schema: &Schema, at: usize) -> Option<Part> {
    let node = &schema.nodes[at];
    let channels = match schema.text(schema.images[node.entry as usize].mode) {
        b"L" => 1,
        b"RGB" => 3,
        _ => return None,
    };
    let (leaf, word) = (node.leaf, node.word as usize);
    Some(Part { node: at, leaf, word, form: Form::Pil(channels), dtype: torch::BYTE })
}
