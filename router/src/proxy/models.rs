//! `GET /v1/models`: what the fleet serves to the client, each model once, in OpenAI's form with
//! vLLM's additions.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::App;
use super::call::Call;
use crate::error::ProxyError;
use crate::fleet::CatalogModel;
use crate::metrics::RouteLabel;

#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: Vec<ModelCard<'a>>,
}

#[derive(Serialize)]
struct ModelCard<'a> {
    id: &'a str,
    object: &'static str,
    /// Zero: engines report their own start times, which differ.
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: Option<u32>,
}

impl<'a> ModelCard<'a> {
    fn new((name, model): (&'a String, &'a CatalogModel)) -> Self {
        Self {
            id: name,
            object: "model",
            created: 0,
            owned_by: "vllm",
            root: name,
            parent: model.parent.as_deref(),
            max_model_len: model.max_model_len,
        }
    }
}

pub(super) async fn list(State(app): State<Arc<App>>, head: Parts) -> Response {
    let call = Call::new(RouteLabel::Models, &head, &app.sinks);
    let catalog = app.fleet.catalog();
    let models = catalog.models.iter();
    let permitted = models.filter(|(name, _)| call.check_model(name).is_ok());
    let list = ModelList {
        object: "list",
        data: permitted.map(ModelCard::new).collect(),
    };
    answer(call, &list)
}

pub(super) async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
    head: Parts,
) -> Response {
    // No model's name is text in another encoding.
    let name = name.map_or_else(|_| head.uri.path().to_owned(), |Path(name)| name);
    let call = Call::new(RouteLabel::Models, &head, &app.sinks);
    let catalog = app.fleet.catalog();
    let model = catalog.models.get_key_value(&name);
    match model.filter(|(name, _)| call.check_model(name).is_ok()) {
        Some(model) => answer(call, &ModelCard::new(model)),
        None => call.refuse(&ProxyError::UnknownModel(name)),
    }
}

fn answer(call: Call, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(json) => {
            let kind = [(header::CONTENT_TYPE, "application/json")];
            call.done((StatusCode::OK, kind, json).into_response())
        }
        Err(_) => call.refuse(&ProxyError::Internal("the models cannot be listed")),
    }
}
