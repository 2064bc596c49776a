//! Where the slots of a pool are kept: in this process, or in Redis, shared with other replicas.

use std::sync::Arc;

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::admission::shared::redis::{PoolInRedis, RedisSlots, listen};
use crate::admission::shared::{Coordinator, Desk, Dispatcher};
use crate::admission::tickets::rabbitmq::{Lines, RabbitTickets};
use crate::admission::tickets::{Grant, ReplicaId};
use crate::admission::{shared, slots};
use crate::app::StartError;
use crate::config::{self, Config};
use crate::gate::entrance::{Entrance, Pool};
use crate::limit::outage::{Limits, Stores};
use crate::metrics::Metrics;

/// Where the slots of the pool are, and how this process gets at them.
#[derive(Clone)]
pub(super) enum Seat {
    Own(Arc<slots::Pool>),
    Shared(Arc<shared::Pool<RedisSlots>>, Arc<PoolInRedis>),
}

impl Seat {
    /// In Redis where one is given, else in this process.
    pub(super) fn new(config: &Config, pool: &config::Pool, replica: ReplicaId, metrics: &Metrics) -> Self {
        let lengths = config.tiers.iter().map(|tier| tier.queue.length);
        let Some(redis) = &config.redis else {
            return Seat::Own(slots::Pool::new(pool.max_in_flight, lengths));
        };
        let expiries = metrics.replicas.lease_expiries.clone();
        let cap = pool.max_in_flight.get();
        let names = PoolInRedis::new(&redis.prefix, &pool.name, replica, cap, config.lease, expiries);
        let shared = shared::Pool::new(pool.max_in_flight, lengths, config.lease, metrics.replicas.clone());
        Seat::Shared(shared, names)
    }

    pub(super) fn pool(&self) -> Pool {
        match self {
            Seat::Own(pool) => Pool::Own(pool.clone()),
            Seat::Shared(pool, _) => Pool::Shared(pool.clone()),
        }
    }

    /// Takes part among the replicas, on the runtime that this is called in; nothing where slots are not shared.
    pub(super) fn take_part(&self, stores: &Stores, broker: Option<Broker>) -> Option<Replica> {
        let (Seat::Shared(pool, names), Some(store)) = (self, stores.redis()) else { return None };
        let limits = stores.limits();
        let slots = RedisSlots::new(limits.redis()?.clone(), names.clone());
        let desk = Desk::new(pool.clone(), slots);
        let dispatcher = broker.and_then(|broker| broker.dispatcher(desk.clone()));
        let coordinator = Arc::new(Coordinator::new(desk));
        tracing::info!(replica = names.replica(), "slots are shared by way of redis");
        let (work, listener) = (coordinator.clone(), listen(store.clone(), names.clone(), pool.clone()));
        let tasks = AbortOnDropHandle::new(tokio::spawn(async move {
            // Connected first, or the first heartbeat would find nobody to talk to.
            limits.settled().await;
            let dispatch = async move {
                if let Some(dispatcher) = dispatcher {
                    dispatcher.run().await;
                }
            };
            tokio::join!(work.run(), listener, dispatch);
        }));
        Some(Replica { coordinator, tasks })
    }

    /// Waits until it is known whether the store answers.
    pub(super) async fn settled(&self) {
        match self {
            Seat::Own(_) => {}
            Seat::Shared(pool, _) => pool.settled().await,
        }
    }

    /// An entrance for the runtime that this is called in, by the connection of its limits.
    pub(super) fn entrance(&self, limits: Limits) -> Entrance {
        match (self, limits.redis().cloned()) {
            (Seat::Shared(pool, names), Some(redis)) => {
                let desk = Desk::new(pool.clone(), RedisSlots::new(redis, names.clone()));
                Entrance::shared(limits, desk)
            }
            // Limits and slots are in Redis both or neither.
            (Seat::Shared(..), None) => unreachable!("limits without redis beside slots in redis"),
            (Seat::Own(pool), _) => Entrance::own(limits, pool.clone()),
        }
    }
}

/// This process among the replicas.
pub(super) struct Replica {
    coordinator: Arc<Coordinator<RedisSlots>>,
    tasks: AbortOnDropHandle<()>,
}

impl Replica {
    /// Gives up whatever this process still has.
    pub(super) async fn leave(self) {
        self.tasks.abort();
        // Ended before the farewell, or a heartbeat could come after it and take part again.
        let _ = self.tasks.await;
        if let Err(error) = self.coordinator.bye().await {
            tracing::warn!(%error, "could not say goodbye: the slots of this replica come back when its lease ends");
        }
    }
}

/// What a ticket's expiry exceeds the longest wait by.
const LITTER: Duration = Duration::from_secs(1);

/// The tickets of this process, and what comes of them.
pub(super) struct Broker {
    pub(super) tickets: RabbitTickets,
    grants: mpsc::Receiver<Grant>,
    replica: ReplicaId,
    expires: Duration,
}

impl Broker {
    /// `None` where none is given. Starts connecting on the runtime that this is called in.
    pub(super) fn new(config: &Config, replica: ReplicaId, metrics: &Metrics) -> Result<Option<Self>, StartError> {
        let Some(rabbitmq) = &config.rabbitmq else { return Ok(None) };
        let lines = Lines {
            pools: config.pools.iter().map(|pool| pool.name.clone()).collect(),
            tiers: config.tiers.iter().map(|tier| tier.name.clone()).collect(),
        };
        let (tickets, grants) = RabbitTickets::new(rabbitmq, lines, replica, &metrics.stores, &metrics.tickets)?;
        // The same for all lines: a ticket is removed only once it is the first of its line.
        let longest = config.tiers.iter().map(|tier| tier.queue.max_wait).max().unwrap_or_default();
        Ok(Some(Self { tickets, grants, replica, expires: longest.saturating_add(LITTER) }))
    }

    fn dispatcher(self, desk: Arc<Desk<RedisSlots>>) -> Option<Dispatcher<RedisSlots, RabbitTickets>> {
        Dispatcher::new(desk, self.tickets, self.grants, self.replica, 0, self.expires)
    }
}
