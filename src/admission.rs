//! Admission: who may be in flight, and whose turn is next.
//!
//! A [`Pool`] has a cap on requests in flight and a waiting room in front of it. What it promises:
//!
//! 1. *Cap.* No more than `max_in_flight` slots exist at any time.
//! 2. *Work-conserving.* A slot is never free while a request waits: it passes from hand to hand under one lock.
//! 3. *Order.* Nothing overtakes: whoever arrives while others wait joins the room, whatever frees at that instant.
//! 4. *One answer.* A ticket leaves the room once: called, expired, gone or closing.
//! 5. *No leaks.* A [`Slot`] and a [`Ticket`] are given back by drop, on every way out.
//!
//! [`order`] decides whose turn it is, [`room`] keeps the queues; both are pure. [`slots`] is the lock around them.
//! [`tickets`] is how replicas that share slots tell each other who waits.

pub mod order;
pub mod room;
pub mod slots;
pub mod tickets;

use std::time::Duration;

pub use slots::{Entry, Pool, PoolStats, Slot, Ticket, Turn};

/// How many requests of a tier may wait, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBounds {
    /// Waiting requests at most; 0 means that nothing of this tier is ever held.
    pub length: usize,
    /// How long one request may wait.
    pub max_wait: Duration,
}
