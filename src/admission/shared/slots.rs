//! What a store of shared slots can do, in the words of the domain.

use crate::limit::{Charge, Take};

/// Who asks for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applicant {
    /// Of this replica's serials; used once.
    pub serial: u64,
    /// Of its tier.
    pub rank: usize,
    /// How many of its tier may wait, over all replicas.
    pub length: usize,
}

/// What came of asking for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// It has one.
    Granted,
    /// It waits, and is counted as waiting.
    Waiting,
    /// Its tier's queue has no place left.
    Full,
    /// This replica has no lease, so nothing was done: a heartbeat is needed first.
    Stranger,
}

/// Who is to have a slot that comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heir {
    /// The oldest waiter of this replica's highest tier.
    pub serial: u64,
    /// How many of its tier wait in this replica, itself included.
    pub own: usize,
}

/// What becomes of a slot that comes back, is wanted, and has no heir.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// It is freed, and replicas are told that it is.
    Announce,
    /// It stays with its serial, for someone to hand it over.
    Keep,
}

/// How many wait, over all replicas.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// How often a slot to hand over was looked for in vain.
    pub epoch: u64,
    /// Ranks that have waiters, and how many.
    pub waiting: Vec<(usize, usize)>,
}

/// What became of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// It is free: nobody waits, or more are in use than the cap allows.
    Freed,
    /// Its heir has it.
    Passed,
    /// It is free, and replicas that have waiters of the highest tier were told.
    Announced,
    /// It stays with its serial, to be handed over.
    Kept(Tally),
    /// The serial had none.
    Gone,
}

/// What came of a waiter's try to get a free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promoted {
    /// It has one.
    Granted,
    /// None is free.
    NoneFree,
    /// A higher tier waits, so it is not its turn.
    HigherWaits,
    /// The store does not know it as a waiter.
    Unknown,
}

/// What came of asking for a slot to hand over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Retried {
    /// There is one.
    Taken(Tally),
    /// None is free, or nobody waits.
    NoneFree(Tally),
    /// This replica has no lease, so nothing was done: a heartbeat is needed first.
    Stranger,
}

/// What a heartbeat tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Beat {
    /// Whether this replica had a lease until now. One without has lost its slots and places.
    pub known: bool,
    /// Slots in use, over all replicas.
    pub in_use: usize,
    /// Replicas that have a lease, this one included.
    pub replicas: usize,
    /// Who waits, over all replicas.
    pub tally: Tally,
    /// The serials of this replica that have a slot.
    pub slots: Vec<u64>,
    /// The serials of this replica that wait.
    pub waiters: Vec<u64>,
    /// Grants to waiters of this replica that did not arrive in time, by serial and attempt. Told until a heartbeat says that
    /// it was heard.
    pub lost_grants: Vec<(u64, u64)>,
}

/// What the store is to change about this replica's serials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Repair {
    /// These have gone.
    pub drop: Vec<u64>,
    /// These have a slot, whatever the cap.
    pub hold: Vec<u64>,
    /// These wait, with the rank of their tier.
    pub wait: Vec<(u64, usize)>,
}

impl Repair {
    /// Whether nothing is to be changed.
    pub fn is_empty(&self) -> bool {
        self.drop.is_empty() && self.hold.is_empty() && self.wait.is_empty()
    }
}

/// A store of the slots of one pool, as one replica asks it.
///
/// 1. *Atomic*: nothing happens in the middle of a call.
/// 2. *Idempotent*: serials are used once, so a call that is repeated changes nothing more and is answered as before, or
///    says that the serial is gone.
/// 3. *One clock*: the store's own decides when a lease ends.
/// 4. *Its own only*: no call takes a slot or a place from another replica whose lease stands.
/// 5. *Nothing overtakes*: while anyone waits, [`Slots::enter`] and [`Slots::acquire`] grant nothing.
/// 6. *Cancel*: dropping the future leaves the call either done whole or not done.
/// 7. *An error means unknown*: the call may have been carried out, or still be; the next heartbeat shows what came of it.
pub trait Slots: Send + Sync + 'static {
    /// What went wrong when the store did not answer.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Charges a request and, where nothing refused, asks for a slot: `None` where a charge refused, or where it stands and
    /// the question for a slot was not answered, as the two may be asked on different servers.
    fn enter(
        &self,
        charges: &[Charge<'_>],
        applicant: Applicant,
    ) -> impl Future<Output = Result<(Take, Option<Acquired>), Self::Error>> + Send;

    /// Asks for a slot, for a request that was charged already.
    fn acquire(&self, applicant: Applicant) -> impl Future<Output = Result<Acquired, Self::Error>> + Send;

    /// Gives a slot back: to the heir where it is its turn, else as `otherwise` says.
    fn release(
        &self,
        serial: u64,
        heir: Option<Heir>,
        otherwise: Otherwise,
    ) -> impl Future<Output = Result<Released, Self::Error>> + Send;

    /// Gives a waiter a free slot, if it is its tier's turn.
    fn promote(&self, serial: u64) -> impl Future<Output = Result<Promoted, Self::Error>> + Send;

    /// Takes slots and places from requests that have gone, and says how many wait now.
    fn forget(&self, serials: &[u64]) -> impl Future<Output = Result<usize, Self::Error>> + Send;

    /// Renews the lease. `heard` are lost grants that an earlier one told of.
    fn heartbeat(&self, heard: &[(u64, u64)]) -> impl Future<Output = Result<Beat, Self::Error>> + Send;

    /// Changes what the store knows about this replica. False where it has no lease, and nothing was changed.
    fn settle(&self, repair: &Repair) -> impl Future<Output = Result<bool, Self::Error>> + Send;

    /// Gives up everything, the lease included.
    fn bye(&self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// How slots pass between replicas by way of tickets and grants. The promises are those of [`Slots`].
pub trait HandOver: Slots {
    /// A slot to hand over under a new serial, though others wait. Where a try is in vain and `raise` is set, the epoch rises.
    fn retry(&self, serial: u64, raise: bool) -> impl Future<Output = Result<Retried, Self::Error>> + Send;

    /// Gives a slot to a waiter of this replica. `Kept` where it does not wait any more; `Freed` where more are in use than the
    /// cap allows, here and below.
    fn pass(&self, from: u64, to: u64) -> impl Future<Output = Result<Released, Self::Error>> + Send;

    /// Makes a slot a grant on its way to a waiter of any replica. `Kept` where that has gone.
    fn transfer(&self, from: u64, to: &Grant<'_>) -> impl Future<Output = Result<Released, Self::Error>> + Send;

    /// Takes a grant back that could not be sent: `Kept`. `Gone` where it was claimed after all, or came to its end.
    fn recall(&self, from: u64, to: &Grant<'_>) -> impl Future<Output = Result<Released, Self::Error>> + Send;

    /// Takes a grant that has arrived: `Passed`. `Kept`, under the spare serial, or `Freed` where its waiter has gone, `Gone`
    /// where it came too late.
    fn claim(&self, grant: Arrived) -> impl Future<Output = Result<Released, Self::Error>> + Send;

    /// Ends a hand-over that found nobody. `Kept` where the epoch is another one by now.
    fn free(
        &self,
        serial: u64,
        epoch: u64,
        otherwise: Otherwise,
    ) -> impl Future<Output = Result<Released, Self::Error>> + Send;
}

/// Whom a slot is on its way to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant<'a> {
    /// The replica's id: hexadecimal digits.
    pub replica: &'a str,
    /// The waiter's serial there.
    pub serial: u64,
    /// Which of its tickets.
    pub attempt: u64,
}

/// A grant at the replica that it was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// The waiter's.
    pub serial: u64,
    /// Which of its tickets.
    pub attempt: u64,
    /// Whether it waits here still. The slot of one that does not is never named after it, as that serial may have one already.
    pub waits: bool,
    /// A new serial, for the slot that nobody waits for here.
    pub spare: u64,
}
