//! Keys of engines that have one of their own.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use axum::http::{HeaderMap, HeaderName, header};
use warmroute_proto::WorkerId;
use warmroute_shim::EngineKey;

/// Anthropic's header for keys.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Keys by worker, each for one URL: a worker that is declared again with another URL does not get
/// its key sent to the old one. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EngineKeys(Arc<RwLock<BTreeMap<WorkerId, KeyOfUrl>>>);

#[derive(Debug)]
struct KeyOfUrl {
    url: String,
    key: EngineKey,
}

impl EngineKeys {
    /// Sets or removes the key of a worker at this URL.
    pub(crate) fn set(&self, worker: &WorkerId, url: &str, key: Option<EngineKey>) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let url = url.to_owned();
        match key {
            Some(key) => keys.insert(worker.clone(), KeyOfUrl { url, key }),
            None => keys.remove(worker),
        };
    }

    /// Replaces the client's key by the worker's, if it has one for this URL.
    pub(crate) fn authorize(&self, worker: &WorkerId, url: &str, headers: &mut HeaderMap) {
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = keys.get(worker).filter(|own| own.url == url) {
            headers.remove(API_KEY);
            headers.insert(header::AUTHORIZATION, own.key.header().clone());
        }
    }

    /// The headers of the router's own requests to a worker.
    pub(crate) fn headers(&self, worker: &WorkerId, url: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        self.authorize(worker, url, &mut headers);
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_sent_to_its_url_only() {
        let (keys, worker) = (EngineKeys::default(), WorkerId::from("w"));
        let key = EngineKey::parse("secret").unwrap();
        keys.set(&worker, "https://a:1", Some(key));
        let sent = |url| keys.headers(&worker, url).remove(header::AUTHORIZATION);
        assert_eq!(sent("https://a:1").unwrap(), "Bearer secret");
        assert_eq!(sent("http://a:1"), None);
        keys.set(&worker, "https://a:1", None);
        assert_eq!(sent("https://a:1"), None);
    }
}
