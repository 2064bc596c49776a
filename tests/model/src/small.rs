//! Collections of a few elements without an allocation, so that a state is plain bytes: cheap to copy, compare and hash.

use std::fmt;
use std::hash::{Hash, Hasher};

/// A set of numbers below 32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Set(u32);

impl Set {
    pub(crate) const EMPTY: Self = Self(0);

    pub(crate) fn of(numbers: impl IntoIterator<Item = u8>) -> Self {
        let mut set = Self::EMPTY;
        for number in numbers {
            set.insert(number);
        }
        set
    }

    pub(crate) fn insert(&mut self, number: u8) {
        self.0 |= 1 << number;
    }

    /// Whether it was there.
    pub(crate) fn remove(&mut self, number: u8) -> bool {
        let had = self.has(number);
        self.0 &= !(1 << number);
        had
    }

    pub(crate) fn has(self, number: u8) -> bool {
        self.0 & (1 << number) != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn but(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn first(self) -> Option<u8> {
        (self.0 != 0).then(|| u8::try_from(self.0.trailing_zeros()).unwrap())
    }

    pub(crate) fn iter(mut self) -> impl Iterator<Item = u8> {
        std::iter::from_fn(move || {
            let first = self.first()?;
            self.remove(first);
            Some(first)
        })
    }
}

impl fmt::Debug for Set {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

/// A list of at most `N`.
#[derive(Clone, Copy)]
pub(crate) struct List<T, const N: usize> {
    items: [T; N],
    len: u8,
}

impl<T: Copy + Default, const N: usize> Default for List<T, N> {
    fn default() -> Self {
        Self { items: [T::default(); N], len: 0 }
    }
}

impl<T: Copy + Default + Ord, const N: usize> List<T, N> {
    pub(crate) fn as_slice(&self) -> &[T] {
        &self.items[..usize::from(self.len)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn insert(&mut self, at: usize, item: T) {
        let len = usize::from(self.len);
        assert!(len < N, "a list of this model holds at most {N}");
        self.items.copy_within(at..len, at + 1);
        self.items[at] = item;
        self.len += 1;
    }

    pub(crate) fn push(&mut self, item: T) {
        self.insert(usize::from(self.len), item);
    }

    /// Adds to a list whose order means nothing.
    pub(crate) fn add(&mut self, item: T) {
        let at = self.as_slice().partition_point(|other| *other < item);
        self.insert(at, item);
    }

    pub(crate) fn remove(&mut self, at: usize) -> T {
        let len = usize::from(self.len);
        let item = self.items[at];
        self.items.copy_within(at + 1..len, at);
        self.len -= 1;
        item
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(T) -> bool) {
        let mut at = 0;
        while at < usize::from(self.len) {
            if keep(self.items[at]) {
                at += 1;
            } else {
                self.remove(at);
            }
        }
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        (self.len > 0).then(|| self.remove(0))
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl<T: Copy + Default + Ord + fmt::Debug, const N: usize> fmt::Debug for List<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

impl<T: Copy + Default + Ord, const N: usize> PartialEq for List<T, N> {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl<T: Copy + Default + Ord, const N: usize> Eq for List<T, N> {}

impl<T: Copy + Default + Ord + Hash, const N: usize> Hash for List<T, N> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_slice().hash(state);
    }
}
