//! Prompts that prefill workers compute, and answers of decode workers. The engines refuse whatever a
//! router may not do with a transfer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fastrand::Rng;
use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};

use crate::fleet::traffic::{request, send};
use crate::fleet::{Engines, Flags, Fleet, Form, Mode};

const LEGS: &str = "warmroute_router_legs_total";
const MOVED: &str = "warmroute_router_moves_total{outcome=\"moved\"}";

const PREFILL: Form = Form {
    role: "prefill",
    ..Form::USUAL
};
const DECODE: Form = Form {
    role: "decode",
    ..Form::USUAL
};

const ENGINES: Engines = Engines {
    count: 6,
    ranks: 1,
    blocks: 4000,
    // What is cached differs from one worker to the next.
    flags: &["--itl-ms", "2", "--no-prompt-tokens-details"],
};

const FLAGS: Flags = Flags {
    router: &[concat!(
        "--config=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/roles.toml"
    )],
    forms: &[PREFILL, PREFILL, PREFILL, DECODE, DECODE, DECODE],
    ..Flags::NONE
};

const MODE: Mode = Mode::Nats {
    indexers: 1,
    routers: 2,
};

/// What an answer says, without its id and time.
async fn read(answer: Response) -> String {
    let status = answer.status();
    let text = answer.text().await.expect("an answer");
    assert!(status.is_success(), "{status}: {text}");
    let unnamed = |text: &str| -> Option<String> {
        let mut json: Value = serde_json::from_str(text).ok()?;
        let members = json.as_object_mut()?;
        members.remove("id");
        members.remove("created");
        Some(json.to_string())
    };
    let lines = text.lines().map(|line| {
        let (name, data) = match line.strip_prefix("data: ") {
            Some(data) => ("data: ", data),
            None => ("", line),
        };
        let data = unnamed(data).unwrap_or_else(|| data.to_owned());
        format!("{name}{data}\n")
    });
    lines.collect()
}

/// A counter of transfers, summed over some engines.
async fn transfers(fleet: &Fleet, engines: std::ops::Range<usize>, counter: &str) -> u64 {
    let mut sum = 0;
    for index in engines {
        let counters = fleet.get(fleet.engine(index, "/debug/counters")).await;
        let count = &counters["transfers"][counter];
        sum += count.as_u64().expect("a count");
    }
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_answer_as_one_does_and_each_transfer_is_used_once() {
    const REQUESTS: u64 = 40;
    let mut fleet = Fleet::start(MODE, ENGINES, FLAGS).await;
    // No router knows it.
    let alone = fleet.add_engine(&ENGINES).await;
    let client = async |seed| {
        let mut rng = Rng::with_seed(seed);
        for _ in 0..REQUESTS {
            let (path, mut body) = request(&mut rng);
            if rng.bool() {
                body["stream"] = json!(true);
                body["stream_options"] = json!({"include_usage": true});
            }
            let expected = fleet.http.post(fleet.engine(alone, path)).json(&body);
            let expected = read(expected.send().await.expect("an answer")).await;
            assert_eq!(read(send(&fleet, path, &body).await).await, expected);
        }
    };
    join_all((0..6).map(client)).await;
    fleet.until_idle().await;
    let offered = transfers(&fleet, 0..3, "offered").await;
    let sent = transfers(&fleet, 0..3, "sent").await;
    let received = transfers(&fleet, 3..6, "received").await;
    let whole = transfers(&fleet, 3..6, "whole").await;
    let refused = transfers(&fleet, 0..6, "refused").await;
    println!("{sent} transfers, {whole} whole requests");
    assert_eq!((received, refused), (sent, 0));
    // The engine may be done with what is moved elsewhere: its blocks wait for the end of their lease.
    let moved = fleet.metric(MOVED).await;
    assert!(
        (sent..=sent + moved as u64).contains(&offered),
        "{offered} {sent} {moved}"
    );
    assert_eq!(sent + whole, 6 * REQUESTS);
    assert!(sent > 10 && whole > 0, "{sent} {whole}");
    let legs = fleet.metric(LEGS).await;
    assert!((legs - 2.0 * sent as f64).abs() < 0.5, "{legs}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_of_either_role_costs_no_request() {
    const BETWEEN: u64 = 60;
    let fleet = Fleet::start(MODE, ENGINES, FLAGS).await;
    let served = AtomicU64::new(0);
    let more = async |count| {
        let until = served.load(Ordering::Relaxed) + count;
        let reached = async |_: &Fleet| served.load(Ordering::Relaxed) >= until;
        fleet.until("requests are served", reached).await;
    };
    let is_over = AtomicBool::new(false);
    let client = async |seed| {
        let mut rng = Rng::with_seed(seed);
        while !is_over.load(Ordering::Relaxed) {
            let (path, body) = request(&mut rng);
            read(send(&fleet, path, &body).await).await;
            served.fetch_add(1, Ordering::Relaxed);
        }
    };
    let kills = async {
        for engine in [0, 3] {
            more(BETWEEN).await;
            fleet.engines[engine].process.kill();
        }
        more(BETWEEN).await;
        is_over.store(true, Ordering::Relaxed);
    };
    tokio::join!(kills, join_all((0..8).map(client)));
    fleet.until_idle().await;
    let refused =
        transfers(&fleet, 1..3, "refused").await + transfers(&fleet, 4..6, "refused").await;
    assert_eq!(refused, 0);
    println!(
        "{} requests, {} legs",
        served.into_inner(),
        fleet.metric(LEGS).await
    );
}
