//! Readiness: should clients be sent here? Liveness is another question, which needs no answer from
//! anybody else.

use std::sync::atomic::{AtomicBool, Ordering};

/// Latches; ready when all have dropped, until the shutdown begins.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    registry: AtomicBool,
    workers: AtomicBool,
    load: AtomicBool,
    stopping: AtomicBool,
}

impl Ready {
    /// Everything that the registry had at the start is known.
    pub(crate) fn registry_read(&self) {
        self.registry.store(true, Ordering::Relaxed);
    }

    /// A worker is usable and checked, or nobody waits for one any longer.
    pub(crate) fn workers_settled(&self) {
        self.workers.store(true, Ordering::Relaxed);
    }

    /// The other routers' load is known, or nobody waits for it any longer.
    pub(crate) fn load_known(&self) {
        self.load.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// What is still missing; `None`: ready.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        if self.stopping.load(Ordering::Relaxed) {
            Some("shutting down")
        } else if !self.registry.load(Ordering::Relaxed) {
            Some("the registry is not read yet")
        } else if !self.workers.load(Ordering::Relaxed) {
            Some("no worker is usable and checked yet")
        } else if !self.load.load(Ordering::Relaxed) {
            Some("the other routers' load is not known yet")
        } else {
            None
        }
    }
}
