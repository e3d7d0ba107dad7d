//! The shim's lease and the worker's registration.
//!
//! Two shims of one worker never write equal lease values, so each recognises its own. A holder that
//! cannot renew treats the lease as expired one TTL after it sent the last confirmed renewal. Only the
//! holder writes the registration, which fences nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use warmroute_plane::{Lease, PlaneError, PutIf, Revision};
use warmroute_proto::codec;
use warmroute_proto::registry::{ShimEntry, WorkerEntry};

use super::ShimState;
use crate::config::ShimConfig;

const LEASE_TTL: Duration = Duration::from_secs(6);
const LEASE_RENEW: Duration = Duration::from_secs(2);
const RELEASE_MAX: Duration = Duration::from_secs(1);

/// Whether this shim may publish, as far as it knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leadership {
    /// Before the first answer.
    Unknown,
    /// This shim holds the lease; the term grows with each acquisition.
    Leads { term: u64 },
    /// This shim's lease expired; no other holder is known.
    Lapsed,
    /// Another shim holds it.
    Yields,
}

pub(super) struct WorkerLease {
    shared: Arc<ShimState>,
    config: ShimConfig,
    /// The lease's value, unique to this process.
    own: Bytes,
    lease: Option<Lease>,
    /// When the last confirmed renewal was sent.
    renewed: Instant,
    leadership: Leadership,
    terms: u64,
    registration: Option<Revision>,
}

impl WorkerLease {
    pub(super) fn new(shared: Arc<ShimState>, config: ShimConfig) -> Self {
        let mut instance = [0; 16];
        fastrand::fill(&mut instance);
        let entry = ShimEntry {
            instance,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        // Encoding into memory does not fail; if it did, the random bytes alone are unique.
        let own = codec::encode(&entry).unwrap_or_else(|_| instance.to_vec());
        Self {
            shared,
            config,
            own: Bytes::from(own),
            lease: None,
            renewed: Instant::now(),
            leadership: Leadership::Unknown,
            terms: 0,
            registration: None,
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut ticks = interval(LEASE_RENEW);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut info = self.shared.info.subscribe();
        let mut connection = self.shared.plane.connection();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
                Ok(()) = info.changed() => {}
                Ok(()) = connection.changed() => {}
            }
            tokio::select! {
                biased;
                // A write without an awaited answer expires by itself.
                () = stop.cancelled() => break,
                () = self.keep() => {}
            }
        }
        self.release().await;
    }

    async fn keep(&mut self) {
        let before = self.leadership;
        self.keep_lease().await;
        if self.leadership != before {
            match self.leadership {
                Leadership::Leads { .. } => {
                    info!(worker = %self.config.worker, "this shim serves the worker");
                }
                Leadership::Yields => {
                    warn!(worker = %self.config.worker, "another shim serves this worker");
                }
                Leadership::Lapsed => {
                    warn!(worker = %self.config.worker, "the worker's lease lapsed");
                }
                Leadership::Unknown => {}
            }
            self.shared.leadership.send_replace(self.leadership);
        }
        if matches!(self.leadership, Leadership::Leads { .. }) {
            self.keep_registration().await;
        }
    }

    async fn keep_lease(&mut self) {
        let asked = Instant::now();
        if let Some(lease) = &mut self.lease {
            match timeout(LEASE_RENEW, lease.renew(self.own.clone())).await {
                Ok(Ok(Ok(()))) => {
                    self.renewed = asked;
                    return;
                }
                // The key is gone, or another holder's.
                Ok(Ok(Err(_lost))) => self.lapse(),
                Ok(Err(_)) | Err(_) if self.renewed.elapsed() < LEASE_TTL => return,
                // It expired: another shim may hold it now.
                Ok(Err(_)) | Err(_) => self.lapse(),
            }
        }
        let key = self.shared.subjects.shim_key(&self.config.worker);
        let plane = Arc::clone(&self.shared.plane);
        let acquire = Lease::acquire(plane, key, self.own.clone(), LEASE_TTL);
        match timeout(LEASE_RENEW, acquire).await {
            Ok(Ok(Some(lease))) => {
                self.lease = Some(lease);
                self.renewed = asked;
                self.terms += 1;
                self.leadership = Leadership::Leads { term: self.terms };
            }
            Ok(Ok(None)) => self.leadership = Leadership::Yields,
            Ok(Err(_)) | Err(_) => {}
        }
    }

    fn lapse(&mut self) {
        self.lease = None;
        self.leadership = Leadership::Lapsed;
    }

    /// Replaces any registration of this worker: the lease decides which shim writes it.
    async fn keep_registration(&mut self) {
        let Ok(value) = codec::encode(&self.entry()) else {
            return;
        };
        let key = self.shared.subjects.worker_key(&self.config.worker);
        let plane = &self.shared.plane;
        let put = plane.put(key, Bytes::from(value), PutIf::Always, Some(LEASE_TTL));
        if let Ok(Ok(revision)) = timeout(LEASE_RENEW, put).await {
            self.registration = Some(revision);
        }
    }

    /// Deregisters and releases the lease, so that the next shim starts without a wait.
    async fn release(self) {
        let deregister = async {
            if let Some(revision) = self.registration {
                let key = self.shared.subjects.worker_key(&self.config.worker);
                match self.shared.plane.delete(key, revision).await {
                    Ok(()) | Err(PlaneError::Conflict) => {}
                    Err(error) => debug!(%error, "the registration expires by itself"),
                }
            }
            if let Some(lease) = self.lease
                && let Err(error) = lease.release().await
            {
                debug!(%error, "the lease expires by itself");
            }
        };
        if timeout(RELEASE_MAX, deregister).await.is_err() {
            debug!("lease and registration expire by themselves");
        }
    }

    fn entry(&self) -> WorkerEntry {
        let info = Arc::clone(&self.shared.info.borrow());
        let views = self.shared.views();
        let reported = views.iter().find_map(|view| view.block_size);
        WorkerEntry {
            worker: self.config.worker.clone(),
            url: self.config.advertise_url.trim_end_matches('/').to_owned(),
            models: info.models.clone(),
            loras: info.loras.clone(),
            ranks: self.config.ranks,
            block_size: reported.or(self.config.block_size).or(info.block_size),
            blocks_per_rank: info.blocks,
            max_model_len: info.max_model_len,
            main_attention_only: all_true(
                self.config.ranks,
                views.iter().map(|view| view.main_attention_only),
            ),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Whether all ranks reported, and all of them `true`.
fn all_true(ranks: u32, mut reports: impl ExactSizeIterator<Item = bool>) -> bool {
    u32::try_from(reports.len()) == Ok(ranks) && reports.all(|report| report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_without_a_report_count_as_false() {
        assert!(!all_true(1, [].into_iter()));
        assert!(!all_true(2, [true].into_iter()));
        assert!(!all_true(2, [true, false].into_iter()));
        assert!(all_true(2, [true, true].into_iter()));
    }
}
