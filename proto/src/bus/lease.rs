//! The one lock idiom: a key under a lease, written by compare-and-set, renewed by its holder.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::{Plane, PlaneError, PutIf, Revision};

/// A key that is ours as long as we renew it in time. Dropping it lets it run out;
/// [`Lease::release`] ends it at once.
pub struct Lease {
    plane: Arc<dyn Plane>,
    key: String,
    ttl: Duration,
    revision: Revision,
}

/// Somebody else holds the key, or nobody does: the holder must stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is lost")]
pub struct LeaseLost;

impl Lease {
    /// Takes the key if nobody holds it; `None` if somebody does.
    pub async fn acquire(
        plane: Arc<dyn Plane>,
        key: String,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Option<Self>, PlaneError> {
        match plane
            .put(key.clone(), value, PutIf::Absent, Some(ttl))
            .await
        {
            Ok(revision) => Ok(Some(Self {
                plane,
                key,
                ttl,
                revision,
            })),
            Err(PlaneError::Conflict) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Renews, with a value that may be new. `Ok(Err(LeaseLost))` is final; an outer error says that
    /// the plane did not answer, and that the lease may run out before it does.
    pub async fn renew(&mut self, value: Bytes) -> Result<Result<(), LeaseLost>, PlaneError> {
        let condition = PutIf::Revision(self.revision);
        let put = self
            .plane
            .put(self.key.clone(), value, condition, Some(self.ttl));
        match put.await {
            Ok(revision) => {
                self.revision = revision;
                Ok(Ok(()))
            }
            Err(PlaneError::Conflict) => Ok(Err(LeaseLost)),
            Err(error) => Err(error),
        }
    }

    /// Gives the key back. That somebody else has it by now is no error.
    pub async fn release(self) -> Result<(), PlaneError> {
        match self.plane.delete(self.key, self.revision).await {
            Ok(()) | Err(PlaneError::Conflict) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
