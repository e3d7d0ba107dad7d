//! Which clients get headers about the routing decision, and what these call a worker.

use std::borrow::Cow;
use std::sync::LazyLock;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use ring::hmac::{HMAC_SHA256, Key, sign};
use uuid::Uuid;
use warmroute_process::access::is_operator;

use crate::settings::{ExplainRule, Settings};

/// Carries an operator's key on the public port.
const ADMIN_KEY: HeaderName = HeaderName::from_static("x-warmroute-admin-key");

/// What a client may know of the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Explanation {
    #[default]
    None,
    Shown,
}

impl Explanation {
    /// Removes the header with an operator's key, which no engine may get.
    pub(super) fn take(settings: &Settings, headers: &mut HeaderMap) -> Self {
        let key = headers.remove(ADMIN_KEY);
        let is_operator = || {
            let key = key.as_ref().map(HeaderValue::as_bytes);
            key.is_some_and(|key| is_operator(&settings.admin_keys().unwrap_or_default(), key))
        };
        match settings.explain_headers() {
            ExplainRule::Off => Self::None,
            ExplainRule::AdminKey if !is_operator() => Self::None,
            ExplainRule::AdminKey | ExplainRule::All => Self::Shown,
        }
    }
}

/// A worker's name on the public port, which shows no address to any client. A name may be an address
/// unless it has letters, digits, `-` and `_` only. Clients can list all addresses of a network, so
/// the name is a keyed hash. Routers with the same operators' keys show the same names.
pub(super) fn name_without_address<'w>(settings: &Settings, worker: &'w str) -> Cow<'w, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    if worker.bytes().all(is_plain) {
        return worker.into();
    }
    let tag = sign(&name_key(settings), worker.as_bytes());
    let digits = tag.as_ref().iter().take(4);
    let digits: String = digits.map(|byte| format!("{byte:02x}")).collect();
    format!("worker-{digits}").into()
}

fn name_key(settings: &Settings) -> Key {
    static OF_PROCESS: LazyLock<Key> = LazyLock::new(|| {
        let random = [Uuid::new_v4(), Uuid::new_v4()].map(Uuid::into_bytes);
        Key::new(HMAC_SHA256, random.as_flattened())
    });
    let keys = settings.admin_keys().unwrap_or_default();
    if keys.is_empty() {
        return OF_PROCESS.clone();
    }
    let mut hashes: Vec<_> = keys.iter().map(|one| one.key.hash.to_hex()).collect();
    hashes.sort_unstable();
    Key::new(HMAC_SHA256, hashes.concat().as_bytes())
}
