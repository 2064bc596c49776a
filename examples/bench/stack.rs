//! The processes of a measurement, all gone on drop.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::envoy::{self, Line};
use crate::http;
use crate::process::Process;
use crate::{Options, Result};

/// The key of the tenant that all load comes from.
pub(crate) const KEY: &str = "key_t3_demo";

/// A small answer of the sample upstream.
pub(crate) const PATH: &str = "/status/200";

/// How long anything may take to get ready on a busy machine.
const READY: Duration = Duration::from_secs(60);

/// What stands behind a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No filter.
    Bare,
    /// The server that allows everything.
    Allow,
    /// bouncer with its buckets in memory; so many in flight, so many held.
    Memory { max_in_flight: usize, queue: usize },
    /// bouncer with its buckets in Redis, which has this long to answer.
    Redis { timeout: &'static str },
    /// Another build of bouncer, with its buckets in memory.
    Other(PathBuf),
}

/// More than any load here has in flight.
pub(crate) const PLENTY: Kind = Kind::Memory { max_in_flight: 100_000, queue: 1000 };

/// A listener and what stands behind it.
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// Of Envoy's listener.
    pub(crate) port: u16,
    grpc: u16,
    /// bouncer's.
    pub(crate) admin: u16,
    /// Absent for [`Kind::Bare`].
    pub(crate) process: Option<Process>,
}

/// Everything that runs.
pub(crate) struct Stack {
    pub(crate) envoy: Process,
    pub(crate) envoy_admin: u16,
    pub(crate) servers: Vec<Server>,
    pub(crate) upstream: Process,
    /// Present where a server needs it.
    pub(crate) redis: Option<(Process, u16)>,
    pub(crate) dir: TempDir,
}

impl Stack {
    /// Ready for requests when this returns.
    pub(crate) fn start(options: &Options, kinds: &[(&str, Kind)]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("bouncer-bench-").tempdir()?;
        let mut ports = free_ports(3 + 3 * kinds.len())?.into_iter();
        let mut port = || ports.next().ok_or("too few ports");
        let (envoy_admin, upstream_port, redis_port) = (port()?, port()?, port()?);
        let redis = if kinds.iter().any(|(_, kind)| matches!(kind, Kind::Redis { .. })) {
            Some((redis(redis_port, dir.path())?, redis_port))
        } else {
            None
        };
        let mut upstream = Command::new(options.bin.join("examples/upstream"));
        let upstream = upstream.arg(format!("127.0.0.1:{upstream_port}"));
        let upstream = Process::spawn("upstream", upstream, dir.path(), true)?;
        let mut servers = Vec::new();
        for (name, kind) in kinds {
            let (port, grpc, admin) = (port()?, port()?, port()?);
            let mut server = Server { name: (*name).into(), kind: kind.clone(), port, grpc, admin, process: None };
            server.process = server.start(options, redis_port, dir.path())?;
            servers.push(server);
        }
        let envoy = start_envoy(options, envoy_admin, upstream_port, &servers, dir.path())?;
        let mut stack = Self { envoy, envoy_admin, servers, upstream, redis, dir };
        stack.wait_until_ready()?;
        Ok(stack)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY;
        for at in 0..self.servers.len() {
            while !matches!(http::get(self.servers[at].port, PATH, KEY), Ok((200, _))) {
                if self.envoy.has_ended()? || Instant::now() > deadline {
                    let kept = std::mem::replace(&mut self.dir, tempfile::tempdir()?).keep();
                    let name = &self.servers[at].name;
                    return Err(format!("nothing answers for {name}; see the logs in {}", kept.display()).into());
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// # Errors
    /// When a request was answered with anything but 2xx since the start.
    pub(crate) fn expect_only_successes(&self) -> Result<()> {
        let (_, stats) = http::get(self.envoy_admin, "/stats?filter=downstream_rq_.xx", KEY)?;
        for server in &self.servers {
            for class in ["3xx", "4xx", "5xx"] {
                let count = http::sum(&stats, &format!("http.{}.downstream_rq_{class}: ", server.name));
                if count > 0.0 {
                    return Err(format!("{count} answers of class {class} on listener {}", server.name).into());
                }
            }
        }
        Ok(())
    }
}

impl Server {
    /// bouncer's metrics.
    pub(crate) fn metrics(&self) -> Result<String> {
        Ok(http::get(self.admin, "/metrics", KEY)?.1)
    }

    fn start(&self, options: &Options, redis: u16, dir: &Path) -> Result<Option<Process>> {
        let ours = options.bin.join("bouncer");
        let (binary, max_in_flight, queue) = match &self.kind {
            Kind::Bare => return Ok(None),
            Kind::Allow => {
                let mut command = Command::new(options.bin.join("examples/allow"));
                let process = Process::spawn(&self.name, command.arg(format!("127.0.0.1:{}", self.grpc)), dir, true)?;
                return Ok(Some(process));
            }
            Kind::Memory { max_in_flight, queue } => (&ours, *max_in_flight, *queue),
            Kind::Redis { .. } => (&ours, 100_000, 1000),
            Kind::Other(path) => (path, 100_000, 1000),
        };
        let redis = match self.kind {
            Kind::Redis { timeout } => format!("redis: {{ url: 'redis://127.0.0.1:{redis}', timeout: {timeout} }}"),
            _ => String::new(),
        };
        // The demonstration tiers, with quotas that no load here empties.
        let config = format!(
            "listen: {{ grpc: '127.0.0.1:{}', admin: '127.0.0.1:{}' }}
{redis}
tiers:
  - {{ name: T3, rate: 10000000/s, burst: 1000000000, queue: {{ length: {queue}, max_wait: 60s }} }}
  - {{ name: T2, rate: 10000000/s, burst: 1000000000, queue: {{ length: {queue}, max_wait: 60s }} }}
  - {{ name: T1, rate: 10000000/s, burst: 1000000000, queue: {{ length: {queue}, max_wait: 60s }} }}
tenants:
  - {{ id: acme, tier: T3, keys: [{KEY}] }}
  - {{ id: globex, tier: T2, keys: [key_t2_demo] }}
  - {{ id: initech, tier: T1, keys: [key_t1_demo] }}
pools: [ {{ name: default, max_in_flight: {max_in_flight} }} ]
",
            self.grpc, self.admin
        );
        let file = dir.join(format!("{}.yaml", self.name));
        std::fs::write(&file, config)?;
        let mut command = Command::new(binary);
        Ok(Some(Process::spawn(&self.name, command.args(["serve", "-c"]).arg(file), dir, true)?))
    }
}

fn start_envoy(options: &Options, admin: u16, upstream: u16, servers: &[Server], dir: &Path) -> Result<Process> {
    let line = |server: &Server| (server.kind != Kind::Bare).then_some(server.grpc);
    let lines: Vec<_> =
        servers.iter().map(|server| Line { name: &server.name, listener: server.port, grpc: line(server) }).collect();
    let file = dir.join("envoy.yaml");
    std::fs::write(&file, envoy::config(admin, upstream, &lines)?)?;
    let mut command = Command::new(&options.envoy);
    command.arg("-c").arg(file).args(["--disable-hot-restart", "--concurrency", &options.concurrency.to_string()]);
    // Its access log is written, as it would be, and read by nobody.
    Process::spawn("envoy", &mut command, dir, false)
}

/// Waits until it answers, so that bouncer finds it at the first try.
fn redis(port: u16, dir: &Path) -> Result<Process> {
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir"]);
    let mut process = Process::spawn("redis", command.arg(dir), dir, true)?;
    let deadline = Instant::now() + READY;
    while redis_info(port, "server").is_err() {
        if process.has_ended()? || Instant::now() > deadline {
            return Err("redis-server did not start".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(process)
}

/// A section of `INFO`.
pub(crate) fn redis_info(port: u16, section: &str) -> Result<String> {
    let mut connection = redis::Client::open(("127.0.0.1", port))?.get_connection()?;
    Ok(redis::cmd("INFO").arg(section).query(&mut connection)?)
}

/// Ports that were free a moment ago.
fn free_ports(count: usize) -> Result<Vec<u16>> {
    let bound = (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<std::io::Result<Vec<_>>>()?;
    Ok(bound.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<std::io::Result<_>>()?)
}
