//! The configuration: one immutable value of domain types, made from a file and the environment.
//!
//! ```text
//! bouncer.yaml ─ yaml ────┐
//!                         ├─ one tree of figment's values, each tagged with where it came from
//! variables ─ environment ┘     │
//!                             reader ─ redis, tiers, tenants, … ─ Config, or every fault at once
//! ```
//!
//! Later wins: the file (or, where none is given, the built-in demonstration set), the variables that deployments of
//! this kind already use (`REDIS_URL`, `MAX_IN_FLIGHT`, …), then `BOUNCER_` with `__` between levels.

mod describe;
mod environment;
mod fault;
mod field;
mod pools;
mod public;
mod rabbitmq;
mod reader;
mod redis;
mod sections;
mod tenants;
mod tiers;
mod yaml;

#[cfg(test)]
mod tests;

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use figment::Figment;

use crate::identity::{KeyHash, Tenant, Tier};
use crate::limit::{DEFAULT_PREFIX, OnOutage};

pub use environment::Override;
pub use fault::{Fault, Faults};

/// The pool that requests use until rules name others.
pub const DEFAULT_POOL: &str = "default";

/// The example file, and what runs where no file is given.
const DEMONSTRATION: &str = include_str!("../bouncer.yaml");

/// A configuration, and what there is to say about how it came to be. Displayed as `bouncer check` prints it.
#[derive(Debug)]
pub struct Loaded {
    /// What runs.
    pub config: Config,
    /// What an operator should know though nothing is wrong; one sentence each, no secrets.
    pub warnings: Vec<String>,
    /// Where it was read from.
    pub origin: Origin,
    /// The fields that the environment set, sorted by path.
    pub overrides: Vec<Override>,
}

/// Where a configuration was read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// This file.
    File(PathBuf),
    /// The built-in demonstration set, whose keys everybody knows.
    Demonstration,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path) => path.display().fmt(f),
            Origin::Demonstration => f.write_str("the built-in demonstration set"),
        }
    }
}

/// Reads the file, or the demonstration set where there is none, and then the environment.
///
/// # Errors
///
/// Every fault of both, together. A file that cannot be read or is not YAML is one fault.
pub fn load(file: Option<&Path>, env: impl Iterator<Item = (String, String)>) -> Result<Loaded, Faults> {
    match file {
        Some(path) => {
            let bytes = fs::read(path).map_err(|error| unreadable(path, &error))?;
            read(Origin::File(path.to_owned()), &bytes, env)
        }
        None => read(Origin::Demonstration, DEMONSTRATION.as_bytes(), env),
    }
}

/// The process's own variables, for [`load`]. Bytes that are not UTF-8 become `U+FFFD`, which no field accepts.
pub fn process_environment() -> impl Iterator<Item = (String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(move |(name, value)| (text(name), text(value)))
}

/// The configuration that a file of this text would give, without any environment.
///
/// # Errors
///
/// Every fault in the text.
pub fn from_yaml(text: &str) -> Result<Config, Faults> {
    let loaded = read(Origin::File("bouncer.yaml".into()), text.as_bytes(), std::iter::empty())?;
    Ok(loaded.config)
}

fn unreadable(path: &Path, error: &std::io::Error) -> Faults {
    let path = path.display().to_string();
    let (found, expected) = (error.to_string(), "a file that can be read".to_owned());
    Faults::from(Fault { source: "the file itself".to_owned(), path, found, expected })
}

fn read(origin: Origin, file: &[u8], env: impl Iterator<Item = (String, String)>) -> Result<Loaded, Faults> {
    let name = origin.to_string();
    let variables = environment::meant_for_us(env);
    let sources = variables.iter().cloned().fold(Figment::from(yaml::File { name: &name }), Figment::merge);
    let mut given = figment::Provider::data(&sources).map_err(|error| unusable(&error))?;
    let mut tree = yaml::parse(file, yaml::File::tag(&given)).map_err(|bad| not_yaml(bad, &name))?;
    let report = reader::Report::new(&sources, &name);
    for variable in variables.iter().filter(|it| environment::trimmed(&it.value) != it.value) {
        report.warn(format!("{}: the white space around the value was dropped", variable.name));
    }
    let set = given.remove(&environment::profile()).unwrap_or_default();
    let overrides = environment::apply(&mut tree, set, &report);
    let config = sections::config(&reader::Node::root(&tree, &report));
    let (faults, mut warnings) = report.finish();
    match config {
        Some(config) if faults.is_empty() => {
            warnings.extend(sections::advice(&config, &origin));
            Ok(Loaded { config, warnings, origin, overrides })
        }
        _ => Err(Faults(faults)),
    }
}

/// Variables that figment cannot merge. Its message names no values.
fn unusable(error: &figment::Error) -> Faults {
    let (path, found) = ("environment".to_owned(), error.kind.to_string());
    Faults::from(Fault {
        path,
        found,
        expected: "variables that can be read".to_owned(),
        source: "environment".to_owned(),
    })
}

/// The one fault of a text that has no fields to speak of.
fn not_yaml(bad: yaml::Unreadable, source: &str) -> Faults {
    let path = format!("line {}, column {}", bad.line, bad.column);
    let expected = "a map of fields in YAML, each field once".to_owned();
    Faults::from(Fault { path, found: bad.found, expected, source: source.to_owned() })
}

/// Everything that `bouncer serve` needs to know.
#[derive(Debug, PartialEq, Eq)]
pub struct Config {
    /// Where this process listens.
    pub listen: Listen,
    /// Absent: buckets and slots are kept in this process.
    pub redis: Option<Redis>,
    /// Absent: what waits is ordered in this process. Only ever there beside `redis`.
    pub rabbitmq: Option<RabbitMq>,
    /// Where keys are looked for.
    pub credentials: Credentials,
    /// As written: an exact path, or a prefix where the last character is `*`.
    pub public: Vec<String>,
    /// Highest first: the list is the order of service, and `tiers[i].rank == i`.
    pub tiers: Vec<Arc<Tier>>,
    /// In the order of the file; no id and no key comes twice.
    pub tenants: Vec<TenantKeys>,
    /// At least `default`.
    pub pools: Vec<Pool>,
    /// What happens on SIGTERM.
    pub shutdown: Shutdown,
    /// How long a silent replica keeps its slots, where they are shared. Slots of this process end with it.
    pub lease: Duration,
    /// What is logged, and how.
    pub log: Log,
}

/// A tenant and the hashes of its keys.
#[derive(Debug, PartialEq, Eq)]
pub struct TenantKeys {
    /// Whose they are.
    pub tenant: Arc<Tenant>,
    /// At least one.
    pub keys: Vec<KeyHash>,
}

/// Where this process listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// Envoy's questions and gRPC health.
    pub grpc: Address,
    /// HTTP: health, metrics, stats.
    pub admin: SocketAddr,
}

/// Where the gRPC server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// Port 0 lets the system choose one.
    Tcp(SocketAddr),
    /// Written `unix:/path`.
    Unix(PathBuf),
}

/// The store of limits and slots that replicas share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redis {
    /// Where it is.
    pub servers: RedisServers,
    /// What every key and channel begins with, so that two deployments can share a Redis: 1 to 64 of the letters
    /// `A-Z a-z 0-9 . _ -`.
    pub prefix: String,
    /// How long one call may take before Redis counts as down.
    pub timeout: Duration,
    /// What happens to requests while it is down, where their tier does not say.
    pub on_outage: OnOutage,
}

impl Redis {
    /// One server, and the defaults for everything else.
    pub fn at(url: impl Into<String>) -> Self {
        Self::on(RedisServers::Single(url.into()))
    }

    /// These servers, and the defaults for everything else.
    pub fn on(servers: RedisServers) -> Self {
        let timeout = Duration::from_millis(50);
        Self { servers, prefix: DEFAULT_PREFIX.to_owned(), timeout, on_outage: OnOutage::Allow }
    }
}

/// Where Redis is. The URLs may hold passwords; displayed and debugged they do not.
#[derive(Clone, PartialEq, Eq)]
pub enum RedisServers {
    /// One server.
    Single(String),
    /// A cluster, by some of its nodes.
    Cluster(Vec<String>),
    /// Whatever server is the master of a service.
    Sentinel {
        /// A URL whose host is the name of the service; its credentials and its database are the master's.
        service: String,
        /// The sentinels.
        urls: Vec<String>,
    },
}

/// The broker that orders what waits over all replicas.
#[derive(Clone, PartialEq, Eq)]
pub struct RabbitMq {
    /// May hold a password: print [`RabbitMq::redacted_url`] instead.
    pub url: String,
    /// How long one call may take, a confirm above all, before RabbitMQ counts as down.
    pub timeout: Duration,
    /// What the names of all queues and exchanges begin with, so that two deployments can share a broker.
    pub prefix: String,
}

impl RabbitMq {
    /// The URL without user, password and query, for logs and `bouncer check`.
    pub fn redacted_url(&self) -> String {
        redis::redacted(&self.url)
    }
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq")
            .field("url", &self.redacted_url())
            .field("timeout", &self.timeout)
            .field("prefix", &self.prefix)
            .finish()
    }
}

/// Where keys are looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Lower-case header names. `authorization` is read as `Bearer <key>`, every other header as the bare key.
    pub headers: Vec<http::HeaderName>,
    /// Whether the upstream gets to see the credential.
    pub forward: bool,
}

/// One protected upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// A valid metric label.
    pub name: String,
    /// The cap: requests between grant and end of response.
    pub max_in_flight: NonZeroUsize,
}

/// What happens on SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shutdown {
    /// How long judging goes on after health says no, until Envoys have looked away.
    pub delay: Duration,
    /// How long streams in flight may take to finish after that.
    pub drain: Duration,
    /// What becomes of requests that still wait then.
    pub held: Held,
}

/// What becomes of held requests on SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// 503 `shutting_down`.
    Refuse,
    /// gRPC UNAVAILABLE before any header, on which Envoy asks another replica; their tokens are given back.
    Move,
}

/// What is logged, and how. `RUST_LOG` wins over the level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The least severe level that is written.
    pub level: tracing::Level,
    /// How a line looks.
    pub format: LogFormat,
}

/// How a line of the log looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}
