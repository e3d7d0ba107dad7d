//! Keys of engines that have one of their own.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, header};
use warmroute_proto::WorkerId;
use warmroute_shim::EngineKey;

use crate::tenants::API_KEY;

/// Keys by worker. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineKeys(Arc<RwLock<BTreeMap<WorkerId, EngineKey>>>);

impl EngineKeys {
    /// Sets or removes a worker's key.
    pub(crate) fn set(&self, worker: &WorkerId, key: Option<EngineKey>) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match key {
            Some(key) => keys.insert(worker.clone(), key),
            None => keys.remove(worker),
        };
    }

    /// Replaces the client's key by the worker's, if it has one.
    pub(crate) fn authorize(&self, worker: &WorkerId, headers: &mut HeaderMap) {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = keys.get(worker) {
            headers.remove(API_KEY);
            headers.insert(header::AUTHORIZATION, key.header().clone());
        }
    }

    /// The headers of the router's own requests to a worker.
    pub(crate) fn headers(&self, worker: &WorkerId) -> HeaderMap {
        let mut headers = HeaderMap::new();
        self.authorize(worker, &mut headers);
        headers
    }
}
