//! The one pipeline every request takes, free of gRPC: identity, then limits, then admission.

pub mod entrance;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::admission::{Entry, Turn};
use crate::config::Held;
use crate::identity::directory::Directory;
use crate::identity::request::Request;
use crate::identity::{Identified, Tenant, identify};
use crate::limit::{Charge, Level};
use crate::metrics::{Metrics, TierMetrics};
use crate::verdict::{Reason, Refusal};
use entrance::{Entered, Entrance, Pool, Slot, Ticket};

/// What a refusal tells a client to wait where nothing better is known: rounded up to the smallest whole second.
const SOON: Duration = Duration::from_secs(1);

/// What all workers of the process share.
pub struct Shared {
    /// Who is known.
    pub directory: Directory,
    /// The upstream's cap and waiting room.
    pub pool: Pool,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Set once, when this replica goes away.
    closing: OnceLock<Held>,
}

impl Shared {
    /// A gate that is open.
    pub fn new(directory: Directory, pool: Pool, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { directory, pool, metrics, closing: OnceLock::new() })
    }

    /// Answers every request that is held, and every later one, as `held` says. What is in flight stays so.
    pub fn close(&self, held: Held) {
        // A second call changes nothing: the first answer stands.
        let _ = self.closing.set(held);
        self.pool.close();
    }
}

/// The pipeline of one worker.
pub struct Gate {
    shared: Arc<Shared>,
    entrance: Entrance,
}

/// What Envoy is told.
#[derive(Debug)]
pub enum Verdict {
    /// Let it through.
    Allow(Pass),
    /// Answer it with a no.
    Refuse(Refusal),
    /// Ask another replica: this one is going away and has given the tokens back.
    Move,
}

/// A yes. The request is in flight until this is dropped.
#[derive(Debug)]
pub struct Pass {
    /// Who is let through; nobody on a public path or a CORS preflight.
    pub tenant: Option<Arc<Tenant>>,
    /// How full the bucket was, where it was asked.
    pub level: Option<Level>,
    /// How long the request was held.
    pub waited: Duration,
    /// The slot, where one is needed.
    pub flight: Option<Flight>,
}

/// A request between grant and end of response. Gives its slot back by drop.
#[derive(Debug)]
pub struct Flight {
    _slot: Slot,
    granted: Instant,
    metrics: Arc<Metrics>,
    rank: usize,
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.metrics.tier(self.rank).backend_duration.observe(self.granted.elapsed().as_secs_f64());
    }
}

/// Until when a request can be held: Envoy's own deadline, less what the answer needs to get there.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline but the tier's `max_wait`.
    pub const NONE: Self = Self(None);

    /// A call that arrived at this instant and is given up by Envoy after `timeout`.
    ///
    /// The hold ends a tenth of it earlier, at least 20 ms and at most 500 ms, so that the refusal is ours and not
    /// Envoy's.
    pub fn after(arrived: Instant, timeout: Duration) -> Self {
        let margin = (timeout / 10).clamp(Duration::from_millis(20), Duration::from_millis(500));
        Self(arrived.checked_add(timeout.saturating_sub(margin)))
    }

    /// The end of a hold that begins at `now` and may last `max_wait`.
    fn hold_until(self, now: Instant, max_wait: Duration) -> Instant {
        let end = now + max_wait;
        self.0.map_or(end, |deadline| deadline.min(end))
    }
}

impl Gate {
    /// The pipeline of one worker, with the worker's own way to buckets and slots.
    pub fn new(shared: Arc<Shared>, entrance: Entrance) -> Self {
        Self { shared, entrance }
    }

    /// Judges a request, holding it where it must wait. Dropping the future gives up its place in the queue, and a
    /// slot that was just granted; tokens that were taken stay spent.
    pub async fn judge(&self, request: &Request, deadline: Deadline) -> Verdict {
        let nobody = &self.shared.metrics.nobody;
        let reason = match identify(request, &self.shared.directory) {
            Identified::Caller(tenant) => return self.admit(tenant, deadline).await,
            Identified::Pass => {
                nobody.forwarded.inc();
                return Verdict::Allow(Pass { tenant: None, level: None, waited: Duration::ZERO, flight: None });
            }
            Identified::Missing => Reason::MissingKey,
            Identified::Invalid => Reason::InvalidKey,
        };
        nobody.refused(reason);
        Verdict::Refuse(Refusal { reason, tenant: None, level: None, retry_after: None, waited: Duration::ZERO })
    }

    /// Charges a tenant, then takes a slot or waits for one.
    async fn admit(&self, tenant: Arc<Tenant>, deadline: Deadline) -> Verdict {
        let metrics = self.shared.metrics.tier(tenant.tier.rank);
        let mut entrant = Entrant { tenant, metrics, level: None, waited: Duration::ZERO };
        if let Some(held) = self.shared.closing.get() {
            return entrant.turned_away(*held);
        }
        let charges = [Charge { bucket: &entrant.tenant.bucket, quota: entrant.tenant.tier.quota, cost: ONE }];
        let (rank, on_outage) = (entrant.tenant.tier.rank, entrant.tenant.tier.on_outage);
        let entry = match self.entrance.enter(rank, &charges, on_outage).await {
            Entered::Admission(level, entry) => {
                entrant.level = level;
                entry
            }
            Entered::Refused { level, retry_after } => {
                entrant.level = Some(level);
                return entrant.refuse(Reason::RateLimited, retry_after);
            }
            Entered::Unavailable => return entrant.refuse(Reason::Unavailable, SOON),
        };
        match entry {
            Entry::Slot(slot) => {
                metrics.forwarded.inc();
                entrant.pass(slot, &self.shared.metrics)
            }
            Entry::Full => entrant.refuse(Reason::QueueFull, SOON),
            Entry::Closing => self.close_on(entrant).await,
            Entry::Held(ticket) => {
                let until = deadline.hold_until(Instant::now(), entrant.tenant.tier.queue.max_wait);
                match entrant.wait(ticket, until).await {
                    Turn::Slot(slot) => entrant.pass(slot, &self.shared.metrics),
                    Turn::Expired => entrant.refuse(Reason::QueueTimeout, SOON),
                    Turn::Closing => self.close_on(entrant).await,
                }
            }
        }
    }

    /// Turns away a request that was charged already. One that moves is charged again where it goes, so it gets its
    /// tokens back first.
    async fn close_on(&self, entrant: Entrant<'_>) -> Verdict {
        let held = self.shared.closing.get().copied().unwrap_or(Held::Refuse);
        if held == Held::Move && entrant.level.is_some() {
            let tenant = &entrant.tenant;
            self.entrance.give_back(&[Charge { bucket: &tenant.bucket, quota: tenant.tier.quota, cost: ONE }]).await;
        }
        entrant.turned_away(held)
    }
}

const ONE: std::num::NonZeroU64 = std::num::NonZeroU64::MIN;

/// A request of a known tenant on its way through the gate.
struct Entrant<'a> {
    tenant: Arc<Tenant>,
    metrics: &'a TierMetrics,
    level: Option<Level>,
    waited: Duration,
}

impl Entrant<'_> {
    async fn wait(&mut self, ticket: Ticket, until: Instant) -> Turn<Slot> {
        self.metrics.queued.inc();
        let mut wait = Wait { metrics: self.metrics, since: Instant::now(), answered: false };
        let turn = ticket.turn(until).await;
        wait.answered = true;
        self.waited = wait.since.elapsed();
        turn
    }

    fn pass(self, slot: Slot, metrics: &Arc<Metrics>) -> Verdict {
        let flight =
            Flight { _slot: slot, granted: Instant::now(), metrics: metrics.clone(), rank: self.tenant.tier.rank };
        Verdict::Allow(Pass { tenant: Some(self.tenant), level: self.level, waited: self.waited, flight: Some(flight) })
    }

    fn refuse(self, reason: Reason, retry_after: Duration) -> Verdict {
        self.metrics.refused(reason);
        Verdict::Refuse(Refusal {
            reason,
            tenant: Some(self.tenant),
            level: self.level,
            retry_after: Some(retry_after),
            waited: self.waited,
        })
    }

    fn turned_away(self, held: Held) -> Verdict {
        match held {
            Held::Refuse => self.refuse(Reason::ShuttingDown, SOON),
            Held::Move => Verdict::Move,
        }
    }
}

/// A stay in the waiting room, measured to its end, also when that is the client going away.
struct Wait<'a> {
    metrics: &'a TierMetrics,
    since: Instant,
    answered: bool,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.metrics.queue_wait.observe(self.since.elapsed().as_secs_f64());
        if !self.answered {
            self.metrics.abandoned.inc();
        }
    }
}

#[cfg(test)]
mod tests;
