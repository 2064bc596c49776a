use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};
use redis::Value;

use super::super::bucket::{Bucket, period};
use super::super::conformance::{Bench, charge, conformance, number, pauses, quota, quotas};
use super::super::tally::tally;
use super::super::{BucketKey, Charge, Level, Limiter, Take};
use super::*;

#[path = "../../../tests/support/redis_cluster.rs"]
pub(crate) mod cluster;
mod on_a_cluster;
#[path = "../../../tests/support/ports.rs"]
pub(crate) mod ports;
#[path = "../../../tests/support/redis.rs"]
pub(crate) mod server;
use server::RedisServer;

/// So that a busy machine does not look like an outage.
const GENEROUS: Duration = Duration::from_secs(20);
const NOW: u64 = 1_790_000_000_000_000;

/// The script with its time from elsewhere.
fn script_on(clock: &str) -> String {
    let text = Script::BUCKET.replace("check('TIME', pcall('TIME'))", clock);
    assert_ne!(text, Script::BUCKET);
    text
}

/// A server whose scripts read the time that the test has written.
struct Virtual {
    server: RedisServer,
    limiter: Arc<RedisLimiter>,
}

impl Virtual {
    fn start() -> Self {
        let server = RedisServer::start();
        set_clock(&server, NOW);
        let config = config::Redis { timeout: GENEROUS, ..config::Redis::at(server.url()) };
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let script = Script::new(&script_on("redis.call('LRANGE', 'test:clock', 0, 1)"));
        let store = RedisStore::with_script(&config, &metrics, script).expect("a good URL");
        Self { server, limiter: Arc::new(RedisLimiter::new(store)) }
    }
}

fn set_clock(server: &RedisServer, micros: u64) {
    let mut connection = server.connection();
    let mut pipe = redis::pipe();
    pipe.atomic().del("test:clock").rpush("test:clock", &[micros / 1_000_000, micros % 1_000_000]);
    pipe.exec(&mut connection).expect("redis answers");
}

impl Bench for Virtual {
    type Limiter = RedisLimiter;

    fn limiter(&self) -> Arc<RedisLimiter> {
        Arc::clone(&self.limiter)
    }

    async fn advance(&self, by: Duration) {
        let mut connection = self.server.connection();
        let clock: Vec<u64> =
            redis::cmd("LRANGE").arg("test:clock").arg(0).arg(1).query(&mut connection).expect("redis answers");
        let micros = u64::try_from(by.as_micros()).expect("short");
        set_clock(&self.server, clock[0] * 1_000_000 + clock[1] + micros);
    }
}

conformance!(Virtual::start(), tokio::test);

/// One step of a history that the script and the model both go through.
#[derive(Debug, Clone)]
enum Step {
    /// A share of the burst, or a little more than all of it.
    Take(f64),
    GiveBack(f64),
    Wait(u64),
    /// The server's clock goes back.
    Back(u64),
    /// Another value in the key, with or without a TTL.
    Store(String, bool),
    /// A value as the script writes it, its time relative to now.
    Shift(f64, i64),
    Delete,
    List,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let foreign = prop_oneof![
        Just(String::new()),
        Just("hello".to_owned()),
        Just("nan 5".to_owned()),
        Just("inf 5".to_owned()),
        Just("-5 5".to_owned()),
        Just("1e300 5".to_owned()),
        Just("1e999 5".to_owned()),
        Just("0x10 5".to_owned()),
        Just("1.2.3 5".to_owned()),
        Just("5 -5".to_owned()),
        Just("5 5.5".to_owned()),
        Just("0 99999999999999999999999".to_owned()),
        Just("5 5 5".to_owned()),
        "[0-9e. -]{0,12}",
        "\\PC{0,8}",
    ];
    let step = prop_oneof![
        8 => (0.0f64..1.1).prop_map(Step::Take),
        2 => Just(Step::Take(0.0)),
        2 => (0.0f64..1.1).prop_map(Step::GiveBack),
        6 => pauses().prop_map(Step::Wait),
        1 => pauses().prop_map(Step::Back),
        1 => (foreign, any::<bool>()).prop_map(|(text, ttl)| Step::Store(text, ttl)),
        1 => (-0.1f64..1.1, any::<i32>()).prop_map(|(share, shift)| Step::Shift(share, i64::from(shift))),
        1 => Just(Step::Delete),
        1 => Just(Step::List),
    ];
    prop::collection::vec(step, 1..40)
}

/// The state that a stored text stands for; what is no state is no number.
fn parse(text: &[u8]) -> (f64, f64) {
    let parsed = std::str::from_utf8(text).ok().and_then(|text| {
        let (tokens, last) = text.split_once(' ')?;
        let plain = !tokens.is_empty() && tokens.bytes().all(|b| b.is_ascii_digit() || b".e-".contains(&b));
        let whole = !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit());
        if plain && whole { Some((tokens.parse().ok()?, last.parse().ok()?)) } else { None }
    });
    parsed.unwrap_or((f64::NAN, f64::NAN))
}

fn cost_of(share: f64, quota: &Quota) -> std::num::NonZeroU64 {
    let burst: f64 = quota.burst.get().to_string().parse().expect("a number");
    number(format!("{:.0}", burst * share).parse::<u64>().expect("a number").max(1))
}

/// What the script must answer, and the state that it must leave.
struct Expected {
    reply: Vec<i64>,
    stored: Option<(f64, f64)>,
}

/// What is in the key: the state, or no numbers for a value that is none; and whether it has a TTL.
struct Model {
    quota: Quota,
    stored: Option<(f64, f64)>,
    expires: bool,
}

impl Model {
    fn put(&mut self, stored: Option<(f64, f64)>, expires: bool) {
        self.stored = stored;
        self.expires = expires;
    }

    fn take(&mut self, cost: std::num::NonZeroU64, now: u64) -> Expected {
        let (bucket, damaged) = match self.stored {
            None => (Bucket::full(&self.quota, now), false),
            Some((tokens, last)) => Bucket::heal(tokens, last, &self.quota, now),
        };
        let (bucket, retry) = match bucket.take(&self.quota, cost, now) {
            Ok(taken) => {
                self.put(Some(taken.parts()), true);
                (taken, 0)
            }
            Err(wait) => {
                if damaged || (self.stored.is_some() && !self.expires) {
                    self.put(Some(bucket.parts()), true);
                }
                (bucket, if wait == Duration::MAX { -1 } else { micros(wait) })
            }
        };
        let Level { remaining, reset, .. } = bucket.level(&self.quota, now);
        let remaining = i64::try_from(remaining).expect("at most 2^53");
        Expected { reply: vec![i64::from(retry == 0), remaining, micros(reset), retry], stored: self.stored }
    }

    fn give_back(&mut self, cost: std::num::NonZeroU64, now: u64) -> Expected {
        if let Some((tokens, last)) = self.stored {
            let (bucket, _) = Bucket::heal(tokens, last, &self.quota, now);
            self.put(Some(bucket.give_back(&self.quota, cost, now).parts()), true);
        }
        Expected { reply: vec![1], stored: self.stored }
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).expect("bounded")
}

/// Sends a whole history at once, then compares each answer with the model's.
fn compare(connection: &mut redis::Connection, script: &str, quota: Quota, steps: &[Step]) -> TestCaseResult {
    const KEY: &str = "bouncer:bucket:{model}";
    let mut pipe = redis::pipe();
    pipe.del(KEY).ignore();
    let mut model = Model { quota, stored: None, expires: false };
    let mut now = NOW;
    let mut expected = Vec::new();
    for step in steps {
        let (mode, cost, answer) = match step {
            Step::Wait(pause) => {
                now += pause;
                continue;
            }
            Step::Back(pause) => {
                now -= pause;
                continue;
            }
            Step::Store(text, ttl) => {
                pipe.set(KEY, text).ignore();
                if *ttl {
                    pipe.pexpire(KEY, 1_000_000_000).ignore();
                }
                model.put(Some(parse(text.as_bytes())), *ttl);
                continue;
            }
            Step::Shift(share, shift) => {
                let last = now.saturating_add_signed(*shift);
                let text = format!("{share} {last}");
                pipe.set(KEY, &text).ignore();
                model.put(Some(parse(text.as_bytes())), false);
                continue;
            }
            Step::Delete => {
                pipe.del(KEY).ignore();
                model.put(None, false);
                continue;
            }
            Step::List => {
                pipe.del(KEY).ignore().rpush(KEY, "x").ignore();
                model.put(Some((f64::NAN, f64::NAN)), false);
                continue;
            }
            Step::Take(share) => {
                let cost = cost_of(*share, &quota);
                ("take", cost, model.take(cost, now))
            }
            Step::GiveBack(share) => {
                let cost = cost_of(*share, &quota);
                ("give_back", cost, model.give_back(cost, now))
            }
        };
        pipe.cmd("EVALSHA").arg(script).arg(1).arg(KEY).arg(mode);
        pipe.arg(quota.rate.count.get()).arg(period(&quota)).arg(quota.burst.get()).arg(cost.get());
        pipe.arg(now / 1_000_000).arg(now % 1_000_000);
        pipe.cmd("GET").arg(KEY).pttl(KEY);
        expected.push(answer);
    }
    let answers: Vec<Value> = pipe.query(connection).expect("redis answers");
    prop_assert_eq!(answers.len(), expected.len() * 3);
    for (answer, expected) in answers.chunks_exact(3).zip(expected) {
        let reply: Vec<i64> = match &answer[0] {
            Value::Int(number) => vec![*number],
            other => redis::from_redis_value_ref(other).expect("whole numbers"),
        };
        prop_assert_eq!(reply, expected.reply);
        let stored: Option<Vec<u8>> = redis::from_redis_value_ref(&answer[1]).expect("a string or nothing");
        let ttl: i64 = redis::from_redis_value_ref(&answer[2]).expect("a number");
        prop_assert_eq!(stored.as_deref().map(parse), expected.stored, "kept {:?}", stored);
        if let Some(text) = stored {
            prop_assert!(!text.windows(2).any(|pair| pair == b"e+"), "an exponent in {:?}", text);
            prop_assert!(ttl > 0, "a TTL of {}", ttl);
        }
    }
    Ok(())
}

#[test]
fn the_script_and_the_model_agree_to_the_last_bit() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let text = script_on("{ARGV[#ARGV - 1], ARGV[#ARGV]}");
    let script: String = redis::cmd("SCRIPT").arg("LOAD").arg(&text).query(&mut connection).expect("a good script");
    let connection = std::cell::RefCell::new(connection);
    let mut runner =
        TestRunner::new(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() });
    runner
        .run(&(quotas(), steps()), |(quota, steps)| compare(&mut connection.borrow_mut(), &script, quota, &steps))
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A store on a script of the test's own, and its limiter once it has tried to connect.
async fn with_script(server: &RedisServer, text: &str) -> (Arc<RedisStore>, RedisLimiter) {
    let config = config::Redis { timeout: GENEROUS, ..config::Redis::at(server.url()) };
    let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
    let store = RedisStore::with_script(&config, &metrics, Script::new(text)).expect("a good URL");
    let limiter = RedisLimiter::new(Arc::clone(&store));
    limiter.settled().await;
    (store, limiter)
}

#[tokio::test]
async fn an_answer_that_is_none_of_the_scripts_is_a_failure_and_no_panic() {
    let server = RedisServer::start();
    let answers = ["'hello'", "{}", "{1}", "{1, 2, 3}", "{1, 2, 3, 'x'}", "{1, 2, 3, 4, 5}", "{1, -7, 3, 0}", "nil"];
    for answer in answers {
        let (store, limiter) = with_script(&server, &format!("return {answer}")).await;
        let status = store.status();
        assert!(!status.up, "{answer}");
        assert_eq!(status.last_error, Some(StoreError::Shape.to_string()), "{answer}");
        let key = BucketKey::tenant("acme");
        let take = limiter.take(&[charge(&key, quota(1, GENEROUS, 1), 1)]).await;
        assert!(matches!(take, Err(StoreError::Down)), "{answer}: {take:?}");
    }
}

#[test]
fn an_answer_that_the_script_never_gives_is_a_failure_even_in_its_shape() {
    let key = BucketKey::tenant("acme");
    let (small, large) = (charge(&key, quota(1, GENEROUS, 5), 1), charge(&key, quota(1, GENEROUS, 5), 6));
    let read = |charge: Charge<'_>, numbers: [i64; 4]| {
        let answer = numbers.map(Value::Int);
        outcomes(&answer, &[charge]).map(|outcomes| tally(&[charge], outcomes))
    };
    let level = |remaining| Level { limit: 5, remaining, reset: Duration::from_micros(9) };
    let never = Take::Refused { level: level(4), retry_after: Duration::MAX };
    assert_eq!(read(small, [1, 4, 9, 0]).ok(), Some(Take::Taken { level: level(4) }));
    assert_eq!(read(small, [1, i64::MAX, 9, 0]).ok(), Some(Take::Taken { level: level(5) }));
    assert_eq!(read(large, [0, 4, 9, -1]).ok(), Some(never));
    let longest = super::super::bucket::LONGEST_WAIT;
    assert!(read(small, [0, 0, longest, longest]).is_ok());
    for (charge, numbers) in [
        (small, [2, 4, 9, 0]),
        (small, [-1, 4, 9, 0]),
        (small, [1, 4, 9, 7]),
        (small, [0, 4, 9, 0]),
        (small, [1, -1, 9, 0]),
        (small, [1, 4, -1, 0]),
        (small, [1, 4, longest + 1, 0]),
        (small, [0, 0, 9, longest + 1]),
        (small, [0, 0, 9, i64::MAX]),
        (small, [0, 0, 9, -1]),
        (large, [0, 4, 9, -2]),
    ] {
        assert!(matches!(read(charge, numbers), Err(StoreError::Shape)), "{numbers:?}");
    }
}

#[test]
fn a_call_tells_redis_the_key_and_the_quota_and_no_time() {
    let key = BucketKey::tenant("acme");
    let charges = [charge(&key, quota(600, 60 * Duration::from_secs(1), 1200), 3)];
    let command = script::command("EVALSHA", "sha", Mode::Take, &charges);
    let words: Vec<String> = command
        .args_iter()
        .map(|word| match word {
            redis::Arg::Simple(word) => String::from_utf8(word.to_vec()).expect("text"),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(words, ["EVALSHA", "sha", "1", "bouncer:bucket:{acme}", "take", "600", "60000000", "1200", "3"]);
}

/// Log lines, as they come.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_outage_is_logged_when_it_begins_and_when_it_ends_and_not_per_request() {
    let lines = Lines::default();
    let writer = lines.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let mut server = RedisServer::start();
    let (store, limiter) = with_script(&server, Script::BUCKET).await;
    let key = BucketKey::tenant("acme");
    let charges = [charge(&key, quota(1, GENEROUS, 1), 1)];
    let wait_until = async |up: bool| {
        let deadline = Instant::now() + GENEROUS;
        while store.status().up != up {
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    server.stop();
    wait_until(false).await;
    for _ in 0..100 {
        limiter.take(&charges).await.expect_err("redis is gone");
    }
    server.restart();
    wait_until(true).await;
    let text = String::from_utf8(lines.0.lock().expect("no panic").clone()).expect("text");
    let levels: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(levels, ["INFO", "WARN", "INFO"], "{text}");
}

#[tokio::test]
async fn a_keeper_that_panics_keeps_again_and_is_not_counted_as_connected_meanwhile() {
    let panics = Arc::new(std::sync::atomic::AtomicUsize::new(2));
    let left = Arc::clone(&panics);
    let writer = move || {
        let panics = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        assert!(panics.is_err(), "the log of this test panics");
        std::io::sink()
    };
    let _guard = tracing::subscriber::set_default(tracing_subscriber::fmt().with_writer(writer).finish());
    let server = RedisServer::start();
    let (store, limiter) = with_script(&server, Script::BUCKET).await;
    let key = BucketKey::tenant("acme");
    let charges = [charge(&key, quota(1, GENEROUS, 1), 1)];
    let deadline = Instant::now() + GENEROUS;
    while let Err(error) = limiter.take(&charges).await {
        assert!(Instant::now() < deadline, "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(panics.load(Ordering::Relaxed), 0);
    assert_eq!(store.routes().len(), 1);
    assert!(store.status().up);
    assert_eq!(store.status().last_error, Some(StoreError::Panicked.to_string()));
}

#[tokio::test]
async fn a_call_that_failed_is_not_repeated() {
    let server = RedisServer::start();
    let text = "if KEYS[1] == 'bouncer:probe:{probe}' then return {1, 1, 0, 0} end \
                redis.call('INCR', 'test:runs') return redis.error_reply('BUSY as it were')";
    let (store, limiter) = with_script(&server, text).await;
    assert!(store.status().up);
    let key = BucketKey::tenant("acme");
    let take = limiter.take(&[charge(&key, quota(1, GENEROUS, 1), 1)]).await;
    assert!(matches!(take, Err(StoreError::Reply(_))), "{take:?}");
    let runs: u64 = redis::cmd("GET").arg("test:runs").query(&mut server.connection()).expect("redis answers");
    assert_eq!(runs, 1);
}
