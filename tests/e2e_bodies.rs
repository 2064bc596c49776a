//! Large bodies and large crowds through a real Envoy: neither costs bouncer memory, and nobody is lost.

mod support;

use std::time::Duration;

use reqwest::Method;
use tokio::task::{AbortHandle, JoinSet};

use support::client::{Answer, Client};
use support::occupant::Occupant;
use support::stack::{Stack, StackOptions};
use support::wait::eventually;

const CAP: usize = 50;
const CROWD: u32 = 1500;
const MIB: u64 = 1 << 20;

const CONFIG: &str = "
tiers:
  - { name: T1, rate: 1000000/s, burst: 1000000, queue: { length: 2000, max_wait: 60s } }
tenants:
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 50 }
";

/// A crowd waits as long as the slots are occupied, which is longer than the shipped hold on a busy machine.
async fn stack() -> Stack {
    let options = StackOptions::new(CONFIG)
        .edit_envoy("message_timeout: 12s", "message_timeout: 120s")
        .edit_envoy("key: bouncer-deadline-ms, value: \"12000\"", "key: bouncer-deadline-ms, value: \"120000\"");
    Stack::start(options).await
}

/// All slots in use until their occupants are told to end.
async fn occupy(stack: &Stack) -> Vec<Occupant> {
    let client = stack.client();
    let occupants = (0..CAP).map(|n| Occupant::start(&client, &format!("occupant-{n}"), "key_t1_demo")).collect();
    stack.wait_until_in_flight(CAP).await;
    occupants
}

/// So many requests, each on a connection of its own, all of them held.
async fn crowd(stack: &Stack) -> JoinSet<Answer> {
    let client = stack.client();
    let get = |client: Client| async move { client.get("/anything", Some("key_t1_demo")).await };
    let crowd = (0..CROWD).map(|_| get(client.clone())).collect();
    stack.wait_until_held("T1", CROWD).await;
    crowd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_32_mib_pass_in_both_directions_without_going_through_bouncer() {
    const SIZE: u64 = 32 * MIB;
    let mut stack = stack().await;
    let client = stack.client();
    // Whatever is allocated once, for any request.
    assert_eq!(client.get("/anything", Some("key_t1_demo")).await.status, 200);
    let before = stack.bouncer.process().resident_bytes();

    let up = client.request(Method::POST, "/anything").header("x-api-key", "key_t1_demo");
    let up = client.send(up.body(vec![b'x'; usize::try_from(SIZE).unwrap()])).await;
    let down = client.get(&format!("/bytes/{SIZE}"), Some("key_t1_demo")).await;

    assert_eq!((up.status, up.json()["body_length"].as_u64()), (200, Some(SIZE)));
    assert_eq!((down.status, down.body.len() as u64), (200, SIZE));
    let grown = stack.bouncer.process().peak_resident_bytes().saturating_sub(before);
    assert!(grown < 8 * MIB, "bouncer grew by {grown} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_1500_is_held_at_once_and_every_one_of_it_is_served() {
    let stack = stack().await;
    let occupants = occupy(&stack).await;
    let mut crowd = crowd(&stack).await;
    assert_no_bound_of_envoy_was_reached(&stack).await;
    assert_eq!(stack.record().current, CAP, "nobody of the crowd went past");

    for occupant in occupants {
        assert_eq!(occupant.finish().await.status, 200);
    }
    while let Some(answer) = crowd.join_next().await {
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    stack.wait_until_quiet().await;
    let record = stack.record();
    assert_eq!((record.total, record.maximum), (CAP + CROWD as usize, CAP));
    assert_no_bound_of_envoy_was_reached(&stack).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_of_1500_that_leaves_at_once_frees_its_places_and_disturbs_nobody() {
    let stack = stack().await;
    let occupants = occupy(&stack).await;
    let crowd = crowd(&stack).await;
    let connections = stack.envoy.stats().await["cluster.bouncer.upstream_cx_total"];

    drop(crowd);

    eventually("an empty waiting room", Duration::from_secs(30), async || {
        (stack.metrics().await.count("bouncer_queue_depth", &[]) == 0).then_some(())
    })
    .await;
    let metrics = stack.metrics().await;
    assert_eq!(metrics.count("bouncer_abandoned_total", &[("tier", "T1")]), u64::from(CROWD));
    assert_eq!(stack.stats().await["pools"][0]["in_flight"], CAP);
    // Had Envoy taken its own resets for a flood, it would have cut the connections to bouncer, and with them the count of
    // what is in flight.
    assert_no_bound_of_envoy_was_reached(&stack).await;
    let envoy = stack.envoy.stats().await;
    assert_eq!(envoy["cluster.bouncer.upstream_cx_destroy"], 0);
    assert_eq!(envoy["cluster.bouncer.upstream_cx_total"], connections);
    for occupant in occupants {
        assert_eq!(occupant.finish().await.status, 200);
    }
    stack.wait_until_quiet().await;
    assert_eq!(stack.record().total, CAP, "who leaves the queue costs no upstream request");
    assert_eq!(stack.client().get("/anything", Some("key_t1_demo")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_leaves_in_its_upload_gives_up_its_place() {
    let stack = stack().await;
    let occupants = occupy(&stack).await;
    // Over HTTP/2 Envoy goes on reading the connection, whatever it has stopped to take of one stream.
    for (client, size) in [(stack.client(), 48 << 10), (stack.http2_client(), 8 << 20)] {
        let upload = held_upload(&stack, client, size).await;
        upload.abort();
        eventually("an empty waiting room", Duration::from_secs(10), async || {
            (stack.metrics().await.count("bouncer_queue_depth", &[]) == 0).then_some(())
        })
        .await;
    }
    for occupant in occupants {
        assert_eq!(occupant.finish().await.status, 200);
    }
    stack.wait_until_quiet().await;
    assert!(!stack.record().order().contains(&"upload"), "who leaves the queue costs no upstream request");
}

/// Past the buffer, Envoy does not read from a client whose request is held, and TCP tells of the end of a connection
/// only behind its last byte. So nobody can know that this client has left until its turn comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_upload_over_http1_whose_client_has_left_keeps_nothing_beyond_its_turn() {
    let stack = stack().await;
    let occupants = occupy(&stack).await;
    let upload = held_upload(&stack, stack.client(), 8 << 20).await;
    upload.abort();
    for occupant in occupants {
        assert_eq!(occupant.finish().await.status, 200);
    }
    stack.wait_until_quiet().await;
    for again in occupy(&stack).await {
        assert_eq!(again.finish().await.status, 200);
    }
}

/// An upload that waits for its turn, and what to abort to make its client leave.
async fn held_upload(stack: &Stack, client: Client, size: usize) -> AbortHandle {
    let upload = client.request(Method::POST, "/anything").header("x-api-key", "key_t1_demo");
    let upload = upload.header("x-test-id", "upload").body(vec![b'x'; size]);
    let sent = tokio::spawn(async move { client.send(upload).await });
    stack.wait_until_held("T1", 1).await;
    sent.abort_handle()
}

async fn assert_no_bound_of_envoy_was_reached(stack: &Stack) {
    let envoy = stack.envoy.stats().await;
    for cluster in ["bouncer", "upstream"] {
        for name in ["upstream_rq_pending_overflow", "circuit_breakers.default.rq_open"] {
            assert_eq!(envoy.get(&format!("cluster.{cluster}.{name}")), Some(&0), "{name} of {cluster}");
        }
    }
    assert_eq!(envoy.get("cluster.bouncer.http2.outbound_control_flood"), Some(&0));
    assert_eq!(envoy.get("http.main.ext_proc.bouncer.streams_failed"), Some(&0));
}
