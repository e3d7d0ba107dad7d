//! Routes whose bodies the router does not understand: given to the least loaded worker of the model
//! that the body names, as they are.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Deserialize;

use super::App;
use super::call::Call;
use super::forward::{Answered, Outgoing, Wish};
use super::headers;
use super::respond::respond;
use crate::error::ApiError;
use crate::metrics::RouteLabel;
use crate::route::Prompt;

/// A rough size of a text in tokens, for load only.
const BYTES_PER_TOKEN: usize = 4;

pub(super) async fn pass(app: &App, route: RouteLabel, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let call = Call::new(route, &parts.headers, app.metrics.clone());
    match attempt(app, &call, parts, body).await {
        Ok(answered) => respond(app, call, answered, None),
        Err(error) => call.refuse(&error),
    }
}

async fn attempt(app: &App, call: &Call, parts: Parts, body: Body) -> Result<Answered, ApiError> {
    let buffered = app.budget.read(&parts.headers, body).await?;
    let catalog = app.fleet.catalog();
    let model = match named_model(&buffered.bytes) {
        Some(model) => model,
        None => catalog.only_model().map(str::to_owned).ok_or_else(|| {
            if catalog.models.is_empty() {
                ApiError::NoWorker
            } else {
                ApiError::Malformed("Several models are served: name one in `model`.".to_owned())
            }
        })?,
    };
    let size = app.block_size(&catalog, &model);
    // A question about the fleet, not a prompt: it bears no load.
    let weightless = parts.method == Method::GET || parts.uri.path().ends_with("tokenize");
    let tokens = if weightless {
        0
    } else {
        app.metrics.unhashed("other_route");
        u32::try_from(buffered.bytes.len() / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
    };
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let outgoing = Outgoing {
        method: parts.method.clone(),
        path: path.to_owned(),
        headers: headers::towards_engine(parts.headers, call.request_id()),
        body: buffered.bytes.clone(),
    };
    let wish = Wish {
        model,
        prompt: Arc::new(Prompt::opaque(tokens, size)),
        index: None,
        streaming: false,
        // Whatever it does, it is not to be done by halves.
        movable: false,
    };
    app.forward(call, &outgoing, &wish).await
}

/// The `model` of a JSON body, if it is one that has one.
fn named_model(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        model: Option<String>,
    }
    if body.is_empty() {
        return None;
    }
    serde_json::from_slice::<Named>(body).ok()?.model
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
