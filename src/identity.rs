//! Identity: who is asking, by the server's own word.
//!
//! [`request`] reads a request's headers once into the few facts that the gate needs. [`directory`] is one immutable
//! value that knows every key by its SHA-256. [`public`] says which paths need no key.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::admission::QueueBounds;
use crate::limit::{BucketKey, OnOutage, Quota};

/// A class of service.
#[derive(Debug, PartialEq, Eq)]
pub struct Tier {
    /// Place in the order of service: 0 is served first. Also the index into everything kept per tier.
    pub rank: usize,
    /// A valid header value and metric label.
    pub name: String,
    pub quota: Quota,
    /// Share of slots under weighted order.
    pub weight: NonZeroU32,
    pub queue: QueueBounds,
    /// Beats the store's own policy.
    pub on_outage: Option<OnOutage>,
}

/// A customer.
#[derive(Debug, PartialEq, Eq)]
pub struct Tenant {
    /// A valid header value.
    pub id: String,
    pub tier: Arc<Tier>,
    pub bucket: BucketKey,
}

/// SHA-256 of a key's bytes. The key itself is never kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// Hashes a key's bytes as they stand: nothing is trimmed.
    pub fn of(key: &[u8]) -> Self {
        use sha2::{Digest, Sha256};
        Self(Sha256::digest(key).into())
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}
