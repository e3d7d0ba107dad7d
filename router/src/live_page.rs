//! The live page: `/` of the admin port, for people. Its files are compiled in and load nothing
//! from elsewhere.
//!
//! `/live/events` streams server-sent events: `history` once, then `state` each second. The page
//! reads it with `fetch`, which can send a key. One state is computed for all viewers, and only
//! while there are any ([`LiveSampler`]). Viewers are bounded, and each gets the newest state that
//! its connection has room for: a slow one skips states, and the port closes the connection of one
//! that does not read.

mod history;
mod indexers;
mod sampler;
mod state;

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Duration, Instant, timeout_at};
use warmroute_process::access::{RouteAccess, RouteTable};

use history::SharedHistory;
pub(crate) use sampler::LiveSampler;

/// Viewers at a time. Each may take a state a second, up to half a MiB for 200 workers of 8 ranks.
const VIEWERS_MAX: usize = 16;

/// Longest stream. The page opens another one, for which its key is checked.
const STREAM_MAX: Duration = Duration::from_secs(300);

/// Nothing but the page's own files and stream, and no text becomes markup.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
    img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (header::CACHE_CONTROL, "no-cache"),
];

/// What viewers read.
pub(crate) struct LiveFeed {
    history: SharedHistory,
    /// The newest `state` event; empty before the first.
    states: watch::Sender<Bytes>,
    viewers: Arc<Semaphore>,
}

/// One open stream.
struct LiveViewer {
    states: watch::Receiver<Bytes>,
    ends: Instant,
    _place: OwnedSemaphorePermit,
}

impl LiveFeed {
    fn new() -> Self {
        Self {
            history: SharedHistory::default(),
            states: watch::Sender::default(),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
        }
    }

    fn is_watched(&self) -> bool {
        self.states.receiver_count() > 0
    }
}

/// Declares the page's files: path, content type and text.
macro_rules! files {
    ($($path:literal: $kind:literal = $file:literal,)+) => {
        const FILES: &[(&str, &str, &str)] =
            &[$(($path, $kind, include_str!(concat!("live_page/", $file)))),+];
    };
}

files! {
    "/": "text/html; charset=utf-8" = "page.html",
    "/live/page.css": "text/css; charset=utf-8" = "page.css",
    "/live/page.js": "text/javascript; charset=utf-8" = "page.js",
    "/live/dom.js": "text/javascript; charset=utf-8" = "dom.js",
    "/live/charts.js": "text/javascript; charset=utf-8" = "charts.js",
    "/live/fleet.js": "text/javascript; charset=utf-8" = "fleet.js",
    "/live/decisions.js": "text/javascript; charset=utf-8" = "decisions.js",
    "/live/icon.svg": "image/svg+xml" = "icon.svg",
}

/// The page's files, which hold no data of the fleet, and the stream of its state.
pub(crate) fn routes(feed: &Arc<LiveFeed>) -> RouteTable {
    let stream = RouteTable::default().route("/live/events", RouteAccess::Read, get(open_stream));
    let add = |table: RouteTable,
               &(path, kind, text): &(&'static str, &'static str, &'static str)| {
        let answer = move || async move { (HEADERS, [(header::CONTENT_TYPE, kind)], text) };
        table.route(path, RouteAccess::Open, get(answer))
    };
    FILES.iter().fold(stream.with_state(feed), add)
}

#[cfg(test)]
pub(crate) fn is_file(path: &str) -> bool {
    FILES.iter().any(|(file, ..)| *file == path)
}

async fn open_stream(State(feed): State<Arc<LiveFeed>>) -> Response {
    let Ok(place) = Arc::clone(&feed.viewers).try_acquire_owned() else {
        let error = json!({ "error": format!("{VIEWERS_MAX} viewers are the most at a time") });
        return (StatusCode::SERVICE_UNAVAILABLE, HEADERS, Json(error)).into_response();
    };
    let viewer = LiveViewer {
        states: feed.states.subscribe(),
        ends: Instant::now() + STREAM_MAX,
        _place: place,
    };
    let history = stream::iter([Ok::<_, Infallible>(feed.history.event())]);
    let states = stream::unfold(viewer, |mut viewer| async move {
        let changed = timeout_at(viewer.ends, viewer.states.changed()).await;
        changed.ok()?.ok()?;
        let event = viewer.states.borrow_and_update().clone();
        Some((Ok(event), viewer))
    });
    let kind = [(header::CONTENT_TYPE, "text/event-stream")];
    (HEADERS, kind, Body::from_stream(history.chain(states))).into_response()
}

/// A server-sent event. JSON has no line breaks outside of strings and escapes those inside.
fn event(name: &str, data: &str) -> Bytes {
    format!("event: {name}\ndata: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use axum::http::Request;
    use tower::ServiceExt as _;
    use warmroute_process::access::{BindScope, PortAccess};

    use super::*;

    /// The answer of a port on loopback without keys.
    async fn get_from(feed: &Arc<LiveFeed>, path: &str) -> Response {
        let access = PortAccess::new(BindScope::Loopback, || None);
        let request = Request::get(path).body(Body::empty()).unwrap();
        routes(feed)
            .guarded(&access)
            .oneshot(request)
            .await
            .unwrap()
    }

    #[tokio::test]
    async fn every_file_that_another_names_is_served_and_protected() {
        let feed = Arc::new(LiveFeed::new());
        let mut named = vec!["/".to_owned()];
        for (_, _, text) in FILES {
            let quoted = text.split('"').map(|name| name.trim_start_matches("./"));
            let names = quoted.filter(|name| !name.contains([' ', '$']));
            let files = names.filter(|name| {
                [".js", ".css", ".svg"]
                    .iter()
                    .any(|end| name.ends_with(end))
            });
            named.extend(files.map(|name| format!("/live/{}", name.trim_start_matches("live/"))));
        }
        for (path, ..) in FILES {
            assert!(named.iter().any(|name| name == path), "{path} is not used");
        }
        for path in named {
            let answer = get_from(&feed, &path).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            for (name, value) in HEADERS {
                assert_eq!(answer.headers()[name], value, "{path}");
            }
        }
    }

    #[tokio::test]
    async fn viewers_are_bounded_and_leave_their_places() {
        let feed = Arc::new(LiveFeed::new());
        let mut open = Vec::new();
        for _ in 0..VIEWERS_MAX {
            open.push(get_from(&feed, "/live/events").await);
        }
        let refused = get_from(&feed, "/live/events").await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(feed.is_watched());
        open.clear();
        assert!(!feed.is_watched());
        let answer = get_from(&feed, "/live/events").await;
        assert_eq!(answer.status(), StatusCode::OK);
    }

    #[tokio::test]
    async fn a_slow_viewer_gets_the_newest_state() {
        let feed = Arc::new(LiveFeed::new());
        let answer = get_from(&feed, "/live/events").await;
        for number in 0..100 {
            feed.states
                .send_replace(event("state", &number.to_string()));
        }
        let mut frames = answer.into_body().into_data_stream();
        let history = frames.next().await.unwrap().unwrap();
        assert_eq!(history, "event: history\ndata: []\n\n");
        let state = frames.next().await.unwrap().unwrap();
        assert_eq!(state, "event: state\ndata: 99\n\n");
    }
}
