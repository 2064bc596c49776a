//! Calls of one runtime, each within its deadline.

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::time::{Instant, timeout};

use super::link::Link;
use super::script::{Mode, Script, command, elements, numbers, outcomes};
use super::servers::Servers;
use super::{RedisStore, StoreError, slots};
use crate::limit::tally::{Outcome, merged, tally};
use crate::limit::{Charge, Limiter, Take};

/// The buckets of a [`RedisStore`], over the connection of one runtime.
///
/// Each call ends within the timeout of the configuration, and at once while Redis counts as down.
pub struct RedisLimiter {
    store: Arc<RedisStore>,
    link: Link,
}

impl RedisLimiter {
    /// Whether keys may be on different servers, so that no script can have all keys of a request.
    pub(crate) fn is_spread(&self) -> bool {
        matches!(self.store.servers, Servers::Cluster(_))
    }

    /// Starts connecting.
    ///
    /// # Panics
    /// Outside of a tokio runtime; the connection lives on the one that this is called in.
    pub fn new(store: Arc<RedisStore>) -> Self {
        Self { link: Link::new(Arc::clone(&store)), store }
    }

    /// Waits until the first try to connect has ended, well or badly.
    pub async fn settled(&self) {
        self.link.wait_settled().await;
    }

    /// Runs a script once within the deadline of a call, and reads its answer. `command` says it whole, from `EVALSHA` or
    /// `EVAL` and what follows that.
    pub(crate) async fn call<T>(
        &self,
        script: &Script,
        command: impl Fn(&str, &str) -> Cmd,
        read: impl FnOnce(&Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let store = &*self.store;
        let epoch = *store.epoch.borrow();
        if epoch.is_open() {
            return Err(StoreError::Down);
        }
        let began = Instant::now();
        let call = async {
            let mut route = match self.link.route().await {
                Some(own) => own,
                None => store.latest()?,
            };
            read(&script.run(&mut route, command).await?)
        };
        let result = timeout(store.timeout, call).await.unwrap_or(Err(StoreError::Timeout(store.timeout)));
        match &result {
            Err(StoreError::Down | StoreError::Unconnected) => return result,
            Err(error) => store.failed(epoch, error),
            Ok(_) => store.answered(epoch),
        }
        store.meters.call.observe(began.elapsed().as_secs_f64());
        result
    }

    /// [`Limiter::take`] by a script that, once everything is taken, does something more in the same run.
    ///
    /// `more` gives the keys behind the buckets, and `arguments` what follows the charges; `read` gets what the script
    /// returns behind its answer to them, where they were taken.
    pub(crate) async fn take_and<T>(
        &self,
        script: &Script,
        charges: &[Charge<'_>],
        more: &[String],
        arguments: impl Fn(&mut Cmd),
        read: impl FnOnce(&[Value]) -> Result<T, StoreError>,
    ) -> Result<(Take, Option<T>), StoreError> {
        let charges = merged(charges);
        let fused = |verb: &str, script: &str| {
            let mut command = Cmd::new();
            command.arg(verb).arg(script).arg(charges.len() + more.len());
            for charge in charges.iter() {
                command.arg(charge.bucket.as_str());
            }
            command.arg(more).arg("take");
            numbers(&mut command, &charges);
            arguments(&mut command);
            command
        };
        let read = |answer: &Value| {
            let answer = elements(answer)?;
            let (taken, rest) = answer.split_at_checked(1 + 3 * charges.len()).ok_or(StoreError::Shape)?;
            let take = tally(&charges, outcomes(taken, &charges)?);
            let rest = if let Take::Taken { .. } = take { Some(read(rest)?) } else { None };
            Ok((take, rest))
        };
        self.call(script, fused, read).await
    }
}

impl RedisLimiter {
    /// One script run, so all keys must be on one server.
    async fn take_together(&self, charges: &[Charge<'_>]) -> Result<Vec<Outcome>, StoreError> {
        let read = |answer: &Value| Ok(outcomes(elements(answer)?, charges)?.collect());
        let take = |verb: &str, script: &str| command(verb, script, Mode::Take, charges);
        self.call(&self.store.script, take, read).await
    }

    async fn give_back_together(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let read = |answer: &Value| if *answer == Value::Int(1) { Ok(()) } else { Err(StoreError::Shape) };
        let give_back = |verb: &str, script: &str| command(verb, script, Mode::GiveBack, charges);
        self.call(&self.store.script, give_back, read).await
    }

    /// The charges that one script run can take together, in the order in which they are taken. `None` where it is all of
    /// them.
    fn parts<'a>(&self, charges: &[Charge<'a>]) -> Option<Vec<Vec<Charge<'a>>>> {
        let slot = |charge: &Charge<'_>| slots::slot(charge.bucket.as_str().as_bytes());
        let first = slot(charges.first()?);
        if !self.is_spread() || charges.iter().all(|charge| slot(charge) == first) {
            return None;
        }
        let mut parts: Vec<Vec<Charge<'a>>> = Vec::new();
        for charge in charges {
            match parts.iter_mut().find(|part| slot(&part[0]) == slot(charge)) {
                Some(part) => part.push(*charge),
                None => parts.push(vec![*charge]),
            }
        }
        Some(parts)
    }

    /// Takes part after part. Where one refuses or fails, those before it are given back.
    async fn take_in_turn(&self, parts: &[Vec<Charge<'_>>]) -> Result<Take, StoreError> {
        let mut taken = Vec::new();
        for (turn, part) in parts.iter().enumerate() {
            let outcomes = self.take_together(part).await;
            let refused = outcomes.as_ref().is_ok_and(|outcomes| outcomes.iter().any(|it| it.retry_after.is_some()));
            if refused || outcomes.is_err() {
                for taken in &parts[..turn] {
                    self.give_back_together(taken).await?;
                }
                return Ok(tally(part, outcomes?.into_iter()));
            }
            taken.extend(outcomes?);
        }
        Ok(tally(&parts.concat(), taken.into_iter()))
    }
}

/// On a cluster, charges whose keys have different hash tags are taken in turn, in their order, and given back where one
/// refuses: for that moment they are missing to others, the wait that is told is that of the first that refuses, and a
/// caller that goes away in the middle leaves those before it taken.
impl Limiter for RedisLimiter {
    type Error = StoreError;

    async fn take(&self, charges: &[Charge<'_>]) -> Result<Take, StoreError> {
        let charges = merged(charges);
        if charges.is_empty() {
            return Ok(tally(&charges, std::iter::empty()));
        }
        match self.parts(&charges) {
            Some(parts) => self.take_in_turn(&parts).await,
            None => Ok(tally(&charges, self.take_together(&charges).await?.into_iter())),
        }
    }

    async fn give_back(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let charges = merged(charges);
        if charges.is_empty() {
            return Ok(());
        }
        let Some(parts) = self.parts(&charges) else { return self.give_back_together(&charges).await };
        for part in &parts {
            self.give_back_together(part).await?;
        }
        Ok(())
    }
}
