//! How the answers of the scripts read.

use redis::Value;

use crate::admission::shared::slots::{Acquired, Beat, Promoted, Released, Retried, Tally};
use crate::limit::redis::StoreError;

pub(super) fn elements(answer: &Value) -> Result<&[Value], StoreError> {
    match answer {
        Value::Array(values) => Ok(values),
        _ => Err(StoreError::Shape),
    }
}

fn number(value: &Value) -> Result<u64, StoreError> {
    match value {
        Value::Int(number) => u64::try_from(*number).map_err(|_| StoreError::Shape),
        _ => Err(StoreError::Shape),
    }
}

fn small(value: &Value) -> Result<usize, StoreError> {
    usize::try_from(number(value)?).map_err(|_| StoreError::Shape)
}

fn numbers(value: &Value) -> Result<Vec<u64>, StoreError> {
    elements(value)?.iter().map(number).collect()
}

pub(super) fn count(answer: &Value) -> Result<usize, StoreError> {
    small(answer)
}

pub(super) fn flag(answer: &Value) -> Result<bool, StoreError> {
    match number(answer)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(StoreError::Shape),
    }
}

/// With how many leases were found ended.
pub(super) fn acquired(answer: &[Value]) -> Result<(Acquired, u64), StoreError> {
    let [code, ended] = answer else { return Err(StoreError::Shape) };
    let acquired = match number(code)? {
        1 => Acquired::Granted,
        2 => Acquired::Waiting,
        3 => Acquired::Full,
        4 => Acquired::Stranger,
        _ => return Err(StoreError::Shape),
    };
    Ok((acquired, number(ended)?))
}

pub(super) fn promoted(answer: &Value) -> Result<Promoted, StoreError> {
    match number(answer)? {
        1 => Ok(Promoted::Granted),
        2 => Ok(Promoted::NoneFree),
        3 => Ok(Promoted::HigherWaits),
        4 => Ok(Promoted::Unknown),
        _ => Err(StoreError::Shape),
    }
}

pub(super) fn released(answer: &Value) -> Result<Released, StoreError> {
    let (code, rest) = elements(answer)?.split_first().ok_or(StoreError::Shape)?;
    match (number(code)?, rest) {
        (1, []) => Ok(Released::Freed),
        (2, []) => Ok(Released::Passed),
        (3, []) => Ok(Released::Announced),
        (4, rest) => Ok(Released::Kept(tally(rest)?)),
        (5, []) => Ok(Released::Gone),
        _ => Err(StoreError::Shape),
    }
}

pub(super) fn retried(answer: &Value) -> Result<Retried, StoreError> {
    let (code, rest) = elements(answer)?.split_first().ok_or(StoreError::Shape)?;
    match (number(code)?, rest) {
        (0, rest) => Ok(Retried::NoneFree(tally(rest)?)),
        (1, rest) => Ok(Retried::Taken(tally(rest)?)),
        (2, []) => Ok(Retried::Stranger),
        _ => Err(StoreError::Shape),
    }
}

/// The epoch, then pairs of rank and number, in any order.
fn tally(values: &[Value]) -> Result<Tally, StoreError> {
    let (epoch, pairs) = values.split_first().ok_or(StoreError::Shape)?;
    if pairs.len() % 2 != 0 {
        return Err(StoreError::Shape);
    }
    let mut waiting = pairs
        .chunks_exact(2)
        .map(|pair| Ok((small(&pair[0])?, small(&pair[1])?)))
        .collect::<Result<Vec<_>, StoreError>>()?;
    waiting.sort_unstable();
    Ok(Tally { epoch: number(epoch)?, waiting })
}

/// With how many leases were found ended.
pub(super) fn beat(answer: &Value) -> Result<(Beat, u64), StoreError> {
    let [figures, tallied, slots, waiters, lost] = elements(answer)? else { return Err(StoreError::Shape) };
    let [known, in_use, replicas, ended] = elements(figures)? else { return Err(StoreError::Shape) };
    let (_, tallied) = elements(tallied)?.split_first().ok_or(StoreError::Shape)?;
    let beat = Beat {
        known: flag(known)?,
        in_use: small(in_use)?,
        replicas: small(replicas)?,
        tally: tally(tallied)?,
        slots: numbers(slots)?,
        waiters: numbers(waiters)?,
        lost_grants: numbers(lost)?.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect(),
    };
    Ok((beat, number(ended)?))
}
