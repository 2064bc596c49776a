//! What is explored: the world (cap, requests, bounds), the faults that may strike it, and the rules of the protocol,
//! each of which can be broken on purpose.

/// Tiers.
pub const RANKS: usize = 2;

/// The order of service: the rank that is next.
pub type Order = fn([usize; RANKS]) -> Option<usize>;

/// What is the same in all states of one exploration.
#[derive(Debug, Clone)]
pub struct World {
    /// Slots of the pool.
    pub cap: usize,
    /// Whose turn it is, of so many waiters in each rank.
    pub order: Order,
    /// Replica and rank of each request; rank 0 is the highest tier. Requests arrive in any order.
    pub requests: Vec<(u8, u8)>,
    /// One more than the last replica that has a request.
    pub replicas: u8,
    /// Waiters at most, by rank.
    pub lengths: [usize; RANKS],
    /// What may still go wrong at the start.
    pub faults: Faults,
    /// Checks only that everything comes to rest, none of the other promises.
    pub only_rest: bool,
    /// The protocol.
    pub rules: Rules,
}

impl World {
    /// A world without faults and bounds, with all rules.
    pub fn new(cap: usize, requests: &[(u8, u8)], order: Order) -> Self {
        let replicas = requests.iter().map(|(replica, _)| replica + 1).max().unwrap();
        Self {
            cap,
            order,
            requests: requests.to_vec(),
            replicas,
            lengths: [usize::MAX; RANKS],
            faults: Faults::default(),
            only_rest: false,
            rules: Rules::default(),
        }
    }

    /// Each of these faults may strike once more.
    pub fn with(mut self, faults: &[Fault]) -> Self {
        for fault in faults {
            self.faults.0[*fault as usize] += 1;
        }
        self
    }

    /// Queues of these lengths, by rank.
    pub fn lengths(mut self, lengths: [usize; RANKS]) -> Self {
        self.lengths = lengths;
        self
    }

    /// Without some of the rules.
    pub fn broken(mut self, break_it: impl FnOnce(&mut Rules)) -> Self {
        break_it(&mut self.rules);
        self
    }

    /// Looks for waiting that never ends, and for nothing else.
    pub fn only_rest(mut self) -> Self {
        self.only_rest = true;
        self
    }

    pub(crate) fn count(&self) -> u8 {
        u8::try_from(self.requests.len()).unwrap()
    }

    pub(crate) fn replica(&self, request: u8) -> u8 {
        self.requests[usize::from(request)].0
    }

    pub(crate) fn rank(&self, request: u8) -> u8 {
        self.requests[usize::from(request)].1
    }

    /// What a replica keeps for itself once its lease has ended.
    pub fn share(&self) -> usize {
        self.cap / usize::from(self.replicas)
    }
}

/// What can go wrong, each a number of times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A client gives up while it waits.
    Cancel,
    /// A grant is lost on its way.
    LostGrant,
    /// A grant arrives after it expired.
    LateGrant,
    /// The broker loses a ticket: a purge, a drop policy.
    LostTicket,
    /// A publish is not confirmed, whether its ticket is in the queue or not.
    LostConfirm,
    /// A replica's connection to the broker is cut: what it had not acknowledged is delivered again, grants to it are
    /// lost, it publishes again.
    Disconnect,
    /// The broker restarts and forgets every ticket and grant.
    Restart,
    /// The reply of a call to Redis is lost, whether the call was done or not.
    LostReply,
    /// A heartbeat is carried out later than its list was made.
    SlowBeat,
    /// A replica is cut off from Redis for a while, perhaps beyond its lease.
    Cut,
    /// A replica dies.
    Death,
    /// Redis comes back empty.
    Flush,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 12] = [
        Self::Cancel,
        Self::LostGrant,
        Self::LateGrant,
        Self::LostTicket,
        Self::LostConfirm,
        Self::Disconnect,
        Self::Restart,
        Self::LostReply,
        Self::SlowBeat,
        Self::Cut,
        Self::Death,
        Self::Flush,
    ];
}

/// How many times each fault may still strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Faults([u8; 12]);

impl Faults {
    pub(crate) fn left(&self, fault: Fault) -> bool {
        self.0[fault as usize] > 0
    }

    pub(crate) fn spend(&mut self, fault: Fault) {
        self.0[fault as usize] -= 1;
    }

    /// Whether no fault but clients that gave up has struck since `start`.
    pub fn only_cancels_since(&self, start: &Self) -> bool {
        self.0[1..] == start.0[1..]
    }
}

/// What becomes of stale tickets when the last waiter has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drain {
    /// Nothing: the broker's message expiry clears them.
    Expiry,
    /// The queues are emptied, whatever is in them.
    Purge,
    /// Ticket by ticket; one whose waiter is registered goes back, and a slot is tried for.
    Checked,
}

/// The rules of the protocol.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "a switch for each rule that a test breaks")]
pub struct Rules {
    /// A second try that fails keeps hand-overs that looked before it from freeing their slot.
    pub epoch: bool,
    /// A waiter whose second try got a slot for somebody else tries again.
    pub tries_until_none: bool,
    /// A heartbeat takes a free slot as a hand-over while anyone waits.
    pub heartbeat_takes: bool,
    /// A request that arrives while others wait waits too.
    pub acquire_heeds_waiters: bool,
    /// A slot that is given back while someone waits is kept for a hand-over.
    pub release_hands_over: bool,
    /// While more is occupied than the cap allows, a slot that comes back is freed although others wait.
    pub excess_is_freed: bool,
    /// A grant on its way occupies its slot only until it expires.
    pub grants_expire: bool,
    /// A heartbeat drops nothing that is newer than its list.
    pub newer_ids_stay: bool,
    /// A slot's id is made when the slot is, and kept for as long as it is held by one replica.
    pub fresh_slot_ids: bool,
    /// Where slots are named after waiters, one that was granted to a request that has gone is not.
    pub the_gone_lend_no_serial: bool,
    /// A heartbeat keeps, but does not add, what is only being acquired.
    pub pending_is_not_added: bool,
    /// A heartbeat adds what is missing only when it is marked as one that registers.
    pub beats_add_only_to_register: bool,
    /// A replica is forgotten until it registers, however often it is told.
    pub forgotten_until_registered: bool,
    /// Another form of heartbeat, in two calls: Redis tells what it keeps of the replica, and the replica then settles what
    /// differs. It drops only what it knows to be over, and those that wait and were not counted ask again.
    pub beats_settle: bool,
    /// Redis refuses to make anything for a replica without a lease.
    pub no_lease_no_slot: bool,
    /// Heartbeats and second tries drop replicas whose lease ended, too.
    pub beats_prune: bool,
    /// A waiter that asks again is still waiting.
    pub acquire_again_is_waiting: bool,
    /// What is done about tickets whose requests have gone.
    pub drain: Drain,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            epoch: true,
            tries_until_none: true,
            heartbeat_takes: true,
            acquire_heeds_waiters: true,
            release_hands_over: true,
            excess_is_freed: true,
            grants_expire: true,
            newer_ids_stay: true,
            fresh_slot_ids: true,
            the_gone_lend_no_serial: true,
            pending_is_not_added: true,
            beats_add_only_to_register: true,
            forgotten_until_registered: true,
            beats_settle: false,
            no_lease_no_slot: true,
            beats_prune: true,
            acquire_again_is_waiting: true,
            drain: Drain::Expiry,
        }
    }
}
