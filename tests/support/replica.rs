//! A process of bouncer, as far as admission goes: several of them make a deployment, within one test.

#![allow(dead_code, reason = "each test crate uses its own part")]

use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::server::RedisServer;
use bouncer::admission::shared::redis::{PoolInRedis, RedisSlots, listen};
use bouncer::admission::shared::{Coordinator, Desk, Dispatcher, Entered, Pool, Slot, Ticket};
use bouncer::admission::tickets::rabbitmq::{Lines, RabbitTickets};
use bouncer::admission::tickets::{ReplicaId, Tickets};
use bouncer::admission::{Entry, Turn};
use bouncer::config::{self, RedisServers};
use bouncer::limit::outage::{Limits, Stores};
use bouncer::limit::{BucketKey, Charge, Quota, Rate};
use bouncer::metrics::{ReplicaMetrics, StoreMetrics, TicketMetrics};
use futures_util::future::join_all;
use prometheus::Registry;
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

pub(crate) type SharedSlot = Slot<RedisSlots>;
pub(crate) type SharedTicket = Ticket<RedisSlots>;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// So that a busy machine does not look like an outage.
pub(crate) const GENEROUS: Duration = Duration::from_secs(20);
/// For the tests of outages. Longer than the default of the configuration, for the sake of busy machines.
pub(crate) const SHORT: Duration = Duration::from_millis(200);
/// Long enough for any test that does not wait for its end.
pub(crate) const LONG_LEASE: Duration = Duration::from_secs(30);
pub(crate) const LENGTH: usize = 1000;
/// Of tickets. Longer than a request of these tests waits while the broker is well.
pub(crate) const EXPIRES: Duration = Duration::from_secs(6);

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
    pub(crate) tickets: Option<RabbitTickets>,
    pub(crate) counts: TicketMetrics,
    pub(crate) store_metrics: StoreMetrics,
    pub(crate) id: String,
    prefix: &'static str,
}

pub(crate) struct Settings {
    pub(crate) cap: usize,
    pub(crate) lease: Duration,
    pub(crate) timeout: Duration,
    /// The broker of tickets, where there is one.
    pub(crate) rabbitmq: Option<String>,
    pub(crate) prefix: &'static str,
}

impl Settings {
    pub(crate) fn cap(cap: usize) -> Self {
        Self { cap, lease: LONG_LEASE, timeout: GENEROUS, rabbitmq: None, prefix: "bouncer" }
    }
}

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
            let id = ReplicaId::random().expect("randomness");
            let expiries = metrics.lease_expiries.clone();
            let names = PoolInRedis::new(settings.prefix, "default", id, settings.cap, settings.lease, expiries);
            let desk = |limits: &Limits| {
                let redis = limits.redis().expect("limits in redis").clone();
                Desk::new(pool.clone(), RedisSlots::new(redis, names.clone()))
            };
            let (limits, own) = (stores.limits(), stores.limits());
            let coordinator = Arc::new(Coordinator::new(desk(&own)));
            let listener = listen(stores.redis().expect("there is one").clone(), names.clone(), pool.clone());
            let work = coordinator.clone();
            let counts = TicketMetrics::register(&registry).expect("names are new");
            let broker = settings.rabbitmq.as_ref().map(|url| {
                let config = config::RabbitMq { url: url.clone(), timeout: SECOND, prefix: "bouncer".to_owned() };
                let lines = Lines { pools: vec!["default".to_owned()], tiers: vec!["T3".to_owned(), "T1".to_owned()] };
                RabbitTickets::new(&config, lines, id, &store_metrics, &counts).expect("a good URL")
            });
            let tickets = broker.as_ref().map(|(tickets, _)| tickets.clone());
            let dispatcher = broker.map(|(tickets, grants)| {
                Dispatcher::new(desk(&own), tickets, grants, id, 0, EXPIRES).expect("the only one of the pool")
            });
            let tasks = runtime.spawn(async move {
                own.settled().await;
                let dispatch = async {
                    if let Some(dispatcher) = dispatcher {
                        dispatcher.run().await;
                    }
                };
                tokio::join!(work.run(), listener, dispatch);
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
                    tickets,
                    counts,
                    store_metrics,
                    id: id.to_string(),
                    prefix: settings.prefix,
                },
                limits,
            )
        };
        limits.settled().await;
        replica.pool.settled().await;
        if let Some(tickets) = &replica.tickets {
            let up = timeout(GENEROUS, tickets.standing().wait_for(|standing| standing.up)).await.is_ok();
            assert!(up, "rabbitmq answers");
        }
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

    /// Answers that the broker was waited for.
    pub(crate) fn broker_calls(&self) -> u64 {
        self.store_metrics.call.with_label_values(&["rabbitmq"]).get_sample_count()
    }

    /// How often the broker was found down.
    pub(crate) fn downs(&self) -> u64 {
        self.store_metrics.transitions.with_label_values(&["rabbitmq", "down"]).get()
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

pub(crate) fn key(name: &str) -> String {
    format!("bouncer:pool:{{default}}:{name}")
}

pub(crate) fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}

/// Slots in use and waiters, by the store's own account.
pub(crate) fn counts(server: &RedisServer) -> (usize, usize) {
    (ask(server, &["HLEN", &key("slots")]), ask(server, &["HLEN", &key("waiters")]))
}

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
