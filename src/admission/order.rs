//! The order of service: whose turn it is, as a pure choice over what waits.

/// Strict order: the highest tier that has a waiter.
///
/// `waiting[rank]` is the number of requests that wait in the tier of that rank; rank 0 is the highest.
pub fn strict(waiting: impl IntoIterator<Item = usize>) -> Option<usize> {
    waiting.into_iter().position(|waiters| waiters > 0)
}

#[cfg(test)]
mod tests {
    use super::strict;

    #[test]
    fn the_highest_tier_with_a_waiter_is_next() {
        assert_eq!(strict([0, 2, 5]), Some(1));
        assert_eq!(strict([1, 2, 5]), Some(0));
        assert_eq!(strict([0, 0, 1]), Some(2));
    }

    #[test]
    fn nobody_is_next_where_nobody_waits() {
        assert_eq!(strict([0, 0, 0]), None);
        assert_eq!(strict([]), None);
    }
}
