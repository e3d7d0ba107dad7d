//! Adapters and cache salts separate equal prompts, in the engine's cache and in its credit.

use serde_json::{Value, json};

use crate::fleet::traffic::{Served, serve};
use crate::fleet::{Access, BLOCK, Engines, Flags, Fleet, Mode};

const MODELS: [&str; 2] = ["mock", "adapter"];
const SALTS: [Option<&str>; 3] = [None, Some("tenant-a"), Some("tenant-b")];

on_both_planes!(credit_is_given_to_each_adapter_and_salt_for_its_own);

/// Equal prompts from all tenants on one source: any leak would show as a cache hit.
async fn credit_is_given_to_each_adapter_and_salt_for_its_own(mode: Mode) {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 2000,
        flags: &["--profile", "instant", "--lora", "adapter"],
    };
    // Also over NATS, with the shipped permissions.
    let flags = Flags {
        access: Access::LeastPrivilege,
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    fleet.until("its tokens are trusted", is_trusted).await;
    fleet.until_indexed().await;
    for (path, prompt) in prompts() {
        for round in 0..2 {
            for model in MODELS {
                for salt in SALTS {
                    let body = body(&prompt, model, salt);
                    let served = serve(&fleet, path, &body).await;
                    check(
                        &served,
                        round > 0,
                        &format!("{path}, {model}, {salt:?}, {round}"),
                    );
                    fleet.until_indexed().await;
                }
            }
        }
    }
    fleet.until_idle().await;
}

/// Every router has verified the engine's tokens and seen its adapter.
async fn is_trusted(fleet: &Fleet) -> bool {
    for router in 0..fleet.routers.len() {
        let workers = fleet.get(fleet.admin(router, "/workers")).await;
        let worker = &workers["workers"][0];
        let checks = ["chat", "text", "block_size"].map(|name| &worker["checks"][name]["result"]);
        let passed = checks.iter().all(|result| *result == "passed");
        if !passed || worker["loras"][0]["name"] != "adapter" {
            return false;
        }
    }
    true
}

fn check(served: &Served, seen_before: bool, case: &str) {
    let own = if seen_before {
        (served.prompt_tokens - 1) / BLOCK
    } else {
        0
    };
    assert!(
        served.prompt_tokens > 3 * BLOCK,
        "{case}: a prompt of several blocks"
    );
    assert_eq!(served.cached_tokens, own * BLOCK, "{case}: cached");
    if !served.is_without_answer() {
        assert_eq!(served.state, "exact", "{case}");
        assert_eq!(served.overlap_blocks, own, "{case}: credited");
    }
}

/// A chat, a text and token ids with different beginnings.
fn prompts() -> [(&'static str, Value); 3] {
    let text = "Every tenant asks the very same question about the very same thing. ".repeat(8);
    let tokens: Vec<u32> = (300..400).collect();
    [
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": text}]}),
        ),
        ("/v1/completions", json!({"prompt": text})),
        ("/v1/completions", json!({"prompt": tokens})),
    ]
}

fn body(prompt: &Value, model: &str, salt: Option<&str>) -> Value {
    let mut body = prompt.clone();
    body["model"] = json!(model);
    body["max_tokens"] = json!(1);
    if let Some(salt) = salt {
        body["cache_salt"] = json!(salt);
    }
    body
}
