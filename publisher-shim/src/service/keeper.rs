//! The shim's lease and the worker's registration.
//!
//! Two shims of one worker never hold the lease with the same value, so that each knows its own
//! again. Who cannot renew in time lets it lapse by its own clock, counted from before the renewal
//! that was confirmed last. The registration is its holder's to write; it fences nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use warmroute_plane::{Lease, PlaneError, PutIf, Revision};
use warmroute_proto::codec;
use warmroute_proto::registry::{ShimEntry, WorkerEntry};

use super::Shared;
use crate::config::ShimConfig;

const LEASE_TTL: Duration = Duration::from_secs(6);
const LEASE_RENEW: Duration = Duration::from_secs(2);
const RELEASE_MAX: Duration = Duration::from_secs(1);

/// Who may publish, as far as this shim knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nothing is known yet.
    Unknown,
    /// This shim; the term grows each time that it takes the lease.
    Leads { term: u64 },
    /// Its lease ran out, and nobody is known to have taken it.
    Lapsed,
    /// Another shim holds it.
    Yields,
}

pub(super) struct Keeper {
    shared: Arc<Shared>,
    config: ShimConfig,
    /// The lease's value: this process and no other.
    own: Bytes,
    lease: Option<Lease>,
    /// When the renewal that was confirmed last was sent.
    renewed: Instant,
    standing: Standing,
    terms: u64,
    registration: Option<Revision>,
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>, config: ShimConfig) -> Self {
        let mut instance = [0; 16];
        fastrand::fill(&mut instance);
        let entry = ShimEntry {
            instance,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        // Encoding into memory does not fail; if it did, the random bytes alone would do.
        let own = codec::encode(&entry).unwrap_or_else(|_| instance.to_vec());
        Self {
            shared,
            config,
            own: Bytes::from(own),
            lease: None,
            renewed: Instant::now(),
            standing: Standing::Unknown,
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
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
                Ok(()) = info.changed() => {}
                Ok(()) = connection.changed() => {}
            }
            tokio::select! {
                // What was asked and not awaited to its end runs out by itself.
                () = stop.cancelled() => break,
                () = self.keep() => {}
            }
        }
        self.let_go().await;
    }

    async fn keep(&mut self) {
        let before = self.standing;
        self.keep_lease().await;
        if self.standing != before {
            match self.standing {
                Standing::Leads { .. } => {
                    info!(worker = %self.config.worker, "this shim serves the worker");
                }
                Standing::Yields => {
                    warn!(worker = %self.config.worker, "another shim serves this worker");
                }
                Standing::Lapsed => {
                    warn!(worker = %self.config.worker, "the worker's lease lapsed");
                }
                Standing::Unknown => {}
            }
            self.shared.standing.send_replace(self.standing);
        }
        if matches!(self.standing, Standing::Leads { .. }) {
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
                // Its key is gone, or another's.
                Ok(Ok(Err(_lost))) => self.lapse(),
                Ok(Err(_)) | Err(_) if self.renewed.elapsed() < LEASE_TTL => return,
                // It ran out unseen: somebody else may have it by now.
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
                self.standing = Standing::Leads { term: self.terms };
            }
            Ok(Ok(None)) => self.standing = Standing::Yields,
            Ok(Err(_)) | Err(_) => {}
        }
    }

    fn lapse(&mut self) {
        self.lease = None;
        self.standing = Standing::Lapsed;
    }

    /// Whatever is there is replaced: it is this worker's, and the lease says who speaks for it.
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

    /// A clean stop: deregisters, and lets the next shim begin at once.
    async fn let_go(self) {
        let deregister = async {
            if let Some(revision) = self.registration {
                let key = self.shared.subjects.worker_key(&self.config.worker);
                match self.shared.plane.delete(key, revision).await {
                    Ok(()) | Err(PlaneError::Conflict) => {}
                    Err(error) => debug!(%error, "the registration runs out by itself"),
                }
            }
            if let Some(lease) = self.lease
                && let Err(error) = lease.release().await
            {
                debug!(%error, "the lease runs out by itself");
            }
        };
        if timeout(RELEASE_MAX, deregister).await.is_err() {
            debug!("lease and registration run out by themselves");
        }
    }

    fn entry(&self) -> WorkerEntry {
        let info = Arc::clone(&self.shared.info.borrow());
        let views = self.shared.views();
        let told = views.iter().find_map(|view| view.block_size);
        WorkerEntry {
            worker: self.config.worker.clone(),
            url: self.config.advertise_url.trim_end_matches('/').to_owned(),
            models: info.models.clone(),
            loras: info.loras.clone(),
            ranks: self.config.ranks,
            block_size: told.or(self.config.block_size).or(info.block_size),
            blocks_per_rank: info.blocks,
            max_model_len: info.max_model_len,
            main_attention_only: all_say(
                self.config.ranks,
                views.iter().map(|view| view.main_attention_only),
            ),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// What every rank says. One that has said nothing yet may say no.
fn all_say(ranks: u32, said: impl Iterator<Item = bool>) -> bool {
    let mut yes = 0;
    for said in said {
        if !said {
            return false;
        }
        yes += 1;
    }
    yes == ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_of_a_rank_is_no_yes() {
        assert!(!all_say(1, [].into_iter()));
        assert!(!all_say(2, [true].into_iter()));
        assert!(!all_say(2, [true, false].into_iter()));
        assert!(all_say(2, [true, true].into_iter()));
    }
}
