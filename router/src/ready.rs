//! Readiness: whether clients should be sent here. Liveness does not depend on it.
//!
//! A router that leaves reports not-ready first and serves on: load balancers need a moment to
//! notice, and no request may fail until then (`notice`). A drain by an operator lasts until it
//! is undone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use crate::indexer_pool::IndexFault;

/// Time for load balancers to notice that a router is not ready: two failed probes one second
/// apart, and the spreading of their result, which takes Kubernetes a second or two.
const NOTICE: Duration = Duration::from_secs(5);

/// The other parts of the drain time are for streams.
const NOTICE_SHARE: u32 = 3;

/// Longest time for which early requests are held. Well above a start that lacks nothing.
const INITIAL_MAX: Duration = Duration::from_secs(10);

/// How long a router that leaves accepts connections.
pub(crate) fn notice(drain_timeout: Duration) -> Duration {
    NOTICE.min(drain_timeout / NOTICE_SHARE)
}

/// Ready once each latch is set, until the router leaves.
#[derive(Debug, Default)]
pub struct Ready {
    registry: AtomicBool,
    drains: AtomicBool,
    workers: AtomicBool,
    load: AtomicBool,
    limits: AtomicBool,
    latched: Notify,
    /// The phase is not [`ServePhase::Serving`]. Read at every answer.
    leaving: AtomicBool,
    phase: Mutex<ServePhase>,
}

/// Whether the router takes part in serving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ServePhase {
    #[default]
    Serving,
    /// Drained by an operator since then. Can be undone.
    Draining(Instant),
    /// Not ready since then. Final.
    Ending(Instant),
}

impl ServePhase {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining(_) => "draining",
            Self::Ending(_) => "ending",
        }
    }
}

impl Ready {
    /// The workers that were registered at the start are known.
    pub(crate) fn registry_read(&self) {
        self.latch(&self.registry);
    }

    /// The drained workers are known.
    pub(crate) fn drains_read(&self) {
        self.latch(&self.drains);
    }

    /// A worker is usable and checked, or the start waits for one no longer.
    pub(crate) fn workers_settled(&self) {
        self.latch(&self.workers);
    }

    /// The other routers' load is known, or the start waits for it no longer.
    pub fn load_known(&self) {
        self.latch(&self.load);
    }

    /// This router's part of the tenants' limits is known.
    pub fn limits_shared(&self) {
        self.latch(&self.limits);
    }

    fn latch(&self, latch: &AtomicBool) {
        latch.store(true, Ordering::Relaxed);
        self.latched.notify_waiters();
    }

    /// All latches are set.
    pub fn is_initialized(&self) -> bool {
        self.missing_latch().is_none()
    }

    /// Waits, for a bounded time, until all latches are set. Load balancers without a readiness
    /// probe send requests as soon as the port accepts connections.
    pub(crate) async fn initialized(&self) {
        if self.is_initialized() {
            return;
        }
        let initialized = async {
            loop {
                let latched = self.latched.notified();
                if self.missing_latch().is_none() {
                    return;
                }
                latched.await;
            }
        };
        if timeout(INITIAL_MAX, initialized).await.is_err() {
            tracing::debug!("request not held any longer, router is not ready");
        }
    }

    /// Reports not-ready until [`Self::undrain`]. Requests are served on. Idempotent.
    pub(crate) fn drain(&self, now: Instant) -> ServePhase {
        self.change(|phase| match phase {
            ServePhase::Serving => ServePhase::Draining(now),
            ServePhase::Draining(_) | ServePhase::Ending(_) => phase,
        })
    }

    /// Ends a drain, unless the process is ending.
    pub(crate) fn undrain(&self) -> ServePhase {
        self.change(|phase| match phase {
            ServePhase::Serving | ServePhase::Draining(_) => ServePhase::Serving,
            ServePhase::Ending(_) => phase,
        })
    }

    /// The process ends. Returns since when the router has not been ready.
    pub(crate) fn end(&self, now: Instant) -> Instant {
        let mut since = now;
        self.change(|phase| {
            if let ServePhase::Draining(earlier) | ServePhase::Ending(earlier) = phase {
                since = earlier;
            }
            ServePhase::Ending(since)
        });
        since
    }

    pub(crate) fn phase(&self) -> ServePhase {
        *self.lock()
    }

    /// Connections are to be closed after the next answer.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// What is missing. `None`: ready.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        match self.phase() {
            ServePhase::Ending(_) => Some("shutting down"),
            ServePhase::Draining(_) => Some("drained by hand"),
            ServePhase::Serving => self.missing_latch(),
        }
    }

    /// The answer to `/readyz`. `index_fault`: why the index is out of reach. Requests are then
    /// served by load, so that the status stays 200.
    pub(crate) fn probe(&self, index_fault: Option<IndexFault>) -> Response {
        match self.probe_text(index_fault) {
            Ok(text) => (StatusCode::OK, text).into_response(),
            Err(missing) => (StatusCode::SERVICE_UNAVAILABLE, missing).into_response(),
        }
    }

    fn probe_text(&self, index_fault: Option<IndexFault>) -> Result<String, &'static str> {
        match (self.missing(), index_fault) {
            (Some(what), _) => Err(what),
            (None, None) => Ok("ready".to_owned()),
            (None, Some(why)) => Ok(format!(
                "degraded: requests are routed by load, because {why}"
            )),
        }
    }

    fn missing_latch(&self) -> Option<&'static str> {
        let missing = [
            (&self.registry, "the registry is not read yet"),
            (&self.drains, "the registry is not read yet"),
            (&self.workers, "no worker is usable and checked yet"),
            (&self.load, "the other routers' load is not known yet"),
            (&self.limits, "the other routers' tenants are not known yet"),
        ];
        let mut missing = missing.into_iter();
        let missing = missing.find(|(latch, _)| !latch.load(Ordering::Relaxed));
        missing.map(|(_, what)| what)
    }

    fn change(&self, next: impl FnOnce(ServePhase) -> ServePhase) -> ServePhase {
        let mut phase = self.lock();
        *phase = next(*phase);
        self.leaving
            .store(*phase != ServePhase::Serving, Ordering::Relaxed);
        *phase
    }

    fn lock(&self) -> MutexGuard<'_, ServePhase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn ready() -> Ready {
        let ready = Ready::default();
        assert!(ready.missing().is_some());
        ready.registry_read();
        ready.drains_read();
        ready.workers_settled();
        ready.load_known();
        ready.limits_shared();
        assert_eq!(ready.missing(), None);
        ready
    }

    #[test]
    fn a_drain_by_hand_can_be_undone() {
        let (ready, now) = (ready(), Instant::now());
        assert_eq!(ready.drain(now), ServePhase::Draining(now));
        assert!(ready.missing().is_some() && ready.is_leaving());
        let later = now + NOTICE;
        assert_eq!(ready.drain(later), ServePhase::Draining(now), "idempotent");
        assert_eq!(ready.undrain(), ServePhase::Serving);
        assert!(ready.missing().is_none() && !ready.is_leaving());
    }

    #[test]
    fn without_an_index_a_router_is_ready_and_says_why_it_routes_by_load() {
        let (ready, fault) = (ready(), Some(IndexFault::NoneReady));
        assert_eq!(ready.probe(fault).status(), StatusCode::OK);
        assert_eq!(
            ready.probe_text(fault),
            Ok("degraded: requests are routed by load, because no indexer is ready".to_owned())
        );
        assert_eq!(ready.probe_text(None), Ok("ready".to_owned()));
        ready.drain(Instant::now());
        assert_eq!(ready.probe_text(fault), Err("drained by hand"));
    }

    #[test]
    fn an_end_is_final_and_the_notice_counts_from_the_drain() {
        let (ready, now) = (ready(), Instant::now());
        ready.drain(now);
        assert_eq!(ready.end(now + NOTICE), now);
        assert_eq!(ready.end(now + 2 * NOTICE), now);
        assert_eq!(ready.undrain(), ServePhase::Ending(now));
        assert!(ready.missing().is_some() && ready.is_leaving());
    }

    #[tokio::test(start_paused = true)]
    async fn early_requests_are_held_for_a_bounded_time() {
        let ready = Ready::default();
        let since = Instant::now();
        ready.initialized().await;
        assert_eq!(since.elapsed(), INITIAL_MAX);
        let mut held = Box::pin(ready.initialized());
        for latch in [
            Ready::registry_read,
            Ready::drains_read,
            Ready::workers_settled,
            Ready::load_known,
            Ready::limits_shared,
        ] {
            assert!(held.as_mut().now_or_never().is_none());
            latch(&ready);
        }
        assert!(held.now_or_never().is_some());
        // Later requests are not held, also when the router leaves.
        ready.end(Instant::now());
        assert!(ready.initialized().now_or_never().is_some());
    }

    #[test]
    fn the_notice_leaves_time_for_streams() {
        let seconds = Duration::from_secs;
        assert_eq!(notice(seconds(30)), NOTICE);
        assert_eq!(notice(seconds(6)), seconds(2));
        assert_eq!(notice(Duration::ZERO), Duration::ZERO);
    }
}
