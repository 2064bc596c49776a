//! What bouncer costs, against an `ext_proc` server that allows everything: `make bench`.
//!
//! Everything runs on this machine and ends with this process: the sample upstream, the servers that are compared, a
//! private Redis, and one Envoy with the shipped configuration, one listener for each of them. Rounds alternate between
//! them, so that a busy moment of the machine falls on all. Figures are medians over rounds, ratios medians of the ratios
//! within a round.

mod envoy;
mod held;
mod http;
mod outage;
mod process;
mod speed;
mod stack;
mod wrk;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

/// Whatever goes wrong ends the measurement.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Measures bouncer behind a real Envoy.
#[derive(Debug, Parser)]
struct Options {
    /// What to measure; everything by default.
    #[arg(value_enum)]
    parts: Vec<Part>,
    /// Rounds of the comparison.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seconds of one measurement within a round.
    #[arg(long, default_value_t = 2)]
    seconds: u64,
    /// Worker threads of Envoy.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Requests that are held at once.
    #[arg(long, default_value_t = 10_000)]
    held: usize,
    /// Another build of bouncer to compare with, also with its buckets in memory. May be repeated.
    #[arg(long, value_name = "NAME=PATH", value_parser = named_path)]
    against: Vec<(String, PathBuf)>,
    /// The Envoy.
    #[arg(long, default_value = "envoy")]
    envoy: PathBuf,
    /// Where cargo put bouncer and, in `examples/`, the servers.
    #[arg(long, default_value = "target/release")]
    bin: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Requests per second, latency, processor time.
    Speed,
    /// Memory of held requests.
    Held,
    /// Latency while Redis does not answer.
    Outage,
}

impl Options {
    fn wants(&self, part: Part) -> bool {
        self.parts.is_empty() || self.parts.contains(&part)
    }

    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

fn named_path(text: &str) -> std::result::Result<(String, PathBuf), &'static str> {
    let (name, path) = text.split_once('=').ok_or("expected NAME=PATH")?;
    Ok((name.to_owned(), path.into()))
}

fn main() -> Result<()> {
    let options = Options::parse();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let cores = std::thread::available_parallelism()?;
    println!("{cores} cores, load average before the start {}", load.split(' ').take(3).collect::<Vec<_>>().join(" "));
    if options.wants(Part::Speed) {
        speed::run(&options)?;
    }
    if options.wants(Part::Held) {
        held::run(&options)?;
    }
    if options.wants(Part::Outage) {
        outage::run(&options)?;
    }
    Ok(())
}
