//! Tickets in a real RabbitMQ: what it keeps, what an operator may do to it, and what happens while it is away.
//!
//! Few tests, as each starts a broker of its own; the parts of one do not depend on each other but for their order.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/proxy.rs"]
mod proxy;
#[path = "support/rabbit.rs"]
mod server;

use std::net::SocketAddr;
use std::time::Duration;

use bouncer::admission::tickets::rabbitmq::{Lines, RabbitTickets};
use bouncer::admission::tickets::{Epoch, Grant, Line, ReplicaId, Sent, Taken, Ticket, TicketError, Tickets};
use bouncer::config::RabbitMq;
use bouncer::metrics::{StoreMetrics, TicketMetrics};
use prometheus::Registry;
use proxy::{Flow, Proxy};
use server::RabbitServer;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
/// What a busy machine may add to a deadline.
const SLACK: Duration = Duration::from_millis(700);
const TOP: Line = Line { pool: 0, rank: 0 };

/// One process of bouncer, as far as tickets go.
struct Replica {
    tickets: RabbitTickets,
    grants: mpsc::Receiver<Grant>,
    id: ReplicaId,
    stores: StoreMetrics,
    counts: TicketMetrics,
}

impl Replica {
    async fn up(id: u64, address: SocketAddr) -> Self {
        Self::with(id, address, &["T3", "T2", "T1"]).await
    }

    async fn with(id: u64, address: SocketAddr, tiers: &[&str]) -> Self {
        let registry = Registry::new();
        let stores = StoreMetrics::register(&registry).unwrap();
        let counts = TicketMetrics::register(&registry).unwrap();
        let config = RabbitMq { url: RabbitServer::url_at(address), timeout: SECOND, prefix: "bouncer".to_owned() };
        let tiers = tiers.iter().map(|name| (*name).to_owned()).collect();
        let lines = Lines { pools: vec!["default".to_owned()], tiers };
        let id = ReplicaId(id);
        let (tickets, grants) = RabbitTickets::new(&config, lines, id, &stores, &counts).unwrap();
        let replica = Self { tickets, grants, id, stores, counts };
        replica.becomes(true, 20 * SECOND).await;
        replica
    }

    async fn becomes(&self, up: bool, within: Duration) -> Epoch {
        let mut standing = self.tickets.standing();
        let waited = timeout(within, standing.wait_for(|standing| standing.up == up)).await;
        let epoch = waited.map(|standing| standing.unwrap().epoch);
        let epoch = epoch.unwrap_or_else(|_| panic!("up = {up} within {within:?}: {:?}", self.tickets.status()));
        // The gauge follows in the next breath.
        let gauge = self.stores.up.with_label_values(&["rabbitmq"]);
        let waited = timeout(SECOND, async {
            while gauge.get() != i64::from(up) {
                sleep(Duration::from_millis(1)).await;
            }
        });
        assert!(waited.await.is_ok());
        epoch
    }

    /// A session later than `epoch`.
    async fn again(&self, epoch: Epoch, within: Duration) -> Epoch {
        let mut standing = self.tickets.standing();
        let waited = timeout(within, standing.wait_for(|standing| standing.up && standing.epoch > epoch)).await;
        waited.unwrap_or_else(|_| panic!("up again within {within:?}: {:?}", self.tickets.status())).unwrap().epoch
    }

    fn epoch(&self) -> Epoch {
        self.tickets.standing().borrow().epoch
    }

    fn ticket(&self, serial: u64, attempt: u32) -> Ticket {
        Ticket { replica: self.id, serial, attempt }
    }

    async fn publish(&self, serial: u64) -> Result<Epoch, TicketError> {
        self.tickets.publish(TOP, self.ticket(serial, 1), MINUTE).await
    }

    async fn grant(&self, to: &Replica, serial: u64) -> Result<Sent, TicketError> {
        self.tickets.grant(to.id, Grant { pool: 0, serial, attempt: 1, from: self.id }, SECOND).await
    }

    async fn take_all(&self, line: Line) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        while let Some(taken) = self.tickets.next(line).await.unwrap() {
            tickets.push(taken.ticket());
            taken.ack();
        }
        tickets
    }

    async fn serials(&self) -> Vec<u64> {
        self.take_all(TOP).await.iter().map(|ticket| ticket.serial).collect()
    }

    fn transitions(&self, to: &str) -> u64 {
        self.stores.transitions.with_label_values(&["rabbitmq", to]).get()
    }

    fn confirms(&self, outcome: &str) -> u64 {
        self.counts.confirms.with_label_values(&[outcome]).get()
    }
}

/// Name, durable, exclusive, auto-delete, arguments; the lines first.
fn queues(server: &RabbitServer) -> (Vec<Vec<String>>, Vec<Vec<String>>) {
    let mut rows = server.rows(&["list_queues", "name", "durable", "exclusive", "auto_delete", "arguments"]);
    rows.sort();
    rows.into_iter().partition(|row| row[0].starts_with("bouncer:"))
}

/// Seldom, as it is `rabbitmqctl` that is asked.
async fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < within, "waited {within:?} in vain for {what}");
        sleep(SECOND).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_may_look_at_the_broker_and_touch_everything_in_it() {
    let server = RabbitServer::start();
    let (a, b) = (Replica::up(0xa, server.address()).await, Replica::up(0xb, server.address()).await);
    every_queue_is_declared_as_any_broker_takes_it(&server);
    two_versions_with_other_bounds_run_side_by_side(&server, &a).await;
    nothing_is_dropped_by_overflow(&a, &b).await;
    a_purged_line_is_empty_and_goes_on(&server, &a, &b).await;
    a_deleted_line_is_a_new_epoch(&server, &a, &b).await;
    a_policy_that_refuses_is_told_and_one_that_drops_is_borne(&server, &a, &b).await;
    connections_that_are_closed_come_back(&server, &a, &b).await;

    assert!(!server.log().contains("PRECONDITION_FAILED"), "a queue was declared in two ways");
    assert!(!server.log().to_lowercase().contains("deprecated"), "something that newer brokers refuse");
}

fn every_queue_is_declared_as_any_broker_takes_it(server: &RabbitServer) {
    let (lines, others) = queues(server);
    let names: Vec<_> = lines.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names, ["bouncer:tickets:default:T1", "bouncer:tickets:default:T2", "bouncer:tickets:default:T3"]);
    for line in &lines {
        assert_eq!(line[1..], ["true", "false", "false", "[{\"x-queue-type\",\"classic\"}]"], "durable, no bounds");
    }
    assert_eq!(others.len(), 2, "one a replica: {others:?}");
    for own in &others {
        assert!(own[0].starts_with("amq.gen-"), "named by the broker: {own:?}");
        assert_eq!(own[1..], ["false", "true", "false", "[]"], "transient only because it is exclusive");
    }
    let mut exchanges = server.rows(&["list_exchanges", "name", "type", "durable", "auto_delete"]);
    exchanges.retain(|row| row[0].starts_with("bouncer"));
    exchanges.sort();
    let expected = ["bouncer:grants", "bouncer:tickets"].map(|name| [name, "direct", "true", "false"]);
    assert_eq!(exchanges, expected);
}

async fn two_versions_with_other_bounds_run_side_by_side(server: &RabbitServer, old: &Replica) {
    // The bounds of a tier reach the broker only as the expiry of each message; its tiers may have another order, and more.
    let new = Replica::with(0xc, server.address(), &["T1", "T4", "T3", "T2"]).await;
    let t3_of_new = Line { pool: 0, rank: 2 };
    old.tickets.publish(TOP, old.ticket(1, 1), 5 * SECOND).await.unwrap();
    new.tickets.publish(t3_of_new, new.ticket(2, 1), 8 * SECOND).await.unwrap();
    assert_eq!(new.take_all(t3_of_new).await, [old.ticket(1, 1), new.ticket(2, 1)]);
    new.tickets.publish(t3_of_new, new.ticket(3, 1), 8 * SECOND).await.unwrap();
    assert_eq!(old.serials().await, [3]);
    assert_eq!((old.transitions("down"), new.transitions("down")), (0, 0));
}

async fn nothing_is_dropped_by_overflow(a: &Replica, b: &Replica) {
    for serial in 0..300 {
        a.publish(serial).await.unwrap();
    }
    assert_eq!(b.serials().await, (0..300).collect::<Vec<_>>(), "the first are the first");
}

async fn a_purged_line_is_empty_and_goes_on(server: &RabbitServer, a: &Replica, b: &Replica) {
    a.publish(1).await.unwrap();
    server.ctl(&["purge_queue", "bouncer:tickets:default:T3"]);
    assert_eq!(b.serials().await, [0; 0]);
    a.publish(2).await.unwrap();
    assert_eq!(b.serials().await, [2]);
}

async fn a_deleted_line_is_a_new_epoch(server: &RabbitServer, a: &Replica, b: &Replica) {
    let before = a.publish(1).await.unwrap();
    server.ctl(&["delete_queue", "bouncer:tickets:default:T3"]);
    assert_eq!(a.publish(2).await, Err(TicketError::Lost), "there is no queue for it");
    a.again(before, 5 * SECOND).await;
    assert_eq!(a.publish(3).await, Ok(a.epoch()));
    assert_eq!(b.serials().await, [3], "a replica that noticed nothing uses the new queue");

    let before = b.epoch();
    server.ctl(&["delete_queue", "bouncer:tickets:default:T3"]);
    assert_eq!(b.tickets.next(TOP).await.map(|taken| taken.is_some()), Err(TicketError::Lost));
    b.again(before, 5 * SECOND).await;
    assert_eq!(b.serials().await, [0; 0]);
}

async fn a_policy_that_refuses_is_told_and_one_that_drops_is_borne(server: &RabbitServer, a: &Replica, b: &Replica) {
    let policy = |definition| server.ctl(&["set_policy", "bound", "^bouncer:", definition, "--apply-to", "queues"]);
    let epoch = a.epoch();
    policy("{\"max-length\":2,\"overflow\":\"reject-publish\"}");
    let mut refused = 0;
    for serial in 0..5 {
        match a.publish(serial).await {
            Ok(_) => {}
            Err(TicketError::Refused) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0);
    assert_eq!(a.confirms("refused"), refused + 1, "with the one whose queue was gone");
    assert_eq!(b.serials().await.len() as u64, 5 - refused);
    policy("{\"max-length\":2}");
    for serial in 0..5 {
        a.publish(serial).await.unwrap();
    }
    assert_eq!(b.serials().await, [3, 4], "whom the broker forgot is for the store of slots to remember");
    assert_eq!(a.epoch(), epoch, "no outage");
    server.ctl(&["clear_policy", "bound"]);
}

async fn connections_that_are_closed_come_back(server: &RabbitServer, a: &Replica, b: &Replica) {
    a.publish(1).await.unwrap();
    let (of_a, of_b) = (a.epoch(), b.epoch());
    server.ctl(&["close_all_connections", "by the operator"]);
    a.again(of_a, 5 * SECOND).await;
    b.again(of_b, 5 * SECOND).await;
    assert_eq!(b.serials().await, [1], "a queue outlives the connection that filled it");
    assert_eq!(a.grant(b, 7).await, Ok(Sent::Queued));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_does_not_answer_is_down_and_comes_back_in_a_new_epoch() {
    let mut server = RabbitServer::start();
    let a = Replica::up(0xa, server.address()).await;
    let mut b = Replica::up(0xb, server.address()).await;
    a_paused_broker_is_down_after_one_call(&server, &a).await;
    a_blocked_broker_is_down_and_its_connections_do_not_pile_up(&server, &a).await;
    for crash in [false, true] {
        a_restarted_broker_is_found_again(&mut server, &a, &mut b, crash).await;
    }
    assert_eq!(a.transitions("up"), a.transitions("down") + 1);
    let errors = |kind| a.stores.errors.with_label_values(&["rabbitmq", kind]).get();
    assert!(errors("timeout") > 0 && errors("connection") > 0 && errors("reply") > 0);
}

async fn a_paused_broker_is_down_after_one_call(server: &RabbitServer, a: &Replica) {
    let before = a.epoch();
    server.pause();
    let began = Instant::now();
    assert_eq!(a.publish(1).await, Err(TicketError::Timeout(SECOND)));
    assert!(began.elapsed() < SECOND + SLACK, "{:?}", began.elapsed());
    a.becomes(false, SLACK).await;
    let began = Instant::now();
    for _ in 0..100 {
        assert_eq!(a.publish(1).await, Err(TicketError::Down));
        assert_eq!(a.tickets.next(TOP).await.map(drop), Err(TicketError::Down));
    }
    assert!(began.elapsed() < SLACK, "a broker that is down is not asked: {:?}", began.elapsed());
    server.resume();
    a.again(before, 5 * SECOND).await;
    // What was sent before the pause may have arrived.
    a.take_all(TOP).await;
    a.publish(2).await.unwrap();
    assert_eq!(a.serials().await, [2]);
}

async fn a_blocked_broker_is_down_and_its_connections_do_not_pile_up(server: &RabbitServer, a: &Replica) {
    let before = a.epoch();
    server.memory_alarm(true);
    let began = Instant::now();
    while let Ok(epoch) = a.publish(1).await {
        assert_eq!(epoch, before);
        assert!(began.elapsed() < 5 * SECOND, "publishers are blocked");
    }
    a.becomes(false, SECOND + SLACK).await;
    assert!(a.tickets.status().last_error.unwrap().contains("block"), "{:?}", a.tickets.status());
    let connections = server.rows(&["list_connections", "pid"]).len();
    sleep(3 * SECOND).await;
    assert_eq!(a.publish(2).await, Err(TicketError::Down));
    assert!(server.rows(&["list_connections", "pid"]).len() <= connections, "no connection after connection");
    server.memory_alarm(false);
    a.again(before, 5 * SECOND).await;
    a.take_all(TOP).await;
    a.publish(3).await.unwrap();
    assert_eq!(a.serials().await, [3]);
}

async fn a_restarted_broker_is_found_again(server: &mut RabbitServer, a: &Replica, b: &mut Replica, crash: bool) {
    let epochs = (a.publish(1).await.unwrap(), b.becomes(true, 5 * SECOND).await);
    if crash {
        server.kill();
    } else {
        server.stop();
    }
    a.becomes(false, SECOND).await;
    b.becomes(false, SECOND).await;
    assert_eq!(a.publish(2).await, Err(TicketError::Down));
    server.restart();
    a.again(epochs.0, 5 * SECOND).await;
    b.again(epochs.1, 5 * SECOND).await;
    assert_eq!(a.serials().await, [0; 0], "tickets are transient");
    a.tickets.publish(TOP, a.ticket(1, 2), MINUTE).await.unwrap();
    assert_eq!(b.take_all(TOP).await, [a.ticket(1, 2)]);
    assert_eq!(a.grant(b, 7).await, Ok(Sent::Queued));
    assert_eq!(timeout(5 * SECOND, b.grants.recv()).await.unwrap().unwrap().serial, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_network_that_breaks_loses_no_more_than_it_must() {
    let server = RabbitServer::start();
    let proxy = Proxy::start(server.address()).await;
    let mut a = Replica::up(0xa, proxy.address()).await;
    let b = Replica::up(0xb, server.address()).await;
    a_swallowed_confirm_is_an_unknown_outcome_in_time(&proxy, &a, &b).await;
    what_was_in_hand_is_back_when_the_connection_ends(&proxy, &a, &b).await;
    a_delay_below_the_timeout_is_no_outage(&proxy, &a).await;
    grants_come_while_the_old_connection_holds_its_queue(&server, &proxy, &mut a, &b).await;
    an_idle_connection_without_a_peer_is_noticed(&proxy, &a).await;
    queues_do_not_grow_over_reconnects_and_are_gone_with_their_replicas(&server, &proxy, a, b).await;
}

async fn a_swallowed_confirm_is_an_unknown_outcome_in_time(proxy: &Proxy, a: &Replica, b: &Replica) {
    let before = a.epoch();
    proxy.to_client(Flow::Swallow);
    let began = Instant::now();
    assert_eq!(a.publish(1).await, Err(TicketError::Timeout(SECOND)));
    assert!(began.elapsed() < SECOND + SLACK, "{:?}", began.elapsed());
    assert_eq!(a.confirms("unknown"), 1);
    proxy.to_client(Flow::Pass);
    a.again(before, 5 * SECOND).await;
    a.tickets.publish(TOP, a.ticket(1, 2), MINUTE).await.unwrap();
    assert_eq!(b.take_all(TOP).await, [a.ticket(1, 1), a.ticket(1, 2)], "the first had arrived, and is stale");
}

async fn what_was_in_hand_is_back_when_the_connection_ends(proxy: &Proxy, a: &Replica, b: &Replica) {
    b.publish(1).await.unwrap();
    let before = a.epoch();
    let taken = a.tickets.next(TOP).await.unwrap().unwrap();
    assert_eq!(b.tickets.next(TOP).await.unwrap().map(|taken| taken.ticket()), None);
    proxy.cut();
    let began = Instant::now();
    loop {
        if let Some(taken) = b.tickets.next(TOP).await.unwrap() {
            taken.ack();
            break;
        }
        assert!(began.elapsed() < 2 * SECOND, "the ticket came back");
    }
    let after = a.again(before, 5 * SECOND).await;
    // Settled on a channel that has ended: it harms nobody.
    taken.ack();
    assert_eq!(a.publish(2).await, Ok(after));
    assert_eq!(a.serials().await, [2]);
}

async fn a_delay_below_the_timeout_is_no_outage(proxy: &Proxy, a: &Replica) {
    proxy.both(Flow::Delay(Duration::from_millis(100)));
    assert_eq!(a.publish(1).await, Ok(a.epoch()));
    assert_eq!(a.serials().await, [1]);
    proxy.both(Flow::Pass);
}

async fn grants_come_while_the_old_connection_holds_its_queue(
    server: &RabbitServer,
    proxy: &Proxy,
    a: &mut Replica,
    b: &Replica,
) {
    let before = a.epoch();
    proxy.both(Flow::Swallow);
    assert!(a.publish(1).await.is_err());
    a.becomes(false, SLACK).await;
    proxy.both(Flow::Pass);
    a.again(before, 5 * SECOND).await;
    assert_eq!(queues(server).1.len(), 3, "the broker does not know yet that the old connection has ended");
    assert_eq!(b.grant(a, 7).await, Ok(Sent::Queued));
    assert_eq!(timeout(SECOND, a.grants.recv()).await.unwrap().unwrap().serial, 7);
    a.take_all(TOP).await;
    eventually("the end of the old connection", 20 * SECOND, || queues(server).1.len() == 2).await;
}

async fn an_idle_connection_without_a_peer_is_noticed(proxy: &Proxy, a: &Replica) {
    let before = a.becomes(true, SECOND).await;
    proxy.both(Flow::Swallow);
    let began = Instant::now();
    a.becomes(false, 12 * SECOND).await;
    assert!(began.elapsed() > 2 * SECOND, "not by a call, as there was none");
    proxy.both(Flow::Pass);
    a.again(before, 5 * SECOND).await;
}

async fn queues_do_not_grow_over_reconnects_and_are_gone_with_their_replicas(
    server: &RabbitServer,
    proxy: &Proxy,
    a: Replica,
    b: Replica,
) {
    for _ in 0..10 {
        let before = a.epoch();
        proxy.cut();
        a.again(before, 5 * SECOND).await;
    }
    a.publish(1).await.unwrap();
    assert_eq!(b.serials().await, [1]);
    eventually("one queue a replica", 20 * SECOND, || queues(server).1.len() == 2).await;
    assert_eq!(queues(server).0.len(), 3);
    let unsettled = server.rows(&["list_queues", "messages_unacknowledged"]);
    assert!(unsettled.iter().all(|row| row[0] == "0"), "{unsettled:?}");

    // As a kill does it: the connections end, and nobody says goodbye.
    let many = futures_util::future::join_all((0..8).map(|n| Replica::up(0x100 + n, proxy.address()))).await;
    proxy.accept(false);
    proxy.cut();
    let began = Instant::now();
    while b.grant(&many[7], 1).await != Ok(Sent::Unroutable) {
        assert!(began.elapsed() < 2 * SECOND, "a queue outlived its replica");
    }
    assert!(b.counts.grants_lost.get() > 0);
    drop((a, many));
    drop(b);
    eventually("the end of all, of one that was up as well", 5 * SECOND, || queues(server).1.is_empty()).await;
}
