//! The main door, spoken to by a gRPC client in this process: no Envoy, no store.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::num::NonZeroUsize;
use std::thread;
use std::time::Duration;

use bouncer::app::App;
use bouncer::config::{self, Address};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Phase;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Reply;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ImmediateResponse, ProcessingRequest, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::value::Kind;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// Longer than anything here takes on a busy machine; no test waits for it to pass.
const PATIENCE: Duration = Duration::from_secs(30);

const CONFIG: &str = r"
listen: { grpc: '127.0.0.1:0', admin: '127.0.0.1:0' }
public: [/open]
tiers:
  - { name: gold, rate: 1000/s, burst: 1000, queue: { length: 100, max_wait: 20s } }
  - { name: free, rate: 1/day, burst: 2, queue: { length: 1, max_wait: 20s } }
tenants:
  - { id: acme, tier: gold, keys: [key-gold] }
  - { id: initech, tier: free, keys: [key-free] }
pools: [{ name: default, max_in_flight: 1 }]
";

/// A replica on its own threads, stopped on drop.
struct Replica {
    address: Address,
    admin: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Replica {
    fn start(extra: &str) -> Self {
        let extra = if extra.is_empty() { "shutdown: { delay: 0s }" } else { extra };
        Self::start_with(&format!("{CONFIG}{extra}\n"))
    }

    fn start_with(yaml: &str) -> Self {
        let config = config::from_yaml(yaml).unwrap();
        let app = App::bind(&config, NonZeroUsize::new(2).unwrap()).unwrap();
        let (address, admin) = (app.grpc_address().clone(), app.admin_address().unwrap().to_string());
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(app.run(async move { drop(stopped.await) })).unwrap();
        });
        Self { address, admin, stop: Some(stop), thread: Some(thread) }
    }

    async fn channel(&self) -> Channel {
        let endpoint = match &self.address {
            Address::Tcp(address) => format!("http://{address}"),
            Address::Unix(path) => format!("unix:{}", path.display()),
        };
        Endpoint::from_shared(endpoint).unwrap().connect().await.unwrap()
    }

    async fn client(&self) -> ExternalProcessorClient<Channel> {
        ExternalProcessorClient::new(self.channel().await)
    }

    async fn admin(&self, path: &str) -> (u16, serde_json::Value) {
        let response = reqwest::get(format!("http://{}{path}", self.admin)).await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn in_flight_and_waiting(&self) -> (u64, u64) {
        let (_, stats) = self.admin("/stats").await;
        let pool = &stats["pools"][0];
        (pool["in_flight"].as_u64().unwrap(), pool["waiting"].as_u64().unwrap())
    }

    /// Waits until the pool stands so.
    async fn settled(&self, in_flight: u64, waiting: u64) {
        let reached = async {
            while self.in_flight_and_waiting().await != (in_flight, waiting) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let settled = tokio::time::timeout(PATIENCE, reached).await;
        assert!(settled.is_ok(), "expected {:?}, found {:?}", (in_flight, waiting), self.in_flight_and_waiting().await);
    }

    fn stop(&mut self) {
        drop(self.stop.take());
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.stop();
        let ended = self.thread.take().map(thread::JoinHandle::join);
        if !thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

fn line(name: &str, value: &str) -> HeaderValue {
    HeaderValue { key: name.into(), raw_value: value.into(), ..Default::default() }
}

fn headers(lines: &[(&str, &str)]) -> ProcessingRequest {
    let mut all = vec![line(":method", "GET"), line(":path", "/"), line(":authority", "test")];
    for (name, value) in lines {
        all.retain(|known| known.key != *name || !name.starts_with(':'));
        all.push(line(name, value));
    }
    let headers = HttpHeaders { headers: Some(HeaderMap { headers: all }), ..Default::default() };
    message(Phase::RequestHeaders(headers))
}

fn message(phase: Phase) -> ProcessingRequest {
    ProcessingRequest { request: Some(phase), ..Default::default() }
}

/// One stream as Envoy opens it: headers sent, the sending side left open.
struct Stream {
    send: mpsc::UnboundedSender<ProcessingRequest>,
    replies: Streaming<ProcessingResponse>,
    verdict: ProcessingResponse,
}

async fn open(client: &ExternalProcessorClient<Channel>, first: ProcessingRequest) -> Result<Stream, Status> {
    open_with(client, first, None).await
}

async fn open_with(
    client: &ExternalProcessorClient<Channel>,
    first: ProcessingRequest,
    deadline_ms: Option<&'static str>,
) -> Result<Stream, Status> {
    let (send, receive) = mpsc::unbounded_channel();
    send.send(first).unwrap();
    let mut request = tonic::Request::new(UnboundedReceiverStream::new(receive));
    if let Some(deadline) = deadline_ms {
        request.metadata_mut().insert("bouncer-deadline-ms", MetadataValue::from_static(deadline));
    }
    let opened = tokio::time::timeout(PATIENCE, client.clone().process(request)).await.expect("an answer in time");
    let mut replies = opened?.into_inner();
    let verdict = replies.message().await?.expect("a verdict");
    Ok(Stream { send, replies, verdict })
}

async fn open_key(client: &ExternalProcessorClient<Channel>, key: &str) -> Stream {
    open(client, headers(&[("x-api-key", key)])).await.unwrap()
}

impl Stream {
    fn allowed(&self) -> bool {
        matches!(self.verdict.response, Some(Reply::RequestHeaders(_)))
    }

    fn refusal(&self) -> &ImmediateResponse {
        match &self.verdict.response {
            Some(Reply::ImmediateResponse(refusal)) => refusal,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    fn status(&self) -> i32 {
        self.refusal().status.unwrap().code
    }

    /// The header that a refusal sets.
    fn header(&self, name: &str) -> Option<String> {
        let set = &self.refusal().headers.as_ref()?.set_headers;
        set.iter().find_map(|set| {
            let header = set.header.as_ref()?;
            (header.key == name).then(|| String::from_utf8(header.raw_value.clone()).unwrap())
        })
    }

    fn metadata(&self, name: &str) -> Option<String> {
        let Kind::StructValue(Struct { fields }) =
            self.verdict.dynamic_metadata.as_ref()?.fields.get("bouncer")?.kind.clone()?
        else {
            return None;
        };
        match fields.get(name)?.kind.clone()? {
            Kind::StringValue(text) => Some(text),
            other => panic!("{name} is {other:?}"),
        }
    }

    async fn ask(&mut self, phase: Phase) -> Reply {
        self.send.send(message(phase)).unwrap();
        self.replies.message().await.unwrap().expect("a reply").response.unwrap()
    }
}

fn mutation(stream: &Stream) -> (Vec<(String, String)>, Vec<String>) {
    let Some(Reply::RequestHeaders(reply)) = &stream.verdict.response else { panic!("not allowed") };
    let mutation = reply.response.as_ref().unwrap().header_mutation.clone().unwrap();
    let set = mutation.set_headers.iter().map(|set| {
        let header = set.header.as_ref().unwrap();
        (header.key.clone(), String::from_utf8(header.raw_value.clone()).unwrap())
    });
    (set.collect(), mutation.remove_headers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_is_held_by_the_stream_and_given_back_when_the_stream_is_reset() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let stream = open_key(&client, "key-gold").await;
    assert!(stream.allowed());
    replica.settled(1, 0).await;
    drop(stream);
    replica.settled(0, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_is_given_back_when_envoy_half_closes() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let Stream { send, mut replies, .. } = open_key(&client, "key-gold").await;
    drop(send);
    assert!(replies.message().await.unwrap().is_none(), "the stream ends");
    replica.settled(0, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_is_given_back_when_the_connection_is_lost() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let waiting = replica.client().await;
    let stream = open_key(&client, "key-gold").await;
    let held = tokio::spawn(async move { open_key(&waiting, "key-gold").await });
    replica.settled(1, 1).await;
    drop((stream, client));
    assert!(held.await.unwrap().allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_before_the_verdict_not_even_response_headers() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let first = open_key(&client, "key-gold").await;
    let (send, receive) = mpsc::unbounded_channel();
    send.send(headers(&[("x-api-key", "key-gold")])).unwrap();
    let mut second = client.clone();
    let call = second.process(UnboundedReceiverStream::new(receive));
    tokio::pin!(call);
    tokio::select! {
        opened = &mut call => panic!("headers came while the request was held: {opened:?}"),
        () = replica.settled(1, 1) => {}
    }
    drop(first);
    let mut replies = call.await.unwrap().into_inner();
    assert!(matches!(replies.message().await.unwrap().unwrap().response, Some(Reply::RequestHeaders(_))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_resets_its_stream_while_held_leaves_the_queue() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let first = open_key(&client, "key-gold").await;
    let other = client.clone();
    let held = tokio::spawn(async move { open_key(&other, "key-gold").await });
    replica.settled(1, 1).await;
    held.abort();
    replica.settled(1, 0).await;
    drop(first);
    replica.settled(0, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_streams_opened_and_reset_leave_nothing_behind() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let mut calls = tokio::task::JoinSet::new();
    for number in 0..1000u32 {
        let client = client.clone();
        calls.spawn(async move {
            let (send, receive) = mpsc::unbounded_channel();
            send.send(headers(&[("x-api-key", "key-gold")])).unwrap();
            let mut client = client;
            let call = client.process(UnboundedReceiverStream::new(receive));
            // Some go away at once, some while they are held, some in flight.
            let patience = Duration::from_millis(u64::from(number % 7));
            let _ = tokio::time::timeout(patience, call).await;
            drop(send);
        });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
    replica.settled(0, 0).await;
    assert!(open_key(&client, "key-gold").await.allowed(), "and the connection is still good");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_gets_no_say_in_who_it_is_and_its_credential_goes_no_further() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let lines = [
        ("x-api-key", "key-gold"),
        ("x-tenant-id", "globex"),
        ("x_tenant_id", "globex"),
        ("x-tenant_tier", "gold"),
        ("accept", "*/*"),
    ];
    let stream = open(&client, headers(&lines)).await.unwrap();
    let (set, mut removed) = mutation(&stream);
    removed.sort();
    assert_eq!(removed, ["x-api-key", "x-tenant_tier", "x_tenant_id"]);
    assert_eq!(set, [("x-tenant-id".into(), "acme".into()), ("x-tenant-tier".into(), "gold".into())]);
    assert_eq!(stream.metadata("verdict").as_deref(), Some("allow"));
    assert_eq!(stream.metadata("tenant").as_deref(), Some("acme"));
    assert_eq!(stream.metadata("tier").as_deref(), Some("gold"));
    assert_eq!(stream.metadata("limit").as_deref(), Some("1000"));
    assert_eq!(stream.metadata("remaining").as_deref(), Some("999"));
    assert_eq!(stream.metadata("reset").as_deref(), Some("1"));
    assert_eq!(stream.metadata("wait_ms").as_deref(), Some("0"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_public_path_and_a_preflight_take_no_slot_and_ask_for_no_further_phase() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let public = [(":path", "/open?x=1"), ("x-api-key", "key-gold"), ("x-tenant-id", "globex")];
    let preflight = [
        (":method", "OPTIONS"),
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("x-api-key", "key-gold"),
        ("x-tenant-id", "globex"),
    ];
    for lines in [&public[..], &preflight[..]] {
        let stream = open(&client, headers(lines)).await.unwrap();
        assert!(stream.allowed());
        assert_eq!(stream.metadata("tenant"), None);
        assert_eq!(stream.metadata("verdict").as_deref(), Some("allow"));
        let skip_all = ProcessingMode {
            request_header_mode: 2,
            response_header_mode: 2,
            request_body_mode: 0,
            response_body_mode: 0,
            request_trailer_mode: 2,
            response_trailer_mode: 2,
        };
        assert_eq!(stream.verdict.mode_override, Some(skip_all));
        assert_eq!(replica.in_flight_and_waiting().await, (0, 0));
        let (set, mut removed) = mutation(&stream);
        removed.sort();
        assert_eq!((set.len(), removed), (0, vec!["x-api-key".to_owned(), "x-tenant-id".to_owned()]));
    }
    assert_eq!(open_key(&client, "key-gold").await.verdict.mode_override, None, "one with a slot stays open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_say_what_the_table_of_answers_says() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let missing = open(&client, headers(&[])).await.unwrap();
    assert_eq!(missing.status(), 401);
    assert_eq!(missing.header("www-authenticate").as_deref(), Some(r#"Bearer realm="bouncer""#));
    let invalid = open_key(&client, "key-nobody").await;
    assert_eq!(invalid.status(), 401);
    assert_eq!(invalid.header("www-authenticate").as_deref(), Some(r#"Bearer realm="bouncer", error="invalid_token""#));
    drop(open_key(&client, "key-free").await);
    replica.settled(0, 0).await;
    drop(open_key(&client, "key-free").await);
    let limited = open_key(&client, "key-free").await;
    assert_eq!(limited.status(), 429);
    assert_eq!(limited.header("x-ratelimit-limit").as_deref(), Some("2"));
    assert_eq!(limited.header("x-ratelimit-remaining").as_deref(), Some("0"));
    assert!(limited.header("x-ratelimit-reset").unwrap().parse::<u64>().unwrap() > 86_400);
    let retry_after: u64 = limited.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=86_400).contains(&retry_after), "{retry_after}");
    assert_eq!(limited.header("content-type").as_deref(), Some("application/problem+json"));
    let body: serde_json::Value = serde_json::from_slice(&limited.refusal().body).unwrap();
    assert_eq!(body["error"], "rate_limited");
    assert_eq!(limited.metadata("verdict").as_deref(), Some("rate_limited"));
    assert_eq!(limited.metadata("tier").as_deref(), Some("free"));
    assert_eq!(limited.header("access-control-allow-origin"), None, "nobody asked from another origin");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_is_refused_with_its_own_status() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let grpc = ("content-type", "application/grpc");
    let missing = open(&client, headers(&[grpc])).await.unwrap();
    assert_eq!(missing.refusal().grpc_status.unwrap().status, 16);
    assert_eq!(missing.refusal().body, b"missing_api_key");
    for _ in 0..2 {
        drop(open_key(&client, "key-free").await);
        replica.settled(0, 0).await;
    }
    let limited = open(&client, headers(&[grpc, ("x-api-key", "key-free")])).await.unwrap();
    assert_eq!(limited.refusal().grpc_status.unwrap().status, 8);
    assert!(limited.header("retry-after").is_some());
    let _in_use = open_key(&client, "key-gold").await;
    let shed = open_with(&client, headers(&[grpc, ("x-api-key", "key-gold")]), Some("50")).await.unwrap();
    assert_eq!(shed.refusal().grpc_status.unwrap().status, 14);
    assert_eq!(shed.refusal().body, b"queue_timeout");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cross_origin_refusal_can_be_read_by_the_script_that_asked() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let refused = open(&client, headers(&[("origin", "https://app.example")])).await.unwrap();
    assert_eq!(refused.header("access-control-allow-origin").as_deref(), Some("*"));
    let exposed = refused.header("access-control-expose-headers").unwrap();
    for name in ["retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"] {
        assert!(exposed.contains(name), "{name} is not in {exposed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_header_has_both_a_value_and_a_raw_value() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let check = |set: &[HeaderValueOption]| {
        assert!(!set.is_empty());
        for set in set {
            let header = set.header.as_ref().unwrap();
            assert!(header.value.is_empty() && !header.raw_value.is_empty(), "{header:?}");
        }
    };
    let refused = open(&client, headers(&[])).await.unwrap();
    check(&refused.refusal().headers.as_ref().unwrap().set_headers);
    let allowed = open_key(&client, "key-gold").await;
    let Some(Reply::RequestHeaders(reply)) = &allowed.verdict.response else { panic!("not allowed") };
    check(&reply.response.as_ref().unwrap().header_mutation.as_ref().unwrap().set_headers);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_later_phase_is_answered_in_kind_and_the_slot_is_kept() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let mut stream = open_key(&client, "key-gold").await;
    assert!(matches!(stream.ask(Phase::RequestBody(HttpBody::default())).await, Reply::RequestBody(_)));
    assert!(matches!(stream.ask(Phase::RequestTrailers(HttpTrailers::default())).await, Reply::RequestTrailers(_)));
    assert!(matches!(stream.ask(Phase::ResponseHeaders(HttpHeaders::default())).await, Reply::ResponseHeaders(_)));
    assert!(matches!(stream.ask(Phase::ResponseBody(HttpBody::default())).await, Reply::ResponseBody(_)));
    assert!(matches!(stream.ask(Phase::ResponseTrailers(HttpTrailers::default())).await, Reply::ResponseTrailers(_)));
    assert_eq!(replica.in_flight_and_waiting().await, (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_does_not_begin_with_request_headers_is_an_error() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let wrong = open(&client, message(Phase::RequestBody(HttpBody::default()))).await;
    assert_eq!(wrong.err().unwrap().code(), Code::InvalidArgument);
    let empty = open(&client, ProcessingRequest::default()).await;
    assert_eq!(empty.err().unwrap().code(), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_ends_before_the_deadline_that_envoy_announced() {
    let replica = Replica::start("");
    let client = replica.client().await;
    let _in_use = open_key(&client, "key-gold").await;
    let shed = open_with(&client, headers(&[("x-api-key", "key-gold")]), Some("300")).await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&shed.refusal().body).unwrap();
    assert_eq!(body["error"], "queue_timeout", "without the deadline it would have waited 20 s");
    let waited: u64 = shed.metadata("wait_ms").unwrap().parse().unwrap();
    assert!((250..300).contains(&waited), "held for {waited} ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nonsense_deadline_is_no_deadline() {
    let replica = Replica::start("");
    let client = replica.client().await;
    for deadline in ["-1", "soon", "1e99", "99999999999999999999999"] {
        let stream = open_with(&client, headers(&[("x-api-key", "key-gold")]), Some(deadline)).await.unwrap();
        assert!(stream.allowed());
        drop(stream);
        replica.settled(0, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_serves_as_a_port_does_and_is_removed_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bouncer.sock");
    let yaml = CONFIG.replace("grpc: '127.0.0.1:0'", &format!("grpc: 'unix:{}'", path.display()));
    let replica = Replica::start_with(&format!("{yaml}shutdown: {{ delay: 0s }}\n"));
    let client = replica.client().await;
    assert!(open_key(&client, "key-gold").await.allowed());
    drop(client);
    drop(replica);
    assert!(!path.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_successor_has_the_unix_socket_while_its_predecessor_drains_and_after() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bouncer.sock");
    let yaml = CONFIG.replace("grpc: '127.0.0.1:0'", &format!("grpc: 'unix:{}'", path.display()));
    let yaml = format!("{yaml}shutdown: {{ delay: 0s }}\n");
    let mut draining = Replica::start_with(&yaml);
    let client = draining.client().await;
    let in_flight = open_key(&client, "key-gold").await;
    draining.stop();
    let gone = async {
        while path.exists() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("no socket file of a listener that is closed");

    let successor = Replica::start_with(&yaml);
    drop((in_flight, client));
    drop(draining);
    assert!(open_key(&successor.client().await, "key-gold").await.allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_shutdown_health_says_no_first_and_judging_goes_on_until_the_delay_is_over() {
    let mut replica = Replica::start("shutdown: { delay: 1s, drain: 20s }");
    let client = replica.client().await;
    let mut health = HealthClient::new(replica.channel().await);
    let ask = HealthCheckRequest::default();
    let status = health.check(ask.clone()).await.unwrap().into_inner().status();
    assert_eq!(status, ServingStatus::Serving);
    assert_eq!(replica.admin("/ready").await.0, 200);
    let mut watch = health.watch(ask).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let in_flight = open_key(&client, "key-gold").await;
    let other = client.clone();
    let held = tokio::spawn(async move { open_key(&other, "key-gold").await });
    replica.settled(1, 1).await;

    replica.stop();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    assert_eq!(replica.admin("/ready").await, (503, serde_json::json!({ "status": "draining", "stores": {} })));
    assert_eq!(replica.admin("/health").await.0, 200, "alive is not ready");
    assert!(open(&client, headers(&[(":path", "/open")])).await.unwrap().allowed(), "judging goes on");

    let held = held.await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&held.refusal().body).unwrap();
    assert_eq!((held.status(), body["error"].as_str()), (503, Some("shutting_down")));
    assert_eq!(held.header("retry-after").as_deref(), Some("1"));
    assert_eq!(replica.in_flight_and_waiting().await, (1, 0), "what is in flight stays so");
    drop((watch, health, in_flight, client, held));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_requests_move_before_any_header_where_the_configuration_says_so() {
    let mut replica = Replica::start("shutdown: { delay: 0s, drain: 20s, held: move }");
    let client = replica.client().await;
    let in_flight = open_key(&client, "key-gold").await;
    let other = client.clone();
    let held = tokio::spawn(async move { open(&other, headers(&[("x-api-key", "key-gold")])).await });
    replica.settled(1, 1).await;
    replica.stop();
    let status = held.await.unwrap().err().expect("no verdict");
    assert_eq!(status.code(), Code::Unavailable);
    drop(in_flight);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_comes_after_the_drain_time_even_with_streams_open() {
    let mut replica = Replica::start("shutdown: { delay: 0s, drain: 100ms }");
    let client = replica.client().await;
    let in_flight = open_key(&client, "key-gold").await;
    replica.stop();
    let thread = replica.thread.take().unwrap();
    tokio::task::spawn_blocking(move || thread.join()).await.unwrap().unwrap();
    replica.thread = Some(thread::spawn(|| {}));
    drop(in_flight);
}
