//! Requests per second, latency and processor time of each server, in alternating rounds.

use std::time::Duration;

use crate::http::sum;
use crate::process::Process;
use crate::stack::{KEY, Kind, PATH, PLENTY, Server, Stack, redis_info};
use crate::wrk::{self, Seen};
use crate::{Options, Result};

const MANY: usize = 32;

/// A busy machine must not look like an outage here.
const PATIENT_REDIS: Kind = Kind::Redis { timeout: "1s" };

/// What a server and those around it did for the load.
#[derive(Default)]
struct Row {
    many: Vec<Seen>,
    one: Vec<Seen>,
    /// Processor time under the load of many: Envoy, the server, Redis, the upstream.
    cpu: [Duration; 4],
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let mut kinds = vec![("none", Kind::Bare), ("allow", Kind::Allow), ("memory", PLENTY), ("redis", PATIENT_REDIS)];
    kinds.extend(options.against.iter().map(|(name, path)| (name.as_str(), Kind::Other(path.clone()))));
    let stack = Stack::start(options, &kinds)?;
    let mut rows: Vec<Row> = stack.servers.iter().map(|_| Row::default()).collect();
    for server in &stack.servers {
        wrk::run(stack.dir.path(), server.port, PATH, KEY, MANY, Duration::from_secs(1))?;
    }
    let before = decisions(&stack)?;
    for round in 0..options.rounds {
        for step in 0..rows.len() {
            // Not always in the same order, or each would always come after the same neighbour.
            let at = (round + step) % rows.len();
            rows[at].measure(&stack, &stack.servers[at], options.time())?;
        }
    }
    stack.expect_only_successes()?;
    for server in stack.servers.iter().filter(|server| matches!(server.kind, Kind::Memory { .. } | Kind::Redis { .. }))
    {
        let metrics = server.metrics()?;
        for unwanted in ["bouncer_abandoned_total", "bouncer_shed_total", "bouncer_store_fallback_total"] {
            let count = sum(&metrics, unwanted);
            if count > 0.0 {
                return Err(format!("{unwanted} of {} is {count}", server.name).into());
            }
        }
    }
    print(options, &stack.servers, &rows);
    let after = decisions(&stack)?;
    println!("\nEVALSHA calls by Redis's own count: {:.4} a request", (after.0 - before.0) / (after.1 - before.1));
    Ok(())
}

impl Row {
    fn measure(&mut self, stack: &Stack, server: &Server, time: Duration) -> Result<()> {
        let before = cpu(stack, server)?;
        self.many.push(wrk::run(stack.dir.path(), server.port, PATH, KEY, MANY, time)?);
        let after = cpu(stack, server)?;
        for (sum, (before, after)) in self.cpu.iter_mut().zip(before.iter().zip(after)) {
            *sum += after.saturating_sub(*before);
        }
        self.one.push(wrk::run(stack.dir.path(), server.port, PATH, KEY, 1, time)?);
        Ok(())
    }

    fn cpu_us(&self, process: usize) -> f64 {
        let requests: f64 = self.many.iter().map(|seen| seen.requests).sum();
        self.cpu[process].as_secs_f64() * 1e6 / requests
    }
}

fn cpu(stack: &Stack, server: &Server) -> Result<[Duration; 4]> {
    let server = server.process.as_ref().map_or(Ok(Duration::ZERO), Process::cpu)?;
    let redis = stack.redis.as_ref().map_or(Ok(Duration::ZERO), |(process, _)| process.cpu())?;
    Ok([stack.envoy.cpu()?, server, redis, stack.upstream.cpu()?])
}

/// How often the script was called, by Redis's own count, and how many requests that was for, by bouncer's.
fn decisions(stack: &Stack) -> Result<(f64, f64)> {
    let (_, port) = stack.redis.as_ref().ok_or("redis was started")?;
    let info = redis_info(*port, "commandstats")?;
    let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")).ok_or("no EVALSHA yet")?;
    let calls = line.split(',').next().ok_or("no number")?.parse()?;
    let server = stack.servers.iter().find(|server| server.kind == PATIENT_REDIS).ok_or("bouncer was started")?;
    Ok((calls, sum(&server.metrics()?, "bouncer_requests_total{")))
}

fn print(options: &Options, servers: &[Server], rows: &[Row]) {
    let floor = servers.iter().position(|server| server.kind == Kind::Allow).map_or(&rows[0], |at| &rows[at]);
    let paired =
        |row: &Row, floor: &Row, figure: fn(&Row) -> &Vec<Seen>, of: fn(f64, f64) -> f64, what: fn(&Seen) -> f64| {
            median(figure(row).iter().zip(figure(floor)).map(|(seen, floor)| of(what(seen), what(floor))))
        };
    println!(
        "\nEnvoy with {} worker(s), medians of {} rounds of {} s",
        options.concurrency, options.rounds, options.seconds
    );
    println!("\n{MANY} connections                                          | processor time, µs a request");
    println!("filter       req/s  of none  of allow   p50 ms   p99 ms |   Envoy   filter    Redis upstream");
    for (server, row) in servers.iter().zip(rows) {
        let many = |what: fn(&Seen) -> f64| median(row.many.iter().map(what));
        let rate = |floor| paired(row, floor, |row| &row.many, |a, b| a / b, |seen| seen.per_second);
        println!(
            "{:<9} {:>8.0} {:>8.3} {:>9.3} {:>8.2} {:>8.2} | {:>7.1} {:>8.1} {:>8.1} {:>8.1}",
            server.name,
            many(|seen| seen.per_second),
            rate(&rows[0]),
            rate(floor),
            many(|seen| seen.p50_ms),
            many(|seen| seen.p99_ms),
            row.cpu_us(0),
            row.cpu_us(1),
            row.cpu_us(2),
            row.cpu_us(3),
        );
    }
    println!("\n1 connection\nfilter     p50 ms  above allow   p99 ms");
    for (server, row) in servers.iter().zip(rows) {
        let one = |what: fn(&Seen) -> f64| median(row.one.iter().map(what));
        let above = paired(row, floor, |row| &row.one, |a, b| a - b, |seen| seen.p50_ms);
        println!(
            "{:<9} {:>7.3} {:>12.3} {:>8.3}",
            server.name,
            one(|seen| seen.p50_ms),
            above,
            one(|seen| seen.p99_ms)
        );
    }
}

/// The middle one, or the mean of the two in the middle.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}
