//! What `bouncer probe` does: asks a replica whether it is ready, for container images that have no other client.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use url::Url;

/// What is asked where no other address is given: the admin port's default, on this host.
pub const READY: &str = "http://127.0.0.1:9192/ready";

/// Longer than a healthy replica ever takes, and shorter than orchestrators wait.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A status line is much shorter; whatever else listens there may send no end of bytes.
const LONGEST_LINE: usize = 1024;

/// Why the answer is not a yes.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what it means")]
pub enum ProbeError {
    #[error("`{0}` is no http:// address of a host and a path")]
    Address(String),
    #[error("no answer from {address} within {TIMEOUT:?}")]
    Unreachable { address: String, source: io::Error },
    #[error("{address} answered {answer:?}")]
    NotReady { address: String, answer: String },
}

/// Asks `url` once, over plain HTTP; `Ok` where the answer is a 200.
///
/// # Errors
/// [`ProbeError`], after at most two seconds once the name is resolved.
pub fn probe(url: &str) -> Result<(), ProbeError> {
    let malformed = || ProbeError::Address(url.to_owned());
    let parsed = Url::parse(url).map_err(|_| malformed())?;
    let (Some(host), "http") = (parsed.host_str(), parsed.scheme()) else { return Err(malformed()) };
    // Url keeps the brackets of an IPv6 address, which is what both uses below expect.
    let address = format!("{host}:{}", parsed.port_or_known_default().unwrap_or(80));
    let target = &parsed[url::Position::BeforePath..url::Position::AfterQuery];
    let line =
        status_line(&address, target).map_err(|source| ProbeError::Unreachable { address: address.clone(), source })?;
    if is_ok(&line) {
        return Ok(());
    }
    Err(ProbeError::NotReady { address, answer: String::from_utf8_lossy(&line).into_owned() })
}

/// `HTTP/1.0 200 OK`, of whichever minor version.
fn is_ok(line: &[u8]) -> bool {
    let mut words = line.split(|byte| *byte == b' ');
    words.next().is_some_and(|version| version.starts_with(b"HTTP/1.")) && words.next() == Some(b"200")
}

/// The first line of the answer, without its end.
fn status_line(address: &str, target: &str) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = connect(address, deadline)?;
    stream.set_write_timeout(Some(left(deadline)?))?;
    write!(stream, "GET {target} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut line = Vec::new();
    let mut chunk = [0; 256];
    while line.len() < LONGEST_LINE {
        // Each read anew, as a peer that sends one byte a second would otherwise hold this for ever.
        stream.set_read_timeout(Some(left(deadline)?))?;
        let count = stream.read(&mut chunk)?;
        line.extend_from_slice(&chunk[..count]);
        if let Some(end) = line.iter().position(|byte| *byte == b'\n') {
            line.truncate(end);
            break;
        }
        if count == 0 {
            break;
        }
    }
    line.truncate(line.trim_ascii_end().len());
    Ok(line)
}

/// A connection to the first of the name's addresses that takes one.
fn connect(address: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut refused = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for candidate in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&candidate, left(deadline)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// The time that is left, as the socket options want it: never zero.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread::{self, JoinHandle};

    use super::*;

    /// Answers one connection with these bytes, and gives back what it was asked.
    fn server(answer: &'static [u8]) -> (String, JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let thread = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = Vec::new();
            let mut byte = [0];
            while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap() == 1 {
                asked.push(byte[0]);
            }
            stream.write_all(answer).unwrap();
            String::from_utf8(asked).unwrap()
        });
        (format!("http://{address}/ready?deep=1"), thread)
    }

    #[test]
    fn ok_answer_is_a_yes() {
        let (url, asked) = server(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}");
        probe(&url).unwrap();
        assert!(asked.join().unwrap().starts_with("GET /ready?deep=1 HTTP/1.0\r\nhost: 127.0.0.1:"));
    }

    #[test]
    fn any_other_answer_is_a_no_that_tells_what_was_said() {
        let answers: [(&[u8], &str); 5] = [
            (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "HTTP/1.1 503 Service Unavailable"),
            (b"HTTP/1.1 2000 OK\r\n\r\n", "HTTP/1.1 2000 OK"),
            (b"SSH-2.0 200 OK\r\n", "SSH-2.0 200 OK"),
            (b"\xff\xfe 200", "\u{fffd}\u{fffd} 200"),
            (b"", ""),
        ];
        for (sent, told) in answers {
            let (url, _) = server(sent);
            match probe(&url) {
                Err(ProbeError::NotReady { answer, .. }) => assert_eq!(answer, told),
                other => panic!("{other:?} to {told:?}"),
            }
        }
    }

    #[test]
    fn endless_line_is_read_no_further_than_its_bound() {
        let (url, _) = server(&[b'x'; 8 * LONGEST_LINE]);
        let Err(ProbeError::NotReady { answer, .. }) = probe(&url) else { panic!("a yes") };
        assert!(answer.len() < 2 * LONGEST_LINE, "{}", answer.len());
    }

    #[test]
    fn port_that_nobody_listens_on_is_a_no() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(probe(&format!("http://{free}/ready")), Err(ProbeError::Unreachable { .. })));
    }

    #[test]
    fn silent_listener_is_a_no_when_the_time_is_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let began = Instant::now();
        let url = format!("http://{}/ready", listener.local_addr().unwrap());
        assert!(matches!(probe(&url), Err(ProbeError::Unreachable { .. })));
        assert!(began.elapsed() >= TIMEOUT, "{:?}", began.elapsed());
    }

    #[test]
    fn only_plain_http_addresses_are_taken() {
        for url in ["", "ready", "127.0.0.1:9192", "https://127.0.0.1/ready", "unix:/run/bouncer.sock", "http://"] {
            assert!(matches!(probe(url), Err(ProbeError::Address(_))), "{url}");
        }
    }
}
