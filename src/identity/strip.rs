//! Which headers must not reach the upstream.

use super::request::{Rules, is};
use super::{TENANT_ID, TENANT_TIER};

/// The identity headers and their twins. Upstreams that follow CGI take `_` and `-` for the same character, so a client
/// could set one by writing the other. The two names that the server sets itself come first.
pub(super) const IDENTITY: [&str; 8] = [
    TENANT_ID,
    TENANT_TIER,
    "x_tenant_id",
    "x-tenant_id",
    "x_tenant-id",
    "x_tenant_tier",
    "x-tenant_tier",
    "x_tenant-tier",
];

/// Bits of the names in [`IDENTITY`] that the server sets itself.
const OWN: u64 = 0b11;

/// A set of headers to remove: eight bits for the identity headers and their twins, the others for the
/// configured credential headers, by index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Strip(u64);

impl Strip {
    /// The bit that stands for all configured headers from the 56th on, should there be so many: to remove one that is
    /// absent does no harm.
    const LAST: usize = 63;

    pub(super) fn insert_identity(&mut self, name: &[u8]) {
        if let Some(bit) = IDENTITY.iter().position(|twin| is(name, twin)) {
            self.0 |= 1 << bit;
        }
    }

    pub(super) fn insert_credential(&mut self, index: usize) {
        self.0 |= 1 << Self::credential_bit(index);
    }

    fn credential_bit(index: usize) -> usize {
        Self::LAST.min(IDENTITY.len() + index)
    }

    fn contains(self, bit: usize) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Without `x-tenant-id` and `x-tenant-tier`: for a request on which the server sets them, overwriting what is there.
    #[must_use]
    pub fn but_own(self) -> Self {
        Self(self.0 & !OWN)
    }

    /// Whether the request may go on with the headers it has.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The names to remove, in lower case. `rules` are those that the request was read with.
    pub fn names(self, rules: &Rules) -> impl Iterator<Item = &str> {
        let identity = IDENTITY.into_iter().enumerate().filter(move |(bit, _)| self.contains(*bit));
        let credentials =
            rules.header_names().enumerate().filter(move |(index, _)| self.contains(Self::credential_bit(*index)));
        identity.chain(credentials).map(|(_, name)| name)
    }
}
