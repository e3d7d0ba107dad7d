//! Logs to stderr, as text or JSON lines.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

use crate::access::AUDIT_TARGET;
use crate::args::LogArgs;

const NATS_CLIENT: &str = "async_nats";

#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error("the log filter does not parse")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    #[error("a logger is installed already: {0}")]
    Installed(String),
}

/// The audit log is written unless the filter names it. The NATS client logs each attempt to
/// connect; [`crate::nats`] reports its state, so that these lines are left to `debug`.
fn filter(text: &str) -> Result<EnvFilter, LogsError> {
    let is_verbose = |part: &str| ["debug", "trace"].contains(&part.trim());
    let mut text = text.to_owned();
    if !text.contains(NATS_CLIENT) && !text.to_lowercase().split(',').any(is_verbose) {
        text = format!("{text},{NATS_CLIENT}=off");
    }
    if !text.contains(AUDIT_TARGET) {
        text = format!("{text},{AUDIT_TARGET}=info");
    }
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
            ("debug", "warmroute_audit=info,debug"),
            ("TRACE,warmroute_audit=off", "warmroute_audit=off,trace"),
        ] {
            assert_eq!(filter(text).unwrap().to_string(), expected);
        }
        assert!(filter("a=b=c").is_err());
    }

    #[test]
    fn the_nats_clients_lines_need_debug_or_a_filter_of_their_own() {
        let is_quiet = |text: &str| filter(text).unwrap().to_string().contains("async_nats=off");
        for text in ["info", "error", "info,warmroute_router=debug"] {
            assert!(is_quiet(text), "{text}");
        }
        for text in ["debug", "Trace", "info,async_nats=info"] {
            assert!(!is_quiet(text), "{text}");
        }
    }
}
