//! What every store of shared slots must do, whatever it keeps them in.

use std::time::Duration;

use super::slots::{
    Acquired, Applicant, Arrived, Beat, Grant, HandOver, Heir, Otherwise, Promoted, Released, Repair, Retried, Slots,
    Tally,
};

/// A store whose clock the test holds.
pub(super) trait Bench: Sized {
    type Slots: HandOver;

    /// An empty one.
    fn new(cap: usize, lease: Duration) -> Self;

    /// How this replica sees it.
    async fn replica(&self, id: &str) -> Self::Slots;

    /// Lets the store's clock go on, and no other.
    async fn advance(&self, by: Duration);
}

pub(super) const LEASE: Duration = Duration::from_secs(10);
const LENGTH: usize = 3;

fn applicant(serial: u64, rank: usize) -> Applicant {
    Applicant { serial, rank, length: LENGTH }
}

/// A store with two replicas that have leases.
async fn two<B: Bench>(cap: usize) -> (B, B::Slots, B::Slots) {
    let bench = B::new(cap, LEASE);
    let (a, b) = (bench.replica("a").await, bench.replica("b").await);
    beat(&a).await;
    beat(&b).await;
    (bench, a, b)
}

async fn beat<S: HandOver>(slots: &S) -> Beat {
    let mut beat = slots.heartbeat(&[]).await.expect("the store answers");
    beat.slots.sort_unstable();
    beat.waiters.sort_unstable();
    beat
}

async fn acquire<S: HandOver>(slots: &S, serial: u64, rank: usize) -> Acquired {
    slots.acquire(applicant(serial, rank)).await.expect("the store answers")
}

async fn release<S: HandOver>(slots: &S, serial: u64, heir: Option<(u64, usize)>, rest: Otherwise) -> Released {
    let heir = heir.map(|(serial, own)| Heir { serial, own });
    slots.release(serial, heir, rest).await.expect("the store answers")
}

async fn claim<S: HandOver>(slots: &S, serial: u64, attempt: u64) -> Released {
    slots.claim(Arrived { serial, attempt, waits: true, spare: 90 }).await.expect("the store answers")
}

async fn promote<S: HandOver>(slots: &S, serial: u64) -> Promoted {
    slots.promote(serial).await.expect("the store answers")
}

pub(super) async fn slots_are_given_up_to_the_cap_and_then_places_up_to_the_length<B: Bench>() {
    let (_bench, a, b) = two::<B>(2).await;
    assert_eq!(acquire(&a, 1, 0).await, Acquired::Granted);
    assert_eq!(acquire(&b, 1, 1).await, Acquired::Granted);
    for serial in 2..5 {
        assert_eq!(acquire(&a, serial, 1).await, Acquired::Waiting);
    }
    assert_eq!(acquire(&b, 2, 1).await, Acquired::Full, "the bound is over all replicas");
    assert_eq!(acquire(&b, 3, 0).await, Acquired::Waiting, "and each tier has its own");
    let told = beat(&b).await;
    assert_eq!((told.in_use, told.replicas), (2, 2));
    assert_eq!(told.tally.waiting, [(0, 1), (1, 3)]);
    assert_eq!((told.slots, told.waiters), (vec![1], vec![3]));
}

pub(super) async fn what_is_asked_twice_is_answered_and_counted_once<B: Bench>() {
    let (_bench, a, b) = two::<B>(1).await;
    for _ in 0..2 {
        assert_eq!(acquire(&a, 1, 0).await, Acquired::Granted);
        for serial in 2..5 {
            assert_eq!(acquire(&a, serial, 0).await, Acquired::Waiting, "also in a queue that is full by now");
        }
    }
    assert_eq!(beat(&b).await.tally.waiting, [(0, 3)]);
    assert_eq!(release(&a, 1, Some((2, 3)), Otherwise::Announce).await, Released::Passed);
    assert_eq!(release(&a, 1, Some((3, 2)), Otherwise::Announce).await, Released::Gone, "nothing passes twice");
    assert_eq!(promote(&a, 2).await, Promoted::Granted);
    for _ in 0..2 {
        a.forget(&[2, 3]).await.expect("the store answers");
        assert_eq!(promote(&a, 4).await, Promoted::Granted);
    }
    let told = beat(&a).await;
    assert_eq!((told.slots, told.waiters, told.in_use), (vec![4], vec![], 1));
}

pub(super) async fn nothing_overtakes_a_waiter_of_another_replica<B: Bench>() {
    let (_bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    assert_eq!(acquire(&b, 1, 1).await, Acquired::Waiting);
    assert_eq!(release(&a, 1, None, Otherwise::Announce).await, Released::Announced);
    assert_eq!(acquire(&a, 2, 0).await, Acquired::Waiting, "though a slot is free");
    assert_eq!(promote(&b, 1).await, Promoted::HigherWaits, "by now");
    assert_eq!(promote(&a, 2).await, Promoted::Granted);
    assert_eq!(promote(&b, 1).await, Promoted::NoneFree);
}

pub(super) async fn a_slot_passes_to_the_heir_only_where_no_higher_tier_waits<B: Bench>() {
    let (_bench, a, b) = two::<B>(2).await;
    acquire(&a, 1, 0).await;
    acquire(&a, 2, 0).await;
    acquire(&a, 3, 1).await;
    acquire(&b, 1, 0).await;
    let tally = Tally { epoch: 0, waiting: vec![(0, 1), (1, 1)] };
    assert_eq!(release(&a, 1, Some((3, 1)), Otherwise::Keep).await, Released::Kept(tally));
    assert_eq!(beat(&a).await.slots, [1, 2], "kept to be handed over");
    assert_eq!(release(&a, 1, Some((3, 1)), Otherwise::Announce).await, Released::Announced);
    assert_eq!(promote(&b, 1).await, Promoted::Granted);
    assert_eq!(release(&a, 2, Some((3, 1)), Otherwise::Announce).await, Released::Passed);
    assert_eq!(release(&a, 3, None, Otherwise::Keep).await, Released::Freed, "nobody waits");
}

pub(super) async fn a_replica_without_a_lease_gets_nothing_and_can_not_settle<B: Bench>() {
    let bench = B::new(1, LEASE);
    let a = bench.replica("a").await;
    assert_eq!(acquire(&a, 1, 0).await, Acquired::Stranger);
    assert_eq!(a.retry(2, true).await.expect("the store answers"), Retried::Stranger);
    let repair = Repair { hold: vec![1], ..Repair::default() };
    assert!(!a.settle(&repair).await.expect("the store answers"));
    let told = beat(&a).await;
    assert_eq!((told.known, told.in_use), (false, 0));
    assert!(beat(&a).await.known);
}

pub(super) async fn slots_and_places_of_a_silent_replica_are_reclaimed_when_its_lease_ends_and_not_before<B: Bench>() {
    let (bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&a, 2, 0).await;
    bench.advance(LEASE.saturating_sub(Duration::from_millis(1))).await;
    beat(&b).await;
    assert_eq!(acquire(&b, 1, 1).await, Acquired::Waiting);
    assert_eq!(promote(&b, 1).await, Promoted::NoneFree);
    bench.advance(Duration::from_millis(1)).await;
    let told = beat(&b).await;
    assert_eq!((told.in_use, told.replicas, told.tally.waiting), (0, 1, vec![(1, 1)]));
    assert_eq!(promote(&b, 1).await, Promoted::Granted);
    let told = beat(&a).await;
    assert_eq!((told.known, told.slots, told.waiters), (false, vec![], vec![]));
    assert_eq!(release(&a, 1, None, Otherwise::Announce).await, Released::Gone, "it frees what is its own only");
    assert_eq!(beat(&b).await.slots, [1]);
}

pub(super) async fn a_heartbeat_keeps_a_lease<B: Bench>() {
    let (bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    for _ in 0..5 {
        bench.advance(LEASE * 2 / 3).await;
        assert!(beat(&a).await.known);
        beat(&b).await;
    }
    assert_eq!(acquire(&b, 1, 0).await, Acquired::Waiting);
}

pub(super) async fn settling_makes_the_store_know_what_the_replica_says_even_beyond_the_cap<B: Bench>() {
    let (_bench, a, b) = two::<B>(2).await;
    acquire(&a, 1, 0).await;
    acquire(&b, 1, 0).await;
    acquire(&a, 2, 1).await;
    let repair = Repair { drop: vec![1, 9], hold: vec![2, 3], wait: vec![(4, 0), (2, 0)] };
    for _ in 0..2 {
        assert!(a.settle(&repair).await.expect("the store answers"));
    }
    let told = beat(&a).await;
    assert_eq!((told.slots, told.waiters, told.in_use), (vec![2, 3], vec![4], 3));
    assert_eq!(told.tally.waiting, [(0, 1)]);
    assert_eq!(release(&a, 2, Some((4, 1)), Otherwise::Keep).await, Released::Freed, "beyond the cap nothing passes");
    assert_eq!(release(&a, 3, Some((4, 1)), Otherwise::Keep).await, Released::Passed);
}

pub(super) async fn a_farewell_leaves_nothing<B: Bench>() {
    let (_bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&a, 2, 0).await;
    for _ in 0..2 {
        a.bye().await.expect("the store answers");
    }
    let told = beat(&b).await;
    assert_eq!((told.in_use, told.replicas, told.tally.waiting), (0, 1, vec![]));
    assert_eq!(acquire(&a, 3, 0).await, Acquired::Stranger);
}

pub(super) async fn a_try_in_vain_raises_the_epoch_and_a_hand_over_then_does_not_free<B: Bench>() {
    let (_bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&b, 1, 0).await;
    let waiting = vec![(0, 1)];
    let kept = |epoch| Released::Kept(Tally { epoch, waiting: waiting.clone() });
    assert_eq!(release(&a, 1, None, Otherwise::Keep).await, kept(0));
    let none = |epoch| Retried::NoneFree(Tally { epoch, waiting: waiting.clone() });
    assert_eq!(b.retry(2, false).await.expect("the store answers"), none(0));
    assert_eq!(b.retry(2, true).await.expect("the store answers"), none(1));
    assert_eq!(a.free(1, 0, Otherwise::Keep).await.expect("the store answers"), kept(1));
    assert_eq!(a.free(1, 1, Otherwise::Keep).await.expect("the store answers"), Released::Freed);
    assert_eq!(a.free(1, 1, Otherwise::Keep).await.expect("the store answers"), Released::Gone);
    for _ in 0..2 {
        let taken = Retried::Taken(Tally { epoch: 1, waiting: waiting.clone() });
        assert_eq!(b.retry(2, true).await.expect("the store answers"), taken);
    }
    for _ in 0..2 {
        assert_eq!(b.pass(2, 1).await.expect("the store answers"), Released::Passed);
    }
    assert_eq!(beat(&b).await.slots, [1]);
    assert_eq!(
        b.retry(3, true).await.expect("the store answers"),
        Retried::NoneFree(Tally { epoch: 1, waiting: vec![] })
    );
}

pub(super) async fn a_grant_on_its_way_is_used_until_it_is_claimed<B: Bench>() {
    let (_bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&b, 1, 0).await;
    let grant = Grant { replica: "b", serial: 1, attempt: 7 };
    for _ in 0..2 {
        assert_eq!(a.transfer(1, &grant).await.expect("the store answers"), Released::Passed);
    }
    assert_eq!(beat(&a).await.in_use, 1);
    assert_eq!(claim(&b, 1, 6).await, Released::Gone, "an older attempt");
    for _ in 0..2 {
        assert_eq!(claim(&b, 1, 7).await, Released::Passed);
    }
    assert_eq!((beat(&b).await.slots, beat(&b).await.waiters), (vec![1], vec![]));
}

pub(super) async fn a_grant_that_is_not_claimed_in_time_is_told_until_it_was_heard<B: Bench>() {
    let (bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&b, 1, 0).await;
    a.transfer(1, &Grant { replica: "b", serial: 1, attempt: 1 }).await.expect("the store answers");
    bench.advance(Duration::from_secs(1)).await;
    assert_eq!(claim(&b, 1, 1).await, Released::Gone);
    for _ in 0..2 {
        let told = beat(&b).await;
        assert_eq!((told.in_use, told.lost_grants), (0, vec![(1, 1)]));
    }
    assert_eq!(beat(&a).await.lost_grants, []);
    assert_eq!(b.heartbeat(&[(1, 1)]).await.expect("the store answers").lost_grants, []);
    assert_eq!(promote(&b, 1).await, Promoted::Granted);
}

pub(super) async fn a_slot_is_kept_where_its_waiter_has_gone_or_has_the_grant<B: Bench>() {
    let (_bench, a, b) = two::<B>(2).await;
    acquire(&a, 1, 0).await;
    acquire(&a, 2, 0).await;
    acquire(&b, 1, 0).await;
    acquire(&b, 2, 1).await;
    let grant = Grant { replica: "b", serial: 1, attempt: 1 };
    let kept = |waiting: &[(usize, usize)]| Released::Kept(Tally { epoch: 0, waiting: waiting.to_vec() });
    let gone = Grant { replica: "b", serial: 9, attempt: 1 };
    assert_eq!(a.transfer(1, &gone).await.expect("the store answers"), kept(&[(0, 1), (1, 1)]));
    let dead = Grant { replica: "c", serial: 1, attempt: 1 };
    assert_eq!(a.transfer(1, &dead).await.expect("the store answers"), kept(&[(0, 1), (1, 1)]));
    assert_eq!(a.transfer(1, &grant).await.expect("the store answers"), Released::Passed);
    assert_eq!(
        a.transfer(2, &grant).await.expect("the store answers"),
        kept(&[(0, 1), (1, 1)]),
        "a ticket that came twice"
    );
    b.forget(&[1]).await.expect("the store answers");
    assert_eq!(claim(&b, 1, 1).await, kept(&[(1, 1)]), "to be handed over");
    assert_eq!(claim(&b, 1, 1).await, kept(&[(1, 1)]), "also twice");
    assert_eq!(b.pass(90, 5).await.expect("the store answers"), kept(&[(1, 1)]));
    assert_eq!(b.pass(90, 2).await.expect("the store answers"), Released::Passed);
    assert_eq!(a.pass(7, 8).await.expect("the store answers"), Released::Gone);
}

pub(super) async fn a_grant_to_one_that_has_gone_here_never_takes_its_serial<B: Bench>() {
    let (_bench, a, b) = two::<B>(2).await;
    acquire(&a, 1, 0).await;
    acquire(&a, 2, 0).await;
    acquire(&b, 1, 0).await;
    acquire(&b, 2, 1).await;
    for (from, attempt) in [(1, 1), (2, 2)] {
        let grant = Grant { replica: "b", serial: 1, attempt };
        assert_eq!(a.transfer(from, &grant).await.expect("the store answers"), Released::Passed);
    }
    assert_eq!(claim(&b, 1, 1).await, Released::Passed);
    let second = Arrived { serial: 1, attempt: 2, waits: false, spare: 3 };
    let kept = Released::Kept(Tally { epoch: 0, waiting: vec![(1, 1)] });
    for _ in 0..2 {
        assert_eq!(b.claim(second).await.expect("the store answers"), kept);
    }
    assert_eq!(beat(&b).await.slots, [1, 3]);
}

pub(super) async fn a_grant_that_was_sent_nowhere_can_be_taken_back<B: Bench>() {
    let (bench, a, b) = two::<B>(1).await;
    acquire(&a, 1, 0).await;
    acquire(&b, 1, 0).await;
    let grant = Grant { replica: "b", serial: 1, attempt: 1 };
    let kept = Released::Kept(Tally { epoch: 0, waiting: vec![(0, 1)] });
    a.transfer(1, &grant).await.expect("the store answers");
    for _ in 0..2 {
        assert_eq!(a.recall(1, &grant).await.expect("the store answers"), kept);
    }
    assert_eq!(claim(&b, 1, 1).await, Released::Gone);
    assert_eq!((beat(&a).await.slots, beat(&a).await.in_use), (vec![1], 1));
    a.transfer(1, &grant).await.expect("the store answers");
    bench.advance(Duration::from_secs(1)).await;
    assert_eq!(a.recall(1, &grant).await.expect("the store answers"), Released::Gone, "another may have its place");
}

/// One test for each of them.
macro_rules! conformance {
    ($bench:ty) => {
        $crate::admission::shared::conformance::conformance! { $bench:
            slots_are_given_up_to_the_cap_and_then_places_up_to_the_length
            what_is_asked_twice_is_answered_and_counted_once
            nothing_overtakes_a_waiter_of_another_replica
            a_slot_passes_to_the_heir_only_where_no_higher_tier_waits
            a_replica_without_a_lease_gets_nothing_and_can_not_settle
            slots_and_places_of_a_silent_replica_are_reclaimed_when_its_lease_ends_and_not_before
            a_heartbeat_keeps_a_lease
            settling_makes_the_store_know_what_the_replica_says_even_beyond_the_cap
            a_farewell_leaves_nothing
            a_try_in_vain_raises_the_epoch_and_a_hand_over_then_does_not_free
            a_grant_on_its_way_is_used_until_it_is_claimed
            a_grant_that_is_not_claimed_in_time_is_told_until_it_was_heard
            a_slot_is_kept_where_its_waiter_has_gone_or_has_the_grant
            a_grant_to_one_that_has_gone_here_never_takes_its_serial
            a_grant_that_was_sent_nowhere_can_be_taken_back
        }
    };
    ($bench:ty: $($name:ident)+) => {
        $(
            #[tokio::test]
            async fn $name() {
                $crate::admission::shared::conformance::$name::<$bench>().await;
            }
        )+
    };
}
pub(super) use conformance;

mod plain {
    super::conformance!(crate::admission::shared::model::Plain);
}
