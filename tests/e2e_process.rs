//! The process around the gate, behind a real Envoy: its socket file, and what it writes to its log.

mod support;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::Value;
use support::grpc::{self, ServingStatus};
use support::stack::{Bouncer, Stack, StackOptions};
use support::wait::eventually;

/// How long an order may take on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// Every secret begins so, and nothing else does.
const SECRET: &str = "s3cret";

const CONFIG: &str = "
tiers:
  - { name: T1, rate: 1000/s, burst: 1000, queue: { length: 10, max_wait: 1s } }
tenants:
  - { id: initech, tier: T1, keys: [s3cret-key] }
pools:
  - { name: default, max_in_flight: 1 }
shutdown: { delay: 0s }
log: { level: info, format: json }
";

#[tokio::test]
async fn socket_file_serves_and_goes_away_with_the_process() {
    let mut stack = Stack::start(StackOptions::new(CONFIG).unix_socket()).await;
    let client = stack.client();
    let socket = stack.bouncer.socket().unwrap().to_owned();

    assert_eq!(client.get("/anything", Some("s3cret-key")).await.status, 200);
    assert_eq!(client.get("/anything", None).await.status, 401);
    // A file that a killed process left is no obstacle.
    stack.bouncer.kill9();
    assert!(socket.exists());
    stack.bouncer.start().await;
    stack.wait_until_healthy().await;
    assert_eq!(client.get("/anything", Some("s3cret-key")).await.status, 200);

    stack.bouncer.terminate();
    assert_eq!(stack.bouncer.exit(Duration::from_secs(5)).await.code(), Some(0));
    assert!(!socket.exists(), "the socket file outlives its process");
}

#[tokio::test]
async fn most_detailed_log_is_whole_json_and_shows_no_secret() {
    // A Redis that is not there, so that what is said about failures is in the log as well.
    let options = StackOptions::new(CONFIG)
        .env("RUST_LOG", "trace")
        .env("REDIS_URL", "redis://s3cret-user:s3cret-password@127.0.0.1:1/0");
    let mut stack = Stack::start(options).await;
    let admin = stack.bouncer.admin_url("/stats");
    for client in [stack.client(), stack.http2_client()] {
        assert_eq!(client.get("/anything", Some("s3cret-key")).await.status, 200);
        assert_eq!(client.get("/anything", Some("s3cret-of-nobody")).await.status, 401);
        let get = |path: &str| client.request(Method::GET, path);
        let bearer = get("/anything").header("authorization", "Bearer s3cret-key");
        assert_eq!(client.send(bearer).await.status, 200);
        assert_eq!(client.send(get("/anything?api_key=s3cret-query")).await.status, 401);
        // Someone who takes the wrong port.
        let lost = reqwest::Client::new().get(&admin).header("x-api-key", "s3cret-key").send().await.unwrap();
        assert_eq!(lost.status(), 200);
    }
    stack.bouncer.terminate();
    assert_eq!(stack.bouncer.exit(Duration::from_secs(5)).await.code(), Some(0));

    let log = stack.bouncer.log_text();
    let mut targets = Vec::new();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        targets.push(line["target"].as_str().unwrap().to_owned());
        assert!(line["timestamp"].is_string() && line["level"].is_string(), "{line}");
    }
    assert!(targets.iter().any(|target| target.starts_with("h2::")), "not the most detailed log");
    let leaks: Vec<_> = log.lines().filter(|line| holds_secret(line)).take(5).collect();
    assert!(leaks.is_empty(), "{leaks:#?}");
}

#[tokio::test]
async fn out_of_descriptors_it_neither_spins_nor_fails_for_good() {
    const OPEN_FILES: usize = 64;
    let dir = tempfile::tempdir().unwrap();
    let options = StackOptions::new(CONFIG).env("RUST_LOG", "debug").open_files(32, 64);
    let mut bouncer = Bouncer::new(dir.path(), "bouncer", &options);
    bouncer.start().await;
    assert!(bouncer.log_text().contains("limit of open files raised"), "{}", bouncer.log_text());
    let address = bouncer.grpc_address();
    let warnings = |bouncer: &Bouncer| bouncer.log_text().matches("a connection was not accepted").count();

    // More than it may have; the kernel makes them, and bouncer never gets to see the last ones.
    let connections: Vec<_> = (0..2 * OPEN_FILES).map(|_| TcpStream::connect(address).unwrap()).collect();
    eventually("a warning", SOON, async || (warnings(&bouncer) > 0).then_some(())).await;
    let (began, used, told) = (Instant::now(), bouncer.process().processor_time(), warnings(&bouncer));
    eventually("two more", SOON, async || (warnings(&bouncer) >= told + 2).then_some(())).await;
    let (passed, used) = (began.elapsed(), bouncer.process().processor_time().saturating_sub(used));
    assert!(used < passed / 4, "{used:?} of processor time in {passed:?}");
    let workers = std::thread::available_parallelism().unwrap().get();
    let most = workers * (usize::try_from(passed.as_secs()).unwrap() + 2);
    assert!(warnings(&bouncer) - told <= most, "{} warnings in {passed:?}", warnings(&bouncer) - told);

    drop(connections);
    eventually("an answer", SOON, async || {
        let asked = tokio::time::timeout(Duration::from_secs(1), grpc::health(address, None)).await;
        (asked.ok()?.ok()? == ServingStatus::Serving).then_some(())
    })
    .await;
}

/// In plain, or as the numbers and escapes in which libraries print bytes.
fn holds_secret(line: &str) -> bool {
    let bytes =
        |written: fn(u8) -> String, between: &str| SECRET.bytes().map(written).collect::<Vec<_>>().join(between);
    let (numbers, hex) = (bytes(|byte| byte.to_string(), ", "), bytes(|byte| format!("{byte:02x}"), ""));
    line.contains(SECRET) || line.contains(&numbers) || line.to_ascii_lowercase().contains(&hex)
}
