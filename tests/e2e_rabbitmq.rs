//! Three bouncers behind one Envoy, with one Redis and one RabbitMQ: the judge is what the upstream saw.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::client::{Answer, Client, fetch};
use support::rabbit::RabbitServer;
use support::redis::RedisServer;
use support::stack::{Bouncer, Stack, StackOptions};
use support::wait::eventually;

const READY: Duration = Duration::from_secs(30);
/// Shorter than the default, so that a test need not wait for 10 s. A heartbeat is due every 0.4 s.
const LEASE: Duration = Duration::from_secs(4);

struct Deployment {
    stack: Stack,
    redis: RedisServer,
    rabbit: RabbitServer,
}

impl Deployment {
    async fn start(cap: u32) -> Self {
        let (redis, rabbit) = (RedisServer::start(), RabbitServer::start());
        let config = format!(
            "
redis: {{ url: '{}', timeout: 5s }}
rabbitmq: {{ url: '{}' }}
tiers:
  - {{ name: T3, rate: 100000/s, queue: {{ length: 1000, max_wait: 20s }} }}
  - {{ name: T1, rate: 100000/s, queue: {{ length: 1000, max_wait: 20s }} }}
tenants:
  - {{ id: acme, tier: T3, keys: [key_t3_demo] }}
  - {{ id: initech, tier: T1, keys: [key_t1_demo] }}
pools:
  - {{ name: default, max_in_flight: {cap} }}
lease: {}s
shutdown: {{ delay: 1s, drain: 20s, held: move }}
",
            redis.url(),
            rabbit.url(),
            LEASE.as_secs()
        );
        let stack = Stack::start(StackOptions::new(config).replicas(3)).await;
        let deployment = Self { stack, redis, rabbit };
        deployment.together().await;
        deployment
    }

    fn bouncers(&self) -> impl Iterator<Item = &Bouncer> {
        std::iter::once(&self.stack.bouncer).chain(&self.stack.others)
    }

    /// All replicas know each other, and each has its tickets.
    async fn together(&self) {
        eventually("replicas that know each other and their broker", READY, async || {
            for bouncer in self.bouncers() {
                let stats = fetch(&bouncer.admin_url("/stats")).await?.json();
                let known = stats["pools"][0]["shared"]["replicas"] == 3;
                (known && stats["stores"]["rabbitmq"]["up"] == true).then_some(())?;
            }
            Some(())
        })
        .await;
    }

    async fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let mut sum = 0.0;
        for bouncer in self.bouncers() {
            sum += bouncer.metrics().await.sum(metric, labels);
        }
        sum
    }

    async fn held(&self, tier: &str, count: f64) {
        eventually("held requests", READY, async || {
            (self.sum("bouncer_queue_depth", &[("tier", tier)]).await >= count).then_some(())
        })
        .await;
    }

    /// By its place among the three.
    fn bouncer(&mut self, at: usize) -> &mut Bouncer {
        if at == 0 { &mut self.stack.bouncer } else { &mut self.stack.others[at - 1] }
    }

    async fn quiet(&self) {
        eventually("nothing in flight and nobody waiting", READY, async || {
            let mut connection = self.redis.connection();
            let mut count = |key: &str| -> usize {
                let key = format!("bouncer:pool:{{default}}:{key}");
                redis::cmd("HLEN").arg(key).query(&mut connection).expect("redis answers")
            };
            (self.stack.record().current == 0 && (count("slots"), count("waiters")) == (0, 0)).then_some(())
        })
        .await;
    }
}

fn spawn(client: &Client, id: String, path: &'static str, key: &'static str) -> tokio::task::JoinHandle<Answer> {
    let client = client.clone();
    tokio::spawn(async move { client.get_as(&id, path, key).await })
}

/// Three proofs on one deployment: none of them leaves anything behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_slot_of_three_replicas_is_never_used_twice_and_the_higher_tier_has_it_first() {
    let deployment = Deployment::start(1).await;
    let stack = &deployment.stack;
    let client = stack.client();

    let answers =
        join_all(
            (0..100).map(|n| {
                let client = &client;
                async move {
                    client.get_as(&format!("flood-{n}"), "/delay/0.01", ["key_t3_demo", "key_t1_demo"][n % 2]).await
                }
            }),
        )
        .await;
    assert!(answers.iter().all(|answer| answer.status == 200));
    let record = stack.record();
    assert_eq!((record.total, record.maximum), (100, 1));
    deployment.quiet().await;
    // One ticket for each that waited, and no more.
    let tickets = deployment.sum("bouncer_ticket_confirms_total", &[("outcome", "confirmed")]).await;
    assert!((1.0..=99.0).contains(&tickets), "{tickets} tickets for 99 requests that waited");

    let before = stack.record().total;
    let first = spawn(&client, "first".into(), "/delay/2", "key_t1_demo");
    stack.wait_until_in_flight(1).await;
    let low: Vec<_> = (0..9).map(|n| spawn(&client, format!("low-{n}"), "/delay/0.01", "key_t1_demo")).collect();
    deployment.held("T1", 9.0).await;
    let high: Vec<_> = (0..9).map(|n| spawn(&client, format!("high-{n}"), "/delay/0.01", "key_t3_demo")).collect();
    deployment.held("T3", 9.0).await;
    for answer in join_all(low.into_iter().chain(high).chain([first])).await {
        assert_eq!(answer.expect("no panic").status, 200);
    }
    let record = stack.record();
    assert_eq!(record.maximum, 1);
    let names = record.order().into_iter().skip(before).map(|id| id.split('-').next().unwrap_or_default().to_owned());
    assert_eq!(names.collect::<Vec<_>>(), [vec!["first"], vec!["high"; 9], vec!["low"; 9]].concat());
    deployment.quiet().await;

    // Idle again: not one word to the broker.
    let calls = deployment.sum("bouncer_store_call_seconds_count", &[("store", "rabbitmq")]).await;
    for n in 0..30 {
        assert_eq!(client.get_as(&format!("alone-{n}"), "/anything", "key_t3_demo").await.status, 200);
        deployment.quiet().await;
    }
    let after = deployment.sum("bouncer_store_call_seconds_count", &[("store", "rabbitmq")]).await;
    assert!((after - calls).abs() < 0.5, "{calls} calls before, {after} after");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cap_holds_for_two_hundred_clients_and_through_the_death_of_a_replica_and_of_the_broker() {
    let mut deployment = Deployment::start(12).await;
    let client = deployment.stack.client();
    let flood = |name: &'static str, seconds: u64| {
        let client = client.clone();
        async move {
            let until = Instant::now() + Duration::from_secs(seconds);
            let statuses = join_all((0..200_usize).map(|n| {
                let client = &client;
                async move {
                    let mut statuses = Vec::new();
                    while Instant::now() < until {
                        let key = ["key_t3_demo", "key_t1_demo", "key_t1_demo"][n % 3];
                        statuses.push(client.get_as(&format!("{name}-{n}"), "/delay/0.02", key).await.status);
                    }
                    statuses
                }
            }))
            .await
            .concat();
            assert!(statuses.iter().all(|status| *status == 200), "{name}: {statuses:?}");
            eprintln!("{name}: {} answers in {seconds} s", statuses.len());
            statuses.len()
        }
    };

    let answers = flood("calm", 4).await;
    deployment.quiet().await;
    assert_eq!(deployment.stack.record().maximum, 12);
    for bouncer in deployment.bouncers() {
        let share = bouncer.metrics().await.sum("bouncer_backend_duration_seconds_count", &[]);
        assert!(share * 5.0 >= f64::from(u32::try_from(answers).expect("few")), "{share} of {answers}");
    }

    let storm = tokio::spawn(flood("death", 8));
    deployment.held("T1", 20.0).await;
    deployment.stack.others[1].kill9();
    assert!(storm.await.expect("no panic") > 0);
    assert_eq!(deployment.stack.record().maximum, 12);
    deployment.stack.others[1].start().await;
    deployment.stack.wait_until_healthy().await;
    deployment.together().await;

    let storm = tokio::spawn(flood("broker", 10));
    deployment.held("T1", 20.0).await;
    deployment.rabbit.stop();
    deployment.rabbit.restart();
    deployment.together().await;
    assert!(storm.await.expect("no panic") > 0);
    assert_eq!(deployment.stack.record().maximum, 12);
    deployment.quiet().await;
    for bouncer in deployment.bouncers() {
        assert!(!bouncer.log_text().contains("panicked"), "{}", bouncer.log_text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_under_load_costs_nobody_an_answer_nor_a_slot() {
    let mut deployment = Deployment::start(8).await;
    let client = deployment.stack.client();
    let ends = Arc::new(AtomicBool::new(false));
    let storm: Vec<_> = (0..60_usize)
        .map(|n| {
            let (client, ends) = (client.clone(), ends.clone());
            tokio::spawn(async move {
                let mut statuses = Vec::new();
                while !ends.load(Ordering::Relaxed) {
                    let key = ["key_t3_demo", "key_t1_demo", "key_t1_demo"][n % 3];
                    statuses.push(client.get_as(&n.to_string(), "/delay/0.03", key).await.status);
                }
                statuses
            })
        })
        .collect();
    deployment.held("T1", 10.0).await;
    for at in 0..3 {
        deployment.bouncer(at).terminate();
        assert!(deployment.bouncer(at).exit(READY).await.success());
        deployment.bouncer(at).start().await;
        deployment.stack.wait_until_healthy().await;
        deployment.together().await;
    }
    ends.store(true, Ordering::Relaxed);
    let statuses: Vec<u16> = join_all(storm).await.into_iter().flat_map(|client| client.expect("no panic")).collect();
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(deployment.stack.record().maximum, 8);
    deployment.quiet().await;
    let queues = deployment.rabbit.rows(&["list_queues", "name"]).len();
    assert_eq!(queues, 5, "two lines of tickets, and a queue of grants for each replica");
}
