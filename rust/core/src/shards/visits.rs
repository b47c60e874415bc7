//! What a rank visits in one epoch.

use super::Permutation;

/// Every `step`-th position of a holder from `offset` on, in an order of this epoch.
#[derive(Clone, Copy, Debug)]
pub struct Visits {
    /// How many there are.
    pub count: u64,
    /// How many ranks visit what the holder has.
    pub step: u64,
    /// Which of them this is.
    pub offset: u64,
    /// The first position of the holder.
    pub first: u64,
    /// The holder's positions in the order of this epoch.
    pub order: Order,
}

/// In which order a holder's positions are visited.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// As they lie, so many.
    AsTheyLie(u64),
    /// That of a key.
    Shuffled(Permutation),
}

impl Visits {
    /// Puts the position of each visit in the place of its number. The first that is no visit of this rank is
    /// the error: beside its own positions are those of others.
    pub fn put_positions(&self, numbers: &mut [u64]) -> Result<(), u64> {
        let held = match &self.order {
            Order::AsTheyLie(len) => *len,
            Order::Shuffled(order) => order.len(),
        };
        if self.first.checked_add(held).is_none() {
            return Err(0);
        }
        for number in numbers.iter_mut() {
            let inside = |at: &u64| *number < self.count && *at < held;
            let at = number.checked_mul(self.step).and_then(|at| at.checked_add(self.offset));
            *number = at.filter(inside).ok_or(*number)?;
        }
        if let Order::Shuffled(order) = &self.order {
            order.put_each(numbers);
        }
        numbers.iter_mut().for_each(|at| *at += self.first);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn orders(held: u64, key: [u64; 3]) -> [Order; 2] {
        [Order::AsTheyLie(held), Order::Shuffled(Permutation::new(held, key))]
    }

    proptest! {
        #[test]
        fn ranks_visit_all_that_their_holder_has_and_nothing_twice(
            held in 0..500_u64, step in 1..9_u64, first in 0..1000_u64, key: [u64; 3]
        ) {
            for order in orders(held, key) {
                let of = |offset: u64| {
                    let count = held.saturating_sub(offset).div_ceil(step);
                    let visits = Visits { count, step, offset, first, order };
                    let mut numbers: Vec<u64> = (0..count).collect();
                    visits.put_positions(&mut numbers).map(|()| numbers)
                };
                let found: Result<Vec<_>, u64> = (0..step).map(of).collect();
                let mut found = found.unwrap().concat();
                found.sort_unstable();
                prop_assert!(found.into_iter().eq(first..first + held));
            }
        }

        #[test]
        fn no_number_leads_beyond_the_holder(
            number: u64, count: u64, step: u64, offset: u64, held in 0..u64::MAX >> 1, key: [u64; 3]
        ) {
            for order in orders(held, key) {
                let mut numbers = [number];
                let found = Visits { count, step, offset, first: 0, order }.put_positions(&mut numbers);
                prop_assert!(found.map_or_else(
                    |which| which == number,
                    |()| numbers[0] < held && number < count
                ));
            }
        }
    }
}
