//! An HTTP server that does what it is asked: answer late, answer badly, stream, echo, break off.
//!
//! HTTP/1.1 and HTTP/2 without TLS on one port, web sockets and the gRPC health service included.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Extension, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{any, get, post};
use axum::{Json, Router, middleware};
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower::ServiceExt;
use tower_http::cors::CorsLayer;

use super::record::{self, Record, Visit};

/// The longest delay and pause anyone may ask for.
const LONGEST: Duration = Duration::from_secs(3600);

/// Bodies up to this many bytes are echoed, longer ones only measured.
const ECHO_BYTES: usize = 4096;

/// Serves until `stop`; connections that are open then are dropped.
pub(crate) async fn serve(listener: TcpListener, record: Record, stop: impl Future<Output = ()>) {
    let app = app(record);
    let mut connections = JoinSet::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => return,
            Some(_) = connections.join_next() => (),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(connection(stream, app.clone()))),
                // Out of file descriptors, or a client that was gone before it was accepted.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
        }
    }
}

fn app(record: Record) -> Router {
    let (_, health) = tonic_health::server::health_reporter();
    Router::new()
        .route("/", get(index))
        .route("/health", get(async || Json(json!({ "status": "ok" }))))
        .route("/anything", any(anything))
        .route("/anything/{*rest}", any(anything))
        .route("/delay/{seconds}", any(delay))
        .route("/status/{code}", any(status))
        .route("/bytes/{count}", any(bytes))
        .route("/stream/{chunks}/{ms}", any(chunks))
        .route("/response-headers", any(response_headers))
        .route("/reset", any(reset_before_head))
        .route("/reset/body", any(reset_in_body))
        .route("/ws", any(websocket))
        .route("/_record", get(async |State(record): State<Record>| Json(record.snapshot())))
        .route("/_record/reset", post(async |State(record): State<Record>| record.reset()))
        .fallback(async || refuse(StatusCode::NOT_FOUND, "no such path; GET / lists them"))
        .with_state(record.clone())
        .route_service("/grpc.health.v1.Health/{*method}", health)
        .layer(CorsLayer::permissive())
        .layer(middleware::from_fn_with_state(record, record::count))
}

async fn connection(stream: TcpStream, app: Router) {
    // A peer that is already gone shows at the first read.
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
        let app = app.clone();
        async move {
            let response = match app.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            // An error in place of a response makes hyper close the connection (HTTP/2: reset the stream).
            match response.extensions().get::<Reset>() {
                Some(Reset) => Err(io::Error::from(io::ErrorKind::ConnectionReset)),
                None => Ok(response),
            }
        }
    });
    let server = auto::Builder::new(TokioExecutor::new());
    // Resets are asked for, and clients may leave: how a connection ended is the record's business.
    let _ = server.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
}

/// Marks a response that is to be replaced by the end of its connection.
#[derive(Clone)]
struct Reset;

async fn index() -> Json<Value> {
    Json(json!({
        "/anything": "echoes the request",
        "/delay/SECONDS": "answers after so long",
        "/status/CODE": "answers with this status",
        "/bytes/N": "answers with so many bytes",
        "/stream/CHUNKS/MS": "a chunk every MS milliseconds",
        "/response-headers?NAME=VALUE": "answers with these headers",
        "/reset": "closes the connection without an answer",
        "/reset/body": "closes the connection within the body",
        "/ws": "a WebSocket that echoes",
        "/_record": "what was in flight; POST /_record/reset forgets",
    }))
}

async fn anything(request: Request) -> Response<Body> {
    let (head, body) = request.into_parts();
    let Ok(Read { length, text, trailers }) = read(body).await else {
        return refuse(StatusCode::BAD_REQUEST, "the request body broke off");
    };
    let echo = json!({
        "method": head.method.as_str(),
        "path": head.uri.path(),
        "query": head.uri.query(),
        "version": format!("{:?}", head.version),
        "headers": pairs(&head.headers),
        "trailers": pairs(&trailers),
        "body_length": length,
        "body": text,
    });
    Json(echo).into_response()
}

/// Names and values, one pair a line.
fn pairs(headers: &HeaderMap) -> Vec<[String; 2]> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    headers.iter().map(|(name, value)| [name.to_string(), text(value.as_bytes())]).collect()
}

/// What is told of a body.
struct Read {
    length: u64,
    /// What it says, if it is short text.
    text: Option<String>,
    /// Headers that came after it.
    trailers: HeaderMap,
}

async fn read(mut body: Body) -> Result<Read, axum::Error> {
    let (mut length, mut kept, mut trailers) = (0_u64, Vec::new(), HeaderMap::new());
    while let Some(frame) = body.frame().await {
        match frame?.into_data() {
            Ok(data) => {
                length += data.len() as u64;
                if length <= ECHO_BYTES as u64 {
                    kept.extend_from_slice(&data);
                }
            }
            Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
        }
    }
    let text = if length <= ECHO_BYTES as u64 { String::from_utf8(kept).ok() } else { None };
    Ok(Read { length, text, trailers })
}

async fn delay(Path(seconds): Path<f64>) -> Response<Body> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(delay) if delay <= LONGEST => {
            tokio::time::sleep(delay).await;
            Json(json!({ "delay": seconds })).into_response()
        }
        _ => refuse(StatusCode::BAD_REQUEST, "seconds must be within 0 and 3600"),
    }
}

async fn status(Path(code): Path<u16>) -> Response<Body> {
    match StatusCode::from_u16(code) {
        Ok(code @ (StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED)) => {
            code.into_response()
        }
        Ok(code) if (200..600).contains(&code.as_u16()) => {
            (code, Json(json!({ "status": code.as_u16() }))).into_response()
        }
        _ => refuse(StatusCode::BAD_REQUEST, "code must be within 200 and 599"),
    }
}

async fn bytes(Path(count): Path<u64>) -> impl IntoResponse {
    static BLOCK: Bytes = Bytes::from_static(&[b'x'; 64 * 1024]);
    let blocks = stream::unfold(count, async |left| {
        let size = BLOCK.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        (size > 0).then(|| (Ok::<_, Infallible>(BLOCK.slice(..size)), left - size as u64))
    });
    let headers =
        [(header::CONTENT_LENGTH, count.to_string()), (header::CONTENT_TYPE, "application/octet-stream".into())];
    (headers, Body::from_stream(blocks))
}

/// The first chunk comes at once, each of the others `ms` after the one before.
async fn chunks(Path((chunks, ms)): Path<(u64, u64)>) -> Response<Body> {
    let pause = Duration::from_millis(ms);
    if pause > LONGEST {
        return refuse(StatusCode::BAD_REQUEST, "a pause must be within an hour");
    }
    let body = stream::unfold(0, move |n| async move {
        if n == chunks {
            return None;
        }
        if n > 0 {
            tokio::time::sleep(pause).await;
        }
        Some((Ok::<_, Infallible>(format!("chunk {n}\n")), n + 1))
    });
    ([(header::CONTENT_TYPE, "text/plain")], Body::from_stream(body)).into_response()
}

async fn response_headers(Query(wanted): Query<Vec<(String, String)>>) -> Response<Body> {
    let mut response = Json(&wanted).into_response();
    for (name, value) in &wanted {
        let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) else {
            return refuse(StatusCode::BAD_REQUEST, "not a header name or value");
        };
        response.headers_mut().append(name, value);
    }
    response
}

async fn reset_before_head() -> Response<Body> {
    let mut response = Response::default();
    response.extensions_mut().insert(Reset);
    response
}

async fn reset_in_body() -> Response<Body> {
    let first = Ok(Bytes::from_static(b"half of what was promised\n"));
    let body = stream::iter([first, Err(io::Error::from(io::ErrorKind::ConnectionReset))]).then(async |item| {
        // hyper may drop what it has buffered when the error follows at once.
        if item.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        item
    });
    ([(header::CONTENT_LENGTH, "1000")], Body::from_stream(body)).into_response()
}

async fn websocket(Extension(visit): Extension<Arc<Visit>>, upgrade: WebSocketUpgrade) -> Response<Body> {
    upgrade.on_upgrade(async move |socket| {
        echo(socket).await;
        visit.complete();
    })
}

async fn echo(mut socket: WebSocket) {
    while let Some(Ok(message)) = socket.recv().await {
        if matches!(message, Message::Text(_) | Message::Binary(_)) && socket.send(message).await.is_err() {
            return;
        }
    }
}

fn refuse(status: StatusCode, detail: &str) -> Response<Body> {
    (status, Json(json!({ "status": status.as_u16(), "detail": detail }))).into_response()
}
