//! What this process knows about its own serials, and what the store must be told when it knows otherwise. Pure.

use std::collections::{HashMap, HashSet};

use super::slots::{Beat, Repair};
use crate::admission::room::Place;
use crate::admission::tickets::Epoch;

/// How one serial stands, by our own account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// A call about it is out, so the store may know it as anything.
    Asked,
    /// It has a slot.
    Held,
    /// It waits here in the room.
    Waiting(Place),
}

/// A point in the history of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Mark(u64);

/// Every serial that is alive in this process, from before the first call about it until after the last.
#[derive(Debug)]
pub(super) struct Ledger {
    next: u64,
    now: Mark,
    /// With when it last changed.
    entries: HashMap<u64, (Standing, Mark)>,
    /// Of those that wait.
    published: HashMap<u64, Published>,
    /// How many tickets were sent, of whatever serial.
    sent: u64,
    /// By rank: how far the line of tickets has come.
    reached: HashMap<usize, Reached>,
    held: usize,
}

/// The latest ticket of a serial that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Published {
    attempt: u32,
    /// In which it was sent; the one before all others where it is known to be lost.
    epoch: Epoch,
    /// Of all that were sent from here.
    number: u64,
}

/// The latest of our tickets that was the first of its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Reached {
    now: u64,
    /// At the last look.
    before: u64,
}

/// What a heartbeat calls for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Settlement {
    /// What the store is to change.
    pub(super) repair: Repair,
    /// Waiters to whom the store has given a slot without our hearing of it.
    pub(super) called: Vec<(u64, Place)>,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self {
            next: 1,
            now: Mark(0),
            entries: HashMap::new(),
            published: HashMap::new(),
            sent: 0,
            reached: HashMap::new(),
            held: 0,
        }
    }

    /// A new serial, asked for.
    pub(super) fn open(&mut self) -> u64 {
        let serial = self.next;
        self.next += 1;
        self.set(serial, Standing::Asked);
        serial
    }

    /// Changes how a serial stands.
    pub(super) fn set(&mut self, serial: u64, standing: Standing) {
        self.remove(serial);
        self.held += usize::from(standing == Standing::Held);
        if standing == Standing::Held {
            self.published.remove(&serial);
        }
        self.entries.insert(serial, (standing, self.now));
    }

    /// Ends a serial. It never comes back.
    pub(super) fn close(&mut self, serial: u64) {
        self.published.remove(&serial);
        self.remove(serial);
    }

    fn remove(&mut self, serial: u64) {
        self.now.0 += 1;
        if let Some((Standing::Held, _)) = self.entries.remove(&serial) {
            self.held -= 1;
        }
    }

    /// The place of a serial that waits.
    pub(super) fn place(&self, serial: u64) -> Option<Place> {
        match self.entries.get(&serial)?.0 {
            Standing::Waiting(place) => Some(place),
            Standing::Asked | Standing::Held => None,
        }
    }

    /// Whether it waits, or is being asked about and may wait after that.
    pub(super) fn may_wait(&self, serial: u64) -> bool {
        matches!(self.entries.get(&serial), Some((Standing::Asked | Standing::Waiting(_), _)))
    }

    /// The next attempt to publish a ticket of a serial, and the rank of its tier. `None` where it does not wait.
    pub(super) fn attempt(&mut self, serial: u64, epoch: Epoch) -> Option<(usize, u32)> {
        let place = self.place(serial)?;
        let published = self.published.entry(serial).or_default();
        self.sent += 1;
        *published = Published { attempt: published.attempt.saturating_add(1), epoch, number: self.sent };
        Some((place.rank(), published.attempt))
    }

    /// The latest attempt is of no use: its ticket or its grant is lost.
    pub(super) fn lost(&mut self, serial: u64) {
        if let Some(published) = self.published.get_mut(&serial) {
            published.epoch = Epoch::default();
        }
    }

    /// This ticket of ours was the first of its line, so those of the same tier that were sent before it are not there any
    /// more, but for some that swapped places on the way.
    pub(super) fn reached(&mut self, serial: u64, attempt: u32) {
        let (Some(place), Some(published)) = (self.place(serial), self.published.get(&serial)) else { return };
        if published.attempt == attempt {
            let reached = self.reached.entry(place.rank()).or_default();
            reached.now = reached.now.max(published.number);
        }
    }

    /// Gives up the tickets that their line had passed by the last look: someone has removed them. To be called no more often
    /// than places are swapped on the way, which is a matter of milliseconds.
    pub(super) fn give_up_passed(&mut self) {
        for (serial, (standing, _)) in &self.entries {
            let Standing::Waiting(place) = standing else { continue };
            let passed = self.reached.get(&place.rank()).map_or(0, |reached| reached.before);
            if let Some(published) = self.published.get_mut(serial)
                && published.number < passed
            {
                published.epoch = Epoch::default();
            }
        }
        for reached in self.reached.values_mut() {
            reached.before = reached.now;
        }
    }

    /// The attempt that was sent last; 0 for none.
    pub(super) fn latest(&self, serial: u64) -> u32 {
        self.published.get(&serial).map_or(0, |published| published.attempt)
    }

    /// Whether it waits without a ticket that may be there.
    pub(super) fn is_unpublished(&self, serial: u64) -> bool {
        self.published.get(&serial).is_none_or(|published| published.epoch == Epoch::default())
    }

    /// Those that wait and have no ticket of this epoch, in the order of arrival.
    pub(super) fn unpublished(&self, epoch: Epoch) -> Vec<u64> {
        let waiting = self.entries.iter().filter(|(_, (standing, _))| matches!(standing, Standing::Waiting(_)));
        let stale = |serial: &u64| self.published.get(serial).is_none_or(|published| published.epoch < epoch);
        let mut serials: Vec<u64> = waiting.map(|(serial, _)| *serial).filter(stale).collect();
        serials.sort_unstable();
        serials
    }

    /// How many have a slot.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Now: to be taken before a heartbeat is sent.
    pub(super) fn mark(&self) -> Mark {
        self.now
    }

    /// Compares what the store said with what is known here. `sent` is from before the heartbeat was sent.
    ///
    /// A serial is used once, so one that is not alive here by now has gone for good, and what the store knows of it can be
    /// dropped. Of those that are alive, one that changed since, or that a call is out about, is left to a later heartbeat:
    /// the store may have answered before or after the change.
    pub(super) fn settle(&self, sent: Mark, beat: &Beat) -> Settlement {
        let slots: HashSet<u64> = beat.slots.iter().copied().collect();
        let waiters: HashSet<u64> = beat.waiters.iter().copied().collect();
        let mut settlement = Settlement::default();
        settlement.repair.drop = slots.union(&waiters).filter(|it| !self.entries.contains_key(it)).copied().collect();
        for (serial, (standing, changed)) in &self.entries {
            if *changed > sent {
                continue;
            }
            match standing {
                Standing::Asked => {}
                Standing::Held if slots.contains(serial) && !waiters.contains(serial) => {}
                Standing::Held => settlement.repair.hold.push(*serial),
                Standing::Waiting(place) if slots.contains(serial) => settlement.called.push((*serial, *place)),
                Standing::Waiting(_) if waiters.contains(serial) => {}
                Standing::Waiting(place) => settlement.repair.wait.push((*serial, place.rank())),
            }
        }
        // In the order of arrival.
        settlement.repair.drop.sort_unstable();
        settlement.repair.hold.sort_unstable();
        settlement.repair.wait.sort_unstable();
        settlement.called.sort_unstable_by_key(|(serial, _)| *serial);
        settlement
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::room::Room;

    fn beat(slots: &[u64], waiters: &[u64]) -> Beat {
        Beat { slots: slots.to_vec(), waiters: waiters.to_vec(), ..Beat::default() }
    }

    fn place(rank: usize) -> Place {
        Room::new([9, 9]).join(rank, ()).unwrap()
    }

    #[test]
    fn what_agrees_is_left_alone() {
        let mut ledger = Ledger::new();
        let (held, waits) = (ledger.open(), ledger.open());
        ledger.set(held, Standing::Held);
        ledger.set(waits, Standing::Waiting(place(0)));
        assert_eq!(ledger.settle(ledger.mark(), &beat(&[held], &[waits])), Settlement::default());
        assert_eq!(ledger.held(), 1);
    }

    #[test]
    fn what_the_store_forgot_is_registered_again() {
        let mut ledger = Ledger::new();
        let (held, waits) = (ledger.open(), ledger.open());
        ledger.set(held, Standing::Held);
        ledger.set(waits, Standing::Waiting(place(1)));
        let settlement = ledger.settle(ledger.mark(), &beat(&[], &[]));
        assert_eq!(settlement.repair, Repair { drop: vec![], hold: vec![held], wait: vec![(waits, 1)] });
    }

    #[test]
    fn a_serial_that_is_not_alive_here_is_dropped_whatever_it_has() {
        let mut ledger = Ledger::new();
        let (released, gone) = (ledger.open(), ledger.open());
        ledger.set(released, Standing::Held);
        ledger.close(released);
        ledger.close(gone);
        let settlement = ledger.settle(ledger.mark(), &beat(&[released, 77], &[gone]));
        assert_eq!(settlement.repair.drop, [released, gone, 77]);
        assert_eq!(ledger.held(), 0);
    }

    #[test]
    fn a_serial_that_a_call_is_out_about_or_that_changed_since_is_left_to_a_later_heartbeat() {
        let mut ledger = Ledger::new();
        let (asked, late) = (ledger.open(), ledger.open());
        let sent = ledger.mark();
        ledger.set(late, Standing::Held);
        assert_eq!(ledger.settle(sent, &beat(&[asked], &[])), Settlement::default());
        assert_eq!(ledger.settle(ledger.mark(), &beat(&[asked], &[])).repair.hold, [late]);
    }

    #[test]
    fn a_waiter_that_was_given_a_slot_unheard_is_called() {
        let mut ledger = Ledger::new();
        let waits = ledger.open();
        ledger.set(waits, Standing::Waiting(place(0)));
        let settlement = ledger.settle(ledger.mark(), &beat(&[waits], &[]));
        assert_eq!(settlement.called, [(waits, place(0))]);
        assert!(settlement.repair.is_empty());
    }

    #[test]
    fn one_that_was_let_through_while_the_store_had_it_wait_gets_its_slot() {
        let mut ledger = Ledger::new();
        let held = ledger.open();
        ledger.set(held, Standing::Held);
        assert_eq!(ledger.settle(ledger.mark(), &beat(&[], &[held])).repair.hold, [held]);
    }

    #[test]
    fn a_waiter_whose_line_has_passed_it_for_a_whole_look_gets_another_ticket() {
        let mut ledger = Ledger::new();
        let mut room = Room::new([9, 9]);
        let mut waits = |ledger: &mut Ledger, rank| {
            let serial = ledger.open();
            ledger.set(serial, Standing::Waiting(room.join(rank, ()).unwrap()));
            ledger.attempt(serial, Epoch::default());
            serial
        };
        let (lost, other, later) = (waits(&mut ledger, 0), waits(&mut ledger, 1), waits(&mut ledger, 0));
        let epoch = crate::admission::tickets::memory::first_epoch();
        assert_eq!(ledger.unpublished(epoch), [lost, other, later]);
        for serial in [lost, other, later] {
            ledger.attempt(serial, epoch);
        }
        ledger.reached(later, 1);
        ledger.give_up_passed();
        ledger.give_up_passed();
        assert!(ledger.unpublished(epoch).is_empty(), "an older attempt tells nothing");
        ledger.reached(later, 2);
        ledger.give_up_passed();
        assert!(ledger.unpublished(epoch).is_empty(), "it may have swapped places");
        ledger.give_up_passed();
        assert_eq!(ledger.unpublished(epoch), [lost]);
        assert_eq!(ledger.attempt(lost, epoch), Some((0, 3)));
    }

    #[test]
    fn only_the_latest_attempt_counts_and_a_slot_ends_it() {
        let mut ledger = Ledger::new();
        let epoch = crate::admission::tickets::memory::first_epoch();
        let serial = ledger.open();
        assert_eq!(ledger.attempt(serial, epoch), None, "it does not wait yet");
        ledger.set(serial, Standing::Waiting(place(1)));
        assert!(ledger.is_unpublished(serial));
        assert_eq!(ledger.attempt(serial, epoch), Some((1, 1)));
        assert!(!ledger.is_unpublished(serial));
        ledger.lost(serial);
        assert!(ledger.is_unpublished(serial));
        assert_eq!(ledger.attempt(serial, epoch), Some((1, 2)));
        assert_eq!(ledger.latest(serial), 2);
        ledger.set(serial, Standing::Held);
        assert_eq!((ledger.latest(serial), ledger.may_wait(serial)), (0, false));
    }
}
