//! Hears of slots that come free, on a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use redis::aio::PubSub;
use tokio::time::{sleep, timeout};

use super::PoolInRedis;
use crate::admission::shared::Pool;
use crate::admission::shared::slots::Slots;
use crate::limit::redis::{RedisStore, StoreError};

/// How often a silent connection is asked for a sign of life, and how long that may take.
const PING: Duration = Duration::from_secs(1);
/// The pause between two tries to subscribe.
const PAUSE: Duration = Duration::from_millis(250);

/// Passes announcements on to a pool, until dropped. Whatever is missed while there is no connection is made up for by the
/// heartbeats, so this needs no word in the log: the store's own says that it is down.
pub async fn listen<S: Slots>(store: Arc<RedisStore>, names: Arc<PoolInRedis>, pool: Arc<Pool<S>>) {
    loop {
        let mut connections = store.connections();
        if let Ok(channel) = subscribe(&store, &names.channel).await {
            pool.maybe_announced();
            tokio::select! {
                () = follow(channel, &names.replica, &pool) => {}
                // By then the others may speak to another server.
                Ok(()) = connections.changed() => continue,
            }
        }
        sleep(PAUSE).await;
    }
}

async fn subscribe(store: &RedisStore, channel: &str) -> Result<PubSub, StoreError> {
    let subscribing = async {
        let mut connection = store.subscriber().await?;
        connection.subscribe(channel).await.map_err(StoreError::Connection)?;
        Ok(connection)
    };
    timeout(PING, subscribing).await.unwrap_or(Err(StoreError::Timeout(PING)))
}

/// Until the connection ends.
async fn follow<S: Slots>(channel: PubSub, replica: &str, pool: &Pool<S>) {
    let (mut sink, mut messages) = channel.split();
    loop {
        match timeout(PING, messages.next()).await {
            Ok(Some(message)) => {
                if let Some((rank, patient)) = read(message.get_payload_bytes()) {
                    pool.announced(rank, patient == replica);
                }
            }
            Ok(None) => return,
            Err(_) => match timeout(PING, sink.ping::<redis::Value>()).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return,
            },
        }
    }
}

/// The highest rank that waits, and the replica that lets others try first. Anyone may publish anything.
fn read(message: &[u8]) -> Option<(usize, &str)> {
    let (rank, patient) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    Some((rank.parse().ok()?, patient))
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn an_announcement_is_a_rank_and_a_replica_and_everything_else_is_ignored() {
        assert_eq!(read(b"2 00ff"), Some((2, "00ff")));
        assert_eq!(read(b"0 *"), Some((0, "*")));
        for foreign in [&b""[..], b"2", b"x *", b"-1 *", b"99999999999999999999999 *", b"\xff \xff"] {
            assert_eq!(read(foreign), None);
        }
    }
}
