//! The doors: how Envoy's protocols are spoken. gRPC types end here.
//!
//! [`ext_proc`] is the main door. [`wire`] is the part of Envoy's messages that is read, [`reply`] writes the
//! answers.

pub mod ext_proc;
pub mod reply;
pub mod wire;
