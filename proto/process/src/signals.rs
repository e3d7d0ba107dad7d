//! Signals that stop a process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signal of a terminal's interrupt key.
pub const INTERRUPT: &str = "SIGINT";

/// SIGTERM, SIGINT and SIGHUP, which all stop a process in order.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Installs the handlers: from now on no such signal kills the process.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the next signal.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => INTERRUPT,
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
