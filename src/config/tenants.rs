//! The `tenants` section: who they are, and the hashes of their keys.

use std::collections::HashMap;
use std::sync::Arc;

use super::TenantKeys;
use super::environment::trimmed;
use super::fault::REDACTED;
use super::reader::{Node, all, quoted};
use super::tiers::Tiers;
use crate::identity::{KeyHash, Tenant, Tier};
use crate::limit::BucketKey;

pub(super) const TENANTS: &str = "a list of at least one tenant";
const KEYS: &str = "a list of at least one key";
const KEY: &str = "a key in quotes, or sha256: and 64 hex digits";
const HASHED: &str = "sha256:";
const LONGEST_ID: usize = 256;

/// Reads all tenants. No id and no key may come twice, not even a key in plain and as its hash.
/// Their buckets' keys begin with `prefix`.
pub(super) fn tenants(node: &Node<'_>, tiers: &Tiers, prefix: &str) -> Option<Vec<TenantKeys>> {
    let mut seen = Seen::default();
    let tenant = |(index, item): (usize, Node<'_>)| {
        let (id, tier, keys) = tenant(&item, index, tiers, &mut seen)?;
        let bucket = BucketKey::prefixed(prefix, &id);
        Some(TenantKeys { tenant: Arc::new(Tenant { id, tier, bucket }), keys })
    };
    all(node.some_items(TENANTS)?.enumerate().map(tenant))
}

/// Where each id and each key came first.
#[derive(Default)]
struct Seen {
    ids: HashMap<String, usize>,
    keys: HashMap<KeyHash, (usize, usize)>,
}

fn tenant(node: &Node<'_>, index: usize, tiers: &Tiers, seen: &mut Seen) -> Option<(String, Arc<Tier>, Vec<KeyHash>)> {
    let fields = node.fields(&["id", "tier", "keys"])?;
    let id = fields.required("id", "an id such as acme").and_then(|node| {
        let id = id(&node)?;
        let other = *seen.ids.entry(id.clone()).or_insert(index);
        if other != index {
            node.fault(format!("{} again, the id of tenants[{other}]", quoted(&id)), "an id for each tenant alone");
        }
        (other == index).then_some(id)
    });
    let tier = fields.required("tier", "the name of a tier").and_then(|node| tiers.find(&node));
    let keys = fields.required("keys", KEYS).and_then(|node| {
        all(node.some_items(KEYS)?.enumerate().map(|(place, item)| {
            let key = key(&item)?;
            let other = *seen.keys.entry(key).or_insert((index, place));
            if other != (index, place) {
                item.fault(format!("the same key as tenants[{}].keys[{}]", other.0, other.1), "each key once");
            }
            (other == (index, place)).then_some(key)
        }))
    });
    Some((id?, tier?, keys?))
}

/// An id that can be sent as a header's value and comes out of it as it went in.
fn id(node: &Node<'_>) -> Option<String> {
    const ID: &str = "1 to 256 visible ASCII characters, with spaces only between them";
    let text = node.name(ID)?;
    let safe = text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    if safe && text.trim() == text && (1..=LONGEST_ID).contains(&text.len()) {
        return Some(text.to_owned());
    }
    node.refuse(ID);
    None
}

fn key(node: &Node<'_>) -> Option<KeyHash> {
    let text = node.secret(KEY)?;
    let key = trimmed(text);
    if key != text {
        node.warn("the white space around the key is not taken as part of it");
    }
    if key.is_empty() {
        node.fault("an empty key", KEY);
        return None;
    }
    if key.get(..HASHED.len()).is_some_and(|start| start.eq_ignore_ascii_case(HASHED)) {
        let hash = hash(&key[HASHED.len()..]);
        if hash.is_none() {
            node.fault(format!("sha256:{REDACTED}"), "64 hex digits after sha256:");
        }
        return hash;
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        node.fault(REDACTED, "visible ASCII characters without spaces: no header could carry this key");
        return None;
    }
    Some(KeyHash::of(key.as_bytes()))
}

fn hash(digits: &str) -> Option<KeyHash> {
    let digits = digits.as_bytes();
    let mut hash = [0; 32];
    if digits.len() != 2 * hash.len() {
        return None;
    }
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        let nibble = |digit: u8| char::from(digit).to_digit(16).and_then(|nibble| u8::try_from(nibble).ok());
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(KeyHash(hash))
}
