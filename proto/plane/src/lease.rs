//! The one lock idiom: a key under a lease, written by compare-and-set, renewed by its holder.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::{Plane, PlaneError, PutIf, Revision};

/// A key that is ours as long as we renew it in time. Dropping it lets it run out;
/// [`Lease::release`] ends it at once.
///
/// A renewal may be written without its acknowledgement coming back. Its holder finds it again by its
/// value, so the values of two holders must never be equal.
pub struct Lease {
    plane: Arc<dyn Plane>,
    key: String,
    ttl: Duration,
    revision: Revision,
    /// Values of renewals whose outcome is unknown, the newest last. All of them were to replace
    /// `revision`, so that at most one was written.
    unsure: VecDeque<Bytes>,
}

/// Long before that many renewals failed the lease has run out.
const UNSURE_MAX: usize = 8;

/// Somebody else holds the key, or nobody does: the holder must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is lost")]
pub struct LeaseLost;

impl Lease {
    /// Takes the key if nobody holds it; `None` if somebody does. A key that has this very value is
    /// its writer's: it was taken, or lost from sight, without the answer coming back.
    pub async fn acquire(
        plane: Arc<dyn Plane>,
        key: String,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Option<Self>, PlaneError> {
        let put = plane.put(key.clone(), value.clone(), PutIf::Absent, Some(ttl));
        let (revision, is_found) = match put.await {
            Ok(revision) => (revision, false),
            Err(PlaneError::Conflict) => {
                let entry = plane.get(key.clone()).await?;
                match entry.filter(|entry| entry.value == value) {
                    Some(own) => (own.revision, true),
                    None => return Ok(None),
                }
            }
            Err(error) => return Err(error),
        };
        let mut lease = Self {
            plane,
            key,
            ttl,
            revision,
            unsure: VecDeque::new(),
        };
        // What was found may be about to run out.
        if is_found && lease.renew(value).await?.is_err() {
            return Ok(None);
        }
        Ok(Some(lease))
    }

    /// The key's revision as of the last write that was acknowledged.
    #[must_use]
    pub const fn revision(&self) -> Revision {
        self.revision
    }

    /// Renews, with a value that may be new. `Ok(Err(LeaseLost))` is final; an outer error says that
    /// the plane did not answer, and that the lease may run out before it does.
    pub async fn renew(&mut self, value: Bytes) -> Result<Result<(), LeaseLost>, PlaneError> {
        match self.put(value.clone()).await {
            Err(PlaneError::Conflict) if self.finds_its_own().await? => {}
            put => return self.renewed(put, value),
        }
        let put = self.put(value.clone()).await;
        self.renewed(put, value)
    }

    async fn put(&self, value: Bytes) -> Result<Revision, PlaneError> {
        let condition = PutIf::Revision(self.revision);
        self.plane
            .put(self.key.clone(), value, condition, Some(self.ttl))
            .await
    }

    fn renewed(
        &mut self,
        put: Result<Revision, PlaneError>,
        value: Bytes,
    ) -> Result<Result<(), LeaseLost>, PlaneError> {
        match put {
            Ok(revision) => {
                self.revision = revision;
                self.unsure.clear();
                Ok(Ok(()))
            }
            Err(PlaneError::Conflict) => Ok(Err(LeaseLost)),
            Err(error) => {
                if self.unsure.len() == UNSURE_MAX {
                    self.unsure.pop_front();
                }
                self.unsure.push_back(value);
                Err(error)
            }
        }
    }

    /// Is what stands in our way a renewal of our own?
    async fn finds_its_own(&mut self) -> Result<bool, PlaneError> {
        if self.unsure.is_empty() {
            return Ok(false);
        }
        let entry = self.plane.get(self.key.clone()).await?;
        let own = entry.filter(|entry| self.unsure.contains(&entry.value));
        if let Some(entry) = &own {
            self.revision = entry.revision;
            self.unsure.clear();
        }
        Ok(own.is_some())
    }

    /// Gives the key back. That somebody else has it by now is no error.
    pub async fn release(mut self) -> Result<(), PlaneError> {
        self.finds_its_own().await?;
        match self.plane.delete(self.key, self.revision).await {
            Ok(()) | Err(PlaneError::Conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
