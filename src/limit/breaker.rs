//! When a store counts as down: state, event and time in, state out.

use std::time::Duration;

use tokio::time::Instant;

/// So many failures in a row open the breaker.
const FAILURES: u32 = 3;

/// The pauses between two tries to reach a store that is down.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Whether calls are made.
#[derive(Debug)]
pub struct Breaker {
    state: State,
    /// When `state` last changed between up and down.
    since: Instant,
    epoch: Epoch,
}

/// Numbers the times between changes: a call that was begun in another one says nothing about this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epoch(u64);

impl Epoch {
    /// Whether calls are made in it.
    pub fn is_open(self) -> bool {
        self.0 % 2 == 1
    }

    fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing is known yet. Calls are made: a store that works answers the first request.
    Untried { failures: u32 },
    /// Calls are made.
    Closed { failures: u32 },
    /// No calls are made. Connections are tried, each with a probe.
    Open,
}

/// What an event changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Up, from the start or after being down for so long.
    Up(Duration),
    /// Down.
    Down,
}

impl Breaker {
    /// A breaker for a store that nobody has tried yet.
    pub fn new(now: Instant) -> Self {
        Self { state: State::Untried { failures: 0 }, since: now, epoch: Epoch(0) }
    }

    /// The time between changes that it is now.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether the store is known to work.
    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// When it came to be as [`Breaker::is_up`] says.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// A call begun in `epoch` was answered.
    pub fn answered(&mut self, epoch: Epoch) {
        if epoch != self.epoch {
            return;
        }
        self.state = match self.state {
            State::Untried { .. } => State::Untried { failures: 0 },
            State::Closed { .. } => State::Closed { failures: 0 },
            State::Open => State::Open,
        };
    }

    /// A call begun in `epoch` failed.
    pub fn failed(&mut self, epoch: Epoch, now: Instant) -> Option<Change> {
        if epoch != self.epoch {
            return None;
        }
        let next = match self.state {
            // Untried, Closed → Open on the last failure that is borne.
            State::Untried { failures } | State::Closed { failures } if failures + 1 >= FAILURES => State::Open,
            State::Untried { failures } => State::Untried { failures: failures + 1 },
            State::Closed { failures } => State::Closed { failures: failures + 1 },
            State::Open => State::Open,
        };
        self.enter(next, now)
    }

    /// A call begun in `epoch` was answered by a server that can do none of them, so another one must be found.
    pub fn unfit(&mut self, epoch: Epoch, now: Instant) -> Option<Change> {
        // Untried, Closed → Open.
        if epoch == self.epoch { self.enter(State::Open, now) } else { None }
    }

    /// The store could not be reached, or did not pass the probe.
    pub fn unreachable(&mut self, now: Instant) -> Option<Change> {
        // Untried, Closed, Open → Open.
        self.enter(State::Open, now)
    }

    /// A probe did what a request does.
    pub fn proved(&mut self, now: Instant) -> Option<Change> {
        // Untried, Closed, Open → Closed. Failures of requests are forgiven by requests only, so Closed stays as it is.
        let next = match self.state {
            State::Untried { .. } | State::Open => State::Closed { failures: 0 },
            closed @ State::Closed { .. } => closed,
        };
        self.enter(next, now)
    }

    fn enter(&mut self, next: State, now: Instant) -> Option<Change> {
        let before = std::mem::replace(&mut self.state, next);
        let change = match (before, next) {
            (State::Untried { .. } | State::Closed { .. }, State::Open) => {
                self.epoch = self.epoch.next();
                Change::Down
            }
            (State::Open, State::Closed { .. }) => {
                self.epoch = self.epoch.next();
                Change::Up(now - self.since)
            }
            (State::Untried { .. }, State::Closed { .. }) => Change::Up(now - self.since),
            _ => return None,
        };
        self.since = now;
        Some(change)
    }
}

/// How long to wait before the next try to reach the store.
#[derive(Debug, Default)]
pub struct Backoff {
    tries: u32,
}

impl Backoff {
    /// A connection that lasts this long ends a series of tries. One that works at first and fails again, over and over,
    /// is tried at the longest pause.
    pub const STEADY: Duration = Duration::from_secs(5);

    /// The pause before the next try, the last one having lasted `lived` (zero if it failed at once).
    pub fn pause(&mut self, lived: Duration) -> Duration {
        if lived >= Self::STEADY {
            self.tries = 0;
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.tries.min(8)).min(LONGEST_PAUSE);
        self.tries = self.tries.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> (Breaker, Instant) {
        let now = Instant::now();
        let mut breaker = Breaker::new(now);
        assert_eq!(breaker.proved(now), Some(Change::Up(Duration::ZERO)));
        (breaker, now)
    }

    #[test]
    fn three_failures_in_a_row_open_it_and_two_do_not() {
        let (mut breaker, now) = breaker();
        let epoch = breaker.epoch();
        assert_eq!(breaker.failed(epoch, now), None);
        assert_eq!(breaker.failed(epoch, now), None);
        breaker.answered(epoch);
        assert_eq!(breaker.failed(epoch, now), None);
        assert_eq!(breaker.failed(epoch, now), None);
        assert!(breaker.is_up());
        assert_eq!(breaker.failed(epoch, now), Some(Change::Down));
        assert!(breaker.epoch().is_open());
    }

    #[test]
    fn an_unreachable_store_opens_it_at_once_and_tells_once() {
        let (mut breaker, now) = breaker();
        assert_eq!(breaker.unreachable(now), Some(Change::Down));
        assert_eq!(breaker.unreachable(now), None);
    }

    #[test]
    fn a_server_that_can_do_nothing_opens_it_at_once_unless_it_was_asked_before_the_outage() {
        let (mut breaker, now) = breaker();
        let before = breaker.epoch();
        assert_eq!(breaker.unfit(before, now), Some(Change::Down));
        breaker.proved(now);
        assert_eq!(breaker.unfit(before, now), None);
        assert!(breaker.is_up());
    }

    #[test]
    fn a_probe_closes_it_and_tells_how_long_it_was_open() {
        let (mut breaker, now) = breaker();
        breaker.unreachable(now);
        let later = now + Duration::from_secs(3);
        assert_eq!(breaker.proved(later), Some(Change::Up(Duration::from_secs(3))));
        assert_eq!(breaker.proved(later), None);
        assert!(!breaker.epoch().is_open());
    }

    #[test]
    fn calls_begun_before_the_outage_do_not_reopen_it_afterwards() {
        let (mut breaker, now) = breaker();
        let before = breaker.epoch();
        breaker.unreachable(now);
        breaker.proved(now);
        for _ in 0..10 {
            assert_eq!(breaker.failed(before, now), None);
        }
        assert!(breaker.is_up());
    }

    #[test]
    fn a_store_that_was_never_reached_is_not_up_yet_asked_until_it_fails() {
        let now = Instant::now();
        let mut breaker = Breaker::new(now);
        assert!(!breaker.is_up());
        assert!(!breaker.epoch().is_open());
        let epoch = breaker.epoch();
        breaker.failed(epoch, now);
        breaker.failed(epoch, now);
        assert_eq!(breaker.failed(epoch, now), Some(Change::Down));
    }

    #[test]
    fn a_probe_does_not_forgive_what_requests_suffered() {
        let (mut breaker, now) = breaker();
        let epoch = breaker.epoch();
        breaker.failed(epoch, now);
        breaker.failed(epoch, now);
        breaker.proved(now);
        assert_eq!(breaker.failed(epoch, now), Some(Change::Down));
    }

    #[test]
    fn pauses_grow_to_half_a_second_and_start_again_after_a_steady_connection() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..6).map(|_| backoff.pause(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 500, 500, 500]);
        assert_eq!(backoff.pause(Duration::from_secs(1)).as_millis(), 500, "a flapping store is not hurried");
        assert_eq!(backoff.pause(Duration::from_secs(5)).as_millis(), 100);
    }
}
