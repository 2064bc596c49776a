//! Each kind of answer once, through a real Envoy.

mod support;

use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::envoy;
use support::grpc::{self, ServingStatus};
use support::stack::{Stack, StackOptions};
use tonic::Code;

/// One slot, one place in T1's queue, and a bucket of T2 that two requests empty for an hour.
const CONFIG: &str = "
tiers:
  - { name: T3, rate: 1000/s, burst: 1000, queue: { length: 10, max_wait: 5s } }
  - { name: T2, rate: 1/h, burst: 2, queue: { length: 10, max_wait: 5s } }
  - { name: T1, rate: 1000/s, burst: 1000, queue: { length: 1, max_wait: 5s } }
tenants:
  - { id: acme, tier: T3, keys: [key_t3_demo] }
  - { id: globex, tier: T2, keys: [key_t2_demo] }
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 1 }
";

async fn stack() -> Stack {
    Stack::start(StackOptions::new(CONFIG)).await
}

#[test]
fn shipped_configuration_is_valid() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/envoy/envoy.yaml");
    let checked =
        Command::new(envoy::binary()).args(["--mode", "validate", "-c", file]).output().expect("Envoy starts");
    let said = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success(), "{said}");
    // The statistics logger's `stat_prefix` has no successor that works yet.
    let warnings: Vec<_> = said
        .lines()
        .filter(|line| line.contains("[warning]") && !line.contains("stats.v3.Config.stat_prefix"))
        .collect();
    assert!(warnings.is_empty(), "{warnings:#?}");
}

#[tokio::test]
async fn without_bouncer_nothing_passes_and_everyone_is_told_when_to_come_back() {
    let stack = Stack::start(StackOptions::new(CONFIG).without_bouncer()).await;

    for client in [stack.client(), stack.http2_client()] {
        let answer = client.get("/anything", Some("key_t3_demo")).await;
        assert_eq!((answer.status, answer.error().as_deref()), (503, Some("unavailable")));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
        assert_eq!(answer.json()["status"], 503);
    }
    let refused = grpc::health(stack.envoy.address(), Some("key_t3_demo")).await.expect_err("no verdict");
    assert_eq!(refused.code(), Code::Unavailable);
    assert_eq!(refused.message(), "the gate is not available");

    assert_eq!(stack.record().total, 0);
}

#[tokio::test]
async fn a_bouncer_that_gets_no_cpu_for_a_second_is_waited_for() {
    let mut stack = stack().await;
    let client = stack.client();

    stack.bouncer.process().signal(Signal::SIGSTOP);
    // Longer than several health checks are apart.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (answer, ()) = tokio::join!(client.get("/anything", Some("key_t3_demo")), async {
        stack.bouncer.process().signal(Signal::SIGCONT);
    });

    assert_eq!(answer.status, 200);
    assert_eq!(stack.envoy.stats().await.get("cluster.bouncer.health_check.failure"), Some(&0));
}

#[tokio::test]
async fn allowed_request_carries_the_tenant_up_and_the_limits_down() {
    let stack = stack().await;

    let answer = stack.client().get("/anything?color=red", Some("key_t3_demo")).await;

    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-ratelimit-limit"), Some("1000"));
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("999"));
    assert_eq!(answer.header("x-ratelimit-reset"), Some("1"));
    let echo = answer.json();
    let header = |name: &str| -> Vec<String> {
        let pairs = echo["headers"].as_array().expect("a list of pairs");
        let values = pairs.iter().filter(|pair| pair[0] == name);
        values.map(|pair| pair[1].as_str().expect("text").to_owned()).collect()
    };
    assert_eq!(header("x-tenant-id"), ["acme"]);
    assert_eq!(header("x-tenant-tier"), ["T3"]);
    assert!(header("x-api-key").is_empty());
    assert_eq!(grpc::health(stack.envoy.address(), Some("key_t3_demo")).await.ok(), Some(ServingStatus::Serving));
}

#[tokio::test]
async fn request_without_a_known_key_is_challenged() {
    let stack = stack().await;

    for (key, error) in [(None, "missing_api_key"), (Some("key_of_nobody"), "invalid_api_key")] {
        let answer = stack.client().get("/anything", key).await;
        assert_eq!((answer.status, answer.error().as_deref()), (401, Some(error)));
        let challenge = answer.header("www-authenticate").unwrap_or_default();
        assert!(challenge.starts_with("Bearer"), "{challenge}");
    }
    let refused = grpc::health(stack.envoy.address(), None).await.expect_err("no key");
    assert_eq!(refused.code(), Code::Unauthenticated);

    assert_eq!(stack.record().total, 0);
}

#[tokio::test]
async fn empty_bucket_answers_when_it_will_have_a_token() {
    let stack = stack().await;
    let client = stack.client();
    for _ in 0..2 {
        assert_eq!(client.get("/anything", Some("key_t2_demo")).await.status, 200);
    }

    let answer = client.get("/anything", Some("key_t2_demo")).await;

    assert_eq!((answer.status, answer.error().as_deref()), (429, Some("rate_limited")));
    assert_eq!(answer.header("x-ratelimit-limit"), Some("2"));
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("0"));
    let wait: u32 = answer.header("retry-after").and_then(|value| value.parse().ok()).expect("whole seconds");
    assert!((3590..=3600).contains(&wait), "{wait}");
    assert_eq!(stack.record().total, 2);
}

#[tokio::test]
async fn request_is_held_while_the_slot_is_taken_and_shed_when_the_queue_is_full() {
    let stack = stack().await;
    let client = stack.client();

    let first = tokio::spawn({
        let client = client.clone();
        async move { client.get_as("first", "/delay/1.5", "key_t1_demo").await }
    });
    stack.wait_until_in_flight(1).await;
    let held = tokio::spawn({
        let client = client.clone();
        async move { client.get_as("held", "/anything", "key_t1_demo").await }
    });
    stack.wait_until_held("T1", 1).await;
    let shed = client.get_as("shed", "/anything", "key_t1_demo").await;

    assert_eq!((shed.status, shed.error().as_deref()), (503, Some("queue_full")));
    assert!(shed.header("retry-after").is_some());
    assert_eq!(first.await.expect("no panic").status, 200);
    assert_eq!(held.await.expect("no panic").status, 200);
    let record = stack.record();
    assert_eq!((record.order(), record.maximum), (vec!["first", "held"], 1));
    stack.wait_until_quiet().await;
}
