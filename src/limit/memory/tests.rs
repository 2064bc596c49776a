use std::sync::Arc;

use super::super::conformance::{Bench, charge, conformance, quota};
use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Paused(Arc<MemoryLimiter>);

impl Bench for Paused {
    type Limiter = MemoryLimiter;

    fn limiter(&self) -> Arc<MemoryLimiter> {
        Arc::clone(&self.0)
    }

    async fn advance(&self, by: Duration) {
        tokio::time::advance(by).await;
    }
}

conformance!(Paused::default(), tokio::test(start_paused = true));

#[tokio::test(start_paused = true)]
async fn idle_buckets_are_forgotten_as_calls_go_by() {
    let limiter = MemoryLimiter::default();
    let quota = quota(10, SECOND, 10);
    for i in 0..1000 {
        limiter.take_now(&[charge(&BucketKey::tenant(&i.to_string()), quota, 1)]);
    }
    assert_eq!(limiter.buckets_in_use(), 1000);
    tokio::time::advance(SECOND).await;
    assert_eq!(limiter.buckets_in_use(), 0);
    let busy = BucketKey::tenant("busy");
    for _ in 0..501 {
        limiter.take_now(&[charge(&busy, quota, 10)]);
    }
    let book = limiter.lock();
    assert_eq!((book.buckets.len(), book.round.len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_names_keeps_no_more_than_twice_what_is_in_use() {
    let limiter = MemoryLimiter::default();
    let quota = quota(100, SECOND, 10);
    for i in 0..20_000 {
        limiter.take_now(&[charge(&BucketKey::tenant(&i.to_string()), quota, 1)]);
        // Each name is in use for 10 ms: a hundred at a time.
        tokio::time::advance(Duration::from_micros(100)).await;
        assert!(limiter.lock().buckets.len() <= 210, "after {i} names");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_refused_makes_no_bucket() {
    let limiter = MemoryLimiter::default();
    limiter.take_now(&[charge(&BucketKey::tenant("dear"), quota(1, SECOND, 1), 2)]);
    assert_eq!(limiter.lock().buckets.len(), 0);
}

#[test]
fn threads_share_one_budget() {
    let limiter = MemoryLimiter::default();
    let key = BucketKey::tenant("threads");
    let quota = quota(1, 86_400 * SECOND, 1000);
    let granted: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let take = || matches!(limiter.take_now(&[charge(&key, quota, 1)]), Take::Taken { .. });
                scope.spawn(move || (0..500).filter(|_| take()).count())
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("no panic")).sum()
    });
    assert_eq!(granted, 1000);
}
