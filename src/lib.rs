//! bouncer: an external filter for Envoy that knows who is asking, how much they may, and when it is their turn.
//!
//! The path of a request:
//!
//! ```text
//! Envoy ── ext_proc ──► envoy        reads the protocol message into a plain Request
//!                       gate         the one pipeline, free of gRPC:
//!                         identity   credential → tenant and tier              | 401
//!                         limit      all charges or none                       | 429
//!                         admission  a slot now, or a ticket and its turn      | 503
//!                       verdict      the one table from outcome to status, headers, body, metric label
//! Envoy ◄── allow/deny  envoy        writes the protocol message
//! Envoy ── stream ends ► envoy  ──►  the slot is dropped, the next ticket is called
//! ```
//!
//! Dependencies point down only: gRPC types stay in [`envoy`], Redis types in [`limit::redis`], AMQP types in
//! [`admission::tickets::rabbitmq`].

#![forbid(unsafe_code)]

pub mod admin;
pub mod admission;
pub mod app;
pub mod config;
pub mod descriptors;
pub mod envoy;
pub mod gate;
pub mod identity;
pub mod key;
pub mod limit;
pub mod listen;
pub mod metrics;
pub mod probe;
pub mod server;
pub mod telemetry;
pub mod verdict;
