//! Scripts: how one is called, and how the answer of the one that takes reads.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value};

use super::super::bucket::{LONGEST_WAIT, period};
use super::super::tally::Outcome;
use super::super::{Charge, Level};
use super::StoreError;
use super::servers::Route;

/// The Lua text and the name that Redis knows it by.
#[derive(Debug)]
pub(crate) struct Script {
    text: String,
    sha: String,
}

/// What the script is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Take,
    GiveBack,
}

impl Script {
    pub(super) const BUCKET: &'static str =
        concat!(include_str!("prelude.lua"), include_str!("bucket.lua"), include_str!("charge.lua"));
    /// What every script begins with.
    pub(crate) const PRELUDE: &'static str = include_str!("prelude.lua");
    /// The functions that take and give back, for a script that does more than that.
    pub(crate) const BUCKET_LIBRARY: &'static str = include_str!("bucket.lua");

    pub(crate) fn new(text: &str) -> Self {
        let sha = redis::Script::new(text).get_hash().to_owned();
        Self { text: text.to_owned(), sha }
    }

    /// Runs the script once. `command` says it whole, from `EVALSHA` or `EVAL` and what follows that.
    ///
    /// A server that does not know it has done nothing, so then it is sent whole. That is the only repetition, but
    /// for a cluster's redirections, which are no failures: after any other one the call may have been carried out. `SCRIPT LOAD` is never needed, nor the right to it.
    pub(super) async fn run(
        &self,
        route: &mut Route,
        command: impl Fn(&str, &str) -> Cmd,
    ) -> Result<Value, StoreError> {
        match route.send(&command("EVALSHA", &self.sha)).await {
            Err(StoreError::Reply(error)) if is_unknown_script(&error) => {
                route.send(&command("EVAL", &self.text)).await
            }
            other => other,
        }
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

pub(super) async fn answer(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value, StoreError> {
    match connection.send_packed_command(command).await {
        Ok(Value::ServerError(error)) => Err(StoreError::Reply(error.into())),
        Ok(value) => Ok(value),
        Err(error) => Err(StoreError::Connection(error)),
    }
}

/// Room for the words of a command that are not keys, and the numbers of a charge.
const WORDS: usize = 64;
const NUMBERS: usize = 64;

pub(super) fn command(verb: &str, script: &str, mode: Mode, charges: &[Charge<'_>]) -> Cmd {
    let keys: usize = charges.iter().map(|charge| charge.bucket.as_str().len()).sum();
    let mut command = Cmd::with_capacity(4 + 5 * charges.len(), WORDS + script.len() + keys + NUMBERS * charges.len());
    command.arg(verb).arg(script).arg(charges.len());
    for charge in charges {
        command.arg(charge.bucket.as_str());
    }
    command.arg(match mode {
        Mode::Take => "take",
        Mode::GiveBack => "give_back",
    });
    numbers(&mut command, charges);
    command
}

/// What bucket.lua wants to know of each charge.
pub(super) fn numbers(command: &mut Cmd, charges: &[Charge<'_>]) {
    for Charge { quota, cost, .. } in charges {
        command.arg(quota.rate.count.get()).arg(period(quota)).arg(quota.burst.get()).arg(cost.get());
    }
}

/// The elements of an answer that is an array.
pub(super) fn elements(answer: &Value) -> Result<&[Value], StoreError> {
    match answer {
        Value::Array(values) => Ok(values),
        _ => Err(StoreError::Shape),
    }
}

/// Reads the answer to [`Mode::Take`], one outcome a charge. What the script never returns is no answer, as something
/// else was asked then, or answered.
pub(super) fn outcomes(
    values: &[Value],
    charges: &[Charge<'_>],
) -> Result<impl Iterator<Item = Outcome> + use<>, StoreError> {
    let (Some(Value::Int(granted @ 0..=1)), Some(numbers)) = (values.first(), values.get(1..)) else {
        return Err(StoreError::Shape);
    };
    let (triples, rest) = numbers.as_chunks::<3>();
    if triples.len() != charges.len() || !rest.is_empty() {
        return Err(StoreError::Shape);
    }
    let read = charges.iter().zip(triples).map(|(charge, numbers)| outcome(charge, numbers));
    let outcomes = read.collect::<Option<Vec<_>>>().ok_or(StoreError::Shape)?;
    if outcomes.iter().all(|outcome| outcome.retry_after.is_none()) != (*granted == 1) {
        return Err(StoreError::Shape);
    }
    Ok(outcomes.into_iter())
}

/// Nothing where the script would not say so of this charge. More than a bucket holds is read as a full one.
fn outcome(charge: &Charge<'_>, numbers: &[Value; 3]) -> Option<Outcome> {
    let &[Value::Int(remaining), Value::Int(reset), Value::Int(retry)] = numbers else { return None };
    let wait = |micros: i64| {
        let micros = u64::try_from(micros).ok().filter(|_| micros <= LONGEST_WAIT)?;
        Some(Duration::from_micros(micros))
    };
    let limit = charge.quota.burst.get();
    let never = retry == -1 && charge.cost > charge.quota.burst;
    Some(Outcome {
        level: Level { limit, remaining: u64::try_from(remaining).ok()?.min(limit), reset: wait(reset)? },
        retry_after: if never { Some(Duration::MAX) } else { Some(wait(retry)?).filter(|wait| !wait.is_zero()) },
    })
}
