//! How long a replica may count on its slots, and how many it may use while it is cut off from the store. Pure.
//!
//! | the store answers | the lease, by our own clock | slots |
//! |---|---|---|
//! | yes | | as the store says |
//! | no | stands | as many as the store knows us to hold, passed on among our own, and our part of those that were free |
//! | no | has ended | at most `floor(cap / replicas last seen)` |
//!
//! Without the part of what was free, an idle replica would let nobody in until its lease ends, though nothing is in use. It is
//! what each replica may take if none can ask: as many as were free at the last heartbeat, divided by the replicas. If the
//! store is away for all, the cap holds but for what was taken since that heartbeat; if it is away for one alone, the others
//! may use the same slots, so the cap can be exceeded by this part, which is never more than the share.
//!
//! The others reclaim what we hold when the lease has ended by the store's clock. We judge it by our own, from when the
//! heartbeat that renewed it was *sent*, and a margin earlier, so we let go before they take over.

use std::num::NonZeroUsize;
use std::time::Duration;

use tokio::time::Instant;

/// What part of a lease the own judgement of its end is early.
const MARGIN: u32 = 10;

/// The lease of this replica, as it judges it itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// `None` before the first heartbeat that was answered.
    ends: Option<Instant>,
    /// How many replicas had one at the last heartbeat, this one included.
    replicas: NonZeroUsize,
}

impl Lease {
    /// No lease yet. A replica that has never reached the store knows of no other.
    pub const NONE: Self = Self { ends: None, replicas: NonZeroUsize::MIN };

    /// After a heartbeat that was sent at this instant and answered later.
    pub fn renewed(sent: Instant, lease: Duration, replicas: usize) -> Self {
        let ends = sent.checked_add(lease.saturating_sub(lease / MARGIN));
        Self { ends, replicas: NonZeroUsize::new(replicas).unwrap_or(NonZeroUsize::MIN) }
    }

    /// Whether what the store knew us to hold is still ours.
    pub fn stands(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| now < ends)
    }

    /// How many replicas there were when we last knew.
    pub fn replicas(&self) -> usize {
        self.replicas.get()
    }
}

/// How many slots a replica may use from when it is cut off: the `held` that the store knows of, and its part of those that
/// were free. `others` are the slots of other replicas at the last heartbeat.
pub fn budget(cap: NonZeroUsize, held: usize, others: usize, lease: &Lease) -> usize {
    held + cap.get().saturating_sub(others).saturating_sub(held) / lease.replicas
}

/// How the store and this replica stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The store is asked.
    Shared,
    /// The store did not answer the last heartbeat.
    Alone {
        /// The slots that are ours as long as the lease stands: see [`budget`].
        budget: usize,
    },
    /// It is being asked again, and told what we hold: what we hold must not change meanwhile.
    Returning {
        /// As in [`Mode::Alone`], should it not answer.
        budget: usize,
    },
}

impl Mode {
    /// How many slots may be in use here without asking the store; `None` where the store decides.
    pub fn allowance(self, lease: &Lease, cap: NonZeroUsize, now: Instant) -> Option<usize> {
        match self {
            Mode::Shared => None,
            Mode::Alone { budget } if lease.stands(now) => Some(budget),
            Mode::Alone { .. } => Some(cap.get() / lease.replicas),
            Mode::Returning { .. } => Some(0),
        }
    }

    /// Whether the store is left alone.
    pub fn is_cut_off(self) -> bool {
        !matches!(self, Mode::Shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    fn cap(cap: usize) -> NonZeroUsize {
        NonZeroUsize::new(cap).unwrap()
    }

    #[test]
    fn a_lease_ends_a_margin_before_the_store_ends_it_counted_from_sending() {
        let sent = Instant::now();
        let lease = Lease::renewed(sent, LEASE, 3);
        assert!(lease.stands(sent + Duration::from_millis(8_999)));
        assert!(!lease.stands(sent + Duration::from_secs(9)));
        assert!(!Lease::NONE.stands(sent));
    }

    #[test]
    fn a_replica_that_is_cut_off_keeps_what_it_has_until_its_lease_ends_and_then_its_share() {
        let sent = Instant::now();
        let lease = Lease::renewed(sent, LEASE, 3);
        let alone = Mode::Alone { budget: 7 };
        assert_eq!(alone.allowance(&lease, cap(13), sent), Some(7));
        assert_eq!(alone.allowance(&lease, cap(13), sent + LEASE), Some(4));
        assert_eq!(alone.allowance(&lease, cap(2), sent + LEASE), Some(0));
        assert_eq!(Mode::Shared.allowance(&lease, cap(13), sent), None);
        assert_eq!(Mode::Returning { budget: 7 }.allowance(&lease, cap(13), sent), Some(0));
    }

    #[test]
    fn the_shares_of_all_replicas_sum_to_no_more_than_the_cap() {
        let now = Instant::now();
        for (slots, replicas) in (1..40).flat_map(|slots| (1..12).map(move |replicas| (slots, replicas))) {
            let lease = Lease::renewed(now, LEASE, replicas);
            let share = Mode::Alone { budget: 99 }.allowance(&lease, cap(slots), now + LEASE).unwrap();
            assert!(share * replicas <= slots, "{replicas} times {share} of {slots}");
        }
    }

    #[test]
    fn what_was_free_is_divided_so_that_all_replicas_together_keep_the_cap() {
        let now = Instant::now();
        let of = |replicas| Lease::renewed(now, LEASE, replicas);
        assert_eq!(budget(cap(50), 0, 0, &of(1)), 50, "one that is alone goes on as before");
        assert_eq!(budget(cap(50), 0, 0, &of(2)), 25);
        assert_eq!(budget(cap(5), 4, 1, &of(2)), 4, "nothing was free");
        assert_eq!(budget(cap(5), 4, 3, &of(2)), 4, "more than the cap were in use");
        for (a, b, c) in (0..8).flat_map(|a| (0..8).flat_map(move |b| (0..8).map(move |c| (a, b, c)))) {
            let all: usize = [a, b, c].iter().map(|held| budget(cap(12), *held, a + b + c - held, &of(3))).sum();
            assert!(all <= 12.max(a + b + c), "{a}, {b} and {c} held, {all} allowed");
        }
    }

    #[test]
    fn a_replica_that_never_reached_the_store_counts_itself_alone() {
        let mode = Mode::Alone { budget: 0 };
        assert_eq!(mode.allowance(&Lease::NONE, cap(12), Instant::now()), Some(12));
    }
}
