//! Shards of datasets, as C++ asks for them.

use crate::bridge::ffi;
use crate::guard::{Crossing, calm, guard};
use stocache::shards::{self, Order, Permutation};
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

// Numbers come as C++ has them: a negative one is a very large one here.

pub fn permute(numbers: &mut [u64], len: u64, key: &[u64; 3]) -> Result<()> {
    guard(|| {
        if let Some(outside) = numbers.iter().find(|number| **number >= len) {
            let message = format!("{} is no position of {len}", *outside as i64);
            return Err(Error::new(Kind::Index, message).into());
        }
        Permutation::new(len, *key).put_each(numbers);
        Ok(())
    })
}

pub fn visit(numbers: &mut [u64], visits: &ffi::Visits) -> Result<()> {
    guard(|| {
        let order = match visits.shuffle {
            true => Order::Shuffled(Permutation::new(visits.held, visits.key)),
            false => Order::AsTheyLie(visits.held),
        };
        let &ffi::Visits { count, step, offset, first, .. } = visits;
        shards::Visits { count, step, offset, first, order }.put_positions(numbers).map_err(|it| {
            let message = format!("index {} of {count} samples of this rank", it as i64);
            Error::new(Kind::Index, message).into()
        })
    })
}
