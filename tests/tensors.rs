//! Tensors that Rust holds, by way of all of tch: `cargo test --features tch --test tensors`, with the
//! libtorch that tch is made for.
#![cfg(feature = "tch")]

use stocache::tensors::TensorCache;
use stocache::{Kind as Trouble, Stored, random_name};
use tch::{Device, Kind, Tensor};

const KINDS: [Kind; 6] =
    [Kind::Uint8, Kind::Int64, Kind::Float, Kind::BFloat16, Kind::ComplexDouble, Kind::Bool];

fn open(kind: Kind) -> TensorCache {
    TensorCache::open(&random_name().unwrap(), 1 << 16, 8, &[2, 3], kind).unwrap()
}

fn numbers(from: i64, kind: Kind) -> Tensor {
    Tensor::arange_start(from, from + 6, (Kind::Int64, Device::Cpu)).to_kind(kind).reshape([2, 3])
}

#[test]
fn a_tensor_that_is_set_is_got_by_all_who_join() {
    for kind in KINDS {
        let cache = open(kind);
        assert!(cache.get(3).unwrap().is_none());
        assert_eq!(cache.set(3, &numbers(1, kind), false).unwrap(), Stored::Done);
        let joined = TensorCache::join(cache.cache().segment().name()).unwrap();
        let sample = joined.get(3).unwrap().unwrap();
        assert_eq!((joined.kind(), sample.kind(), sample.size()), (kind, kind, vec![2, 3]));
        assert_eq!(sample, numbers(1, kind), "{kind:?}");
        assert_eq!(cache.cache().stats().hits, 1);
    }
}

#[test]
fn a_batch_has_zeros_where_there_is_no_sample() {
    let cache = open(Kind::Float);
    let rows = Tensor::stack(&[numbers(0, Kind::Float), numbers(6, Kind::Float)], 0);
    assert_eq!(cache.set_many(&[1, 4], &rows, false).unwrap(), [true, true]);
    assert_eq!(cache.set_many(&[4, 5], &rows, false).unwrap(), [false, true]);
    let (batch, found) = cache.get_many(&[4, 0, 1]).unwrap();
    assert_eq!(found, [true, false, true]);
    assert_eq!(batch.get(0), numbers(6, Kind::Float));
    assert_eq!(f64::try_from(batch.get(1).abs().sum(Kind::Float)).unwrap(), 0.0);
    assert_eq!(batch.get(2), numbers(0, Kind::Float));
}

#[test]
fn a_copy_stays_as_it_is_when_the_sample_changes() {
    let cache = open(Kind::Int64);
    cache.set(2, &numbers(0, Kind::Int64), false).unwrap();
    let before = cache.get(2).unwrap().unwrap();
    // Columns first: what is not contiguous is stored as it reads.
    let other = numbers(10, Kind::Int64).tr().contiguous().tr();
    assert!(!other.is_contiguous());
    assert_eq!(cache.set(2, &other, true).unwrap(), Stored::Done);
    drop(cache.cache().clear());
    assert_eq!(before, numbers(0, Kind::Int64));
}

#[test]
fn what_does_not_fit_is_refused_in_one_sentence() {
    let cache = open(Kind::Uint8);
    for (wrong, said) in [
        (numbers(0, Kind::Float), "a Float tensor of [2, 3] on Cpu was given"),
        (numbers(0, Kind::Uint8).reshape([3, 2]), "a Uint8 tensor of [3, 2] on Cpu was given"),
    ] {
        let refused = cache.set(0, &wrong, false).unwrap_err();
        assert_eq!(refused.kind(), Trouble::Argument);
        assert!(refused.to_string().starts_with(said), "{refused}");
        assert!(refused.to_string().ends_with("this cache takes Uint8 of [2, 3] on Cpu"));
    }
    let name = random_name().unwrap();
    let quantised = TensorCache::open(&name, 1 << 16, 8, &[2], Kind::QInt8).err().unwrap();
    assert!(quantised.to_string().contains("QInt8 is more than bytes"), "{quantised}");
}
