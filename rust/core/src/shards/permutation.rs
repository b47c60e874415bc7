//! An order of the numbers below a length, given by a key; no list of them is made.
//!
//! A Feistel network over the least power of two that holds the length: each round changes one half of
//! the bits by a function of the other, so it can be undone, whatever the function. A result that is not
//! below the length is put in again until one is ("cycle walking"): less than twice on average.

/// Fewer leave traces of the order where the length is small, which the tests below find with four.
const ROUNDS: usize = 8;
/// Halves of one or two bits would take twice as many.
const LEAST_BITS: u32 = 6;

/// A bijection of `0..len`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    low_bits: u32,
    low_mask: u64,
    high_mask: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// That of a key: a seed, and what it is for. Other words give another order.
    pub fn new(len: u64, key: [u64; 3]) -> Self {
        let bits = (u64::BITS - len.saturating_sub(1).leading_zeros()).max(LEAST_BITS);
        let (low_bits, high_bits) = (bits / 2, bits - bits / 2);
        // Word after word, each on top of a scrambled one before: (0, 1) is not (1, 0).
        let mut state = key.iter().fold(len, |state, word| mix(state) ^ word);
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        });
        let mask = |bits: u32| (1 << bits) - 1;
        Self { len, low_bits, low_mask: mask(low_bits), high_mask: mask(high_bits), keys }
    }

    /// How many numbers there are.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number at position `i`, which is below the length.
    #[inline]
    pub fn at(&self, i: u64) -> u64 {
        debug_assert!(i < self.len);
        let mut at = i;
        loop {
            at = self.scramble(at);
            if at < self.len {
                return at;
            }
        }
    }

    /// Where a number is: `position_of(at(i)) == i`.
    #[inline]
    pub fn position_of(&self, number: u64) -> u64 {
        debug_assert!(number < self.len);
        let mut at = number;
        loop {
            at = self.unscramble(at);
            if at < self.len {
                return at;
            }
        }
    }

    #[inline]
    fn scramble(&self, at: u64) -> u64 {
        let (mut high, mut low) = (at >> self.low_bits, at & self.low_mask);
        for pair in self.keys.chunks_exact(2) {
            high ^= mix(low ^ pair[0]) & self.high_mask;
            low ^= mix(high ^ pair[1]) & self.low_mask;
        }
        high << self.low_bits | low
    }

    #[inline]
    fn unscramble(&self, at: u64) -> u64 {
        let (mut high, mut low) = (at >> self.low_bits, at & self.low_mask);
        for pair in self.keys.chunks_exact(2).rev() {
            low ^= mix(high ^ pair[1]) & self.low_mask;
            high ^= mix(low ^ pair[0]) & self.high_mask;
        }
        high << self.low_bits | low
    }
}

/// The finaliser of splitmix64.
#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(len: u64, key: [u64; 3]) -> Vec<u64> {
        let order = Permutation::new(len, key);
        (0..len).map(|i| order.at(i)).collect()
    }

    #[test]
    fn every_number_comes_once_at_every_length() {
        for len in 0..600 {
            let mut found = all(len, [7, 0, len]);
            found.sort_unstable();
            assert!(found.into_iter().eq(0..len), "{len}");
        }
    }

    proptest! {
        #[test]
        fn a_position_leads_back_to_its_number(len in 1..u64::MAX >> 1, i: u64, key: [u64; 3]) {
            let order = Permutation::new(len, key);
            let i = i % len;
            prop_assert!(order.at(i) < len);
            prop_assert_eq!(order.position_of(order.at(i)), i);
        }
    }

    #[test]
    fn another_key_is_another_order_and_the_same_key_the_same() {
        let keys =
            [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [2, 0, 0], [u64::MAX, 0, 0]];
        let orders: std::collections::HashSet<_> = keys.iter().map(|key| all(1000, *key)).collect();
        assert_eq!(orders.len(), keys.len());
        assert_eq!(all(1000, [3, 4, 5]), all(1000, [3, 4, 5]));
    }

    /// These must not change: a run that goes on with another version would read other samples.
    #[test]
    fn the_order_of_a_key_is_this() {
        assert_eq!(all(10, [13, 0, 0]), [2, 8, 0, 6, 7, 3, 5, 9, 1, 4]);
    }

    /// The mean over many keys of how far the counts of `cell` are from even, per degree of freedom:
    /// about 1 where they are random.
    fn unevenness(cells: usize, keys: u64, cell: impl Fn(u64) -> usize) -> f64 {
        let mut counts = vec![0_u64; cells];
        (0..keys).for_each(|key| counts[cell(key)] += 1);
        let even = keys as f64 / cells as f64;
        let squares = counts.iter().map(|count| (*count as f64 - even).powi(2) / even);
        squares.sum::<f64>() / (cells - 1) as f64
    }

    #[test]
    fn numbers_land_anywhere_and_beside_anybody() {
        for len in [3_u64, 5, 8, 9, 16, 37] {
            let cells = len * (len - 1);
            // Where two neighbours land, out of all pairs.
            let pair = |key: u64| {
                let order = Permutation::new(len, [key, 1, 2]);
                let (a, b) = (order.at(0), order.at(1));
                (a * (len - 1) + b - u64::from(b > a)) as usize
            };
            let found = unevenness(cells as usize, 500 * cells, pair);
            let expected = (2.0 / (cells - 1) as f64).sqrt();
            assert!(found < 1.0 + 6.0 * expected, "{len}: {found}");
        }
    }
}
