//! What a replica does of itself: heartbeats, what follows a cut, stale tickets.

use super::redis::{Beat, Beaten, Retried};
use super::request::{release, serve_cut_off};
use super::rules::{Drain, Fault, RANKS, World};
use super::state::{Link, NO_SLOT, NOBODY, Phase, State};
use super::steps::{Next, Reply, Step, Steps};

impl Steps<'_> {
    pub(crate) fn replica(&mut self, replica: u8) {
        let now = self.from.replica(replica);
        if now.dead {
            return;
        }
        if now.link != Link::Whole {
            // Its heartbeats go on, so the first that arrives ends the cut; what it did meanwhile is in its list.
            self.step("is no longer cut off", replica, |_, state| {
                let replica = state.replica_mut(replica);
                replica.register = replica.link == Link::Lapsed;
                replica.link = Link::Whole;
            });
            if let Some(waiter) = self.from.own_waiter(self.world, replica, Phase::waits) {
                let mut after = *self.from;
                let breach = serve_cut_off(self.world, &mut after, waiter);
                if after != *self.from {
                    self.next.push(Next { step: Step("is served while cut off", waiter), state: after, breach });
                }
            }
            return;
        }
        if let Some(beat) = now.beat {
            self.step("slow heartbeat arrives", replica, |world, state| {
                state.replica_mut(replica).beat = None;
                if world.rules.beats_settle {
                    settle(state, replica, beat, Reply::Comes);
                } else {
                    heartbeat(world, state, replica, beat, Reply::Comes);
                }
            });
        } else {
            self.heartbeat(replica);
        }
        if now.register {
            return;
        }
        if let Some(slot) = now.idle.first() {
            self.step("gives an unused slot back", replica, |world, state| {
                state.replica_mut(replica).idle.remove(slot);
                release(world, state, replica, slot, Reply::Comes);
            });
        }
        if now.drains {
            self.drain(replica);
        }
        let eligible = |phase| matches!(phase, Phase::Published | Phase::Waiting);
        if self.world.rules.heartbeat_takes
            && self.from.redis.occupied() < self.world.cap
            && !self.from.redis.waiters.is_empty()
            && !self.from.hand_overs.as_slice().iter().any(|hand_over| hand_over.replica == replica)
            && self.from.own_waiter(self.world, replica, eligible).is_some()
        {
            self.step("heartbeat takes a slot", replica, |world, state| {
                let slot = state.fresh(world, replica);
                match state.redis.retry(world, slot) {
                    Retried::Slot => state.look(world, replica, slot, NOBODY),
                    Retried::None => {}
                    Retried::Forgotten => state.replica_mut(replica).register = true,
                }
            });
        }
    }

    /// Heartbeats go on for ever: only those that change something are steps.
    fn heartbeat(&mut self, replica: u8) {
        if self.world.rules.beats_settle {
            return self.heartbeat_that_settles(replica);
        }
        let mut after = *self.from;
        let beat = snapshot(self.world, self.from, replica);
        heartbeat(self.world, &mut after, replica, beat, Reply::Comes);
        if after != *self.from {
            let what = ["heartbeat", "heartbeat done, reply lost", "heartbeat not done, reply lost"];
            self.call(what, replica, |world, state, reply| {
                heartbeat(world, state, replica, beat, reply);
                None
            });
        }
        if self.from.faults.left(Fault::SlowBeat) {
            self.step("slow heartbeat is made", replica, |world, state| {
                state.faults.spend(Fault::SlowBeat);
                state.replica_mut(replica).beat = Some(snapshot(world, state, replica));
            });
        }
    }

    fn heartbeat_that_settles(&mut self, replica: u8) {
        let mut after = *self.from;
        let differs = renew(self.world, &mut after, replica);
        settle(&mut after, replica, differs, Reply::Comes);
        if after != *self.from {
            let what = ["heartbeat", "heartbeat done, reply lost", "heartbeat settled, reply lost"];
            self.call(what, replica, |world, state, reply| {
                if reply == Reply::LostAfter {
                    state.redis.renew(world, replica);
                } else {
                    let differs = renew(world, state, replica);
                    settle(state, replica, differs, reply);
                }
                None
            });
        }
        if self.from.faults.left(Fault::SlowBeat) {
            self.step("slow heartbeat is made", replica, |world, state| {
                state.faults.spend(Fault::SlowBeat);
                let differs = renew(world, state, replica);
                state.replica_mut(replica).beat = Some(differs);
            });
        }
    }

    fn drain(&mut self, replica: u8) {
        self.step("clears stale tickets", replica, |world, state| {
            let Some(rank) = (0..RANKS).find(|rank| !state.broker.queues[*rank].is_empty()) else {
                state.replica_mut(replica).drains = false;
                return;
            };
            let Some(ticket) = state.broker.queues[rank].pop_front() else { return };
            if world.rules.drain == Drain::Checked && state.redis.waiters.has(ticket.request) {
                state.broker.put_back(world, ticket);
                state.replica_mut(replica).drains = false;
            } else {
                state.left_queue(ticket);
            }
        });
    }
}

/// A heartbeat's list, as the replica knows itself now.
fn snapshot(world: &World, state: &State, replica: u8) -> Beat {
    let mut beat = Beat { register: state.replica(replica).register, ..Beat::default() };
    beat.held = state.held(world, replica);
    beat.keep = beat.held;
    for request in (0..world.count()).filter(|request| world.replica(*request) == replica) {
        let local = state.request(request);
        if local.phase == Phase::Asking {
            beat.keep.insert(request);
            if !world.rules.pending_is_not_added {
                beat.held.insert(request);
            }
        }
        if local.slot != NO_SLOT {
            beat.keep.insert(local.slot);
        }
        if local.phase.waits() {
            beat.alive.insert(request);
        }
        if local.phase.is_registered() {
            beat.waiting.insert(request);
        }
    }
    beat
}

fn heartbeat(world: &World, state: &mut State, replica: u8, beat: Beat, reply: Reply) {
    if reply == Reply::LostBefore {
        return;
    }
    let answer = state.redis.heartbeat(world, replica, beat);
    let expired = state.redis.expired_of(world, replica);
    if reply != Reply::Comes {
        return;
    }
    // The heartbeat after this one says that these were heard of.
    state.redis.grants.retain(|grant| !expired.as_slice().contains(&grant));
    match answer {
        Beaten::Forgotten if world.rules.forgotten_until_registered => state.replica_mut(replica).register = true,
        Beaten::Forgotten => {
            for request in beat.waiting.iter() {
                if state.request(request).phase.is_registered() {
                    state.set(request, Phase::Asking);
                }
            }
        }
        Beaten::Registered => {
            state.replica_mut(replica).register = false;
            state.republish_all(world, replica);
        }
        Beaten::Renewed => {}
    }
    for grant in expired.as_slice() {
        let local = state.request(grant.ticket.request);
        if local.phase.is_registered() && local.attempt == grant.ticket.attempt {
            state.republish(grant.ticket.request);
        }
    }
}

/// Renews the lease and compares: what to drop (`keep`, `alive`), and what to add (`held`).
fn renew(world: &World, state: &mut State, replica: u8) -> Beat {
    let was_known = state.redis.renew(world, replica);
    let expired = state.redis.expired_of(world, replica);
    state.redis.grants.retain(|grant| !expired.as_slice().contains(&grant));
    let known = snapshot(world, state, replica);
    let (slots, waiters) = (state.redis.slots_of(world, replica), state.redis.waiters_of(world, replica));
    for request in known.waiting.but(waiters).iter() {
        state.set(request, Phase::Asking);
    }
    for grant in expired.as_slice() {
        let local = state.request(grant.ticket.request);
        if local.phase.is_registered() && local.attempt == grant.ticket.attempt {
            state.republish(grant.ticket.request);
        }
    }
    let held = known.held.but(slots);
    if !held.is_empty() || !was_known {
        state.replica_mut(replica).register = true;
    }
    Beat { keep: slots.but(known.keep), held, alive: waiters.but(known.alive), register: !was_known, ..Beat::default() }
}

fn settle(state: &mut State, replica: u8, differs: Beat, reply: Reply) {
    let done = state.redis.settle(replica, !differs.register, differs.keep, differs.alive, differs.held);
    if done && reply == Reply::Comes {
        state.replica_mut(replica).register = false;
    }
}
