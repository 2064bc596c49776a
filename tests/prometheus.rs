//! What operators look at, against a real Prometheus: it scrapes a real bouncer and its Envoy under load, with the shipped
//! configuration but for addresses and intervals, and answers every expression of the dashboard and of the alert rules.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::Value;
use support::client::{Client, fetch};
use support::ports::Port;
use support::process::Process;
use support::redis::RedisServer;
use support::stack::{Stack, StackOptions};
use support::wait::eventually;
use tokio::task::JoinSet;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A slow machine scrapes late, and the expressions are asked one after the other.
const PATIENCE: Duration = Duration::from_secs(60);

/// Of replicas that share slots. A bouncer that runs alone has nothing to say there, if it knows them at all.
const OF_REPLICAS: [&str; 4] = [
    "bouncer_handovers_total",
    "bouncer_stale_tickets_total",
    "bouncer_grants_lost_total",
    "bouncer_lease_expiries_total",
];

/// Counted when something is wrong, which this load does not make wrong. There, and 0.
const ZERO_WHEN_WELL: [&str; 2] = ["envoy_http_rbac_denied", "envoy_cluster_upstream_rq_pending_overflow"];

/// Two slots, short queues and a small bucket, so that a few clients see every kind of answer.
const CONFIG: &str = "
redis: { url: REDIS, timeout: 2s }
tiers:
  - { name: T3, rate: 1000/s, burst: 1000, queue: { length: 8, max_wait: 2s } }
  - { name: T2, rate: 10/min, burst: 1, queue: { length: 8, max_wait: 2s } }
  - { name: T1, rate: 1000/s, burst: 1000, queue: { length: 2, max_wait: 20ms } }
tenants:
  - { id: acme, tier: T3, keys: [key_t3_demo] }
  - { id: globex, tier: T2, keys: [key_t2_demo] }
  - { id: initech, tier: T1, keys: [key_t1_demo] }
pools:
  - { name: default, max_in_flight: 2 }
";

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn promtool(arguments: &[&str]) -> (bool, String) {
    let ran = Command::new("promtool").current_dir(ROOT).args(arguments).output();
    let ran = ran.unwrap_or_else(|error| panic!("promtool: {error}; `make test` installs it"));
    (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

#[test]
fn promtool_finds_no_fault_in_configuration_and_rules() {
    for arguments in [["check", "config", "prometheus/prometheus.yml"], ["check", "rules", "prometheus/alerts.yml"]] {
        let (well, said) = promtool(&arguments);
        assert!(well, "{said}");
    }
}

#[test]
fn each_alert_fires_on_what_it_is_for_and_on_nothing_less() {
    let (well, said) = promtool(&["test", "rules", "tests/prometheus/alerts.test.yml"]);
    assert!(well, "{said}");
    let cases = read("tests/prometheus/alerts.test.yml");
    for (alert, _) in alerts() {
        let fired = cases.split(&format!("alertname: {alert}\n")).skip(1).any(|case| case.contains("exp_alerts:"));
        assert!(fired, "no case in which {alert} fires");
    }
}

/// Each alert and its expression.
fn alerts() -> Vec<(String, String)> {
    let rules: serde_yaml::Value = serde_yaml::from_str(&read("prometheus/alerts.yml")).unwrap();
    let groups = rules["groups"].as_sequence().unwrap().iter();
    let text = |rule: &serde_yaml::Value, field: &str| rule[field].as_str().unwrap().to_owned();
    groups
        .flat_map(|group| group["rules"].as_sequence().unwrap())
        .map(|rule| (text(rule, "alert"), text(rule, "expr")))
        .collect()
}

/// Each panel's title with one of its expressions, Grafana's one variable filled in.
fn panels() -> Vec<(String, String)> {
    let dashboard: Value = serde_json::from_str(&read("grafana/dashboards/bouncer.json")).unwrap();
    let mut found = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap().replace("$__rate_interval", "20s");
            assert!(!expression.contains('$'), "a variable that Grafana is not told: {expression}");
            found.push((panel["title"].as_str().unwrap().to_owned(), expression));
        }
    }
    found
}

/// The metrics of bouncer and of Envoy in an expression.
fn names(expression: &str) -> BTreeSet<&str> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    // Envoy's labels begin like its metrics.
    let is_label = |word: &str| expression.contains(&format!("{word}="));
    words.filter(|word| (word.starts_with("bouncer_") || word.starts_with("envoy_")) && !is_label(word)).collect()
}

fn mentions(expression: &str, any: &[&str]) -> bool {
    names(expression).iter().any(|name| any.contains(name))
}

/// A Prometheus of this test, with the shipped files.
struct Prometheus {
    _process: Process,
    port: Port,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    async fn start(bouncer: &str, envoy: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("bouncer-prometheus-").tempdir().unwrap();
        let mut config = read("prometheus/prometheus.yml");
        for (shipped, ours) in [
            ("bouncer-1:9192, bouncer-2:9192", bouncer),
            ("envoy:9901", envoy),
            ("scrape_interval: 5s", "scrape_interval: 500ms"),
            ("evaluation_interval: 5s", "evaluation_interval: 500ms"),
        ] {
            assert!(config.contains(shipped), "{shipped}");
            config = config.replace(shipped, ours);
        }
        let file = dir.path().join("prometheus.yml");
        std::fs::write(&file, config).unwrap();
        std::fs::write(dir.path().join("alerts.yml"), read("prometheus/alerts.yml")).unwrap();
        let port = Port::free();
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address={}", port.address()))
            .arg("--log.level=warn")
            .env("GOMAXPROCS", "1");
        let process = Process::spawn("prometheus", &mut command, &dir.path().join("prometheus.log"), None);
        let started = Self { _process: process, port, _dir: dir };
        let ready = format!("http://{}/-/ready", started.port.address());
        eventually("a ready Prometheus", PATIENCE, async || fetch(&ready).await.filter(|answer| answer.status == 200))
            .await;
        started
    }

    async fn api(&self, path: &str, query: &[(&str, &str)]) -> Value {
        let url = format!("http://{}/api/v1/{path}", self.port.address());
        let url = url::Url::parse_with_params(&url, query).unwrap();
        let answer = fetch(url.as_str()).await.expect("Prometheus answers").json();
        assert_eq!(answer["status"], "success", "{query:?}: {answer}");
        answer["data"].clone()
    }

    /// The values of an instant query.
    async fn values(&self, expression: &str) -> Vec<f64> {
        let data = self.api("query", &[("query", expression)]).await;
        assert_eq!(data["resultType"], "vector", "{expression}");
        let result = data["result"].as_array().unwrap();
        result.iter().map(|sample| sample["value"][1].as_str().unwrap().parse().unwrap()).collect()
    }

    /// Waits until an expression has values, one of which is above zero unless `zero` will do.
    async fn wait_for(&self, what: &str, expression: &str, zero: bool) {
        eventually(&format!("values of {what}: {expression}"), PATIENCE, async || {
            let values = self.values(expression).await;
            values.iter().any(|value| *value > 0.0 || zero && *value == 0.0).then_some(())
        })
        .await;
    }
}

/// Clients that go on until told to stop, or until nobody does.
struct Load {
    stop: Arc<AtomicBool>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(client: &Client) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut clients = JoinSet::new();
        let kinds = [
            // Six for two slots: some are always held.
            (6, Some("key_t3_demo"), "/delay/0.05", None),
            (2, Some("key_t2_demo"), "/anything", None),
            // More than its queue takes, and the higher tier rarely leaves it a slot in time.
            (4, Some("key_t1_demo"), "/anything", None),
            (1, None, "/anything", None),
            // Gone before its turn.
            (1, Some("key_t3_demo"), "/delay/0.05", Some(Duration::from_millis(15))),
        ];
        for (count, key, path, patience) in kinds {
            for _ in 0..count {
                clients.spawn(one_client(client.clone(), key, path, patience, Arc::clone(&stop)));
            }
        }
        Self { stop, clients }
    }

    async fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.unwrap();
        }
    }
}

async fn one_client(
    client: Client,
    key: Option<&'static str>,
    path: &'static str,
    patience: Option<Duration>,
    stop: Arc<AtomicBool>,
) {
    let end = Instant::now() + 3 * PATIENCE;
    while !stop.load(Ordering::Relaxed) && Instant::now() < end {
        let mut request = client.request(Method::GET, path);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let answered = async { client.send(request).await };
        match patience {
            // Dropping the request is what an impatient client does.
            Some(patience) => drop(tokio::time::timeout(patience, answered).await),
            None => drop(answered.await),
        }
        // Not to measure how fast this machine is.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn every_expression_of_dashboard_and_alerts_is_answered_from_real_metrics() {
    let mut redis = RedisServer::start();
    let stack = Stack::start(StackOptions::new(CONFIG.replace("REDIS", &redis.url()))).await;
    let address = |url: String| url::Url::parse(&url).unwrap().authority().to_owned();
    let (bouncer, envoy) = (address(stack.bouncer.admin_url("/")), address(stack.envoy.admin_url("/")));
    let prometheus = Prometheus::start(&bouncer, &envoy).await;
    let load = Load::start(&stack.client());

    // An outage of Redis, so that failures and the policy's answers are counted as well.
    prometheus.wait_for("calls of the store", "rate(bouncer_store_call_seconds_count[5s])", false).await;
    redis.stop();
    prometheus.wait_for("requests without Redis", "rate(bouncer_store_fallback_total[5s])", false).await;
    prometheus.wait_for("failures of Redis", "rate(bouncer_store_errors_total[5s])", false).await;
    redis.restart();
    prometheus.wait_for("Redis back", "bouncer_store_up", false).await;

    let (alerts, panels) = (alerts(), panels());
    assert!(panels.len() > 20 && alerts.len() > 7, "{} and {}", panels.len(), alerts.len());
    for (what, expression) in &panels {
        if mentions(expression, &OF_REPLICAS) {
            prometheus.values(expression).await;
        } else {
            prometheus.wait_for(what, expression, mentions(expression, &ZERO_WHEN_WELL)).await;
        }
    }
    for (alert, expression) in &alerts {
        // Whether it fires is tested on made-up series; here, that there is something to compare.
        prometheus.values(expression).await;
        let (measured, _) = expression.rsplit_once([' ']).and_then(|(left, _)| left.rsplit_once(' ')).unwrap();
        if !mentions(expression, &OF_REPLICAS) {
            prometheus.wait_for(alert, measured, mentions(expression, &ZERO_WHEN_WELL)).await;
        }
    }

    let known = prometheus.api("label/__name__/values", &[]).await;
    let known: BTreeSet<_> = known.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let asked: BTreeSet<_> = panels.iter().chain(&alerts).flat_map(|(_, expression)| names(expression)).collect();
    let unknown: Vec<_> = asked.iter().filter(|name| !known.contains(*name) && !OF_REPLICAS.contains(name)).collect();
    assert!(asked.len() > 12 && unknown.is_empty(), "{unknown:?} of {asked:?}");

    let rules = prometheus.api("rules", &[]).await;
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        assert_eq!((&rule["health"], &rule["lastError"]), (&"ok".into(), &Value::Null), "{rule}");
    }
    load.stop().await;
}
