//! What strikes: cuts, deaths, losses, and the time that passes until a lease or a grant ends.

use super::redis::{Grant, Lease, Redis};
use super::rules::{Drain, Fault, World};
use super::small::{List, Set};
use super::state::{Broker, Link, Phase, Replica, Search, State};
use super::steps::Steps;

impl Steps<'_> {
    pub(crate) fn strike(&mut self) {
        for replica in 0..self.world.replicas {
            self.strike_replica(replica);
        }
        self.strike_broker();
        self.expire();
        if self.from.faults.left(Fault::Flush) && self.from.redis != Redis::default() {
            self.step("Redis comes back empty", 0, |_, state| {
                state.faults.spend(Fault::Flush);
                state.redis = Redis::default();
                state.raise_epoch();
            });
        }
    }

    fn strike_replica(&mut self, replica: u8) {
        let now = self.from.replica(replica);
        let faults = self.from.faults;
        let lease = self.from.redis.lease(replica);
        if lease == Lease::Stands && (now.dead || now.link == Link::Lapsed) {
            self.step("lease ends", replica, |_, state| state.redis.leases[usize::from(replica)] = Lease::Ended);
        }
        if now.link == Link::Cut {
            self.step("takes its lease for ended", replica, |_, state| {
                state.replica_mut(replica).link = Link::Lapsed;
                state.replica_mut(replica).idle = Set::EMPTY;
            });
        }
        if now.dead {
            return;
        }
        if faults.left(Fault::Cut) && now.link == Link::Whole {
            self.step("is cut off from Redis", replica, |world, state| {
                state.faults.spend(Fault::Cut);
                cut(world, state, replica);
            });
        }
        let others = (0..self.world.replicas).filter(|other| *other != replica && !self.from.replica(*other).dead);
        if faults.left(Fault::Death) && others.count() > 0 {
            self.step("dies", replica, |world, state| {
                state.faults.spend(Fault::Death);
                die(world, state, replica);
            });
        }
        if faults.left(Fault::Disconnect) {
            self.step("loses its connection to the broker", replica, |world, state| {
                state.faults.spend(Fault::Disconnect);
                let all = state.hand_overs;
                for hand_over in all.as_slice() {
                    if let Search::Found(ticket) = hand_over.search
                        && hand_over.replica == replica
                    {
                        state.broker.put_back(world, ticket);
                    }
                }
                state.broker.mail.retain(|grant| world.replica(grant.request) != replica);
                state.republish_all(world, replica);
            });
        }
    }

    fn strike_broker(&mut self) {
        let faults = self.from.faults;
        if faults.left(Fault::Restart) {
            let from = self.from;
            self.step("the broker forgets everything", 0, |world, state| {
                state.faults.spend(Fault::Restart);
                for ticket in from.broker.queues.iter().flat_map(|queue| queue.as_slice()) {
                    state.left_queue(*ticket);
                }
                state.broker = Broker::default();
                for replica in 0..world.replicas {
                    state.republish_all(world, replica);
                }
            });
        }
        if faults.left(Fault::LostTicket) {
            for rank in 0..self.from.broker.queues.len() {
                for at in 0..self.from.broker.queues[rank].as_slice().len() {
                    let request = self.from.broker.queues[rank].as_slice()[at].request;
                    self.step("the broker loses a ticket", request, |_, state| {
                        state.faults.spend(Fault::LostTicket);
                        let ticket = state.broker.queues[rank].remove(at);
                        state.left_queue(ticket);
                    });
                }
            }
        }
        if faults.left(Fault::LostGrant) {
            for at in 0..self.from.broker.mail.as_slice().len() {
                self.step("a grant is lost", self.from.broker.mail.as_slice()[at].request, |_, state| {
                    state.faults.spend(Fault::LostGrant);
                    state.broker.mail.remove(at);
                });
            }
        }
    }

    fn expire(&mut self) {
        for grant in self.from.redis.grants.as_slice().iter().filter(|grant| !grant.expired) {
            let owner = self.world.replica(grant.ticket.request);
            let on_its_way = self.from.broker.mail.as_slice().contains(&grant.ticket) && self.from.acts(owner);
            if !self.world.rules.grants_expire || (on_its_way && !self.from.faults.left(Fault::LateGrant)) {
                continue;
            }
            self.step("a grant expires", grant.ticket.request, |_, state| {
                if on_its_way {
                    state.faults.spend(Fault::LateGrant);
                }
                state.redis.grants.retain(|other| other != *grant);
                state.redis.grants.add(Grant { expired: true, ..*grant });
            });
        }
        // The message expiry is longer than any wait, so it only meets tickets of requests that have gone.
        let all_over = self.from.requests.iter().all(|request| request.phase == Phase::Over);
        if all_over && self.world.rules.drain == Drain::Expiry {
            for rank in 0..self.from.broker.queues.len() {
                if !self.from.broker.queues[rank].is_empty() {
                    self.step("stale tickets expire", 0, |_, state| state.broker.queues[rank].clear());
                }
            }
        }
        // Nobody is there to receive it.
        for at in 0..self.from.broker.mail.as_slice().len() {
            if all_over && self.from.replica(self.world.replica(self.from.broker.mail.as_slice()[at].request)).dead {
                self.step("a grant to the dead is dropped", 0, |_, state| {
                    state.broker.mail.remove(at);
                });
            }
        }
    }
}

/// What it was doing with slots is kept for its own requests; tickets it had taken go back.
fn cut(world: &World, state: &mut State, replica: u8) {
    // One that has not registered has no lease to end.
    let lapsed = state.replica(replica).register;
    state.replica_mut(replica).link = if lapsed { Link::Lapsed } else { Link::Cut };
    state.replica_mut(replica).beat = None;
    state.replica_mut(replica).drains = false;
    let mut left = List::default();
    let all = state.hand_overs;
    for hand_over in all.as_slice() {
        if hand_over.replica != replica {
            left.add(*hand_over);
            continue;
        }
        if !lapsed {
            state.replica_mut(replica).idle.insert(hand_over.slot);
        }
        if let Search::Found(ticket) = hand_over.search {
            state.broker.put_back(world, ticket);
        }
    }
    state.hand_overs = left;
    for request in (0..world.count()).filter(|request| world.replica(*request) == replica) {
        if state.request(request).phase == Phase::Leaving {
            state.set(request, Phase::Over);
        }
    }
}

/// What it knew is gone; what it ran still runs; what it had not acknowledged is delivered again.
fn die(world: &World, state: &mut State, replica: u8) {
    // What it started beyond its lease was not counted, and still is not.
    let now = state.replica(replica);
    let link = if now.register || now.link == Link::Lapsed { Link::Lapsed } else { Link::Whole };
    cut(world, state, replica);
    *state.replica_mut(replica) = Replica { dead: true, link, ..Replica::default() };
    state.broker.mail.retain(|grant| world.replica(grant.request) != replica);
    for request in (0..world.count()).filter(|request| world.replica(*request) == replica) {
        if state.request(request).phase != Phase::Running {
            state.set(request, Phase::Over);
        }
    }
}
