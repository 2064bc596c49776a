//! Visits every state that can be reached, breadth first, so that the first breach found is one of the shortest.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};

use super::properties;
use super::rules::World;
use super::state::State;
use super::steps::{Breach, Step, next};

/// Everything that was visited, when nothing was wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub struct Explored {
    /// Different states.
    pub states: usize,
    /// Ways from one to another.
    pub steps: usize,
}

/// A promise that was not kept, and the steps that lead there.
#[derive(Debug)]
pub struct Broken {
    /// Which promise.
    pub breach: Breach,
    /// One step a line, each with the request or replica it is about, then the state they lead to.
    pub trace: String,
}

/// There is a state from which nothing that may happen ends in rest.
pub const STUCK: Breach = "from here, no state of rest can be reached";

/// Explores a world to its end.
///
/// # Errors
/// The first breach.
///
/// # Panics
/// When there are more states than `most`.
pub fn explore(world: &World, most: usize) -> Result<Explored, Broken> {
    let mut visited = Visited::default();
    visited.meet(State::first(world), None);
    let mut at = 0;
    while at < visited.states.len() {
        assert!(at < most, "more than {most} states");
        let state = visited.states[at];
        if let Some(breach) = properties::holds(world, &state)
            && !world.only_rest
        {
            return Err(Broken { breach, trace: visited.trace(at, None) });
        }
        for next in next(world, &state) {
            if let Some(breach) = next.breach
                && !world.only_rest
            {
                return Err(Broken { breach, trace: visited.trace(at, Some((next.step, &next.state))) });
            }
            visited.meet(next.state, Some((at, next.step)));
        }
        at += 1;
    }
    match visited.first_stuck() {
        Some(at) => Err(Broken { breach: STUCK, trace: visited.trace(at, None) }),
        None => Ok(Explored { states: visited.states.len(), steps: visited.edges.len() }),
    }
}

#[derive(Default)]
struct Visited {
    states: Vec<State>,
    /// By fingerprint.
    numbers: HashMap<u64, u32, BuildHasherDefault<Fold>>,
    hasher: BuildHasherDefault<Fold>,
    /// The step by which a state was first met, and from where.
    origins: Vec<Option<(u32, Step)>>,
    edges: Vec<(u32, u32)>,
}

impl Visited {
    fn meet(&mut self, state: State, origin: Option<(usize, Step)>) {
        let new = u32::try_from(self.states.len()).unwrap();
        let origin = origin.map(|(from, step)| (u32::try_from(from).unwrap(), step));
        let mut print = self.hasher.hash_one(state);
        let number = loop {
            match self.numbers.entry(print) {
                Entry::Occupied(known) if self.states[*known.get() as usize] == state => break *known.get(),
                // Another state with the same fingerprint: this one is kept beside it.
                Entry::Occupied(_) => print = print.wrapping_add(1),
                Entry::Vacant(place) => {
                    place.insert(new);
                    self.states.push(state);
                    self.origins.push(origin);
                    break new;
                }
            }
        };
        if let Some((from, _)) = origin {
            self.edges.push((number, from));
        }
    }

    /// The first state from which no state of rest can be reached.
    fn first_stuck(&mut self) -> Option<usize> {
        self.edges.sort_unstable();
        let mut comes_to_rest: Vec<bool> = self.states.iter().map(properties::at_rest).collect();
        let mut todo: Vec<u32> = (0..).zip(&comes_to_rest).filter(|(_, rests)| **rests).map(|(at, _)| at).collect();
        while let Some(to) = todo.pop() {
            let first = self.edges.partition_point(|(other, _)| *other < to);
            for (_, from) in self.edges[first..].iter().take_while(|(other, _)| *other == to) {
                if !std::mem::replace(&mut comes_to_rest[*from as usize], true) {
                    todo.push(*from);
                }
            }
        }
        comes_to_rest.iter().position(|rests| !rests)
    }

    fn trace(&self, to: usize, last: Option<(Step, &State)>) -> String {
        let mut steps = Vec::new();
        let mut at = to;
        while let Some((from, Step(what, who))) = self.origins[at] {
            steps.push(format!("{who}: {what}"));
            at = from as usize;
        }
        steps.reverse();
        steps.extend(last.map(|(Step(what, who), _)| format!("{who}: {what}")));
        let mut trace = steps.join("\n");
        let _ = write!(trace, "\n{:?}", last.map_or(&self.states[to], |(_, state)| state));
        trace
    }
}

/// A hash of words by multiplication and rotation. States are made by us, so nobody chooses them to collide.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(u64::from(word));
    }

    fn write_u16(&mut self, word: u16) {
        self.write_u64(u64::from(word));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word.cast_unsigned() as u64);
    }
}
