//! Shared slots in Redis: every operation is one run of a script, on keys of one hash tag.

mod answer;
mod listener;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;
use redis::{Cmd, Value};

use super::slots::{
    Acquired, Applicant, Arrived, Beat, Grant, HandOver, Heir, Otherwise, Promoted, Released, Repair, Retried, Slots,
};
use crate::admission::tickets::ReplicaId;
use crate::limit::redis::{RedisLimiter, Script, StoreError};
use crate::limit::{Charge, Limiter, Take, percent_encoded};

pub use listener::listen;

/// The keys of a pool, in the order in which slots.lua has them.
const KEYS: [&str; 5] = ["slots", "waiters", "totals", "replicas", "grants"];

/// The functions that both scripts share.
const LIBRARY: &str = include_str!("redis/slots.lua");

fn enter_text() -> String {
    [Script::PRELUDE, Script::BUCKET_LIBRARY, LIBRARY, include_str!("redis/enter.lua")].concat()
}

fn operations_text() -> String {
    [Script::PRELUDE, LIBRARY, include_str!("redis/operations.lua")].concat()
}

/// What all slots of one pool of this process have in common.
#[derive(Debug)]
pub struct PoolInRedis {
    replica: String,
    keys: Vec<String>,
    channel: String,
    cap: usize,
    /// Milliseconds.
    lease: u64,
    operations: Script,
    enter: Script,
    expiries: IntCounter,
}

impl PoolInRedis {
    /// The pool of this name, whose keys begin with `prefix`: of `[A-Za-z0-9._-]`. `expiries` counts the leases that this
    /// process found ended.
    pub fn new(
        prefix: &str,
        name: &str,
        replica: ReplicaId,
        cap: usize,
        lease: Duration,
        expiries: IntCounter,
    ) -> Arc<Self> {
        let base = base(prefix, name);
        Self::with_scripts(&base, replica.to_string(), cap, lease, expiries, &operations_text(), &enter_text())
    }

    fn with_scripts(
        base: &str,
        replica: String,
        cap: usize,
        lease: Duration,
        expiries: IntCounter,
        operations: &str,
        enter: &str,
    ) -> Arc<Self> {
        Arc::new(Self {
            replica,
            keys: KEYS.iter().map(|key| format!("{base}:{key}")).collect(),
            channel: format!("{base}:freed"),
            cap,
            lease: u64::try_from(lease.as_millis()).unwrap_or(u64::MAX),
            operations: Script::new(operations),
            enter: Script::new(enter),
            expiries,
        })
    }

    /// The id of this process.
    pub fn replica(&self) -> &str {
        &self.replica
    }

    /// What slots.lua wants to know of every call. A key outlives every lease.
    fn common(&self, command: &mut Cmd) {
        let keep = self.lease.saturating_mul(2).saturating_add(1000);
        command.arg(&self.replica).arg(self.cap).arg(keep).arg(&self.channel);
    }
}

/// What the keys of a pool and its channel begin with, which is their hash tag too.
fn base(prefix: &str, name: &str) -> String {
    format!("{prefix}:pool:{{{}}}", percent_encoded(name))
}

/// The slots of a pool, over the connection of one runtime.
#[derive(Clone)]
pub struct RedisSlots {
    limiter: Arc<RedisLimiter>,
    pool: Arc<PoolInRedis>,
}

impl RedisSlots {
    /// Slots by way of a limiter's connection.
    pub fn new(limiter: Arc<RedisLimiter>, pool: Arc<PoolInRedis>) -> Self {
        Self { limiter, pool }
    }

    async fn operate<T>(
        &self,
        operation: &str,
        arguments: impl Fn(&mut Cmd),
        read: impl FnOnce(&Value) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let pool = &*self.pool;
        let command = |verb: &str, script: &str| {
            let mut command = Cmd::new();
            command.arg(verb).arg(script).arg(pool.keys.len()).arg(&pool.keys).arg(operation);
            pool.common(&mut command);
            arguments(&mut command);
            command
        };
        self.limiter.call(&pool.operations, command, read).await
    }

    /// A bucket and a pool have different hash tags, so on a cluster they are asked one after the other: a request that is
    /// refused must not have taken part in the queue. Where the second gives no answer, the charge stands, and whether there
    /// is a slot is for the next heartbeat to find out.
    async fn enter_in_turn(
        &self,
        charges: &[Charge<'_>],
        asks: Applicant,
    ) -> Result<(Take, Option<Acquired>), StoreError> {
        let take = self.limiter.take(charges).await?;
        let Take::Taken { .. } = take else { return Ok((take, None)) };
        Ok((take, self.acquire(asks).await.ok()))
    }

    fn acquired(&self, answer: &[Value]) -> Result<Acquired, StoreError> {
        let (acquired, ended) = answer::acquired(answer)?;
        self.pool.expiries.inc_by(ended);
        Ok(acquired)
    }
}

fn applicant(command: &mut Cmd, applicant: &Applicant) {
    command.arg(applicant.serial).arg(applicant.rank).arg(applicant.length);
}

fn otherwise(command: &mut Cmd, otherwise: Otherwise) {
    command.arg(match otherwise {
        Otherwise::Announce => "announce",
        Otherwise::Keep => "keep",
    });
}

impl Slots for RedisSlots {
    type Error = StoreError;

    async fn enter(&self, charges: &[Charge<'_>], asks: Applicant) -> Result<(Take, Option<Acquired>), StoreError> {
        if self.limiter.is_spread() {
            return self.enter_in_turn(charges, asks).await;
        }
        let arguments = |command: &mut Cmd| {
            self.pool.common(command);
            applicant(command, &asks);
        };
        let read = |answer: &[Value]| self.acquired(answer);
        self.limiter.take_and(&self.pool.enter, charges, &self.pool.keys, arguments, read).await
    }

    async fn acquire(&self, asks: Applicant) -> Result<Acquired, StoreError> {
        let read = |answer: &Value| self.acquired(answer::elements(answer)?);
        self.operate("acquire", |command| applicant(command, &asks), read).await
    }

    async fn release(&self, serial: u64, heir: Option<Heir>, rest: Otherwise) -> Result<Released, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(serial);
            match heir {
                Some(heir) => command.arg(heir.serial).arg(heir.own),
                None => command.arg("").arg(0),
            };
            otherwise(command, rest);
        };
        self.operate("release", arguments, answer::released).await
    }

    async fn promote(&self, serial: u64) -> Result<Promoted, StoreError> {
        self.operate(
            "promote",
            |command| {
                command.arg(serial);
            },
            answer::promoted,
        )
        .await
    }

    async fn forget(&self, serials: &[u64]) -> Result<usize, StoreError> {
        self.operate(
            "forget",
            |command| {
                command.arg(serials);
            },
            answer::count,
        )
        .await
    }

    async fn heartbeat(&self, heard: &[(u64, u64)]) -> Result<Beat, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(self.pool.lease);
            for (serial, attempt) in heard {
                command.arg(*serial).arg(*attempt);
            }
        };
        let (beat, ended) = self.operate("heartbeat", arguments, answer::beat).await?;
        self.pool.expiries.inc_by(ended);
        Ok(beat)
    }

    async fn settle(&self, repair: &Repair) -> Result<bool, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(repair.drop.len()).arg(&repair.drop).arg(repair.hold.len()).arg(&repair.hold);
            for (serial, rank) in &repair.wait {
                command.arg(*serial).arg(*rank);
            }
        };
        self.operate("settle", arguments, answer::flag).await
    }

    async fn bye(&self) -> Result<(), StoreError> {
        self.operate("bye", |_| {}, |answer| answer::flag(answer).map(drop)).await
    }
}

impl HandOver for RedisSlots {
    async fn retry(&self, serial: u64, raise: bool) -> Result<Retried, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(serial).arg(u8::from(raise));
        };
        self.operate("retry", arguments, answer::retried).await
    }

    async fn pass(&self, from: u64, to: u64) -> Result<Released, StoreError> {
        self.operate(
            "pass",
            |command| {
                command.arg(from).arg(to);
            },
            answer::released,
        )
        .await
    }

    async fn transfer(&self, from: u64, to: &Grant<'_>) -> Result<Released, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(from).arg(to.replica).arg(to.serial).arg(to.attempt);
        };
        self.operate("transfer", arguments, answer::released).await
    }

    async fn recall(&self, from: u64, to: &Grant<'_>) -> Result<Released, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(from).arg(to.replica).arg(to.serial).arg(to.attempt);
        };
        self.operate("recall", arguments, answer::released).await
    }

    async fn claim(&self, grant: Arrived) -> Result<Released, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(grant.serial).arg(grant.attempt).arg(u8::from(grant.waits)).arg(grant.spare);
        };
        self.operate("claim", arguments, answer::released).await
    }

    async fn free(&self, serial: u64, epoch: u64, rest: Otherwise) -> Result<Released, StoreError> {
        let arguments = |command: &mut Cmd| {
            command.arg(serial).arg(epoch);
            otherwise(command, rest);
        };
        self.operate("free", arguments, answer::released).await
    }
}
