//! The command line as a person and a script meet it: exit codes, what goes where, and what it says. No Envoy.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::fs::File;
use std::io::{PipeWriter, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use support::client::fetch;
use support::stack::{Bouncer, StackOptions};

/// How a run ended.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs bouncer to its end, with nothing in its environment but these variables.
fn bouncer(arguments: &[&str], environment: &[(&str, &str)], stdin: &str) -> Ended {
    let mut child = Command::new(env!("CARGO_BIN_EXE_bouncer"))
        .args(arguments)
        .env_clear()
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that reads no input may have ended already.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ended { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

fn run(arguments: &[&str]) -> Ended {
    bouncer(arguments, &[], "")
}

fn write(folder: &Path, config: &str) -> String {
    let file = folder.join("bouncer.yaml");
    std::fs::write(&file, config).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn every_level_of_help_names_what_is_below_it() {
    for (arguments, named) in [
        (&["--help"][..], &["serve", "check", "probe", "key", "Exit codes", "64"][..]),
        (&["serve", "--help"], &["--config <FILE>", "BOUNCER_LISTEN__ADMIN", "shutdown.delay"]),
        (&["check", "--help"], &["--config <FILE>"]),
        (&["probe", "--help"], &["--url <URL>", "[default: http://127.0.0.1:9192/ready]"]),
        (&["key", "--help"], &["new", "hash"]),
        (&["key", "new", "--help"], &["key"]),
        (&["key", "hash", "--help"], &["[KEY]", "standard input"]),
    ] {
        let ended = run(arguments);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{arguments:?}");
        for name in named {
            assert!(ended.stdout.contains(name), "{arguments:?} does not say {name:?}:\n{}", ended.stdout);
        }
    }
    assert_eq!(run(&["--version"]).stdout, format!("bouncer {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_command_line_is_told_on_standard_error() {
    for arguments in [&[][..], &["key"], &["bogus"], &["serve", "--bogus"], &["check", "bouncer.yaml"]] {
        let ended = run(arguments);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(ended.stderr.contains("Usage: bouncer"), "{arguments:?}: {}", ended.stderr);
    }
}

#[test]
fn check_prints_what_serve_would_run() {
    let demonstration = "\
configuration  the built-in demonstration set
listen         grpc 127.0.0.1:9191, admin 127.0.0.1:9192
log            level info, format text
shutdown       delay 2s, drain 30s, held refuse
redis          none: limits and slots in this process
rabbitmq       none: waiting room in this process
lease          10s, which changes nothing without redis
credentials    authorization, x-api-key, removed before the upstream
public         /health
tenants        3 with 3 keys
tier           T3: rate 200/s, burst 400, weight 6, queue 1000 for up to 5s, 1 tenant
tier           T2: rate 50/s, burst 100, weight 3, queue 1000 for up to 5s, 1 tenant
tier           T1: rate 10/s, burst 20, weight 1, queue 1000 for up to 5s, 1 tenant
pool           default: max_in_flight 50, order strict
";
    let ended = run(&["check"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let (runs, warnings) = ended.stdout.split_at(demonstration.len().min(ended.stdout.len()));
    assert_eq!(runs, demonstration);
    assert!(warnings.contains("everybody knows its keys"), "{warnings}");
    assert!(warnings.lines().all(|line| line.starts_with("warning  ")), "{warnings}");
    assert!(!ended.stdout.contains("_demo"), "a key is shown");
}

#[test]
fn check_shows_the_file_the_environment_and_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(
        folder.path(),
        "
tiers: [{ name: only, rate: 60/min, queue: { length: 5 } }]
tenants: [{ id: acme, tier: only, keys: [s3cret-key] }]
pools: [{ name: default, max_in_flight: 7 }]
redis: { url: 'redis://user:s3cret@host:6379/1' }
",
    );
    let environment =
        [("MAX_IN_FLIGHT", "9"), ("BOUNCER_LISTEN__GRPC", "unix:/run/bouncer.sock"), ("HOME", "/nowhere")];

    let ended = bouncer(&["check", "--config", &file], &environment, "");

    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    for said in [
        &format!("configuration  {file}")[..],
        "listen         grpc unix:/run/bouncer.sock, admin 127.0.0.1:9192",
        "redis          redis://<redacted>@host:6379/1, prefix bouncer, timeout 50ms, on_outage allow",
        "tier           only: rate 60/min, burst 120, weight 1, queue 5 for up to 5s, 1 tenant",
        "pool           default: max_in_flight 9, order strict",
        "environment    listen.grpc set by BOUNCER_LISTEN__GRPC",
        "environment    pools[0].max_in_flight set by MAX_IN_FLIGHT",
    ] {
        assert!(ended.stdout.lines().any(|line| line == said), "{said:?} is missing in:\n{}", ended.stdout);
    }
    assert!(!ended.stdout.contains("s3cret"));
}

#[test]
fn every_fault_of_a_configuration_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(
        folder.path(),
        "
tiers: [{ name: only, rate: 0/s, queue: { lenght: 5 } }]
tenants: [{ id: acme, tier: other, keys: [s3cret-key] }]
pools: [{ name: default, max_in_flight: 7, order: weighted }]
",
    );
    let environment = [("MAX_QUEUE_WAIT_MS", "soon")];
    for command in ["check", "serve"] {
        let ended = bouncer(&[command, "-c", &file], &environment, "");
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(64), ""), "{command}");
        let mut lines = ended.stderr.lines();
        assert_eq!(lines.next(), Some("bouncer: configuration refused: 5 faults"));
        for path in ["tiers[0].rate: ", "tiers[0].queue.lenght: ", "tenants[0].tier: ", "pools[0].order: "] {
            assert!(ended.stderr.contains(&format!("\n  {path}")), "{path} is missing in:\n{}", ended.stderr);
        }
        assert!(ended.stderr.contains("MAX_QUEUE_WAIT_MS"), "{}", ended.stderr);
        assert_eq!(lines.count(), 5, "{}", ended.stderr);
        assert!(!ended.stderr.contains("s3cret"));
    }
    let missing = run(&["serve", "-c", "/nowhere/bouncer.yaml"]);
    assert_eq!(missing.code, Some(64));
    assert!(missing.stderr.contains("/nowhere/bouncer.yaml"), "{}", missing.stderr);
}

#[test]
fn unusable_log_filter_names_its_variable() {
    for command in ["check", "serve"] {
        let ended = bouncer(&[command], &[("RUST_LOG", "a=b=c")], "");
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(64), ""), "{command}");
        assert!(ended.stderr.starts_with("bouncer: RUST_LOG is not"), "{}", ended.stderr);
        assert_eq!(ended.stderr.matches("error parsing").count(), 1, "{}", ended.stderr);
    }
}

#[test]
fn key_is_new_each_time_and_its_hash_is_the_same_from_an_argument_and_from_standard_input() {
    let (one, other) = (run(&["key", "new"]), run(&["key", "new"]));
    assert_eq!((one.code, one.stderr.as_str()), (Some(0), ""));
    let (key, hash) = one.stdout.trim_end().split_once('\n').unwrap();
    assert_ne!(one.stdout, other.stdout);
    assert!(hash.starts_with("sha256:") && !hash.contains('\n'), "{hash}");

    for (arguments, stdin) in
        [(&["key", "hash", key][..], ""), (&["key", "hash"], key), (&["key", "hash"], &format!("{key}\r\n"))]
    {
        let hashed = bouncer(arguments, &[], stdin);
        assert_eq!((hashed.code, hashed.stdout.trim_end()), (Some(0), hash), "{stdin:?}");
    }
    let empty = bouncer(&["key", "hash"], &[], "\n");
    assert_eq!((empty.code, empty.stderr.as_str()), (Some(1), "bouncer: the key is empty\n"));
    assert_eq!(empty.stdout, "");
}

#[test]
fn nobody_reading_the_output_is_no_panic() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bouncer"));
    let output = command.arg("check").env_clear().stdout(full()).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("bouncer: ") && !said.contains("panicked"), "{said}");
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

/// The writing end of a pipe that nobody reads any more.
fn unread() -> PipeWriter {
    std::io::pipe().unwrap().1
}

#[tokio::test]
async fn log_that_cannot_be_written_stops_nothing() {
    for stderr in [Stdio::from(full()), Stdio::from(unread())] {
        let folder = tempfile::tempdir().unwrap();
        let demonstration = include_str!("../bouncer.yaml");
        let options = StackOptions::new(demonstration).env("BOUNCER_SHUTDOWN__DELAY", "0s");
        let mut bouncer = Bouncer::new(folder.path(), "bouncer", &options);
        bouncer.start_logging_to(Some(stderr)).await;
        // Logged while it serves.
        bouncer.process().signal(Signal::SIGHUP);

        let health = fetch(&bouncer.admin_url("/health")).await;

        assert_eq!(health.unwrap().status, 200);
        bouncer.terminate();
        assert_eq!(bouncer.exit(Duration::from_secs(20)).await.code(), Some(0));
    }
}

#[test]
fn exit_code_is_the_same_where_the_reason_cannot_be_told() {
    for (arguments, code) in [(&["serve", "-c", "/nowhere"][..], 64), (&["check", "-c", "/nowhere"], 64)] {
        for stderr in [Stdio::from(full()), Stdio::from(unread())] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_bouncer"));
            let status = command.args(arguments).env_clear().stdout(Stdio::null()).stderr(stderr).status().unwrap();
            assert_eq!(status.code(), Some(code), "{arguments:?}");
        }
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_bouncer"));
    let status = command.arg("check").env_clear().stdout(full()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

/// Serves on these addresses, or says why not.
fn serve(grpc: SocketAddr, admin: SocketAddr) -> Ended {
    let (grpc, admin) = (grpc.to_string(), admin.to_string());
    bouncer(&["serve"], &[("BOUNCER_LISTEN__GRPC", &grpc), ("BOUNCER_LISTEN__ADMIN", &admin)], "")
}

#[test]
fn address_in_use_is_told_by_its_field() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, free) = (taken.local_addr().unwrap(), "127.0.0.1:0".parse().unwrap());
    for (ended, field) in [(serve(address, free), "listen.grpc"), (serve(free, address), "listen.admin")] {
        assert_eq!(ended.code, Some(1), "{field}");
        let said = format!("bouncer: cannot listen on {address} ({field}): Address already in use (os error 98)\n");
        assert!(ended.stderr.ends_with(&said), "{}", ended.stderr);
    }
}

#[tokio::test]
async fn second_bouncer_on_the_same_ports_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let demonstration = include_str!("../bouncer.yaml");
    let mut first = Bouncer::new(folder.path(), "bouncer", &StackOptions::new(demonstration));
    first.start().await;

    let second = serve(first.grpc_address(), first.admin_address());

    assert_eq!(second.code, Some(1));
    assert!(second.stderr.contains(&format!("{} (listen.admin)", first.admin_address())), "{}", second.stderr);
    first.process().assert_running();
}
