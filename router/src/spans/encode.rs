//! From ended requests to OTLP's messages, with the names of OpenTelemetry's semantic conventions
//! for HTTP and generative AI; names of our own begin with `warmroute.`.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use tokio::time::Instant;
use warmroute_process::build;

use super::context::SpanId;
use super::export::FinishedTrace;
use super::{RequestTrace, TraceStep};
use crate::call_report::EndedRequest;
use crate::metrics::{RequestEnd, RouteLabel};

const SERVICE: &str = "warmroute-router";

/// Attributes under construction.
#[derive(Default)]
struct Attributes(Vec<KeyValue>);

/// What the spans of one request share.
struct SpanBuilder<'a> {
    trace: &'a RequestTrace,
    request: &'a EndedRequest,
}

/// The times of a span.
#[derive(Clone, Copy)]
struct SpanTimes {
    from: Instant,
    until: Instant,
}

impl Attributes {
    fn text(mut self, key: &str, value: impl Into<String>) -> Self {
        self.push(key, Value::StringValue(value.into()));
        self
    }

    fn number(mut self, key: &str, value: impl Into<i64>) -> Self {
        self.push(key, Value::IntValue(value.into()));
        self
    }

    fn push(&mut self, key: &str, value: Value) {
        let value = Some(AnyValue { value: Some(value) });
        let key = key.to_owned();
        self.0.push(KeyValue {
            key,
            value,
            ..KeyValue::default()
        });
    }
}

impl RouteLabel {
    /// Name and path of a route, where there is one for the label.
    const fn route(self) -> (&'static str, Option<&'static str>) {
        match self {
            Self::Chat => ("POST /v1/chat/completions", Some("/v1/chat/completions")),
            Self::Completions => ("POST /v1/completions", Some("/v1/completions")),
            Self::Embeddings => ("POST /v1/embeddings", Some("/v1/embeddings")),
            Self::Models => ("GET /v1/models", Some("/v1/models")),
            Self::Tokenize => ("tokenize", None),
            Self::Other => ("other", None),
        }
    }

    /// `gen_ai.operation.name`.
    const fn operation(self) -> Option<&'static str> {
        match self {
            Self::Chat => Some("chat"),
            Self::Completions => Some("text_completion"),
            Self::Embeddings => Some("embeddings"),
            Self::Models | Self::Tokenize | Self::Other => None,
        }
    }
}

impl TraceStep {
    const fn name(self) -> &'static str {
        match self {
            Self::ReadBody => "read body",
            Self::Tokenize => "tokenize",
            Self::RenderImages => "render images",
            Self::QueryIndex => "query index",
            Self::Choose => "choose",
        }
    }
}

/// The message for a batch. `instance` identifies this process.
pub(super) fn export_request(batch: &[FinishedTrace], instance: &str) -> ExportTraceServiceRequest {
    let resource = Attributes::default()
        .text("service.name", SERVICE)
        .text("service.version", build::version())
        .text("service.instance.id", instance);
    let spans = batch.iter().flat_map(FinishedTrace::spans).collect();
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource {
                attributes: resource.0,
                ..Resource::default()
            }),
            scope_spans: vec![ScopeSpans {
                scope: Some(InstrumentationScope {
                    name: SERVICE.to_owned(),
                    ..InstrumentationScope::default()
                }),
                spans,
                ..ScopeSpans::default()
            }],
            ..ResourceSpans::default()
        }],
    }
}

impl FinishedTrace {
    /// The spans of the request, its own first.
    pub(super) fn spans(&self) -> Vec<Span> {
        let (trace, request) = (&*self.trace, &*self.request);
        let build = SpanBuilder { trace, request };
        let end = request.started + request.total;
        let whole = SpanTimes {
            from: request.started,
            until: end,
        };
        let mut spans = vec![build.request(whole)];
        for step in &trace.steps {
            let times = SpanTimes {
                from: step.from,
                until: step.until,
            };
            let mut span = build.span(SpanId::random(), times);
            step.step.name().clone_into(&mut span.name);
            spans.push(span);
        }
        if let Some(from) = trace.sent {
            spans.push(build.forward(SpanTimes { from, until: end }));
            if let Some(ttft) = request.timings.ttft {
                let until = request.started + ttft;
                let mut span = build.span(SpanId::random(), SpanTimes { from, until });
                "first token".clone_into(&mut span.name);
                span.parent_span_id = trace.forward.0.to_be_bytes().into();
                spans.push(span);
            }
        }
        spans
    }
}

impl SpanBuilder<'_> {
    /// A child of the request's span.
    fn span(&self, id: SpanId, times: SpanTimes) -> Span {
        let unix = |at: Instant| {
            let since = at.saturating_duration_since(self.request.started);
            let began = self.request.time.saturating_sub(self.request.total);
            nanos(began + since)
        };
        Span {
            trace_id: self.trace.trace.0.to_be_bytes().into(),
            span_id: id.0.to_be_bytes().into(),
            parent_span_id: self.trace.request.0.to_be_bytes().into(),
            kind: SpanKind::Internal.into(),
            start_time_unix_nano: unix(times.from),
            end_time_unix_nano: unix(times.until),
            flags: 1,
            ..Span::default()
        }
    }

    fn request(&self, times: SpanTimes) -> Span {
        let request = self.request;
        let (name, route) = request.route.route();
        let mut about = Attributes::default()
            .text("warmroute.request_id", lossy(request.request_id.as_bytes()))
            .text("warmroute.outcome", request.end.label());
        if let Some(tenant) = &request.tenant {
            about = about.text("warmroute.tenant", tenant.as_str());
        }
        if let Some(route) = route {
            let method = name.split(' ').next().unwrap_or_default();
            about = about.text("http.request.method", method);
            about = about.text("http.route", route);
        }
        if request.status > 0 {
            about = about.number("http.response.status_code", request.status);
        }
        if let Some(model) = &request.model {
            about = about.text("gen_ai.request.model", &**model);
        }
        if is_error(request.end) {
            about = about.text("error.type", request.end.label());
        }
        Span {
            name: name.to_owned(),
            kind: SpanKind::Server.into(),
            parent_span_id: match self.trace.parent {
                Some(parent) => parent.0.to_be_bytes().into(),
                None => Vec::new(),
            },
            attributes: about.0,
            status: status(request.end),
            ..self.span(self.trace.request, times)
        }
    }

    /// The engine's part, from the sending to the end of the answer.
    fn forward(&self, times: SpanTimes) -> Span {
        let request = self.request;
        let operation = request.route.operation();
        let model = request.model.as_deref().unwrap_or_default();
        let mut about = Attributes::default()
            .text("gen_ai.request.model", model)
            .number("gen_ai.usage.output_tokens", request.output_tokens)
            .number("gen_ai.usage.input_tokens", request.prompt_tokens);
        if let Some(operation) = operation {
            about = about.text("gen_ai.operation.name", operation);
        }
        if let Some(cached) = request.cached_tokens {
            about = about.number("gen_ai.usage.cache_read.input_tokens", cached);
        }
        if let Some(placement) = &request.placement {
            about = about
                .text("warmroute.worker", placement.source.worker.as_str())
                .number("warmroute.dp_rank", placement.source.dp_rank.0)
                .text("warmroute.decision", placement.basis.label())
                .text("warmroute.index_state", placement.index_state.label())
                .number("warmroute.credited_tokens", placement.credited_tokens)
                .number("http.response.status_code", request.status);
        }
        Span {
            name: format!("{} {model}", operation.unwrap_or("forward")),
            kind: SpanKind::Client.into(),
            attributes: about.0,
            status: status(request.end),
            ..self.span(self.trace.forward, times)
        }
    }
}

const fn is_error(end: RequestEnd) -> bool {
    match end {
        RequestEnd::Engine5xx | RequestEnd::Failed | RequestEnd::Shed => true,
        RequestEnd::Ok
        | RequestEnd::Refused
        | RequestEnd::Limited
        | RequestEnd::Engine4xx
        | RequestEnd::ClientGone => false,
    }
}

fn status(end: RequestEnd) -> Option<Status> {
    is_error(end).then(|| Status {
        message: end.label().to_owned(),
        code: StatusCode::Error.into(),
    })
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
