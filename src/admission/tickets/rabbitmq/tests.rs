use prometheus::Registry;
use tokio::time::{sleep, timeout};

use super::super::conformance::{Bench, suite};
use super::*;

#[path = "../../../../tests/support/rabbit.rs"]
mod server;
use server::RabbitServer;

struct Broker {
    server: RabbitServer,
    /// To look at queues without a client of ours.
    watcher: lapin::Channel,
    _connection: lapin::Connection,
}

fn lines() -> Lines {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Lines { pools: names(&["default", "batch"]), tiers: names(&["T3", "T2", "T1"]) }
}

impl Bench for Broker {
    type Tickets = RabbitTickets;

    async fn connect(&self, replica: ReplicaId) -> (RabbitTickets, mpsc::Receiver<Grant>) {
        // So that a busy machine does not look like an outage.
        let timeout_of_calls = Duration::from_secs(20);
        let config =
            config::RabbitMq { url: self.server.url(), timeout: timeout_of_calls, prefix: "conformance".to_owned() };
        let registry = Registry::new();
        let stores = StoreMetrics::register(&registry).expect("names are new");
        let metrics = TicketMetrics::register(&registry).expect("names are new");
        let (tickets, grants) = RabbitTickets::new(&config, lines(), replica, &stores, &metrics).expect("a good URL");
        let mut standing = tickets.standing();
        let up = timeout(Duration::from_secs(20), standing.wait_for(|standing| standing.up)).await;
        assert!(up.is_ok(), "{:?}", tickets.status());
        (tickets, grants)
    }

    async fn waiting(&self, line: Line) -> usize {
        let name = Names::new("conformance", &lines()).line(line);
        let passive = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
        let queue = self.watcher.queue_declare(name, passive, lapin::types::FieldTable::default()).await;
        queue.expect("the queue is there").message_count() as usize
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_keeps_all_promises() {
    let server = RabbitServer::start();
    let connection = lapin::Connection::connect(&server.url(), lapin::ConnectionProperties::default()).await.unwrap();
    let watcher = connection.create_channel().await.unwrap();
    suite(&Broker { server, watcher, _connection: connection }).await;
}

#[tokio::test]
async fn a_broker_that_was_never_there_is_down_and_asked_nothing() {
    let registry = Registry::new();
    let stores = StoreMetrics::register(&registry).unwrap();
    let metrics = TicketMetrics::register(&registry).unwrap();
    let url = "amqp://guest:hunter2@127.0.0.1:1/%2f".to_owned();
    let config = config::RabbitMq { url, timeout: Duration::from_secs(1), prefix: "bouncer".to_owned() };
    let (tickets, _grants) = RabbitTickets::new(&config, lines(), ReplicaId(1), &stores, &metrics).unwrap();
    let ticket = Ticket { replica: ReplicaId(1), serial: 1, attempt: 1 };
    let line = Line { pool: 0, rank: 0 };
    assert_eq!(tickets.publish(line, ticket, Duration::from_secs(1)).await, Err(TicketError::Down));
    while tickets.status().last_error.is_none() {
        sleep(Duration::from_millis(1)).await;
    }
    let status = tickets.status();
    assert!(!status.up);
    assert!(!format!("{status:?}").contains("hunter2"), "{status:?}");
    assert_eq!(stores.transitions.with_label_values(&[STORE, "down"]).get(), 1);
    assert_eq!(tickets.next(line).await.map(|taken| taken.is_some()), Err(TicketError::Down));
}
