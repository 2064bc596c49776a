//! The last call about a serial.

use std::sync::Arc;

use super::pool::Pool;
use super::slots::Slots;

/// The end of a serial: it comes with the answer to the last call about it, or when no answer can come any more, as the
/// call's runtime has ended. Without an answer, a heartbeat is to look what the store made of it.
#[must_use = "a serial ends as soon as this is dropped"]
pub(super) struct Ending<S: Slots> {
    pool: Arc<Pool<S>>,
    pub(super) serial: u64,
    settled: bool,
}

impl<S: Slots> Ending<S> {
    pub(super) fn new(pool: &Arc<Pool<S>>, serial: u64) -> Self {
        Self { pool: pool.clone(), serial, settled: false }
    }

    /// Of a new serial: that of a slot to hand over.
    pub(super) fn open(pool: &Arc<Pool<S>>) -> Self {
        let serial = pool.lock().ledger.open();
        Self::new(pool, serial)
    }

    /// The last call has been answered, or failed. Without `settled`, a heartbeat is wanted.
    pub(super) fn end(mut self, settled: bool) {
        self.settled = settled;
    }
}

impl<S: Slots> Drop for Ending<S> {
    fn drop(&mut self) {
        self.pool.ended(self.serial);
        if !self.settled {
            self.pool.beat_wanted.notify_one();
        }
    }
}
