//! The shim's lease and the worker's registration.
//!
//! Two shims of one worker never write equal lease values, so each recognises its own. A holder that
//! cannot renew treats the lease as expired one TTL after it sent the last confirmed renewal. Only the
//! holder writes the registration, which fences nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use warmroute_plane::{
    Connection, LEASE_RENEWAL, LEASE_TTL, LeaseEvent, LeaseHolder, PlaneError, PutIf, Revision,
};
use warmroute_process::build;
use warmroute_proto::codec;
use warmroute_proto::registry::{ShimEntry, WorkerEntry};

use super::ShimState;
use crate::config::ShimConfig;
use crate::engine::BlockCount;

const RELEASE_MAX: Duration = Duration::from_secs(1);

/// A registration that is being written; `None` if the plane did not take it.
type Writing = Pin<Box<dyn Future<Output = Option<Revision>> + Send>>;

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
    holder: LeaseHolder,
    /// The lease's value, unique to this process.
    value: Bytes,
    leadership: Leadership,
    terms: u64,
    registration: Option<Revision>,
    writing: Option<Writing>,
}

impl WorkerLease {
    pub(super) fn new(shared: Arc<ShimState>, config: ShimConfig) -> Self {
        let mut instance = [0; 16];
        fastrand::fill(&mut instance);
        let entry = ShimEntry {
            instance,
            version: build::version().to_owned(),
        };
        // Encoding into memory does not fail; if it did, the random bytes alone are unique.
        let value = codec::encode(&entry).unwrap_or_else(|_| instance.to_vec());
        let key = shared.subjects.shim_key(&config.worker);
        Self {
            holder: LeaseHolder::new(Arc::clone(&shared.plane), key),
            shared,
            config,
            value: Bytes::from(value),
            leadership: Leadership::Unknown,
            terms: 0,
            registration: None,
            writing: None,
        }
    }

    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut connection = self.shared.plane.connection();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Ok(()) = connection.changed() => self.holder.renew_now(),
                () = self.shared.facts_changed.notified() => self.register(),
                revision = written(&mut self.writing) => {
                    self.writing = None;
                    // A failed write leaves the entry of the last one, which a stop deletes.
                    self.registration = revision.or(self.registration);
                }
                event = self.holder.next(|| self.value.clone()) => self.apply(event),
            }
        }
        self.release().await;
    }

    fn apply(&mut self, event: LeaseEvent) {
        let worker = &self.config.worker;
        let leadership = match event {
            LeaseEvent::Acquired(_) => {
                info!(%worker, "this shim serves the worker");
                self.terms += 1;
                Leadership::Leads { term: self.terms }
            }
            LeaseEvent::Renewed(_) => self.leadership,
            LeaseEvent::Lost => {
                // A lost connection is reported once for the process.
                match *self.shared.plane.connection().borrow() {
                    Connection::Up => warn!(%worker, "the worker's lease is lost"),
                    Connection::Down => debug!(%worker, "the worker's lease is lost"),
                }
                Leadership::Lapsed
            }
            LeaseEvent::HeldElsewhere => Leadership::Yields,
        };
        if leadership != self.leadership {
            if leadership == Leadership::Yields {
                warn!(%worker, "another shim serves this worker");
            }
            self.leadership = leadership;
            self.shared.leadership.send_replace(leadership);
        }
        self.register();
    }

    /// Writes the registration if this shim leads and the engine listed its models: routers answer 404
    /// for models that no registration lists. The lease decides which shim writes, so any other
    /// registration is replaced.
    fn register(&mut self) {
        let entry = self.entry();
        let leads = matches!(self.leadership, Leadership::Leads { .. });
        if !leads || entry.models.is_empty() {
            return;
        }
        let Ok(value) = codec::encode(&entry) else {
            return;
        };
        let key = self.shared.subjects.worker_key(&self.config.worker);
        let plane = Arc::clone(&self.shared.plane);
        self.writing = Some(Box::pin(async move {
            let put = plane.put(key, Bytes::from(value), PutIf::Always, Some(LEASE_TTL));
            timeout(LEASE_RENEWAL, put).await.ok()?.ok()
        }));
    }

    /// Deregisters and releases the lease, so that the next shim starts without a wait.
    async fn release(mut self) {
        // Its write first: a registration that arrives after the deletion would stand until it
        // expires.
        if let Some(writing) = self.writing.take()
            && let Ok(Some(revision)) = timeout(RELEASE_MAX, writing).await
        {
            self.registration = Some(revision);
        }
        if let Some(revision) = self.registration {
            let key = self.shared.subjects.worker_key(&self.config.worker);
            let delete = self.shared.plane.delete(key, revision);
            match timeout(RELEASE_MAX, delete).await {
                Ok(Ok(()) | Err(PlaneError::Conflict)) => {}
                Ok(Err(error)) => debug!(%error, "the registration expires by itself"),
                Err(_) => debug!("the registration expires by itself"),
            }
        }
        self.holder.release().await;
    }

    fn entry(&self) -> WorkerEntry {
        let info = Arc::clone(&self.shared.info.borrow());
        let views = self.shared.views();
        let cuts = views.iter().filter_map(|view| view.block_cut);
        let reported = cuts.clone().next().map(|cut| cut.size);
        WorkerEntry {
            worker: self.config.worker.clone(),
            url: self.config.advertise_url.trim_end_matches('/').to_owned(),
            models: info.models.clone(),
            loras: info.loras.clone(),
            ranks: self.config.ranks,
            block_size: reported.or(self.config.block_size).or(info.block_size),
            blocks_per_rank: info.blocks.map(BlockCount::per_rank),
            max_model_len: info.max_model_len,
            main_attention_only: all_true(
                self.config.ranks,
                views.iter().map(|view| view.main_attention_only),
            ),
            version: build::version().to_owned(),
            // A rank without events knows of none.
            lookahead: cuts.map(|cut| cut.lookahead).max().unwrap_or_default(),
            role: self.config.role,
        }
    }
}

async fn written(writing: &mut Option<Writing>) -> Option<Revision> {
    match writing {
        Some(writing) => writing.await,
        None => std::future::pending().await,
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
