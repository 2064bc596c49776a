//! A message in hand.

use futures::FutureExt;
use lapin::Channel;
use lapin::message::BasicGetMessage;
use lapin::options::{BasicAckOptions, BasicNackOptions};
use prometheus::IntCounter;

use super::super::{Taken, Ticket};
use super::Shared;

/// A ticket that was taken from RabbitMQ.
#[must_use = "a ticket goes back to its line as soon as it is dropped"]
pub struct RabbitTaken {
    ticket: Ticket,
    message: Unsettled,
    stale: IntCounter,
}

/// A message that goes back when dropped.
struct Unsettled {
    channel: Channel,
    /// `None` once settled.
    tag: Option<u64>,
}

impl RabbitTaken {
    /// `None` for a message that is no ticket, which is removed.
    pub(super) fn of(message: &BasicGetMessage, channel: Channel, shared: &Shared) -> Option<Self> {
        let unsettled = Unsettled { channel, tag: Some(message.delivery.delivery_tag) };
        let Some(ticket) = Ticket::decode(&message.delivery.data) else {
            unsettled.remove();
            return None;
        };
        Some(Self { ticket, message: unsettled, stale: shared.meters.stale.clone() })
    }
}

impl Taken for RabbitTaken {
    fn ticket(&self) -> Ticket {
        self.ticket
    }

    fn ack(self) {
        self.message.remove();
    }

    fn stale(self) {
        self.stale.inc();
        self.message.remove();
    }
}

impl Unsettled {
    // The first poll hands the frame to the connection; what follows is only the news that it was written. On a channel
    // that has ended it is refused before it is sent, and the broker has put the message back already.
    fn remove(mut self) {
        if let Some(tag) = self.tag.take() {
            let _ = self.channel.basic_ack(tag, BasicAckOptions::default()).now_or_never();
        }
    }
}

impl Drop for Unsettled {
    fn drop(&mut self) {
        if let Some(tag) = self.tag.take() {
            let requeue = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
            let _ = self.channel.basic_nack(tag, requeue).now_or_never();
        }
    }
}
