//! Who is held, who is next and who is sent away, by the upstream's own record behind a real Envoy.

mod support;

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use support::client::{Answer, Client};
use support::stack::{Stack, StackOptions};
use support::wait::eventually;
use tokio::task::JoinHandle;

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long the upstream may take to notice an abort on a busy machine. Requests that end by themselves count exactly.
const NOTICE: Duration = Duration::from_secs(1);
/// How far apart requests may start that are let through together: less than the second that one takes.
const TOGETHER: Duration = Duration::from_millis(500);

/// Two tiers whose buckets are as good as never refilled, and this cap, queue length of T1, and longest wait.
fn options(cap: usize, length: usize, max_wait: &str) -> StackOptions {
    StackOptions::new(format!(
        "
tiers:
  - {{ name: T3, rate: 1/day, burst: 200, queue: {{ length: 1000, max_wait: {max_wait} }} }}
  - {{ name: T1, rate: 1/day, burst: 200, queue: {{ length: {length}, max_wait: {max_wait} }} }}
tenants:
  - {{ id: acme, tier: T3, keys: [key_t3] }}
  - {{ id: initech, tier: T1, keys: [key_t1] }}
pools:
  - {{ name: default, max_in_flight: {cap} }}
"
    ))
}

/// Sends a request from a task of its own, whose abort is the client's abort.
fn spawn(client: &Client, id: impl Into<String>, path: &'static str, key: &'static str) -> JoinHandle<Answer> {
    let (client, id) = (client.clone(), id.into());
    tokio::spawn(async move { client.get_as(&id, path, key).await })
}

/// Takes so many slots for as long as the test likes: until these are aborted.
async fn occupy(stack: &Stack, client: &Client, slots: usize) -> Vec<JoinHandle<Answer>> {
    let occupied = (0..slots).map(|slot| spawn(client, format!("occupies-{slot}"), "/delay/600", "key_t3")).collect();
    stack.wait_until_in_flight(slots).await;
    occupied
}

/// Puts requests into a queue that is empty, one after the other, so that their order is known.
async fn queue(
    stack: &Stack,
    client: &Client,
    count: u32,
    path: &'static str,
    tier: &'static str,
    key: &'static str,
) -> Vec<JoinHandle<Answer>> {
    let mut held = Vec::new();
    for number in 0..count {
        held.push(spawn(client, format!("{tier}-{number}"), path, key));
        stack.wait_until_held(tier, number + 1).await;
    }
    held
}

/// Waits until exactly so many requests of T1 are held.
async fn held_is(stack: &Stack, count: u64) {
    eventually(&format!("{count} held requests"), PATIENCE, async || {
        (stack.metrics().await.count("bouncer_queue_depth", &[("tier", "T1")]) == count).then_some(())
    })
    .await;
}

fn retry_after(answer: &Answer) -> u64 {
    answer.header("retry-after").and_then(|text| text.parse().ok()).expect("whole seconds")
}

fn numbered(name: &str, count: u32) -> impl Iterator<Item = String> {
    (0..count).map(move |number| format!("{name}-{number}"))
}

#[tokio::test]
async fn every_waiting_request_of_a_higher_tier_starts_before_any_of_a_lower_one() {
    let stack = Stack::start(options(10, 1000, "11s")).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 10).await;
    let mut waiting: Vec<_> = numbered("T1", 15).map(|id| spawn(&client, id, "/delay/1", "key_t1")).collect();
    stack.wait_until_held("T1", 15).await;
    waiting.extend(numbered("T3", 15).map(|id| spawn(&client, id, "/delay/1", "key_t3")));
    stack.wait_until_held("T3", 15).await;

    occupied.iter().for_each(JoinHandle::abort);
    for answer in join_all(waiting).await {
        assert_eq!(answer.expect("no panic").status, 200);
    }

    // The second ten slots come free together and go to five and five. What Envoy is told to let through within one turn
    // of its event loop, it sends in an order of its own; a request out of turn would be early by a second.
    let record = stack.record();
    let starts = |tier: &str| -> Vec<u64> {
        let of_tier = record.requests.iter().filter(|entry| entry.id.starts_with(tier));
        of_tier.map(|entry| entry.started_us).collect()
    };
    let (high, low) = (starts("T3"), starts("T1"));
    assert_eq!((high.len(), low.len()), (15, 15));
    let together = u64::try_from(TOGETHER.as_micros()).expect("a short time");
    assert!(high.iter().max() < low.iter().min().map(|first| first + together).as_ref(), "{:#?}", record.requests);
    assert!(record.peak(NOTICE) <= 10, "{}", record.peak(NOTICE));
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn with_one_slot_the_order_of_service_is_exact() {
    let stack = Stack::start(options(1, 1000, "11s")).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 1).await;
    let mut waiting = queue(&stack, &client, 15, "/delay/0.01", "T1", "key_t1").await;
    waiting.extend(queue(&stack, &client, 15, "/delay/0.01", "T3", "key_t3").await);

    occupied.iter().for_each(JoinHandle::abort);
    for answer in join_all(waiting).await {
        assert_eq!(answer.expect("no panic").status, 200);
    }

    let expected: Vec<_> = numbered("T3", 15).chain(numbered("T1", 15)).collect();
    assert_eq!(stack.record().order()[1..], expected);
}

#[tokio::test]
async fn who_arrives_as_a_slot_frees_goes_behind_those_who_wait() {
    let stack = Stack::start(options(1, 1000, "11s")).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 1).await;
    let waiting = queue(&stack, &client, 10, "/delay/0.02", "T3", "key_t3").await;

    // Each answer frees the slot, and at that instant others arrive, of the same tier and of a lower one.
    let arrive = async |number: usize| {
        let ids = ["same", "lower", "same-too"].map(|name| format!("{name}-{number}"));
        let keys = ["key_t3", "key_t1", "key_t3"];
        let arrivals = ids.iter().zip(keys).map(|(id, key)| client.get_as(id, "/anything", key));
        join_all(arrivals).await
    };
    let releases = waiting.into_iter().enumerate().map(|(number, waiter)| {
        let arrive = &arrive;
        async move {
            assert_eq!(waiter.await.expect("no panic").status, 200);
            arrive(number).await
        }
    });
    occupied.iter().for_each(JoinHandle::abort);
    let (answers, first) = tokio::join!(join_all(releases), arrive(10));

    assert!(answers.iter().flatten().chain(&first).all(|answer| answer.status == 200));
    let record = stack.record();
    let order = record.order();
    assert_eq!(order.len(), 1 + 10 + 33);
    assert_eq!(order[1..=10], numbered("T3", 10).collect::<Vec<_>>());
    assert_eq!(record.peak(NOTICE), 1);
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn a_full_queue_refuses_at_once_and_a_wait_in_vain_ends_with_its_own_reason() {
    let stack = Stack::start(options(1, 3, "2s")).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 1).await;

    let began = Instant::now();
    let mut answers: FuturesUnordered<_> = (0..10).map(|_| client.get_as("shed", "/anything", "key_t1")).collect();
    let full: Vec<_> = answers.by_ref().take(7).collect().await;
    held_is(&stack, 3).await;
    let expired: Vec<_> = answers.collect().await;

    assert!(began.elapsed() >= Duration::from_secs(2), "{:?}", began.elapsed());
    for (answers, count, reason) in [(&full, 7, "queue_full"), (&expired, 3, "queue_timeout")] {
        assert_eq!(answers.len(), count);
        for answer in answers {
            assert_eq!((answer.status, answer.error().as_deref()), (503, Some(reason)));
            assert!(retry_after(answer) >= 1);
        }
        let shed = [("tier", "T1"), ("reason", reason)];
        assert_eq!(stack.metrics().await.count("bouncer_shed_total", &shed), count as u64, "{reason}");
    }
    let outcome = [("tier", "T1"), ("outcome", "queued")];
    assert_eq!(stack.metrics().await.count("bouncer_requests_total", &outcome), 3);

    // Each says how full the bucket is, for what a request took before it was shed stays taken.
    let mut remaining: Vec<u32> = full
        .iter()
        .chain(&expired)
        .filter(|answer| answer.header("x-ratelimit-limit") == Some("200"))
        .filter_map(|answer| answer.header("x-ratelimit-remaining")?.parse().ok())
        .collect();
    remaining.sort_unstable();
    assert_eq!(remaining, (190..200).collect::<Vec<_>>());
    occupied.iter().for_each(JoinHandle::abort);
    let next = client.get_as("next", "/anything", "key_t1").await;
    assert_eq!((next.status, next.header("x-ratelimit-remaining")), (200, Some("189")));
    assert_eq!(stack.record().order(), ["occupies-0", "next"]);
}

#[tokio::test]
async fn clients_that_go_away_leave_their_places_to_others_and_their_turns_to_who_stays() {
    let stack = Stack::start(options(1, 50, "11s")).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 1).await;
    let leaving = queue(&stack, &client, 49, "/anything", "T1", "key_t1").await;
    let staying = spawn(&client, "stays", "/anything", "key_t1");
    stack.wait_until_held("T1", 50).await;
    assert_eq!(client.get("/anything", Some("key_t1")).await.error().as_deref(), Some("queue_full"));

    leaving.iter().for_each(JoinHandle::abort);
    held_is(&stack, 1).await;

    // Exactly their places are there again.
    let leaving: Vec<_> = (0..49).map(|number| spawn(&client, format!("{number}"), "/anything", "key_t1")).collect();
    stack.wait_until_held("T1", 50).await;
    assert_eq!(client.get("/anything", Some("key_t1")).await.error().as_deref(), Some("queue_full"));
    leaving.iter().for_each(JoinHandle::abort);
    held_is(&stack, 1).await;

    occupied.iter().for_each(JoinHandle::abort);
    assert_eq!(staying.await.expect("no panic").status, 200);
    assert_eq!(stack.record().order(), ["occupies-0", "stays"]);
    assert_eq!(stack.metrics().await.count("bouncer_abandoned_total", &[("tier", "T1")]), 2 * 49);
    stack.wait_until_quiet().await;
}

#[tokio::test]
async fn a_hold_ends_before_envoy_loses_patience() {
    let options = options(1, 1000, "11s").edit_envoy("message_timeout: 12s", "message_timeout: 2s").edit_envoy(
        r#"{ key: bouncer-deadline-ms, value: "12000" }"#,
        r#"{ key: bouncer-deadline-ms, value: "2000" }"#,
    );
    let stack = Stack::start(options).await;
    let client = stack.client();
    let occupied = occupy(&stack, &client, 1).await;

    for answer in join_all((0..3).map(|_| client.get_as("held", "/anything", "key_t1"))).await {
        assert_eq!((answer.status, answer.error().as_deref()), (503, Some("queue_timeout")));
        assert!(retry_after(&answer) >= 1 && answer.header("x-ratelimit-limit").is_some());
    }

    let timeouts = stack.envoy.stats().await.get("http.main.ext_proc.bouncer.message_timeouts").copied();
    assert_eq!(timeouts, Some(0));
    assert_eq!(stack.record().order(), ["occupies-0"]);
    occupied.iter().for_each(JoinHandle::abort);
    stack.wait_until_quiet().await;
}
