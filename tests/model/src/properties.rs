//! What is promised, as checks of a state or of a step.

use super::redis::Lease;
use super::rules::{RANKS, World};
use super::small::Set;
use super::state::{HandOver, Link, Phase, Search, State};
use super::steps::Breach;

/// Whether Redis counts what this replica runs. What a dead one ran counts until its lease ends.
fn counts(world: &World, state: &State, replica: u8) -> bool {
    debug_assert!(replica < world.replicas);
    let now = state.replica(replica);
    now.link != Link::Lapsed && !now.register && state.redis.lease(replica) != Lease::None
}

/// Bounds: what Redis counts as occupied never grows beyond the cap, nor who waits beyond the length of the queue, but by what a replica registers that was not counted.
pub(crate) fn keeps_the_bounds(world: &World, before: &State, after: &State) -> Option<Breach> {
    let (was, is) = (before.redis.occupied(), after.redis.occupied());
    let registers = (0..world.replicas).any(|replica| {
        let now = before.replica(replica);
        let missing = !before.held(world, replica).but(before.redis.slots).is_empty();
        let settles = world.rules.beats_settle && (missing || now.beat.is_some_and(|beat| !beat.held.is_empty()));
        (settles || now.register || now.beat.is_some_and(|beat| beat.register))
            && after.redis.lease(replica) == Lease::Stands
    });
    if registers {
        return None;
    }
    let crowded = |rank: &u8| {
        let waiting = |state: &State| state.redis.waiters.iter().filter(|waiter| world.rank(*waiter) == *rank).count();
        waiting(after) > waiting(before) && waiting(after) > world.lengths[usize::from(*rank)]
    };
    if (0..).take(RANKS).any(|rank| crowded(&rank)) {
        return Some("more wait than the queue is long");
    }
    (is > world.cap && is > was).then_some("more is occupied than the cap allows")
}

/// Cap: after a request starts, no more run than the cap allows, but for replicas that Redis does not count: one whose
/// lease has ended starts only within its share, one that Redis has forgotten starts none.
pub(crate) fn started(world: &World, state: &State, request: u8) -> Option<Breach> {
    let replica = world.replica(request);
    if state.replica(replica).link == Link::Lapsed {
        return (state.running(world, replica) > world.share())
            .then_some("a replica cut off starts more than its share");
    }
    let counted = (0..world.replicas).filter(|replica| counts(world, state, *replica));
    let running: usize = counted.map(|replica| state.running(world, replica)).sum();
    (running > world.cap || !counts(world, state, replica)).then_some("more run than the cap allows")
}

/// Order: a hand-over that gives its slot to a request passes over no request of a higher tier whose ticket has been in
/// the queue ever since the hand-over began.
pub(crate) fn in_order(world: &World, state: &State, hand_over: &HandOver, request: u8) -> Option<Breach> {
    let passed_over = |other: &u8| {
        hand_over.passes_over & (1 << other) != 0
            && world.rank(*other) < world.rank(request)
            && state.request(*other).phase.is_registered()
            && state.redis.waiters.has(*other)
    };
    (0..world.count()).any(|other| passed_over(&other)).then_some("a hand-over passes over a higher tier's ticket")
}

/// What holds in every state.
pub(crate) fn holds(world: &World, state: &State) -> Option<Breach> {
    for replica in (0..world.replicas).filter(|replica| state.redis.lease(*replica) != Lease::None) {
        let cut = !state.replica(replica).dead && state.replica(replica).link == Link::Cut;
        if cut && state.running(world, replica) > state.redis.slots_of(world, replica).len() {
            return Some("a replica cut off runs more than Redis counts");
        }
    }
    for replica in (0..world.replicas).filter(|replica| state.acts(*replica)) {
        let running = (0..world.count()).map(|request| (request, state.request(request)));
        let running =
            running.filter(|(request, now)| world.replica(*request) == replica && now.phase == Phase::Running);
        let slots = Set::of(running.map(|(_, now)| now.slot));
        if state.redis.lease(replica) != Lease::None && !slots.but(state.redis.slots).is_empty() {
            return Some("a request in flight has no slot in Redis");
        }
    }
    if state.faults.only_cancels_since(&world.faults) { no_slot_is_wasted(world, state) } else { None }
}

/// Work-conserving: while nothing fails, a slot is free and a request waits only for as long as a second try is due, or
/// somebody else is bringing that request its slot.
fn no_slot_is_wasted(world: &World, state: &State) -> Option<Breach> {
    let trying = |phase| matches!(phase, Phase::Registered | Phase::Published | Phase::Leaving);
    if state.redis.occupied() >= world.cap || state.requests.iter().any(|request| trying(request.phase)) {
        return None;
    }
    let served = |request: u8| {
        let grants = state.redis.grants.as_slice().iter().map(|grant| grant.ticket);
        let found = state.hand_overs.as_slice().iter().filter_map(|hand_over| match hand_over.search {
            Search::Found(ticket) => Some(ticket),
            Search::Queues | Search::Nothing => None,
        });
        grants.chain(found).any(|ticket| ticket.request == request)
    };
    let unserved = |request: &u8| state.request(*request).phase == Phase::Waiting && !served(*request);
    // One that has found the ticket of a request that has gone will search on.
    let searching = |hand_over: &&HandOver| match hand_over.search {
        Search::Found(ticket) => !state.request(ticket.request).phase.waits(),
        Search::Queues | Search::Nothing => true,
    };
    let searching = state.hand_overs.as_slice().iter().filter(searching).count();
    ((0..world.count()).filter(unserved).count() > searching)
        .then_some("a slot is free and nobody brings it to a request that waits")
}

/// At rest everyone is answered, nothing is occupied, nobody is counted, no ticket is left behind.
pub(crate) fn at_rest(state: &State) -> bool {
    state.requests.iter().all(|request| request.phase == Phase::Over)
        && state.redis.slots.is_empty()
        && state.redis.waiters.is_empty()
        && state.redis.grants.is_empty()
        && state.hand_overs.is_empty()
        && state.broker.mail.is_empty()
        && state.broker.queues.iter().all(super::small::List::is_empty)
        && state.replicas.iter().all(|replica| replica.idle.is_empty() && replica.beat.is_none())
}
