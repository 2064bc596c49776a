//! A Redis that loses its scripts, hangs, dies, comes back or refuses, as clients of a real Envoy see it.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use http::Method;
use serde_json::Value;
use support::client::{Answer, Client, fetch};
use support::redis::RedisServer;
use support::stack::{Stack, StackOptions};
use support::wait::eventually;

/// A tier for each policy, with buckets that are as good as never refilled, and one that is refilled soon.
const TIERS: &str = "
tiers:
  - { name: allow, rate: 1/day, burst: 20, on_outage: allow }
  - { name: deny, rate: 1/day, burst: 20, on_outage: deny }
  - { name: local, rate: 1/day, burst: 20, on_outage: local }
  - { name: wide, rate: 1/day, burst: 300, on_outage: deny }
  - { name: short, rate: 1/s, burst: 5, on_outage: deny }
tenants:
  - { id: allow, tier: allow, keys: [key_allow] }
  - { id: deny, tier: deny, keys: [key_deny] }
  - { id: local, tier: local, keys: [key_local] }
  - { id: wide, tier: wide, keys: [key_wide] }
  - { id: short, tier: short, keys: [key_short] }
  - { id: 'a}b{c {}', tier: allow, keys: [key_of_braces] }
pools:
  - { name: default, max_in_flight: 50 }
";
const BURST: usize = 20;

/// So that a busy machine does not look like an outage.
const GENEROUS: &str = "20s";
/// For the outages: more than the default, as this machine may be busy with other tests while Redis is well.
const SHORT: &str = "500ms";
/// How soon limits are shared again.
const BACK: Duration = Duration::from_secs(5);
/// How long anything else may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

fn options(url: &str, timeout: &str) -> StackOptions {
    StackOptions::new(format!("redis: {{ url: '{url}', timeout: {timeout} }}\n{TIERS}"))
}

async fn stack(server: &RedisServer, timeout: &str) -> Stack {
    Stack::start(options(&server.url(), timeout)).await
}

async fn get(client: &Client, key: &str, count: usize) -> Vec<Answer> {
    join_all((0..count).map(|_| client.get("/anything", Some(key)))).await
}

/// How many were allowed, where every other answer must be a 429.
fn allowed(answers: &[Answer]) -> usize {
    let allowed = answers.iter().filter(|answer| answer.status == 200).count();
    for answer in answers.iter().filter(|answer| answer.status != 200) {
        assert_eq!((answer.status, answer.error().as_deref()), (429, Some("rate_limited")));
    }
    allowed
}

/// Whether a bucket was asked.
fn is_metered(answer: &Answer) -> bool {
    answer.header("x-ratelimit-limit").is_some()
}

fn assert_let_through_unmetered(answer: &Answer) {
    assert_eq!((answer.status, is_metered(answer)), (200, false), "{:?}", answer.headers);
}

fn assert_refused_as_unavailable(answer: &Answer) {
    assert_eq!((answer.status, answer.error().as_deref()), (503, Some("unavailable")));
    let wait: u32 = answer.header("retry-after").and_then(|text| text.parse().ok()).expect("whole seconds");
    assert!(wait >= 1);
}

/// What `/ready` says of Redis, which must come with a 200: a replica that answers by policy is ready.
async fn ready(stack: &Stack) -> Value {
    let answer = fetch(&stack.bouncer.admin_url("/ready")).await.expect("bouncer's admin port answers");
    assert_eq!(answer.status, 200);
    answer.json()["stores"]["redis"].take()
}

/// Waits until metric and `/ready` say that Redis is up, or down.
async fn store_becomes(stack: &Stack, up: bool, within: Duration) {
    eventually(&format!("a store with up = {up}"), within, async || {
        let metrics = stack.metrics().await;
        let labels = [("store", "redis")];
        assert!(metrics.has("bouncer_store_up", &labels));
        let gauge = metrics.count("bouncer_store_up", &labels);
        (gauge == u64::from(up) && ready(stack).await["up"] == up).then_some(())
    })
    .await;
}

/// Waits until requests are metered again on every way to Redis: each of bouncer's threads has one of its own.
async fn metered_again(stack: &Stack, within: Duration) {
    let client = stack.client();
    eventually("metered requests", within, async || {
        get(&client, "key_allow", 16).await.iter().all(is_metered).then_some(())
    })
    .await;
}

/// Runs a command and gives its answer.
fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}

fn all_keys(server: &RedisServer) -> Vec<String> {
    let keys: Vec<String> = ask(server, &["KEYS", "*"]);
    assert!(keys.iter().any(|key| key.starts_with("bouncer:bucket:")), "{keys:?}");
    keys
}

fn assert_every_key_expires(server: &RedisServer) {
    for key in all_keys(server) {
        // A key may be gone since, but never stay.
        assert_ne!(ask::<i64>(server, &["PTTL", &key]), -1, "{key} stays for ever");
    }
}

#[tokio::test]
async fn a_flushed_script_cache_costs_no_request_and_no_token() {
    let server = RedisServer::start();
    let stack = stack(&server, GENEROUS).await;
    let client = stack.client();

    let done = AtomicBool::new(false);
    let load = async {
        let clients = (0..20).map(async |_| {
            let mut answers = Vec::new();
            for _ in 0..30 {
                answers.push(client.get("/anything", Some("key_wide")).await);
            }
            answers
        });
        let answers = join_all(clients).await.concat();
        done.store(true, Ordering::Relaxed);
        answers
    };
    let flushes = async {
        let mut flushes = 0;
        while !done.load(Ordering::Relaxed) {
            ask::<()>(&server, &["SCRIPT", "FLUSH"]);
            flushes += 1;
            // Between two requests of this load, not a wait for anything.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        flushes
    };
    let (answers, flushes) = tokio::join!(load, flushes);

    assert_eq!((answers.len(), allowed(&answers)), (600, 300));
    assert_eq!(stack.record().total, 300);
    let metrics = stack.metrics().await;
    assert_eq!(metrics.count("bouncer_store_fallback_total", &[]), 0);
    assert_eq!(metrics.count("bouncer_store_errors_total", &[]), 0);
    let stats: String = ask(&server, &["INFO", "commandstats"]);
    assert!(flushes > 2 && stats.contains("cmdstat_eval:"), "the script was sent whole again: {flushes}, {stats}");
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn while_redis_hangs_everyone_is_answered_by_policy_without_asking_it() {
    let server = RedisServer::start();
    let stack = stack(&server, SHORT).await;
    let client = stack.client();
    store_becomes(&stack, true, PATIENCE).await;

    server.pause();
    let (mut allow, mut deny, mut local) = (Vec::new(), Vec::new(), Vec::new());
    eventually("a store that counts as down", PATIENCE, async || {
        let (one, two, three) =
            tokio::join!(get(&client, "key_allow", 4), get(&client, "key_deny", 4), get(&client, "key_local", 4));
        allow.extend(one);
        deny.extend(two);
        local.extend(three);
        (ready(&stack).await["up"] == false).then_some(())
    })
    .await;
    store_becomes(&stack, false, PATIENCE).await;
    // From here on no call is under way, and only tries to reconnect fail.
    let (calls, errors) = calls_and_errors(&stack).await;
    let done = AtomicBool::new(false);
    let load = |key: &'static str| {
        let (client, done) = (&client, &done);
        async move {
            let mut answers = Vec::new();
            while !done.load(Ordering::Relaxed) || answers.len() < 2 * BURST {
                answers.extend(get(client, key, 4).await);
            }
            answers
        }
    };
    let watch = async {
        eventually("two tries to reach Redis", PATIENCE, async || {
            (calls_and_errors(&stack).await.1 >= errors + 2).then_some(())
        })
        .await;
        done.store(true, Ordering::Relaxed);
    };
    let (one, two, three, ()) = tokio::join!(load("key_allow"), load("key_deny"), load("key_local"), watch);
    allow.extend(one);
    deny.extend(two);
    local.extend(three);

    // Redis still hangs, so all of these were answered without it.
    assert_eq!(calls_and_errors(&stack).await.0, calls, "no request asks a store that is down");
    allow.iter().for_each(assert_let_through_unmetered);
    deny.iter().for_each(assert_refused_as_unavailable);
    assert_eq!(allowed(&local), BURST);
    assert!(local.iter().all(is_metered));
    let metrics = stack.metrics().await;
    for (policy, answers) in [("allow", &allow), ("deny", &deny), ("local", &local)] {
        let answered = metrics.count("bouncer_store_fallback_total", &[("policy", policy)]);
        assert_eq!(answered, answers.len() as u64, "{policy}");
    }

    server.resume();
    metered_again(&stack, BACK).await;
    store_becomes(&stack, true, PATIENCE).await;
    let back = get(&client, "key_deny", 2 * BURST).await;
    // Calls that nobody waited for any more may have been carried out, each once.
    assert!((1..=BURST).contains(&allowed(&back)));
    assert_every_key_expires(&server);
}

/// How many calls to Redis have ended, and how much went wrong, tries to reconnect included.
async fn calls_and_errors(stack: &Stack) -> (u64, u64) {
    let metrics = stack.metrics().await;
    (metrics.count("bouncer_store_call_seconds_count", &[]), metrics.count("bouncer_store_errors_total", &[]))
}

#[tokio::test]
async fn replicas_share_buckets_and_share_them_again_after_redis_died() {
    let mut server = RedisServer::start();
    let (one, two) = tokio::join!(stack(&server, SHORT), stack(&server, SHORT));
    let (first, second) = (one.client(), two.client());
    tokio::join!(metered_again(&one, PATIENCE), metered_again(&two, PATIENCE));
    let both = async |key: &'static str, each| {
        let (mut answers, more) = tokio::join!(get(&first, key, each), get(&second, key, each));
        answers.extend(more);
        answers
    };
    assert_eq!(allowed(&both("key_deny", BURST).await), BURST);

    server.stop();
    tokio::join!(store_becomes(&one, false, PATIENCE), store_becomes(&two, false, PATIENCE));
    both("key_allow", 2 * BURST).await.iter().for_each(assert_let_through_unmetered);
    both("key_deny", 2 * BURST).await.iter().for_each(assert_refused_as_unavailable);
    // Each replica grants one bucket, and no more, however long it lasts.
    for client in [&first, &second] {
        assert_eq!(allowed(&get(client, "key_local", 2 * BURST).await), BURST);
    }

    server.restart();
    tokio::join!(metered_again(&one, BACK), metered_again(&two, BACK));
    // It came back empty: one full bucket for both.
    assert_eq!(allowed(&both("key_deny", BURST).await), BURST);
    assert_eq!(allowed(&both("key_local", BURST).await), BURST);
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn damaged_buckets_heal() {
    let server = RedisServer::start();
    let stack = stack(&server, GENEROUS).await;
    let client = stack.client();

    // Another value where a bucket was.
    let bucket = "bouncer:bucket:{deny}";
    assert_eq!(allowed(&get(&client, "key_deny", BURST + 1).await), BURST);
    ask::<()>(&server, &["DEL", bucket]);
    ask::<i64>(&server, &["RPUSH", bucket, "not", "a", "bucket"]);
    assert_eq!(allowed(&get(&client, "key_deny", BURST + 1).await), BURST);

    // A bucket that someone made stay.
    let bucket = "bouncer:bucket:{short}";
    let mut refused = client.get("/anything", Some("key_short")).await;
    for _ in 0..100 {
        if refused.status == 429 {
            break;
        }
        refused = client.get("/anything", Some("key_short")).await;
    }
    assert_eq!(refused.status, 429);
    assert!(ask::<bool>(&server, &["PERSIST", bucket]));
    client.get("/anything", Some("key_short")).await;
    assert!(ask::<i64>(&server, &["PTTL", bucket]) > 0, "it expires again");
    let answer = eventually("a token, a second later", PATIENCE, async || {
        Some(client.get("/anything", Some("key_short")).await).filter(|answer| answer.status == 200)
    })
    .await;
    assert!(is_metered(&answer));
    assert_every_key_expires(&server);
}

#[tokio::test]
async fn a_redis_that_is_not_there_at_the_start_is_an_outage_that_ends() {
    let mut server = RedisServer::start();
    server.stop();
    let stack = stack(&server, SHORT).await;
    let client = stack.client();

    store_becomes(&stack, false, PATIENCE).await;
    let error = ready(&stack).await["last_error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("refused"), "{error}");
    get(&client, "key_allow", 4).await.iter().for_each(assert_let_through_unmetered);
    get(&client, "key_deny", 4).await.iter().for_each(assert_refused_as_unavailable);
    assert_eq!(allowed(&get(&client, "key_local", 2 * BURST).await), BURST);

    server.restart();
    metered_again(&stack, BACK).await;
    store_becomes(&stack, true, PATIENCE).await;
    assert_eq!(allowed(&get(&client, "key_deny", 2 * BURST).await), BURST);
}

#[tokio::test]
async fn a_redis_that_refuses_the_time_is_never_open_in_silence() {
    let server = RedisServer::start();
    ask::<()>(&server, &["ACL", "SETUSER", "app", "on", ">hush-hush", "~*", "+@all", "-time", "-script"]);
    let url = format!("redis://app:hush-hush@127.0.0.1:{}", server.port());
    let stack = Stack::start(options(&url, GENEROUS)).await;
    let client = stack.client();

    store_becomes(&stack, false, PATIENCE).await;
    let error = ready(&stack).await["last_error"].as_str().unwrap_or_default().to_owned();
    assert!(error.contains("TIME"), "{error}");
    get(&client, "key_allow", 30).await.iter().for_each(assert_let_through_unmetered);
    get(&client, "key_deny", 30).await.iter().for_each(assert_refused_as_unavailable);
    assert_eq!(allowed(&get(&client, "key_local", 30).await), BURST);
    let metrics = stack.metrics().await;
    for policy in ["allow", "deny", "local"] {
        assert_eq!(metrics.count("bouncer_store_fallback_total", &[("policy", policy)]), 30, "{policy}");
    }
    let log = stack.bouncer.log_text();
    assert!(log.contains("redis is down") && log.contains("TIME"), "{log}");
    assert!(!log.contains("hush-hush") && !error.contains("hush-hush"));
}

#[tokio::test]
async fn no_api_key_is_ever_kept_or_told() {
    let mut server = RedisServer::start();
    // As much as can be logged.
    let stack = Stack::start(options(&server.url(), GENEROUS).env("RUST_LOG", "trace")).await;
    let client = stack.client();
    let secrets = ["key_allow", "key_deny", "key_of_braces", "key_of_nobody"];

    for key in secrets {
        let in_query = format!("api_key={key}");
        let bearer = format!("Bearer {key}");
        let with_bearer = || client.request(Method::GET, "/anything").header("authorization", &bearer);
        let known = if key == "key_of_nobody" { 401 } else { 200 };
        for (answer, status) in [
            (client.get(&format!("/anything?{in_query}"), Some(key)).await, known),
            (client.send(with_bearer()).await, known),
            (client.send(with_bearer().header("x-api-key", key)).await, 401),
        ] {
            assert_eq!(answer.status, status, "{key}");
            // The query is the upstream's to read.
            let echo = answer.text().replace(&in_query, "");
            assert!(!echo.contains(key), "{echo}");
        }
    }
    // A tenant may be called anything, and has a bucket and a header of its own.
    let answer = client.get("/anything", Some("key_of_braces")).await;
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("17"));
    assert!(answer.text().contains(r#"["x-tenant-id","a}b{c {}"]"#), "{}", answer.text());
    let mut told = Vec::new();
    for key in all_keys(&server) {
        let value: Vec<u8> = ask(&server, &["DUMP", &key]);
        told.push(("redis", format!("{key} {}", String::from_utf8_lossy(&value))));
    }
    server.stop();
    store_becomes(&stack, false, PATIENCE).await;
    assert_let_through_unmetered(&client.get("/anything", Some("key_allow")).await);
    assert_refused_as_unavailable(&client.get("/anything", Some("key_deny")).await);

    let access_log = eventually("fifteen lines of the access log", PATIENCE, async || {
        let lines = stack.envoy.access_log();
        (lines.len() >= 15).then(|| lines.join("\n"))
    })
    .await;
    told.push(("access log", access_log));
    for page in ["/metrics", "/stats", "/ready", "/health"] {
        told.push((page, fetch(&stack.bouncer.admin_url(page)).await.expect("the admin port answers").text()));
    }
    let log = stack.bouncer.log_text();
    assert!(log.contains("TRACE") && log.contains("redis is down"), "the log holds all there is");
    told.push(("log", log));
    for (place, text) in &told {
        for secret in secrets {
            assert!(!text.contains(secret), "{secret} in {place}");
        }
    }
}
