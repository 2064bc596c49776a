//! Slots that all replicas share: one cap and one order by tier over all of them.
//!
//! ```text
//! desk ── enter ─────► slots (Redis)      one a runtime: charges a request, and a slot or a place in the same run
//!   │  ── release ───►                    nobody waits for it; the slot passes to our own next waiter in the same run
//!   └── pool                              one a process: the room, the ledger of serials, the lease
//! coordinator ── heartbeat, settle ──►    one a process: keeps the lease, puts right what a lost reply left open
//!             ◄─ announcements ───────    a slot is free while one of ours may wait: try to promote it
//! dispatcher ── tickets, grants ──►       where there is a broker: publishes who waits here, hands slots over, claims grants
//! ```
//!
//! What it promises, beyond what [`super`] says of one process:
//!
//! 1. *Cap.* Over all replicas no more than `max_in_flight` slots are in use, but for what [`lease`] says of a replica
//!    that is cut off.
//! 2. *Order.* A slot goes to a waiter of the highest tier that waits anywhere; within a tier, first come first served
//!    within a replica, and over all replicas while tickets are up, in the order in which they reached the broker. A request that arrives while anyone waits anywhere joins the room.
//! 3. *No leaks.* Each request has a serial, which is used once. The ledger knows a serial before anything is sent
//!    about it, and whatever the store knows and the ledger does not is dropped at the next heartbeat.
//!
//! [`slots`] is what a store of slots can do, in the words of the domain; [`redis`] is the one there is.

#[cfg(test)]
mod conformance;
mod coordinator;
mod desk;
mod dispatcher;
mod ending;
mod hand_over;
pub mod lease;
mod ledger;
#[cfg(test)]
mod model;
mod pool;
pub mod redis;
mod slot;
pub mod slots;
mod ticket;

pub use coordinator::Coordinator;
pub use desk::{Desk, Entered};
pub use dispatcher::Dispatcher;
pub use pool::{Pool, SharedStats};
pub use slot::Slot;
pub use ticket::Ticket;
