//! An order of the numbers below a length, given by a key; no list of them is made.
//!
//! A Feistel network over the least power of two that holds the length: each round changes one half of
//! the bits by a function of the other, so it can be undone, whatever the function. A result that is not
//! below the length is put in again until one is ("cycle walking"): less than twice on average.
#![allow(unsafe_code)] // what the processor has beyond the least

/// Fewer leave traces of the order where the length is small, which the tests below find with four.
const ROUNDS: usize = 8;
/// Halves of three bits leave such traces with the best of functions, in the order of three or four numbers.
const LEAST_BITS: u32 = 8;
const LOW: u64 = u32::MAX as u64;
/// So many numbers are put in place together.
const TOGETHER: usize = 128;

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

    /// Puts the number at each position in its place; all are below the length. Many at a time, and those
    /// that have to be put in again together: the compiler makes vectors of them.
    pub fn put_each(&self, positions: &mut [u64]) {
        let (mut again, mut places) = ([0_u64; TOGETHER], [0_u8; TOGETHER]);
        for chunk in positions.chunks_mut(TOGETHER) {
            debug_assert!(chunk.iter().all(|&at| at < self.len));
            self.scramble_each(chunk);
            let mut left = 0;
            for (place, &at) in chunk.iter().enumerate() {
                (again[left], places[left]) = (at, place as u8);
                left += usize::from(at >= self.len);
            }
            while left > 0 {
                self.scramble_each(&mut again[..left]);
                for i in 0..std::mem::take(&mut left) {
                    let (at, place) = (again[i], places[i]);
                    chunk[place as usize] = at;
                    (again[left], places[left]) = (at, place);
                    left += usize::from(at >= self.len);
                }
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

    fn scramble_each(&self, numbers: &mut [u64]) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it.
            return unsafe { self.scramble_each_by_four(numbers) };
        }
        numbers.iter_mut().for_each(|at| *at = self.scramble(*at));
    }

    /// The same, in twice as long vectors.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[target_feature(enable = "avx2")]
    fn scramble_each_by_four(&self, numbers: &mut [u64]) {
        numbers.iter_mut().for_each(|at| *at = self.scramble(*at));
    }

    #[inline(always)]
    fn scramble(&self, at: u64) -> u64 {
        let (mut high, mut low) = (at >> self.low_bits, at & self.low_mask);
        for pair in self.keys.chunks_exact(2) {
            high ^= folded(low, pair[0]) & self.high_mask;
            low ^= folded(high, pair[1]) & self.low_mask;
        }
        high << self.low_bits | low
    }

    #[inline]
    fn unscramble(&self, at: u64) -> u64 {
        let (mut high, mut low) = (at >> self.low_bits, at & self.low_mask);
        for pair in self.keys.chunks_exact(2).rev() {
            low ^= folded(high, pair[1]) & self.low_mask;
            high ^= folded(low, pair[0]) & self.high_mask;
        }
        high << self.low_bits | low
    }
}

/// What a round makes of one half, which has 32 bits at the most: the middle of a product of what two halves
/// of a key make of it, to which every bit of the half contributes, and not in proportion. A product of 32
/// bits by 32 is one that processors make several of at a time.
#[inline(always)]
fn folded(half: u64, key: u64) -> u64 {
    let (a, b) = (half ^ (key >> 32), half ^ (key & LOW));
    ((a & LOW) * (b & LOW)) >> 16
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
            let mut both = [i, len - 1 - i];
            order.put_each(&mut both);
            prop_assert_eq!(both, [order.at(i), order.at(len - 1 - i)]);
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
        assert_eq!(all(10, [13, 0, 0]), [1, 7, 5, 6, 9, 2, 4, 0, 8, 3]);
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
        for len in [3_u64, 5, 8, 9, 16, 37, 300] {
            let cells = len * (len - 1);
            // Where two neighbours land, out of all pairs.
            let pair = |key: u64| {
                let order = Permutation::new(len, [key, 1, 2]);
                let (a, b) = (order.at(0), order.at(1));
                (a * (len - 1) + b - u64::from(b > a)) as usize
            };
            are_even(cells, (250_000 / cells).max(50), pair, len);
        }
    }

    #[test]
    fn three_in_a_row_land_anywhere() {
        for len in [4_u64, 5, 8, 13, 32] {
            let triple = |key: u64| {
                let order = Permutation::new(len, [1, key, 2]);
                (order.at(0) * len * len + order.at(1) * len + order.at(2)) as usize
            };
            let mut numbers = std::collections::HashMap::new();
            for a in 0..len {
                for b in (0..len).filter(|&b| b != a) {
                    for c in (0..len).filter(|&c| c != a && c != b) {
                        let next = numbers.len();
                        numbers.insert((a * len * len + b * len + c) as usize, next);
                    }
                }
            }
            let cells = len * (len - 1) * (len - 2);
            are_even(cells, (250_000 / cells).max(50), |key| numbers[&triple(key)], len);
        }
    }

    /// How far apart two neighbours land, where lengths are those of datasets.
    #[test]
    fn neighbours_land_at_any_distance() {
        for len in [1_u64 << 16, 100_000, 1 << 33, 1 << 40] {
            let distance = |key: u64| {
                let order = Permutation::new(len, [3, 2, key]);
                let at = key % (len - 2);
                let (a, b, c) = (order.at(at), order.at(at + 1), order.at(at + 2));
                let apart = |a: u64, b: u64| ((a + len - b) % len) as u128 * 16 / len as u128;
                (apart(a, b) * 16 + apart(c, b)) as usize
            };
            are_even(256, 1000, distance, len);
        }
    }

    fn are_even(cells: u64, each: u64, cell: impl Fn(u64) -> usize, len: u64) {
        let found = unevenness(cells as usize, each * cells, cell);
        let expected = (2.0 / (cells - 1) as f64).sqrt();
        assert!(found < 1.0 + 6.0 * expected, "{len}: {found}");
    }
}
