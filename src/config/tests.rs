//! What the configuration promises, rule by rule.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::admission::QueueBounds;
use crate::limit::BucketKey;

/// The shortest file there is.
const LEAST: &str = "
tiers: [{ name: T1, rate: 10/s }]
tenants: [{ id: acme, tier: T1, keys: [key_one] }]
pools: [{ name: default, max_in_flight: 50 }]
";

fn with(text: &str, env: &[(&str, &str)]) -> Result<Loaded, Faults> {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    read(Origin::File("bouncer.yaml".into()), text.as_bytes(), env)
}

fn loaded(text: &str, env: &[(&str, &str)]) -> Loaded {
    with(text, env).unwrap_or_else(|faults| panic!("{faults}"))
}

fn refused(text: &str, env: &[(&str, &str)]) -> Vec<String> {
    with(text, env).map(|loaded| loaded.to_string()).unwrap_err().0.iter().map(Fault::to_string).collect()
}

fn demonstration(env: &[(&str, &str)]) -> Loaded {
    loaded(DEMONSTRATION, env)
}

fn least_and(extra: &str) -> String {
    format!("{LEAST}{extra}")
}

fn queue_lengths(loaded: &Loaded) -> Vec<(&str, usize)> {
    loaded.config.tiers.iter().map(|tier| (tier.name.as_str(), tier.queue.length)).collect()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config")
}

fn stems(extension: &str) -> BTreeSet<String> {
    let files = fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|it| it == extension));
    files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn every_bad_file_is_refused_with_exactly_its_message() {
    let names = stems("yaml");
    assert_eq!(names, stems("expected"), "each .yaml has its .expected");
    assert!(names.len() > 100, "the fixtures were not found");
    let mut wrong = Vec::new();
    for name in names {
        let bytes = fs::read(fixtures().join(format!("{name}.yaml"))).unwrap();
        let expected = fs::read_to_string(fixtures().join(format!("{name}.expected"))).unwrap();
        let found = match read(Origin::File(format!("{name}.yaml").into()), &bytes, std::iter::empty()) {
            Ok(_) => "accepted".to_owned(),
            Err(faults) => format!("{faults}\n"),
        };
        if found != expected {
            wrong.push(format!("{name}: {found}instead of {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn bless() {
    for name in stems("yaml") {
        let bytes = fs::read(fixtures().join(format!("{name}.yaml"))).unwrap();
        let found = match read(Origin::File(format!("{name}.yaml").into()), &bytes, std::iter::empty()) {
            Ok(_) => "accepted".to_owned(),
            Err(faults) => format!("{faults}\n"),
        };
        fs::write(fixtures().join(format!("{name}.expected")), found).unwrap();
    }
}
