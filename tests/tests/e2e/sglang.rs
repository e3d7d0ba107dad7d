//! Engines in SGLang's form: the shim finds their events and block size by `/server_info`, the
//! router reads their load, and compares token ids where they show them.

use serde_json::Value;

use crate::credit::compare_credit;
use crate::fleet::{BLOCK, EngineKind, Engines, Flags, Fleet, Form, Mode};

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 2,
    blocks: 400,
    flags: &["--profile", "instant"],
};

const SGLANG: Form = Form {
    engine: EngineKind::Sglang,
    ..Form::USUAL
};

const FLAGS: Flags = Flags {
    router: &[concat!(
        "--config=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/sglang.toml"
    )],
    forms: &[SGLANG; 2],
    ..Flags::NONE
};

on_both_planes!(credit_is_what_sglang_reports);

/// Chats, texts and salts at two workers of two ranks, evictions, and a flush of an idle cache.
async fn credit_is_what_sglang_reports(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, FLAGS).await;
    fleet.until_indexed().await;
    let all_shown = async |fleet: &Fleet| all_shown(fleet).await;
    fleet.until("routers show all workers", all_shown).await;
    let (hits, late) = compare_credit(&fleet, 100).await;
    assert!(hits > 0 && late < 50, "{hits}, {late}");
    fleet.assert_indexed_is_true().await;
    fleet.until_idle().await;

    for engine in 0..ENGINES.count {
        let flush = fleet.http.post(fleet.engine(engine, "/flush_cache"));
        assert!(flush.send().await.unwrap().status().is_success());
    }
    fleet.until_indexed().await;
    let empty = fleet.truth().await;
    assert_eq!(empty.len(), 4);
    assert!(empty.values().all(|held| held.is_empty()));
    fleet.assert_indexed_is_true().await;
    let (hits, _) = compare_credit(&fleet, 20).await;
    assert!(hits > 0);
}

/// What is compared has passed, what cannot be is skipped, and the load of each rank is read.
async fn all_shown(fleet: &Fleet) -> bool {
    for router in 0..fleet.routers.len() {
        let page = fleet.get(fleet.admin(router, "/workers")).await;
        let workers = page["workers"].as_array().expect("workers");
        let is_shown = |worker: &Value| {
            let has = |check: &str, result: &str| worker["checks"][check]["result"] == result;
            worker["block_size"] == BLOCK
                && worker["entry"]["blocks_per_rank"] == ENGINES.blocks
                && worker["load_error"].is_null()
                && worker["engine_load"]["1"]["waiting"] == 0
                && ["text", "chat", "chat_with_tools", "block_size"]
                    .map(|check| has(check, "passed"))
                    == [true; 4]
                && ["responses", "messages"].map(|check| has(check, "skipped")) == [true; 2]
        };
        if workers.len() != ENGINES.count || !workers.iter().all(is_shown) {
            return false;
        }
    }
    true
}
