//! The connection of one runtime to Redis, and the task that keeps it.
//!
//! With a cluster it is one to each master, and all of them are one here: where one master does not answer, the store is
//! down until another one has taken its place. (With its default settings, a cluster refuses all keys then.)
//!
//! A connection lives on the runtime that uses it, so that an answer wakes no other thread. Whenever the store counts as
//! down the connection is given up and a new one made: what is stuck in an old one would hold up all that follows, and
//! after a network that was cut its next retransmission can be many seconds away.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::super::breaker::{Backoff, Epoch};
use super::servers::{Route, Upholder};
use super::{RedisStore, STORE, StoreError};

/// What a caller finds.
#[derive(Clone)]
enum Line {
    /// The first try is on its way, or the first one after a connection that worked: worth a wait.
    Coming,
    Up(Route),
    Down,
}

/// One connection, kept by a task of its own until this is dropped.
pub(super) struct Link {
    line: watch::Receiver<Line>,
    _keeper: AbortOnDropHandle<()>,
}

/// Why a connection was given up.
enum End {
    Lost,
    StoreDown,
}

impl Link {
    /// Must be called within the runtime that is to use it.
    pub(super) fn new(store: Arc<RedisStore>) -> Self {
        let (sender, line) = watch::channel(Line::Coming);
        Self { line, _keeper: AbortOnDropHandle::new(tokio::spawn(keep_on(store, sender))) }
    }

    /// The connection, if there is one; one that is coming is waited for, so the caller needs a deadline.
    pub(super) async fn route(&self) -> Option<Route> {
        let line = self.line.borrow().clone();
        let line = if let Line::Coming = line { self.settled().await } else { line };
        match line {
            Line::Up(route) => Some(route),
            Line::Coming | Line::Down => None,
        }
    }

    /// Waits until it is known whether there is a connection.
    async fn settled(&self) -> Line {
        let mut line = self.line.clone();
        // The keeper only ends with the runtime.
        line.wait_for(|line| !matches!(line, Line::Coming)).await.map_or(Line::Down, |line| line.clone())
    }

    pub(super) async fn wait_settled(&self) {
        let _ = self.settled().await;
    }
}

/// Keeps a connection in spite of panics: a runtime without a keeper would never be connected again, and say nothing.
async fn keep_on(store: Arc<RedisStore>, line: watch::Sender<Line>) {
    let mut backoff = Backoff::default();
    let mut panicked = false;
    loop {
        let kept = async {
            if panicked {
                store.unreachable(&StoreError::Panicked);
                sleep(backoff.pause(Duration::ZERO)).await;
            }
            keep(&store, &line).await
        };
        // A panic leaves the two whole: the breaker changes before anything is told of it.
        let Err(_) = AssertUnwindSafe(kept).catch_unwind().await;
        panicked = true;
        line.send_replace(Line::Down);
    }
}

/// Connects, proves, serves, and again, for ever.
async fn keep(store: &RedisStore, line: &watch::Sender<Line>) -> Infallible {
    let mut backoff = Backoff::default();
    let mut epoch = store.epochs();
    let mut borrows = false;
    loop {
        let mut lived = Duration::ZERO;
        match establish(store).await {
            Ok((route, upholder)) => {
                let began = Instant::now();
                let connected = store.proved(route.clone());
                borrows = false;
                line.send_replace(Line::Up(route));
                let end = serve(upholder, &mut epoch).await;
                drop(connected);
                lived = began.elapsed();
                match end {
                    // A server that closes an idle connection is not down: it is, if it cannot be reached again.
                    End::Lost if lived >= Backoff::STEADY => {
                        line.send_replace(Line::Coming);
                        continue;
                    }
                    End::Lost => drop(store.unreachable(&StoreError::Lost)),
                    End::StoreDown => {}
                }
            }
            Err(error) => {
                let others = store.unreachable(&error);
                if others && !borrows {
                    let reason = error.to_string();
                    tracing::warn!(
                        store = STORE,
                        reason,
                        "a worker has no connection of its own and asks over another's"
                    );
                }
                borrows = others;
            }
        }
        line.send_replace(Line::Down);
        let down = epoch.borrow().is_open();
        tokio::select! {
            () = sleep(backoff.pause(lived)) => {}
            // Another runtime has got through: no need to wait.
            _ = epoch.wait_for(|epoch| !epoch.is_open()), if down => {}
        }
    }
}

/// A connection that has done what a request does. On a cluster, one to each master.
async fn establish(store: &RedisStore) -> Result<(Route, Upholder), StoreError> {
    let (route, mut upholder) = store.servers.connect().await?;
    let probe = timeout(store.timeout, store.probe(&route));
    tokio::select! {
        proved = probe => proved.map_err(|_| StoreError::Timeout(store.timeout))??,
        () = upholder.run() => return Err(StoreError::Lost),
    }
    Ok((route, upholder))
}

/// Runs a connection until it ends or the store counts as down.
async fn serve(mut upholder: Upholder, epoch: &mut watch::Receiver<Epoch>) -> End {
    tokio::select! {
        () = upholder.run() => End::Lost,
        _ = epoch.wait_for(|epoch| epoch.is_open()) => End::StoreDown,
    }
}
