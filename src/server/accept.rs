//! Accepting connections when the system has none to give.

use std::io;
use std::time::Duration;

use futures::{Stream, StreamExt};
use tokio::time::{Instant, sleep};

/// How long to leave a listener alone that failed. Out of descriptors, it would fail again at once, and go on to do so
/// until something else ends.
const PAUSE: Duration = Duration::from_millis(100);

/// How long one warning lasts.
const QUIET: Duration = Duration::from_secs(1);

/// The connections of a listener, without its failures: each is waited out, and one a second is told.
pub(super) fn patient<T>(incoming: impl Stream<Item = io::Result<T>>) -> impl Stream<Item = io::Result<T>> {
    let mut told: Option<Instant> = None;
    incoming.filter_map(move |accepted| {
        if let Err(error) = &accepted
            && told.is_none_or(|told| told.elapsed() >= QUIET)
        {
            told = Some(Instant::now());
            tracing::warn!(%error, "a connection was not accepted");
        }
        async move {
            if accepted.is_err() {
                sleep(PAUSE).await;
            }
            accepted.ok().map(Ok)
        }
    })
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_listener_that_fails_is_left_alone_for_a_while_and_asked_again() {
        let failed = || Err(io::Error::other("too many open files"));
        let incoming = stream::iter([Ok(1), failed(), failed(), failed(), Ok(2)]);
        let began = Instant::now();
        let accepted: Vec<_> = patient(incoming).map(|it| (it.ok(), began.elapsed())).collect().await;
        assert_eq!(accepted, [(Some(1), Duration::ZERO), (Some(2), 3 * PAUSE)]);
    }
}
