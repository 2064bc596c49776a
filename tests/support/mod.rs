//! What tests against a real Envoy share: one stack a test (upstream, bouncer, Envoy) on ports of its own.
//!
//! ```text
//! client ──► envoy (the shipped file, other ports) ──► upstream (in this process, with its record)
//!                       └── ext_proc ──► bouncer (the binary under test)
//! ```
//!
//! A `mod.rs`, because `tests/support.rs` would be a test of its own to cargo.

#![allow(dead_code, reason = "every test binary uses another part of this")]

pub(crate) mod client;
pub(crate) mod dice;
pub(crate) mod envoy;
pub(crate) mod grpc;
pub(crate) mod metrics;
pub(crate) mod occupant;
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod rabbit;
pub(crate) mod raw;
pub(crate) mod redis;
pub(crate) mod stack;
pub(crate) mod upstream;
pub(crate) mod wait;
pub(crate) mod websocket;
