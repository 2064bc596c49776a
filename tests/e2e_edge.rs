//! Who is let through, and as whom, at the edges: browsers, probes, crooked paths, forged and repeated headers, through a
//! real Envoy.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use reqwest::Method;
use serde_json::Value;

use support::client::Answer;
use support::occupant::Occupant;
use support::raw::{Raw, exchange};
use support::stack::{Stack, StackOptions};
use support::wait::eventually;

/// One slot, no place to wait for T1, and buckets that fill by one token an hour. Below `/anything` the upstream echoes
/// what it got.
const CONFIG: &str = "
public: [/health, /anything/open, '/anything/assets/*']
tiers:
  - { name: T3, rate: 1000000/s, burst: 1000000, queue: { length: 10, max_wait: 5s } }
  - { name: T2, rate: 1/h, burst: 5, queue: { length: 10, max_wait: 5s } }
  - { name: T1, rate: 1/h, burst: 50, queue: { length: 1, max_wait: 50ms } }
tenants:
  - { id: acme, tier: T3, keys: [key_t3_demo] }
  - { id: globex, tier: T2, keys: [key_t2_demo] }
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 1 }
";

const ORIGIN: &str = "https://app.example";

async fn stack() -> Stack {
    Stack::start(StackOptions::new(CONFIG)).await
}

/// The values of a header in an echo of `/anything`.
fn echoed(answer: &Answer, name: &str) -> Vec<String> {
    let echo = answer.json();
    let pairs = echo["headers"].as_array().unwrap_or_else(|| panic!("no echo: {echo}"));
    let values = pairs.iter().filter(|pair| pair[0] == name);
    values.map(|pair| pair[1].as_str().unwrap().to_owned()).collect()
}

/// The status in the head of a raw answer.
fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no status in {answer:?}"))
}

/// A GET with these header lines, exactly as written.
async fn raw_get(stack: &Stack, path: &str, lines: &[&str]) -> String {
    let first = format!("GET {path} HTTP/1.1");
    let head = [&[first.as_str(), "host: test", "connection: close"], lines, &["\r\n"]].concat();
    exchange(stack.envoy.address(), head.join("\r\n")).await
}

async fn buckets_in_use(stack: &Stack) -> Value {
    stack.stats().await["buckets"]["in_use"].clone()
}

#[tokio::test]
async fn preflights_need_no_key_no_token_and_no_slot() {
    let stack = stack().await;
    let client = stack.client();
    assert_eq!(client.get("/anything", Some("key_t2_demo")).await.header("x-ratelimit-remaining"), Some("4"));
    stack.wait_until_quiet().await;
    let occupant = Occupant::start(&client, "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;

    for _ in 0..20 {
        let preflight = client.request(Method::OPTIONS, "/anything").header("origin", ORIGIN);
        let preflight = preflight.header("access-control-request-method", "POST");
        let answer = client.send(preflight.header("access-control-request-headers", "x-api-key")).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
        assert!(answer.header("access-control-allow-methods").is_some());
        assert!(answer.header("access-control-allow-headers").is_some());
        assert_eq!(answer.header("x-ratelimit-remaining"), None);
    }

    assert_eq!(occupant.finish().await.status, 200);
    assert_eq!(client.get("/anything", Some("key_t2_demo")).await.header("x-ratelimit-remaining"), Some("3"));
    // An OPTIONS request that asks for nothing needs a key like any other.
    assert_eq!(client.send(client.request(Method::OPTIONS, "/anything")).await.status, 401);
}

#[tokio::test]
async fn script_of_another_origin_can_read_every_refusal() {
    let stack = stack().await;
    let client = stack.client();
    for _ in 0..5 {
        assert_eq!(client.get("/anything", Some("key_t2_demo")).await.status, 200);
    }
    let occupant = Occupant::start(&client, "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;

    for (key, status, error) in [
        (None, 401, "missing_api_key"),
        (Some("key_of_nobody"), 401, "invalid_api_key"),
        (Some("key_t2_demo"), 429, "rate_limited"),
        (Some("key_t1_demo"), 503, "queue_timeout"),
    ] {
        let mut request = client.request(Method::GET, "/anything").header("origin", ORIGIN);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let answer = client.send(request).await;
        assert_eq!((answer.status, answer.error().as_deref()), (status, Some(error)));
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
        let exposed = answer.header("access-control-expose-headers").unwrap();
        let exposed: Vec<_> = exposed.split(',').map(str::trim).collect();
        let expected: &[&str] = match status {
            401 => &["www-authenticate"],
            _ => &["retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"],
        };
        for name in expected {
            assert!(answer.header(name).is_some_and(|value| !value.is_empty()), "{error} has no {name}");
            assert!(exposed.contains(name), "{error} exposes only {exposed:?}");
        }
        assert!(answer.headers.get("retry-after").is_none_or(|value| value != "0"));
    }
    assert_eq!(occupant.finish().await.status, 200);
}

#[tokio::test]
async fn probes_of_a_public_path_touch_no_bucket_and_need_no_slot() {
    let stack = stack().await;
    let client = stack.client();
    let occupant = Occupant::start(&client, "occupant", "key_t3_demo");
    stack.wait_until_in_flight(1).await;
    let before = buckets_in_use(&stack).await;

    for _ in 0..60 {
        let answer = client.get("/health", None).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-limit")), (200, None));
    }

    assert_eq!(buckets_in_use(&stack).await, before);
    let metrics = stack.metrics().await;
    assert_eq!(metrics.count("bouncer_requests_total", &[("tier", "none"), ("outcome", "forwarded")]), 60);
    assert_eq!(metrics.count("bouncer_requests_total", &[("outcome", "queued")]), 0);
    assert_eq!(occupant.finish().await.status, 200);
}

#[tokio::test]
async fn crooked_path_is_never_public_unless_the_upstream_sees_the_public_one() {
    let stack = stack().await;

    // Envoy makes one path of what means the same, for bouncer and the upstream alike.
    for (path, seen) in [
        ("/anything/open", "/anything/open"),
        ("/anything/open?to=/../admin", "/anything/open"),
        ("//anything//open", "/anything/open"),
        ("/anything/x/../open", "/anything/open"),
        ("/anything/%6fpen", "/anything/open"),
        ("http://test/anything/open", "/anything/open"),
        ("/anything/assets/logo.png", "/anything/assets/logo.png"),
    ] {
        let answer = raw_get(&stack, path, &[]).await;
        assert_eq!(status(&answer), 200, "{path}: {answer}");
        let seen_by_upstream = format!(r#""path":"{seen}""#);
        assert!(answer.contains(&seen_by_upstream), "{path}: {answer}");
    }
    let passed = stack.record().total;

    for path in [
        "/health/../anything",
        "/health/..;/anything",
        "/health;/../anything",
        "/health;x=/anything",
        "/health/",
        "/Health",
        "/health%00",
        "/health%2f..%2fanything",
        "/anything/open/../admin",
        "/anything/open;jsessionid=1",
        "/anything/assets/../admin",
        "/anything/assets/..%2fadmin",
        "/anything/assets/%2e%2e/admin",
        "/anything/assets/%2e%2e%2fadmin",
        "/anything/assets/%252e%252e/admin",
        "/anything/assets/..;/admin",
        "/anything/assets/..\\admin",
        "/anything/assets/..%5cadmin",
        "/anything/assets/%c0%ae%c0%ae/admin",
        "//admin/../anything",
        "http://test/health/../anything",
        "/health#/../anything",
    ] {
        // Read no further: after a 400 Envoy leaves the closing to the client for a second.
        let mut connection = Raw::connect(stack.envoy.address()).await;
        connection.send(format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")).await;
        let answer = connection.read_until("\r\n\r\n").await;
        assert!(matches!(status(&answer), 400 | 401), "{path}: {answer}");
    }
    assert_eq!(stack.record().total, passed, "none of them reached the upstream");
}

#[tokio::test]
async fn scheme_has_no_case_and_the_key_has() {
    let stack = stack().await;
    let client = stack.client();
    for (authorization, status) in [
        ("Bearer key_t3_demo", 200),
        ("bearer key_t3_demo", 200),
        ("BEARER   key_t3_demo", 200),
        ("Bearer KEY_T3_DEMO", 401),
        ("Basic key_t3_demo", 401),
        ("Bearer", 401),
        ("key_t3_demo", 401),
    ] {
        let request = client.request(Method::GET, "/anything").header("authorization", authorization);
        let answer = client.send(request).await;
        assert_eq!(answer.status, status, "{authorization}: {}", answer.text());
        if status == 200 {
            assert_eq!(echoed(&answer, "authorization"), [""; 0], "the upstream does not get to see it");
        }
    }
}

#[tokio::test]
async fn key_in_the_query_opens_nothing_and_no_key_is_logged() {
    let config = format!("{CONFIG}log: {{ level: trace }}\n");
    let stack = Stack::start(StackOptions::new(config)).await;
    let client = stack.client();

    for query in ["api_key=key_t3_demo", "x-api-key=key_t3_demo", "access_token=key_t3_demo"] {
        let answer = client.get(&format!("/anything/query?{query}"), None).await;
        assert_eq!((answer.status, answer.error().as_deref()), (401, Some("missing_api_key")));
    }
    assert_eq!(client.get("/anything/header", Some("key_t3_demo")).await.status, 200);
    assert_eq!(client.get("/anything/wrong", Some("key_of_nobody")).await.status, 401);

    let lines = eventually("five lines of the access log", Duration::from_secs(10), async || {
        Some(stack.envoy.access_log()).filter(|lines| lines.len() >= 5)
    })
    .await;
    assert!(lines.iter().any(|line| line.contains("/anything/query ")), "{lines:#?}");
    let said = stack.bouncer.log_text();
    assert!(said.contains("TRACE"), "bouncer says all it can");
    for log in [lines.join("\n"), said, stack.envoy.process.log_text()] {
        for secret in ["key_t3_demo", "key_of_nobody", "api_key=", "access_token="] {
            assert!(!log.contains(secret), "{secret} is in a log");
        }
    }
}

#[tokio::test]
async fn more_than_one_credential_is_none_even_when_they_agree() {
    let stack = stack().await;
    for lines in [
        ["x-api-key: key_t3_demo", "x-api-key: key_t3_demo"],
        ["x-api-key: key_t3_demo", "x-api-key: key_t1_demo"],
        ["authorization: Bearer key_t3_demo", "authorization: Bearer key_t3_demo"],
        ["authorization: Bearer key_t3_demo", "Authorization: Bearer key_t1_demo"],
        ["authorization: Bearer key_t3_demo", "x-api-key: key_t3_demo"],
        ["x-api-key: key_t3_demo, key_t3_demo", "accept: */*"],
    ] {
        let answer = raw_get(&stack, "/anything", &lines).await;
        assert_eq!(status(&answer), 401, "{lines:?}: {answer}");
        assert!(answer.contains(r#""error":"invalid_api_key""#), "{lines:?}: {answer}");
    }
    assert_eq!(stack.record().total, 0);
    assert_eq!(buckets_in_use(&stack).await, 0, "nobody was charged");
}

/// What a client may say of itself, and the upstream may not hear. The last line is nobody's business.
const FORGED: [&str; 8] = [
    "x-tenant-id: evil",
    "X-Tenant-Id: evil-too",
    "x-tenant-tier: T3",
    "x_tenant_id: evil",
    "X_Tenant_Tier: T3",
    "x-tenant_id: evil",
    "x_tenant-tier: T3",
    "x-other: kept",
];

#[tokio::test]
async fn upstream_hears_who_it_is_from_the_server_alone() {
    let stack = stack().await;
    let keyed = [&["x-api-key: key_t1_demo"], &FORGED[..]].concat();
    // Named as meant for one hop only, so that a proxy would drop what the server says.
    let dropped = ["x-api-key: key_t1_demo", "x-other: kept", "connection: x-tenant-id, x-tenant-tier"];
    for (path, lines, id, tier) in [
        ("/anything", &keyed[..], Some("initech"), Some("T1")),
        ("/anything", &dropped[..], Some("initech"), Some("T1")),
        ("/anything/open", &keyed[..], None, None),
        ("/anything/open", &FORGED[..], None, None),
    ] {
        let answer = raw_get(&stack, path, lines).await;
        assert_eq!(status(&answer), 200, "{answer}");
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let echo: Value = serde_json::from_str(body.trim_matches(|c| c != '{' && c != '}')).unwrap();
        let pairs = echo["headers"].as_array().unwrap();
        let identity: Vec<_> = pairs
            .iter()
            .map(|pair| (pair[0].as_str().unwrap().replace('_', "-"), pair[1].as_str().unwrap()))
            .filter(|(name, _)| name.starts_with("x-tenant") || name == "x-api-key")
            .collect();
        let expected: Vec<_> = [("x-tenant-id", id), ("x-tenant-tier", tier)]
            .into_iter()
            .filter_map(|(n, v)| Some((n.to_owned(), v?)))
            .collect();
        assert_eq!(identity, expected, "{path}");
        assert!(body.contains("x-other"), "what is not about identity stays");
    }
    let answer = raw_get(&stack, "/anything", &keyed).await;
    assert!(answer.contains("x-ratelimit-limit: 50"), "the limits are those of the key's tier: {answer}");
}

#[tokio::test]
async fn credential_goes_on_to_the_upstream_only_where_that_is_configured() {
    let mut stack = stack().await;
    assert_eq!(echoed(&stack.client().get("/anything", Some("key_t3_demo")).await, "x-api-key"), [""; 0]);

    stack.bouncer.configure(&format!("{CONFIG}credentials: {{ forward: true }}\n"));
    stack.bouncer.restart().await;
    stack.wait_until_healthy().await;

    let answer = eventually("a verdict of the new bouncer", Duration::from_secs(10), async || {
        Some(stack.client().get("/anything", Some("key_t3_demo")).await).filter(|answer| answer.status == 200)
    })
    .await;
    assert_eq!(echoed(&answer, "x-api-key"), ["key_t3_demo"]);
    assert_eq!(echoed(&answer, "x-tenant-id"), ["acme"]);
}

#[tokio::test]
async fn challenge_can_be_parsed_and_names_an_error_only_where_a_key_was_sent() {
    let stack = stack().await;
    let client = stack.client();
    let plain = r#"Bearer realm="bouncer""#;
    let invalid = r#"Bearer realm="bouncer", error="invalid_token""#;
    for (lines, expected) in [
        (&[][..], plain),
        (&["x-api-key: key_of_nobody"], invalid),
        (&["authorization: Bearer key_of_nobody"], invalid),
        (&["authorization: Basic dXNlcjpwYXNz"], invalid),
    ] {
        let answer = raw_get(&stack, "/anything", lines).await;
        assert_eq!(status(&answer), 401);
        let challenges: Vec<_> =
            answer.lines().filter_map(|line| line.strip_prefix("www-authenticate: ")).map(str::trim_end).collect();
        assert_eq!(challenges, [expected], "{lines:?}");
    }
    // A refusal of a HEAD has the head of the refusal and nothing else.
    let answer = client.send(client.request(Method::HEAD, "/anything")).await;
    assert_eq!((answer.status, answer.header("www-authenticate"), answer.body.len()), (401, Some(plain), 0));
    let head =
        exchange(stack.envoy.address(), "HEAD /anything HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 401 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert_eq!(head.matches("\r\n\r\n").count(), 1, "{head}");
}

#[tokio::test]
async fn names_of_any_visible_ascii_reach_the_upstream_as_they_are_written() {
    let visible: String = (b' '..=b'~').map(char::from).collect();
    let ids =
        ["a b  c", visible.trim(), "%DYNAMIC_METADATA(bouncer:tier)%", "100%", "x, y; z=\"q\"", &"long-".repeat(20)];
    let tenants: Vec<_> = ids
        .iter()
        .enumerate()
        .map(|(n, id)| serde_json::json!({ "id": id, "tier": "T_1.x-y", "keys": [format!("key{n}{visible}").replace(' ', "")] }))
        .collect();
    let config = serde_json::json!({
        "tiers": [{ "name": "T_1.x-y", "rate": "100/s", "queue": { "length": 1, "max_wait": "1s" } }],
        "tenants": tenants,
        "pools": [{ "name": "default", "max_in_flight": 10 }],
    });
    // JSON is YAML.
    let stack = Stack::start(StackOptions::new(config.to_string())).await;
    let client = stack.client();
    for (tenant, id) in tenants.iter().zip(ids) {
        let answer = client.get("/anything", tenant["keys"][0].as_str()).await;
        assert_eq!(answer.status, 200, "{id}: {}", answer.text());
        assert_eq!(echoed(&answer, "x-tenant-id"), [id]);
        assert_eq!(echoed(&answer, "x-tenant-tier"), ["T_1.x-y"]);
        assert_eq!(answer.header("x-ratelimit-limit"), Some("200"));
    }
    let envoy = stack.envoy.stats().await;
    assert_eq!(envoy["http.main.ext_proc.bouncer.rejected_header_mutations"], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_and_paths_never_become_series() {
    let mut stack = stack().await;
    let client = stack.client();
    let attempt = async |n: u32| {
        let answer = client.get(&format!("/anything/{n}?n={n}"), Some(&format!("wrong-{n}"))).await;
        assert_eq!(answer.status, 401);
    };
    attempt(0).await;
    let series = async |stack: &Stack| (stack.metrics().await.series(), stack.envoy.metrics().await.series());
    let (before, memory) = (series(&stack).await, stack.bouncer.process().resident_bytes());

    futures_util::future::join_all((0..8).map(|lane| {
        let attempt = &attempt;
        async move {
            for n in 1..=250 {
                attempt(lane * 250 + n).await;
            }
        }
    }))
    .await;

    assert_eq!(series(&stack).await, before);
    assert_eq!(buckets_in_use(&stack).await, 0);
    let refused =
        stack.metrics().await.count("bouncer_requests_total", &[("tier", "none"), ("outcome", "unauthorized")]);
    assert_eq!(refused, 2001);
    let grown = stack.bouncer.process().resident_bytes().saturating_sub(memory);
    assert!(grown < 4 << 20, "bouncer grew by {grown} bytes");
}
