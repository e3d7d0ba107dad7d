//! The headers that are passed on, and those that the router writes.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use uuid::Uuid;

use crate::route::SessionKey;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
pub(crate) const WORKER: HeaderName = HeaderName::from_static("x-warmroute-worker");
pub(crate) const DP_RANK: HeaderName = HeaderName::from_static("x-warmroute-dp-rank");
pub(crate) const OVERLAP: HeaderName = HeaderName::from_static("x-warmroute-overlap-blocks");
pub(crate) const PREDICTED: HeaderName = HeaderName::from_static("x-warmroute-predicted-blocks");
pub(crate) const BASIS: HeaderName = HeaderName::from_static("x-warmroute-basis");
pub(crate) const INDEX_STATE: HeaderName = HeaderName::from_static("x-warmroute-index-state");
pub(crate) const TIER_STATES: HeaderName = HeaderName::from_static("x-warmroute-tier-states");

/// The headers that explain a choice.
const EXPLANATION: [HeaderName; 7] = [
    WORKER,
    DP_RANK,
    OVERLAP,
    PREDICTED,
    BASIS,
    INDEX_STATE,
    TIER_STATES,
];

/// A client's wish not to wait in the router's queue.
pub(crate) const DO_NOT_QUEUE: HeaderName = HeaderName::from_static("x-warmroute-do-not-queue");

/// Level in the router's queue; lower is served first.
pub(crate) const PRIORITY: HeaderName = HeaderName::from_static("x-warmroute-priority");

/// Names of a client's session, first to last; after them the body's `user`.
const SESSIONS: [HeaderName; 3] = [
    HeaderName::from_static("x-session-id"),
    HeaderName::from_static("x-dynamo-session-id"),
    HeaderName::from_static("x-user-id"),
];

/// The rank to which vLLM's front end dispatches the request.
pub(crate) const ENGINE_RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Ids by which clients trace a request: passed on, and returned.
pub(crate) const TRACES: [HeaderName; 2] =
    [HeaderName::from_static("x-correlation-id"), TRACEPARENT];

/// The values that a client sent for [`TRACES`].
pub(crate) type Traces = [Option<HeaderValue>; 2];

/// Longest value in bytes that is returned to the client.
const RETURNED_MAX: usize = 256;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// Headers of a connection, not of a message: RFC 9110, section 7.6.1.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Removes the hop-by-hop headers and those that `Connection` names.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Makes a redirect one to a path: an engine names itself by its address, which is not for clients.
pub(crate) fn hide_host(headers: &mut HeaderMap) {
    let Some(location) = headers.get(header::LOCATION) else {
        return;
    };
    let path = location.to_str().ok().and_then(|text| {
        let uri: Uri = text.parse().ok()?;
        let path = uri.path_and_query()?.as_str();
        let is_path = path.starts_with('/') && !path.starts_with("//");
        is_path.then(|| HeaderValue::from_str(path).ok()).flatten()
    });
    match path {
        Some(path) => drop(headers.insert(header::LOCATION, path)),
        None => drop(headers.remove(header::LOCATION)),
    }
}

/// Removes what explains a choice: an engine that is a router must not show its own to clients.
pub(crate) fn hide_explanation(headers: &mut HeaderMap) {
    for name in EXPLANATION {
        headers.remove(name);
    }
}

/// Both framings of a body, or a length that is no single number: RFC 9112, section 6.3, treats such
/// a message as an attack.
pub(crate) fn is_length_unclear(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(length) = lengths.next() else {
        return false;
    };
    let is_number = length.as_bytes().iter().all(u8::is_ascii_digit);
    !is_number || lengths.next().is_some() || headers.contains_key(header::TRANSFER_ENCODING)
}

/// The session that a client names in its headers.
pub(crate) fn session(headers: &HeaderMap) -> Option<SessionKey> {
    let named = SESSIONS.into_iter().filter_map(|name| headers.get(name));
    let mut named = named.filter_map(|value| SessionKey::named(value.to_str().ok()?));
    named.next()
}

/// A client's headers as an engine gets them. The body was read and decoded, and may be rewritten, so
/// its length is set again; a client cannot choose the rank. Answers must not be compressed: the router reads
/// them for a tenant's account of tokens.
pub(crate) fn to_engine(mut headers: HeaderMap, request_id: &HeaderValue) -> HeaderMap {
    strip_hop_by_hop(&mut headers);
    for ours in [
        header::HOST,
        header::CONTENT_ENCODING,
        header::CONTENT_LENGTH,
        header::EXPECT,
        header::ACCEPT_ENCODING,
        DO_NOT_QUEUE,
        PRIORITY,
    ] {
        headers.remove(ours);
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers
}

/// The client's request id, or a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> HeaderValue {
    returned(headers, &REQUEST_ID).unwrap_or_else(|| {
        let mut buffer = Uuid::encode_buffer();
        let id = new_id().hyphenated().encode_lower(&mut buffer);
        HeaderValue::from_str(id).unwrap_or_else(|_| HeaderValue::from_static("-"))
    })
}

/// An id that this process gives once, and that no client can guess: engines refuse a request whose
/// id is in use. Needs no system call; two processes share ids with a probability of 2^-64.
fn new_id() -> Uuid {
    static KEYS: LazyLock<[RandomState; 2]> = LazyLock::new(<[RandomState; 2]>::default);
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let [high, low] = [&KEYS[0], &KEYS[1]].map(|key| key.hash_one(count));
    Uuid::from_u64_pair(high, low)
}

/// Path and query as the client sent them.
pub(crate) fn path(uri: &Uri) -> String {
    let path = uri.path_and_query();
    path.map_or("/", |path| path.as_str()).to_owned()
}

pub(crate) fn traces(headers: &HeaderMap) -> Traces {
    TRACES.map(|name| returned(headers, &name))
}

fn returned(headers: &HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let fits = |value: &&HeaderValue| !value.is_empty() && value.len() <= RETURNED_MAX;
    headers.get(name).filter(fits).cloned()
}

/// An operator's text as a header value. Characters that are not allowed become `?`.
pub(crate) fn text_value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or_else(|_| {
        let safe: String = text
            .chars()
            .map(|c| if c.is_ascii_graphic() { c } else { '?' })
            .collect();
        HeaderValue::from_str(&safe).unwrap_or_else(|_| HeaderValue::from_static("?"))
    })
}

/// The pause that an overloaded engine names in seconds.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(entries: &[(&'static str, &'static str)]) -> HeaderMap {
        entries
            .iter()
            .map(|&(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn an_engines_own_explanation_is_hidden() {
        let mut headers = map(&[("x-warmroute-overlap-blocks", "7"), ("x-other", "kept")]);
        for name in EXPLANATION {
            headers.insert(name, HeaderValue::from_static("1"));
        }
        hide_explanation(&mut headers);
        assert_eq!(headers, map(&[("x-other", "kept")]));
    }

    #[test]
    fn hop_by_hop_headers_are_removed() {
        let mut headers = map(&[
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("authorization", "Bearer t"),
        ]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers, map(&[("authorization", "Bearer t")]));
    }

    #[test]
    fn a_redirect_shows_no_address() {
        for (location, shown) in [
            ("/v1/models?a=1", Some("/v1/models?a=1")),
            ("http://10.0.0.7:8000/v1/models?a=1", Some("/v1/models?a=1")),
            ("http://10.0.0.7:8000", Some("/")),
            ("//10.0.0.7:8000/v1", None),
            ("http://10.0.0.7//10.0.0.7/v1", None),
            ("10.0.0.7:8000", None),
            ("\u{e9}", None),
        ] {
            let value = HeaderValue::from_str(location).unwrap();
            let mut headers = HeaderMap::from_iter([(header::LOCATION, value)]);
            hide_host(&mut headers);
            let found = headers
                .get(header::LOCATION)
                .map(|one| one.to_str().unwrap());
            assert_eq!(found, shown, "{location}");
        }
    }

    #[test]
    fn the_engine_gets_the_clients_headers_except_the_routers() {
        let id = HeaderValue::from_static("r1");
        let headers = map(&[
            ("host", "router"),
            ("content-encoding", "gzip"),
            ("content-length", "5"),
            ("expect", "100-continue"),
            ("accept-encoding", "gzip"),
            ("x-data-parallel-rank", "7"),
            ("x-warmroute-do-not-queue", "1"),
            ("x-warmroute-priority", "-1"),
            ("traceparent", "00-1-2-3"),
        ]);
        assert_eq!(
            to_engine(headers, &id),
            map(&[
                // Replaced when the request is addressed.
                ("x-data-parallel-rank", "7"),
                ("traceparent", "00-1-2-3"),
                ("x-request-id", "r1"),
            ])
        );
    }

    #[test]
    fn the_first_session_header_that_names_something_counts() {
        let named = |entries: &[_]| session(&map(entries));
        let one = SessionKey::named("a");
        assert_eq!(named(&[("x-user-id", "b"), ("x-session-id", "a")]), one);
        assert_eq!(named(&[("x-user-id", "a"), ("x-session-id", "")]), one);
        assert_eq!(
            named(&[("x-dynamo-session-id", "a"), ("x-user-id", "b")]),
            one
        );
        assert_eq!(named(&[("x-request-id", "a")]), None);
    }

    #[test]
    fn a_request_id_is_kept_or_made() {
        assert_eq!(request_id(&map(&[("x-request-id", "mine")])), "mine");
        let made = request_id(&HeaderMap::new());
        assert_eq!(made.len(), 36);
        // One id shows no part of the next.
        let next = request_id(&HeaderMap::new());
        let [made, next] = [&made, &next].map(|id| {
            let (high, low) = id.to_str().unwrap().split_at(18);
            (high.to_owned(), low.to_owned())
        });
        assert!(made.0 != next.0 && made.1 != next.1, "{made:?} {next:?}");
    }
}
