//! Engines get token ids in place of a text completion's prompt, and answer the same.

use std::fs;

use serde_json::{Value, json};

use crate::fleet::traffic::send;
use crate::fleet::{Engines, Flags, Fleet, Mode, Place};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 400,
    flags: &["--profile", "instant"],
};

/// Text completions whose prompts came as ids.
async fn id_prompts(fleet: &Fleet) -> u64 {
    let mut sum = 0;
    for index in 0..ENGINES.count {
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
