//! The arithmetic of a token bucket: state and time in, state out.
//!
//! `redis/bucket.lua` does the same operations in the same order. Lua's numbers are IEEE doubles too, so the two agree
//! to the last bit, and a property test holds them to it. Change them together.
//!
//! A bucket gains `elapsed * count / per` tokens, multiplied first: where a period has gone by a whole number of times,
//! the gain is a whole number. What a bucket holds is exact to half a unit in the last place of a double at each take:
//! under a millionth of a token for bursts up to 10^9, under a tenth of one for 10^15.

use std::num::NonZeroU64;
use std::time::Duration;

use super::{Level, Quota};

/// Waits beyond this many microseconds, 142 years, are all reported as this long. A time of today plus this wait is
/// still below 2^53, where doubles stop telling microseconds apart.
const FOREVER: f64 = 4_503_599_627_370_496.0;

/// The longest lag of a clock that is waited for, in microseconds: a day. Without it a damaged value could stop a bucket
/// that takes years to fill for years.
const LONGEST_LAG: f64 = 86_400_000_000.0;

/// No wait is longer, in microseconds: one that is known, of a bucket whose time is ahead as far as it may be.
pub(super) const LONGEST_WAIT: i64 = 4_503_599_627_370_496 + 86_400_000_000;

/// What a bucket remembers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bucket {
    /// Tokens at the instant `last`.
    tokens: f64,
    /// Microseconds since the epoch of the store's clock, a whole number.
    last: f64,
}

impl Bucket {
    /// A bucket that nobody has taken from, `now` being in microseconds.
    pub fn full(quota: &Quota, now: u64) -> Self {
        Self { tokens: float(quota.burst.get()), last: float(now) }
    }

    /// What a store has kept, made sensible, and whether that took more than a clamp: then it must be written back
    /// even where nothing is taken.
    ///
    /// Tokens are clamped to what the bucket can hold; no number at all counts as a full bucket, as a lost key would.
    /// A `last` further ahead than a whole refill takes, or than a day, is damaged: waiting for it could take for ever.
    /// A bucket left alone for as long as a refill would have expired and been full, so counting from now with the
    /// tokens that are left grants nothing that was not promised. A `last` that is ahead by less comes from a clock
    /// that went back, and is waited for.
    pub fn heal(tokens: f64, last: f64, quota: &Quota, now: u64) -> (Self, bool) {
        let flow = Flow::of(quota);
        let now = float(now);
        if tokens.is_nan() || last.is_nan() {
            return (Self { tokens: flow.burst, last: now }, true);
        }
        let tokens = tokens.max(0.0).min(flow.burst);
        let damaged = last < 0.0 || last - now > (flow.burst * flow.per / flow.count).min(LONGEST_LAG);
        (Self { tokens, last: if damaged { now } else { last } }, damaged)
    }

    /// Takes `cost` tokens at `now`, in microseconds.
    ///
    /// # Errors
    /// How long until the same take succeeds, to the microsecond. The bucket is to stay as it was: that is what makes
    /// the wait exact.
    pub fn take(self, quota: &Quota, cost: NonZeroU64, now: u64) -> Result<Self, Duration> {
        let flow = Flow::of(quota);
        let (cost, now) = (float(cost.get()), float(now));
        if cost > flow.burst {
            return Err(Duration::MAX);
        }
        let tokens = self.tokens_at(&flow, now);
        if tokens < cost {
            return Err(micros(self.wait(&flow, cost, now)));
        }
        Ok(Self { tokens: tokens - cost, last: self.last.max(now) })
    }

    /// Puts `cost` tokens back at `now`, in microseconds.
    #[must_use]
    pub fn give_back(self, quota: &Quota, cost: NonZeroU64, now: u64) -> Self {
        let flow = Flow::of(quota);
        let now = float(now);
        let tokens = (self.tokens_at(&flow, now) + float(cost.get())).min(flow.burst);
        Self { tokens, last: self.last.max(now) }
    }

    /// How full the bucket is at `now`, in microseconds.
    pub fn level(&self, quota: &Quota, now: u64) -> Level {
        let flow = Flow::of(quota);
        let now = float(now);
        Level {
            limit: quota.burst.get(),
            remaining: whole(self.tokens_at(&flow, now).floor()),
            reset: micros(self.wait(&flow, flow.burst, now)),
        }
    }

    /// Whether the bucket is as good as forgotten at `now`, in microseconds.
    pub fn is_full(&self, quota: &Quota, now: u64) -> bool {
        let flow = Flow::of(quota);
        self.tokens_at(&flow, float(now)) >= flow.burst
    }

    /// Tokens and last, to compare with what a store has kept.
    #[cfg(test)]
    pub(super) fn parts(self) -> (f64, f64) {
        (self.tokens, self.last)
    }

    /// A clock that has gone back adds nothing, and because `last` never moves back nothing is added twice.
    fn tokens_at(&self, flow: &Flow, now: f64) -> f64 {
        flow.burst.min(flow.after(self.tokens, (now - self.last).max(0.0)))
    }

    /// Microseconds from `now` until the bucket holds `target` tokens.
    fn wait(&self, flow: &Flow, target: f64, now: f64) -> f64 {
        if self.tokens_at(flow, now) >= target {
            return 0.0;
        }
        let elapsed = flow.elapsed_until(self.tokens, target);
        if elapsed < FOREVER { self.last + elapsed - now } else { FOREVER }
    }
}

/// A quota as the numbers that are calculated with.
struct Flow {
    count: f64,
    /// Microseconds.
    per: f64,
    burst: f64,
}

impl Flow {
    fn of(quota: &Quota) -> Self {
        Self { count: float(quota.rate.count.get()), per: float(period(quota)), burst: float(quota.burst.get()) }
    }

    fn after(&self, tokens: f64, elapsed: f64) -> f64 {
        tokens + elapsed * self.count / self.per
    }

    /// The least number of microseconds that takes the bucket from `tokens` to `target`; it is below the target now.
    ///
    /// The quotient is only a guess: it is rounded differently than the sum that the take looks at. So the sum itself
    /// is asked, which never falls as time goes on. Nearly always the guess or its neighbour is right. Where a token is
    /// near the last place of a double it can be far off, hence steps that double, and a bisection: at most 160
    /// questions.
    fn elapsed_until(&self, tokens: f64, target: f64) -> f64 {
        let reached = |elapsed| self.after(tokens, elapsed) >= target;
        let mut low = 0.0;
        let mut high = ((target - tokens) * self.per / self.count).ceil().min(FOREVER);
        let mut step = 1.0;
        while high < FOREVER && !reached(high) {
            low = high;
            high = (high + step).min(FOREVER);
            step *= 2.0;
        }
        if high >= FOREVER {
            return FOREVER;
        }
        let mut below = high - 1.0;
        step = 1.0;
        while below > low && reached(below) {
            high = below;
            below -= step;
            step *= 2.0;
        }
        low = low.max(below);
        while high - low > 1.0 {
            let middle = low.midpoint(high).floor();
            if reached(middle) {
                high = middle;
            } else {
                low = middle;
            }
        }
        high
    }
}

/// The period of a quota's rate in microseconds.
pub(super) fn period(quota: &Quota) -> u64 {
    u64::try_from(quota.rate.per.as_micros()).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "counts are at most 2^53, clocks below it for the next 200 years")]
fn float(number: u64) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, not negative, at most 2^53")]
fn whole(number: f64) -> u64 {
    number as u64
}

fn micros(number: f64) -> Duration {
    Duration::from_micros(whole(number))
}

#[cfg(test)]
mod tests;
