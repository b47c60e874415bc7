//! Shards of datasets, as C++ asks for them.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use stocache::shards::{self, Permutation};
use stocache::{Error, Kind};

type Result<T> = std::result::Result<T, Crossing>;

pub fn count_for(rank: u32) {
    calm((), || stocache::segment::count_for(rank));
}

pub fn deal_out(
    samples: u64,
    chunk: u64,
    holders: &[ffi::Holder],
    agreed: bool,
) -> Result<Vec<ffi::Stretch>> {
    let holder =
        |each: &ffi::Holder| shards::Holder { weight: each.weight, capacity: each.capacity };
    let stretch = |each: shards::Stretch| ffi::Stretch { start: each.start, len: each.len };
    guard(|| {
        let holders: Vec<_> = holders.iter().map(holder).collect();
        Ok(shards::deal_out(samples, chunk, &holders, agreed).into_iter().map(stretch).collect())
    })
}

pub fn permute(numbers: &mut [i64], len: i64, key: &[u64; 3]) -> Result<()> {
    guard(|| {
        let order = Permutation::new(len.max(0) as u64, *key);
        for number in numbers {
            if !(0..len).contains(number) {
                let message = format!("{number} is no position of {len}");
                return Err(Error::new(Kind::Index, message).into());
            }
            *number = order.at(*number as u64) as i64;
        }
        Ok(())
    })
}
