//! What the configuration promises, rule by rule.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::admission::QueueBounds;
use crate::limit::BucketKey;

/// The shortest file there is.
const LEAST: &str = "
tiers: [{ name: T1, rate: 10/s }]
tenants: [{ id: acme, tier: T1, keys: [key_one] }]
pools: [{ name: default, max_in_flight: 50 }]
";

fn with(text: &str, env: &[(&str, &str)]) -> Result<Loaded, Faults> {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    read(Origin::File("bouncer.yaml".into()), text.as_bytes(), env)
}

fn loaded(text: &str, env: &[(&str, &str)]) -> Loaded {
    with(text, env).unwrap_or_else(|faults| panic!("{faults}"))
}

fn refused(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    with(text, env).map(|loaded| loaded.to_string()).unwrap_err().0.iter().map(Fault::to_string).collect()
}

fn demonstration(env: &[(&str, &str)]) -> Loaded {
    loaded(DEMONSTRATION, env)
}

fn least_and(extra: &str) -> String {
    format!("{LEAST}{extra}")
}

fn queue_lengths(loaded: &Loaded) -> Vec<(&str, usize)> {
    loaded.config.tiers.iter().map(|tier| (tier.name.as_str(), tier.queue.length)).collect()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config")
}

fn stems(extension: &str) -> BTreeSet<String> {
    let files = fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|it| it == extension));
    files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn every_bad_file_is_refused_with_exactly_its_message() {
    let names = stems("yaml");
    assert_eq!(names, stems("expected"), "each .yaml has its .expected");
    assert!(names.len() > 100, "the fixtures were not found");
    let mut wrong = Vec::new();
    for name in names {
        let bytes = fs::read(fixtures().join(format!("{name}.yaml"))).unwrap();
        let expected = fs::read_to_string(fixtures().join(format!("{name}.expected"))).unwrap();
        let found = match read(Origin::File(format!("{name}.yaml").into()), &bytes, std::iter::empty()) {
            Ok(_) => "accepted".to_owned(),
            Err(faults) => format!("{faults}\n"),
        };
        if found != expected {
            wrong.push(format!("{name}: {found}instead of {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_message_shows_a_key_or_a_password() {
    for name in stems("expected") {
        let text = fs::read_to_string(fixtures().join(format!("{name}.expected"))).unwrap();
        for secret in ["key_one", "key_secret", "key secret", "sécret", "hunter2", "12345678", "abab"] {
            assert!(!text.contains(secret), "{name} shows {secret}");
        }
    }
}

#[test]
fn the_example_file_is_the_demonstration_set() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("bouncer.yaml");
    let file = load(Some(&path), std::iter::empty()).unwrap();
    let built_in = load(None, std::iter::empty()).unwrap();
    assert_eq!(file.config, built_in.config);
    assert_eq!(file.origin, Origin::File(path));
    assert_eq!(built_in.origin, Origin::Demonstration);
    assert!(built_in.warnings.iter().any(|it| it.contains("demonstration set")), "{:?}", built_in.warnings);
    assert!(file.warnings.iter().all(|it| !it.contains("demonstration set")), "{:?}", file.warnings);
    for tenant in ["acme", "globex", "initech"] {
        let warning = format!("tenant {tenant} has a key of the public example");
        assert!(file.warnings.contains(&warning), "{:?}", file.warnings);
    }
}

#[test]
fn the_demonstration_set_knows_the_three_tiers_and_their_keys() {
    let config = demonstration(&[]).config;
    let tiers: Vec<_> = config.tiers.iter().map(|it| (it.rank, it.name.as_str(), it.quota.burst.get())).collect();
    assert_eq!(tiers, [(0, "T3", 400), (1, "T2", 100), (2, "T1", 20)]);
    let keys: [&[u8]; 3] = [b"key_t3_demo", b"key_t2_demo", b"key_t1_demo"];
    for ((tenant, key), tier) in config.tenants.iter().zip(keys).zip(&config.tiers) {
        assert_eq!(tenant.keys, [KeyHash::of(key)]);
        assert!(Arc::ptr_eq(&tenant.tenant.tier, tier));
        assert_eq!(tenant.tenant.bucket, BucketKey::tenant(&tenant.tenant.id));
    }
    assert_eq!(config.redis, None);
}

#[test]
fn what_a_file_leaves_out_is_as_the_example_shows_it() {
    let (least, example) = (from_yaml(LEAST).unwrap(), demonstration(&[]).config);
    assert_eq!(least.listen, example.listen);
    assert_eq!(least.credentials, example.credentials);
    assert_eq!(least.public, example.public);
    assert_eq!(least.shutdown, example.shutdown);
    assert_eq!((least.lease, &least.log), (example.lease, &example.log));
    assert_eq!(least.pools, example.pools);
    let tier = &least.tiers[0];
    assert_eq!(tier.queue, QueueBounds { length: 1000, max_wait: Duration::from_secs(5) });
    assert_eq!((tier.weight.get(), tier.on_outage), (1, None));
    let redis = from_yaml(&least_and("redis: { url: redis://localhost }")).unwrap().redis.unwrap();
    assert_eq!((redis.timeout, redis.on_outage), (Duration::from_millis(50), OnOutage::Allow));
}

#[test]
fn every_field_can_be_set() {
    let config = from_yaml(
        "
listen: { grpc: 'unix:/run/bouncer.sock', admin: '[::1]:0' }
redis: { url: 'redis://user:p%40ss@redis.example:6380/3', prefix: team.a, timeout: 2s, on_outage: deny }
credentials: { headers: [X-Key], forward: true }
public: []
tiers: [{ name: gold.1, rate: 5000/day, burst: 9007199254740992, weight: 7, on_outage: local,
          queue: { length: 0, max_wait: 1m 30s } }]
tenants: [{ id: 'Acme & Sons, Inc.', tier: gold.1, keys: [key_one] }]
pools: [{ name: default, max_in_flight: 1, order: strict }]
shutdown: { delay: 0s, drain: 0s, held: move }
lease: 1m
log: { level: trace, format: json }
",
    )
    .unwrap();
    assert_eq!(config.listen.grpc, Address::Unix("/run/bouncer.sock".into()));
    assert_eq!(config.listen.admin, "[::1]:0".parse().unwrap());
    let redis = config.redis.unwrap();
    assert_eq!(redis.servers, RedisServers::Single("redis://user:p%40ss@redis.example:6380/3".into()));
    assert_eq!(redis.servers.to_string(), "redis://<redacted>@redis.example:6380/3");
    assert_eq!(redis.prefix, "team.a");
    assert_eq!((redis.timeout, redis.on_outage), (Duration::from_secs(2), OnOutage::Deny));
    assert_eq!(config.credentials, Credentials { headers: vec!["x-key".parse().unwrap()], forward: true });
    assert!(config.public.is_empty());
    let tier = &config.tiers[0];
    assert_eq!((tier.quota.rate.count.get(), tier.quota.rate.per), (5000, Duration::from_secs(86_400)));
    assert_eq!((tier.quota.burst.get(), tier.weight.get(), tier.on_outage), (1 << 53, 7, Some(OnOutage::Local)));
    assert_eq!(tier.queue, QueueBounds { length: 0, max_wait: Duration::from_secs(90) });
    assert_eq!(config.tenants[0].tenant.id, "Acme & Sons, Inc.");
    assert_eq!(config.pools[0].max_in_flight.get(), 1);
    assert_eq!(config.shutdown, Shutdown { delay: Duration::ZERO, drain: Duration::ZERO, held: Held::Move });
    assert_eq!(config.lease, Duration::from_secs(60));
    assert_eq!(config.log, Log { level: tracing::Level::TRACE, format: LogFormat::Json });
}

#[test]
fn redis_may_be_a_cluster_or_the_master_that_sentinels_know() {
    let servers = |section: &str| from_yaml(&least_and(section)).unwrap().redis.unwrap().servers;
    let cluster = servers("redis: { cluster: ['redis://:hunter2@a:7000', redis://b/0] }");
    assert_eq!(cluster, RedisServers::Cluster(vec!["redis://:hunter2@a:7000".into(), "redis://b/0".into()]));
    let urls = vec!["redis://:hunter2@a:26379".to_owned(), "redis://b:26379".to_owned()];
    let sentinel = |service: &str| RedisServers::Sentinel { service: service.to_owned(), urls: urls.clone() };
    let given =
        |service: &str| format!("redis: {{ sentinel: {{ service: '{service}', urls: [{}, {}] }} }}", urls[0], urls[1]);
    assert_eq!(servers(&given("my_main.1")), sentinel("redis://my_main.1"));
    assert_eq!(servers(&given("redis://me:hunter2@main/3")), sentinel("redis://me:hunter2@main/3"));
    assert_eq!(format!("{cluster:?}"), "cluster of redis://<redacted>@a:7000, redis://b/0");
    let shown = "<redacted>@main/3 by sentinels redis://<redacted>@a:26379, redis://b:26379";
    assert_eq!(format!("{:?}", sentinel("redis://me:hunter2@main/3")), shown);
}

#[test]
fn an_alias_for_one_redis_beside_a_cluster_in_the_file_is_refused_and_both_are_named() {
    let file = least_and("redis: { cluster: [redis://a] }");
    let expected = [
        "redis.url: found redis.url beside redis.cluster, expected one of redis.url, redis.cluster and redis.sentinel \
         alone (REDIS_URL)",
        "redis.cluster: found redis.cluster beside redis.url, expected one of redis.url, redis.cluster and \
         redis.sentinel alone (bouncer.yaml)",
    ];
    assert_eq!(refused(&file, &[("REDIS_URL", "redis://b")]), expected);
}

#[test]
fn variables_can_name_a_cluster_or_sentinels() {
    let servers = |env: &[(&str, &str)]| loaded(LEAST, env).config.redis.unwrap().servers.to_string();
    assert_eq!(
        servers(&[("BOUNCER_REDIS__CLUSTER", "[redis://a:1, redis://b:2]")]),
        "cluster of redis://a:1, redis://b:2"
    );
    let sentinel =
        [("BOUNCER_REDIS__SENTINEL__SERVICE", "main"), ("BOUNCER_REDIS__SENTINEL__URLS", "[\"redis://a:1\"]")];
    assert_eq!(servers(&sentinel), "main by sentinels redis://a:1");
}

#[test]
fn buckets_begin_with_the_prefix() {
    let config = from_yaml(&least_and("redis: { url: redis://localhost, prefix: staging }")).unwrap();
    assert_eq!(config.tenants[0].tenant.bucket.as_str(), "staging:bucket:{acme}");
}

#[test]
fn burst_is_twice_the_number_in_the_rate_as_written() {
    for (rate, burst) in [("10/s", 20), ("600/min", 1200), ("1/day", 2), ("999999999999999/h", 1_999_999_999_999_998)] {
        let config = from_yaml(&LEAST.replace("10/s", rate)).unwrap();
        assert_eq!(config.tiers[0].quota.burst.get(), burst, "{rate}");
    }
}

#[test]
fn a_hashed_key_is_the_key() {
    let hash = "sha256:2C70E12B7A0646F92279F427C7B38E7334D8E5389CFF167A1DC30E73F826B683";
    let config = from_yaml(&LEAST.replace("key_one", hash)).unwrap();
    assert_eq!(config.tenants[0].keys, [KeyHash::of(b"key")]);
    let config = from_yaml(&LEAST.replace("key_one", &hash.to_lowercase())).unwrap();
    assert_eq!(config.tenants[0].keys, [KeyHash::of(b"key")]);
}

#[test]
fn space_around_a_key_is_dropped_with_a_warning_that_does_not_show_it() {
    for written in [r#""key_one\n""#, r#"" key_one\r""#, r#""\uFEFFkey_one""#, r#""key_one\u00a0""#] {
        let loaded = loaded(&LEAST.replace("key_one", written), &[]);
        assert_eq!(loaded.config.tenants[0].keys, [KeyHash::of(b"key_one")], "{written}");
        let warning = "tenants[0].keys[0]: the white space around the key is not taken as part of it";
        assert_eq!(loaded.warnings[0], warning);
    }
    let loaded = loaded(LEAST, &[("REDIS_URL", " redis://:hunter2@localhost\n")]);
    let servers = RedisServers::Single("redis://:hunter2@localhost".into());
    assert_eq!(loaded.config.redis.unwrap().servers, servers);
    assert_eq!(loaded.warnings, ["REDIS_URL: the white space around the value was dropped"]);
}

#[test]
fn timeout_of_redis_above_a_second_is_advised_against() {
    let warnings =
        |timeout| loaded(&least_and(&format!("redis: {{ url: redis://r, timeout: {timeout} }}")), &[]).warnings;
    assert_eq!(warnings("1s"), [""; 0]);
    let advice = warnings("1001ms");
    assert!(advice.len() == 1 && advice[0].starts_with("redis.timeout is 1s 1ms: "), "{advice:?}");
}

#[test]
fn later_wins_file_then_aliases_then_prefixed_variables() {
    let file = least_and("redis: { url: redis://file, timeout: 1s }");
    let url = |env| loaded(&file, env).config.redis.unwrap().servers.to_string();
    assert_eq!(url(&[]), "redis://file");
    assert_eq!(url(&[("REDIS_URL", "redis://alias")]), "redis://alias");
    let both = [("BOUNCER_REDIS__URL", "redis://prefixed"), ("REDIS_URL", "redis://alias")];
    assert_eq!(url(&both), "redis://prefixed");
    assert_eq!(loaded(&file, &both).config.redis.unwrap().timeout, Duration::from_secs(1), "the rest stays");
    let cap = |env| loaded(LEAST, env).config.pools[0].max_in_flight.get();
    assert_eq!(cap(&[("MAX_IN_FLIGHT", "7")]), 7);
    assert_eq!(cap(&[("MAX_IN_FLIGHT", "7"), ("BOUNCER_POOLS__0__MAX_IN_FLIGHT", "8")]), 8);
}

#[test]
fn aliases_set_all_tiers_and_a_tiers_own_length_beats_the_general_one() {
    let demo = demonstration(&[("MAX_QUEUE_LENGTH", "5"), ("MAX_QUEUE_LENGTH_T1", "0"), ("MAX_QUEUE_WAIT_MS", "250")]);
    assert_eq!(queue_lengths(&demo), [("T3", 5), ("T2", 5), ("T1", 0)]);
    assert!(demo.config.tiers.iter().all(|tier| tier.queue.max_wait == Duration::from_millis(250)));
    let only_one = demonstration(&[("MAX_QUEUE_LENGTH_T2", "9")]);
    assert_eq!(queue_lengths(&only_one), [("T3", 1000), ("T2", 9), ("T1", 1000)]);
}

#[test]
fn a_tiers_own_variable_is_found_by_its_name_then_in_any_case() {
    let tiers = "[{ name: pay-as.you_go, rate: 10/s }, { name: T1, rate: 10/s }, { name: t1, rate: 10/s }]";
    let file = LEAST.replace("[{ name: T1, rate: 10/s }]", tiers);
    let lengths = [("MAX_QUEUE_LENGTH_PAY_AS_YOU_GO", "1"), ("MAX_QUEUE_LENGTH_T1", "2"), ("MAX_QUEUE_LENGTH_t1", "3")];
    assert_eq!(queue_lengths(&loaded(&file, &lengths)), [("pay-as.you_go", 1), ("T1", 2), ("t1", 3)]);
    let folded = loaded(&file, &lengths[..2]);
    assert_eq!(queue_lengths(&folded), [("pay-as.you_go", 1), ("T1", 2), ("t1", 2)]);
}

#[test]
fn an_alias_that_fits_nothing_is_reported() {
    let loaded = loaded(LEAST, &[("MAX_QUEUE_LENGTH_T9", "5")]);
    assert_eq!(loaded.warnings[0], "MAX_QUEUE_LENGTH_T9: the file has no tier of this name");
}

#[test]
fn empty_aliases_count_as_not_set() {
    let names = ["REDIS_URL", "RABBITMQ_URL", "MAX_IN_FLIGHT", "MAX_QUEUE_LENGTH", "MAX_QUEUE_LENGTH_T1"];
    let empty: Vec<_> = names.iter().map(|name| (*name, "")).chain([("MAX_QUEUE_WAIT_MS", " \n")]).collect();
    let loaded = loaded(DEMONSTRATION, &empty);
    assert_eq!(loaded.config, demonstration(&[]).config);
    assert!(loaded.overrides.is_empty());
}

#[test]
fn service_links_of_kubernetes_are_nobodys_settings() {
    let links = [
        "BOUNCER_SERVICE_HOST",
        "BOUNCER_SERVICE_PORT",
        "BOUNCER_SERVICE_PORT_GRPC",
        "BOUNCER_PORT",
        "BOUNCER_PORT_9191_TCP",
        "BOUNCER_PORT_9191_TCP_PROTO",
        "BOUNCER_PORT_9191_TCP_PORT",
        "BOUNCER_PORT_9191_TCP_ADDR",
        "BOUNCER_REDIS_MASTER_SERVICE_HOST",
        "BOUNCER_REDIS_PORT",
        "BOUNCER_REDIS_PORT_6379_TCP_ADDR",
    ];
    let env: Vec<_> = links.iter().map(|name| (*name, "tcp://10.0.0.1:9191")).collect();
    assert_eq!(demonstration(&env).config, demonstration(&[]).config);
}

#[test]
fn a_prefixed_variable_reaches_every_level() {
    let env = [
        ("BOUNCER_LEASE", "20s"),
        ("BOUNCER_LISTEN__ADMIN", "0.0.0.0:9999"),
        ("BOUNCER_CREDENTIALS__FORWARD", "true"),
        ("BOUNCER_CREDENTIALS__HEADERS", "[x-one, x-two]"),
        ("BOUNCER_TIERS__0__QUEUE__LENGTH", "3"),
        ("BOUNCER_TENANTS__0__KEYS__0", "12345678"),
        ("BOUNCER_SHUTDOWN", "{drain=1s}"),
        ("BOUNCER_SHUTDOWN__DELAY", "\"1s\""),
    ];
    let loaded = loaded(LEAST, &env);
    let config = &loaded.config;
    assert_eq!(config.lease, Duration::from_secs(20));
    assert_eq!(config.listen.admin, "0.0.0.0:9999".parse().unwrap());
    assert!(config.credentials.forward);
    assert_eq!(config.credentials.headers, ["x-one", "x-two"]);
    assert_eq!(config.tiers[0].queue.length, 3);
    assert_eq!(config.tenants[0].keys, [KeyHash::of(b"12345678")], "a variable is text, whatever it looks like");
    assert_eq!((config.shutdown.drain, config.shutdown.delay), (Duration::from_secs(1), Duration::from_secs(1)));
    let queue =
        Override { path: "tiers[0].queue.length".to_owned(), variable: "BOUNCER_TIERS__0__QUEUE__LENGTH".to_owned() };
    assert!(loaded.overrides.contains(&queue), "{:?}", loaded.overrides);
}

#[test]
fn a_fault_names_the_variable_it_came_from() {
    let env = [
        ("BOUNCER_CREDENTIALS__FORWARD", "maybe"),
        ("BOUNCER_LEASE", ""),
        ("BOUNCER_POOLS__1__MAX_IN_FLIGHT", "5"),
        ("BOUNCER_REDIS_URL", "redis://:hunter2@localhost"),
        ("BOUNCER_TIERS__0__QUEUE__LENGTH", "-1"),
        ("BOUNCER_TIERS__T1__RATE", "5/s"),
        ("MAX_IN_FLIGHT", "0"),
        ("MAX_QUEUE_LENGTH", "many"),
        ("MAX_QUEUE_WAIT_MS", "5s"),
        ("REDIS_URL", "http://:hunter2@localhost"),
    ];
    let expected = [
        "MAX_IN_FLIGHT: found \"0\", expected a whole number from 1 to 1000000000 (environment)",
        "MAX_QUEUE_WAIT_MS: found \"5s\", expected whole milliseconds from 1 to 86400000 (environment)",
        "MAX_QUEUE_LENGTH: found \"many\", expected a whole number from 0 to 1000000000 (environment)",
        "pools.1.max_in_flight: found \"1\" for a place in a list, expected a number from 0 to 0 \
         (BOUNCER_POOLS__1__MAX_IN_FLIGHT)",
        "tiers.t1.rate: found \"t1\" for a place in a list, expected a number from 0 to 0 (BOUNCER_TIERS__T1__RATE)",
        "redis_url: found an unknown field, expected listen, redis, rabbitmq, credentials, public, tiers, tenants, \
         pools, shutdown, lease or log; two underscores lead into a field (BOUNCER_REDIS_URL)",
        "redis.url: found http://<redacted>@localhost/, expected a URL such as redis://localhost:6379 (REDIS_URL)",
        "credentials.forward: found \"maybe\", expected true or false (BOUNCER_CREDENTIALS__FORWARD)",
        "tiers[0].queue.length: found \"-1\", expected a whole number from 0 to 1000000000 \
         (BOUNCER_TIERS__0__QUEUE__LENGTH)",
        "lease: found \"\", expected a duration above zero and up to 1day, such as 250ms or 5s (BOUNCER_LEASE)",
    ];
    assert_eq!(refused(LEAST, &env), expected);
}

#[test]
fn an_escape_after_a_letter_beyond_ascii_is_neither_a_panic_nor_a_cut() {
    for value in ["\"é\\n\"", "[\"ééé/x\\n\"]", "{host=\"é\\t\"}"] {
        let faults = refused(LEAST, &[("BOUNCER_LOG", value)]);
        assert_eq!(faults, ["log: found text, expected a map of level, format (BOUNCER_LOG)"], "{value}");
    }
}

#[test]
fn no_depth_of_a_variable_exhausts_the_stack() {
    let (name, value) = (format!("BOUNCER_LOG{}", "__X".repeat(30_000)), "[{x=".repeat(30_000));
    assert_eq!(refused(LEAST, &[(&name, "1")]).len(), 1);
    assert_eq!(
        refused(LEAST, &[("BOUNCER_LOG", &value)]),
        ["log: found text, expected a map of level, format (BOUNCER_LOG)"]
    );
    // The scanner of YAML takes quadratic time.
    assert_eq!(refused(&least_and(&format!("log: {}", "[".repeat(5_000))), &[]).len(), 1);
}

#[test]
fn rabbitmq_in_the_environment_is_refused_like_in_a_file() {
    let url = ("RABBITMQ_URL", "amqp://guest:hunter2@localhost:5672/%2f");
    let alone = "rabbitmq: found rabbitmq without redis, expected redis beside it: tickets without shared slots order \
                 nothing (RABBITMQ_URL)";
    assert_eq!(refused(DEMONSTRATION, &[url]), [alone]);
    let both = loaded(DEMONSTRATION, &[url, ("REDIS_URL", "redis://localhost")]);
    let read = both.config.rabbitmq.expect("a broker");
    assert_eq!(
        (read.redacted_url().as_str(), read.prefix.as_str()),
        ("amqp://<redacted>@localhost:5672/%2f", "bouncer")
    );
    let wrong = ("RABBITMQ_URL", "http://guest:hunter2@localhost");
    assert_eq!(
        refused(DEMONSTRATION, &[wrong, ("REDIS_URL", "redis://localhost")]),
        ["rabbitmq.url: found http://<redacted>@localhost/, expected a URL such as \
             amqp://user:password@localhost:5672/%2f (RABBITMQ_URL)"]
    );
}

#[test]
fn faults_are_counted_and_listed_one_a_line() {
    let one = with("lease: 10s\nlease: 10s", &[]).unwrap_err().to_string();
    assert!(one.starts_with("configuration refused: 1 fault\n  line 2, column 1: "), "{one}");
    let three = with("lease: 10s", &[]).unwrap_err().to_string();
    assert!(three.starts_with("configuration refused: 3 faults\n  tiers: "), "{three}");
    assert_eq!(three.lines().count(), 4);
}

#[test]
fn a_file_that_cannot_be_read_is_one_fault() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing.yaml");
    for path in [missing.as_path(), directory.path()] {
        let faults = load(Some(path), std::iter::empty()).unwrap_err();
        assert_eq!(faults.0.len(), 1);
        assert_eq!(faults.0[0].path, path.display().to_string());
    }
}

#[test]
fn everything_public_is_worth_a_warning() {
    let loaded = loaded(&least_and("public: [/*]"), &[]);
    assert_eq!(loaded.warnings[0], "public[0]: every path is public, so no request needs a key");
}

#[test]
fn check_prints_what_would_run() {
    let env = [("REDIS_URL", "redis://:hunter2@localhost:6379/1?protocol=resp3"), ("MAX_IN_FLIGHT", "7")];
    let loaded = loaded(&least_and("log: { format: json }"), &env);
    let expected = "\
configuration  bouncer.yaml
listen         grpc 127.0.0.1:9191, admin 127.0.0.1:9192
log            level info, format json
shutdown       delay 2s, drain 30s, held refuse
redis          redis://<redacted>@localhost:6379/1?<redacted>, prefix bouncer, timeout 50ms, on_outage allow
rabbitmq       none: each replica orders its own queue, by tier over all of them
lease          10s, after which a silent replica's slots are reclaimed
credentials    authorization, x-api-key, removed before the upstream
public         /health
tenants        1 with 1 key
tier           T1: rate 10/s, burst 20, weight 1, queue 1000 for up to 5s, 1 tenant
pool           default: max_in_flight 7, order strict
environment    pools[0].max_in_flight set by MAX_IN_FLIGHT
environment    redis.url set by REDIS_URL
";
    assert_eq!(loaded.to_string(), expected);
    assert!(!format!("{loaded:?}").contains("hunter2"));
}

#[test]
fn a_hundred_thousand_tenants_load() {
    use std::fmt::Write;
    let mut text = LEAST.lines().filter(|line| !line.starts_with("tenants")).collect::<Vec<_>>().join("\n");
    text.push_str("\ntenants:\n");
    for n in 0..100_000 {
        writeln!(text, "  - {{ id: tenant-{n}, tier: T1, keys: [key_{n:032}] }}").unwrap();
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let start = std::time::Instant::now();
    let loaded = load(Some(file.path()), std::iter::empty()).unwrap();
    println!("loaded 100,000 tenants in {:?}", start.elapsed());
    assert_eq!(loaded.config.tenants.len(), 100_000);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(Origin::Demonstration, &bytes, std::iter::empty());
    }

    #[test]
    fn no_yaml_panics(text in r#"([a-z]{0,6}|[\[\]{}:,\-&*!|>'"%@`#?\n ]|\n {0,4}|tiers|rate|\.nan|1e999|~|<<|\u{feff}){0,40}"#) {
        let _ = from_yaml(&text);
    }

    #[test]
    fn no_value_of_a_field_panics(field in 0..20_usize, value in r#"("|'|\[|\{)?[ -~é\n]{0,20}"#) {
        let fields = [
            "listen", "redis", "rabbitmq", "credentials", "public", "tiers", "tenants", "pools", "shutdown", "lease",
            "log", "listen__grpc", "redis__url", "public__0", "tiers__0__rate", "tiers__0__queue__max_wait",
            "tenants__0__keys__0", "tenants__0__id", "pools__0", "x__0__",
        ];
        let name = format!("BOUNCER_{}", fields[field].to_uppercase());
        let _ = with(LEAST, &[(&name, &value)]);
        let _ = with(&least_and(&format!("{}: {value}", fields[field])), &[("MAX_QUEUE_LENGTH", &value)]);
    }

    #[test]
    fn no_key_is_ever_shown(key in "[a-z]{12}[0-9]{12}", mangled in 0..5_usize) {
        let written = match mangled {
            0 => format!("{key} {key}"),
            1 => format!("sha256:{key}"),
            2 => format!("\"{key}\\x07\""),
            3 => format!("{{ {key}: {key} }}"),
            _ => format!("[{key}]"),
        };
        let faults = from_yaml(&LEAST.replace("key_one", &written)).unwrap_err().to_string();
        prop_assert!(!faults.contains(&key), "{faults}");
    }
}
