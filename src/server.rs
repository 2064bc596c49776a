//! The gRPC server of one worker: the doors and the health service on one listener.

mod accept;

use std::time::Duration;

use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Error, Server};
use tonic_health::pb::health_server::{Health, HealthServer};

use crate::envoy::ext_proc::ExtProc;
use crate::listen::Listener;
use accept::patient;

/// How long a connection may be silent before it is asked for a sign of life, and how long that may take. Together
/// well under 10 s: an Envoy that froze, or a host that vanished, must not keep its slots longer.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(4);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// Streams that were reset before this server looked at them. A server that was paused for a moment finds many: the
/// default of 20 would make it drop the whole connection, and every request in flight with it.
const PENDING_RESETS: usize = 100_000;

/// Serves until `stop`, then says GOAWAY, closes the listener and returns when the last stream has ended.
///
/// # Errors
/// When the listener fails.
pub async fn serve<H: Health>(
    listener: Listener,
    door: ExtProc,
    health: HealthServer<H>,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let router = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .http2_max_pending_accept_reset_streams(Some(PENDING_RESETS))
        .add_service(door)
        .add_service(health);
    match listener {
        Listener::Tcp(listener) => {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            router.serve_with_incoming_shutdown(patient(incoming), stop.cancelled()).await?;
        }
        Listener::Unix(listener) => {
            let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
            router.serve_with_incoming_shutdown(patient(incoming), stop.cancelled()).await?;
        }
    }
    Ok(())
}

/// Why a worker stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The socket could not be used.
    #[error("cannot listen")]
    Listen(#[from] std::io::Error),
    /// The gRPC server failed.
    #[error("the gRPC server failed")]
    Transport(#[from] Error),
}
