//! Readiness: should clients be sent here? Liveness is another question, which needs no answer from
//! anybody else.
//!
//! A router that leaves says so first and serves on: load balancers need a moment to notice, and a
//! plain one must not see one failed request until then ([`notice`]). Drained by hand, it stays like
//! that until it is told otherwise.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

/// What load balancers get to notice that a router is not ready: two failed checks a second apart, and
/// some for whoever tells them. Kubernetes tells its nodes within a second or two.
const NOTICE: Duration = Duration::from_secs(5);

/// The rest of the drain time is for streams.
const NOTICE_SHARE: u32 = 3;

/// How long a router that leaves goes on accepting.
pub(crate) fn notice(drain_timeout: Duration) -> Duration {
    NOTICE.min(drain_timeout / NOTICE_SHARE)
}

/// Requests that come before the router was ready for the first time wait for that, but no longer. Well
/// above what a start takes that lacks nothing.
const BEGINNING_MAX: Duration = Duration::from_secs(10);

/// Latches; ready when all have dropped, until the router leaves.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    registry: AtomicBool,
    drains: AtomicBool,
    workers: AtomicBool,
    load: AtomicBool,
    latched: Notify,
    /// Not [`Stay::Serving`]: read at every answer.
    leaving: AtomicBool,
    stay: Mutex<Stay>,
}

/// Whether the router stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stay {
    #[default]
    Serving,
    /// Drained by hand since then; may come back.
    Draining(Instant),
    /// Not ready since then, and never again.
    Ending(Instant),
}

impl Stay {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Draining(_) => "draining",
            Self::Ending(_) => "ending",
        }
    }
}

impl Ready {
    /// Everything that the registry had at the start is known.
    pub(crate) fn registry_read(&self) {
        self.registry.store(true, Ordering::Relaxed);
        self.latched.notify_waiters();
    }

    /// Which workers operators took out is known.
    pub(crate) fn drains_read(&self) {
        self.drains.store(true, Ordering::Relaxed);
        self.latched.notify_waiters();
    }

    /// A worker is usable and checked, or nobody waits for one any longer.
    pub(crate) fn workers_settled(&self) {
        self.workers.store(true, Ordering::Relaxed);
        self.latched.notify_waiters();
    }

    /// The other routers' load is known, or nobody waits for it any longer.
    pub(crate) fn load_known(&self) {
        self.load.store(true, Ordering::Relaxed);
        self.latched.notify_waiters();
    }

    /// Waits until the router was ready once, for a bounded time. Balancers that ask nobody whether he is
    /// ready send requests as soon as somebody listens.
    pub(crate) async fn begun(&self) {
        if self.lacking().is_none() {
            return;
        }
        let begun = async {
            loop {
                let latched = self.latched.notified();
                if self.lacking().is_none() {
                    return;
                }
                latched.await;
            }
        };
        if timeout(BEGINNING_MAX, begun).await.is_err() {
            tracing::debug!("a request came long before the router is ready");
        }
    }

    /// Takes the router out of its load balancers. It goes on serving what comes.
    pub(crate) fn drain(&self, now: Instant) -> Stay {
        self.change(|stay| match stay {
            Stay::Serving => Stay::Draining(now),
            Stay::Draining(_) | Stay::Ending(_) => stay,
        })
    }

    /// Takes a drain back, unless the process is ending.
    pub(crate) fn undrain(&self) -> Stay {
        self.change(|stay| match stay {
            Stay::Serving | Stay::Draining(_) => Stay::Serving,
            Stay::Ending(_) => stay,
        })
    }

    /// The process is told to end. Since when the router has not been ready.
    pub(crate) fn end(&self, now: Instant) -> Instant {
        let ending = self.change(|stay| match stay {
            Stay::Serving => Stay::Ending(now),
            Stay::Draining(since) | Stay::Ending(since) => Stay::Ending(since),
        });
        match ending {
            Stay::Ending(since) | Stay::Draining(since) => since,
            Stay::Serving => now,
        }
    }

    pub(crate) fn stay(&self) -> Stay {
        *self.lock()
    }

    /// Connections should not be used for another request.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// What is still missing; `None`: ready.
    pub(crate) fn missing(&self) -> Option<&'static str> {
        match self.stay() {
            Stay::Ending(_) => Some("shutting down"),
            Stay::Draining(_) => Some("drained by hand"),
            Stay::Serving => self.lacking(),
        }
    }

    fn lacking(&self) -> Option<&'static str> {
        let is_read = |latch: &AtomicBool| latch.load(Ordering::Relaxed);
        if !is_read(&self.registry) || !is_read(&self.drains) {
            Some("the registry is not read yet")
        } else if !self.workers.load(Ordering::Relaxed) {
            Some("no worker is usable and checked yet")
        } else if !self.load.load(Ordering::Relaxed) {
            Some("the other routers' load is not known yet")
        } else {
            None
        }
    }

    fn change(&self, next: impl FnOnce(Stay) -> Stay) -> Stay {
        let mut stay = self.lock();
        *stay = next(*stay);
        self.leaving
            .store(*stay != Stay::Serving, Ordering::Relaxed);
        *stay
    }

    fn lock(&self) -> MutexGuard<'_, Stay> {
        self.stay.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert_eq!(ready.missing(), None);
        ready
    }

    #[test]
    fn a_drain_by_hand_can_be_taken_back() {
        let (ready, now) = (ready(), Instant::now());
        assert_eq!(ready.drain(now), Stay::Draining(now));
        assert!(ready.missing().is_some() && ready.is_leaving());
        let later = now + NOTICE;
        assert_eq!(ready.drain(later), Stay::Draining(now), "told twice");
        assert_eq!(ready.undrain(), Stay::Serving);
        assert!(ready.missing().is_none() && !ready.is_leaving());
    }

    #[test]
    fn an_end_cannot_and_the_notice_counts_from_the_drain() {
        let (ready, now) = (ready(), Instant::now());
        ready.drain(now);
        assert_eq!(ready.end(now + NOTICE), now);
        assert_eq!(ready.end(now + 2 * NOTICE), now);
        assert_eq!(ready.undrain(), Stay::Ending(now));
        assert!(ready.missing().is_some() && ready.is_leaving());
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_requests_wait_for_the_router_but_not_for_ever() {
        let ready = Ready::default();
        let since = Instant::now();
        ready.begun().await;
        assert_eq!(since.elapsed(), BEGINNING_MAX);
        let mut waiting = Box::pin(ready.begun());
        for latch in [
            Ready::registry_read,
            Ready::drains_read,
            Ready::workers_settled,
            Ready::load_known,
        ] {
            assert!(waiting.as_mut().now_or_never().is_none());
            latch(&ready);
        }
        assert!(waiting.now_or_never().is_some());
        // Never again, also when it leaves.
        ready.end(Instant::now());
        assert!(ready.begun().now_or_never().is_some());
    }

    #[test]
    fn the_notice_leaves_streams_their_share() {
        let seconds = Duration::from_secs;
        assert_eq!(notice(seconds(30)), NOTICE);
        assert_eq!(notice(seconds(6)), seconds(2));
        assert_eq!(notice(Duration::ZERO), Duration::ZERO);
    }
}
