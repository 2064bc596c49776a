//! What is wrong with a configuration, all of it at once.

use std::fmt;

/// What stands in a message where a secret would.
pub(super) const REDACTED: &str = "<redacted>";

/// One thing that is wrong: where, what is there, what should be, and who said so.
///
/// Holds no key and no password, whatever was in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where: `tiers[0].rate`, a place in a file that is not YAML, or the name of a variable.
    pub path: String,
    /// What is there.
    pub found: String,
    /// What should be there.
    pub expected: String,
    /// The file or the variable that the value came from.
    pub source: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: found {}, expected {} ({})", self.path, self.found, self.expected, self.source)
    }
}

/// Everything that is wrong with a configuration; at least one fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "configuration refused: {count} fault{}", if count == 1 { "" } else { "s" })?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Faults {}

impl From<Fault> for Faults {
    fn from(fault: Fault) -> Self {
        Self(vec![fault])
    }
}
