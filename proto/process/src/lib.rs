//! The process around the core of every Warmroute binary: shared flags, environment names and
//! [`completions`] ([`args`], [`mod@env`], [`listen`]), the connection to the plane ([`nats`]),
//! [`logs`] and a bound of their lines ([`log_limit`]), [`metrics`] and their reader
//! ([`metrics_page`]), HTTP ([`server`], [`connection_threads`], [`engine_answer`]), [`tls`], files
//! that are read again ([`small_file`], [`followed_file`]), [`open_files`], [`tasks`], [`signals`],
//! and the life cycle ([`host`]).
#![forbid(unsafe_code)]

pub mod access;
pub mod args;
pub mod blocking;
pub mod build;
pub mod byte_size;
pub mod completions;
pub mod connection_threads;
pub mod engine_answer;
pub mod engine_args;
pub mod env;
pub mod followed_file;
pub mod host;
pub mod listen;
pub mod log_limit;
pub mod logs;
pub mod metrics;
pub mod metrics_page;
pub mod nats;
pub mod open_files;
pub mod server;
pub mod shared_page;
pub mod signals;
pub mod small_file;
pub mod tasks;
pub mod tls;

mod joining;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;

/// Writes one JSON line to stdout, for callers that let the system choose the ports.
pub fn announce(line: std::fmt::Arguments<'_>) {
    if let Err(error) = print(line) {
        tracing::warn!(%error, "ports not written to stdout");
    }
}

/// Writes the output of a command to stdout. A command whose output is lost has failed.
pub fn print(output: std::fmt::Arguments<'_>) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{output}");
    written
        .and_then(|()| stdout.flush())
        .context("writing to stdout")
}

/// A binary's `main`: runs `start` and writes its error to stderr, without a backtrace.
pub fn main(start: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    main_or(ExitCode::from(failed(1)), || {
        start().map(|()| ExitCode::SUCCESS)
    })
}

/// Exit code of a failure: 2 under `--check`, which wrong arguments have too, else `otherwise`.
#[must_use]
pub fn failed(otherwise: u8) -> u8 {
    // The raw arguments, since parsed ones may be what fails.
    match std::env::args_os().any(|argument| argument == "--check") {
        true => 2,
        false => otherwise,
    }
}

/// Like [`main()`], for binaries with several exit codes.
pub fn main_or(failed: ExitCode, start: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    open_files::raise_limit();
    start().unwrap_or_else(|error| {
        // If stderr is closed, there is no other place to report.
        drop(writeln!(std::io::stderr(), "error: {error:#}"));
        failed
    })
}
