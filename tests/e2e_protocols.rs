//! What runs over HTTP, and what the proxy does for it: web sockets, gRPC, hop-by-hop headers, upstreams that fail; through
//! a real Envoy.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use reqwest::Method;
use serde_json::Value;
use tokio_tungstenite::tungstenite::{self, Message};
use tonic::Code;

use support::client::Client;
use support::grpc::{self, ServingStatus};
use support::occupant::Occupant;
use support::raw::{Raw, exchange};
use support::stack::{Stack, StackOptions};
use support::wait::eventually;
use support::websocket;

/// One slot; a bucket of T2 that two requests empty for an hour; no time to wait for T1.
const CONFIG: &str = "
public: [/health, /stream/*]
tiers:
  - { name: T3, rate: 1000000/s, burst: 1000000, queue: { length: 1000, max_wait: 5s } }
  - { name: T2, rate: 1/h, burst: 2, queue: { length: 10, max_wait: 5s } }
  - { name: T1, rate: 1000000/s, burst: 1000000, queue: { length: 1, max_wait: 50ms } }
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

async fn in_flight(stack: &Stack) -> u64 {
    stack.metrics().await.count("bouncer_in_flight", &[("pool", "default")])
}

#[tokio::test]
async fn websocket_keeps_its_slot_from_the_upgrade_to_its_end() {
    let stack = stack().await;
    let mut socket = websocket::open(stack.envoy.address(), "/ws", "key_t3_demo", "first").await.unwrap();
    socket.send(Message::text("hello")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("hello"));
    assert_eq!(in_flight(&stack).await, 1);

    let address = stack.envoy.address();
    let held = tokio::spawn(async move { websocket::open(address, "/ws", "key_t3_demo", "held").await });
    stack.wait_until_held("T3", 1).await;
    assert_eq!(stack.record().order(), ["first"], "no 101 while the slot is taken");
    socket.close(None).await.unwrap();

    let mut socket = held.await.unwrap().expect("an upgrade after the wait");
    socket.send(Message::binary(vec![0, 255])).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::binary(vec![0, 255]));
    assert_eq!(in_flight(&stack).await, 1);
    drop(socket);
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn websocket_over_the_limit_is_refused_before_the_upgrade() {
    let stack = stack().await;
    for _ in 0..2 {
        assert_eq!(stack.client().get("/anything", Some("key_t2_demo")).await.status, 200);
    }
    let refused = websocket::open(stack.envoy.address(), "/ws", "key_t2_demo", "refused").await;
    let Err(tungstenite::Error::Http(response)) = refused else { panic!("no refusal: {refused:?}") };
    assert_eq!(response.status(), 429);
    assert!(response.headers().get("retry-after").is_some_and(|value| !value.is_empty()));
    assert_eq!(stack.record().total, 2);
}

#[tokio::test]
async fn websocket_outlives_the_timeout_for_answers_and_a_declined_one_gives_its_slot_back() {
    let options =
        StackOptions::new(CONFIG).edit_envoy("cluster: upstream, timeout: 30s", "cluster: upstream, timeout: 0.2s");
    let stack = Stack::start(options).await;
    let mut socket = websocket::open(stack.envoy.address(), "/ws", "key_t3_demo", "long").await.unwrap();
    // Longer than the route's timeout.
    tokio::time::sleep(Duration::from_millis(500)).await;
    socket.send(Message::text("still there")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap(), Message::text("still there"));
    socket.close(None).await.unwrap();
    stack.wait_until_quiet().await;

    let declined = websocket::open(stack.envoy.address(), "/anything", "key_t3_demo", "declined").await;
    let Err(tungstenite::Error::Http(response)) = declined else { panic!("an upgrade: {declined:?}") };
    assert_eq!(response.status(), 200);
    stack.wait_until_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_of_a_large_upload_reaches_the_client_that_is_still_sending() {
    let stack = stack().await;
    let upload = bytes::Bytes::from(vec![b'x'; 8 << 20]);
    for client in [stack.client(), stack.http2_client()] {
        for _ in 0..20 {
            let answer = client.send(client.request(Method::POST, "/anything").body(upload.clone())).await;
            assert_eq!((answer.status, answer.error().as_deref()), (401, Some("missing_api_key")));
        }
    }
    assert_eq!(stack.record().total, 0);
}

#[tokio::test]
async fn grpc_client_is_refused_in_its_own_words_and_told_when_to_come_back() {
    let stack = stack().await;
    let address = stack.envoy.address();
    for _ in 0..2 {
        assert_eq!(grpc::health(address, Some("key_t2_demo")).await.unwrap(), ServingStatus::Serving);
    }
    stack.wait_until_quiet().await;
    let occupant = Occupant::start(&stack.client(), "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;

    for (key, code, message, retry) in [
        (None, Code::Unauthenticated, "missing_api_key", false),
        (Some("key_of_nobody"), Code::Unauthenticated, "invalid_api_key", false),
        (Some("key_t2_demo"), Code::ResourceExhausted, "rate_limited", true),
        (Some("key_t1_demo"), Code::Unavailable, "queue_timeout", true),
    ] {
        let refused = grpc::health(address, key).await.expect_err("a refusal");
        assert_eq!((refused.code(), refused.message()), (code, message));
        let metadata = refused.metadata();
        let seconds = metadata.get("retry-after").map(|value| value.to_str().unwrap().parse::<u32>().unwrap());
        assert_eq!(seconds.is_some_and(|seconds| seconds >= 1), retry, "{message}: {metadata:?}");
        assert_eq!(metadata.get("x-ratelimit-limit").is_some(), retry, "{message}: {metadata:?}");
    }
    assert_eq!(occupant.finish().await.status, 200);
}

/// Of these, none may pass.
const HOP: [&str; 9] = [
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "proxy-authenticate",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-named",
];

#[tokio::test]
async fn headers_for_one_hop_go_no_further_in_either_direction() {
    let stack = stack().await;
    // What says to be gRPC takes another route.
    for kind in ["application/json", "application/grpc"] {
        let request = format!(
            "GET /anything HTTP/1.1\r\nhost: test\r\nx-api-key: key_t3_demo\r\ncontent-type: {kind}\r\n\
            connection: close, x-named, keep-alive, te\r\nx-named: hop\r\nkeep-alive: timeout=5\r\n\
            proxy-connection: close\r\nproxy-authorization: Basic eA==\r\nproxy-authenticate: Basic\r\n\
            te: deflate\r\ntrailer: x-late\r\nx-kept: end\r\n\r\n"
        );
        let answer = exchange(stack.envoy.address(), request).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let echo: Value = serde_json::from_str(body.trim_matches(|c| c != '{' && c != '}')).unwrap();
        let names: Vec<_> = echo["headers"].as_array().unwrap().iter().map(|pair| pair[0].as_str().unwrap()).collect();
        for name in HOP {
            assert!(!names.contains(&name), "the upstream got {name} of {kind}: {names:?}");
        }
        assert!(names.contains(&"x-kept"));

        let path = "/response-headers?connection=x-named&x-named=hop&keep-alive=timeout%3D5&proxy-connection=close\
            &proxy-authenticate=Basic&proxy-authorization=x&te=deflate&trailer=x-late&x-kept=end";
        let request = stack.client().request(Method::GET, path).header("x-api-key", "key_t3_demo");
        let answer = stack.client().send(request.header("content-type", kind)).await;
        assert_eq!(answer.status, 200);
        // A body without a length has to be framed for the next hop, too.
        for name in HOP.into_iter().filter(|name| *name != "transfer-encoding") {
            assert_eq!(answer.header(name), None, "the client got {name} of {kind}");
        }
        assert_eq!(answer.header("x-kept"), Some("end"));
    }
}

#[tokio::test]
async fn upstream_that_is_down_is_a_503_that_gives_its_slot_back() {
    let mut stack = stack().await;
    let client = stack.client();
    stack.upstream.stop();

    for _ in 0..3 {
        let answer = client.get("/anything", Some("key_t3_demo")).await;
        assert_eq!((answer.status, answer.error()), (503, None), "Envoy's own: bouncer allowed it");
        assert!(answer.header("x-ratelimit-limit").is_some());
    }
    stack.wait_until_quiet().await;

    stack.upstream.start();
    assert_eq!(client.get("/anything", Some("key_t3_demo")).await.status, 200);
    let metrics = stack.metrics().await;
    assert_eq!(metrics.count("bouncer_requests_total", &[("tier", "T3"), ("outcome", "forwarded")]), 4);
}

#[tokio::test]
async fn upstream_that_is_too_slow_is_a_504_that_gives_its_slot_back() {
    let options =
        StackOptions::new(CONFIG).edit_envoy("cluster: upstream, timeout: 30s", "cluster: upstream, timeout: 0.3s");
    let stack = Stack::start(options).await;
    let client = stack.client();

    let slow = tokio::spawn({
        let client = client.clone();
        async move { client.get_as("slow", "/delay/60", "key_t3_demo").await }
    });
    stack.wait_until_in_flight(1).await;
    // Held meanwhile: that the slot comes back is what lets it through.
    let held = client.get_as("held", "/anything", "key_t3_demo").await;

    assert_eq!(held.status, 200);
    assert_eq!(slow.await.unwrap().status, 504);
    assert_eq!(stack.record().order(), ["slow", "held"]);
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn time_of_a_hold_does_not_count_against_the_upstream() {
    let options =
        StackOptions::new(CONFIG).edit_envoy("cluster: upstream, timeout: 30s", "cluster: upstream, timeout: 0.3s");
    let stack = Stack::start(options).await;
    // An upload that is not complete: the route's timeout has not begun.
    let occupant = Occupant::start(&stack.client(), "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;
    let held = tokio::spawn({
        let client = stack.client();
        async move { client.get("/anything", Some("key_t3_demo")).await }
    });
    stack.wait_until_held("T3", 1).await;
    // Longer than the route's timeout.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(occupant.finish().await.status, 200);
    assert_eq!(held.await.unwrap().status, 200);
}

#[tokio::test]
async fn hold_ends_with_an_answer_of_bouncer_before_envoy_gives_up() {
    // Shorter than the 5 s that the tier would wait.
    let options = StackOptions::new(CONFIG)
        .edit_envoy("message_timeout: 12s", "message_timeout: 2s")
        .edit_envoy("key: bouncer-deadline-ms, value: \"12000\"", "key: bouncer-deadline-ms, value: \"2000\"");
    let stack = Stack::start(options).await;
    let occupant = Occupant::start(&stack.client(), "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;

    let answer = stack.client().get("/anything", Some("key_t3_demo")).await;

    assert_eq!((answer.status, answer.error().as_deref()), (503, Some("queue_timeout")));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(ext_proc(&stack).await["message_timeouts"], 0);
    assert_eq!(occupant.finish().await.status, 200);
}

#[tokio::test]
async fn client_has_no_say_in_retries_timeouts_or_redirects() {
    let stack = stack().await;
    let client = stack.client();
    let send = async |path: &str| {
        let request = client.request(Method::GET, path).header("x-api-key", "key_t3_demo");
        // From an address of a network that many an Envoy trusts.
        let request = request.header("x-forwarded-for", "10.0.0.1");
        let request = request.header("x-envoy-retry-on", "5xx,retriable-4xx,reset,connect-failure");
        let request = request.header("x-envoy-max-retries", "10").header("x-envoy-upstream-rq-timeout-ms", "1");
        let request = request
            .header("x-envoy-upstream-rq-per-try-timeout-ms", "1")
            .header("x-envoy-hedge-on-per-try-timeout", "true");
        client.send(request).await
    };
    let mut remaining = 1_000_000;
    for (path, status) in [("/status/503", 503), ("/reset", 503), ("/delay/0.1", 200), ("/status/302", 302)] {
        stack.upstream.reset_record();
        let answer = send(path).await;
        assert_eq!((answer.status, stack.record().total), (status, 1), "{path}");
        let left: u64 = answer.header("x-ratelimit-remaining").unwrap().parse().unwrap();
        assert!(left < 1_000_000 && left <= remaining, "one token a request");
        remaining = left;
    }
    // A redirect is the client's to follow. With this policy Envoy would follow it, through all filters again, and the
    // tenant would be charged for each hop.
    assert!(!support::envoy::CONFIG.contains("internal_redirect_policy"));
}

/// Counters of the `ext_proc` filter.
async fn ext_proc(stack: &Stack) -> BTreeMap<String, u64> {
    let stats = stack.envoy.stats().await;
    let own = stats
        .into_iter()
        .filter_map(|(name, value)| Some((name.strip_prefix("http.main.ext_proc.bouncer.")?.to_owned(), value)));
    own.collect()
}

#[tokio::test]
async fn one_message_pair_a_request_and_one_more_for_trailers() {
    let stack = stack().await;
    let client = stack.client();
    let mut expected = (0, 0);
    let mut check = async |what: &str, sent: u64, received: u64| {
        stack.wait_until_quiet().await;
        let stats = ext_proc(&stack).await;
        expected = (expected.0 + sent, expected.1 + received);
        assert_eq!((stats["stream_msgs_sent"], stats["stream_msgs_received"]), expected, "{what}");
    };

    let upload = client.request(Method::POST, "/anything").header("x-api-key", "key_t3_demo");
    assert_eq!(client.send(upload.body(vec![b'x'; 1 << 20])).await.status, 200);
    check("an upload", 1, 1).await;
    assert_eq!(client.get("/bytes/1000000", Some("key_t3_demo")).await.status, 200);
    check("a download", 1, 1).await;
    assert_eq!(client.get("/health", None).await.status, 200);
    check("a public path", 1, 1).await;
    assert_eq!(client.get("/anything", None).await.status, 401);
    check("a refusal", 1, 1).await;
    assert!(grpc::health(stack.envoy.address(), Some("key_t3_demo")).await.is_ok());
    check("a response with trailers", 2, 2).await;

    let stats = ext_proc(&stack).await;
    for (name, value) in &stats {
        let known = [
            "streams_started",
            "streams_closed",
            "stream_msgs_sent",
            "stream_msgs_received",
            "immediate_responses_sent",
        ];
        assert!(known.contains(&name.as_str()) || *value == 0, "{name} is {value}");
    }
    assert_eq!((stats["streams_started"], stats["streams_closed"], stats["immediate_responses_sent"]), (5, 5, 1));
}

#[tokio::test]
async fn public_paths_work_where_envoy_does_not_let_bouncer_end_the_stream_early() {
    let allowed = "allow_mode_override: true";
    let refused = [
        "allow_mode_override: false".to_owned(),
        format!("{allowed}\n              allowed_override_modes: [ {{ response_header_mode: SEND }} ]"),
    ];
    for edit in refused {
        let stack = Stack::start(StackOptions::new(CONFIG).edit_envoy(allowed, edit)).await;
        let client = stack.client();
        let occupant = Occupant::start(&client, "occupant", "key_t3_demo");
        stack.wait_until_in_flight(1).await;

        let answer = client.get("/stream/4/20", None).await;

        assert_eq!((answer.status, answer.text().lines().count()), (200, 4));
        assert_eq!(in_flight(&stack).await, 1, "a public path takes no slot");
        assert_eq!(occupant.finish().await.status, 200);
        stack.wait_until_quiet().await;
        let stats = ext_proc(&stack).await;
        assert_eq!((stats["stream_msgs_sent"], stats["stream_msgs_received"]), (2, 2));
        assert_eq!((stats["streams_failed"], stats["spurious_msgs_received"]), (0, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_thousand_ends_of_streams_are_nothing_to_complain_of() {
    const LANES: u32 = 10;
    let config = CONFIG.replace("max_in_flight: 1 }", "max_in_flight: 8 }");
    let mut stack = Stack::start(StackOptions::new(config)).await;
    let client = stack.client();
    let before = stack.bouncer.log_text().lines().count();
    let memory = stack.bouncer.process().resident_bytes();

    let lane = async |client: Client| {
        for n in 0..500 {
            assert_eq!(client.get("/status/200", Some("key_t3_demo")).await.status, 200);
            if n % 25 == 0 {
                abort(&stack).await;
            }
        }
    };
    futures_util::future::join_all((0..LANES).map(|_| lane(client.clone()))).await;
    stack.wait_until_quiet().await;

    let metrics = stack.metrics().await;
    let served = metrics.count("bouncer_requests_total", &[("tier", "T3"), ("outcome", "forwarded")])
        + metrics.count("bouncer_requests_total", &[("tier", "T3"), ("outcome", "queued")]);
    assert_eq!(served, 5200);
    assert_eq!(metrics.count("bouncer_shed_total", &[]), 0);
    let said = stack.bouncer.log_text();
    assert_eq!(said.lines().skip(before).collect::<Vec<_>>(), [""; 0]);
    eventually("every stream closed", Duration::from_secs(10), async || {
        let stats = ext_proc(&stack).await;
        (stats["streams_started"] == 5200 && stats["streams_closed"] == 5200).then_some(())
    })
    .await;
    let stats = ext_proc(&stack).await;
    assert_eq!((stats["streams_failed"], stats["failure_mode_allowed"]), (0, 0));
    let grown = stack.bouncer.process().resident_bytes().saturating_sub(memory);
    assert!(grown < 4 << 20, "bouncer grew by {grown} bytes");
}

/// Leaves when the first bytes of a long answer are there.
async fn abort(stack: &Stack) {
    let mut connection = Raw::connect(stack.envoy.address()).await;
    connection.send("GET /bytes/100000000 HTTP/1.1\r\nhost: test\r\nx-api-key: key_t3_demo\r\n\r\n").await;
    connection.read_until("\r\n\r\n").await;
}
