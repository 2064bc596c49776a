//! Sixty-four clients for twenty seconds who do everything a client can do, through a real Envoy. The upstream's own
//! record is the judge: the cap is never exceeded, and nothing is left behind.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt, stream};
use reqwest::{Body, Method, RequestBuilder, Response};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::{self, Message};
use tonic::Code;

use support::client::{Answer, Client};
use support::dice::Dice;
use support::grpc;
use support::occupant::Occupant;
use support::stack::{Stack, StackOptions};
use support::upstream::micros;
use support::websocket;

const CAP: usize = 10;
const CLIENTS: u64 = 64;
const LENGTH: Duration = Duration::from_secs(20);
/// What the upstream may take to notice that a request was cut off.
const GRACE: Duration = Duration::from_millis(100);

/// Nobody is ever rate limited, and the queues hold everybody.
const CONFIG: &str = "
tiers:
  - { name: T3, rate: 1000000/s, burst: 1000000, queue: { length: 1000, max_wait: 5s } }
  - { name: T2, rate: 1000000/s, burst: 1000000, queue: { length: 1000, max_wait: 5s } }
  - { name: T1, rate: 1000000/s, burst: 1000000, queue: { length: 1000, max_wait: 5s } }
tenants:
  - { id: acme, tier: T3, keys: [key_t3_demo] }
  - { id: globex, tier: T2, keys: [key_t2_demo] }
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 10 }
";

const KEYS: [(&str, u64); 3] = [("key_t3_demo", 1), ("key_t2_demo", 1), ("key_t1_demo", 1)];

/// What a client may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plain,
    Streamed,
    /// Leaves soon, which is while it is held as long as all slots are taken.
    AbortedEarly,
    AbortedBeforeHead,
    AbortedInBody,
    ResetBeforeHead,
    ResetInBody,
    TimeoutBeforeHead,
    TimeoutInBody,
    Head,
    Upload,
    UploadAborted,
    /// Answered by the upstream before it has read the upload.
    UploadUnread,
    WebSocket,
    WebSocketAborted,
    Http2,
    Http2Aborted,
    GrpcUnary,
    GrpcWatchAborted,
}

/// How often each of them happens. What keeps a slot for long is rare, or nothing else would get a turn.
const MIX: [(Kind, u64); 19] = [
    (Kind::Plain, 20),
    (Kind::Streamed, 3),
    (Kind::AbortedEarly, 20),
    (Kind::AbortedBeforeHead, 5),
    (Kind::AbortedInBody, 5),
    (Kind::ResetBeforeHead, 6),
    (Kind::ResetInBody, 6),
    (Kind::TimeoutBeforeHead, 4),
    (Kind::TimeoutInBody, 4),
    (Kind::Head, 10),
    (Kind::Upload, 4),
    (Kind::UploadAborted, 5),
    (Kind::UploadUnread, 3),
    (Kind::WebSocket, 6),
    (Kind::WebSocketAborted, 6),
    (Kind::Http2, 10),
    (Kind::Http2Aborted, 8),
    (Kind::GrpcUnary, 8),
    (Kind::GrpcWatchAborted, 6),
];

/// How a request came to an early end, where not by the upstream itself.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// By the client, which began to leave at this instant of the record's clock.
    Client(u64),
    /// By Envoy's timeout, at an instant that only Envoy knows.
    Envoy,
}

/// What the clients know afterwards.
#[derive(Default)]
struct Log {
    cuts: HashMap<String, Cut>,
    /// How often each kind was served as far as it was meant to go, and how often it was shed instead.
    served: BTreeMap<Kind, u64>,
    shed: BTreeMap<Kind, u64>,
}

/// How one request went, by its client's account.
enum Fate {
    Served,
    Shed,
    Cut(Cut),
}

/// What all clients share.
struct Storm {
    http1: Client,
    http2: Client,
    address: std::net::SocketAddr,
    grpc: tonic_health::pb::health_client::HealthClient<tonic::transport::Channel>,
    clock: Box<dyn Fn() -> u64 + Send + Sync>,
    upload: bytes::Bytes,
    log: Mutex<Log>,
    number: AtomicU64,
}

impl Storm {
    async fn new(stack: &Stack) -> Arc<Self> {
        Arc::new(Self {
            http1: stack.client(),
            http2: stack.http2_client(),
            address: stack.envoy.address(),
            grpc: grpc::connect(stack.envoy.address()).await,
            clock: Box::new(stack.upstream.clock()),
            upload: vec![b'x'; 8 << 20].into(),
            log: Mutex::default(),
            number: AtomicU64::new(0),
        })
    }

    /// One client: one thing after another until the end.
    async fn client(self: Arc<Self>, seed: u64, end: Instant) {
        let mut dice = Dice::new(seed);
        while Instant::now() < end {
            let (kind, key) = (dice.pick(&MIX), dice.pick(&KEYS));
            let id = format!("{kind:?}-{}", self.number.fetch_add(1, Ordering::Relaxed));
            let fate = self.act(kind, key, &id, &mut dice).await;
            let mut log = self.log.lock().unwrap();
            match fate {
                Fate::Served => *log.served.entry(kind).or_default() += 1,
                Fate::Shed => *log.shed.entry(kind).or_default() += 1,
                Fate::Cut(cut) => {
                    *log.served.entry(kind).or_default() += 1;
                    log.cuts.insert(id, cut);
                }
            }
        }
    }

    async fn act(&self, kind: Kind, key: &str, id: &str, dice: &mut Dice) -> Fate {
        let send = |client: &Client, method, path: &str| {
            client.request(method, path).header("x-api-key", key).header("x-test-id", id)
        };
        let get = |path: &str| send(&self.http1, Method::GET, path);
        match kind {
            Kind::Plain => expect(get("/anything"), 200).await,
            Kind::Streamed => {
                let chunks = dice.within(4..8);
                expect(get(&format!("/stream/{chunks}/250")), 200).await
            }
            Kind::AbortedEarly => self.abort(get("/delay/5"), dice.millis(1..120)).await,
            Kind::AbortedBeforeHead => self.abort(get("/delay/5"), dice.millis(300..900)).await,
            Kind::AbortedInBody => self.abort_in_body(get("/stream/1000/20"), dice.millis(0..200)).await,
            Kind::ResetBeforeHead => expect(get("/reset"), 503).await,
            Kind::ResetInBody => broken(get("/reset/body")).await,
            Kind::TimeoutBeforeHead => timed_out(expect(get("/delay/9"), 504).await),
            Kind::TimeoutInBody => timed_out(broken(get("/stream/999/20")).await),
            Kind::Head => expect(send(&self.http1, Method::HEAD, "/bytes/1000"), 200).await,
            Kind::Upload => expect(send(&self.http1, Method::POST, "/anything").body(self.upload.clone()), 200).await,
            Kind::UploadAborted => {
                let half = stream::once(async { Ok::<_, Infallible>("the first half") }).chain(stream::pending());
                let upload = send(&self.http1, Method::POST, "/anything").body(Body::wrap_stream(half));
                self.abort(upload, dice.millis(100..600)).await
            }
            Kind::UploadUnread => {
                unread(send(&self.http1, Method::POST, "/status/200").body(self.upload.clone())).await
            }
            Kind::WebSocket => self.websocket(key, id, true).await,
            Kind::WebSocketAborted => self.websocket(key, id, false).await,
            Kind::Http2 => expect(send(&self.http2, Method::GET, "/anything"), 200).await,
            Kind::Http2Aborted => {
                self.abort_in_body(send(&self.http2, Method::GET, "/stream/1000/20"), dice.millis(0..200)).await
            }
            Kind::GrpcUnary => self.unary(key, id).await,
            Kind::GrpcWatchAborted => self.watch(key, id, dice.millis(0..200)).await,
        }
    }

    fn leave(&self) -> Fate {
        Fate::Cut(Cut::Client((self.clock)()))
    }

    /// Leaves after so long, if there is no answer by then.
    async fn abort(&self, request: RequestBuilder, after: Duration) -> Fate {
        let mut sent = Box::pin(request.send());
        match timeout(after, &mut sent).await {
            Err(_) => self.leave(),
            Ok(answered) => shed(answered.unwrap()).await,
        }
    }

    /// Leaves so long after the first chunk of the body.
    async fn abort_in_body(&self, request: RequestBuilder, after: Duration) -> Fate {
        let response = request.send().await.unwrap();
        if response.status() != 200 {
            return shed(response).await;
        }
        let mut body = response.bytes_stream();
        body.next().await.unwrap().unwrap();
        let read_on = async { while body.next().await.is_some_and(|chunk| chunk.is_ok()) {} };
        timeout(after, read_on).await.expect_err("the stream is longer than that");
        self.leave()
    }

    async fn websocket(&self, key: &str, id: &str, polite: bool) -> Fate {
        let mut socket = match websocket::open(self.address, "/ws", key, id).await {
            Ok(socket) => socket,
            Err(tungstenite::Error::Http(response)) if response.status() == 503 => return Fate::Shed,
            Err(error) => panic!("no socket: {error}"),
        };
        for text in ["one", "two"] {
            socket.send(Message::text(text)).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap(), Message::text(text));
        }
        if !polite {
            return self.leave();
        }
        socket.close(None).await.unwrap();
        while socket.next().await.is_some_and(|message| message.is_ok()) {}
        Fate::Served
    }

    async fn unary(&self, key: &str, id: &str) -> Fate {
        match self.grpc.clone().check(grpc::question(Some(key), Some(id))).await {
            Ok(_) => Fate::Served,
            Err(status) => shed_grpc(&status),
        }
    }

    async fn watch(&self, key: &str, id: &str, after: Duration) -> Fate {
        let mut watch = match self.grpc.clone().watch(grpc::question(Some(key), Some(id))).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => return shed_grpc(&status),
        };
        watch.message().await.unwrap().expect("the present state");
        timeout(after, watch.message()).await.expect_err("nothing changes");
        self.leave()
    }
}

/// The whole answer has this status, or the request was shed.
async fn expect(request: RequestBuilder, status: u16) -> Fate {
    let response = request.send().await.unwrap();
    let ours = response.status().as_u16() != status || is_problem(&response);
    if ours {
        return shed(response).await;
    }
    response.bytes().await.unwrap();
    Fate::Served
}

/// The answer breaks off in its body, or the request was shed.
async fn broken(request: RequestBuilder) -> Fate {
    let response = request.send().await.unwrap();
    if response.status() != 200 {
        return shed(response).await;
    }
    response.bytes().await.expect_err("a body that breaks off");
    Fate::Served
}

/// How the rest of the upload ends is between Envoy and the upstream: with the answer, or with a broken connection.
async fn unread(request: RequestBuilder) -> Fate {
    match request.send().await {
        Ok(response) if is_problem(&response) => shed(response).await,
        Ok(_) | Err(_) => Fate::Served,
    }
}

fn timed_out(fate: Fate) -> Fate {
    if matches!(fate, Fate::Served) { Fate::Cut(Cut::Envoy) } else { fate }
}

/// Envoy's own answers and the upstream's are no problem documents.
fn is_problem(response: &Response) -> bool {
    response.headers().get("content-type").is_some_and(|kind| kind == "application/problem+json")
}

/// The only other thing that may happen: too long a wait.
async fn shed(response: Response) -> Fate {
    let answer = Answer::read(response).await.unwrap();
    // A HEAD is refused without a body.
    let reason = if answer.body.is_empty() { None } else { answer.error() };
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(matches!(reason.as_deref(), None | Some("queue_timeout")), "{}", answer.text());
    Fate::Shed
}

fn shed_grpc(status: &tonic::Status) -> Fate {
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "queue_timeout"));
    Fate::Shed
}

async fn stack() -> Stack {
    // Two paths that the upstream takes longer for than Envoy waits.
    let route = "              - match: { prefix: / }\n";
    let short = |prefix: &str| {
        format!(
            "              - match: {{ prefix: {prefix} }}\n                route: {{ cluster: upstream, timeout: 0.4s }}\n"
        )
    };
    let edited = format!("{}{}{route}", short("/delay/9"), short("/stream/999/"));
    Stack::start(StackOptions::new(CONFIG).edit_envoy(route, edited)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_every_kind_of_request_never_exceeds_the_cap_and_leaves_nothing_behind() {
    let seed = std::env::var("STORM_SEED").map_or(20_250_101, |seed| seed.parse().expect("a number"));
    println!("STORM_SEED={seed}");
    let stack = stack().await;
    let storm = Storm::new(&stack).await;

    let end = Instant::now() + LENGTH;
    let mut clients: JoinSet<()> = (0..CLIENTS).map(|n| storm.clone().client(seed * CLIENTS + n, end)).collect();
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    stack.wait_until_quiet().await;

    let metrics = stack.metrics().await;
    let queued = metrics.count("bouncer_requests_total", &[("outcome", "queued")]);
    let abandoned = metrics.count("bouncer_abandoned_total", &[]);
    let log = std::mem::take(&mut *storm.log.lock().unwrap());
    println!("queued {queued}, left while held {abandoned}, served {:?}, shed {:?}", log.served, log.shed);
    for (kind, _) in MIX {
        assert!(log.served.get(&kind).is_some_and(|count| *count >= 5), "{kind:?} hardly happened");
    }
    assert!(queued > 300 && abandoned > 50, "a storm must make requests wait");

    assert_cap_was_kept(&stack, &log.cuts);
    assert_nothing_went_wrong(&stack).await;
    assert_all_slots_are_free(&stack).await;
}

/// A request counts to its end in the upstream. One that was cut off counts until it was cut, which the upstream must
/// notice within the grace: what it needs longer counts against the cap.
fn assert_cap_was_kept(stack: &Stack, cuts: &HashMap<String, Cut>) {
    let record = stack.record();
    let peak = record.peak_until(|entry| {
        let ended = entry.ended_us.expect("nothing is in flight");
        let noticed = ended.saturating_sub(micros(GRACE));
        match cuts.get(&entry.id) {
            None => ended,
            Some(Cut::Envoy) => noticed,
            Some(Cut::Client(left)) => noticed.max(*left).min(ended),
        }
    });
    println!("{} at the upstream, at most {peak} together, {} by its bare record", record.total, record.maximum);
    assert_eq!(record.total, record.requests.len(), "every request of the storm named itself");
    assert_eq!(peak, CAP, "the storm fills the cap and never exceeds it");
}

async fn assert_nothing_went_wrong(stack: &Stack) {
    let said = stack.bouncer.log_text();
    // That limits are kept in the process, and whose keys these are, is what this test asked for.
    let complaints: Vec<_> = said
        .lines()
        .filter(|line| line.contains("ERROR") || line.contains("WARN"))
        .filter(|line| !line.contains("redis is absent") && !line.contains("public example"))
        .collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
    let envoy = stack.envoy.stats().await;
    for name in [
        "http.main.ext_proc.bouncer.streams_failed",
        "http.main.ext_proc.bouncer.failure_mode_allowed",
        "http.main.ext_proc.bouncer.message_timeouts",
        "http.main.rbac.bouncer.denied",
        "cluster.bouncer.upstream_rq_active",
        "cluster.bouncer.upstream_rq_pending_overflow",
        "cluster.upstream.upstream_rq_pending_overflow",
    ] {
        assert_eq!(envoy.get(name), Some(&0), "{name}");
    }
}

/// As many as the cap get in flight at once, and the next one is held.
async fn assert_all_slots_are_free(stack: &Stack) {
    let client = stack.client();
    let occupants: Vec<_> = (0..CAP).map(|n| Occupant::start(&client, &format!("after-{n}"), "key_t1_demo")).collect();
    stack.wait_until_in_flight(CAP).await;
    let one_more = Occupant::start(&client, "one-more", "key_t1_demo");
    stack.wait_until_held("T1", 1).await;
    assert_eq!(stack.record().current, CAP);
    for occupant in occupants {
        assert_eq!(occupant.finish().await.status, 200);
    }
    assert_eq!(one_more.finish().await.status, 200);
    stack.wait_until_quiet().await;
}
