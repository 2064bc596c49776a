//! Everything that can happen next. What replicas do by the protocol is in [`crate::request`], [`crate::hand_over`] and
//! [`crate::beat`]; what strikes them is in [`crate::faults`].

use super::properties;
use super::rules::{Fault, World};
use super::state::State;

/// A step, and whom it is about: a request, or a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step(pub &'static str, pub u8);

/// What was promised and not kept.
pub(crate) type Breach = &'static str;

pub(crate) struct Next {
    pub(crate) step: Step,
    pub(crate) state: State,
    pub(crate) breach: Option<Breach>,
}

/// Collects what can follow one state.
pub(crate) struct Steps<'a> {
    pub(crate) world: &'a World,
    pub(crate) from: &'a State,
    pub(crate) next: Vec<Next>,
}

/// A call to Redis whose reply may be lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Comes,
    /// The call was done, and nobody knows.
    LostAfter,
    /// The call was not done, and nobody knows.
    LostBefore,
}

pub(crate) fn next(world: &World, from: &State) -> Vec<Next> {
    let mut steps = Steps { world, from, next: Vec::with_capacity(16) };
    for request in 0..world.count() {
        steps.request(request);
    }
    for at in 0..from.hand_overs.as_slice().len() {
        steps.hand_over(at);
    }
    for at in 0..from.broker.mail.as_slice().len() {
        steps.claim(at);
    }
    for replica in 0..world.replicas {
        steps.replica(replica);
    }
    steps.strike();
    steps.next
}

impl Steps<'_> {
    pub(crate) fn step(&mut self, what: &'static str, who: u8, apply: impl FnOnce(&World, &mut State)) {
        self.checked(what, who, |world, state| {
            apply(world, state);
            None
        });
    }

    pub(crate) fn checked(
        &mut self,
        what: &'static str,
        who: u8,
        apply: impl FnOnce(&World, &mut State) -> Option<Breach>,
    ) {
        let mut state = *self.from;
        let breach =
            apply(self.world, &mut state).or_else(|| properties::keeps_the_bounds(self.world, self.from, &state));
        self.next.push(Next { step: Step(what, who), state, breach });
    }

    /// A call to Redis, and the same with its reply lost.
    pub(crate) fn call(
        &mut self,
        what: [&'static str; 3],
        who: u8,
        apply: impl Fn(&World, &mut State, Reply) -> Option<Breach>,
    ) {
        self.checked(what[0], who, |world, state| apply(world, state, Reply::Comes));
        if self.from.faults.left(Fault::LostReply) {
            for (what, reply) in [(what[1], Reply::LostAfter), (what[2], Reply::LostBefore)] {
                self.checked(what, who, |world, state| {
                    state.faults.spend(Fault::LostReply);
                    apply(world, state, reply)
                });
            }
        }
    }
}
