//! Chance that can be repeated.

use std::ops::Range;
use std::time::Duration;

/// `SplitMix64` (Steele, Lea, Flood 2014): enough to mix a storm, and the same for the same seed everywhere.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// One of them, each as likely as its weight says.
    pub(crate) fn pick<T: Copy>(&mut self, weighted: &[(T, u64)]) -> T {
        let mut left = self.within(0..weighted.iter().map(|(_, weight)| weight).sum());
        for (item, weight) in weighted {
            match left.checked_sub(*weight) {
                None => return *item,
                Some(rest) => left = rest,
            }
        }
        unreachable!("`left` began below the sum of the weights")
    }
}
