//! What Envoy is answered: the verdict as messages of `envoy.service.ext_proc.v3`.
//!
//! Header values go out in `raw_value`: an Envoy of today reads nothing else, and one that finds both fields set
//! refuses the whole reply.

use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::ProcessingMode;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::{BodySendMode, HeaderSendMode};

use super::message::{
    CommonResponse, Field, GrpcStatus, HeaderMutation, HeaderValue, HeaderValueOption, HeadersResponse, HttpStatus,
    ImmediateResponse, Kind, ProcessingResponse, Response, Struct, Unchanged,
};
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
            (vec![set(TENANT_ID, copy(&tenant.id)), set(TENANT_TIER, copy(&tenant.tier.name))], request.strip.but_own())
        }
        None => (Vec::new(), request.strip),
    };
    let remove_headers = strip.names(rules).map(copy).collect();
    let mutation = HeaderMutation { set_headers, remove_headers };
    let common = CommonResponse { header_mutation: Some(mutation) };
    ProcessingResponse {
        response: Some(Response::RequestHeaders(HeadersResponse { response: Some(common) })),
        dynamic_metadata: Some(metadata("allow", pass.tenant.as_deref(), pass.level.as_ref(), pass.waited)),
        mode_override: pass.flight.is_none().then(nothing_more),
    }
}

/// A no, which Envoy answers itself.
pub fn refuse(request: &Request, refusal: &Refusal) -> ProcessingResponse {
    let reason = refusal.reason;
    let mut headers = Vec::with_capacity(8);
    if let Some(challenge) = reason.challenge() {
        headers.push(set("www-authenticate", fixed(challenge)));
    }
    if let Some(retry_after) = refusal.retry_after {
        headers.push(set("retry-after", number(retry_after_seconds(retry_after))));
    }
    if let Some(level) = &refusal.level {
        headers.push(set("x-ratelimit-limit", number(level.limit)));
        headers.push(set("x-ratelimit-remaining", number(level.remaining)));
        headers.push(set("x-ratelimit-reset", number(whole_seconds(level.reset))));
    }
    if request.cross_origin {
        // A refusal holds nothing secret, and without these a script sees a network error in its place.
        headers.push(set("access-control-allow-origin", fixed("*")));
        headers.push(set("access-control-expose-headers", fixed(EXPOSED)));
    }
    let (body, grpc_status) = if request.grpc {
        // Envoy puts the body into grpc-message.
        (fixed(reason.error()), Some(GrpcStatus { status: reason.grpc_status() }))
    } else {
        headers.push(set("content-type", fixed("application/problem+json")));
        (fixed(reason.body()), None)
    };
    let immediate = ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(reason.status()) }),
        headers: Some(HeaderMutation { set_headers: headers, remove_headers: Vec::new() }),
        body,
        grpc_status,
        details: format!("bouncer_{}", reason.error()).into(),
    };
    ProcessingResponse {
        response: Some(Response::Immediate(immediate)),
        dynamic_metadata: Some(metadata(
            reason.error(),
            refusal.tenant.as_deref(),
            refusal.level.as_ref(),
            refusal.waited,
        )),
        mode_override: None,
    }
}

/// Goes on without a change: the answer to every phase after the first.
pub fn unchanged(phase: &Phase) -> ProcessingResponse {
    let response = match phase {
        Phase::RequestHeaders(_) => Response::RequestHeaders(HeadersResponse::default()),
        Phase::ResponseHeaders(_) => Response::ResponseHeaders(Unchanged {}),
        Phase::RequestBody(_) => Response::RequestBody(Unchanged {}),
        Phase::ResponseBody(_) => Response::ResponseBody(Unchanged {}),
        Phase::RequestTrailers(_) => Response::RequestTrailers(Unchanged {}),
        Phase::ResponseTrailers(_) => Response::ResponseTrailers(Unchanged {}),
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

fn set(name: &'static str, value: Bytes) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: fixed(name), raw_value: value }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
    }
}

/// Everything as text: Envoy formats numbers as floating point, and a limit of fifteen digits would come out rounded.
fn metadata(verdict: &'static str, tenant: Option<&Tenant>, level: Option<&Level>, waited: Duration) -> Struct {
    let mut fields = Vec::with_capacity(7);
    let mut say = |name, text| fields.push(Field::new(name, Kind::Text(text)));
    say("verdict", fixed(verdict));
    say("wait_ms", number(u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)));
    if let Some(tenant) = tenant {
        say("tenant", copy(&tenant.id));
        say("tier", copy(&tenant.tier.name));
    }
    if let Some(level) = level {
        say("limit", number(level.limit));
        say("remaining", number(level.remaining));
        say("reset", number(whole_seconds(level.reset)));
    }
    Struct { fields: vec![Field::new(METADATA, Kind::Struct(Struct { fields }))] }
}

fn fixed(text: &'static str) -> Bytes {
    Bytes::from_static(text.as_bytes())
}

fn copy(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn number(number: u64) -> Bytes {
    number.to_string().into()
}
