//! The `tiers` section: the classes of service, highest first.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;
use std::time::Duration;

use super::field::{self, LARGEST_COUNT};
use super::reader::{Fields, Node, alternatives, quoted};
use super::sections::on_outage;
use crate::admission::QueueBounds;
use crate::identity::Tier;
use crate::limit::{Quota, Rate};
use crate::metrics::NOBODY;

pub(super) const TIERS: &str = "a list of at least one tier, highest first";

/// The largest burst: up to here every whole number is exact in Lua's floating point.
const LARGEST_BURST: u64 = 1 << 53;
const LARGEST_WEIGHT: u64 = 1_000_000;

/// What could be read of the tiers.
#[derive(Default)]
pub(super) struct Tiers {
    /// Those without a fault, in the order of the list.
    pub(super) read: Vec<Arc<Tier>>,
    /// By name; `None` for one that has a fault in another field.
    named: HashMap<String, Option<Arc<Tier>>>,
    /// Where each name came first.
    first: HashMap<String, usize>,
    /// Whether one has no usable name, so that a tenant's tier cannot be called unknown.
    unnamed: bool,
    /// Whether any was refused.
    pub(super) refused: bool,
}

impl Tiers {
    /// Nothing is known about tiers.
    pub(super) fn unreadable() -> Self {
        Self { unnamed: true, refused: true, ..Self::default() }
    }

    pub(super) fn read(node: &Node<'_>) -> Self {
        let Some(items) = node.some_items(TIERS) else { return Self::unreadable() };
        let mut tiers = Self::default();
        for (rank, item) in items.enumerate() {
            let tier = tiers.tier(&item, rank).map(Arc::new);
            tiers.refused |= tier.is_none();
            if let Some(tier) = tier {
                tiers.named.insert(tier.name.clone(), Some(Arc::clone(&tier)));
                tiers.read.push(tier);
            }
        }
        tiers
    }

    fn tier(&mut self, node: &Node<'_>, rank: usize) -> Option<Tier> {
        let Some(fields) = node.fields(&["name", "rate", "burst", "weight", "queue", "on_outage"]) else {
            self.unnamed = true;
            return None;
        };
        let name = self.name(&fields, rank);
        let quota = quota(&fields);
        let weight = fields.or("weight", NonZeroU32::MIN, weight);
        let bounds = QueueBounds { length: 1000, max_wait: Duration::from_secs(5) };
        let queue = fields.or("queue", bounds, |node| queue(node, bounds));
        let on_outage = fields.maybe("on_outage", on_outage);
        let (quota, weight, queue, on_outage) = (quota?, weight?, queue?, on_outage?);
        Some(Tier { rank, name: name?, quota, weight, queue, on_outage })
    }

    /// A name that no tier has yet.
    fn name(&mut self, fields: &Fields<'_>, rank: usize) -> Option<String> {
        let node = fields.required("name", "a name such as gold");
        let Some(name) = node.as_ref().and_then(field::name) else {
            self.unnamed = true;
            return None;
        };
        let first = *self.first.entry(name.clone()).or_insert(rank);
        if first != rank {
            node?.fault(format!("{} again, the name of tiers[{first}]", quoted(&name)), "a name for each tier alone");
            return None;
        }
        self.named.insert(name.clone(), None);
        if name == NOBODY {
            node?.fault(quoted(&name), "another name: metrics give this one to requests of nobody they know");
            return None;
        }
        Some(name)
    }

    /// The tier a tenant names; a fault of the tenant where there is none.
    pub(super) fn find(&self, node: &Node<'_>) -> Option<Arc<Tier>> {
        let expected = "the name of a tier";
        let name = node.name(expected)?;
        if let Some(tier) = self.named.get(name) {
            return tier.clone();
        }
        if !self.unnamed {
            let mut names: Vec<&str> = self.named.keys().map(String::as_str).collect();
            names.sort_unstable();
            node.refuse(format!("{expected}: {}", alternatives(names.into_iter())));
        }
        None
    }
}

fn quota(fields: &Fields<'_>) -> Option<Quota> {
    let rate = fields.required("rate", "a rate such as 10/s").and_then(|node| field::rate(&node));
    let burst = fields.maybe("burst", |node| NonZeroU64::new(node.whole(1..=LARGEST_BURST)?))?;
    let rate = rate?;
    Some(Quota { rate, burst: burst.unwrap_or_else(|| twice(rate)) })
}

/// The default burst: twice the number in the rate as written, whatever its period.
fn twice(rate: Rate) -> NonZeroU64 {
    rate.count.saturating_mul(NonZeroU64::MIN.saturating_add(1))
}

fn weight(node: &Node<'_>) -> Option<NonZeroU32> {
    node.whole(1..=LARGEST_WEIGHT).and_then(|weight| NonZeroU32::new(u32::try_from(weight).ok()?))
}

fn queue(node: &Node<'_>, default: QueueBounds) -> Option<QueueBounds> {
    let fields = node.fields(&["length", "max_wait"])?;
    let length = fields.or("length", default.length, |node| usize::try_from(node.whole(0..=LARGEST_COUNT)?).ok());
    let max_wait = fields.or("max_wait", default.max_wait, field::duration);
    Some(QueueBounds { length: length?, max_wait: max_wait? })
}
