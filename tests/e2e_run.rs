//! `make run`, as a person has it: ready when it says so, and all gone at Ctrl-C.

mod support;

use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use support::client::Client;
use support::ports::Port;
use support::process::{self, Process};
use support::wait::eventually;

/// What is built already takes a moment; what is not, such as after other compiler flags, takes as long as it takes.
const BUILT: Duration = Duration::from_secs(240);

const PORTS: [&str; 5] = ["ENVOY_PORT", "ENVOY_ADMIN_PORT", "GRPC_PORT", "ADMIN_PORT", "UPSTREAM_PORT"];

/// The script behind `make run`, on these ports.
fn script(ports: &[Port]) -> Command {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/run.sh"));
    command.env("ENVOY_BIN", support::envoy::binary()).env("PROFILE", "dev").env_remove("REDIS_URL");
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
