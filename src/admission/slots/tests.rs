use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use futures::FutureExt;
use futures::poll;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn pool(cap: usize, lengths: &[usize]) -> Arc<Pool> {
    Pool::new(NonZeroUsize::new(cap).unwrap(), lengths.iter().copied())
}

fn slot(pool: &Arc<Pool>) -> Slot {
    match pool.enter(0) {
        Entry::Slot(slot) => slot,
        other => panic!("expected a slot, got {other:?}"),
    }
}

fn ticket(pool: &Arc<Pool>, rank: usize) -> Ticket {
    match pool.enter(rank) {
        Entry::Held(ticket) => ticket,
        other => panic!("expected a ticket, got {other:?}"),
    }
}

fn quiet(pool: &Pool) -> bool {
    let stats = pool.stats();
    stats.in_flight == 0 && stats.waiting.iter().all(|waiting| *waiting == 0)
}

#[tokio::test(start_paused = true)]
async fn slots_are_given_up_to_the_cap_and_then_requests_are_held() {
    let pool = pool(2, &[5]);
    let held = [slot(&pool), slot(&pool)];
    let waiting = ticket(&pool, 0);
    assert_eq!(pool.stats(), PoolStats { max_in_flight: 2, in_flight: 2, waiting: vec![1] });
    drop(held);
    assert!(matches!(waiting.turn_within(SECOND).await, Turn::Slot(_)));
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_at_once_and_only_its_own_tier() {
    let pool = pool(1, &[5, 1]);
    let _slot = slot(&pool);
    let _held = ticket(&pool, 1);
    assert!(matches!(pool.enter(1), Entry::Full));
    let _held = ticket(&pool, 0);
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_at_its_instant_and_gives_the_place_up() {
    let pool = pool(1, &[1]);
    let _slot = slot(&pool);
    let start = Instant::now();
    let until = start + 5 * SECOND;
    assert!(matches!(ticket(&pool, 0).turn(until).await, Turn::Expired));
    assert_eq!(Instant::now(), until);
    assert_eq!(pool.stats().waiting, [0]);
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_comes_at_the_last_instant_is_taken() {
    let pool = pool(1, &[1]);
    let slot = slot(&pool);
    let waiting = ticket(&pool, 0);
    let until = Instant::now() + SECOND;
    let mut turn = Box::pin(waiting.turn(until));
    assert!(poll!(&mut turn).is_pending());
    drop(slot);
    tokio::time::advance(2 * SECOND).await;
    assert!(matches!(turn.await, Turn::Slot(_)));
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn the_highest_tier_is_called_first_and_each_tier_in_order_of_arrival() {
    let pool = pool(1, &[5, 5]);
    let mut in_use = slot(&pool);
    let mut low: Vec<_> = (0..3).map(|_| Box::pin(ticket(&pool, 1).turn_within(SECOND))).collect();
    let mut high: Vec<_> = (0..3).map(|_| Box::pin(ticket(&pool, 0).turn_within(SECOND))).collect();
    let mut order = Vec::new();
    for _ in 0..6 {
        drop(in_use);
        let mut called = Vec::new();
        for (tier, turns) in [("high", &mut high), ("low", &mut low)] {
            for (at, turn) in turns.iter_mut().enumerate() {
                if !order.contains(&(tier, at))
                    && let Some(turn) = turn.now_or_never()
                {
                    called.push((tier, at, turn));
                }
            }
        }
        let [(tier, at, Turn::Slot(slot))] = <[_; 1]>::try_from(called).unwrap() else { panic!("one slot") };
        order.push((tier, at));
        in_use = slot;
    }
    assert_eq!(order, [("high", 0), ("high", 1), ("high", 2), ("low", 0), ("low", 1), ("low", 2)]);
}

#[tokio::test(start_paused = true)]
async fn a_new_arrival_never_overtakes_a_waiter_when_a_slot_frees() {
    let pool = pool(1, &[5, 5]);
    let in_use = slot(&pool);
    let mut turn = Box::pin(ticket(&pool, 1).turn_within(SECOND));
    assert!(poll!(&mut turn).is_pending());
    drop(in_use);
    // The waiter has not run yet: a higher tier that arrives now finds the slot taken.
    let late = ticket(&pool, 0);
    let Poll::Ready(Turn::Slot(slot)) = poll!(&mut turn) else { panic!("the waiter was called") };
    drop(slot);
    assert!(matches!(late.turn_within(SECOND).await, Turn::Slot(_)));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_waiter_leaves_the_queue_at_once() {
    let pool = pool(1, &[50]);
    let in_use = slot(&pool);
    let mut turns: Vec<_> = (0..50).map(|_| Box::pin(ticket(&pool, 0).turn_within(SECOND))).collect();
    for turn in &mut turns {
        assert!(poll!(turn).is_pending());
    }
    assert!(matches!(pool.enter(0), Entry::Full));
    let last = turns.pop().unwrap();
    drop(turns);
    assert_eq!(pool.stats().waiting, [1]);
    drop(in_use);
    assert!(matches!(last.await, Turn::Slot(_)));
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_goes_away_after_being_called_passes_the_slot_on() {
    let pool = pool(1, &[5]);
    let in_use = slot(&pool);
    let first = ticket(&pool, 0);
    let second = ticket(&pool, 0);
    drop(in_use);
    assert_eq!(pool.stats().waiting, [1], "the first was called");
    drop(first);
    assert!(matches!(second.turn_within(SECOND).await, Turn::Slot(_)));
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn a_thousand_called_waiters_that_went_away_do_not_exhaust_the_stack() {
    let pool = pool(1, &[10_000]);
    let in_use = slot(&pool);
    let tickets: Vec<_> = (0..10_000).map(|_| ticket(&pool, 0)).collect();
    drop(in_use);
    drop(tickets);
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn a_panic_gives_the_slot_and_the_place_back() {
    let pool = pool(1, &[5]);
    let (holder, waiter) = (pool.clone(), pool.clone());
    let in_use = slot(&holder);
    let waiting = ticket(&waiter, 0);
    let crashed = tokio::spawn(async move {
        let _waiting = waiting;
        let _in_use = in_use;
        panic!("on purpose");
    });
    assert!(crashed.await.unwrap_err().is_panic());
    assert!(quiet(&pool));
}

#[tokio::test(start_paused = true)]
async fn closing_tells_everyone_in_the_room_and_whoever_comes_later() {
    let pool = pool(1, &[5, 5]);
    let in_use = slot(&pool);
    let waiting = [ticket(&pool, 0), ticket(&pool, 1)];
    pool.close();
    for ticket in waiting {
        assert!(matches!(ticket.turn_within(SECOND).await, Turn::Closing));
    }
    assert!(matches!(pool.enter(0), Entry::Closing));
    assert_eq!(pool.stats().in_flight, 1, "what is in flight stays so");
    drop(in_use);
    assert!(quiet(&pool));
    assert!(matches!(pool.enter(0), Entry::Closing), "also when slots are free");
}

#[test]
fn threads_that_enter_leave_and_give_up_never_exceed_the_cap_nor_leak() {
    const CAP: usize = 3;
    let pool = pool(CAP, &[8, 8]);
    let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let (pool, inside, most) = (&pool, &inside, &most);
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
                runtime.block_on(async {
                    for round in 0..2_000u64 {
                        let slot = match pool.enter(usize::from(thread % 2 == 0)) {
                            Entry::Slot(slot) => Some(slot),
                            Entry::Held(ticket) => {
                                // Some waits are so short that they race with the call.
                                let wait = Duration::from_micros((thread * 7 + round * 13) % 200);
                                match ticket.turn_within(wait).await {
                                    Turn::Slot(slot) => Some(slot),
                                    Turn::Expired => None,
                                    Turn::Closing => panic!("nobody closed the pool"),
                                }
                            }
                            Entry::Full => None,
                            Entry::Closing => panic!("nobody closed the pool"),
                        };
                        if let Some(slot) = slot {
                            most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            tokio::task::yield_now().await;
                            inside.fetch_sub(1, Ordering::SeqCst);
                            drop(slot);
                        }
                    }
                });
            });
        }
    });
    assert!(most.load(Ordering::SeqCst) <= CAP, "{most:?} were inside at once");
    assert!(quiet(&pool));
}
