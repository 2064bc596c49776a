//! Tickets and grants: how replicas learn whose turn it is, wherever the request is held.
//!
//! A request that is held has a [`Ticket`] in the [`Line`] of its pool and tier. Whoever has a slot to hand over takes the
//! [`next`](Tickets::next) ticket of a line and sends a [`Grant`] to the replica that holds the request. There are two
//! implementations behind one test suite: [`memory`], for replicas in one process, and [`rabbitmq`].
//!
//! Nothing here counts slots or knows who still waits: a ticket may be stale, and only the slots' own store can tell.

#[cfg(test)]
mod conformance;
pub mod memory;
pub mod rabbitmq;
mod wire;

use std::fmt;
use std::time::Duration;

use tokio::sync::watch;

/// One running process, by the random bits that it chose when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaId(pub u64);

impl ReplicaId {
    /// For a process that starts.
    ///
    /// # Errors
    /// When the system has no randomness to give.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes)?;
        Ok(Self(u64::from_be_bytes(bytes)))
    }
}

impl fmt::Display for ReplicaId {
    /// Sixteen hex digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Where tickets of one kind lie: one pool's waiting requests of one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Line {
    /// The pool's place in the configuration.
    pub pool: usize,
    /// The tier's rank; 0 is the highest.
    pub rank: usize,
}

/// One try of one held request to be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// Who holds the request.
    pub replica: ReplicaId,
    /// The request, within its replica.
    pub serial: u64,
    /// 1 for the first; only the latest counts.
    pub attempt: u32,
}

/// A slot on its way to a request that waits elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The pool's place in the configuration of whoever reads this.
    pub pool: usize,
    /// The request, within the replica that the grant is sent to.
    pub serial: u64,
    /// That of the ticket which is answered.
    pub attempt: u32,
    /// Who handed over.
    pub from: ReplicaId,
}

/// Numbers the times of good service. Whatever was published in an earlier one may be lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(u64);

impl Epoch {
    fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Whether tickets can be published, and since when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Standing {
    /// Whether anything is asked at all.
    pub up: bool,
    /// Grows each time that `up` becomes true.
    pub epoch: Epoch,
}

/// What became of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It lies in the queue of the replica, which may yet die before it reads it.
    Queued,
    /// The replica has no queue: it is dead or cut off at the moment. Nothing was sent.
    Unroutable,
}

/// Why a call came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The store counts as down, and was not asked.
    #[error("tickets are down")]
    Down,
    /// Nothing came in time. Whether it was carried out is unknown.
    #[error("no answer about a ticket within {0:?}")]
    Timeout(Duration),
    /// The connection ended first. Whether it was carried out is unknown.
    #[error("connection lost before the answer about a ticket")]
    Lost,
    /// It was not carried out, by a decision of the store: an operator's policy, say.
    #[error("the ticket was refused")]
    Refused,
}

/// A ticket that was taken out of its line. Dropped without a word it goes back to its place.
#[must_use = "a ticket goes back to its line as soon as it is dropped"]
pub trait Taken: Send + Sync + 'static {
    /// What it says.
    fn ticket(&self) -> Ticket;

    /// Its request was granted a slot: it is gone for good.
    ///
    /// Nothing waits for this. If the connection is lost at this very moment the ticket comes back, and is stale then.
    fn ack(self);

    /// Its request does not wait any more: it is gone for good, and counted.
    fn stale(self);
}

/// The lines of all pools and the ways to all replicas, as one replica sees them.
///
/// 1. *Confirmed is there*: once [`Tickets::publish`] gives an epoch, [`Tickets::next`] of any replica finds the ticket, as
///    long as that epoch lasts, it has not expired, and no foreign hand removes it.
/// 2. *First in, first out* within a line, in the order in which tickets arrived; a ticket that goes back takes its old
///    place.
/// 3. *One taker*: a ticket is in one pair of hands at a time. It leaves its line by [`Taken::ack`], [`Taken::stale`], its
///    expiry or the loss of the store; after the loss of a connection it may be seen again.
/// 4. *Nothing stays taken*: what was taken and not settled is back in its line when its handle is dropped, when the call
///    that took it is dropped before its end, or when the taker's connection ends.
/// 5. *Bounded*: each call ends within the timeout of the configuration, at once while the store is down, and the first
///    one that is not answered takes the store down. Waiting for one's turn to be sent is not counted: whoever is before
///    is bounded too.
/// 6. *Cancel*: a call that is dropped is carried out or not, as a whole, and leaves nothing behind but what it says.
/// 7. *An error means unknown*, but for [`TicketError::Down`] and [`TicketError::Refused`]: the ticket may lie in its line.
///    To publish the next attempt is always right; the earlier one is stale.
/// 8. *A new epoch is an order to publish again*: the grants and tickets of earlier ones may be lost.
pub trait Tickets: Send + Sync + 'static {
    /// A ticket in hand.
    type Taken: Taken;

    /// Puts a ticket at the end of its line, and waits until it is there. It is removed after `expires`, whoever waits:
    /// that only clears litter, and should exceed what the request may wait.
    ///
    /// Gives the epoch in which it was confirmed.
    fn publish(
        &self,
        line: Line,
        ticket: Ticket,
        expires: Duration,
    ) -> impl Future<Output = Result<Epoch, TicketError>> + Send;

    /// Takes the first ticket of a line; nothing where the line is empty.
    fn next(&self, line: Line) -> impl Future<Output = Result<Option<Self::Taken>, TicketError>> + Send;

    /// Sends a grant to a replica, and waits until it lies in its queue. Unread it is removed after `expires`.
    fn grant(
        &self,
        to: ReplicaId,
        grant: Grant,
        expires: Duration,
    ) -> impl Future<Output = Result<Sent, TicketError>> + Send;

    /// Whether it is up, now and from now on.
    fn standing(&self) -> watch::Receiver<Standing>;

    /// Takes stale tickets off the head of a line until there is none, or one whose request `waits`, which goes back to its
    /// place. Gives how many were removed.
    fn drain<W, F>(&self, line: Line, mut waits: W) -> impl Future<Output = Result<usize, TicketError>> + Send
    where
        W: FnMut(Ticket) -> F + Send,
        F: Future<Output = bool> + Send,
    {
        async move {
            let mut removed = 0;
            while let Some(taken) = self.next(line).await? {
                if waits(taken.ticket()).await {
                    break;
                }
                taken.stale();
                removed += 1;
            }
            Ok(removed)
        }
    }
}
