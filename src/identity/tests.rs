use std::num::NonZeroU64;
use std::time::Duration;

use http::HeaderName;

use super::public::PublicPaths;
use super::request::Rules;
use super::*;
use crate::limit::Rate;

/// Some tenant of some tier.
pub(super) fn tenant(id: &str, tier: &str) -> Arc<Tenant> {
    let rate = Rate { count: NonZeroU64::MIN, per: Duration::from_secs(1) };
    let tier = Tier {
        rank: 0,
        name: tier.into(),
        quota: Quota { rate, burst: NonZeroU64::MIN },
        weight: NonZeroU32::MIN,
        queue: QueueBounds { length: 1, max_wait: Duration::from_secs(1) },
        on_outage: None,
    };
    Arc::new(Tenant { id: id.into(), tier: Arc::new(tier), bucket: BucketKey::tenant(id) })
}

/// The default headers, and `/health` public.
pub(super) fn rules(forward: bool) -> Rules {
    let headers = ["authorization", "x-api-key"].map(HeaderName::from_static);
    Rules::new(&headers, forward, PublicPaths::new(["/health"]).expect("a valid path"))
}

/// A request for `target`, written `METHOD /path`, with more headers.
pub(super) fn read(target: &str, headers: &[(&str, &str)], rules: &Rules) -> Request {
    let (method, path) = target.split_once(' ').expect("a method and a path");
    let all = [(":method", method), (":path", path)].into_iter().chain(headers.iter().copied());
    Request::read(all.map(|(name, value)| (name.as_bytes(), value.as_bytes())), rules)
}

fn answer(target: &str, headers: &[(&str, &str)]) -> Identified {
    let directory = Directory::new(
        [("k-1", "acme"), ("k-2", "globex")].map(|(k, id)| (KeyHash::of(k.as_bytes()), tenant(id, "T1"))),
    );
    identify(&read(target, headers, &rules(false)), &directory)
}

#[test]
fn a_known_key_is_its_tenant_in_either_header() {
    let acme = Identified::Caller(tenant("acme", "T1"));
    assert_eq!(answer("GET /x", &[("x-api-key", "k-1")]), acme);
    assert_eq!(answer("GET /x", &[("authorization", "Bearer k-1")]), acme);
    assert_eq!(answer("GET /x", &[("authorization", "bearer k-2")]), Identified::Caller(tenant("globex", "T1")));
}

#[test]
fn no_key_is_missing_and_a_wrong_one_is_invalid() {
    assert_eq!(answer("GET /x", &[]), Identified::Missing);
    assert_eq!(answer("GET /x", &[("x-api-key", "")]), Identified::Missing);
    assert_eq!(answer("GET /x", &[("authorization", "Bearer ")]), Identified::Missing);
    assert_eq!(answer("GET /x", &[("x-api-key", "K-1")]), Identified::Invalid);
    assert_eq!(answer("GET /x", &[("authorization", "Basic k-1")]), Identified::Invalid);
}

#[test]
fn two_credentials_are_invalid_even_when_they_agree() {
    assert_eq!(answer("GET /x", &[("x-api-key", "k-1"), ("x-api-key", "k-1")]), Identified::Invalid);
    assert_eq!(answer("GET /x", &[("x-api-key", "k-1"), ("authorization", "Bearer k-1")]), Identified::Invalid);
}

#[test]
fn a_key_in_the_query_is_no_key() {
    assert_eq!(answer("GET /x?api_key=k-1&x-api-key=k-1&access_token=k-1", &[]), Identified::Missing);
}

#[test]
fn identity_headers_of_the_client_say_nothing() {
    assert_eq!(answer("GET /x", &[("x-tenant-id", "acme"), ("x-tenant-tier", "T3")]), Identified::Missing);
    let forged = [("x-tenant-id", "globex"), ("x-api-key", "k-1"), ("x-tenant-id", "globex")];
    assert_eq!(answer("GET /x", &forged), Identified::Caller(tenant("acme", "T1")));
}

#[test]
fn a_public_path_passes_without_identity_whatever_it_carries() {
    for headers in [&[][..], &[("x-api-key", "k-1")], &[("x-api-key", "wrong")], &[("authorization", "Basic dTpw")]] {
        assert_eq!(answer("GET /health?x=1", headers), Identified::Pass);
    }
    assert_eq!(answer("GET /health/../admin", &[]), Identified::Missing);
}

#[test]
fn a_preflight_passes_and_other_options_requests_do_not() {
    let preflight = [("origin", "https://app.example"), ("access-control-request-method", "POST")];
    assert_eq!(answer("OPTIONS /x", &preflight), Identified::Pass);
    assert_eq!(answer("OPTIONS /x", &preflight[..1]), Identified::Missing);
    assert_eq!(answer("OPTIONS /x", &preflight[1..]), Identified::Missing);
    assert_eq!(answer("POST /x", &preflight), Identified::Missing);
}

#[test]
fn a_key_hash_is_the_sha_256_of_the_bytes_and_hides_itself() {
    // The digest of "abc" in FIPS 180-2, appendix B.1.
    let abc = KeyHash::of(b"abc");
    assert_eq!(abc.0[..4], [0xba, 0x78, 0x16, 0xbf]);
    assert_eq!(abc.0[28..], [0xf2, 0x00, 0x15, 0xad]);
    assert_ne!(KeyHash::of(b"\xff"), KeyHash::of(b"\xfe"));
    assert_eq!(format!("{abc:?}"), "KeyHash(…)");
}
