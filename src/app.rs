//! The application: the only place that picks back ends and puts the parts together.

mod seat;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::server::HealthReporter;

use crate::admin::{self, Admin};
use crate::admission::tickets::{ReplicaId, rabbitmq};
use crate::config::{Address, Config, Shutdown};
use crate::envoy::ext_proc::ExtProc;
use crate::gate::{Gate, Shared};
use crate::identity::directory::Directory;
use crate::identity::public::{PublicPathError, PublicPaths};
use crate::identity::request::Rules;
use crate::limit::outage::Stores;
use crate::limit::redis::UrlError;
use crate::listen::{self, Bound, Listener, Neighbours, SocketFile};
use crate::metrics::Metrics;
use crate::server::{self, ServeError};
use seat::{Broker, Seat};

/// How far apart two processes may be told to stop, and their listeners close, for that to count as the same moment.
const TOGETHER: Duration = Duration::from_millis(500);

/// A replica whose sockets are bound and whose parts are made, ready to run.
pub struct App {
    shared: Arc<Shared>,
    stores: Arc<Stores>,
    seat: Seat,
    broker: Option<Broker>,
    rules: Arc<Rules>,
    admin: Arc<Admin>,
    grpc: Bound,
    admin_listener: TcpListener,
    shutdown: Shutdown,
}

/// Why a replica did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address} ({field})")]
    Listen {
        /// The configuration's field.
        field: &'static str,
        /// What it says.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// A metric has the name of another.
    #[error("metrics cannot be registered")]
    Metrics(#[from] prometheus::Error),
    /// The store's address cannot be used.
    #[error("the addresses of redis cannot be used")]
    Redis(#[from] UrlError),
    /// The broker's address cannot be used.
    #[error("rabbitmq.url cannot be used")]
    RabbitMq(#[from] rabbitmq::UrlError),
    /// A public path cannot be matched.
    #[error("a public path cannot be used")]
    Public(#[from] PublicPathError),
    /// The system has no randomness to give.
    #[error("no id for this replica could be made")]
    Id(#[from] getrandom::Error),
    /// There is no pool in the configuration.
    #[error("no pool is configured")]
    NoPool,
}

/// Why a replica stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The system refused a thread or a runtime.
    #[error("a worker could not be started")]
    Worker(#[source] io::Error),
    /// A worker ended without being asked.
    #[error("a worker stopped serving")]
    Serve(#[from] ServeError),
    /// A worker panicked.
    #[error("a worker panicked")]
    Panic,
}

impl App {
    /// Binds the sockets and makes the parts.
    ///
    /// # Errors
    /// When an address is in use or cannot be bound.
    ///
    /// # Panics
    /// With RabbitMQ, outside of a tokio runtime.
    pub fn bind(config: &Config, workers: NonZeroUsize) -> Result<Self, StartError> {
        let in_use = |field, address: String| move |source| StartError::Listen { field, address, source };
        // The admin port first: it is not shared, so that a second replica started by mistake fails here instead of
        // taking half of the first one's connections.
        let admin_address = config.listen.admin;
        let admin_listener = TcpListener::bind(admin_address)
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(in_use("listen.admin", admin_address.to_string()))?;
        let grpc = listen::bind(&config.listen.grpc, workers.get())
            .map_err(in_use("listen.grpc", config.listen.grpc.to_string()))?;

        let metrics = Arc::new(Metrics::new(&config.tiers)?);
        let stores = Arc::new(Stores::new(config.redis.as_ref(), &metrics.stores)?);
        let pool = config.pools.first().ok_or(StartError::NoPool)?;
        let replica = ReplicaId::random()?;
        let seat = Seat::new(config, pool, replica, &metrics);
        let broker = Broker::new(config, replica, &metrics)?;
        let keys = config.tenants.iter().flat_map(|known| known.keys.iter().map(|key| (*key, known.tenant.clone())));
        let directory = Directory::new(keys);
        let shared = Shared::new(directory, seat.pool(), metrics);
        let tickets = broker.as_ref().map(|broker| broker.tickets.clone());
        let admin = Admin::new(shared.clone(), stores.clone(), tickets, config.tiers.clone(), pool.name.clone());
        let public = PublicPaths::new(&config.public)?;
        let rules = Arc::new(Rules::new(&config.credentials.headers, config.credentials.forward, public));
        Ok(Self { shared, stores, seat, broker, rules, admin, grpc, admin_listener, shutdown: config.shutdown })
    }

    /// Where the gRPC server listens.
    pub fn grpc_address(&self) -> &Address {
        &self.grpc.address
    }

    /// Where the admin port is.
    ///
    /// # Errors
    /// When the system cannot tell.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.admin_listener.local_addr()
    }

    /// Serves until `shutdown`, then goes away in the order that loses nothing: first say so and go on judging until
    /// Envoys have looked away, then answer what is held, then say GOAWAY and let what is in flight finish. With another
    /// process on the same port GOAWAY comes first, as new connections reach that one.
    ///
    /// # Errors
    /// When a worker ends before it is asked to.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        let socket_file = SocketFile::of(&self.grpc.address);
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_serving::<ExtProc>().await;
        let admin = tokio::net::TcpListener::from_std(self.admin_listener).map_err(RunError::Worker)?;
        let routes = admin::routes(self.admin.clone());
        tokio::spawn(async move { axum::serve(admin, routes).await });

        let replica = self.seat.take_part(&self.stores, self.broker);
        let stop = CancellationToken::new();
        let neighbours = self.grpc.neighbours();
        let parts = WorkerParts {
            shared: self.shared.clone(),
            stores: self.stores,
            seat: self.seat,
            rules: self.rules,
            health,
        };
        let mut workers = Workers::start(self.grpc.listeners, &parts, &stop)?;
        tokio::select! {
            () = shutdown => {}
            ended = workers.next() => return ended.unwrap_or(Err(RunError::Panic)),
        }

        self.admin.drain();
        if others_stay(&neighbours, self.shutdown.delay).await {
            // To Envoy it is one address, of which only good can be said: it must look away from this process alone.
            tracing::info!(delay = ?self.shutdown.delay, "shutting down: the other process on this port takes over");
            stop.cancel();
        } else {
            tracing::info!(delay = ?self.shutdown.delay, "shutting down: health says no, judging goes on");
            not_serving(&reporter).await;
        }
        if let Ok(ended) = tokio::time::timeout(self.shutdown.delay, workers.all()).await {
            ended?;
        }
        let stats = self.shared.pool.stats();
        let held: usize = stats.waiting.iter().sum();
        tracing::info!(held, in_flight = stats.in_flight, drain = ?self.shutdown.drain, "no new requests");
        self.shared.close(self.shutdown.held);
        // Now, not at the end of the drain: a successor may have its own file there by then.
        drop(socket_file);
        stop.cancel();
        if let Ok(ended) = tokio::time::timeout(self.shutdown.drain, workers.all()).await {
            ended?;
        } else {
            let in_flight = self.shared.pool.stats().in_flight;
            tracing::warn!(in_flight, "drain time is over: the rest finishes without being counted");
        }
        if let Some(replica) = replica {
            replica.leave().await;
        }
        tracing::info!("stopped");
        Ok(())
    }
}

/// Whether other processes on this port go on taking connections. Where several are told to stop at the same moment, all
/// but one close their listeners at once, and that one finds itself alone and judges for all of them.
async fn others_stay(neighbours: &Neighbours, delay: Duration) -> bool {
    if neighbours.any() && neighbours.is_last() {
        tokio::time::sleep(TOGETHER.min(delay)).await;
    }
    neighbours.any()
}

async fn not_serving(reporter: &HealthReporter) {
    reporter.set_not_serving::<ExtProc>().await;
    // The empty name is the server as a whole, which is what Envoy asks for by default.
    reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
}

/// What every worker gets a share of.
struct WorkerParts<H: Health> {
    shared: Arc<Shared>,
    stores: Arc<Stores>,
    seat: Seat,
    rules: Arc<Rules>,
    health: HealthServer<H>,
}

/// One thread a core, each with its own single-threaded runtime and its own listener.
///
/// A work-stealing runtime moves a stream between cores for no gain: what a request does here is short, and its
/// connection already has a core. Measured behind Envoy on two cores that were busy with other work: a fifth to a third
/// more processor time a request for work stealing, and nothing to choose between one such thread and one a core.
struct Workers {
    ended: mpsc::UnboundedReceiver<Result<(), RunError>>,
}

impl Workers {
    fn start<H: Health>(
        listeners: Vec<Listener>,
        parts: &WorkerParts<H>,
        stop: &CancellationToken,
    ) -> Result<Self, RunError> {
        let (report, ended) = mpsc::unbounded_channel();
        for (number, listener) in listeners.into_iter().enumerate() {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Worker)?;
            let (shared, stores, rules) = (parts.shared.clone(), parts.stores.clone(), parts.rules.clone());
            let seat = parts.seat.clone();
            let (health, stop, report) = (parts.health.clone(), stop.clone(), report.clone());
            let work = move || {
                let ended = runtime.block_on(async move {
                    let limits = stores.limits();
                    // So that the first requests find Redis connected; bounded, and connections queue meanwhile.
                    limits.settled().await;
                    seat.settled().await;
                    let door = ExtProc::new(Gate::new(shared, seat.entrance(limits)), rules);
                    server::serve(listener, door, health, stop).await
                });
                // Nobody listens any more where the drain time is over.
                let _ = report.send(ended.map_err(RunError::Serve));
            };
            thread::Builder::new().name(format!("worker-{number}")).spawn(work).map_err(RunError::Worker)?;
        }
        Ok(Self { ended })
    }

    /// The next worker to end. `None` when all have ended, or the last one panicked.
    async fn next(&mut self) -> Option<Result<(), RunError>> {
        self.ended.recv().await
    }

    async fn all(&mut self) -> Result<(), RunError> {
        while let Some(ended) = self.next().await {
            ended?;
        }
        Ok(())
    }
}
