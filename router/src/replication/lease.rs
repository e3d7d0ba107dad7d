//! The lease of this router's key: renewed in time, and the source of its incarnations.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep_until};
use warmroute_plane::{Lease, Plane, PlaneError};
use warmroute_proto::load::RouterEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, RouterId, codec};

/// Three renewals may fail.
const TTL: Duration = Duration::from_secs(6);
const RENEW: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(500);

pub(super) struct Keeper {
    plane: Arc<dyn Plane>,
    key: String,
    value: Bytes,
    /// None while nobody holds it for us, or while `writing` has it.
    lease: Option<Lease>,
    writing: Option<BoxFuture<'static, Written>>,
    due: Instant,
    /// The next write's revision is an incarnation.
    is_wanted: bool,
}

/// What came of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Taken(Generation),
    Kept,
    Lost,
}

enum Written {
    Held(Lease),
    Lost,
    /// The lease may still be ours, if there was one.
    Unsure(Option<Lease>),
}

impl Keeper {
    pub(super) fn new(plane: Arc<dyn Plane>, subjects: &Subjects, router: RouterId) -> Self {
        let entry = RouterEntry {
            router,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        Self {
            plane,
            key: subjects.router_key(router),
            value: codec::encode(&entry).unwrap_or_default().into(),
            lease: None,
            writing: None,
            due: Instant::now(),
            is_wanted: false,
        }
    }

    /// A new incarnation is wanted, as soon as may be.
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
        self.due = Instant::now();
    }

    /// The next thing that came of it. Cancel-safe: a write under way goes on at the next call.
    pub(super) async fn next(&mut self) -> Outcome {
        loop {
            if self.writing.is_none() {
                sleep_until(self.due).await;
                self.writing = Some(self.write());
            }
            let Some(writing) = &mut self.writing else {
                continue;
            };
            let written = writing.await;
            self.writing = None;
            if let Some(outcome) = self.written(written) {
                return outcome;
            }
        }
    }

    /// Gives the key back.
    pub(super) async fn release(&mut self) {
        if let Some(writing) = self.writing.take()
            && let Written::Held(lease) | Written::Unsure(Some(lease)) = writing.await
        {
            self.lease = Some(lease);
        }
        if let Some(lease) = self.lease.take()
            && let Err(error) = lease.release().await
        {
            tracing::debug!(%error, "the lease is not given back, it runs out");
        }
    }

    fn write(&mut self) -> BoxFuture<'static, Written> {
        let (plane, key, value) = (
            Arc::clone(&self.plane),
            self.key.clone(),
            self.value.clone(),
        );
        match self.lease.take() {
            Some(lease) => renew(lease, value).boxed(),
            None => acquire(plane, key, value).boxed(),
        }
    }

    fn written(&mut self, written: Written) -> Option<Outcome> {
        let now = Instant::now();
        match written {
            Written::Held(lease) => {
                let revision = Generation(lease.revision().0);
                self.lease = Some(lease);
                self.due = now + RENEW;
                let taken = std::mem::take(&mut self.is_wanted);
                Some(if taken {
                    Outcome::Taken(revision)
                } else {
                    Outcome::Kept
                })
            }
            Written::Lost => {
                self.due = now;
                Some(Outcome::Lost)
            }
            Written::Unsure(lease) => {
                self.lease = lease;
                self.due = now + RETRY;
                None
            }
        }
    }
}

async fn renew(mut lease: Lease, value: Bytes) -> Written {
    match lease.renew(value).await {
        Ok(Ok(())) => Written::Held(lease),
        Ok(Err(_)) => Written::Lost,
        Err(error) => unsure(&error, Some(lease)),
    }
}

async fn acquire(plane: Arc<dyn Plane>, key: String, value: Bytes) -> Written {
    match Lease::acquire(plane, key, value, TTL).await {
        Ok(Some(lease)) => Written::Held(lease),
        // An earlier write of our own, whose word did not come back. It runs out.
        Ok(None) => Written::Unsure(None),
        Err(error) => unsure(&error, None),
    }
}

fn unsure(error: &PlaneError, lease: Option<Lease>) -> Written {
    tracing::debug!(%error, "this router's lease was not written");
    Written::Unsure(lease)
}
