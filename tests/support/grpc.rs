//! A gRPC client of the upstream's health service.

use std::net::SocketAddr;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

pub(crate) use tonic_health::pb::health_check_response::ServingStatus;

/// Asks for the health of the whole server, on a connection of its own.
///
/// # Errors
/// The gRPC status of a refusal.
pub(crate) async fn health(address: SocketAddr, key: Option<&str>) -> Result<ServingStatus, Status> {
    let answer = connect(address).await.check(question(key, None)).await?;
    Ok(answer.get_ref().status())
}

/// As [`health`], where perhaps nobody listens.
///
/// # Errors
/// Why there was no answer.
pub(crate) async fn try_health(address: SocketAddr) -> Result<ServingStatus, Box<dyn std::error::Error>> {
    let channel = Endpoint::from_shared(format!("http://{address}"))?.connect().await?;
    Ok(HealthClient::new(channel).check(question(None, None)).await?.get_ref().status())
}

/// A client on a connection of its own, which its clones share.
pub(crate) async fn connect(address: SocketAddr) -> HealthClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URL");
    let channel = endpoint.timeout(Duration::from_secs(60)).connect().await.expect("something listens");
    HealthClient::new(channel)
}

/// What to ask it; the upstream's record lists it under `id`.
pub(crate) fn question(key: Option<&str>, id: Option<&str>) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: String::new() });
    for (name, value) in [("x-api-key", key), ("x-test-id", id)] {
        if let Some(value) = value {
            request.metadata_mut().insert(name, value.parse().expect("a header value"));
        }
    }
    request
}
