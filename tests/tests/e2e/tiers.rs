//! Blocks in CPU memory: their credit, and the state of each tier where operators read it.

use fastrand::Rng;
use serde_json::{Value, json};

use crate::credit::compare_credit_of;
use crate::fleet::traffic::{prompt, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

/// Blocks of each of the first prompts, of which GPU memory holds three.
const BLOCKS: u64 = 20;
const PROMPTS: u64 = 10;
/// A few more than the first prompts have.
const CPU_BLOCKS: usize = 210;

on_both_planes!(blocks_in_cpu_memory_are_credited_from_the_first_store);
on_both_planes!(a_tier_without_credit_is_shown_and_named_once);
on_both_planes!(a_tier_that_does_not_exist_is_not_shown);

const fn engines(flags: &'static [&'static str]) -> Engines {
    Engines {
        count: 1,
        ranks: 1,
        blocks: 64,
        flags,
    }
}

async fn complete_all(fleet: &Fleet) {
    for first in 0..PROMPTS {
        serve(fleet, "/v1/completions", &prompt(first, BLOCKS)).await;
    }
}

/// Blocks that the engine holds in a tier.
async fn held(fleet: &Fleet, tier: &str) -> usize {
    let truth = fleet.truth().await;
    let pairs = truth.values().flatten();
    pairs.filter(|(_, held_in)| held_in == tier).count()
}

/// Waits until every index shows these states of the engine's tiers.
async fn until_shown(fleet: &Fleet, states: Value) {
    let is_shown = async |fleet: &Fleet| {
        for base in fleet.indexes() {
            let page = fleet.get(format!("{base}/workers")).await;
            // A router's page has more than the list.
            let workers = page.get("workers").unwrap_or(&page);
            if workers[0]["sources"][0]["tiers"] != states {
                return false;
            }
        }
        true
    };
    fleet.until("the tiers' states are shown", is_shown).await;
}

async fn blocks_in_cpu_memory_are_credited_from_the_first_store(mode: Mode) {
    let flags = &["--profile", "instant", "--cpu-blocks", "210"];
    let fleet = Fleet::start(mode, engines(flags), Flags::default()).await;
    complete_all(&fleet).await;
    fleet.until_indexed().await;
    let stored = usize::try_from(PROMPTS * BLOCKS).unwrap();
    assert_eq!(held(&fleet, "cpu").await, stored, "nothing is removed");
    assert!(held(&fleet, "gpu").await < 64);
    let mut answered = 0;
    // Each was evicted from GPU memory.
    for first in 0..PROMPTS - 4 {
        let served = serve(&fleet, "/v1/completions", &prompt(first, BLOCKS)).await;
        assert_eq!(served.cached_tokens, BLOCKS * BLOCK);
        if !served.is_without_answer() {
            assert_eq!((&*served.state, served.overlap_blocks), ("exact", BLOCKS));
            assert_eq!(served.tier_states, "gpu=exact, cpu=exact, disk=exact");
            answered += 1;
        }
        fleet.until_indexed().await;
    }
    assert!(answered > 0, "the index does not answer");
    until_shown(
        &fleet,
        json!({"gpu": "exact", "cpu": "exact", "disk": "exact"}),
    )
    .await;
    // More than both tiers hold.
    let mut rng = Rng::with_seed(1);
    let requests = (0..60).map(|_| {
        let body = prompt(rng.u64(0..20), rng.u64(1..30));
        ("/v1/completions", body)
    });
    let (hits, _) = compare_credit_of(&fleet, requests).await;
    assert!(hits > 0, "prompts share beginnings");
    assert_eq!(held(&fleet, "cpu").await, CPU_BLOCKS);
    fleet.assert_indexed_is_true().await;
    assert_eq!(warnings(&fleet), Vec::<String>::new());
}

/// No event shows what a hit with windows needs of CPU memory.
async fn a_tier_without_credit_is_shown_and_named_once(mode: Mode) {
    let flags = &[
        "--profile=instant",
        "--cpu-blocks=210",
        "--sliding-groups=2",
    ];
    let fleet = Fleet::start(mode, engines(flags), Flags::default()).await;
    complete_all(&fleet).await;
    fleet.until_indexed().await;
    assert!(held(&fleet, "cpu").await > 0);
    until_shown(
        &fleet,
        json!({"gpu": "exact", "cpu": "partial", "disk": "exact"}),
    )
    .await;
    let served = loop {
        let served = serve(&fleet, "/v1/completions", &prompt(0, BLOCKS)).await;
        if !served.is_without_answer() {
            break served;
        }
        complete_all(&fleet).await;
        fleet.until_indexed().await;
    };
    assert_eq!((&*served.state, served.overlap_blocks), ("exact", 0));
    assert_eq!(served.tier_states, "gpu=exact, cpu=partial, disk=exact");
    fleet
        .until("the cause is logged", async |fleet| {
            warnings(fleet).len() == 1
        })
        .await;
    // The stores after a reset have the same cause, and a heartbeat follows each reset.
    reset(&fleet).await;
    complete_all(&fleet).await;
    fleet.until_indexed().await;
    reset(&fleet).await;
    let [warning] = &*warnings(&fleet) else {
        panic!("{:?}", warnings(&fleet));
    };
    let cause = "some stored blocks get no credit";
    assert!(
        warning.contains(cause) && warning.contains("tier=cpu"),
        "{warning}"
    );
}

/// An engine whose metrics show that it has no KV connector, and one that has a CPU tier.
async fn a_tier_that_does_not_exist_is_not_shown(mode: Mode) {
    for (flags, lower, header) in [
        (
            &["--profile=instant", "--connector-metrics"][..],
            json!({"gpu": "exact"}),
            "gpu=exact",
        ),
        (
            &[
                "--profile=instant",
                "--connector-metrics",
                "--cpu-blocks=210",
            ],
            json!({"gpu": "exact", "cpu": "exact", "disk": "partial"}),
            "gpu=exact, cpu=exact, disk=partial",
        ),
    ] {
        let fleet = Fleet::start(mode, engines(flags), Flags::default()).await;
        complete_all(&fleet).await;
        fleet.until_indexed().await;
        until_shown(&fleet, lower).await;
        let served = loop {
            let served = serve(&fleet, "/v1/completions", &prompt(0, BLOCKS)).await;
            if !served.is_without_answer() {
                break served;
            }
        };
        assert_eq!(served.tier_states, header);
        fleet.assert_indexed_is_true().await;
    }
}

/// Warnings about the engine's tiers.
fn warnings(fleet: &Fleet) -> Vec<String> {
    let log = fleet.shim_log();
    let is_warning = |line: &&str| line.contains("WARN") && line.contains("tier=");
    log.lines().filter(is_warning).map(str::to_owned).collect()
}

/// Empties GPU memory.
async fn reset(fleet: &Fleet) {
    let url = fleet.engine(0, "/reset_prefix_cache");
    let answer = fleet.http.post(url).send().await;
    assert!(answer.unwrap().status().is_success());
    let is_empty = async |fleet: &Fleet| {
        let digest = fleet.get(format!("{}/v1/digest", fleet.indexes()[0])).await;
        digest["sources"][0]["blocks"] == 0
    };
    fleet.until("the index is empty", is_empty).await;
}
