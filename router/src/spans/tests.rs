use std::time::Duration;

use opentelemetry_proto::tonic::common::v1::KeyValue;
use tokio::net::TcpListener;

use std::sync::Arc;

use super::*;
use crate::call_report::{CallReport, EndedRequest};
use crate::metrics::{Metrics, RouteLabel};
use crate::settings::{LiveSettings, Settings};
use crate::testing::{TestTask, http_client};

/// More than the queue holds.
const REQUESTS: u64 = 3000;

/// Ends requests against this collector, then the process. Returns the metrics.
async fn end_requests(endpoint: &str, status: u16) -> Arc<Metrics> {
    let text = format!("[tracing]\notlp_endpoint = \"{endpoint}\"\n");
    let settings = LiveSettings::new(Settings::parse(&text).unwrap());
    let metrics = Arc::new(Metrics::new().unwrap());
    let client = http_client();
    let (tracer, exporter) = Tracer::new(settings, Arc::clone(&metrics), client);
    let task = TestTask::spawn(|stop| exporter.run(stop));
    while !tracer.is_on() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..REQUESTS {
        let id = HeaderValue::from_static("r");
        let mut report = CallReport::new(RouteLabel::Chat, id, [None, None]);
        report.status = status;
        report.trace = tracer.begin(None);
        let ended = EndedRequest::new(&report, Duration::from_millis(1));
        let trace = report.trace.take().unwrap();
        let [_, begun] = &ended.traces;
        assert_eq!(begun.as_ref(), Some(&trace.traceparent()));
        tracer.ended(trace, &Arc::new(ended));
    }
    // No task has run since: the queue is full of what may fill it.
    assert_eq!(
        traces(&metrics, "dropped"),
        REQUESTS - if status == 401 { 256 } else { 2048 }
    );
    tokio::time::sleep(Duration::from_millis(500)).await;
    task.end().await;
    metrics
}

fn traces(metrics: &Metrics, outcome: &str) -> u64 {
    metrics.value(&format!("traces_total{{outcome=\"{outcome}\"}}"))
}

/// The test would not end if the shutdown waited for the collector.
#[tokio::test(start_paused = true)]
async fn a_collector_that_never_answers_delays_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let metrics = end_requests(&endpoint, 200).await;
    assert_eq!(traces(&metrics, "written"), 0);
    assert_eq!(traces(&metrics, "dropped"), REQUESTS);
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_is_not_there_delays_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let metrics = end_requests(&endpoint, 200).await;
    assert_eq!(traces(&metrics, "dropped"), REQUESTS);
}

/// Clients that are not known leave places for others' spans.
#[tokio::test(start_paused = true)]
async fn requests_without_a_key_share_an_eighth_of_the_queue() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    end_requests(&endpoint, 401).await;
}

#[tokio::test(start_paused = true)]
async fn a_requests_span_names_its_tenant() {
    let text = "[tracing]\notlp_endpoint = \"http://127.0.0.1:9\"\n";
    let settings = LiveSettings::new(Settings::parse(text).unwrap());
    let metrics = Arc::new(Metrics::new().unwrap());
    let (tracer, exporter) = Tracer::new(settings, metrics, http_client());
    let task = TestTask::spawn(|stop| exporter.run(stop));
    while !tracer.is_on() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let id = HeaderValue::from_static("r");
    let mut report = CallReport::new(RouteLabel::Chat, id, [None, None]);
    report.trace = tracer.begin(None);
    report.tenant = Some("acme".parse().unwrap());
    let request = Arc::new(EndedRequest::new(&report, Duration::from_millis(1)));
    let trace = report.trace.take().unwrap();
    let spans = export::FinishedTrace { trace, request }.spans();
    let named = |pair: &&KeyValue| pair.key == "warmroute.tenant";
    assert_eq!(spans[0].attributes.iter().filter(named).count(), 1);
    task.end().await;
}
