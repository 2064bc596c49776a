//! A RabbitMQ of its own for a test binary: ports, names, data and epmd apart from any other, gone when dropped.
//!
//! It takes about four seconds to start, so tests share one where they break nothing, each with its own prefix.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a server may take to answer, on a machine that is busy with other tests.
const START: Duration = Duration::from_secs(60);

/// Where Debian's package keeps the programs themselves; those on `PATH` change user and take the standard ports.
const PROGRAMS: &str = "/usr/lib/rabbitmq/bin";

/// A running (or stopped) broker.
pub(crate) struct RabbitServer {
    ports: Ports,
    folder: tempfile::TempDir,
    epmd: Child,
    child: Option<Child>,
}

struct Ports {
    amqp: u16,
    distribution: u16,
    epmd: u16,
}

#[allow(dead_code, reason = "each test crate uses its own part")]
impl RabbitServer {
    /// Starts a broker and waits until it answers.
    pub(crate) fn start() -> Self {
        // Another process may take a port between the look and the start: then with other ones.
        for _ in 0..3 {
            let mut server = Self::prepare();
            if server.launch() {
                return server;
            }
        }
        panic!("rabbitmq-server did not start");
    }

    fn prepare() -> Self {
        let free = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [amqp, distribution, epmd] = free.map(|port| port.local_addr().expect("its address").port());
        let folder = tempfile::tempdir().expect("a folder for rabbitmq");
        secret(&folder.path().join(".erlang.cookie"), b"BOUNCERTESTCOOKIE");
        std::fs::write(folder.path().join("plugins"), "[].").expect("a file of no plugins");
        std::fs::write(folder.path().join("rabbitmq.conf"), "disk_free_limit.absolute = 1MB\n").expect("a file");
        let mut command = Command::new("epmd");
        command.args(["-address", "127.0.0.1", "-port", &epmd.to_string()]);
        let epmd_child = quiet(&mut command).spawn().expect("epmd is installed with rabbitmq-server");
        Self { ports: Ports { amqp, distribution, epmd }, folder, epmd: epmd_child, child: None }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.ports.amqp).into()
    }

    pub(crate) fn url(&self) -> String {
        Self::url_at(self.address())
    }

    /// For a broker behind a proxy.
    pub(crate) fn url_at(address: SocketAddr) -> String {
        format!("amqp://guest:guest@{address}/%2f")
    }

    /// Asks it to end, and waits for that. What is durable stays.
    pub(crate) fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        let mut child = self.child.take().expect("rabbitmq-server runs");
        let began = Instant::now();
        while matches!(child.try_wait(), Ok(None)) && began.elapsed() < START {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        child.wait().expect("rabbitmq-server can be waited for");
    }

    /// Ends it as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A process that was paused can be killed too.
            let _ = child.kill();
            child.wait().expect("rabbitmq-server can be waited for");
        }
    }

    /// Starts it again on the same port with what is durable.
    pub(crate) fn restart(&mut self) {
        self.kill();
        assert!(self.launch(), "rabbitmq-server came back");
    }

    /// Stops it in its tracks: connections stay, nothing is answered.
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Ends [`RabbitServer::pause`].
    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Runs `rabbitmqctl` and gives what it prints. About a second each.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let mut command = self.command("rabbitmqctl");
        let output = command.arg("--quiet").args(arguments).stdin(Stdio::null()).output().expect("rabbitmqctl runs");
        assert!(output.status.success(), "rabbitmqctl {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Raises the memory alarm, on which publishers are blocked, or ends it.
    pub(crate) fn memory_alarm(&self, raised: bool) {
        self.ctl(&["set_vm_memory_high_watermark", if raised { "0.0000001" } else { "0.9" }]);
    }

    /// The rows of a table such as `list_queues`, without its head.
    pub(crate) fn rows(&self, arguments: &[&str]) -> Vec<Vec<String>> {
        let table = [arguments, &["--no-table-headers"]].concat();
        self.ctl(&table).lines().map(|row| row.split('\t').map(str::to_owned).collect()).collect()
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        let logs = std::fs::read_dir(self.folder.path().join("log")).into_iter().flatten().flatten();
        logs.filter_map(|file| std::fs::read(file.path()).ok())
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .collect()
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok()).expect("rabbitmq-server runs");
        kill(Pid::from_raw(pid), signal).expect("rabbitmq-server takes signals");
    }

    fn command(&self, program: &str) -> Command {
        let at = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(PathBuf::from(PROGRAMS).join(program));
        command
            .env("HOME", self.folder.path())
            .env("RABBITMQ_NODENAME", format!("bouncer-{}@localhost", self.ports.amqp))
            .env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_NODE_PORT", self.ports.amqp.to_string())
            .env("RABBITMQ_DIST_PORT", self.ports.distribution.to_string())
            .env("ERL_EPMD_PORT", self.ports.epmd.to_string())
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("RABBITMQ_MNESIA_BASE", at("data"))
            .env("RABBITMQ_LOG_BASE", at("log"))
            .env("RABBITMQ_CONFIG_FILE", at("rabbitmq.conf"))
            .env("RABBITMQ_CONF_ENV_FILE", at("none"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", at("plugins"))
            .env("RABBITMQ_PID_FILE", at("pid"))
            // So that the process is the one that was started, and takes signals.
            .env("RUNNING_UNDER_SYSTEMD", "true")
            .env(
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS",
                "+sbwt none +sbwtdcpu none +sbwtdio none +S 2:2 -start_epmd false",
            );
        command
    }

    /// Whether the broker came up.
    fn launch(&mut self) -> bool {
        self.child = Some(quiet(&mut self.command("rabbitmq-server")).spawn().expect("rabbitmq-server is installed"));
        let began = Instant::now();
        while began.elapsed() < START {
            if self.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None))) {
                self.child = None;
                return false;
            }
            if self.answers() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.kill();
        false
    }

    /// Whether it says the first word of the protocol.
    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(self.address()) else { return false };
        let mut first = [0];
        stream.set_read_timeout(Some(Duration::from_secs(1))).is_ok()
            && stream.write_all(b"AMQP\x00\x00\x09\x01").is_ok()
            && stream.read_exact(&mut first).is_ok()
            && first == [1]
    }
}

impl Drop for RabbitServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!("--- rabbitmq ---\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
        self.kill();
        let _ = self.epmd.kill();
        let _ = self.epmd.wait();
    }
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// A file that only its owner reads, which Erlang insists on.
fn secret(path: &Path, text: &[u8]) {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o400).open(path).expect("a file");
    file.write_all(text).expect("a file that can be written");
}
