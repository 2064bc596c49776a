//! One pool as this process sees it: the room, the ledger and the lease behind one lock, which is never held over an await.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;

use super::desk::Desk;
use super::ending::Ending;
use super::lease::{Lease, Mode, budget};
use super::ledger::{Ledger, Mark, Standing};
use super::slot::Slot;
use super::slots::{Beat, Heir, Repair, Slots, Tally};
use crate::admission::room::{Place, Room};
use crate::admission::{PoolStats, order};
use crate::metrics::ReplicaMetrics;

/// One protected upstream whose slots are shared over replicas.
pub struct Pool<S: Slots> {
    pub(super) cap: NonZeroUsize,
    /// By rank; over all replicas.
    pub(super) lengths: Vec<usize>,
    pub(super) lease: Duration,
    pub(super) metrics: ReplicaMetrics,
    state: Mutex<State<S>>,
    /// A heartbeat is wanted before the next one is due.
    pub(super) beat_wanted: Notify,
    /// A slot may be free for one of ours.
    pub(super) promotion_wanted: Notify,
    /// The same, once others have had their chance.
    pub(super) promotion_wanted_later: Notify,
    /// Whether the first heartbeat has ended, well or badly.
    pub(super) settled: watch::Sender<bool>,
    /// A slot may have come free that nobody hands over.
    pub(super) look_wanted: Notify,
    /// To whoever has the tickets; nobody where Redis is alone.
    errands: OnceLock<mpsc::UnboundedSender<Errand<S>>>,
    /// Whether tickets say whose turn it is, at this moment.
    ordered: AtomicBool,
}

/// What is to be done about tickets. So many at most as there are slots and waiters.
pub(super) enum Errand<S: Slots> {
    /// A slot is to be handed over.
    HandOver(Ending<S>, Tally),
    /// A waiter needs a ticket.
    Publish(u64),
    /// Whoever waits without a ticket needs one.
    PublishAll,
}

pub(super) struct State<S: Slots> {
    pub(super) room: Room<Waiter<S>>,
    pub(super) ledger: Ledger,
    mode: Mode,
    lease: Lease,
    closed: bool,
    /// How many announcements have come. One that comes while a request is asking may be meant for that request.
    announcements: u64,
    seen: Seen,
}

/// A request in the room.
pub(super) struct Waiter<S: Slots> {
    pub(super) serial: u64,
    pub(super) desk: Arc<Desk<S>>,
    pub(super) call: oneshot::Sender<Call<S>>,
}

/// What a waiter is told, once.
pub(super) enum Call<S: Slots> {
    Slot(Slot<S>),
    Closing,
}

/// A waiter that was taken out of the room while the store is asked whether it may have a slot. Unless it gets one, it is put
/// back by drop, also where the store can not be asked any more because the runtime that was to do so has ended.
pub(super) struct Offered<S: Slots> {
    pool: Arc<Pool<S>>,
    /// `None` once it has a slot.
    waiter: Option<Waiter<S>>,
    place: Place,
    pub(super) heir: Heir,
}

impl<S: Slots> Offered<S> {
    /// The waiter, who has a slot by now.
    pub(super) fn granted(mut self) -> Option<Waiter<S>> {
        self.waiter.take()
    }
}

impl<S: Slots> Drop for Offered<S> {
    fn drop(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            self.pool.put_back(waiter, self.place);
        }
    }
}

/// How a request can be admitted at this instant.
pub(super) enum Opened {
    /// By the store, under this serial; with the announcements so far.
    Ask { serial: u64, announcements: u64 },
    /// By this process.
    Alone,
    /// Not at all.
    Closing,
}

/// What the last heartbeat told.
#[derive(Debug, Clone, Default)]
struct Seen {
    in_use: usize,
    /// Of them, how many are of other replicas.
    others: usize,
    replicas: usize,
    waiting: Vec<(usize, usize)>,
}

/// How the pool stands over all replicas, by the last heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedStats {
    /// Whether this replica goes on alone, as the store does not answer.
    pub cut_off: bool,
    /// Replicas that take part.
    pub replicas: usize,
    /// Slots in use.
    pub in_flight: usize,
    /// Requests held, by the tier's rank.
    pub waiting: Vec<usize>,
}

impl<S: Slots> Pool<S> {
    /// A pool with `max_in_flight` slots over all replicas, and queues of each of `lengths`, highest tier first, over all
    /// replicas too. A replica that is silent for the length of a lease loses its slots.
    pub fn new(
        max_in_flight: NonZeroUsize,
        lengths: impl IntoIterator<Item = usize>,
        lease: Duration,
        metrics: ReplicaMetrics,
    ) -> Arc<Self> {
        let lengths: Vec<usize> = lengths.into_iter().collect();
        let state = State {
            room: Room::new(lengths.iter().copied()),
            ledger: Ledger::new(),
            // Until the first heartbeat is answered.
            mode: Mode::Alone { budget: 0 },
            lease: Lease::NONE,
            closed: false,
            announcements: 0,
            seen: Seen::default(),
        };
        metrics.cut_off.set(1);
        Arc::new(Self {
            cap: max_in_flight,
            lengths,
            lease,
            metrics,
            state: Mutex::new(state),
            beat_wanted: Notify::new(),
            promotion_wanted: Notify::new(),
            promotion_wanted_later: Notify::new(),
            settled: watch::Sender::new(false),
            look_wanted: Notify::new(),
            errands: OnceLock::new(),
            ordered: AtomicBool::new(false),
        })
    }

    /// Waits until the first heartbeat has ended, well or badly: within 1 s and one call's timeout.
    pub async fn settled(&self) {
        // An error would mean that the sender is gone, and it is in `self`.
        let _ = self.settled.subscribe().wait_for(|settled| *settled).await;
    }

    /// Takes no new requests, and tells everyone in the room so. Slots in use stay until they are dropped.
    pub fn close(&self) {
        let waiters = {
            let mut state = self.lock();
            state.closed = true;
            let waiters = state.room.close();
            for waiter in &waiters {
                state.ledger.close(waiter.serial);
            }
            waiters
        };
        for waiter in waiters {
            // An error only says that the waiter has gone.
            let _ = waiter.call.send(Call::Closing);
        }
        // The store still counts them as waiting; the heartbeat drops them.
        self.beat_wanted.notify_one();
    }

    /// How this replica's part of the pool stands now.
    pub fn stats(&self) -> PoolStats {
        let state = self.lock();
        PoolStats {
            max_in_flight: self.cap.get(),
            in_flight: state.ledger.held(),
            waiting: state.room.waiting().collect(),
        }
    }

    /// How the whole pool stood at the last heartbeat.
    pub fn shared_stats(&self) -> SharedStats {
        let state = self.lock();
        let mut waiting = vec![0; self.lengths.len()];
        for (rank, count) in &state.seen.waiting {
            if let Some(tier) = waiting.get_mut(*rank) {
                *tier = *count;
            }
        }
        SharedStats {
            cut_off: state.mode.is_cut_off(),
            replicas: state.seen.replicas,
            in_flight: state.seen.in_use,
            waiting,
        }
    }

    /// The state is whole at every instruction that can panic, so a poisoned lock still guards a sound one.
    pub(super) fn lock(&self) -> MutexGuard<'_, State<S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether tickets say whose turn it is. Where not, each replica keeps its own room.
    pub(super) fn is_ordered(&self) -> bool {
        self.ordered.load(Ordering::Relaxed)
    }

    /// Tickets can be had from now on, or not any more.
    pub(super) fn set_ordered(&self, ordered: bool) {
        self.ordered.store(ordered, Ordering::Relaxed);
    }

    /// Takes errands from now on. `None` where another does.
    pub(super) fn take_errands(&self) -> Option<mpsc::UnboundedReceiver<Errand<S>>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.errands.set(sender).ok().map(|()| receiver)
    }

    /// Not under the lock: an errand that nobody takes any more is dropped, which may take it.
    pub(super) fn send(&self, errand: Errand<S>) {
        if let Some(errands) = self.errands.get() {
            // Fails while this replica goes away: then a farewell follows.
            let _ = errands.send(errand);
        }
    }

    /// Whether a request waits in whatever replica, as far as is known here.
    pub(super) fn anyone_waits(&self) -> bool {
        let state = self.lock();
        !state.seen.waiting.is_empty() || state.room.waiting().any(|waiting| waiting > 0)
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.lock().is_cut_off()
    }

    /// The ticket of a serial is lost, or was taken in vain; if it still waits, it needs another one.
    pub(super) fn ticket_lost(&self, serial: u64) {
        self.lock().ledger.lost(serial);
    }

    /// This ticket of ours was the first of its line.
    pub(super) fn ticket_reached(&self, serial: u64, attempt: u32) {
        self.lock().ledger.reached(serial, attempt);
    }

    /// Grants that came to nothing. Their waiters need tickets, but for those that have a later one.
    pub(super) fn grants_lost(&self, grants: &[(u64, u64)]) {
        for (serial, attempt) in grants {
            let latest = {
                let mut state = self.lock();
                let latest = u64::from(state.ledger.latest(*serial)) == *attempt;
                if latest {
                    state.ledger.lost(*serial);
                }
                latest
            };
            if latest {
                self.send(Errand::Publish(*serial));
            }
        }
    }

    /// A serial for a request, if the store is to be asked about it.
    pub(super) fn open(&self) -> Opened {
        let mut state = self.lock();
        if state.closed {
            Opened::Closing
        } else if state.mode.is_cut_off() {
            Opened::Alone
        } else {
            Opened::Ask { serial: state.ledger.open(), announcements: state.announcements }
        }
    }

    /// A slot is free and the tier of this rank is the highest that waits. `patient` is the replica that should let others
    /// try first, as they may have waited longer.
    pub(super) fn announced(&self, rank: usize, patient: bool) {
        let ours = {
            let mut state = self.lock();
            state.announcements += 1;
            // A higher tier may have come since; a lower one would be refused.
            order::strict(state.room.waiting()).is_some_and(|ours| ours <= rank)
        };
        match (ours, patient) {
            (true, false) => self.promotion_wanted.notify_one(),
            (true, true) => self.promotion_wanted_later.notify_one(),
            (false, _) => {}
        }
    }

    /// Announcements may have been missed.
    pub(super) fn maybe_announced(&self) {
        self.lock().announcements += 1;
        self.promotion_wanted.notify_one();
    }

    /// Takes whose turn it is here out of the room, to ask the store whether it may have a slot. `None` where nobody waits
    /// here or the store is not asked.
    pub(super) fn offer(self: &Arc<Self>) -> Option<Offered<S>> {
        let called = self.lock().call_to_offer();
        called.map(|called| self.offered(called))
    }

    /// The same for one waiter. `None` where it does not wait here, or is on offer to another slot.
    pub(super) fn offer_to(self: &Arc<Self>, serial: u64) -> Option<Offered<S>> {
        let called = {
            let mut state = self.lock();
            if state.mode.is_cut_off() {
                return None;
            }
            let place = state.ledger.place(serial)?;
            let waiter = state.room.leave(place)?;
            state.ledger.set(serial, Standing::Asked);
            (waiter, place, Heir { serial, own: 0 })
        };
        Some(self.offered(called))
    }

    /// What [`State::call_to_offer`] gave. Not under the lock: what is offered is put back by drop.
    pub(super) fn offered(self: &Arc<Self>, (waiter, place, heir): (Waiter<S>, Place, Heir)) -> Offered<S> {
        Offered { pool: self.clone(), waiter: Some(waiter), place, heir }
    }

    /// Puts back a waiter that may not have a slot yet. If it has gone meanwhile, the store is told.
    fn put_back(&self, waiter: Waiter<S>, place: Place) {
        let gone = {
            let mut state = self.lock();
            if state.closed {
                state.ledger.close(waiter.serial);
                drop(state);
                self.beat_wanted.notify_one();
                let _ = waiter.call.send(Call::Closing);
                return;
            }
            // Its ticket says so before it looks for its place in the room, so one of the two finds the other.
            if waiter.call.is_closed() {
                waiter
            } else {
                let serial = waiter.serial;
                state.ledger.set(serial, Standing::Waiting(place));
                state.room.put_back(place, waiter);
                let unpublished = state.ledger.is_unpublished(serial);
                drop(state);
                if unpublished && self.is_ordered() {
                    self.send(Errand::Publish(serial));
                }
                return;
            }
        };
        gone.desk.clone().forget_soon(gone.serial);
    }

    /// The store has given this serial a slot.
    pub(super) fn granted(&self, serial: u64) {
        let mut state = self.lock();
        state.ledger.set(serial, Standing::Held);
        // One more that the store knows of.
        if let Mode::Alone { budget } | Mode::Returning { budget } = &mut state.mode {
            *budget += 1;
        }
    }

    /// Nothing is to be said about this serial any more.
    pub(super) fn ended(&self, serial: u64) {
        self.lock().ledger.close(serial);
    }

    /// While cut off: lets in as many of the room as may be in flight.
    pub(super) fn pump(&self) {
        loop {
            let called = self.lock().call_alone(self.cap);
            let Some(waiter) = called else { return };
            let serial = waiter.serial;
            if let Err(slot) = waiter.grant() {
                slot.forget();
                self.ended(serial);
            }
        }
    }

    /// A heartbeat is about to be sent.
    pub(super) fn beat_begins(&self) -> Mark {
        let mut state = self.lock();
        if let Mode::Alone { budget } = state.mode {
            state.mode = Mode::Returning { budget };
        }
        state.ledger.mark()
    }

    /// The store did not answer. True where it did before.
    pub(super) fn beat_failed(&self) -> bool {
        let was = {
            let mut state = self.lock();
            let budget = match state.mode {
                Mode::Shared => budget(self.cap, state.ledger.held(), state.seen.others, &state.lease),
                Mode::Alone { budget } | Mode::Returning { budget } => budget,
            };
            std::mem::replace(&mut state.mode, Mode::Alone { budget })
        };
        self.metrics.cut_off.set(1);
        self.pump();
        was == Mode::Shared
    }

    /// The store was told something, and whether it heard is unknown: what it knows for certain is what is still held.
    pub(super) fn repair_failed(&self) -> bool {
        {
            let mut state = self.lock();
            let held = state.ledger.held();
            if let Mode::Alone { budget } | Mode::Returning { budget } = &mut state.mode {
                *budget = held.min(*budget);
            }
        }
        self.beat_failed()
    }

    /// The store answered a heartbeat that was sent at `sent`. What it must be told, and who turns out to have a slot.
    pub(super) fn beat_answered(&self, mark: Mark, sent: Instant, beat: &Beat) -> (Repair, Vec<Waiter<S>>) {
        let mut state = self.lock();
        state.lease = Lease::renewed(sent, self.lease, beat.replicas);
        state.seen = Seen {
            in_use: beat.in_use,
            others: beat.in_use.saturating_sub(beat.slots.len()),
            replicas: beat.replicas,
            waiting: beat.tally.waiting.clone(),
        };
        let settlement = state.ledger.settle(mark, beat);
        let mut called = Vec::with_capacity(settlement.called.len());
        for (serial, place) in settlement.called {
            if let Some(waiter) = state.room.leave(place) {
                state.ledger.set(serial, Standing::Held);
                called.push(waiter);
            }
        }
        (settlement.repair, called)
    }

    /// The store knows what we hold. True where it did not answer before.
    pub(super) fn rejoined(&self) -> bool {
        self.metrics.cut_off.set(0);
        std::mem::replace(&mut self.lock().mode, Mode::Shared) != Mode::Shared
    }
}

impl<S: Slots> State<S> {
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn is_cut_off(&self) -> bool {
        self.mode.is_cut_off()
    }

    pub(super) fn announcements(&self) -> u64 {
        self.announcements
    }

    /// Calls whose turn it is here, unless the store is left alone.
    pub(super) fn call_to_offer(&mut self) -> Option<(Waiter<S>, Place, Heir)> {
        if self.mode.is_cut_off() {
            return None;
        }
        let rank = order::strict(self.room.waiting())?;
        let own = self.room.waiting().nth(rank)?;
        let waiter = self.room.call()?;
        let place = self.ledger.place(waiter.serial)?;
        self.ledger.set(waiter.serial, Standing::Asked);
        let heir = Heir { serial: waiter.serial, own };
        Some((waiter, place, heir))
    }

    /// Whether one more may be in flight without asking the store.
    pub(super) fn has_own_slot(&self, cap: NonZeroUsize) -> bool {
        self.mode.allowance(&self.lease, cap, Instant::now()).is_some_and(|allowance| self.ledger.held() < allowance)
    }

    fn call_alone(&mut self, cap: NonZeroUsize) -> Option<Waiter<S>> {
        if !self.has_own_slot(cap) {
            return None;
        }
        let waiter = self.room.call()?;
        self.ledger.set(waiter.serial, Standing::Held);
        Some(waiter)
    }
}

impl<S: Slots> Waiter<S> {
    /// Tells a waiter that a slot is its own by now.
    ///
    /// # Errors
    /// The slot, where the waiter has gone.
    pub(super) fn grant(self) -> Result<(), Slot<S>> {
        let slot = Slot::new(self.serial, self.desk);
        match self.call.send(Call::Slot(slot)) {
            Err(Call::Slot(slot)) => Err(slot),
            Ok(()) | Err(Call::Closing) => Ok(()),
        }
    }
}
