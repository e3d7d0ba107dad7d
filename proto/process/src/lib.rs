//! What every binary of Warmroute has around its core, once: the flags that all share and the names
//! of the environment ([`args`], [`mod@env`], [`listen`]), the way to the plane ([`nats`]), logs, the
//! accept loop of its HTTP ([`server`]), tasks, signals, and the process around them ([`host`]).
//!
//! Nothing here knows what a binary is for.
#![forbid(unsafe_code)]

pub mod args;
pub mod blocking;
pub mod env;
pub mod host;
pub mod listen;
pub mod logs;
pub mod nats;
pub mod server;
pub mod signals;
pub mod tasks;

mod joining;

use std::io::Write as _;
use std::process::ExitCode;

/// One JSON line on stdout, for whoever let the system choose the ports.
pub fn announce(line: std::fmt::Arguments<'_>) {
    let mut stdout = std::io::stdout().lock();
    let written = writeln!(stdout, "{line}");
    if let Err(error) = written.and_then(|()| stdout.flush()) {
        tracing::warn!(%error, "the ports cannot be told on stdout");
    }
}

/// A binary's `main`: runs `start`, and tells an operator what is wrong, without a backtrace.
pub fn main(start: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    main_or(ExitCode::FAILURE, || start().map(|()| ExitCode::SUCCESS))
}

/// The same for one that tells by its exit code more than that it failed.
pub fn main_or(failed: ExitCode, start: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    start().unwrap_or_else(|error| {
        // Nobody is left to tell where stderr is closed.
        drop(writeln!(std::io::stderr(), "error: {error:#}"));
        failed
    })
}
