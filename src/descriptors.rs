//! File descriptors: each connection needs one, and the system hands out few unless it is asked for more.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the number of files that this process may have open from the customary 1024 or so to the most that the system
/// lets it have. Goes on with what there is where the system refuses.
pub fn raise_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        Ok((soft, hard))
    });
    match raised {
        Ok((from, to)) => tracing::debug!(from, to, "limit of open files raised"),
        Err(error) => tracing::debug!(%error, "limit of open files left as it is"),
    }
}
