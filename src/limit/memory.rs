//! Buckets in this process: the whole store where there is no Redis, and the policy `local` while there is none.

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::bucket::Bucket;
use super::tally::{Outcome, merged, tally};
use super::{BucketKey, Charge, Limiter, Quota, Take};

/// How many buckets a call looks at to see whether they can be forgotten. More than one, so that a flood of new names
/// is forgotten faster than it comes; there is no timer, and no call that pays for all.
const SWEPT_BY_A_CALL: usize = 2;

/// Buckets behind one lock, for all threads. Nothing is awaited while it is held.
///
/// A bucket that is full again is the same as one that was never made, and is forgotten as calls go by. What is kept is
/// at most about twice what is in use.
#[derive(Debug)]
pub struct MemoryLimiter {
    /// The clock counts from here. It is tokio's, so a test can stop it.
    epoch: Instant,
    shelf: Mutex<Shelf>,
}

#[derive(Debug, Default)]
struct Shelf {
    buckets: HashMap<BucketKey, Kept>,
    /// Every key of `buckets` once, in the order of the next look.
    round: VecDeque<BucketKey>,
}

#[derive(Debug)]
struct Kept {
    bucket: Bucket,
    /// As it was at the last call, to tell when the bucket is full.
    quota: Quota,
}

impl Default for MemoryLimiter {
    fn default() -> Self {
        Self { epoch: Instant::now(), shelf: Mutex::default() }
    }
}

impl MemoryLimiter {
    /// How many buckets are not full. Looks at all of them: for people, not for requests.
    pub fn buckets_in_use(&self) -> usize {
        let now = self.now();
        self.shelf().buckets.values().filter(|kept| !kept.bucket.is_full(&kept.quota, now)).count()
    }

    /// [`Limiter::take`] without the wait that it never needs.
    pub fn take_now(&self, charges: &[Charge<'_>]) -> Take {
        let charges = merged(charges);
        let mut shelf = self.shelf();
        // Read under the lock: times of one bucket then come in order.
        let now = self.now();
        let granted = charges.iter().all(|charge| shelf.try_take(charge, now).is_ok());
        let take = tally(&charges, charges.iter().map(|charge| shelf.settle(charge, granted, now)));
        shelf.sweep(now);
        take
    }

    /// [`Limiter::give_back`] without the wait that it never needs.
    pub fn give_back_now(&self, charges: &[Charge<'_>]) {
        let mut shelf = self.shelf();
        let now = self.now();
        for charge in charges {
            // A bucket that is not kept is full.
            if let Some(kept) = shelf.buckets.get_mut(charge.bucket) {
                kept.bucket = kept.bucket.give_back(&charge.quota, charge.cost, now);
            }
        }
        shelf.sweep(now);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A panic of another thread leaves every bucket whole, as each is replaced in one move.
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shelf {
    fn bucket(&self, charge: &Charge<'_>, now: u64) -> Bucket {
        self.buckets.get(charge.bucket).map_or_else(|| Bucket::full(&charge.quota, now), |kept| kept.bucket)
    }

    fn try_take(&self, charge: &Charge<'_>, now: u64) -> Result<Bucket, std::time::Duration> {
        self.bucket(charge, now).take(&charge.quota, charge.cost, now)
    }

    /// Carries one charge out if all are granted, and says what came of it.
    fn settle(&mut self, charge: &Charge<'_>, granted: bool, now: u64) -> Outcome {
        match self.try_take(charge, now) {
            Ok(taken) => {
                if granted {
                    self.keep(charge, taken);
                }
                Outcome { level: taken.level(&charge.quota, now), retry_after: None }
            }
            Err(wait) => Outcome { level: self.bucket(charge, now).level(&charge.quota, now), retry_after: Some(wait) },
        }
    }

    fn keep(&mut self, charge: &Charge<'_>, bucket: Bucket) {
        let kept = Kept { bucket, quota: charge.quota };
        if let Some(old) = self.buckets.get_mut(charge.bucket) {
            *old = kept;
        } else {
            self.buckets.insert(charge.bucket.clone(), kept);
            self.round.push_back(charge.bucket.clone());
        }
    }

    fn sweep(&mut self, now: u64) {
        for _ in 0..SWEPT_BY_A_CALL {
            let Some(key) = self.round.pop_front() else { break };
            if self.buckets.get(&key).is_some_and(|kept| !kept.bucket.is_full(&kept.quota, now)) {
                self.round.push_back(key);
            } else {
                self.buckets.remove(&key);
            }
        }
        // A flood that has passed gives its memory back, at a cost spread over the calls that removed it.
        if self.buckets.capacity() > 1024 && self.buckets.len() < self.buckets.capacity() / 8 {
            self.buckets.shrink_to(self.buckets.len() * 2);
            self.round.shrink_to(self.round.len() * 2);
        }
    }
}

impl Limiter for MemoryLimiter {
    type Error = Infallible;

    async fn take(&self, charges: &[Charge<'_>]) -> Result<Take, Infallible> {
        Ok(self.take_now(charges))
    }

    async fn give_back(&self, charges: &[Charge<'_>]) -> Result<(), Infallible> {
        self.give_back_now(charges);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
