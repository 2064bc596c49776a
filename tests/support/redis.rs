//! A Redis of its own for a test: free port, own folder, nothing saved, gone when dropped.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::ports::Port;

/// How long a server may take to answer, on a machine that is busy with other tests.
const START: Duration = Duration::from_secs(20);

/// A running (or stopped) `redis-server` of this test alone.
pub(crate) struct RedisServer {
    port: Port,
    arguments: Vec<String>,
    folder: tempfile::TempDir,
    child: Option<Child>,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl RedisServer {
    /// Starts a server and waits until it answers.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// The same, with more of the command line: `&["--cluster-enabled", "yes"]`.
    pub(crate) fn start_with(arguments: &[&str]) -> Self {
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        // A member of a cluster listens on a second port, which may be taken: then with another one.
        for _ in 0..10 {
            let folder = tempfile::tempdir().expect("a folder for redis");
            let mut server = Self { port: Port::free(), arguments: arguments.clone(), folder, child: None };
            if server.launch() {
                return server;
            }
        }
        panic!("redis-server did not start");
    }

    pub(crate) fn port(&self) -> u16 {
        self.port.number()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.port.address())
    }

    /// The process, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Kills it as a crash would. The port stays reserved for [`RedisServer::restart`].
    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("redis-server can be killed");
            child.wait().expect("redis-server can be waited for");
        }
    }

    /// Starts it again on the same port, empty.
    pub(crate) fn restart(&mut self) {
        self.stop();
        assert!(self.launch(), "redis-server came back on port {}", self.port());
    }

    /// The same for one that others look at, which does not come back.
    pub(crate) fn crash(&self) {
        self.signal(Signal::SIGKILL);
    }

    /// Stops it in its tracks: connections stay, nothing is answered.
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Ends [`RedisServer::pause`].
    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// A blocking connection to look at what the server keeps.
    pub(crate) fn connection(&self) -> redis::Connection {
        self.try_connection().expect("redis-server answers")
    }

    fn try_connection(&self) -> redis::RedisResult<redis::Connection> {
        let mut connection = redis::Client::open(self.url())?.get_connection_with_timeout(START)?;
        redis::cmd("PING").exec(&mut connection)?;
        Ok(connection)
    }

    fn signal(&self, signal: Signal) {
        let pid = self.pid().and_then(|pid| i32::try_from(pid).ok()).expect("redis-server runs");
        kill(Pid::from_raw(pid), signal).expect("redis-server takes signals");
    }

    /// Whether the server came up.
    fn launch(&mut self) -> bool {
        let child = Command::new(std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".into()))
            .args(["--port", &self.port().to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(["--enable-debug-command", "local"])
            .args(&self.arguments)
            .arg("--dir")
            .arg(self.folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is installed");
        self.child = Some(child);
        let began = Instant::now();
        while began.elapsed() < START {
            let ended = self.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None)));
            if ended {
                self.child = None;
                return false;
            }
            if self.try_connection().is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.stop();
        false
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A stopped process can be killed too.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
