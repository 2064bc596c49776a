//! Upstream, bouncer and Envoy together.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::client::{Client, fetch};
use super::envoy::Envoy;
use super::metrics::Metrics;
use super::ports::Port;
use super::process::Process;
use super::upstream::{Snapshot, Upstream};
use super::wait::eventually;

/// How long anything may take to get ready on a busy machine.
const READY: Duration = Duration::from_secs(30);

/// What a test wants to be different.
pub(crate) struct StackOptions {
    /// `bouncer.yaml` without `listen`.
    pub(crate) config: String,
    /// Environment of bouncer. It gets nothing else of this process's own but PATH and `RUST_BACKTRACE`.
    pub(crate) env: Vec<(String, String)>,
    /// Texts of `envoy/envoy.yaml` and what to put in their place.
    pub(crate) envoy_edits: Vec<(String, String)>,
    /// Worker threads of Envoy.
    pub(crate) envoy_workers: u32,
    /// Whether bouncer runs from the start; [`Bouncer::start`] does it later.
    pub(crate) with_bouncer: bool,
    /// How many bouncers Envoy asks in turn.
    pub(crate) replicas: usize,
    /// Whether Envoy reaches bouncer through a socket file.
    pub(crate) unix_socket: bool,
    /// How many files bouncer may have open: as it starts, and at most.
    pub(crate) open_files: Option<(u32, u32)>,
}

impl StackOptions {
    /// A stack with this `bouncer.yaml`.
    pub(crate) fn new(config: impl Into<String>) -> Self {
        Self {
            config: config.into(),
            env: Vec::new(),
            envoy_edits: Vec::new(),
            envoy_workers: 2,
            with_bouncer: true,
            replicas: 1,
            unix_socket: false,
            open_files: None,
        }
    }

    /// Replaces text of the shipped Envoy file.
    pub(crate) fn edit_envoy(mut self, from: impl Into<String>, to: impl Into<String>) -> Self {
        self.envoy_edits.push((from.into(), to.into()));
        self
    }

    /// Sets an environment variable of bouncer.
    pub(crate) fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// More than one bouncer; one worker of Envoy, so that they are asked strictly in turn.
    pub(crate) fn replicas(mut self, count: usize) -> Self {
        (self.replicas, self.envoy_workers) = (count, 1);
        self
    }

    /// A socket file in place of a port.
    pub(crate) fn unix_socket(mut self) -> Self {
        self.unix_socket = true;
        self
    }

    /// So many open files for bouncer as it starts, and at most.
    pub(crate) fn open_files(mut self, soft: u32, hard: u32) -> Self {
        self.open_files = Some((soft, hard));
        self
    }

    /// Leaves bouncer out.
    pub(crate) fn without_bouncer(mut self) -> Self {
        self.with_bouncer = false;
        self
    }
}

/// Everything a request passes, all of it gone on drop. Fields end in this order.
pub(crate) struct Stack {
    pub(crate) envoy: Envoy,
    pub(crate) bouncer: Bouncer,
    /// More replicas, where they were asked for.
    pub(crate) others: Vec<Bouncer>,
    pub(crate) upstream: Upstream,
    dir: TempDir,
}

impl Stack {
    /// Ready for requests when this returns.
    ///
    /// # Panics
    /// When a part does not get ready, with the end of its log.
    pub(crate) async fn start(options: StackOptions) -> Self {
        let dir = tempfile::Builder::new().prefix("bouncer-stack-").tempdir().expect("a temporary directory");
        let upstream = Upstream::new();
        let mut bouncer = Bouncer::new(dir.path(), "bouncer", &options);
        let mut others: Vec<_> =
            (1..options.replicas).map(|n| Bouncer::new(dir.path(), &format!("bouncer-{n}"), &options)).collect();
        if options.with_bouncer {
            // Before Envoy, which opens its listener only when its first health check of bouncer is over.
            for bouncer in std::iter::once(&mut bouncer).chain(&mut others) {
                bouncer.start().await;
            }
        }
        let addresses: Vec<_> = std::iter::once(&bouncer).chain(&others).map(Bouncer::envoy_address).collect();
        let (workers, edits) = (options.envoy_workers, &options.envoy_edits);
        let envoy = Envoy::start(dir.path(), &addresses, upstream.address(), workers, edits).await;
        let stack = Self { envoy, bouncer, others, upstream, dir };
        if options.with_bouncer {
            stack.wait_until_healthy().await;
        }
        stack
    }

    /// An HTTP/1.1 client of Envoy.
    pub(crate) fn client(&self) -> Client {
        Client::http1(self.envoy.address())
    }

    /// An HTTP/2 client of Envoy.
    pub(crate) fn http2_client(&self) -> Client {
        Client::http2(self.envoy.address())
    }

    /// bouncer's metrics.
    pub(crate) async fn metrics(&self) -> Metrics {
        self.bouncer.metrics().await
    }

    /// A bouncer on the same gRPC port, with an admin port of its own, not started yet.
    pub(crate) fn successor(&self, options: StackOptions) -> Bouncer {
        let same = options.env("BOUNCER_LISTEN__GRPC", self.bouncer.grpc.address().to_string());
        Bouncer::new(self.dir.path(), "successor", &same)
    }

    /// bouncer's `/stats`.
    pub(crate) async fn stats(&self) -> Value {
        fetch(&self.bouncer.admin_url("/stats")).await.expect("bouncer's admin port answers").json()
    }

    /// The upstream's own record.
    pub(crate) fn record(&self) -> Snapshot {
        self.upstream.record()
    }

    /// Waits until so many requests of a tier are held.
    pub(crate) async fn wait_until_held(&self, tier: &str, count: u32) {
        self.bouncer.wait_until_held(tier, count).await;
    }

    /// Waits until so many requests are in flight at the upstream.
    pub(crate) async fn wait_until_in_flight(&self, count: usize) {
        let what = format!("{count} requests in flight");
        eventually(&what, READY, async || (self.record().current >= count).then_some(())).await;
    }

    /// Waits until nothing is in flight or waiting, neither by bouncer's account nor by the upstream's.
    pub(crate) async fn wait_until_quiet(&self) {
        eventually("nothing in flight and nobody waiting", READY, async || {
            let metrics = self.metrics().await;
            let (in_flight, waiting) = (metrics.sum("bouncer_in_flight", &[]), metrics.sum("bouncer_queue_depth", &[]));
            (in_flight == 0.0 && waiting == 0.0 && self.record().current == 0).then_some(())
        })
        .await;
    }

    /// Waits until Envoy sees that every bouncer says it is well.
    pub(crate) async fn wait_until_healthy(&self) {
        self.wait_until_seen_healthy(1 + self.others.len()).await;
    }

    /// Waits until Envoy sees so many bouncers that say they are well.
    pub(crate) async fn wait_until_seen_healthy(&self, count: usize) {
        let count = u64::try_from(count).expect("few");
        eventually("as many bouncers that Envoy finds healthy", READY, async || {
            (self.envoy.stats().await.get("cluster.bouncer.membership_healthy") == Some(&count)).then_some(())
        })
        .await;
    }
}

/// The binary under test: may be started, ended and started again on the same ports.
pub(crate) struct Bouncer {
    grpc: Port,
    /// In place of the port.
    socket: Option<PathBuf>,
    admin: Port,
    config: PathBuf,
    log: PathBuf,
    env: Vec<(String, String)>,
    open_files: Option<(u32, u32)>,
    process: Option<Process>,
}

impl Bouncer {
    /// Its files in `dir` begin with `name`.
    pub(crate) fn new(dir: &Path, name: &str, options: &StackOptions) -> Self {
        let config = dir.join(format!("{name}.yaml"));
        std::fs::write(&config, &options.config).expect("a directory of our own");
        Self {
            grpc: Port::free(),
            socket: options.unix_socket.then(|| dir.join(format!("{name}.sock"))),
            admin: Port::free(),
            config,
            log: dir.join(format!("{name}.log")),
            env: options.env.clone(),
            open_files: options.open_files,
            process: None,
        }
    }

    /// Where Envoy finds it, as Envoy's configuration writes it.
    fn envoy_address(&self) -> String {
        match &self.socket {
            Some(path) => format!("{{ pipe: {{ path: {} }} }}", path.display()),
            None => {
                format!("{{ socket_address: {{ address: 127.0.0.1, port_value: {} }} }}", self.grpc.number())
            }
        }
    }

    /// Its socket file, where it has one.
    pub(crate) fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Where its gRPC server listens, unless it has a socket file.
    pub(crate) fn grpc_address(&self) -> SocketAddr {
        self.grpc.address()
    }

    /// Starts it; ready when this returns, though Envoy may take another 0.2 s to see it: [`Stack::wait_until_healthy`].
    ///
    /// # Panics
    /// When it runs already, or does not get ready.
    pub(crate) async fn start(&mut self) {
        self.start_logging_to(None).await;
    }

    /// The same, with its standard error somewhere else than in [`Bouncer::log_text`].
    pub(crate) async fn start_logging_to(&mut self, stderr: Option<Stdio>) {
        assert!(self.process.as_mut().is_none_or(|process| process.ended().is_some()), "bouncer runs already");
        let mut command = self.command();
        let listen =
            self.socket.as_ref().map_or(self.grpc.address().to_string(), |path| format!("unix:{}", path.display()));
        let kept = ["PATH", "RUST_BACKTRACE", "RUST_LOG"].map(|name| (name, std::env::var_os(name)));
        command
            .env_clear()
            .envs(kept.into_iter().filter_map(|(name, value)| Some((name, value?))))
            .env("BOUNCER_LISTEN__GRPC", listen)
            .env("BOUNCER_LISTEN__ADMIN", self.admin.address().to_string())
            .envs(self.env.iter().cloned())
            .args(["serve", "-c"])
            .arg(&self.config);
        let mut process = match stderr {
            None => Process::spawn("bouncer", &mut command, &self.log, None),
            Some(stderr) => Process::spawn_with("bouncer", command.stdout(Stdio::null()).stderr(stderr), &self.log),
        };
        let url = self.admin_url("/ready");
        eventually("a ready bouncer", READY, async || {
            process.assert_running();
            fetch(&url).await.filter(|answer| answer.status == 200)
        })
        .await;
        self.process = Some(process);
    }

    fn command(&self) -> Command {
        let program = env!("CARGO_BIN_EXE_bouncer");
        let Some((soft, hard)) = self.open_files else { return Command::new(program) };
        let mut command = Command::new("sh");
        let limited = format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$0\" \"$@\"");
        command.args(["-c", &limited, program]);
        command
    }

    /// SIGKILL, then [`Bouncer::start`].
    pub(crate) async fn restart(&mut self) {
        self.kill9();
        self.start().await;
    }

    /// SIGKILL, and gone when this returns.
    pub(crate) fn kill9(&mut self) {
        self.process().kill9();
    }

    /// SIGTERM; [`Bouncer::exit`] waits for what comes of it.
    pub(crate) fn terminate(&mut self) {
        self.process().signal(Signal::SIGTERM);
    }

    /// How it ended.
    ///
    /// # Panics
    /// When it has not ended in time.
    pub(crate) async fn exit(&mut self, within: Duration) -> ExitStatus {
        self.process().exit(within).await
    }

    /// The running process, for signals and figures.
    ///
    /// # Panics
    /// When it was never started.
    pub(crate) fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("bouncer was started")
    }

    /// Everything that all its runs have logged.
    pub(crate) fn log_text(&self) -> String {
        super::process::read(&self.log)
    }

    /// Its metrics.
    pub(crate) async fn metrics(&self) -> Metrics {
        let answer = fetch(&self.admin_url("/metrics")).await.expect("bouncer's admin port answers");
        Metrics::parse(&answer.text())
    }

    /// Waits until it holds so many requests of a tier.
    pub(crate) async fn wait_until_held(&self, tier: &str, count: u32) {
        let what = format!("{count} held requests of {tier}");
        eventually(&what, READY, async || {
            let depth = self.metrics().await.sum("bouncer_queue_depth", &[("pool", "default"), ("tier", tier)]);
            (depth >= f64::from(count)).then_some(())
        })
        .await;
    }

    /// Rewrites its file; the next start reads it.
    pub(crate) fn configure(&self, config: &str) {
        std::fs::write(&self.config, config).expect("a directory of our own");
    }

    pub(crate) fn admin_address(&self) -> SocketAddr {
        self.admin.address()
    }

    pub(crate) fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin.address())
    }
}
