//! Several processes of bouncer within a test, as far as admission goes.

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bouncer::admission::shared::redis::{PoolInRedis, RedisSlots, listen, replica_id};
use bouncer::admission::shared::{Coordinator, Desk, Entered, Pool, Slot, Ticket};
use bouncer::admission::{Entry, Turn};
use bouncer::config::{self, RedisServers};
use bouncer::limit::outage::{Limits, Stores};
use bouncer::limit::{BucketKey, Charge, Quota, Rate};
use bouncer::metrics::{ReplicaMetrics, StoreMetrics};
use futures_util::future::join_all;
use prometheus::Registry;
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

use super::server::RedisServer;

pub(crate) type SharedSlot = Slot<RedisSlots>;
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) type SharedTicket = Ticket<RedisSlots>;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// So that a busy machine does not look like an outage.
pub(crate) const GENEROUS: Duration = Duration::from_secs(20);
/// For the tests of outages. Longer than the default of the configuration, for the sake of busy machines.
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) const SHORT: Duration = Duration::from_millis(200);
/// Long enough for any test that does not wait for its end.
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(30);
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) const LENGTH: usize = 1000;

/// Servers that replicas can share.
pub(crate) trait Reached: Sync {
    fn servers(&self) -> RedisServers;
}

impl Reached for RedisServer {
    fn servers(&self) -> RedisServers {
        RedisServers::Single(self.url())
    }
}

/// One process of bouncer, as far as admission goes, with two tiers.
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) struct Replica {
    /// Gone when it is killed.
    pub(crate) runtime: Option<Runtime>,
    pub(crate) pool: Arc<Pool<RedisSlots>>,
    pub(crate) desk: Arc<Desk<RedisSlots>>,
    pub(crate) coordinator: Arc<Coordinator<RedisSlots>>,
    pub(crate) tasks: tokio::task::JoinHandle<()>,
    pub(crate) stores: Stores,
    pub(crate) names: Arc<PoolInRedis>,
    pub(crate) limits: Limits,
    pub(crate) metrics: ReplicaMetrics,
    pub(crate) id: String,
    prefix: &'static str,
}

pub(crate) struct Settings {
    pub(crate) cap: usize,
    pub(crate) lease: Duration,
    pub(crate) timeout: Duration,
    pub(crate) prefix: &'static str,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Settings {
    pub(crate) fn cap(cap: usize) -> Self {
        Self { cap, lease: LONG_LEASE, timeout: GENEROUS, prefix: "bouncer" }
    }
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Replica {
    pub(crate) async fn start(server: &impl Reached, settings: &Settings) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let (mut replica, limits) = {
            let _within = runtime.enter();
            let registry = Registry::new();
            let metrics = ReplicaMetrics::register(&registry).expect("names are new");
            let redis = config::Redis {
                timeout: settings.timeout,
                prefix: settings.prefix.to_owned(),
                ..config::Redis::on(server.servers())
            };
            let store_metrics = StoreMetrics::register(&registry).expect("names are new");
            let stores = Stores::new(Some(&redis), &store_metrics).expect("a good URL");
            let cap = NonZeroUsize::new(settings.cap).expect("not zero");
            let pool = Pool::new(cap, [LENGTH, LENGTH], settings.lease, metrics.clone());
            let id = replica_id().expect("randomness");
            let expiries = metrics.lease_expiries.clone();
            let names =
                PoolInRedis::new(settings.prefix, "default", id.clone(), settings.cap, settings.lease, expiries);
            let desk = |limits: &Limits| {
                let redis = limits.redis().expect("limits in redis").clone();
                Desk::new(pool.clone(), RedisSlots::new(redis, names.clone()))
            };
            let (limits, own) = (stores.limits(), stores.limits());
            let coordinator = Arc::new(Coordinator::new(desk(&own)));
            let listener = listen(stores.redis().expect("there is one").clone(), names.clone(), pool.clone());
            let work = coordinator.clone();
            let tasks = runtime.spawn(async move {
                own.settled().await;
                tokio::join!(work.run(), listener);
            });
            let desk = desk(&limits);
            (
                Self {
                    runtime: None,
                    stores,
                    names,
                    pool,
                    desk,
                    coordinator,
                    tasks,
                    limits: limits.clone(),
                    metrics,
                    id,
                    prefix: settings.prefix,
                },
                limits,
            )
        };
        limits.settled().await;
        replica.pool.settled().await;
        replica.runtime = Some(runtime);
        replica
    }

    pub(crate) async fn several(count: usize, server: &impl Reached, settings: &Settings) -> Vec<Self> {
        let replicas = join_all((0..count).map(|_| Self::start(server, settings))).await;
        // So that each has seen all of them.
        for replica in &replicas {
            let all = || replica.pool.shared_stats().replicas == count;
            becomes("all replicas known", 2 * settings.lease / 10 + 5 * SECOND, all).await;
        }
        replicas
    }

    pub(crate) async fn enter(&self, rank: usize) -> Entry<SharedSlot, SharedTicket> {
        self.enter_at(&self.desk, &self.limits, rank).await
    }

    pub(crate) async fn enter_at(
        &self,
        desk: &Arc<Desk<RedisSlots>>,
        limits: &Limits,
        rank: usize,
    ) -> Entry<SharedSlot, SharedTicket> {
        let number = |n| NonZeroU64::new(n).expect("not zero");
        let quota = Quota { rate: Rate { count: number(1_000_000), per: SECOND }, burst: number(1_000_000) };
        let bucket = BucketKey::prefixed(self.prefix, "acme");
        let charges = [Charge { bucket: &bucket, quota, cost: NonZeroU64::MIN }];
        match desk.enter(limits, &charges, None, rank).await {
            Entered::Admission(_, entry) => entry,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn slot(&self, rank: usize) -> SharedSlot {
        match self.enter(rank).await {
            Entry::Slot(slot) => slot,
            other => panic!("expected a slot, got {other:?}"),
        }
    }

    pub(crate) async fn ticket(&self, rank: usize) -> SharedTicket {
        match self.enter(rank).await {
            Entry::Held(ticket) => ticket,
            other => panic!("expected a ticket, got {other:?}"),
        }
    }

    /// A slot, however long that takes.
    pub(crate) async fn served(&self, rank: usize, within: Duration) -> Option<SharedSlot> {
        let until = Instant::now() + within;
        match self.enter(rank).await {
            Entry::Slot(slot) => Some(slot),
            Entry::Held(ticket) => match ticket.turn(until).await {
                Turn::Slot(slot) => Some(slot),
                Turn::Expired => None,
                Turn::Closing => panic!("nobody closed the pool"),
            },
            other => panic!("{other:?}"),
        }
    }

    /// As SIGKILL would: no farewell, and whatever it held is never given back.
    pub(crate) fn kill(mut self) {
        self.runtime.take().expect("alive").shutdown_background();
    }

    pub(crate) async fn leave(mut self) {
        self.tasks.abort();
        let _ = (&mut self.tasks).await;
        self.coordinator.bye().await.expect("redis answers");
    }

    pub(crate) fn is_cut_off(&self) -> bool {
        self.pool.shared_stats().cut_off
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) async fn becomes(what: &str, within: Duration, mut is: impl FnMut() -> bool) {
    let waited = timeout(within, async {
        while !is() {
            sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what} within {within:?}");
}

#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) fn key(name: &str) -> String {
    format!("bouncer:pool:{{default}}:{name}")
}

#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}

/// Slots in use and waiters, by the store's own account.
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) fn counts(server: &RedisServer) -> (usize, usize) {
    (ask(server, &["HLEN", &key("slots")]), ask(server, &["HLEN", &key("waiters")]))
}

#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) async fn quiet(server: &RedisServer, replicas: &[Replica]) {
    becomes("nothing in use and nobody waiting", 10 * SECOND, || {
        let own = replicas.iter().all(|replica| {
            let stats = replica.pool.stats();
            stats.in_flight == 0 && stats.waiting == [0, 0]
        });
        own && counts(server) == (0, 0)
    })
    .await;
    let totals: Vec<String> = ask(server, &["HKEYS", &key("totals")]);
    assert!(totals.iter().all(|field| field == "epoch"), "{totals:?}");
    for key in ask::<Vec<String>>(server, &["KEYS", "bouncer:pool:*"]) {
        assert_ne!(ask::<i64>(server, &["PTTL", &key]), -1, "{key} stays for ever");
    }
}

/// How many are inside, and how many were at most.
#[derive(Default)]
pub(crate) struct Inside {
    now: AtomicUsize,
    most: AtomicUsize,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Inside {
    pub(crate) async fn stay(&self, slot: SharedSlot, time: Duration) {
        self.most.fetch_max(self.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        sleep(time).await;
        self.now.fetch_sub(1, Ordering::SeqCst);
        drop(slot);
    }

    pub(crate) fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }
}
