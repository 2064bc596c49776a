//! `bouncer probe` as a container's health check runs it, against a real bouncer.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::Signal;
use support::ports::Port;
use support::process::Process;
use support::wait::eventually;

const PATIENCE: Duration = Duration::from_secs(30);

fn probe(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bouncer")).arg("probe").args(arguments).output().unwrap()
}

#[tokio::test]
async fn probe_says_yes_while_judging_and_no_from_the_first_moment_of_a_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let (grpc, admin) = (Port::free(), Port::free());
    let url = format!("http://{}/ready", admin.address());
    assert_eq!(probe(&["--url", &url]).status.code(), Some(1), "nothing listens yet");

    let mut command = Command::new(env!("CARGO_BIN_EXE_bouncer"));
    command
        .arg("serve")
        .env("BOUNCER_LISTEN__GRPC", grpc.address().to_string())
        .env("BOUNCER_LISTEN__ADMIN", admin.address().to_string())
        .env("BOUNCER_SHUTDOWN__DELAY", "20s");
    let mut bouncer = Process::spawn("bouncer", &mut command, &dir.path().join("log"), None);
    eventually("a yes", PATIENCE, async || {
        bouncer.assert_running();
        let said = probe(&["--url", &url]);
        said.status.success().then(|| assert!(said.stdout.is_empty() && said.stderr.is_empty(), "{said:?}"))
    })
    .await;

    bouncer.signal(Signal::SIGTERM);
    let no = eventually("a no", PATIENCE, async || {
        let said = probe(&["--url", &url]);
        (!said.status.success()).then_some(said)
    })
    .await;
    assert_eq!(no.status.code(), Some(1));
    let said = String::from_utf8(no.stderr).unwrap();
    assert_eq!(said, format!("bouncer: {} answered \"HTTP/1.0 503 Service Unavailable\"\n", admin.address()));
    assert!(bouncer.ended().is_none(), "it still judges");
}
