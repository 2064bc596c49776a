//! Log lines: text for people, JSON for machines, on standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

use crate::config::{Log, LogFormat};

/// Why there is no log.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The variable cannot be parsed.
    #[error("{} is not a level or a list of directives such as info,bouncer=debug", EnvFilter::DEFAULT_ENV)]
    Filter(#[source] ParseError),
    /// The process logs already.
    #[error("a logger was set before")]
    Twice(#[source] TryInitError),
}

/// Starts logging. `RUST_LOG` beats the configured level.
///
/// # Errors
/// When `RUST_LOG` cannot be parsed, or a logger was set already.
pub fn start(log: &Log) -> Result<(), LogError> {
    let filter = filter(log)?;
    // Without its own report of lines that cannot be written: that report panics where standard error takes nothing.
    let lines =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).log_internal_errors(false);
    let started = match log.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init(),
    };
    started.map_err(LogError::Twice)
}

/// Whether [`start`] would find the variables of the environment in order.
///
/// # Errors
/// When `RUST_LOG` cannot be parsed.
pub fn check(log: &Log) -> Result<(), LogError> {
    filter(log).map(drop)
}

fn filter(log: &Log) -> Result<EnvFilter, LogError> {
    match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(directives) if !directives.is_empty() => EnvFilter::try_new(directives).map_err(LogError::Filter),
        _ => Ok(EnvFilter::default().add_directive(log.level.into())),
    }
}
