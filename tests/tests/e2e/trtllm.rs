//! Engines in TensorRT-LLM's form, whose cache events one reader takes by HTTP. They have no route
//! that shows token ids, so that prompts are ids.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::credit::compare_credit_of;
use crate::fleet::traffic::{prompt, serve};
use crate::fleet::{BLOCK, EngineKind, Engines, Flags, Fleet, Form, Mode};

const TRTLLM: Form = Form {
    engine: EngineKind::Trtllm,
    ..Form::USUAL
};

const FLAGS: Flags = Flags {
    router: &[concat!(
        "--config=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/trtllm.toml"
    )],
    forms: &[TRTLLM; 2],
    ..Flags::NONE
};

/// Blocks of a prompt.
const BLOCKS: u64 = 20;

on_both_planes!(credit_is_what_tensorrt_llm_reports);
on_both_planes!(blocks_move_between_levels_of_memory);
on_both_planes!(lost_events_cost_the_credit_of_what_came_before);

const fn engines(count: usize, ranks: u16, flags: &'static [&'static str]) -> Engines {
    Engines {
        count,
        ranks,
        blocks: 400,
        flags,
    }
}

async fn credit_is_what_tensorrt_llm_reports(mode: Mode) {
    let fleet = Fleet::start(mode, engines(2, 2, &["--profile=instant"]), FLAGS).await;
    fleet.until_indexed().await;
    let mut rng = Rng::with_seed(1);
    let requests = (0..100).map(|_| {
        let mut body = prompt(rng.u64(0..6), rng.u64(1..BLOCKS));
        body["max_tokens"] = json!(rng.u32(1..40));
        if rng.u8(0..4) == 0 {
            body["cache_salt"] = json!(format!("tenant-{}", rng.u8(0..2)));
        }
        ("/v1/completions", body)
    });
    let (hits, late) = compare_credit_of(&fleet, requests).await;
    assert!(hits > 0 && late < 50, "{hits}, {late}");
    fleet.assert_indexed_is_true().await;
    fleet.until_idle().await;
}

/// A block that leaves the GPU is in host memory, and back on the GPU after a hit.
async fn blocks_move_between_levels_of_memory(mode: Mode) {
    let flags = &["--profile=instant", "--cpu-blocks=900"];
    let engines = Engines {
        blocks: 64,
        ..engines(1, 1, flags)
    };
    let fleet = Fleet::start(mode, engines, FLAGS).await;
    fleet.until_indexed().await;
    let mut rng = Rng::with_seed(2);
    let requests = (0..80).map(|_| {
        let body = prompt(rng.u64(0..10), rng.u64(1..BLOCKS));
        ("/v1/completions", body)
    });
    let (hits, late) = compare_credit_of(&fleet, requests).await;
    assert!(hits > 0 && late < 40, "{hits}, {late}");
    let truth = fleet.truth().await;
    let count = |tier: &str| {
        let pairs = truth.values().flatten();
        pairs.filter(|(_, held_in)| held_in == tier).count()
    };
    assert!(
        count("gpu") > 0 && count("cpu") > 60,
        "both levels are used"
    );
    fleet.assert_indexed_is_true().await;
}

async fn lost_events_cost_the_credit_of_what_came_before(mode: Mode) {
    let mut fleet = Fleet::start(mode, engines(1, 1, &["--profile=instant"]), FLAGS).await;
    fleet.until_indexed().await;
    for first in 0..3 {
        serve(&fleet, "/v1/completions", &prompt(first, BLOCKS)).await;
    }
    fleet.until_indexed().await;

    // The buffer dropped some.
    let drop = json!({"drop_batches": 1});
    let fault = fleet.http.post(fleet.engine(0, "/debug/fault")).json(&drop);
    assert!(fault.send().await.unwrap().status().is_success());
    for first in 3..5 {
        serve(&fleet, "/v1/completions", &prompt(first, BLOCKS)).await;
    }
    fleet.until_indexed().await;
    // What came before the gap may be gone, and is not credited. What came behind it is.
    credited(&fleet, 0, 0).await;
    credited(&fleet, 4, BLOCKS).await;
    assert!(
        fleet
            .shim_log()
            .contains("another process reads this route")
    );

    restart(&mut fleet).await;
    fleet.until_indexed().await;
    credited_after(&fleet, 4, BLOCKS).await;

    // A second reader takes what it can.
    let taken = async {
        loop {
            serve(
                &fleet,
                "/v1/completions",
                &prompt(fastrand::u64(100..900), 2),
            )
            .await;
            let read = fleet.http.post(fleet.engine(0, "/kv_cache_events"));
            let events: Vec<Value> = read.send().await.unwrap().json().await.unwrap();
            if !events.is_empty() {
                break;
            }
        }
    };
    taken.await;
    for first in 5..8 {
        serve(&fleet, "/v1/completions", &prompt(first, BLOCKS)).await;
    }
    fleet.until_indexed().await;
    credited(&fleet, 4, 0).await;
    restart(&mut fleet).await;
    fleet.until_indexed().await;
    credited_after(&fleet, 2, BLOCKS).await;
    fleet.assert_indexed_is_true().await;
}

async fn restart(fleet: &mut Fleet) {
    fleet.engines[0].process.kill();
    let is_lost = async |fleet: &Fleet| {
        for index in fleet.indexes() {
            let positions = fleet.positions(&index).await;
            if positions.values().any(|(state, _)| state != "stale") {
                return false;
            }
        }
        true
    };
    fleet.until("the dead engine has no credit", is_lost).await;
    fleet.engines[0].process.restart().await;
    // A probe may have failed in between.
    let is_used = async |fleet: &Fleet| {
        for router in 0..fleet.routers.len() {
            let page = fleet.get(fleet.admin(router, "/workers")).await;
            if page["workers"][0]["health"] != "healthy" {
                return false;
            }
        }
        true
    };
    fleet.until("routers use the engine again", is_used).await;
}

/// Sends a prompt of the topic until the index answers. Its credit is this, and the engine has it.
async fn credited(fleet: &Fleet, topic: u64, blocks: u64) {
    loop {
        let served = serve(fleet, "/v1/completions", &prompt(topic, BLOCKS)).await;
        assert!(served.overlap_blocks * BLOCK <= served.cached_tokens);
        if !served.is_without_answer() {
            let found = (&*served.state, served.overlap_blocks);
            assert_eq!(found, ("unverified", blocks));
            return;
        }
        fleet.until_indexed().await;
    }
}

/// The new life has nothing of the topic, and then all of it.
async fn credited_after(fleet: &Fleet, topic: u64, blocks: u64) {
    let first = serve(fleet, "/v1/completions", &prompt(topic, BLOCKS)).await;
    assert_eq!((first.overlap_blocks, first.cached_tokens), (0, 0));
    fleet.until_indexed().await;
    credited(fleet, topic, blocks).await;
}
