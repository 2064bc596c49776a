//! Several replicas on one Redis: one cap and one order over all of them, and what is left of both when parts fail.

#[path = "support/ports.rs"]
mod ports;
#[path = "support/replica.rs"]
mod replica;
#[path = "support/redis.rs"]
mod server;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bouncer::admission::shared::Desk;
use bouncer::admission::shared::redis::RedisSlots;
use bouncer::admission::{Entry, Turn};
use futures_util::future::join_all;
use replica::{
    GENEROUS, Inside, LENGTH, LONG_LEASE, Replica, SECOND, SHORT, Settings, SharedTicket, ask, becomes, counts, key,
    quiet,
};
use server::RedisServer;
use tokio::time::{Instant, sleep, timeout};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_slot_serves_a_hundred_requests_of_three_replicas_one_after_the_other() {
    let server = RedisServer::start();
    let replicas = Replica::several(3, &server, &Settings::cap(1)).await;
    let inside = Inside::default();
    let began = Instant::now();
    join_all((0..100).map(|n| {
        let (replica, inside) = (&replicas[n % 3], &inside);
        async move {
            let slot = replica.served(n % 2, GENEROUS).await.expect("served");
            inside.stay(slot, Duration::from_millis(2)).await;
        }
    }))
    .await;
    assert_eq!(inside.most(), 1);
    // Each lost wake-up would wait for the next heartbeat, up to 1 s.
    assert!(began.elapsed() < 3 * SECOND, "{:?}", began.elapsed());
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_requests_that_come_wait_give_up_and_go_never_exceeds_the_cap_nor_leaks() {
    const CAP: usize = 4;
    let store = RedisServer::start();
    let replicas = Replica::several(3, &store, &Settings::cap(CAP)).await;
    let (inside, served) = (Inside::default(), [const { AtomicUsize::new(0) }; 3]);
    join_all((0..90_usize).map(|client| {
        let (replica, inside, served) = (&replicas[client % 3], &inside, &served[client % 3]);
        async move {
            for round in 0..20_usize {
                let dice = (client * 31 + round * 17) % 10;
                let micros = |n: usize| Duration::from_micros(u64::try_from(n).expect("small"));
                let patience = micros(if dice < 4 { (client * 97 + round * 13) % 3000 } else { 20_000_000 });
                // Given up while being asked, while waiting, or not at all.
                let turn = timeout(patience, replica.served(dice % 2, GENEROUS)).await;
                if let Ok(Some(slot)) = turn {
                    served.fetch_add(1, Ordering::Relaxed);
                    inside.stay(slot, micros((client + round) % 900)).await;
                }
            }
        }
    }))
    .await;
    assert!(inside.most() <= CAP, "{} were inside at once", inside.most());
    let served: Vec<usize> = served.iter().map(|it| it.load(Ordering::Relaxed)).collect();
    let all: usize = served.iter().sum();
    assert!(all >= 90 * 12, "whoever did not give up was served: {served:?}");
    assert!(served.iter().all(|part| part * 5 > all), "no replica got less than a fifth: {served:?}");
    quiet(&store, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_waiter_of_the_higher_tier_is_served_before_any_of_the_lower_wherever_it_waits() {
    let server = RedisServer::start();
    let replicas = Replica::several(3, &server, &Settings::cap(1)).await;
    let in_use = replicas[0].slot(1).await;
    let order = std::sync::Mutex::new(Vec::new());
    let wait = async |ticket: SharedTicket, rank: usize| {
        let Turn::Slot(slot) = ticket.turn(Instant::now() + GENEROUS).await else { panic!("served") };
        order.lock().expect("no panic").push(rank);
        sleep(Duration::from_millis(2)).await;
        drop(slot);
    };
    let mut tickets = Vec::new();
    for n in 0..10 {
        tickets.push((replicas[n % 2].ticket(1).await, 1));
    }
    for _ in 0..10 {
        tickets.push((replicas[2].ticket(0).await, 0));
    }
    assert_eq!(counts(&server), (1, 20));
    drop(in_use);
    join_all(tickets.into_iter().map(|(ticket, rank)| wait(ticket, rank))).await;
    let order = order.into_inner().expect("no panic");
    assert_eq!(order, [[0; 10], [1; 10]].concat());
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bound_of_a_queue_holds_over_all_replicas() {
    let server = RedisServer::start();
    let replicas = Replica::several(2, &server, &Settings::cap(1)).await;
    let _in_use = replicas[0].slot(0).await;
    let tickets = join_all((0..LENGTH).map(|n| replicas[n % 2].ticket(1))).await;
    for replica in &replicas {
        assert!(matches!(replica.enter(1).await, Entry::Full));
        assert!(matches!(replica.enter(0).await, Entry::Held(_)), "another tier has its own");
    }
    drop(tickets);
    becomes("all places given up", 5 * SECOND, || counts(&server).1 == 0).await;
    assert!(matches!(replicas[1].enter(1).await, Entry::Held(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_and_places_of_a_killed_replica_come_back_when_its_lease_ends_and_not_before() {
    let server = RedisServer::start();
    let settings = Settings { lease: 2 * SECOND, ..Settings::cap(2) };
    let mut replicas = Replica::several(2, &server, &settings).await;
    let survivor = replicas.remove(0);
    let killed = replicas.remove(0);
    let held = [killed.slot(0).await, killed.slot(0).await];
    let waiting = killed.ticket(0).await;
    let id = killed.id.clone();
    killed.kill();
    drop((held, waiting));
    let until: f64 = ask(&server, &["ZSCORE", &key("replicas"), &id]);
    let slot = survivor.served(1, GENEROUS).await.expect("a slot comes back");
    let now: Vec<f64> = ask(&server, &["TIME"]);
    let late = now[0] * 1000.0 + now[1] / 1000.0 - until;
    assert!((0.0..1000.0).contains(&late), "{late} ms after the end of the lease");
    assert_eq!(survivor.metrics.lease_expiries.get(), 1);
    assert_eq!(counts(&server), (1, 0));
    drop(slot);
    quiet(&server, &[survivor]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_says_goodbye_leaves_nothing_and_others_go_on_at_once() {
    let server = RedisServer::start();
    let mut replicas = Replica::several(2, &server, &Settings::cap(1)).await;
    let leaves = replicas.remove(0);
    let slot = leaves.slot(0).await;
    let waiting = replicas[0].ticket(0).await;
    leaves.leave().await;
    let turn = timeout(2 * SECOND, waiting.turn(Instant::now() + GENEROUS)).await.expect("told by the farewell");
    assert!(matches!(turn, Turn::Slot(_)));
    drop((slot, turn));
    quiet(&server, &replicas).await;
    assert_eq!(ask::<usize>(&server, &["ZCARD", &key("replicas")]), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_was_forgotten_registers_what_it_holds_and_who_waits() {
    let server = RedisServer::start();
    let settings = Settings { lease: 2 * SECOND, ..Settings::cap(2) };
    let replicas = Replica::several(2, &server, &settings).await;
    let held = [replicas[0].slot(0).await, replicas[1].slot(0).await];
    let waiting = replicas[1].ticket(1).await;
    ask::<()>(&server, &["FLUSHALL"]);
    // The first to register does not know yet what the other holds, so the waiter may be let in beyond the cap.
    becomes("registered again", 5 * SECOND, || [(2, 1), (3, 0)].contains(&counts(&server))).await;
    assert!(matches!(replicas[0].enter(0).await, Entry::Held(_)), "the cap holds again");
    drop(held);
    assert!(matches!(waiting.turn(Instant::now() + 5 * SECOND).await, Turn::Slot(_)));
    quiet(&server, &replicas).await;
    let lost: Vec<u64> = replicas.iter().map(|replica| replica.metrics.leases_lost.get()).collect();
    assert_eq!(lost, [1, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_right_after_redis_lost_everything_is_let_in_once_its_replica_is_known_again() {
    let server = RedisServer::start();
    let replicas = Replica::several(1, &server, &Settings::cap(2)).await;
    let held = replicas[0].slot(0).await;
    ask::<()>(&server, &["FLUSHALL"]);
    let began = Instant::now();
    let slot = replicas[0].served(0, GENEROUS).await.expect("served");
    assert!(began.elapsed() < SECOND, "without waiting for the next regular heartbeat: {:?}", began.elapsed());
    assert_eq!(counts(&server), (2, 0));
    drop((held, slot));
    quiet(&server, &replicas).await;
}

/// Redis stops answering for both of two replicas: the outage rules in numbers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_away_a_replica_goes_on_with_what_it_holds_and_after_its_lease_with_its_share() {
    let server = RedisServer::start();
    let settings = Settings { cap: 5, lease: 3 * SECOND, timeout: SHORT, ..Settings::cap(1) };
    let replicas = Replica::several(2, &server, &settings).await;
    let (a, b) = (&replicas[0], &replicas[1]);
    let mut of_a = Vec::new();
    for _ in 0..4 {
        of_a.push(a.slot(0).await);
    }
    let of_b = b.slot(0).await;
    for replica in [a, b] {
        becomes("told of all five", 2 * SECOND, || replica.pool.shared_stats().in_flight == 5).await;
    }
    let paused = Instant::now();
    server.pause();
    for replica in [a, b] {
        becomes("cut off", SECOND, || replica.is_cut_off()).await;
    }
    // What it holds and no more, passed on among its own.
    let first = a.ticket(1).await;
    let second = a.ticket(0).await;
    drop(of_a.pop());
    let Turn::Slot(handed) = second.turn(Instant::now() + SECOND).await else { panic!("passed on") };
    of_a.push(handed);
    drop(first);
    drop(of_a.pop());
    of_a.push(a.slot(1).await);
    let waits_at_a = a.ticket(0).await;
    let waits_at_b = b.ticket(0).await;
    let turn = waits_at_b.turn(paused + settings.lease / 2).await;
    assert!(matches!(turn, Turn::Expired), "four at one and one at the other are the cap");
    assert!(paused.elapsed() < settings.lease * 8 / 10, "too slow a machine to tell: {:?}", paused.elapsed());

    // After the lease: two each. One has more, and lets go as they end.
    let more_at_b = b.served(0, settings.lease + SECOND).await.expect("its share");
    assert!(paused.elapsed() > settings.lease * 6 / 10, "not before its lease ended: {:?}", paused.elapsed());
    let beyond = b.ticket(0).await;
    assert!(matches!(beyond.turn(Instant::now() + SHORT).await, Turn::Expired));
    drop((of_a.pop(), of_a.pop()));
    assert_eq!(a.pool.stats().in_flight, 2);
    let waits_at_a = tokio::spawn(waits_at_a.turn(Instant::now() + GENEROUS));
    sleep(SHORT).await;
    assert!(!waits_at_a.is_finished(), "its share is in use");
    drop(of_a.pop());
    let Ok(Turn::Slot(handed)) = waits_at_a.await else { panic!("below its share") };

    // Shared again within 5 s, with the true counts.
    server.resume();
    becomes("shared again", 5 * SECOND, || !a.is_cut_off() && !b.is_cut_off()).await;
    becomes("the true counts", SECOND, || counts(&server) == (4, 0)).await;
    drop((of_a, handed, of_b, more_at_b));
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_replicas_that_are_cut_off_divide_what_is_free_and_wait_for_no_lease_to_end() {
    let mut server = RedisServer::start();
    let settings = Settings { cap: 5, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(1) };
    let replicas = Replica::several(2, &server, &settings).await;
    server.stop();
    for replica in &replicas {
        becomes("cut off", 2 * SECOND, || replica.is_cut_off()).await;
        let within_its_part = [replica.slot(0).await, replica.slot(0).await];
        let beyond = replica.ticket(0).await;
        drop(within_its_part);
        assert!(matches!(beyond.turn(Instant::now() + SECOND).await, Turn::Slot(_)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_comes_back_empty_is_told_what_is_held_and_who_waits() {
    let mut server = RedisServer::start();
    let settings = Settings { cap: 3, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(1) };
    let replicas = Replica::several(2, &server, &settings).await;
    let held = [replicas[0].slot(0).await, replicas[0].slot(0).await, replicas[1].slot(0).await];
    let waiting = [replicas[0].ticket(1).await, replicas[1].ticket(0).await];
    server.stop();
    for replica in &replicas {
        // An idle replica notices with its next heartbeat.
        becomes("cut off", 2 * SECOND, || replica.is_cut_off()).await;
    }
    server.restart();
    becomes("shared again", 5 * SECOND, || replicas.iter().all(|replica| !replica.is_cut_off())).await;
    // The first to register does not know yet what the other holds, so a waiter may have been let in beyond the cap.
    becomes("everyone known", 5 * SECOND, || {
        let (in_use, waiting) = counts(&server);
        in_use + waiting == 5 && (3..=5).contains(&in_use)
    })
    .await;
    drop(held);
    for ticket in waiting {
        assert!(matches!(ticket.turn(Instant::now() + 5 * SECOND).await, Turn::Slot(_)));
    }
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_starts_without_redis_serves_the_cap_alone_and_shares_once_it_is_there() {
    let mut server = RedisServer::start();
    server.stop();
    let settings = Settings { cap: 2, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(1) };
    let replica = Replica::start(&server, &settings).await;
    assert!(replica.is_cut_off());
    let held = [replica.slot(0).await, replica.slot(0).await];
    let waiting = replica.ticket(0).await;
    server.restart();
    becomes("the true counts", 5 * SECOND, || !replica.is_cut_off() && counts(&server) == (2, 1)).await;
    drop(held);
    assert!(matches!(waiting.turn(Instant::now() + 5 * SECOND).await, Turn::Slot(_)));
    quiet(&server, &[replica]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_whose_answers_were_lost_are_settled_by_the_next_heartbeat() {
    let server = RedisServer::start();
    let settings = Settings { cap: 3, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(1) };
    let replicas = Replica::several(1, &server, &settings).await;
    let replica = &replicas[0];
    let mut held = vec![replica.slot(0).await, replica.slot(0).await];
    server.pause();
    // Sent, carried out when Redis wakes up, and never heard of: a slot asked for by one that stays, by one that goes away,
    // and one given back.
    let asked = replica.enter(0);
    drop(held.pop());
    let gives_up = timeout(SHORT / 4, replica.enter(0)).await;
    assert!(gives_up.is_err());
    let asked = asked.await;
    becomes("cut off", SECOND, || replica.is_cut_off()).await;
    server.resume();
    becomes("shared again", 5 * SECOND, || !replica.is_cut_off()).await;
    let slot = match asked {
        Entry::Slot(slot) => slot,
        Entry::Held(ticket) => match ticket.turn(Instant::now() + 5 * SECOND).await {
            Turn::Slot(slot) => slot,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    becomes("the true counts", 5 * SECOND, || counts(&server) == (2, 0)).await;
    drop((slot, held));
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_given_back_after_its_runtime_has_ended_is_settled_by_a_heartbeat() {
    let server = RedisServer::start();
    let replicas = Replica::several(1, &server, &Settings::cap(1)).await;
    let replica = &replicas[0];
    let worker = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let (desk, limits) = {
        let _within = worker.enter();
        let limits = replica.stores.limits();
        let slots = RedisSlots::new(limits.redis().expect("limits in redis").clone(), replica.names.clone());
        (Desk::new(replica.pool.clone(), slots), limits)
    };
    limits.settled().await;
    let Entry::Slot(slot) = replica.enter_at(&desk, &limits, 0).await else { panic!("a slot") };
    let waiting = replica.ticket(0).await;
    let Entry::Held(gone) = replica.enter_at(&desk, &limits, 0).await else { panic!("a place") };
    worker.shutdown_background();
    drop(gone);
    becomes("the place given up", 2 * SECOND, || counts(&server) == (1, 1)).await;
    drop(slot);
    assert!(matches!(waiting.turn(Instant::now() + 5 * SECOND).await, Turn::Slot(_)), "the slot passed on");
    quiet(&server, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_answers_who_waits_and_makes_way_for_other_replicas() {
    let server = RedisServer::start();
    let replicas = Replica::several(2, &server, &Settings::cap(1)).await;
    let slot = replicas[0].slot(0).await;
    let closing = replicas[0].ticket(0).await;
    let waiting = replicas[1].ticket(1).await;
    replicas[0].pool.close();
    assert!(matches!(closing.turn(Instant::now() + GENEROUS).await, Turn::Closing));
    assert!(matches!(replicas[0].enter(0).await, Entry::Closing));
    becomes("its place given up", 2 * SECOND, || counts(&server) == (1, 1)).await;
    drop(slot);
    let turn = timeout(SECOND, waiting.turn(Instant::now() + GENEROUS)).await.expect("at once");
    assert!(matches!(turn, Turn::Slot(_)));
    drop(turn);
    quiet(&server, &replicas).await;
}
