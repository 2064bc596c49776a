//! The servers of a store, and how a connection to those that take writes is made.

use std::sync::Arc;

use redis::aio::{MultiplexedConnection, PubSub};
use redis::{Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisResult, Value};

use super::StoreError;
use super::cluster::{self, Seeds, Upkeep};
use super::script::answer;
use super::sentinel::Sentinels;
use super::wire::{Driver, Wire, subscriber};
use crate::config::RedisServers;
use crate::limit::BucketKey;

/// Where Redis is.
pub(super) enum Servers {
    Single(ConnectionInfo),
    Sentinel(Arc<Sentinels>),
    Cluster(Seeds),
}

/// A way to whatever has a key.
#[derive(Clone)]
pub(super) enum Route {
    One(MultiplexedConnection),
    Cluster(cluster::Route),
}

/// What must be polled for a route to work.
pub(super) enum Upholder {
    One(Driver),
    /// Of this master, as long as these know no other.
    Master(Driver, ConnectionInfo, Arc<Sentinels>),
    Cluster(Upkeep),
}

impl Servers {
    pub(super) fn new(config: &RedisServers) -> RedisResult<Self> {
        const SENTINEL_PORT: u16 = 26379;
        let server = |url: &String| url.as_str().into_connection_info();
        Ok(match config {
            RedisServers::Single(url) => Self::Single(server(url)?),
            RedisServers::Cluster(urls) => {
                Self::Cluster(Seeds::new(urls.iter().map(server).collect::<Result<_, _>>()?))
            }
            RedisServers::Sentinel { service, urls } => {
                let sentinel = |url: &String| {
                    let server = server(url)?;
                    let port = url::Url::parse(url).ok().and_then(|url| url.port());
                    Ok(match server.addr() {
                        ConnectionAddr::Tcp(host, _) if port.is_none() => {
                            let address = ConnectionAddr::Tcp(host.clone(), SENTINEL_PORT);
                            server.set_addr(address)
                        }
                        _ => server,
                    })
                };
                let sentinels = urls.iter().map(sentinel).collect::<RedisResult<_>>()?;
                let service = server(service)?;
                let name = match service.addr() {
                    ConnectionAddr::Tcp(name, _) => name.clone(),
                    other => other.to_string(),
                };
                Self::Sentinel(Arc::new(Sentinels::new(name, service.redis_settings().clone(), sentinels)))
            }
        })
    }

    /// Connects, and logs in. Each step is bounded.
    pub(super) async fn connect(&self) -> Result<(Route, Upholder), StoreError> {
        match self {
            Self::Single(server) => {
                let Wire { connection, driver } = Wire::connect(server).await?;
                Ok((Route::One(connection), Upholder::One(driver)))
            }
            Self::Sentinel(sentinels) => {
                let (master, Wire { connection, driver }) = sentinels.connect().await?;
                Ok((Route::One(connection), Upholder::Master(driver, master, sentinels.clone())))
            }
            Self::Cluster(seeds) => {
                let (route, upkeep) = Upkeep::connect(seeds).await?;
                Ok((Route::Cluster(route), Upholder::Cluster(upkeep)))
            }
        }
    }

    /// A connection for messages. The nodes of a cluster pass them on to each other, so any of them will do.
    pub(super) async fn subscriber(&self) -> Result<PubSub, StoreError> {
        match self {
            Self::Single(server) => subscriber(server).await,
            Self::Sentinel(sentinels) => subscriber(&sentinels.connect().await?.0).await,
            Self::Cluster(seeds) => seeds.subscriber().await,
        }
    }
}

impl Route {
    /// Sends the call of a script to whom its keys belong; the caller needs a deadline.
    pub(super) async fn send(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            Self::One(connection) => answer(connection, command).await,
            Self::Cluster(route) => route.send(command).await,
        }
    }

    /// The buckets that prove it to work.
    pub(super) fn probes(&self, prefix: &str) -> Vec<BucketKey> {
        match self {
            Self::One(_) => vec![BucketKey::probe(prefix, "probe")],
            Self::Cluster(route) => route.probes(prefix),
        }
    }
}

impl Upholder {
    /// Until a connection ends that is needed, or is of use no more.
    pub(super) async fn run(&mut self) {
        match self {
            Self::One(driver) => driver.await,
            Self::Master(driver, master, sentinels) => tokio::select! {
                () = driver => {}
                () = sentinels.until_another_is_named(master) => {}
            },
            Self::Cluster(upkeep) => upkeep.run().await,
        }
    }
}
