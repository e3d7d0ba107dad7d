//! `GET /v1/models`: what the fleet serves, each model once, in OpenAI's form with vLLM's additions.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Serialize;

use super::App;
use super::call::Call;
use crate::error::ApiError;
use crate::fleet::CatalogModel;
use crate::metrics::RouteLabel;

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Card<'a>>,
}

#[derive(Serialize)]
struct Card<'a> {
    id: &'a str,
    object: &'static str,
    /// Engines give their own start time, which differs between workers.
    created: u64,
    owned_by: &'static str,
    root: &'a str,
    parent: Option<&'a str>,
    max_model_len: Option<u32>,
}

fn card<'a>((name, model): (&'a String, &'a CatalogModel)) -> Card<'a> {
    Card {
        id: name,
        object: "model",
        created: 0,
        owned_by: "vllm",
        root: name,
        parent: model.parent.as_deref(),
        max_model_len: model.max_model_len,
    }
}

pub(super) fn list(app: &App, headers: &HeaderMap) -> Response {
    let call = Call::new(RouteLabel::Models, headers, app.metrics.clone());
    let catalog = app.fleet.catalog();
    let list = List {
        object: "list",
        data: catalog.models.iter().map(card).collect(),
    };
    answer(call, &list)
}

pub(super) fn one(app: &App, headers: &HeaderMap, name: &str) -> Response {
    let call = Call::new(RouteLabel::Models, headers, app.metrics.clone());
    let catalog = app.fleet.catalog();
    match catalog.models.get_key_value(name) {
        Some(model) => answer(call, &card(model)),
        None => call.refuse(&ApiError::UnknownModel(name.to_owned())),
    }
}

fn answer(call: Call, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(json) => {
            let kind = [(header::CONTENT_TYPE, "application/json")];
            call.done((StatusCode::OK, kind, json).into_response())
        }
        Err(_) => call.refuse(&ApiError::Internal("the models cannot be listed")),
    }
}
