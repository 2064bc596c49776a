//! Paths that need no key.

use super::reader::Node;
use crate::identity::public::PublicPath;

const PUBLIC: &str = "a path that starts with /, with * at its end alone if it is a prefix";

/// A path as [`crate::config::Config::public`] keeps it.
///
/// Only the normal form is taken: requests are compared after normalising, so another spelling would never match, and
/// whoever wrote it would believe that it does.
pub(super) fn path(node: &Node<'_>) -> Option<String> {
    let text = node.text(PUBLIC)?;
    let stem = text.strip_suffix('*').unwrap_or(text);
    if !stem.starts_with('/') || stem.contains('*') {
        node.refuse(PUBLIC);
        return None;
    }
    if let Some(why) = not_normal(stem) {
        node.refuse(format!("a path in normal form, without {why}"));
        return None;
    }
    // What requests are judged by has the last word; what comes before only says more precisely what is wrong.
    if text.parse::<PublicPath>().is_err() {
        node.refuse("a path that every upstream reads the same way");
        return None;
    }
    if stem == "/" && text != stem {
        node.warn("every path is public, so no request needs a key");
    }
    Some(text.to_owned())
}

/// What keeps a path from being in normal form.
fn not_normal(path: &str) -> Option<&'static str> {
    if path.contains("//") {
        return Some("//");
    }
    if path.split('/').any(|segment| segment == "." || segment == "..") {
        return Some("the segments . and ..");
    }
    if path.contains([';', '\\', '?', '#']) {
        return Some("; \\ ? or #");
    }
    if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Some("spaces, control characters or letters that are not ASCII");
    }
    path.split('%').skip(1).any(|rest| !needed_escape(rest)).then_some("an escape that is broken or not needed")
}

/// Whether the two digits after a `%` stand for a byte that cannot be written plainly, and that is no separator.
fn needed_escape(rest: &str) -> bool {
    let byte = rest.get(..2).filter(|hex| hex.bytes().all(|digit| digit.is_ascii_hexdigit()));
    let byte = byte.and_then(|hex| u8::from_str_radix(hex, 16).ok());
    byte.is_some_and(|byte| !byte.is_ascii_alphanumeric() && !b"-._~/\\;?#*\0".contains(&byte))
}
