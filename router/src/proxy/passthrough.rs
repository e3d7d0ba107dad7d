//! Routes whose bodies the router does not understand: sent as they are to the least loaded worker
//! of the model that the body names.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Deserialize;

use super::App;
use super::call::Call;
use super::forward::{EngineAnswer, ForwardedRequest, Routing};
use super::headers;
use super::plan::{self, BYTES_PER_TOKEN};
use super::respond::respond;
use crate::error::ProxyError;
use crate::metrics::RouteLabel;
use crate::route::Prompt;

pub(super) async fn pass(app: &App, route: RouteLabel, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let call = Call::new(route, &parts.headers, &app.metrics);
    match forward(app, &call, parts, body).await {
        Ok(answer) => respond(app, call, answer, None),
        Err(error) => call.refuse(&error),
    }
}

async fn forward(
    app: &App,
    call: &Call,
    parts: Parts,
    body: Body,
) -> Result<EngineAnswer, ProxyError> {
    let body = app.bodies.read(&parts.headers, body).await?;
    let catalog = app.fleet.catalog();
    let model = match named_model(&body.bytes) {
        Some(model) => model,
        None => catalog.only_model().map(str::to_owned).ok_or_else(|| {
            if catalog.models.is_empty() {
                ProxyError::NoWorker
            } else {
                ProxyError::Malformed("Several models are served: name one in `model`.".to_owned())
            }
        })?,
    };
    let block_size = catalog.models.get(&model);
    let block_size = block_size.map_or(plan::ASSUMED_BLOCK_SIZE, plan::block_size);
    // Neither bears load.
    let weightless = parts.method == Method::GET || parts.uri.path().ends_with("tokenize");
    let tokens = if weightless {
        0
    } else {
        app.metrics.unhashed("other_route");
        u32::try_from(body.bytes.len() / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
    };
    let request = ForwardedRequest {
        method: parts.method,
        path: headers::path(&parts.uri),
        headers: headers::to_engine(parts.headers, call.request_id()),
        body: body.bytes.clone(),
    };
    let routing = Routing {
        model,
        prompt: Arc::new(Prompt::opaque(tokens, block_size)),
        index: None,
        streaming: false,
        // Such a request may have effects that an abort leaves half done.
        movable: false,
    };
    app.forward(call, &request, &routing).await
}

/// The `model` of a JSON body, if it has one.
fn named_model(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct NamedModel {
        #[serde(default)]
        model: Option<String>,
    }
    if body.is_empty() {
        return None;
    }
    serde_json::from_slice::<NamedModel>(body).ok()?.model
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_found_where_there_is_one() {
        for (body, model) in [
            (&b"{\"model\":\"m\",\"input\":[1,2]}"[..], Some("m")),
            (b"{\"input\":\"x\"}", None),
            (b"--boundary", None),
            (b"{\"model\":7}", None),
            (b"", None),
        ] {
            assert_eq!(named_model(body).as_deref(), model);
        }
    }
}
