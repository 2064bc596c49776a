//! The kinds of single values: how each is written, and what it may be.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Address;
use super::reader::Node;
use crate::limit::Rate;

/// The most requests that may be in flight or wait. Beyond any machine, and far from overflowing anything.
pub(super) const LARGEST_COUNT: u64 = 1_000_000_000;

/// The longest of all durations. Far from overflowing any clock.
pub(super) const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// Fifteen digits: twice as many is still a whole number to Lua.
const LARGEST_RATE: u64 = 999_999_999_999_999;

const PERIODS: [(&str, u64); 4] = [("s", 1), ("min", 60), ("h", 60 * 60), ("day", 24 * 60 * 60)];

const RATE: &str = "a rate above zero such as 10/s, 600/min, 1000/h or 5000/day";

/// `N/s`, `N/min`, `N/h` or `N/day`.
pub(super) fn rate(node: &Node<'_>) -> Option<Rate> {
    let text = node.text(RATE)?;
    let Some((count, per)) = rate_parts(text) else {
        node.refuse(RATE);
        return None;
    };
    let rate = count.filter(|count| count.get() <= LARGEST_RATE).map(|count| Rate { count, per });
    if rate.is_none() {
        node.refuse(format!("a rate of at most {LARGEST_RATE}"));
    }
    rate
}

/// `None` where it is no rate, an inner `None` where it is too large to be a number.
fn rate_parts(text: &str) -> Option<(Option<NonZeroU64>, Duration)> {
    let (count, unit) = text.split_once('/')?;
    let (_, seconds) = PERIODS.iter().find(|(name, _)| *name == unit)?;
    let digits = !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit());
    if !digits || count.bytes().all(|byte| byte == b'0') {
        return None;
    }
    Some((count.parse().ok(), Duration::from_secs(*seconds)))
}

/// The unit of a rate, as it was written.
pub(super) fn per(rate: Rate) -> &'static str {
    PERIODS.iter().find(|(_, seconds)| rate.per.as_secs() == *seconds).map_or("?", |(name, _)| name)
}

/// A duration above zero.
pub(super) fn duration(node: &Node<'_>) -> Option<Duration> {
    const DURATION: &str = "a duration above zero and up to 1day, such as 250ms or 5s";
    bounded(node, Duration::from_nanos(1), DURATION)
}

/// A duration that may be zero.
pub(super) fn duration_or_zero(node: &Node<'_>) -> Option<Duration> {
    bounded(node, Duration::ZERO, "a duration up to 1day, such as 250ms or 5s")
}

fn bounded(node: &Node<'_>, least: Duration, expected: &str) -> Option<Duration> {
    let text = node.text(expected)?;
    let duration = humantime::parse_duration(text).ok().filter(|it| (least..=LONGEST).contains(it));
    if duration.is_none() {
        node.refuse(expected);
    }
    duration
}

/// A name that is safe as a header value, a metric label and a part of a variable's name.
pub(super) fn name(node: &Node<'_>) -> Option<String> {
    const NAME: &str = "1 to 64 of the letters A-Z a-z 0-9 . _ -";
    let text = node.name(NAME)?;
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if (1..=64).contains(&text.len()) && text.bytes().all(safe) {
        return Some(text.to_owned());
    }
    node.refuse(NAME);
    None
}

/// An address and a port. No host name: what it resolves to may change, and the fault would come too late.
pub(super) fn socket(node: &Node<'_>) -> Option<SocketAddr> {
    const SOCKET: &str = "an IP address and a port such as 127.0.0.1:9192";
    let text = node.text(SOCKET)?;
    let parsed = text.parse().ok();
    if parsed.is_none() {
        node.refuse(SOCKET);
    }
    parsed
}

/// An address and a port, or `unix:` and an absolute path.
pub(super) fn address(node: &Node<'_>) -> Option<Address> {
    const ADDRESS: &str = "an IP address and a port such as 127.0.0.1:9191, or unix:/path";
    // What the kernel's sun_path takes, with its closing zero.
    const LONGEST_PATH: usize = 107;
    let text = node.text(ADDRESS)?;
    let parsed = match text.strip_prefix("unix:") {
        Some(path) if path.len() > LONGEST_PATH => {
            node.refuse(format!("a socket's path of at most {LONGEST_PATH} bytes"));
            return None;
        }
        Some(path) => (Path::new(path).is_absolute() && !path.ends_with('/') && !path.contains('\0'))
            .then(|| Address::Unix(PathBuf::from(path))),
        None => text.parse().ok().map(Address::Tcp),
    };
    if parsed.is_none() {
        node.refuse(ADDRESS);
    }
    parsed
}
