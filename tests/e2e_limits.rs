//! Quotas as clients see them, through a real Envoy: how much passes, and what the headers say, in memory and in Redis.

mod support;

use std::collections::HashSet;
use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::client::{Answer, Client};
use support::redis::RedisServer;
use support::stack::{Stack, StackOptions};

/// The demonstration's tiers, and some with small, short and huge quotas.
const CONFIG: &str = "
tiers:
  - { name: T3, rate: 200/s, burst: 400, queue: { max_wait: 11s } }
  - { name: T2, rate: 50/s, burst: 100, queue: { max_wait: 11s } }
  - { name: T1, rate: 10/s, burst: 20, queue: { max_wait: 11s } }
  - { name: five, rate: 1/h, burst: 5 }
  - { name: huge, rate: 999999999999999/day, burst: 999999999999999 }
  - { name: one-a-second, rate: 1/s, burst: 1 }
  - { name: two-a-second, rate: 2/s, burst: 1 }
  - { name: forty-a-minute, rate: 40/min, burst: 1 }
tenants:
  - { id: acme, tier: T3, keys: [key_t3] }
  - { id: globex, tier: T2, keys: [key_t2] }
  - { id: initech, tier: T1, keys: [key_t1] }
  - { id: five, tier: five, keys: [key_five] }
  - { id: huge, tier: huge, keys: [key_huge] }
  - { id: one-a-second, tier: one-a-second, keys: [key_1s] }
  - { id: two-a-second, tier: two-a-second, keys: [key_2s] }
  - { id: forty-a-minute, tier: forty-a-minute, keys: [key_40m] }
pools:
  - { name: default, max_in_flight: 50 }
";

/// Buckets in the process.
async fn in_memory() -> Stack {
    Stack::start(StackOptions::new(CONFIG)).await
}

/// Buckets in this Redis, with a deadline so generous that a busy machine does not look like an outage.
async fn in_redis(server: &RedisServer) -> Stack {
    let redis = format!("redis: {{ url: '{}', timeout: 20s, on_outage: deny }}\n", server.url());
    Stack::start(StackOptions::new(redis + CONFIG)).await
}

#[tokio::test]
async fn bursts_get_what_was_promised_from_memory() {
    bursts_get_what_was_promised(&in_memory().await).await;
}

#[tokio::test]
async fn bursts_get_what_was_promised_from_redis() {
    let server = RedisServer::start();
    bursts_get_what_was_promised(&in_redis(&server).await).await;
}

/// Every burst passes the bucket's size and what the rate brings meanwhile; the upstream sees exactly these requests.
async fn bursts_get_what_was_promised(stack: &Stack) {
    for (key, rate, burst, requests) in
        [("key_t1", 10.0, 20.0, 50), ("key_t2", 50.0, 100.0, 250), ("key_t3", 200.0, 400.0, 1000)]
    {
        stack.upstream.reset_record();
        let client = stack.client();
        let began = Instant::now();
        let sent = (0..requests).map(|number| {
            let (client, id) = (client.clone(), format!("{key}-{number}"));
            async move { (client.get_as(&id, "/anything", key).await, id) }
        });
        let answers = join_all(sent).await;
        let promised = burst + rate * began.elapsed().as_secs_f64();

        let allowed: HashSet<_> = answers.iter().filter(|(answer, _)| answer.status == 200).map(|(_, id)| id).collect();
        let count = f64::from(u32::try_from(allowed.len()).expect("at most a thousand"));
        assert!(count >= burst && count <= promised + 1.0, "{key}: {count} of {promised}");
        for (answer, _) in answers.iter().filter(|(answer, _)| answer.status != 200) {
            assert_eq!((answer.status, answer.error().as_deref()), (429, Some("rate_limited")), "{key}");
        }
        let record = stack.record();
        assert_eq!((record.total, record.requests.len()), (allowed.len(), allowed.len()), "{key}");
        assert!(record.requests.iter().all(|entry| allowed.contains(&entry.id)), "{key}");
        assert!(record.maximum <= 50, "{key}: {}", record.maximum);
    }
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn headers_tell_how_full_the_bucket_in_memory_is() {
    headers_tell_how_full_the_bucket_is(&in_memory().await).await;
}

#[tokio::test]
async fn headers_tell_how_full_the_bucket_in_redis_is() {
    let server = RedisServer::start();
    headers_tell_how_full_the_bucket_is(&in_redis(&server).await).await;
}

async fn headers_tell_how_full_the_bucket_is(stack: &Stack) {
    let client = stack.client();

    // Requests that run together are told different levels, down to zero and never below.
    let answers = join_all((0..8).map(|_| client.get("/anything", Some("key_five")))).await;
    let (allowed, refused): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    let mut remaining: Vec<_> = allowed.iter().map(|answer| figure(answer, "x-ratelimit-remaining")).collect();
    remaining.sort_unstable();
    assert_eq!(remaining, [0, 1, 2, 3, 4]);
    assert_eq!(refused.len(), 3);
    for answer in refused {
        assert_eq!((answer.status, figure(answer, "x-ratelimit-remaining")), (429, 0));
        assert!((3590..=3600).contains(&figure(answer, "retry-after")), "{:?}", answer.headers);
    }
    for answer in &answers {
        assert_eq!(figure(answer, "x-ratelimit-limit"), 5);
        assert!((1..=5 * 3600).contains(&figure(answer, "x-ratelimit-reset")), "{:?}", answer.headers);
        assert_eq!(answer.header("retry-after").is_some(), answer.status == 429);
    }

    // Fifteen digits arrive as they are, with no exponent and no rounding.
    for client in [&client, &stack.http2_client()] {
        stack.upstream.reset_record();
        let answer = client.get("/anything", Some("key_huge")).await;
        assert_eq!(answer.header("x-ratelimit-limit"), Some("999999999999999"));
        let remaining = figure(&answer, "x-ratelimit-remaining");
        // The rate brings more than ten billion tokens a second, so the next request finds a full bucket.
        assert_eq!((answer.status, remaining), (200, 999_999_999_999_998));
        let echo = answer.json().to_string();
        assert!(!echo.contains("x-ratelimit"), "the client's figures reached the upstream: {echo}");
    }

    // An upstream that limits too does not add a second set.
    let theirs = "x-ratelimit-limit=7&x-ratelimit-remaining=3&x-ratelimit-reset=9&retry-after=11";
    let answer = client.get(&format!("/response-headers?{theirs}"), Some("key_t3")).await;
    assert_eq!(answer.status, 200);
    assert_eq!((figure(&answer, "x-ratelimit-limit"), figure(&answer, "x-ratelimit-remaining")), (400, 399));
    assert_eq!(figure(&answer, "x-ratelimit-reset"), 1);
    assert_eq!(answer.header("retry-after"), Some("11"), "what bouncer did not say is the upstream's to say");
}

#[tokio::test]
async fn a_retry_after_the_told_time_passes_with_memory() {
    retries_after_the_told_time_pass(&in_memory().await).await;
}

#[tokio::test]
async fn a_retry_after_the_told_time_passes_with_redis() {
    let server = RedisServer::start();
    retries_after_the_told_time_pass(&in_redis(&server).await).await;
}

/// Several rounds of each of three rhythms side by side; where the whole seconds do not fit the rate, phases drift.
async fn retries_after_the_told_time_pass(stack: &Stack) {
    let client = stack.client();
    let rounds = ["key_1s", "key_2s", "key_40m"].map(|key| retry_as_told(&client, key, 3));
    join_all(rounds).await;
}

async fn retry_as_told(client: &Client, key: &str, rounds: usize) {
    for round in 0..rounds {
        let refused = refusal(client, key).await;
        let wait = figure(&refused, "retry-after");
        assert!(wait <= 2, "{key}: {wait} s at no less than 40 a minute");
        tokio::time::sleep(Duration::from_secs(wait)).await;
        let answer = client.get("/anything", Some(key)).await;
        assert_eq!(answer.status, 200, "{key}, round {round}: refused after {wait} s as told");
    }
}

/// Empties a bucket of one token and gives the refusal, after which nobody else takes from it. On a busy machine the
/// bucket may refill before the second request comes, so there are more.
async fn refusal(client: &Client, key: &str) -> Answer {
    for _ in 0..100 {
        let answer = client.get("/anything", Some(key)).await;
        if answer.status == 429 {
            return answer;
        }
    }
    panic!("{key} was never refused");
}

/// Zero is neither "nothing" nor "everything": it does not start.
#[test]
fn a_quota_of_nothing_does_not_start() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("bouncer.yaml");
    for (shipped, bad, field) in [
        ("rate: 1/h", "rate: 0/h", "tiers[3].rate"),
        ("rate: 1/h", "rate: -1/h", "tiers[3].rate"),
        ("burst: 5 ", "burst: 0 ", "tiers[3].burst"),
        ("max_in_flight: 50", "max_in_flight: 0", "pools[0].max_in_flight"),
    ] {
        assert!(CONFIG.contains(shipped));
        std::fs::write(&file, CONFIG.replacen(shipped, bad, 1)).expect("a directory of our own");
        let bouncer = Command::new(env!("CARGO_BIN_EXE_bouncer")).args(["serve", "-c"]).arg(&file).output();
        let bouncer = bouncer.expect("bouncer starts");
        let said = String::from_utf8_lossy(&bouncer.stderr);
        assert_eq!(bouncer.status.code(), Some(64), "{bad}: {said}");
        assert!(said.contains(field), "{bad}: {said}");
    }
}

/// A figure as the headers write them: whole, not negative, without leading zeros; `Retry-After` at least 1.
fn figure(answer: &Answer, name: &str) -> u64 {
    let text = answer.header(name).unwrap_or_else(|| panic!("no {name}: {:?}", answer.headers));
    let figure: u64 = text.parse().unwrap_or_else(|_| panic!("{name}: {text:?}"));
    assert_eq!(figure.to_string(), text, "{name}");
    assert!(figure > 0 || name != "retry-after", "{name}: {text}");
    figure
}
