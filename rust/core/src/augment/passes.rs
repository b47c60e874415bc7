//! The two passes of a resize: along lines, and across them.
#![allow(unsafe_code)] // calls of functions compiled for what was found, and loads of 16 bytes

use super::kernels::{Level, kernel, sum};
#[cfg(target_arch = "x86_64")]
use super::weights::{Block, REACH};
use super::weights::{STEP, Weights};

/// A line of bytes in another size, and behind it up to the next `STEP` what nobody reads.
pub(super) fn along_bytes(level: Level, from: &[u8], weights: &Weights, to: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if level != Level::Plain && !weights.blocks.is_empty() {
        let (taps, precision) = (weights.taps, weights.precision);
        // SAFETY: the processor has it, or there would be no such level.
        unsafe { gathered(from, &weights.blocks, taps.div_ceil(2), precision, to) };
        return;
    }
    let Weights { starts, whole, taps, precision, .. } = weights;
    summed_bytes(level, from, starts, whole, *taps, *precision, to);
}

/// The same by instructions that bring 16 bytes in any order, and multiply and add pairs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn gathered(from: &[u8], blocks: &[Block], pairs: usize, precision: u32, to: &mut [u8]) {
    match pairs {
        1 => gathered_by::<1>(from, blocks, pairs, precision, to),
        2 => gathered_by::<2>(from, blocks, pairs, precision, to),
        _ => gathered_by::<0>(from, blocks, pairs, precision, to),
    }
}

/// `PAIRS` is `pairs`, where that is known when this is compiled, or else 0.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn gathered_by<const PAIRS: usize>(
    from: &[u8],
    blocks: &[Block],
    pairs: usize,
    precision: u32,
    to: &mut [u8],
) {
    use std::arch::x86_64::*;
    let pairs = if PAIRS == 0 { pairs } else { PAIRS };
    let half = _mm256_set1_epi32(1 << precision >> 1);
    let shift = _mm_cvtsi32_si128(precision as i32);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let last = from.len() - REACH;
    let (steps, _) = to.as_chunks_mut::<STEP>();
    for (blocks, to) in blocks.chunks_exact(4 * pairs).zip(steps) {
        let mut sums = [half; 4];
        for (blocks, sum) in blocks.chunks_exact(pairs).zip(&mut sums) {
            for block in blocks {
                let bases = block.bases.map(|base| base as usize);
                assert!(bases[0] <= last && bases[1] <= last);
                // SAFETY: 16 bytes from there are within the line; a block is 32 bytes of each.
                let (bytes, places, weights) = unsafe {
                    let low = _mm_loadu_si128(from.as_ptr().add(bases[0]).cast());
                    let high = _mm_loadu_si128(from.as_ptr().add(bases[1]).cast());
                    (
                        _mm256_set_m128i(high, low),
                        _mm256_loadu_si256(block.places.as_ptr().cast()),
                        _mm256_loadu_si256(block.weights.as_ptr().cast()),
                    )
                };
                let pairs = _mm256_shuffle_epi8(bytes, places);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, weights));
            }
        }
        for sum in &mut sums {
            *sum = _mm256_sra_epi32(*sum, shift);
        }
        let low = _mm256_packs_epi32(sums[0], sums[1]);
        let high = _mm256_packs_epi32(sums[2], sums[3]);
        let made = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        // SAFETY: 32 bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), made) };
    }
}

kernel! {
    fn summed_bytes<FUSED>(
        from: &[u8], starts: &[usize], weights: &[i16], taps: usize, precision: u32, to: &mut [u8],
    ) {
        for ((start, weights), to) in starts.iter().zip(weights.chunks_exact(taps)).zip(to) {
            let values = from[*start..start + taps].iter().zip(weights);
            let made: i32 = values.map(|(value, weight)| i32::from(*value) * i32::from(*weight)).sum();
            *to = ((made + (1 << precision >> 1)) >> precision).clamp(0, 255) as u8;
        }
    }
}

kernel! {
    /// The sum of lines that lie `room` bytes apart, one for each weight.
    fn across_bytes<FUSED>(
        lines: &[u8], room: usize, weights: &[i16], precision: u32, to: &mut [u8],
    ) {
        for (step, to) in to.chunks_mut(STEP).enumerate() {
            let mut sums = [1_i32 << precision >> 1; STEP];
            for (line, weight) in lines.chunks_exact(room).zip(weights) {
                let (steps, _) = line.as_chunks::<STEP>();
                let (line, weight) = (&steps[step], i32::from(*weight));
                for x in 0..STEP {
                    sums[x] += i32::from(line[x]) * weight;
                }
            }
            let write = |(to, sum): (&mut u8, &i32)| *to = (sum >> precision).clamp(0, 255) as u8;
            match to.first_chunk_mut::<STEP>() {
                // Of a length that is known, it is a few instructions.
                Some(to) => to.iter_mut().zip(&sums).for_each(write),
                None => to.iter_mut().zip(&sums).for_each(write),
            }
        }
    }
}

kernel! {
    /// A line of numbers in another size.
    fn along_numbers<FUSED>(
        from: &[f32], starts: &[usize], weights: &[f32], taps: usize, to: &mut [f32],
    ) {
        for ((start, weights), to) in starts.iter().zip(weights.chunks_exact(taps)).zip(to) {
            let values = from[*start..start + taps].iter().zip(weights);
            *to = values.fold(0.0, |so_far, (value, weight)| sum::<FUSED>(*value, *weight, so_far));
        }
    }
}

kernel! {
    /// The sum of lines that lie `room` numbers apart, one for each weight.
    fn across_numbers<FUSED>(lines: &[f32], room: usize, weights: &[f32], to: &mut [f32]) {
        for (step, to) in to.chunks_mut(STEP).enumerate() {
            let mut sums = [0.0_f32; STEP];
            for (line, weight) in lines.chunks_exact(room).zip(weights) {
                let (steps, _) = line.as_chunks::<STEP>();
                for x in 0..STEP {
                    sums[x] = sum::<FUSED>(steps[step][x], *weight, sums[x]);
                }
            }
            to.copy_from_slice(&sums[..to.len()]);
        }
    }
}
