//! The part of `envoy.service.ext_proc.v3.ProcessingResponse` that bouncer writes.
//!
//! The generated types own every name and value as a string of its own and keep maps as hash maps. Here names are
//! static, and a map is the list of entries that it is on the wire. Field numbers are those of Envoy's published API; a
//! test decodes with the generated types what these encode. Fields of bytes stand for strings of the API, and hold text.

use bytes::Bytes;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use prost::{Message, Oneof};

/// One message to Envoy: the answer to one phase.
#[derive(Clone, PartialEq, Message)]
pub struct ProcessingResponse {
    /// What becomes of the phase.
    #[prost(oneof = "Response", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub response: Option<Response>,
    /// Namespaces of dynamic metadata.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
    /// Which phases are to follow, where that is not what the filter's configuration says.
    #[prost(message, optional, tag = "9")]
    pub mode_override: Option<ProcessingMode>,
}

/// The answer to a phase, of the same name as the phase, or an end to the request.
#[derive(Clone, PartialEq, Oneof)]
pub enum Response {
    /// Where the verdict is a yes.
    #[prost(message, tag = "1")]
    RequestHeaders(HeadersResponse),
    /// Goes on without a change.
    #[prost(message, tag = "2")]
    ResponseHeaders(Unchanged),
    /// Goes on without a change.
    #[prost(message, tag = "3")]
    RequestBody(Unchanged),
    /// Goes on without a change.
    #[prost(message, tag = "4")]
    ResponseBody(Unchanged),
    /// Goes on without a change.
    #[prost(message, tag = "5")]
    RequestTrailers(Unchanged),
    /// Goes on without a change.
    #[prost(message, tag = "6")]
    ResponseTrailers(Unchanged),
    /// Where the verdict is a no: Envoy answers this.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// The empty message: every field of the answer at its default.
#[derive(Clone, PartialEq, Message)]
pub struct Unchanged {}

/// An answer to headers.
#[derive(Clone, PartialEq, Message)]
pub struct HeadersResponse {
    /// Absent where nothing changes.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// What changes.
#[derive(Clone, PartialEq, Message)]
pub struct CommonResponse {
    /// Of the headers.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
}

/// Headers to set, then headers to remove.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderMutation {
    /// To set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    /// Names.
    #[prost(bytes = "bytes", repeated, tag = "2")]
    pub remove_headers: Vec<Bytes>,
}

/// A header, and what to do where there is one of its name.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValueOption {
    /// The header.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// A `HeaderAppendAction` of the API.
    #[prost(int32, tag = "3")]
    pub append_action: i32,
}

/// One header line.
#[derive(Clone, PartialEq, Message)]
pub struct HeaderValue {
    /// In lower case.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// The only field for the value that every Envoy of today reads.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// An answer that Envoy gives in the upstream's place.
#[derive(Clone, PartialEq, Message)]
pub struct ImmediateResponse {
    /// The HTTP status.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// The response's headers.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// The response's body.
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// For gRPC clients.
    #[prost(message, optional, tag = "4")]
    pub grpc_status: Option<GrpcStatus>,
    /// For Envoy's access log.
    #[prost(bytes = "bytes", tag = "5")]
    pub details: Bytes,
}

/// An HTTP status.
#[derive(Clone, PartialEq, Message)]
pub struct HttpStatus {
    /// As a number.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// A gRPC status.
#[derive(Clone, PartialEq, Message)]
pub struct GrpcStatus {
    /// As a number.
    #[prost(uint32, tag = "1")]
    pub status: u32,
}

/// `google.protobuf.Struct`.
#[derive(Clone, PartialEq, Message)]
pub struct Struct {
    /// Each key once.
    #[prost(message, repeated, tag = "1")]
    pub fields: Vec<Field>,
}

/// An entry of a [`Struct`].
#[derive(Clone, PartialEq, Message)]
pub struct Field {
    /// Its name.
    #[prost(bytes = "bytes", tag = "1")]
    pub key: Bytes,
    /// Never absent.
    #[prost(message, optional, tag = "2")]
    pub value: Option<Value>,
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, Message)]
pub struct Value {
    /// Never absent.
    #[prost(oneof = "Kind", tags = "3, 5")]
    pub kind: Option<Kind>,
}

/// The kinds of value that bouncer writes.
#[derive(Clone, PartialEq, Oneof)]
pub enum Kind {
    /// Text.
    #[prost(bytes = "bytes", tag = "3")]
    Text(Bytes),
    /// Named values.
    #[prost(message, tag = "5")]
    Struct(Struct),
}

impl Field {
    /// A named value.
    pub fn new(key: &'static str, kind: Kind) -> Self {
        Self { key: Bytes::from_static(key.as_bytes()), value: Some(Value { kind: Some(kind) }) }
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3 as core;
    use envoy_types::pb::envoy::service::ext_proc::v3 as api;
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Answer;
    use envoy_types::pb::envoy::r#type::v3 as http;
    use envoy_types::pb::google::protobuf::{self, value};

    use super::*;

    fn decode(message: &ProcessingResponse) -> api::ProcessingResponse {
        api::ProcessingResponse::decode(message.encode_to_vec().as_slice()).unwrap()
    }

    fn mutation() -> HeaderMutation {
        let header = HeaderValue { key: "x-a".into(), raw_value: "1".into() };
        HeaderMutation {
            set_headers: vec![HeaderValueOption { header: Some(header), append_action: 2 }],
            remove_headers: vec!["x-b".into(), "x-c".into()],
        }
    }

    fn generated_mutation() -> api::HeaderMutation {
        let header = core::HeaderValue { key: "x-a".into(), raw_value: b"1".into(), ..Default::default() };
        let action = core::header_value_option::HeaderAppendAction::OverwriteIfExistsOrAdd.into();
        api::HeaderMutation {
            set_headers: vec![core::HeaderValueOption {
                header: Some(header),
                append_action: action,
                ..Default::default()
            }],
            remove_headers: vec!["x-b".into(), "x-c".into()],
        }
    }

    #[test]
    fn a_yes_is_read_by_the_generated_types() {
        let common = CommonResponse { header_mutation: Some(mutation()) };
        let inner = Kind::Struct(Struct { fields: vec![Field::new("verdict", Kind::Text("allow".into()))] });
        let yes = ProcessingResponse {
            response: Some(Response::RequestHeaders(HeadersResponse { response: Some(common) })),
            dynamic_metadata: Some(Struct { fields: vec![Field::new("bouncer", inner)] }),
            mode_override: Some(ProcessingMode { response_header_mode: 2, ..Default::default() }),
        };

        let common = api::CommonResponse { header_mutation: Some(generated_mutation()), ..Default::default() };
        let value = |kind| protobuf::Value { kind: Some(kind) };
        let verdict = ("verdict".to_owned(), value(value::Kind::StringValue("allow".into())));
        let inner = value(value::Kind::StructValue(protobuf::Struct { fields: [verdict].into() }));
        let expected = api::ProcessingResponse {
            response: Some(Answer::RequestHeaders(api::HeadersResponse { response: Some(common) })),
            dynamic_metadata: Some(protobuf::Struct { fields: [("bouncer".to_owned(), inner)].into() }),
            mode_override: Some(ProcessingMode { response_header_mode: 2, ..Default::default() }),
            ..Default::default()
        };
        assert_eq!(decode(&yes), expected);
    }

    #[test]
    fn a_no_is_read_by_the_generated_types() {
        let no = ImmediateResponse {
            status: Some(HttpStatus { code: 429 }),
            headers: Some(mutation()),
            body: "{}".into(),
            grpc_status: Some(GrpcStatus { status: 8 }),
            details: "why".into(),
        };

        let expected = api::ImmediateResponse {
            status: Some(http::HttpStatus { code: 429 }),
            headers: Some(generated_mutation()),
            body: b"{}".into(),
            grpc_status: Some(api::GrpcStatus { status: 8 }),
            details: "why".into(),
        };
        let read = decode(&ProcessingResponse { response: Some(Response::Immediate(no)), ..Default::default() });
        assert_eq!(read.response, Some(Answer::ImmediateResponse(expected)));
    }

    #[test]
    fn an_unchanged_phase_is_answered_under_its_own_name() {
        let answer = |response| decode(&ProcessingResponse { response: Some(response), ..Default::default() }).response;
        let headers = api::HeadersResponse::default();
        let (body, trailers) = (api::BodyResponse::default(), api::TrailersResponse::default());
        let default = HeadersResponse::default();
        assert_eq!(answer(Response::RequestHeaders(default)), Some(Answer::RequestHeaders(headers.clone())));
        assert_eq!(answer(Response::ResponseHeaders(Unchanged {})), Some(Answer::ResponseHeaders(headers)));
        assert_eq!(answer(Response::RequestBody(Unchanged {})), Some(Answer::RequestBody(body.clone())));
        assert_eq!(answer(Response::ResponseBody(Unchanged {})), Some(Answer::ResponseBody(body)));
        assert_eq!(answer(Response::RequestTrailers(Unchanged {})), Some(Answer::RequestTrailers(trailers.clone())));
        assert_eq!(answer(Response::ResponseTrailers(Unchanged {})), Some(Answer::ResponseTrailers(trailers)));
    }
}
