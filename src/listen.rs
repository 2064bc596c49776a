//! Listening sockets: bound before anything runs, so that a port in use is an error at start and a test can ask for
//! port 0.

mod table;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use socket2::{Domain, Protocol, Socket, Type};

use crate::config::Address;

/// Connections the kernel keeps until they are accepted. A whole fleet of Envoys may reconnect at once.
const BACKLOG: i32 = 1024;

/// A bound address with one listener for each worker.
#[derive(Debug)]
pub struct Bound {
    /// Where it listens; the port is the real one where 0 was asked for.
    pub address: Address,
    /// One a worker.
    pub listeners: Vec<Listener>,
}

impl Bound {
    /// Whom to ask later whether another process listens here as well.
    pub fn neighbours(&self) -> Neighbours {
        Neighbours { address: self.address.clone(), own: self.listeners.len() }
    }
}

/// The other processes that may share this one's port: a successor, or replicas behind one address.
#[derive(Debug)]
pub struct Neighbours {
    address: Address,
    own: usize,
}

impl Neighbours {
    /// Whether there is one now, which gets the connections that this process does not take. False where the system
    /// cannot tell, and for a unix socket, which one process has alone.
    pub fn any(&self) -> bool {
        match &self.address {
            Address::Tcp(address) => table::listeners(*address) > self.own,
            Address::Unix(_) => false,
        }
    }
}

/// What one worker accepts from.
#[derive(Debug)]
pub enum Listener {
    /// Shares its port with the other workers' (`SO_REUSEPORT`): the kernel spreads connections over them. It also
    /// lets a successor listen before its predecessor stops.
    Tcp(TcpListener),
    /// A duplicate of the one listener.
    Unix(UnixListener),
}

/// Binds an address for this many workers.
///
/// # Errors
/// When the address cannot be bound, or another process listens on the unix socket.
pub fn bind(address: &Address, workers: usize) -> io::Result<Bound> {
    match address {
        Address::Tcp(address) => bind_tcp(*address, workers),
        Address::Unix(path) => bind_unix(path, workers),
    }
}

fn bind_tcp(address: SocketAddr, workers: usize) -> io::Result<Bound> {
    let first = reuse_port(address)?;
    let address = first.local_addr()?;
    let mut listeners = vec![Listener::Tcp(first)];
    for _ in 1..workers {
        listeners.push(Listener::Tcp(reuse_port(address)?));
    }
    Ok(Bound { address: Address::Tcp(address), listeners })
}

fn reuse_port(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn bind_unix(path: &Path, workers: usize) -> io::Result<Bound> {
    remove_stale(path)?;
    let first = UnixListener::bind(path)?;
    first.set_nonblocking(true)?;
    let mut listeners = Vec::with_capacity(workers);
    for _ in 1..workers {
        listeners.push(Listener::Unix(first.try_clone()?));
    }
    listeners.push(Listener::Unix(first));
    Ok(Bound { address: Address::Unix(path.to_owned()), listeners })
}

/// Removes the socket file of a process that was killed. One that still answers is not touched.
fn remove_stale(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        // Not there, or not ours to judge: binding says what is wrong.
        Err(_) => Ok(()),
    }
}

/// Removes a socket file when the process ends.
#[derive(Debug)]
#[must_use = "the socket file is removed as soon as this is dropped"]
pub struct SocketFile(Option<PathBuf>);

impl SocketFile {
    /// Guards the file of a unix address; does nothing for TCP.
    pub fn of(address: &Address) -> Self {
        match address {
            Address::Tcp(_) => Self(None),
            Address::Unix(path) => Self(Some(path.clone())),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::debug!(%error, path = %path.display(), "socket file not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_the_port_that_the_kernel_chose() {
        let bound = bind(&Address::Tcp("127.0.0.1:0".parse().unwrap()), 3).unwrap();
        let Address::Tcp(address) = bound.address else { panic!("not TCP") };
        assert_ne!(address.port(), 0);
        for listener in &bound.listeners {
            let Listener::Tcp(listener) = listener else { panic!("not TCP") };
            assert_eq!(listener.local_addr().unwrap(), address);
        }
        assert_eq!(bound.listeners.len(), 3);
    }

    #[test]
    fn a_successor_on_the_port_is_seen_while_it_listens() {
        let bound = bind(&Address::Tcp("127.0.0.1:0".parse().unwrap()), 2).unwrap();
        assert!(!bound.neighbours().any());
        let successor = bind(&bound.address, 1).unwrap();
        assert!(bound.neighbours().any());
        drop(successor);
        assert!(!bound.neighbours().any());
    }

    #[test]
    fn a_socket_left_by_a_killed_process_is_replaced_and_a_live_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let address = Address::Unix(folder.path().join("bouncer.sock"));
        let bound = bind(&address, 2).unwrap();
        assert_eq!(bind(&address, 2).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(bound);
        bind(&address, 2).unwrap();
    }
}
