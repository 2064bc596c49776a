//! A shared slot in use.

use std::fmt;
use std::sync::Arc;

use super::desk::Desk;
use super::slots::Slots;

/// The right to be in flight, given back by drop.
#[must_use = "a slot is given back as soon as it is dropped"]
pub struct Slot<S: Slots> {
    serial: u64,
    /// `None` once given back.
    desk: Option<Arc<Desk<S>>>,
}

impl<S: Slots> Slot<S> {
    pub(super) fn new(serial: u64, desk: Arc<Desk<S>>) -> Self {
        Self { serial, desk: Some(desk) }
    }

    /// Drops it without giving anything back.
    pub(super) fn forget(mut self) {
        self.desk = None;
    }
}

impl<S: Slots> Drop for Slot<S> {
    fn drop(&mut self) {
        if let Some(desk) = self.desk.take() {
            desk.give_back(self.serial);
        }
    }
}

impl<S: Slots> fmt::Debug for Slot<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Slot").field(&self.serial).finish()
    }
}
