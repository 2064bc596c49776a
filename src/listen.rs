//! Listening sockets: bound before anything runs, so that a port in use is an error at start and a test can ask for
//! port 0.

mod table;

use std::fs::{File, FileType};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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
        let own = self.listeners.iter().filter_map(|listener| listener.inode().ok()).collect();
        Neighbours { address: self.address.clone(), own }
    }
}

/// The other processes that may share this one's port: a successor, or replicas behind one address.
#[derive(Debug)]
pub struct Neighbours {
    address: Address,
    /// The inodes of this process's own listeners.
    own: Vec<u64>,
}

impl Neighbours {
    /// Whether there is one now, which gets the connections that this process does not take. False where the system
    /// cannot tell, and for a unix socket, which one process has alone.
    pub fn any(&self) -> bool {
        !self.others().is_empty()
    }

    /// Whether this process is the one to wait for the others where all of them may be leaving at once. Of those that
    /// see each other exactly one is, whoever asks when: the one that has the listener with the highest inode.
    pub fn is_last(&self) -> bool {
        self.own.iter().max() > self.others().iter().max()
    }

    fn others(&self) -> Vec<u64> {
        match &self.address {
            Address::Tcp(address) => {
                let mut all = table::listeners(*address);
                all.retain(|inode| !self.own.contains(inode));
                all
            }
            Address::Unix(_) => Vec::new(),
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

impl Listener {
    fn inode(&self) -> io::Result<u64> {
        let socket: OwnedFd = match self {
            Self::Tcp(listener) => listener.try_clone()?.into(),
            Self::Unix(listener) => listener.try_clone()?.into(),
        };
        File::from(socket).metadata().map(|socket| socket.ino())
    }
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

/// Removes the socket file of a process that was killed. One that still answers is not touched, nor is any other file.
fn remove_stale(path: &Path) -> io::Result<()> {
    // Not there, or not ours to judge: binding says what is wrong.
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    // Connecting to any file at all is refused in the same way as to a socket that nobody listens on.
    if !found.file_type().is_socket() {
        let what = format!("{} is there, which is not replaced", kind(found.file_type()));
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens on this socket")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        // Not ours to judge either.
        Err(_) => Ok(()),
    }
}

fn kind(found: FileType) -> &'static str {
    if found.is_symlink() {
        "a symbolic link"
    } else if found.is_dir() {
        "a folder"
    } else if found.is_file() {
        "a file"
    } else {
        "something else than a socket"
    }
}

/// Removes a socket file on drop, unless another process has put its own there meanwhile.
///
/// To be dropped before the last listener closes: until then no other file can get this one's inode.
#[derive(Debug)]
#[must_use = "the socket file is removed as soon as this is dropped"]
pub struct SocketFile(Option<(PathBuf, Inode)>);

impl SocketFile {
    /// Guards the file of a unix address that was just bound; does nothing for TCP.
    pub fn of(address: &Address) -> Self {
        match address {
            Address::Tcp(_) => Self(None),
            Address::Unix(path) => Self(Inode::at(path).ok().map(|inode| (path.clone(), inode))),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let Some((path, own)) = &self.0 else { return };
        let removed = match Inode::at(path) {
            Ok(found) if found == *own => std::fs::remove_file(path),
            // A successor's.
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::debug!(%error, path = %path.display(), "socket file not removed");
        }
    }
}

/// Which file it is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    fn at(path: &Path) -> io::Result<Self> {
        std::fs::symlink_metadata(path).map(|found| Self { device: found.dev(), number: found.ino() })
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
        assert!(bound.neighbours().any() && successor.neighbours().any());
        drop(successor);
        assert!(!bound.neighbours().any());
    }

    #[test]
    fn one_of_those_that_share_a_port_is_the_last_to_leave() {
        let first = bind(&Address::Tcp("127.0.0.1:0".parse().unwrap()), 2).unwrap();
        let all = [2, 1, 3].map(|workers| bind(&first.address, workers).unwrap());
        let last = std::iter::once(&first).chain(&all).filter(|bound| bound.neighbours().is_last()).count();
        assert_eq!(last, 1);
        drop(all);
        assert!(first.neighbours().is_last());
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

    #[test]
    fn what_is_no_socket_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("notes"), folder.path().join("link"));
        std::fs::write(&file, "precious").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for (path, what) in
            [(&file, "a file is there"), (&link, "a symbolic link"), (&folder.path().into(), "a folder")]
        {
            let error = bind(&Address::Unix(path.clone()), 1).unwrap_err();
            assert!(error.to_string().starts_with(what), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&link).unwrap(), "precious");
    }

    #[test]
    fn a_socket_file_is_removed_by_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bouncer.sock");
        let address = Address::Unix(path.clone());
        let first = bind(&address, 1).unwrap();
        let own = SocketFile::of(&address);
        // As an operator would who starts a successor by hand.
        std::fs::remove_file(&path).unwrap();
        let successor = bind(&address, 1).unwrap();
        drop(own);
        assert!(path.exists(), "the successor cannot be reached");
        drop((first, SocketFile::of(&successor.address)));
        assert!(!path.exists());
    }
}
