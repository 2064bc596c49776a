//! The kernel's table of TCP sockets, asked one thing: who else listens where this process does.

use std::fs;
use std::net::{IpAddr, SocketAddr};

/// The state of a listening socket in the table.
const LISTEN: &str = "0A";

/// The inodes of the sockets that listen on exactly this address, this process's own among them. None can be seen where
/// there is no `/proc`.
pub(super) fn listeners(address: SocketAddr) -> Vec<u64> {
    let table = if address.is_ipv4() { "/proc/self/net/tcp" } else { "/proc/self/net/tcp6" };
    match fs::read_to_string(table) {
        Ok(text) => find(&text, address),
        Err(error) => {
            tracing::debug!(%error, table, "cannot see who else listens");
            Vec::new()
        }
    }
}

/// Lines are `number: address:port peer:port state …`, in upper-case hexadecimal; the tenth field is the inode.
fn find(table: &str, address: SocketAddr) -> Vec<u64> {
    let wanted = written(address);
    let inode = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let listens = fields.next() == Some(wanted.as_str()) && fields.nth(1) == Some(LISTEN);
        if listens { fields.nth(5)?.parse().ok() } else { None }
    };
    table.lines().filter_map(inode).collect()
}

/// The address as words of 32 bits in the order of this machine's bytes, then the port.
fn written(address: SocketAddr) -> String {
    let word = |bytes: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(bytes));
    let ip = match address.ip() {
        IpAddr::V4(ip) => word(ip.octets()),
        IpAddr::V6(ip) => ip.octets().as_chunks().0.iter().copied().map(word).collect(),
    };
    format!("{ip}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:23E7 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 0100007F:23E7 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 00000000:23E7 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 0100007F:23E7 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4 1 0 100 0 0 10 0
   4: 0100007F:C350 0100007F:23E7 01 00000000:00000000 00:00000000 00000000     0        0 5 1 0 100 0 0 10 0
";

    #[test]
    #[cfg(target_endian = "little")]
    fn only_sockets_that_listen_on_the_very_address_count() {
        let listeners = |address: &str| find(TABLE, address.parse().unwrap());
        assert_eq!(listeners("127.0.0.1:9191"), [1, 2]);
        assert_eq!(listeners("0.0.0.0:9191"), [3]);
        assert!(listeners("127.0.0.1:50000").is_empty());
        assert_eq!(written("[::1]:9191".parse().unwrap()), "00000000000000000000000001000000:23E7");
    }

    #[test]
    fn own_listeners_are_seen() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            // A machine without IPv6 has nothing to see there.
            let Ok(listener) = std::net::TcpListener::bind(host) else { continue };
            let address = listener.local_addr().unwrap();
            assert_eq!(listeners(address).len(), 1, "{address}");
            drop(listener);
            assert!(listeners(address).is_empty(), "{address}");
        }
    }

    #[test]
    fn foreign_text_is_no_listener() {
        for text in ["", "\n\n", "x", "0:", "0: 0100007F:23E7", "0: 0100007F:23E7 0A"] {
            assert!(find(text, "127.0.0.1:9191".parse().unwrap()).is_empty(), "{text:?}");
        }
    }
}
