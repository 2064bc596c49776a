mod on_a_cluster;

use std::num::NonZeroU64;
use std::time::Duration;

use futures::future::join_all;
use prometheus::Registry;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::super::conformance::{Bench, LEASE, conformance};
use super::super::model::Plain;
use super::*;
use crate::config;
use crate::limit::redis::RedisStore;
use crate::limit::redis::tests::server::RedisServer;
use crate::limit::{BucketKey, Quota, Rate};
use crate::metrics::StoreMetrics;

/// So that a busy machine does not look like an outage.
const GENEROUS: Duration = Duration::from_secs(20);
/// Seconds since 1970.
const NOW: u64 = 1_790_000_000;
const POOL: &str = "a pool";

/// A server whose scripts read the time that the test has written.
struct Virtual {
    server: RedisServer,
    cap: usize,
    lease: Duration,
}

fn on_test_clock(text: &str) -> String {
    let moved = text.replace("check('TIME', pcall('TIME'))", "redis.call('LRANGE', 'test:clock', 0, 1)");
    assert_ne!(moved, text);
    moved
}

fn clock(server: &RedisServer) -> (u64, u64) {
    redis::cmd("LRANGE").arg("test:clock").arg(0).arg(1).query(&mut server.connection()).expect("redis answers")
}

fn set_clock(server: &RedisServer, micros: u64) {
    let mut pipe = redis::pipe();
    pipe.atomic().del("test:clock").rpush("test:clock", &[micros / 1_000_000, micros % 1_000_000]);
    pipe.exec(&mut server.connection()).expect("redis answers");
}

impl Bench for Virtual {
    type Slots = RedisSlots;

    fn new(cap: usize, lease: Duration) -> Self {
        let server = RedisServer::start();
        set_clock(&server, NOW * 1_000_000);
        Self { server, cap, lease }
    }

    async fn replica(&self, id: &str) -> RedisSlots {
        let (operations, enter) = (on_test_clock(&operations_text()), on_test_clock(&enter_text()));
        let expiries = IntCounter::new("expiries", "Leases found ended").expect("a good name");
        let pool = PoolInRedis::with_scripts(
            &base("bouncer", POOL),
            id.to_owned(),
            self.cap,
            self.lease,
            expiries,
            &operations,
            &enter,
        );
        let config = config::Redis { timeout: GENEROUS, ..config::Redis::at(self.server.url()) };
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let limiter = RedisLimiter::new(RedisStore::new(&config, &metrics).expect("a good URL"));
        limiter.settled().await;
        RedisSlots::new(Arc::new(limiter), pool)
    }

    async fn advance(&self, by: Duration) {
        let (seconds, micros) = clock(&self.server);
        set_clock(&self.server, seconds * 1_000_000 + micros + u64::try_from(by.as_micros()).expect("short"));
    }
}

conformance!(Virtual);

/// One step of a history that the scripts and the model both go through. Replica, then serials.
#[derive(Debug, Clone)]
enum Step {
    Acquire(usize, u64, usize),
    Release(usize, u64, Option<u64>, bool),
    Promote(usize, u64),
    Forget(usize, Vec<u64>),
    Heartbeat(usize, Vec<(u64, u64)>),
    Settle(usize, Repair),
    Bye(usize),
    Retry(usize, u64, bool),
    Pass(usize, u64, u64),
    Transfer(usize, u64, usize, u64, u64),
    Recall(usize, u64, usize, u64, u64),
    Claim(usize, u64, u64, bool, u64),
    Free(usize, u64, u64, bool),
    Wait(u64),
}

const REPLICAS: [&str; 3] = ["a", "b", "cc"];

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (who, serial, attempt) = (0..3_usize, || 1..6_u64, || 0..2_u64);
    let serials = || prop::collection::vec(1..6_u64, 0..3);
    let repair = (serials(), serials(), prop::collection::vec((1..6_u64, 0..2_usize), 0..3))
        .prop_map(|(drop, hold, wait)| Repair { drop, hold, wait });
    let heard = prop::collection::vec((1..6_u64, 0..2_u64), 0..2);
    let step = prop_oneof![
        12 => (who.clone(), serial(), 0..2_usize).prop_map(|(who, it, rank)| Step::Acquire(who, it, rank)),
        8 => (who.clone(), serial(), prop::option::of(serial()), any::<bool>())
            .prop_map(|(who, it, heir, keep)| Step::Release(who, it, heir, keep)),
        6 => (who.clone(), serial()).prop_map(|(who, it)| Step::Promote(who, it)),
        2 => (who.clone(), serials()).prop_map(|(who, them)| Step::Forget(who, them)),
        8 => (who.clone(), heard).prop_map(|(who, heard)| Step::Heartbeat(who, heard)),
        1 => (who.clone(), repair).prop_map(|(who, repair)| Step::Settle(who, repair)),
        1 => who.clone().prop_map(Step::Bye),
        4 => (who.clone(), serial(), any::<bool>()).prop_map(|(who, it, raise)| Step::Retry(who, it, raise)),
        4 => (who.clone(), serial(), serial()).prop_map(|(who, from, to)| Step::Pass(who, from, to)),
        6 => (who.clone(), serial(), who.clone(), serial(), attempt())
            .prop_map(|(who, from, to, it, attempt)| Step::Transfer(who, from, to, it, attempt)),
        2 => (who.clone(), serial(), who.clone(), serial(), attempt())
            .prop_map(|(who, from, to, it, attempt)| Step::Recall(who, from, to, it, attempt)),
        5 => (who.clone(), serial(), attempt(), any::<bool>(), serial())
            .prop_map(|(who, it, attempt, waits, spare)| Step::Claim(who, it, attempt, waits, spare)),
        4 => (who, serial(), 0..3_u64, any::<bool>()).prop_map(|(who, it, epoch, keep)| Step::Free(who, it, epoch, keep)),
        3 => prop_oneof![4 => 1..600_u64, 2 => Just(1000), 1 => Just(4000), 1 => Just(10_000)].prop_map(Step::Wait),
    ];
    // From a store that is in use: replicas with leases, slots and waiters.
    let begins = prop::collection::vec((0..3_usize, 1..6_u64, 0..2_usize), 4..10);
    (begins, prop::collection::vec(step, 1..50)).prop_map(|(begins, steps)| {
        let beats = (0..3).map(|who| Step::Heartbeat(who, Vec::new()));
        let asks = begins.into_iter().map(|(who, serial, rank)| Step::Acquire(who, serial, rank));
        beats.chain(asks).chain(steps).collect()
    })
}

fn rest(keep: bool) -> Otherwise {
    if keep { Otherwise::Keep } else { Otherwise::Announce }
}

/// What a store answers to a step, as text. Within a heartbeat, serials may come in any order.
async fn answer<S: HandOver>(replicas: &[S], step: &Step) -> String {
    match step {
        Step::Acquire(who, serial, rank) => {
            let asks = Applicant { serial: *serial, rank: *rank, length: 3 };
            format!("{:?}", replicas[*who].acquire(asks).await.ok())
        }
        Step::Release(who, serial, heir, keep) => {
            // The whole share, so that it does not depend on the clock who gets it.
            let heir = heir.map(|serial| Heir { serial, own: 1000 });
            format!("{:?}", replicas[*who].release(*serial, heir, rest(*keep)).await.ok())
        }
        Step::Promote(who, serial) => format!("{:?}", replicas[*who].promote(*serial).await.ok()),
        Step::Forget(who, serials) => format!("{:?}", replicas[*who].forget(serials).await.ok()),
        Step::Heartbeat(who, heard) => {
            let mut beat = replicas[*who].heartbeat(heard).await.ok();
            if let Some(beat) = &mut beat {
                beat.slots.sort_unstable();
                beat.waiters.sort_unstable();
                beat.lost_grants.sort_unstable();
            }
            format!("{beat:?}")
        }
        Step::Settle(who, repair) => format!("{:?}", replicas[*who].settle(repair).await.ok()),
        Step::Bye(who) => format!("{:?}", replicas[*who].bye().await.ok()),
        Step::Retry(who, serial, raise) => format!("{:?}", replicas[*who].retry(*serial, *raise).await.ok()),
        Step::Pass(who, from, to) => format!("{:?}", replicas[*who].pass(*from, *to).await.ok()),
        Step::Transfer(who, from, to, serial, attempt) => {
            let grant = Grant { replica: REPLICAS[*to], serial: *serial, attempt: *attempt };
            format!("{:?}", replicas[*who].transfer(*from, &grant).await.ok())
        }
        Step::Recall(who, from, to, serial, attempt) => {
            let grant = Grant { replica: REPLICAS[*to], serial: *serial, attempt: *attempt };
            format!("{:?}", replicas[*who].recall(*from, &grant).await.ok())
        }
        Step::Claim(who, serial, attempt, waits, spare) => {
            let arrived = Arrived { serial: *serial, attempt: *attempt, waits: *waits, spare: *spare };
            format!("{:?}", replicas[*who].claim(arrived).await.ok())
        }
        Step::Free(who, serial, epoch, keep) => {
            format!("{:?}", replicas[*who].free(*serial, *epoch, rest(*keep)).await.ok())
        }
        Step::Wait(_) => String::new(),
    }
}

#[test]
fn the_scripts_and_the_model_give_the_same_answers_to_any_history() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let bench = Virtual::new(2, LEASE);
    let real = runtime.block_on(async { join_all(REPLICAS.map(|id| bench.replica(id))).await });
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() });
    let ran = runner.run(&steps(), |steps| {
        let plain = Plain::new(2, LEASE);
        redis::cmd("FLUSHALL").exec(&mut bench.server.connection()).expect("redis answers");
        set_clock(&bench.server, NOW * 1_000_000);
        let differ = runtime.block_on(async {
            let model = join_all(REPLICAS.map(|id| plain.replica(id))).await;
            for (at, step) in steps.iter().enumerate() {
                if let Step::Wait(millis) = step {
                    plain.advance(Duration::from_millis(*millis)).await;
                    bench.advance(Duration::from_millis(*millis)).await;
                }
                let (is, ought) = (answer(&real, step).await, answer(&model, step).await);
                if is != ought {
                    return Some(format!("step {at}, {step:?}: {is} instead of {ought}"));
                }
            }
            None
        });
        prop_assert_eq!(differ, None);
        Ok(())
    });
    ran.unwrap_or_else(|failure| panic!("{failure}"));
}

fn key(name: &str) -> String {
    format!("bouncer:pool:{{a%20pool}}:{name}")
}

fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}

fn asks(serial: u64) -> Applicant {
    Applicant { serial, rank: 0, length: 9 }
}

#[tokio::test]
async fn a_request_is_charged_and_gets_a_slot_in_one_run_and_nothing_where_its_bucket_is_empty() {
    let bench = Virtual::new(9, LEASE);
    let slots = bench.replica("a").await;
    slots.heartbeat(&[]).await.expect("redis answers");
    let one = NonZeroU64::MIN;
    let quota = Quota { rate: Rate { count: one, per: Duration::from_secs(60) }, burst: one };
    let bucket = BucketKey::tenant("acme");
    let charges = [Charge { bucket: &bucket, quota, cost: one }];
    ask::<()>(&bench.server, &["CONFIG", "RESETSTAT"]);
    let (take, acquired) = slots.enter(&charges, asks(1)).await.expect("redis answers");
    assert!(matches!((take, acquired), (Take::Taken { .. }, Some(Acquired::Granted))), "{take:?} {acquired:?}");
    let (take, acquired) = slots.enter(&charges, asks(2)).await.expect("redis answers");
    assert!(matches!((take, acquired), (Take::Refused { .. }, None)), "{take:?} {acquired:?}");
    let told = slots.heartbeat(&[]).await.expect("redis answers");
    assert_eq!((told.slots, told.waiters), (vec![1], vec![]));
    let stats: String = ask(&bench.server, &["INFO", "commandstats"]);
    let calls = |command: &str| {
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")))?;
        line.split_once("calls=")?.1.split(',').next()?.parse::<u32>().ok()
    };
    // The script is unknown once; the heartbeat's was known.
    assert_eq!((calls("evalsha"), calls("eval")), (Some(3), Some(1)), "{stats}");
}

#[tokio::test]
async fn every_key_is_of_one_hash_tag_and_expires_after_the_lease() {
    let bench = Virtual::new(1, LEASE);
    let slots = bench.replica("a").await;
    slots.heartbeat(&[]).await.expect("redis answers");
    for serial in 1..4 {
        slots.acquire(asks(serial)).await.expect("redis answers");
    }
    slots.retry(9, true).await.expect("redis answers");
    slots.transfer(1, &Grant { replica: "a", serial: 2, attempt: 1 }).await.expect("redis answers");
    slots.release(7, None, Otherwise::Announce).await.expect("redis answers");
    slots.acquire(asks(5)).await.expect("redis answers");
    let mut keys: Vec<String> = ask(&bench.server, &["KEYS", "bouncer:pool:*"]);
    keys.sort_unstable();
    assert_eq!(keys, ["grants", "replicas", "totals", "waiters"].map(key));
    for key in keys {
        let left: i64 = ask(&bench.server, &["PTTL", &key]);
        assert!((20_000..=21_000).contains(&left), "{key} lives {left} ms");
    }
}

#[tokio::test]
async fn keys_of_another_kind_and_totals_that_do_not_add_up_are_healed_by_a_heartbeat() {
    let bench = Virtual::new(1, LEASE);
    let slots = bench.replica("a").await;
    slots.heartbeat(&[]).await.expect("redis answers");
    for serial in 1..4 {
        slots.acquire(asks(serial)).await.expect("redis answers");
    }
    ask::<()>(&bench.server, &["DEL", &key("totals")]);
    ask::<()>(&bench.server, &["SET", &key("slots"), "foreign"]);
    assert!(slots.acquire(asks(4)).await.is_err(), "a foreign value stops everything");
    let told = slots.heartbeat(&[]).await.expect("redis answers");
    assert_eq!((told.slots, told.tally.waiting), (vec![], vec![(0, 2)]));
    assert_eq!(slots.acquire(asks(4)).await.expect("redis answers"), Acquired::Waiting);
}

#[tokio::test]
async fn a_free_slot_is_announced_with_the_highest_tier_that_waits() {
    let bench = Virtual::new(1, LEASE);
    let (a, b) = (bench.replica("a").await, bench.replica("b").await);
    for slots in [&a, &b] {
        slots.heartbeat(&[]).await.expect("redis answers");
    }
    let mut connection = bench.server.connection();
    let mut channel = connection.as_pubsub();
    channel.subscribe(key("freed")).expect("redis answers");
    let mut heard = || {
        channel.set_read_timeout(Some(GENEROUS)).expect("a time above zero");
        channel.get_message().expect("an announcement").get_payload::<String>().expect("text")
    };
    a.acquire(asks(1)).await.expect("redis answers");
    b.acquire(Applicant { rank: 1, ..asks(1) }).await.expect("redis answers");
    b.acquire(Applicant { rank: 2, ..asks(2) }).await.expect("redis answers");
    a.release(1, None, Otherwise::Announce).await.expect("redis answers");
    assert_eq!(heard(), "1 a", "by the replica that lets others try first");
    b.forget(&[1]).await.expect("redis answers");
    assert_eq!(heard(), "2 *", "the higher tier has gone, so it is the next one's turn");
    b.promote(2).await.expect("redis answers");
    a.acquire(asks(2)).await.expect("redis answers");
    b.bye().await.expect("redis answers");
    assert_eq!(heard(), "0 *");
}

#[tokio::test]
async fn of_the_slots_that_come_back_a_replica_passes_on_its_share() {
    let bench = Virtual::new(1, Duration::from_secs(1000));
    let (a, b) = (bench.replica("a").await, bench.replica("b").await);
    for slots in [&a, &b] {
        slots.heartbeat(&[]).await.expect("redis answers");
    }
    let mut own = 0;
    for round in 0..300_u64 {
        let serial = 10 * round;
        set_clock(&bench.server, NOW * 1_000_000 + round * 1_234_567);
        a.acquire(asks(serial)).await.expect("redis answers");
        a.acquire(asks(serial + 1)).await.expect("redis answers");
        b.acquire(asks(serial + 2)).await.expect("redis answers");
        b.acquire(asks(serial + 3)).await.expect("redis answers");
        let heir = Some(Heir { serial: serial + 1, own: 1 });
        let released = a.release(serial, heir, Otherwise::Announce).await.expect("redis answers");
        own += u32::from(released == Released::Passed);
        a.forget(&[serial, serial + 1]).await.expect("redis answers");
        b.forget(&[serial + 2, serial + 3]).await.expect("redis answers");
    }
    assert!((70..130).contains(&own), "one of three waits here, and {own} of 300 were passed on");
}

#[tokio::test]
async fn an_answer_that_is_none_of_the_scripts_is_an_error_and_no_panic() {
    let bench = Virtual::new(1, LEASE);
    let sane = bench.replica("a").await;
    for returned in ["'x'", "{}", "{1}", "{9, 9}", "{4, 1, 2}", "{{1}}", "-1", "nil", "{{1,2,3,4},{0,1},{'x'},{},{}}"] {
        let text = format!("return {returned}");
        let expiries = IntCounter::new("expiries", "Leases found ended").expect("a good name");
        let pool = PoolInRedis::with_scripts(&base("bouncer", POOL), "a".into(), 1, LEASE, expiries, &text, &text);
        let slots = RedisSlots::new(sane.limiter.clone(), pool);
        let failures = [
            slots.acquire(asks(1)).await.is_err(),
            slots.enter(&[], asks(1)).await.is_err(),
            slots.heartbeat(&[]).await.is_err(),
            slots.promote(1).await.is_err(),
            slots.settle(&Repair::default()).await.is_err(),
        ];
        assert_eq!(failures, [true; 5], "{returned}");
    }
}
