//! Log lines: text for people, JSON for machines, on standard error.

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// Starts logging. `RUST_LOG` beats the configured level.
///
/// # Errors
/// When `RUST_LOG` cannot be parsed, or a logger was set already.
pub fn start(log: &Log) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(directives) if !directives.is_empty() => EnvFilter::try_new(directives)?,
        // The AMQP client logs an error for each end of a connection and a warning for each message that comes back; what
        // they mean for requests is logged once, by whoever keeps the connection.
        _ => EnvFilter::default().add_directive(log.level.into()).add_directive("lapin=off".parse()?),
    };
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.format {
        LogFormat::Text => subscriber.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    }
}
