//! What a replica does about tickets: publishes those of its waiters, hands slots over, takes grants in.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::desk::Desk;
use super::ending::Ending;
use super::hand_over::{Exchange, HandedOver};
use super::pool::Errand;
use super::slots::{HandOver, Retried};
use crate::admission::tickets::{Epoch, Grant, ReplicaId, Standing, Ticket, Tickets};

/// The pause before a try is made again that was not answered.
const AGAIN: Duration = Duration::from_millis(100);

/// One a process, on the runtime of its coordinator. What it spawns is bounded by the slots and the waiters there are.
pub struct Dispatcher<S: HandOver, T: Tickets> {
    exchange: Arc<Exchange<S, T>>,
    errands: mpsc::UnboundedReceiver<Errand<S>>,
    grants: mpsc::Receiver<Grant>,
    standing: watch::Receiver<Standing>,
    /// How long a ticket lies unread, whoever waits.
    expires: Duration,
}

impl<S: HandOver, T: Tickets> Dispatcher<S, T> {
    /// Dispatches for the pool of this desk, which is at this place of the configuration. Tickets are removed after `expires`,
    /// which should exceed what a request may wait.
    ///
    /// `None` where the pool has a dispatcher already.
    pub fn new(
        desk: Arc<Desk<S>>,
        tickets: T,
        grants: mpsc::Receiver<Grant>,
        replica: ReplicaId,
        pool: usize,
        expires: Duration,
    ) -> Option<Self> {
        let errands = desk.pool().take_errands()?;
        let standing = tickets.standing();
        let exchange = Arc::new(Exchange { desk, tickets, replica, pool });
        Some(Self { exchange, errands, grants, standing, expires })
    }

    /// Works until dropped, and what it has begun ends with it.
    pub async fn run(mut self) {
        let exchange = Arc::clone(&self.exchange);
        tokio::join!(self.dispatch(), looks(&exchange));
    }

    async fn dispatch(&mut self) {
        let mut tasks = JoinSet::new();
        let mut grants_end = false;
        self.stands(&mut tasks);
        loop {
            tokio::select! {
                changed = self.standing.changed() => match changed {
                    Ok(()) => self.stands(&mut tasks),
                    // Its sender is in the tickets, which are ours.
                    Err(_) => return,
                },
                Some(errand) = self.errands.recv() => self.run_errand(errand, &mut tasks),
                grant = self.grants.recv(), if !grants_end => match grant {
                    Some(grant) => {
                        let exchange = Arc::clone(&self.exchange);
                        tasks.spawn(async move { exchange.claim(grant).await });
                    }
                    None => grants_end = true,
                },
                // One that panicked has given back what it had.
                Some(_) = tasks.join_next() => {}
            }
        }
    }

    /// Tickets have come up, in an epoch in which nothing is published yet, or have gone down.
    fn stands(&mut self, tasks: &mut JoinSet<()>) {
        let standing = *self.standing.borrow_and_update();
        let pool = self.exchange.slots_of();
        pool.set_ordered(standing.up);
        if standing.up {
            self.publish_all(tasks);
        } else {
            // Each replica keeps its own room now.
            pool.maybe_announced();
        }
    }

    fn run_errand(&mut self, errand: Errand<S>, tasks: &mut JoinSet<()>) {
        match errand {
            Errand::HandOver(held, tally) => {
                let exchange = Arc::clone(&self.exchange);
                tasks.spawn(async move {
                    exchange.hand_over(held, tally).await;
                });
            }
            Errand::Publish(serial) => {
                // It may have been published with all others.
                if self.exchange.slots_of().lock().ledger.is_unpublished(serial) {
                    self.publish(serial, tasks);
                }
            }
            Errand::PublishAll => self.publish_all(tasks),
        }
    }

    fn publish_all(&mut self, tasks: &mut JoinSet<()>) {
        let epoch = self.epoch();
        let serials = self.exchange.slots_of().lock().ledger.unpublished(epoch);
        for serial in serials {
            self.publish(serial, tasks);
        }
    }

    /// The one in which tickets are published now; the one before all others while they cannot be.
    fn epoch(&self) -> Epoch {
        let standing = *self.standing.borrow();
        if standing.up { standing.epoch } else { Epoch::default() }
    }

    fn publish(&mut self, serial: u64, tasks: &mut JoinSet<()>) {
        let epoch = self.epoch();
        let Some((rank, attempt)) = self.exchange.slots_of().lock().ledger.attempt(serial, epoch) else { return };
        let (exchange, expires) = (Arc::clone(&self.exchange), self.expires);
        tasks.spawn(async move {
            let ticket = Ticket { replica: exchange.replica, serial, attempt };
            if exchange.tickets.publish(exchange.line(rank), ticket, expires).await.is_err() {
                // With the next epoch or heartbeat, under the next attempt: this one may be there all the same.
                exchange.slots_of().ticket_lost(serial);
            }
            try_until_served(&exchange, serial).await;
        });
    }
}

/// The second try of a waiter: a hand-over that found no ticket of it frees its slot, unless the waiter has tried in vain by
/// then. A try that gets a slot may serve another one, of a higher tier or earlier, who need not try any more; then there may
/// be a second slot that nobody looks at, so it tries again.
async fn try_until_served<S: HandOver, T: Tickets>(exchange: &Exchange<S, T>, serial: u64) {
    let pool = exchange.slots_of();
    while pool.lock().ledger.may_wait(serial) && !pool.is_cut_off() {
        let held = Ending::open(pool);
        match exchange.desk.slots().retry(held.serial, true).await {
            Ok(Retried::Taken(tally)) => match exchange.hand_over(held, tally).await {
                HandedOver::Served => {}
                HandedOver::Freed => return,
                HandedOver::Unknown => sleep(AGAIN).await,
            },
            Ok(Retried::NoneFree(_)) => return held.end(true),
            // Where it was not made, the epoch was not raised.
            Ok(Retried::Stranger) | Err(_) => {
                held.end(false);
                sleep(AGAIN).await;
            }
        }
    }
}

/// Slots that come back by the end of a lease or of a grant, or from a replica that has no tickets, wake nobody by themselves.
async fn looks<S: HandOver, T: Tickets>(exchange: &Exchange<S, T>) {
    let pool = exchange.slots_of();
    loop {
        pool.look_wanted.notified().await;
        while pool.is_ordered() && !pool.is_cut_off() {
            let held = Ending::open(pool);
            match exchange.desk.slots().retry(held.serial, false).await {
                Ok(Retried::Taken(tally)) => {
                    if exchange.hand_over(held, tally).await != HandedOver::Served {
                        break;
                    }
                }
                Ok(Retried::NoneFree(_)) => {
                    held.end(true);
                    break;
                }
                Ok(Retried::Stranger) | Err(_) => {
                    held.end(false);
                    break;
                }
            }
        }
    }
}
