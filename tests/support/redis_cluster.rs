//! A Redis Cluster of its own for a test: three masters, and a replica of each where one is wanted.

use std::time::{Duration, Instant};

use super::server::RedisServer;

/// How long the nodes may take to agree, on a machine that is busy with other tests.
const AGREE: Duration = Duration::from_secs(30);
const MASTERS: usize = 3;
/// For how many milliseconds a node may be silent before the others give it up: longer than a busy machine makes it.
const PATIENT: &str = "15000";
const SLOTS: usize = 16_384;

/// The nodes: masters first, then the replica of each in the same order.
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<RedisServer>,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Cluster {
    /// Three masters that share the slots in equal parts.
    pub(crate) fn start() -> Self {
        Self::with(0, PATIENT)
    }

    /// The same, each with a replica that takes over on request.
    pub(crate) fn with_replicas() -> Self {
        Self::with(MASTERS, PATIENT)
    }

    /// The same, each with a replica that takes over when its master is gone for a second.
    pub(crate) fn with_eager_replicas() -> Self {
        Self::with(MASTERS, "1000")
    }

    /// Lets one more master in, which has no slots yet, and gives its place.
    pub(crate) fn grow(&mut self) -> usize {
        self.nodes.push(node(PATIENT));
        let (place, first) = (self.nodes.len() - 1, self.nodes[0].port().to_string());
        ask::<()>(&self.nodes[place], &["CLUSTER", "SET-CONFIG-EPOCH", &(place + 1).to_string()]);
        ask::<()>(&self.nodes[place], &["CLUSTER", "MEET", "127.0.0.1", &first]);
        self.agreed("all nodes know the new one, and it knows that all is well", |node| {
            let known = ask::<String>(node, &["CLUSTER", "NODES"]);
            let ok = ask::<String>(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok");
            ok && known.lines().count() == self.nodes.len() && !known.contains("handshake")
        });
        place
    }

    fn with(replicas: usize, patience: &str) -> Self {
        let nodes: Vec<_> = (0..MASTERS + replicas).map(|_| node(patience)).collect();
        let cluster = Self { nodes };
        for (number, node) in cluster.nodes.iter().enumerate() {
            ask::<()>(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            if number < MASTERS {
                let (first, last) = (SLOTS * number / MASTERS, SLOTS * (number + 1) / MASTERS - 1);
                ask::<()>(node, &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
            }
            let first = cluster.nodes[0].port().to_string();
            if number > 0 {
                ask::<()>(node, &["CLUSTER", "MEET", "127.0.0.1", &first]);
            }
        }
        cluster.agreed("all nodes know each other", |node| {
            let known = ask::<String>(node, &["CLUSTER", "NODES"]);
            known.lines().count() == MASTERS + replicas && !known.contains("handshake")
        });
        for (replica, master) in cluster.nodes[MASTERS..].iter().zip(&cluster.nodes) {
            ask::<()>(replica, &["CLUSTER", "REPLICATE", &id(master)]);
        }
        for replica in &cluster.nodes[MASTERS..] {
            eventually("replicas are linked", || {
                ask::<String>(replica, &["INFO", "replication"]).contains("master_link_status:up")
            });
        }
        cluster.agreed("all slots are served and all replicas known", |node| {
            let nodes = ask::<String>(node, &["CLUSTER", "NODES"]);
            let slaves = nodes.lines().filter(|line| line.contains("slave")).count();
            let ok = ask::<String>(node, &["CLUSTER", "INFO"]).contains("cluster_state:ok");
            ok && slaves == replicas
        });
        cluster
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(RedisServer::url).collect()
    }

    /// The place of the master that has a key.
    pub(crate) fn owner(&self, key: &str) -> usize {
        let slot: usize = ask(&self.nodes[0], &["CLUSTER", "KEYSLOT", key]);
        (0..MASTERS).find(|number| slot < SLOTS * (number + 1) / MASTERS).expect("a slot")
    }

    /// Begins to move the slot of a key: what is in it stays, what is not is made at the new place.
    pub(crate) fn begin_migration(&self, key: &str, from: usize, to: usize) {
        let slot = self.slot(key);
        ask::<()>(&self.nodes[to], &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(&self.nodes[from])]);
        ask::<()>(&self.nodes[from], &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(&self.nodes[to])]);
    }

    /// Moves the keys that are in a slot.
    pub(crate) fn migrate_keys(&self, key: &str, from: usize, to: usize) {
        let slot = self.slot(key);
        loop {
            let keys: Vec<String> = ask(&self.nodes[from], &["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                return;
            }
            let port = self.nodes[to].port().to_string();
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            migrate.extend(keys.iter().map(String::as_str));
            ask::<()>(&self.nodes[from], &migrate);
        }
    }

    /// Tells the new owner first, then the old one, then the other masters.
    pub(crate) fn end_migration(&self, key: &str, from: usize, to: usize) {
        let (slot, owner) = (self.slot(key), id(&self.nodes[to]));
        for number in [to, from].into_iter().chain((0..MASTERS).filter(|number| ![from, to].contains(number))) {
            ask::<()>(&self.nodes[number], &["CLUSTER", "SETSLOT", &slot, "NODE", &owner]);
        }
    }

    fn slot(&self, key: &str) -> String {
        ask::<u16>(&self.nodes[0], &["CLUSTER", "KEYSLOT", key]).to_string()
    }

    fn agreed(&self, what: &str, is: impl Fn(&RedisServer) -> bool) {
        eventually(what, || self.nodes.iter().all(&is));
    }
}

fn node(patience: &str) -> RedisServer {
    let arguments = [
        ["--cluster-enabled", "yes"],
        ["--cluster-node-timeout", patience],
        ["--cluster-replica-validity-factor", "0"],
        ["--repl-diskless-sync-delay", "0"],
        ["--repl-ping-replica-period", "1"],
    ];
    RedisServer::start_with(&arguments.concat())
}

fn id(node: &RedisServer) -> String {
    ask(node, &["CLUSTER", "MYID"])
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < AGREE, "{what} within {AGREE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a command on one server and gives its answer.
pub(crate) fn ask<T: redis::FromRedisValue>(server: &RedisServer, command: &[&str]) -> T {
    let mut cmd = redis::cmd(command[0]);
    cmd.arg(&command[1..]).query(&mut server.connection()).expect("redis answers")
}
