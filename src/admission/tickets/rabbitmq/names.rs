//! What things are called in the broker. Two deployments share one by their prefix; two versions of bouncer by agreeing on
//! every name and argument here, which is why nothing of them comes from a bound in the configuration.

use lapin::types::ShortString;

use super::super::{Line, ReplicaId};
use super::Lines;

/// Names of one deployment. All parts are `[A-Za-z0-9._-]`, so a `:` keeps them apart.
#[derive(Debug)]
pub(super) struct Names {
    /// The exchange of tickets, by the name of their line.
    pub(super) tickets: ShortString,
    /// The exchange of grants, by the id of the replica.
    pub(super) grants: ShortString,
    /// By pool and rank. A line's name is its queue and its routing key.
    lines: Vec<Vec<ShortString>>,
}

impl Names {
    pub(super) fn new(prefix: &str, lines: &Lines) -> Self {
        let of_pool =
            |pool: &String| lines.tiers.iter().map(|tier| format!("{prefix}:tickets:{pool}:{tier}").into()).collect();
        Self {
            tickets: format!("{prefix}:tickets").into(),
            grants: format!("{prefix}:grants").into(),
            lines: lines.pools.iter().map(of_pool).collect(),
        }
    }

    pub(super) fn line(&self, line: Line) -> ShortString {
        self.lines[line.pool][line.rank].clone()
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = &ShortString> {
        self.lines.iter().flatten()
    }

    pub(super) fn replica(replica: ReplicaId) -> ShortString {
        replica.to_string().into()
    }
}
