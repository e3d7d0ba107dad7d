//! Leases: a registry key written by compare-and-set, which expires unless its holder renews it.
//!
//! [`Lease`] does single writes, for locks that are held once. [`LeaseHolder`] keeps a lease for as
//! long as it is polled: it acquires, renews, retries, and treats the lease as expired by its own
//! clock. When to write and when a lease expires is decided by [`LeaseTiming`], which is pure.
//!
//! Invariant: a key that was written may be ours although the answer was lost. The writer
//! recognises it by its value, so the values of two holders must never be equal.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep_until, timeout};

use super::{Plane, PlaneError, PutIf, RETRY_DELAY, Revision};

/// A lease expires this long after its last renewal.
pub const LEASE_TTL: Duration = Duration::from_secs(6);

/// Delay between two renewals, and the most that one may take. Two of three may fail.
pub const LEASE_RENEWAL: Duration = Duration::from_secs(2);

/// Most time that a release may take. A lease that is not released expires.
const RELEASE_MAX: Duration = Duration::from_secs(1);

/// Bound on the values kept to recognise our own writes. A lease expires before as many fail.
const UNCONFIRMED_MAX: usize = 8;

/// A key under a lease. Dropping it lets the lease expire; [`Lease::release`] deletes the key.
pub struct Lease {
    plane: Arc<dyn Plane>,
    key: String,
    ttl: Duration,
    /// The key's revision as of our last confirmed write; `None` while it is not ours.
    revision: Option<Revision>,
    /// Values of writes whose outcome is unknown, the newest last.
    unconfirmed: VecDeque<Bytes>,
}

/// Outcome of a write to a lease's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseWrite {
    /// The key is ours, with this revision.
    Held(Revision),
    /// The key was ours: it expired, or another process has it.
    Lost,
    /// Another process holds the key.
    HeldElsewhere,
}

impl Lease {
    /// A lease that is not held yet.
    #[must_use]
    pub const fn new(plane: Arc<dyn Plane>, key: String, ttl: Duration) -> Self {
        Self {
            plane,
            key,
            ttl,
            revision: None,
            unconfirmed: VecDeque::new(),
        }
    }

    /// The held lease, or `None` if another process holds the key.
    pub async fn acquire(
        plane: Arc<dyn Plane>,
        key: String,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Option<Self>, PlaneError> {
        let mut lease = Self::new(plane, key, ttl);
        match lease.write(value).await? {
            LeaseWrite::Held(_) => Ok(Some(lease)),
            LeaseWrite::Lost | LeaseWrite::HeldElsewhere => Ok(None),
        }
    }

    /// Acquires or renews the lease with this value. After an error the key may have been written;
    /// the next write finds out. Cancel-safe in the same sense.
    pub async fn write(&mut self, value: Bytes) -> Result<LeaseWrite, PlaneError> {
        self.note_unconfirmed(&value);
        let mut put = self.put(value.clone()).await;
        if put == Err(PlaneError::Conflict) && self.adopt_own_write().await? {
            // What was found may be about to expire.
            put = self.put(value).await;
        }
        match put {
            Ok(revision) => {
                self.revision = Some(revision);
                self.unconfirmed.clear();
                Ok(LeaseWrite::Held(revision))
            }
            Err(PlaneError::Conflict) => Ok(match self.revision.take() {
                Some(_) => LeaseWrite::Lost,
                None => LeaseWrite::HeldElsewhere,
            }),
            Err(error) => Err(error),
        }
    }

    /// Deletes the key if it is still ours.
    pub async fn release(mut self) -> Result<(), PlaneError> {
        if !self.unconfirmed.is_empty() {
            self.adopt_own_write().await?;
        }
        let Some(revision) = self.revision else {
            return Ok(());
        };
        match self.plane.delete(self.key, revision).await {
            Ok(()) | Err(PlaneError::Conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, value: Bytes) -> Result<Revision, PlaneError> {
        let condition = self.revision.map_or(PutIf::Absent, PutIf::Revision);
        let key = self.key.clone();
        self.plane.put(key, value, condition, Some(self.ttl)).await
    }

    /// Keeps the invariant before the write is sent, so that a dropped write is recognised too.
    fn note_unconfirmed(&mut self, value: &Bytes) {
        if self.unconfirmed.back() == Some(value) {
            return;
        }
        if self.unconfirmed.len() == UNCONFIRMED_MAX {
            self.unconfirmed.pop_front();
        }
        self.unconfirmed.push_back(value.clone());
    }

    /// Takes over the key's revision if its value is one of ours. Returns whether it is.
    async fn adopt_own_write(&mut self) -> Result<bool, PlaneError> {
        let entry = self.plane.get(self.key.clone()).await?;
        let own = entry.filter(|entry| self.unconfirmed.contains(&entry.value));
        if let Some(entry) = &own {
            self.revision = Some(entry.revision);
        }
        Ok(own.is_some())
    }
}

/// A change that [`LeaseHolder::next`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// The lease was not held and is now. The revision is new: no two acquisitions have the same.
    Acquired(Revision),
    Renewed(Revision),
    /// The lease expired by our clock, or its key was deleted or overwritten.
    Lost,
    /// Another process holds the key. Reported at every attempt.
    HeldElsewhere,
}

/// Acquires a lease and keeps it, for as long as [`LeaseHolder::next`] is polled.
pub struct LeaseHolder {
    state: LeaseState,
    timing: LeaseTiming,
}

enum LeaseState {
    Idle(Lease),
    Writing(PendingWrite),
    Released,
}

type PendingWrite = Pin<Box<dyn Future<Output = FinishedWrite> + Send>>;

struct FinishedWrite {
    lease: Lease,
    sent: Instant,
    /// `None` if the plane neither confirmed nor refused it.
    outcome: Option<LeaseWrite>,
}

impl LeaseHolder {
    /// A holder of this key that acquires it at the first [`LeaseHolder::next`].
    #[must_use]
    pub fn new(plane: Arc<dyn Plane>, key: String) -> Self {
        Self {
            state: LeaseState::Idle(Lease::new(plane, key, LEASE_TTL)),
            timing: LeaseTiming::new(Instant::now()),
        }
    }

    /// The next change of the lease; `value` gives what each write stores. Pending for ever after a
    /// release. Cancel-safe: a write under way continues at the next call.
    pub async fn next(&mut self, value: impl Fn() -> Bytes) -> LeaseEvent {
        loop {
            let expiry = sleep_until_some(self.timing.expiry);
            let written = match &mut self.state {
                LeaseState::Idle(_) => {
                    sleep_until(self.timing.wake()).await;
                    None
                }
                LeaseState::Writing(write) => tokio::select! {
                    biased;
                    written = write => Some(written),
                    () = expiry => None,
                },
                LeaseState::Released => std::future::pending().await,
            };
            let now = Instant::now();
            let event = match written {
                Some(FinishedWrite {
                    lease,
                    sent,
                    outcome,
                }) => {
                    self.state = LeaseState::Idle(lease);
                    self.timing.written(sent, outcome, now)
                }
                None => self.timing.expire(now),
            };
            if let Some(event) = event {
                return event;
            }
            if self.timing.due <= now {
                self.start(now, &value);
            }
        }
    }

    /// Makes the next write due immediately.
    pub fn renew_now(&mut self) {
        self.timing.due = Instant::now();
    }

    /// Deletes the key if it is held. Takes one second at most; on failure the lease expires.
    pub async fn release(&mut self) {
        let state = std::mem::replace(&mut self.state, LeaseState::Released);
        let release = async {
            match state {
                LeaseState::Idle(lease) => lease.release().await,
                LeaseState::Writing(write) => write.await.lease.release().await,
                LeaseState::Released => Ok(()),
            }
        };
        match timeout(RELEASE_MAX, release).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "lease not released, it expires"),
            Err(_) => tracing::debug!("lease not released in time, it expires"),
        }
    }

    fn start(&mut self, now: Instant, value: impl Fn() -> Bytes) {
        self.state = match std::mem::replace(&mut self.state, LeaseState::Released) {
            LeaseState::Idle(lease) => LeaseState::Writing(Box::pin(write(lease, value(), now))),
            state @ (LeaseState::Writing(_) | LeaseState::Released) => state,
        };
    }
}

async fn write(mut lease: Lease, value: Bytes, sent: Instant) -> FinishedWrite {
    let outcome = match timeout(LEASE_RENEWAL, lease.write(value)).await {
        Ok(Ok(outcome)) => Some(outcome),
        Ok(Err(error)) => {
            tracing::debug!(%error, "lease not written");
            None
        }
        Err(_) => {
            tracing::debug!("lease not written in time");
            None
        }
    };
    FinishedWrite {
        lease,
        sent,
        outcome,
    }
}

async fn sleep_until_some(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// When a lease is written next and when it expires. Pure.
struct LeaseTiming {
    due: Instant,
    /// One TTL after the last confirmed write was sent; `None` while the lease is not held.
    expiry: Option<Instant>,
}

impl LeaseTiming {
    const fn new(now: Instant) -> Self {
        Self {
            due: now,
            expiry: None,
        }
    }

    fn wake(&self) -> Instant {
        self.expiry.map_or(self.due, |expiry| self.due.min(expiry))
    }

    fn expire(&mut self, now: Instant) -> Option<LeaseEvent> {
        self.expiry.take_if(|expiry| *expiry <= now)?;
        Some(LeaseEvent::Lost)
    }

    fn written(
        &mut self,
        sent: Instant,
        outcome: Option<LeaseWrite>,
        now: Instant,
    ) -> Option<LeaseEvent> {
        let expiry = sent + LEASE_TTL;
        match outcome {
            Some(LeaseWrite::Held(revision)) if now < expiry => {
                self.due = sent + LEASE_RENEWAL;
                Some(match self.expiry.replace(expiry) {
                    Some(_) => LeaseEvent::Renewed(revision),
                    None => LeaseEvent::Acquired(revision),
                })
            }
            Some(LeaseWrite::Lost) => {
                self.due = now;
                self.expiry.take().map(|_| LeaseEvent::Lost)
            }
            Some(LeaseWrite::HeldElsewhere) => {
                self.due = now + LEASE_RENEWAL;
                self.expiry = None;
                Some(LeaseEvent::HeldElsewhere)
            }
            Some(LeaseWrite::Held(_)) | None => {
                self.due = now + RETRY_DELAY;
                self.expire(now)
            }
        }
    }
}

#[cfg(test)]
mod tests;
