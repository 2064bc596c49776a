//! One state of everything: the requests, Redis, the broker, and what each replica knows.

use super::redis::{Beat, FRESH, Lease, Redis, Slot, Ticket, owner};
use super::rules::{Faults, RANKS, World};
use super::small::{List, Set};

/// How far a request is, as its replica sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Phase {
    #[default]
    New,
    /// It waits, and Redis is to be asked (again) for a slot or a place.
    Asking,
    /// Redis counts it as waiting; its ticket is to be published.
    Registered,
    /// Its ticket is confirmed; a second try is due.
    Published,
    Waiting,
    /// The reply was lost that would have given it its slot: it asks whether the slot is its own.
    Claiming,
    /// In flight. With a dead replica: the upstream still answers it.
    Running,
    /// It has gone, and Redis is to be told.
    Leaving,
    Over,
}

impl Phase {
    /// Whether its client still waits for a turn.
    pub(crate) fn waits(self) -> bool {
        matches!(self, Self::Asking | Self::Registered | Self::Published | Self::Waiting | Self::Claiming)
    }

    /// Whether it waits and Redis was told so.
    pub(crate) fn is_registered(self) -> bool {
        matches!(self, Self::Registered | Self::Published | Self::Waiting)
    }
}

pub(crate) const NO_SLOT: Slot = 31;

pub(crate) const NOBODY: u8 = 31;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Request {
    pub(crate) phase: Phase,
    /// While it runs or claims.
    pub(crate) slot: Slot,
    /// Of its latest publish.
    pub(crate) attempt: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Broker {
    pub(crate) queues: [List<Ticket, 10>; RANKS],
    /// Grants on their way to their owners, in any order.
    pub(crate) mail: List<Ticket, 5>,
}

impl Broker {
    /// Where it was delivered from: at the front, as nothing behind it was delivered before it.
    pub(crate) fn put_back(&mut self, world: &World, ticket: Ticket) {
        self.queues[usize::from(world.rank(ticket.request))].insert(0, ticket);
    }
}

/// A replica's link to Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Link {
    #[default]
    Whole,
    Cut,
    /// Cut, and by the replica's own clock its lease has ended.
    Lapsed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Replica {
    pub(crate) dead: bool,
    pub(crate) link: Link,
    /// It was forgotten, or may have been, and registers before it does anything else.
    pub(crate) register: bool,
    /// Slots it holds without a use for them: kept while it is cut off, given back after.
    pub(crate) idle: Set,
    /// A heartbeat made and not yet carried out.
    pub(crate) beat: Option<Beat>,
    /// It brought the number of waiters to zero and clears stale tickets.
    pub(crate) drains: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub(crate) enum Search {
    /// Asks the queues that are left.
    #[default]
    Queues,
    /// Has taken a ticket, and not yet acknowledged it.
    Found(Ticket),
    /// All were empty.
    Nothing,
}

/// A slot on its way from one request to the next, at one replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub(crate) struct HandOver {
    pub(crate) replica: u8,
    pub(crate) slot: Slot,
    pub(crate) search: Search,
    /// Ranks that are still to be asked, a bit each.
    pub(crate) ask: u8,
    /// The epoch was raised since it began.
    pub(crate) raised: bool,
    /// The request by whose try it got its slot, or [`NOBODY`].
    pub(crate) tries_for: u8,
    /// Requests whose tickets have been in a queue ever since it began, a bit each. Only the check of the order reads it.
    pub(crate) passes_over: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct State {
    pub(crate) requests: [Request; 5],
    pub(crate) redis: Redis,
    pub(crate) broker: Broker,
    pub(crate) replicas: [Replica; 3],
    pub(crate) hand_overs: List<HandOver, 4>,
    pub(crate) faults: Faults,
}

impl State {
    pub(crate) fn first(world: &World) -> Self {
        let mut redis = Redis::default();
        for replica in 0..world.replicas {
            redis.leases[usize::from(replica)] = Lease::Stands;
        }
        let mut requests = [Request { phase: Phase::Over, slot: NO_SLOT, attempt: 0 }; 5];
        for request in &mut requests[..world.requests.len()] {
            request.phase = Phase::New;
        }
        Self {
            requests,
            redis,
            broker: Broker::default(),
            replicas: Default::default(),
            hand_overs: List::default(),
            faults: world.faults,
        }
    }

    pub(crate) fn request(&self, request: u8) -> Request {
        self.requests[usize::from(request)]
    }

    pub(crate) fn replica(&self, replica: u8) -> Replica {
        self.replicas[usize::from(replica)]
    }

    pub(crate) fn replica_mut(&mut self, replica: u8) -> &mut Replica {
        &mut self.replicas[usize::from(replica)]
    }

    /// Whether a replica can call Redis.
    pub(crate) fn calls(&self, replica: u8) -> bool {
        let replica = self.replica(replica);
        !replica.dead && replica.link == Link::Whole
    }

    /// Whether a replica can call Redis, and need not register first.
    pub(crate) fn acts(&self, replica: u8) -> bool {
        self.calls(replica) && !self.replica(replica).register
    }

    pub(crate) fn set(&mut self, request: u8, phase: Phase) {
        self.requests[usize::from(request)].phase = phase;
        if phase != Phase::Running && phase != Phase::Claiming {
            self.requests[usize::from(request)].slot = NO_SLOT;
        }
        if phase == Phase::Over {
            self.requests[usize::from(request)].attempt = 0;
        }
    }

    pub(crate) fn run(&mut self, request: u8, slot: Slot) {
        self.requests[usize::from(request)].slot = slot;
        self.set(request, Phase::Running);
    }

    pub(crate) fn claim_again(&mut self, request: u8, slot: Slot) {
        self.requests[usize::from(request)].slot = slot;
        self.set(request, Phase::Claiming);
    }

    /// It publishes again, as the next attempt.
    pub(crate) fn republish(&mut self, request: u8) {
        self.requests[usize::from(request)].attempt += 1;
        self.set(request, Phase::Registered);
    }

    pub(crate) fn republish_all(&mut self, world: &World, replica: u8) {
        for request in 0..world.count() {
            if world.replica(request) == replica && self.request(request).phase.is_registered() {
                self.republish(request);
            }
        }
    }

    /// The waiter of this replica that is served without a ticket: the highest tier's, its oldest.
    pub(crate) fn own_waiter(&self, world: &World, replica: u8, eligible: impl Fn(Phase) -> bool) -> Option<u8> {
        (0..world.count())
            .filter(|request| world.replica(*request) == replica && eligible(self.request(*request).phase))
            .min_by_key(|request| world.rank(*request))
    }

    pub(crate) fn running(&self, world: &World, replica: u8) -> usize {
        let runs = |request: &u8| world.replica(*request) == replica && self.request(*request).phase == Phase::Running;
        (0..world.count()).filter(runs).count()
    }

    /// Slots this replica holds, for a request or on their way.
    pub(crate) fn held(&self, world: &World, replica: u8) -> Set {
        let mut held = self.replica(replica).idle;
        for request in 0..world.count() {
            if world.replica(request) == replica && self.request(request).phase == Phase::Running {
                held.insert(self.request(request).slot);
            }
        }
        for hand_over in self.hand_overs.as_slice() {
            if hand_over.replica == replica {
                held.insert(hand_over.slot);
            }
        }
        held
    }

    /// A serial that nothing knows of, and that any heartbeat on its way takes for newer than its list. Numbers are used
    /// again, or there would be no end of states.
    pub(crate) fn fresh(&mut self, world: &World, replica: u8) -> Slot {
        let beat = self.replica(replica).beat.map_or(Set::EMPTY, |beat| {
            // What is to be dropped must not be made again under the same number.
            if world.rules.beats_settle { beat.held.or(beat.keep) } else { beat.held }
        });
        let claiming = (0..world.count()).map(|request| self.request(request)).filter(|r| r.slot != NO_SLOT);
        let known = self.redis.slots.or(self.held(world, replica)).or(beat).or(Set::of(claiming.map(|r| r.slot)));
        let first = world.count() + replica * FRESH;
        let slot = (first..first + FRESH).find(|slot| !known.has(*slot)).unwrap();
        debug_assert_eq!(owner(world, slot), replica);
        self.newer(world, replica, slot);
        slot
    }

    /// A serial made after the list of a heartbeat on its way.
    pub(crate) fn newer(&mut self, world: &World, replica: u8, serial: Slot) {
        if let Some(beat) = &mut self.replica_mut(replica).beat
            && world.rules.newer_ids_stay
            && !world.rules.beats_settle
        {
            beat.keep.insert(serial);
            if serial < world.count() {
                beat.alive.insert(serial);
            }
        }
    }

    /// A hand-over looks at the queues of the tiers that have waiters.
    pub(crate) fn look(&mut self, world: &World, replica: u8, slot: Slot, tries_for: u8) {
        let ask = self.redis.totals(world).iter().fold(0, |ask, rank| ask | 1 << rank);
        let mut passes_over = 0;
        for ticket in self.broker.queues.iter().flat_map(|queue| queue.as_slice()) {
            if self.redis.waiters.has(ticket.request) {
                passes_over |= 1 << ticket.request;
            }
        }
        let search = if ask == 0 { Search::Nothing } else { Search::Queues };
        self.hand_overs.add(HandOver { replica, slot, search, ask, raised: false, tries_for, passes_over });
    }

    /// A hand-over has ended. The waiter that tried for its slot tries again if somebody else got it.
    pub(crate) fn handed_over(&mut self, world: &World, hand_over: &HandOver) {
        let tried = hand_over.tries_for;
        if tried != NOBODY && self.request(tried).phase == Phase::Waiting && world.rules.tries_until_none {
            self.set(tried, Phase::Published);
        }
    }

    /// A ticket has left its queue.
    pub(crate) fn left_queue(&mut self, ticket: Ticket) {
        let mut hand_overs = List::default();
        for hand_over in self.hand_overs.as_slice() {
            hand_overs.add(HandOver { passes_over: hand_over.passes_over & !(1 << ticket.request), ..*hand_over });
        }
        self.hand_overs = hand_overs;
    }

    pub(crate) fn raise_epoch(&mut self) {
        let mut hand_overs = List::default();
        for hand_over in self.hand_overs.as_slice() {
            hand_overs.add(HandOver { raised: true, ..*hand_over });
        }
        self.hand_overs = hand_overs;
    }
}
