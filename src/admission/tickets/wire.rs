//! Tickets and grants as bytes: the messages of `proto/bouncer.proto`. Foreign bytes are nothing, never a panic.

use prost::Message;

use super::{Grant, ReplicaId, Ticket};

mod proto {
    #![expect(unreachable_pub, reason = "generated")]
    include!(concat!(env!("OUT_DIR"), "/bouncer.v1.rs"));
}

impl Ticket {
    pub(super) fn encode(self) -> Vec<u8> {
        proto::Ticket { replica: self.replica.0, serial: self.serial, attempt: self.attempt }.encode_to_vec()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let proto::Ticket { replica, serial, attempt } = proto::Ticket::decode(bytes).ok()?;
        // What an empty message, or one of another kind, would say: attempts count from 1.
        (attempt > 0).then_some(Self { replica: ReplicaId(replica), serial, attempt })
    }
}

impl Grant {
    /// `pools` are the names by which replicas know each other's pools.
    pub(super) fn encode(self, pools: &[String]) -> Vec<u8> {
        let pool = pools.get(self.pool).cloned().unwrap_or_default();
        proto::Grant { pool, serial: self.serial, attempt: self.attempt, from: self.from.0 }.encode_to_vec()
    }

    /// `None` also for a pool that this replica does not have.
    pub(super) fn decode(bytes: &[u8], pools: &[String]) -> Option<Self> {
        let proto::Grant { pool, serial, attempt, from } = proto::Grant::decode(bytes).ok()?;
        let pool = pools.iter().position(|name| *name == pool)?;
        (attempt > 0).then_some(Self { pool, serial, attempt, from: ReplicaId(from) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pools() -> [String; 2] {
        ["default".to_owned(), "batch".to_owned()]
    }

    proptest! {
        #[test]
        fn a_ticket_is_read_as_it_was_written_and_is_a_few_bytes(replica: u64, serial: u64, attempt in 1..u32::MAX) {
            let ticket = Ticket { replica: ReplicaId(replica), serial, attempt };
            let bytes = ticket.encode();
            prop_assert_eq!(Ticket::decode(&bytes), Some(ticket));
            prop_assert!(bytes.len() <= 26, "{} bytes", bytes.len());
        }

        #[test]
        fn a_grant_is_read_as_it_was_written(pool in 0..2_usize, serial: u64, attempt in 1..u32::MAX, from: u64) {
            let grant = Grant { pool, serial, attempt, from: ReplicaId(from) };
            prop_assert_eq!(Grant::decode(&grant.encode(&pools()), &pools()), Some(grant));
        }

        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Ticket::decode(&bytes);
            let _ = Grant::decode(&bytes, &pools());
        }
    }

    #[test]
    fn an_empty_message_is_neither() {
        assert_eq!(Ticket::decode(b""), None);
        assert_eq!(Grant::decode(b"", &pools()), None);
    }

    #[test]
    fn a_grant_for_a_pool_that_is_not_here_is_nothing() {
        let grant = Grant { pool: 1, serial: 7, attempt: 1, from: ReplicaId(9) };
        assert_eq!(Grant::decode(&grant.encode(&pools()), &pools()[..1]), None);
    }
}
