//! A network that can be broken: a TCP proxy in front of any server.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::sleep;

/// What happens to bytes of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "each test crate uses its own part")]
pub(crate) enum Flow {
    /// They arrive.
    Pass,
    /// They are gone, and so is the end of the stream: the other side never hears of it.
    Swallow,
    /// Each piece arrives this much later.
    Delay(Duration),
}

#[derive(Debug, Clone, Copy)]
struct State {
    to_server: Flow,
    to_client: Flow,
    /// Connections of earlier generations are cut.
    generation: u64,
    accepts: bool,
}

/// Listens until dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    state: watch::Sender<State>,
    listening: AbortHandle,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Proxy {
    /// In front of a server, which need not run yet.
    pub(crate) async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let state = State { to_server: Flow::Pass, to_client: Flow::Pass, generation: 0, accepts: true };
        let state = watch::Sender::new(state);
        let listening = tokio::spawn(listen(listener, server, state.subscribe())).abort_handle();
        Self { address, state, listening }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, also on connections that there are.
    pub(crate) fn to_server(&self, flow: Flow) {
        self.state.send_modify(|state| state.to_server = flow);
    }

    /// From now on, also on connections that there are.
    pub(crate) fn to_client(&self, flow: Flow) {
        self.state.send_modify(|state| state.to_client = flow);
    }

    /// Both ways.
    pub(crate) fn both(&self, flow: Flow) {
        self.to_server(flow);
        self.to_client(flow);
    }

    /// Ends all connections that there are.
    pub(crate) fn cut(&self) {
        self.state.send_modify(|state| state.generation += 1);
    }

    /// Whether new connections find a server; where not, they end at once.
    pub(crate) fn accept(&self, accepts: bool) {
        self.state.send_modify(|state| state.accepts = accepts);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn listen(listener: TcpListener, server: SocketAddr, state: watch::Receiver<State>) {
    while let Ok((client, _)) = listener.accept().await {
        let now = *state.borrow();
        if now.accepts {
            tokio::spawn(connection(client, server, state.clone(), now.generation));
        }
    }
}

async fn connection(client: TcpStream, server: SocketAddr, mut state: watch::Receiver<State>, generation: u64) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    // Fails on a socket that has ended already.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let up = pump(from_client, to_server, state.clone(), |state| state.to_server);
    let down = pump(from_server, to_client, state.clone(), |state| state.to_client);
    tokio::select! {
        ((), ()) = async { tokio::join!(up, down) } => {}
        // Also when the proxy is dropped.
        _ = state.wait_for(|state| state.generation != generation) => {}
    }
}

async fn pump(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    state: watch::Receiver<State>,
    flow: impl Fn(&State) -> Flow,
) {
    let mut piece = vec![0; 16 * 1024];
    loop {
        let read = from.read(&mut piece).await.unwrap_or(0);
        let now = flow(&state.borrow());
        match now {
            Flow::Swallow if read == 0 => return std::future::pending().await,
            Flow::Swallow => continue,
            Flow::Delay(time) => sleep(time).await,
            Flow::Pass => {}
        }
        if read == 0 || to.write_all(&piece[..read]).await.is_err() {
            let _ = to.shutdown().await;
            return;
        }
    }
}
