//! Engines that publish no events and report no cached tokens: routed by what was sent to them, and
//! shown as such.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::fleet::traffic::{Served, serve};
use crate::fleet::{Engines, Events, Flags, Fleet, Form, Mode};
use crate::plane::doctor;

const SILENT: Form = Form {
    events: Events::None,
    ..Form::USUAL
};

const ENGINES: Engines = Engines {
    count: 3,
    ranks: 1,
    blocks: 600,
    flags: &["--profile", "instant", "--no-prompt-tokens-details"],
};

const FLAGS: Flags = Flags {
    forms: &[SILENT, SILENT, SILENT],
    router: &[concat!(
        "--tokenizer=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/tiny"
    )],
    ..Flags::NONE
};

/// Longer than a router expects what it has just sent, on any basis.
const PREDICTIONS_END: Duration = Duration::from_millis(2_500);

on_both_planes!(prompts_return_to_where_they_were_sent_and_no_worker_looks_broken);

async fn prompts_return_to_where_they_were_sent_and_no_worker_looks_broken(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, FLAGS).await;
    let is_shown = async |fleet: &Fleet| shown_without_events(fleet).await;
    fleet
        .until("all sources are without events", is_shown)
        .await;
    let mut workers = Vec::new();
    for topic in 0..6 {
        let first = ask(&fleet, topic).await;
        assert_eq!(first.basis, "load_only", "topic {topic}");
        workers.push(first.worker);
    }
    sleep(PREDICTIONS_END).await;
    for (topic, worker) in (0..).zip(workers) {
        let next = ask(&fleet, topic).await;
        assert_eq!((&*next.basis, &*next.state), ("approximate", "unknown"));
        assert_eq!((next.overlap_blocks, next.worker), (0, worker));
    }
    let ladder = async |rung: &str| {
        let rung = format!("warmroute_router_ladder_total{{step=\"{rung}\"");
        let page = text(&fleet, fleet.admin(0, "/metrics")).await;
        page.lines()
            .any(|line| line.starts_with(&rung) && !line.ends_with(" 0"))
    };
    assert!(ladder("approximate").await && !ladder("index").await);
    if matches!(mode, Mode::Nats { .. }) {
        let named = async |fleet: &Fleet| {
            let (code, found) = doctor::look(fleet).await;
            let sources = found.get("source_without_events");
            // Each of two indexers names each source.
            code == Some(0) && found.len() == 1 && sources.is_some_and(|all| all.len() == 6)
        };
        fleet
            .until("doctor names them, and nothing else", named)
            .await;
    }
}

/// A conversation's request, when nothing else is open.
async fn ask(fleet: &Fleet, topic: u32) -> Served {
    let prompt = format!("Topic {topic}: ").repeat(80);
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
    let served = serve(fleet, "/v1/completions", &body).await;
    fleet.until_idle().await;
    served
}

async fn shown_without_events(fleet: &Fleet) -> bool {
    for index in fleet.indexes() {
        let digest = fleet.get(format!("{index}/v1/digest")).await;
        let sources = digest["sources"].as_array().expect("sources");
        let silent = |source: &&Value| source["reason"] == "no_events";
        let counted = format!("{index}/metrics");
        let page = text(fleet, counted).await;
        let count = "warmroute_indexer_sources{state=\"no_events\"} 3";
        if sources.iter().filter(silent).count() != 3 || !page.contains(count) {
            return false;
        }
    }
    true
}

async fn text(fleet: &Fleet, url: String) -> String {
    let answer = fleet.http.get(url).send().await;
    answer.expect("an answer").text().await.expect("text")
}
