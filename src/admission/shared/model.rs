//! A store of slots as plainly as it can be said, to test the scripts against: what they answer and keep, on the same steps.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::conformance::Bench;
use super::slots::{
    Acquired, Applicant, Arrived, Beat, Grant, HandOver, Heir, Otherwise, Promoted, Released, Repair, Retried, Slots,
    Tally,
};
use crate::limit::{Charge, Level, Take};

/// Of a replica, and which of its requests.
type Id = (String, u64);

#[derive(Debug, Default)]
struct State {
    cap: usize,
    now: Duration,
    slots: BTreeSet<Id>,
    waiters: BTreeMap<Id, usize>,
    leases: BTreeMap<String, Duration>,
    /// With the attempt.
    grants: BTreeMap<(Id, u64), Duration>,
    epoch: u64,
}

impl State {
    fn occupied(&self) -> usize {
        self.slots.len() + self.grants.values().filter(|expiry| **expiry > self.now).count()
    }

    fn top(&self) -> Option<usize> {
        self.waiters.values().min().copied()
    }

    fn tally(&self) -> Tally {
        let mut waiting = BTreeMap::new();
        for rank in self.waiters.values() {
            *waiting.entry(*rank).or_insert(0) += 1;
        }
        Tally { epoch: self.epoch, waiting: waiting.into_iter().collect() }
    }

    fn prune(&mut self) {
        let now = self.now;
        let ended: Vec<String> =
            self.leases.iter().filter(|(_, ends)| **ends <= now).map(|(replica, _)| replica.clone()).collect();
        for replica in ended {
            self.forget_replica(&replica);
        }
    }

    fn forget_replica(&mut self, replica: &str) {
        self.leases.remove(replica);
        self.slots.retain(|(owner, _)| owner != replica);
        self.waiters.retain(|(owner, _), _| owner != replica);
        self.grants.retain(|((owner, _), _), _| owner != replica);
    }
}

/// One replica's view of the model.
pub(super) struct Model {
    state: Arc<Mutex<State>>,
    replica: String,
    lease: Duration,
}

impl Model {
    #[expect(clippy::unnecessary_wraps, reason = "what every method of a store returns")]
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> Result<T, Infallible> {
        Ok(act(&mut self.state.lock().expect("no panic")))
    }

    fn id(&self, serial: u64) -> Id {
        (self.replica.clone(), serial)
    }
}

impl Slots for Model {
    type Error = Infallible;

    async fn enter(&self, _: &[Charge<'_>], asks: Applicant) -> Result<(Take, Option<Acquired>), Infallible> {
        let level = Level { limit: 0, remaining: 0, reset: Duration::ZERO };
        Ok((Take::Taken { level }, Some(self.acquire(asks).await?)))
    }

    async fn acquire(&self, asks: Applicant) -> Result<Acquired, Infallible> {
        let id = self.id(asks.serial);
        self.with(|state| {
            state.prune();
            if !state.leases.contains_key(&self.replica) {
                Acquired::Stranger
            } else if state.slots.contains(&id) {
                Acquired::Granted
            } else if state.waiters.is_empty() && state.occupied() < state.cap {
                state.slots.insert(id);
                Acquired::Granted
            } else if state.waiters.contains_key(&id) {
                Acquired::Waiting
            } else if state.waiters.values().filter(|rank| **rank == asks.rank).count() >= asks.length {
                Acquired::Full
            } else {
                state.waiters.insert(id, asks.rank);
                Acquired::Waiting
            }
        })
    }

    async fn release(&self, serial: u64, heir: Option<Heir>, rest: Otherwise) -> Result<Released, Infallible> {
        let id = self.id(serial);
        self.with(|state| {
            if !state.slots.remove(&id) {
                return Released::Gone;
            }
            if state.waiters.is_empty() || state.occupied() >= state.cap {
                return Released::Freed;
            }
            if let Some(heir) = heir.map(|heir| self.id(heir.serial))
                && state.waiters.get(&heir).copied() == state.top()
            {
                state.waiters.remove(&heir);
                state.slots.insert(heir);
                return Released::Passed;
            }
            match rest {
                Otherwise::Announce => Released::Announced,
                Otherwise::Keep => {
                    state.slots.insert(id);
                    Released::Kept(state.tally())
                }
            }
        })
    }

    async fn promote(&self, serial: u64) -> Result<Promoted, Infallible> {
        let id = self.id(serial);
        self.with(|state| match state.waiters.get(&id).copied() {
            None if state.slots.contains(&id) => Promoted::Granted,
            None => Promoted::Unknown,
            Some(_) if state.occupied() >= state.cap => Promoted::NoneFree,
            Some(rank) if Some(rank) != state.top() => Promoted::HigherWaits,
            Some(_) => {
                state.waiters.remove(&id);
                state.slots.insert(id);
                Promoted::Granted
            }
        })
    }

    async fn forget(&self, serials: &[u64]) -> Result<usize, Infallible> {
        self.with(|state| {
            for serial in serials {
                state.slots.remove(&self.id(*serial));
                state.waiters.remove(&self.id(*serial));
            }
            state.waiters.len()
        })
    }

    async fn heartbeat(&self, heard: &[(u64, u64)]) -> Result<Beat, Infallible> {
        self.with(|state| {
            state.prune();
            let known = state.leases.insert(self.replica.clone(), state.now + self.lease).is_some();
            for (serial, attempt) in heard {
                state.grants.remove(&(self.id(*serial), *attempt));
            }
            let mine = |id: &&Id| id.0 == self.replica;
            let now = state.now;
            let lost = state.grants.iter().filter(|((id, _), expiry)| mine(&id) && **expiry <= now);
            Beat {
                known,
                in_use: state.occupied(),
                replicas: state.leases.len(),
                tally: state.tally(),
                slots: state.slots.iter().filter(mine).map(|id| id.1).collect(),
                waiters: state.waiters.keys().filter(mine).map(|id| id.1).collect(),
                lost_grants: lost.map(|((id, attempt), _)| (id.1, *attempt)).collect(),
            }
        })
    }

    async fn settle(&self, repair: &Repair) -> Result<bool, Infallible> {
        self.with(|state| {
            if !state.leases.contains_key(&self.replica) {
                return false;
            }
            for serial in &repair.drop {
                state.slots.remove(&self.id(*serial));
                state.waiters.remove(&self.id(*serial));
            }
            for serial in &repair.hold {
                state.waiters.remove(&self.id(*serial));
                state.slots.insert(self.id(*serial));
            }
            for (serial, rank) in &repair.wait {
                if !state.slots.contains(&self.id(*serial)) {
                    state.waiters.entry(self.id(*serial)).or_insert(*rank);
                }
            }
            true
        })
    }

    async fn bye(&self) -> Result<(), Infallible> {
        self.with(|state| {
            state.forget_replica(&self.replica);
            state.prune();
        })
    }
}

impl HandOver for Model {
    async fn retry(&self, serial: u64, raise: bool) -> Result<Retried, Infallible> {
        let id = self.id(serial);
        self.with(|state| {
            if !state.leases.contains_key(&self.replica) {
                return Retried::Stranger;
            }
            if state.slots.contains(&id) || (!state.waiters.is_empty() && state.occupied() < state.cap) {
                state.slots.insert(id);
                return Retried::Taken(state.tally());
            }
            state.epoch += u64::from(raise && !state.waiters.is_empty());
            Retried::NoneFree(state.tally())
        })
    }

    async fn pass(&self, from: u64, to: u64) -> Result<Released, Infallible> {
        let (from, to) = (self.id(from), self.id(to));
        self.with(|state| {
            if !state.slots.contains(&from) {
                return if state.slots.contains(&to) { Released::Passed } else { Released::Gone };
            }
            if state.occupied() > state.cap {
                state.slots.remove(&from);
                return Released::Freed;
            }
            if state.waiters.remove(&to).is_none() {
                return Released::Kept(state.tally());
            }
            state.slots.remove(&from);
            state.slots.insert(to);
            Released::Passed
        })
    }

    async fn transfer(&self, from: u64, to: &Grant<'_>) -> Result<Released, Infallible> {
        let (from, waiter) = (self.id(from), (to.replica.to_owned(), to.serial));
        let grant = (waiter.clone(), to.attempt);
        self.with(|state| {
            if !state.slots.contains(&from) {
                return if state.grants.contains_key(&grant) { Released::Passed } else { Released::Gone };
            }
            if state.occupied() > state.cap {
                state.slots.remove(&from);
                return Released::Freed;
            }
            let stands = state.leases.get(to.replica).is_some_and(|ends| *ends > state.now);
            if !stands || !state.waiters.contains_key(&waiter) || state.grants.contains_key(&grant) {
                return Released::Kept(state.tally());
            }
            state.slots.remove(&from);
            state.grants.insert(grant, state.now + Duration::from_secs(1));
            Released::Passed
        })
    }

    async fn recall(&self, from: u64, to: &Grant<'_>) -> Result<Released, Infallible> {
        let from = self.id(from);
        let grant = ((to.replica.to_owned(), to.serial), to.attempt);
        self.with(|state| {
            if state.grants.get(&grant).is_some_and(|expiry| *expiry > state.now) {
                state.grants.remove(&grant);
                state.slots.insert(from.clone());
            }
            if state.slots.contains(&from) { Released::Kept(state.tally()) } else { Released::Gone }
        })
    }

    async fn claim(&self, arrived: Arrived) -> Result<Released, Infallible> {
        let (id, spare) = (self.id(arrived.serial), self.id(arrived.spare));
        let grant = (id.clone(), arrived.attempt);
        self.with(|state| {
            let now = state.now;
            if state.grants.get(&grant).is_none_or(|expiry| *expiry <= now) {
                return if arrived.waits && state.slots.contains(&id) {
                    Released::Passed
                } else if state.slots.contains(&spare) {
                    Released::Kept(state.tally())
                } else {
                    Released::Gone
                };
            }
            let excess = state.occupied() > state.cap;
            state.grants.remove(&grant);
            if excess {
                return Released::Freed;
            }
            if arrived.waits && state.waiters.remove(&id).is_some() {
                state.slots.insert(id);
                return Released::Passed;
            }
            if state.waiters.is_empty() {
                return Released::Freed;
            }
            state.slots.insert(spare);
            Released::Kept(state.tally())
        })
    }

    async fn free(&self, serial: u64, epoch: u64, rest: Otherwise) -> Result<Released, Infallible> {
        let id = self.id(serial);
        self.with(|state| {
            if !state.slots.contains(&id) {
                return Released::Gone;
            }
            if !state.waiters.is_empty() && state.epoch != epoch {
                return Released::Kept(state.tally());
            }
            state.slots.remove(&id);
            let wanted = !state.waiters.is_empty() && state.occupied() < state.cap;
            if rest == Otherwise::Announce && wanted { Released::Announced } else { Released::Freed }
        })
    }
}

/// The model as a store under test.
pub(super) struct Plain {
    state: Arc<Mutex<State>>,
    lease: Duration,
}

impl Bench for Plain {
    type Slots = Model;

    fn new(cap: usize, lease: Duration) -> Self {
        Self { state: Arc::new(Mutex::new(State { cap, ..State::default() })), lease }
    }

    async fn replica(&self, id: &str) -> Model {
        Model { state: self.state.clone(), replica: id.to_owned(), lease: self.lease }
    }

    async fn advance(&self, by: Duration) {
        self.state.lock().expect("no panic").now += by;
    }
}
