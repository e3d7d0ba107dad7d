//! `/metrics` under vLLM's names, one series a rank.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::rank::Rank;
use crate::server::Server;

pub(crate) async fn metrics(State(server): State<Arc<Server>>) -> Response {
    if !server.has_metrics.load(Ordering::Relaxed) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let kind = [(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, render(&server)).into_response()
}

fn render(server: &Server) -> String {
    let mut text = MetricsPage::default();
    let args = &server.args.engine;
    text.head("cache_config_info", "gauge");
    // Sliding-window groups hold blocks beside the pool's, at most as many.
    let groups = 1 + args.sliding_groups as u64;
    // vLLM sums the blocks of all ranks, in every rank's line.
    let blocks = u64::from(args.num_blocks) * groups * server.ranks.len() as u64;
    for rank in &server.ranks {
        let labels = format!(
            "block_size=\"{}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"{}\",\
             num_gpu_blocks=\"{blocks}\"",
            args.block_size, rank.number,
        );
        text.line("cache_config_info", &labels, 1.0);
    }
    text.series(server, "num_requests_running", "gauge", |rank| {
        float(rank.load().running)
    });
    text.series(server, "num_requests_waiting", "gauge", |rank| {
        float(rank.load().waiting)
    });
    text.series(server, "kv_cache_usage_perc", "gauge", |rank| {
        let load = rank.load();
        float(load.used_blocks) / float(load.usable_blocks.max(1))
    });
    text.series(server, "prefix_cache_queries_total", "counter", |rank| {
        float(rank.totals().prefix_queries)
    });
    text.series(server, "prefix_cache_hits_total", "counter", |rank| {
        float(rank.totals().prefix_hits)
    });
    if server.args.events.connector_metrics {
        let name = "external_prefix_cache_queries_total";
        match args.cpu_blocks {
            0 => text.series(server, name, "counter", |_| 0.0),
            _ => text.series(server, name, "counter", |rank| {
                let totals = rank.totals();
                float(totals.prefix_queries - totals.prefix_hits)
            }),
        }
    }
    text.series(server, "num_preemptions_total", "counter", |rank| {
        float(rank.totals().preemptions)
    });
    text.series(server, "generation_tokens_total", "counter", |rank| {
        float(rank.totals().generated_tokens)
    });
    text.0.push_str("# TYPE http_requests_total counter\n");
    for ((route, method, class), count) in server.calls.requests() {
        text.write(format_args!(
            "http_requests_total{{handler=\"{route}\",method=\"{method}\",status=\"{class}\"}} {count}.0\n"
        ));
    }
    text.head("sleep_mode_operation_duration_seconds", "histogram");
    for (operation, count) in server.calls.sleep_operations() {
        let name = "sleep_mode_operation_duration_seconds_count";
        text.line(name, &format!("operation=\"{operation}\""), float(count));
    }
    text.0
}

#[derive(Default)]
struct MetricsPage(String);

impl MetricsPage {
    fn series(&mut self, server: &Server, name: &str, kind: &str, value: fn(&Rank) -> f64) {
        self.head(name, kind);
        for rank in &server.ranks {
            let labels = format!("engine=\"{}\",model_name=\"{}\"", rank.number, server.model);
            self.line(name, &labels, value(rank));
        }
    }

    fn head(&mut self, name: &str, kind: &str) {
        let family = name.strip_suffix("_total").unwrap_or(name);
        self.write(format_args!("# TYPE vllm:{family} {kind}\n"));
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        self.write(format_args!("vllm:{name}{{{labels}}} {value:?}\n"));
    }

    fn write(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a string cannot fail.
        self.0.write_fmt(line).unwrap_or_default();
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn float(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or(u64::MAX) as f64
}
