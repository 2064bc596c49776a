//! A gRPC client of the upstream's health service.

use std::net::SocketAddr;
use std::time::Duration;

use tonic::transport::Endpoint;
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

pub(crate) use tonic_health::pb::health_check_response::ServingStatus;

/// Asks for the health of the whole server, on a connection of its own.
///
/// # Errors
/// The gRPC status of a refusal.
pub(crate) async fn health(address: SocketAddr, key: Option<&str>) -> Result<ServingStatus, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address is a URL");
    let channel = endpoint.timeout(Duration::from_secs(60)).connect().await.expect("something listens");
    let mut request = Request::new(HealthCheckRequest { service: String::new() });
    if let Some(key) = key {
        request.metadata_mut().insert("x-api-key", key.parse().expect("a key is a header value"));
    }
    let answer = HealthClient::new(channel).check(request).await?;
    Ok(answer.get_ref().status())
}
