//! The two passes of a resize: along lines, and across them.
#![allow(unsafe_code)] // calls of functions compiled for what was found, and loads of 16 bytes

use super::kernels::{Level, kernel, sum};
#[cfg(target_arch = "x86_64")]
use super::weights::{Block, Blocks};
use super::weights::{STEP, Weights};

/// A line of bytes in another size, and behind it up to the next `STEP` what nobody reads.
pub(super) fn along_bytes(level: Level, from: &[u8], weights: &Weights, to: &mut [u8]) {
    let Weights { starts, whole, taps, precision, .. } = weights;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: there are no such blocks unless the processor has the instructions for them.
    unsafe {
        let pairs = taps.div_ceil(2);
        match weights.blocks(level) {
            Blocks::Eight(blocks) => return eights(from, blocks, pairs, *precision, to),
            Blocks::Sixteen(blocks) => return sixteens(from, blocks, pairs, *precision, to),
            Blocks::None => {}
        }
    }
    summed_bytes(level, from, starts, whole, *taps, *precision, to);
}

/// Calls a function for a number of pairs that is known when it is compiled, or else for 0.
#[cfg(target_arch = "x86_64")]
macro_rules! by_pairs {
    ($name:ident($from:expr, $blocks:expr, $pairs:expr, $precision:expr, $to:expr)) => {
        match $pairs {
            1 => $name::<1>($from, $blocks, 1, $precision, $to),
            2 => $name::<2>($from, $blocks, 2, $precision, $to),
            pairs => $name::<0>($from, $blocks, pairs, $precision, $to),
        }
    };
}

/// The same by instructions that bring 16 bytes in any order, and multiply and add pairs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn eights(from: &[u8], blocks: &[Block<16>], pairs: usize, precision: u32, to: &mut [u8]) {
    by_pairs!(eights_by(from, blocks, pairs, precision, to));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn eights_by<const PAIRS: usize>(
    from: &[u8],
    blocks: &[Block<16>],
    pairs: usize,
    precision: u32,
    to: &mut [u8],
) {
    use std::arch::x86_64::*;
    let pairs = if PAIRS == 0 { pairs } else { PAIRS };
    let half = _mm256_set1_epi32(1 << precision >> 1);
    let shift = _mm_cvtsi32_si128(precision as i32);
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let last = from.len() - 16;
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

/// The same by instructions that bring 64 bytes in any order.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn sixteens(from: &[u8], blocks: &[Block<32>], pairs: usize, precision: u32, to: &mut [u8]) {
    by_pairs!(sixteens_by(from, blocks, pairs, precision, to));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn sixteens_by<const PAIRS: usize>(
    from: &[u8],
    blocks: &[Block<32>],
    pairs: usize,
    precision: u32,
    to: &mut [u8],
) {
    use std::arch::x86_64::*;
    const LOWER: u64 = u64::MAX / 3; // of every two bytes
    let pairs = if PAIRS == 0 { pairs } else { PAIRS };
    let half = _mm512_set1_epi32(1 << precision >> 1);
    let shift = _mm_cvtsi32_si128(precision as i32);
    let last = from.len() - 64;
    let (steps, _) = to.as_chunks_mut::<16>();
    for (blocks, to) in blocks.chunks_exact(pairs).zip(steps) {
        let mut sum = half;
        for block in blocks {
            let base = block.bases[0] as usize;
            assert!(base <= last);
            // SAFETY: 64 bytes from there are within the line; a block is 64 bytes of each.
            let (bytes, places, weights) = unsafe {
                (
                    _mm512_loadu_si512(from.as_ptr().add(base).cast()),
                    _mm512_loadu_si512(block.places.as_ptr().cast()),
                    _mm512_loadu_si512(block.weights.as_ptr().cast()),
                )
            };
            let pairs = _mm512_maskz_permutexvar_epi8(LOWER, places, bytes);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, weights));
        }
        let made = _mm512_max_epi32(_mm512_sra_epi32(sum, shift), _mm512_setzero_si512());
        // SAFETY: 16 bytes.
        unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtusepi32_epi8(made)) };
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
        match weights.len() {
            1 => few_lines::<1>(lines, room, weights, precision, to),
            2 => few_lines::<2>(lines, room, weights, precision, to),
            3 => few_lines::<3>(lines, room, weights, precision, to),
            4 => few_lines::<4>(lines, room, weights, precision, to),
            5 => few_lines::<5>(lines, room, weights, precision, to),
            6 => few_lines::<6>(lines, room, weights, precision, to),
            _ => many_lines(lines, room, weights, precision, to),
        }
    }
}

/// Weights are of about one in all, so what is made of bytes fits 16 bits.
#[inline(always)]
fn to_byte(sum: i32, precision: u32) -> u8 {
    ((sum >> precision) as i16).clamp(0, 255) as u8
}

/// One loop over all lines, which a compiler sees through.
#[inline(always)]
fn few_lines<const COUNT: usize>(
    lines: &[u8],
    room: usize,
    weights: &[i16],
    precision: u32,
    to: &mut [u8],
) {
    let len = to.len();
    let lines: [&[u8]; COUNT] = std::array::from_fn(|line| &lines[line * room..][..len]);
    let weights: [i16; COUNT] = std::array::from_fn(|line| weights[line]);
    for x in 0..len {
        let mut sum = 1_i32 << precision >> 1;
        for line in 0..COUNT {
            sum += i32::from(i16::from(lines[line][x])) * i32::from(weights[line]);
        }
        to[x] = to_byte(sum, precision);
    }
}

#[inline(always)]
fn many_lines(lines: &[u8], room: usize, weights: &[i16], precision: u32, to: &mut [u8]) {
    const AT_ONCE: usize = 512;
    for (part, to) in to.chunks_mut(AT_ONCE).enumerate() {
        let mut sums = [1_i32 << precision >> 1; AT_ONCE];
        let sums = &mut sums[..to.len()];
        for (line, weight) in lines.chunks_exact(room).zip(weights) {
            let line = &line[part * AT_ONCE..][..sums.len()];
            for (sum, value) in sums.iter_mut().zip(line) {
                *sum += i32::from(i16::from(*value)) * i32::from(*weight);
            }
        }
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to = to_byte(*sum, precision));
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
        to.fill(0.0);
        for (line, weight) in lines.chunks_exact(room).zip(weights) {
            for (to, value) in to.iter_mut().zip(line) {
                *to = sum::<FUSED>(*value, *weight, *to);
            }
        }
    }
}
