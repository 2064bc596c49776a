//! Tickets in memory: several replicas of one process share a [`Broker`]. For tests and models of the protocol.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::{Epoch, Grant, Line, ReplicaId, Sent, Standing, Taken, Ticket, TicketError, Tickets};

/// What replicas share.
#[derive(Debug)]
pub struct Broker {
    state: Mutex<State>,
    standing: watch::Sender<Standing>,
}

#[derive(Debug, Default)]
struct State {
    /// By the order of arrival, so that what goes back finds its old place.
    lines: HashMap<Line, BTreeMap<u64, (Ticket, Instant)>>,
    arrivals: u64,
    replicas: HashMap<ReplicaId, mpsc::UnboundedSender<Grant>>,
}

impl Broker {
    /// A broker that is up and empty.
    pub fn new() -> Arc<Self> {
        let standing = Standing { up: true, epoch: Epoch::default().next() };
        Arc::new(Self { state: Mutex::default(), standing: watch::Sender::new(standing) })
    }

    /// Connects a replica, and gives the way by which its grants come. A replica that connects again takes over from its
    /// former self.
    pub fn connect(self: &Arc<Self>, replica: ReplicaId) -> (MemoryTickets, mpsc::UnboundedReceiver<Grant>) {
        let (sender, grants) = mpsc::unbounded_channel();
        self.lock().replicas.insert(replica, sender);
        (MemoryTickets { broker: Arc::clone(self) }, grants)
    }

    /// Refuses everything until [`Broker::start`].
    pub fn stop(&self) {
        self.standing.send_modify(|standing| standing.up = false);
    }

    /// Serves again, in a new epoch and without the tickets of the old one.
    pub fn start(&self) {
        self.lock().lines.clear();
        self.standing.send_modify(|standing| *standing = Standing { up: true, epoch: standing.epoch.next() });
    }

    /// How many tickets lie in a line.
    pub fn len(&self, line: Line) -> usize {
        let mut state = self.lock();
        state.expire(line);
        state.lines.get(&line).map_or(0, BTreeMap::len)
    }

    fn up(&self) -> Result<Epoch, TicketError> {
        let standing = *self.standing.borrow();
        if standing.up { Ok(standing.epoch) } else { Err(TicketError::Down) }
    }

    /// The state is whole at every instruction that can panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn expire(&mut self, line: Line) {
        let now = Instant::now();
        if let Some(tickets) = self.lines.get_mut(&line) {
            tickets.retain(|_, (_, expiry)| *expiry > now);
        }
    }
}

#[cfg(test)]
pub(crate) fn first_epoch() -> Epoch {
    Epoch::default().next()
}

/// A [`Broker`] as one replica uses it.
#[derive(Debug, Clone)]
pub struct MemoryTickets {
    broker: Arc<Broker>,
}

/// A ticket that was taken from a [`Broker`].
#[derive(Debug)]
#[must_use = "a ticket goes back to its line as soon as it is dropped"]
pub struct MemoryTaken {
    broker: Arc<Broker>,
    epoch: Epoch,
    line: Line,
    arrival: u64,
    ticket: Ticket,
    expiry: Instant,
    settled: bool,
}

impl Tickets for MemoryTickets {
    type Taken = MemoryTaken;

    async fn publish(&self, line: Line, ticket: Ticket, expires: Duration) -> Result<Epoch, TicketError> {
        let epoch = self.broker.up()?;
        let mut state = self.broker.lock();
        state.arrivals += 1;
        let arrival = state.arrivals;
        state.lines.entry(line).or_default().insert(arrival, (ticket, Instant::now() + expires));
        Ok(epoch)
    }

    async fn next(&self, line: Line) -> Result<Option<MemoryTaken>, TicketError> {
        let epoch = self.broker.up()?;
        let mut state = self.broker.lock();
        state.expire(line);
        let first = state.lines.get_mut(&line).and_then(BTreeMap::pop_first);
        Ok(first.map(|(arrival, (ticket, expiry))| {
            let broker = Arc::clone(&self.broker);
            MemoryTaken { broker, epoch, line, arrival, ticket, expiry, settled: false }
        }))
    }

    async fn grant(&self, to: ReplicaId, grant: Grant, _expires: Duration) -> Result<Sent, TicketError> {
        self.broker.up()?;
        let sent = self.broker.lock().replicas.get(&to).is_some_and(|replica| replica.send(grant).is_ok());
        Ok(if sent { Sent::Queued } else { Sent::Unroutable })
    }

    fn standing(&self) -> watch::Receiver<Standing> {
        self.broker.standing.subscribe()
    }
}

impl Taken for MemoryTaken {
    fn ticket(&self) -> Ticket {
        self.ticket
    }

    fn ack(mut self) {
        self.settled = true;
    }

    fn stale(mut self) {
        self.settled = true;
    }
}

impl Drop for MemoryTaken {
    fn drop(&mut self) {
        let same = self.broker.standing.borrow().epoch == self.epoch;
        if !self.settled && same {
            let mut state = self.broker.lock();
            state.lines.entry(self.line).or_default().insert(self.arrival, (self.ticket, self.expiry));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Bench, suite};
    use super::*;

    struct InMemory(Arc<Broker>);

    impl Bench for InMemory {
        type Tickets = MemoryTickets;

        async fn connect(&self, replica: ReplicaId) -> (MemoryTickets, mpsc::Receiver<Grant>) {
            let (tickets, mut grants) = self.0.connect(replica);
            let (sender, receiver) = mpsc::channel(64);
            tokio::spawn(async move {
                while let Some(grant) = grants.recv().await {
                    if sender.send(grant).await.is_err() {
                        break;
                    }
                }
            });
            (tickets, receiver)
        }

        async fn waiting(&self, line: Line) -> usize {
            self.0.len(line)
        }
    }

    #[tokio::test]
    async fn memory_keeps_all_promises() {
        suite(&InMemory(Broker::new())).await;
    }

    #[tokio::test]
    async fn a_broker_that_stops_refuses_and_comes_back_empty_in_a_new_epoch() {
        let broker = Broker::new();
        let (tickets, _grants) = broker.connect(ReplicaId(1));
        let line = Line { pool: 0, rank: 0 };
        let ticket = Ticket { replica: ReplicaId(1), serial: 1, attempt: 1 };
        let before = tickets.publish(line, ticket, Duration::from_secs(5)).await.unwrap();
        let taken = tickets.next(line).await.unwrap().unwrap();
        broker.stop();
        assert_eq!(tickets.publish(line, ticket, Duration::from_secs(5)).await, Err(TicketError::Down));
        broker.start();
        assert!(tickets.standing().borrow().epoch > before);
        drop(taken);
        assert_eq!(broker.len(line), 0, "what was taken before the loss does not come back after it");
    }
}
