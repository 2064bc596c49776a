use proptest::prelude::*;

use super::super::strip::IDENTITY;
use super::super::tests::{read, rules};
use super::super::{TENANT_ID, TENANT_TIER};
use super::*;

fn stripped(target: &str, headers: &[(&str, &str)], rules: &Rules) -> Vec<String> {
    read(target, headers, rules).strip.names(rules).map(str::to_owned).collect()
}

fn presented(headers: &[(&str, &str)]) -> Presented {
    read("GET /x", headers, &rules(false)).credential
}

#[test]
fn one_credential_is_hashed() {
    let key = Presented::One(KeyHash::of(b"k-1"));
    assert_eq!(presented(&[("x-api-key", " k-1\t")]), key);
    assert_eq!(presented(&[("X-API-Key", "k-1")]), key);
    assert_eq!(presented(&[("Authorization", "BEARER k-1")]), key);
    assert_eq!(presented(&[("accept", "*/*")]), Presented::None);
}

#[test]
fn an_empty_credential_does_not_count_beside_a_real_one() {
    let key = Presented::One(KeyHash::of(b"k-1"));
    assert_eq!(presented(&[("authorization", "Bearer"), ("x-api-key", "k-1")]), key);
    assert_eq!(presented(&[("x-api-key", "k-1"), ("x-api-key", ""), ("authorization", "")]), key);
    assert_eq!(presented(&[("x-api-key", ""), ("x-api-key", " ")]), Presented::None);
}

#[test]
fn more_than_one_credential_is_a_conflict_in_any_order() {
    let bearer = ("authorization", "Bearer k-1");
    let basic = ("authorization", "Basic dTpw");
    let (k1, k2) = (("x-api-key", "k-1"), ("x-api-key", "k-2"));
    for pair in
        [[k1, k1], [k1, k2], [bearer, bearer], [bearer, k1], [k2, bearer], [basic, k1], [k1, basic], [basic, basic]]
    {
        assert_eq!(presented(&pair), Presented::Conflict, "{pair:?}");
    }
    assert_eq!(presented(&[k1, k1, k1]), Presented::Conflict);
    assert_eq!(presented(&[basic]), Presented::Malformed);
}

#[test]
fn only_configured_headers_bring_a_key() {
    let only_own = Rules::new(&[HeaderName::from_static("x-key")], false, PublicPaths::default());
    let request = read("GET /x", &[("authorization", "Bearer k-1"), ("x-api-key", "k-1"), ("x-key", "k-2")], &only_own);
    assert_eq!(request.credential, Presented::One(KeyHash::of(b"k-2")));
    assert_eq!(request.strip.names(&only_own).collect::<Vec<_>>(), ["x-key"]);
}

#[test]
fn a_key_that_is_not_utf_8_is_read_as_its_bytes() {
    let headers: [(&[u8], &[u8]); 2] = [(b"x-api-key", b"k\xff\xfe"), (b"\xff\xff", b"\xff")];
    let request = Request::read(headers, &rules(false));
    assert_eq!(request.credential, Presented::One(KeyHash::of(b"k\xff\xfe")));
}

#[test]
fn the_credential_is_stripped_on_every_path_unless_it_is_forwarded() {
    let headers = [("authorization", "Bearer k-1"), ("X-Api-Key", "")];
    for target in ["GET /x", "GET /health"] {
        assert_eq!(stripped(target, &headers, &rules(false)), ["authorization", "x-api-key"], "{target}");
        assert!(stripped(target, &headers, &rules(true)).is_empty(), "{target}");
    }
    assert!(read("GET /x", &[("accept", "*/*")], &rules(false)).strip.is_empty());
}

#[test]
fn identity_headers_and_their_twins_are_stripped_in_every_spelling() {
    for word in ["id", "tier"] {
        for (first, second) in [('-', '-'), ('-', '_'), ('_', '-'), ('_', '_')] {
            let name = format!("x{first}tenant{second}{word}");
            for forward in [false, true] {
                assert_eq!(stripped("GET /health", &[(&name, "evil")], &rules(forward)), [name.as_str()]);
            }
            assert_eq!(stripped("GET /x", &[(&name.to_uppercase(), "evil")], &rules(false)), [name.as_str()]);
        }
    }
    assert!(
        stripped("GET /x", &[("x-tenant-idx", "1"), ("x-tenant-i", "1"), ("x-tenant-tie", "1")], &rules(false))
            .is_empty()
    );
}

#[test]
fn the_names_that_the_server_sets_itself_can_be_left_to_the_setting() {
    let rules = rules(false);
    let headers = [("x-tenant-id", "a"), ("x_tenant_id", "b"), ("x-tenant-tier", "c"), ("x-api-key", "k-1")];
    let request = read("GET /x", &headers, &rules);
    assert_eq!(request.strip.but_own().names(&rules).collect::<Vec<_>>(), ["x_tenant_id", "x-api-key"]);
    assert_eq!(request.strip.names(&rules).count(), 4);
}

#[test]
fn every_one_of_very_many_configured_headers_is_stripped() {
    let names: Vec<String> = (0..200).map(|n| format!("x-key-{n}")).collect();
    let headers: Vec<HeaderName> = names.iter().map(|name| name.parse().expect("a valid name")).collect();
    let rules = Rules::new(&headers, false, PublicPaths::default());
    for name in &names {
        let stripped = stripped("GET /x", &[(name, "k-1")], &rules);
        assert!(stripped.contains(name), "{name}");
    }
    assert_eq!(stripped("GET /x", &[("x-key-54", "k-1")], &rules), ["x-key-54"]);
}

#[test]
fn a_configured_header_may_have_a_name_that_means_something_else_too() {
    let headers = ["x-tenant-id", "content-type"].map(HeaderName::from_static);
    let rules = Rules::new(&headers, true, PublicPaths::default());
    let request = read("GET /x", &[("x-tenant-id", "k-1")], &rules);
    assert_eq!(request.credential, Presented::One(KeyHash::of(b"k-1")));
    assert_eq!(request.strip.names(&rules).collect::<Vec<_>>(), ["x-tenant-id"]);
    assert!(read("POST /x", &[("content-type", "application/grpc")], &rules).grpc);
}

#[test]
fn grpc_is_told_by_its_content_type() {
    let grpc = |value| read("POST /x", &[("content-type", value)], &rules(false)).grpc;
    for value in
        ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8", "Application/GRPC ; a=b"]
    {
        assert!(grpc(value), "{value}");
    }
    for value in
        ["", "application/grpc-web", "application/grpc-web+proto", "application/grpcx", "application/json", "grpc"]
    {
        assert!(!grpc(value), "{value}");
    }
    assert!(!read("POST /x", &[], &rules(false)).grpc);
}

#[test]
fn an_origin_tells_a_script_of_a_browser() {
    let cross_origin = |headers| read("GET /x", headers, &rules(false)).cross_origin;
    assert!(cross_origin(&[("Origin", "https://app.example")]));
    assert!(cross_origin(&[("origin", "null")]));
    assert!(!cross_origin(&[("origin", "")]));
    assert!(!cross_origin(&[]));
}

#[test]
fn a_preflight_is_an_options_request_that_asks_for_a_method_from_an_origin() {
    let access = |target, headers| read(target, headers, &rules(false)).access;
    let asks = [("origin", "https://app.example"), ("access-control-request-method", "PUT")];
    assert_eq!(access("OPTIONS /x", &asks), Access::Preflight);
    assert_eq!(access("options /x", &asks), Access::Keyed, "methods have a case");
    assert_eq!(access("GET /x", &asks), Access::Keyed);
    assert_eq!(access("OPTIONS /x", &asks[..1]), Access::Keyed);
    assert_eq!(access("OPTIONS /x", &asks[1..]), Access::Keyed);
    assert_eq!(access("OPTIONS /health", &asks), Access::Public);
}

#[test]
fn a_preflight_does_nothing_but_ask() {
    let access = |name, value| {
        let asks = [("origin", "https://app.example"), ("access-control-request-method", "PUT"), (name, value)];
        read("OPTIONS /x", &asks, &rules(false)).access
    };
    for (name, value) in [
        ("upgrade", "websocket"),
        ("content-type", "application/grpc"),
        ("content-type", "Application/grpc-web+proto"),
        ("X-HTTP-Method-Override", "POST"),
        ("x_http_method_override", "POST"),
        ("x-http-method", "POST"),
        ("x-method-override", "POST"),
        ("content-length", "5"),
        ("content-length", ""),
        ("transfer-encoding", "chunked"),
    ] {
        assert_eq!(access(name, value), Access::Keyed, "{name}: {value}");
    }
    for (name, value) in
        [("access-control-request-headers", "upgrade"), ("content-length", "0"), ("content-type", "text/plain")]
    {
        assert_eq!(access(name, value), Access::Preflight, "{name}: {value}");
    }
}

#[test]
fn a_request_with_two_paths_or_two_methods_needs_a_key() {
    let rules = rules(false);
    assert_eq!(read("GET /health", &[(":path", "/health")], &rules).access, Access::Keyed);
    let asks = [("origin", "a"), ("access-control-request-method", "PUT"), (":method", "POST")];
    assert_eq!(read("OPTIONS /x", &asks, &rules).access, Access::Keyed);
}

#[test]
fn a_request_without_pseudo_headers_needs_a_key() {
    assert_eq!(Request::read([], &rules(false)).access, Access::Keyed);
}

#[test]
fn what_is_kept_of_a_held_request_is_small() {
    assert!(size_of::<Request>() <= 48, "{} bytes", size_of::<Request>());
}

/// Names that mean something, in any case, and names that do not.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just("authorization"),
        Just("Authorization"),
        Just("x-api-key"),
        Just("X-API-KEY"),
        Just("origin"),
        Just("access-control-request-method"),
        Just("content-type"),
        Just("content-length"),
        Just("upgrade"),
        Just("x-http-method"),
        Just(":path"),
        Just(":method"),
        prop::sample::select(IDENTITY.as_slice()),
    ]
    .prop_map(|name| name.as_bytes().to_vec())
    .boxed()
    .prop_union(any::<Vec<u8>>().boxed())
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::sample::select(vec!["", " ", "Bearer k-1", "bearer  k-2", "Basic x", "k-1", "/health", "OPTIONS", "/x"])
            .prop_map(|value| value.as_bytes().to_vec()),
        any::<Vec<u8>>(),
    ]
}

proptest! {
    #[test]
    fn any_headers_can_be_read_and_nothing_of_the_clients_word_is_left(
        headers in prop::collection::vec((name(), value()), 0..12),
    ) {
        let rules = rules(false);
        let request = Request::read(headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice())), &rules);
        let stripped: Vec<&str> = request.strip.names(&rules).collect();
        for (name, _) in &headers {
            let folded = name.to_ascii_lowercase().iter().map(|b| if *b == b'_' { b'-' } else { *b }).collect::<Vec<_>>();
            let claims = folded == TENANT_ID.as_bytes() || folded == TENANT_TIER.as_bytes();
            let brings_key = is(name, "authorization") || is(name, "x-api-key");
            prop_assert_eq!(stripped.iter().any(|gone| is(name, gone)), claims || brings_key, "{}", name.escape_ascii());
        }
        prop_assert!(stripped.iter().all(|gone| headers.iter().any(|(name, _)| is(name, gone))), "only what is there");
    }

    #[test]
    fn the_order_of_headers_does_not_matter(
        headers in prop::collection::vec((name(), value()), 0..8).prop_flat_map(|all| (Just(all.clone()), Just(all).prop_shuffle())),
    ) {
        let rules = rules(false);
        let read = |all: &[(Vec<u8>, Vec<u8>)]| {
            Request::read(all.iter().map(|(name, value)| (name.as_slice(), value.as_slice())), &rules)
        };
        prop_assert_eq!(read(&headers.0), read(&headers.1));
    }
}
