//! The workers that one embedded router may have together.

use std::collections::BTreeSet;

use warmroute_proto::WorkerId;

use super::WorkerSpec;

/// Most workers. Each has a shim, which is five tasks and two sockets a rank.
pub(super) const WORKERS_MAX: usize = 1024;

/// Most ranks of all workers.
const RANKS_MAX: u64 = 4096;

/// Why workers cannot be served together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerSetError {
    #[error("two workers are named {0}; give one another id=")]
    Id(WorkerId),
    #[error("two workers have the URL {0}")]
    Url(String),
    #[error("two workers have the endpoint {0}")]
    Endpoint(String),
    #[error("more than {WORKERS_MAX} workers, or {RANKS_MAX} ranks")]
    TooMany,
}

/// Two shims of one source contend for its lease; two workers at one URL count its load twice.
pub(crate) fn check<'a>(
    workers: impl IntoIterator<Item = &'a WorkerSpec>,
) -> Result<(), WorkerSetError> {
    let (mut ids, mut urls, mut endpoints) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut ranks = 0;
    for worker in workers {
        if !ids.insert(&worker.id) {
            return Err(WorkerSetError::Id(worker.id.clone()));
        }
        if !urls.insert(&worker.url) {
            return Err(WorkerSetError::Url(worker.url.clone()));
        }
        for endpoint in worker.endpoints() {
            if !endpoints.insert(endpoint) {
                return Err(WorkerSetError::Endpoint(endpoint.clone()));
            }
        }
        ranks += u64::from(worker.ranks.get());
        if ids.len() > WORKERS_MAX || ranks > RANKS_MAX {
            return Err(WorkerSetError::TooMany);
        }
    }
    Ok(())
}

impl WorkerSpec {
    fn endpoints(&self) -> impl Iterator<Item = &String> {
        self.kv.iter().chain(&self.replay)
    }

    /// The two have a name, a URL or an endpoint in common: one can only run without the other.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        check([self, other]).is_err()
    }
}
