//! Who holds which stretch of a dataset.
//!
//! Positions are counted in chunks, which stay whole. If everybody can hold a fair part, that is what they
//! get: as many each, by their weights, and all of the dataset is held. If somebody cannot, what is known
//! decides. Where each knows what all can hold, those with room take what others have not, as evenly as that
//! goes. Where it knows itself only, it takes less of its own fair part, which nobody else touches: whatever
//! the others do, no sample is held twice.

/// Somebody who keeps a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What part is fair, beside the others': how many ranks it is for.
    pub weight: u64,
    /// How many samples it can keep.
    pub capacity: u64,
}

/// Consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first.
    pub start: u64,
    /// How many.
    pub len: u64,
}

/// The stretch of each holder, of the positions of so many samples, in whole chunks. `agreed`: what is said
/// of each holder here is what it says itself.
pub fn deal_out(samples: u64, chunk: u64, holders: &[Holder], agreed: bool) -> Vec<Stretch> {
    let chunk = chunk.max(1);
    let chunks = samples.div_ceil(chunk);
    // The last chunk may be shorter; who can hold all of the samples can hold all of the chunks.
    let room = |holder: &Holder| match holder.capacity >= samples {
        true => chunks,
        false => holder.capacity / chunk,
    };
    let fair = fair_parts(chunks, holders);
    let fits = fair.iter().zip(holders).all(|(part, holder)| part.len <= room(holder));
    let parts = match (fits, agreed) {
        (true, _) => fair,
        (false, true) => {
            let rooms: Vec<u64> = holders.iter().map(room).collect();
            one_after_the_other(&level(chunks, holders, &rooms))
        }
        (false, false) => {
            let less = |(part, holder): (&Stretch, &Holder)| Stretch {
                start: part.start,
                len: part.len.min(room(holder)),
            };
            fair.iter().zip(holders).map(less).collect()
        }
    };
    let in_samples = |part: Stretch| {
        let start = (part.start * chunk).min(samples);
        Stretch { start, len: (part.len * chunk).min(samples - start) }
    };
    parts.into_iter().map(in_samples).collect()
}

/// By weight, one after the other, without a gap.
fn fair_parts(chunks: u64, holders: &[Holder]) -> Vec<Stretch> {
    let weight: u128 = holders.iter().map(|holder| u128::from(holder.weight)).sum();
    let up_to = |before: u128| match weight {
        0 => 0,
        _ => (u128::from(chunks) * before / weight) as u64,
    };
    let mut before = 0;
    let part = |holder: &Holder| {
        let start = up_to(before);
        before += u128::from(holder.weight);
        Stretch { start, len: up_to(before) - start }
    };
    holders.iter().map(part).collect()
}

/// How much each gets if none gets more than its room, all that fits is given, and what those get who still
/// have room is even by weight.
fn level(chunks: u64, holders: &[Holder], rooms: &[u64]) -> Vec<u64> {
    let mut given = vec![0; holders.len()];
    // From those who are full first.
    let mut order: Vec<usize> = (0..holders.len()).filter(|i| holders[*i].weight > 0).collect();
    let fullness = |i: usize, k: usize| {
        let scaled = |i: usize, k: usize| u128::from(rooms[i]) * u128::from(holders[k].weight);
        scaled(i, k).cmp(&scaled(k, i)).then(i.cmp(&k))
    };
    order.sort_unstable_by(|i, k| fullness(*i, *k));
    let mut left = chunks;
    let mut weight: u128 = order.iter().map(|i| u128::from(holders[*i].weight)).sum();
    for i in order {
        let own = u128::from(holders[i].weight);
        // Rounded up, so that nothing is left over at the end for which there is room.
        let part = (u128::from(left) * own).div_ceil(weight) as u64;
        given[i] = part.min(rooms[i]);
        left -= given[i];
        weight -= own;
    }
    given
}

fn one_after_the_other(lens: &[u64]) -> Vec<Stretch> {
    let mut start = 0;
    let next = |len: &u64| {
        let part = Stretch { start, len: *len };
        start += len;
        part
    };
    lens.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn holders(capacities: &[u64]) -> Vec<Holder> {
        capacities.iter().map(|capacity| Holder { weight: 1, capacity: *capacity }).collect()
    }

    fn lens(parts: &[Stretch]) -> Vec<u64> {
        parts.iter().map(|part| part.len).collect()
    }

    #[test]
    fn where_all_fits_parts_are_even_and_all_is_held() {
        let parts = deal_out(10, 1, &holders(&[100, 3, 4]), false);
        assert_eq!(lens(&parts), [3, 3, 4]);
        assert_eq!(parts, deal_out(10, 1, &holders(&[100, 4, 4]), true));
    }

    #[test]
    fn who_knows_only_itself_leaves_what_others_may_hold() {
        let parts = deal_out(12, 1, &holders(&[2, 2, 2]), false);
        assert_eq!(lens(&parts), [2, 2, 2]);
        assert_eq!(parts.iter().map(|part| part.start).collect::<Vec<_>>(), [0, 4, 8]);
    }

    #[test]
    fn who_has_room_takes_what_others_have_not() {
        assert_eq!(lens(&deal_out(12, 1, &holders(&[1, 9, 9]), true)), [1, 6, 5]);
        assert_eq!(lens(&deal_out(12, 1, &holders(&[1, 2, 3]), true)), [1, 2, 3]);
    }

    #[test]
    fn weights_are_ranks() {
        let two = [Holder { weight: 6, capacity: 99 }, Holder { weight: 2, capacity: 99 }];
        assert_eq!(lens(&deal_out(80, 1, &two, false)), [60, 20]);
    }

    #[test]
    fn chunks_stay_whole() {
        let parts = deal_out(95, 10, &holders(&[999, 999, 999]), false);
        assert_eq!(lens(&parts), [30, 30, 35]);
        assert_eq!(lens(&deal_out(95, 10, &holders(&[19, 19, 19]), true)), [10, 10, 10]);
    }

    #[test]
    fn nobody_and_nothing() {
        assert!(deal_out(10, 1, &[], true).is_empty());
        assert_eq!(lens(&deal_out(0, 1, &holders(&[1, 1]), false)), [0, 0]);
        assert_eq!(lens(&deal_out(7, 1, &holders(&[0, 0]), true)), [0, 0]);
    }

    prop_compose! {
        fn someone()(weight in 1..9_u64, capacity in prop_oneof![0..50_u64, 0..2000_u64]) -> Holder {
            Holder { weight, capacity }
        }
    }

    proptest! {
        #[test]
        fn parts_are_disjoint_within_capacity_and_hold_what_fits(
            samples in 0..1500_u64,
            chunk in 1..20_u64,
            holders in prop::collection::vec(someone(), 1..12),
            agreed: bool,
        ) {
            let parts = deal_out(samples, chunk, &holders, agreed);
            let mut end = 0;
            for (part, holder) in parts.iter().zip(&holders) {
                prop_assert!(part.start >= end, "{:?} begins before {}", part, end);
                end = part.start + part.len;
                prop_assert!(end <= samples);
                prop_assert!(part.len <= holder.capacity);
                prop_assert!(part.len == 0 || part.start % chunk == 0);
                prop_assert!(end == samples || end % chunk == 0);
            }
            let held: u64 = parts.iter().map(|part| part.len).sum();
            let chunks = samples.div_ceil(chunk);
            let room: u64 = holders.iter().map(|holder| match holder.capacity >= samples {
                true => chunks,
                false => holder.capacity / chunk,
            }).sum();
            if agreed {
                prop_assert!(held.div_ceil(chunk) == chunks.min(room), "{held} of {samples} are held");
            }
        }

        #[test]
        fn who_has_room_left_has_no_less_than_others(
            samples in 0..1500_u64,
            holders in prop::collection::vec(someone(), 1..12),
        ) {
            let parts = deal_out(samples, 1, &holders, true);
            for (part, holder) in parts.iter().zip(&holders) {
                for (other, its) in parts.iter().zip(&holders) {
                    // By weight, and up to what rounding takes.
                    let (mine, theirs) = (part.len * its.weight, other.len * holder.weight);
                    let rounding = 2 * holder.weight * its.weight;
                    prop_assert!(
                        part.len == holder.capacity || mine + rounding >= theirs,
                        "{:?} {:?} beside {:?} {:?}", part, holder, other, its
                    );
                }
            }
        }
    }
}
