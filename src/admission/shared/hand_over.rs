//! A slot on its way to the next request, wherever that is held.
//!
//! ```text
//! a slot that is kept ──► the lines that have waiters, highest tier first
//!    a ticket of our own ──► pass ──► it runs
//!    another's ─────────────► transfer ──► grant ──► the ticket is gone     (at its replica: claim ──► it runs)
//!    no ticket at all ──────► our own oldest waiter, whose ticket is lost or not there yet
//!    nobody here either ────► free, unless someone looked for a slot meanwhile: then again
//! ```
//!
//! Whoever drops the future of a hand-over loses nothing for long: the ticket in hand goes back to its line, and the slot has
//! a serial that is alive nowhere, so the next heartbeat drops it.

use std::sync::Arc;
use std::time::Duration;

use super::desk::Desk;
use super::ending::Ending;
use super::pool::{Offered, Pool};
use super::slots::{self, Arrived, HandOver, Otherwise, Released, Tally};
use crate::admission::tickets::{Grant, Line, ReplicaId, Sent, Taken, Ticket, TicketError, Tickets};

/// How long a grant may lie unread. The store of slots counts as long for it.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// Where slots and tickets meet.
pub(super) struct Exchange<S: HandOver, T: Tickets> {
    pub(super) desk: Arc<Desk<S>>,
    pub(super) tickets: T,
    pub(super) replica: ReplicaId,
    /// The place of the pool in the configuration.
    pub(super) pool: usize,
}

/// How a hand-over ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HandedOver {
    /// A request has the slot, or is about to.
    Served,
    /// Nobody was found, so it is free.
    Freed,
    /// Whether it is still there is not known: the next heartbeat tells.
    Unknown,
}

/// What came of one look through the lines.
enum Looked<S: slots::Slots> {
    Over(HandedOver),
    /// Something has changed meanwhile.
    Again(Ending<S>, Tally),
}

impl<S: HandOver, T: Tickets> Exchange<S, T> {
    pub(super) fn slots_of(&self) -> &Arc<Pool<S>> {
        self.desk.pool()
    }

    pub(super) fn line(&self, rank: usize) -> Line {
        Line { pool: self.pool, rank }
    }

    /// Hands over a slot that is kept under this serial.
    pub(super) async fn hand_over(&self, mut held: Ending<S>, mut tally: Tally) -> HandedOver {
        loop {
            match self.look(held, &tally).await {
                Looked::Again(still, now) => (held, tally) = (still, now),
                Looked::Over(how) => {
                    // The store may have been lost since.
                    self.slots_of().pump();
                    return how;
                }
            }
        }
    }

    async fn look(&self, held: Ending<S>, tally: &Tally) -> Looked<S> {
        let tiers = self.slots_of().lengths.len();
        // Another replica may know of more tiers.
        for rank in tally.waiting.iter().map(|(rank, _)| *rank).filter(|rank| *rank < tiers) {
            loop {
                let taken = match self.tickets.next(self.line(rank)).await {
                    Ok(Some(taken)) => taken,
                    Ok(None) => break,
                    Err(_) => return self.without_tickets(held).await,
                };
                let ticket = taken.ticket();
                if ticket.replica != self.replica {
                    return self.transfer(held, taken).await;
                }
                self.slots_of().ticket_reached(ticket.serial, ticket.attempt);
                if let Some(offered) = self.slots_of().offer_to(ticket.serial) {
                    return self.pass(held, offered, Some(taken), tally.epoch).await;
                }
                // On offer to another slot; should that come to nothing, it needs a new ticket. Or gone.
                self.slots_of().ticket_lost(ticket.serial);
                taken.stale();
            }
        }
        match self.slots_of().offer() {
            Some(offered) => self.pass(held, offered, None, tally.epoch).await,
            None => self.free(held, tally.epoch).await,
        }
    }

    /// To a waiter of our own.
    async fn pass(&self, held: Ending<S>, offered: Offered<S>, taken: Option<T::Taken>, epoch: u64) -> Looked<S> {
        let to = offered.heir.serial;
        match self.desk.slots().pass(held.serial, to).await {
            Ok(Released::Passed) => {
                if let Some(taken) = taken {
                    taken.ack();
                }
                held.end(true);
                if let Some(waiter) = offered.granted() {
                    self.slots_of().metrics.own.inc();
                    self.desk.grant(waiter);
                }
                Looked::Over(HandedOver::Served)
            }
            // The store does not know this waiter. It is told, and then there is a ticket again.
            Ok(Released::Kept(tally)) => {
                drop(offered);
                self.slots_of().ticket_lost(to);
                self.slots_of().beat_wanted.notify_one();
                match taken {
                    Some(taken) => {
                        taken.stale();
                        Looked::Again(held, tally)
                    }
                    None => self.free(held, epoch).await,
                }
            }
            // More than the cap were in use. The ticket goes back to its line.
            Ok(Released::Freed) => {
                drop((offered, taken));
                held.end(true);
                Looked::Over(HandedOver::Freed)
            }
            // Where it was passed after all, the heartbeat says so.
            Ok(Released::Announced | Released::Gone) | Err(_) => {
                drop((offered, taken));
                held.end(false);
                Looked::Over(HandedOver::Unknown)
            }
        }
    }

    /// To a waiter of another replica.
    async fn transfer(&self, held: Ending<S>, taken: T::Taken) -> Looked<S> {
        let Ticket { replica, serial, attempt } = taken.ticket();
        let name = replica.to_string();
        let to = slots::Grant { replica: &name, serial, attempt: attempt.into() };
        match self.desk.slots().transfer(held.serial, &to).await {
            Ok(Released::Passed) => {}
            // That waiter has gone, or has this very grant.
            Ok(Released::Kept(tally)) => {
                taken.stale();
                return Looked::Again(held, tally);
            }
            Ok(Released::Freed) => {
                drop(taken);
                held.end(true);
                return Looked::Over(HandedOver::Freed);
            }
            // The slot has gone: the ticket is for another one.
            Ok(Released::Announced | Released::Gone) | Err(_) => {
                drop(taken);
                held.end(false);
                return Looked::Over(HandedOver::Unknown);
            }
        }
        let grant = Grant { pool: self.pool, serial, attempt, from: self.replica };
        match self.tickets.grant(replica, grant, ON_ITS_WAY).await {
            Ok(Sent::Queued) => {
                taken.ack();
                held.end(true);
                Looked::Over(HandedOver::Served)
            }
            // It is dead, or publishes again when it is back.
            Ok(Sent::Unroutable) => {
                taken.stale();
                match self.recall(held, &to).await {
                    Ok((held, tally)) => Looked::Again(held, tally),
                    Err(over) => over,
                }
            }
            Err(TicketError::Down | TicketError::Refused) => {
                drop(taken);
                match self.recall(held, &to).await {
                    Ok((held, _)) => self.without_tickets(held).await,
                    Err(over) => over,
                }
            }
            // It may arrive; if not, it expires, and its waiter publishes again.
            Err(TicketError::Timeout(_) | TicketError::Lost) => {
                drop(taken);
                held.end(true);
                Looked::Over(HandedOver::Unknown)
            }
        }
    }

    /// Takes back a slot that was sent nowhere.
    async fn recall(&self, held: Ending<S>, to: &slots::Grant<'_>) -> Result<(Ending<S>, Tally), Looked<S>> {
        if let Ok(Released::Kept(tally)) = self.desk.slots().recall(held.serial, to).await {
            return Ok((held, tally));
        }
        held.end(false);
        Err(Looked::Over(HandedOver::Unknown))
    }

    /// To nobody.
    async fn free(&self, held: Ending<S>, epoch: u64) -> Looked<S> {
        // Announced, as whoever waits elsewhere may be cut off from the tickets.
        match self.desk.slots().free(held.serial, epoch, Otherwise::Announce).await {
            Ok(Released::Kept(tally)) => Looked::Again(held, tally),
            Ok(Released::Freed | Released::Announced) => {
                held.end(true);
                Looked::Over(HandedOver::Freed)
            }
            Ok(Released::Passed | Released::Gone) | Err(_) => {
                held.end(false);
                Looked::Over(HandedOver::Unknown)
            }
        }
    }

    /// As where there are none: to our own next waiter if the store agrees, else free and announced.
    async fn without_tickets(&self, held: Ending<S>) -> Looked<S> {
        let offered = self.slots_of().offer();
        self.desk.release(held, offered, Otherwise::Announce).await;
        Looked::Over(HandedOver::Unknown)
    }

    /// A grant for one of ours has arrived.
    pub(super) async fn claim(&self, grant: Grant) {
        if grant.pool != self.pool {
            return;
        }
        self.slots_of().ticket_reached(grant.serial, grant.attempt);
        let offered = self.slots_of().offer_to(grant.serial);
        if offered.is_none() {
            // On offer to another slot; should that come to nothing, it needs a new ticket. Or gone.
            self.slots_of().ticket_lost(grant.serial);
        }
        let spare = Ending::open(self.slots_of());
        let (serial, attempt) = (grant.serial, grant.attempt.into());
        let arrived = Arrived { serial, attempt, waits: offered.is_some(), spare: spare.serial };
        match self.desk.slots().claim(arrived).await {
            Ok(Released::Passed) => {
                spare.end(true);
                if let Some(waiter) = offered.and_then(Offered::granted) {
                    self.slots_of().metrics.other.inc();
                    self.desk.grant(waiter);
                }
            }
            Ok(Released::Kept(tally)) => {
                if offered.is_some() {
                    // The store does not know this waiter.
                    self.slots_of().beat_wanted.notify_one();
                }
                drop(offered);
                self.hand_over(spare, tally).await;
            }
            // Too late, or more than the cap were in use: with the grant the ticket is gone.
            Ok(Released::Freed | Released::Announced | Released::Gone) => {
                spare.end(true);
                self.slots_of().ticket_lost(serial);
                drop(offered);
            }
            // Where it was claimed after all, the heartbeat says so; where not, it says that the grant expired.
            Err(_) => {
                drop(offered);
                spare.end(false);
            }
        }
    }
}
