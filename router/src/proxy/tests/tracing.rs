//! Traces of requests, as a collector receives them.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::world::{Engine, World, body, in_time, streaming};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

/// A receiver of OTLP over HTTP.
struct Collector {
    endpoint: String,
    received: mpsc::Receiver<Span>,
}

impl Collector {
    async fn start() -> Self {
        let (sender, received) = mpsc::channel(256);
        let take = async |State(sender): State<mpsc::Sender<Span>>, body: Bytes| {
            let message = ExportTraceServiceRequest::decode(body).unwrap();
            for resource in message.resource_spans {
                for scope in resource.scope_spans {
                    for span in scope.spans {
                        sender.send(span).await.unwrap();
                    }
                }
            }
        };
        let router = Router::new()
            .route("/v1/traces", post(take))
            .with_state(sender);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        TaskTracker::new().spawn(async move { axum::serve(listener, router).await });
        Self { endpoint, received }
    }

    /// The next spans, by name.
    async fn spans(&mut self, count: usize) -> BTreeMap<String, Span> {
        let mut spans = BTreeMap::new();
        while spans.len() < count {
            let span = in_time("a span", self.received.recv()).await.unwrap();
            spans.insert(span.name.clone(), span);
        }
        spans
    }
}

async fn traced(world: &World, collector: &Collector, ratio: f64) {
    let endpoint = &collector.endpoint;
    world.set(&format!(
        "[tracing]\notlp_endpoint = \"{endpoint}\"\nsample_ratio = {ratio}\n"
    ));
    while !world.app.sinks.tracer.is_on() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute(of: &[KeyValue], key: &str) -> Option<Value> {
    let pair = of.iter().find(|pair| pair.key == key)?;
    pair.value.clone()?.value
}

#[tokio::test]
async fn a_sampled_request_has_spans_below_the_clients_and_above_the_engines() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut collector = Collector::start().await;
    traced(&world, &collector, 0.0).await;
    let mut stream = world
        .post("/v1/completions", &streaming())
        .header("traceparent", format!("00-{TRACE}-{CLIENT}-01"))
        .header("tracestate", "vendor=1")
        .send()
        .await
        .unwrap();
    for _ in 0..2 {
        engine.release_event(&mut stream).await;
    }
    engine.end_stream();
    while stream.chunk().await.unwrap().is_some() {}
    let spans = collector.spans(7).await;
    let (request, forward) = ("POST /v1/completions", "text_completion m");
    let steps = [
        "choose",
        "first token",
        "query index",
        "read body",
        "tokenize",
    ];
    let mut expected = [&steps[..], &[request, forward]].concat();
    expected.sort_unstable();
    assert!(spans.keys().eq(expected), "{:?}", spans.keys());

    let headers = engine.last().headers;
    let sent = headers["traceparent"].to_str().unwrap().to_owned();
    assert_eq!(
        sent,
        format!("00-{TRACE}-{}-01", hex(&spans[forward].span_id))
    );
    assert_eq!(headers["tracestate"], "vendor=1");
    let whole = &spans[request];
    assert_eq!(hex(&whole.parent_span_id), CLIENT);
    for (name, span) in &spans {
        assert_eq!(hex(&span.trace_id), TRACE);
        assert!(
            span.start_time_unix_nano <= span.end_time_unix_nano,
            "{name}"
        );
        assert!(
            span.start_time_unix_nano >= whole.start_time_unix_nano,
            "{name}"
        );
        assert!(
            span.end_time_unix_nano <= whole.end_time_unix_nano,
            "{name}"
        );
        let parent = match name.as_str() {
            name if name == request => continue,
            "first token" => &spans[forward].span_id,
            _ => &whole.span_id,
        };
        assert_eq!(span.parent_span_id, *parent, "{name}");
    }
    let text = |value: &str| Some(Value::StringValue(value.to_owned()));
    let about = &whole.attributes;
    let status = attribute(about, "http.response.status_code");
    assert_eq!(status, Some(Value::IntValue(200)));
    assert_eq!(attribute(about, "http.route"), text("/v1/completions"));
    let about = &spans[forward].attributes;
    assert_eq!(attribute(about, "gen_ai.request.model"), text("m"));
    assert_eq!(attribute(about, "warmroute.worker"), text("w0"));
}

/// The client decides where it sends a context, else the ratio; what is not sampled is passed on.
#[tokio::test]
async fn a_request_that_is_not_sampled_keeps_the_clients_context() {
    let engine = Engine::start().await;
    let world = World::with(&[&engine]).await;
    let mut collector = Collector::start().await;
    traced(&world, &collector, 1.0).await;
    let own = format!("00-{TRACE}-{CLIENT}-00");
    let sent = world.post("/v1/completions", &body(40));
    sent.header("traceparent", &own).send().await.unwrap();
    assert_eq!(engine.last().headers["traceparent"], own.as_str());
    world
        .raw("/v1/completions", r#"{"model":"mine","prompt":[1]}"#)
        .await;
    let spans = collector.spans(2).await;
    let refused = &spans["POST /v1/completions"];
    assert!(refused.parent_span_id.is_empty());
    assert_ne!(hex(&refused.trace_id), TRACE);
    let status = attribute(&refused.attributes, "http.response.status_code");
    assert_eq!(status, Some(Value::IntValue(404)));
}
