//! What asks a process to end.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The name of the signal that comes from a terminal.
pub const INTERRUPT: &str = "SIGINT";

/// SIGTERM, SIGINT and SIGHUP: all of them ask for an orderly end.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on none of them ends the process by itself.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The name of the first that comes.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => INTERRUPT,
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
