//! The main door: `envoy.service.ext_proc.v3.ExternalProcessor`, open to the end of the HTTP request.
//!
//! Envoy opens one gRPC stream a request and sends the request's headers; with response trailers asked for, it keeps
//! the stream open exactly as long as the request lives, and resets it then. So the stream holds the slot, and
//! dropping it gives the slot back: at the end of the response, at the client's abort, at a reset or a timeout, and
//! when Envoy itself is gone.
//!
//! Nothing is sent before the verdict, not even response headers: until it sees those, Envoy may retry the stream on
//! another replica, which is what saves a held request when this one dies.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{FutureExt, Stream};
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec, Streaming};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Code, Response, Status};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use super::message::ProcessingResponse;
use super::reply;
use super::wire::{Phase, ProcessingRequest};
use crate::gate::{Deadline, Flight, Gate, Verdict};
use crate::identity::request::{Request, Rules};

/// gRPC initial metadata in which Envoy's configuration repeats the filter's `message_timeout`, in milliseconds: the
/// protocol itself does not carry it.
pub const DEADLINE_METADATA: &str = "bouncer-deadline-ms";

const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";

/// The service. Cheap to clone.
#[derive(Clone)]
pub struct ExtProc {
    door: Arc<Door>,
}

struct Door {
    gate: Gate,
    rules: Arc<Rules>,
}

impl ExtProc {
    /// The door to a gate. `rules` say how a request is read.
    pub fn new(gate: Gate, rules: Arc<Rules>) -> Self {
        Self { door: Arc::new(Door { gate, rules }) }
    }
}

impl Door {
    async fn process(
        self: Arc<Self>,
        request: tonic::Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let deadline = deadline(&request, Instant::now());
        let mut inbound = request.into_inner();
        let request = match inbound.message().await?.and_then(|message| message.phase) {
            // The message is dropped here: a request that is held keeps only the few facts the gate needs.
            Some(Phase::RequestHeaders(headers)) => Request::read(headers.lines(), &self.rules),
            _ => return Err(Status::invalid_argument("the first message must carry request headers")),
        };
        let (verdict, flight) = match self.gate.judge(&request, deadline).await {
            Verdict::Allow(mut pass) => (reply::allow(&request, &self.rules, &pass), pass.flight.take()),
            Verdict::Refuse(refusal) => (reply::refuse(&request, &refusal), None),
            Verdict::Move => return Err(Status::unavailable("this replica is shutting down")),
        };
        Ok(Response::new(Replies { verdict: Some(verdict), inbound, flight }))
    }
}

fn deadline<T>(request: &tonic::Request<T>, arrived: Instant) -> Deadline {
    request
        .metadata()
        .get(DEADLINE_METADATA)
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .map_or(Deadline::NONE, |timeout| Deadline::after(arrived, Duration::from_millis(timeout)))
}

/// The messages to Envoy: the verdict, then an empty answer to whatever else it sends, until it ends the stream.
#[derive(Debug)]
struct Replies {
    verdict: Option<ProcessingResponse>,
    inbound: Streaming<ProcessingRequest>,
    /// Dropped with the stream, or at a half-close if that comes first.
    flight: Option<Flight>,
}

impl Stream for Replies {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(verdict) = self.verdict.take() {
            return Poll::Ready(Some(Ok(verdict)));
        }
        loop {
            let next = std::task::ready!(Pin::new(&mut self.inbound).poll_next(cx));
            match next {
                Some(Ok(ProcessingRequest { phase: Some(phase) })) => {
                    return Poll::Ready(Some(Ok(reply::unchanged(&phase))));
                }
                // A message without a phase only speaks of flow control, and wants no answer.
                Some(Ok(ProcessingRequest { phase: None })) => {}
                // A reset is how Envoy ends every stream: not an error, and nobody is left to tell.
                Some(Err(_)) | None => {
                    self.flight = None;
                    return Poll::Ready(None);
                }
            }
        }
    }
}

/// Protobuf with buffers that fit the messages. By default each stream starts with 8 KiB in each direction, which is
/// most of what a held request would cost.
#[derive(Debug, Clone, Copy)]
struct SmallBuffers;

impl SmallBuffers {
    fn settings() -> BufferSettings {
        BufferSettings::new(512, 32 * 1024)
    }
}

impl Codec for SmallBuffers {
    type Encode = ProcessingResponse;
    type Decode = ProcessingRequest;
    type Encoder = ProstEncoder<ProcessingResponse>;
    type Decoder = ProstDecoder<ProcessingRequest>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<ProcessingResponse, ProcessingRequest>::raw_encoder(Self::settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<ProcessingResponse, ProcessingRequest>::raw_decoder(Self::settings())
    }
}

struct Process(Arc<Door>);

impl StreamingService<ProcessingRequest> for Process {
    type Response = ProcessingResponse;
    type ResponseStream = Replies;
    type Future = BoxFuture<'static, Result<Response<Replies>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<ProcessingRequest>>) -> Self::Future {
        self.0.clone().process(request).boxed()
    }
}

impl tower::Service<http::Request<Body>> for ExtProc {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() != PROCESS {
            let unknown = Status::new(Code::Unimplemented, "no such method").into_http();
            return futures::future::ready(Ok(unknown)).boxed();
        }
        let door = self.door.clone();
        async move { Ok(Grpc::new(SmallBuffers).streaming(Process(door), request).await) }.boxed()
    }
}

impl NamedService for ExtProc {
    const NAME: &'static str = "envoy.service.ext_proc.v3.ExternalProcessor";
}
