//! Where the requests of one runtime ask for slots.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::ending::Ending;
use super::ledger::Standing;
use super::pool::{Errand, Offered, Opened, Pool, Waiter};
use super::slot::Slot;
use super::slots::{Acquired, Applicant, Otherwise, Promoted, Released, Slots};
use super::ticket::Ticket;
use crate::admission::Entry;
use crate::limit::outage::{Limits, Metered};
use crate::limit::{Charge, Level, OnOutage, Take};

/// One runtime's way to a pool and its store.
pub struct Desk<S: Slots> {
    pool: Arc<Pool<S>>,
    slots: S,
    /// Where calls go on when the request that caused them has gone.
    runtime: Handle,
}

/// What came of a request that asked to be charged and let in.
#[derive(Debug)]
pub enum Entered<L, T> {
    /// It was charged, or nobody could be asked and the policy lets it pass; and this is what it got.
    Admission(Option<Level>, Entry<L, T>),
    /// Its bucket is empty.
    Refused {
        /// How full it still is.
        level: Level,
        /// When the same take succeeds.
        retry_after: std::time::Duration,
    },
    /// The store of buckets does not answer, and the policy refuses the request.
    Unavailable,
}

impl<S: Slots> Desk<S> {
    /// A desk of the runtime that this is called in. `slots` must be of the same runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(pool: Arc<Pool<S>>, slots: S) -> Arc<Self> {
        Arc::new(Self { pool, slots, runtime: Handle::current() })
    }

    /// The pool behind it.
    pub fn pool(&self) -> &Arc<Pool<S>> {
        &self.pool
    }

    pub(super) fn slots(&self) -> &S {
        &self.slots
    }

    /// Charges a request of the tier of this rank, and takes a slot or a place: one question to the store where that
    /// answers. Where it does not, `limits` say what becomes of the charge, and this process whether there is a slot.
    ///
    /// Dropping the future gives up whatever was taken; tokens stay spent.
    pub async fn enter(
        self: &Arc<Self>,
        limits: &Limits,
        charges: &[Charge<'_>],
        on_outage: Option<OnOutage>,
        rank: usize,
    ) -> Entered<Slot<S>, Ticket<S>> {
        let asking = match self.pool.open() {
            Opened::Closing => return Entered::Admission(None, Entry::Closing),
            Opened::Alone => {
                let metered = limits.take(charges, on_outage).await;
                return metered_entry(metered, || self.enter_alone(rank));
            }
            Opened::Ask { serial, announcements } => Asking { desk: Some(self.clone()), serial, rank, announcements },
        };
        let applicant = Applicant { serial: asking.serial, rank, length: self.pool.lengths[rank] };
        match self.slots.enter(charges, applicant).await {
            Ok((Take::Refused { level, retry_after }, _)) => {
                asking.end();
                Entered::Refused { level, retry_after }
            }
            Ok((Take::Taken { level }, Some(acquired))) => Entered::Admission(Some(level), asking.answered(acquired)),
            // Taken, and no word of a slot: the heartbeat settles it.
            Ok((Take::Taken { level }, None)) => Entered::Admission(Some(level), asking.unsettled()),
            Err(_) => metered_entry(limits.take_without_store(charges, on_outage), || asking.unsettled()),
        }
    }

    /// Admits a request while the store is not asked.
    fn enter_alone(self: &Arc<Self>, rank: usize) -> Entry<Slot<S>, Ticket<S>> {
        let mut state = self.pool.lock();
        if state.is_closed() {
            return Entry::Closing;
        }
        let serial = state.ledger.open();
        let nobody_waits = state.room.waiting().all(|waiting| waiting == 0);
        if nobody_waits && state.has_own_slot(self.pool.cap) {
            state.ledger.set(serial, Standing::Held);
            return Entry::Slot(Slot::new(serial, self.clone()));
        }
        drop(state);
        self.join(serial, rank, false)
    }

    /// Takes a place in the room. One that the store does not know of yet is told to it by a heartbeat.
    fn join(self: &Arc<Self>, serial: u64, rank: usize, known: bool) -> Entry<Slot<S>, Ticket<S>> {
        let (call, called) = oneshot::channel();
        let waiter = Waiter { serial, desk: self.clone(), call };
        let mut state = self.pool.lock();
        let closed = state.is_closed();
        let joined = if closed { None } else { state.room.join(rank, waiter).ok() };
        let Some(place) = joined else {
            drop(state);
            self.clone().forget_soon(serial);
            return if closed { Entry::Closing } else { Entry::Full };
        };
        state.ledger.set(serial, Standing::Waiting(place));
        let alone = state.is_cut_off();
        drop(state);
        if alone {
            self.pool.pump();
        } else if !known {
            self.pool.beat_wanted.notify_one();
        }
        Entry::Held(Ticket::new(serial, self.clone(), place, called))
    }

    /// Tells the store that a request has gone, whatever it had.
    pub(super) fn forget_soon(self: Arc<Self>, serial: u64) {
        let ending = Ending::new(&self.pool, serial);
        let runtime = self.runtime.clone();
        runtime.spawn(async move { ending.end(self.slots.forget(&[serial]).await.is_ok()) });
    }

    /// Gives a slot back, to whose turn it is here if the store agrees.
    pub(super) fn give_back(self: Arc<Self>, serial: u64) {
        let mut state = self.pool.lock();
        if state.is_cut_off() {
            state.ledger.close(serial);
            drop(state);
            self.pool.pump();
            return;
        }
        state.ledger.set(serial, Standing::Asked);
        let ordered = self.pool.is_ordered();
        // Where tickets say whose turn it is, that need not be one of ours.
        let called = if ordered { None } else { state.call_to_offer() };
        drop(state);
        let ending = Ending::new(&self.pool, serial);
        let offered = called.map(|called| self.pool.offered(called));
        let rest = if ordered { Otherwise::Keep } else { Otherwise::Announce };
        let runtime = self.runtime.clone();
        runtime.spawn(async move { self.release(ending, offered, rest).await });
    }

    pub(super) async fn release(&self, ending: Ending<S>, offered: Option<Offered<S>>, rest: Otherwise) {
        let heir = offered.as_ref().map(|offered| offered.heir);
        let released = self.slots.release(ending.serial, heir, rest).await;
        let settled = match released {
            Ok(Released::Passed) => {
                ending.end(true);
                if let Some(waiter) = offered.and_then(Offered::granted) {
                    self.pool.metrics.own.inc();
                    self.grant(waiter);
                }
                return;
            }
            // Though one of ours waits: either more than the cap were in use, or the store does not know it.
            Ok(Released::Freed) => offered.is_none(),
            Ok(Released::Announced) => {
                self.pool.promotion_wanted_later.notify_one();
                true
            }
            Ok(Released::Kept(tally)) => return self.pool.send(Errand::HandOver(ending, tally)),
            Ok(Released::Gone) | Err(_) => false,
        };
        // First, or the heartbeat that is wanted would find it still on offer.
        drop(offered);
        ending.end(settled);
        // The store may have been lost since.
        self.pool.pump();
    }

    /// Lets our waiters have what is free, as long as something is and it is their turn.
    pub(super) async fn promote(&self) {
        while let Some(offered) = self.pool.offer() {
            match self.slots.promote(offered.heir.serial).await {
                Ok(Promoted::Granted) => {
                    if let Some(waiter) = offered.granted() {
                        self.pool.metrics.other.inc();
                        self.grant(waiter);
                    }
                    continue;
                }
                Ok(Promoted::NoneFree | Promoted::HigherWaits) => {}
                Ok(Promoted::Unknown) | Err(_) => {
                    drop(offered);
                    self.pool.beat_wanted.notify_one();
                }
            }
            break;
        }
        self.pool.pump();
    }

    /// The store has given this waiter a slot.
    pub(super) fn grant(&self, waiter: Waiter<S>) {
        self.pool.granted(waiter.serial);
        // Where it has gone, dropping its slot gives it back.
        drop(waiter.grant());
    }
}

fn metered_entry<L, T>(metered: Metered, enter: impl FnOnce() -> Entry<L, T>) -> Entered<L, T> {
    match metered {
        Metered::Taken(level) => Entered::Admission(Some(level), enter()),
        Metered::Unmetered => Entered::Admission(None, enter()),
        Metered::Refused { level, retry_after } => Entered::Refused { level, retry_after },
        Metered::Unavailable => Entered::Unavailable,
    }
}

/// A request that the store is being asked about. What it may have got is given up by drop.
struct Asking<S: Slots> {
    /// `None` once answered.
    desk: Option<Arc<Desk<S>>>,
    serial: u64,
    rank: usize,
    /// How many there had been when the store was asked.
    announcements: u64,
}

impl<S: Slots> Asking<S> {
    fn answered(mut self, acquired: Acquired) -> Entry<Slot<S>, Ticket<S>> {
        if let Acquired::Stranger = acquired {
            return self.unsettled();
        }
        let Some(desk) = self.desk.take() else { return Entry::Closing };
        match acquired {
            Acquired::Granted => {
                desk.pool.granted(self.serial);
                Entry::Slot(Slot::new(self.serial, desk))
            }
            Acquired::Full | Acquired::Stranger => {
                desk.pool.ended(self.serial);
                Entry::Full
            }
            Acquired::Waiting => {
                let entry = desk.join(self.serial, self.rank, true);
                if desk.pool.is_ordered() {
                    desk.pool.send(Errand::Publish(self.serial));
                } else if desk.pool.lock().announcements() != self.announcements {
                    // A slot that came free since the store counted this request was announced before it was in the room.
                    desk.pool.promotion_wanted.notify_one();
                }
                entry
            }
        }
    }

    /// Whether the store has given it anything is not known: it waits until a heartbeat has told.
    fn unsettled(mut self) -> Entry<Slot<S>, Ticket<S>> {
        match self.desk.take() {
            Some(desk) => desk.join(self.serial, self.rank, false),
            None => Entry::Closing,
        }
    }

    /// It got nothing.
    fn end(mut self) {
        if let Some(desk) = self.desk.take() {
            desk.pool.ended(self.serial);
        }
    }
}

impl<S: Slots> Drop for Asking<S> {
    fn drop(&mut self) {
        if let Some(desk) = self.desk.take() {
            desk.forget_soon(self.serial);
        }
    }
}
