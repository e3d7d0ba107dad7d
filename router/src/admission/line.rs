//! Where a request joins the queue, and how much may wait.

use warmroute_process::access::keys::KeyId;

/// The requests of one tenant share a line. `None`: there are no tenants.
pub(crate) type TenantName = Option<KeyId>;

/// What may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueBounds {
    /// Requests of all models.
    pub requests: usize,
    pub requests_per_model: usize,
    /// Bytes of all models' requests.
    pub bytes: usize,
}

/// The queue is at a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueAtBound;

/// The line that a request joins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueLine {
    pub model: String,
    /// Lower is served first.
    pub level: i64,
    pub tenant: TenantName,
}
