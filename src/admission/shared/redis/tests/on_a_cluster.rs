//! The suite of all stores of slots, on a cluster.

use std::cell::RefCell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntCounter, Registry};

use super::{GENEROUS, NOW, POOL, asks, key};
use crate::admission::shared::conformance::{self, Bench, LEASE};
use crate::admission::shared::redis::{PoolInRedis, RedisSlots, base, enter_text, operations_text};
use crate::admission::shared::slots::{Acquired, Slots};
use crate::config::{self, RedisServers};
use crate::limit::redis::tests::cluster::{Cluster, ask};
use crate::limit::redis::tests::server::RedisServer;
use crate::limit::redis::{RedisLimiter, RedisStore};
use crate::limit::{BucketKey, Charge, Quota, Rate, Take};
use crate::metrics::StoreMetrics;

/// On the node that has the pool.
const CLOCK: &str = "test:clock:{a%20pool}";

thread_local! {
    /// The one that all benches of this test use, one after the other.
    static CLUSTER: RefCell<Option<Rc<Cluster>>> = const { RefCell::new(None) };
}

/// A cluster whose scripts for slots read the time that the test has written.
struct Virtual {
    cluster: Rc<Cluster>,
    cap: usize,
    lease: Duration,
}

impl Virtual {
    fn node(&self) -> &RedisServer {
        &self.cluster.nodes[self.cluster.owner(CLOCK)]
    }

    fn set_clock(&self, micros: u64) {
        let mut pipe = redis::pipe();
        pipe.atomic().del(CLOCK).rpush(CLOCK, &[micros / 1_000_000, micros % 1_000_000]);
        pipe.exec(&mut self.node().connection()).expect("redis answers");
    }
}

impl Bench for Virtual {
    type Slots = RedisSlots;

    fn new(cap: usize, lease: Duration) -> Self {
        let cluster =
            CLUSTER.with_borrow_mut(|cluster| cluster.get_or_insert_with(|| Rc::new(Cluster::start())).clone());
        cluster.nodes.iter().for_each(|node| ask(node, &["FLUSHALL"]));
        let bench = Self { cluster, cap, lease };
        bench.set_clock(NOW * 1_000_000);
        bench
    }

    async fn replica(&self, id: &str) -> RedisSlots {
        let on_test_clock = |text: &str| {
            let clock = format!("redis.call('LRANGE', '{CLOCK}', 0, 1)");
            let moved = text.replace("check('TIME', pcall('TIME'))", &clock);
            assert_ne!(moved, text);
            moved
        };
        let (operations, enter) = (on_test_clock(&operations_text()), enter_text());
        let expiries = IntCounter::new("expiries", "Leases found ended").expect("a good name");
        let base = base("bouncer", POOL);
        let pool = PoolInRedis::with_scripts(&base, id.to_owned(), self.cap, self.lease, expiries, &operations, &enter);
        let servers = RedisServers::Cluster(self.cluster.urls());
        let config = config::Redis { timeout: GENEROUS, ..config::Redis::on(servers) };
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let limiter = RedisLimiter::new(RedisStore::new(&config, &metrics).expect("good URLs"));
        limiter.settled().await;
        RedisSlots::new(Arc::new(limiter), pool)
    }

    async fn advance(&self, by: Duration) {
        let clock: Vec<u64> = ask(self.node(), &["LRANGE", CLOCK, "0", "1"]);
        self.set_clock(clock[0] * 1_000_000 + clock[1] + u64::try_from(by.as_micros()).expect("short"));
    }
}

/// One test, as a cluster takes seconds to start.
#[tokio::test]
async fn the_suite_holds_on_a_cluster() {
    conformance::slots_are_given_up_to_the_cap_and_then_places_up_to_the_length::<Virtual>().await;
    conformance::what_is_asked_twice_is_answered_and_counted_once::<Virtual>().await;
    conformance::nothing_overtakes_a_waiter_of_another_replica::<Virtual>().await;
    conformance::a_slot_passes_to_the_heir_only_where_no_higher_tier_waits::<Virtual>().await;
    conformance::a_replica_without_a_lease_gets_nothing_and_can_not_settle::<Virtual>().await;
    conformance::slots_and_places_of_a_silent_replica_are_reclaimed_when_its_lease_ends_and_not_before::<Virtual>()
        .await;
    conformance::a_heartbeat_keeps_a_lease::<Virtual>().await;
    conformance::settling_makes_the_store_know_what_the_replica_says_even_beyond_the_cap::<Virtual>().await;
    conformance::a_farewell_leaves_nothing::<Virtual>().await;
    conformance::a_try_in_vain_raises_the_epoch_and_a_hand_over_then_does_not_free::<Virtual>().await;
    conformance::a_grant_on_its_way_is_used_until_it_is_claimed::<Virtual>().await;
    conformance::a_grant_that_is_not_claimed_in_time_is_told_until_it_was_heard::<Virtual>().await;
    conformance::a_slot_is_kept_where_its_waiter_has_gone_or_has_the_grant::<Virtual>().await;

    // A bucket is elsewhere than the pool, and is asked first.
    let bench = Virtual::new(9, LEASE);
    let slots = bench.replica("a").await;
    slots.heartbeat(&[]).await.expect("redis answers");
    let one = NonZeroU64::MIN;
    let quota = Quota { rate: Rate { count: one, per: Duration::from_secs(60) }, burst: one };
    let pool = bench.cluster.owner(&key("slots"));
    let buckets = (0..100).map(|n| BucketKey::tenant(&n.to_string()));
    let elsewhere = |bucket: &BucketKey| bench.cluster.owner(bucket.as_str()) != pool;
    let bucket = buckets.into_iter().find(elsewhere).expect("one of many");
    let charges = [Charge { bucket: &bucket, quota, cost: one }];
    let (take, acquired) = slots.enter(&charges, asks(1)).await.expect("redis answers");
    assert!(matches!((take, acquired), (Take::Taken { .. }, Some(Acquired::Granted))), "{take:?} {acquired:?}");
    let (take, acquired) = slots.enter(&charges, asks(2)).await.expect("redis answers");
    assert!(matches!((take, acquired), (Take::Refused { .. }, None)), "{take:?} {acquired:?}");
    let told = slots.heartbeat(&[]).await.expect("redis answers");
    assert_eq!((told.slots, told.waiters), (vec![1], vec![]), "who is refused asked for no slot");
    // Where the pool's node can not answer, the charge stands and the slot is an open question.
    ask::<()>(&bench.cluster.nodes[pool], &["SET", &key("slots"), "foreign"]);
    let other = BucketKey::tenant("other");
    let charges = [Charge { bucket: &other, quota, cost: one }];
    let (take, acquired) = slots.enter(&charges, asks(3)).await.expect("the bucket's node answers");
    assert!(matches!((take, acquired), (Take::Taken { .. }, None)), "{take:?} {acquired:?}");
}
