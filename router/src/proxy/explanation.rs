//! Which clients get headers about the routing decision.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use warmroute_process::access::is_operator;

use crate::settings::{ExplainRule, Settings};

/// Carries an operator's key on the public port.
const ADMIN_KEY: HeaderName = HeaderName::from_static("x-warmroute-admin-key");

/// What a client may know of the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Explanation {
    #[default]
    None,
    /// All but names of workers that are addresses.
    WithoutAddresses,
    Whole,
}

impl Explanation {
    /// Removes the header with an operator's key, which no engine may get.
    pub(super) fn take(settings: &Settings, headers: &mut HeaderMap) -> Self {
        let key = headers.remove(ADMIN_KEY);
        let keys = settings.admin_keys();
        let is_operator = || {
            let key = key.as_ref().map(HeaderValue::as_bytes);
            key.is_some_and(|key| is_operator(&keys, key))
        };
        match settings.explain_headers() {
            ExplainRule::Off => Self::None,
            ExplainRule::AdminKey | ExplainRule::All if is_operator() => Self::Whole,
            ExplainRule::AdminKey => Self::None,
            ExplainRule::All => Self::WithoutAddresses,
        }
    }
}
