//! Other routers, as processes in front of a fleet's engines.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::fleet::{Fleet, free_port, strings};
use crate::nats_server::child::Watchdog;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    VllmRouter,
    SglangRouter,
    Smg,
}

/// One cadence for all, shorter than their defaults: what is compared is not patience.
const HEALTH: [&str; 6] = [
    "--health-check-interval-secs=2",
    "--health-check-timeout-secs=2",
    "--health-failure-threshold=2",
    "--health-success-threshold=1",
    "--policy=cache_aware",
    "--log-level=error",
];

impl Peer {
    pub(super) const ALL: [Self; 3] = [Self::VllmRouter, Self::SglangRouter, Self::Smg];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::VllmRouter => "vllm-router",
            Self::SglangRouter => "sglang-router",
            Self::Smg => "smg",
        }
    }

    const fn flags(self) -> &'static [&'static str] {
        match self {
            Self::VllmRouter => &[],
            Self::SglangRouter => &["launch"],
            Self::Smg => &[
                "launch",
                "--worker-stall-secs=2",
                "--worker-wedge-secs=3",
                "--worker-stale-secs=15",
            ],
        }
    }
}

/// Killed when dropped.
pub(super) struct RunningPeer {
    child: Child,
    watchdog: Watchdog,
    pub(super) base: String,
}

impl RunningPeer {
    /// Starts it from a folder of programs.
    pub(super) fn start(peer: Peer, programs: &Path, fleet: &Fleet) -> Self {
        let port = free_port();
        let log = File::create(fleet.file("peer.log")).expect("a log");
        let mut command = Command::new(programs.join(peer.name()));
        let engines = (0..fleet.engines.len()).map(|engine| fleet.engine(engine, ""));
        command
            .args(peer.flags())
            .args(HEALTH)
            .args(strings(&[
                "--host",
                "127.0.0.1",
                "--port",
                &port.to_string(),
            ]))
            .args([
                "--prometheus-port",
                &free_port().to_string(),
                "--worker-urls",
            ])
            .args(engines)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        let child = command.spawn().expect("a peer's program");
        Self {
            watchdog: Watchdog::over(&child),
            child,
            base: format!("http://127.0.0.1:{port}"),
        }
    }
}

impl Drop for RunningPeer {
    fn drop(&mut self) {
        self.watchdog.end();
        self.child.kill().expect("our child");
        self.child.wait().expect("it was killed");
    }
}
