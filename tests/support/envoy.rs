//! A real Envoy with the shipped configuration.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::client::fetch;
use super::metrics::Metrics;
use super::ports::Port;
use super::process::{self, Process};
use super::wait::eventually;

/// The shipped file.
pub(crate) const CONFIG: &str = include_str!("../../envoy/envoy.yaml");

/// A running Envoy.
pub(crate) struct Envoy {
    pub(crate) process: Process,
    listener: Port,
    admin: Port,
    access_log: PathBuf,
}

impl Envoy {
    /// Starts the shipped configuration on free ports, with every `edits.0` replaced by `edits.1`, in front of these
    /// bouncers (addresses as Envoy's configuration writes them). Ready when this returns.
    pub(crate) async fn start(
        dir: &Path,
        bouncers: &[String],
        upstream: SocketAddr,
        workers: u32,
        edits: &[(String, String)],
    ) -> Self {
        let (listener, admin) = (Port::free(), Port::free());
        let ports = [(8080, listener.number()), (9901, admin.number()), (8081, upstream.port())];
        let endpoints: Vec<_> = bouncers.iter().map(|address| endpoint(address)).collect();
        let shipped = endpoint("{ socket_address: { address: 127.0.0.1, port_value: 9191 } }");
        let mut config = replace(CONFIG, &shipped, &endpoints.join(", "));
        for (shipped, ours) in ports {
            config = replace(&config, &format!("port_value: {shipped} "), &format!("port_value: 0{ours} "));
        }
        // The zero kept a port from being taken for a shipped one by a later round.
        config = config.replace("port_value: 0", "port_value: ");
        for (from, to) in edits {
            config = replace(&config, from, to);
        }
        let file = dir.join("envoy.yaml");
        std::fs::write(&file, config).expect("a directory of our own");
        let access_log = dir.join("access.log");
        let mut command = Command::new(binary());
        command
            .arg("-c")
            .arg(&file)
            .args(["--disable-hot-restart", "--file-flush-interval-msec", "50"])
            .args(["--concurrency", &workers.to_string()]);
        let process = Process::spawn("envoy", &mut command, &dir.join("envoy.log"), Some(&access_log));
        let mut envoy = Self { process, listener, admin, access_log };
        envoy.wait_until_live().await;
        envoy
    }

    async fn wait_until_live(&mut self) {
        let url = self.admin_url("/ready");
        let process = &mut self.process;
        eventually("a live Envoy", Duration::from_secs(30), async || {
            process.assert_running();
            fetch(&url).await.filter(|answer| answer.status == 200)
        })
        .await;
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    pub(crate) fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin.address())
    }

    /// Counters and gauges by name, as on the admin page.
    pub(crate) async fn stats(&self) -> BTreeMap<String, u64> {
        let answer = fetch(&self.admin_url("/stats")).await.expect("Envoy's admin page answers");
        let pairs = answer.text();
        // Histograms are no numbers, and text readouts are quoted.
        pairs
            .lines()
            .filter_map(|line| line.rsplit_once(": "))
            .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
            .collect()
    }

    /// The same with labels, as for Prometheus.
    pub(crate) async fn metrics(&self) -> Metrics {
        let answer = fetch(&self.admin_url("/stats/prometheus")).await.expect("Envoy's admin page answers");
        Metrics::parse(&answer.text())
    }

    /// The lines written so far; a line is there some 50 ms after its request ended.
    pub(crate) fn access_log(&self) -> Vec<String> {
        process::read(&self.access_log).lines().map(str::to_owned).collect()
    }
}

fn endpoint(address: &str) -> String {
    format!("{{ endpoint: {{ address: {address} }} }}")
}

/// Replaces every occurrence.
///
/// # Panics
/// When there is none: the shipped file has changed, and a test would silently test something else.
fn replace(config: &str, from: &str, to: &str) -> String {
    assert!(config.contains(from), "envoy/envoy.yaml has no {from:?}");
    config.replace(from, to)
}

/// Where Envoy is: `ENVOY_BIN`, else on PATH, else where `make test` puts it.
///
/// # Panics
/// When it is nowhere. A test that skips itself would look like one that passed.
pub(crate) fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ENVOY_BIN").filter(|path| !path.is_empty()) {
        return path.into();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("envoy")).find(|path| path.is_file());
    on_path.or_else(fetched).expect("no Envoy: `make test` fetches it, or set ENVOY_BIN")
}

fn fetched() -> Option<PathBuf> {
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join(".envoy/venv/lib");
    let pythons = std::fs::read_dir(lib).ok()?;
    pythons
        .filter_map(Result::ok)
        .map(|python| python.path().join("site-packages/envoy/_bin/envoy"))
        .find(|path| path.is_file())
}
