//! Fused transforms of one row, on one core: `cargo bench --bench augment`.
#![allow(unsafe_code)] // rows are raw memory

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use stocache::augment::{Image, Number, Pipeline, Scratch, Shape};
use stocache::sys::stores::Stores;

const FLIP: &str = r#"{"step": "RandomHorizontalFlip", "p": 0.5}"#;
const FINISH: &str = r#"{"step": "ToDtype", "dtype": "float32", "scale": true},
    {"step": "Normalize", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}"#;
const CROP: &str = r#"{"step": "RandomCrop", "size": [224, 224], "padding": null,
    "pad_if_needed": false, "fill": [0], "mask_fill": 0, "padding_mode": "constant"}"#;
const RESIZED: &str = r#"{"step": "RandomResizedCrop", "size": [224, 224], "scale": [0.08, 1.0],
    "ratio": [0.75, 1.3333], "filter": "bilinear", "antialias": true}"#;
const JITTER: &str = r#"{"step": "ColorJitter", "brightness": [0.6, 1.4], "contrast": [0.6, 1.4],
    "saturation": [0.6, 1.4], "hue": [-0.1, 0.1]}"#;

/// So many images and rows one after the other that they do not stay in the processor's caches.
const ROWS: usize = 128;
const SIDE: u32 = 256;

fn rows(c: &mut Criterion) {
    let mut group = c.benchmark_group("augment");
    group.sample_size(20);
    group.throughput(Throughput::Elements(ROWS as u64));
    let image_bytes = (3 * SIDE * SIDE) as usize;
    let images: Vec<u8> = (0..ROWS * image_bytes).map(|at| ((at * 31) >> 3) as u8).collect();
    let mut out = vec![0.0_f32; ROWS * 3 * 224 * 224];

    group.bench_function("bound: read a crop, write float32", |b| {
        b.iter(|| {
            for (image, row) in images.chunks_exact(image_bytes).zip(out.chunks_exact_mut(150_528))
            {
                for (line, to) in row.chunks_exact_mut(224).enumerate() {
                    let from = (line / 224 * 256 + line % 224 + 16) * 256 + 16;
                    for (to, from) in to.iter_mut().zip(&image[from..from + 224]) {
                        *to = f32::from(*from);
                    }
                }
            }
            black_box(&mut out);
        });
    });
    let plain = r#""dtype": null, "channels_last": false"#;
    for (name, steps, more, interleaved) in [
        ("crop, flip, normalise", format!("{CROP}, {FLIP}, {FINISH}"), plain, false),
        ("the same of pixels", format!("{CROP}, {FLIP}, {FINISH}"), plain, true),
        (
            "the same to bfloat16",
            format!("{CROP}, {FLIP}, {FINISH}"),
            r#""dtype": "bfloat16", "channels_last": false"#,
            false,
        ),
        (
            "the same to channels_last",
            format!("{CROP}, {FLIP}, {FINISH}"),
            r#""dtype": null, "channels_last": true"#,
            false,
        ),
        ("crop and flip of bytes", format!("{CROP}, {FLIP}"), plain, false),
        ("resized crop, flip, normalise", format!("{RESIZED}, {FLIP}, {FINISH}"), plain, false),
        ("the same of pixels, resized", format!("{RESIZED}, {FLIP}, {FINISH}"), plain, true),
        ("crop, jitter, normalise", format!("{CROP}, {JITTER}, {FINISH}"), plain, false),
    ] {
        let text = format!(r#"{{"steps": [{steps}], {more}}}"#);
        let pipeline = Pipeline::parse(&text).expect("known steps");
        let shape = Shape {
            channels: 3,
            height: SIDE,
            width: SIDE,
            dtype: 0,
            interleaved,
            pil: false,
            array: false,
        };
        let bytes = pipeline.output(&shape).expect("it suits").bytes;
        let (mut scratch, stores) = (Scratch::new(), Stores::of(ROWS * bytes));
        let mut epoch = 0;
        group.bench_function(name, |b| {
            b.iter(|| {
                epoch += 1;
                let to = out.as_mut_ptr().cast::<u8>();
                for row in 0..ROWS {
                    let number = Number { seed: 0, epoch, index: row as u64 };
                    let drawn = pipeline.draw(number, &shape).expect("it suits");
                    let data = images[row * image_bytes..].as_ptr();
                    let image = Image { data, shape };
                    // SAFETY: as many images and rows as there are; a row is at most float32.
                    unsafe {
                        pipeline
                            .apply(&drawn, image, to.add(row * bytes), stores, &mut scratch)
                            .expect("ok");
                    }
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rows);
criterion_main!(benches);
