//! Slots of one pool, kept in this process: the lock around the room and the count.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::room::{Place, Room};
use super::{Entry, PoolStats, Turn};

/// One protected upstream: its cap, and its waiting room.
#[derive(Debug)]
pub struct Pool {
    max_in_flight: NonZeroUsize,
    state: Mutex<State>,
}

/// While `in_flight < max_in_flight` the room is empty: whoever gives a slot back passes it on within the same lock.
#[derive(Debug)]
struct State {
    in_flight: usize,
    room: Room<oneshot::Sender<Call>>,
    closed: bool,
}

/// What a waiter is told, once.
#[derive(Debug)]
enum Call {
    Slot(Slot),
    Closing,
}

impl Pool {
    /// A pool with `max_in_flight` slots, and a queue of each of `lengths`, highest tier first.
    pub fn new(max_in_flight: NonZeroUsize, lengths: impl IntoIterator<Item = usize>) -> Arc<Self> {
        let state = State { in_flight: 0, room: Room::new(lengths), closed: false };
        Arc::new(Self { max_in_flight, state: Mutex::new(state) })
    }

    /// Takes a slot, or else a place in the queue of the tier of this rank.
    pub fn enter(self: &Arc<Self>, rank: usize) -> Entry<Slot, Ticket> {
        let mut state = self.lock();
        if state.closed {
            return Entry::Closing;
        }
        if state.in_flight < self.max_in_flight.get() {
            state.in_flight += 1;
            return Entry::Slot(Slot::new(self.clone()));
        }
        let (call, called) = oneshot::channel();
        match state.room.join(rank, call) {
            Ok(place) => Entry::Held(Ticket { pool: self.clone(), place, called }),
            Err(_) => Entry::Full,
        }
    }

    /// Takes no new requests, and tells everyone in the room so. Slots in use stay until they are dropped.
    pub fn close(&self) {
        let waiters = {
            let mut state = self.lock();
            state.closed = true;
            state.room.close()
        };
        for waiter in waiters {
            // An error only says that the waiter has gone.
            let _ = waiter.send(Call::Closing);
        }
    }

    /// How the pool stands now.
    pub fn stats(&self) -> PoolStats {
        let state = self.lock();
        PoolStats {
            max_in_flight: self.max_in_flight.get(),
            in_flight: state.in_flight,
            waiting: state.room.waiting().collect(),
        }
    }

    /// Passes a slot to whose turn it is, or frees it where nobody waits.
    fn release(self: Arc<Self>) {
        let mut slot = Slot::new(self);
        loop {
            let waiter = {
                let Some(pool) = &slot.pool else { return };
                let mut state = pool.lock();
                let Some(waiter) = state.room.call() else {
                    state.in_flight -= 1;
                    drop(state);
                    slot.pool = None;
                    return;
                };
                waiter
            };
            match waiter.send(Call::Slot(slot)) {
                // The waiter went away between being called and being told: the next one is called.
                Err(Call::Slot(returned)) => slot = returned,
                Ok(()) | Err(Call::Closing) => return,
            }
        }
    }

    /// The state is whole at every instruction that can panic, so a poisoned lock still guards a sound one.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to be in flight, given back by drop.
#[must_use = "a slot is given back as soon as it is dropped"]
pub struct Slot {
    /// `None` once given back.
    pool: Option<Arc<Pool>>,
}

impl Slot {
    fn new(pool: Arc<Pool>) -> Self {
        Self { pool: Some(pool) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.release();
        }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Slot")
    }
}

/// A place in the waiting room, given up by drop.
#[must_use = "a place is given up as soon as its ticket is dropped"]
pub struct Ticket {
    pool: Arc<Pool>,
    place: Place,
    /// A slot that was sent and not received is dropped with the receiver, and so passes on.
    called: oneshot::Receiver<Call>,
}

impl Ticket {
    /// Waits for the turn of this ticket, until an instant at the latest. Dropping the future gives the place up.
    pub async fn turn(mut self, until: Instant) -> Turn<Slot> {
        match timeout_at(until, &mut self.called).await {
            Ok(Ok(Call::Slot(slot))) => Turn::Slot(slot),
            // A room that was dropped with its waiters in it is closed, too.
            Ok(Ok(Call::Closing) | Err(_)) => Turn::Closing,
            Err(_) => Turn::Expired,
        }
    }

    /// Waits as [`Ticket::turn`] does, for at most this long.
    pub async fn turn_within(self, wait: Duration) -> Turn<Slot> {
        self.turn(Instant::now() + wait).await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // `None` where it was called already: then the receiver has the slot, and drops it after this.
        let sender = self.pool.lock().room.leave(self.place);
        drop(sender);
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&self.place).finish()
    }
}

#[cfg(test)]
mod tests;
