//! From an engine's response head to the client's: headers, the tracked body, the audit at its end.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use warmroute_proto::Tier;

use super::App;
use super::attempt::{EngineHead, Placement};
use super::call::Call;
use super::explanation::{Explanation, name_without_address};
use super::forward::EngineAnswer;
use super::headers;
use super::resume::ResumableAnswer;
use super::silence::SilenceWatch;
use super::stream::{BodyWatch, Flight, FlightProgress, KeptAnswer, OnUsage, TrackedBody};
use crate::answer_end::AnswerEnd;
use crate::openai::StreamObserver;
use crate::route::Decision;

const EVENTS: &str = "text/event-stream";

/// Takes the first bytes of an answer's body.
pub(super) type OnBeginning = Box<dyn FnOnce(&[u8]) + Send>;

/// What is read of an answer, besides what the accounts need.
#[derive(Default)]
pub(super) struct AnswerReaders {
    pub on_usage: Option<OnUsage>,
    pub on_beginning: Option<OnBeginning>,
    /// Present if the answer is a stream that may be resumed.
    pub resumable: Option<Box<ResumableAnswer>>,
}

pub(super) fn respond(
    app: &App,
    call: Call,
    answer: EngineAnswer,
    readers: AnswerReaders,
) -> Response {
    let watch = watch(app, answer.head.response.headers());
    watched(app, call, answer, readers, watch)
}

/// An answer that an earlier request generated, and was charged for.
pub(super) fn respond_stored(app: &App, call: Call, answer: EngineAnswer) -> Response {
    let readers = AnswerReaders::default();
    watched(app, call, answer, readers, BodyWatch::Nothing)
}

fn watched(
    app: &App,
    mut call: Call,
    answer: EngineAnswer,
    mut readers: AnswerReaders,
    watch: BodyWatch,
) -> Response {
    let EngineHead {
        response,
        early,
        is_error,
        was_late,
    } = answer.head;
    if was_late {
        app.metrics.passed_late_stream();
    }
    let Placement {
        decision,
        slot,
        tracked,
        losses,
        rule,
        ..
    } = answer.placement;
    let (mut parts, body) = response.into_parts();
    headers::strip_hop_by_hop(&mut parts.headers);
    headers::hide_host(&mut parts.headers);
    headers::hide_explanation(&mut parts.headers);
    if !is_open_stream(parts.status, &parts.headers) {
        readers.resumable = None;
    }
    explain(app, &mut parts.headers, &decision, call.explanation());
    call.sign(&mut parts.headers);
    let block_tokens = decision.claim.block_tokens().into();
    call.report.status = parts.status.as_u16();
    let source = decision.source.clone();
    call.report.placed(decision, || app.fleet.catalog());
    let is_stream = is_open_stream(parts.status, &parts.headers);
    let pause_max = app.settings.current().token_timeout();
    let silence = is_stream.then(|| SilenceWatch::new(losses, source, pause_max));
    let end = AnswerEnd::of(parts.status, is_error, rule);
    let progress = FlightProgress::judged(end.failure().is_some());
    let flight = Flight {
        call,
        slot: Some(slot),
        tracked: Some(tracked),
        status: parts.status,
        rule,
        silence,
        watch,
        block_tokens,
        readers,
        metrics: Arc::clone(&app.metrics),
        progress,
    };
    Response::from_parts(parts, Body::new(TrackedBody::new(early, body, flight)))
}

/// A stream of events without a length.
pub(super) fn is_open_stream(status: StatusCode, headers: &HeaderMap) -> bool {
    status == StatusCode::OK
        && read_type(headers).starts_with(EVENTS)
        && !headers.contains_key(header::CONTENT_LENGTH)
}

/// The type of an answer that can be read; empty for an encoded one.
fn read_type(headers: &HeaderMap) -> &str {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.filter(|_| !headers.contains_key(header::CONTENT_ENCODING));
    kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default()
}

fn watch(app: &App, headers: &HeaderMap) -> BodyWatch {
    let kind = read_type(headers);
    if kind.starts_with(EVENTS) {
        BodyWatch::Events(StreamObserver::default())
    } else if kind.starts_with("application/json") {
        BodyWatch::Json(KeptAnswer::new(app.bodies.clone()))
    } else {
        BodyWatch::Nothing
    }
}

/// Adds why this worker was chosen, for clients that may know it. The headers show which prompts are
/// cached, and so what others have sent.
fn explain(app: &App, to: &mut HeaderMap, decision: &Decision, explanation: Explanation) {
    match explanation {
        Explanation::None => return,
        Explanation::Shown => {}
    }
    let settings = app.settings.current();
    let worker = name_without_address(&settings, decision.source.worker.as_str());
    to.insert(headers::WORKER, headers::text_value(&worker));
    for (name, number) in [
        (headers::DP_RANK, decision.source.dp_rank.0),
        (headers::OVERLAP, decision.overlap_blocks),
        (headers::PREDICTED, decision.predicted_blocks),
    ] {
        to.insert(name, HeaderValue::from(number));
    }
    let basis = HeaderValue::from_static(decision.basis().label());
    to.insert(headers::BASIS, basis);
    let state = HeaderValue::from_static(decision.index_state.label());
    to.insert(headers::INDEX_STATE, state);
    let states = Tier::ALL.map(|tier| (tier, *decision.tier_states.get(tier)));
    let exist = states.iter().filter(|(_, state)| !state.is_absent());
    let tiers = exist.map(|(tier, state)| format!("{}={}", tier.label(), state.label()));
    let tiers: Vec<String> = tiers.collect();
    to.insert(headers::TIER_STATES, headers::text_value(&tiers.join(", ")));
}
