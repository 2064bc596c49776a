//! What a replica does when it is asked to stop: the order, the timing, and that nobody sees more of it than a 503.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use support::client::{Answer, Client, fetch};
use support::grpc::{self, ServingStatus};
use support::stack::{Bouncer, Stack, StackOptions};
use support::upstream::chunks;
use support::wait::eventually;
use tokio::task::JoinHandle;

const KEY: &str = "key_t1_demo";

/// How long an order may take to arrive on a busy machine.
const SOON: Duration = Duration::from_secs(2);

fn config(max_in_flight: u32, shutdown: &str) -> String {
    format!(
        "
tiers:
  - {{ name: T1, rate: 100000/s, burst: 100000, queue: {{ length: 100, max_wait: 11s }} }}
tenants:
  - {{ id: initech, tier: T1, keys: [key_t1_demo] }}
public: [/health]
pools:
  - {{ name: default, max_in_flight: {max_in_flight} }}
shutdown: {shutdown}
"
    )
}

fn get_many(client: &Client, count: u32, path: &'static str) -> Vec<JoinHandle<Answer>> {
    let get = |_| {
        let client = client.clone();
        tokio::spawn(async move { client.get(path, Some(KEY)).await })
    };
    (0..count).map(get).collect()
}

/// Waits until neither health service says yes any more.
async fn wait_until_not_ready(bouncer: &Bouncer, within: Duration) {
    eventually("a bouncer that says it is not ready", within, async || {
        let ready = fetch(&bouncer.admin_url("/ready")).await?;
        let health = grpc::health(bouncer.grpc_address(), None).await.ok()?;
        (ready.status == 503 && health == ServingStatus::NotServing).then(|| {
            assert_eq!(ready.json()["status"], "draining");
        })
    })
    .await;
}

#[tokio::test]
async fn stopping_replica_answers_what_it_holds_and_finishes_what_is_under_way() {
    let config = config(4, "{ delay: 2s, drain: 20s, held: refuse }");
    let mut stack = Stack::start(StackOptions::new(config)).await;
    let client = stack.client();
    let running = get_many(&client, 4, "/stream/30/200");
    stack.wait_until_in_flight(4).await;
    let held = get_many(&client, 50, "/anything");
    stack.wait_until_held("T1", 50).await;

    let asked = Instant::now();
    stack.bouncer.terminate();
    wait_until_not_ready(&stack.bouncer, Duration::from_millis(1500)).await;
    // Orchestrators repeat themselves: a second SIGTERM changes nothing.
    stack.bouncer.terminate();
    assert_eq!(fetch(&stack.bouncer.admin_url("/health")).await.unwrap().status, 200, "it is alive");
    stack.wait_until_held("T1", 50).await;

    for held in held {
        let answer = held.await.unwrap();
        assert_eq!((answer.status, answer.error().as_deref()), (503, Some("shutting_down")));
        assert!(
            answer.header("retry-after").is_some_and(|value| value.parse::<u32>().is_ok_and(|seconds| seconds > 0))
        );
    }
    let answered = asked.elapsed();
    assert!((Duration::from_secs(2)..Duration::from_secs(2) + SOON).contains(&answered), "after {answered:?}");
    let stats = stack.stats().await;
    assert_eq!((&stats["pools"][0]["waiting"], &stats["pools"][0]["in_flight"]), (&0.into(), &4.into()));
    let shed = stack.metrics().await.count("bouncer_shed_total", &[("tier", "T1"), ("reason", "shutting_down")]);
    assert_eq!(shed, 50);

    // Envoy has looked away, so this is its own answer.
    let new = client.get("/anything", Some(KEY)).await;
    assert_eq!((new.status, new.error().as_deref()), (503, Some("unavailable")));

    assert_eq!(stack.bouncer.process().ended(), None, "four streams are under way");
    for running in running {
        let answer = running.await.unwrap();
        assert_eq!((answer.status, answer.text()), (200, chunks(30)));
    }
    assert_eq!(stack.bouncer.exit(SOON).await.code(), Some(0));
    assert_eq!(stack.record().total, 4, "nothing that was held reached the upstream");
}

#[tokio::test]
async fn stopping_replica_judges_until_its_delay_is_over() {
    // An Envoy that never looks away, as one would be whose health checks are slower than the delay.
    let options = StackOptions::new(config(50, "{ delay: 2s, drain: 10s, held: refuse }"))
        .edit_envoy("healthy_panic_threshold: { value: 0 }", "healthy_panic_threshold: { value: 100 }");
    let mut stack = Stack::start(options).await;
    let client = stack.client();

    let asked = Instant::now();
    stack.bouncer.terminate();
    wait_until_not_ready(&stack.bouncer, Duration::from_millis(1500)).await;
    while asked.elapsed() < Duration::from_secs(1) {
        assert_eq!(client.get("/anything", Some(KEY)).await.status, 200);
        assert_eq!(client.get("/anything", None).await.status, 401);
        assert_eq!(client.get("/health", None).await.status, 200);
    }
    // Where Envoy goes on asking, it is told so, or finds nobody there.
    eventually("a refusal", SOON, async || {
        let answer = client.get("/anything", Some(KEY)).await;
        assert!(matches!(answer.status, 200 | 503), "{}", answer.status);
        (answer.status == 503).then(|| {
            assert!(matches!(answer.error().as_deref(), Some("shutting_down" | "unavailable")), "{answer:?}");
        })
    })
    .await;
    assert!(asked.elapsed() >= Duration::from_secs(2), "refused after {:?}", asked.elapsed());
    assert_eq!(stack.bouncer.exit(SOON).await.code(), Some(0));
    assert_eq!(client.get("/anything", Some(KEY)).await.error().as_deref(), Some("unavailable"));
}

#[tokio::test]
async fn replica_ends_when_its_drain_time_is_over_and_breaks_no_response() {
    let config = config(4, "{ delay: 0s, drain: 1s, held: refuse }");
    let mut stack = Stack::start(StackOptions::new(config)).await;
    let running = get_many(&stack.client(), 2, "/stream/25/200");
    stack.wait_until_in_flight(2).await;

    let asked = Instant::now();
    stack.bouncer.terminate();
    let status = stack.bouncer.exit(Duration::from_secs(10)).await;

    assert_eq!(status.code(), Some(0));
    assert!((Duration::from_secs(1)..Duration::from_secs(4)).contains(&asked.elapsed()), "{:?}", asked.elapsed());
    assert!(stack.bouncer.log_text().contains("drain time is over"));
    for running in running {
        let answer = running.await.unwrap();
        assert_eq!((answer.status, answer.text()), (200, chunks(25)));
    }
}

#[tokio::test]
async fn interrupt_is_a_polite_stop_and_a_second_one_is_not() {
    let config = config(4, "{ delay: 1s, drain: 20s, held: refuse }");
    let mut stack = Stack::start(StackOptions::new(config)).await;

    stack.bouncer.process().signal(Signal::SIGHUP);
    eventually("a word about SIGHUP", SOON, async || stack.bouncer.log_text().contains("SIGHUP ignored").then_some(()))
        .await;
    assert_eq!(stack.client().get("/anything", Some(KEY)).await.status, 200);

    let asked = Instant::now();
    stack.bouncer.process().signal(Signal::SIGINT);
    assert_eq!(stack.bouncer.exit(Duration::from_secs(1) + SOON).await.code(), Some(0));
    assert!(asked.elapsed() >= Duration::from_secs(1), "{:?}", asked.elapsed());

    stack.bouncer.start().await;
    stack.wait_until_healthy().await;
    let running = get_many(&stack.client(), 1, "/stream/15/200");
    stack.wait_until_in_flight(1).await;
    stack.bouncer.process().signal(Signal::SIGINT);
    wait_until_not_ready(&stack.bouncer, SOON).await;
    stack.bouncer.process().signal(Signal::SIGINT);
    assert_eq!(stack.bouncer.exit(SOON).await.code(), Some(130));
    for running in running {
        assert_eq!(running.await.unwrap().text(), chunks(15));
    }
}

#[tokio::test]
async fn successor_on_the_same_port_takes_over_without_a_refusal() {
    let options = || StackOptions::new(config(50, "{ delay: 2s, drain: 10s, held: move }"));
    let mut stack = Stack::start(options()).await;
    let mut successor = stack.successor(options());
    let stop = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = (0..4).map(|_| tokio::spawn(steady(stack.client(), stop.clone()))).collect();
    let running = get_many(&stack.client(), 2, "/stream/20/200");
    stack.wait_until_in_flight(2).await;

    successor.start().await;
    stack.bouncer.terminate();
    let status = stack.bouncer.exit(Duration::from_secs(15)).await;
    assert_eq!(status.code(), Some(0));
    eventually("requests judged by the successor", SOON, async || {
        (successor.metrics().await.sum("bouncer_requests_total", &[("outcome", "forwarded")]) > 100.0).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);

    for client in load {
        let (served, refused) = client.await.unwrap();
        assert_eq!(refused, Vec::<String>::new(), "beside {served} that were served");
    }
    for running in running {
        assert_eq!(running.await.unwrap().text(), chunks(20));
    }
}

#[tokio::test]
async fn two_on_one_port_that_are_told_to_stop_at_once_judge_until_the_delay_is_over() {
    let delay = Duration::from_secs(2);
    let options = || StackOptions::new(config(50, "{ delay: 2s, drain: 10s, held: refuse }"));
    let mut stack = Stack::start(options()).await;
    let mut other = stack.successor(options());
    other.start().await;

    let asked = Instant::now();
    stack.bouncer.terminate();
    other.terminate();
    // Each on a connection of its own. Those that a listener had not accepted when it closed are reset, for a moment.
    eventually("one that says it goes", delay, async || {
        let health = tokio::time::timeout(SOON, grpc::try_health(stack.bouncer.grpc_address())).await.ok()?;
        (health.ok()? == ServingStatus::NotServing).then_some(())
    })
    .await;
    while asked.elapsed() < Duration::from_millis(1500) {
        let health = grpc::try_health(stack.bouncer.grpc_address()).await;
        assert_eq!(health.unwrap(), ServingStatus::NotServing, "after {:?}", asked.elapsed());
    }
    for bouncer in [&mut stack.bouncer, &mut other] {
        assert_eq!(bouncer.exit(delay + SOON).await.code(), Some(0));
    }
    assert!(asked.elapsed() >= delay, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn requests_held_at_a_hand_over_are_served_by_the_successor() {
    let options = || StackOptions::new(config(2, "{ delay: 1s, drain: 10s, held: move }"));
    let mut stack = Stack::start(options()).await;
    let mut successor = stack.successor(options());
    let running = get_many(&stack.client(), 2, "/stream/25/200");
    stack.wait_until_in_flight(2).await;
    let held = get_many(&stack.client(), 8, "/delay/0.05");
    stack.wait_until_held("T1", 8).await;

    successor.start().await;
    stack.bouncer.terminate();

    for held in held {
        assert_eq!(held.await.unwrap().status, 200);
    }
    assert!(stack.record().current >= 2, "they were served while their first bouncer had no slot for them");
    assert_eq!(stack.bouncer.exit(Duration::from_secs(10)).await.code(), Some(0));
    for running in running {
        assert_eq!(running.await.unwrap().text(), chunks(25));
    }
    assert_eq!(stack.record().total, 10, "each request reaches the upstream once");
}

#[tokio::test]
async fn requests_that_cannot_move_anywhere_are_told_to_come_back() {
    let config = config(2, "{ delay: 200ms, drain: 10s, held: move }");
    let mut stack = Stack::start(StackOptions::new(config)).await;
    let running = get_many(&stack.client(), 2, "/stream/10/200");
    stack.wait_until_in_flight(2).await;
    let held = get_many(&stack.client(), 8, "/anything");
    stack.wait_until_held("T1", 8).await;

    stack.bouncer.terminate();

    for held in held {
        let answer = held.await.unwrap();
        assert_eq!((answer.status, answer.error().as_deref()), (503, Some("unavailable")));
        assert!(answer.header("retry-after").is_some());
    }
    assert_eq!(stack.bouncer.exit(Duration::from_secs(10)).await.code(), Some(0));
    for running in running {
        assert_eq!(running.await.unwrap().text(), chunks(10));
    }
    assert_eq!(stack.record().total, 2);
}

/// One request after the other until told to stop: how many were served, and what the others were told.
async fn steady(client: Client, stop: Arc<AtomicBool>) -> (u32, Vec<String>) {
    let (mut served, mut refused) = (0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let answer = client.get("/delay/0.002", Some(KEY)).await;
        if answer.status == 200 {
            served += 1;
        } else {
            refused.push(format!("{} {}", answer.status, answer.text()));
        }
    }
    (served, refused)
}
