//! Buckets in Redis, shared by all replicas.
//!
//! A decision is one `EVALSHA` on a connection that many calls share. [`RedisStore`] is what a process knows about its
//! Redis, above all whether it is down; each runtime makes its own [`RedisLimiter`] from it.

mod cluster;
mod limiter;
mod link;
mod script;
mod sentinel;
mod servers;
mod slots;
mod wire;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::try_join_all;
use prometheus::{Histogram, IntCounter, IntGauge};
use redis::RedisError;
use redis::aio::PubSub;
use tokio::sync::watch;
use tokio::time::Instant;

use super::breaker::{Breaker, Change, Epoch};
use super::{Charge, Quota, Rate};
use crate::config;
use crate::metrics::StoreMetrics;
pub use limiter::RedisLimiter;
pub(crate) use script::Script;
use script::{Mode, command, elements, outcomes};
use servers::{Route, Servers};

/// The label of this store in metrics.
pub(super) const STORE: &str = "redis";

/// Why Redis gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It counts as down, and was not asked.
    #[error("redis is down")]
    Down,
    /// No runtime has a connection at the moment. It was not asked.
    #[error("not connected to redis")]
    Unconnected,
    /// Nothing came in time; whether it was carried out is unknown.
    #[error("no answer from redis within {0:?}")]
    Timeout(Duration),
    /// It ended while calls were out, or before it was of use.
    #[error("connection to redis lost")]
    Lost,
    /// It could not be made, or broke under a call.
    #[error("connection to redis failed: {0}")]
    Connection(#[source] RedisError),
    /// No sentinel knows a server for this service.
    #[error("no sentinel names a master of the service")]
    NoMaster,
    /// A sentinel is behind the times.
    #[error("the server that a sentinel names is not a master")]
    NotMaster,
    /// A cluster is not whole.
    #[error("some slots of the cluster have no master")]
    Uncovered,
    /// The nodes of a cluster do not agree who has a key.
    #[error("redirected too often by the cluster")]
    Astray,
    /// It answered with an error, such as a missing right or a replica's refusal to write.
    #[error("redis refused: {0}")]
    Reply(#[source] RedisError),
    /// What keeps the connection panicked. The panic was told when it happened.
    #[error("the keeper of a connection to redis panicked")]
    Panicked,
    /// Something else than the script answered.
    #[error("redis answered something else than the script returns")]
    Shape,
}

impl StoreError {
    /// Whether it takes no writes, as a master does that is one no more. A script's error has the word within.
    fn is_read_only(&self) -> bool {
        const READ_ONLY: &str = "READONLY";
        match self {
            Self::Reply(error) => {
                error.code() == Some(READ_ONLY) || error.detail().is_some_and(|detail| detail.contains(READ_ONLY))
            }
            _ => false,
        }
    }
}

impl From<std::io::Error> for StoreError {
    fn from(error: std::io::Error) -> Self {
        Self::Connection(error.into())
    }
}

/// A URL that Redis could not be reached by.
#[derive(Debug, thiserror::Error)]
#[error("not a redis URL: {0}")]
pub struct UrlError(#[source] RedisError);

/// Whether this is a URL that Redis could be reached by.
///
/// # Errors
/// What is wrong with it, in words that may hold a part of it: the password too.
pub fn check_url(url: &str) -> Result<(), UrlError> {
    redis::IntoConnectionInfo::into_connection_info(url).map(drop).map_err(UrlError)
}

/// How Redis is doing, for `/ready` and `/stats`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Whether requests are metered in it.
    pub up: bool,
    /// For how long that has been so.
    pub lasting: Duration,
    /// What went wrong last, also where it is up again.
    pub last_error: Option<String>,
}

/// What a process knows about its Redis.
pub struct RedisStore {
    servers: Servers,
    prefix: String,
    /// How long a call may take.
    timeout: Duration,
    script: Script,
    health: Mutex<Health>,
    /// The breaker's epoch; calls read it and keepers of connections wait for it to change.
    epoch: watch::Sender<Epoch>,
    /// Whether a call failed since the last one that was answered, so that a good answer need not lock.
    failing: AtomicBool,
    /// The way of each runtime that has one, the latest last: a runtime that has none asks over another's.
    routes: Mutex<BTreeMap<u64, Route>>,
    /// Told of each new connection: servers may have changed places.
    connections: watch::Sender<()>,
    meters: Meters,
}

struct Health {
    breaker: Breaker,
    last_error: Option<String>,
}

struct Meters {
    up: IntGauge,
    ups: IntCounter,
    downs: IntCounter,
    timeouts: IntCounter,
    connections: IntCounter,
    replies: IntCounter,
    call: Histogram,
}

impl Meters {
    fn new(metrics: &StoreMetrics) -> Self {
        let error = |kind| metrics.errors.with_label_values(&[STORE, kind]);
        Self {
            up: metrics.up.with_label_values(&[STORE]),
            ups: metrics.transitions.with_label_values(&[STORE, "up"]),
            downs: metrics.transitions.with_label_values(&[STORE, "down"]),
            timeouts: error("timeout"),
            connections: error("connection"),
            replies: error("reply"),
            call: metrics.call.with_label_values(&[STORE]),
        }
    }

    fn count(&self, error: &StoreError) {
        match error {
            StoreError::Down | StoreError::Unconnected => {}
            StoreError::Timeout(_) => self.timeouts.inc(),
            StoreError::Lost
            | StoreError::Connection(_)
            | StoreError::Panicked
            | StoreError::NoMaster
            | StoreError::NotMaster
            | StoreError::Uncovered => self.connections.inc(),
            StoreError::Reply(_) | StoreError::Shape | StoreError::Astray => self.replies.inc(),
        }
    }
}

impl RedisStore {
    /// Opens nothing yet.
    ///
    /// # Errors
    /// When the URL is none that Redis could be reached by.
    pub fn new(config: &config::Redis, metrics: &StoreMetrics) -> Result<Arc<Self>, UrlError> {
        Self::with_script(config, metrics, Script::new(Script::BUCKET))
    }

    fn with_script(config: &config::Redis, metrics: &StoreMetrics, script: Script) -> Result<Arc<Self>, UrlError> {
        let breaker = Breaker::new(Instant::now());
        Ok(Arc::new(Self {
            servers: Servers::new(&config.servers).map_err(UrlError)?,
            prefix: config.prefix.clone(),
            timeout: config.timeout,
            script,
            epoch: watch::Sender::new(breaker.epoch()),
            health: Mutex::new(Health { breaker, last_error: None }),
            failing: AtomicBool::new(false),
            routes: Mutex::default(),
            connections: watch::Sender::new(()),
            meters: Meters::new(metrics),
        }))
    }

    /// How Redis is doing.
    pub fn status(&self) -> Status {
        let health = self.health();
        Status {
            up: health.breaker.is_up(),
            lasting: health.breaker.since().elapsed(),
            last_error: health.last_error.clone(),
        }
    }

    /// A connection of its own that can subscribe to channels. Opens one; the caller needs a deadline.
    pub(crate) async fn subscriber(&self) -> Result<PubSub, StoreError> {
        self.servers.subscriber().await
    }

    /// Changes with each new connection, after which a subscriber may be at a server that messages do not reach any more.
    pub(crate) fn connections(&self) -> watch::Receiver<()> {
        self.connections.subscribe()
    }

    /// A panic of another thread leaves the breaker whole.
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn epochs(&self) -> watch::Receiver<Epoch> {
        self.epoch.subscribe()
    }

    fn answered(&self, epoch: Epoch) {
        if self.failing.load(Ordering::Relaxed) {
            self.failing.store(false, Ordering::Relaxed);
            self.health().breaker.answered(epoch);
        }
    }

    fn failed(&self, epoch: Epoch, error: &StoreError) {
        self.meters.count(error);
        self.failing.store(true, Ordering::Relaxed);
        self.change(Some(error), |breaker, now| {
            if error.is_read_only() { breaker.unfit(epoch, now) } else { breaker.failed(epoch, now) }
        });
    }

    /// A runtime did not get a connection that works. The store is down if no other has one; gives whether one has.
    fn unreachable(&self, error: &StoreError) -> bool {
        self.meters.count(error);
        let others = !self.routes().is_empty();
        self.change(Some(error), |breaker, now| if others { None } else { breaker.unreachable(now) });
        others
    }

    /// Nothing that could panic is done under this lock.
    fn routes(&self) -> MutexGuard<'_, BTreeMap<u64, Route>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection that was proved last, of whatever runtime.
    fn latest(&self) -> Result<Route, StoreError> {
        self.routes().last_key_value().map(|(_, latest)| latest.clone()).ok_or(StoreError::Unconnected)
    }

    /// A runtime has a connection that works, as long as the guard is kept.
    fn proved(&self, route: Route) -> Connected<'_> {
        let id = {
            let mut routes = self.routes();
            let id = routes.last_key_value().map_or(0, |(latest, _)| latest + 1);
            routes.insert(id, route);
            id
        };
        // First, so that a panic while the change is told does not leave it counted for ever.
        let connected = Connected { store: self, id };
        self.change(None, Breaker::proved);
        self.connections.send_replace(());
        connected
    }

    /// The one place where the breaker changes: counted, told to all, logged once.
    fn change(&self, error: Option<&StoreError>, event: impl FnOnce(&mut Breaker, Instant) -> Option<Change>) {
        let mut health = self.health();
        if let Some(error) = error {
            health.last_error = Some(error.to_string());
        }
        let Some(change) = event(&mut health.breaker, Instant::now()) else { return };
        self.epoch.send_replace(health.breaker.epoch());
        match change {
            Change::Up(after) => {
                self.meters.up.set(1);
                self.meters.ups.inc();
                tracing::info!(store = STORE, ?after, "redis is up");
            }
            Change::Down => {
                self.meters.up.set(0);
                self.meters.downs.inc();
                let reason = health.last_error.as_deref().unwrap_or_default();
                tracing::warn!(store = STORE, reason, "redis is down, the outage policy decides");
            }
        }
    }

    /// Does on a new connection what a request does, to a bucket of its own that always grants and soon expires. What a
    /// request would be refused for, a missing right or a server that takes no writes, shows here.
    async fn probe(&self, route: &Route) -> Result<(), StoreError> {
        const PLENTY: std::num::NonZeroU64 = std::num::NonZeroU64::new(1_000_000).unwrap();
        let quota = Quota { rate: Rate { count: PLENTY, per: Duration::from_secs(1) }, burst: PLENTY };
        let probes = route.probes(&self.prefix);
        let proofs = probes.iter().map(|bucket| {
            let mut route = route.clone();
            async move {
                let charges = [Charge { bucket, quota, cost: std::num::NonZeroU64::MIN }];
                let take = |verb: &str, script: &str| command(verb, script, Mode::Take, &charges);
                let answer = self.script.run(&mut route, take).await?;
                outcomes(elements(&answer)?, &charges).map(drop)
            }
        });
        try_join_all(proofs).await.map(drop)
    }
}

/// Counts a runtime as connected until dropped.
#[must_use]
struct Connected<'a> {
    store: &'a RedisStore,
    id: u64,
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.store.routes().remove(&self.id);
    }
}

#[cfg(test)]
pub(crate) mod tests;
