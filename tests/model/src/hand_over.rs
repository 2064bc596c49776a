//! A slot on its way to the next request: the search for a ticket, the grant, the claim.

use super::properties;
use super::redis::{Claimed, Freed, Passed, Slot, Ticket, Transferred};
use super::rules::{Drain, Fault, World};
use super::state::{HandOver, NOBODY, Phase, Search, State};
use super::steps::{Breach, Reply, Steps};

impl Steps<'_> {
    pub(crate) fn hand_over(&mut self, at: usize) {
        let hand_over = self.from.hand_overs.as_slice()[at];
        let HandOver { replica, slot, .. } = hand_over;
        if !self.from.acts(replica) {
            return;
        }
        match hand_over.search {
            Search::Queues => self.step("asks a queue", replica, |world, state| {
                let mut hand_over = state.hand_overs.remove(at);
                let asked = std::array::from_fn(|rank| usize::from(hand_over.ask & (1 << rank) != 0));
                let rank = (world.order)(asked).expect("there is one to ask, or it would not search");
                match state.broker.queues[rank].pop_front() {
                    Some(ticket) => {
                        state.left_queue(ticket);
                        hand_over.search = Search::Found(ticket);
                    }
                    None => {
                        hand_over.ask &= !(1 << rank);
                        if hand_over.ask == 0 {
                            hand_over.search = Search::Nothing;
                        }
                    }
                }
                state.hand_overs.add(hand_over);
            }),
            Search::Found(ticket) if self.world.replica(ticket.request) == replica => {
                if self.from.request(ticket.request).phase.waits() {
                    self.pass(at, ticket.request);
                } else {
                    self.step("own ticket is stale", ticket.request, |_, state| {
                        let hand_over = state.hand_overs.remove(at);
                        state.hand_overs.add(HandOver { search: Search::Queues, ..hand_over });
                    });
                }
            }
            Search::Found(ticket) => self.transfer(at, ticket),
            Search::Nothing => {
                let eligible = |phase| matches!(phase, Phase::Published | Phase::Waiting);
                match self.from.own_waiter(self.world, replica, eligible) {
                    Some(waiter) => self.pass(at, waiter),
                    None => self.free(at, replica, slot),
                }
            }
        }
    }

    fn pass(&mut self, at: usize, to: u8) {
        let what = ["pass", "pass done, reply lost", "pass not done, reply lost"];
        self.call(what, to, |world, state, reply| {
            let hand_over = state.hand_overs.remove(at);
            let HandOver { replica, slot, search, .. } = hand_over;
            let waited = !state.redis.waiters.is_empty();
            let answer = (reply != Reply::LostBefore).then(|| state.redis.pass(world, slot, to));
            match answer {
                Some(answer) if reply == Reply::Comes => match answer {
                    Passed::Done => {
                        state.run(to, if world.rules.fresh_slot_ids { slot } else { to });
                        last_waiter_left(world, state, replica, waited);
                        state.handed_over(world, &hand_over);
                        return properties::started(world, state, to)
                            .or_else(|| properties::in_order(world, state, &hand_over, to));
                    }
                    Passed::Gone => give_back(world, state, search),
                },
                _ => state.claim_again(to, if world.rules.fresh_slot_ids { slot } else { to }),
            }
            state.handed_over(world, &hand_over);
            None
        });
    }

    fn transfer(&mut self, at: usize, ticket: Ticket) {
        let what = ["transfer", "transfer done, reply lost", "transfer not done, reply lost"];
        self.call(what, ticket.request, |world, state, reply| {
            let hand_over = state.hand_overs.remove(at);
            let HandOver { replica, slot, search, .. } = hand_over;
            let answer = (reply != Reply::LostBefore).then(|| state.redis.transfer(world, slot, ticket));
            match answer {
                Some(answer) if reply == Reply::Comes => match answer {
                    Transferred::Done => {
                        if !state.replica(world.replica(ticket.request)).dead {
                            state.broker.mail.add(ticket);
                        }
                        state.handed_over(world, &hand_over);
                        return properties::in_order(world, state, &hand_over, ticket.request);
                    }
                    Transferred::Stale => {
                        state.look(world, replica, slot, hand_over.tries_for);
                        return None;
                    }
                    Transferred::Gone => give_back(world, state, search),
                },
                // Its slot is dropped by the next heartbeat, or is a grant that expires.
                _ => state.broker.put_back(world, ticket),
            }
            state.handed_over(world, &hand_over);
            None
        });
    }

    fn free(&mut self, at: usize, replica: u8, slot: Slot) {
        let what = ["free", "free done, reply lost", "free not done, reply lost"];
        self.call(what, replica, |world, state, reply| {
            let hand_over = state.hand_overs.remove(at);
            if reply != Reply::LostBefore {
                let answer = state.redis.free(world, slot, !hand_over.raised);
                if answer == Freed::Again && reply == Reply::Comes {
                    state.look(world, replica, slot, hand_over.tries_for);
                }
            }
            None
        });
    }

    pub(crate) fn claim(&mut self, at: usize) {
        let ticket = self.from.broker.mail.as_slice()[at];
        let request = ticket.request;
        if !self.from.acts(self.world.replica(request)) {
            return;
        }
        self.checked("claim", request, |world, state| claim(world, state, at, Reply::Comes));
        if self.from.faults.left(Fault::LostReply) {
            // One that was not done is only late: it is made again.
            self.checked("claim done, reply lost", request, |world, state| {
                state.faults.spend(Fault::LostReply);
                claim(world, state, at, Reply::LostAfter)
            });
        }
    }

    pub(crate) fn claim_again(&mut self, request: u8) {
        self.checked("claim again", request, |world, state| {
            let slot = state.request(request).slot;
            let waited = !state.redis.waiters.is_empty();
            match state.redis.pass(world, slot, request) {
                Passed::Done => {
                    state.run(request, slot);
                    last_waiter_left(world, state, world.replica(request), waited);
                    properties::started(world, state, request)
                }
                Passed::Gone => {
                    state.set(request, Phase::Asking);
                    None
                }
            }
        });
    }
}

pub(crate) fn last_waiter_left(world: &World, state: &mut State, replica: u8, waited: bool) {
    if waited && state.redis.waiters.is_empty() && world.rules.drain != Drain::Expiry {
        state.replica_mut(replica).drains = true;
    }
}

/// The slot has gone, and the ticket that was taken for it is for the next.
fn give_back(world: &World, state: &mut State, search: Search) {
    if let Search::Found(ticket) = search {
        state.broker.put_back(world, ticket);
    }
}

fn claim(world: &World, state: &mut State, at: usize, reply: Reply) -> Option<Breach> {
    let ticket = state.broker.mail.remove(at);
    let request = ticket.request;
    let replica = world.replica(request);
    // What has gone is being forgotten under its own serial: a slot by that name would go with it.
    let may_be_forgotten = !state.request(request).phase.waits() && world.rules.the_gone_lend_no_serial;
    let own_serial = !world.rules.fresh_slot_ids && !may_be_forgotten;
    let slot = if own_serial { request } else { state.fresh(world, replica) };
    let waited = !state.redis.waiters.is_empty();
    let answer = state.redis.claim(world, slot, ticket);
    let local = state.request(request);
    if reply != Reply::Comes {
        if local.phase.is_registered() {
            state.claim_again(request, slot);
        }
        return None;
    }
    match answer {
        Claimed::Slot => {
            last_waiter_left(world, state, replica, waited);
            if local.phase.waits() || local.phase == Phase::Leaving {
                // One that has gone meanwhile ends at once, which is a way for any request to go on.
                state.run(request, slot);
                return properties::started(world, state, request);
            }
            state.replica_mut(replica).idle.insert(slot);
        }
        Claimed::HandOver => state.look(world, replica, slot, NOBODY),
        Claimed::Freed => {}
        Claimed::Lost => {
            if local.phase.is_registered() && local.attempt == ticket.attempt {
                state.republish(request);
            }
        }
    }
    None
}
