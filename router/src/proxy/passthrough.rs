//! Routes whose bodies the router does not understand: sent as they are to the least loaded worker
//! of the model that the body names.

use std::fmt;
use std::sync::Arc;

use axum::extract::Request;
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::Response;
use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use warmroute_proto::WorkerId;

use super::App;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Routing};
use super::headers;
use super::plan::{self, BYTES_PER_TOKEN};
use super::respond::{AnswerReaders, OnBeginning, respond};
use super::waiting::WorkerWait;
use crate::error::ProxyError;
use crate::metrics::RouteLabel;
use crate::openai::OpenAiError;
use crate::route::Prompt;

/// The workers that may get a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Any,
    Only(WorkerId),
}

pub(super) async fn pass(app: &App, route: RouteLabel, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let call = Call::new(route, &parts.headers, &app.metrics);
    let body = match app.bodies.read(&parts.headers, body).await {
        Ok(body) => body,
        Err(error) => return call.refuse(&error),
    };
    let stores = parts.uri.path() == "/v1/responses";
    let previous = if stores {
        RoutedFields::of(&body.bytes).previous
    } else {
        None
    };
    let owner = previous.and_then(|id| app.stored.owner(&id));
    let target = owner.map_or(Target::Any, Target::Only);
    match forward(app, &call, &parts, &body.bytes, target).await {
        Ok(answer) => {
            let on_beginning = stores.then(|| -> OnBeginning {
                let stored = app.stored.clone();
                let worker = answer.placement.decision.source.worker.clone();
                Box::new(move |beginning| stored.learn(worker, beginning))
            });
            let readers = AnswerReaders {
                on_beginning,
                ..AnswerReaders::default()
            };
            respond(app, call, answer, readers)
        }
        Err(error) => call.refuse(&error),
    }
}

pub(super) async fn forward(
    app: &App,
    call: &Call,
    parts: &Parts,
    body: &Bytes,
    target: Target,
) -> Result<EngineAnswer, ProxyError> {
    let mut wait = WorkerWait::default();
    let named = RoutedFields::of(body).model;
    let model = loop {
        match served_model(app, parts, named.clone(), &target) {
            Ok(model) => break model,
            Err(error) if wait.before_retry(app, &error).await => {}
            Err(error) => return Err(error),
        }
    };
    let catalog = app.fleet.catalog();
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
    let request = ForwardedRequest {
        method: parts.method.clone(),
        path: headers::path(&parts.uri),
        headers: headers::to_engine(parts.headers.clone(), call.request_id()),
        body: body.clone(),
    };
    let routing = Routing {
        model,
        prompt: Arc::new(Prompt::opaque(tokens, block_size)),
        index: None,
        streaming: false,
        // Such a request may have effects that an abort leaves half done.
        movable: false,
        exclude: match target {
            Target::Any => Vec::new(),
            Target::Only(worker) => app.fleet.other_sources(&worker),
        },
    };
    app.forward(call, &request, &routing, &mut wait).await
}

/// The model that a request is for. A single model need not be named; any worker can answer for its
/// version and for an answer that it stores.
fn served_model(
    app: &App,
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
        "/version" => catalog.models.keys().next().map(String::as_str),
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

/// What the router reads of a JSON body. The last of repeated keys wins, as in the engines'
/// parsers; a value that is no string counts as absent.
#[derive(Debug, Default, PartialEq, Eq)]
struct RoutedFields {
    model: Option<String>,
    /// `previous_response_id`: an answer that only its worker has.
    previous: Option<String>,
}

impl RoutedFields {
    fn of(body: &[u8]) -> Self {
        if body.is_empty() {
            return Self::default();
        }
        serde_json::from_slice(body).unwrap_or_default()
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
            let value: Value = map.next_value()?;
            *field = value.as_str().map(str::to_owned);
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
            assert_eq!(RoutedFields::of(body).model.as_deref(), model);
        }
    }
}
