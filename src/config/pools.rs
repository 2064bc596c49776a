//! The `pools` section: the protected upstreams. Today that is one.

use std::num::NonZeroUsize;

use super::field::{self, LARGEST_COUNT};
use super::reader::{Node, all, quoted};
use super::{DEFAULT_POOL, Pool};

pub(super) const POOLS: &str = "a list of one pool, called default";

pub(super) fn pools(node: &Node<'_>) -> Option<Vec<Pool>> {
    let pools = all(node.some_items(POOLS)?.enumerate().map(|(index, item)| {
        let pool = pool(&item);
        if index > 0 {
            item.fault("a second pool", "the pool default alone: nothing can send a request to another yet");
            return None;
        }
        pool
    }));
    let pools = pools?;
    if pools.iter().all(|pool| pool.name != DEFAULT_POOL) {
        let names: Vec<String> = pools.iter().map(|pool| quoted(&pool.name)).collect();
        node.fault(names.join(", "), "the pool default: requests use it");
        return None;
    }
    Some(pools)
}

fn pool(node: &Node<'_>) -> Option<Pool> {
    const FIRST_COME: &str = "no such field: within a tier it is first come, first served";
    let later = [("promote_after", "no such field: the highest tier that waits is served"), ("fair", FIRST_COME)];
    let fields = node.fields_and_later(&["name", "max_in_flight", "order"], &later)?;
    let name = fields.required("name", "the name default").and_then(|node| field::name(&node));
    let cap = fields.required("max_in_flight", "a whole number such as 50");
    let cap = cap.and_then(|node| NonZeroUsize::new(usize::try_from(node.whole(1..=LARGEST_COUNT)?).ok()?));
    let order = fields.or("order", (), order);
    order?;
    Some(Pool { name: name?, max_in_flight: cap? })
}

/// There is one order so far.
fn order(node: &Node<'_>) -> Option<()> {
    const WEIGHTED: &str = "weighted";
    if node.is(WEIGHTED) {
        node.fault("\"weighted\", which is not supported yet", "strict");
        return None;
    }
    node.choice(&[("strict", ())])
}
