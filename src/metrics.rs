//! Every metric of bouncer, by name, in one file. Labels come from the configuration only: no key, path or address
//! ever becomes one.

use std::sync::Arc;

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Registry, TextEncoder, histogram_opts,
    register_histogram_vec_with_registry as histograms, register_int_counter_vec_with_registry as counters,
    register_int_gauge_vec_with_registry as gauges,
};

use crate::admission::PoolStats;
use crate::identity::Tier;
use crate::verdict::Reason;

/// The tier label of requests in which nobody was recognised.
const NOBODY: &str = "none";

/// Seconds. A call on a local network takes well under a millisecond; the default deadline is 50 ms.
const STORE_CALL_BUCKETS: [f64; 10] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1];

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// What the stores report.
    pub stores: StoreMetrics,
    /// By the tier's rank.
    tiers: Vec<TierMetrics>,
    /// Requests in which nobody was recognised.
    pub nobody: TierMetrics,
    /// `bouncer_in_flight{pool}`: requests of this replica between grant and end of response.
    in_flight: IntGaugeVec,
    /// `bouncer_queue_depth{pool,tier}`: requests that this replica holds.
    queue_depth: IntGaugeVec,
    /// `bouncer_max_in_flight{pool}`: the cap.
    max_in_flight: IntGaugeVec,
    /// `bouncer_max_queue_depth{pool,tier}`: how many may be held, over all replicas that share slots.
    max_queue_depth: IntGaugeVec,
    names: Vec<Arc<Tier>>,
}

/// What is counted for one tier. Handles are made once, so that counting a request is one atomic addition.
#[derive(Debug)]
pub struct TierMetrics {
    /// Let through at once.
    pub forwarded: IntCounter,
    /// Entered the waiting room.
    pub queued: IntCounter,
    /// Refused with 429.
    pub rate_limited: IntCounter,
    /// Refused with 401.
    pub unauthorized: IntCounter,
    shed: IntCounter,
    shed_by_reason: [IntCounter; Reason::SHED.len()],
    /// Held and gone before it was answered.
    pub abandoned: IntCounter,
    /// Seconds from entering the room to leaving it, whatever came of it.
    pub queue_wait: Histogram,
    /// Seconds from grant to end of response.
    pub backend_duration: Histogram,
}

impl TierMetrics {
    /// Counts a refusal under the outcome that the table of answers gives it.
    pub fn refused(&self, reason: Reason) {
        match reason {
            Reason::MissingKey | Reason::InvalidKey => self.unauthorized.inc(),
            Reason::RateLimited => self.rate_limited.inc(),
            Reason::QueueFull | Reason::QueueTimeout | Reason::Unavailable | Reason::ShuttingDown => {
                self.shed.inc();
                if let Some(at) = Reason::SHED.iter().position(|shed| *shed == reason) {
                    self.shed_by_reason[at].inc();
                }
            }
        }
    }
}

impl Metrics {
    /// Registers everything, with one series for each tier from the start, so that a rate over a counter sees its
    /// first increment.
    ///
    /// # Errors
    /// When a name is registered twice.
    pub fn new(tiers: &[Arc<Tier>]) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let families = Families::register(&registry)?;
        let up = gauges!("bouncer_build_info", "1, labelled with the version", &["version"], registry)?;
        up.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            stores: StoreMetrics::register(&registry)?,
            tiers: tiers.iter().map(|tier| families.tier(&tier.name)).collect(),
            nobody: families.tier(NOBODY),
            in_flight: gauges!(
                "bouncer_in_flight",
                "Requests of this replica between grant and end of response",
                &["pool"],
                registry
            )?,
            queue_depth: gauges!(
                "bouncer_queue_depth",
                "Requests that this replica holds",
                &["pool", "tier"],
                registry
            )?,
            max_in_flight: gauges!("bouncer_max_in_flight", "The cap on requests in flight", &["pool"], registry)?,
            max_queue_depth: gauges!(
                "bouncer_max_queue_depth",
                "The bound on requests held, over all replicas that share slots",
                &["pool", "tier"],
                registry
            )?,
            names: tiers.to_vec(),
            registry,
        })
    }

    /// The metrics of the tier of this rank.
    pub fn tier(&self, rank: usize) -> &TierMetrics {
        &self.tiers[rank]
    }

    /// Sets the gauges of a pool from how it stands.
    pub fn observe_pool(&self, pool: &str, stats: &PoolStats) {
        self.in_flight.with_label_values(&[pool]).set(gauge(stats.in_flight));
        self.max_in_flight.with_label_values(&[pool]).set(gauge(stats.max_in_flight));
        for (tier, waiting) in self.names.iter().zip(&stats.waiting) {
            let labels = [pool, tier.name.as_str()];
            self.queue_depth.with_label_values(&labels).set(gauge(*waiting));
            self.max_queue_depth.with_label_values(&labels).set(gauge(tier.queue.length));
        }
    }

    /// Everything in Prometheus's text format.
    ///
    /// # Errors
    /// When a metric cannot be encoded.
    pub fn render(&self) -> prometheus::Result<String> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The families that have a label for the tier.
struct Families {
    requests: IntCounterVec,
    shed: IntCounterVec,
    abandoned: IntCounterVec,
    queue_wait: HistogramVec,
    backend_duration: HistogramVec,
}

impl Families {
    fn register(registry: &Registry) -> prometheus::Result<Self> {
        // A hold ends within seconds; a response may stream for minutes.
        let waits = vec![0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
        let durations = vec![0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
        Ok(Self {
            requests: counters!(
                "bouncer_requests_total",
                "Requests by outcome; one that was queued and then shed counts as both",
                &["tier", "outcome"],
                registry
            )?,
            shed: counters!(
                "bouncer_shed_total",
                "Requests answered with 503, by reason",
                &["tier", "reason"],
                registry
            )?,
            abandoned: counters!(
                "bouncer_abandoned_total",
                "Requests whose client went away while they were held",
                &["tier"],
                registry
            )?,
            queue_wait: histograms!(
                histogram_opts!("bouncer_queue_wait_seconds", "Time in the waiting room", waits),
                &["tier"],
                registry
            )?,
            backend_duration: histograms!(
                histogram_opts!("bouncer_backend_duration_seconds", "Time from grant to end of response", durations),
                &["tier"],
                registry
            )?,
        })
    }

    fn tier(&self, tier: &str) -> TierMetrics {
        let outcome = |outcome: &str| self.requests.with_label_values(&[tier, outcome]);
        TierMetrics {
            forwarded: outcome("forwarded"),
            queued: outcome("queued"),
            rate_limited: outcome("rate_limited"),
            unauthorized: outcome("unauthorized"),
            shed: outcome("shed"),
            shed_by_reason: Reason::SHED.map(|reason| self.shed.with_label_values(&[tier, reason.error()])),
            abandoned: self.abandoned.with_label_values(&[tier]),
            queue_wait: self.queue_wait.with_label_values(&[tier]),
            backend_duration: self.backend_duration.with_label_values(&[tier]),
        }
    }
}

/// What the stores report.
#[derive(Debug, Clone)]
pub struct StoreMetrics {
    /// `bouncer_store_up{store}`: 1 while the store is asked, 0 while the outage policy answers for it.
    pub up: IntGaugeVec,
    /// `bouncer_store_transitions_total{store,to}` with `to` = `up` or `down`.
    pub transitions: IntCounterVec,
    /// `bouncer_store_errors_total{store,kind}` with `kind` = `timeout`, `connection` or `reply`.
    pub errors: IntCounterVec,
    /// `bouncer_store_fallback_total{store,policy}`: requests that the outage policy answered.
    pub fallback: IntCounterVec,
    /// `bouncer_store_call_seconds{store}`: how long calls took, failed ones included.
    pub call: HistogramVec,
}

impl StoreMetrics {
    /// # Errors
    /// When a name is registered twice.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        Ok(Self {
            up: gauges!(
                "bouncer_store_up",
                "1 while the store is asked, 0 while it counts as down",
                &["store"],
                registry
            )?,
            transitions: counters!(
                "bouncer_store_transitions_total",
                "Times the store went up or down",
                &["store", "to"],
                registry
            )?,
            errors: counters!(
                "bouncer_store_errors_total",
                "Calls to the store that failed",
                &["store", "kind"],
                registry
            )?,
            fallback: counters!(
                "bouncer_store_fallback_total",
                "Requests answered by the outage policy",
                &["store", "policy"],
                registry
            )?,
            call: histograms!(
                histogram_opts!(
                    "bouncer_store_call_seconds",
                    "How long calls to the store took",
                    STORE_CALL_BUCKETS.to_vec()
                ),
                &["store"],
                registry
            )?,
        })
    }
}
