//! What a replica does besides answering requests: heartbeats, and promotions of its waiters.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::desk::Desk;
use super::pool::Errand;
use super::slots::Slots;

/// So many heartbeats in the length of a lease, and at least one in this time: they make up for lost announcements.
const BEATS: u32 = 10;
const LONGEST: Duration = Duration::from_secs(1);
/// The longest pause between two tries to reach a store that does not answer.
const RETRY: Duration = Duration::from_millis(250);
/// The shortest pause between two heartbeats. Those that are asked for meanwhile are one.
const REST: Duration = Duration::from_millis(5);
/// How long others have to take a slot that is free, before the replica that freed it tries itself.
const PATIENCE: Duration = Duration::from_millis(20);

/// One a process, on a runtime that outlives the workers.
pub struct Coordinator<S: Slots> {
    desk: Arc<Desk<S>>,
}

impl<S: Slots> Coordinator<S> {
    /// Coordinates by way of this desk, which has the pool to itself in all that is not a request.
    pub fn new(desk: Arc<Desk<S>>) -> Self {
        Self { desk }
    }

    /// Works until dropped.
    pub async fn run(&self) {
        tokio::join!(self.beats(), self.promotions(), self.late_promotions(), self.passed_tickets());
    }

    /// Gives up everything this replica has. The heartbeats must have ended before.
    ///
    /// # Errors
    /// When the store did not answer; then the others reclaim it when the lease ends.
    pub async fn bye(&self) -> Result<(), S::Error> {
        self.desk.slots().bye().await
    }

    async fn beats(&self) {
        let pool = self.desk.pool();
        let mut heard = Vec::new();
        loop {
            let answered = self.beat(&mut heard).await;
            pool.settled.send_replace(true);
            let regular = (pool.lease / BEATS).min(LONGEST);
            let pause = if answered { regular } else { regular.min(RETRY) };
            sleep(REST).await;
            // One that is asked for while the store does not answer would only be asked for again.
            let wanted =
                async { if answered { pool.beat_wanted.notified().await } else { std::future::pending().await } };
            let _ = timeout(pause.saturating_sub(REST), wanted).await;
        }
    }

    /// One heartbeat, and what it calls for. False where the store did not answer. `heard` are the lost grants that the
    /// last one told of.
    async fn beat(&self, heard: &mut Vec<(u64, u64)>) -> bool {
        let pool = self.desk.pool();
        let mark = pool.beat_begins();
        let sent = Instant::now();
        let beat = match self.desk.slots().heartbeat(heard).await {
            Ok(beat) => beat,
            Err(error) => {
                if pool.beat_failed() {
                    tracing::warn!(%error, "cut off from the other replicas: going on with the slots held");
                }
                return false;
            }
        };
        let (repair, called) = pool.beat_answered(mark, sent, &beat);
        heard.clone_from(&beat.lost_grants);
        for waiter in called {
            // It is held already. Where it has gone, dropping its slot gives it back.
            drop(waiter.grant());
        }
        if !repair.is_empty() {
            match self.desk.slots().settle(&repair).await {
                Ok(true) => {}
                Ok(false) => {
                    pool.repair_failed();
                    return false;
                }
                Err(error) => {
                    if pool.repair_failed() {
                        tracing::warn!(%error, "cut off from the other replicas: going on with the slots held");
                    }
                    return false;
                }
            }
        }
        // Those that wait anew may have lost a grant, and have no ticket in any case where they came during an outage.
        for (serial, _) in &repair.wait {
            pool.ticket_lost(*serial);
        }
        pool.grants_lost(&beat.lost_grants);
        let rejoined = pool.rejoined();
        if rejoined {
            tracing::info!(
                replicas = beat.replicas,
                registered = repair.hold.len(),
                "slots are shared with all replicas"
            );
            // What changed while the store was being told.
            pool.beat_wanted.notify_one();
        } else if !beat.known {
            pool.metrics.leases_lost.inc();
            tracing::warn!(registered = repair.hold.len(), "the lease was lost: slots and places are registered again");
        }
        if pool.is_ordered() {
            pool.send(Errand::PublishAll);
        }
        // Slots that come back by the end of a lease wake nobody by themselves.
        pool.maybe_announced();
        true
    }

    async fn promotions(&self) {
        loop {
            self.desk.pool().promotion_wanted.notified().await;
            let pool = self.desk.pool();
            if !pool.is_ordered() {
                self.desk.promote().await;
            } else if pool.anyone_waits() {
                pool.look_wanted.notify_one();
            }
        }
    }

    async fn late_promotions(&self) {
        loop {
            self.desk.pool().promotion_wanted_later.notified().await;
            sleep(PATIENCE).await;
            self.desk.pool().promotion_wanted.notify_one();
        }
    }

    /// Whoever removes tickets tells nobody. They are published again with the heartbeat after this.
    async fn passed_tickets(&self) {
        loop {
            sleep(LONGEST).await;
            if self.desk.pool().is_ordered() {
                self.desk.pool().lock().ledger.give_up_passed();
            }
        }
    }
}
