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
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(directives) if !directives.is_empty() => EnvFilter::try_new(directives).map_err(LogError::Filter)?,
        // The AMQP client logs an error for each end of a connection and a warning for each message that comes back; what
        // they mean for requests is logged once, by whoever keeps the connection.
        _ => {
            let quiet = "lapin=off".parse().map_err(LogError::Filter)?;
            EnvFilter::default().add_directive(log.level.into()).add_directive(quiet)
        }
    };
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match log.format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init(),
    };
    started.map_err(LogError::Twice)
}
