//! Limits: what a tenant was promised, and the taking of it.
//!
//! A [`Charge`] is one take from one bucket. A [`Limiter`] takes all charges of a request or none, and says how full
//! the buckets are afterwards. There are two limiters, [`memory`] and [`redis`], behind the same trait and the same
//! test suite; both use the arithmetic of [`bucket`], the second one in Lua. [`outage`] decides what happens while
//! Redis does not answer.

pub mod breaker;
pub mod bucket;
#[cfg(test)]
mod conformance;
pub mod memory;
pub mod outage;
pub mod redis;
mod tally;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

/// What keys in a store begin with where nothing else is said.
pub const DEFAULT_PREFIX: &str = "bouncer";

/// How many tokens a bucket gains in a period: `count` every `per`.
///
/// Kept as it was written (`600/min` stays 600 per minute), so that no rounding happens before the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Tokens gained in a period.
    pub count: NonZeroU64,
    /// The period, from a second to a day.
    pub per: Duration,
}

/// What a tier was promised: a sustained rate, and how many tokens may be saved up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// What comes in, sustained.
    pub rate: Rate,
    /// The bucket's size in tokens; at most 2^53, so that Lua's numbers hold it exactly.
    pub burst: NonZeroU64,
}

/// The name of one bucket, unique and safe to send to any store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BucketKey(Arc<str>);

impl BucketKey {
    /// The bucket of a tenant. Whatever the tenant is called, the key holds exactly one non-empty Redis hash tag, and
    /// no two tenants share a key: every byte outside `[A-Za-z0-9._-]` is percent-encoded.
    pub fn tenant(id: &str) -> Self {
        Self::prefixed(DEFAULT_PREFIX, id)
    }

    /// The same in a deployment that shares its store with others. The prefix must be of `[A-Za-z0-9._-]`.
    pub fn prefixed(prefix: &str, id: &str) -> Self {
        Self(format!("{prefix}:bucket:{{{}}}", percent_encoded(id)).into())
    }

    /// The bucket that proves a store to work, or the part of one that has this tag. No tenant's key begins like it.
    pub(crate) fn probe(prefix: &str, tag: &str) -> Self {
        Self(format!("{prefix}:probe:{{{tag}}}").into())
    }

    /// The key as a store gets it: printable ASCII without a space.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Any text as part of a key, with every byte outside `[A-Za-z0-9._-]` percent-encoded.
pub(crate) fn percent_encoded(text: &str) -> String {
    use fmt::Write;
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-') {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

/// One take from one bucket.
#[derive(Debug, Clone, Copy)]
pub struct Charge<'a> {
    /// Where from.
    pub bucket: &'a BucketKey,
    /// What the bucket was promised; the same for all charges of one bucket.
    pub quota: Quota,
    /// Tokens to take, at least 1.
    pub cost: NonZeroU64,
}

/// How full a bucket is: the figures of the `X-RateLimit-*` headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// The bucket's size in tokens.
    pub limit: u64,
    /// Whole tokens left.
    pub remaining: u64,
    /// How long until the bucket is full again, rounded up to a microsecond.
    pub reset: Duration,
}

/// What came of charging a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Take {
    /// Every charge was taken.
    Taken {
        /// That of the charge closest to refusing.
        level: Level,
    },
    /// Nothing was taken. The figures are those of the charge that refused (of several, the one that refuses longest).
    Refused {
        /// How full its bucket still is.
        level: Level,
        /// The same take alone succeeds after this long and not before, to the microsecond; [`Duration::MAX`] when the
        /// cost exceeds the burst.
        retry_after: Duration,
    },
}

/// What to do with a request while the store that knows its bucket does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOutage {
    /// Let it pass unmetered.
    Allow,
    /// Refuse it with 503.
    Deny,
    /// Meter it in a bucket of this process, which starts full.
    Local,
}

impl fmt::Display for OnOutage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnOutage::Allow => "allow",
            OnOutage::Deny => "deny",
            OnOutage::Local => "local",
        })
    }
}

/// A store that keeps buckets.
///
/// 1. *All or none*: either every charge of a call is taken or no bucket changes, also against concurrent calls.
/// 2. *A refusal costs nothing*: it leaves every bucket as it was.
/// 3. *One clock*: the store's own; no two callers can disagree about the time.
/// 4. *Cancel*: dropping the future leaves the call either done whole or not done; it is never done twice.
/// 5. *An error means unknown*: the call may or may not have been carried out, and is not repeated.
pub trait Limiter: Send + Sync {
    /// What went wrong when the store did not answer.
    type Error: std::error::Error + Send + Sync + 'static;

    /// Takes all charges, or none.
    fn take(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<Take, Self::Error>> + Send;

    /// Puts back what [`Limiter::take`] took, never above the burst.
    fn give_back(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<(), Self::Error>> + Send;
}
