//! Tickets in RabbitMQ, shared by all replicas.
//!
//! ```text
//! publish ──► <prefix>:tickets ──► <prefix>:tickets:<pool>:<tier>   durable, one a line      ──► next (basic.get)
//! grant   ──► <prefix>:grants  ──► a queue of the broker's naming   exclusive, one a replica ──► consumer
//! ```
//!
//! A process has one connection, which a task of its own keeps (`keeper`). Calls run on the runtime of that task whoever
//! makes them, so that a caller who goes away leaves no message without an owner. A broker that blocks publishers or does
//! not answer one call in time is down, and what lies in it is not trusted any more: a new session is a new epoch.

mod keeper;
mod link;
mod names;
mod session;
mod taken;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use lapin::uri::AMQPUri;
use prometheus::{Histogram, IntCounter, IntGauge};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{Epoch, Grant, Line, ReplicaId, Sent, Standing, Ticket, TicketError, Tickets};
use crate::config;
use crate::limit::breaker::{Breaker, Change};
use crate::limit::redis::Status;
use crate::metrics::{StoreMetrics, TicketMetrics};
use names::Names;
use session::{Published, Session};
pub use taken::RabbitTaken;

/// The label of this store in metrics.
const STORE: &str = "rabbitmq";

/// Grants that were received and not read yet; beyond that they stay in the broker.
const UNREAD: usize = 1024;

/// A URL that RabbitMQ could not be reached by. Shows nothing of it, as a part may be secret.
#[derive(Debug, thiserror::Error)]
#[error("not an amqp URL")]
pub struct UrlError;

/// The names of pools and tiers, by which replicas agree on lines whatever their order in the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lines {
    /// By their place in the configuration. Of the letters that [`config`] allows in names.
    pub pools: Vec<String>,
    /// By rank, of the same letters.
    pub tiers: Vec<String>,
}

/// Why the broker is of no use.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("cannot be reached: {0}")]
    Unreachable(#[source] io::Error),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("connection ended")]
    Ended,
    #[error("it blocks publishers: {0}")]
    Blocked(String),
    #[error("a queue is gone: {0}")]
    QueueGone(String),
    #[error("it did not take a message to a queue that was just made")]
    Probe,
    #[error("{0}")]
    Amqp(#[from] lapin::Error),
    /// A call has met and counted it.
    #[error("{0}")]
    Call(Box<Fault>),
}

impl Fault {
    /// As a call tells it.
    fn told(&self) -> TicketError {
        match self {
            Fault::Timeout(limit) => TicketError::Timeout(*limit),
            _ => TicketError::Lost,
        }
    }
}

/// The tickets of this process, in RabbitMQ. Clones share one connection, which ends with the last of them.
#[derive(Clone)]
pub struct RabbitTickets {
    shared: Arc<Shared>,
    _keeper: Arc<AbortOnDropHandle<()>>,
}

/// What calls and the keeper share.
struct Shared {
    uri: AMQPUri,
    timeout: Duration,
    replica: ReplicaId,
    lines: Lines,
    names: Names,
    /// Where calls run.
    runtime: Handle,
    /// Empty while the broker is down.
    session: ArcSwapOption<Session>,
    standing: watch::Sender<Standing>,
    /// The epoch of the latest session, up or not.
    epoch: Mutex<Epoch>,
    health: Mutex<Health>,
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
    confirmed: IntCounter,
    refused: IntCounter,
    unconfirmed: IntCounter,
    stale: IntCounter,
    grants_lost: IntCounter,
}

impl Meters {
    fn new(stores: &StoreMetrics, tickets: &TicketMetrics) -> Self {
        let error = |kind| stores.errors.with_label_values(&[STORE, kind]);
        let confirm = |outcome| tickets.confirms.with_label_values(&[outcome]);
        Self {
            up: stores.up.with_label_values(&[STORE]),
            ups: stores.transitions.with_label_values(&[STORE, "up"]),
            downs: stores.transitions.with_label_values(&[STORE, "down"]),
            timeouts: error("timeout"),
            connections: error("connection"),
            replies: error("reply"),
            call: stores.call.with_label_values(&[STORE]),
            confirmed: confirm("confirmed"),
            refused: confirm("refused"),
            unconfirmed: confirm("unknown"),
            stale: tickets.stale.clone(),
            grants_lost: tickets.grants_lost.clone(),
        }
    }

    fn count(&self, fault: &Fault) {
        match fault {
            Fault::Timeout(_) => self.timeouts.inc(),
            Fault::Unreachable(_) | Fault::Ended => self.connections.inc(),
            Fault::Amqp(error) if !error.is_amqp_error() => self.connections.inc(),
            Fault::Amqp(_) | Fault::Blocked(_) | Fault::QueueGone(_) | Fault::Probe => self.replies.inc(),
            Fault::Call(_) => {}
        }
    }
}

impl RabbitTickets {
    /// Starts connecting, and gives the way by which the grants of this replica come. The broker gets what expires: nothing
    /// is lost for good if nobody reads it.
    ///
    /// # Errors
    /// When the URL is none that RabbitMQ could be reached by.
    ///
    /// # Panics
    /// Outside of a tokio runtime. The connection lives on the one that this is called in, and so do all calls.
    pub fn new(
        config: &config::RabbitMq,
        lines: Lines,
        replica: ReplicaId,
        stores: &StoreMetrics,
        tickets: &TicketMetrics,
    ) -> Result<(Self, mpsc::Receiver<Grant>), UrlError> {
        let uri = config.url.parse().map_err(|_| UrlError)?;
        let breaker = Breaker::new(Instant::now());
        let shared = Arc::new(Shared {
            uri,
            timeout: config.timeout,
            replica,
            names: Names::new(&config.prefix, &lines),
            lines,
            runtime: Handle::current(),
            session: ArcSwapOption::empty(),
            standing: watch::Sender::default(),
            epoch: Mutex::default(),
            health: Mutex::new(Health { breaker, last_error: None }),
            meters: Meters::new(stores, tickets),
        });
        let (sender, grants) = mpsc::channel(UNREAD);
        let keeper = tokio::spawn(keeper::keep(Arc::clone(&shared), sender));
        Ok((Self { shared, _keeper: Arc::new(AbortOnDropHandle::new(keeper)) }, grants))
    }

    /// How RabbitMQ is doing.
    pub fn status(&self) -> Status {
        let health = self.shared.health();
        Status {
            up: health.breaker.is_up(),
            lasting: health.breaker.since().elapsed(),
            last_error: health.last_error.clone(),
        }
    }

    /// Runs a call to its end on the keeper's runtime, whether its caller still waits or not: a ticket that arrives for a
    /// caller who has gone must go back, and a lane is of use again only after its confirm.
    async fn call<T: Send + 'static, F>(
        &self,
        work: impl FnOnce(Arc<Shared>, Arc<Session>) -> F,
    ) -> Result<T, TicketError>
    where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
    {
        let session = self.shared.session.load_full().ok_or(TicketError::Down)?;
        let shared = Arc::clone(&self.shared);
        let work = work(Arc::clone(&shared), Arc::clone(&session));
        let task = self.shared.runtime.spawn(async move {
            let began = Instant::now();
            let result = work.await;
            shared.meters.call.observe(began.elapsed().as_secs_f64());
            result.map_err(|fault| {
                let told = fault.told();
                shared.meters.count(&fault);
                session.end(Fault::Call(fault.into()));
                told
            })
        });
        // Fails where the runtime shuts down.
        task.await.unwrap_or(Err(TicketError::Lost))
    }
}

impl Tickets for RabbitTickets {
    type Taken = RabbitTaken;

    async fn publish(&self, line: Line, ticket: Ticket, expires: Duration) -> Result<Epoch, TicketError> {
        let confirmed = self.call(async move |shared: Arc<Shared>, session: Arc<Session>| {
            let (exchange, line) = (shared.names.tickets.clone(), shared.names.line(line));
            let published = session.publish(exchange, line.clone(), &ticket.encode(), expires, shared.timeout).await;
            match published {
                Ok(Published::Queued) => shared.meters.confirmed.inc(),
                Ok(Published::Refused) => {
                    shared.meters.refused.inc();
                    return Ok(Err(TicketError::Refused));
                }
                // Whoever deleted the queue took the other tickets along: all must be published again.
                Ok(Published::Unroutable) => {
                    shared.meters.refused.inc();
                    return Err(Fault::QueueGone(line.to_string()));
                }
                Err(fault) => {
                    shared.meters.unconfirmed.inc();
                    return Err(fault);
                }
            }
            Ok(Ok(session.epoch))
        });
        confirmed.await?
    }

    async fn next(&self, line: Line) -> Result<Option<RabbitTaken>, TicketError> {
        self.call(async move |shared: Arc<Shared>, session: Arc<Session>| {
            session.get(&shared.names.line(line), &shared).await
        })
        .await
    }

    async fn grant(&self, to: ReplicaId, grant: Grant, expires: Duration) -> Result<Sent, TicketError> {
        let sent = self.call(async move |shared: Arc<Shared>, session: Arc<Session>| {
            let (exchange, key) = (shared.names.grants.clone(), Names::replica(to));
            let payload = grant.encode(&shared.lines.pools);
            let published = session.publish(exchange, key, &payload, expires, shared.timeout).await;
            if !matches!(published, Ok(Published::Queued)) {
                shared.meters.grants_lost.inc();
            }
            Ok(match published? {
                Published::Queued => Ok(Sent::Queued),
                Published::Unroutable => Ok(Sent::Unroutable),
                Published::Refused => Err(TicketError::Refused),
            })
        });
        sent.await?
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.shared.standing.subscribe()
    }
}

impl Shared {
    fn next_epoch(&self) -> Epoch {
        let mut epoch = self.epoch.lock().unwrap_or_else(PoisonError::into_inner);
        *epoch = epoch.next();
        *epoch
    }

    fn up(&self, session: &Arc<Session>) {
        self.session.store(Some(Arc::clone(session)));
        self.standing.send_replace(Standing { up: true, epoch: session.epoch });
        self.change(Breaker::proved);
    }

    fn down(&self, fault: &Fault) {
        self.session.store(None);
        self.standing.send_modify(|standing| standing.up = false);
        self.meters.count(fault);
        self.health().last_error = Some(fault.to_string());
        self.change(Breaker::unreachable);
    }

    /// A message that nobody here wrote. Read and forgotten.
    fn foreign(&self) {
        self.meters.replies.inc();
    }

    /// The one place where the breaker changes: counted, logged once.
    fn change(&self, event: impl FnOnce(&mut Breaker, Instant) -> Option<Change>) {
        let mut health = self.health();
        match event(&mut health.breaker, Instant::now()) {
            Some(Change::Up(after)) => {
                self.meters.up.set(1);
                self.meters.ups.inc();
                tracing::info!(store = STORE, ?after, "rabbitmq is up");
            }
            Some(Change::Down) => {
                self.meters.up.set(0);
                self.meters.downs.inc();
                let reason = health.last_error.as_deref().unwrap_or_default();
                tracing::warn!(store = STORE, reason, "rabbitmq is down, each replica keeps its own room");
            }
            None => {}
        }
    }

    /// A panic of another thread leaves the breaker whole.
    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
