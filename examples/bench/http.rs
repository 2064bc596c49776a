//! An HTTP/1.1 client that is no load of its own: blocking, one request at a time.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::Result;

/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// One connection.
pub(crate) struct Connection(BufReader<TcpStream>);

impl Connection {
    pub(crate) fn open(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a GET and does not wait for the answer.
    pub(crate) fn ask(&mut self, path: &str, key: &str) -> Result<()> {
        let request = format!("GET {path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {key}\r\n\r\n");
        Ok(self.0.get_mut().write_all(request.as_bytes())?)
    }

    /// Reads one answer to its end: status and body.
    pub(crate) fn answer(&mut self) -> Result<(u16, String)> {
        let status = self.line()?;
        let status = status.split(' ').nth(1).ok_or("no status line")?.parse()?;
        let (mut length, mut chunked) = (0, false);
        loop {
            let line = self.line()?.to_ascii_lowercase();
            match line.split_once(": ") {
                None => break,
                Some(("content-length", value)) => length = value.parse()?,
                Some(("transfer-encoding", value)) => chunked = value == "chunked",
                Some(_) => {}
            }
        }
        let mut body = String::new();
        if chunked {
            while let size @ 1.. = u64::from_str_radix(&self.line()?, 16)? {
                self.read(size, &mut body)?;
                self.line()?;
            }
            self.line()?;
        } else {
            self.read(length, &mut body)?;
        }
        Ok((status, body))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line)? == 0 {
            return Err("the connection ended before the answer did".into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn read(&mut self, size: u64, into: &mut String) -> Result<()> {
        let read = self.0.by_ref().take(size).read_to_string(into)?;
        if read as u64 == size { Ok(()) } else { Err("the connection ended within the body".into()) }
    }
}

/// One GET over a connection of its own.
pub(crate) fn get(port: u16, path: &str, key: &str) -> Result<(u16, String)> {
    let mut connection = Connection::open(port)?;
    connection.ask(path, key)?;
    connection.answer()
}

/// The sum of the numbers at the end of those lines of a page that begin so: a sample of Prometheus, or of Envoy's
/// statistics.
pub(crate) fn sum(page: &str, prefix: &str) -> f64 {
    let lines = page.lines().filter(|line| line.starts_with(prefix));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}
