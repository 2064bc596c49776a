//! The waiting room: one queue a tier, first come first served within each. Pure: it knows no clock and no lock.

use std::collections::BTreeMap;

use super::order;

/// Where a waiter stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    rank: usize,
    /// Unique in the room and growing: the order of arrival.
    number: u64,
}

impl Place {
    /// Of the waiter's tier.
    pub fn rank(self) -> usize {
        self.rank
    }
}

/// The queue of the waiter's tier has no place left.
#[derive(Debug, PartialEq, Eq)]
pub struct Full;

/// Queues of waiters, highest tier first.
#[derive(Debug)]
pub struct Room<T> {
    queues: Vec<Queue<T>>,
    next_number: u64,
}

/// Waiters by number. A tree, because a waiter that goes away leaves from the middle: a thousand that leave together
/// must not cost a million steps.
#[derive(Debug)]
struct Queue<T> {
    waiters: BTreeMap<u64, T>,
    length: usize,
}

impl<T> Room<T> {
    /// A room with one queue for each of `lengths`, which are the most that may wait in it.
    pub fn new(lengths: impl IntoIterator<Item = usize>) -> Self {
        let queues = lengths.into_iter().map(|length| Queue { waiters: BTreeMap::new(), length }).collect();
        Self { queues, next_number: 0 }
    }

    /// Takes the last place of a queue.
    ///
    /// # Errors
    /// [`Full`] when there is none left.
    pub fn join(&mut self, rank: usize, waiter: T) -> Result<Place, Full> {
        let queue = &mut self.queues[rank];
        if queue.waiters.len() >= queue.length {
            return Err(Full);
        }
        let number = self.next_number;
        self.next_number += 1;
        queue.waiters.insert(number, waiter);
        Ok(Place { rank, number })
    }

    /// Gives up a place. `None` when its waiter has been called already.
    pub fn leave(&mut self, place: Place) -> Option<T> {
        self.queues[place.rank].waiters.remove(&place.number)
    }

    /// Calls whose turn it is out of the room.
    pub fn call(&mut self) -> Option<T> {
        let rank = order::strict(self.waiting())?;
        self.queues[rank].waiters.pop_first().map(|(_, waiter)| waiter)
    }

    /// Puts a waiter that was called in vain back where it stood, also in a queue that is full by now.
    pub fn put_back(&mut self, place: Place, waiter: T) {
        self.queues[place.rank].waiters.insert(place.number, waiter);
    }

    /// Empties the room, in the order of service.
    pub fn close(&mut self) -> Vec<T> {
        std::iter::from_fn(|| self.call()).collect()
    }

    /// How many wait, by rank.
    pub fn waiting(&self) -> impl Iterator<Item = usize> + '_ {
        self.queues.iter().map(|queue| queue.waiters.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same room, as slowly and plainly as it can be said.
    struct Model {
        lengths: Vec<usize>,
        waiters: Vec<(usize, u32)>,
    }

    impl Model {
        fn call(&mut self) -> Option<u32> {
            let rank = self.waiters.iter().map(|(rank, _)| *rank).min()?;
            let at = self.waiters.iter().position(|(r, _)| *r == rank)?;
            Some(self.waiters.remove(at).1)
        }

        fn join(&mut self, rank: usize, waiter: u32) -> bool {
            let room = self.waiters.iter().filter(|(r, _)| *r == rank).count() < self.lengths[rank];
            if room {
                self.waiters.push((rank, waiter));
            }
            room
        }

        fn leave(&mut self, waiter: u32) -> Option<u32> {
            let at = self.waiters.iter().position(|(_, w)| *w == waiter)?;
            Some(self.waiters.remove(at).1)
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Join(usize),
        Leave(usize),
        Call,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0..3usize).prop_map(Step::Join),
            1 => (0..60usize).prop_map(Step::Leave),
            2 => Just(Step::Call),
        ];
        proptest::collection::vec(step, 0..200)
    }

    proptest! {
        #[test]
        fn any_history_gives_what_the_plain_model_gives(lengths in proptest::collection::vec(0..6usize, 3), steps in steps()) {
            let mut room = Room::new(lengths.iter().copied());
            let mut model = Model { lengths, waiters: Vec::new() };
            let mut places = Vec::new();
            for step in steps {
                match step {
                    Step::Join(rank) => {
                        let waiter = u32::try_from(places.len()).unwrap();
                        let joined = room.join(rank, waiter);
                        prop_assert_eq!(joined.is_ok(), model.join(rank, waiter));
                        places.push(joined.ok());
                    }
                    Step::Leave(at) => {
                        if let Some(Some(place)) = places.get(at) {
                            prop_assert_eq!(room.leave(*place), model.leave(u32::try_from(at).unwrap()));
                        }
                    }
                    Step::Call => prop_assert_eq!(room.call(), model.call()),
                }
                prop_assert_eq!(room.waiting().sum::<usize>(), model.waiters.len());
            }
        }
    }

    #[test]
    fn a_queue_of_length_zero_holds_nobody() {
        let mut room = Room::new([0]);
        assert_eq!(room.join(0, "a"), Err(Full));
    }

    #[test]
    fn a_waiter_that_was_called_in_vain_is_the_next_again_even_if_its_queue_is_full() {
        let mut room = Room::new([1]);
        let place = room.join(0, "first").unwrap();
        assert_eq!(room.call(), Some("first"));
        room.join(0, "second").unwrap();
        room.put_back(place, "first");
        assert_eq!(room.close(), ["first", "second"]);
    }

    #[test]
    fn a_place_given_up_can_be_taken_again_behind_the_others() {
        let mut room = Room::new([2]);
        let first = room.join(0, "first").unwrap();
        room.join(0, "second").unwrap();
        assert_eq!(room.join(0, "third"), Err(Full));
        assert_eq!(room.leave(first), Some("first"));
        assert_eq!(room.leave(first), None, "a place is given up once");
        room.join(0, "third").unwrap();
        assert_eq!(room.close(), ["second", "third"]);
    }
}
