//! Logs to stderr, as text or JSON lines.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

/// Configuration of the logs.
#[derive(Clone, Debug)]
pub struct Logs {
    /// A filter that parses.
    pub filter: String,
    pub json: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error("the log filter does not parse")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    #[error("a logger is installed already: {0}")]
    Installed(String),
}

/// Installs the process's logger. Fails the second time.
pub fn install(logs: &Logs) -> Result<(), LogsError> {
    let builder = fmt()
        .with_env_filter(EnvFilter::try_new(&logs.filter)?)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let installed = if logs.json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder.try_init()
    };
    installed.map_err(|error| LogsError::Installed(error.to_string()))
}
