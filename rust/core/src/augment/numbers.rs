//! Random numbers as a function of (seed, epoch, index), and of the step that draws them.
//!
//! There is no stream: what one row gets depends on no other row, nor on who augments it and when. Each
//! step has numbers of its own, so a step more or less does not change what the others draw.

use crate::fault::{Fault, active};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// What the parameters of a row are a function of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Number {
    /// Of the run.
    pub seed: u64,
    /// How often the dataset was gone through.
    pub epoch: u64,
    /// Of the sample in its dataset.
    pub index: u64,
}

/// The numbers of one step for one row.
pub(super) struct Draws {
    key: u64,
    drawn: u64,
}

impl Draws {
    pub fn new(number: Number, step: u64) -> Self {
        let epoch = if active(Fault::ForgetAugmentationEpoch) { 0 } else { number.epoch };
        let mut bytes = [0; 24];
        for (word, value) in bytes.chunks_exact_mut(8).zip([epoch, number.index, step]) {
            word.copy_from_slice(&value.to_le_bytes());
        }
        Self { key: xxh3_64_with_seed(&bytes, number.seed), drawn: 0 }
    }

    /// Steele, Lea and Flood's SplitMix64 at a place of its sequence.
    pub fn word(&mut self) -> u64 {
        self.drawn += 1;
        word_at(self.key, self.drawn)
    }

    /// From 0 up to, not including, 1.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }

    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// One of 0 .. `count`; 0 if there is none.
    pub fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.word()) * u128::from(count)) >> 64) as u64
    }

    /// Whether something of that probability happens: as `torch.rand(1) < p`.
    pub fn happens(&mut self, p: f64) -> bool {
        self.unit() < p
    }
}

pub(super) fn word_at(key: u64, place: u64) -> u64 {
    let mut z = key.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A number of the normal distribution: the one at that place of what `key` stands for.
pub(super) fn normal_at(key: u64, place: u64) -> f32 {
    let word = word_at(key, place);
    // Box and Muller's: two uniform numbers, of which the first is never 0.
    let first = ((word >> 32) as f64 + 0.5) * (1.0 / 4_294_967_296.0);
    let second = (word as u32) as f64 * (1.0 / 4_294_967_296.0);
    ((-2.0 * first.ln()).sqrt() * (std::f64::consts::TAU * second).cos()) as f32
}
