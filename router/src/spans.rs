//! OpenTelemetry traces of requests, exported over OTLP/HTTP with protobuf.
//!
//! A sampled request holds a [`RequestTrace`]: its ids and the times of its steps. At its end that is
//! queued with the request's values. One task makes the spans and sends them. A full queue and a
//! collector that does not accept them drop spans and count them; no request waits.

mod context;
mod encode;
mod export;

#[cfg(test)]
mod tests;

use axum::http::HeaderValue;
use tokio::time::Instant;

pub(crate) use context::SampleRatio;
use context::{SpanId, TraceId};
#[cfg(test)]
pub(crate) use export::SpanExporter;
pub(crate) use export::Tracer;

/// A part of a request with a span of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TraceStep {
    ReadBody,
    /// Parse, render, tokenize, hash.
    Tokenize,
    RenderImages,
    QueryIndex,
    /// Choose a worker and account the request.
    Choose,
}

#[derive(Clone, Copy, Debug)]
struct StepTimes {
    step: TraceStep,
    from: Instant,
    until: Instant,
}

/// A sampled request.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    trace: TraceId,
    /// The client's span.
    parent: Option<SpanId>,
    request: SpanId,
    /// The engine's parent.
    forward: SpanId,
    steps: Vec<StepTimes>,
    sent: Option<Instant>,
}

impl RequestTrace {
    fn new(trace: TraceId, parent: Option<SpanId>) -> Self {
        Self {
            trace,
            parent,
            request: SpanId::random(),
            forward: SpanId::random(),
            steps: Vec::with_capacity(4),
            sent: None,
        }
    }

    /// A step that ends now.
    pub(crate) fn step(&mut self, step: TraceStep, from: Instant) {
        let until = Instant::now();
        self.steps.push(StepTimes { step, from, until });
    }

    /// The request is sent to an engine, for the first time or again.
    pub(crate) fn sent(&mut self) {
        self.sent.get_or_insert_with(Instant::now);
    }

    /// `traceparent` for the engine.
    pub(crate) fn traceparent(&self) -> HeaderValue {
        let text = context::traceparent(self.trace, self.forward);
        HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}
