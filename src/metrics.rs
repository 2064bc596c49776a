//! Every metric of bouncer, by name, in one file. Labels come from the configuration only: no key, path or address
//! ever becomes one.

use prometheus::{
    HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Registry,
    register_histogram_vec_with_registry as histograms, register_int_counter_vec_with_registry as counters,
    register_int_gauge_vec_with_registry as gauges,
};

/// Seconds. A call on a local network takes well under a millisecond; the default deadline is 50 ms.
const STORE_CALL_BUCKETS: [f64; 10] = [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1];

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
                HistogramOpts::new("bouncer_store_call_seconds", "How long calls to the store took")
                    .buckets(STORE_CALL_BUCKETS.to_vec()),
                &["store"],
                registry
            )?,
        })
    }
}
