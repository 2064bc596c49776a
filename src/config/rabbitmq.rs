//! The `rabbitmq` section.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

use super::RabbitMq;
use super::field::{duration, name};
use super::reader::{Fields, Node};
use super::redis::{redacted, tail};

const URL: &str = "a URL such as amqp://user:password@localhost:5672/%2f";

/// Whether requests are ordered by RabbitMQ yet. A setting that changes nothing is not taken in silence, so until they are
/// the section is refused as a whole.
const SUPPORTED: bool = false;

/// The whole section. The outer `None` where it is there and refused.
#[expect(clippy::option_option, reason = "absent and refused are two different things")]
pub(super) fn rabbitmq(fields: &Fields<'_>) -> Option<Option<RabbitMq>> {
    let Some(node) = fields.get("rabbitmq") else { return Some(None) };
    if !fields.has("redis") {
        node.fault("rabbitmq without redis", "redis beside it: tickets without shared slots order nothing");
        return None;
    }
    if !SUPPORTED {
        node.not_yet("no such field: requests are held in this process");
        return None;
    }
    section(&node).map(Some)
}

pub(super) fn section(node: &Node<'_>) -> Option<RabbitMq> {
    let fields = node.fields(&["url", "timeout", "prefix"])?;
    let timeout = fields.or("timeout", Duration::from_secs(1), duration);
    let prefix = fields.or("prefix", "bouncer".to_owned(), name);
    let url = fields.required("url", URL).and_then(|node| url(&node));
    Some(RabbitMq { url: url?, timeout: timeout?, prefix: prefix? })
}

fn url(node: &Node<'_>) -> Option<String> {
    let text = node.secret(URL)?;
    let refuse = |expected: &str| {
        node.fault(redacted(text), expected);
        None
    };
    let Ok(url) = Url::parse(text) else {
        return refuse("a URL such as amqp://localhost:5672, with %40 and the like for signs in its password");
    };
    match url.scheme() {
        "amqp" => {}
        "amqps" => return refuse("amqp://, as amqps:// is not supported yet"),
        _ => return refuse(URL),
    }
    if tail(&url).contains('@') {
        return refuse("%40, %2F, %3F or %23 for the signs @ / ? # in its password");
    }
    if url.host_str().is_none_or(str::is_empty) || url.port() == Some(0) {
        return refuse("a host, and a port above zero, such as amqp://localhost:5672");
    }
    if url.path().trim_start_matches('/').contains('/') {
        return refuse("%2f for a / in the name of the virtual host, such as amqp://localhost:5672/%2f");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return refuse("nothing after the virtual host, such as amqp://localhost:5672/%2f");
    }
    if [url.username(), url.password().unwrap_or_default(), url.path()].into_iter().any(|part| !is_text(part)) {
        return refuse("escapes such as %2f that spell text");
    }
    Some(text.to_owned())
}

fn is_text(escaped: &str) -> bool {
    percent_decode_str(escaped).decode_utf8().is_ok()
}
