//! What a request can do next, from its arrival to its end.

use super::hand_over::last_waiter_left;
use super::properties;
use super::redis::{Acquired, Released, Retried, Slot, Ticket};
use super::rules::{Fault, World};
use super::state::{Link, NOBODY, Phase, State};
use super::steps::{Breach, Reply, Steps};

impl Steps<'_> {
    pub(crate) fn request(&mut self, request: u8) {
        let replica = self.world.replica(request);
        let acts = self.from.acts(replica);
        match self.from.request(request).phase {
            Phase::New if acts => self.acquire(request),
            Phase::New => self.arrive_cut_off(request),
            Phase::Asking if acts => self.acquire(request),
            Phase::Registered if !self.from.replica(replica).dead => self.publish(request),
            Phase::Published if acts => self.second_try(request),
            Phase::Claiming if acts => self.claim_again(request),
            Phase::Running => self.end(request),
            Phase::Leaving if acts => self.forget(request),
            _ => {}
        }
        if self.from.request(request).phase.waits() && self.from.faults.left(Fault::Cancel) {
            self.step("the client gives up", request, |world, state| {
                state.faults.spend(Fault::Cancel);
                // What cannot be told is settled by the next heartbeat's list.
                let told = state.calls(world.replica(request));
                state.set(request, if told { Phase::Leaving } else { Phase::Over });
            });
        }
    }

    fn acquire(&mut self, request: u8) {
        let what = ["acquire", "acquire done, reply lost", "acquire not done, reply lost"];
        self.call(what, request, |world, state, reply| {
            let replica = world.replica(request);
            let had = state.redis.slots.has(request);
            state.newer(world, replica, request);
            let answer = (reply != Reply::LostBefore).then(|| state.redis.acquire(world, request));
            match answer {
                Some(Acquired::Slot) if !had && !state.redis.waiters.is_empty() => {
                    return Some("an arrival overtakes a waiter");
                }
                Some(answer) if reply == Reply::Comes => match answer {
                    Acquired::Slot => {
                        state.run(request, request);
                        // Its slot counted before somebody else registered, if it was made before.
                        return if had { None } else { properties::started(world, state, request) };
                    }
                    Acquired::Waiting => state.republish(request),
                    Acquired::Full => {
                        let waits = state.redis.waiters.has(request);
                        state.set(request, Phase::Over);
                        return waits.then_some("a request that waits is told that the queue is full");
                    }
                    Acquired::Forgotten => {
                        state.replica_mut(replica).register = true;
                        state.set(request, Phase::Asking);
                    }
                },
                _ => state.set(request, Phase::Asking),
            }
            None
        });
    }

    /// Without Redis: a slot that the replica holds without a use, or one of its share, or the room of this process.
    fn arrive_cut_off(&mut self, request: u8) {
        let replica = self.world.replica(request);
        let from = self.from.replica(replica);
        if from.dead || from.link == Link::Whole {
            return;
        }
        self.checked("arrives while cut off", request, |world, state| {
            state.set(request, Phase::Asking);
            let first = state.own_waiter(world, replica, Phase::waits) == Some(request);
            if first { serve_cut_off(world, state, request) } else { None }
        });
    }

    fn publish(&mut self, request: u8) {
        let ticket = Ticket { request, attempt: self.from.request(request).attempt };
        let rank = usize::from(self.world.rank(request));
        self.step("publish", request, |_, state| {
            state.broker.queues[rank].push(ticket);
            state.set(request, Phase::Published);
        });
        if self.from.faults.left(Fault::LostConfirm) {
            self.step("publish, in the queue, not confirmed", request, |_, state| {
                state.faults.spend(Fault::LostConfirm);
                state.broker.queues[rank].push(ticket);
                state.republish(request);
            });
            self.step("publish, not in the queue", request, |_, state| {
                state.faults.spend(Fault::LostConfirm);
                state.republish(request);
            });
        }
    }

    fn second_try(&mut self, request: u8) {
        let what = ["second try", "second try done, reply lost", "second try not done, reply lost"];
        self.call(what, request, |world, state, reply| {
            let replica = world.replica(request);
            let slot = state.fresh(world, replica);
            let answer = (reply != Reply::LostBefore).then(|| state.redis.retry(world, slot));
            if answer == Some(Retried::None) {
                state.raise_epoch();
            }
            match answer {
                Some(answer) if reply == Reply::Comes => match answer {
                    Retried::Slot => {
                        state.set(request, Phase::Waiting);
                        state.look(world, replica, slot, request);
                    }
                    Retried::None => state.set(request, Phase::Waiting),
                    Retried::Forgotten => state.replica_mut(replica).register = true,
                },
                // Not done, it would not have raised the epoch: it is made again.
                _ => {}
            }
            None
        });
    }

    fn end(&mut self, request: u8) {
        let replica = self.world.replica(request);
        let slot = self.from.request(request).slot;
        if self.from.replica(replica).dead {
            self.step("ends, its replica dead", request, |_, state| state.set(request, Phase::Over));
        } else if self.from.replica(replica).link != Link::Whole {
            self.checked("ends while cut off", request, |world, state| {
                state.set(request, Phase::Over);
                if state.replica(replica).link == Link::Cut {
                    state.replica_mut(replica).idle.insert(slot);
                }
                let waiter = state.own_waiter(world, replica, Phase::waits);
                waiter.and_then(|waiter| serve_cut_off(world, state, waiter))
            });
        } else if self.from.replica(replica).register {
            // It is not on the list by which the replica registers, and so not in Redis after that.
            self.step("ends, not registered", request, |_, state| state.set(request, Phase::Over));
        } else {
            let what = ["ends", "ends, release done, reply lost", "ends, release not done, reply lost"];
            self.call(what, request, |world, state, reply| {
                state.set(request, Phase::Over);
                release(world, state, replica, slot, reply);
                None
            });
        }
    }

    fn forget(&mut self, request: u8) {
        let what = ["forget", "forget done, reply lost", "forget not done, reply lost"];
        self.call(what, request, |world, state, reply| {
            state.set(request, Phase::Over);
            if reply != Reply::LostBefore {
                let waited = !state.redis.waiters.is_empty();
                let answer = state.redis.forget(world, request, request);
                if reply == Reply::Comes {
                    if answer == Released::HandOver {
                        state.look(world, world.replica(request), request, NOBODY);
                    }
                    last_waiter_left(world, state, world.replica(request), waited);
                }
            }
            None
        });
    }
}

pub(crate) fn release(world: &World, state: &mut State, replica: u8, slot: Slot, reply: Reply) {
    if reply == Reply::LostBefore {
        return;
    }
    let answer = state.redis.release(world, slot);
    if answer == Released::HandOver && reply == Reply::Comes {
        state.look(world, replica, slot, NOBODY);
    }
}

/// Gives the replica's own waiter a slot while it is cut off from Redis: one it holds without a use, or after its lease
/// one of its share.
pub(crate) fn serve_cut_off(world: &World, state: &mut State, waiter: u8) -> Option<Breach> {
    let replica = world.replica(waiter);
    let slot = match state.replica(replica).link {
        Link::Cut => {
            let slot = state.replica(replica).idle.first()?;
            state.replica_mut(replica).idle.remove(slot);
            state.run(waiter, slot);
            return None;
        }
        _ if state.running(world, replica) >= world.share() => return None,
        _ => state.fresh(world, replica),
    };
    state.run(waiter, slot);
    properties::started(world, state, waiter)
}
