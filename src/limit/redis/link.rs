//! The connection of one runtime to Redis, and the task that keeps it.
//!
//! A connection lives on the runtime that uses it, so that an answer wakes no other thread. Whenever the store counts as
//! down the connection is given up and a new one made: what is stuck in an old one would hold up all that follows, and
//! after a network that was cut its next retransmission can be many seconds away.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::either::Either;
use tokio_util::task::AbortOnDropHandle;

use super::super::breaker::{Backoff, Epoch};
use super::{RedisStore, StoreError};

/// How long connecting and logging in may take. More than a call may: it is not a request that waits for it.
const CONNECT: Duration = Duration::from_secs(1);

/// What a caller finds.
#[derive(Clone)]
enum Line {
    /// The first try is on its way, or the first one after a connection that worked: worth a wait.
    Coming,
    Up(MultiplexedConnection),
    Down,
}

/// One connection, kept by a task of its own until this is dropped.
pub(super) struct Link {
    line: watch::Receiver<Line>,
    _keeper: AbortOnDropHandle<()>,
}

/// Reads and writes the socket; ends when the connection does.
type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Why a connection was given up.
enum End {
    Lost,
    StoreDown,
}

impl Link {
    /// Must be called within the runtime that is to use it.
    pub(super) fn new(store: Arc<RedisStore>) -> Self {
        let (sender, line) = watch::channel(Line::Coming);
        Self { line, _keeper: AbortOnDropHandle::new(tokio::spawn(keep(store, sender))) }
    }

    /// The connection; one that is coming is waited for, so the caller needs a deadline.
    pub(super) async fn connection(&self) -> Result<MultiplexedConnection, StoreError> {
        let line = self.line.borrow().clone();
        let line = if let Line::Coming = line { self.settled().await } else { line };
        match line {
            Line::Up(connection) => Ok(connection),
            Line::Coming | Line::Down => Err(StoreError::Unconnected),
        }
    }

    /// Waits until it is known whether there is a connection.
    async fn settled(&self) -> Line {
        let mut line = self.line.clone();
        // The keeper only ends with the runtime.
        line.wait_for(|line| !matches!(line, Line::Coming)).await.map_or(Line::Down, |line| line.clone())
    }

    pub(super) async fn wait_settled(&self) {
        let _ = self.settled().await;
    }
}

/// Connects, proves, serves, and again, for ever.
async fn keep(store: Arc<RedisStore>, line: watch::Sender<Line>) {
    let mut backoff = Backoff::default();
    let mut epoch = store.epochs();
    loop {
        let mut lived = Duration::ZERO;
        match establish(&store).await {
            Ok((connection, driver)) => {
                let began = Instant::now();
                let connected = store.proved();
                line.send_replace(Line::Up(connection));
                let end = serve(driver, &mut epoch).await;
                drop(connected);
                lived = began.elapsed();
                match end {
                    // A server that closes an idle connection is not down: it is, if it cannot be reached again.
                    End::Lost if lived >= Backoff::STEADY => {
                        line.send_replace(Line::Coming);
                        continue;
                    }
                    End::Lost => store.unreachable(&StoreError::Lost),
                    End::StoreDown => {}
                }
            }
            Err(error) => store.unreachable(&error),
        }
        line.send_replace(Line::Down);
        let down = epoch.borrow().is_open();
        tokio::select! {
            () = sleep(backoff.pause(lived)) => {}
            // Another runtime has got through: no need to wait.
            _ = epoch.wait_for(|epoch| !epoch.is_open()), if down => {}
        }
    }
}

/// A connection that has done what a request does.
async fn establish(store: &RedisStore) -> Result<(MultiplexedConnection, Driver), StoreError> {
    let connecting = timeout(CONNECT, connect(&store.server));
    let (connection, mut driver) = connecting.await.map_err(|_| StoreError::Timeout(CONNECT))??;
    let probe = timeout(store.timeout, store.probe(connection.clone()));
    tokio::select! {
        proved = probe => proved.map_err(|_| StoreError::Timeout(store.timeout))??,
        () = &mut driver => return Err(StoreError::Lost),
    }
    Ok((connection, driver))
}

type Stream = Either<TcpStream, UnixStream>;

pub(super) async fn open(server: &ConnectionInfo) -> Result<Stream, StoreError> {
    Ok(match server.addr() {
        ConnectionAddr::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            stream.set_nodelay(true)?;
            Either::Left(stream)
        }
        ConnectionAddr::Unix(path) => Either::Right(UnixStream::connect(path).await?),
        other => return Err(io::Error::other(format!("no way to connect to {other}")).into()),
    })
}

/// Not the crate's own way to connect: that one tells nobody when a connection ends.
async fn connect(server: &ConnectionInfo) -> Result<(MultiplexedConnection, Driver), StoreError> {
    let stream = open(server).await?;
    // The deadline of a call includes the wait for a connection, so it is ours.
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let made = MultiplexedConnection::new_with_config(server.redis_settings(), stream, config).await;
    let (connection, driver) = made.map_err(StoreError::Connection)?;
    Ok((connection, Box::pin(driver)))
}

/// Runs a connection until it ends or the store counts as down.
async fn serve(mut driver: Driver, epoch: &mut watch::Receiver<Epoch>) -> End {
    tokio::select! {
        () = &mut driver => End::Lost,
        _ = epoch.wait_for(|epoch| epoch.is_open()) => End::StoreDown,
    }
}
