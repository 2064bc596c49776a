//! `make run`, as a person has it: ready when it says so, and all gone at Ctrl-C.

mod support;

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::client::{Client, fetch};
use support::metrics::Metrics;
use support::ports::Port;
use support::process::{self, Process};
use support::wait::eventually;

/// What is built already takes a moment; what is not, such as after other compiler flags, takes as long as it takes.
const BUILT: Duration = Duration::from_secs(240);

const PORTS: [&str; 5] = ["ENVOY_PORT", "ENVOY_ADMIN_PORT", "GRPC_PORT", "ADMIN_PORT", "UPSTREAM_PORT"];

/// The script behind `make run`, on these ports.
fn script(ports: &[Port]) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/run.sh"));
    command.env("ENVOY_BIN", support::envoy::binary()).env("PROFILE", "dev");
    for name in ["REDIS_URL", "REPLICAS", "REDIS", "RABBITMQ"] {
        command.env_remove(name);
    }
    for (name, port) in PORTS.iter().zip(ports) {
        command.env(name, port.number().to_string());
    }
    command
}

fn free_ports() -> Vec<Port> {
    PORTS.iter().map(|_| Port::free()).collect()
}

/// The line that says ready, and only when the script has printed everything.
fn ready_lines(stdout: &Path) -> Option<Vec<String>> {
    let text = process::read(stdout);
    let whole = text.matches("curl ").count() == 3 && text.ends_with('\n');
    whole.then(|| text.lines().filter(|line| line.starts_with("ready")).map(str::to_owned).collect())
}

#[tokio::test]
async fn make_run_says_ready_once_serves_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let stdout = folder.path().join("stdout");
    let ports = free_ports();
    let mut running = Process::spawn("run.sh", &mut script(&ports), &folder.path().join("stderr"), Some(&stdout));

    let ready = eventually("a line that says ready", BUILT, async || {
        running.assert_running();
        ready_lines(&stdout)
    })
    .await;
    assert_eq!(ready.len(), 1, "{ready:?}");
    assert!(ready[0].contains(&format!("http://{}", ports[0].address())), "{ready:?}");
    // At once: it is ready when it says so.
    let client = Client::http1(ports[0].address());
    let served = client.get("/anything", Some("key_t3_demo")).await;
    assert_eq!((served.status, served.header("x-ratelimit-limit")), (200, Some("400")));
    assert_eq!(client.get("/anything", None).await.status, 401);

    running.signal(Signal::SIGINT);
    let ended = running.exit(Duration::from_secs(10)).await;

    assert_eq!(ended.code(), Some(0));
    for (name, port) in PORTS.iter().zip(&ports) {
        assert!(TcpStream::connect(port.address()).is_err(), "something still listens on {name}");
    }
}

/// `n` and the three ports after it, for two replicas: two above the first's are the second's.
fn four_ports_in_a_row() -> Vec<Port> {
    let mut ports: Vec<Port> = Vec::new();
    while ports.len() < 4 {
        let port = Port::free();
        if ports.last().is_some_and(|last| last.number() + 1 != port.number()) {
            ports.clear();
        }
        ports.push(port);
    }
    ports
}

/// The replica with this admin port, as a child of the script.
fn replica(script: &Process, admin: u16) -> Pid {
    let pid = script.pid();
    let children = process::read(Path::new(&format!("/proc/{pid}/task/{pid}/children")));
    let variable = format!("BOUNCER_LISTEN__ADMIN=127.0.0.1:{admin}");
    let listens = |pid: &&str| process::read(Path::new(&format!("/proc/{pid}/environ"))).contains(&variable);
    let found = children.split_whitespace().find(listens).expect("a replica on this port");
    Pid::from_raw(found.parse().expect("a number"))
}

#[tokio::test]
async fn make_run_with_replicas_shares_a_redis_and_goes_on_when_one_of_them_dies() {
    let folder = tempfile::tempdir().unwrap();
    let (stdout, stderr) = (folder.path().join("stdout"), folder.path().join("stderr"));
    let (row, mut ports) = (four_ports_in_a_row(), free_ports());
    let mut command = script(&ports);
    let (grpc, admin) = (row[0].number(), row[1].number());
    command.env("GRPC_PORT", grpc.to_string()).env("ADMIN_PORT", admin.to_string());
    let mut running = Process::spawn(
        "run.sh",
        command.env("REPLICAS", "2").env("REDIS", "1").env("RABBITMQ", "1"),
        &stderr,
        Some(&stdout),
    );
    let redis: u16 = eventually("the port of Redis", BUILT, async || {
        running.assert_running();
        process::read(&stdout).split_once("redis-cli -p ")?.1.split_once(' ')?.0.parse().ok()
    })
    .await;

    let client = Client::http1(ports[0].address());
    for _ in 0..10 {
        assert_eq!(client.get("/anything", Some("key_t3_demo")).await.status, 200);
    }
    for port in [&row[1], &row[3]] {
        let url = format!("http://{}/metrics", port.address());
        let metrics = eventually("both servers in use", Duration::from_secs(30), async || {
            let metrics = Metrics::parse(&fetch(&url).await?.text());
            let up = |store| metrics.sum("bouncer_store_up", &[("store", store)]) > 0.0;
            (up("redis") && up("rabbitmq")).then_some(metrics)
        })
        .await;
        assert!(metrics.sum("bouncer_requests_total", &[("tier", "T3"), ("outcome", "forwarded")]) > 0.0);
    }

    kill(replica(&running, row[3].number()), Signal::SIGKILL).unwrap();
    eventually("a word about the lost one", Duration::from_secs(10), async || {
        process::read(&stderr).contains("1 of 2 replicas left").then_some(())
    })
    .await;
    for _ in 0..10 {
        assert_eq!(client.get("/anything", Some("key_t3_demo")).await.status, 200);
    }

    running.signal(Signal::SIGINT);
    assert_eq!(running.exit(Duration::from_secs(10)).await.code(), Some(0));
    ports.extend(row);
    for address in ports.iter().map(Port::address).chain([(Ipv4Addr::LOCALHOST, redis).into()]) {
        assert!(TcpStream::connect(address).is_err(), "something still listens on {address}");
    }
}

#[tokio::test]
async fn make_run_refuses_what_it_cannot_run() {
    let folder = tempfile::tempdir().unwrap();
    let ports = free_ports();
    for (variables, said) in [
        (&[("REPLICAS", "none")][..], "REPLICAS=none is not a number of replicas from 1 to 99\n"),
        (&[("REDIS", "yes")], "REDIS=yes is neither 1 nor 0\n"),
        (
            &[("REDIS", "1"), ("REDIS_URL", "redis://127.0.0.1:1")],
            "REDIS=1 starts a Redis and REDIS_URL names one; choose one of them\n",
        ),
        (&[("RABBITMQ", "1")], "RABBITMQ=1 needs REDIS=1 or REDIS_URL: tickets without shared slots order nothing\n"),
        (&[("REPLICAS", "2"), ("GRPC_PORT", "70000")], "GRPC_PORT=70000 is not a port\n"),
    ] {
        let log = folder.path().join(variables[0].0);
        let mut command = script(&ports);
        let mut refused = Process::spawn("run.sh", command.envs(variables.iter().copied()), &log, None);
        assert_eq!(refused.exit(Duration::from_secs(10)).await.code(), Some(1), "{variables:?}");
        assert!(refused.log_text().ends_with(said), "{:?}", refused.log_text());
    }
}

#[tokio::test]
async fn make_run_names_the_variable_of_a_port_that_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let ports = free_ports();
    let _taken = TcpListener::bind(ports[3].address()).unwrap();
    let mut refused = Process::spawn("run.sh", &mut script(&ports), &folder.path().join("log"), None);

    let ended = refused.exit(Duration::from_secs(10)).await;

    assert_eq!(ended.code(), Some(1));
    let said = format!("port {} is taken; choose another one: make run ADMIN_PORT=...\n", ports[3].number());
    assert_eq!(refused.log_text(), said);
}
