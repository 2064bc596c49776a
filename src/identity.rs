//! Identity: who is asking, by the server's own word.
//!
//! [`request`] reads a request's headers once into the few facts that the gate needs. [`directory`] is one immutable
//! value that knows every key by its SHA-256. [`public`] says which paths need no key, [`strip`] which
//! headers the upstream may not see. [`identify`] puts them together.

pub mod directory;
pub mod public;
pub mod request;
pub mod strip;

mod credential;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::admission::QueueBounds;
use crate::limit::{BucketKey, OnOutage, Quota};

use directory::Directory;
use request::{Access, Presented, Request};

/// The header that tells the upstream which tenant is asking. Set by the server alone.
pub const TENANT_ID: &str = "x-tenant-id";

/// The header that tells the upstream the tenant's tier. Set by the server alone.
pub const TENANT_TIER: &str = "x-tenant-tier";

/// A class of service.
#[derive(Debug, PartialEq, Eq)]
pub struct Tier {
    /// Place in the order of service: 0 is served first. Also the index into everything kept per tier.
    pub rank: usize,
    /// A valid header value and metric label.
    pub name: String,
    /// What each of its tenants may take.
    pub quota: Quota,
    /// Share of slots under weighted order.
    pub weight: NonZeroU32,
    /// How many of its requests may be held, and how long.
    pub queue: QueueBounds,
    /// Beats the store's own policy.
    pub on_outage: Option<OnOutage>,
}

/// A customer.
#[derive(Debug, PartialEq, Eq)]
pub struct Tenant {
    /// A valid header value.
    pub id: String,
    /// What it bought.
    pub tier: Arc<Tier>,
    /// The bucket that its requests are charged to.
    pub bucket: BucketKey,
}

/// SHA-256 of a key's bytes. The key itself is never kept.
///
/// Two hashes may be compared byte by byte in a time that depends on them: whoever measures it learns a few bits of the
/// digest of a key that they would have to invert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// The hash of a key as the client sends it: bytes, UTF-8 or not.
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl Hash for KeyHash {
    /// Eight bytes of a digest are as evenly spread as all of them.
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.first_chunk().copied().map_or(0, u64::from_le_bytes));
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}

/// Who sent a request, as far as the server can tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identified {
    /// A tenant, found by its key.
    Caller(Arc<Tenant>),
    /// Nobody in particular, and nobody needs to be: a public path or a CORS preflight.
    Pass,
    /// No key was sent where one is needed.
    Missing,
    /// What was sent is no key of ours: unknown, malformed, or more than one.
    Invalid,
}

/// Finds out who sent `request`.
///
/// A key on a public path or on a preflight is not looked at, so that such a request gets one answer whatever it
/// carries.
pub fn identify(request: &Request, directory: &Directory) -> Identified {
    match request.access {
        Access::Public | Access::Preflight => Identified::Pass,
        Access::Keyed => match &request.credential {
            Presented::None => Identified::Missing,
            Presented::Malformed | Presented::Conflict => Identified::Invalid,
            Presented::One(key) => match directory.find(key) {
                Some(tenant) => Identified::Caller(Arc::clone(tenant)),
                None => Identified::Invalid,
            },
        },
    }
}

#[cfg(test)]
mod tests;
