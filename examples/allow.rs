//! An `ext_proc` server that allows everything: `cargo run --example allow [ADDRESS]`, by default on 127.0.0.1:9191.
//!
//! The floor of every measurement: it answers with the same messages as bouncer, over the same gRPC library, and decides
//! nothing. What bouncer costs beyond it is what its decisions cost.

use std::collections::HashMap;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Asked;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Reply;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeaderMutation, HeadersResponse, ProcessingRequest, ProcessingResponse, TrailersResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures::stream::BoxStream;
use futures::{StreamExt, stream};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

struct Allow;

#[tonic::async_trait]
impl ExternalProcessor for Allow {
    type ProcessStream = BoxStream<'static, Result<ProcessingResponse, Status>>;

    /// Returns, and thereby sends the response headers, only with the first reply, as bouncer does.
    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let mut asked = request.into_inner();
        let Some(first) = asked.message().await? else {
            return Ok(Response::new(stream::empty().boxed()));
        };
        let first = stream::iter([reply(&first)]);
        // Stays open until Envoy drops it at the end of the request.
        Ok(Response::new(first.chain(asked.map(|asked| reply(&asked?))).boxed()))
    }
}

fn reply(asked: &ProcessingRequest) -> Result<ProcessingResponse, Status> {
    match asked.request {
        Some(Asked::RequestHeaders(_)) => Ok(ProcessingResponse {
            response: Some(Reply::RequestHeaders(HeadersResponse {
                response: Some(CommonResponse { header_mutation: Some(mutation()), ..CommonResponse::default() }),
            })),
            dynamic_metadata: Some(metadata()),
            ..ProcessingResponse::default()
        }),
        Some(Asked::ResponseTrailers(_)) => Ok(ProcessingResponse {
            response: Some(Reply::ResponseTrailers(TrailersResponse::default())),
            ..ProcessingResponse::default()
        }),
        _ => Err(Status::invalid_argument("only request headers and response trailers are expected")),
    }
}

fn mutation() -> HeaderMutation {
    let set = |name: &str, value: &str| HeaderValueOption {
        header: Some(HeaderValue { key: name.into(), raw_value: value.into(), ..HeaderValue::default() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    };
    HeaderMutation {
        set_headers: vec![set("x-tenant-id", "acme"), set("x-tenant-tier", "T3")],
        remove_headers: vec!["x-api-key".into()],
    }
}

fn metadata() -> Struct {
    let text = |value: &str| Value { kind: Some(Kind::StringValue(value.into())) };
    let verdict = [
        ("verdict", text("allow")),
        ("tenant", text("acme")),
        ("tier", text("T3")),
        ("wait_ms", text("0")),
        ("limit", text("400")),
        ("remaining", text("399")),
        ("reset", text("1")),
    ];
    let verdict: HashMap<_, _> = verdict.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let verdict = Value { kind: Some(Kind::StructValue(Struct { fields: verdict })) };
    Struct { fields: HashMap::from([("bouncer".to_owned(), verdict)]) }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9191".to_owned());
    let listener = TcpListener::bind(&address).await?;
    println!("allowing everything on {}", listener.local_addr()?);
    let (_, health) = tonic_health::server::health_reporter();
    Server::builder()
        .add_service(health)
        .add_service(ExternalProcessorServer::new(Allow))
        .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)))
        .await?;
    Ok(())
}
