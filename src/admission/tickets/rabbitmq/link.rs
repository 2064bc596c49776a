//! One connection to the broker, from the socket up. The library's own recovery stays off: a connection that has ended is
//! given up, and the keeper makes a new one.

use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_rs::traits::Reactor;
use futures::{Stream, StreamExt};
use lapin::uri::AMQPUri;
use lapin::{AsyncTcpStream, Connection, ConnectionProperties, Event};
use socket2::{SockRef, Socket};
use tokio::time::{Instant, interval, timeout, timeout_at};

use super::super::ReplicaId;
use super::Fault;

/// How long connecting and logging in may take. More than a call may: no request waits for it.
const CONNECT: Duration = Duration::from_secs(2);

/// How much of it reaching the broker may take, so that no socket is made that nobody waits for any more.
const DIAL: Duration = Duration::from_secs(1);

/// How often an end is looked for that no event told of.
const LOOK: Duration = Duration::from_millis(100);

/// A connection that is logged in.
pub(super) struct Link {
    pub(super) connection: Arc<Connection>,
    events: Pin<Box<dyn Stream<Item = Event> + Send>>,
    /// The same socket once more. The library closes a connection with a question to the broker; one that does not answer
    /// would keep the socket and a thread for ever.
    socket: Option<Socket>,
}

/// What a connection tells of itself.
pub(super) enum Notice {
    /// The broker takes no messages any more, for the reason that it gives.
    Blocked(String),
    /// It takes messages again.
    Unblocked,
    /// The connection has ended.
    Ended(Fault),
}

impl Link {
    pub(super) async fn connect(uri: &AMQPUri, replica: ReplicaId) -> Result<Self, Fault> {
        let kept = Arc::new(Mutex::new(None));
        let connecting = connect(uri.clone(), replica, Arc::clone(&kept));
        let result = timeout(CONNECT, connecting).await.unwrap_or(Err(Fault::Timeout(CONNECT)));
        let socket = kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        match result {
            Ok(connection) => {
                let events = Box::pin(connection.events_listener());
                Ok(Self { connection: Arc::new(connection), events, socket })
            }
            Err(fault) => {
                shut(socket.as_ref());
                Err(fault)
            }
        }
    }

    /// Waits for what comes next. Can be dropped and asked again.
    pub(super) async fn notice(&mut self) -> Notice {
        let mut look = interval(LOOK);
        loop {
            tokio::select! {
                event = self.events.next() => match event {
                    Some(Event::ConnectionBlocked(reason)) => return Notice::Blocked(reason),
                    Some(Event::ConnectionUnblocked) => return Notice::Unblocked,
                    Some(Event::Error(error)) => return Notice::Ended(error.into()),
                    // A channel that ended is noticed by the call on it.
                    Some(_) => {}
                    None => return Notice::Ended(Fault::Ended),
                },
                _ = look.tick() => if !self.connection.status().connected() {
                    return Notice::Ended(Fault::Ended);
                },
            }
        }
    }

    /// Ends the connection at once, whether the broker answers or not.
    pub(super) fn give_up(self) {
        shut(self.socket.as_ref());
    }
}

fn shut(socket: Option<&Socket>) {
    // Fails for a socket that has ended already.
    let _ = socket.map(|socket| socket.shutdown(Shutdown::Both));
}

async fn connect(mut uri: AMQPUri, replica: ReplicaId, kept: Arc<Mutex<Option<Socket>>>) -> Result<Connection, Fault> {
    // The lower of both sides' counts; a silence of twice as long ends the connection.
    uri.query.heartbeat = Some(HEARTBEAT_SECONDS);
    let host = (uri.authority.host.clone(), uri.authority.port);
    let addresses: Vec<_> = tokio::net::lookup_host(host).await.map_err(Fault::Unreachable)?.collect();
    let runtime = lapin::runtime::default_runtime().map_err(Fault::from)?;
    // On a thread of the library's own, which from then on reads and writes the socket.
    let dial = async move |_: AMQPUri, runtime: async_rs::TokioRuntime| {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        let until = Instant::now() + DIAL;
        for address in &addresses {
            // Comes with TCP_NODELAY set.
            let dialled = timeout_at(until, runtime.tcp_connect_addr(*address)).await;
            match dialled.unwrap_or_else(|late| Err(late.into())) {
                Ok(stream) => {
                    let copy = SockRef::from(stream.get_ref()).try_clone()?;
                    *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(copy);
                    return Ok(AsyncTcpStream::Plain(stream));
                }
                Err(error) => last = error,
            }
        }
        Err(last.into())
    };
    let properties = ConnectionProperties::default().with_connection_name(format!("bouncer {replica}").into());
    Ok(Connection::connector(uri, runtime, dial, properties).await?)
}

/// Not lower: the broker's authors warn of false alarms below five seconds.
const HEARTBEAT_SECONDS: u16 = 5;
