//! The room as a whole: pipelines on images of every kind, against a plain calculation of each value.
#![allow(unsafe_code)] // rows are raw memory

use super::apply::Scratch;
use super::image::{Image, Shape};
use super::kernels::Level;
use super::numbers::{Draws, Number, normal_at};
use super::pipeline::Pipeline;
use crate::error::{Kind, Result};
use crate::sys::stores::Stores;
use proptest::prelude::*;
use std::sync::Arc;

const FLIP: &str = r#"{"step": "RandomHorizontalFlip", "p": 0.5}"#;
const TURN: &str = r#"{"step": "RandomVerticalFlip", "p": 0.5}"#;
const FLOAT: &str = r#"{"step": "ToDtype", "dtype": "float32", "scale": true}"#;
const MEANS: &str =
    r#"{"step": "Normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}"#;
const IMAGE: &str = r#"{"step": "ToImage"}"#;

fn crop(size: u32) -> String {
    format!(
        r#"{{"step": "RandomCrop", "size": [{size}, {size}], "padding": null, "pad_if_needed": false,
            "fill": [0], "mask_fill": 0, "padding_mode": "constant"}}"#
    )
}

fn described(steps: &[&str], more: &str) -> Result<Pipeline> {
    let more = if more.is_empty() { r#""dtype": null, "channels_last": false"# } else { more };
    Pipeline::parse(&format!(r#"{{"steps": [{}], {more}}}"#, steps.join(", ")))
}

fn shape(channels: u32, height: u32, width: u32) -> Shape {
    let (dtype, interleaved, pil, array) = (0, false, false, false);
    Shape { channels, height, width, dtype, interleaved, pil, array }
}

fn number(index: u64) -> Number {
    Number { seed: 7, epoch: 3, index }
}

/// Bytes that depend on their place.
fn bytes_of(shape: &Shape) -> Vec<u8> {
    let count = shape.channels * shape.height * shape.width;
    (0..count).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// The same values, pixel by pixel.
fn interleaved(shape: &Shape, planes: &[u8]) -> Vec<u8> {
    let (channels, pixels) = (shape.channels as usize, (shape.height * shape.width) as usize);
    (0..planes.len()).map(|place| planes[place % channels * pixels + place / channels]).collect()
}

/// A row, as bytes, which is the same however it is stored; its memory ends where it does.
fn row(
    pipeline: &Pipeline,
    shape: &Shape,
    bytes: &[u8],
    index: u64,
    level: Level,
) -> Result<Vec<u8>> {
    let output = pipeline.output(shape)?;
    let drawn = pipeline.draw(number(index), shape)?;
    let image = Image { data: bytes.as_ptr(), shape: *shape };
    let stored = |stores| {
        let mut words = vec![0_u64; output.bytes.div_ceil(8)];
        let to = words.as_mut_ptr().cast::<u8>();
        // SAFETY: the image is all of these bytes, and the row fits.
        unsafe { pipeline.apply(&drawn, image, to, stores, &mut Scratch::at(level))? };
        // SAFETY: the row, which was written.
        Ok(unsafe { std::slice::from_raw_parts(to, output.bytes) }.to_vec())
    };
    let row = stored(Stores::Cached)?;
    assert_eq!(row, stored(Stores::Streamed)?);
    Ok(row)
}

fn floats(row: &[u8]) -> Vec<f32> {
    let (values, _) = row.as_chunks();
    values.iter().map(|value| f32::from_ne_bytes(*value)).collect()
}

fn best(pipeline: &Pipeline, shape: &Shape, bytes: &[u8], index: u64) -> Vec<u8> {
    row(pipeline, shape, bytes, index, Level::here()).unwrap()
}

#[test]
fn a_crop_that_is_flipped_and_normalised_is_what_each_value_says() {
    let pipeline = described(&[&crop(5), FLIP, TURN, FLOAT, MEANS], "").unwrap();
    let image = shape(3, 9, 8);
    let bytes = bytes_of(&image);
    let (mean, std) = ([0.485_f32, 0.456, 0.406], [0.229_f32, 0.224, 0.225]);
    let mut seen = std::collections::HashSet::new();
    for index in 0..64 {
        let told = pipeline.draw(number(index), &image).unwrap().describe();
        seen.insert((told.contains("horizontal"), told.contains("vertical")));
        let crop = told.split_once("\"top\":").unwrap().1;
        let numbers: Vec<usize> = crop
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse().ok())
            .take(2)
            .collect();
        let made = floats(&best(&pipeline, &image, &bytes, index));
        for (place, made) in made.into_iter().enumerate() {
            let (channel, y, x) = (place / 25, place / 5 % 5, place % 5);
            let y = if told.contains("vertical") { 4 - y } else { y } + numbers[0];
            let x = if told.contains("horizontal") { 4 - x } else { x } + numbers[1];
            let value = f32::from(bytes[channel * 72 + y * 8 + x]) * (1.0 / 255.0_f64) as f32;
            let wanted = (value - mean[channel]) / std[channel];
            assert!((made - wanted).abs() < 1e-6, "{index} {place}: {made} is not {wanted}");
        }
    }
    assert_eq!(seen.len(), 4, "every pair of flips came");
}

#[test]
fn every_level_of_the_processor_makes_the_same() {
    let jitter = r#"{"step": "ColorJitter", "brightness": [0.6, 1.4], "contrast": [0.6, 1.4],
                     "saturation": [0.6, 1.4], "hue": [-0.1, 0.1]}"#;
    let part = r#"{"step": "RandomResizedCrop", "size": [21, 19], "scale": [0.1, 1.0],
                   "ratio": [0.75, 1.3333], "filter": "bilinear", "antialias": true}"#;
    let image = Shape { interleaved: true, ..shape(3, 40, 37) };
    let bytes = bytes_of(&image);
    for (steps, more) in [
        (vec![&*crop(30), FLIP, FLOAT, MEANS], ""),
        (vec![part, FLIP, FLOAT, MEANS], r#""dtype": "bfloat16", "channels_last": true"#),
        (vec![part, jitter], ""),
        (vec![FLOAT, jitter], r#""dtype": "float16", "channels_last": false"#),
    ] {
        let pipeline = described(&steps, more).unwrap();
        let dtype = pipeline.output(&image).unwrap().dtype;
        for index in 0..8 {
            let made = best(&pipeline, &image, &bytes, index);
            for level in Level::all() {
                let other = row(&pipeline, &image, &bytes, index, level).unwrap();
                // Sums that are rounded once or twice: a level of bytes, or the last bits.
                let near = match dtype {
                    0 => made.iter().zip(&other).all(|(a, b)| a.abs_diff(*b) <= 3),
                    6 => {
                        floats(&made).iter().zip(floats(&other)).all(|(a, b)| (a - b).abs() < 1e-6)
                    }
                    _ => {
                        let words = |bytes: &[u8]| -> Vec<u16> {
                            let (words, _) = bytes.as_chunks();
                            words.iter().map(|word| u16::from_ne_bytes(*word)).collect()
                        };
                        let pairs = words(&made).into_iter().zip(words(&other));
                        let far = pairs.filter(|(a, b)| a.abs_diff(*b) > 2).count();
                        far * 100 <= made.len()
                    }
                };
                assert!(near, "{steps:?} {level:?} differs at {index}");
            }
        }
    }
}

/// A side of bytes in another size, of lines that are so far apart: summed as torch's formula says.
fn resized_side(bytes: &[u8], (from, to, apart): (usize, usize, usize), sharp: bool) -> Vec<u8> {
    let scale = from as f64 / to as f64;
    let wider = scale.max(1.0);
    let reach = wider * if sharp { 2.0 } else { 1.0 };
    let of = |x: f64| match (x.abs(), sharp) {
        (x, false) => (1.0 - x).max(0.0),
        (x, true) if x < 1.0 => 1.5 * x.powi(3) - 2.5 * x * x + 1.0,
        (x, true) if x < 2.0 => -0.5 * x.powi(3) + 2.5 * x * x - 4.0 * x + 2.0,
        _ => 0.0,
    };
    let mut made = vec![0; bytes.len() / from * to];
    for (place, made) in made.iter_mut().enumerate() {
        let (before, at, beside) = (place / apart / to, place / apart % to, place % apart);
        let centre = (at as f64 + 0.5) * scale;
        let (mut sum, mut total) = (0.0, 0.0);
        for source in 0..from {
            let far = source as f64 + 0.5 - centre;
            if far.abs() <= reach {
                let value = bytes[(before * from + source) * apart + beside];
                sum += of(far / wider) * f64::from(value);
                total += of(far / wider);
            }
        }
        *made = (sum / total).round().clamp(0.0, 255.0) as u8;
    }
    made
}

#[test]
fn every_level_of_the_processor_resizes_alike() {
    for (channels, height, width, high, wide) in [
        (3, 40, 37, 21, 19),
        (3, 17, 200, 40, 224),
        (3, 5, 16, 33, 70),
        (3, 7, 9, 3, 12),
        (1, 60, 300, 20, 90), // in two halves of a block
        (2, 9, 400, 5, 11),   // too far apart for a block
        (4, 1, 1, 5, 5),
    ] {
        let plain = shape(channels, height, width);
        let bytes = bytes_of(&plain);
        let mixed = Shape { interleaved: true, ..plain };
        let pixels = interleaved(&plain, &bytes);
        for (filter, sharp) in [("bilinear", false), ("bicubic", true)] {
            let step = format!(
                r#"{{"step": "Resize", "size": [{high}, {wide}], "max_size": null,
                    "filter": "{filter}", "antialias": true}}"#
            );
            let pipeline = described(&[&step], "").unwrap();
            let [from, to, height, high] = [width, wide, height, high].map(|side| side as usize);
            let along = resized_side(&bytes, (from, to, 1), sharp);
            let wanted = resized_side(&along, (height, high, to), sharp);
            for level in Level::all() {
                let made = row(&pipeline, &plain, &bytes, 0, level).unwrap();
                assert_eq!(made, row(&pipeline, &mixed, &pixels, 0, level).unwrap());
                assert_eq!(made, best(&pipeline, &plain, &bytes, 0), "{level:?} {step}");
                assert_eq!(made.len(), wanted.len());
                let far = made.iter().zip(&wanted).map(|(a, b)| a.abs_diff(*b)).max();
                assert!(far <= Some(1), "{level:?} {from} {height} {step}: {far:?}");
            }
        }
    }
}

#[test]
fn planes_and_pixels_come_to_the_same() {
    let pad = r#"{"step": "Pad", "padding": [2, 1, 0, 3], "fill": [9], "mask_fill": null,
                  "padding_mode": "reflect"}"#;
    let grey = r#"{"step": "RandomGrayscale", "p": 0.5}"#;
    let erase = r#"{"step": "RandomErasing", "p": 0.7, "scale": [0.1, 0.4], "ratio": [0.5, 2.0],
                    "value": [1, 2, 3]}"#;
    for steps in [
        vec![&*crop(6), FLIP, TURN],
        vec![pad, &*crop(7), grey, FLIP],
        vec![erase, FLIP, FLOAT, MEANS],
        vec![FLOAT, MEANS, erase, TURN],
    ] {
        for (channels, last) in [(3, false), (3, true)] {
            let more = format!(r#""dtype": null, "channels_last": {last}"#);
            let pipeline = described(&steps, &more).unwrap();
            let plain = shape(channels, 11, 10);
            let mixed = Shape { interleaved: true, ..plain };
            let bytes = bytes_of(&plain);
            let pixels = interleaved(&plain, &bytes);
            for index in 0..16 {
                let one = best(&pipeline, &plain, &bytes, index);
                assert_eq!(one, best(&pipeline, &mixed, &pixels, index), "{steps:?} {index}");
            }
            let output = pipeline.output(&plain).unwrap();
            assert_eq!(output.channels_last, last);
        }
    }
}

#[test]
fn channels_last_is_the_same_values_in_another_order() {
    let image = shape(3, 9, 7);
    let bytes = bytes_of(&image);
    let steps = [&*crop(5), FLIP];
    let planes = described(&steps, "").unwrap();
    let pixels = described(&steps, r#""dtype": null, "channels_last": true"#).unwrap();
    for index in 0..8 {
        let wanted = interleaved(&shape(3, 5, 5), &best(&planes, &image, &bytes, index));
        assert_eq!(best(&pixels, &image, &bytes, index), wanted);
    }
}

#[test]
fn pixels_of_any_number_of_channels_have_the_means_of_their_channels() {
    for channels in (1_u32..20).chain([47, 48, 49, 60]) {
        let numbers = |from: f64| -> Vec<f64> {
            (0..channels).map(|channel| from + f64::from(channel) / 8.0).collect()
        };
        let (mean, std) = (numbers(0.1), numbers(1.0));
        let means = format!(r#"{{"step": "Normalize", "mean": {mean:?}, "std": {std:?}}}"#);
        for dtype in ["null", r#""bfloat16""#, r#""float16""#] {
            let made = |last: bool| {
                let more = format!(r#""dtype": {dtype}, "channels_last": {last}"#);
                let pipeline = described(&[&crop(11), FLIP, FLOAT, &means], &more).unwrap();
                let image = shape(channels, 13, 17);
                let output = pipeline.output(&image).unwrap();
                (best(&pipeline, &image, &bytes_of(&image), 5), output)
            };
            let ((planes, output), (pixels, _)) = (made(false), made(true));
            let (channels, item) = (channels as usize, output.bytes / (channels as usize * 121));
            let values = planes.chunks_exact(item).enumerate();
            for (place, value) in values {
                let at = (place % 121 * channels + place / 121) * item;
                assert_eq!(&pixels[at..at + item], value, "{channels} {dtype} {place}");
            }
        }
    }
}

#[test]
fn sides_that_do_not_fit_their_numbers_are_too_large() {
    let wide = shape(1, 1, 1 << 20);
    let resize = |size: u32| {
        format!(
            r#"{{"step": "Resize", "size": [{size}], "max_size": null, "filter": "bilinear",
                "antialias": true}}"#
        )
    };
    let padded = |side: u32| {
        format!(
            r#"{{"step": "RandomCrop", "size": [4, 4], "padding": [{side}, {side}, {side}, {side}],
                "pad_if_needed": false, "fill": [0], "mask_fill": 0, "padding_mode": "constant"}}"#
        )
    };
    for step in [resize(4097), resize(u32::MAX), padded(1 << 31), padded(u32::MAX)] {
        let pipeline = described(&[&step], "").unwrap();
        for image in [wide, shape(1, 1 << 20, 1)] {
            let error = pipeline.output(&image).unwrap_err();
            assert!(error.message().contains("too large"), "{step}: {error}");
            assert!(pipeline.draw(number(1), &image).is_err());
        }
    }
    let error = described(&[&padded(1 << 31)], "").unwrap().output(&shape(3, 8, 8)).unwrap_err();
    assert!(error.message().contains("too large"), "{error}");
    // What comes out is small, but not what it is cut from.
    let centre = r#"{"step": "CenterCrop", "size": [1048576, 1]}"#;
    let error = described(&[centre], "").unwrap().output(&wide).unwrap_err();
    assert!(error.message().contains("too large"), "{error}");
}

#[test]
fn the_room_of_a_large_image_is_given_back_when_a_small_one_comes() {
    let padded = |by: u32| {
        let pad = format!(
            r#"{{"step": "Pad", "padding": [{by}, {by}, {by}, {by}], "fill": [9], "mask_fill": null,
                "padding_mode": "edge"}}"#
        );
        described(&[FLOAT, &pad, &crop(4)], "").unwrap()
    };
    let (small, large) = (padded(2), padded(2000));
    let image = shape(1, 9, 9);
    let bytes = bytes_of(&image);
    let after = |pipeline: &Pipeline| {
        let drawn = pipeline.draw(number(1), &image).unwrap();
        let mut row = [0.0_f32; 16];
        let (of, to) = (Image { data: bytes.as_ptr(), shape: image }, row.as_mut_ptr().cast());
        // SAFETY: the image, and room for the row.
        let done = Scratch::here(|scratch| unsafe {
            pipeline.apply(&drawn, of, to, Stores::Cached, scratch)
        });
        done.unwrap();
        Scratch::kept()
    };
    let few = after(&small);
    assert!(0 < few && few < 1 << 20);
    for _ in 0..3 {
        let many = after(&large);
        assert!(many > 4 * 4009 * 4009, "it is made once for all of them: {many}");
    }
    assert_eq!(after(&small), 0);
}

#[test]
fn what_was_erased_moves_with_the_image() {
    let erase = r#"{"step": "RandomErasing", "p": 1.0, "scale": [0.2, 0.2], "ratio": [1.0, 1.0],
                    "value": [200]}"#;
    let steps = [erase, r#"{"step": "RandomHorizontalFlip", "p": 1.0}"#];
    let image = shape(1, 10, 10);
    let first = described(&[erase], "").unwrap();
    let both = described(&steps, "").unwrap();
    let black = vec![0; 100];
    for index in 0..16 {
        let mut one = best(&first, &image, &black, index);
        assert!(one.contains(&200) && one.contains(&0));
        one.chunks_exact_mut(10).for_each(<[u8]>::reverse);
        assert_eq!(one, best(&both, &image, &black, index));
    }
}

#[test]
fn a_pipeline_never_writes_beyond_its_row() {
    let pipeline = described(&[&crop(7), FLIP, FLOAT], "").unwrap();
    let image = Shape { interleaved: true, ..shape(3, 9, 11) };
    let bytes = bytes_of(&image);
    let drawn = pipeline.draw(number(1), &image).unwrap();
    let mut room = vec![-1.0_f32; 3 * 49 + 32];
    let of = Image { data: bytes.as_ptr(), shape: image };
    // SAFETY: a row in the middle of this room.
    unsafe {
        let to = room.as_mut_ptr().add(16).cast();
        pipeline.apply(&drawn, of, to, Stores::Cached, &mut Scratch::new()).unwrap();
    }
    assert!(room[..16].iter().chain(&room[16 + 147..]).all(|value| *value == -1.0));
    assert!(room[16..16 + 147].iter().all(|value| (0.0..=1.0).contains(value)));
}

#[test]
fn parameters_of_another_image_and_rows_that_are_not_aligned_are_refused() {
    let pipeline = described(&[&crop(3), FLOAT], "").unwrap();
    let (one, other) = (shape(3, 9, 9), shape(3, 4, 4));
    let drawn = pipeline.draw(number(0), &one).unwrap();
    let bytes = bytes_of(&one);
    let mut room = [0_u64; 64];
    let to = room.as_mut_ptr().cast::<u8>();
    let apply = |shape: Shape, to: *mut u8| {
        let image = Image { data: bytes.as_ptr(), shape };
        // SAFETY: there is room for a row, and what does not suit is not written.
        unsafe { pipeline.apply(&drawn, image, to, Stores::Cached, &mut Scratch::new()) }
    };
    assert_eq!(apply(other, to).unwrap_err().kind(), Kind::State);
    assert_eq!(apply(one, to.wrapping_add(1)).unwrap_err().kind(), Kind::State);
    apply(one, to).unwrap();
}

#[test]
fn many_rows_are_what_each_of_them_is_alone() {
    let pipeline = Arc::new(described(&[&crop(5), FLIP, FLOAT, MEANS], "").unwrap());
    let image = shape(3, 8, 8);
    let bytes: Vec<u8> = (0..20).flat_map(|_| bytes_of(&image)).collect();
    let numbers: Vec<Number> = (0..20).map(number).collect();
    let mut room = vec![0.0_f32; 20 * 75];
    let images = Image { data: bytes.as_ptr(), shape: image };
    // SAFETY: twenty images, and as many rows.
    unsafe { pipeline.apply_many(numbers, images, room.as_mut_ptr().cast(), 3).unwrap() };
    for (index, row) in room.chunks_exact(75).enumerate() {
        assert_eq!(row, floats(&best(&pipeline, &image, &bytes, index as u64)));
    }
}

/// Sums over many rows, so that a change of the numbers is seen.
fn sums_of(index_apart: u64) -> (u64, u64) {
    let pipeline = described(&[&crop(16)], "").unwrap();
    let image = shape(1, 64, 64);
    let places = |epoch: u64| -> Vec<String> {
        let draw = |index| {
            let number = Number { seed: 1, epoch, index: index * index_apart };
            pipeline.draw(number, &image).unwrap().describe()
        };
        (0..200).map(draw).collect()
    };
    let (one, two) = (places(0), places(1));
    let different: std::collections::HashSet<_> = one.iter().collect();
    let moved = one.iter().zip(&two).filter(|(one, two)| one != two).count();
    (different.len() as u64, moved as u64)
}

#[test]
fn numbers_follow_from_seed_epoch_and_index_and_from_nothing_else() {
    let pipeline = described(&[&crop(16), FLIP], "").unwrap();
    let image = shape(3, 64, 64);
    let draw = |seed, epoch, index| {
        pipeline.draw(Number { seed, epoch, index }, &image).unwrap().describe()
    };
    assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
    for step in [1, 1 << 20, 1 << 40] {
        let (different, moved) = sums_of(step);
        assert!(different > 180 && moved > 190, "{step}: {different} places, {moved} moved");
    }
    let changed = (0..100).filter(|&seed| draw(seed, 0, 0) != draw(seed + 1, 0, 0)).count();
    assert!(changed > 90);
}

#[test]
fn a_step_more_leaves_the_numbers_of_those_before_it() {
    let crop = crop(16);
    let (short, long) = (vec![&*crop, FLIP], vec![&*crop, FLIP, TURN]);
    let image = shape(1, 64, 64);
    let told = |steps: &[&str], index| {
        described(steps, "").unwrap().draw(number(index), &image).unwrap().describe()
    };
    for index in 0..50 {
        let (short, long) = (told(&short, index), told(&long, index));
        assert!(long.starts_with(short.trim_end_matches(']')), "{short} {long}");
    }
}

#[test]
fn numbers_are_even_and_normal() {
    let mut counts = [0_u32; 10];
    for index in 0..20_000 {
        let mut draws = Draws::new(number(index), 5);
        counts[draws.below(10) as usize] += 1;
        assert!((0.0..1.0).contains(&draws.unit()));
    }
    // Six standard deviations of a tenth of 20,000.
    assert!(counts.iter().all(|count| count.abs_diff(2_000) < 255), "{counts:?}");
    let normal: Vec<f64> = (0..40_000).map(|place| f64::from(normal_at(99, place))).collect();
    let mean = normal.iter().sum::<f64>() / 40_000.0;
    let spread = normal.iter().map(|value| value * value).sum::<f64>() / 40_000.0;
    assert!(mean.abs() < 0.03 && (spread - 1.0).abs() < 0.05, "{mean} {spread}");
    assert!(normal.iter().all(|value| value.is_finite()));
}

#[test]
fn what_does_not_suit_an_image_is_refused_with_torchvisions_words() {
    let jitter = r#"{"step": "ColorJitter", "brightness": [0.5, 1.5], "contrast": null,
                     "saturation": null, "hue": null}"#;
    let small = crop(10);
    let maybe = format!(r#"{{"step": "RandomApply", "steps": [{}], "p": 0.5}}"#, crop(4));
    let zoom = r#"{"step": "Resize", "size": [1], "max_size": null, "filter": "bilinear",
                   "antialias": true}"#;
    let pil = Shape { interleaved: true, pil: true, ..shape(3, 8, 8) };
    let array = Shape { interleaved: true, array: true, ..shape(3, 8, 8) };
    let cases: Vec<(Vec<&str>, Shape, &str)> = vec![
        (
            vec![&small],
            shape(3, 8, 9),
            "Required crop size (10, 10) is larger than input image size",
        ),
        (vec![MEANS], shape(3, 8, 8), "Input tensor should be a float tensor. Got torch.uint8."),
        (vec![FLOAT, MEANS], shape(1, 8, 8), "3 values of mean and std, and the image has 1"),
        (vec![jitter], shape(2, 8, 8), "permitted channel values are 1 or 3, but found 2"),
        (vec![IMAGE, FLOAT], Shape { dtype: 4, ..shape(3, 8, 8) }, "dtype that fused steps do not"),
        (vec![MEANS], pil, "Normalize() does not support PIL images"),
        (vec![FLIP], pil, "add v2.ToImage()"),
        (vec![FLIP, IMAGE], array, "put v2.ToImage() before it"),
        (vec![&maybe], shape(3, 8, 8), "rows would be [3, 8, 8]"),
        (vec![FLIP], shape(3, 0, 8), "no pixels"),
        (vec![FLIP], shape(3, 1 << 21, 8), "too large"),
        (vec![zoom, &small], shape(3, 8, 8), "Required crop size"),
    ];
    for (steps, image, wanted) in cases {
        let pipeline = described(&steps, "").unwrap();
        let error = pipeline.output(&image).unwrap_err();
        assert!(error.message().contains(wanted), "{steps:?}: {error}");
    }
    let half = r#""dtype": "bfloat16", "channels_last": false"#;
    let error = described(&[FLIP], half).unwrap().output(&shape(3, 8, 8)).unwrap_err();
    assert!(error.message().contains("v2.ToDtype(torch.bfloat16, scale=True)"), "{error}");
}

#[test]
fn steps_that_no_image_suits_are_refused_at_once() {
    for (step, wanted) in [
        (r#"{"step": "CenterCrop", "size": [0, 4]}"#, "sides of 1 or more"),
        (r#"{"step": "RandomHorizontalFlip", "p": 1.5}"#, "interval [0.0, 1.0]"),
        (r#"{"step": "Normalize", "mean": [0.5], "std": [0.0]}"#, "division by zero"),
        (r#"{"step": "Normalize", "mean": [0.5, 1, 2], "std": [1, 1]}"#, "3 means and 2 stds"),
        (r#"{"step": "Grayscale", "num_output_channels": 2}"#, "must be 1 or 3, got 2"),
        (r#"{"step": "RandomChoice", "steps": [], "p": []}"#, "Length of p"),
        (r#"{"step": "Rotate"}"#, "damaged"),
        (r#"{"step": "ToImage", "more": 1}"#, "damaged"),
    ] {
        let error = described(&[step], "").unwrap_err();
        assert!(error.message().contains(wanted), "{step}: {error}");
    }
    assert!(Pipeline::parse("").is_err() && Pipeline::parse("[]").is_err());
}

fn any_step() -> impl Strategy<Value = String> {
    prop_oneof![
        (1_u32..20, 0_u32..4, any::<bool>(), 0_usize..4).prop_map(|(size, pad, need, mode)| {
            let mode = ["constant", "edge", "reflect", "symmetric"][mode];
            format!(
                r#"{{"step": "RandomCrop", "size": [{size}, {size}], "padding": [{pad}, 0, 1, {pad}],
                    "pad_if_needed": {need}, "fill": [7], "mask_fill": 0, "padding_mode": "{mode}"}}"#
            )
        }),
        (1_u32..24, 1_u32..24).prop_map(|(height, width)| {
            format!(r#"{{"step": "CenterCrop", "size": [{height}, {width}]}}"#)
        }),
        (1_u32..24, 1_u32..24, any::<bool>(), any::<bool>()).prop_map(|(h, w, sharp, near)| {
            let filter = if sharp { "bicubic" } else { "bilinear" };
            format!(
                r#"{{"step": "RandomResizedCrop", "size": [{h}, {w}], "scale": [0.1, 1.0],
                    "ratio": [0.5, 2.0], "filter": "{filter}", "antialias": {near}}}"#
            )
        }),
        Just(FLIP.to_string()),
        Just(TURN.to_string()),
        Just(FLOAT.to_string()),
        Just(r#"{"step": "Grayscale", "num_output_channels": 1}"#.to_string()),
        Just(r#"{"step": "RandomGrayscale", "p": 0.5}"#.to_string()),
        Just(r#"{"step": "RGB"}"#.to_string()),
        Just(IMAGE.to_string()),
        Just(
            r#"{"step": "ColorJitter", "brightness": [0.5, 1.5], "contrast": [0.5, 1.5],
                "saturation": [0.5, 1.5], "hue": [-0.5, 0.5]}"#
                .to_string()
        ),
        Just(
            r#"{"step": "RandomErasing", "p": 0.7, "scale": [0.0, 1.0], "ratio": [0.3, 3.3],
                "value": [0]}"#
                .to_string()
        ),
        Just(r#"{"step": "Normalize", "mean": [0.5], "std": [0.25]}"#.to_string()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever the steps and the image: an error, or exactly the row that was said, from within the
    /// image. Both are at the very end of their memory, so that a step too far shows under a tool that
    /// looks, and in the bytes behind the row here.
    #[test]
    fn any_pipeline_writes_what_it_says_or_refuses(
        steps in prop::collection::vec(any_step(), 0..6),
        channels in 1_u32..5,
        height in 1_u32..20,
        width in 1_u32..20,
        form in 0_u32..4,
        float in any::<bool>(),
        last in any::<bool>(),
        index in any::<u64>(),
    ) {
        let dtype = if float { 6 } else { 0 };
        let image = Shape {
            dtype, interleaved: form > 0, pil: form == 2, array: form == 3,
            ..shape(channels, height, width)
        };
        let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
        let more = format!(r#""dtype": null, "channels_last": {last}"#);
        let pipeline = described(&steps, &more).unwrap();
        let count = (channels * height * width) as usize;
        let bytes = vec![0x3d_u8; count * if float { 4 } else { 1 }];
        let words: Vec<u32> = (0..count).map(|_| 0x3d3d_3d3d).collect();
        let data = if float { words.as_ptr().cast() } else { bytes.as_ptr() };
        let Ok(output) = pipeline.output(&image) else { return Ok(()) };
        let drawn = pipeline.draw(number(index), &image).unwrap();
        let mut room = vec![0xa5_a5_a5_a5_u32; output.bytes.div_ceil(4) + 16];
        let to = room.as_mut_ptr().cast::<u8>();
        let of = Image { data, shape: image };
        // SAFETY: all of the image, and room for the row.
        let done = unsafe { pipeline.apply(&drawn, of, to, Stores::Cached, &mut Scratch::new()) };
        prop_assert!(done.is_ok(), "{:?}", done);
        // SAFETY: the room, which is of any value.
        let room = unsafe { std::slice::from_raw_parts(to, room.len() * 4) };
        prop_assert!(room[output.bytes..].iter().all(|byte| *byte == 0xa5));
    }
}
