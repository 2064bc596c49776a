//! What is open on a connection while it is of use: the channels, and the queue of this replica's grants.
//!
//! A session ends at the first call that fails in a way that leaves its channels in doubt, and is never mended.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer, ExchangeKind};
use prometheus::IntCounter;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::super::{Epoch, Grant};
use super::names::Names;
use super::taken::RabbitTaken;
use super::{Fault, Shared};

/// Messages that may be unconfirmed at a time.
const LANES: usize = 16;

/// Messages that are no ticket are taken away; so many at most by one call.
const FOREIGN: usize = 16;

pub(super) struct Session {
    pub(super) epoch: Epoch,
    /// Asks for tickets, and settles them.
    gets: Channel,
    lanes: Lanes,
    over: CancellationToken,
    why: Mutex<Option<Fault>>,
    /// Takes grants in as long as the session lives.
    _grants: AbortOnDropHandle<()>,
}

/// Channels on which messages are published, one unconfirmed message on each.
///
/// What comes back as unroutable comes before its own confirm and may come before the confirm of another message. The
/// library gives it to whichever confirm comes first, so that with two messages on a channel the wrong one could be told.
struct Lanes {
    free: Mutex<Vec<Channel>>,
    permits: Semaphore,
}

/// What became of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Published {
    Queued,
    Unroutable,
    Refused,
}

impl Session {
    /// Declares everything, and proves that a message can be sent.
    pub(super) async fn open(
        connection: &Connection,
        shared: &Arc<Shared>,
        grants: &mpsc::Sender<Grant>,
    ) -> Result<Arc<Self>, Fault> {
        let gets = connection.create_channel().await?;
        declare(&gets, &shared.names).await?;
        // Not the channel of tickets: a wrong word about one of them must not end the way of grants.
        let mine = connection.create_channel().await?;
        let (queue, consumer) = own_queue(&mine, shared).await?;
        let mut free = Vec::with_capacity(LANES);
        for _ in 0..LANES {
            let lane = connection.create_channel().await?;
            lane.confirm_select(ConfirmSelectOptions::default()).await?;
            free.push(lane);
        }
        let over = CancellationToken::new();
        // Not the shared state itself, which holds the session that holds the reader.
        let (pools, foreign) = (shared.lines.pools.clone(), shared.meters.replies.clone());
        let reader = Reader { _channel: mine, consumer, pools, foreign, grants: grants.clone(), over: over.clone() };
        let session = Arc::new(Self {
            epoch: shared.next_epoch(),
            gets,
            lanes: Lanes { free: Mutex::new(free), permits: Semaphore::new(LANES) },
            over,
            why: Mutex::default(),
            _grants: AbortOnDropHandle::new(tokio::spawn(reader.read())),
        });
        // To the own queue by the exchange that belongs to every virtual host; whoever reads it finds no grant in it.
        let probe = session.publish("".into(), queue, &[], shared.timeout, shared.timeout).await?;
        if probe == Published::Queued { Ok(session) } else { Err(Fault::Probe) }
    }

    /// Ends the session for all who use it, unless it has ended before.
    pub(super) fn end(&self, fault: Fault) {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(fault);
        self.over.cancel();
    }

    /// Waits for the end.
    pub(super) async fn over(&self) -> Fault {
        self.over.cancelled().await;
        self.why.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or(Fault::Ended)
    }

    /// Sends a message and waits until the broker has it.
    pub(super) async fn publish(
        &self,
        exchange: ShortString,
        key: ShortString,
        payload: &[u8],
        expires: Duration,
        limit: Duration,
    ) -> Result<Published, Fault> {
        // Transient, and gone by itself: the broker keeps nothing that nobody waits for.
        let expiration = expires.as_millis().max(1).to_string();
        let properties = BasicProperties::default().with_expiration(expiration.into()).with_delivery_mode(1);
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let work = async {
            let _permit = self.lanes.permits.acquire().await.map_err(|_| Fault::Ended)?;
            let lane = self.lanes.free.lock().unwrap_or_else(PoisonError::into_inner).pop().ok_or(Fault::Ended)?;
            let sent = async { lane.basic_publish(exchange, key, options, payload, properties).await?.await };
            let confirmation = timeout(limit, sent).await.map_err(|_| Fault::Timeout(limit))??;
            // A lane whose confirm did not come is not used again.
            self.lanes.free.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
            Ok(match confirmation {
                Confirmation::Ack(None) => Published::Queued,
                Confirmation::Ack(Some(_)) | Confirmation::Nack(Some(_)) => Published::Unroutable,
                Confirmation::Nack(None) | Confirmation::NotRequested => Published::Refused,
            })
        };
        self.unless_over(work).await
    }

    /// Takes the first ticket of a queue.
    pub(super) async fn get(&self, queue: &ShortString, shared: &Arc<Shared>) -> Result<Option<RabbitTaken>, Fault> {
        let work = async {
            for _ in 0..FOREIGN {
                let asked = self.gets.basic_get(queue.clone(), BasicGetOptions { no_ack: false });
                let Some(message) = asked.await? else { return Ok(None) };
                match RabbitTaken::of(&message, self.gets.clone(), shared) {
                    Some(taken) => return Ok(Some(taken)),
                    None => shared.foreign(),
                }
            }
            Ok(None)
        };
        let limited = async { timeout(shared.timeout, work).await.unwrap_or(Err(Fault::Timeout(shared.timeout))) };
        self.unless_over(limited).await
    }

    async fn unless_over<T>(&self, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
        tokio::select! {
            biased;
            () = self.over.cancelled() => Err(Fault::Ended),
            done = work => done,
        }
    }
}

async fn declare(channel: &Channel, names: &Names) -> Result<(), Fault> {
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    for exchange in [&names.tickets, &names.grants] {
        channel.exchange_declare(exchange.clone(), ExchangeKind::Direct, durable, FieldTable::default()).await?;
    }
    // A virtual host may have another default type, and the type is an argument like any other: two that differ refuse
    // each other. No bound is an argument, so that changing one in the configuration changes no queue.
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("classic".into()));
    for line in names.lines() {
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(line.clone(), durable, arguments.clone()).await?;
        let bound = QueueBindOptions::default();
        channel.queue_bind(line.clone(), names.tickets.clone(), line.clone(), bound, FieldTable::default()).await?;
    }
    Ok(())
}

/// The queue of this replica's grants. The broker chooses its name: one of our own could still be locked by the connection
/// before, which the broker may not know to have ended.
async fn own_queue(channel: &Channel, shared: &Shared) -> Result<(ShortString, Consumer), Fault> {
    let exclusive = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare("".into(), exclusive, FieldTable::default()).await?.name().clone();
    let (exchange, key) = (shared.names.grants.clone(), Names::replica(shared.replica));
    channel.queue_bind(queue.clone(), exchange, key, QueueBindOptions::default(), FieldTable::default()).await?;
    // A grant that is lost with this process expires in the store of slots, so acknowledging it would be for nothing.
    let options = BasicConsumeOptions { no_ack: true, exclusive: true, ..BasicConsumeOptions::default() };
    let consumer = channel.basic_consume(queue.clone(), "".into(), options, FieldTable::default()).await?;
    Ok((queue, consumer))
}

/// Takes in the grants of this replica.
struct Reader {
    /// Closed when dropped.
    _channel: Channel,
    consumer: Consumer,
    pools: Vec<String>,
    /// Counts messages that are no grants.
    foreign: IntCounter,
    grants: mpsc::Sender<Grant>,
    over: CancellationToken,
}

impl Reader {
    async fn read(mut self) {
        while let Some(Ok(delivery)) = self.consumer.next().await {
            // That of the probe.
            if delivery.data.is_empty() {
                continue;
            }
            match Grant::decode(&delivery.data, &self.pools) {
                Some(grant) => {
                    if self.grants.send(grant).await.is_err() {
                        return;
                    }
                }
                None => self.foreign.inc(),
            }
        }
        // Deleted by an operator, or the connection has ended.
        self.over.cancel();
    }
}
