//! What every implementation of [`Tickets`] must do. One function, because a broker takes seconds to start; each part uses
//! a line or replicas of its own.

use std::time::Duration;

use futures::future::join_all;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::{Grant, Line, ReplicaId, Sent, Taken, Ticket, TicketError, Tickets};

/// Replicas that share a store, with three lines (`rank` 0 to 2) in each of two pools.
pub(super) trait Bench: Sync {
    type Tickets: Tickets;

    /// A replica that is up.
    async fn connect(&self, replica: ReplicaId) -> (Self::Tickets, mpsc::Receiver<Grant>);

    /// How many tickets lie in a line, those in hand not counted.
    async fn waiting(&self, line: Line) -> usize;
}

const MINUTE: Duration = Duration::from_secs(60);
const A: ReplicaId = ReplicaId(0xa);
const B: ReplicaId = ReplicaId(0xffff_ffff_ffff_ffff);

fn ticket(serial: u64) -> Ticket {
    Ticket { replica: A, serial, attempt: 1 }
}

fn grant(serial: u64) -> Grant {
    Grant { pool: 1, serial, attempt: 3, from: A }
}

pub(super) async fn suite<B: Bench>(bench: &B) {
    let (a, _grants) = bench.connect(A).await;
    let (b, grants) = bench.connect(self::B).await;
    lines_are_first_in_first_out_and_apart(bench, &a, &b).await;
    a_ticket_is_in_one_pair_of_hands_and_goes_back_to_its_place(bench, &a, &b).await;
    a_call_that_is_dropped_leaves_nothing_taken(bench, &a).await;
    tickets_expire(bench, &a).await;
    a_drain_stops_at_who_waits(bench, &a, &b).await;
    grants_reach_the_replica_they_are_for(bench, &a, &b, grants).await;
    many_at_once_lose_and_double_nothing(bench, &a, &b).await;
}

async fn serials<T: Tickets>(tickets: &T, line: Line) -> Vec<u64> {
    let mut serials = Vec::new();
    while let Some(taken) = tickets.next(line).await.unwrap() {
        serials.push(taken.ticket().serial);
        taken.ack();
    }
    serials
}

async fn holds<B: Bench>(bench: &B, line: Line, count: usize) {
    let settled = async {
        while bench.waiting(line).await != count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(timeout(Duration::from_secs(10), settled).await.is_ok(), "{line:?} holds {count}");
}

async fn lines_are_first_in_first_out_and_apart<B: Bench>(bench: &B, a: &B::Tickets, b: &B::Tickets) {
    let lines = [Line { pool: 0, rank: 0 }, Line { pool: 0, rank: 2 }, Line { pool: 1, rank: 0 }];
    for (n, line) in (0..).zip(lines) {
        assert!(b.next(line).await.unwrap().is_none());
        for serial in 0..5 {
            let epoch = a.publish(line, ticket(n * 10 + serial), MINUTE).await.unwrap();
            assert_eq!(epoch, a.standing().borrow().epoch);
        }
    }
    for (n, line) in (0..).zip(lines) {
        assert_eq!(serials(b, line).await, (n * 10..n * 10 + 5).collect::<Vec<_>>());
        holds(bench, line, 0).await;
    }
}

async fn a_ticket_is_in_one_pair_of_hands_and_goes_back_to_its_place<B: Bench>(
    bench: &B,
    a: &B::Tickets,
    b: &B::Tickets,
) {
    let line = Line { pool: 0, rank: 0 };
    let whole = Ticket { replica: self::B, serial: u64::MAX, attempt: u32::MAX };
    a.publish(line, whole, MINUTE).await.unwrap();
    a.publish(line, ticket(2), MINUTE).await.unwrap();
    let first = b.next(line).await.unwrap().unwrap();
    assert_eq!(first.ticket(), whole, "every field arrives");
    let second = a.next(line).await.unwrap().unwrap();
    assert_eq!(second.ticket().serial, 2);
    assert!(a.next(line).await.unwrap().is_none(), "both are in hands");
    drop(second);
    drop(first);
    holds(bench, line, 2).await;
    assert_eq!(serials(a, line).await, [u64::MAX, 2], "each is in its old place");
}

async fn a_call_that_is_dropped_leaves_nothing_taken<B: Bench>(bench: &B, a: &B::Tickets) {
    let line = Line { pool: 1, rank: 1 };
    a.publish(line, ticket(1), MINUTE).await.unwrap();
    for micros in [0, 10, 50, 100, 200, 500, 1000] {
        let _ = timeout(Duration::from_micros(micros), a.next(line)).await.map(|taken| drop(taken.unwrap()));
    }
    holds(bench, line, 1).await;
    assert_eq!(serials(a, line).await, [1]);
}

async fn tickets_expire<B: Bench>(bench: &B, a: &B::Tickets) {
    let line = Line { pool: 0, rank: 1 };
    a.publish(line, ticket(1), Duration::from_millis(50)).await.unwrap();
    a.publish(line, ticket(2), MINUTE).await.unwrap();
    holds(bench, line, 1).await;
    assert_eq!(serials(a, line).await, [2]);
}

async fn a_drain_stops_at_who_waits<B: Bench>(bench: &B, a: &B::Tickets, b: &B::Tickets) {
    let line = Line { pool: 1, rank: 2 };
    for serial in 0..6 {
        a.publish(line, ticket(serial), MINUTE).await.unwrap();
    }
    assert_eq!(b.drain(line, async |ticket: Ticket| ticket.serial == 4).await, Ok(4));
    holds(bench, line, 2).await;
    assert_eq!(b.drain(line, async |_| false).await, Ok(2));
    holds(bench, line, 0).await;
}

async fn grants_reach_the_replica_they_are_for<B: Bench>(
    bench: &B,
    a: &B::Tickets,
    b: &B::Tickets,
    mut grants: mpsc::Receiver<Grant>,
) {
    for serial in [0, 7, u64::MAX] {
        assert_eq!(a.grant(self::B, grant(serial), MINUTE).await, Ok(Sent::Queued));
        assert_eq!(grants.recv().await, Some(grant(serial)));
    }
    assert_eq!(b.grant(self::B, grant(8), MINUTE).await, Ok(Sent::Queued));
    assert_eq!(grants.recv().await, Some(grant(8)), "a replica can grant to itself");
    assert_eq!(a.grant(ReplicaId(0xdead), grant(9), MINUTE).await, Ok(Sent::Unroutable));

    // A grant that does and one that does not find its replica, at the same time: neither answer is the other's.
    let calls = (0..60).map(|n| a.grant(if n % 2 == 0 { self::B } else { ReplicaId(n) }, grant(n), MINUTE));
    for (n, sent) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(sent, Ok(if n % 2 == 0 { Sent::Queued } else { Sent::Unroutable }), "grant {n}");
    }
    for _ in 0..30 {
        assert!(grants.recv().await.unwrap().serial.is_multiple_of(2));
    }
    drop(grants);
    let gone = ReplicaId(0x60e);
    let (c, grants) = bench.connect(gone).await;
    assert_eq!(a.grant(gone, grant(1), MINUTE).await, Ok(Sent::Queued));
    drop((c, grants));
    let began = Instant::now();
    while a.grant(gone, grant(1), MINUTE).await != Ok(Sent::Unroutable) {
        assert!(began.elapsed() < Duration::from_secs(10), "a replica that went away has no queue");
        sleep(Duration::from_millis(5)).await;
    }
}

async fn many_at_once_lose_and_double_nothing<B: Bench>(bench: &B, a: &B::Tickets, b: &B::Tickets) {
    let line = Line { pool: 0, rank: 0 };
    let published = join_all((0..300).map(|serial| a.publish(line, ticket(serial), MINUTE))).await;
    assert!(published.iter().all(Result::is_ok), "{published:?}");
    let take = async |tickets: &B::Tickets| -> Result<u64, TicketError> {
        let taken = tickets.next(line).await?.expect("one for each");
        let serial = taken.ticket().serial;
        taken.ack();
        Ok(serial)
    };
    let (mut left, right) = tokio::join!(join_all((0..150).map(|_| take(a))), join_all((0..150).map(|_| take(b))));
    left.extend(right);
    let mut serials: Vec<_> = left.into_iter().map(Result::unwrap).collect();
    serials.sort_unstable();
    assert_eq!(serials, (0..300).collect::<Vec<_>>());
    holds(bench, line, 0).await;
}
