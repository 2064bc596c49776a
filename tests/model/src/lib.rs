//! Every interleaving of the hand-over protocol, of a few requests at a few replicas, while things go wrong.

#![forbid(unsafe_code)]

mod beat;
pub mod explore;
mod faults;
mod hand_over;
mod properties;
mod redis;
mod request;
pub mod rules;
mod small;
mod state;
mod steps;
