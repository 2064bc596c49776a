//! What Redis keeps of a pool, and its scripts as pure functions: each is one step that nothing interrupts.
//!
//! The epoch is a counter in Redis. Here a hand-over remembers instead whether it was raised since, which is all that is
//! ever asked of it and keeps the number of states finite.

use super::rules::World;
use super::small::{List, Set};

/// A slot's serial: below the number of requests that of a request, above it one made for a hand-over or a claim.
pub(crate) type Slot = u8;

/// Slots a replica may hold beyond those of its requests' own serials.
pub(crate) const FRESH: u8 = 8;

/// A request's turn to be called, by the number of its publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub(crate) struct Ticket {
    pub(crate) request: u8,
    pub(crate) attempt: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub(crate) struct Grant {
    pub(crate) ticket: Ticket,
    pub(crate) expired: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Lease {
    /// Not among the replicas.
    #[default]
    None,
    Stands,
    /// Its end has passed; dropped by the next script that looks.
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Redis {
    pub(crate) slots: Set,
    pub(crate) waiters: Set,
    pub(crate) grants: List<Grant, 5>,
    pub(crate) leases: [Lease; 3],
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    Slot,
    Waiting,
    Full,
    Forgotten,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Retried {
    Slot,
    /// The epoch is raised with it.
    None,
    Forgotten,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Released {
    Freed,
    HandOver,
    Gone,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    Done,
    Gone,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Transferred {
    Done,
    Stale,
    Gone,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    Slot,
    HandOver,
    Freed,
    Lost,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Done,
    Again,
    Gone,
}

/// A heartbeat's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Beat {
    /// Serials that may be slots of mine: held, or being acquired, or newer than the list.
    pub(crate) keep: Set,
    /// Serials that are slots of mine.
    pub(crate) held: Set,
    /// Requests of mine that are alive, or newer than the list.
    pub(crate) alive: Set,
    /// Requests of mine that wait and were registered.
    pub(crate) waiting: Set,
    /// Adds what is missing.
    pub(crate) register: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Beaten {
    Forgotten,
    Registered,
    Renewed,
}

pub(crate) fn owner(world: &World, slot: Slot) -> u8 {
    if slot < world.count() { world.replica(slot) } else { (slot - world.count()) / FRESH }
}

impl Redis {
    pub(crate) fn occupied(&self) -> usize {
        self.slots.len() + self.grants.as_slice().iter().filter(|grant| !grant.expired).count()
    }

    /// The ranks that have waiters.
    pub(crate) fn totals(&self, world: &World) -> Set {
        Set::of(self.waiters.iter().map(|waiter| world.rank(waiter)))
    }

    pub(crate) fn lease(&self, replica: u8) -> Lease {
        self.leases[usize::from(replica)]
    }

    pub(crate) fn slots_of(&self, world: &World, replica: u8) -> Set {
        Set::of(self.slots.iter().filter(|slot| owner(world, *slot) == replica))
    }

    pub(crate) fn waiters_of(&self, world: &World, replica: u8) -> Set {
        Set::of(self.waiters.iter().filter(|waiter| world.replica(*waiter) == replica))
    }

    /// Forgets replicas whose lease ended, with all that is theirs.
    pub(crate) fn prune(&mut self, world: &World) {
        for replica in 0..world.replicas {
            if self.lease(replica) == Lease::Ended {
                self.slots = self.slots.but(self.slots_of(world, replica));
                self.waiters = self.waiters.but(self.waiters_of(world, replica));
                self.grants.retain(|grant| world.replica(grant.ticket.request) != replica);
                self.leases[usize::from(replica)] = Lease::None;
            }
        }
    }

    fn refuses(&self, world: &World, replica: u8) -> bool {
        world.rules.no_lease_no_slot && self.lease(replica) == Lease::None
    }

    fn exceeds(&self, world: &World) -> bool {
        world.rules.excess_is_freed && self.occupied() > world.cap
    }

    pub(crate) fn acquire(&mut self, world: &World, request: u8) -> Acquired {
        self.prune(world);
        if self.refuses(world, world.replica(request)) {
            return Acquired::Forgotten;
        }
        if self.slots.has(request) {
            return Acquired::Slot;
        }
        if world.rules.acquire_again_is_waiting && self.waiters.has(request) {
            return Acquired::Waiting;
        }
        let heeded = if world.rules.acquire_heeds_waiters { self.waiters } else { Set::EMPTY };
        if heeded.is_empty() && self.occupied() < world.cap {
            self.slots.insert(request);
            return Acquired::Slot;
        }
        let rank = world.rank(request);
        let length = self.waiters.iter().filter(|waiter| world.rank(*waiter) == rank).count();
        if length >= world.lengths[usize::from(rank)] {
            return Acquired::Full;
        }
        self.waiters.insert(request);
        Acquired::Waiting
    }

    pub(crate) fn retry(&mut self, world: &World, slot: Slot) -> Retried {
        if world.rules.beats_prune {
            self.prune(world);
        }
        if self.refuses(world, owner(world, slot)) {
            return Retried::Forgotten;
        }
        if self.occupied() >= world.cap {
            return Retried::None;
        }
        self.slots.insert(slot);
        Retried::Slot
    }

    pub(crate) fn release(&mut self, world: &World, slot: Slot) -> Released {
        if !self.slots.has(slot) {
            return Released::Gone;
        }
        if world.rules.release_hands_over && !self.waiters.is_empty() && !self.exceeds(world) {
            return Released::HandOver;
        }
        self.slots.remove(slot);
        Released::Freed
    }

    /// Gives a slot of a replica to a waiter of the same one.
    pub(crate) fn pass(&mut self, world: &World, slot: Slot, to: u8) -> Passed {
        if !self.slots.has(slot) || (self.exceeds(world) && self.slots.remove(slot)) {
            return Passed::Gone;
        }
        // Whether it still waits is known to its own replica, so a pass that was done already is done again.
        self.waiters.remove(to);
        if !world.rules.fresh_slot_ids {
            self.slots.remove(slot);
            self.slots.insert(to);
        }
        Passed::Done
    }

    pub(crate) fn transfer(&mut self, world: &World, slot: Slot, ticket: Ticket) -> Transferred {
        if !self.slots.has(slot) || (self.exceeds(world) && self.slots.remove(slot)) {
            return Transferred::Gone;
        }
        let stands = self.lease(world.replica(ticket.request)) == Lease::Stands;
        let granted = self.grants.as_slice().contains(&Grant { ticket, expired: false });
        if !self.waiters.has(ticket.request) || !stands || granted {
            return Transferred::Stale;
        }
        self.slots.remove(slot);
        self.grants.retain(|grant| grant.ticket != ticket);
        self.grants.add(Grant { ticket, expired: false });
        Transferred::Done
    }

    /// Turns a grant into the slot of this serial.
    pub(crate) fn claim(&mut self, world: &World, slot: Slot, ticket: Ticket) -> Claimed {
        let unexpired = self.grants.as_slice().contains(&Grant { ticket, expired: false });
        let exceeds = self.exceeds(world);
        self.grants.retain(|grant| grant.ticket != ticket);
        if !unexpired || exceeds {
            return Claimed::Lost;
        }
        if self.waiters.remove(ticket.request) {
            self.slots.insert(slot);
            return Claimed::Slot;
        }
        if self.waiters.is_empty() {
            return Claimed::Freed;
        }
        self.slots.insert(slot);
        Claimed::HandOver
    }

    pub(crate) fn free(&mut self, world: &World, slot: Slot, epoch_stands: bool) -> Freed {
        if !self.slots.has(slot) {
            return Freed::Gone;
        }
        if world.rules.epoch && !epoch_stands && !self.waiters.is_empty() {
            return Freed::Again;
        }
        self.slots.remove(slot);
        Freed::Done
    }

    /// Drops a request, whatever it is by now: a waiter, or a slot that others may wait for.
    pub(crate) fn forget(&mut self, world: &World, request: u8, slot: Slot) -> Released {
        self.waiters.remove(request);
        self.release(world, slot)
    }

    pub(crate) fn heartbeat(&mut self, world: &World, replica: u8, beat: Beat) -> Beaten {
        let rules = &world.rules;
        if rules.beats_prune {
            self.prune(world);
        }
        let forgotten = self.lease(replica) == Lease::None;
        if forgotten && rules.forgotten_until_registered && !beat.register {
            return Beaten::Forgotten;
        }
        self.leases[usize::from(replica)] = Lease::Stands;
        self.slots = self.slots.but(self.slots_of(world, replica).but(beat.keep));
        self.waiters = self.waiters.but(self.waiters_of(world, replica).but(beat.alive));
        if beat.register || !rules.beats_add_only_to_register || forgotten {
            self.slots = self.slots.or(beat.held);
        }
        if beat.register {
            self.waiters = self.waiters.or(beat.waiting);
            return Beaten::Registered;
        }
        if forgotten { Beaten::Forgotten } else { Beaten::Renewed }
    }

    /// The first call of a heartbeat that settles: whether the replica has a lease, which is not made here, as what the
    /// replica holds does not count yet.
    pub(crate) fn renew(&mut self, world: &World, replica: u8) -> bool {
        self.prune(world);
        self.lease(replica) != Lease::None
    }

    /// The second call: nothing where the replica has been forgotten since the first. Whether it was done.
    pub(crate) fn settle(&mut self, replica: u8, was_known: bool, over: Set, over_waiters: Set, held: Set) -> bool {
        if was_known && self.lease(replica) == Lease::None {
            return false;
        }
        self.leases[usize::from(replica)] = Lease::Stands;
        self.slots = self.slots.but(over).or(held);
        self.waiters = self.waiters.but(over_waiters);
        true
    }

    /// Expired grants of a replica's requests.
    pub(crate) fn expired_of(&self, world: &World, replica: u8) -> List<Grant, 5> {
        let mut expired = self.grants;
        expired.retain(|grant| grant.expired && world.replica(grant.ticket.request) == replica);
        expired
    }
}
