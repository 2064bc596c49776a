//! The sample upstream, in a thread and runtime of its own, so that a busy test does not slow it down.

#[path = "../../examples/upstream/record.rs"]
mod record;
#[path = "../../examples/upstream/server.rs"]
mod server;

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::TcpSocket;
use tokio::sync::oneshot;

use self::record::Record;
pub(crate) use self::record::{Entry, Snapshot};
use super::ports::Port;

/// What `/stream/{count}/…` answers in all.
pub(crate) fn chunks(count: u32) -> String {
    (0..count).fold(String::new(), |text, n| text + &format!("chunk {n}\n"))
}

/// Stopped on drop. Its record lives on through [`Upstream::stop`] and [`Upstream::start`].
pub(crate) struct Upstream {
    port: Port,
    record: Record,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Upstream {
    /// Listens when this returns.
    pub(crate) fn new() -> Self {
        let mut upstream = Self { port: Port::free(), record: Record::default(), running: None };
        upstream.start();
        upstream
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// Listens again after a [`Upstream::stop`], on the same port.
    pub(crate) fn start(&mut self) {
        assert!(self.running.is_none(), "the upstream runs already");
        let (stop, stopped) = oneshot::channel();
        let (started, listening) = std::sync::mpsc::channel();
        let (address, record) = (self.address(), self.record.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let socket = TcpSocket::new_v4().expect("a socket");
                socket.set_reuseaddr(true).expect("an option that every socket has");
                socket.bind(address).expect("a port of our own");
                let listener = socket.listen(16_384).expect("a bound socket");
                started.send(()).expect("someone waits for this");
                let stop = async {
                    // An error means that the sender was dropped, which ends the upstream as well.
                    let _ = stopped.await;
                };
                server::serve(listener, record, stop).await;
            });
        });
        listening.recv().expect("the upstream listens");
        self.running = Some((stop, thread));
    }

    /// Closes the port and every connection.
    pub(crate) fn stop(&mut self) {
        let Some((stop, thread)) = self.running.take() else { return };
        // Fails only when the thread has ended; then `join` tells how.
        let _ = stop.send(());
        let ended = thread.join();
        assert!(ended.is_ok() || std::thread::panicking(), "the upstream panicked");
    }

    pub(crate) fn record(&self) -> Snapshot {
        self.record.snapshot()
    }

    /// Tells the time on the record's clock: microseconds, as in its entries.
    pub(crate) fn clock(&self) -> impl Fn() -> u64 + Clone + Send + Sync + 'static {
        let record = self.record.clone();
        move || record.now_us()
    }

    pub(crate) fn reset_record(&self) {
        self.record.reset();
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Snapshot {
    /// The ids of the listed requests in the order in which they arrived.
    pub(crate) fn order(&self) -> Vec<&str> {
        self.requests.iter().map(|entry| entry.id.as_str()).collect()
    }

    /// The most *listed* requests in flight together, where an aborted one ended up to `grace` before the upstream
    /// noticed: an abort ends a request, and the news of it takes a moment.
    pub(crate) fn peak(&self, grace: Duration) -> usize {
        let grace = micros(grace);
        self.peak_until(|entry| match entry.ended_us {
            None => u64::MAX,
            Some(end) if entry.aborted => end.saturating_sub(grace),
            Some(end) => end,
        })
    }

    /// The most listed requests in flight together, where `end` says until which instant each of them counts.
    pub(crate) fn peak_until(&self, end: impl Fn(&Entry) -> u64) -> usize {
        // At the same instant, what ends makes room for what starts.
        let mut changes: Vec<_> = self
            .requests
            .iter()
            .flat_map(|entry| [(entry.started_us, 1), (end(entry).max(entry.started_us), -1_isize)])
            .collect();
        changes.sort_unstable();
        let (mut now, mut peak) = (0_isize, 0_isize);
        for (_, change) in changes {
            now += change;
            peak = peak.max(now);
        }
        usize::try_from(peak).expect("never negative, as a request starts before it ends")
    }
}

/// In the unit of the record.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("a short time")
}

#[test]
fn peak_counts_an_abort_until_the_grace_before_its_notice() {
    let entry = |started_us, ended_us, aborted| Entry { id: String::new(), started_us, ended_us, aborted };
    let record = |requests| Snapshot { requests, ..Snapshot::default() };
    let grace = Duration::from_micros(100);
    assert_eq!(record(vec![entry(0, Some(150), true), entry(50, None, false)]).peak(grace), 1);
    assert_eq!(record(vec![entry(0, Some(151), true), entry(50, None, false)]).peak(grace), 2);
    assert_eq!(record(vec![entry(0, Some(51), false), entry(50, None, false)]).peak(grace), 2);
    assert_eq!(record(vec![entry(0, Some(50), false), entry(50, None, false)]).peak(grace), 1);
    assert_eq!(record(vec![]).peak(grace), 0);
}
