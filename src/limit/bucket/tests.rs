use proptest::prelude::*;

use super::super::conformance::{magnitude, number, pauses, quota, quotas};
use super::*;

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);
/// A time of today in microseconds.
const NOW: u64 = 1_790_000_000_000_000;

#[test]
fn whole_periods_bring_whole_tokens() {
    let quota = quota(3, Duration::from_secs(60), 100);
    let empty = Bucket::full(&quota, NOW).take(&quota, number(100), NOW).expect("full");
    for periods in 1..=33 {
        let level = empty.level(&quota, NOW + periods * 60_000_000);
        assert_eq!(level.remaining, 3 * periods);
        assert!(empty.take(&quota, number(3 * periods), NOW + periods * 60_000_000 - 1).is_err());
    }
}

#[test]
fn reset_and_retry_of_an_empty_bucket_are_those_of_the_formula() {
    let quota = quota(10, SECOND, 20);
    let empty = Bucket::full(&quota, NOW).take(&quota, number(20), NOW).expect("full");
    assert_eq!(empty.level(&quota, NOW), Level { limit: 20, remaining: 0, reset: Duration::from_secs(2) });
    assert_eq!(empty.take(&quota, number(1), NOW), Err(Duration::from_millis(100)));
    assert_eq!(empty.take(&quota, number(1), NOW + 30_000), Err(Duration::from_millis(70)));
}

#[test]
fn a_cost_above_the_burst_is_never_granted() {
    let quota = quota(10, SECOND, 20);
    assert_eq!(Bucket::full(&quota, NOW).take(&quota, number(21), NOW), Err(Duration::MAX));
}

#[test]
fn a_clock_that_goes_back_never_refills_twice() {
    let quota = quota(5, SECOND, 5);
    let mut bucket = Bucket::full(&quota, NOW);
    let mut taken = 0;
    // One caller's clock is a second behind the other's; ten seconds go by.
    for step in 0..1000u64 {
        let now = NOW + step * 10_000 - (step % 2) * 1_000_000;
        if let Ok(next) = bucket.take(&quota, number(1), now) {
            bucket = next;
            taken += 1;
        }
    }
    assert!(taken <= 5 + 5 * 10, "{taken} taken");
    assert!(taken >= 5 + 5 * 9, "{taken} taken");
}

#[test]
fn a_wait_while_the_clock_is_behind_includes_its_lag() {
    let quota = quota(1, SECOND, 1);
    let empty = Bucket::full(&quota, NOW).take(&quota, number(1), NOW).expect("full");
    assert_eq!(empty.take(&quota, number(1), NOW - 400_000), Err(Duration::from_millis(1400)));
}

#[test]
fn huge_numbers_stay_exact() {
    let quota = quota(999_999_999_999_999, DAY, 999_999_999_999_999);
    let bucket = Bucket::full(&quota, NOW).take(&quota, number(1), NOW).expect("full");
    let level = bucket.level(&quota, NOW);
    assert_eq!((level.limit, level.remaining), (999_999_999_999_999, 999_999_999_999_998));
    let bucket = bucket.take(&quota, number(123_451_234_512_345), NOW).expect("nearly full");
    assert_eq!(bucket.level(&quota, NOW).remaining, 999_999_999_999_998 - 123_451_234_512_345);
}

#[test]
fn damage_heals_to_a_bucket_that_works() {
    let quota = quota(10, SECOND, 20);
    let now = float(NOW);
    let full = Bucket::full(&quota, NOW);
    let empty = Bucket { tokens: 0.0, last: now };
    assert_eq!(Bucket::heal(f64::NAN, now, &quota, NOW), (full, true));
    assert_eq!(Bucket::heal(1.0, f64::NAN, &quota, NOW), (full, true));
    assert_eq!(Bucket::heal(f64::INFINITY, now, &quota, NOW), (full, false));
    assert_eq!(Bucket::heal(1e300, now, &quota, NOW), (full, false));
    assert_eq!(Bucket::heal(-1e300, now, &quota, NOW), (empty, false));
    assert_eq!(Bucket::heal(f64::NEG_INFINITY, now, &quota, NOW), (empty, false));
    assert_eq!(Bucket::heal(0.0, f64::INFINITY, &quota, NOW), (empty, true));
    assert_eq!(Bucket::heal(0.0, -1.0, &quota, NOW), (empty, true));
    // Two seconds fill it: as far ahead as that may be a clock that went back, beyond it is damage.
    let ahead = Bucket { tokens: 0.0, last: now + 2e6 };
    assert_eq!(Bucket::heal(0.0, now + 2e6, &quota, NOW), (ahead, false));
    assert_eq!(Bucket::heal(0.0, now + 2e6 + 1.0, &quota, NOW), (empty, true));
}

#[test]
fn waits_beyond_reason_are_capped_rather_than_wrong() {
    let quota = quota(1, DAY, 1 << 53);
    let empty = Bucket::full(&quota, NOW).take(&quota, quota.burst, NOW).expect("full");
    assert_eq!(empty.take(&quota, quota.burst, NOW), Err(micros(FOREVER)));
    assert_eq!(empty.level(&quota, NOW).reset, micros(FOREVER));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn a_refused_take_succeeds_exactly_when_it_was_told(
        quota in quotas(),
        events in prop::collection::vec((pauses(), 0.0f64..1.0), 1..30),
    ) {
        let mut now = NOW;
        let mut bucket = Bucket::full(&quota, now);
        for (pause, share) in events {
            now += pause;
            let cost = number(whole(float(quota.burst.get()) * share).max(1));
            match bucket.take(&quota, cost, now) {
                Ok(next) => bucket = next,
                Err(wait) if wait < micros(FOREVER) => {
                    let wait = u64::try_from(wait.as_micros()).expect("bounded");
                    prop_assert!(wait >= 1);
                    prop_assert!(bucket.take(&quota, cost, now + wait - 1).is_err(), "not before");
                    prop_assert!(bucket.take(&quota, cost, now + wait).is_ok(), "then");
                }
                Err(_) => {}
            }
        }
    }

    #[test]
    fn a_bucket_is_full_exactly_when_its_level_says(quota in quotas(), pause in pauses(), share in 0.0f64..1.0) {
        let cost = number(whole(float(quota.burst.get()) * share).max(1));
        let bucket = Bucket::full(&quota, NOW).take(&quota, cost, NOW).expect("full");
        let now = NOW + pause;
        let reset = bucket.level(&quota, now).reset;
        prop_assert_eq!(reset.is_zero(), bucket.is_full(&quota, now));
        if !reset.is_zero() && reset < micros(FOREVER) {
            let reset = u64::try_from(reset.as_micros()).expect("bounded");
            prop_assert!(!bucket.is_full(&quota, now + reset - 1));
            prop_assert!(bucket.is_full(&quota, now + reset));
        }
    }

    #[test]
    fn no_more_is_granted_than_burst_and_rate_allow(
        count in 1u64..1000,
        burst in 1u64..1_000_000,
        events in prop::collection::vec((pauses(), 1u64..50), 1..60),
    ) {
        let quota = quota(count, SECOND, burst);
        let mut now = NOW;
        let mut bucket = Bucket::full(&quota, now);
        let mut granted = 0u64;
        for (pause, cost) in events {
            now += pause;
            if let Ok(next) = bucket.take(&quota, number(cost), now) {
                bucket = next;
                granted += cost;
            }
            // In millionths of a token, and one token for the rounding.
            let promised = u128::from(burst + 1) * 1_000_000 + u128::from(now - NOW) * u128::from(count);
            prop_assert!(u128::from(granted) * 1_000_000 <= promised);
        }
    }

    #[test]
    fn what_is_given_back_can_be_taken_again(quota in quotas(), share in 0.0f64..1.0) {
        let cost = number(whole(float(quota.burst.get()) * share).max(1));
        let taken = Bucket::full(&quota, NOW).take(&quota, cost, NOW).expect("full");
        let back = taken.give_back(&quota, cost, NOW);
        prop_assert_eq!(back, Bucket::full(&quota, NOW));
        prop_assert_eq!(back.give_back(&quota, cost, NOW), back, "never above the burst");
    }

    #[test]
    fn whatever_is_stored_the_arithmetic_stays_within_bounds(
        quota in quotas(),
        tokens in any::<f64>(),
        last in any::<f64>(),
        cost in magnitude(),
        now in 0..2 * NOW,
    ) {
        let (bucket, _) = Bucket::heal(tokens, last, &quota, now);
        let level = bucket.level(&quota, now);
        prop_assert!(level.remaining <= level.limit);
        match bucket.take(&quota, number(cost), now) {
            Ok(next) => prop_assert!(next.level(&quota, now).remaining <= quota.burst.get() - cost),
            Err(wait) => prop_assert!(!wait.is_zero()),
        }
    }
}
