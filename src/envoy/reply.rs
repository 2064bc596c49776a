//! What Envoy is answered: the verdict as messages of `envoy.service.ext_proc.v3`.
//!
//! Header values go out in `raw_value`: an Envoy of today reads nothing else, and one that finds both fields set
//! refuses the whole reply.

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{BodySendMode, HeaderSendMode};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, CommonResponse, GrpcStatus, HeaderMutation, HeadersResponse, ImmediateResponse, ProcessingResponse,
    TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};

use super::wire::Phase;
use crate::gate::Pass;
use crate::identity::request::{Request, Rules};
use crate::identity::{TENANT_ID, TENANT_TIER, Tenant};
use crate::limit::Level;
use crate::verdict::{Refusal, retry_after_seconds, whole_seconds};

/// The namespace of bouncer's dynamic metadata.
pub const METADATA: &str = "bouncer";

/// What a script on another origin may read of a refusal.
const EXPOSED: &str = "retry-after, www-authenticate, x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset";

/// A yes: identity set anew, what the client may not say removed.
pub fn allow(request: &Request, rules: &Rules, pass: &Pass) -> ProcessingResponse {
    let (set_headers, strip) = match &pass.tenant {
        Some(tenant) => {
            (vec![set(TENANT_ID, &tenant.id), set(TENANT_TIER, &tenant.tier.name)], request.strip.but_own())
        }
        None => (Vec::new(), request.strip),
    };
    let remove_headers = strip.names(rules).map(ToOwned::to_owned).collect();
    let mutation = HeaderMutation { set_headers, remove_headers };
    let common = CommonResponse { header_mutation: Some(mutation), ..Default::default() };
    let waited_ms = pass.waited.as_millis();
    ProcessingResponse {
        response: Some(Response::RequestHeaders(HeadersResponse { response: Some(common) })),
        dynamic_metadata: Some(metadata("allow", pass.tenant.as_deref(), pass.level.as_ref(), waited_ms)),
        mode_override: pass.flight.is_none().then(nothing_more),
        ..Default::default()
    }
}

/// A no, which Envoy answers itself.
pub fn refuse(request: &Request, refusal: &Refusal) -> ProcessingResponse {
    let reason = refusal.reason;
    let mut headers = Vec::with_capacity(8);
    if let Some(challenge) = reason.challenge() {
        headers.push(set("www-authenticate", challenge));
    }
    if let Some(retry_after) = refusal.retry_after {
        headers.push(set("retry-after", &retry_after_seconds(retry_after).to_string()));
    }
    if let Some(level) = &refusal.level {
        headers.push(set("x-ratelimit-limit", &level.limit.to_string()));
        headers.push(set("x-ratelimit-remaining", &level.remaining.to_string()));
        headers.push(set("x-ratelimit-reset", &whole_seconds(level.reset).to_string()));
    }
    if request.cross_origin {
        // A refusal holds nothing secret, and without these a script sees a network error in its place.
        headers.push(set("access-control-allow-origin", "*"));
        headers.push(set("access-control-expose-headers", EXPOSED));
    }
    let (body, grpc_status) = if request.grpc {
        // Envoy puts the body into grpc-message.
        (reason.error().into(), Some(GrpcStatus { status: reason.grpc_status() }))
    } else {
        headers.push(set("content-type", "application/problem+json"));
        (reason.body().into(), None)
    };
    let immediate = ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(reason.status()) }),
        headers: Some(HeaderMutation { set_headers: headers, remove_headers: Vec::new() }),
        body,
        grpc_status,
        details: format!("bouncer_{}", reason.error()),
    };
    let waited_ms = refusal.waited.as_millis();
    ProcessingResponse {
        response: Some(Response::ImmediateResponse(immediate)),
        dynamic_metadata: Some(metadata(reason.error(), refusal.tenant.as_deref(), refusal.level.as_ref(), waited_ms)),
        ..Default::default()
    }
}

/// Goes on without a change: the answer to every phase after the first.
pub fn unchanged(phase: &Phase) -> ProcessingResponse {
    let response = match phase {
        Phase::RequestHeaders(_) => Response::RequestHeaders(HeadersResponse::default()),
        Phase::ResponseHeaders(_) => Response::ResponseHeaders(HeadersResponse::default()),
        Phase::RequestBody(_) => Response::RequestBody(BodyResponse::default()),
        Phase::ResponseBody(_) => Response::ResponseBody(BodyResponse::default()),
        Phase::RequestTrailers(_) => Response::RequestTrailers(TrailersResponse::default()),
        Phase::ResponseTrailers(_) => Response::ResponseTrailers(TrailersResponse::default()),
    };
    ProcessingResponse { response: Some(response), ..Default::default() }
}

/// Asks Envoy to send no further phase and so to close the stream. Every field is said: one left unset would fall
/// back to its default and switch the response phase on.
fn nothing_more() -> ProcessingMode {
    ProcessingMode {
        request_header_mode: HeaderSendMode::Skip.into(),
        response_header_mode: HeaderSendMode::Skip.into(),
        request_body_mode: BodySendMode::None.into(),
        response_body_mode: BodySendMode::None.into(),
        request_trailer_mode: HeaderSendMode::Skip.into(),
        response_trailer_mode: HeaderSendMode::Skip.into(),
    }
}

fn set(name: &str, value: &str) -> HeaderValueOption {
    let header = HeaderValue { key: name.into(), raw_value: value.into(), ..Default::default() };
    HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..Default::default()
    }
}

/// Everything as text: Envoy formats numbers as floating point, and a limit of fifteen digits would come out rounded.
fn metadata(verdict: &str, tenant: Option<&Tenant>, level: Option<&Level>, waited_ms: u128) -> Struct {
    let mut fields = Vec::with_capacity(7);
    fields.push(("verdict", verdict.to_owned()));
    fields.push(("wait_ms", waited_ms.to_string()));
    if let Some(tenant) = tenant {
        fields.push(("tenant", tenant.id.clone()));
        fields.push(("tier", tenant.tier.name.clone()));
    }
    if let Some(level) = level {
        fields.push(("limit", level.limit.to_string()));
        fields.push(("remaining", level.remaining.to_string()));
        fields.push(("reset", whole_seconds(level.reset).to_string()));
    }
    let fields = fields.into_iter().map(|(name, text)| (name.to_owned(), value(Kind::StringValue(text)))).collect();
    let bouncer = value(Kind::StructValue(Struct { fields }));
    Struct { fields: [(METADATA.to_owned(), bouncer)].into() }
}

fn value(kind: Kind) -> Value {
    Value { kind: Some(kind) }
}
