//! Adapters and cache salts separate equal prompts, in the engine's cache and in its credit.

use serde_json::{Value, json};
use warmroute_process::access::keys::KeyHash;

use crate::fleet::traffic::{Served, read, serve};
use crate::fleet::{Access, BLOCK, Engines, Flags, Fleet, Mode, Place};

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

on_both_planes!(a_tenant_that_probes_prompts_learns_nothing_of_other_tenants);

/// Tenants by name, which is their key, with the rule of their salt. The last two share a group.
const TENANTS: [(&str, &str); 4] = [
    ("victim", "salt = \"tenant\""),
    ("attacker", "salt = \"tenant\""),
    ("one", "salt = \"tenant\"\nsalt_group = \"team\""),
    ("other", "salt = \"tenant\"\nsalt_group = \"team\""),
];

/// The time to the first token follows from the tokens that the engine did not compute
/// (`cached_tokens`), and from the source that the router chose by its credit.
async fn a_tenant_that_probes_prompts_learns_nothing_of_other_tenants(mode: Mode) {
    let place = Place::new();
    let tenants = TENANTS.map(|(name, salt)| {
        let hash = KeyHash::of(name.as_bytes()).unwrap().to_hex();
        let keys = format!("keys = [{{ id = \"{name}\", sha256 = \"{hash}\" }}]");
        format!("[[tenants]]\nname = \"{name}\"\n{keys}\n{salt}\n")
    });
    let explain = "[admin]\nexplain_headers = \"all\"\n";
    let flags = Flags {
        router: place.router_flags(&(tenants.concat() + explain)),
        ..Flags::default()
    };
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 2000,
        flags: &["--profile", "instant", "--lora", "adapter"],
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    fleet.until("its tokens are trusted", is_trusted).await;
    fleet.until_indexed().await;
    for (path, prompt) in prompts() {
        // The attacker's own guess, with the victim's prompt and with a salt of its own too.
        for salt in [None, Some("guess")] {
            let body = body(&prompt, "mock", salt);
            for (tenant, is_seen) in [
                ("victim", false),
                ("attacker", false),
                ("attacker", true),
                ("one", false),
                ("other", true),
                ("victim", true),
            ] {
                let asked = fleet.http.post(fleet.url(path)).bearer_auth(tenant);
                let served = read(asked.json(&body).send().await.unwrap()).await;
                check(&served, is_seen, &format!("{path}, {tenant}, {salt:?}"));
                fleet.until_indexed().await;
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
