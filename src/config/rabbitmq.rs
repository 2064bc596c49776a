//! The `rabbitmq` section.

use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

use super::RabbitMq;
use super::field::{duration, name};
use super::reader::{Fields, Node};
use super::redis::{redacted, tail};

const URL: &str = "a URL such as amqp://user:password@localhost:5672/%2f";

/// The whole section. The outer `None` where it is there and refused.
#[expect(clippy::option_option, reason = "absent and refused are two different things")]
pub(super) fn rabbitmq(fields: &Fields<'_>) -> Option<Option<RabbitMq>> {
    let Some(node) = fields.get("rabbitmq") else { return Some(None) };
    if !fields.has("redis") {
        node.fault("rabbitmq without redis", "redis beside it: tickets without shared slots order nothing");
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

#[cfg(test)]
mod tests {
    use figment::{Figment, Provider};

    use super::super::reader::{Node, Report};
    use super::super::yaml;
    use super::*;

    /// What the section would be if it were supported, or every fault in it.
    fn read(text: &str) -> Result<RabbitMq, Vec<String>> {
        let sources = Figment::from(yaml::File { name: "bouncer.yaml" });
        let tag = yaml::File::tag(&sources.data().unwrap());
        let tree = yaml::parse(format!("rabbitmq: {text}").as_bytes(), tag).ok().expect("yaml");
        let report = Report::new(&sources, "bouncer.yaml");
        let read =
            Node::root(&tree, &report).fields(&["rabbitmq"]).and_then(|fields| section(&fields.get("rabbitmq")?));
        let faults: Vec<_> = report.finish().0.iter().map(ToString::to_string).collect();
        read.filter(|_| faults.is_empty()).ok_or(faults)
    }

    #[test]
    fn what_a_section_leaves_out_has_defaults() {
        let url = "amqp://guest:guest@localhost:5672/%2f";
        let expected = RabbitMq { url: url.to_owned(), timeout: Duration::from_secs(1), prefix: "bouncer".to_owned() };
        assert_eq!(read(&format!("{{ url: \"{url}\" }}")), Ok(expected));
        let whole = read(&format!("{{ url: \"{url}\", timeout: 300ms, prefix: eu-1.gate }}")).unwrap();
        assert_eq!((whole.timeout, whole.prefix.as_str()), (Duration::from_millis(300), "eu-1.gate"));
        for url in ["amqp://localhost", "amqp://rabbit.internal:5673", "amqp://u:p%40ss@[::1]:5672/%2Fa%2Fb"] {
            assert_eq!(read(&format!("{{ url: \"{url}\" }}")).map(|read| read.url), Ok(url.to_owned()));
        }
    }

    #[test]
    fn no_password_is_shown() {
        let read = read("{ url: \"amqp://bob:hunter2@localhost:5672/%2f\" }").unwrap();
        assert_eq!(read.redacted_url(), "amqp://<redacted>@localhost:5672/%2f");
        assert!(!format!("{read:?}").contains("hunter2"));
    }

    #[test]
    fn each_bad_section_is_refused_with_exactly_its_message() {
        let cases = [
            ("{}", "rabbitmq.url: found nothing, expected a URL such as amqp://user:password@localhost:5672/%2f"),
            (
                "{ url: \"amqps://bob:hunter2@localhost\" }",
                "rabbitmq.url: found amqps://<redacted>@localhost, expected amqp://, as amqps:// is not supported yet",
            ),
            (
                "{ url: \"http://bob:hunter2@localhost/\" }",
                "rabbitmq.url: found http://<redacted>@localhost/, expected a URL such as \
                 amqp://user:password@localhost:5672/%2f",
            ),
            (
                "{ url: hunter2 }",
                "rabbitmq.url: found <redacted>, expected a URL such as amqp://localhost:5672, with %40 and the like \
                 for signs in its password",
            ),
            (
                "{ url: \"amqp://bob:hunt/er2@localhost\" }",
                "rabbitmq.url: found <redacted>, expected a URL such as amqp://localhost:5672, with %40 and the like \
                 for signs in its password",
            ),
            (
                "{ url: \"amqp://bob@x/hunter2@localhost\" }",
                "rabbitmq.url: found <redacted>, expected %40, %2F, %3F or %23 for the signs @ / ? # in its password",
            ),
            (
                "{ url: \"amqp://localhost:0\" }",
                "rabbitmq.url: found amqp://localhost:0, expected a host, and a port above zero, such as \
                 amqp://localhost:5672",
            ),
            (
                "{ url: \"amqp://localhost/a/b\" }",
                "rabbitmq.url: found amqp://localhost/a/b, expected %2f for a / in the name of the virtual host, such \
                 as amqp://localhost:5672/%2f",
            ),
            (
                "{ url: \"amqp://localhost/%2f?heartbeat=0\" }",
                "rabbitmq.url: found amqp://localhost/%2f?<redacted>, expected nothing after the virtual host, such as \
                 amqp://localhost:5672/%2f",
            ),
            (
                "{ url: \"amqp://localhost/%ff\" }",
                "rabbitmq.url: found amqp://localhost/%ff, expected escapes such as %2f that spell text",
            ),
            (
                "{ url: \"amqp://localhost\", timeout: 0s }",
                "rabbitmq.timeout: found \"0s\", expected a duration above zero and up to 1day, such as 250ms or 5s",
            ),
            (
                "{ url: \"amqp://localhost\", prefix: \"a:b\" }",
                "rabbitmq.prefix: found \"a:b\", expected 1 to 64 of the letters A-Z a-z 0-9 . _ -",
            ),
            (
                "{ url: \"amqp://localhost\", queue: x }",
                "rabbitmq.queue: found an unknown field, expected url, timeout or prefix",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text), Err(vec![format!("{expected} (bouncer.yaml)")]), "{text}");
        }
    }
}
