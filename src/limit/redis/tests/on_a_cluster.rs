//! The suite of all limiters, on a cluster.

use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;

use super::cluster::{Cluster, ask};
use super::{GENEROUS, NOW};
use crate::config::{self, RedisServers};
use crate::limit::conformance::{self, Bench, charge, quota};
use crate::limit::redis::{RedisLimiter, RedisStore, Script};
use crate::limit::{BucketKey, Limiter, Take};
use crate::metrics::StoreMetrics;

/// A cluster whose scripts read the time that the test has written, the same on each node.
struct Virtual {
    cluster: Cluster,
    /// One key on each node.
    clocks: Vec<String>,
    limiter: Arc<RedisLimiter>,
}

impl Virtual {
    async fn start() -> Self {
        let cluster = Cluster::start();
        let clock = |node| {
            let mut clocks = (0..1000).map(|n| format!("test:clock:{n}"));
            clocks.find(|clock| cluster.owner(clock) == node).expect("one of many")
        };
        let clocks: Vec<String> = (0..cluster.nodes.len()).map(clock).collect();
        let here = format!(
            "(function() for _, key in ipairs({{'{}'}}) do local time = redis.pcall('LRANGE', key, 0, 1) \
             if not time.err then return time end end end)()",
            clocks.join("', '")
        );
        let text = Script::BUCKET.replace("check('TIME', pcall('TIME'))", &here);
        assert_ne!(text, Script::BUCKET);
        set_clocks(&cluster, &clocks, NOW);
        let config = config::Redis { timeout: GENEROUS, ..config::Redis::on(RedisServers::Cluster(cluster.urls())) };
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let store = RedisStore::with_script(&config, &metrics, Script::new(&text)).expect("good URLs");
        let limiter = Arc::new(RedisLimiter::new(store));
        limiter.settled().await;
        Self { cluster, clocks, limiter }
    }
}

fn set_clocks(cluster: &Cluster, clocks: &[String], micros: u64) {
    for (node, clock) in cluster.nodes.iter().zip(clocks) {
        let mut pipe = redis::pipe();
        pipe.atomic().del(clock).rpush(clock, &[micros / 1_000_000, micros % 1_000_000]);
        pipe.exec(&mut node.connection()).expect("redis answers");
    }
}

impl Bench for Virtual {
    type Limiter = RedisLimiter;

    fn limiter(&self) -> Arc<RedisLimiter> {
        Arc::clone(&self.limiter)
    }

    async fn advance(&self, by: Duration) {
        let clock: Vec<u64> = ask(&self.cluster.nodes[0], &["LRANGE", &self.clocks[0], "0", "1"]);
        let micros = u64::try_from(by.as_micros()).expect("short");
        set_clocks(&self.cluster, &self.clocks, clock[0] * 1_000_000 + clock[1] + micros);
    }
}

/// One test, as a cluster takes seconds to start. Not in it: that the longest of several refusals is told, for buckets of
/// different hash tags are asked in turn, until one refuses.
#[tokio::test]
async fn the_suite_holds_on_a_cluster() {
    let bench = Virtual::start().await;
    conformance::a_burst_is_granted_then_refused_until_the_rate_brings_more(&bench).await;
    conformance::a_retry_a_microsecond_early_is_refused_and_then_granted(&bench).await;
    conformance::a_refusal_costs_nothing(&bench).await;
    conformance::several_charges_are_taken_all_or_none(&bench).await;
    conformance::a_bucket_named_twice_pays_the_sum(&bench).await;
    conformance::a_cost_above_the_burst_is_never_granted(&bench).await;
    conformance::what_is_given_back_is_there_again_and_never_above_the_burst(&bench).await;
    conformance::an_idle_bucket_is_full_again(&bench).await;
    conformance::a_quota_that_changes_is_followed_at_once(&bench).await;
    conformance::huge_numbers_are_exact(&bench).await;
    conformance::nothing_to_charge_is_taken(&bench).await;
    conformance::concurrent_calls_share_one_budget(&bench).await;

    // One that refuses stops the taking before it comes to the next.
    let (empty, full) = (BucketKey::tenant("empty"), BucketKey::tenant("full"));
    let one = quota(1, 86_400 * Duration::from_secs(1), 1);
    let both = [charge(&empty, one, 1), charge(&full, one, 1)];
    assert!(matches!(bench.limiter.take(&both[..1]).await, Ok(Take::Taken { .. })));
    assert!(matches!(bench.limiter.take(&both).await, Ok(Take::Refused { .. })));
    assert!(matches!(bench.limiter.take(&both[1..]).await, Ok(Take::Taken { .. })));
}
