//! Several charges as one: what goes into a store, and what comes out of it.

use std::borrow::Cow;
use std::time::Duration;

use super::{Charge, Level, Take};

/// What came of one charge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    pub(super) level: Level,
    /// Present: this charge refused, for so long.
    pub(super) retry_after: Option<Duration>,
}

/// The charges with each bucket named once, at the sum of its costs: a store may then look at one after the other.
pub(super) fn merged<'c, 'a>(charges: &'c [Charge<'a>]) -> Cow<'c, [Charge<'a>]> {
    let repeats = |(i, charge): (usize, &Charge<'_>)| charges[..i].iter().any(|other| other.bucket == charge.bucket);
    if !charges.iter().enumerate().any(repeats) {
        return Cow::Borrowed(charges);
    }
    let mut merged: Vec<Charge<'a>> = Vec::with_capacity(charges.len());
    for charge in charges {
        match merged.iter_mut().find(|other| other.bucket == charge.bucket) {
            Some(other) => other.cost = other.cost.saturating_add(charge.cost.get()),
            None => merged.push(*charge),
        }
    }
    Cow::Owned(merged)
}

/// The answer to all charges, from the outcome of each, in the same order. No charge at all is taken, from a bucket of
/// size 0.
pub(super) fn tally(charges: &[Charge<'_>], outcomes: impl Iterator<Item = Outcome>) -> Take {
    let mut refused: Option<(Duration, Level)> = None;
    let mut closest: Option<(&Charge<'_>, Level)> = None;
    for (charge, Outcome { level, retry_after }) in charges.iter().zip(outcomes) {
        if let Some(wait) = retry_after {
            if refused.is_none_or(|(longest, _)| wait > longest) {
                refused = Some((wait, level));
            }
        } else if closest.is_none_or(|(other, low)| fewer_takes(charge, level, other, low)) {
            closest = Some((charge, level));
        }
    }
    if let Some((retry_after, level)) = refused {
        return Take::Refused { level, retry_after };
    }
    let nothing = Level { limit: 0, remaining: 0, reset: Duration::ZERO };
    Take::Taken { level: closest.map_or(nothing, |(_, level)| level) }
}

/// Whether `a` can be charged fewer times more than `b`: `remaining / cost`, without the division.
fn fewer_takes(a: &Charge<'_>, level_a: Level, b: &Charge<'_>, level_b: Level) -> bool {
    u128::from(level_a.remaining) * u128::from(b.cost.get()) < u128::from(level_b.remaining) * u128::from(a.cost.get())
}
