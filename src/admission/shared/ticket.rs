//! A place in the waiting room of a shared pool.

use std::fmt;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::desk::Desk;
use super::ledger::Standing;
use super::pool::Call;
use super::slot::Slot;
use super::slots::Slots;
use crate::admission::Turn;
use crate::admission::room::Place;

/// A place in the waiting room, given up by drop.
#[must_use = "a place is given up as soon as its ticket is dropped"]
pub struct Ticket<S: Slots> {
    serial: u64,
    desk: Arc<Desk<S>>,
    place: Place,
    /// A slot that was sent and not received is dropped with the receiver, and so passes on.
    called: oneshot::Receiver<Call<S>>,
}

impl<S: Slots> Ticket<S> {
    pub(super) fn new(serial: u64, desk: Arc<Desk<S>>, place: Place, called: oneshot::Receiver<Call<S>>) -> Self {
        Self { serial, desk, place, called }
    }

    /// Waits for the turn of this ticket, until an instant at the latest. Dropping the future gives the place up.
    pub async fn turn(mut self, until: Instant) -> Turn<Slot<S>> {
        match timeout_at(until, &mut self.called).await {
            Ok(Ok(Call::Slot(slot))) => Turn::Slot(slot),
            // A waiter that was dropped with its runtime is closed, too.
            Ok(Ok(Call::Closing) | Err(_)) => Turn::Closing,
            Err(_) => Turn::Expired,
        }
    }
}

impl<S: Slots> Drop for Ticket<S> {
    fn drop(&mut self) {
        // First: whoever has taken it out of the room and puts it back looks at this.
        self.called.close();
        let (waiter, alone) = {
            let mut state = self.desk.pool().lock();
            // `None` where it was called already: then the receiver has the slot, and drops it after this.
            let Some(waiter) = state.room.leave(self.place) else { return };
            let alone = state.is_cut_off();
            if alone {
                state.ledger.close(self.serial);
            } else {
                state.ledger.set(self.serial, Standing::Asked);
            }
            (waiter, alone)
        };
        drop(waiter);
        if !alone {
            self.desk.clone().forget_soon(self.serial);
        }
    }
}

impl<S: Slots> fmt::Debug for Ticket<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&self.serial).finish()
    }
}
