//! Memory of requests that are held, many at once, and whether each of them is served afterwards.

use std::time::{Duration, Instant};

use crate::http::{Connection, sum};
use crate::stack::{KEY, Kind, PATH, Server, Stack};
use crate::{Options, Result};

/// Slots, all taken while the others wait.
const SLOTS: usize = 32;

pub(crate) fn run(options: &Options) -> Result<()> {
    let kind = Kind::Memory { max_in_flight: SLOTS, queue: options.held };
    let stack = Stack::start(options, &[("held", kind)])?;
    let [server] = &stack.servers[..] else { return Err("one server was started".into()) };
    let process = server.process.as_ref().ok_or("a server without a process")?;

    let mut in_flight = Vec::new();
    for _ in 0..SLOTS {
        let mut connection = Connection::open(server.port)?;
        connection.ask("/delay/3600", KEY)?;
        in_flight.push(connection);
    }
    wait_until(server, SLOTS, 0)?;
    let before = process.resident_kib()?;
    let began = Instant::now();
    let mut held = Vec::with_capacity(options.held);
    for _ in 0..options.held {
        let mut connection = Connection::open(server.port)?;
        connection.ask(PATH, KEY)?;
        held.push(connection);
    }
    wait_until(server, SLOTS, options.held)?;
    let during = process.resident_kib()?;
    let opened = began.elapsed();

    // These clients go away, and their slots pass on.
    drop(in_flight);
    let began = Instant::now();
    let mut complete = 0;
    for connection in &mut held {
        complete += usize::from(matches!(connection.answer(), Ok((200, _))));
    }
    let drained = began.elapsed();
    drop(held);
    wait_until(server, 0, 0)?;
    let after = process.resident_kib()?;
    #[expect(clippy::cast_precision_loss, reason = "memory of one machine")]
    let each = during.saturating_sub(before) as f64 / options.held as f64;
    println!(
        "\n{} requests held at once (all within {opened:.1?}): bouncer at {before} KiB before, {during} KiB during, \
         {after} KiB after: {each:.2} KiB each; {complete} served within {drained:.1?}",
        options.held
    );
    if complete == options.held { Ok(()) } else { Err("held requests were lost".into()) }
}

/// Waits until so many are in flight and so many held.
fn wait_until(server: &Server, in_flight: usize, held: usize) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let metrics = server.metrics()?;
        let found = (sum(&metrics, "bouncer_in_flight{"), sum(&metrics, "bouncer_queue_depth{"));
        #[expect(clippy::cast_precision_loss, reason = "counts of connections of one machine")]
        if found == (in_flight as f64, held as f64) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("{found:?} in flight and held, not {in_flight} and {held}").into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
