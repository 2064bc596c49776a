//! The admin port: liveness, readiness, metrics and figures for operators.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::admission::tickets::rabbitmq::RabbitTickets;
use crate::gate::Shared;
use crate::identity::Tier;
use crate::limit::outage::Stores;

/// What the admin port can tell.
pub struct Admin {
    shared: Arc<Shared>,
    stores: Arc<Stores>,
    tickets: Option<RabbitTickets>,
    tiers: Vec<Arc<Tier>>,
    pool: String,
    started: Instant,
    draining: AtomicBool,
}

impl Admin {
    /// The state behind the admin port, for a replica that starts now.
    pub fn new(
        shared: Arc<Shared>,
        stores: Arc<Stores>,
        tickets: Option<RabbitTickets>,
        tiers: Vec<Arc<Tier>>,
        pool: String,
    ) -> Arc<Self> {
        let (started, draining) = (Instant::now(), AtomicBool::new(false));
        Arc::new(Self { shared, stores, tickets, tiers, pool, started, draining })
    }

    /// From now on `/ready` says no.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    fn state(&self) -> &'static str {
        if self.draining.load(Ordering::Relaxed) { "draining" } else { "ready" }
    }

    fn stores(&self) -> Value {
        let redis = self.stores.status().map(|status| ("redis", status));
        let rabbitmq = self.tickets.as_ref().map(|tickets| ("rabbitmq", tickets.status()));
        let stores = redis.into_iter().chain(rabbitmq).map(|(name, status)| {
            let since = status.lasting.as_secs();
            let shown = json!({ "up": status.up, "last_error": status.last_error, "since_seconds": since });
            (name.to_owned(), shown)
        });
        Value::Object(stores.collect())
    }

    /// The whole pool where slots are shared, as it stood at the last heartbeat; the figures beside it are this replica's.
    fn shared_pool(&self) -> Option<Value> {
        let shared = self.shared.pool.shared_stats()?;
        let tiers = self.tiers.iter().zip(&shared.waiting);
        let queues: Vec<_> = tiers.map(|(tier, waiting)| json!({ "tier": tier.name, "waiting": waiting })).collect();
        Some(json!({
            "cut_off": shared.cut_off,
            "replicas": shared.replicas,
            "in_flight": shared.in_flight,
            "waiting": shared.waiting.iter().sum::<usize>(),
            "queues": queues,
        }))
    }

    fn stats(&self) -> Value {
        let pool = self.shared.pool.stats();
        let queues: Vec<_> = self
            .tiers
            .iter()
            .zip(&pool.waiting)
            .map(|(tier, waiting)| {
                json!({
                    "tier": tier.name,
                    "waiting": waiting,
                    "length": tier.queue.length,
                    "max_wait_ms": u64::try_from(tier.queue.max_wait.as_millis()).unwrap_or(u64::MAX),
                })
            })
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "state": self.state(),
            "uptime_seconds": self.started.elapsed().as_secs(),
            "pools": [{
                "name": self.pool,
                "max_in_flight": pool.max_in_flight,
                "in_flight": pool.in_flight,
                "waiting": pool.waiting.iter().sum::<usize>(),
                "queues": queues,
                "shared": self.shared_pool(),
            }],
            "buckets": { "in_use": self.stores.buckets_in_use() },
            "keys": self.shared.directory.len(),
            "stores": self.stores(),
        })
    }
}

/// The routes of the admin port.
pub fn routes(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/health", get(async || Json(json!({ "status": "alive" }))))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/stats", get(async |State(admin): State<Arc<Admin>>| Json(admin.stats())))
        .with_state(admin)
}

/// 200 while judging, also with a store down: a replica that answers by policy is of more use than none.
async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    let status = if admin.draining.load(Ordering::Relaxed) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    (status, Json(json!({ "status": admin.state(), "stores": admin.stores() }))).into_response()
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    admin.shared.metrics.observe_pool(&admin.pool, &admin.shared.pool.stats());
    match admin.shared.metrics.render() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "metrics could not be rendered");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
