//! Logs to stderr, as text or JSON lines.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

use crate::access::AUDIT_TARGET;
use crate::args::LogArgs;

#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error("the log filter does not parse")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    #[error("a logger is installed already: {0}")]
    Installed(String),
}

/// The audit log is written unless the filter names it.
fn filter(text: &str) -> Result<EnvFilter, LogsError> {
    let text = match text.contains(AUDIT_TARGET) {
        true => text.to_owned(),
        false => format!("{text},{AUDIT_TARGET}=info"),
    };
    Ok(EnvFilter::try_new(text)?)
}

/// Installs the process's logger. Fails the second time.
pub fn install(args: &LogArgs) -> Result<(), LogsError> {
    let builder = fmt()
        .with_env_filter(filter(&args.log)?)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let installed = if args.log_json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder.try_init()
    };
    installed.map_err(|error| LogsError::Installed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_audit_log_is_written_unless_the_filter_names_it() {
        for (text, expected) in [
            ("error", "warmroute_audit=info,error"),
            ("error,warmroute_audit=off", "warmroute_audit=off,error"),
        ] {
            assert_eq!(filter(text).unwrap().to_string(), expected);
        }
        assert!(filter("a=b=c").is_err());
    }
}
