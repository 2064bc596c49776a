//! The `redis` section: which servers, and how they are used.

use std::fmt;
use std::time::Duration;

use url::Url;

use super::fault::REDACTED;
use super::field::{duration, name};
use super::reader::{Fields, Node, all};
use super::sections::on_outage;
use super::{Redis, RedisServers};
use crate::limit::redis::check_url;
use crate::limit::{DEFAULT_PREFIX, OnOutage};

const URL: &str = "a URL such as redis://localhost:6379";
const CLUSTER: &str = "a list of at least one URL such as [redis://localhost:7000]";
const SENTINELS: &str = "a list of at least one URL such as [redis://localhost:26379]";
const SERVICE: &str = "the name of a service such as main, or redis://user:password@main where it needs credentials";

const ONE: &str = "one of redis.url, redis.cluster and redis.sentinel alone";

/// The ways to say where Redis is.
const WAYS: [&str; 3] = ["url", "cluster", "sentinel"];

pub(super) fn redis(node: &Node<'_>) -> Option<Redis> {
    let fields = node.fields(&["url", "cluster", "sentinel", "prefix", "timeout", "on_outage"])?;
    let servers = servers(&fields);
    let prefix = fields.or("prefix", DEFAULT_PREFIX.to_owned(), name);
    let timeout = fields.or("timeout", Duration::from_millis(50), duration);
    let on_outage = fields.or("on_outage", OnOutage::Allow, on_outage);
    Some(Redis { servers: servers?, prefix: prefix?, timeout: timeout?, on_outage: on_outage? })
}

/// Exactly one of the ways. Each one that is there is read, so that all faults are told.
fn servers(fields: &Fields<'_>) -> Option<RedisServers> {
    let single = fields.get("url").map(|node| url(&node, Use::Data).map(RedisServers::Single));
    let cluster = fields.get("cluster").map(|node| urls(&node, CLUSTER, Use::Member).map(RedisServers::Cluster));
    let sentinel = fields.get("sentinel").map(|node| sentinel(&node));
    let given: Vec<&str> = WAYS.into_iter().filter(|way| fields.has(way)).collect();
    if given.is_empty() {
        fields.required("url", &format!("{URL}, or redis.cluster or redis.sentinel in its place"));
    }
    if given.len() > 1 {
        // Told of each, with where it came from: any of them may be the one that was not meant.
        for way in &given {
            let others: Vec<String> = given.iter().filter(|it| *it != way).map(|it| format!("redis.{it}")).collect();
            let found = format!("redis.{way} beside {}", others.join(" and "));
            fields.get(way).into_iter().for_each(|node| node.fault(found.as_str(), ONE));
        }
        return None;
    }
    single.or(cluster).or(sentinel)?
}

fn sentinel(node: &Node<'_>) -> Option<RedisServers> {
    let fields = node.fields(&["service", "urls"])?;
    let service = fields.required("service", SERVICE).and_then(|node| service(&node));
    let urls = fields.required("urls", SENTINELS).and_then(|node| urls(&node, SENTINELS, Use::Sentinel));
    Some(RedisServers::Sentinel { service: service?, urls: urls? })
}

/// A bare name is that of a service without credentials.
fn service(node: &Node<'_>) -> Option<String> {
    let text = node.secret(SERVICE)?;
    if text.contains("://") {
        return url(node, Use::Service);
    }
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if text.is_empty() || text.len() > 64 || !text.bytes().all(safe) {
        node.fault(REDACTED, SERVICE);
        return None;
    }
    Some(format!("redis://{text}"))
}

fn urls(node: &Node<'_>, expected: &str, way: Use) -> Option<Vec<String>> {
    all(node.some_items(expected)?.map(|item| url(&item, way)))
}

/// What is reached by a URL.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// The one server.
    Data,
    /// A node of a cluster, which has one database.
    Member,
    /// A sentinel, which has none.
    Sentinel,
    /// The service that sentinels know, in the place of a host.
    Service,
}

fn url(node: &Node<'_>, way: Use) -> Option<String> {
    let text = node.secret(URL)?;
    let refuse = |expected: &str| {
        node.fault(redacted(text), expected);
        None
    };
    let Ok(url) = Url::parse(text) else {
        return refuse("a URL such as redis://localhost:6379, with %40 and the like for signs in its password");
    };
    match url.scheme() {
        "redis" => {}
        "rediss" => return refuse("redis://, as rediss:// is not supported yet"),
        _ => return refuse(URL),
    }
    if tail(&url).contains('@') {
        return refuse("%40, %2F, %3F or %23 for the signs @ / ? # in its password");
    }
    if url.host_str().is_none_or(str::is_empty) || url.port() == Some(0) {
        return refuse("a host, and a port above zero, such as redis://localhost:6379");
    }
    let database = url.path().trim_start_matches('/');
    match way {
        Use::Member if !matches!(database, "" | "0") => return refuse("no database, as a cluster has only one"),
        Use::Sentinel if !database.is_empty() => return refuse("no database, as a sentinel has none"),
        Use::Service if url.port().is_some() => return refuse("no port, as the sentinels tell where the service is"),
        Use::Data | Use::Member | Use::Sentinel | Use::Service => {}
    }
    if !database.is_empty() && database.parse::<u32>().is_err() || url.fragment().is_some() {
        return refuse("at most the number of a database after the port, such as redis://localhost:6379/0");
    }
    // What the client itself refuses, in words that may show a part of it.
    if check_url(text).is_err() {
        return refuse("a URL that the Redis client can read: escapes of UTF-8 alone, and parameters that it knows");
    }
    Some(text.to_owned())
}

/// What follows host and port. An `@` in it means that the password holds a `/`, `?` or `#` that ended it early.
pub(super) fn tail(url: &Url) -> &str {
    &url[url::Position::BeforePath..]
}

/// A URL without anything that may be a secret: no user, no password, no query.
pub(super) fn redacted(text: &str) -> String {
    let Some(url) = Url::parse(text).ok().filter(|url| !tail(url).contains('@') && url.has_host()) else {
        return REDACTED.to_owned();
    };
    let secret = !url.username().is_empty() || url.password().is_some();
    let user = if secret { format!("{REDACTED}@") } else { String::new() };
    let address = &url[url::Position::BeforeHost..url::Position::AfterPath];
    let query = if url.query().is_some() { format!("?{REDACTED}") } else { String::new() };
    format!("{}://{user}{address}{query}", url.scheme())
}

/// Without users, passwords and queries, for logs and `bouncer check`.
impl fmt::Display for RedisServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |urls: &[String]| urls.iter().map(|url| redacted(url)).collect::<Vec<_>>().join(", ");
        match self {
            RedisServers::Single(url) => f.write_str(&redacted(url)),
            RedisServers::Cluster(urls) => write!(f, "cluster of {}", list(urls)),
            RedisServers::Sentinel { service, urls } => {
                let service = redacted(service);
                write!(f, "{} by sentinels {}", service.trim_start_matches("redis://"), list(urls))
            }
        }
    }
}

impl fmt::Debug for RedisServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
