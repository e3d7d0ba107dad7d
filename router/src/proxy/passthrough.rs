//! Routes whose bodies the router does not understand: sent as they are to the least loaded worker
//! of the model that the body names, as a member of JSON or a field of a form.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, Uri, header};
use axum::response::Response;
use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use warmroute_process::blocking;
use warmroute_proto::{Seed, WorkerId};

use super::App;
use super::body::BufferedBody;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Legs, Routing};
use super::generate::INLINE_BYTES_MAX;
use super::headers;
use super::plan;
use super::queueing::QueueHints;
use super::respond::{AnswerReaders, respond};
use super::waiting::WorkerWait;
use crate::answer_end::AnswerRule;
use crate::error::ProxyError;
use crate::fleet::{ModelCatalog, RequestCase};
use crate::metrics::{CancelPhase, RouteLabel};
use crate::openai::{self, OpenAiError, UnreadableForm};
use crate::route::Prompt;
use crate::route::prompt::BYTES_PER_TOKEN;
use crate::spans::TraceStep;
use crate::tenants::is_form_route;

/// Longest wait for the head of an answer that takes an engine some milliseconds. Above the pauses of
/// an engine whose process loads an adapter or collects garbage.
const BRIEF_MAX: Duration = Duration::from_secs(60);

/// The workers that may get a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Any,
    Only(WorkerId),
}

pub(super) async fn pass(app: &App, route: RouteLabel, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let call = Call::new(route, &parts, &app.sinks);
    match app.read_body(&call, &parts, body).await {
        Ok(body) => pass_read(app, call, parts, body).await,
        Err(error) => app.refuse(call, &error),
    }
}

pub(super) async fn pass_read(
    app: &App,
    mut call: Call,
    parts: Parts,
    body: BufferedBody,
) -> Response {
    call.report.step(TraceStep::ReadBody, call.report.started);
    match forward(app, &mut call, &parts, &body.charged(), Target::Any).await {
        Ok(answer) => respond(app, call, answer, AnswerReaders::default()),
        Err(error) => app.refuse(call, &error),
    }
}

pub(super) async fn forward(
    app: &App,
    call: &mut Call,
    parts: &Parts,
    body: &Bytes,
    target: Target,
) -> Result<EngineAnswer, ProxyError> {
    let hints = QueueHints::read(&parts.headers, call);
    let mut wait = WorkerWait::new(hints);
    let RoutedFields {
        model: named,
        previous,
    } = RoutedFields::read(parts, body).await?;
    let owner = app.previous_worker(call, &parts.headers, previous).await?;
    let target = owner.map_or(target, Target::Only);
    let model = loop {
        match served_model(app, call, parts, named.clone(), &target) {
            Ok(model) => break model,
            Err(error) if wait.before_retry(app, call, &error).await => {}
            Err(error) => return Err(error),
        }
    };
    // An answer that an engine stores is not asked for by its model.
    if !is_stored(&parts.uri) {
        call.check_model(&model)?;
    }
    let catalog = app.fleet.catalog();
    call.report.model(&catalog, &model);
    let block_size = catalog.models.get(&model);
    let block_size = block_size.map_or(plan::ASSUMED_BLOCK_SIZE, plan::block_size);
    // Neither bears load.
    let weightless = parts.method == Method::GET || parts.uri.path().ends_with("tokenize");
    let tokens = if weightless {
        0
    } else {
        app.metrics.unhashed("other_route");
        u32::try_from(body.len() / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
    };
    let prompt = if weightless || app.policy.is_blind() {
        Prompt::opaque(tokens, block_size)
    } else {
        Prompt::of_text(&[body], tokens, block_size, Seed::new(Some(&model), None))
    };
    if is_json(body) {
        call.admit_prompt(tokens)?;
    }
    let request = ForwardedRequest {
        method: parts.method.clone(),
        path: headers::path(&parts.uri),
        headers: call.to_engine(parts.headers.clone()),
        body: body.clone(),
    };
    let owner = match &target {
        Target::Any => None,
        Target::Only(worker) => Some(worker),
    };
    let excluded = app.excluded(owner, &request.headers, &model);
    let mut routing = Routing {
        model,
        prompt: Arc::new(prompt.with_session(headers::session(&parts.headers))),
        index: None,
        streaming: false,
        holds_head: false,
        head_max: is_brief(parts.uri.path()).then_some(BRIEF_MAX),
        // Such a request may have effects that an abort leaves half done.
        movable: false,
        cancel: Some(CancelPhase::BeforeHead),
        rule: AnswerRule::Other,
        case: RequestCase::default(),
        excluded,
        hints,
        legs: Legs::whole(),
    };
    call.report.prompt(&routing.prompt);
    app.forward(call, &request, &mut routing, &mut wait).await
}

/// `/v1/responses/{id}` and its cancel.
fn is_stored(uri: &Uri) -> bool {
    uri.path().starts_with("/v1/responses/") && !uri.path().ends_with("/render")
}

/// Whether an engine answers without its model.
fn is_brief(path: &str) -> bool {
    let ends = ["tokenize", "/render", "/count_tokens"];
    let is_stored = path.starts_with("/v1/responses/");
    is_stored || path == "/version" || ends.iter().any(|end| path.ends_with(end))
}

/// Forms and files have bytes that are no text.
fn is_json(body: &[u8]) -> bool {
    body.trim_ascii_start().starts_with(b"{")
}

/// The model that a request is for. A single model need not be named. A worker of any model that the
/// client may use answers for its version.
fn served_model(
    app: &App,
    call: &Call,
    parts: &Parts,
    named: Option<String>,
    target: &Target,
) -> Result<String, ProxyError> {
    if let Some(named) = named {
        return Ok(named);
    }
    if let Target::Only(worker) = target {
        return app.fleet.model_of(worker).ok_or(ProxyError::NoWorker);
    }
    let catalog = app.fleet.catalog();
    let only = match parts.uri.path() {
        // A gateway decides which requests are for this fleet.
        _ if call.gateway().is_some() => own(call, &catalog),
        "/version" => own(call, &catalog),
        _ => catalog.only_model(),
    };
    only.map(str::to_owned).ok_or_else(|| {
        if catalog.models.is_empty() {
            ProxyError::NoWorker
        } else {
            OpenAiError::missing_model().into()
        }
    })
}

/// A model that the client may use, or else any.
fn own<'a>(call: &Call, catalog: &'a ModelCatalog) -> Option<&'a str> {
    let mut names = catalog.models.keys().map(String::as_str);
    let own = names.clone().find(|name| call.check_model(name).is_ok());
    own.or_else(|| names.next())
}

/// Whether a content type is JSON's, whatever its parameters are.
fn is_json_type(kind: &[u8]) -> bool {
    let end = kind.iter().position(|byte| *byte == b';');
    let kind = kind[..end.unwrap_or(kind.len())].trim_ascii();
    kind.eq_ignore_ascii_case(b"application/json")
}

/// Empty if the client sent none. One that not all parsers read alike is refused.
fn content_type(headers: &HeaderMap) -> Result<Vec<u8>, ProxyError> {
    let mut kinds = headers.get_all(header::CONTENT_TYPE).iter();
    let kind = kinds.next().map(|kind| kind.as_bytes().to_vec());
    let is_odd = kind.as_ref().is_some_and(|kind| !kind.is_ascii());
    if is_odd || kinds.next().is_some() {
        return Err(OpenAiError::unreadable_form(UnreadableForm::ODD_TYPE).into());
    }
    Ok(kind.unwrap_or_default())
}

/// What the router reads of a body. The last of repeated keys wins, as in the engines' parsers; a
/// value that is no string counts as absent.
#[derive(Debug, Default, PartialEq, Eq)]
struct RoutedFields {
    model: Option<String>,
    /// `previous_response_id`: a stored answer that the prompt begins with.
    previous: Option<String>,
}

impl RoutedFields {
    /// Reads a large body on another thread.
    async fn read(parts: &Parts, body: &Bytes) -> Result<Self, ProxyError> {
        let kind = content_type(&parts.headers)?;
        if !body.is_empty() && is_form_route(parts.uri.path()) && !is_json_type(&kind) {
            // Engines read other kinds of forms here.
            openai::require_form(&kind).map_err(OpenAiError::unreadable_form)?;
        }
        if body.len() <= INLINE_BYTES_MAX {
            return Self::of(&kind, body);
        }
        let body = body.clone();
        let read = blocking::run(move || Self::of(&kind, &body)).await;
        read.map_err(|_| ProxyError::Internal("reading the body failed"))?
    }

    fn of(content_type: &[u8], body: &[u8]) -> Result<Self, ProxyError> {
        if body.is_empty() {
            return Ok(Self::default());
        }
        if !openai::is_form(content_type) {
            return Ok(serde_json::from_slice(body).unwrap_or_default());
        }
        let model = openai::form_field(content_type, body, "model");
        Ok(Self {
            model: model
                .map_err(OpenAiError::unreadable_form)?
                .map(str::to_owned),
            previous: None,
        })
    }
}

impl<'de> Deserialize<'de> for RoutedFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RoutedFieldsVisitor)
    }
}

struct RoutedFieldsVisitor;

impl<'de> Visitor<'de> for RoutedFieldsVisitor {
    type Value = RoutedFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RoutedFields, A::Error> {
        let mut fields = RoutedFields::default();
        while let Some(key) = map.next_key::<String>()? {
            let field = match key.as_str() {
                "model" => &mut fields.model,
                "previous_response_id" => &mut fields.previous,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            // A tree of a whole body's values would take many times its bytes.
            let value: &RawValue = map.next_value()?;
            *field = serde_json::from_str(value.get()).ok();
        }
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_where_there_is_one() {
        for (body, model) in [
            (&b"{\"model\":\"m\",\"input\":[1,2]}"[..], Some("m")),
            (b"{\"model\":\"a\",\"model\":\"m\"}", Some("m")),
            (b"{\"model\":\"a\",\"model\":null}", None),
            (b"{\"input\":\"x\"}", None),
            (b"--boundary", None),
            (b"{\"model\":7}", None),
            (b"{\"model\":\"m\"", None),
            (b"[]", None),
            (b"", None),
        ] {
            let fields = RoutedFields::of(b"", body).unwrap();
            assert_eq!(fields.model.as_deref(), model);
        }
    }

    /// A tree of such a value would be too deep for its reader, and take many times its bytes.
    #[test]
    fn a_value_that_is_no_string_is_not_read_as_a_tree() {
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let body = format!(r#"{{"model":{deep},"previous_response_id":{deep},"model":"m"}}"#);
        let fields = RoutedFields::of(b"", body.as_bytes()).unwrap();
        assert_eq!(fields.model.as_deref(), Some("m"));
        assert_eq!(fields.previous, None);
    }
}
