//! Several replicas on one Redis and one RabbitMQ: the order of service over all of them, and what is left of it when the
//! broker fails.

#[path = "support/ports.rs"]
mod ports;
#[path = "support/proxy.rs"]
mod proxy;
#[path = "support/rabbit.rs"]
mod rabbit;
#[path = "support/replica.rs"]
mod replica;
#[path = "support/redis.rs"]
mod server;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bouncer::admission::Turn;
use bouncer::admission::tickets::Tickets;
use futures_util::future::join_all;
use proxy::{Flow, Proxy};
use rabbit::RabbitServer;
use replica::{
    EXPIRES, GENEROUS, Inside, Replica, SECOND, SHORT, Settings, SharedTicket, ask, becomes, counts, key, quiet,
};
use server::RedisServer;
use tokio::time::{Instant, sleep, timeout};

fn settings(rabbit: &RabbitServer, cap: usize) -> Settings {
    Settings { rabbitmq: Some(rabbit.url()), ..Settings::cap(cap) }
}

fn confirmed(replica: &Replica) -> u64 {
    replica.counts.confirms.with_label_values(&["confirmed"]).get()
}

/// A request that waits, with its ticket in the broker.
async fn with_ticket(replica: &Replica, rank: usize) -> SharedTicket {
    let before = confirmed(replica);
    let ticket = replica.ticket(rank).await;
    becomes("published", 5 * SECOND, || confirmed(replica) > before).await;
    ticket
}

async fn is_up(replica: &Replica, up: bool, within: Duration) {
    let mut standing = replica.tickets.as_ref().expect("with tickets").standing();
    let waited = timeout(within, standing.wait_for(|standing| standing.up == up)).await.is_ok();
    assert!(waited, "rabbitmq up = {up} within {within:?}");
}

/// Lets these be served one after another, and says in which order.
async fn order_of<T: Copy>(tickets: Vec<(SharedTicket, T)>) -> Vec<T> {
    let order = Mutex::new(Vec::new());
    join_all(tickets.into_iter().map(|(ticket, name)| {
        let order = &order;
        async move {
            let Turn::Slot(slot) = ticket.turn(Instant::now() + GENEROUS).await else { panic!("served") };
            order.lock().expect("no panic").push(name);
            sleep(Duration::from_millis(2)).await;
            drop(slot);
        }
    }))
    .await;
    order.into_inner().expect("no panic")
}

/// Tickets that lie in the broker, by tier.
fn lying(rabbit: &RabbitServer) -> Vec<(String, usize)> {
    let rows = rabbit.rows(&["list_queues", "name", "messages"]);
    let tickets = rows.into_iter().filter(|row| row[0].starts_with("bouncer:tickets:"));
    let mut lines: Vec<_> = tickets.map(|row| (row[0].clone(), row[1].parse().expect("a number"))).collect();
    lines.sort();
    lines
}

/// Nothing in use, nobody counted as waiting, and no ticket left once the last has expired.
async fn all_quiet(server: &RedisServer, rabbit: &RabbitServer, replicas: &[Replica]) {
    quiet(server, replicas).await;
    let began = Instant::now();
    while lying(rabbit).iter().any(|(_, messages)| *messages > 0) {
        assert!(began.elapsed() < EXPIRES + 5 * SECOND, "{:?}", lying(rabbit));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_slot_serves_a_hundred_requests_of_three_replicas_one_after_the_other() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(3, &redis, &settings(&rabbit, 1)).await;
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
    eprintln!("100 requests of 2 ms, one at a time, took {:?}", began.elapsed());
    assert!(began.elapsed() < 3 * SECOND, "{:?}", began.elapsed());
    let (own, other): (Vec<_>, Vec<_>) =
        replicas.iter().map(|replica| (replica.metrics.own.get(), replica.metrics.other.get())).unzip();
    assert_eq!(own.iter().chain(&other).sum::<u64>(), 99, "{own:?} own and {other:?} other");
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_highest_tier_is_served_first_and_within_a_tier_the_first_ticket_wherever_the_request_is_held() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(3, &redis, &settings(&rabbit, 1)).await;
    let in_use = replicas[0].slot(1).await;
    let mut tickets = Vec::new();
    for n in 0..12 {
        tickets.push((with_ticket(&replicas[[0, 1, 1][n % 3]], 1).await, (1, n)));
    }
    for n in 0..8 {
        tickets.push((with_ticket(&replicas[2 - n % 2], 0).await, (0, n)));
    }
    // One that gives up leaves a stale ticket.
    drop(tickets.remove(3));
    becomes("given up", 5 * SECOND, || counts(&redis) == (1, 19)).await;
    drop(in_use);
    let order = order_of(tickets).await;
    let lower = (0..12).filter(|n| *n != 3).map(|n| (1, n));
    assert_eq!(order, (0..8).map(|n| (0, n)).chain(lower).collect::<Vec<_>>());
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_requests_that_come_wait_give_up_and_go_never_exceeds_the_cap_nor_leaks() {
    const CAP: usize = 12;
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(3, &redis, &settings(&rabbit, CAP)).await;
    let (inside, served) = (Inside::default(), [const { AtomicUsize::new(0) }; 3]);
    let began = Instant::now();
    join_all((0..200_usize).map(|client| {
        let (replica, inside, served) = (&replicas[client % 3], &inside, &served[client % 3]);
        async move {
            for round in 0..10_usize {
                let dice = (client * 31 + round * 17) % 10;
                let micros = |n: usize| Duration::from_micros(u64::try_from(n).expect("small"));
                let patience = micros(if dice < 4 { (client * 97 + round * 13) % 30_000 } else { 20_000_000 });
                // Given up while being asked, while waiting, or not at all.
                let turn = timeout(patience, replica.served(dice % 2, GENEROUS)).await;
                if let Ok(Some(slot)) = turn {
                    served.fetch_add(1, Ordering::Relaxed);
                    inside.stay(slot, micros((client + round) % 3000)).await;
                }
            }
        }
    }))
    .await;
    assert!(inside.most() <= CAP, "{} were inside at once", inside.most());
    let served: Vec<usize> = served.iter().map(|it| it.load(Ordering::Relaxed)).collect();
    let all: usize = served.iter().sum();
    eprintln!("{all} were served in {:?}, {served:?} by replica", began.elapsed());
    assert!(all >= 200 * 6, "whoever did not give up was served: {served:?}");
    assert!(served.iter().all(|part| part * 5 > all), "no replica got less than a fifth: {served:?}");
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn below_the_cap_the_broker_hears_nothing_and_above_it_one_ticket_a_request() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(2, &redis, &settings(&rabbit, 1)).await;
    let calls = || replicas.iter().map(Replica::broker_calls).sum::<u64>();
    for n in 0..50 {
        drop(replicas[n % 2].slot(0).await);
        becomes("given back", 5 * SECOND, || counts(&redis).0 == 0).await;
    }
    // A heartbeat asks nothing either.
    sleep(2 * SECOND).await;
    assert_eq!(calls(), 0, "below the cap");

    let in_use = replicas[0].slot(0).await;
    let held = [with_ticket(&replicas[0], 0).await, with_ticket(&replicas[1], 0).await];
    assert_eq!(calls(), 2, "one ticket each");
    drop(in_use);
    for ticket in held {
        assert!(matches!(ticket.turn(Instant::now() + GENEROUS).await, Turn::Slot(_)));
    }
    quiet(&redis, &replicas).await;
    // The own ticket: one look. That of the other: one look and a grant.
    assert_eq!(calls(), 5, "two tickets, two looks, one grant");
    assert_eq!(replicas.iter().map(confirmed).sum::<u64>(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_dies_with_slots_and_tickets_keeps_nobody_waiting_beyond_its_lease() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let lease = 3 * SECOND;
    let mut replicas = Replica::several(3, &redis, &Settings { lease, ..settings(&rabbit, 3) }).await;
    let killed = replicas.remove(2);
    let slots = [killed.slot(0).await, killed.slot(0).await];
    let in_use = replicas[0].slot(0).await;
    // The dead replica's tickets are before all others.
    let mut dead = Vec::new();
    for _ in 0..5 {
        dead.push(with_ticket(&killed, 0).await);
    }
    let first = with_ticket(&replicas[0], 1).await;
    let second = with_ticket(&replicas[1], 1).await;
    let third = with_ticket(&replicas[1], 1).await;
    killed.kill();
    let began = Instant::now();
    drop((slots, dead));
    drop(in_use);
    // The one slot that is left goes on at once, past the tickets of the dead.
    let Turn::Slot(slot) = first.turn(Instant::now() + GENEROUS).await else { panic!("served") };
    assert!(began.elapsed() < 2 * SECOND, "{:?}", began.elapsed());
    assert_eq!(counts(&redis).0, 3, "the dead replica's slots count as used until its lease ends");
    let both = join_all([second, third].map(|ticket| ticket.turn(Instant::now() + GENEROUS))).await;
    assert!(both.iter().all(|turn| matches!(turn, Turn::Slot(_))));
    assert!(began.elapsed() < lease + 2 * SECOND, "{:?}", began.elapsed());
    drop((slot, both));
    quiet(&redis, &replicas).await;
}

/// Everything that an operator and a bad day can do to a broker, one after another, with the same requests held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_requests_keep_their_places_through_whatever_becomes_of_the_broker() {
    let (redis, mut rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(2, &redis, &settings(&rabbit, 1)).await;
    let (a, b) = (&replicas[0], &replicas[1]);
    let mut in_use = a.slot(0).await;
    // Two serve each other's turn at each step: the next one in line, and nobody waits for longer than it says.
    let next = async |what: &str, ticket: SharedTicket, within: Duration| {
        let began = Instant::now();
        let turn = ticket.turn(Instant::now() + within).await;
        eprintln!("{what}: served after {:?}", began.elapsed());
        match turn {
            Turn::Slot(slot) => slot,
            other => panic!("{what}: {other:?}"),
        }
    };

    // Where no ticket says whose turn it is, both are served, whoever is first.
    let both = async |what: &str, one: SharedTicket, two: SharedTicket, within: Duration| {
        let served = timeout(2 * within, order_of(vec![(one, 1), (two, 2)])).await;
        assert_eq!(served.map(|order| order.len()), Ok(2), "{what}");
        a.served(0, within).await.unwrap_or_else(|| panic!("{what}: the slot did not come back"))
    };

    let (first, other) = (with_ticket(b, 1).await, with_ticket(a, 1).await);
    rabbit.ctl(&["purge_queue", "bouncer:tickets:default:T1"]);
    drop(in_use);
    // No ticket is there: whoever looks gives the slot to its own, and its heartbeats to the other.
    in_use = both("purged", first, other, 2 * SECOND).await;

    let (first, other) = (with_ticket(b, 1).await, with_ticket(a, 1).await);
    rabbit.ctl(&["delete_queue", "bouncer:tickets:default:T1"]);
    // Whoever publishes next finds that out, makes the queue again, and publishes all of its own anew.
    let before = (b.downs(), confirmed(b));
    let third = b.ticket(1).await;
    becomes("noticed", 5 * SECOND, || b.downs() > before.0).await;
    becomes("published again", 5 * SECOND, || confirmed(b) >= before.1 + 2).await;
    drop(in_use);
    // In whatever order: the other replica's ticket went with the queue, and nobody told it.
    assert_eq!(order_of(vec![(first, 1), (other, 2), (third, 3)]).await.len(), 3);
    in_use = a.served(0, 5 * SECOND).await.expect("served");

    let (first, other) = (with_ticket(b, 1).await, with_ticket(a, 1).await);
    rabbit.stop();
    is_up(a, false, 2 * SECOND).await;
    is_up(b, false, 2 * SECOND).await;
    drop(in_use);
    in_use = both("stopped", first, other, 2 * SECOND).await;
    let (low, high) = (a.ticket(1).await, b.ticket(0).await);
    let before = [a, b].map(confirmed);
    rabbit.restart();
    for (replica, before) in [a, b].into_iter().zip(before) {
        is_up(replica, true, 5 * SECOND).await;
        // Whoever waits is published: shared order again.
        becomes("published again", 2 * SECOND, || confirmed(replica) > before).await;
    }
    drop(in_use);
    in_use = next("started again, the higher tier first", high, 2 * SECOND).await;
    assert_eq!(counts(&redis), (1, 1));
    drop(in_use);
    in_use = next("started again", low, 2 * SECOND).await;

    let (first, other) = (with_ticket(b, 1).await, with_ticket(a, 1).await);
    rabbit.pause();
    drop(in_use);
    // One call goes unanswered for 1 s, then the broker is down.
    in_use = both("paused", first, other, 3 * SECOND).await;
    rabbit.resume();
    is_up(a, true, 20 * SECOND).await;
    is_up(b, true, 20 * SECOND).await;

    rabbit.memory_alarm(true);
    let (first, other) = (b.ticket(1).await, a.ticket(1).await);
    drop(in_use);
    in_use = both("alarm", first, other, 3 * SECOND).await;
    rabbit.memory_alarm(false);
    is_up(a, true, 20 * SECOND).await;
    is_up(b, true, 20 * SECOND).await;
    let (low, high) = (with_ticket(a, 1).await, with_ticket(b, 0).await);
    drop(in_use);
    in_use = next("after the alarm, the higher tier first", high, 2 * SECOND).await;
    drop(in_use);
    in_use = next("after the alarm", low, 2 * SECOND).await;
    drop(in_use);
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_alone_is_cut_off_from_the_broker_serves_its_own_and_its_lost_grants_come_back() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let proxy = Proxy::start(rabbit.address()).await;
    let near = Replica::start(&redis, &settings(&rabbit, 1)).await;
    let url = RabbitServer::url_at(proxy.address());
    let far = Replica::start(&redis, &Settings { rabbitmq: Some(url), ..Settings::cap(1) }).await;

    // The network swallows whatever the far one says and hears, and nobody knows yet.
    let in_use = near.slot(0).await;
    let (first, second) = (with_ticket(&far, 1).await, with_ticket(&near, 1).await);
    proxy.both(Flow::Swallow);
    let began = Instant::now();
    drop(in_use);
    // The first ticket gets a grant that never arrives. It expires after 1 s, and heartbeats find the slot free.
    let (first, second) = (tokio::spawn(first.turn(began + GENEROUS)), second.turn(began + GENEROUS).await);
    let Turn::Slot(slot) = second else { panic!("served") };
    eprintln!("a lost grant cost {:?}", began.elapsed());
    assert!(began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
    is_up(&far, false, 5 * SECOND).await;
    assert!(!first.is_finished());
    drop(slot);
    // Cut off from tickets alone, it hears that the slot is free.
    let Ok(Ok(Turn::Slot(slot))) = timeout(2 * SECOND, first).await else { panic!("served") };

    // While it is away, slots pass both ways.
    let (first, second) = (far.ticket(1).await, with_ticket(&near, 1).await);
    drop(slot);
    let order = order_of(vec![(first, "far"), (second, "near")]).await;
    assert_eq!(order.len(), 2);
    let in_use = near.served(0, 5 * SECOND).await.expect("served");

    // Back again, in one order.
    let before = confirmed(&far);
    let held = far.ticket(0).await;
    proxy.cut();
    proxy.both(Flow::Pass);
    is_up(&far, true, 5 * SECOND).await;
    becomes("published again", 2 * SECOND, || confirmed(&far) > before).await;
    let low = with_ticket(&near, 1).await;
    drop(in_use);
    assert_eq!(order_of(vec![(low, "low"), (held, "high")]).await, ["high", "low"]);
    all_quiet(&redis, &rabbit, &[near, far]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_waiter_is_forgotten_where_a_policy_drops_or_refuses_tickets() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(2, &redis, &settings(&rabbit, 1)).await;
    for overflow in ["drop-head", "reject-publish"] {
        let definition = format!("{{\"max-length\":1,\"overflow\":\"{overflow}\"}}");
        rabbit.ctl(&["set_policy", "few", "^bouncer:tickets", &definition, "--apply-to", "queues"]);
        let in_use = replicas[0].served(0, 5 * SECOND).await.expect("served");
        let mut tickets = Vec::new();
        for n in 0..8 {
            tickets.push((replicas[n % 2].ticket(1).await, n));
        }
        sleep(SECOND / 2).await;
        drop(in_use);
        let began = Instant::now();
        assert_eq!(order_of(tickets).await.len(), 8);
        eprintln!("{overflow}: eight of which one has a ticket took {:?}", began.elapsed());
        assert!(began.elapsed() < 5 * SECOND, "{:?}", began.elapsed());
        quiet(&redis, &replicas).await;
    }
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_away_each_replica_serves_its_own_room_and_then_they_share_one_order_again() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let settings = Settings { timeout: SHORT, ..settings(&rabbit, 2) };
    let replicas = Replica::several(2, &redis, &settings).await;
    let [a, b] = &replicas[..] else { panic!("two") };
    let held = [a.slot(0).await, b.slot(0).await];
    let waiting = [with_ticket(a, 1).await, with_ticket(b, 1).await];
    redis.pause();
    becomes("cut off", 3 * SECOND, || a.is_cut_off() && b.is_cut_off()).await;
    drop(held);
    let slots = join_all(waiting.map(|ticket| ticket.turn(Instant::now() + 2 * SECOND))).await;
    assert!(slots.iter().all(|turn| matches!(turn, Turn::Slot(_))), "{slots:?}");
    let (low, high) = (a.ticket(1).await, b.ticket(0).await);
    redis.resume();
    becomes("shared again", 5 * SECOND, || !a.is_cut_off() && !b.is_cut_off()).await;
    becomes("the true counts", 2 * SECOND, || counts(&redis) == (2, 2)).await;
    let [one, two] = <[_; 2]>::try_from(slots).expect("two");
    drop(one);
    let Turn::Slot(high) = high.turn(Instant::now() + 2 * SECOND).await else { panic!("the higher tier first") };
    assert_eq!(counts(&redis), (2, 1));
    drop(two);
    assert!(matches!(low.turn(Instant::now() + 2 * SECOND).await, Turn::Slot(_)));
    drop(high);
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_ticket_was_purged_is_served_though_others_with_tickets_keep_coming() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let replicas = Replica::several(2, &redis, &settings(&rabbit, 1)).await;
    let mut in_use = replicas[0].slot(0).await;
    let purged = with_ticket(&replicas[0], 1).await;
    rabbit.ctl(&["purge_queue", "bouncer:tickets:default:T1"]);
    // From now on the line is never empty.
    let mut waiting = std::collections::VecDeque::new();
    for n in 0..20 {
        waiting.push_back(with_ticket(&replicas[n % 2], 1).await);
    }
    let began = Instant::now();
    let purged = tokio::spawn(purged.turn(began + GENEROUS));
    let mut n = 0;
    while !purged.is_finished() {
        waiting.push_back(with_ticket(&replicas[n % 2], 1).await);
        drop(in_use);
        n += 1;
        let first = waiting.pop_front().expect("twenty");
        tokio::select! {
            turn = first.turn(began + GENEROUS) => {
                let Turn::Slot(slot) = turn else { panic!("{turn:?}") };
                in_use = slot;
            }
            () = async { while !purged.is_finished() { sleep(Duration::from_millis(5)).await; } } => break,
        }
        sleep(Duration::from_millis(20)).await;
    }
    eprintln!("served after {:?} and {n} others", began.elapsed());
    assert!(began.elapsed() < 6 * SECOND, "{:?}", began.elapsed());
    assert!(matches!(purged.await, Ok(Turn::Slot(_))));
    drop(waiting);
    all_quiet(&redis, &rabbit, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neither_the_brokers_queues_nor_the_keys_of_redis_grow_over_restarts() {
    let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
    let settings = Settings { lease: SECOND, ..settings(&rabbit, 1) };
    let survivor = Replica::start(&redis, &settings).await;
    let mut sizes = Vec::new();
    for _ in 0..4 {
        let replica = Replica::start(&redis, &settings).await;
        let (slot, ticket) = (replica.served(0, GENEROUS).await, with_ticket(&survivor, 0).await);
        let waits = with_ticket(&replica, 1).await;
        replica.kill();
        drop((slot, waits));
        drop(ticket.turn(Instant::now() + GENEROUS).await);
        quiet(&redis, std::slice::from_ref(&survivor)).await;
        becomes("one replica left", 5 * SECOND, || ask::<usize>(&redis, &["ZCARD", &key("replicas")]) == 1).await;
        let keys: Vec<String> = ask(&redis, &["KEYS", "*"]);
        sizes.push((rabbit.rows(&["list_queues", "name"]).len(), keys.len()));
    }
    // Two lines of tickets and the survivor's queue of grants; the slots and waiters of nobody are no keys.
    assert!(sizes.iter().all(|(queues, keys)| *queues == 3 && *keys <= 4), "{sizes:?}");
}
