//! The one table from outcome to status, headers, body and metric label.

use std::sync::Arc;
use std::time::Duration;

use crate::identity::Tenant;
use crate::limit::Level;

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// No credential was presented.
    MissingKey,
    /// The credential is unknown, malformed, or one of several.
    InvalidKey,
    /// The tenant's bucket is empty.
    RateLimited,
    /// The tier's queue has no place left.
    QueueFull,
    /// No slot came free in time.
    QueueTimeout,
    /// The store is down, and the policy says to refuse.
    Unavailable,
    /// This replica is going away.
    ShuttingDown,
}

impl Reason {
    /// Every reason to shed a request, in the order of their metric labels.
    pub const SHED: [Reason; 4] = [Reason::QueueFull, Reason::QueueTimeout, Reason::Unavailable, Reason::ShuttingDown];

    /// The HTTP status.
    pub const fn status(self) -> u16 {
        match self {
            Reason::MissingKey | Reason::InvalidKey => 401,
            Reason::RateLimited => 429,
            Reason::QueueFull | Reason::QueueTimeout | Reason::Unavailable | Reason::ShuttingDown => 503,
        }
    }

    /// The gRPC status: `UNAUTHENTICATED`, `RESOURCE_EXHAUSTED` or `UNAVAILABLE`.
    pub const fn grpc_status(self) -> u32 {
        match self {
            Reason::MissingKey | Reason::InvalidKey => 16,
            Reason::RateLimited => 8,
            Reason::QueueFull | Reason::QueueTimeout | Reason::Unavailable | Reason::ShuttingDown => 14,
        }
    }

    /// The name of the refusal: the body's `error`, the verdict in Envoy's metadata, the label of a shed request.
    pub const fn error(self) -> &'static str {
        match self {
            Reason::MissingKey => "missing_api_key",
            Reason::InvalidKey => "invalid_api_key",
            Reason::RateLimited => "rate_limited",
            Reason::QueueFull => "queue_full",
            Reason::QueueTimeout => "queue_timeout",
            Reason::Unavailable => "unavailable",
            Reason::ShuttingDown => "shutting_down",
        }
    }

    /// The body: an RFC 9457 problem with the member `error` beside the standard ones.
    pub const fn body(self) -> &'static str {
        match self {
            Reason::MissingKey => {
                r#"{"type":"about:blank","title":"Unauthorized","status":401,"error":"missing_api_key","detail":"this request carries no API key"}"#
            }
            Reason::InvalidKey => {
                r#"{"type":"about:blank","title":"Unauthorized","status":401,"error":"invalid_api_key","detail":"the API key is unknown, or the credential is of another scheme, or there is more than one"}"#
            }
            Reason::RateLimited => {
                r#"{"type":"about:blank","title":"Too Many Requests","status":429,"error":"rate_limited","detail":"the rate limit of this tenant is used up; see Retry-After"}"#
            }
            Reason::QueueFull => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"error":"queue_full","detail":"the upstream is busy and too many requests of this tier wait for it"}"#
            }
            Reason::QueueTimeout => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"error":"queue_timeout","detail":"the upstream stayed busy for as long as this request could wait"}"#
            }
            Reason::Unavailable => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"error":"unavailable","detail":"the rate limit of this tenant cannot be checked at the moment"}"#
            }
            Reason::ShuttingDown => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"error":"shutting_down","detail":"this replica is shutting down"}"#
            }
        }
    }

    /// The challenge of a 401: RFC 6750 names an error only where a credential was sent.
    pub const fn challenge(self) -> Option<&'static str> {
        match self {
            Reason::MissingKey => Some(r#"Bearer realm="bouncer""#),
            Reason::InvalidKey => Some(r#"Bearer realm="bouncer", error="invalid_token""#),
            Reason::RateLimited
            | Reason::QueueFull
            | Reason::QueueTimeout
            | Reason::Unavailable
            | Reason::ShuttingDown => None,
        }
    }
}

/// A no.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// Who was refused, where that is known.
    pub tenant: Option<Arc<Tenant>>,
    /// How full the bucket is, where it was asked.
    pub level: Option<Level>,
    /// When to come back; present on every 429 and 503.
    pub retry_after: Option<Duration>,
    /// How long the request was held before it was refused.
    pub waited: Duration,
}

/// Whole seconds for a header, rounded up: who waits that long finds what was promised.
pub fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// `Retry-After` in whole seconds: rounded up, and at least 1 (RFC 9110, section 10.2.3).
pub fn retry_after_seconds(duration: Duration) -> u64 {
    whole_seconds(duration).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Reason; 7] = [
        Reason::MissingKey,
        Reason::InvalidKey,
        Reason::RateLimited,
        Reason::QueueFull,
        Reason::QueueTimeout,
        Reason::Unavailable,
        Reason::ShuttingDown,
    ];

    #[test]
    fn every_body_says_what_the_table_says() {
        for reason in ALL {
            let body: serde_json::Value = serde_json::from_str(reason.body()).unwrap();
            assert_eq!(body["status"], reason.status());
            assert_eq!(body["error"], reason.error());
            assert_eq!(body["type"], "about:blank");
            let title = http::StatusCode::from_u16(reason.status()).unwrap();
            assert_eq!(body["title"], title.canonical_reason().unwrap());
            assert!(body["detail"].as_str().is_some_and(|detail| !detail.is_empty()));
        }
    }

    #[test]
    fn exactly_the_401s_carry_a_challenge_and_the_503s_are_shed() {
        for reason in ALL {
            assert_eq!(reason.challenge().is_some(), reason.status() == 401, "{reason:?}");
            assert_eq!(Reason::SHED.contains(&reason), reason.status() == 503, "{reason:?}");
        }
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        assert_eq!(retry_after_seconds(Duration::ZERO), 1);
        assert_eq!(retry_after_seconds(Duration::from_millis(1)), 1);
        assert_eq!(retry_after_seconds(Duration::from_secs(2)), 2);
        assert_eq!(retry_after_seconds(Duration::new(2, 1)), 3);
        assert_eq!(retry_after_seconds(Duration::MAX), u64::MAX);
        assert_eq!(whole_seconds(Duration::ZERO), 0);
    }
}
