//! The task that keeps the connection: connects, declares, serves, and again, for ever.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::super::Grant;
use super::link::{Link, Notice};
use super::session::Session;
use super::{Fault, Shared};
use crate::limit::breaker::Backoff;

/// How long declaring everything may take, with the probe at its end.
const OPEN: Duration = Duration::from_secs(3);

pub(super) async fn keep(shared: Arc<Shared>, grants: mpsc::Sender<Grant>) {
    let mut backoff = Backoff::default();
    loop {
        let mut lived = Duration::ZERO;
        let fault = match Link::connect(&shared.uri, shared.replica).await {
            Ok(mut link) => {
                let began = Instant::now();
                let fault = serve(&shared, &mut link, &grants).await;
                lived = began.elapsed();
                link.give_up();
                fault
            }
            Err(fault) => fault,
        };
        shared.down(&fault);
        sleep(backoff.pause(lived)).await;
    }
}

/// Session after session on one connection, until it ends.
///
/// A connection that is blocked is kept: the broker stops reading it, so it would not notice the end, and a new one for
/// every try would pile up there until the alarm is over.
async fn serve(shared: &Arc<Shared>, link: &mut Link, grants: &mpsc::Sender<Grant>) -> Fault {
    loop {
        let blocked = match open(shared, link, grants).await {
            Ok(session) => {
                shared.up(&session);
                let ended = tokio::select! {
                    notice = link.notice() => notice,
                    fault = session.over() => Notice::Ended(fault),
                };
                match ended {
                    Notice::Blocked(reason) => {
                        session.end(Fault::Blocked(reason.clone()));
                        reason
                    }
                    Notice::Unblocked => continue,
                    Notice::Ended(fault) => {
                        session.end(Fault::Ended);
                        return fault;
                    }
                }
            }
            Err(Fault::Blocked(reason)) => reason,
            Err(fault) => return fault,
        };
        shared.down(&Fault::Blocked(blocked));
        loop {
            match link.notice().await {
                Notice::Blocked(_) => {}
                Notice::Unblocked => break,
                Notice::Ended(fault) => return fault,
            }
        }
    }
}

async fn open(shared: &Arc<Shared>, link: &mut Link, grants: &mpsc::Sender<Grant>) -> Result<Arc<Session>, Fault> {
    // The connection is lent twice, so what it tells is read beside it.
    let connection = Arc::clone(&link.connection);
    let opening = timeout(OPEN, Session::open(&connection, shared, grants));
    tokio::select! {
        opened = opening => opened.unwrap_or(Err(Fault::Timeout(OPEN))),
        notice = link.notice() => Err(match notice {
            Notice::Blocked(reason) => Fault::Blocked(reason),
            Notice::Unblocked => Fault::Ended,
            Notice::Ended(fault) => fault,
        }),
    }
}
