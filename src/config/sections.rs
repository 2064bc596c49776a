//! The whole configuration and its small sections.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use http::HeaderName;
use http::header::AUTHORIZATION;
use tracing::Level;

use super::field::{address, duration, duration_or_zero, socket};
use super::pools::{POOLS, pools};
use super::public;
use super::rabbitmq::rabbitmq;
use super::reader::{Node, all, boolean, quoted};
use super::redis::redis;
use super::tenants::{TENANTS, tenants};
use super::tiers::{TIERS, Tiers};
use super::{Address, Config, Credentials, Held, Listen, Log, LogFormat, Origin, Shutdown};
use crate::identity::KeyHash;
use crate::limit::{DEFAULT_PREFIX, OnOutage};

const FIELDS: [&str; 11] =
    ["listen", "redis", "rabbitmq", "credentials", "public", "tiers", "tenants", "pools", "shutdown", "lease", "log"];

/// Walks the whole tree. `None` where anything was refused.
pub(super) fn config(root: &Node<'_>) -> Option<Config> {
    let fields = root.fields(&FIELDS)?;
    let listen = fields.or("listen", default_listen(), listen);
    let redis = fields.maybe("redis", redis);
    let rabbitmq = rabbitmq(&fields);
    let credentials = fields.or("credentials", default_credentials(), credentials);
    let public = fields.or("public", vec!["/health".to_owned()], |node| {
        all(node.items("a list of paths such as [/health]")?.map(|item| public::path(&item)))
    });
    let tiers = fields.required("tiers", TIERS).map_or_else(Tiers::unreadable, |node| Tiers::read(&node));
    // Where the section is refused, nothing is made of the tenants either.
    let prefix = redis.as_ref().and_then(Option::as_ref).map_or(DEFAULT_PREFIX, |redis| &redis.prefix);
    let tenants = fields.required("tenants", TENANTS).and_then(|node| tenants(&node, &tiers, prefix));
    let pools = fields.required("pools", POOLS).and_then(|node| pools(&node));
    let shutdown = fields.or("shutdown", DEFAULT_SHUTDOWN, shutdown);
    let lease = fields.or("lease", Duration::from_secs(10), duration);
    let log = fields.or("log", DEFAULT_LOG, log);
    let tiers = (!tiers.refused).then_some(tiers.read);
    Some(Config {
        listen: listen?,
        redis: redis?,
        rabbitmq: rabbitmq?,
        credentials: credentials?,
        public: public?,
        tiers: tiers?,
        tenants: tenants?,
        pools: pools?,
        shutdown: shutdown?,
        lease: lease?,
        log: log?,
    })
}

/// The keys of the example file, which people start from.
const PUBLIC_KEYS: [&str; 3] = ["key_t1_demo", "key_t2_demo", "key_t3_demo"];

/// A call of Redis that takes longer is one that its users notice.
const LONG_TIMEOUT: Duration = Duration::from_secs(1);

/// What an operator should know about a configuration without faults.
pub(super) fn advice(config: &Config, origin: &Origin) -> Vec<String> {
    let mut advice = Vec::new();
    if *origin == Origin::Demonstration {
        advice
            .push("the built-in demonstration set is in use, and everybody knows its keys: give a file with -c".into());
    } else {
        let known = PUBLIC_KEYS.map(|key| KeyHash::of(key.as_bytes()));
        let holders = config.tenants.iter().filter(|holder| holder.keys.iter().any(|key| known.contains(key)));
        advice.extend(holders.map(|holder| format!("tenant {} has a key of the public example", holder.tenant.id)));
    }
    match &config.redis {
        None => advice.push(
            "redis is absent: limits and slots are kept in this process, so two replicas allow twice as much".into(),
        ),
        Some(redis) if redis.timeout > LONG_TIMEOUT => advice.push(format!(
            "redis.timeout is {}: for so long the first requests of each outage wait before on_outage answers them",
            humantime::format_duration(redis.timeout)
        )),
        Some(_) => {}
    }
    advice
}

fn default_listen() -> Listen {
    let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    Listen { grpc: Address::Tcp(local(9191)), admin: local(9192) }
}

fn listen(node: &Node<'_>) -> Option<Listen> {
    let fields = node.fields(&["grpc", "admin"])?;
    let default = default_listen();
    let grpc = fields.or("grpc", default.grpc, address);
    let admin = fields.or("admin", default.admin, socket);
    let listen = Listen { grpc: grpc?, admin: admin? };
    match listen.grpc {
        Address::Tcp(grpc) if grpc == listen.admin && grpc.port() != 0 => {
            node.fault(format!("{grpc} for both grpc and admin"), "an address for each alone");
            None
        }
        Address::Tcp(grpc) if overlap(grpc, listen.admin) => {
            let found = format!("{grpc} for grpc and {} for admin, which overlap", listen.admin);
            node.fault(found, "an address for each alone");
            None
        }
        Address::Tcp(_) | Address::Unix(_) => Some(listen),
    }
}

/// Whether the system would refuse one of two addresses because of the other: each takes its port on all addresses
/// where it names none, and `[::]` on those of IPv4 too.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    let all = |of: IpAddr, too: IpAddr| of.is_unspecified() && (of.is_ipv6() || too.is_ipv4());
    one.port() == other.port() && one.port() != 0 && (a == b || all(a, b) || all(b, a))
}

fn default_credentials() -> Credentials {
    Credentials { headers: vec![AUTHORIZATION, HeaderName::from_static("x-api-key")], forward: false }
}

fn credentials(node: &Node<'_>) -> Option<Credentials> {
    let fields = node.fields(&["headers", "forward"])?;
    let default = default_credentials();
    let headers = fields.or("headers", default.headers, headers);
    let forward = fields.or("forward", default.forward, boolean);
    Some(Credentials { headers: headers?, forward: forward? })
}

fn headers(node: &Node<'_>) -> Option<Vec<HeaderName>> {
    let mut seen: Vec<HeaderName> = Vec::new();
    all(node.some_items("a list of at least one header such as [authorization, x-api-key]")?.map(|item| {
        let header = header(&item)?;
        if seen.contains(&header) {
            item.fault(format!("{} again", quoted(header.as_str())), "each header once");
            return None;
        }
        seen.push(header.clone());
        Some(header)
    }))
}

fn header(node: &Node<'_>) -> Option<HeaderName> {
    // Set anew on every request, or needed to route and frame it: a key could not survive there.
    const TAKEN: [&str; 11] = [
        "x-tenant-id",
        "x-tenant-tier",
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "upgrade",
        "te",
        "x-request-id",
        "x-forwarded-proto",
        "x-forwarded-for",
    ];
    // Envoy's own, which it does not let a filter remove: the upstream would see the key.
    const ENVOYS: &str = "x-envoy-";
    const HEADER: &str = "the name of a header such as x-api-key";
    let text = node.text(HEADER)?;
    let Ok(header) = HeaderName::try_from(text) else {
        node.refuse(HEADER);
        return None;
    };
    let plain = header.as_str().replace('_', "-");
    if TAKEN.contains(&plain.as_str()) || plain.starts_with(ENVOYS) {
        node.refuse("a header that carries nothing else, such as x-api-key");
        return None;
    }
    Some(header)
}

const DEFAULT_SHUTDOWN: Shutdown =
    Shutdown { delay: Duration::from_secs(2), drain: Duration::from_secs(30), held: Held::Refuse };

fn shutdown(node: &Node<'_>) -> Option<Shutdown> {
    let fields = node.fields(&["delay", "drain", "held"])?;
    let delay = fields.or("delay", DEFAULT_SHUTDOWN.delay, duration_or_zero);
    let drain = fields.or("drain", DEFAULT_SHUTDOWN.drain, duration_or_zero);
    let held =
        fields.or("held", DEFAULT_SHUTDOWN.held, |node| node.choice(&[("refuse", Held::Refuse), ("move", Held::Move)]));
    Some(Shutdown { delay: delay?, drain: drain?, held: held? })
}

const DEFAULT_LOG: Log = Log { level: Level::INFO, format: LogFormat::Text };

fn log(node: &Node<'_>) -> Option<Log> {
    const LEVELS: [(&str, Level); 5] = [
        ("error", Level::ERROR),
        ("warn", Level::WARN),
        ("info", Level::INFO),
        ("debug", Level::DEBUG),
        ("trace", Level::TRACE),
    ];
    let fields = node.fields(&["level", "format"])?;
    let level = fields.or("level", DEFAULT_LOG.level, |node| node.choice(&LEVELS));
    let format = fields
        .or("format", DEFAULT_LOG.format, |node| node.choice(&[("text", LogFormat::Text), ("json", LogFormat::Json)]));
    Some(Log { level: level?, format: format? })
}

/// What happens while a store is down, as a tier or the store says it.
pub(super) fn on_outage(node: &Node<'_>) -> Option<OnOutage> {
    node.choice(&[("allow", OnOutage::Allow), ("deny", OnOutage::Deny), ("local", OnOutage::Local)])
}
