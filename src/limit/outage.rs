//! The limits of a process, and what decides while their store does not answer.

use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;

use super::memory::MemoryLimiter;
use super::redis::{RedisLimiter, RedisStore, STORE, Status, UrlError};
use super::{Charge, Level, Limiter, OnOutage, Take};
use crate::config;
use crate::metrics::StoreMetrics;

/// What came of metering a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metered {
    /// Every charge was taken; the level is that of the charge closest to refusing.
    Taken(Level),
    /// Nothing was taken; the figures are those of [`Take::Refused`].
    Refused {
        /// How full the bucket that refused still is.
        level: Level,
        /// When the same take succeeds; [`Duration::MAX`] for never.
        retry_after: Duration,
    },
    /// The store did not answer, and the policy lets the request pass.
    Unmetered,
    /// The store did not answer, and the policy refuses the request.
    Unavailable,
}

impl From<Take> for Metered {
    fn from(take: Take) -> Self {
        match take {
            Take::Taken { level } => Metered::Taken(level),
            Take::Refused { level, retry_after } => Metered::Refused { level, retry_after },
        }
    }
}

/// Where the buckets of a process are: one value for all its threads.
pub struct Stores(Kind);

enum Kind {
    Memory(Arc<MemoryLimiter>),
    Redis(Arc<RedisStore>, Arc<Fallback>),
}

/// What answers while Redis does not.
struct Fallback {
    /// The policy of tiers that have none of their own.
    policy: OnOutage,
    /// Buckets of this process, for [`OnOutage::Local`].
    local: MemoryLimiter,
    allowed: IntCounter,
    denied: IntCounter,
    metered: IntCounter,
}

impl Stores {
    /// Buckets in Redis where one is given, else in this process. Opens nothing yet.
    ///
    /// # Errors
    /// When the URL is none that Redis could be reached by.
    pub fn new(redis: Option<&config::Redis>, metrics: &StoreMetrics) -> Result<Self, UrlError> {
        let Some(redis) = redis else { return Ok(Self(Kind::Memory(Arc::default()))) };
        let counter = |policy: OnOutage| metrics.fallback.with_label_values(&[STORE, &policy.to_string()]);
        let fallback = Fallback {
            policy: redis.on_outage,
            local: MemoryLimiter::default(),
            allowed: counter(OnOutage::Allow),
            denied: counter(OnOutage::Deny),
            metered: counter(OnOutage::Local),
        };
        Ok(Self(Kind::Redis(RedisStore::new(redis, metrics)?, Arc::new(fallback))))
    }

    /// The limits for one runtime. With Redis this starts connecting, and nothing waits for it.
    ///
    /// # Panics
    /// With Redis, outside of a tokio runtime.
    pub fn limits(&self) -> Limits {
        Limits(match &self.0 {
            Kind::Memory(memory) => Way::Memory(Arc::clone(memory)),
            Kind::Redis(store, fallback) => {
                Way::Redis(Arc::new(RedisLimiter::new(Arc::clone(store))), Arc::clone(fallback))
            }
        })
    }

    /// The Redis of the process; nothing where there is none.
    pub fn redis(&self) -> Option<&Arc<RedisStore>> {
        match &self.0 {
            Kind::Memory(_) => None,
            Kind::Redis(store, _) => Some(store),
        }
    }

    /// How Redis is doing; nothing where there is none.
    pub fn status(&self) -> Option<Status> {
        match &self.0 {
            Kind::Memory(_) => None,
            Kind::Redis(store, _) => Some(store.status()),
        }
    }

    /// How many buckets of this process are not full: all there are, or with Redis those of [`OnOutage::Local`].
    pub fn buckets_in_use(&self) -> usize {
        match &self.0 {
            Kind::Memory(memory) => memory.buckets_in_use(),
            Kind::Redis(_, fallback) => fallback.local.buckets_in_use(),
        }
    }
}

/// The limits as one runtime asks for them.
#[derive(Clone)]
pub struct Limits(Way);

#[derive(Clone)]
enum Way {
    Memory(Arc<MemoryLimiter>),
    Redis(Arc<RedisLimiter>, Arc<Fallback>),
}

impl Limits {
    /// Takes all charges of a request or none. `on_outage` is the tier's own policy; without one the store's decides.
    pub async fn take(&self, charges: &[Charge<'_>], on_outage: Option<OnOutage>) -> Metered {
        match &self.0 {
            Way::Memory(memory) => memory.take_now(charges).into(),
            // What went wrong is counted, logged and kept by the store.
            Way::Redis(redis, fallback) => match redis.take(charges).await {
                Ok(take) => take.into(),
                Err(_) => fallback.take(charges, on_outage),
            },
        }
    }

    /// What [`Limits::take`] answers when the store was asked by other means and gave no answer.
    pub fn take_without_store(&self, charges: &[Charge<'_>], on_outage: Option<OnOutage>) -> Metered {
        match &self.0 {
            Way::Memory(memory) => memory.take_now(charges).into(),
            Way::Redis(_, fallback) => fallback.take(charges, on_outage),
        }
    }

    /// The connection to Redis, for other questions; nothing where there is none.
    pub fn redis(&self) -> Option<&Arc<RedisLimiter>> {
        match &self.0 {
            Way::Memory(_) => None,
            Way::Redis(redis, _) => Some(redis),
        }
    }

    /// Puts back what [`Limits::take`] took.
    ///
    /// While the store does not answer, its buckets keep what was taken, and those of this process gain it, which hold
    /// no more than their burst in any case.
    pub async fn give_back(&self, charges: &[Charge<'_>]) {
        match &self.0 {
            Way::Memory(memory) => memory.give_back_now(charges),
            Way::Redis(redis, fallback) => {
                if redis.give_back(charges).await.is_err() {
                    fallback.local.give_back_now(charges);
                }
            }
        }
    }

    /// Waits until the store has been tried once, so that the first requests find it connected. It ends within 1 s and
    /// one call's timeout, whether the store answered or not.
    pub async fn settled(&self) {
        match &self.0 {
            Way::Memory(_) => {}
            Way::Redis(redis, _) => redis.settled().await,
        }
    }
}

impl Fallback {
    fn take(&self, charges: &[Charge<'_>], on_outage: Option<OnOutage>) -> Metered {
        match on_outage.unwrap_or(self.policy) {
            OnOutage::Allow => {
                self.allowed.inc();
                Metered::Unmetered
            }
            OnOutage::Deny => {
                self.denied.inc();
                Metered::Unavailable
            }
            OnOutage::Local => {
                self.metered.inc();
                self.local.take_now(charges).into()
            }
        }
    }
}
