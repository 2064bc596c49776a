//! What every limiter must do, whatever it keeps its buckets in.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::{BucketKey, Charge, Level, Limiter, Quota, Rate, Take};

/// A limiter whose clock the test holds.
pub(super) trait Bench: Sync {
    type Limiter: Limiter + 'static;

    fn limiter(&self) -> Arc<Self::Limiter>;

    /// Lets the store's clock go on, and no other.
    async fn advance(&self, by: Duration);
}

const SECOND: Duration = Duration::from_secs(1);

pub(super) fn quota(count: u64, per: Duration, burst: u64) -> Quota {
    Quota { rate: Rate { count: number(count), per }, burst: number(burst) }
}

pub(super) fn number(n: u64) -> NonZeroU64 {
    NonZeroU64::new(n).expect("not zero")
}

pub(super) fn charge(bucket: &BucketKey, quota: Quota, cost: u64) -> Charge<'_> {
    Charge { bucket, quota, cost: number(cost) }
}

/// A number of any magnitude up to 10^15, or an extreme one.
pub(super) fn magnitude() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 1u64..100,
        2 => (0u32..15, 1u64..10).prop_map(|(power, digit)| digit * 10u64.pow(power)),
        1 => Just(999_999_999_999_999),
        1 => Just(1 << 53),
    ]
}

pub(super) fn quotas() -> impl Strategy<Value = Quota> {
    let per = prop_oneof![Just(SECOND), Just(60 * SECOND), Just(3600 * SECOND), Just(86_400 * SECOND)];
    (magnitude(), per, magnitude()).prop_map(|(count, per, burst)| quota(count, per, burst))
}

/// Microseconds between two events, of any magnitude up to some days.
pub(super) fn pauses() -> impl Strategy<Value = u64> {
    (0u32..12, 0u64..10, 0u64..1000).prop_map(|(power, digit, rest)| digit * 10u64.pow(power) + rest)
}

fn taken(take: Take) -> Level {
    match take {
        Take::Taken { level } => level,
        Take::Refused { .. } => panic!("{take:?}"),
    }
}

fn refused(take: Take) -> (Level, Duration) {
    match take {
        Take::Refused { level, retry_after } => (level, retry_after),
        Take::Taken { .. } => panic!("{take:?}"),
    }
}

async fn take<B: Bench>(bench: &B, charges: &[Charge<'_>]) -> Take {
    bench.limiter().take(charges).await.expect("the store answers")
}

pub(super) async fn a_burst_is_granted_then_refused_until_the_rate_brings_more<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("burst");
    let one = [charge(&key, quota(10, SECOND, 3), 1)];
    for left in [2, 1, 0] {
        let level = taken(take(bench, &one).await);
        assert_eq!((level.limit, level.remaining), (3, left));
    }
    let (level, retry_after) = refused(take(bench, &one).await);
    assert_eq!(level, Level { limit: 3, remaining: 0, reset: Duration::from_millis(300) });
    assert_eq!(retry_after, Duration::from_millis(100));
    bench.advance(retry_after).await;
    taken(take(bench, &one).await);
    refused(take(bench, &one).await);
}

pub(super) async fn a_retry_a_microsecond_early_is_refused_and_then_granted<B: Bench>(bench: &B) {
    for (i, (count, per, burst, cost)) in
        [(3, SECOND, 7, 2), (7, SECOND, 7, 7), (600, 60 * SECOND, 13, 1), (7, 3600 * SECOND, 11, 5)]
            .into_iter()
            .enumerate()
    {
        let key = BucketKey::tenant(&format!("retry-{i}"));
        let quota = quota(count, per, burst);
        taken(take(bench, &[charge(&key, quota, burst)]).await);
        let again = [charge(&key, quota, cost)];
        for _ in 0..5 {
            let (_, retry_after) = refused(take(bench, &again).await);
            let early = retry_after.checked_sub(Duration::from_micros(1)).expect("at least that");
            bench.advance(early).await;
            assert_eq!(refused(take(bench, &again).await).1, Duration::from_micros(1));
            bench.advance(Duration::from_micros(1)).await;
            taken(take(bench, &again).await);
        }
    }
}

pub(super) async fn a_refusal_costs_nothing<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("refusal");
    let quota = quota(1, SECOND, 10);
    taken(take(bench, &[charge(&key, quota, 6)]).await);
    let (level, retry_after) = refused(take(bench, &[charge(&key, quota, 5)]).await);
    assert_eq!((level.remaining, retry_after), (4, SECOND));
    for _ in 0..20 {
        assert_eq!(refused(take(bench, &[charge(&key, quota, 5)]).await), (level, retry_after));
    }
    assert_eq!(taken(take(bench, &[charge(&key, quota, 4)]).await).remaining, 0);
}

pub(super) async fn several_charges_are_taken_all_or_none<B: Bench>(bench: &B) {
    let (small, large) = (BucketKey::tenant("small"), BucketKey::tenant("large"));
    let (few, many) = (quota(1, SECOND, 2), quota(1, SECOND, 100));
    let both = [charge(&large, many, 1), charge(&small, few, 1)];
    // Of what was taken, the level is that of the charge closest to refusing.
    assert_eq!(taken(take(bench, &both).await), Level { limit: 2, remaining: 1, reset: SECOND });
    assert_eq!(taken(take(bench, &both).await).remaining, 0);
    for _ in 0..10 {
        let (level, retry_after) = refused(take(bench, &both).await);
        assert_eq!((level.limit, level.remaining, retry_after), (2, 0, SECOND));
        // In whatever order they come.
        let (level, retry_after) = refused(take(bench, &[both[1], both[0]]).await);
        assert_eq!((level.limit, level.remaining, retry_after), (2, 0, SECOND));
    }
    assert_eq!(taken(take(bench, &[charge(&large, many, 1)]).await).remaining, 97, "refusals took nothing");
}

pub(super) async fn of_several_refusals_the_longest_is_told<B: Bench>(bench: &B) {
    let (quick, slow) = (BucketKey::tenant("quick"), BucketKey::tenant("slow"));
    let (fast, long) = (quota(10, SECOND, 1), quota(1, 60 * SECOND, 5));
    taken(take(bench, &[charge(&quick, fast, 1), charge(&slow, long, 5)]).await);
    let (level, retry_after) = refused(take(bench, &[charge(&quick, fast, 1), charge(&slow, long, 1)]).await);
    assert_eq!((level.limit, level.remaining, retry_after), (5, 0, 60 * SECOND));
}

pub(super) async fn a_bucket_named_twice_pays_the_sum<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("twice");
    let quota = quota(1, SECOND, 5);
    let twice = [charge(&key, quota, 2), charge(&key, quota, 1)];
    assert_eq!(taken(take(bench, &twice).await).remaining, 2);
    let (level, retry_after) = refused(take(bench, &twice).await);
    assert_eq!((level.remaining, retry_after), (2, SECOND), "the sum is what is waited for");
    bench.advance(SECOND).await;
    assert_eq!(taken(take(bench, &twice).await).remaining, 0);
}

pub(super) async fn a_cost_above_the_burst_is_never_granted<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("dear");
    let quota = quota(1, SECOND, 5);
    let (level, retry_after) = refused(take(bench, &[charge(&key, quota, 6)]).await);
    assert_eq!((level, retry_after), (Level { limit: 5, remaining: 5, reset: Duration::ZERO }, Duration::MAX));
}

pub(super) async fn what_is_given_back_is_there_again_and_never_above_the_burst<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("back");
    let quota = quota(1, SECOND, 5);
    taken(take(bench, &[charge(&key, quota, 5)]).await);
    bench.limiter().give_back(&[charge(&key, quota, 2)]).await.expect("the store answers");
    assert_eq!(taken(take(bench, &[charge(&key, quota, 1)]).await).remaining, 1);
    for _ in 0..3 {
        bench.limiter().give_back(&[charge(&key, quota, 5)]).await.expect("the store answers");
    }
    assert_eq!(taken(take(bench, &[charge(&key, quota, 1)]).await).remaining, 4);
    let unknown = BucketKey::tenant("never taken from");
    bench.limiter().give_back(&[charge(&unknown, quota, 5)]).await.expect("the store answers");
    assert_eq!(taken(take(bench, &[charge(&unknown, quota, 1)]).await).remaining, 4);
}

pub(super) async fn an_idle_bucket_is_full_again<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("idle");
    let quota = quota(1, SECOND, 4);
    let level = taken(take(bench, &[charge(&key, quota, 4)]).await);
    assert_eq!(level.reset, 4 * SECOND);
    bench.advance(level.reset).await;
    assert_eq!(taken(take(bench, &[charge(&key, quota, 1)]).await).remaining, 3);
}

pub(super) async fn a_quota_that_changes_is_followed_at_once<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("changed");
    taken(take(bench, &[charge(&key, quota(1, SECOND, 100), 10)]).await);
    let level = taken(take(bench, &[charge(&key, quota(1, SECOND, 5), 1)]).await);
    assert_eq!((level.limit, level.remaining), (5, 4), "never above the new burst");
    let level = taken(take(bench, &[charge(&key, quota(1, SECOND, 100), 1)]).await);
    assert_eq!((level.limit, level.remaining), (100, 3), "a larger burst fills at the rate");
}

pub(super) async fn huge_numbers_are_exact<B: Bench>(bench: &B) {
    let key = BucketKey::tenant("huge");
    let quota = quota(999_999_999_999_999, 86_400 * SECOND, 999_999_999_999_999);
    let level = taken(take(bench, &[charge(&key, quota, 1)]).await);
    assert_eq!((level.limit, level.remaining), (999_999_999_999_999, 999_999_999_999_998));
    let level = taken(take(bench, &[charge(&key, quota, 123_451_234_512_345)]).await);
    assert_eq!(level.remaining, 999_999_999_999_998 - 123_451_234_512_345);
}

pub(super) async fn nothing_to_charge_is_taken<B: Bench>(bench: &B) {
    taken(take(bench, &[]).await);
    bench.limiter().give_back(&[]).await.expect("the store answers");
}

pub(super) async fn concurrent_calls_share_one_budget<B: Bench>(bench: &B) {
    let keys = [BucketKey::tenant("shared-a"), BucketKey::tenant("shared-b")];
    let quotas = [quota(1, 86_400 * SECOND, 150), quota(1, 86_400 * SECOND, 100)];
    let calls = (0..300).map(|_| {
        let (limiter, keys) = (bench.limiter(), keys.clone());
        tokio::spawn(async move {
            let both = [charge(&keys[0], quotas[0], 1), charge(&keys[1], quotas[1], 1)];
            limiter.take(&both).await.expect("the store answers")
        })
    });
    let mut granted = 0;
    for call in calls.collect::<Vec<_>>() {
        granted += u64::from(matches!(call.await.expect("no panic"), Take::Taken { .. }));
    }
    assert_eq!(granted, 100, "the smaller bucket bounds both");
    assert_eq!(taken(take(bench, &[charge(&keys[0], quotas[0], 50)]).await).remaining, 0, "refusals took nothing");
}

/// Writes the suite out as tests, each on a bench of its own that `$bench` makes.
macro_rules! conformance {
    (@each $bench:expr, $attribute:meta, $($name:ident,)+) => {
        $(conformance!(@one $bench, $attribute, $name);)+
    };
    (@one $bench:expr, $attribute:meta, $name:ident) => {
        #[$attribute]
        async fn $name() {
            crate::limit::conformance::$name(&$bench).await;
        }
    };
    ($bench:expr, $attribute:meta) => {
        conformance!(@each $bench, $attribute,
            a_burst_is_granted_then_refused_until_the_rate_brings_more,
            a_retry_a_microsecond_early_is_refused_and_then_granted,
            a_refusal_costs_nothing,
            several_charges_are_taken_all_or_none,
            of_several_refusals_the_longest_is_told,
            a_bucket_named_twice_pays_the_sum,
            a_cost_above_the_burst_is_never_granted,
            what_is_given_back_is_there_again_and_never_above_the_burst,
            an_idle_bucket_is_full_again,
            a_quota_that_changes_is_followed_at_once,
            huge_numbers_are_exact,
            nothing_to_charge_is_taken,
            concurrent_calls_share_one_budget,
        );
    };
}
pub(super) use conformance;
