//! A master, its replica and three sentinels of their own for a test.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::ports::Port;
use super::server::RedisServer;

/// How long they may take to find each other, on a machine that is busy with other tests.
const AGREE: Duration = Duration::from_secs(30);
const SENTINELS: usize = 3;

/// The sentinels want one password, and scripts another user than the default one.
pub(crate) struct Sentinel {
    /// The first master, and its replica.
    pub(crate) servers: [RedisServer; 2],
    sentinels: Vec<Watcher>,
}

struct Watcher {
    port: Port,
    child: Child,
    _folder: tempfile::TempDir,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl Sentinel {
    pub(crate) fn start() -> Self {
        // The default user may replicate and look, but run no script: who forgets to log in is refused.
        let arguments = [
            "--user default on nopass ~* &* +@all -eval -evalsha",
            "--user bouncer on >p@ss ~* &* +@all",
            "--repl-diskless-sync-delay 0",
            "--repl-ping-replica-period 1",
            "--replica-priority 10",
        ];
        let arguments: Vec<&str> = arguments.iter().flat_map(|it| it.split(' ')).collect();
        let master = RedisServer::start_with(&arguments);
        let replica = RedisServer::start_with(&arguments);
        let mut follow = redis::cmd("REPLICAOF");
        follow.arg("127.0.0.1").arg(master.port()).exec(&mut replica.connection()).expect("redis answers");
        let sentinels = (0..SENTINELS).map(|_| Watcher::start(master.port())).collect();
        let started = Self { servers: [master, replica], sentinels };
        eventually("all sentinels know each other and the replica", || {
            started.sentinels.iter().all(|watcher| watcher.knows(SENTINELS - 1))
        });
        started
    }

    /// What the configuration calls the service, with the login of the master.
    pub(crate) fn service() -> String {
        "redis://bouncer:p%40ss@main_1".to_owned()
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(|watcher| format!("redis://:watch@{}", watcher.port.address())).collect()
    }

    /// Kills a sentinel.
    pub(crate) fn kill(&mut self, number: usize) {
        let child = &mut self.sentinels[number].child;
        child.kill().expect("a sentinel can be killed");
        child.wait().expect("a sentinel can be waited for");
    }

    /// The port of the master that a sentinel names.
    pub(crate) fn master(&self, number: usize) -> u16 {
        self.sentinels[number].master().expect("a sentinel answers")
    }

    /// Lets the sentinels make the replica the master though there is nothing wrong.
    pub(crate) fn fail_over(&self) {
        let mut command = redis::cmd("SENTINEL");
        let failover = command.arg("FAILOVER").arg("main_1");
        failover.exec(&mut self.sentinels[0].connection().expect("a sentinel answers")).expect("it fails over");
    }
}

impl Watcher {
    fn start(master: u16) -> Self {
        for _ in 0..10 {
            let (port, folder) = (Port::free(), tempfile::tempdir().expect("a folder for a sentinel"));
            let file = folder.path().join("sentinel.conf");
            let text = format!(
                "port {}\nbind 127.0.0.1\ndir {}\nrequirepass watch\nsentinel sentinel-pass watch\n\
                 sentinel monitor main_1 127.0.0.1 {master} 2\nsentinel down-after-milliseconds main_1 600\n\
                 sentinel failover-timeout main_1 3000\n",
                port.number(),
                folder.path().display()
            );
            std::fs::write(&file, text).expect("a file for a sentinel");
            let child = Command::new(std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".into()))
                .arg(&file)
                .arg("--sentinel")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("redis-server is installed");
            let mut watcher = Self { port, child, _folder: folder };
            let began = Instant::now();
            while began.elapsed() < AGREE && matches!(watcher.child.try_wait(), Ok(None)) {
                if watcher.connection().is_ok() {
                    return watcher;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        panic!("no sentinel started");
    }

    fn connection(&self) -> redis::RedisResult<redis::Connection> {
        let url = format!("redis://:watch@{}", self.port.address());
        redis::Client::open(url)?.get_connection_with_timeout(AGREE)
    }

    fn master(&self) -> Option<u16> {
        let mut command = redis::cmd("SENTINEL");
        let named = command.arg("GET-MASTER-ADDR-BY-NAME").arg("main_1").query(&mut self.connection().ok()?);
        let (_, port): (String, u16) = named.ok()?;
        Some(port)
    }

    fn knows(&self, others: usize) -> bool {
        let list = |what: &str| {
            let mut command = redis::cmd("SENTINEL");
            let list: redis::RedisResult<Vec<redis::Value>> =
                command.arg(what).arg("main_1").query(&mut self.connection()?);
            list.map(|list| list.len())
        };
        list("SENTINELS").is_ok_and(|count| count == others) && list("REPLICAS").is_ok_and(|count| count == 1)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < AGREE, "{what} within {AGREE:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
