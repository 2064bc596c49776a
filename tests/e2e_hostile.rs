//! Clients that mean harm, byte by byte, through a real Envoy.

mod support;

use std::time::Duration;

use support::raw::{Raw, exchange};
use support::stack::{Stack, StackOptions};
use support::wait::eventually;

const CAP: usize = 3;
const HELD: u32 = 20;
const CONFIG: &str = "
tiers:
  - { name: T3, rate: 1000/s, burst: 1000, queue: { length: 100, max_wait: 60s } }
tenants:
  - { id: acme, tier: T3, keys: [key_t3_demo] }
pools:
  - { name: default, max_in_flight: 3 }
";

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const DATA: u8 = 0;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// A frame of HTTP/2 (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// What opens a connection, with these settings.
fn preface(settings: &[u8]) -> Vec<u8> {
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &frame(SETTINGS, 0, 0, settings)].concat()
}

/// Header lines, each a literal that is not indexed (RFC 7541, section 6.2.2).
fn lines(lines: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).expect("a short text")], text.as_bytes()].concat();
    lines.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

fn request(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let method = if more.iter().any(|(name, _)| *name == "te") { "POST" } else { "GET" };
    let mut all = vec![(":method", method), (":scheme", "http"), (":authority", "test"), (":path", path)];
    all.extend(more);
    lines(&all)
}

/// A patient stack: what is held stays so while the machine is busy with the attack.
fn patient() -> StackOptions {
    StackOptions::new(CONFIG)
        .edit_envoy("message_timeout: 12s", "message_timeout: 120s")
        .edit_envoy("value: \"12000\"", "value: \"120000\"")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_reset_thousands_of_streams_break_no_cap_and_take_no_place() {
    let stack = Stack::start(patient()).await;
    let client = stack.client();
    let get = |path: &'static str| {
        let client = client.clone();
        tokio::spawn(async move { client.get(path, Some("key_t3_demo")).await })
    };
    let running: Vec<_> = (0..CAP).map(|_| get("/stream/600/50")).collect();
    stack.wait_until_in_flight(CAP).await;
    let held: Vec<_> = (0..HELD).map(|_| get("/anything")).collect();
    stack.wait_until_held("T3", HELD).await;

    // As many as one HTTP/2 connection may open, all in one write and none with a key.
    let mut burst = preface(&[]);
    for number in 0..480 {
        let stream = 2 * number + 1;
        burst.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream, &request("/x", &[])));
        burst.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
    }
    let mut attackers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (address, burst) = (stack.envoy.address(), burst.clone());
        attackers.spawn(async move {
            let mut connection = Raw::connect(address).await;
            connection.send(burst).await;
            connection
        });
    }
    let connections = attackers.join_all().await;
    // Envoy has looked at all of it when a request that came later is answered.
    assert_eq!(client.get("/anything", None).await.status, 401);
    drop(connections);
    stack.wait_until_seen_healthy(1).await;

    let stats = stack.envoy.stats().await;
    assert_eq!(stats.get("cluster.bouncer.http2.outbound_flood"), Some(&0), "the connection to bouncer was kept");
    assert_eq!(stats.get("cluster.bouncer.http2.outbound_control_flood"), Some(&0));
    assert_eq!(stack.record().current, CAP);
    let metrics = stack.metrics().await;
    assert_eq!(metrics.count("bouncer_in_flight", &[]), CAP as u64);
    assert_eq!(metrics.count("bouncer_queue_depth", &[]), u64::from(HELD), "everyone kept the place");
    assert_eq!(metrics.count("bouncer_abandoned_total", &[]), 0);
    for request in running {
        request.abort();
    }
    for request in held {
        assert_eq!(request.await.expect("no panic").status, 200);
    }
    assert_eq!(stack.record().maximum, CAP);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_a_client_says_it_is_after_its_body_goes_no_further() {
    let stack = Stack::start(StackOptions::new(CONFIG)).await;
    let grpc = [("x-api-key", "key_t3_demo"), ("content-type", "application/grpc"), ("te", "trailers")];
    let trailers = [
        ("x-tenant-id", "evil"),
        ("x_tenant_id", "evil"),
        ("x-tenant-tier", "evil"),
        ("x-tenant_tier", "evil"),
        ("x-api-key", "evil"),
        ("authorization", "evil"),
        ("x-kept", "harmless"),
    ];
    let mut connection = Raw::connect(stack.envoy.address()).await;
    let mut call = preface(&[]);
    call.extend(frame(HEADERS, END_HEADERS, 1, &request("/anything", &grpc)));
    call.extend(frame(DATA, 0, 1, &[0; 5]));
    call.extend(frame(HEADERS, END_HEADERS | END_STREAM, 1, &lines(&trailers)));
    connection.send(call).await;
    let answer = connection.read_until("\"version\"").await;
    assert!(answer.contains("harmless"), "trailers as such arrive: {answer}");
    assert!(!answer.contains("evil"), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_headers_are_answered_as_such_wherever_the_limit_is_met() {
    let stack = Stack::start(StackOptions::new(CONFIG)).await;
    let mut refused = 0;
    for count in [80, 90, 93, 96, 98, 99, 120] {
        let mut request =
            "GET /anything HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-api-key: key_t3_demo\r\n".to_owned();
        request.extend((0..count).map(|number| format!("x-{number}: a\r\n")));
        let answer = exchange(stack.envoy.address(), request + "\r\n").await;
        let status = answer.get(9..12).unwrap_or_default();
        assert!(matches!(status, "200" | "431"), "{count} headers: {answer}");
        refused += u32::from(status == "431");
    }
    assert!((1..7).contains(&refused), "{refused} of 7 were refused");
    stack.wait_until_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_its_answer_keeps_no_slot_for_it() {
    let options = StackOptions::new(CONFIG).edit_envoy("stream_flush_timeout: 10s", "stream_flush_timeout: 1s");
    let stack = Stack::start(options).await;
    // SETTINGS_INITIAL_WINDOW_SIZE 0: not one byte of a body may be sent to this client.
    let mut attack = preface(&[0, 4, 0, 0, 0, 0]);
    for stream in [1, 3, 5] {
        let get = request("/bytes/100", &[("x-api-key", "key_t3_demo")]);
        attack.extend(frame(HEADERS, END_HEADERS | END_STREAM, stream, &get));
    }
    let mut connection = Raw::connect(stack.envoy.address()).await;
    connection.send(attack).await;
    eventually("three answers of the upstream", Duration::from_secs(30), async || {
        (stack.record().total >= CAP).then_some(())
    })
    .await;
    stack.wait_until_quiet().await;
}
