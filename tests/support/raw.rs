//! A TCP connection that sends exactly the bytes it is given.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// How long a peer may be silent.
const PATIENCE: Duration = Duration::from_secs(30);

/// Dropping it closes the connection.
pub(crate) struct Raw {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.expect("something listens"), read: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.expect("an open connection");
    }

    /// Everything received so far, once it contains `text`.
    ///
    /// # Panics
    /// When the connection ends without it.
    pub(crate) async fn read_until(&mut self, text: &str) -> String {
        loop {
            let read = self.received();
            if read.contains(text) {
                return read;
            }
            assert!(self.receive().await, "the connection ended without {text:?}: {read:?}");
        }
    }

    /// Everything received until the peer closed the connection.
    pub(crate) async fn read_to_end(&mut self) -> String {
        while self.receive().await {}
        self.received()
    }

    fn received(&self) -> String {
        String::from_utf8_lossy(&self.read).into_owned()
    }

    /// False at the end of the connection, by FIN or RST.
    async fn receive(&mut self) -> bool {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.read)).await;
        matches!(read.expect("a peer that is not silent for so long"), Ok(count) if count > 0)
    }
}

/// Sends one request on a connection of its own and reads until the peer closes it: the request says so.
pub(crate) async fn exchange(address: SocketAddr, request: impl AsRef<[u8]>) -> String {
    let mut connection = Raw::connect(address).await;
    connection.send(request).await;
    connection.read_to_end().await
}
