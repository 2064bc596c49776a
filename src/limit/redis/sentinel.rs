//! The master of a service, as sentinels know it.
//!
//! They are asked at every new connection, once a second while there is one, and never believed: a server that is named must say itself that it is a master,
//! for a sentinel that was cut off names the old one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo, RedisConnectionInfo, Value, cmd};
use tokio::time::sleep;

use super::StoreError;
use super::script::elements;
use super::wire::{PATIENCE, Wire, ask};

/// How often a sentinel is asked while there is a connection.
const INTERVAL: Duration = Duration::from_secs(1);

/// A service, and who knows where it is.
pub(super) struct Sentinels {
    service: String,
    /// How to log in at the master.
    login: RedisConnectionInfo,
    known_to: Vec<ConnectionInfo>,
    /// Who is asked first: whoever knew last time.
    first: AtomicUsize,
}

impl Sentinels {
    pub(super) fn new(service: String, login: RedisConnectionInfo, known_to: Vec<ConnectionInfo>) -> Self {
        Self { service, login, known_to, first: AtomicUsize::new(0) }
    }

    /// Connects to the master: asks the sentinels in turn until one names a server that is one.
    pub(super) async fn connect(&self) -> Result<(ConnectionInfo, Wire), StoreError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut named = Vec::new();
        let mut failure = StoreError::NoMaster;
        for turn in 0..self.known_to.len() {
            let at = (first + turn) % self.known_to.len();
            match self.by(&self.known_to[at], &mut named).await {
                Ok(Some(found)) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok(found);
                }
                Ok(None) => {}
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Ends when a sentinel names another server than this one. A master that was replaced goes on as one until the sentinels
    /// have told it, which takes them some 10 s where it was well.
    pub(super) async fn until_another_is_named(&self, master: &ConnectionInfo) {
        loop {
            sleep(INTERVAL).await;
            let at = self.first.load(Ordering::Relaxed) % self.known_to.len().max(1);
            match self.named_by(&self.known_to[at]).await {
                Ok(Some(address)) if address != *master.addr() => return,
                Ok(Some(_)) => {}
                // Another one is asked next time.
                Ok(None) | Err(_) => self.first.store(at + 1, Ordering::Relaxed),
            }
        }
    }

    async fn named_by(&self, sentinel: &ConnectionInfo) -> Result<Option<ConnectionAddr>, StoreError> {
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
        address(&ask(sentinel, &question, PATIENCE).await?)
    }

    /// `None` where this sentinel knows no master, or names one that another has named.
    async fn by(
        &self,
        sentinel: &ConnectionInfo,
        named: &mut Vec<ConnectionAddr>,
    ) -> Result<Option<(ConnectionInfo, Wire)>, StoreError> {
        let Some(address) = self.named_by(sentinel).await? else { return Ok(None) };
        if named.contains(&address) {
            return Ok(None);
        }
        named.push(address.clone());
        let master = sentinel.clone().set_addr(address).set_redis_settings(self.login.clone());
        let mut wire = Wire::connect(&master).await?;
        match elements(&wire.ask(&cmd("ROLE")).await?)?.first() {
            Some(Value::BulkString(role)) if role == b"master" => Ok(Some((master, wire))),
            _ => Err(StoreError::NotMaster),
        }
    }
}

/// A host and a port, or nothing where the service is unknown.
fn address(answer: &Value) -> Result<Option<ConnectionAddr>, StoreError> {
    let text = |value: &Value| match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).map_err(|_| StoreError::Shape),
        _ => Err(StoreError::Shape),
    };
    match answer {
        Value::Nil => Ok(None),
        Value::Array(parts) => {
            let [host, port] = parts.as_slice() else { return Err(StoreError::Shape) };
            let port = text(port)?.parse().map_err(|_| StoreError::Shape)?;
            Ok(Some(ConnectionAddr::Tcp(text(host)?, port)))
        }
        _ => Err(StoreError::Shape),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_sentinel_names_a_host_and_a_port_or_nobody_and_anything_else_is_a_failure() {
        let named = address(&Value::Array(vec![bulk("10.0.0.7"), bulk("6380")])).expect("an address");
        assert_eq!(named, Some(ConnectionAddr::Tcp("10.0.0.7".into(), 6380)));
        assert_eq!(address(&Value::Nil).expect("an answer"), None);
        let foreign = [
            bulk("10.0.0.7:6380"),
            Value::Array(vec![]),
            Value::Array(vec![bulk("a")]),
            Value::Array(vec![bulk("a"), bulk("70000")]),
            Value::Array(vec![Value::Int(1), bulk("1")]),
            Value::Array(vec![Value::BulkString(vec![0xff]), bulk("1")]),
        ];
        for answer in foreign {
            assert!(matches!(address(&answer), Err(StoreError::Shape)), "{answer:?}");
        }
    }
}
