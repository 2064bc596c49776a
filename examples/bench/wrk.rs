//! The load: `wrk`, with a machine-readable last line.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::Result;

/// Latencies in microseconds, to one line of its own.
const REPORT: &str = r#"
done = function(summary, latency)
  local e = summary.errors
  io.write(string.format("bench %.0f %.0f %.0f %.0f %.0f\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99), e.status + e.connect + e.read + e.write + e.timeout))
end
"#;

/// What one run of `wrk` saw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) requests: f64,
    pub(crate) per_second: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

/// Asks for `path` on this port over so many connections, each one request at a time.
///
/// # Errors
/// Also when a single answer was missing or not a success.
pub(crate) fn run(dir: &Path, port: u16, path: &str, key: &str, connections: usize, time: Duration) -> Result<Seen> {
    let script = dir.join("report.lua");
    std::fs::write(&script, REPORT)?;
    let mut command = Command::new("wrk");
    command
        .args(["-t1", "--timeout", "30s", "-c", &connections.to_string(), "-d", &format!("{}s", time.as_secs())])
        .args(["-H", &format!("x-api-key: {key}"), "-s"])
        .arg(script)
        .arg(format!("http://127.0.0.1:{port}{path}"));
    let output = command.output().map_err(|error| format!("cannot run wrk: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("bench ")).ok_or_else(|| format!("wrk said {text}"))?;
    let numbers = line.split(' ').map(str::parse).collect::<std::result::Result<Vec<f64>, _>>()?;
    let [requests, duration_us, p50_us, p99_us, errors] = numbers[..] else { return Err(line.into()) };
    if errors > 0.0 {
        return Err(format!("{errors} of {requests} requests failed on port {port}").into());
    }
    let per_second = requests / (duration_us / 1e6);
    Ok(Seen { requests, per_second, p50_ms: p50_us / 1e3, p99_ms: p99_us / 1e3 })
}
