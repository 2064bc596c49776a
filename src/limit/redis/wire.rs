//! One connection to one server.

use std::io;
use std::pin::Pin;
use std::time::Duration;

use redis::aio::{MultiplexedConnection, PubSub};
use redis::{AsyncConnectionConfig, Cmd, ConnectionAddr, ConnectionInfo, Value};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_util::either::Either;

use super::StoreError;
use super::script::answer;

/// How long connecting and logging in may take. More than a call may: it is not a request that waits for it.
pub(super) const CONNECT: Duration = Duration::from_secs(1);

/// How long one of several servers that know where the data is may take to answer, before the next one is asked.
pub(super) const PATIENCE: Duration = Duration::from_millis(300);

/// Reads and writes the socket; ends when the connection does.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A connection that is logged in, and what must be polled for it to work.
pub(super) struct Wire {
    pub(super) connection: MultiplexedConnection,
    pub(super) driver: Driver,
}

impl Wire {
    /// Not the crate's own way to connect: that one tells nobody when a connection ends.
    pub(super) async fn connect(server: &ConnectionInfo) -> Result<Self, StoreError> {
        timeout(CONNECT, Self::connect_at_leisure(server)).await.map_err(|_| StoreError::Timeout(CONNECT))?
    }

    async fn connect_at_leisure(server: &ConnectionInfo) -> Result<Self, StoreError> {
        let stream = open(server).await?;
        // The deadline of a call includes the wait for a connection, so it is ours.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let made = MultiplexedConnection::new_with_config(server.redis_settings(), stream, config).await;
        let (connection, driver) = made.map_err(StoreError::Connection)?;
        Ok(Self { connection, driver: Box::pin(driver) })
    }

    /// Sends a command while nobody else polls the driver.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        let mut connection = self.connection.clone();
        self.drive(answer(&mut connection, command)).await
    }

    /// Does something that needs the connection while nobody else polls the driver.
    pub(super) async fn drive<T>(
        &mut self,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        tokio::select! {
            done = work => done,
            () = &mut self.driver => Err(StoreError::Lost),
        }
    }
}

/// Connects, asks one thing, and hangs up.
pub(super) async fn ask(server: &ConnectionInfo, command: &Cmd, within: Duration) -> Result<Value, StoreError> {
    let asking = async { Wire::connect(server).await?.ask(command).await };
    timeout(within, asking).await.unwrap_or(Err(StoreError::Timeout(within)))
}

/// A connection for messages; the caller needs a deadline.
pub(super) async fn subscriber(server: &ConnectionInfo) -> Result<PubSub, StoreError> {
    let stream = open(server).await?;
    PubSub::new(server.redis_settings(), stream).await.map_err(StoreError::Connection)
}

type Stream = Either<TcpStream, UnixStream>;

async fn open(server: &ConnectionInfo) -> Result<Stream, StoreError> {
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
