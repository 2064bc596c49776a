//! Admission: who may be in flight, and whose turn is next.

use std::time::Duration;

/// How many requests of a tier may wait, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBounds {
    /// Waiting requests at most; 0 means that nothing of this tier is ever held.
    pub length: usize,
    pub max_wait: Duration,
}
