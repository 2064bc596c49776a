use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};

use futures::{FutureExt, poll};

use super::*;
use crate::admission::{QueueBounds, slots};
use crate::identity::public::PublicPaths;
use crate::identity::request::Rules;
use crate::identity::{KeyHash, Tier};
use crate::limit::outage::{Limits, Metered, Stores};
use crate::limit::{BucketKey, Quota, Rate};

const SECOND: Duration = Duration::from_secs(1);

/// Two tiers, `high` and `low`, with one tenant each, whose key is its name; burst 3, refilled once a minute.
struct Fixture {
    gate: Arc<Gate>,
    shared: Arc<Shared>,
    limits: Limits,
    rules: Rules,
}

impl Fixture {
    fn new(cap: usize, length: usize) -> Self {
        let tiers: Vec<_> =
            ["high", "low"].into_iter().enumerate().map(|(rank, name)| tier(rank, name, length)).collect();
        let tenants = tiers.iter().map(|tier| {
            let id = tier.name.clone();
            let tenant = Tenant { bucket: BucketKey::tenant(&id), id, tier: tier.clone() };
            (KeyHash::of(tier.name.as_bytes()), Arc::new(tenant))
        });
        let metrics = Arc::new(Metrics::new(&tiers).unwrap());
        let stores = Stores::new(None, &metrics.stores).unwrap();
        let pool = slots::Pool::new(NonZeroUsize::new(cap).unwrap(), [length, length]);
        let shared = Shared::new(Directory::new(tenants), Pool::Own(pool.clone()), metrics);
        let limits = stores.limits();
        let rules =
            Rules::new(&[http::HeaderName::from_static("x-api-key")], false, PublicPaths::new(["/open"]).unwrap());
        let gate = Arc::new(Gate::new(shared.clone(), Entrance::own(limits.clone(), pool)));
        Self { gate, shared, limits, rules }
    }

    fn request(&self, path: &str, key: &str) -> Request {
        let lines = [(":method", "GET"), (":path", path), ("x-api-key", key)];
        Request::read(lines.map(|(name, value)| (name.as_bytes(), value.as_bytes())), &self.rules)
    }

    async fn judge(&self, key: &str) -> Verdict {
        self.gate.judge(&self.request("/", key), Deadline::NONE).await
    }

    /// A request of this key that is held, and polled once.
    async fn held(&self, key: &str) -> futures::future::BoxFuture<'static, Verdict> {
        let (gate, request) = (self.gate.clone(), self.request("/", key));
        let mut verdict = async move { gate.judge(&request, Deadline::NONE).await }.boxed();
        assert!(poll!(&mut verdict).is_pending());
        verdict
    }
}

fn tier(rank: usize, name: &str, length: usize) -> Arc<Tier> {
    Arc::new(Tier {
        rank,
        name: name.into(),
        quota: Quota {
            rate: Rate { count: NonZeroU64::MIN, per: Duration::from_secs(60) },
            burst: NonZeroU64::new(3).unwrap(),
        },
        weight: NonZeroU32::MIN,
        queue: QueueBounds { length, max_wait: 5 * SECOND },
        on_outage: None,
    })
}

fn pass(verdict: Verdict) -> Pass {
    match verdict {
        Verdict::Allow(pass) => pass,
        other => panic!("expected a yes, got {other:?}"),
    }
}

fn refusal(verdict: Verdict) -> Refusal {
    match verdict {
        Verdict::Refuse(refusal) => refusal,
        other => panic!("expected a no, got {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_known_key_passes_with_its_tenant_and_level_and_holds_a_slot() {
    let gate = Fixture::new(1, 5);
    let pass = pass(gate.judge("high").await);
    assert_eq!(pass.tenant.unwrap().id, "high");
    assert_eq!(pass.level.unwrap(), Level { limit: 3, remaining: 2, reset: 60 * SECOND });
    assert_eq!(gate.shared.pool.stats().in_flight, 1);
    drop(pass.flight);
    assert_eq!(gate.shared.pool.stats().in_flight, 0);
    assert_eq!(gate.shared.metrics.tier(0).forwarded.get(), 1);
    assert_eq!(gate.shared.metrics.tier(0).backend_duration.get_sample_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn unknown_and_missing_keys_are_refused_and_counted_for_nobody() {
    let gate = Fixture::new(1, 5);
    assert_eq!(refusal(gate.judge("wrong").await).reason, Reason::InvalidKey);
    assert_eq!(refusal(gate.judge("").await).reason, Reason::MissingKey);
    assert_eq!(gate.shared.metrics.nobody.unauthorized.get(), 2);
    assert_eq!(gate.shared.pool.stats().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn a_public_path_needs_no_key_no_token_and_no_slot() {
    let gate = Fixture::new(1, 5);
    let _in_use = pass(gate.judge("high").await);
    let verdict = gate.gate.judge(&gate.request("/open", "high"), Deadline::NONE).await;
    let pass = pass(verdict);
    assert!(pass.tenant.is_none() && pass.level.is_none() && pass.flight.is_none());
}

#[tokio::test(start_paused = true)]
async fn an_empty_bucket_is_429_with_an_exact_wait_and_takes_no_slot() {
    let gate = Fixture::new(9, 5);
    for _ in 0..3 {
        pass(gate.judge("high").await);
    }
    let refusal = refusal(gate.judge("high").await);
    assert_eq!(refusal.reason, Reason::RateLimited);
    assert_eq!(refusal.retry_after, Some(60 * SECOND));
    assert_eq!(refusal.level.unwrap().remaining, 0);
    tokio::time::advance(Duration::from_micros(59_999_999)).await;
    assert!(matches!(gate.judge("high").await, Verdict::Refuse(_)), "not before");
    tokio::time::advance(Duration::from_micros(1)).await;
    pass(gate.judge("high").await);
    pass(gate.judge("low").await);
}

#[tokio::test(start_paused = true)]
async fn a_held_request_is_served_when_a_slot_frees_and_says_how_long_it_waited() {
    let gate = Fixture::new(1, 5);
    let first = pass(gate.judge("low").await);
    let held = gate.held("high").await;
    tokio::time::advance(2 * SECOND).await;
    drop(first);
    let pass = pass(held.await);
    assert_eq!(pass.waited, 2 * SECOND);
    let metrics = gate.shared.metrics.tier(0);
    assert_eq!((metrics.queued.get(), metrics.forwarded.get()), (1, 0), "queued is not forwarded at once");
    assert_eq!(metrics.queue_wait.get_sample_count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_waited_its_tiers_longest_is_shed_at_that_instant_with_its_level() {
    let gate = Fixture::new(1, 5);
    let _in_use = pass(gate.judge("low").await);
    let start = Instant::now();
    let refusal = refusal(gate.judge("high").await);
    assert_eq!(start.elapsed(), 5 * SECOND);
    assert_eq!((refusal.reason, refusal.retry_after), (Reason::QueueTimeout, Some(SECOND)));
    assert_eq!(refusal.level.unwrap().remaining, 2, "a token that was taken stays spent");
    assert_eq!(gate.shared.metrics.tier(0).queued.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hold_ends_before_the_deadline_of_the_proxy() {
    let gate = Fixture::new(1, 5);
    let _in_use = pass(gate.judge("low").await);
    for (timeout, hold) in [(200, 180), (2_000, 1_800), (60_000, 5_000), (10, 0), (0, 0)] {
        let start = Instant::now();
        let deadline = Deadline::after(start, Duration::from_millis(timeout));
        let verdict = gate.gate.judge(&gate.request("/", "high"), deadline).await;
        match refusal(verdict).reason {
            Reason::QueueTimeout => assert_eq!(start.elapsed(), Duration::from_millis(hold), "timeout {timeout} ms"),
            reason => assert_eq!(reason, Reason::RateLimited),
        }
        tokio::time::advance(120 * SECOND).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_sheds_at_once() {
    let gate = Fixture::new(1, 1);
    let _in_use = pass(gate.judge("low").await);
    let _held = gate.held("low").await;
    let refusal = refusal(gate.judge("low").await);
    assert_eq!((refusal.reason, refusal.waited), (Reason::QueueFull, Duration::ZERO));
    let text = gate.shared.metrics.render().unwrap();
    assert!(text.contains(r#"bouncer_shed_total{reason="queue_full",tier="low"} 1"#), "{text}");
    assert!(text.contains(r#"bouncer_requests_total{outcome="shed",tier="low"} 1"#), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_goes_away_while_held_is_counted_and_frees_its_place() {
    let gate = Fixture::new(1, 1);
    let _in_use = pass(gate.judge("low").await);
    drop(gate.held("low").await);
    assert_eq!(gate.shared.pool.stats().waiting, [0, 0]);
    assert_eq!(gate.shared.metrics.tier(1).abandoned.get(), 1);
    drop(gate.held("low").await);
}

#[tokio::test(start_paused = true)]
async fn closing_refuses_held_and_new_requests_and_leaves_what_is_in_flight() {
    let gate = Fixture::new(1, 5);
    let first = pass(gate.judge("low").await);
    let held = gate.held("high").await;
    gate.shared.close(Held::Refuse);
    assert_eq!(refusal(held.await).reason, Reason::ShuttingDown);
    let refused = refusal(gate.judge("high").await);
    assert_eq!((refused.reason, refused.level), (Reason::ShuttingDown, None), "nobody is charged any more");
    assert_eq!(refusal(gate.judge("wrong").await).reason, Reason::InvalidKey);
    assert_eq!(gate.shared.pool.stats().in_flight, 1);
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_moves_gets_its_token_back() {
    let gate = Fixture::new(1, 5);
    let first = pass(gate.judge("low").await);
    let held = gate.held("high").await;
    gate.shared.close(Held::Move);
    assert!(matches!(held.await, Verdict::Move));
    assert!(matches!(gate.judge("high").await, Verdict::Move));
    drop(first);
    let charge = [Charge { bucket: &BucketKey::tenant("high"), quota: tier(0, "high", 1).quota, cost: ONE }];
    let Metered::Taken(level) = gate.limits.take(&charge, None).await else { panic!("not taken") };
    assert_eq!(level.remaining, 2, "only this one was taken");
}
