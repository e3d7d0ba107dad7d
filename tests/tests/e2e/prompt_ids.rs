//! Engines get token ids in place of a text completion's prompt, and answer the same. Some prompts are
//! encoded by the reference too.

use std::fs;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::fleet::traffic::send;
use crate::fleet::{Engines, Flags, Fleet, Mode, Place};

const PATH: &str = "/v1/completions";

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 400,
    flags: &["--profile", "instant"],
};

/// Text completions whose prompts came as ids.
async fn id_prompts(fleet: &Fleet) -> u64 {
    let mut sum = 0;
    for index in 0..fleet.engines.len() {
        let counters = fleet.get(fleet.engine(index, "/debug/counters")).await;
        sum += counters["id_prompts"].as_u64().unwrap();
    }
    sum
}

/// Without what differs from request to request.
async fn unnamed(answer: reqwest::Response) -> Value {
    let mut answer: Value = answer.json().await.unwrap();
    for key in ["id", "created"] {
        answer[key] = Value::Null;
    }
    answer["usage"]["prompt_tokens_details"] = Value::Null;
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_gets_token_ids_and_answers_the_same() {
    let place = Place::new();
    let settings = place.path("settings.toml");
    fs::write(&settings, "completion_prompts = \"token-ids\"\n").unwrap();
    let config = format!("--config={}", settings.display());
    let flags = Flags {
        router: Box::leak(Box::new([&*config.leak()])),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, ENGINES, flags).await;
    let body = json!({
        "model": "mock", "prompt": "Gr\u{fc}\u{df}e, \"\u{1f600}\" and more.", "max_tokens": 9,
    });
    let path = "/v1/completions";
    // All workers must have proven that their ids are the router's.
    let sent = async |fleet: &Fleet| {
        send(fleet, path, &body).await.text().await.unwrap();
        id_prompts(fleet).await > 0
    };
    fleet.until("prompts are sent as ids", sent).await;
    let before = id_prompts(&fleet).await;
    let direct = fleet.http.post(fleet.engine(0, path)).json(&body).send();
    let direct = unnamed(direct.await.unwrap()).await;
    assert_eq!(id_prompts(&fleet).await, before, "the text was sent");
    assert_eq!(unnamed(send(&fleet, path, &body).await).await, direct);
    assert_eq!(id_prompts(&fleet).await, before + 1);
    // The answer may show the text.
    let mut echoed = body.clone();
    echoed["echo"] = json!(true);
    assert_eq!(unnamed(send(&fleet, path, &echoed).await).await, direct);
    assert_eq!(id_prompts(&fleet).await, before + 1);
}

/// An engine's answers to one prompt, so that two of them differ in their ids only.
const SINGLE: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 8_000,
    flags: &["--profile", "instant"],
};

/// An answer's head and bytes. What any two answers of the engine differ in is replaced.
async fn bytes(answer: reqwest::Response) -> (u16, String, String) {
    let status = answer.status().as_u16();
    let kind = answer.headers()["content-type"].to_str().unwrap();
    let (kind, mut text) = (kind.to_owned(), answer.text().await.unwrap());
    let mark = r#""id":""#;
    let start = text.find(mark).expect("an id") + mark.len();
    let end = start + text[start..].find('"').unwrap();
    let id = text[start..end].to_owned();
    assert!(id.starts_with("cmpl-"), "{id}");
    text = text.replace(&id, "ID");
    (status, kind, text)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bytes_of_an_answer_do_not_show_that_ids_were_sent() {
    let place = Place::new();
    let flags = Flags {
        router: place.router_flags("completion_prompts = \"text\"\n"),
        ..Flags::default()
    };
    let fleet = Fleet::start(Mode::Embedded, SINGLE, flags).await;
    let plain = json!({
        "model": "mock", "prompt": "Gr\u{fc}\u{df}e, \"\u{1f600}\" and more.", "max_tokens": 9,
    });
    let mut streamed = plain.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let bodies = [plain, streamed];
    let direct = async |body: &Value| {
        let sent = fleet.http.post(fleet.engine(0, PATH)).json(body).send();
        bytes(sent.await.unwrap()).await
    };
    // From then on the engine has the prompt in its cache.
    direct(&bodies[0]).await;
    let expected = [direct(&bodies[0]).await, direct(&bodies[1]).await];
    assert!(expected[1].2.ends_with("data: [DONE]\n\n"), "{expected:?}");
    assert_ne!(expected[0], expected[1]);
    for (body, expected) in bodies.iter().zip(&expected) {
        assert_eq!(bytes(send(&fleet, PATH, body).await).await, *expected);
    }
    assert_eq!(id_prompts(&fleet).await, 0, "texts were sent");
    place.router_flags("completion_prompts = \"token-ids\"\n");
    let sent = async |fleet: &Fleet| {
        send(fleet, PATH, &bodies[0]).await.text().await.unwrap();
        id_prompts(fleet).await > 0
    };
    fleet.until("prompts are sent as ids", sent).await;
    for (body, expected) in bodies.iter().zip(&expected) {
        let before = id_prompts(&fleet).await;
        assert_eq!(bytes(send(&fleet, PATH, body).await).await, *expected);
        assert_eq!(id_prompts(&fleet).await, before + 1, "ids were sent");
    }
}

/// Waits until the router knows that its ids are the engine's.
async fn until_checked(fleet: &Fleet) {
    let passed = r#"warmroute_router_worker_check_passed{check="text""#;
    let is_checked = async |fleet: &Fleet| {
        let page = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
        let page = page.unwrap().text().await.unwrap();
        let mut lines = page.lines();
        lines.any(|line| line.starts_with(passed) && line.ends_with(" 1"))
    };
    fleet.until("the ids are checked", is_checked).await;
}

/// A series of the router, by its name and labels.
async fn metric(fleet: &Fleet, name: &str) -> u64 {
    let page = fleet.http.get(fleet.admin(0, "/metrics")).send().await;
    let page = page.unwrap().text().await.unwrap();
    let name = format!("warmroute_router_{name} ");
    let value = page.lines().find_map(|line| line.strip_prefix(&*name));
    value.expect("a series").parse().unwrap()
}

/// The bytes of a repeated prompt are found where those of the first one were missed.
#[tokio::test(flavor = "multi_thread")]
async fn the_cache_of_ids_counts_the_bytes_of_prompts() {
    let fleet = Fleet::start(Mode::Embedded, SINGLE, Flags::default()).await;
    until_checked(&fleet).await;
    let counted = async || {
        let series = |result| format!("token_cache_bytes_total{{result=\"{result}\"}}");
        [
            metric(&fleet, &series("hit")).await,
            metric(&fleet, &series("miss")).await,
            metric(&fleet, "token_cache_kept_bytes").await,
        ]
    };
    // The first prompt is one segment. The second one has several, whose rest may be too short.
    let short = "A prompt of two hundred bytes. ".repeat(7)[..200].to_owned();
    for (prompt, rest) in [
        (short, 0),
        ("Longer than a segment may be. ".repeat(400), 63),
    ] {
        let bytes = prompt.len() as u64;
        let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
        let before = counted().await;
        send(&fleet, PATH, &body).await.text().await.unwrap();
        let first = counted().await;
        // Equal segments of one prompt are missed once.
        let found = first[0] - before[0];
        let missed = first[1] - before[1];
        assert!(missed > 0 && found + missed <= bytes && found + missed + rest >= bytes);
        assert!(
            first[2] > before[2] + missed,
            "texts are kept with their ids"
        );
        for repeated in 1..=2 {
            send(&fleet, PATH, &body).await.text().await.unwrap();
            let expected = [first[0] + repeated * (found + missed), first[1], first[2]];
            assert_eq!(counted().await, expected, "{bytes} bytes");
        }
        println!(
            "{bytes} bytes: {missed} missed and {found} found, then {}",
            found + missed
        );
    }
}

/// One in so many prompts is encoded by the reference too.
const SAMPLED_ONE_IN: usize = 1024;

/// Prompts above are not compared.
const SAMPLE_BYTES_MAX: usize = 64 << 10;

/// Texts that were compared: equal and different ones.
async fn compared(fleet: &Fleet) -> (u64, u64) {
    let series = |result| format!("encoder_comparisons_total{{result=\"{result}\"}}");
    let equal = metric(fleet, &series("equal")).await;
    (equal, metric(fleet, &series("different")).await)
}

/// What a difference does is shown by a unit test: all tokenizers whose encoders are known to differ
/// are left to the reference.
#[tokio::test(flavor = "multi_thread")]
async fn one_in_a_thousand_prompts_is_compared_with_the_reference() {
    let fleet = Fleet::start(Mode::Embedded, SINGLE, Flags::default()).await;
    until_checked(&fleet).await;
    let generated = compared(&fleet).await.0;
    assert!(generated > 0, "texts are compared at the load");
    let ask = async |prompt: &str| {
        let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 1});
        send(&fleet, PATH, &body).await.text().await.unwrap();
    };
    // The first prompt would be, but is too large.
    ask(&"plain words ".repeat(SAMPLE_BYTES_MAX / 12 + 1)).await;
    let mut sent = 1;
    while sent + 32 < SAMPLED_ONE_IN {
        join_all((0..16).map(|_| ask("some plain words"))).await;
        sent += 16;
    }
    assert_eq!(compared(&fleet).await, (generated, 0));
    while compared(&fleet).await == (generated, 0) {
        ask("some plain words").await;
        sent += 1;
        assert!(sent < SAMPLED_ONE_IN * 2, "no sample is compared");
    }
    println!("{generated} texts compared at the load, then one of {sent} prompts");
    assert_eq!(compared(&fleet).await, (generated + 1, 0));
    assert_eq!(metric(&fleet, "reference_encoder").await, 0);
}
