//! The `redis` section.

use std::time::Duration;

use url::Url;

use super::Redis;
use super::fault::REDACTED;
use super::field::duration;
use super::reader::Node;
use super::sections::on_outage;
use crate::limit::OnOutage;

const URL: &str = "a URL such as redis://localhost:6379";

pub(super) fn redis(node: &Node<'_>) -> Option<Redis> {
    const ONE: &str = "redis.url, the address of one Redis";
    let later = [("cluster", ONE), ("sentinel", ONE)];
    let fields = node.fields_and_later(&["url", "timeout", "on_outage"], &later)?;
    let timeout = fields.or("timeout", Duration::from_millis(50), duration);
    let on_outage = fields.or("on_outage", OnOutage::Allow, on_outage);
    if later.iter().any(|(name, _)| fields.has(name)) && !fields.has("url") {
        return None;
    }
    let url = fields.required("url", URL).and_then(|node| url(&node));
    Some(Redis { url: url?, timeout: timeout?, on_outage: on_outage? })
}

fn url(node: &Node<'_>) -> Option<String> {
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
    if !database.is_empty() && database.parse::<u32>().is_err() || url.fragment().is_some() {
        return refuse("at most the number of a database after the port, such as redis://localhost:6379/0");
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
