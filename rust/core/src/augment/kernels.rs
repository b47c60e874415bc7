//! Loops over rows, compiled for several processors and chosen at run time.
//!
//! They are plain Rust that the compiler vectorises: the same loop once for AVX-512, once for AVX2 with
//! FMA, and once for what every processor of the architecture has, which on AArch64 is NEON.
#![allow(unsafe_code)] // calls of functions compiled for what was found; conversions that are in range

use std::sync::OnceLock;

/// What the processor can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best that this processor has.
    pub fn here() -> Self {
        static FOUND: OnceLock<Level> = OnceLock::new();
        *FOUND.get_or_init(|| *Self::all().last().unwrap_or(&Level::Plain))
    }

    /// All that this processor has, the best last.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Level::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                all.push(Level::Avx2);
            }
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                all.push(Level::Avx512);
            }
        }
        all
    }

    /// Whether a product and a sum take one instruction and are rounded once.
    pub fn fuses(self) -> bool {
        self != Level::Plain || cfg!(target_arch = "aarch64")
    }
}

/// A function once for each level; `FUSED` says whether `sum` rounds once.
macro_rules! kernel {
    ($(#[$meta:meta])* fn $name:ident<$fused:ident>($($arg:ident: $kind:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code)] // calls of functions compiled for what was found
        pub(super) fn $name(level: Level, $($arg: $kind),*) {
            #[inline(always)]
            fn body<const $fused: bool>($($arg: $kind),*) $body
            match level {
                Level::Plain => body::<{ cfg!(target_arch = "aarch64") }>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => {
                    #[target_feature(enable = "avx2,fma,f16c")]
                    fn compiled($($arg: $kind),*) {
                        body::<true>($($arg),*);
                    }
                    // SAFETY: the processor has it, or there would be no such level.
                    unsafe { compiled($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => {
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                    fn compiled($($arg: $kind),*) {
                        body::<true>($($arg),*);
                    }
                    // SAFETY: as above.
                    unsafe { compiled($($arg),*) }
                }
            }
        }
    };
}
pub(super) use kernel;

/// a × b + c.
#[inline(always)]
pub(super) fn sum<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// The byte below a number, as torch makes it of what was clamped.
#[inline(always)]
pub(super) fn byte(value: f32) -> u8 {
    // Of what is no number, 0.
    let value = if value > 0.0 { value.min(255.0) } else { 0.0 };
    // SAFETY: from 0 to 255.
    unsafe { value.to_int_unchecked::<i32>() as u8 }
}

/// The nearest bfloat16, of two as near the even one; no number stays none.
#[inline(always)]
pub(super) fn to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    if value.is_nan() { 0x7fc0 } else { rounded }
}

kernel! {
    /// Pixels of three channels into three rows.
    fn split_pixels<FUSED>(from: &[u8], r: &mut [u8], g: &mut [u8], b: &mut [u8]) {
        let (pixels, _) = from.as_chunks::<3>();
        let len = pixels.len().min(r.len()).min(g.len()).min(b.len());
        let (pixels, r, g, b) = (&pixels[..len], &mut r[..len], &mut g[..len], &mut b[..len]);
        for x in 0..len {
            (r[x], g[x], b[x]) = (pixels[x][0], pixels[x][1], pixels[x][2]);
        }
    }
}

kernel! {
    /// Three rows into pixels.
    fn join_pixels<FUSED>(r: &[u8], g: &[u8], b: &[u8], to: &mut [u8]) {
        let (pixels, _) = to.as_chunks_mut::<3>();
        let len = pixels.len().min(r.len()).min(g.len()).min(b.len());
        let (pixels, r, g, b) = (&mut pixels[..len], &r[..len], &g[..len], &b[..len]);
        for x in 0..len {
            pixels[x] = [r[x], g[x], b[x]];
        }
    }
}

/// Coefficients of values one after the other: of one channel, or of three in turn.
pub(super) const TURN: usize = 48;
/// Scale and bias.
pub(super) type Lines = ([f32; TURN], [f32; TURN]);

/// Writes what a line makes of bytes.
macro_rules! lines {
    ($(#[$meta:meta])* $name:ident, $to:ty, $convert:expr) => {
        kernel! {
            $(#[$meta])*
            fn $name<FUSED>(from: &[u8], lines: &Lines, to: &mut [$to]) {
                let (scale, bias) = lines;
                let convert = $convert;
                let len = from.len().min(to.len());
                let (whole, rest) = from[..len].as_chunks::<TURN>();
                let (to_whole, to_rest) = to[..len].as_chunks_mut::<TURN>();
                for (from, to) in whole.iter().zip(to_whole) {
                    for x in 0..TURN {
                        to[x] = convert(sum::<FUSED>(f32::from(from[x]), scale[x], bias[x]));
                    }
                }
                for (x, (from, to)) in rest.iter().zip(to_rest).enumerate() {
                    *to = convert(sum::<FUSED>(f32::from(*from), scale[x], bias[x]));
                }
            }
        }
    };
}
lines!(
    /// As float32.
    lines_to_float, f32, |value: f32| value
);
lines!(
    /// As bfloat16.
    lines_to_bfloat16, u16, to_bfloat16
);
