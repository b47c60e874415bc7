//! Brightness, contrast, saturation, hue, grey; each as torchvision calculates it for tensors, of bytes
//! and of float32, and as Pillow does for its images, which is not the same.
//!
//! Three rows of values at once: red, green and blue of some pixels.

use super::kernels::{Level, byte, kernel, sum};

/// Values of a channel: bytes, or numbers from 0 to 1.
trait Tone: Copy {
    fn number(self) -> f32;
    /// Of a number that may be out of range.
    fn clamped(number: f32) -> Self;
    /// What torchvision takes of a grey for the next calculation.
    fn grey(number: f32) -> f32;
    /// Of a pixel whose hue was turned: the largest of its values, less a part of what the smallest lacks.
    fn turned(most: f32, less: f32) -> Self;
}

impl Tone for u8 {
    #[inline(always)]
    fn number(self) -> f32 {
        f32::from(self)
    }
    #[inline(always)]
    fn clamped(number: f32) -> Self {
        byte(number)
    }
    #[inline(always)]
    fn grey(number: f32) -> f32 {
        f32::from(byte(number)) // the floor of it
    }
    #[inline(always)]
    fn turned(most: f32, less: f32) -> Self {
        // torchvision does it with numbers from 0 to 1, and makes bytes of them in its way.
        byte((most - less) * ((255.0_f64 + 1.0 - 1e-3) / 255.0) as f32)
    }
}

impl Tone for f32 {
    #[inline(always)]
    fn number(self) -> f32 {
        self
    }
    #[inline(always)]
    fn clamped(number: f32) -> Self {
        number.clamp(0.0, 1.0)
    }
    #[inline(always)]
    fn grey(number: f32) -> f32 {
        number
    }
    #[inline(always)]
    fn turned(most: f32, less: f32) -> Self {
        if less == 0.0 { most } else { (most - less).clamp(0.0, 1.0) }
    }
}

#[inline(always)]
fn grey_of<T: Tone, const FUSED: bool>(r: T, g: T, b: T) -> f32 {
    let grey = sum::<FUSED>(g.number(), 0.587, r.number() * 0.2989);
    T::grey(sum::<FUSED>(b.number(), 0.114, grey))
}

#[inline(always)]
fn brighten<T: Tone>(row: &mut [T], factor: f32) {
    row.iter_mut().for_each(|value| *value = T::clamped(value.number() * factor));
}

/// value × factor + rest, where rest is the other's share.
#[inline(always)]
fn towards<T: Tone, const FUSED: bool>(row: &mut [T], other: f32, factor: f32, share: f32) {
    for value in row {
        *value = T::clamped(sum::<FUSED>(other, share, value.number() * factor));
    }
}

#[inline(always)]
fn saturate<T: Tone, const FUSED: bool>(
    r: &mut [T],
    g: &mut [T],
    b: &mut [T],
    factor: f32,
    share: f32,
) {
    let len = r.len().min(g.len()).min(b.len());
    let (r, g, b) = (&mut r[..len], &mut g[..len], &mut b[..len]);
    for x in 0..len {
        let grey = grey_of::<T, FUSED>(r[x], g[x], b[x]);
        let blend = |value: T| T::clamped(sum::<FUSED>(grey, share, value.number() * factor));
        (r[x], g[x], b[x]) = (blend(r[x]), blend(g[x]), blend(b[x]));
    }
}

#[inline(always)]
fn greys<T: Tone, const FUSED: bool>(r: &[T], g: &[T], b: &[T], to: &mut [f32]) {
    let len = r.len().min(g.len()).min(b.len()).min(to.len());
    let (r, g, b, to) = (&r[..len], &g[..len], &b[..len], &mut to[..len]);
    for x in 0..len {
        to[x] = grey_of::<T, FUSED>(r[x], g[x], b[x]);
    }
}

/// What torchvision does by way of hue, saturation and value: with the hue in sixths of the circle, each
/// channel is the largest value of the pixel less a part of the range between it and the smallest, which
/// rises from 0 to 1 in one sixth, stays for two, and falls in one.
#[inline(always)]
fn turn<T: Tone>(r: &mut [T], g: &mut [T], b: &mut [T], hue: f32) {
    let len = r.len().min(g.len()).min(b.len());
    let (r, g, b) = (&mut r[..len], &mut g[..len], &mut b[..len]);
    let by = hue * 6.0;
    for x in 0..len {
        let (red, green, blue) = (r[x].number(), g[x].number(), b[x].number());
        let most = red.max(green).max(blue);
        let least = red.min(green).min(blue);
        let range = most - least;
        let (far, sixths) = if most == red {
            (green - blue, by)
        } else if most == green {
            (blue - red, by + 2.0)
        } else {
            (red - green, by + 4.0)
        };
        let sixths = sixths + far / if range == 0.0 { 1.0 } else { range };
        // From -4 to 8, and so one turn too many or too few at most.
        let sixths = if sixths < 0.0 { sixths + 6.0 } else { sixths };
        let sixths = if sixths >= 6.0 { sixths - 6.0 } else { sixths };
        let channel = |behind: f32| {
            let at = sixths + behind;
            let at = if at >= 6.0 { at - 6.0 } else { at };
            T::turned(most, range * at.min(4.0 - at).clamp(0.0, 1.0))
        };
        (r[x], g[x], b[x]) = (channel(5.0), channel(3.0), channel(1.0));
    }
}

kernel! { fn brighten_bytes<FUSED>(row: &mut [u8], factor: f32) { brighten(row, factor); } }
kernel! { fn brighten_floats<FUSED>(row: &mut [f32], factor: f32) { brighten(row, factor); } }
kernel! {
    fn bytes_towards<FUSED>(row: &mut [u8], other: f32, factor: f32, share: f32) {
        towards::<u8, FUSED>(row, other, factor, share);
    }
}
kernel! {
    fn floats_towards<FUSED>(row: &mut [f32], other: f32, factor: f32, share: f32) {
        towards::<f32, FUSED>(row, other, factor, share);
    }
}
kernel! {
    fn saturate_bytes<FUSED>(r: &mut [u8], g: &mut [u8], b: &mut [u8], factor: f32, share: f32) {
        saturate::<u8, FUSED>(r, g, b, factor, share);
    }
}
kernel! {
    fn saturate_floats<FUSED>(
        r: &mut [f32],
        g: &mut [f32],
        b: &mut [f32],
        factor: f32,
        share: f32,
    ) {
        saturate::<f32, FUSED>(r, g, b, factor, share);
    }
}
kernel! {
    fn greys_of_bytes<FUSED>(r: &[u8], g: &[u8], b: &[u8], to: &mut [f32]) {
        greys::<u8, FUSED>(r, g, b, to);
    }
}
kernel! {
    fn sum_of_bytes<FUSED>(values: &[u8]) -> u32 {
        values.iter().map(|&value| u32::from(value)).sum()
    }
}
kernel! {
    /// In many sums at once, which also lose less.
    fn sum_of_floats<FUSED>(values: &[f32]) -> f64 {
        let (whole, rest) = values.as_chunks::<16>();
        let mut sums = [0.0_f64; 16];
        for values in whole {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += f64::from(*value);
            }
        }
        sums.iter().sum::<f64>() + rest.iter().map(|&value| f64::from(value)).sum::<f64>()
    }
}
kernel! {
    fn sum_of_pillow_greys<FUSED>(r: &[u8], g: &[u8], b: &[u8]) -> u32 {
        let values = r.iter().zip(g).zip(b);
        values.map(|((r, g), b)| u32::from(pillow_grey(*r, *g, *b))).sum()
    }
}
kernel! {
    fn greys_of_floats<FUSED>(r: &[f32], g: &[f32], b: &[f32], to: &mut [f32]) {
        greys::<f32, FUSED>(r, g, b, to);
    }
}
kernel! {
    fn turn_bytes<FUSED>(r: &mut [u8], g: &mut [u8], b: &mut [u8], hue: f32) {
        turn(r, g, b, hue);
    }
}
kernel! {
    fn turn_floats<FUSED>(r: &mut [f32], g: &mut [f32], b: &mut [f32], hue: f32) {
        turn(r, g, b, hue);
    }
}
kernel! {
    /// Pillow's blend of bytes with one value.
    fn pillow_towards<FUSED>(row: &mut [u8], other: f32, factor: f32) {
        for value in row {
            *value = byte(other + factor * (f32::from(*value) - other));
        }
    }
}
kernel! {
    fn pillow_saturate<FUSED>(r: &mut [u8], g: &mut [u8], b: &mut [u8], factor: f32) {
        let len = r.len().min(g.len()).min(b.len());
        let (r, g, b) = (&mut r[..len], &mut g[..len], &mut b[..len]);
        for x in 0..len {
            let grey = f32::from(pillow_grey(r[x], g[x], b[x]));
            let blend = |value: u8| byte(grey + factor * (f32::from(value) - grey));
            (r[x], g[x], b[x]) = (blend(r[x]), blend(g[x]), blend(b[x]));
        }
    }
}

#[inline(always)]
fn pillow_grey(r: u8, g: u8, b: u8) -> u8 {
    ((u32::from(r) * 19595 + u32::from(g) * 38470 + u32::from(b) * 7471 + 0x8000) >> 16) as u8
}

/// Pillow's way through hue, saturation and value, each a byte.
fn pillow_turn([r, g, b]: [u8; 3], by: u8) -> [u8; 3] {
    let (most, least) = (r.max(g).max(b), r.min(g).min(b));
    let v = f64::from(most);
    if most == least {
        return [most; 3];
    }
    let range = f32::from(most - least);
    let s = range / f32::from(most);
    let far = |value: u8| f32::from(most - value) / range;
    let (rc, gc, bc) = (far(r), far(g), far(b));
    let h = if r == most {
        bc - gc
    } else if g == most {
        (2.0 + f64::from(rc) - f64::from(bc)) as f32
    } else {
        (4.0 + f64::from(gc) - f64::from(rc)) as f32
    };
    let h = ((f64::from(h) / 6.0 + 1.0) % 1.0) as f32;
    let h = (f64::from(h) * 255.0) as u8;
    let s = (f64::from(s) * 255.0) as u8;
    if s == 0 {
        return [most; 3];
    }
    let sixths = f64::from(h.wrapping_add(by)) * 6.0 / 255.0;
    let i = sixths.floor();
    let f = f64::from((sixths - i) as f32);
    let fs = f64::from((f64::from(s) / 255.0) as f32);
    let near = |value: f64| value.round().clamp(0.0, 255.0) as u8;
    let p = near(v * (1.0 - fs));
    let q = near(v * (1.0 - fs * f));
    let t = near(v * (1.0 - fs * (1.0 - f)));
    match i as u32 % 6 {
        0 => [most, t, p],
        1 => [q, most, p],
        2 => [p, most, t],
        3 => [p, q, most],
        4 => [t, p, most],
        _ => [most, p, q],
    }
}

/// An image, plane by plane: one, or three.
pub(super) enum Planes<'a> {
    Bytes(&'a mut [u8]),
    Floats(&'a mut [f32]),
}

/// Three planes of as many values.
fn three<T>(planes: &mut [T], len: usize) -> [&mut [T]; 3] {
    let (r, rest) = planes.split_at_mut(len);
    let (g, b) = rest.split_at_mut(len);
    [r, g, &mut b[..len]]
}

/// So many values of each channel at a time: they stay in the processor's nearest cache.
const AT_ONCE: usize = 2048;

/// For parts of three planes.
fn by_parts<T>(planes: &mut [T], len: usize, mut each: impl FnMut(&mut [T], &mut [T], &mut [T])) {
    let [r, g, b] = three(planes, len);
    let parts = r.chunks_mut(AT_ONCE).zip(g.chunks_mut(AT_ONCE)).zip(b.chunks_mut(AT_ONCE));
    parts.for_each(|((r, g), b)| each(r, g, b));
}

impl Planes<'_> {
    pub fn brightness(self, factor: f64, pil: bool, level: Level) {
        let factor = factor as f32;
        match self {
            Planes::Bytes(planes) if pil => pillow_towards(level, planes, 0.0, factor),
            Planes::Bytes(planes) => brighten_bytes(level, planes, factor),
            Planes::Floats(planes) => brighten_floats(level, planes, factor),
        }
    }

    /// Of planes of so many values.
    pub fn contrast(self, len: usize, factor: f64, pil: bool, level: Level) {
        let (narrow, share) = (factor as f32, (1.0 - factor) as f32);
        let mut greys = [0.0; AT_ONCE];
        let mut all = 0.0_f64;
        match self {
            Planes::Bytes(planes) => {
                if planes.len() == len {
                    all = planes
                        .chunks(AT_ONCE)
                        .map(|part| f64::from(sum_of_bytes(level, part)))
                        .sum();
                } else {
                    by_parts(planes, len, |r, g, b| {
                        if pil {
                            all += f64::from(sum_of_pillow_greys(level, r, g, b));
                        } else {
                            greys_of_bytes(level, r, g, b, &mut greys);
                            all += sum_of_floats(level, &greys[..r.len()]);
                        }
                    });
                }
                let mean = all / len as f64;
                match pil {
                    true => pillow_towards(level, planes, (mean + 0.5).floor() as f32, narrow),
                    false => bytes_towards(level, planes, mean as f32, narrow, share),
                }
            }
            Planes::Floats(planes) => {
                if planes.len() == len {
                    all = sum_of_floats(level, planes);
                } else {
                    by_parts(planes, len, |r, g, b| {
                        greys_of_floats(level, r, g, b, &mut greys);
                        all += sum_of_floats(level, &greys[..r.len()]);
                    });
                }
                floats_towards(level, planes, (all / len as f64) as f32, narrow, share);
            }
        }
    }

    /// Of three planes of so many values.
    pub fn saturation(self, len: usize, factor: f64, pil: bool, level: Level) {
        let (narrow, share) = (factor as f32, (1.0 - factor) as f32);
        match self {
            Planes::Bytes(planes) if pil => {
                by_parts(planes, len, |r, g, b| pillow_saturate(level, r, g, b, narrow));
            }
            Planes::Bytes(planes) => {
                by_parts(planes, len, |r, g, b| saturate_bytes(level, r, g, b, narrow, share));
            }
            Planes::Floats(planes) => {
                by_parts(planes, len, |r, g, b| saturate_floats(level, r, g, b, narrow, share));
            }
        }
    }

    /// Of three planes of so many values.
    pub fn hue(self, len: usize, factor: f64, pil: bool, level: Level) {
        match self {
            Planes::Bytes(planes) if pil => {
                let by = (factor * 255.0) as i32 as u8;
                by_parts(planes, len, |r, g, b| {
                    for ((r, g), b) in r.iter_mut().zip(g).zip(b) {
                        [*r, *g, *b] = pillow_turn([*r, *g, *b], by);
                    }
                });
            }
            Planes::Bytes(planes) => {
                by_parts(planes, len, |r, g, b| turn_bytes(level, r, g, b, factor as f32));
            }
            Planes::Floats(planes) => {
                by_parts(planes, len, |r, g, b| turn_floats(level, r, g, b, factor as f32));
            }
        }
    }

    /// The grey of three planes, into the first.
    pub fn grey(self, len: usize, pil: bool, level: Level) {
        let mut greys = [0.0; AT_ONCE];
        match self {
            Planes::Bytes(planes) => by_parts(planes, len, |r, g, b| {
                if pil {
                    for ((r, g), b) in r.iter_mut().zip(&*g).zip(&*b) {
                        *r = pillow_grey(*r, *g, *b);
                    }
                } else {
                    greys_of_bytes(level, r, g, b, &mut greys);
                    r.iter_mut().zip(greys).for_each(|(to, grey)| *to = byte(grey));
                }
            }),
            Planes::Floats(planes) => by_parts(planes, len, |r, g, b| {
                greys_of_floats(level, r, g, b, &mut greys);
                r.iter_mut().zip(greys).for_each(|(to, grey)| *to = grey);
            }),
        }
    }
}
