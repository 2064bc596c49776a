//! Limits and shared slots where Redis is more than one server: a cluster, and a master that sentinels watch.

#[path = "support/redis_cluster.rs"]
mod cluster;
#[path = "support/ports.rs"]
mod ports;
#[path = "support/replica.rs"]
mod replica;
#[path = "support/redis_sentinel.rs"]
mod sentinel;
#[path = "support/redis.rs"]
mod server;

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bouncer::admission::{Entry, Turn};
use bouncer::config::{self, RedisServers};
use bouncer::limit::outage::{Limits, Metered, Stores};
use bouncer::limit::{BucketKey, Charge, Level, OnOutage, Quota, Rate};
use bouncer::metrics::StoreMetrics;
use cluster::Cluster;
use futures_util::future::join_all;
use prometheus::Registry;
use replica::{
    GENEROUS, Inside, LONG_LEASE, Reached, Replica, SECOND, SHORT, Settings, ask, becomes, counts, key, quiet,
};
use sentinel::Sentinel;
use server::RedisServer;
use tokio::time::{Instant, sleep};

const DAY: Duration = Duration::from_secs(86_400);
/// How long after the election of a new master everything must be shared again.
const SOON: Duration = Duration::from_secs(5);

impl Reached for Cluster {
    fn servers(&self) -> RedisServers {
        RedisServers::Cluster(self.urls())
    }
}

impl Reached for Sentinel {
    fn servers(&self) -> RedisServers {
        RedisServers::Sentinel { service: Sentinel::service(), urls: self.urls() }
    }
}

/// Limits alone, of a process that refuses whatever Redis does not answer.
struct Process {
    stores: Stores,
    limits: Limits,
    metrics: StoreMetrics,
}

impl Process {
    async fn start(servers: RedisServers, timeout: Duration) -> Self {
        let metrics = StoreMetrics::register(&Registry::new()).expect("names are new");
        let redis = config::Redis { timeout, on_outage: OnOutage::Deny, ..config::Redis::on(servers) };
        let stores = Stores::new(Some(&redis), &metrics).expect("good URLs");
        let limits = stores.limits();
        limits.settled().await;
        Self { stores, limits, metrics }
    }

    fn is_up(&self) -> bool {
        self.stores.status().expect("there is a redis").up
    }

    fn last_error(&self) -> String {
        self.stores.status().expect("there is a redis").last_error.unwrap_or_default()
    }

    fn failures(&self) -> u64 {
        let kinds = ["timeout", "connection", "reply"];
        kinds.iter().map(|kind| self.metrics.errors.with_label_values(&["redis", kind]).get()).sum()
    }

    /// Takes one token of so many that a day brings.
    async fn take(&self, tenant: &str, burst: u64) -> Metered {
        let number = |n| NonZeroU64::new(n).expect("not zero");
        let quota = Quota { rate: Rate { count: number(1), per: DAY }, burst: number(burst) };
        let bucket = BucketKey::tenant(tenant);
        self.limits.take(&[Charge { bucket: &bucket, quota, cost: NonZeroU64::MIN }], None).await
    }

    async fn taken(&self, tenant: &str, burst: u64) -> Level {
        match self.take(tenant, burst).await {
            Metered::Taken(level) => level,
            other => panic!("{other:?}, and the last error was: {}", self.last_error()),
        }
    }
}

fn bucket(tenant: &str) -> String {
    BucketKey::tenant(tenant).as_str().to_owned()
}

/// A hundred requests of three replicas get the one slot one after the other, with no wake-up lost.
async fn one_slot_serves_all(servers: &impl Reached, pool_is_at: &RedisServer) {
    let replicas = Replica::several(3, servers, &Settings::cap(1)).await;
    let inside = Inside::default();
    let began = Instant::now();
    join_all((0..100).map(|n| {
        let (replica, inside) = (&replicas[n % 3], &inside);
        async move {
            let slot = replica.served(n % 2, GENEROUS).await.expect("served");
            inside.stay(slot, Duration::from_millis(2)).await;
        }
    }))
    .await;
    assert_eq!(inside.most(), 1);
    // Each lost wake-up would wait for the next heartbeat, up to 1 s.
    assert!(began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
    quiet(pool_is_at, &replicas).await;
}

/// Three processes share a bucket to the last token.
async fn one_bucket_is_shared(servers: &impl Reached) {
    let processes = join_all((0..3).map(|_| Process::start(servers.servers(), GENEROUS))).await;
    let takes = join_all((0..150).map(|n| processes[n % 3].take("shared", 100))).await;
    assert_eq!(takes.iter().filter(|take| matches!(take, Metered::Taken(_))).count(), 100);
    assert_eq!(takes.iter().filter(|take| matches!(take, Metered::Refused { .. })).count(), 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_one_bucket_and_one_cap_for_all_replicas() {
    let cluster = Cluster::start();
    one_bucket_is_shared(&cluster).await;
    one_slot_serves_all(&cluster, &cluster.nodes[cluster.owner(&key("slots"))]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_a_request_asks_for_its_bucket_and_then_for_its_slot_and_not_where_the_bucket_is_empty() {
    let cluster = Cluster::start();
    let replicas = Replica::several(1, &cluster, &Settings::cap(10)).await;
    // Other than the heartbeats, which are runs of scripts too.
    let calls = || -> u64 {
        let buckets = cluster.owner(&bucket("acme"));
        let pool = cluster.owner(&key("slots"));
        assert_ne!(buckets, pool, "the tenant was chosen for that");
        let stats: String = ask(&cluster.nodes[buckets], &["INFO", "commandstats"]);
        let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
        line.and_then(|line| line.split(',').next()?.parse().ok()).unwrap_or(0)
    };
    let before = calls();
    drop(replicas[0].slot(0).await);
    assert_eq!(calls() - before, 1, "one call for the bucket, and the slot's went elsewhere");
    quiet(&cluster.nodes[cluster.owner(&key("slots"))], &replicas).await;
}

#[tokio::test]
async fn tenants_of_hostile_names_are_isolated_on_a_cluster() {
    let cluster = Cluster::start();
    let process = Process::start(cluster.servers(), GENEROUS).await;
    let (long, braces) = ("x".repeat(5000), "{".repeat(100));
    let names =
        ["", "{}", "{a}", "{", "}", "{{}}", "with space", "a", "a%7D", "a:b", "bouncer:bucket:{a}", "ü", "\r\nX", "\0"];
    let names: Vec<&str> = names.into_iter().chain([&*long, &*braces]).collect();
    for name in &names {
        let takes = join_all((0..5).map(|_| process.take(name, 3))).await;
        assert_eq!(takes.iter().filter(|take| matches!(take, Metered::Taken(_))).count(), 3, "{name:?}");
    }
    let keys: Vec<usize> =
        cluster.nodes.iter().map(|node| ask::<Vec<String>>(node, &["KEYS", "bouncer:bucket:*"]).len()).collect();
    assert_eq!(keys.iter().sum::<usize>(), names.len(), "{keys:?}");
    assert!(keys.iter().all(|keys| *keys > 0), "each node has some: {keys:?}");
    assert_eq!(process.failures(), 0, "{}", process.last_error());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_migrates_under_load_loses_no_take_and_doubles_none() {
    const BURST: u64 = 10_000_000;
    let cluster = Cluster::start();
    let processes = join_all((0..2).map(|_| Process::start(cluster.servers(), GENEROUS))).await;
    let (moving, taken) = (AtomicBool::new(true), AtomicU64::new(0));
    processes[0].taken("moves", BURST).await;
    let load = join_all((0..16).map(|n| {
        let (process, moving, taken) = (&processes[n % 2], &moving, &taken);
        async move {
            while moving.load(Ordering::Relaxed) {
                process.taken("moves", BURST).await;
                taken.fetch_add(1, Ordering::Relaxed);
            }
        }
    }));
    let migrations = async {
        let key = bucket("moves");
        let home = cluster.owner(&key);
        // Round all three nodes, twice.
        for step in 0..6 {
            let (from, to) = ((home + step) % 3, (home + step + 1) % 3);
            let load_goes_on = async |more: u64| {
                let before = taken.load(Ordering::Relaxed);
                becomes("the load goes on", GENEROUS, || taken.load(Ordering::Relaxed) >= before + more).await;
            };
            tokio::task::block_in_place(|| cluster.begin_migration(&key, from, to));
            load_goes_on(50).await;
            tokio::task::block_in_place(|| cluster.migrate_keys(&key, from, to));
            load_goes_on(50).await;
            tokio::task::block_in_place(|| cluster.end_migration(&key, from, to));
            load_goes_on(50).await;
        }
        moving.store(false, Ordering::Relaxed);
    };
    tokio::join!(load, migrations);
    let left = processes[1].taken("moves", BURST).await.remaining;
    assert_eq!(BURST - left, taken.load(Ordering::Relaxed) + 2, "each take once");
    for process in &processes {
        assert_eq!(process.failures(), 0, "redirections are no failures: {}", process.last_error());
    }
}

#[tokio::test]
async fn a_node_that_gets_its_first_slot_is_found_while_that_is_on_its_way_and_after() {
    let mut cluster = Cluster::start();
    let process = Process::start(cluster.servers(), GENEROUS).await;
    let new = cluster.grow();
    let key = bucket("acme");
    let home = cluster.owner(&key);
    cluster.begin_migration(&key, home, new);
    // It has no key yet, so the first one is made at the new place.
    assert_eq!(process.taken("acme", 10).await.remaining, 9);
    assert_eq!(ask::<Vec<String>>(&cluster.nodes[home], &["KEYS", &key]), Vec::<String>::new());
    assert_eq!(process.taken("acme", 10).await.remaining, 8);
    cluster.end_migration(&key, home, new);
    assert_eq!(process.taken("acme", 10).await.remaining, 7);
    assert_eq!(process.failures(), 0, "{}", process.last_error());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_slot_of_a_pool_migrates_every_request_is_served_and_nothing_is_left() {
    const CAP: usize = 4;
    let cluster = Cluster::start();
    let replicas = Replica::several(2, &cluster, &Settings { timeout: SECOND, ..Settings::cap(CAP) }).await;
    let (inside, moving) = (Inside::default(), AtomicBool::new(true));
    let load = join_all((0..12_usize).map(|n| {
        let (replica, inside, moving) = (&replicas[n % 2], &inside, &moving);
        async move {
            while moving.load(Ordering::Relaxed) {
                let slot = replica.served(n % 2, GENEROUS).await.expect("served");
                inside.stay(slot, Duration::from_millis(3)).await;
            }
        }
    }));
    let pool = key("slots");
    let (from, to) = (cluster.owner(&pool), (cluster.owner(&pool) + 1) % 3);
    let migration = async {
        sleep(SHORT).await;
        tokio::task::block_in_place(|| {
            cluster.begin_migration(&pool, from, to);
            cluster.migrate_keys(&pool, from, to);
            cluster.end_migration(&pool, from, to);
        });
        becomes("shared again", SOON, || replicas.iter().all(|replica| !replica.is_cut_off())).await;
        sleep(SECOND).await;
        moving.store(false, Ordering::Relaxed);
    };
    tokio::join!(load, migration);
    // Cut off for a moment, each goes by what it saw at its last heartbeat.
    assert!(inside.most() <= 2 * CAP, "{} were inside at once", inside.most());
    quiet(&cluster.nodes[to], &replicas).await;
    assert_eq!(ask::<Vec<String>>(&cluster.nodes[from], &["KEYS", "bouncer:pool:*"]), Vec::<String>::new());
}

/// Kills the master that has the pool, and expects what was held and who waits to be shared again soon after another one is
/// elected. `elected` says where the pool is then.
async fn survives(replicas: &[Replica], kill: impl FnOnce(), elected: impl AsyncFn() -> String) {
    let held = [replicas[0].slot(0).await, replicas[0].slot(0).await, replicas[1].slot(0).await];
    let waiting = [replicas[0].ticket(1).await, replicas[1].ticket(0).await];
    tokio::task::block_in_place(kill);
    for replica in replicas {
        becomes("cut off", 3 * SECOND, || replica.is_cut_off()).await;
    }
    let url = elected().await;
    let since = Instant::now();
    becomes("shared again", SOON, || replicas.iter().all(|replica| !replica.is_cut_off())).await;
    println!("shared again {:?} after the election was seen", since.elapsed());
    let counted = || {
        let mut connection = redis::Client::open(url.as_str()).expect("a URL").get_connection().expect("redis answers");
        let count = |name: &str, connection: &mut redis::Connection| -> usize {
            redis::cmd("HLEN").arg(key(name)).query(connection).expect("redis answers")
        };
        (count("slots", &mut connection), count("waiters", &mut connection))
    };
    // What the new master had not heard of is told to it, and one that did not know of the others may have let one in.
    becomes("everyone known", SOON, || {
        let (in_use, waiting) = counted();
        in_use + waiting == 5 && (3..=5).contains(&in_use)
    })
    .await;
    drop(held);
    for ticket in waiting {
        assert!(matches!(ticket.turn(Instant::now() + SOON).await, Turn::Slot(_)));
    }
    becomes("nothing in use and nobody waiting", SOON, || counted() == (0, 0)).await;
}

/// Sentinels end all connections to a server whose role they change, so one that is lost is no answer yet.
fn is_master(server: &RedisServer) -> bool {
    let role = || -> redis::RedisResult<String> {
        redis::cmd("INFO").arg("replication").query(&mut redis::Client::open(server.url())?.get_connection()?)
    };
    role().is_ok_and(|role| role.contains("role:master"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_a_master_of_a_cluster_is_killed_its_replica_is_found() {
    let cluster = Cluster::with_eager_replicas();
    let settings = Settings { cap: 3, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(3) };
    let replicas = Replica::several(2, &cluster, &settings).await;
    let process = Process::start(cluster.servers(), SHORT).await;
    let pool = cluster.owner(&key("slots"));
    let mut tenants = (0..100).map(|n| format!("tenant-{n}"));
    let tenant = tenants.find(|it| cluster.owner(&bucket(it)) == pool).expect("one of many");
    process.taken(&tenant, 10).await;
    survives(
        &replicas,
        || cluster.nodes[pool].crash(),
        async || {
            let successor = &cluster.nodes[pool + 3];
            becomes("elected", GENEROUS, || is_master(successor)).await;
            successor.url()
        },
    )
    .await;
    becomes("limits are shared again", SOON, || process.is_up()).await;
    let left = process.taken(&tenant, 10).await.remaining;
    assert!(left <= 9, "{left}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_cluster_that_changes_places_with_its_replica_is_followed_without_a_failure() {
    const BURST: u64 = 1_000_000;
    let cluster = Cluster::with_replicas();
    let process = Process::start(cluster.servers(), GENEROUS).await;
    let master = cluster.owner(&bucket("acme"));
    let (old, new) = (&cluster.nodes[master], &cluster.nodes[master + 3]);
    ask::<()>(new, &["CLUSTER", "FAILOVER"]);
    let (deadline, mut taken) = (Instant::now() + GENEROUS, 0);
    while !is_master(new) || is_master(old) {
        process.taken("acme", BURST).await;
        taken += 1;
        assert!(Instant::now() < deadline, "they change places");
    }
    assert_eq!(process.taken("acme", BURST).await.remaining, BURST - taken - 1, "each take once");
    assert_eq!(process.failures(), 0, "{}", process.last_error());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_lead_to_a_master_that_keeps_one_bucket_and_one_cap() {
    let mut sentinel = Sentinel::start();
    one_bucket_is_shared(&sentinel).await;
    one_slot_serves_all(&sentinel, &sentinel.servers[0]).await;
    sentinel.kill(0);
    let process = Process::start(sentinel.servers(), GENEROUS).await;
    assert!(process.is_up(), "the next sentinel knows it too: {}", process.last_error());

    let urls = sentinel.urls();
    let unknown = RedisServers::Sentinel { service: "redis://other".into(), urls: urls.clone() };
    let stranger = RedisServers::Sentinel { service: "redis://main_1".into(), urls: urls.clone() };
    let urls = urls.iter().map(|url| url.replace(":watch@", ":wrong@")).collect();
    let unwatched = RedisServers::Sentinel { service: Sentinel::service(), urls };
    for (servers, error) in [
        (unknown, "no sentinel names a master of the service"),
        (stranger, "redis refused: "),
        (unwatched, "connection to redis failed: "),
    ] {
        let process = Process::start(servers.clone(), GENEROUS).await;
        assert!(!process.is_up(), "{servers:?}");
        let told = process.last_error();
        // A killed sentinel is asked too.
        assert!(told.starts_with(error) || told.contains("refused"), "{servers:?}: {told}");
        assert!(!told.contains("p@ss") && !told.contains("watch") && !told.contains("wrong"), "{told}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_master_is_killed_sentinels_lead_to_the_next_one() {
    let sentinel = Sentinel::start();
    let settings = Settings { cap: 3, lease: LONG_LEASE, timeout: SHORT, ..Settings::cap(3) };
    let replicas = Replica::several(2, &sentinel, &settings).await;
    let process = Process::start(sentinel.servers(), SHORT).await;
    process.taken("acme", 10).await;
    survives(
        &replicas,
        || sentinel.servers[0].crash(),
        async || {
            let successor = &sentinel.servers[1];
            becomes("elected", GENEROUS, || is_master(successor)).await;
            successor.url()
        },
    )
    .await;
    becomes("limits are shared again", SOON, || process.is_up()).await;
    let left = process.taken("acme", 10).await.remaining;
    assert!(left <= 9, "{left}");
    assert_eq!(sentinel.master(1), sentinel.servers[1].port());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_is_replaced_while_it_is_well_is_left_for_the_new_one_before_it_hears_of_it() {
    let sentinel = Sentinel::start();
    let replicas = Replica::several(2, &sentinel, &Settings::cap(3)).await;
    let [old, new] = &sentinel.servers;
    let held = [replicas[0].slot(0).await, replicas[1].slot(0).await];
    assert_eq!(counts(old), (2, 0));
    tokio::task::block_in_place(|| sentinel.fail_over());
    becomes("elected", GENEROUS, || is_master(new)).await;
    let third = replicas[0].slot(0).await;
    becomes("all is shared there", SOON, || counts(new) == (3, 0)).await;
    assert!(is_master(old), "it has not been told yet, so only the sentinels can have said it");
    let waiting = replicas[1].ticket(0).await;
    drop(third);
    let turn = waiting.turn(Instant::now() + SOON).await;
    assert!(matches!(turn, Turn::Slot(_)));
    drop((held, turn));
    quiet(new, &replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_no_writes_any_more_counts_as_down_at_its_first_answer() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let process = Process::start(server.servers(), GENEROUS).await;
    process.taken("acme", 10).await;
    ask::<()>(&server, &["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
    assert!(matches!(process.take("acme", 10).await, Metered::Unavailable));
    assert!(!process.is_up());
    assert!(process.last_error().contains("READONLY"), "{}", process.last_error());
    ask::<()>(&server, &["REPLICAOF", "NO", "ONE"]);
    becomes("up again", SOON, || process.is_up()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_deployments_with_prefixes_of_their_own_share_a_redis_and_nothing_else() {
    let server = RedisServer::start();
    let cap = |prefix| Settings { prefix, ..Settings::cap(1) };
    let mut slots = Vec::new();
    let replicas = [Replica::start(&server, &cap("blue")).await, Replica::start(&server, &cap("green")).await];
    for replica in &replicas {
        slots.push(replica.slot(0).await);
        assert!(matches!(replica.enter(0).await, Entry::Held(_)), "its own one slot is in use");
        assert_eq!(replica.pool.shared_stats().replicas, 1);
    }
    let keys: Vec<String> = ask(&server, &["KEYS", "*"]);
    let of = |prefix: &str| keys.iter().filter(|key| key.starts_with(prefix)).count();
    assert_eq!((of("blue:"), of("green:")), (keys.len() / 2, keys.len() / 2), "{keys:?}");
    assert!(keys.contains(&"blue:bucket:{acme}".to_owned()) && keys.contains(&"green:bucket:{acme}".to_owned()));
    assert_eq!(counts(&server), (0, 0), "nothing under the default prefix");
}
