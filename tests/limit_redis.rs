//! Limits in a real Redis: what it keeps, what it refuses, and what happens while it is away.

#[path = "support/ports.rs"]
mod ports;
#[path = "support/redis.rs"]
mod server;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bouncer::config;
use bouncer::limit::outage::{Limits, Metered, Stores};
use bouncer::limit::{BucketKey, Charge, Level, OnOutage, Quota, Rate};
use bouncer::metrics::StoreMetrics;
use futures_util::future::join_all;
use prometheus::Registry;
use server::RedisServer;
use tokio::time::{Instant, sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(86_400);
/// So that a busy machine does not look like an outage.
const GENEROUS: Duration = Duration::from_secs(20);
/// For the tests of outages. Longer than the default of the configuration, for the sake of busy machines.
const SHORT: Duration = Duration::from_millis(200);
/// What a busy machine may add to a deadline.
const SLACK: Duration = Duration::from_millis(300);

fn number(n: u64) -> NonZeroU64 {
    NonZeroU64::new(n).expect("not zero")
}

fn quota(count: u64, per: Duration, burst: u64) -> Quota {
    Quota { rate: Rate { count: number(count), per }, burst: number(burst) }
}

/// One process of bouncer, as far as limits go.
struct Process {
    stores: Stores,
    metrics: StoreMetrics,
}

impl Process {
    fn new(url: String, timeout: Duration, on_outage: OnOutage) -> Self {
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let redis = config::Redis { timeout, on_outage, ..config::Redis::at(url) };
        Self { stores: Stores::new(Some(&redis), &metrics).expect("a good URL"), metrics }
    }

    async fn connected(server: &RedisServer, timeout: Duration, on_outage: OnOutage) -> (Self, Limits) {
        let process = Self::new(server.url(), timeout, on_outage);
        let limits = process.stores.limits();
        limits.settled().await;
        assert!(process.is_up(), "{}", process.last_error());
        (process, limits)
    }

    fn is_up(&self) -> bool {
        self.stores.status().expect("there is a redis").up
    }

    fn last_error(&self) -> String {
        self.stores.status().expect("there is a redis").last_error.unwrap_or_default()
    }

    fn fallbacks(&self, policy: &str) -> u64 {
        self.metrics.fallback.with_label_values(&["redis", policy]).get()
    }

    async fn becomes(&self, up: bool, within: Duration) {
        let waited = timeout(within, async {
            while self.is_up() != up {
                sleep(Duration::from_millis(2)).await;
            }
        });
        assert!(waited.await.is_ok(), "up = {up} within {within:?}; last error: {}", self.last_error());
        let gauge = self.metrics.up.with_label_values(&["redis"]).get();
        assert_eq!(gauge, i64::from(up));
    }
}

async fn take(limits: &Limits, tenant: &str, quota: Quota, cost: u64) -> Metered {
    let bucket = BucketKey::tenant(tenant);
    limits.take(&[Charge { bucket: &bucket, quota, cost: number(cost) }], None).await
}

fn taken(metered: Metered) -> Level {
    match metered {
        Metered::Taken(level) => level,
        other => panic!("{other:?}"),
    }
}

fn is_taken(metered: Metered) -> bool {
    match metered {
        Metered::Taken(_) => true,
        Metered::Refused { .. } => false,
        other @ (Metered::Unmetered | Metered::Unavailable) => panic!("{other:?}"),
    }
}

/// Runs a command and gives its answer.
fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}

fn key(tenant: &str) -> String {
    BucketKey::tenant(tenant).as_str().to_owned()
}

fn assert_every_key_expires(server: &RedisServer) {
    let keys: Vec<String> = ask(server, &["KEYS", "bouncer:*"]);
    assert!(!keys.is_empty());
    for key in keys {
        // A key may be gone since, but never stay.
        assert_ne!(ask::<i64>(server, &["PTTL", &key]), -1, "{key} stays for ever");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_cache_that_is_flushed_under_load_costs_no_request_and_no_token() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(1, DAY, 700);
    let done = AtomicBool::new(false);
    let granted = std::thread::scope(|scope| {
        let flushes = scope.spawn(|| {
            let mut connection = server.connection();
            let mut flushes = 0;
            while !done.load(Ordering::Relaxed) {
                redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).expect("redis answers");
                flushes += 1;
            }
            flushes
        });
        let calls = (0..32).map(|_| async {
            let mut granted = 0;
            for _ in 0..40 {
                granted += u32::from(is_taken(take(&limits, "flushed", quota, 1).await));
            }
            granted
        });
        let granted: u32 = tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(join_all(calls)))
            .into_iter()
            .sum();
        done.store(true, Ordering::Relaxed);
        assert!(flushes.join().expect("no panic") > 10, "flushed while the load went on");
        granted
    });
    assert_eq!(granted, 700);
    assert_eq!(process.last_error(), "");
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn hostile_names_are_separate_buckets_on_a_cluster() {
    let server = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    ask::<()>(&server, &["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    let deadline = Instant::now() + GENEROUS;
    while !ask::<String>(&server, &["CLUSTER", "INFO"]).contains("cluster_state:ok") {
        assert!(Instant::now() < deadline, "the cluster comes up");
        sleep(Duration::from_millis(10)).await;
    }
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let long = "x".repeat(256);
    let braces = "{}".repeat(128);
    let names = [
        "{}",
        "a}b{c",
        "}{",
        "{a",
        "a}",
        "{",
        "}",
        "{{}}",
        "with space",
        "a",
        "a%7D",
        "a:b",
        "bouncer:bucket:{a}",
        "ü",
        "\r\nFLUSHALL\r\n",
        "\0",
        &long,
        &braces,
    ];
    for name in names {
        let granted = join_all((0..5).map(|_| take(&limits, name, quota(1, DAY, 3), 1))).await;
        assert_eq!(granted.into_iter().filter(|call| is_taken(*call)).count(), 3, "{name:?}");
        let key = key(name);
        let (_, tag) = key.split_once('{').expect("an opening brace");
        let tag = tag.strip_suffix('}').expect("a closing brace at the end");
        assert!(!tag.is_empty() && !tag.contains(['{', '}']), "{key}");
        assert_eq!(
            ask::<u16>(&server, &["CLUSTER", "KEYSLOT", &key]),
            ask::<u16>(&server, &["CLUSTER", "KEYSLOT", tag]),
            "{key}"
        );
    }
    let keys: Vec<String> = ask(&server, &["KEYS", "bouncer:bucket:*"]);
    assert_eq!(keys.len(), names.len());
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn a_key_that_was_made_to_stay_expires_again() {
    let server = RedisServer::start();
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(5, 10 * SECOND, 5);
    for cost in [1, 5] {
        // Once by a take that is granted, once by one that is refused.
        taken(take(&limits, "stays", quota, 1).await);
        assert!(ask::<bool>(&server, &["PERSIST", &key("stays")]));
        assert_eq!(is_taken(take(&limits, "stays", quota, cost).await), cost == 1);
        let ttl = ask::<i64>(&server, &["PTTL", &key("stays")]);
        assert!((1..=11_000).contains(&ttl), "{ttl} ms");
    }
}

#[tokio::test]
async fn a_foreign_value_in_a_bucket_heals() {
    let server = RedisServer::start();
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(1, DAY, 5);
    let bucket = key("foreign");
    let foreign: [&[&str]; 6] = [
        &["SET", &bucket, "hello"],
        &["SET", &bucket, ""],
        &["RPUSH", &bucket, "a", "b"],
        &["HSET", &bucket, "tokens", "5"],
        &["SADD", &bucket, "a"],
        &["SET", &bucket, "nan 99999999999999999999"],
    ];
    for command in foreign {
        ask::<()>(&server, &["DEL", &bucket]);
        ask::<redis::Value>(&server, command);
        assert_eq!(taken(take(&limits, "foreign", quota, 1).await).remaining, 4, "{command:?}");
        assert_eq!(taken(take(&limits, "foreign", quota, 1).await).remaining, 3, "{command:?}");
    }
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn huge_numbers_arrive_and_stay_exact() {
    let server = RedisServer::start();
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(999_999_999_999_999, DAY, 999_999_999_999_999);
    let level = taken(take(&limits, "huge", quota, 1).await);
    assert_eq!((level.limit, level.remaining), (999_999_999_999_999, 999_999_999_999_998));
    taken(take(&limits, "huge", quota, 123_451_234_512_345).await);
    let stored: String = ask(&server, &["GET", &key("huge")]);
    assert!(!stored.contains('e'), "{stored}");
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn a_bucket_refills_by_the_time_of_the_server_that_keeps_it() {
    let server = RedisServer::start();
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(1, 3600 * SECOND, 5);
    taken(take(&limits, "aged", quota, 5).await);
    let stored: String = ask(&server, &["GET", &key("aged")]);
    let last: u64 = stored.split_once(' ').expect("two numbers").1.parse().expect("microseconds");
    let (seconds, micros): (u64, u64) = ask(&server, &["TIME"]);
    assert!((last..last + 60_000_000).contains(&(seconds * 1_000_000 + micros)));
    // As if three hours had gone by on the server.
    ask::<()>(&server, &["SET", &key("aged"), &format!("0 {}", last - 3 * 3_600_000_000), "PX", "100000"]);
    assert_eq!(taken(take(&limits, "aged", quota, 1).await).remaining, 2);
}

#[tokio::test]
async fn under_load_the_promise_is_kept_and_not_exceeded() {
    let server = RedisServer::start();
    let process = Process::new(server.url(), GENEROUS, OnOutage::Deny);
    let workers = [process.stores.limits(), process.stores.limits()];
    join_all(workers.iter().map(Limits::settled)).await;
    let quota = quota(200, SECOND, 50);
    let began = Instant::now();
    let calls = (0..32).map(|i| {
        let limits = &workers[i % 2];
        async move {
            let mut granted = 0u32;
            while began.elapsed() < SECOND {
                granted += u32::from(is_taken(take(limits, "loaded", quota, 1).await));
            }
            granted
        }
    });
    let granted = f64::from(join_all(calls).await.into_iter().sum::<u32>());
    let promised = 50.0 + 200.0 * began.elapsed().as_secs_f64();
    assert!(granted <= promised, "{granted} of {promised}");
    // The last calls of the second may come late on a busy machine.
    assert!(granted >= 50.0 + 200.0 * 0.9, "{granted} of {promised}");
}

#[tokio::test]
async fn a_user_who_may_not_read_the_time_gets_a_store_that_is_down_and_says_why() {
    let server = RedisServer::start();
    ask::<()>(&server, &["ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all", "-time", "-script"]);
    let url = format!("redis://app:secret@127.0.0.1:{}", server.port());
    let process = Process::new(url, GENEROUS, OnOutage::Deny);
    let limits = process.stores.limits();
    limits.settled().await;
    assert!(!process.is_up());
    assert!(process.last_error().contains("TIME"), "{}", process.last_error());
    assert!(!process.last_error().contains("secret"), "{}", process.last_error());
    for _ in 0..5 {
        assert_eq!(take(&limits, "acme", quota(1, DAY, 2), 1).await, Metered::Unavailable);
    }
    assert_eq!(process.fallbacks("deny"), 5);
    // Given the right, it comes up by itself.
    ask::<()>(&server, &["ACL", "SETUSER", "app", "+time"]);
    process.becomes(true, 5 * SECOND).await;
}

#[tokio::test]
async fn a_user_who_may_not_manage_scripts_is_served() {
    let server = RedisServer::start();
    ask::<()>(&server, &["ACL", "SETUSER", "app", "on", ">secret", "~bouncer:*", "+@all", "-script"]);
    let url = format!("redis://app:secret@127.0.0.1:{}", server.port());
    let process = Process::new(url, GENEROUS, OnOutage::Deny);
    let limits = process.stores.limits();
    limits.settled().await;
    for left in [4, 3, 2, 1, 0] {
        assert_eq!(taken(take(&limits, "acme", quota(1, DAY, 5), 1).await).remaining, left);
        ask::<()>(&server, &["SCRIPT", "FLUSH"]);
    }
    assert!(process.is_up());
}

#[tokio::test]
async fn a_wrong_password_is_an_outage_that_says_so_and_keeps_it_secret() {
    let server = RedisServer::start();
    ask::<()>(&server, &["ACL", "SETUSER", "app", "on", ">right", "~*", "+@all"]);
    let process = Process::new(format!("redis://app:wrong@127.0.0.1:{}", server.port()), GENEROUS, OnOutage::Deny);
    let limits = process.stores.limits();
    limits.settled().await;
    assert!(!process.is_up());
    let reason = process.last_error();
    assert!(reason.to_lowercase().contains("authentication") && !reason.contains("wrong@"), "{reason}");
    assert_eq!(take(&limits, "acme", quota(1, DAY, 2), 1).await, Metered::Unavailable);
}

#[tokio::test]
async fn while_redis_hangs_every_call_is_answered_by_policy_and_soon_none_waits() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, SHORT, OnOutage::Allow).await;
    let plenty = quota(1, DAY, 1_000_000);
    server.pause();
    let began = Instant::now();
    let first = join_all((0..50).map(|_| take(&limits, "hung", plenty, 1))).await;
    assert!(began.elapsed() < SHORT + SLACK, "{:?}", began.elapsed());
    assert!(first.iter().all(|call| *call == Metered::Unmetered));
    process.becomes(false, SECOND).await;
    // Down: none waits. If each did, a thousand calls would take more than three minutes.
    let began = Instant::now();
    for _ in 0..1000 {
        assert_eq!(take(&limits, "hung", plenty, 1).await, Metered::Unmetered);
    }
    assert!(began.elapsed() < SECOND, "{:?}", began.elapsed());
    // Connecting and probing go on all the while, and disturb nobody.
    let until = Instant::now() + 2 * SECOND;
    let mut waits = Vec::new();
    while Instant::now() < until {
        let began = Instant::now();
        assert_eq!(take(&limits, "hung", plenty, 1).await, Metered::Unmetered);
        waits.push(began.elapsed());
        sleep(Duration::from_millis(1)).await;
    }
    waits.sort();
    let p99 = waits[waits.len() * 99 / 100];
    assert!(p99 < Duration::from_millis(20), "{p99:?} of {}", waits.len());
    assert_eq!(process.metrics.transitions.with_label_values(&["redis", "down"]).get(), 1);
    assert!(process.metrics.errors.with_label_values(&["redis", "timeout"]).get() >= 3);
    assert!(process.fallbacks("allow") >= 1050);
    server.resume();
    process.becomes(true, 5 * SECOND).await;
    taken(take(&limits, "hung", plenty, 1).await);
}

#[tokio::test]
async fn a_call_that_timed_out_is_carried_out_once_or_not_at_all() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, SHORT, OnOutage::Deny).await;
    let quota = quota(1, DAY, 10);
    server.pause();
    for tenant in ["late-1", "late-2"] {
        assert_eq!(take(&limits, tenant, quota, 1).await, Metered::Unavailable);
    }
    server.resume();
    process.becomes(true, 5 * SECOND).await;
    for tenant in ["late-1", "late-2"] {
        let left = taken(take(&limits, tenant, quota, 1).await).remaining;
        assert!(left == 8 || left == 9, "{left} left of 10");
    }
}

#[tokio::test]
async fn a_take_that_is_dropped_is_carried_out_once_or_not_at_all() {
    let server = RedisServer::start();
    let (_, limits) = Process::connected(&server, GENEROUS, OnOutage::Deny).await;
    let quota = quota(1, DAY, 10);
    let mut dropped = 0;
    for i in 0..300u64 {
        let tenant = format!("dropped-{i}");
        let call = take(&limits, &tenant, quota, 1);
        // Dropped before the first poll, between polls, or done.
        tokio::select! {
            biased;
            () = async { for _ in 0..i % 6 { tokio::task::yield_now().await } } => dropped += 1,
            metered = call => { taken(metered); }
        }
    }
    assert!(dropped > 0);
    for i in 0..300 {
        let left = taken(take(&limits, &format!("dropped-{i}"), quota, 1).await).remaining;
        assert!(left == 8 || left == 9, "{left} left of 10");
    }
}

#[tokio::test]
async fn a_redis_that_is_killed_is_shared_again_within_five_seconds_of_its_return() {
    let mut server = RedisServer::start();
    let process = Process::new(server.url(), SHORT, OnOutage::Deny);
    let workers = [process.stores.limits(), process.stores.limits()];
    join_all(workers.iter().map(Limits::settled)).await;
    let quota = quota(1, DAY, 5);
    taken(take(&workers[0], "back", quota, 1).await);
    server.stop();
    process.becomes(false, SECOND).await;
    assert_eq!(take(&workers[0], "back", quota, 1).await, Metered::Unavailable);
    server.restart();
    let deadline = Instant::now() + 5 * SECOND;
    for limits in &workers {
        // Each runtime finds its own way back.
        while take(limits, "probe of the test", quota, 1).await == Metered::Unavailable {
            assert!(Instant::now() < deadline, "{}", process.last_error());
            sleep(Duration::from_millis(5)).await;
        }
    }
    let mut granted = 0;
    for i in 0..10 {
        granted += u32::from(is_taken(take(&workers[i % 2], "shared", quota, 1).await));
    }
    assert_eq!(granted, 5, "one budget for both");
}

#[tokio::test]
async fn a_redis_that_is_not_there_at_the_start_is_an_outage_like_any_other() {
    let mut server = RedisServer::start();
    server.stop();
    let process = Process::new(server.url(), SHORT, OnOutage::Allow);
    let limits = process.stores.limits();
    assert_eq!(take(&limits, "early", quota(1, DAY, 5), 1).await, Metered::Unmetered);
    limits.settled().await;
    assert!(!process.is_up());
    assert!(process.last_error().contains("refused"), "{}", process.last_error());
    server.restart();
    process.becomes(true, 5 * SECOND).await;
    taken(take(&limits, "early", quota(1, DAY, 5), 1).await);
}

#[tokio::test]
async fn the_first_request_waits_for_the_first_connection() {
    let server = RedisServer::start();
    let process = Process::new(server.url(), GENEROUS, OnOutage::Deny);
    taken(take(&process.stores.limits(), "first", quota(1, DAY, 5), 1).await);
    assert!(process.is_up());
}

#[tokio::test]
async fn a_connection_that_is_cut_is_made_again() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, SHORT, OnOutage::Deny).await;
    for _ in 0..3 {
        ask::<i64>(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        let deadline = Instant::now() + 5 * SECOND;
        while take(&limits, "cut", quota(1, SECOND, 1000), 1).await == Metered::Unavailable {
            assert!(Instant::now() < deadline, "{}", process.last_error());
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn a_worker_that_gets_no_connection_is_metered_over_anothers_and_by_policy_only_when_nobody_has_one() {
    let server = RedisServer::start();
    let (process, first) = Process::connected(&server, GENEROUS, OnOutage::Allow).await;
    let mut admin = server.connection();
    redis::cmd("CONFIG").arg(&["SET", "maxclients", "1"]).exec(&mut admin).expect("redis answers");
    let quota = quota(1, DAY, 5);
    // As in a process, a runtime of its own; this one goes on serving the first.
    let (granted, (process, second)) = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let second = process.stores.limits();
            second.settled().await;
            let mut granted = 0;
            for _ in 0..10 {
                granted += u32::from(is_taken(take(&second, "crowded", quota, 1).await));
            }
            (granted, (process, second))
        })
    })
    .await
    .expect("no panic");
    assert_eq!(granted, 5);
    assert!(!is_taken(take(&first, "crowded", quota, 1).await), "one budget for both");
    assert!(process.is_up());
    // Its refusal, or that it closes the connection, whichever is seen first.
    assert_ne!(process.last_error(), "");
    assert!(process.metrics.errors.with_label_values(&["redis", "connection"]).get() > 0);
    assert_eq!(process.fallbacks("allow"), 0);

    redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).exec(&mut admin).expect("redis answers");
    process.becomes(false, SECOND).await;
    assert_eq!(take(&second, "crowded", quota, 1).await, Metered::Unmetered);
    assert_eq!(process.fallbacks("allow"), 1);
}

#[tokio::test]
async fn a_replica_that_takes_no_writes_counts_as_down() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, SHORT, OnOutage::Deny).await;
    // Nobody listens there; that makes it a replica all the same.
    ask::<()>(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    for _ in 0..3 {
        assert_eq!(take(&limits, "replica", quota(1, DAY, 5), 1).await, Metered::Unavailable);
    }
    process.becomes(false, SECOND).await;
    assert!(process.last_error().contains("READONLY"), "{}", process.last_error());
    ask::<()>(&server, &["REPLICAOF", "NO", "ONE"]);
    process.becomes(true, 5 * SECOND).await;
}

#[tokio::test]
async fn a_redis_without_memory_counts_as_down_until_it_has_some() {
    let server = RedisServer::start();
    let (process, limits) = Process::connected(&server, SHORT, OnOutage::Deny).await;
    ask::<()>(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    for _ in 0..3 {
        assert_eq!(take(&limits, "crowded", quota(1, DAY, 5), 1).await, Metered::Unavailable);
    }
    process.becomes(false, SECOND).await;
    assert!(process.last_error().contains("OOM"), "{}", process.last_error());
    // The probe writes too: it does not take the store for well.
    sleep(Duration::from_millis(700)).await;
    assert!(!process.is_up());
    ask::<()>(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    process.becomes(true, 5 * SECOND).await;
}

#[tokio::test]
async fn local_buckets_are_one_budget_of_the_process_and_a_tier_may_choose_otherwise() {
    let mut server = RedisServer::start();
    server.stop();
    let process = Process::new(server.url(), SHORT, OnOutage::Local);
    let workers = [process.stores.limits(), process.stores.limits()];
    join_all(workers.iter().map(Limits::settled)).await;
    let quota = quota(1, DAY, 20);
    let mut granted = 0;
    for i in 0..50 {
        granted += u32::from(is_taken(take(&workers[i % 2], "local", quota, 1).await));
    }
    assert_eq!(granted, 20);
    assert_eq!(process.stores.buckets_in_use(), 1);
    let bucket = BucketKey::tenant("local");
    let charges = [Charge { bucket: &bucket, quota, cost: number(1) }];
    workers[0].give_back(&charges).await;
    assert_eq!(taken(workers[1].take(&charges, None).await).remaining, 0, "given back where it was taken");
    assert_eq!(workers[0].take(&charges, Some(OnOutage::Allow)).await, Metered::Unmetered);
    assert_eq!(workers[0].take(&charges, Some(OnOutage::Deny)).await, Metered::Unavailable);
    assert_eq!((process.fallbacks("local"), process.fallbacks("allow"), process.fallbacks("deny")), (51, 1, 1));
}
