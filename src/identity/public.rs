//! Which paths need no key.
//!
//! Upstreams disagree about what a path means: some decode it twice, some resolve dot segments after decoding, some take
//! `\` for `/`, drop what follows a `;`, or merge slashes. A path that any of them may read as another one is never
//! public, however it starts: its caller has to show a key.

use std::borrow::Cow;
use std::collections::HashSet;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

/// One configured path: exact, or everything that starts with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublicPath {
    /// In its normal form.
    Exact(String),
    /// In its normal form, without the `*`.
    Prefix(String),
}

/// A configured path that could never match.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("public path `{path}` is not an absolute path that every upstream reads the same way")]
pub struct PublicPathError {
    /// As written.
    pub path: String,
}

impl FromStr for PublicPath {
    type Err = PublicPathError;

    /// Reads `/exact`, `/prefix*`, or `*` for every path.
    ///
    /// # Errors
    /// When no request could ever match, because its path would count as ambiguous.
    fn from_str(path: &str) -> Result<Self, Self::Err> {
        let (text, prefix) = match path.strip_suffix('*') {
            Some("") => ("/", true),
            Some(text) => (text, true),
            None => (path, false),
        };
        match normal(text.as_bytes()) {
            Some(normal) if prefix => Ok(Self::Prefix(normal.into_owned())),
            Some(normal) => Ok(Self::Exact(normal.into_owned())),
            None => Err(PublicPathError { path: path.to_owned() }),
        }
    }
}

/// All paths that need no key.
#[derive(Debug, Default)]
pub struct PublicPaths {
    exact: HashSet<String>,
    /// Sorted, and none starts with another one.
    prefixes: Vec<String>,
}

impl PublicPaths {
    /// # Errors
    /// The first path that [`PublicPath`] refuses.
    pub fn new<S: AsRef<str>>(paths: impl IntoIterator<Item = S>) -> Result<Self, PublicPathError> {
        paths.into_iter().map(|path| path.as_ref().parse()).collect()
    }

    /// Whether `target`, the `:path` of a request, names a public path beyond doubt. Its query does not matter.
    pub fn contains(&self, target: &[u8]) -> bool {
        if self.exact.is_empty() && self.prefixes.is_empty() {
            return false;
        }
        let path = target.split(|byte| *byte == b'?').next().unwrap_or_default();
        normal(path).is_some_and(|path| self.exact.contains(&*path) || self.has_prefix_of(&path))
    }

    fn has_prefix_of(&self, path: &str) -> bool {
        // Whatever sorts between a prefix of the path and the path itself starts with that prefix too, and is therefore
        // not in the list. So only the last entry that is not behind the path can be one.
        let behind = self.prefixes.partition_point(|prefix| prefix.as_str() <= path);
        self.prefixes[..behind].last().is_some_and(|prefix| path.starts_with(prefix.as_str()))
    }
}

impl FromIterator<PublicPath> for PublicPaths {
    fn from_iter<I: IntoIterator<Item = PublicPath>>(paths: I) -> Self {
        let mut all = Self::default();
        for path in paths {
            match path {
                PublicPath::Exact(path) => {
                    all.exact.insert(path);
                }
                PublicPath::Prefix(path) => all.prefixes.push(path),
            }
        }
        all.prefixes.sort_unstable();
        // `dedup_by` compares with the last one kept, which sorts before everything that starts with it.
        all.prefixes.dedup_by(|next, kept| next.starts_with(kept.as_str()));
        all
    }
}

/// The normal form of a path without query (RFC 3986, section 6.2.2): unreserved characters decoded, the digits of other
/// escapes in upper case. `None` when upstreams may disagree about the path.
fn normal(path: &[u8]) -> Option<Cow<'_, str>> {
    if path.first() != Some(&b'/') {
        return None;
    }
    let path = if path.contains(&b'%') {
        Cow::Owned(unescape(path)?)
    } else if path.iter().copied().all(is_plain) {
        Cow::Borrowed(str::from_utf8(path).ok()?)
    } else {
        return None;
    };
    has_plain_segments(&path).then_some(path)
}

/// Decodes what may be decoded; `None` for an escape that is broken or hides something.
fn unescape(path: &[u8]) -> Option<String> {
    let mut text = String::with_capacity(path.len());
    let mut rest = path;
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            is_plain(*first).then(|| text.push(char::from(*first)))?;
            continue;
        }
        let [high, low, tail @ ..] = rest else { return None };
        rest = tail;
        let (high, low) = (char::from(*high), char::from(*low));
        let byte = u8::try_from(high.to_digit(16)? << 4 | low.to_digit(16)?).ok()?;
        match byte {
            _ if is_unreserved(byte) => text.push(char::from(byte)),
            b'/' | b'\\' | b';' | b'?' | b'#' | b'%' => return None,
            _ => text.extend(['%', high.to_ascii_uppercase(), low.to_ascii_uppercase()]),
        }
    }
    // Bytes that are not UTF-8 mean one thing to one upstream and another to the next: overlong forms of `.` and `/`
    // have been decoded before.
    let decoded = percent_decode_str(&text).decode_utf8().ok()?;
    (!decoded.contains(char::is_control)).then_some(text)
}

/// Whether every segment stands for itself. `//`, `/./` and `/../` do not; nor do dots and spaces in any mixture, which
/// Windows takes for `.` or `..`.
fn has_plain_segments(path: &str) -> bool {
    let mut segments = path.split('/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        let mut rest = segment;
        while let Some(shorter) = rest.strip_prefix('.').or_else(|| rest.strip_prefix("%20")) {
            rest = shorter;
        }
        let trailing_slash = segment.is_empty() && segments.peek().is_none();
        if rest.is_empty() && !trailing_slash {
            return false;
        }
    }
    true
}

/// What may stand in a path as it is (RFC 3986, section 3.3), but for `;`, behind which some upstreams see parameters.
fn is_plain(byte: u8) -> bool {
    is_unreserved(byte)
        || matches!(byte, b'/' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')' | b'*' | b'+' | b',' | b'=' | b':' | b'@')
}

fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

#[cfg(test)]
mod tests;
