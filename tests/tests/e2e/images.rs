//! Prompts with images: the credit is what the engine reports.

use std::fs;

use serde_json::{Value, json};

use crate::fleet::traffic::serve;
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode, Place};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 400,
    flags: &["--profile", "instant"],
};

/// Workers without render routes.
const UNRENDERED: Engines = Engines {
    flags: &["--profile", "instant", "--no-render"],
    ..ENGINES
};

const CHAT: &str = "/v1/chat/completions";

/// A fleet, and the place of its settings.
async fn start(mode: Mode, engines: Engines) -> (Fleet, Place) {
    let place = Place::new();
    let settings = place.path("settings.toml");
    let text = "multimodal = \"render\"\n[admin]\nexplain_headers = \"all\"\n";
    fs::write(&settings, text).unwrap();
    let config = format!("--config={}", settings.display());
    let flags = Flags {
        router: Box::leak(Box::new([&*config.leak()])),
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    fleet.until_indexed().await;
    (fleet, place)
}

fn image(name: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": format!("data:{name}")}})
}

/// A small image, of which several fit into a block.
fn small(name: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": format!("data:{name}"), "detail": "low"}})
}

/// A question about images, between texts of some blocks.
fn question(images: &[Value], text: &str) -> Value {
    let system = "Look at the pictures, and answer with the name of what they show. ".repeat(3);
    let mut parts = vec![json!({"type": "text", "text": "Here they are:"})];
    parts.extend(images.iter().cloned());
    parts.push(json!({"type": "text", "text": text}));
    let messages = json!([
        {"role": "system", "content": system},
        {"role": "user", "content": parts},
    ]);
    json!({"model": "mock", "messages": messages, "max_tokens": 4})
}

/// Serves a request whose credit must be what the engine reports. Returns its cached tokens; `None`
/// if the index did not answer in time, as on a busy machine.
async fn credited(fleet: &Fleet, path: &str, body: &Value) -> Option<u64> {
    let served = serve(fleet, path, body).await;
    fleet.until_indexed().await;
    if served.is_without_answer() {
        return None;
    }
    assert_eq!(
        served.overlap_blocks * BLOCK,
        served.cached_tokens,
        "{body}"
    );
    Some(served.cached_tokens)
}

/// Repeats a scenario with another cache salt until the index answered all of its requests.
async fn salted(scenario: impl AsyncFn(Value) -> Option<()>) {
    for salt in 0..20 {
        if scenario(json!(format!("try {salt}"))).await.is_some() {
            return;
        }
    }
    panic!("the index does not answer");
}

async fn renders(fleet: &Fleet) -> u64 {
    let mut sum = 0;
    for index in 0..ENGINES.count {
        let counters = fleet.get(fleet.engine(index, "/debug/counters")).await;
        sum += counters["image_renders"].as_u64().unwrap();
    }
    sum
}

fn unhashed(reason: &str) -> String {
    format!("warmroute_router_unhashed_requests_total{{reason=\"{reason}\"}}")
}

on_both_planes!(images_are_credited_as_the_engine_caches_them);

async fn images_are_credited_as_the_engine_caches_them(mode: Mode) {
    let (fleet, _place) = start(mode, ENGINES).await;
    salted(async |salt| compare(&fleet, &salt).await).await;
    assert!(renders(&fleet).await >= 9);
    fleet.assert_indexed_is_true().await;
    fleet.until_idle().await;
}

async fn compare(fleet: &Fleet, salt: &Value) -> Option<()> {
    let text = "What is it? ".repeat(8);
    let ask = async |images: &[Value], text: &str, salt: &Value| {
        let mut body = question(images, text);
        body["cache_salt"] = salt.clone();
        credited(fleet, CHAT, &body).await
    };
    let cat = [image("cat")];
    assert_eq!(ask(&cat, &text, salt).await?, 0);
    let again = ask(&cat, &text, salt).await?;
    // The blocks before the other question are those of the first one.
    let other_question = ask(&cat, &format!("Is it a dog? {text}"), salt).await?;
    assert!(other_question < again);
    // The tokens are equal, and the image is not: the text before it is credited.
    let text_only = ask(&[image("dog")], &text, salt).await?;
    assert!(text_only > 0);
    assert!(text_only + 2 * BLOCK <= other_question);
    // An image over several blocks, and several images in a block, in both orders.
    let album = |first, second| [small(first), small(second), image("c")];
    assert_eq!(ask(&album("a", "b"), &text, salt).await?, text_only);
    let whole = ask(&album("a", "b"), &text, salt).await?;
    assert!(whole > other_question);
    assert_eq!(ask(&album("b", "a"), &text, salt).await?, text_only);
    // Another tenant's.
    let other_salt = json!(format!("other {salt}"));
    assert_eq!(ask(&album("a", "b"), &text, &other_salt).await?, 0);
    assert_eq!(ask(&album("a", "b"), &text, &other_salt).await?, whole);
    Some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_responses_and_messages_are_rendered_by_their_own_routes() {
    let (fleet, _place) = start(Mode::Embedded, ENGINES).await;
    let text = "What is it, and where? ".repeat(12);
    let picture = json!({"type": "input_image", "image_url": "data:cat"});
    let parts = json!([{"type": "input_text", "text": text}, picture]);
    let input = json!([{"role": "user", "content": parts}]);
    let source = json!({"type": "base64", "media_type": "image/png", "data": "cat"});
    let parts = json!([{"type": "text", "text": text}, {"type": "image", "source": source}]);
    let messages = json!([{"role": "user", "content": parts}]);
    let bodies = [
        ("/v1/responses", json!({"model": "mock", "input": input})),
        (
            "/v1/messages",
            json!({"model": "mock", "messages": messages, "max_tokens": 2}),
        ),
    ];
    salted(async |salt| {
        for (path, mut body) in bodies.clone() {
            body["cache_salt"] = json!(format!("{salt} at {path}"));
            assert_eq!(credited(&fleet, path, &body).await?, 0, "{path}");
            assert!(credited(&fleet, path, &body).await? > 4 * BLOCK, "{path}");
        }
        Some(())
    })
    .await;
    assert!(renders(&fleet).await >= 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_workers_without_render_routes_are_routed_by_load() {
    let (fleet, _place) = start(Mode::Embedded, UNRENDERED).await;
    let body = question(&[image("cat")], "What is it?");
    for _ in 0..2 {
        let served = serve(&fleet, CHAT, &body).await;
        assert_eq!(served.overlap_blocks, 0);
        fleet.until_indexed().await;
    }
    let counted = fleet.metric(&unhashed("render_not_offered")).await;
    assert!((counted - 2.0).abs() < f64::EPSILON, "{counted}");
    let workers = fleet.get(fleet.admin(0, "/workers")).await;
    let check = &workers["workers"][0]["checks"]["rendered_chat"];
    assert_eq!(check["result"], "skipped", "{workers}");
    assert!(check["why"].as_str().unwrap().contains("images"));
}
