//! Where the gate asks whether a request may pass: charged, and a slot or a place, in one question.
//!
//! There are two entrances. In a process that has its pool to itself, limits and pool are asked one after the other, and
//! the pool answers at once. Where slots are shared, a desk asks the store for both in one round trip.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::admission::shared::redis::RedisSlots;
use crate::admission::shared::{self, SharedStats};
use crate::admission::{Entry, PoolStats, Turn, slots};
use crate::limit::outage::{Limits, Metered};
use crate::limit::{Charge, Level, OnOutage};

/// One protected upstream.
#[derive(Clone)]
pub enum Pool {
    /// Its slots are all of this process.
    Own(Arc<slots::Pool>),
    /// Its slots are shared with other replicas.
    Shared(Arc<shared::Pool<RedisSlots>>),
}

impl Pool {
    /// Takes no new requests, and tells everyone in the room so. Slots in use stay until they are dropped.
    pub fn close(&self) {
        match self {
            Pool::Own(pool) => pool.close(),
            Pool::Shared(pool) => pool.close(),
        }
    }

    /// How this replica's part stands now.
    pub fn stats(&self) -> PoolStats {
        match self {
            Pool::Own(pool) => pool.stats(),
            Pool::Shared(pool) => pool.stats(),
        }
    }

    /// How the whole stood at the last heartbeat; nothing where this process is all there is.
    pub fn shared_stats(&self) -> Option<SharedStats> {
        match self {
            Pool::Own(_) => None,
            Pool::Shared(pool) => Some(pool.shared_stats()),
        }
    }
}

/// The entrance to a pool, for the requests of one runtime.
pub struct Entrance {
    limits: Limits,
    way: Way,
}

enum Way {
    Own(Arc<slots::Pool>),
    Shared(Arc<shared::Desk<RedisSlots>>),
}

/// What came of a request at an entrance.
#[derive(Debug)]
pub enum Entered {
    /// It was charged (nothing is known of its bucket where the store is down and the policy lets it pass), and got this.
    Admission(Option<Level>, Entry<Slot, Ticket>),
    /// Its bucket is empty; the figures are those of [`Metered::Refused`].
    Refused {
        /// How full it still is.
        level: Level,
        /// When the same take succeeds; [`Duration::MAX`] for never.
        retry_after: Duration,
    },
    /// The store of buckets does not answer, and the policy refuses the request.
    Unavailable,
}

impl Entrance {
    /// To a pool of this process.
    pub fn own(limits: Limits, pool: Arc<slots::Pool>) -> Self {
        Self { limits, way: Way::Own(pool) }
    }

    /// To a shared pool, by a desk of the runtime that this will be used in.
    pub fn shared(limits: Limits, desk: Arc<shared::Desk<RedisSlots>>) -> Self {
        Self { limits, way: Way::Shared(desk) }
    }

    /// Charges a request of the tier of this rank, and where nothing refuses, takes a slot or a place. `on_outage` is the
    /// tier's own policy. Dropping the future gives up what was taken, but for the tokens.
    pub async fn enter(&self, rank: usize, charges: &[Charge<'_>], on_outage: Option<OnOutage>) -> Entered {
        match &self.way {
            Way::Own(pool) => match self.limits.take(charges, on_outage).await {
                Metered::Taken(level) => Entered::Admission(Some(level), pool.enter(rank).map(Slot::Own, Ticket::Own)),
                Metered::Unmetered => Entered::Admission(None, pool.enter(rank).map(Slot::Own, Ticket::Own)),
                Metered::Refused { level, retry_after } => Entered::Refused { level, retry_after },
                Metered::Unavailable => Entered::Unavailable,
            },
            Way::Shared(desk) => match desk.enter(&self.limits, charges, on_outage, rank).await {
                shared::Entered::Admission(level, entry) => {
                    Entered::Admission(level, entry.map(Slot::Shared, Ticket::Shared))
                }
                shared::Entered::Refused { level, retry_after } => Entered::Refused { level, retry_after },
                shared::Entered::Unavailable => Entered::Unavailable,
            },
        }
    }

    /// Puts back the tokens of a request that goes elsewhere.
    pub async fn give_back(&self, charges: &[Charge<'_>]) {
        self.limits.give_back(charges).await;
    }
}

/// The right to be in flight, given back by drop.
#[derive(Debug)]
#[must_use = "a slot is given back as soon as it is dropped"]
pub enum Slot {
    /// Of this process's own pool.
    Own(slots::Slot),
    /// Of a shared pool.
    Shared(shared::Slot<RedisSlots>),
}

/// A place in the waiting room, given up by drop.
#[derive(Debug)]
#[must_use = "a place is given up as soon as its ticket is dropped"]
pub enum Ticket {
    /// In this process's own pool.
    Own(slots::Ticket),
    /// In a shared pool.
    Shared(shared::Ticket<RedisSlots>),
}

impl Ticket {
    /// Waits for the turn of this ticket, until an instant at the latest. Dropping the future gives the place up.
    pub async fn turn(self, until: Instant) -> Turn<Slot> {
        match self {
            Ticket::Own(ticket) => ticket.turn(until).await.map(Slot::Own),
            Ticket::Shared(ticket) => ticket.turn(until).await.map(Slot::Shared),
        }
    }
}
