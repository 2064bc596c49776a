//! A bouncer or an Envoy that dies or freezes: what is under way ends well, what is held is answered, nothing unjudged
//! passes, and nothing stays taken.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::client::{Answer, Client};
use support::stack::{Stack, StackOptions};
use support::upstream;
use support::wait::eventually;
use tokio::task::JoinHandle;

const KEY: &str = "key_t1_demo";

/// Two slots, and a wait that no test is as long as.
const CONFIG: &str = "
tiers:
  - { name: T1, rate: 1000/s, burst: 1000, queue: { length: 100, max_wait: 11s } }
tenants:
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 2 }
shutdown: { delay: 1s, drain: 20s, held: move }
";

fn get(client: &Client, id: &str, path: &str) -> JoinHandle<Answer> {
    let (client, id, path) = (client.clone(), id.to_owned(), path.to_owned());
    tokio::spawn(async move { client.get_as(&id, &path, KEY).await })
}

/// Starts `count` requests of this path, named for it.
fn get_many(client: &Client, what: &str, count: u32, path: &str) -> Vec<JoinHandle<Answer>> {
    (0..count).map(|n| get(client, &format!("{what}-{n}"), path)).collect()
}

async fn all(requests: Vec<JoinHandle<Answer>>) -> Vec<Answer> {
    let mut answers = Vec::new();
    for request in requests {
        answers.push(request.await.unwrap());
    }
    answers
}

fn statuses(answers: &[Answer]) -> Vec<u16> {
    answers.iter().map(|answer| answer.status).collect()
}

/// Whether it is the answer of `/stream/{chunks}/…`, to its last chunk.
fn assert_whole_stream(answer: &Answer, chunks: u32) {
    assert_eq!((answer.status, answer.text()), (200, upstream::chunks(chunks)));
}

fn assert_unavailable(answer: &Answer) {
    assert_eq!((answer.status, answer.error().as_deref()), (503, Some("unavailable")));
    assert!(answer.header("retry-after").is_some());
}

/// Requests are judged and served, one after the other and several at once.
async fn assert_all_is_well(stack: &Stack) {
    let client = stack.client();
    assert_eq!(client.get("/anything", None).await.status, 401);
    let served = all(get_many(&client, "well", 6, "/delay/0.05")).await;
    assert_eq!(statuses(&served), [200; 6]);
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn killed_bouncer_breaks_no_response_and_lets_nothing_unjudged_pass() {
    let mut stack = Stack::start(StackOptions::new(CONFIG)).await;
    let client = stack.client();
    let streams = get_many(&client, "stream", 2, "/stream/15/200");
    stack.wait_until_in_flight(2).await;
    let held = get_many(&client, "held", 8, "/anything");
    stack.wait_until_held("T1", 8).await;

    let killed = Instant::now();
    stack.bouncer.kill9();

    // The instant of the death, and long after it.
    let mut new = vec![client.get_as("new", "/anything", KEY).await];
    for answer in all(held).await {
        assert_unavailable(&answer);
    }
    assert!(killed.elapsed() < Duration::from_secs(5), "held requests were answered after {:?}", killed.elapsed());
    new.extend(all(get_many(&client, "new", 5, "/anything")).await);
    for answer in new {
        assert_unavailable(&answer);
    }
    for answer in all(streams).await {
        assert_whole_stream(&answer, 15);
    }
    let record = stack.record();
    assert!(record.order().iter().all(|id| id.starts_with("stream-")), "{:?}", record.order());

    stack.bouncer.start().await;
    stack.wait_until_healthy().await;
    assert_all_is_well(&stack).await;
}

#[tokio::test]
async fn frozen_bouncer_is_noticed_and_breaks_no_response() {
    let mut stack = Stack::start(StackOptions::new(CONFIG)).await;
    let client = stack.client();
    // Longer than Envoy needs to give the connection up.
    let stream = get(&client, "stream", "/stream/20/500");
    stack.wait_until_in_flight(1).await;

    stack.bouncer.process().freeze().await;

    // This one is sent before a health check can have failed, and waits until the connection is given up.
    let frozen = Instant::now();
    assert_unavailable(&client.get_as("first", "/anything", KEY).await);
    assert!(frozen.elapsed() < Duration::from_secs(10), "refused after {:?}", frozen.elapsed());
    let later = Instant::now();
    assert_unavailable(&client.get_as("later", "/anything", KEY).await);
    assert!(later.elapsed() < Duration::from_secs(2), "refused after {:?}", later.elapsed());
    assert_whole_stream(&stream.await.unwrap(), 20);
    assert_eq!(stack.record().order(), ["stream"]);

    stack.bouncer.process().signal(Signal::SIGCONT);
    stack.wait_until_healthy().await;
    assert_all_is_well(&stack).await;
}

#[tokio::test]
async fn frozen_envoy_loses_its_slots_and_places() {
    let stack = Stack::start(StackOptions::new(CONFIG)).await;
    let client = stack.client();
    let streams = get_many(&client, "stream", 2, "/stream/120/100");
    stack.wait_until_in_flight(2).await;
    let held = get_many(&client, "held", 3, "/anything");
    stack.wait_until_held("T1", 3).await;

    stack.envoy.process.freeze().await;

    assert_empty_within(&stack, Duration::from_secs(15)).await;
    // What it had under way when it stopped is not taken from it.
    stack.envoy.process.signal(Signal::SIGCONT);
    for answer in all(streams).await {
        assert_whole_stream(&answer, 120);
    }
    for answer in all(held).await {
        assert!(matches!(answer.status, 200 | 503), "{}", answer.status);
    }
    stack.wait_until_healthy().await;
    assert_all_is_well(&stack).await;
}

#[tokio::test]
async fn killed_envoy_gives_its_slots_and_places_back_at_once() {
    let mut stack = Stack::start(StackOptions::new(CONFIG)).await;
    let client = stack.client();
    let request = |path| client.request(reqwest::Method::GET, path).header("x-api-key", KEY).send();
    let streams = [request("/stream/100/100"), request("/stream/100/100")].map(tokio::spawn);
    stack.wait_until_in_flight(2).await;
    let held = [request("/anything"), request("/anything"), request("/anything")].map(tokio::spawn);
    stack.wait_until_held("T1", 3).await;

    stack.envoy.process.kill9();

    assert_empty_within(&stack, Duration::from_secs(2)).await;
    for request in held {
        assert!(request.await.unwrap().is_err(), "nobody is left to answer");
    }
    drop(streams);
    let metrics = stack.metrics().await;
    let queued = metrics.count("bouncer_requests_total", &[("tier", "T1"), ("outcome", "queued")]);
    assert_eq!(queued, 3);
    assert_eq!(stack.record().total, 2, "a request that nobody waits for reached the upstream");
}

/// By bouncer's account, whatever the upstream still does.
async fn assert_empty_within(stack: &Stack, within: Duration) {
    eventually("free slots and places", within, async || {
        let metrics = stack.metrics().await;
        let taken = metrics.sum("bouncer_in_flight", &[]) + metrics.sum("bouncer_queue_depth", &[]);
        (taken == 0.0).then_some(())
    })
    .await;
}

/// Two replicas with both slots of each taken by long streams, and so many requests held by each.
struct Pair {
    stack: Stack,
    streams: Vec<JoinHandle<Answer>>,
    held: Vec<JoinHandle<Answer>>,
}

impl Pair {
    const HELD_BY_EACH: u32 = 8;

    async fn start() -> Self {
        let stack = Stack::start(StackOptions::new(CONFIG).replicas(2)).await;
        let client = stack.client();
        let streams = get_many(&client, "stream", 4, "/stream/25/200");
        stack.wait_until_in_flight(4).await;
        let held = get_many(&client, "held", 2 * Self::HELD_BY_EACH, "/delay/0.05");
        stack.bouncer.wait_until_held("T1", Self::HELD_BY_EACH).await;
        stack.others[0].wait_until_held("T1", Self::HELD_BY_EACH).await;
        Self { stack, streams, held }
    }

    /// Everyone is served, new requests too, and each of them once.
    async fn assert_nothing_is_lost(self) {
        let client = self.stack.client();
        let new = get_many(&client, "new", 8, "/delay/0.05");
        for answer in all(self.streams).await {
            assert_whole_stream(&answer, 25);
        }
        let (held, new) = (all(self.held).await, all(new).await);
        assert_eq!((statuses(&held), statuses(&new)), (vec![200; held.len()], vec![200; new.len()]));
        let record = self.stack.record();
        let mut served = record.order();
        served.sort_unstable();
        served.dedup();
        assert_eq!((served.len(), record.total), (28, 28), "each request reaches the upstream once");
    }
}

#[tokio::test]
async fn requests_held_by_a_killed_replica_are_served_by_the_other() {
    let mut pair = Pair::start().await;
    pair.stack.bouncer.kill9();
    pair.stack.others[0].wait_until_held("T1", 2 * Pair::HELD_BY_EACH).await;
    pair.assert_nothing_is_lost().await;
}

#[tokio::test]
async fn replica_that_is_replaced_moves_what_it_holds_to_the_other() {
    let mut pair = Pair::start().await;
    let stopped = Instant::now();
    pair.stack.bouncer.terminate();
    pair.stack.others[0].wait_until_held("T1", 2 * Pair::HELD_BY_EACH).await;
    assert!(stopped.elapsed() >= Duration::from_secs(1), "moved before shutdown.delay: {:?}", stopped.elapsed());
    let status = pair.stack.bouncer.exit(Duration::from_secs(20)).await;
    assert_eq!(status.code(), Some(0));
    pair.assert_nothing_is_lost().await;
}
