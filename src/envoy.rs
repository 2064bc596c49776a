//! The doors: how Envoy's protocols are spoken. gRPC types end here.
//!
//! [`ext_proc`] is the main door. [`wire`] is the part of Envoy's messages that is read, [`message`] the part that is
//! written, [`reply`] turns a verdict into it.

pub mod ext_proc;
pub mod message;
pub mod reply;
pub mod wire;
