//! What requests wait when Redis stops answering: it is frozen for ten seconds under a steady load.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::http::{Connection, sum};
use crate::stack::{KEY, Kind, PATH, Server, Stack};
use crate::{Options, Result};

const CLIENTS: u32 = 16;
/// Of all clients together.
const PER_SECOND: u32 = 800;
const BEFORE: Duration = Duration::from_secs(5);
const FROZEN: Duration = Duration::from_secs(10);
const AFTER: Duration = Duration::from_secs(5);

/// When a request was due, since the start, and how long after that it was answered.
type Sample = (Duration, Duration);

pub(crate) fn run(options: &Options) -> Result<()> {
    let stack = Stack::start(options, &[("allow", Kind::Allow), ("redis", Kind::Redis { timeout: "50ms" })])?;
    let [allow, server] = &stack.servers[..] else { return Err("two servers were started".into()) };
    let (redis, _) = stack.redis.as_ref().ok_or("redis was started")?;

    let floor = load(allow.port, BEFORE, |_| Ok(()))?;
    let policy =
        |server: &Server| Ok::<_, Box<dyn std::error::Error>>(sum(&server.metrics()?, "bouncer_store_fallback_total"));
    let before = policy(server)?;
    let samples = load(server.port, BEFORE + FROZEN + AFTER, |start| {
        thread::sleep((start + BEFORE).saturating_duration_since(Instant::now()));
        redis.signal(Signal::SIGSTOP)?;
        thread::sleep(FROZEN);
        redis.signal(Signal::SIGCONT)
    })?;
    let by_policy = policy(server)? - before;
    stack.expect_only_successes()?;

    println!("\nRedis frozen for {FROZEN:?} at {PER_SECOND} requests a second; latency in ms");
    println!("when                             p50      p99      max  requests");
    row("always-allow server", &floor, Duration::ZERO..BEFORE);
    row("before", &samples, Duration::ZERO..BEFORE);
    row("first second of the freeze", &samples, BEFORE..BEFORE + Duration::from_secs(1));
    row("rest of the freeze", &samples, BEFORE + Duration::from_secs(1)..BEFORE + FROZEN);
    row("after", &samples, BEFORE + FROZEN..BEFORE + FROZEN + AFTER);
    println!("{by_policy} requests answered by the outage policy, every one of {} with success", samples.len());
    Ok(())
}

fn row(when: &str, samples: &[Sample], phase: std::ops::Range<Duration>) {
    let mut waits: Vec<_> = samples.iter().filter(|(due, _)| phase.contains(due)).map(|(_, wait)| *wait).collect();
    waits.sort_unstable();
    let at = |percent: usize| waits.get((waits.len() * percent / 100).min(waits.len().saturating_sub(1)));
    let ms = |percent| at(percent).map_or(f64::NAN, |wait| wait.as_secs_f64() * 1e3);
    println!("{when:<28} {:>7.2} {:>8.2} {:>8.2} {:>9}", ms(50), ms(99), ms(100), waits.len());
}

/// Asks at a steady pace, also while answers are late, and does `meanwhile`, which is told the start.
fn load(port: u16, time: Duration, meanwhile: impl FnOnce(Instant) -> Result<()>) -> Result<Vec<Sample>> {
    let start = Instant::now() + Duration::from_millis(50);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| thread::spawn(move || ask(port, client, start, time).map_err(|error| error.to_string())))
        .collect();
    meanwhile(start)?;
    let mut samples = Vec::new();
    for client in clients {
        samples.extend(client.join().map_err(|_| "a client panicked")??);
    }
    Ok(samples)
}

/// A request is timed from when it was due, so that one which comes late because of the one before it shows that.
fn ask(port: u16, client: u32, start: Instant, time: Duration) -> Result<Vec<Sample>> {
    let mut connection = Connection::open(port)?;
    let step = Duration::from_secs(1) / PER_SECOND;
    let mut samples = Vec::new();
    for turn in 0.. {
        let due = step * (turn * CLIENTS + client);
        if due >= time {
            break;
        }
        thread::sleep((start + due).saturating_duration_since(Instant::now()));
        connection.ask(PATH, KEY)?;
        let (status, _) = connection.answer()?;
        if status != 200 {
            return Err(format!("answered with {status}").into());
        }
        samples.push((due, (start + due).elapsed()));
    }
    Ok(samples)
}
