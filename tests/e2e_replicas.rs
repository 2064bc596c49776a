//! Three bouncers behind one Envoy, with one Redis: one cap and one order over all of them.

mod support;

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::client::{Answer, Client};
use support::redis::RedisServer;
use support::stack::{Bouncer, Stack, StackOptions};
use support::wait::eventually;

const SECOND: Duration = Duration::from_secs(1);
const READY: Duration = Duration::from_secs(30);
/// Shorter than the default, so that a test need not wait for 10 s. A heartbeat is due every 0.4 s.
const LEASE: Duration = Duration::from_secs(4);
/// Generous, so that a busy machine does not look like an outage.
const TIMEOUT: &str = "5s";

fn config(server: &RedisServer, cap: u32, wait: &str) -> String {
    let lease = LEASE.as_secs();
    format!(
        "
redis: {{ url: '{}', timeout: {TIMEOUT} }}
tiers:
  - {{ name: T3, rate: 100000/s, queue: {{ length: 1000, max_wait: {wait} }} }}
  - {{ name: T1, rate: 100000/s, queue: {{ length: 1000, max_wait: {wait} }} }}
tenants:
  - {{ id: acme, tier: T3, keys: [key_t3_demo] }}
  - {{ id: initech, tier: T1, keys: [key_t1_demo] }}
pools:
  - {{ name: default, max_in_flight: {cap} }}
lease: {lease}s
",
        server.url()
    )
}

fn bouncers(stack: &Stack) -> impl Iterator<Item = &Bouncer> {
    std::iter::once(&stack.bouncer).chain(&stack.others)
}

async fn start(server: &RedisServer, cap: u32, wait: &str) -> Stack {
    let stack = Stack::start(StackOptions::new(config(server, cap, wait)).replicas(3)).await;
    eventually("replicas that know each other", READY, async || {
        for bouncer in bouncers(&stack) {
            let stats = support::client::fetch(&bouncer.admin_url("/stats")).await?.json();
            (stats["pools"][0]["shared"]["replicas"] == 3).then_some(())?;
        }
        Some(())
    })
    .await;
    stack
}

fn in_redis(server: &RedisServer) -> (usize, usize) {
    let mut connection = server.connection();
    let mut count = |key: &str| {
        let key = format!("bouncer:pool:{{default}}:{key}");
        redis::cmd("HLEN").arg(key).query(&mut connection).expect("redis answers")
    };
    (count("slots"), count("waiters"))
}

async fn quiet(stack: &Stack, server: &RedisServer) {
    eventually("nothing in flight and nobody waiting", READY, async || {
        (stack.record().current == 0 && in_redis(server) == (0, 0)).then_some(())
    })
    .await;
}

async fn held(stack: &Stack, tier: &str, count: f64) {
    eventually("held requests", READY, async || {
        let mut depth = 0.0;
        for bouncer in bouncers(stack) {
            depth += bouncer.metrics().await.sum("bouncer_queue_depth", &[("tier", tier)]);
        }
        (depth >= count).then_some(())
    })
    .await;
}

fn spawn(client: &Client, id: String, path: &'static str, key: &'static str) -> tokio::task::JoinHandle<Answer> {
    let client = client.clone();
    tokio::spawn(async move { client.get_as(&id, path, key).await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cap_holds_over_three_replicas_and_each_serves_its_share() {
    let server = RedisServer::start();
    let stack = start(&server, 6, "20s").await;
    let client = stack.client();
    let began = Instant::now();

    let answers = join_all((0..300).map(|n| {
        let client = &client;
        async move { client.get_as(&n.to_string(), "/delay/0.02", ["key_t3_demo", "key_t1_demo"][n % 2]).await }
    }))
    .await;

    assert!(answers.iter().all(|answer| answer.status == 200));
    let record = stack.record();
    assert_eq!((record.total, record.maximum), (300, 6));
    // 300 times 20 ms by six at a time are 1 s; a wake-up that is lost costs up to 0.4 s for one of six slots.
    eprintln!("300 requests of 20 ms through 6 slots took {:?}", began.elapsed());
    let mut handovers = [0.0, 0.0];
    for bouncer in bouncers(&stack) {
        let metrics = bouncer.metrics().await;
        let share = metrics.sum("bouncer_backend_duration_seconds_count", &[]);
        assert!(share >= 60.0, "a replica served {share} of 300");
        for (sum, route) in handovers.iter_mut().zip(["own", "other"]) {
            *sum += metrics.sum("bouncer_handovers_total", &[("route", route)]);
        }
    }
    assert!(handovers[0] > 0.0 && handovers[1] > 0.0, "{handovers:?} by route");
    // Those that waited got their slots by hand-over, and the first six did not wait.
    assert!(handovers[0] + handovers[1] <= 294.0, "{handovers:?} by route");
    quiet(&stack, &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_higher_tier_is_served_first_wherever_it_is_held() {
    let server = RedisServer::start();
    let stack = start(&server, 1, "20s").await;
    let client = stack.client();

    let first = spawn(&client, "first".into(), "/delay/2", "key_t1_demo");
    stack.wait_until_in_flight(1).await;
    let low: Vec<_> = (0..9).map(|n| spawn(&client, format!("low-{n}"), "/delay/0.01", "key_t1_demo")).collect();
    held(&stack, "T1", 9.0).await;
    let high: Vec<_> = (0..9).map(|n| spawn(&client, format!("high-{n}"), "/delay/0.01", "key_t3_demo")).collect();
    held(&stack, "T3", 9.0).await;

    for answer in join_all(low.into_iter().chain(high).chain([first])).await {
        assert_eq!(answer.expect("no panic").status, 200);
    }
    let record = stack.record();
    assert_eq!(record.maximum, 1);
    let order: Vec<_> = record.order().into_iter().map(|id| id.split('-').next().unwrap_or_default()).collect();
    assert_eq!(order, [vec!["first"], vec!["high"; 9], vec!["low"; 9]].concat());
    quiet(&stack, &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_a_replica_is_killed_its_responses_complete_its_held_requests_move_and_its_slots_come_back() {
    let server = RedisServer::start();
    let mut stack = start(&server, 3, "20s").await;
    let client = stack.client();

    let running: Vec<_> = (0..3).map(|n| spawn(&client, format!("run-{n}"), "/delay/2", "key_t3_demo")).collect();
    stack.wait_until_in_flight(3).await;
    let waiting: Vec<_> = (0..9).map(|n| spawn(&client, format!("wait-{n}"), "/delay/0.05", "key_t1_demo")).collect();
    held(&stack, "T1", 9.0).await;
    stack.others[1].kill9();
    let killed = Instant::now();

    // The dead replica's slots count as used until its lease ends, and its responses are over before that.
    for answer in join_all(running.into_iter().chain(waiting)).await {
        assert_eq!(answer.expect("no panic").status, 200);
    }
    assert_eq!(stack.record().maximum, 3);
    eventually("the dead replica's slots", LEASE + SECOND, async || (in_redis(&server) == (0, 0)).then_some(())).await;
    assert!(killed.elapsed() < LEASE + 2 * SECOND, "{:?}", killed.elapsed());

    stack.others[1].start().await;
    stack.wait_until_healthy().await;
    let answers = join_all((0..30).map(|n| {
        let client = &client;
        async move { client.get_as(&format!("after-{n}"), "/delay/0.02", "key_t1_demo").await }
    }))
    .await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    assert_eq!(stack.record().maximum, 3);
    quiet(&stack, &server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_ends_in_good_order_leaves_nothing_behind() {
    let server = RedisServer::start();
    let mut stack = start(&server, 2, "20s").await;
    let client = stack.client();
    assert_eq!(client.get("/anything", Some("key_t3_demo")).await.status, 200);
    for bouncer in std::iter::once(&mut stack.bouncer).chain(&mut stack.others) {
        bouncer.terminate();
    }
    for bouncer in std::iter::once(&mut stack.bouncer).chain(&mut stack.others) {
        assert!(bouncer.exit(READY).await.success());
    }
    let left: Vec<String> =
        redis::cmd("KEYS").arg("bouncer:pool:*").query(&mut server.connection()).expect("redis answers");
    assert!(left.is_empty(), "{left:?}");
}
