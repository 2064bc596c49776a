//! Which node of a cluster has which keys.
//!
//! A key's hash slot is the CRC16 of its tag, or of the whole key where it has none, modulo 16384
//! (<https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>).

use std::ops::RangeInclusive;

use redis::{Arg, Cmd, RedisError, Value};

use super::StoreError;
use super::script::elements;

/// How many hash slots there are.
pub(super) const SLOTS: u16 = 16_384;

/// CRC16 in the XMODEM variant: polynomial 0x1021, from zero, not reflected.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8)
            .fold(crc ^ (u16::from(*byte) << 8), |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    })
}

pub(super) fn slot(key: &[u8]) -> u16 {
    let position = |bytes: &[u8], wanted| bytes.iter().position(|byte| *byte == wanted);
    let tag = position(key, b'{').and_then(|open| {
        let rest = &key[open + 1..];
        position(rest, b'}').filter(|length| *length > 0).map(|length| &rest[..length])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// The slot of a call of a script: that of its first key, behind the verb, the script and the number of keys.
pub(super) fn slot_of(command: &Cmd) -> u16 {
    match command.args_iter().nth(3) {
        Some(Arg::Simple(key)) => slot(key),
        _ => 0,
    }
}

/// Where a node listens, as the cluster says it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Address {
    /// Of `host:port`. A host that is left out is that of whoever said so.
    fn parse(text: &str, said_by: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = if host.is_empty() { said_by } else { host };
        Some(Self { host: host.to_owned(), port: port.parse().ok()? })
    }
}

/// Where else to send a command that a node did not carry out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Redirection {
    /// The slot has moved there for good.
    Moved(Address),
    /// The slot is on its way, and the key is there, or would be.
    Ask(Address),
}

/// `None` where the error is none.
pub(super) fn redirection(error: &RedisError, said_by: &str) -> Option<Redirection> {
    let to = Address::parse(error.redirect_node()?.0, said_by)?;
    match error.code()? {
        "MOVED" => Some(Redirection::Moved(to)),
        "ASK" => Some(Redirection::Ask(to)),
        _ => None,
    }
}

/// Who has some of the slots.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) slots: RangeInclusive<u16>,
    pub(super) master: Address,
    pub(super) replicas: Vec<Address>,
}

/// Reads the answer to `CLUSTER SLOTS`.
pub(super) fn shards(answer: &Value, said_by: &str) -> Result<Vec<Shard>, StoreError> {
    elements(answer)?.iter().map(|shard| read_shard(shard, said_by)).collect()
}

fn read_shard(answer: &Value, said_by: &str) -> Result<Shard, StoreError> {
    let [first, last, master, replicas @ ..] = elements(answer)? else { return Err(StoreError::Shape) };
    let bound = |value: &Value| match value {
        Value::Int(slot) => u16::try_from(*slot).ok().filter(|slot| *slot < SLOTS).ok_or(StoreError::Shape),
        _ => Err(StoreError::Shape),
    };
    let slots = bound(first)?..=bound(last)?;
    let master = address(master, said_by)?.ok_or(StoreError::Uncovered)?;
    let replicas = replicas.iter().filter_map(|replica| address(replica, said_by).transpose());
    Ok(Shard { slots, master, replicas: replicas.collect::<Result<_, _>>()? })
}

/// `None` where the cluster itself does not know it.
fn address(node: &Value, said_by: &str) -> Result<Option<Address>, StoreError> {
    let [host, Value::Int(port), ..] = elements(node)? else { return Err(StoreError::Shape) };
    let host = match host {
        Value::Nil => said_by,
        Value::BulkString(host) => match std::str::from_utf8(host).map_err(|_| StoreError::Shape)? {
            "" => said_by,
            "?" => return Ok(None),
            host => host,
        },
        _ => return Err(StoreError::Shape),
    };
    let port = u16::try_from(*port).map_err(|_| StoreError::Shape)?;
    Ok(Some(Address { host: host.to_owned(), port }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), crc16(b"foo{}{bar}") % SLOTS, "an empty tag is none");
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
        assert_eq!(slot(b"foo{bar}{zap}"), slot(b"bar"));
        assert_eq!(slot(b"foo{bar"), crc16(b"foo{bar") % SLOTS);
    }

    #[test]
    fn a_call_goes_where_its_first_key_is() {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg("sha").arg(2).arg("a:{foo}").arg("b:{foo}").arg("take");
        assert_eq!(slot_of(&command), slot(b"foo"));
    }

    fn error(line: &str) -> RedisError {
        match redis::parse_redis_value(format!("-{line}\r\n").as_bytes()) {
            Ok(Value::ServerError(error)) => error.into(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn redirections_are_told_from_failures() {
        let to = |host: &str, port| Address { host: host.to_owned(), port };
        let told = |line: &str| redirection(&error(line), "here");
        assert_eq!(told("MOVED 3999 127.0.0.1:6381"), Some(Redirection::Moved(to("127.0.0.1", 6381))));
        assert_eq!(told("ASK 3999 ::1:6381"), Some(Redirection::Ask(to("::1", 6381))));
        assert_eq!(told("MOVED 3999 :6381"), Some(Redirection::Moved(to("here", 6381))));
        for failure in
            ["TRYAGAIN Multiple keys", "CLUSTERDOWN The cluster is down", "LOADING x", "MOVED", "MOVED 1 a:b"]
        {
            assert_eq!(told(failure), None, "{failure}");
        }
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn a_map_names_masters_and_replicas_and_leaves_out_what_the_cluster_does_not_know() {
        let node = |host: Value, port| Value::Array(vec![host, Value::Int(port), bulk("id"), Value::Array(vec![])]);
        let shard = |nodes: Vec<Value>| {
            let shard = [vec![Value::Int(0), Value::Int(16_383)], nodes].concat();
            Value::Array(vec![Value::Array(shard)])
        };
        let read = shards(&shard(vec![node(bulk("a"), 1), node(Value::Nil, 2), node(bulk("?"), 3)]), "here");
        let [shard_read] = &read.expect("a map")[..] else { panic!("one shard") };
        assert_eq!(shard_read.slots, 0..=16_383);
        assert_eq!(shard_read.master, Address { host: "a".into(), port: 1 });
        assert_eq!(shard_read.replicas, [Address { host: "here".into(), port: 2 }]);
        assert!(matches!(shards(&shard(vec![node(bulk("?"), 1)]), "here"), Err(StoreError::Uncovered)));
        assert!(matches!(shards(&shard(vec![]), "here"), Err(StoreError::Shape)));
        assert!(matches!(shards(&bulk("x"), "here"), Err(StoreError::Shape)));
    }

    proptest! {
        #[test]
        fn no_answer_and_no_error_panics(first in any::<i64>(), last in any::<i64>(), port in any::<i64>(), text in "\\PC{0,20}") {
            let node = Value::Array(vec![bulk(&text), Value::Int(port)]);
            let _ = shards(&Value::Array(vec![Value::Array(vec![Value::Int(first), Value::Int(last), node])]), "here");
            let _ = redirection(&error(&format!("MOVED {first} {text}")), "here");
        }
    }
}
