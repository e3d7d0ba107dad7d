//! Signals that stop a process, and SIGHUP, which never does.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signal of a terminal's interrupt key.
pub const INTERRUPT: &str = "SIGINT";

/// SIGTERM and SIGINT, which stop a process in order.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Installs the handlers: from now on no such signal kills the process, and SIGHUP only wakes
    /// the tasks that listen for it.
    pub fn listen() -> io::Result<Self> {
        // A handler stays installed for the life of the process.
        drop(signal(SignalKind::hangup())?);
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The name of the next signal.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => INTERRUPT,
        }
    }
}
