//! A WebSocket client.

use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, http::HeaderValue};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};

/// Opens a WebSocket, which the upstream's record lists under `id`.
///
/// # Errors
/// [`tungstenite::Error::Http`] with the response where it was refused.
pub(crate) async fn open(
    address: SocketAddr,
    path: &str,
    key: &str,
    id: &str,
) -> tungstenite::Result<WebSocketStream<MaybeTlsStream<TcpStream>>> {
    let mut request = format!("ws://{address}{path}").into_client_request()?;
    request.headers_mut().insert("x-api-key", HeaderValue::from_str(key)?);
    request.headers_mut().insert("x-test-id", HeaderValue::from_str(id)?);
    let (socket, _) = tokio_tungstenite::connect_async(request).await?;
    Ok(socket)
}
