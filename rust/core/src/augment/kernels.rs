//! Loops over rows, compiled for several processors and chosen at run time.
//!
//! They are plain Rust that the compiler vectorises: the same loop once for AVX-512, once for AVX2 with
//! FMA, and once for what every processor of the architecture has, which on AArch64 is NEON.
#![allow(unsafe_code)] // calls of functions compiled for what was found; conversions that are in range

use std::sync::OnceLock;

/// What the processor can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Level {
    #[default]
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// And shuffles of 64 bytes.
    #[cfg(target_arch = "x86_64")]
    Vbmi,
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
                if is_x86_feature_detected!("avx512vbmi") {
                    all.push(Level::Vbmi);
                }
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
    (
        $(#[$meta:meta])*
        fn $name:ident<$fused:ident>($($arg:ident: $kind:ty),* $(,)?) $(-> $made:ty)? $body:block
    ) => {
        $(#[$meta])*
        #[allow(unsafe_code)] // calls of functions compiled for what was found
        pub(super) fn $name(level: Level, $($arg: $kind),*) $(-> $made)? {
            #[inline(always)]
            fn body<const $fused: bool>($($arg: $kind),*) $(-> $made)? $body
            match level {
                Level::Plain => body::<{ cfg!(target_arch = "aarch64") }>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => {
                    #[target_feature(enable = "avx2,fma,f16c")]
                    fn compiled($($arg: $kind),*) $(-> $made)? {
                        body::<true>($($arg),*)
                    }
                    // SAFETY: the processor has it, or there would be no such level.
                    unsafe { compiled($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Vbmi => {
                    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                    fn compiled($($arg: $kind),*) $(-> $made)? {
                        body::<true>($($arg),*)
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
    if value.is_nan() { 0x7fc0 } else { number_to_bfloat16(value) }
}

/// The same of a number.
#[inline(always)]
fn number_to_bfloat16(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

kernel! {
    /// Pixels of three channels into three rows, the last pixel first if they are mirrored.
    fn split_pixels<FUSED>(from: &[u8], mirrored: bool, r: &mut [u8], g: &mut [u8], b: &mut [u8]) {
        let (pixels, _) = from.as_chunks::<3>();
        let len = pixels.len().min(r.len()).min(g.len()).min(b.len());
        let (pixels, r, g, b) = (&pixels[..len], &mut r[..len], &mut g[..len], &mut b[..len]);
        if mirrored {
            for x in 0..len {
                let pixel = pixels[len - 1 - x];
                (r[x], g[x], b[x]) = (pixel[0], pixel[1], pixel[2]);
            }
        } else {
            for x in 0..len {
                (r[x], g[x], b[x]) = (pixels[x][0], pixels[x][1], pixels[x][2]);
            }
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

/// Values in their order, or the last first.
macro_rules! each_value {
    ($from:ident, $mirrored:ident, $to:ident, $convert:expr) => {{
        let convert = $convert;
        if $mirrored {
            $to.iter_mut().zip($from.iter().rev()).for_each(|(to, from)| *to = convert(*from));
        } else {
            $to.iter_mut().zip($from).for_each(|(to, from)| *to = convert(*from));
        }
    }};
}

kernel! {
    /// Bytes as they are.
    fn copy_bytes<FUSED>(from: &[u8], mirrored: bool, to: &mut [u8]) {
        each_value!(from, mirrored, to, |value| value);
    }
}

kernel! {
    /// Values of four bytes as they are.
    fn copy_words<FUSED>(from: &[[u8; 4]], mirrored: bool, to: &mut [[u8; 4]]) {
        each_value!(from, mirrored, to, |value: [u8; 4]| value);
    }
}

kernel! {
    /// Pixels of three channels, the last first.
    fn mirror_pixels<FUSED>(from: &[[u8; 3]], to: &mut [[u8; 3]]) {
        to.iter_mut().zip(from.iter().rev()).for_each(|(to, from)| *to = *from);
    }
}

/// Scale and bias.
pub(super) type Line = (f32, f32);
/// So many values one after the other are of channels in turn.
pub(super) const TURN: usize = 48;
/// Scale and bias of each of a turn.
pub(super) type Turn = ([f32; TURN], [f32; TURN]);

/// Writes what lines make of bytes.
macro_rules! lines {
    ($(#[$meta:meta])* $of_channel:ident, $of_pixels:ident, $to:ty, $convert:expr) => {
        kernel! {
            $(#[$meta])*
            fn $of_channel<FUSED>(from: &[u8], line: Line, mirrored: bool, to: &mut [$to]) {
                let (scale, bias) = line;
                let round = $convert;
                let convert = |from: u8| round(sum::<FUSED>(f32::from(from), scale, bias));
                each_value!(from, mirrored, to, convert);
            }
        }
        kernel! {
            /// The same of the channels of pixels in turn.
            fn $of_pixels<FUSED>(from: &[u8], turn: &Turn, to: &mut [$to]) {
                let (scale, bias) = turn;
                let round = $convert;
                let len = from.len().min(to.len());
                let (whole, rest) = from[..len].as_chunks::<TURN>();
                let (to_whole, to_rest) = to[..len].as_chunks_mut::<TURN>();
                for (from, to) in whole.iter().zip(to_whole) {
                    for x in 0..TURN {
                        to[x] = round(sum::<FUSED>(f32::from(from[x]), scale[x], bias[x]));
                    }
                }
                for (x, (from, to)) in rest.iter().zip(to_rest).enumerate() {
                    *to = round(sum::<FUSED>(f32::from(*from), scale[x], bias[x]));
                }
            }
        }
    };
}
lines!(
    /// As float32.
    line_to_float, pixels_to_float, f32, |value: f32| value
);
lines!(
    /// As bfloat16. A line that leads to what is no number is no recipe.
    line_to_bfloat16, pixels_to_bfloat16, u16, number_to_bfloat16
);
