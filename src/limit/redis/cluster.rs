//! A cluster: a connection to each of its masters, and the map that says which of them has a key.
//!
//! A command goes to the master of its first key's slot. Where a slot has moved, the node that had it did not carry the
//! command out but says who has it now, so following that is no repetition. The map is read again by the keeper, so that
//! only the first commands after a move take the longer way.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use redis::aio::{MultiplexedConnection, PubSub};
use redis::{Cmd, ConnectionAddr, ConnectionInfo, RedisConnectionInfo, Value, cmd, pipe};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::StoreError;
use super::script::answer;
use super::slots::{Address, Redirection, SLOTS, Shard, redirection, shards, slot, slot_of};
use super::wire::{PATIENCE, Wire, ask, subscriber};
use crate::limit::BucketKey;

/// The pause after the map was read again. A migration moves thousands of slots, one after the other.
const REST: Duration = Duration::from_millis(50);
/// How many redirections a command follows. Two nodes that send it to each other do not agree yet.
const REDIRECTIONS: usize = 5;

/// The nodes that can be asked about the rest.
pub(super) struct Seeds {
    given: Vec<ConnectionInfo>,
    /// All that were in the last map.
    known: Mutex<Vec<Address>>,
    /// Who is asked first.
    first: AtomicUsize,
}

impl Seeds {
    pub(super) fn new(given: Vec<ConnectionInfo>) -> Self {
        Self { given, known: Mutex::default(), first: AtomicUsize::new(0) }
    }

    /// Those of the configuration, then those that the cluster itself has named.
    fn all(&self) -> Vec<ConnectionInfo> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let login = self.given.first().map(ConnectionInfo::redis_settings);
        let known = known.iter().filter_map(|address| login.map(|login| server(address, login)));
        let mut all = self.given.clone();
        for server in known {
            if all.iter().all(|other| other.addr() != server.addr()) {
                all.push(server);
            }
        }
        all
    }

    /// All of them, each with its place, from the one on that answered last.
    fn in_turn(&self) -> Vec<(usize, ConnectionInfo)> {
        let mut all: Vec<_> = self.all().into_iter().enumerate().collect();
        let first = self.first.load(Ordering::Relaxed) % all.len().max(1);
        all.rotate_left(first);
        all
    }

    /// The map, and how to log in at the nodes: as at the one that told it.
    async fn map(&self) -> Result<(RedisConnectionInfo, Vec<Shard>), StoreError> {
        let mut failure = StoreError::Uncovered;
        for (at, seed) in self.in_turn() {
            match read_map(&seed).await {
                Ok(map) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok((seed.redis_settings().clone(), map));
                }
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// A connection for messages to any node.
    pub(super) async fn subscriber(&self) -> Result<PubSub, StoreError> {
        let mut failure = StoreError::Uncovered;
        for (_, seed) in self.in_turn() {
            match timeout(PATIENCE, subscriber(&seed)).await.unwrap_or(Err(StoreError::Timeout(PATIENCE))) {
                Ok(subscriber) => return Ok(subscriber),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// What the node that is asked first says cannot be used: it may be one that the others have given up.
    fn next(&self) {
        self.first.fetch_add(1, Ordering::Relaxed);
    }
}

fn server(address: &Address, login: &RedisConnectionInfo) -> ConnectionInfo {
    #[expect(clippy::unwrap_used, reason = "an address is connection information already")]
    let server = redis::IntoConnectionInfo::into_connection_info((address.host.as_str(), address.port)).unwrap();
    server.set_redis_settings(login.clone())
}

fn host(server: &ConnectionInfo) -> &str {
    match server.addr() {
        ConnectionAddr::Tcp(host, _) => host,
        _ => "",
    }
}

/// Whom a slot belongs to, and the connections to them.
struct Map {
    nodes: Vec<(Address, MultiplexedConnection)>,
    /// By slot, a place in `nodes`.
    owners: Vec<usize>,
}

impl Map {
    fn node(&self, address: &Address) -> Option<MultiplexedConnection> {
        self.nodes.iter().find(|(known, _)| known == address).map(|(_, connection)| connection.clone())
    }

    fn has_slots(&self, address: &Address) -> bool {
        self.owners.iter().any(|owner| self.nodes[*owner].0 == *address)
    }

    /// A bucket for each node that has slots, to prove it by.
    fn probes(&self, prefix: &str) -> Vec<BucketKey> {
        // Enough for the hashes of these numbers to have hit every slot several times.
        const ENOUGH: u32 = 1 << 20;
        let mut unproved: HashSet<usize> = self.owners.iter().copied().collect();
        let mut probes = Vec::new();
        for number in 0..ENOUGH {
            if unproved.is_empty() {
                break;
            }
            let key = BucketKey::probe(prefix, &number.to_string());
            if unproved.remove(&self.owners[usize::from(slot(key.as_str().as_bytes()))]) {
                probes.push(key);
            }
        }
        probes
    }
}

/// A way to all masters, for the calls of one runtime.
#[derive(Clone)]
pub(super) struct Route {
    map: watch::Receiver<Arc<Map>>,
    /// Nodes that calls were sent to by others.
    wanted: mpsc::UnboundedSender<Address>,
}

impl Route {
    /// Sends a command to whom its first key belongs, and on to where that one says it is; the caller needs a deadline.
    pub(super) async fn send(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        let (mut node, mut connection) = {
            let map = self.map.borrow();
            let (address, connection) = &map.nodes[map.owners[usize::from(slot_of(command))]];
            (address.clone(), connection.clone())
        };
        let mut answered = answer(&mut connection, command).await;
        for _ in 0..REDIRECTIONS {
            let Err(StoreError::Reply(error)) = &answered else { return answered };
            match redirection(error, &node.host) {
                None => return answered,
                Some(Redirection::Moved(to)) => {
                    // An error would mean that the keeper is gone, and the runtime with it.
                    let _ = self.wanted.send(to.clone());
                    connection = self.connection(&to).await?;
                    answered = answer(&mut connection, command).await;
                    node = to;
                }
                Some(Redirection::Ask(to)) => {
                    connection = self.connection(&to).await?;
                    answered = ask_anyway(&mut connection, command).await;
                    node = to;
                }
            }
        }
        Err(StoreError::Astray)
    }

    /// The connection to a node, made by the keeper where there is none yet.
    async fn connection(&mut self, to: &Address) -> Result<MultiplexedConnection, StoreError> {
        if let Some(connection) = self.map.borrow().node(to) {
            return Ok(connection);
        }
        let _ = self.wanted.send(to.clone());
        let map = self.map.wait_for(|map| map.node(to).is_some()).await.map_err(|_| StoreError::Lost)?;
        map.node(to).ok_or(StoreError::Lost)
    }

    /// Buckets of which each node with slots has one.
    pub(super) fn probes(&self, prefix: &str) -> Vec<BucketKey> {
        self.map.borrow().probes(prefix)
    }
}

/// A node that is taking a slot over serves it only to who says so, for one command.
async fn ask_anyway(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value, StoreError> {
    let mut both = pipe();
    both.cmd("ASKING").add_command(command.clone());
    let mut answers = connection.send_packed_commands(&both, 1, 1).await.map_err(StoreError::Connection)?;
    match answers.pop() {
        Some(Value::ServerError(error)) => Err(StoreError::Reply(error.into())),
        Some(answer) => Ok(answer),
        None => Err(StoreError::Shape),
    }
}

/// Keeps the connections and the map of one runtime.
pub(super) struct Upkeep {
    login: RedisConnectionInfo,
    map: watch::Sender<Arc<Map>>,
    wanted: mpsc::UnboundedReceiver<Address>,
    drivers: JoinSet<Address>,
}

impl Upkeep {
    /// Connects to all masters. Every slot must have one.
    pub(super) async fn connect(seeds: &Seeds) -> Result<(Route, Self), StoreError> {
        let (login, shards) = seeds.map().await?;
        let mut drivers = JoinSet::new();
        let map = match connect_all(&login, &shards, &[], &mut drivers).await {
            Ok(map) => map,
            Err(error) => {
                seeds.next();
                return Err(error);
            }
        };
        let named = shards.into_iter().flat_map(|shard| std::iter::once(shard.master).chain(shard.replicas));
        *seeds.known.lock().unwrap_or_else(PoisonError::into_inner) = named.collect();
        let (wanting, wanted) = mpsc::unbounded_channel();
        let map = watch::Sender::new(Arc::new(map));
        let route = Route { map: map.subscribe(), wanted: wanting };
        Ok((route, Self { login, map, wanted, drivers }))
    }

    /// Runs the connections, and makes new ones where calls are sent to other nodes, until one ends that is needed.
    pub(super) async fn run(&mut self) {
        let mut moved_to = None;
        let mut rested = Instant::now();
        loop {
            tokio::select! {
                ended = self.drivers.join_next() => match ended {
                    // A node that has lost its slots may leave.
                    Some(Ok(node)) if !self.map.borrow().has_slots(&node) => self.forget(&node),
                    _ => return,
                },
                Some(node) = self.wanted.recv() => {
                    let known = self.map.borrow().node(&node).is_some();
                    if known {
                        moved_to = Some(node);
                    } else {
                        // Someone waits for the connection.
                        self.follow(node).await;
                    }
                }
                // With the old map the calls arrive too, by a longer way.
                () = sleep_until(rested), if moved_to.is_some() => {
                    if let Some(node) = moved_to.take() {
                        self.follow(node).await;
                    }
                    rested = Instant::now() + REST;
                }
            }
        }
    }

    /// Reads the map from a node that calls were sent to, for it knows what it has.
    async fn follow(&mut self, node: Address) {
        if let Err(error) = self.update(node).await {
            // The calls that wait for it fail, and with enough of them the store counts as down and is connected anew.
            tracing::debug!(%error, "could not follow a redirection");
        }
    }

    async fn update(&mut self, node: Address) -> Result<(), StoreError> {
        let shards = read_map(&server(&node, &self.login)).await?;
        let old = self.map.borrow().clone();
        let mut map = connect_all(&self.login, &shards, &old.nodes, &mut self.drivers).await?;
        // One that is to get its first slot has none yet.
        if map.node(&node).is_none() {
            let connection = connect(&self.login, &node, &old.nodes, &mut self.drivers).await?;
            map.nodes.push((node, connection));
        }
        self.map.send_replace(Arc::new(map));
        Ok(())
    }

    fn forget(&self, node: &Address) {
        self.map.send_modify(|map| {
            let nodes = map.nodes.iter().filter(|(known, _)| known != node).cloned().collect::<Vec<_>>();
            let place = |owner: &usize| nodes.iter().position(|(known, _)| *known == map.nodes[*owner].0);
            if let Some(owners) = map.owners.iter().map(place).collect() {
                *map = Arc::new(Map { nodes, owners });
            }
        });
    }
}

async fn read_map(node: &ConnectionInfo) -> Result<Vec<Shard>, StoreError> {
    let answer = ask(node, cmd("CLUSTER").arg("SLOTS"), PATIENCE).await?;
    shards(&answer, host(node))
}

/// Connects to whom there is no connection yet, all at once.
async fn connect_all(
    login: &RedisConnectionInfo,
    shards: &[Shard],
    connected: &[(Address, MultiplexedConnection)],
    drivers: &mut JoinSet<Address>,
) -> Result<Map, StoreError> {
    const NOBODY: usize = usize::MAX;
    let mut masters: Vec<Address> = Vec::new();
    let mut owners = vec![NOBODY; usize::from(SLOTS)];
    for shard in shards {
        let place = masters.iter().position(|known| *known == shard.master).unwrap_or(masters.len());
        if place == masters.len() {
            masters.push(shard.master.clone());
        }
        shard.slots.clone().for_each(|slot| owners[usize::from(slot)] = place);
    }
    if owners.contains(&NOBODY) {
        return Err(StoreError::Uncovered);
    }
    let known = |address: &Address| connected.iter().find(|(known, _)| known == address);
    let new = masters.iter().filter(|address| known(address).is_none());
    let made = join_all(new.map(|address| {
        let server = server(address, login);
        async move { (address.clone(), Wire::connect(&server).await) }
    }))
    .await;
    let mut fresh = Vec::with_capacity(made.len());
    for (address, wire) in made {
        let connection = run(&address, wire?, drivers);
        fresh.push((address, connection));
    }
    let connection =
        |address: &Address| known(address).or_else(|| fresh.iter().find(|(new, _)| new == address)).cloned();
    let nodes = masters.iter().map(connection).collect::<Option<Vec<_>>>().ok_or(StoreError::Lost)?;
    Ok(Map { nodes, owners })
}

async fn connect(
    login: &RedisConnectionInfo,
    address: &Address,
    connected: &[(Address, MultiplexedConnection)],
    drivers: &mut JoinSet<Address>,
) -> Result<MultiplexedConnection, StoreError> {
    if let Some((_, connection)) = connected.iter().find(|(known, _)| known == address) {
        return Ok(connection.clone());
    }
    Ok(run(address, Wire::connect(&server(address, login)).await?, drivers))
}

fn run(address: &Address, wire: Wire, drivers: &mut JoinSet<Address>) -> MultiplexedConnection {
    let (address, driver) = (address.clone(), wire.driver);
    drivers.spawn(async move {
        driver.await;
        address
    });
    wire.connection
}
