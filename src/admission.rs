//! Admission: who may be in flight, and whose turn is next.
//!
//! A pool has a cap on requests in flight and a waiting room in front of it. What it promises:
//!
//! 1. *Cap.* No more than `max_in_flight` slots exist at any time.
//! 2. *Work-conserving.* A slot is never free while a request waits: it passes from hand to hand under one lock.
//! 3. *Order.* Nothing overtakes: whoever arrives while others wait joins the room, whatever frees at that instant.
//! 4. *One answer.* A ticket leaves the room once: called, expired, gone or closing.
//! 5. *No leaks.* A slot and a ticket are given back by drop, on every way out.
//!
//! [`order`] decides whose turn it is, [`room`] keeps the queues; both are pure. [`slots`] is the lock around them where this
//! process has the pool to itself, [`shared`] the same over all replicas. [`tickets`] is how replicas that share slots tell
//! each other who waits.

pub mod order;
pub mod room;
pub mod shared;
pub mod slots;
pub mod tickets;

use std::time::Duration;

/// What happened at the door: `S` is a slot, `T` a ticket.
#[derive(Debug)]
pub enum Entry<S, T> {
    /// A slot was free and nobody waited for it.
    Slot(S),
    /// Everything is in use, or others wait: await your turn.
    Held(T),
    /// The tier's queue has no place left.
    Full,
    /// The pool takes no new requests.
    Closing,
}

impl<S, T> Entry<S, T> {
    /// The same with another kind of slot and ticket.
    pub fn map<U, V>(self, slot: impl FnOnce(S) -> U, ticket: impl FnOnce(T) -> V) -> Entry<U, V> {
        match self {
            Entry::Slot(it) => Entry::Slot(slot(it)),
            Entry::Held(it) => Entry::Held(ticket(it)),
            Entry::Full => Entry::Full,
            Entry::Closing => Entry::Closing,
        }
    }
}

/// How a wait ended: `S` is a slot.
#[derive(Debug)]
pub enum Turn<S> {
    /// It is your turn.
    Slot(S),
    /// It did not come in time; the place is given up.
    Expired,
    /// The pool was closed.
    Closing,
}

impl<S> Turn<S> {
    /// The same with another kind of slot.
    pub fn map<U>(self, slot: impl FnOnce(S) -> U) -> Turn<U> {
        match self {
            Turn::Slot(it) => Turn::Slot(slot(it)),
            Turn::Expired => Turn::Expired,
            Turn::Closing => Turn::Closing,
        }
    }
}

/// How a pool stands at one instant, as far as this replica has a part in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStats {
    /// The cap.
    pub max_in_flight: usize,
    /// Slots given out.
    pub in_flight: usize,
    /// Requests held, by the tier's rank.
    pub waiting: Vec<usize>,
}

/// How many requests of a tier may wait, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBounds {
    /// Waiting requests at most; 0 means that nothing of this tier is ever held.
    pub length: usize,
    /// How long one request may wait.
    pub max_wait: Duration,
}
