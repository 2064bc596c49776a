//! The command line: parses, loads, runs, and turns errors into exit codes.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use bouncer::app::App;
use bouncer::config::{self, Loaded};
use bouncer::{descriptors, key, probe, telemetry};
use clap::{Parser, Subcommand};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What `sysexits.h` calls a usage error: the configuration is at fault, and starting again will not help.
const EX_USAGE: u8 = 64;
/// What a shell reports for a process that SIGINT ended.
const INTERRUPTED: i32 = 130;

const EXIT_CODES: &str = "\
Exit codes:
  0   done; for `serve`, stopped as asked
  1   it failed: an address in use, for example
  2   the command line is wrong
  64  the configuration is wrong: every fault is listed on standard error
  130 `serve` was interrupted a second time, and ended at once";

/// A gate for Envoy: API keys, rate limits, and a waiting room in front of an upstream's in-flight cap.
#[derive(Debug, Parser)]
#[command(version, about, arg_required_else_help = true, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Judge Envoy's requests until SIGTERM or Ctrl-C.
    ///
    /// When told to stop, it says so in its health and goes on judging for `shutdown.delay`, answers what it holds, and
    /// ends when what is under way has finished, or after `shutdown.drain`. Ctrl-C after that ends it at once.
    Serve {
        #[command(flatten)]
        source: Source,
    },
    /// Read the configuration as `serve` does, and print what would run.
    Check {
        #[command(flatten)]
        source: Source,
    },
    /// Ask a running bouncer whether it is ready: exit code 0 for yes, 1 for no. For container health checks.
    Probe {
        /// What to ask, over plain HTTP.
        #[arg(long, default_value = probe::READY)]
        url: String,
    },
    /// Make API keys, and hash them for the configuration.
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
}

#[derive(Debug, clap::Args)]
struct Source {
    /// The configuration, in YAML. Without it a demonstration set is used, whose keys everybody knows.
    ///
    /// Variables of the environment win over the file: `BOUNCER_` and two underscores between levels, such as
    /// `BOUNCER_REDIS__URL` or `BOUNCER_LISTEN__ADMIN`.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum KeyCommand {
    /// Print a new random key, and on the next line the hash that the configuration may hold in its place.
    New,
    /// Print the hash that the configuration may hold in place of a key.
    Hash {
        /// The key; read from standard input where it is not given, which no other user of the machine can see.
        key: Option<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            report(error.as_ref());
            ExitCode::FAILURE
        }
    }
}

/// One line with everything that led to it.
fn report(error: &(dyn Error + Send + Sync)) {
    let mut line = format!("bouncer: {error}");
    let mut cause = error.source();
    while let Some(next) = cause {
        // Some libraries repeat in an error what its cause says.
        let text = next.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = next.source();
    }
    complain(line);
}

/// Unlike `eprintln!`, no panic where standard error takes nothing; the exit code tells it all the same.
fn complain(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

fn run(command: Command) -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    match command {
        Command::Serve { source } => match load(&source) {
            Ok(loaded) => {
                if let Err(error) = telemetry::start(&loaded.config.log) {
                    report(&error);
                    return Ok(ExitCode::from(EX_USAGE));
                }
                serve(&loaded).map(|()| ExitCode::SUCCESS)
            }
            Err(code) => Ok(code),
        },
        Command::Check { source } => match load(&source) {
            Ok(loaded) => {
                if let Err(error) = telemetry::check(&loaded.config.log) {
                    report(&error);
                    return Ok(ExitCode::from(EX_USAGE));
                }
                print(&loaded)
            }
            Err(code) => Ok(code),
        },
        Command::Probe { url } => {
            probe::probe(&url)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Key { command: KeyCommand::New } => {
            let key = key::new_key()?;
            print(format_args!("{key}\n{}\n", key::hash_line(&key)))
        }
        Command::Key { command: KeyCommand::Hash { key } } => {
            if key.is_none() && io::stdin().is_terminal() {
                complain("type the key, then Enter and Ctrl-D");
            }
            let key = key::read_key(key.as_deref(), io::stdin().lock())?;
            print(format_args!("{}\n", key::hash_line(&key)))
        }
    }
}

/// Unlike `print!`, no panic where nobody reads any more.
fn print(text: impl Display) -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        // As for `check | head`: who stopped reading has what it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        written => Ok(written.map(|()| ExitCode::SUCCESS)?),
    }
}

fn load(source: &Source) -> Result<Loaded, ExitCode> {
    config::load(source.config.as_deref(), config::process_environment()).map_err(|faults| {
        complain(format_args!("bouncer: {faults}"));
        ExitCode::from(EX_USAGE)
    })
}

fn serve(loaded: &Loaded) -> Result<(), Box<dyn Error + Send + Sync>> {
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    descriptors::raise_limit();
    let workers = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    // The main thread runs the admin port and the signals; requests are judged on the workers.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(async {
        let app = App::bind(&loaded.config, workers)?;
        let grpc = app.grpc_address().to_string();
        let admin = app.admin_address()?;
        tracing::info!(%grpc, %admin, workers, version = env!("CARGO_PKG_VERSION"), "listening");
        app.run(stop_signal()?).await.map_err(Into::into)
    });
    // Workers that outlived the drain time end with the process, not before it.
    runtime.shutdown_background();
    served
}

/// Completes at the first SIGTERM or SIGINT. After that a SIGINT ends the process at once.
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
                _ = hangup.recv() => {
                    tracing::warn!("SIGHUP ignored: this version does not reload its configuration");
                }
            }
        }
        tokio::spawn(end_at_once(interrupt));
    })
}

async fn end_at_once(mut interrupt: Signal) {
    interrupt.recv().await;
    tracing::warn!("interrupted again: ending at once");
    std::process::exit(INTERRUPTED);
}
