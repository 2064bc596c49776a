//! Ports that no other test has.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below the ports that Linux gives to outgoing connections: a port from there could be taken by a client while a killed
/// bouncer is not back yet.
const FIRST: u16 = 12_000;
const COUNT: u16 = 20_000;

static NEXT: AtomicU16 = AtomicU16::new(0);

/// A loopback port that is this test's until dropped, whether something listens on it or not.
pub(crate) struct Port {
    number: u16,
    /// A name that only one process can hold, and that the kernel frees however the process ends.
    _reservation: UnixListener,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Port {
    /// # Panics
    /// When all ports of the range are taken.
    pub(crate) fn free() -> Self {
        // Tests run in processes of their own, so each starts somewhere else.
        let start = u16::try_from(std::process::id() * 16 % u32::from(COUNT)).expect("below COUNT");
        for _ in 0..COUNT {
            let offset = (u32::from(start) + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
            let number = FIRST + u16::try_from(offset).expect("below COUNT");
            let name = UnixAddr::from_abstract_name(format!("bouncer-test-port-{number}")).expect("a short name");
            let Ok(reservation) = UnixListener::bind_addr(&name) else { continue };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                return Self { number, _reservation: reservation };
            }
        }
        panic!("no free port within {FIRST} and {}", FIRST + COUNT);
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.number).into()
    }
}
