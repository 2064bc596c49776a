//! The configuration: one immutable value of domain types, made from a file and the environment.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::identity::{KeyHash, Tenant, Tier};
use crate::limit::OnOutage;

/// Everything that `bouncer serve` needs to know.
#[derive(Debug)]
pub struct Config {
    pub listen: Listen,
    /// Absent: buckets are kept in this process.
    pub redis: Option<Redis>,
    pub credentials: Credentials,
    /// As written: an exact path, or a prefix where the last character is `*`.
    pub public: Vec<String>,
    /// Highest first: the list is the order of service, and `tiers[i].rank == i`.
    pub tiers: Vec<Arc<Tier>>,
    pub tenants: Vec<TenantKeys>,
    /// At least `default`.
    pub pools: Vec<Pool>,
    pub shutdown: Shutdown,
    /// How long a silent replica keeps its slots. Slots of this process end with it, so nothing waits for this yet.
    pub lease: Duration,
    pub log: Log,
}

/// A tenant and the hashes of its keys.
#[derive(Debug)]
pub struct TenantKeys {
    pub tenant: Arc<Tenant>,
    pub keys: Vec<KeyHash>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    pub grpc: Address,
    pub admin: SocketAddr,
}

/// Where the gRPC server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    Tcp(SocketAddr),
    /// Written `unix:/path`.
    Unix(PathBuf),
}

#[derive(Clone, PartialEq, Eq)]
pub struct Redis {
    /// May hold a password: print [`Redis::redacted_url`] instead.
    pub url: String,
    /// How long one call may take before Redis counts as down.
    pub timeout: Duration,
    pub on_outage: OnOutage,
}

impl Redis {
    /// The URL without user and password, for logs and `bouncer check`.
    pub fn redacted_url(&self) -> String {
        match url::Url::parse(&self.url) {
            Ok(mut url) => {
                let hidden = url.password().is_some() || !url.username().is_empty();
                if hidden && (url.set_username("").is_err() || url.set_password(None).is_err()) {
                    return "redis://…".into();
                }
                url.to_string()
            }
            Err(_) => "redis://…".into(),
        }
    }
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redis")
            .field("url", &self.redacted_url())
            .field("timeout", &self.timeout)
            .field("on_outage", &self.on_outage)
            .finish()
    }
}

/// Where keys are looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Lower-case header names. `authorization` is read as `Bearer <key>`, every other header as the bare key.
    pub headers: Vec<http::HeaderName>,
    /// Whether the upstream gets to see the credential.
    pub forward: bool,
}

/// One protected upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    pub max_in_flight: NonZeroUsize,
}

/// What happens on SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shutdown {
    /// How long judging goes on after health says no, until Envoys have looked away.
    pub delay: Duration,
    /// How long streams in flight may take to finish after that.
    pub drain: Duration,
    pub held: Held,
}

/// What becomes of held requests on SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// 503 `shutting_down`.
    Refuse,
    /// gRPC UNAVAILABLE before any header, on which Envoy asks another replica; their tokens are given back.
    Move,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    pub level: tracing::Level,
    pub format: LogFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}
