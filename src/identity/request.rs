//! A request's headers, read once into the few facts that the gate needs, whatever protocol brought them.

use http::HeaderName;

use super::KeyHash;
use super::credential::{self, Reading};
use super::public::PublicPaths;
use super::strip::Strip;

/// What the configuration says about reading requests: one immutable value.
#[derive(Debug)]
pub struct Rules {
    headers: Vec<CredentialHeader>,
    forward: bool,
    public: PublicPaths,
}

#[derive(Debug)]
struct CredentialHeader {
    name: HeaderName,
    /// Bears a scheme before its key.
    bearer: bool,
}

impl Rules {
    /// `headers` are those that may bring a key: `authorization` as `Bearer <key>`, every other one as the bare key. With
    /// `forward` the upstream gets to see them.
    pub fn new(headers: &[HeaderName], forward: bool, public: PublicPaths) -> Self {
        let headers = headers
            .iter()
            .map(|name| CredentialHeader { name: name.clone(), bearer: *name == http::header::AUTHORIZATION })
            .collect();
        Self { headers, forward, public }
    }

    /// The names of the headers that may bring a key, by index.
    pub(super) fn header_names(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|header| header.name.as_str())
    }

    fn credential(&self, name: &[u8]) -> Option<(usize, &CredentialHeader)> {
        self.headers.iter().enumerate().find(|(_, header)| is(name, header.name.as_str()))
    }
}

/// The facts about a request. Small, since it is kept while the request is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Not looked for on requests that need none.
    pub credential: Presented,
    /// Whether a key is needed at all.
    pub access: Access,
    /// The client speaks gRPC and reads a refusal as a grpc-status.
    pub grpc: bool,
    /// A browser's script may be asking, which sees no more of a refusal than CORS headers allow. (Browsers send an
    /// Origin on some requests to the same origin too.)
    pub cross_origin: bool,
    /// What must be removed before the upstream sees the request.
    pub strip: Strip,
}

/// The credential that came with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presented {
    /// None, or only empty ones.
    None,
    /// One key, which may or may not be known.
    One(KeyHash),
    /// Something that cannot be a key of ours, such as another scheme.
    Malformed,
    /// More than one credential, equal or not: whoever reads another one than we do would see another caller.
    Conflict,
}

/// What a request needs to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// A key.
    Keyed,
    /// Nothing: its path is public.
    Public,
    /// Nothing: a browser asks whether it may ask, and never sends a credential with that.
    Preflight,
}

impl Request {
    /// Reads headers as a proxy hands them over: names in lower case or not, pseudo-headers among them, one pair for
    /// each line. Any bytes will do.
    pub fn read<'a>(headers: impl IntoIterator<Item = (&'a [u8], &'a [u8])>, rules: &Rules) -> Self {
        let mut lines = Lines::default();
        for (name, value) in headers {
            lines.add(name, value, rules);
        }
        lines.into_request(rules)
    }
}

/// What has been seen so far of a request's headers.
#[derive(Default)]
struct Lines<'a> {
    method: Line<'a>,
    path: Line<'a>,
    content_type: Line<'a>,
    origin: bool,
    asks_for_method: bool,
    /// Something came that browsers never send with a preflight.
    more_than_asks: bool,
    credential: Credential<'a>,
    strip: Strip,
}

impl<'a> Lines<'a> {
    fn add(&mut self, name: &'a [u8], value: &'a [u8], rules: &Rules) {
        // Not part of the choice below: a configured header may have any name.
        if let Some((index, header)) = rules.credential(name) {
            self.credential.add(if header.bearer { credential::bearer(value) } else { credential::bare(value) });
            if !rules.forward {
                self.strip.insert_credential(index);
            }
        }
        self.more_than_asks |= is_beyond_preflight(name, value);
        match name.len() {
            5 if is(name, ":path") => self.path.add(value),
            6 if is(name, "origin") => self.origin |= !value.is_empty(),
            7 if is(name, ":method") => self.method.add(value),
            11 | 13 => self.strip.insert_identity(name),
            12 if is(name, "content-type") => self.content_type.add(value),
            29 if is(name, "access-control-request-method") => self.asks_for_method |= !value.is_empty(),
            _ => {}
        }
    }

    fn is_preflight(&self) -> bool {
        self.method.one() == Some(b"OPTIONS") && self.origin && self.asks_for_method && !self.more_than_asks
    }

    fn into_request(self, rules: &Rules) -> Request {
        let access = if self.path.one().is_some_and(|path| rules.public.contains(path)) {
            Access::Public
        } else if self.is_preflight() {
            Access::Preflight
        } else {
            Access::Keyed
        };
        let credential = match (access, self.credential) {
            (Access::Public | Access::Preflight, _) | (Access::Keyed, Credential::None) => Presented::None,
            (Access::Keyed, Credential::One(key)) => Presented::One(KeyHash::of(key)),
            (Access::Keyed, Credential::Malformed) => Presented::Malformed,
            (Access::Keyed, Credential::Conflict) => Presented::Conflict,
        };
        Request {
            credential,
            access,
            grpc: self.content_type.one().is_some_and(is_grpc),
            cross_origin: self.origin,
            strip: self.strip,
        }
    }
}

/// Whether a header tells that its request does more than ask: that it opens another protocol, is a call, has a body, or
/// is meant as another method than it says, which some upstreams go by. A browser's preflight has nothing of this.
fn is_beyond_preflight(name: &[u8], value: &[u8]) -> bool {
    const GRPC: &str = "application/grpc";
    match name.len() {
        7 => is(name, "upgrade"),
        12 => is(name, "content-type") && value.get(..GRPC.len()).is_some_and(|start| is(start, GRPC)),
        14 => is(name, "content-length") && value.trim_ascii() != b"0",
        13 => is_twin(name, "x-http-method"),
        17 => is(name, "transfer-encoding") || is_twin(name, "x-method-override"),
        22 => is_twin(name, "x-http-method-override"),
        _ => false,
    }
}

/// The value of a header that may occur once.
#[derive(Default)]
enum Line<'a> {
    #[default]
    Absent,
    One(&'a [u8]),
    Many,
}

impl<'a> Line<'a> {
    fn add(&mut self, value: &'a [u8]) {
        *self = match self {
            Line::Absent => Line::One(value),
            Line::One(_) | Line::Many => Line::Many,
        };
    }

    fn one(&self) -> Option<&'a [u8]> {
        match self {
            Line::One(value) => Some(value),
            Line::Absent | Line::Many => None,
        }
    }
}

/// [`Presented`] before its key is hashed, which is done once and only where it is needed.
#[derive(Default)]
enum Credential<'a> {
    #[default]
    None,
    One(&'a [u8]),
    Malformed,
    Conflict,
}

impl<'a> Credential<'a> {
    fn add(&mut self, reading: Reading<'a>) {
        *self = match (&self, reading) {
            (_, Reading::Nothing) => return,
            (Credential::None, Reading::Key(key)) => Credential::One(key),
            (Credential::None, Reading::Malformed) => Credential::Malformed,
            (
                Credential::One(_) | Credential::Malformed | Credential::Conflict,
                Reading::Key(_) | Reading::Malformed,
            ) => Credential::Conflict,
        };
    }
}

/// `application/grpc`, with a subtype after `+` or parameters, as Envoy and gRPC servers take it; gRPC-Web is not gRPC.
fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &str = "application/grpc";
    content_type.split_at_checked(GRPC.len()).is_some_and(|(start, rest)| {
        is(start, GRPC) && matches!(rest.trim_ascii_start().first(), None | Some(b'+' | b';'))
    })
}

/// Header names have no case.
pub(super) fn is(name: &[u8], known: &str) -> bool {
    name.eq_ignore_ascii_case(known.as_bytes())
}

/// As [`is`], for upstreams that follow CGI and take `_` and `-` for the same character.
fn is_twin(name: &[u8], known: &str) -> bool {
    let plain = |byte: &u8| if *byte == b'_' { b'-' } else { byte.to_ascii_lowercase() };
    name.iter().map(plain).eq(known.bytes())
}

#[cfg(test)]
mod tests;
