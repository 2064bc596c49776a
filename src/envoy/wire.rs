//! The part of `envoy.service.ext_proc.v3.ProcessingRequest` that bouncer reads.
//!
//! The generated types decode everything, two allocations a header. Here headers are slices of the message's own
//! buffer, and what nobody asks for is skipped. Field numbers are those of Envoy's published API; a test encodes
//! with the generated types and decodes with these. Bytes instead of strings also mean that a header which is not
//! UTF-8 does not fail the call.

use bytes::Bytes;
use prost::{Message, Oneof};

/// One message of Envoy: a phase of the HTTP request that the stream belongs to.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingRequest {
    /// Which phase.
    #[prost(oneof = "Phase", tags = "2, 3, 4, 5, 6, 7")]
    pub phase: Option<Phase>,
}

/// A phase of an HTTP request. Only the first one, and the response's trailers, are ever sent with the processing
/// mode that is shipped.
#[derive(Clone, PartialEq, Oneof)]
pub enum Phase {
    /// Where the request is judged.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// Sent where the operator asks for it.
    #[prost(message, tag = "3")]
    ResponseHeaders(Skipped),
    /// Sent where the operator asks for it.
    #[prost(message, tag = "4")]
    RequestBody(Skipped),
    /// Sent where the operator asks for it.
    #[prost(message, tag = "5")]
    ResponseBody(Skipped),
    /// Sent where the operator asks for it.
    #[prost(message, tag = "6")]
    RequestTrailers(Skipped),
    /// Sent for responses that have trailers, such as those of gRPC.
    #[prost(message, tag = "7")]
    ResponseTrailers(Skipped),
}

/// A message whose content nobody reads.
#[derive(Clone, PartialEq, Message)]
pub struct Skipped {}

/// The headers of a request, pseudo-headers among them.
#[derive(Clone, PartialEq, Message)]
pub struct HttpHeaders {
    /// Absent where there are none.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
}

/// Header lines in order, one entry a line.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderMap {
    /// The lines.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

/// One header line.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    /// In lower case.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// Set by old Envoys only.
    #[prost(bytes = "bytes", tag = "2")]
    pub value: Bytes,
    /// Set by every Envoy of today.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

impl HttpHeaders {
    /// Names and values, as they came.
    pub fn lines(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.headers.iter().flat_map(|map| &map.headers).map(|line| {
            let value = if line.raw_value.is_empty() { &line.value } else { &line.raw_value };
            (line.key.as_ref(), value.as_ref())
        })
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3 as core;
    use envoy_types::pb::envoy::service::ext_proc::v3 as api;
    use envoy_types::pb::google::protobuf::Struct;
    use proptest::prelude::*;

    use super::*;

    fn header(key: &str, value: &str, raw: &[u8]) -> core::HeaderValue {
        core::HeaderValue { key: key.into(), value: value.into(), raw_value: raw.to_vec() }
    }

    fn decode(request: api::processing_request::Request) -> Phase {
        let message = api::ProcessingRequest {
            request: Some(request),
            observability_mode: true,
            attributes: [("unread".to_owned(), Struct::default())].into(),
            ..Default::default()
        };
        ProcessingRequest::decode(message.encode_to_vec().as_slice()).unwrap().phase.unwrap()
    }

    #[test]
    fn headers_written_by_the_generated_types_are_read_back() {
        let headers = vec![header(":path", "", b"/a"), header("old", "text", b""), header("raw", "", b"\xff\x00")];
        let message =
            api::HttpHeaders { headers: Some(core::HeaderMap { headers }), end_of_stream: true, ..Default::default() };
        let Phase::RequestHeaders(read) = decode(api::processing_request::Request::RequestHeaders(message)) else {
            panic!("not request headers")
        };
        let lines: Vec<_> = read.lines().collect();
        assert_eq!(lines, [(&b":path"[..], &b"/a"[..]), (b"old", b"text"), (b"raw", b"\xff\x00")]);
    }

    #[test]
    fn every_phase_is_told_apart() {
        use api::processing_request::Request;
        assert!(matches!(decode(Request::ResponseHeaders(api::HttpHeaders::default())), Phase::ResponseHeaders(_)));
        let body = api::HttpBody { body: b"unread".to_vec(), ..Default::default() };
        assert!(matches!(decode(Request::RequestBody(body.clone())), Phase::RequestBody(_)));
        assert!(matches!(decode(Request::ResponseBody(body)), Phase::ResponseBody(_)));
        assert!(matches!(decode(Request::RequestTrailers(api::HttpTrailers::default())), Phase::RequestTrailers(_)));
        assert!(matches!(decode(Request::ResponseTrailers(api::HttpTrailers::default())), Phase::ResponseTrailers(_)));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            if let Ok(request) = ProcessingRequest::decode(bytes.as_slice())
                && let Some(Phase::RequestHeaders(headers)) = request.phase
            {
                let _ = headers.lines().count();
            }
        }
    }
}
