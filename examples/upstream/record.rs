//! The upstream's own record of what was in flight: the judge of bouncer's cap and order.
//!
//! A request counts from the moment its head arrived until its response body ended, or until its connection or handler
//! was dropped. A request that names itself in `x-test-id` is also listed, in the order of arrival.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::{Method, Response};
use axum::middleware::Next;
use http_body::{Frame, SizeHint};
use serde::{Deserialize, Serialize};

/// Shared by everything that counts and reads.
#[derive(Clone)]
pub(crate) struct Record {
    state: Arc<Mutex<Snapshot>>,
    /// Time zero of the listed instants; a reset does not move it.
    origin: Instant,
}

impl Default for Record {
    fn default() -> Self {
        Self { state: Arc::default(), origin: Instant::now() }
    }
}

/// What `GET /_record` answers.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// In flight now.
    pub(crate) current: usize,
    /// Most that were ever in flight together since the last reset.
    pub(crate) maximum: usize,
    /// Arrived since the last reset.
    pub(crate) total: usize,
    /// Those that named themselves, in the order of arrival.
    pub(crate) requests: Vec<Entry>,
    /// Counts resets, so that a request from before one does not write into the list made after it.
    pub(crate) epoch: u64,
}

/// One request that named itself. Instants are microseconds since the upstream started.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) id: String,
    pub(crate) started_us: u64,
    /// None while in flight.
    pub(crate) ended_us: Option<u64>,
    /// Ended before its response was written whole.
    pub(crate) aborted: bool,
}

impl Record {
    /// The record as it stands.
    pub(crate) fn snapshot(&self) -> Snapshot {
        self.lock().clone()
    }

    /// Forgets the past. Requests in flight still count as such.
    pub(crate) fn reset(&self) {
        let mut state = self.lock();
        let (current, epoch) = (state.current, state.epoch + 1);
        *state = Snapshot { current, maximum: current, epoch, ..Snapshot::default() };
    }

    /// Counts a request until the visit is dropped.
    fn arrive(&self, id: Option<String>) -> Visit {
        let started_us = self.now_us();
        let mut state = self.lock();
        state.total += 1;
        state.current += 1;
        state.maximum = state.maximum.max(state.current);
        let place = id.map(|id| {
            state.requests.push(Entry { id, started_us, ended_us: None, aborted: false });
            (state.epoch, state.requests.len() - 1)
        });
        Visit { record: self.clone(), place, complete: AtomicBool::new(false) }
    }

    /// Microseconds since the upstream started.
    pub(crate) fn now_us(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// A panic elsewhere cannot leave the counters half changed, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in flight; dropping it ends it.
#[must_use]
pub(crate) struct Visit {
    record: Record,
    /// Epoch and index of its entry in the list.
    place: Option<(u64, usize)>,
    complete: AtomicBool,
}

impl Visit {
    /// The response was written whole: its end is not an abort.
    pub(crate) fn complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let now = self.record.now_us();
        let mut state = self.record.lock();
        state.current -= 1;
        if let Some((epoch, index)) = self.place
            && epoch == state.epoch
            && let Some(entry) = state.requests.get_mut(index)
        {
            entry.ended_us = Some(now);
            entry.aborted = !self.complete.load(Ordering::Relaxed);
        }
    }
}

/// Counts every request but those for the record itself. A handler that outlives its response (a WebSocket) takes the
/// `Arc<Visit>` out of the request's extensions and keeps it.
pub(crate) async fn count(State(record): State<Record>, mut request: Request, next: Next) -> Response<Body> {
    if request.uri().path().starts_with("/_record") {
        return next.run(request).await;
    }
    let id = request.headers().get("x-test-id").map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned());
    let visit = Arc::new(record.arrive(id));
    request.extensions_mut().insert(Arc::clone(&visit));
    let head = request.method() == Method::HEAD;
    let response = next.run(request).await;
    if head || response.body().is_end_stream() {
        visit.complete();
    }
    response.map(|body| Body::new(Counted { body, visit }))
}

/// A response body that carries its visit to the end.
struct Counted {
    body: Body,
    visit: Arc<Visit>,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.body).poll_frame(cx);
        // Servers do not ask again after a last frame that says it is the last.
        let ended = matches!(polled, Poll::Ready(None))
            || (matches!(polled, Poll::Ready(Some(Ok(_)))) && this.body.is_end_stream());
        if ended {
            this.visit.complete();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
