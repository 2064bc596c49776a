//! Every metric of bouncer, by name, in one file. Labels come from the configuration only: no key, path or address
//! ever becomes one.

use std::sync::Arc;

use prometheus::{
    Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry, TextEncoder, histogram_opts,
    register_histogram_vec_with_registry as histograms, register_int_counter_vec_with_registry as counters,
    register_int_counter_with_registry as counter, register_int_gauge_vec_with_registry as gauges,
    register_int_gauge_with_registry as single_gauge,
};

use crate::admission::PoolStats;
use crate::identity::Tier;
use crate::verdict::Reason;

/// The tier label of requests in which nobody was recognised. No tier may have this name.
pub(crate) const NOBODY: &str = "none";

/// Seconds. A call on a local network takes well under a millisecond; the default deadline is 50 ms in Redis and 1 s in
/// RabbitMQ.
const STORE_CALL_BUCKETS: [f64; 12] =
    [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

/// All metrics of the process.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// What the stores report.
    pub stores: StoreMetrics,
    /// What sharing slots with other replicas reports.
    pub replicas: ReplicaMetrics,
    /// What becomes of tickets and grants.
    pub tickets: TicketMetrics,
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
            replicas: ReplicaMetrics::register(&registry)?,
            tickets: TicketMetrics::register(&registry)?,
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
    /// `bouncer_store_up{store}`: 1 while the store is asked, 0 while something else stands in for it.
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

/// What sharing slots with other replicas reports.
#[derive(Debug, Clone)]
pub struct ReplicaMetrics {
    /// `bouncer_handovers_total{route="own"}`: slots that passed from one request of this replica to another.
    pub own: IntCounter,
    /// `bouncer_handovers_total{route="other"}`: slots that held requests of this replica got after another gave them up.
    pub other: IntCounter,
    /// `bouncer_lease_expiries_total`: leases of whatever replica that this one found ended.
    pub lease_expiries: IntCounter,
    /// `bouncer_leases_lost_total`: times that this replica found its own slots and places reclaimed.
    pub leases_lost: IntCounter,
    /// `bouncer_cut_off`: 1 while this replica goes on with the slots it has, as the store does not answer.
    pub cut_off: IntGauge,
}

impl ReplicaMetrics {
    /// # Errors
    /// When a name is registered twice.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        let handovers = counters!(
            "bouncer_handovers_total",
            "Slots that held requests of this replica got, from its own requests or from another replica",
            &["route"],
            registry
        )?;
        Ok(Self {
            own: handovers.with_label_values(&["own"]),
            other: handovers.with_label_values(&["other"]),
            lease_expiries: counter!(
                "bouncer_lease_expiries_total",
                "Leases, of whatever replica, that this one found ended",
                registry
            )?,
            leases_lost: counter!(
                "bouncer_leases_lost_total",
                "Times that this replica found its slots and places reclaimed",
                registry
            )?,
            cut_off: single_gauge!(
                "bouncer_cut_off",
                "1 while this replica goes on with the slots it has, as the store does not answer",
                registry
            )?,
        })
    }
}

/// What becomes of tickets and grants.
#[derive(Debug, Clone)]
pub struct TicketMetrics {
    /// `bouncer_ticket_confirms_total{outcome}` with `outcome` = `confirmed`, `refused` or `unknown`: tickets that were
    /// published.
    pub confirms: IntCounterVec,
    /// `bouncer_stale_tickets_total`: tickets taken whose request did not wait any more.
    pub stale: IntCounter,
    /// `bouncer_grants_lost_total`: grants that did not reach who they were for.
    pub grants_lost: IntCounter,
}

impl TicketMetrics {
    /// # Errors
    /// When a name is registered twice.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        Ok(Self {
            confirms: counters!(
                "bouncer_ticket_confirms_total",
                "Tickets published, by what the broker said",
                &["outcome"],
                registry
            )?,
            stale: counter!(
                "bouncer_stale_tickets_total",
                "Tickets taken whose request did not wait any more",
                registry
            )?,
            grants_lost: counter!(
                "bouncer_grants_lost_total",
                "Grants that did not reach the replica they were for",
                registry
            )?,
        })
    }
}
