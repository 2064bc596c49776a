//! Waiting for something to become true.

use std::time::{Duration, Instant};

/// Asks `poll` every 10 ms until it gives something.
///
/// # Panics
/// When it has given nothing `within` this time.
pub(crate) async fn eventually<T>(what: &str, within: Duration, mut poll: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {within:?} in vain for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
