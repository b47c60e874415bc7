//! How long a server's answers take: counts by size, four sizes from one power of two to the next.

use std::time::Duration;

const PER_OCTAVE: u32 = 4;
/// From a microsecond to more than a minute.
const SIZES: usize = 27 * PER_OCTAVE as usize;

/// Of one server, as this process saw it.
pub(super) struct Latency([u32; SIZES]);

impl Latency {
    pub(super) fn new() -> Self {
        Self([0; SIZES])
    }

    pub(super) fn note(&mut self, took: Duration) {
        let count = &mut self.0[size(took)];
        *count = count.saturating_add(1);
    }

    /// The time within which so many of a hundred answers came, to a fifth of it; zero: there were none.
    pub(super) fn percentile(&self, percent: u64) -> Duration {
        let all: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let mut left = (all * percent).div_ceil(100);
        for (size, &count) in self.0.iter().enumerate() {
            left = left.saturating_sub(u64::from(count));
            if left == 0 && all > 0 {
                return longest(size);
            }
        }
        Duration::ZERO
    }
}

fn size(took: Duration) -> usize {
    let micros = took.as_nanos() as f64 / 1e3;
    let size = micros.max(1.0).log2() * f64::from(PER_OCTAVE);
    (size as usize).min(SIZES - 1)
}

/// What is of that size takes less.
fn longest(size: usize) -> Duration {
    Duration::from_secs_f64(((size + 1) as f64 / f64::from(PER_OCTAVE)).exp2() / 1e6)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_what_was_noted() {
        let mut seen = Latency::new();
        assert_eq!(seen.percentile(50), Duration::ZERO);
        (1..=1000).for_each(|micros| seen.note(Duration::from_micros(micros)));
        for percent in [1, 50, 90, 99, 100] {
            let (found, exact) = (seen.percentile(percent), Duration::from_micros(percent * 10));
            assert!(found >= exact && found < exact.mul_f64(1.2), "{percent}: {found:?}");
        }
        seen.note(Duration::from_secs(100_000));
        seen.note(Duration::ZERO);
        assert!(seen.percentile(100) > Duration::from_secs(60));
    }
}
