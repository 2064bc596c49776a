//! A request that keeps its slot until it is told to end.

use std::convert::Infallible;

use futures_util::stream;
use reqwest::{Body, Method};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::client::{Answer, Client};

/// An upload whose body is not there yet, so the upstream waits for the rest of it. Ends by itself on drop.
pub(crate) struct Occupant {
    rest: oneshot::Sender<()>,
    answer: JoinHandle<Answer>,
}

impl Occupant {
    /// Sends the head; the stack says when it is in flight, or held.
    pub(crate) fn start(client: &Client, id: &str, key: &str) -> Self {
        let (rest, told) = oneshot::channel::<()>();
        let body = stream::once(async {
            // An error means that the occupant was dropped, which ends it as well.
            let _ = told.await;
            Ok::<_, Infallible>("the rest")
        });
        let request = client.request(Method::POST, "/anything").header("x-api-key", key).header("x-test-id", id);
        let (client, request) = (client.clone(), request.body(Body::wrap_stream(body)));
        Self { rest, answer: tokio::spawn(async move { client.send(request).await }) }
    }

    /// Lets it end.
    ///
    /// # Panics
    /// When it gets no whole answer.
    pub(crate) async fn finish(self) -> Answer {
        drop(self.rest);
        self.answer.await.expect("no panic")
    }
}
