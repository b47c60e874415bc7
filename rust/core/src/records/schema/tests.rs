//! Nothing that is read makes the parser panic, and what an encoder wrote is found again.

use super::kinds::{self, DType, ImageMode, torch};
use super::{Extent, Kind, Schema};
use proptest::prelude::*;

/// A sample, as far as the format is concerned.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Str(String),
    Tensor(u8, Vec<u32>, Vec<u8>),
    Ints(Vec<i64>),
    Tuple(Vec<Value>),
    Dict(Vec<(String, Value)>),
    Pairs(Vec<(Value, Value)>),
    /// Whether it is stacked, and its parts.
    Object(bool, Vec<Value>),
    /// Mode, width and height, pixels, and what is kept of its info.
    Image(&'static str, [u32; 2], Vec<u8>, Option<Box<Value>>),
}

/// Writes samples as `csrc/codec/encode.cpp` does.
#[derive(Default)]
pub(crate) struct Writer {
    pub schema: Vec<u8>,
    words: Vec<u32>,
    numbers: Vec<u64>,
    payloads: Vec<Vec<u8>>,
    kinds: Vec<Kind>,
}

impl Writer {
    /// The schema and the record.
    pub(crate) fn encode(value: &Value) -> (Vec<u8>, Vec<u8>) {
        let writer = Self::written(value);
        let record = writer.record().0;
        (writer.schema, record)
    }

    fn written(value: &Value) -> Self {
        let mut writer = Self { schema: vec![super::VERSION], ..Self::default() };
        writer.value(value);
        writer
    }

    /// The record, and where its payloads lie.
    fn record(&self) -> (Vec<u8>, Vec<Extent>) {
        let mut record: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if !self.numbers.is_empty() {
            record.resize(record.len().next_multiple_of(8), 0);
        }
        record.extend(self.numbers.iter().flat_map(|number| number.to_le_bytes()));
        let mut extents = Vec::new();
        for payload in &self.payloads {
            if payload.is_empty() {
                extents.push(Extent::default());
                continue;
            }
            record.resize(record.len().next_multiple_of(16), 0);
            extents.push(Extent { at: record.len() as u64, len: payload.len() as u64 });
            record.extend(payload);
        }
        (record, extents)
    }

    fn count(&mut self, mut count: usize) {
        while count >= 0x80 {
            self.schema.push(count as u8 | 0x80);
            count >>= 7;
        }
        self.schema.push(count as u8);
    }

    fn value(&mut self, value: &Value) {
        let kind = match value {
            Value::None => Kind::None,
            Value::Bool(_) => Kind::Bool,
            Value::Int(_) => Kind::Int,
            Value::Str(_) => Kind::Str,
            Value::Tensor(..) => Kind::Tensor,
            Value::Ints(_) => Kind::Ints,
            Value::Tuple(_) => Kind::Tuple,
            Value::Dict(_) => Kind::Dict,
            Value::Pairs(_) => Kind::Pairs,
            Value::Object(..) => Kind::Object,
            Value::Image(..) => Kind::Image,
        };
        self.kinds.push(kind);
        self.schema.push(kind as u8);
        match value {
            Value::None => {}
            Value::Bool(value) => self.numbers.push((*value).into()),
            Value::Int(value) => self.numbers.push(*value as u64),
            Value::Str(text) => {
                self.words.push(text.len() as u32);
                self.payloads.push(text.as_bytes().to_vec());
            }
            Value::Tensor(dtype, dims, data) => {
                self.schema.push(*dtype);
                self.count(dims.len());
                self.words.extend(dims);
                self.payloads.push(data.clone());
            }
            Value::Ints(values) => {
                self.words.push(values.len() as u32);
                self.payloads.push(values.iter().flat_map(|value| value.to_le_bytes()).collect());
            }
            Value::Tuple(children) => {
                self.count(children.len());
                children.iter().for_each(|child| self.value(child));
            }
            Value::Dict(children) => {
                self.count(children.len());
                for (key, child) in children {
                    self.schema.push(b's');
                    self.count(key.len());
                    self.schema.extend(key.bytes());
                    self.value(child);
                }
            }
            Value::Pairs(children) => {
                self.count(children.len());
                for (key, child) in children {
                    self.value(key);
                    self.value(child);
                }
            }
            Value::Object(stacked, parts) => {
                self.schema.extend(b"\x01m\x01C\x00\x00");
                self.schema.push((*stacked).into());
                self.count(parts.len());
                parts.iter().for_each(|part| self.value(part));
            }
            Value::Image(mode, size, pixels, info) => {
                self.count(mode.len());
                self.schema.extend(mode.bytes());
                self.count(0); // no palette
                self.words.extend(size);
                self.payloads.push(pixels.clone());
                match info {
                    Some(info) => self.value(info),
                    None => {
                        self.kinds.push(Kind::Missing);
                        self.schema.push(Kind::Missing as u8);
                    }
                }
            }
        }
    }
}

/// A grey image of PIL, and what is beside its pixels.
pub(crate) fn grey(size: [u32; 2], info: Option<Value>) -> Value {
    let pixels = (0..size[0] * size[1]).map(|at| at as u8).collect();
    Value::Image("L", size, pixels, info.map(Box::new))
}

fn tensors() -> impl Strategy<Value = Value> {
    let dims = proptest::collection::vec(0u32..5, 0..4);
    (prop::sample::select(vec![0u8, 4, 6, 11]), dims).prop_map(|(dtype, dims)| {
        let items: u32 = dims.iter().product();
        let bytes = items * kinds::tensor_itemsize(dtype as i8);
        Value::Tensor(dtype, dims, (0..bytes).map(|i| i as u8).collect())
    })
}

pub(crate) fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        ".{0,20}".prop_map(Value::Str),
        proptest::collection::vec(any::<i64>(), 0..5).prop_map(Value::Ints),
        tensors(),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::Tuple),
            proptest::collection::vec(("[a-z]{0,200}", inner.clone()), 0..4).prop_map(Value::Dict),
            proptest::collection::vec((inner.clone(), inner.clone()), 0..4).prop_map(Value::Pairs),
            proptest::collection::vec(inner.clone(), 0..4)
                .prop_map(|parts| Value::Object(false, parts)),
            (0u32..4, 0u32..4, inner.clone())
                .prop_map(|(width, height, info)| grey([width, height], Some(info))),
            (tensors(), proptest::collection::vec(inner, 0..3)).prop_map(|(data, rest)| {
                Value::Object(true, std::iter::once(data).chain(rest).collect())
            }),
        ]
    })
}

#[test]
fn the_bytes_of_a_schema_and_a_record_are_these() {
    let sample = Value::Tuple(vec![
        Value::Tensor(4, vec![2], vec![1; 16]),
        Value::Str("ab".into()),
        Value::Dict(vec![("k".into(), Value::Int(-2))]),
    ]);
    let (schema, record) = Writer::encode(&sample);
    assert_eq!(schema, b"\x01(\x03T\x04\x01s{\x01s\x01ki");
    let mut expected = vec![2, 0, 0, 0, 2, 0, 0, 0]; // words: one dim, one length
    expected.extend((-2i64).to_le_bytes());
    expected.extend([1; 16]);
    expected.extend(b"ab");
    assert_eq!(record, expected);
    let parsed = Schema::parse(&schema).unwrap();
    let mut extents = [Extent::default(); 2];
    assert!(parsed.lay_out(&[2, 2], record.len() as u64, &mut extents));
    assert_eq!(extents, [Extent { at: 16, len: 16 }, Extent { at: 32, len: 2 }]);
    assert!(!parsed.lay_out(&[2, 2], record.len() as u64 + 1, &mut extents));
    assert!(!parsed.lay_out(&[2, 3], record.len() as u64, &mut extents));
}

#[test]
fn samples_that_differ_beside_their_pixels_are_alike() {
    let of = |info: Option<Value>, last: Value| {
        let sample = Value::Tuple(vec![grey([2, 1], info), last]);
        Schema::parse(&Writer::encode(&sample).0).unwrap()
    };
    let turned = Value::Dict(vec![("exif".into(), Value::Str("up".into()))]);
    let plain = of(None, Value::Int(3));
    let with_info = of(Some(turned.clone()), Value::Int(4));
    assert!(plain != with_info && plain.is_like(&with_info) && with_info.is_like(&plain));
    assert!(plain.is_like(&plain));
    assert!(!plain.is_like(&of(None, Value::Bool(true))));
    assert!(!with_info.is_like(&of(Some(turned.clone()), Value::Str("x".into()))));
    assert!(!plain.is_like(&Schema::parse(&Writer::encode(&Value::Int(3)).0).unwrap()));
    // What is beside them is no column, whatever it is.
    for info in [None, Some(turned), Some(Value::Pairs(vec![]))] {
        let schema = of(info, Value::Int(3));
        assert!(schema.fusible && !schema.collatable);
    }
    assert!(!of(None, Value::None).fusible);
    assert!(of(None, Value::Int(1)).nodes.iter().filter(|node| !node.apart).count() == 3);
}

#[test]
fn the_bytes_of_all_kinds_are_these() {
    let bytes: Vec<u8> = Kind::ALL.iter().map(|&kind| kind as u8).collect();
    assert_eq!(bytes, b"n?iIfcsyYTAauvM([ldZ{OPDEmRpx");
    assert!(Kind::ALL.iter().all(|&kind| Kind::of(kind as u8) == Some(kind)));
    assert_eq!((0..=255).filter_map(Kind::of).count(), Kind::ALL.len());
}

#[test]
fn schemas_of_every_kind_are_read() {
    for (good, schema) in [
        (true, &b"\x01a\x01d"[..]),
        (false, b"\x01a\x01S"),
        (false, b"\x01a\x01O"),
        (true, b"\x01A\x06M8[ns]\x02"),
        (false, b"\x01A\x01f\x41"),
        (true, b"\x01M\x01P\x03RGBx"),
        (false, b"\x01M\x01L\x03RGBx"),
        (false, b"\x01x"),
        (true, b"\x01P\x01m\x01C\x02\x00\x01a\x01bii"),
        (false, b"\x01P\x01m\x01C\x02\x01\x01a\x01b\x01cii"),
        (true, b"\x01D\x01m\x01C\x01\x00\x01a\x01\x01bxi"),
        (false, b"\x01D\x01m\x01C\x01\x00\x01a\x01\x01bix"),
        (true, b"\x01E\x01m\x01C\x00\x00"),
        (true, b"\x01{\x03(\x02n1ii\x01\x00\x00\x00\x00\x00\x00\x00fy\x01qp"),
        (false, b"\x01{\x01z"),
        (true, b"\x01m\x01nR\x01m\x01C\x00\x00\x00\x00"),
        (false, b"\x01m\x01n"),
        (true, b"\x01R\x01m\x01C\x00\x00\x01\x02T\x04\x01n"),
        (false, b"\x01R\x01m\x01C\x00\x00\x01\x02nT\x04\x01"),
        (false, b"\x01R\x01m\x01C\x00\x00\x01\x00"),
        (false, b"\x01R\x01m\x01C\x00\x00\x02\x00"),
        (false, b"\x01R\x01m\x01C\x01\x00\x01a\x00\x00"),
        (false, b"\x02n"),
        (false, b"\x01nn"),
        (false, b""),
    ] {
        assert_eq!(Schema::parse(schema).is_ok(), good, "{:?}", schema.escape_ascii().to_string());
    }
    assert!(Schema::parse(b"\x01p").unwrap().needs_pickle);
    let stacked = |rest: &[u8]| {
        let head = b"\x01R\x01m\x01C\x00\x00\x01\x02T\x04\x01";
        Schema::parse(&[head, rest].concat()).unwrap()
    };
    assert!(stacked(b"n").collatable && stacked(b"n").has_rest); // None alone is no column
    assert!(!stacked(b"p").collatable); // what is unpickled is default_collate's to see
    assert!(!Schema::parse(b"\x01R\x01m\x01C\x00\x00\x00\x01i").unwrap().collatable);
    let nested =
        Schema::parse(b"\x01(\x02R\x01m\x01C\x00\x00\x01\x02T\x04\x01{\x01s\x01ksi").unwrap();
    let after: Vec<u32> = nested.nodes.iter().map(|node| node.after).collect();
    assert_eq!(after, [6, 5, 3, 5, 5, 6]);
    let apart: Vec<bool> = nested.nodes.iter().map(|node| node.apart).collect();
    assert_eq!(apart, [false, false, false, true, true, false]);
    assert!(!Schema::parse(b"\x01{\x01f\0\0\0\0\0\0\xf8\x7fi").unwrap().collatable); // a NaN
}

#[test]
fn few_bytes_cannot_ask_for_much() {
    let deep: Vec<u8> = std::iter::once(1).chain([b'(', 1].repeat(1000)).chain([b'n']).collect();
    let many = [&[1, b'(', 100][..], &b"Z\xff\xff\xff\xff\x01".repeat(100)].concat();
    let wide = b"\x01(\xff\xff\xff\xff\x0f";
    let huge = b"\x01s\xff\xff\xff\xff\x7f";
    for schema in [&deep[..], &many, wide, huge, &vec![1; kinds::SCHEMA_LIMIT + 1]] {
        let error = Schema::parse(schema).unwrap_err();
        assert!(error.message().starts_with("malformed schema: "), "{error}");
    }
}

#[test]
fn sizes_do_not_overflow() {
    assert_eq!(kinds::dims_bytes(&[], 8), Some(8));
    assert_eq!(kinds::dims_bytes(&[3, 0, 5], 4), Some(0));
    assert_eq!(kinds::dims_bytes(&[u32::MAX; 2], 1), None);
    assert_eq!(kinds::dims_bytes(&[u32::MAX, u32::MAX, 0], 8), None);
    assert_eq!(kinds::pixels_bytes(9, 2, 1), Some(4));
    assert_eq!(kinds::pixels_bytes(u32::MAX, u32::MAX, 32), None);
    assert_eq!(kinds::pixels_bytes(0, 1 << 20, 24), Some(0));
    assert_eq!(kinds::pixels_bytes(0, u32::MAX, 24), None);
}

#[test]
fn dtypes_and_modes_are_known_or_refused() {
    for good in ["?", "<f", ">d", "|b", "M8", "m8[ns]", "<M8[25s]", "U", ">S", "g"] {
        assert!(DType::parse(good.as_bytes()).is_some(), "{good}");
    }
    for bad in ["", "O", "<", "ff", "M", "M8[", "M8[]", "M8[x]", "M8[1234567890s]", "V4", ">>f"] {
        assert!(DType::parse(bad.as_bytes()).is_none(), "{bad}");
    }
    assert_eq!(DType::parse(b"f").unwrap().torch, torch::FLOAT);
    assert_eq!(DType::parse(b">f").unwrap().torch, torch::NONE);
    assert_eq!(ImageMode::of(b"P"), Some(ImageMode { bits: 8, palette: true }));
    assert_eq!(ImageMode::of(b"RGB\0"), None);
}

proptest! {
    #[test]
    fn what_was_written_is_found_again(value in values()) {
        let writer = Writer::written(&value);
        let (record, expected) = writer.record();
        let parsed = Schema::parse(&writer.schema).unwrap();
        let kinds: Vec<Kind> = parsed.nodes.iter().map(|node| node.kind).collect();
        prop_assert_eq!(&kinds, &writer.kinds);
        prop_assert_eq!(parsed.words as usize, writer.words.len());
        prop_assert_eq!(parsed.numbers as usize, writer.numbers.len());
        prop_assert_eq!(parsed.needs_pickle, false);
        let mut extents = vec![Extent::default(); parsed.leaves.len()];
        prop_assert!(parsed.lay_out(&writer.words, record.len() as u64, &mut extents));
        prop_assert_eq!(extents, expected);
    }

    #[test]
    fn no_bytes_make_the_parser_panic(
        value in values(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
        words in proptest::collection::vec(any::<u32>(), 64),
        len in 0u64..1 << 33,
    ) {
        let mut bytes = Writer::encode(&value).0;
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len() + 1).max(bytes.len() / 2));
        check_any(&bytes, &words, len)?;
    }

    #[test]
    fn no_noise_makes_the_parser_panic(
        noise in proptest::collection::vec(
            prop_oneof![prop::sample::select(b"n?iIfcsyYTAauvM([ldZ{OPDEmRpx".to_vec()), 0u8..8], 0..60),
        words in proptest::collection::vec(any::<u32>(), 64),
        len in 0u64..4096,
    ) {
        check_any(&[&[super::VERSION][..], &noise].concat(), &words, len)?;
    }
}

/// Whatever the schema and the words say: no panic, and payloads that lie inside the record one after
/// the other.
fn check_any(bytes: &[u8], words: &[u32], len: u64) -> Result<(), TestCaseError> {
    let Ok(parsed) = Schema::parse(bytes) else { return Ok(()) };
    for span in parsed.names.iter().chain(parsed.keys.iter().map(|key| &key.text)) {
        parsed.text(*span);
    }
    for class in &parsed.classes {
        let _ =
            (parsed.text(class.module), parsed.text(class.qualified), parsed.text(class.fields));
    }
    let words: Vec<u32> =
        words.iter().copied().cycle().take((parsed.words as usize).min(1 << 16)).collect();
    let mut extents = vec![Extent::default(); parsed.leaves.len()];
    if parsed.lay_out(&words, len, &mut extents) {
        let mut end = parsed.head();
        for extent in extents.iter().filter(|extent| extent.len > 0) {
            prop_assert!(extent.at >= end && extent.at + extent.len <= len);
            end = extent.at + extent.len;
        }
    }
    let mut end = 0;
    let mut inside = true;
    parsed.each_payload_apart(&words, len, |extent| {
        if extent.len > 0 {
            inside &= extent.at >= end.max(parsed.head()) && extent.at + extent.len <= len;
            end = extent.at + extent.len;
        }
    });
    prop_assert!(inside);
    Ok(())
}
