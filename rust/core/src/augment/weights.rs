//! What a resize takes of which places along one side: torch's weights, of bytes as whole numbers.

use super::steps::Filter;
use std::ops::Range;

/// A line is written in steps of so many places; what holds lines has room for whole steps.
pub(super) const STEP: usize = 32;
/// Places whose values one instruction gathers, in two halves.
const BLOCK: usize = 8;
/// Bytes that a half of a block is gathered from.
pub(super) const REACH: usize = 16;

/// How a side of one size becomes one of another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sides {
    pub from: usize,
    pub to: usize,
    pub filter: Filter,
    pub antialias: bool,
}

/// Each place of a side is a sum of `taps` neighbours of the other, from `starts` on, all within it.
#[derive(Default)]
pub(super) struct Weights {
    of: Option<(Sides, bool)>,
    pub taps: usize,
    pub starts: Vec<usize>,
    /// `taps` for each place; of one of both kinds only.
    pub numbers: Vec<f32>,
    pub whole: Vec<i16>,
    /// `whole` are times two to this.
    pub precision: u32,
    /// The same as `whole`, for `REACH` bytes at once; none if some lie further apart than that.
    pub blocks: Vec<Block>,
    exact: Vec<f64>,
}

/// Two taps of eight places: where they lie, and how much of each.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Block {
    pub weights: [i16; 2 * BLOCK],
    /// For each byte of both halves widened to 16 bits, which of its `REACH` it is, or none.
    pub places: [u8; 2 * REACH],
    /// Where the `REACH` bytes of each half begin.
    pub bases: [u32; 2],
}

impl Weights {
    /// As they are needed; kept if they are already.
    pub fn become_for(&mut self, sides: Sides, bytes: bool) {
        if self.of == Some((sides, bytes)) {
            return;
        }
        self.of = None; // if what follows is not done to its end, nobody is to believe it
        match bytes {
            true => self.calculate::<true>(&sides),
            false => self.calculate::<false>(&sides),
        }
        self.numbers.clear();
        self.whole.clear();
        self.blocks.clear();
        if bytes {
            self.make_whole();
            self.make_blocks(sides.from);
        } else {
            self.numbers.extend(self.exact.iter().map(|weight| *weight as f32));
        }
        self.of = Some((sides, bytes));
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

    /// torch calculates the weights of numbers in float32: where a place lies is rounded by 4e-6 at a
    /// side of 60 already, which shows in what is made of noise. So each of its roundings is made here.
    fn calculate<const BYTES: bool>(&mut self, sides: &Sides) {
        let Sides { from, to, filter, antialias } = *sides;
        let near = |value: f64| if BYTES { value } else { f64::from(value as f32) };
        let scale = near(from as f64 / to as f64);
        let kernel: fn(f64) -> f64 = match (filter, antialias) {
            (Filter::Bilinear, _) => triangle,
            (Filter::Bicubic, true) if BYTES => |x| cubic(x, -0.5, |value| value),
            (Filter::Bicubic, false) if BYTES => |x| cubic(x, -0.75, |value| value),
            (Filter::Bicubic, true) => |x| cubic(x, -0.5, |value| f64::from(value as f32)),
            (Filter::Bicubic, false) => |x| cubic(x, -0.75, |value| f64::from(value as f32)),
        };
        let reach = if filter == Filter::Bicubic { 2.0 } else { 1.0 };
        // Only with antialias does a place of a smaller image see all that lies between.
        let wider = if antialias { scale.max(1.0) } else { 1.0 };
        let (support, narrower) = (near(reach * wider), near(1.0 / wider));
        self.taps = from.min(2 * support.ceil() as usize + 1);
        self.starts.clear();
        self.exact.clear();
        self.exact.resize(self.taps * to, 0.0);
        let mut most = 0;
        for (place, weights) in self.exact.chunks_exact_mut(self.taps).enumerate() {
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
                    let first = middle.floor() as isize - reach as isize + 1;
                    let within = |at: isize| at.clamp(0, from as isize - 1) as usize;
                    let start = within(first);
                    for tap in 0..2 * reach as isize {
                        let far = near((tap + 1) as f64 - reach - behind);
                        weights[within(first + tap) - start] += near(kernel(far));
                    }
                    (start, within(first + 2 * reach as isize - 1) + 1 - start)
                }
            };
            self.starts.push(start);
            most = most.max(count);
        }
        self.narrow(most.max(1), from);
    }

    /// To so many taps, and none of them outside.
    fn narrow(&mut self, taps: usize, from: usize) {
        for (place, start) in self.starts.iter_mut().enumerate() {
            let (old, new) = (place * self.taps, place * taps);
            let moved = start.saturating_sub(from - taps);
            *start -= moved;
            // What is cut off is zero; a place's own weights lie at or behind where they go.
            self.exact.copy_within(old..old + taps - moved, new + moved);
            self.exact[new..new + moved].fill(0.0);
        }
        self.exact.truncate(taps * self.starts.len());
        self.taps = taps;
    }

    /// As torch does it: as precise as the largest fits 16 bits.
    fn make_whole(&mut self) {
        let largest = self.exact.iter().copied().fold(0.0, f64::max);
        let fits = |precision: &u32| {
            let next = 0.5 + largest * f64::from(1_u32 << (precision + 1));
            next < f64::from(1 << 15)
        };
        self.precision = (0..22).take_while(fits).count() as u32;
        let unit = f64::from(1_u32 << self.precision);
        self.whole.extend(self.exact.iter().map(|weight| (weight * unit).round() as i16));
    }

    fn make_blocks(&mut self, from: usize) {
        let (taps, count) = (self.taps, self.starts.len());
        if from < REACH {
            return;
        }
        for first in (0..self.room()).step_by(BLOCK) {
            for tap in (0..taps).step_by(2) {
                let mut block =
                    Block { weights: [0; 16], places: [0x80; 2 * REACH], bases: [0; 2] };
                for half in 0..2 {
                    let begin = first + half * BLOCK / 2;
                    let Some(base) = self.starts.get(begin) else { break };
                    let base = (base + tap).min(from - REACH);
                    block.bases[half] = base as u32;
                    for (at, place) in (begin..count.min(begin + BLOCK / 2)).enumerate() {
                        for of in 0..(taps - tap).min(2) {
                            let far = self.starts[place] + tap + of - base;
                            if far >= REACH {
                                self.blocks.clear();
                                return;
                            }
                            let to = half * BLOCK + 2 * at + of;
                            block.places[2 * to] = far as u8;
                            block.weights[to] = self.whole[place * taps + tap + of];
                        }
                    }
                }
                self.blocks.push(block);
            }
        }
    }
}

fn triangle(x: f64) -> f64 {
    (1.0 - x.abs()).max(0.0)
}

/// `near` rounds what one instruction gives.
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
        let mut weights = Weights::default();
        for (from, to) in [(1, 1), (1, 9), (2, 7), (9, 1), (7, 100), (100, 7), (31, 32), (64, 64)] {
            for (filter, antialias) in [
                (Filter::Bilinear, true),
                (Filter::Bilinear, false),
                (Filter::Bicubic, true),
                (Filter::Bicubic, false),
            ] {
                let sides = Sides { from, to, filter, antialias };
                weights.become_for(sides, false);
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
        let mut weights = Weights::default();
        for antialias in [false, true] {
            let sides = Sides { from: 9, to: 9, filter: Filter::Bicubic, antialias };
            weights.become_for(sides, true);
            for place in 0..9 {
                assert_eq!(weights.seen(&weights.whole, place), (place, &[1 << 14][..]));
            }
            assert_eq!(weights.precision, 14);
        }
    }

    #[test]
    fn blocks_are_the_same_sums() {
        let line: Vec<u8> = (0..700_usize).map(|at| (at * 37 % 251) as u8).collect();
        let mut weights = Weights::default();
        let mut gathered = 0;
        for (from, to) in [(16, 40), (17, 5), (200, 224), (224, 33), (700, 150), (700, 9), (9, 40)]
        {
            for filter in [Filter::Bilinear, Filter::Bicubic] {
                weights.become_for(Sides { from, to, filter, antialias: true }, true);
                let pairs = weights.taps.div_ceil(2);
                gathered += usize::from(!weights.blocks.is_empty());
                for (at, blocks) in weights.blocks.chunks_exact(pairs).enumerate() {
                    for place in at * BLOCK..(at + 1) * BLOCK {
                        let (half, of) = (place % BLOCK / 4, place % 4);
                        let mut sum = 0;
                        for block in blocks {
                            for word in half * BLOCK + 2 * of..half * BLOCK + 2 * of + 2 {
                                let far = block.places[2 * word];
                                let value = match far {
                                    0x80 => 0,
                                    _ => line[block.bases[half] as usize + usize::from(far)],
                                };
                                sum += i32::from(value) * i32::from(block.weights[word]);
                                assert_eq!(block.places[2 * word + 1], 0x80);
                            }
                        }
                        let wanted: i32 = match place < to {
                            true => {
                                let (first, seen) = weights.seen(&weights.whole, place);
                                let pairs = line[first..].iter().zip(seen);
                                pairs.map(|(value, of)| i32::from(*value) * i32::from(*of)).sum()
                            }
                            false => 0,
                        };
                        assert_eq!(sum, wanted, "{from} {to} {filter:?} {place}");
                    }
                }
            }
        }
        assert_eq!(gathered, 8, "those that lie near each other, and no others");
    }
}
