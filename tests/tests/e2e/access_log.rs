//! The access log of a real router: what a line has of a request that hit the cache.

use std::fs;

use serde_json::{Value, json};

use crate::fleet::traffic::{send, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode, Place};

const WORD: &str = "confidential";

#[tokio::test(flavor = "multi_thread")]
async fn a_line_has_worker_tokens_and_times_and_no_prompt() {
    let place = Place::new();
    let (log, settings) = (place.path("access.log"), place.path("settings.toml"));
    let path = log.display();
    let text = format!("access_log = \"{path}\"\n[admin]\nexplain_headers = \"all\"\n");
    fs::write(&settings, text).unwrap();
    let config = format!("--config={}", settings.display());
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant"],
    };
    let flags = Flags {
        router: Box::leak(Box::new([&*config.leak()])),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, engines, flags).await;
    let mut body =
        json!({"model": "mock", "prompt": format!("{WORD} ").repeat(60), "max_tokens": 3});
    serve(&fleet, "/v1/completions", &body).await;
    fleet.until_indexed().await;
    let served = serve(&fleet, "/v1/completions", &body).await;
    assert!(served.cached_tokens > 0, "the engine has it");
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let answer = send(&fleet, "/v1/completions", &body).await;
    answer.bytes().await.expect("a whole answer");

    let lines = || fs::read_to_string(&log).unwrap_or_default();
    let written = async |_: &Fleet| lines().lines().count() == 3;
    fleet.until("all requests are logged", written).await;
    let lines = lines();
    assert!(!lines.contains(WORD), "{lines}");
    let line: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!(line["worker"], served.worker, "{line}");
    assert_eq!(line["model"], "mock");
    assert_eq!(line["prompt_tokens"], served.prompt_tokens);
    assert_eq!(line["output_tokens"], 3);
    assert_eq!(line["credited_tokens"], served.overlap_blocks * BLOCK);
    assert_eq!(line["cached_tokens"], served.cached_tokens);
    assert_ne!(line["credited_tokens"], 0);
    for time in ["decision_ms", "ttft_ms", "total_ms"] {
        assert!(line[time].as_f64().is_some_and(|time| time > 0.0), "{line}");
    }
    assert_eq!(line["outcome"], "ok");
}
