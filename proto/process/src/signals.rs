//! Signals that stop a process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signal of a terminal's interrupt key.
pub const INTERRUPT: &str = "SIGINT";

/// SIGTERM, SIGINT and, unless it has another meaning, SIGHUP, which stop a process in order.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Option<Signal>,
}

/// What SIGHUP means to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hangup {
    Stops,
    /// A task of the process listens for it and reads its settings again.
    Reloads,
}

impl Signals {
    /// Installs the handlers: from now on no such signal kills the process.
    pub fn listen(hangup: Hangup) -> io::Result<Self> {
        let hangup = match hangup {
            Hangup::Stops => Some(signal(SignalKind::hangup())?),
            Hangup::Reloads => None,
        };
        Ok(Self {
            hangup,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The name of the next signal.
    pub async fn received(&mut self) -> &'static str {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => INTERRUPT,
            _ = hangup => "SIGHUP",
        }
    }
}
