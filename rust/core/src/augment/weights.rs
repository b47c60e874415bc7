//! What a resize takes of which places along one side: torch's weights, of bytes as whole numbers.

use super::buffers::out_of_memory;
use super::kernels::{Level, kernel};
use super::steps::Filter;
use crate::error::Result;
use std::cell::OnceCell;
use std::ops::Range;
use std::rc::Rc;

/// A line is written in steps of so many places; what holds lines has room for whole steps.
pub(super) const STEP: usize = 32;

/// How a side of one size becomes one of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sides {
    pub from: usize,
    pub to: usize,
    pub filter: Filter,
    pub antialias: bool,
    /// Of bytes, or of numbers.
    pub bytes: bool,
}

/// Each place of a side is a sum of `taps` neighbours of the other, from `starts` on, all within it.
pub(super) struct Weights {
    sides: Sides,
    pub taps: usize,
    pub starts: Vec<usize>,
    /// `taps` for each place; of one of both kinds only.
    pub numbers: Vec<f32>,
    pub whole: Vec<i16>,
    /// `whole` are times two to this.
    pub precision: u32,
    blocks: OnceCell<Blocks>,
}

/// Weights that were calculated. Images are cut to any size, but sides have only so many.
#[derive(Default)]
pub(super) struct Known {
    slots: Vec<Option<Rc<Weights>>>,
    bytes: usize,
}

impl Known {
    const SLOTS: usize = 512;
    /// No more than this is kept.
    const MOST_BYTES: usize = 4 << 20;

    pub fn weights(&mut self, sides: Sides, level: Level) -> Result<Rc<Weights>> {
        // Sizes that follow one another do not meet.
        let slot = (sides.from + sides.to * 37 + 7 * usize::from(sides.bytes)) % Self::SLOTS;
        match self.slots.get(slot) {
            Some(Some(known)) if known.sides == sides => return Ok(Rc::clone(known)),
            Some(_) => {}
            None => {
                let no_room = |_| out_of_memory(8 * Self::SLOTS);
                self.slots.try_reserve_exact(Self::SLOTS).map_err(no_room)?;
                self.slots.resize(Self::SLOTS, None);
            }
        }
        let made = Rc::new(Weights::of(sides, level)?);
        if let Some(gone) = self.slots[slot].replace(Rc::clone(&made)) {
            self.bytes -= gone.bytes();
        }
        self.bytes += made.bytes();
        if self.bytes > Self::MOST_BYTES {
            *self = Self::default();
        }
        Ok(made)
    }
}

/// The same as `Weights::whole`, for instructions that gather the values of several places.
pub(super) enum Blocks {
    /// Some lie further apart than such an instruction reaches, or there was no memory for more.
    None,
    /// Of eight places, each half of 16 bytes.
    Eight(Vec<Block<16>>),
    /// Of sixteen places, of 64 bytes.
    Sixteen(Vec<Block<32>>),
}

/// Two taps of some places: where they lie, and how much of each.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Block<const TAPS: usize> {
    pub weights: [i16; TAPS],
    /// For each tap, widened to 16 bits, which of the bytes it is; or none, whose weight is 0.
    pub places: [[u8; 2]; TAPS],
    /// Where the bytes begin, of each half.
    pub bases: [u32; 2],
}

/// For an instruction that sees none of the bytes where such a one is asked for.
const NOTHING: u8 = 0x80;

impl Weights {
    pub fn of(sides: Sides, level: Level) -> Result<Self> {
        let mut exact = Exact::default();
        exact.reserve(&sides)?;
        match sides.bytes {
            true => calculate_for_bytes(level, &mut exact, &sides),
            false => calculate_for_numbers(level, &mut exact, &sides),
        }
        let Exact { taps, starts, weights } = exact;
        let mut made = Self {
            sides,
            taps,
            starts,
            numbers: Vec::new(),
            whole: Vec::new(),
            precision: 0,
            blocks: OnceCell::new(),
        };
        if sides.bytes {
            made.precision = precision(&weights);
            let unit = f64::from(1_u32 << made.precision);
            let rounded = weights.iter().map(|weight| (weight * unit).round() as i16);
            made.whole = collected(rounded)?;
        } else {
            made.numbers = collected(weights.iter().map(|weight| *weight as f32))?;
        }
        Ok(made)
    }

    /// What it takes of memory, with its blocks.
    fn bytes(&self) -> usize {
        let blocks = self.taps.div_ceil(2) * self.room() / 8 * size_of::<Block<16>>();
        let Self { starts, numbers, whole, .. } = self;
        starts.len() * 8 + numbers.len() * 4 + whole.len() * 2 + blocks
    }

    /// For the instructions of that level.
    pub fn blocks(&self, level: Level) -> &Blocks {
        self.blocks.get_or_init(|| match level {
            Level::Plain => Blocks::None,
            #[cfg(target_arch = "x86_64")]
            Level::Vbmi => match self.make_blocks(1, 64) {
                Some(blocks) => Blocks::Sixteen(blocks),
                None => self.eights(),
            },
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::Avx512 => self.eights(),
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn eights(&self) -> Blocks {
        self.make_blocks(2, 16).map_or(Blocks::None, Blocks::Eight)
    }

    /// Room that a line of these places needs.
    pub fn room(&self) -> usize {
        self.starts.len().next_multiple_of(STEP)
    }

    /// The places of the other side that are needed.
    pub fn reach(&self) -> Range<usize> {
        let first = self.starts.first().copied().unwrap_or_default();
        first..self.starts.last().map_or(first, |last| last + self.taps)
    }

    /// Of `numbers` or `whole`, those of a place that are not zero, and where the first belongs.
    pub fn seen<'a, W: Copy + Default + PartialEq>(
        &self,
        weights: &'a [W],
        place: usize,
    ) -> (usize, &'a [W]) {
        let (first, weights) = (self.starts[place], &weights[place * self.taps..][..self.taps]);
        let seen = |weight: &W| *weight != W::default();
        let begin = weights.iter().position(seen).unwrap_or_default();
        let end = weights.iter().rposition(seen).map_or(begin, |last| last + 1);
        (first + begin, &weights[begin..end])
    }

    /// Of parts that are gathered from so many bytes each; none if some lie further apart, or if
    /// there is no memory for them.
    #[cfg(target_arch = "x86_64")]
    fn make_blocks<const TAPS: usize>(
        &self,
        parts: usize,
        reach: usize,
    ) -> Option<Vec<Block<TAPS>>> {
        let (taps, count) = (self.taps, self.starts.len());
        let last = self.sides.from.checked_sub(reach)?;
        let (all, each) = (TAPS / 2, TAPS / 2 / parts);
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(self.room().div_ceil(all) * taps.div_ceil(2)).ok()?;
        for first in (0..self.room()).step_by(all) {
            for tap in (0..taps).step_by(2) {
                let (weights, places) = ([0; TAPS], [[NOTHING; 2]; TAPS]);
                let mut block = Block { weights, places, bases: [0; 2] };
                for part in 0..parts {
                    let begin = first + part * each;
                    let Some(base) = self.starts.get(begin) else { break };
                    let base = (base + tap).min(last);
                    block.bases[part] = base as u32;
                    for (at, place) in (begin..count.min(begin + each)).enumerate() {
                        for of in 0..(taps - tap).min(2) {
                            let far = self.starts[place] + tap + of - base;
                            if far >= reach {
                                return None;
                            }
                            let to = 2 * (part * each + at) + of;
                            block.places[to][0] = far as u8;
                            block.weights[to] = self.whole[place * taps + tap + of];
                        }
                    }
                }
                blocks.push(block);
            }
        }
        Some(blocks)
    }
}

/// All of them, or an error where there is no memory for so many.
fn collected<T>(all: impl ExactSizeIterator<Item = T>) -> Result<Vec<T>> {
    let mut into = Vec::new();
    let no_room = |_| out_of_memory(all.len() * size_of::<T>());
    into.try_reserve_exact(all.len()).map_err(no_room)?;
    into.extend(all);
    Ok(into)
}

/// As torch does it: as precise as the largest fits 16 bits.
fn precision(weights: &[f64]) -> u32 {
    let largest = weights.iter().copied().fold(0.0, f64::max);
    let fits = |precision: &u32| {
        let next = 0.5 + largest * f64::from(1_u32 << (precision + 1));
        next < f64::from(1 << 15)
    };
    (0..22).take_while(fits).count() as u32
}

/// Weights before they are rounded.
#[derive(Default)]
pub(super) struct Exact {
    taps: usize,
    starts: Vec<usize>,
    weights: Vec<f64>,
}

kernel! {
    fn calculate_for_bytes<FUSED>(exact: &mut Exact, sides: &Sides) { exact.calculate::<true>(sides); }
}
kernel! {
    fn calculate_for_numbers<FUSED>(exact: &mut Exact, sides: &Sides) {
        exact.calculate::<false>(sides);
    }
}

/// As precise as torch calculates them: of numbers in float32.
#[inline(always)]
fn near<const BYTES: bool>(value: f64) -> f64 {
    if BYTES { value } else { f64::from(value as f32) }
}

/// How far a place sees, in places of the other side.
#[inline(always)]
fn support<const BYTES: bool>(sides: &Sides) -> (f64, f64) {
    let scale = near::<BYTES>(sides.from as f64 / sides.to as f64);
    let reach = if sides.filter == Filter::Bicubic { 2.0 } else { 1.0 };
    // Only with antialias does a place of a smaller image see all that lies between.
    let wider = if sides.antialias { scale.max(1.0) } else { 1.0 };
    (near::<BYTES>(reach * wider), near::<BYTES>(1.0 / wider))
}

impl Exact {
    fn reserve(&mut self, sides: &Sides) -> Result<()> {
        let (support, _) = support::<true>(sides);
        self.taps = sides.from.min(2 * support.ceil() as usize + 1);
        let (places, weights) = (sides.to, sides.to * self.taps);
        let no_room = |_| out_of_memory(8 * (places + weights));
        self.starts.try_reserve_exact(places).map_err(no_room)?;
        self.weights.try_reserve_exact(weights).map_err(no_room)?;
        self.weights.resize(weights, 0.0);
        Ok(())
    }

    /// torch calculates the weights of numbers in float32: where a place lies is rounded by 4e-6 at a
    /// side of 60 already, which shows in what is made of noise. So each of its roundings is made here.
    #[inline(always)]
    fn calculate<const BYTES: bool>(&mut self, sides: &Sides) {
        let Sides { from, to, filter, antialias, .. } = *sides;
        let near = near::<BYTES>;
        let scale = near(from as f64 / to as f64);
        let kernel = |x: f64| match (filter, antialias) {
            (Filter::Bilinear, _) => triangle(x),
            (Filter::Bicubic, true) => cubic(x, -0.5, near),
            (Filter::Bicubic, false) => cubic(x, -0.75, near),
        };
        let (support, narrower) = support::<BYTES>(sides);
        let mut most = 0;
        for (place, weights) in self.weights.chunks_exact_mut(self.taps).enumerate() {
            let centre = near(scale * (place as f64 + 0.5));
            let (start, count) = match antialias {
                true => {
                    let start = (near(centre - support) + 0.5).max(0.0) as usize;
                    let end = ((near(centre + support) + 0.5) as usize).min(from);
                    let count = end.saturating_sub(start).min(self.taps);
                    let mut total = 0.0;
                    for (tap, weight) in weights[..count].iter_mut().enumerate() {
                        let far = near((start + tap) as f64 - centre) + 0.5;
                        *weight = near(kernel(near(far * narrower)));
                        total = near(total + *weight);
                    }
                    if total != 0.0 {
                        weights[..count].iter_mut().for_each(|weight| *weight /= total);
                    }
                    (start, count)
                }
                false => {
                    // Beyond the edges torch goes on with the values there.
                    // By one instruction, and so rounded once.
                    let middle = near(scale * (place as f64 + 0.5) - 0.5);
                    let middle = if filter == Filter::Bilinear { middle.max(0.0) } else { middle };
                    let behind = near(middle - middle.floor());
                    let first = middle.floor() as isize - support as isize + 1;
                    let within = |at: isize| at.clamp(0, from as isize - 1) as usize;
                    let start = within(first);
                    for tap in 0..2 * support as isize {
                        let far = near((tap + 1) as f64 - support - behind);
                        weights[within(first + tap) - start] += near(kernel(far));
                    }
                    (start, within(first + 2 * support as isize - 1) + 1 - start)
                }
            };
            self.starts.push(start);
            most = most.max(count);
        }
        self.narrow(most.max(1), from);
    }

    /// To so many taps, and none of them outside.
    #[inline(always)]
    fn narrow(&mut self, taps: usize, from: usize) {
        for (place, start) in self.starts.iter_mut().enumerate() {
            let (old, new) = (place * self.taps, place * taps);
            let moved = start.saturating_sub(from - taps);
            *start -= moved;
            // What is cut off is zero; a place's own weights lie at or behind where they go.
            self.weights.copy_within(old..old + taps - moved, new + moved);
            self.weights[new..new + moved].fill(0.0);
        }
        self.weights.truncate(taps * self.starts.len());
        self.taps = taps;
    }
}

#[inline(always)]
fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// `near` rounds what one instruction gives.
#[inline(always)]
fn cubic(x: f64, a: f64, near: impl Fn(f64) -> f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        near(near(near((a + 2.0) * x - (a + 3.0)) * x) * x + 1.0)
    } else if x < 2.0 {
        near(near(near(a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of a place's weights, by the place of the other side that they are of.
    fn spread(weights: &Weights, place: usize, from: usize) -> Vec<f32> {
        let mut all = vec![0.0; from];
        let (first, seen) = weights.seen(&weights.numbers, place);
        all[first..first + seen.len()].copy_from_slice(seen);
        all
    }

    #[test]
    fn places_take_what_lies_around_them_and_in_all_one() {
        for (from, to) in [(1, 1), (1, 9), (2, 7), (9, 1), (7, 100), (100, 7), (31, 32), (64, 64)] {
            for (filter, antialias) in [
                (Filter::Bilinear, true),
                (Filter::Bilinear, false),
                (Filter::Bicubic, true),
                (Filter::Bicubic, false),
            ] {
                let sides = Sides { from, to, filter, antialias, bytes: false };
                let weights = Weights::of(sides, Level::here()).unwrap();
                assert!(weights.reach().end <= from);
                for place in 0..to {
                    let all = spread(&weights, place, from);
                    let sum: f32 = all.iter().sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{sides:?} {place}: {sum}");
                    let centre: f32 = all.iter().zip(0..).map(|(of, at)| of * at as f32).sum();
                    let wanted = (place as f32 + 0.5) * from as f32 / to as f32 - 0.5;
                    let near = if place * 2 + 1 == to { 1e-3 } else { 1.0 };
                    let far = (centre - wanted.clamp(0.0, from as f32 - 1.0)).abs();
                    assert!(far < near * (from as f32 / to as f32).max(1.0), "{sides:?} {place}");
                }
            }
        }
    }

    #[test]
    fn the_same_size_changes_nothing() {
        for antialias in [false, true] {
            let sides = Sides { from: 9, to: 9, filter: Filter::Bicubic, antialias, bytes: true };
            let weights = Weights::of(sides, Level::here()).unwrap();
            for place in 0..9 {
                assert_eq!(weights.seen(&weights.whole, place), (place, &[1 << 14][..]));
            }
            assert_eq!(weights.precision, 14);
        }
    }

    #[test]
    fn what_is_known_is_what_would_be_calculated_and_never_too_much() {
        let mut known = Known::default();
        let mut often = 0;
        for round in 0..3 {
            for from in (3..700).chain([90_000, 400_000]) {
                for (to, bytes) in [(224, true), (224, false), (1_000, true)] {
                    let antialias = from % 3 > 0;
                    let sides = Sides { from, to, filter: Filter::Bilinear, antialias, bytes };
                    let of = known.weights(sides, Level::here()).unwrap();
                    often += usize::from(Rc::strong_count(&of) > 1 && round > 0);
                    let wanted = Weights::of(sides, Level::Plain).unwrap();
                    assert_eq!(of.starts, wanted.starts, "{sides:?}");
                    assert_eq!((&of.whole, &of.numbers), (&wanted.whole, &wanted.numbers));
                    let there = known.slots.iter().flatten().map(|weights| weights.bytes());
                    assert!(there.sum::<usize>() == known.bytes && known.bytes <= 4 << 20);
                }
            }
        }
        assert!(often > 0);
    }

    /// Whether the blocks are there, and are the same sums.
    fn are_the_same<const TAPS: usize>(
        weights: &Weights,
        parts: usize,
        reach: usize,
        line: &[u8],
    ) -> bool {
        let Some(blocks) = weights.make_blocks::<TAPS>(parts, reach) else { return false };
        let all = TAPS / 2;
        for (at, blocks) in blocks.chunks_exact(weights.taps.div_ceil(2)).enumerate() {
            for place in 0..all {
                let part = place / (all / parts);
                let taps = blocks.iter().flat_map(|block| {
                    [2 * place, 2 * place + 1].map(|tap| {
                        let [far, upper] = block.places[tap];
                        assert_eq!(upper, NOTHING);
                        let value = match far {
                            NOTHING => 0,
                            _ => line[block.bases[part] as usize + usize::from(far)],
                        };
                        i32::from(value) * i32::from(block.weights[tap])
                    })
                });
                let wanted: i32 = match at * all + place {
                    place if place < weights.sides.to => {
                        let (first, seen) = weights.seen(&weights.whole, place);
                        let pairs = line[first..].iter().zip(seen);
                        pairs.map(|(value, of)| i32::from(*value) * i32::from(*of)).sum()
                    }
                    _ => 0,
                };
                assert_eq!(taps.sum::<i32>(), wanted, "{:?} {at} {place}", weights.sides);
            }
        }
        true
    }

    #[test]
    fn blocks_are_the_same_sums() {
        let line: Vec<u8> = (0..700_usize).map(|at| (at * 37 % 251) as u8).collect();
        let mut gathered = [0; 2];
        for (from, to) in
            [(16, 40), (17, 5), (64, 70), (200, 224), (224, 33), (700, 190), (700, 9), (9, 40)]
        {
            for filter in [Filter::Bilinear, Filter::Bicubic] {
                let sides = Sides { from, to, filter, antialias: true, bytes: true };
                let weights = Weights::of(sides, Level::here()).unwrap();
                gathered[0] += usize::from(are_the_same::<16>(&weights, 2, 16, &line));
                gathered[1] += usize::from(are_the_same::<32>(&weights, 1, 64, &line));
            }
        }
        assert_eq!(gathered, [10, 6], "those that lie near each other, and no others");
    }
}
