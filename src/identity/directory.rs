//! Every key that is known, and whose it is.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::{KeyHash, Tenant};

/// All keys, as one immutable value: a reload builds another one.
///
/// ```
/// # use bouncer::{config::Config, identity::directory::Directory};
/// # fn of(config: &Config) -> Directory {
/// Directory::new(config.tenants.iter().flat_map(|owner| owner.keys.iter().map(|key| (*key, owner.tenant.clone()))))
/// # }
/// ```
pub struct Directory {
    tenants: HashMap<KeyHash, Arc<Tenant>, BuildHasherDefault<DigestHasher>>,
}

impl Directory {
    /// Of a key that is given twice, the last tenant stays; the configuration refuses such a key.
    pub fn new(keys: impl IntoIterator<Item = (KeyHash, Arc<Tenant>)>) -> Self {
        Self { tenants: keys.into_iter().collect() }
    }

    /// The owner of a key.
    ///
    /// One step of hashing (which the digest has already done) and one comparison or a few, however many keys there
    /// are.
    pub fn find(&self, key: &KeyHash) -> Option<&Arc<Tenant>> {
        self.tenants.get(key)
    }

    /// How many keys are known.
    pub fn len(&self) -> usize {
        self.tenants.len()
    }

    /// Whether no key is known, so that everybody is refused.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory").field("keys", &self.len()).finish_non_exhaustive()
    }
}

/// Takes the eight bytes that [`KeyHash`] offers as they are.
///
/// SHA-256 has spread them already, so a seeded hash would buy nothing: only the configuration inserts keys, a caller
/// merely looks one up, and keys that share these 64 bits have to be found by brute force. The map stays correct even
/// then, since it compares whole digests.
#[derive(Default)]
struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn write_u64(&mut self, digest: u64) {
        self.0 = digest;
    }

    fn write(&mut self, bytes: &[u8]) {
        // `KeyHash` never comes this way; whatever else did would still be hashed, if less evenly.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::time::Instant;

    use super::super::tests::tenant;
    use super::*;

    fn filled(keys: usize) -> Directory {
        let owners = [tenant("acme", "T1"), tenant("globex", "T2")];
        Directory::new((0..keys).map(|n| (key(n), Arc::clone(&owners[n % 2]))))
    }

    fn key(n: usize) -> KeyHash {
        KeyHash::of(format!("key-{n}").as_bytes())
    }

    #[test]
    fn every_key_finds_its_owner_and_no_other_key_finds_one() {
        let directory = filled(100_000);
        assert_eq!(directory.len(), 100_000);
        for n in 0..100_000 {
            let owner = directory.find(&key(n)).map(|tenant| tenant.id.as_str());
            assert_eq!(owner, Some(["acme", "globex"][n % 2]), "key {n}");
        }
        for n in 100_000..100_100 {
            assert!(directory.find(&key(n)).is_none(), "key {n}");
        }
    }

    #[test]
    fn keys_that_agree_in_the_hashed_bytes_keep_their_own_owners() {
        let acme = KeyHash([7; 32]);
        let mut globex = acme;
        globex.0[31] = 8;
        let mut stranger = acme;
        stranger.0[8] = 9;
        let directory = Directory::new([(acme, tenant("acme", "T1")), (globex, tenant("globex", "T2"))]);
        assert_eq!(directory.find(&acme).map(|tenant| tenant.id.as_str()), Some("acme"));
        assert_eq!(directory.find(&globex).map(|tenant| tenant.id.as_str()), Some("globex"));
        assert!(directory.find(&stranger).is_none());
    }

    #[test]
    fn an_empty_directory_knows_nobody() {
        let directory = Directory::new([]);
        assert!(directory.is_empty());
        assert!(directory.find(&KeyHash::of(b"")).is_none());
    }

    #[test]
    fn its_debug_output_shows_no_key() {
        assert_eq!(format!("{:?}", filled(3)), "Directory { keys: 3, .. }");
    }

    /// Prints what building and asking cost; asserts nothing about time.
    #[test]
    #[ignore = "a measurement: run with --release --run-ignored all --no-capture"]
    fn cost_of_a_lookup_by_number_of_keys() {
        for keys in [10, 1_000, 100_000] {
            let hashes: Vec<_> = (0..keys).map(key).collect();
            let owner = tenant("acme", "T1");
            let start = Instant::now();
            let directory = Directory::new(hashes.iter().map(|hash| (*hash, Arc::clone(&owner))));
            let built = start.elapsed();
            let rounds = 1_000_000;
            let start = Instant::now();
            for n in 0..rounds {
                black_box(directory.find(black_box(&hashes[n % 10])));
            }
            let few = start.elapsed();
            let start = Instant::now();
            for n in 0..rounds {
                black_box(directory.find(black_box(&hashes[n * 7919 % keys])));
            }
            let all = start.elapsed();
            println!("{keys} keys: built in {built:?}; 10^6 lookups of ten of them {few:?}, of all in turn {all:?}");
        }
    }
}
