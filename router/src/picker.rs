//! The endpoint picker of a gateway: Envoy's external processing protocol and the gRPC health
//! protocol, on a port of their own ([`EndpointPickerSettings`](crate::settings)).
//!
//! A request that a gateway asks about goes through the phases of the proxy ([`crate::proxy`]); only
//! the connection to its engine is the gateway's. [`exchange`] is the state machine of the messages,
//! [`session`] carries them.
//!
//! No gRPC library: the router's server speaks HTTP/2 already, with its TLS, limits and shutdown. What
//! gRPC adds is a frame of five bytes ([`frames`]) and trailers ([`grpc`]), and of the protocol's
//! messages the picker needs the twenty of [`messages`]. A library would bring a second server, and
//! the generated messages hundreds of types to compile.

mod exchange;
mod frames;
mod grpc;
mod heads;
mod messages;
mod session;
#[cfg(test)]
pub(crate) mod testing;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::response::Response;
use futures_util::FutureExt as _;
use http_body_util::{BodyExt as _, Limited};
use prost::Message as _;
use tokio::sync::mpsc;
use warmroute_process::log_limit::LogLimit;

use crate::proxy::App;
use frames::{FrameDecoder, FrameError, framed};
use grpc::{Code, Status};
use messages::{HealthCheckRequest, HealthCheckResponse};
use session::StreamFault;

const PROCESSOR: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
const CHECK: &str = "/grpc.health.v1.Health/Check";

/// Answers that wait for the connection, besides one that is made.
const ANSWERS_MAX: usize = 2;

/// Bytes of a health check's name.
const SERVICE_MAX: usize = 1 << 10;

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

static FAULTS: LogLimit = LogLimit::new();

/// The port's router. Its calls are gRPC's.
pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new().fallback(call).with_state(app)
}

async fn call(State(app): State<Arc<App>>, request: Request) -> Response {
    if let Some(answer) = grpc::not_grpc(request.version(), request.headers()) {
        if let Some(left_out) = FAULTS.admit() {
            let version = request.version();
            tracing::warn!(
                ?version,
                left_out,
                "a client of the endpoint picker speaks no gRPC"
            );
        }
        return answer;
    }
    match (request.method(), request.uri().path()) {
        (&Method::POST, PROCESS) => {
            let (sender, answers) = mpsc::channel(ANSWERS_MAX);
            let body = request.into_body();
            let served = async move { process(app, body, sender).await };
            grpc::streamed(served.boxed(), answers)
        }
        (&Method::POST, CHECK) => checked(&app, request).await,
        _ => grpc::ended(&Status::new(Code::Unimplemented, "no such method")),
    }
}

async fn process(
    app: Arc<App>,
    body: axum::body::Body,
    answers: mpsc::Sender<bytes::Bytes>,
) -> Status {
    match session::serve(app, body, answers).await {
        Ok(true) => Status::OK,
        Ok(false) => Status::new(Code::Unavailable, "the gateway has left"),
        Err(fault) => {
            if let Some(left_out) = FAULTS.admit() {
                tracing::warn!(%fault, left_out, "a gateway's request failed");
            }
            Status::new(code_of(&fault), fault)
        }
    }
}

const fn code_of(fault: &StreamFault) -> Code {
    match fault {
        StreamFault::Order(fault) if fault.is_setup() => Code::FailedPrecondition,
        StreamFault::Order(_) | StreamFault::Message(_) | StreamFault::Head(_) => {
            Code::InvalidArgument
        }
        StreamFault::Frame(_) | StreamFault::BuffersFull => Code::ResourceExhausted,
        StreamFault::Cut => Code::Unavailable,
    }
}

/// The gRPC health protocol: alive by the name `liveness`, and ready by all others.
async fn checked(app: &App, request: Request) -> Response {
    let Some(service) = service_of(request).await else {
        return grpc::ended(&Status::new(Code::InvalidArgument, "not a health check"));
    };
    let is_serving = match service.as_str() {
        "liveness" => true,
        "" | "readiness" | PROCESSOR => app.ready.missing().is_none(),
        _ => return grpc::ended(&Status::new(Code::NotFound, "no such service")),
    };
    let answer = HealthCheckResponse {
        status: if is_serving { SERVING } else { NOT_SERVING },
    };
    let (sender, answers) = mpsc::channel(1);
    // The channel is empty.
    drop(sender.try_send(framed(&answer)));
    grpc::streamed(std::future::ready(Status::OK).boxed(), answers)
}

async fn service_of(request: Request) -> Option<String> {
    let body = Limited::new(request.into_body(), SERVICE_MAX);
    let body = body.collect().await.ok()?.to_bytes();
    let message = || {
        let mut decoder = FrameDecoder::new(SERVICE_MAX);
        decoder.push(&body);
        decoder.next()
    };
    let message: Result<_, FrameError> = message();
    let check = HealthCheckRequest::decode(message.ok()??).ok()?;
    Some(check.service)
}
