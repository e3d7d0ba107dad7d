//! Messages of an engine that this version does not understand, as of a future vLLM.

use serde_json::{Value, json};

use crate::fleet::traffic::{Served, prompt, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};
use crate::plane::equality::generations;

const BLOCKS: u64 = 10;

const ENGINES: Engines = Engines {
    count: 1,
    ranks: 1,
    blocks: 4000,
    flags: &["--profile", "instant"],
};

on_both_planes!(an_odd_event_costs_no_credit);
on_both_planes!(a_payload_that_is_no_batch_costs_one_generation_and_no_later_credit);
on_both_planes!(a_group_of_an_unknown_kind_ends_exact_and_no_request);
on_both_planes!(an_engine_that_comes_back_without_metrics_is_unverified);
on_both_planes!(a_message_without_a_sequence_number_costs_credit_until_the_next_with_one);

/// The engine publishes a strange message.
async fn publish(fleet: &Fleet, message: &str) {
    let fault = fleet.http.post(fleet.engine(0, "/debug/fault"));
    let fault = fault.json(&json!({"publish": message})).send().await;
    assert!(fault.unwrap().status().is_success());
}

async fn complete(fleet: &Fleet, first: u64) -> Served {
    serve(fleet, "/v1/completions", &prompt(first, BLOCKS)).await
}

/// New prompts, until the index has credited one in this state.
async fn assert_credited(fleet: &Fleet, prompts: &mut impl Iterator<Item = u64>, state: &str) {
    loop {
        let first = prompts.next().expect("endless");
        assert_eq!(complete(fleet, first).await.cached_tokens, 0);
        fleet.until_indexed_as(&[state]).await;
        let served = complete(fleet, first).await;
        assert_eq!(served.cached_tokens, BLOCKS * BLOCK);
        if served.state != "unknown" {
            assert_eq!(served.basis, "index");
            assert_eq!((&*served.state, served.overlap_blocks), (state, BLOCKS));
            return;
        }
    }
}

/// The log has one such warning. It may be written after the state shows.
async fn until_warned(fleet: &Fleet, text: &str) {
    let is_warned = async |fleet: &Fleet| {
        let log = fleet.shim_log();
        let is_warning = |line: &&str| line.contains("WARN") && line.contains(text);
        log.lines().filter(is_warning).count() == 1
    };
    fleet.until(text, is_warned).await;
}

/// An event that is not understood costs no block, and lowers the state until the next clear.
async fn an_odd_event_costs_no_credit(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let mut prompts = 0..;
    for (message, state, warning) in [
        (
            "unknown_event",
            "unverified",
            "sent an unknown event type \"BlocksMoved\"",
        ),
        (
            "unknown_removal",
            "partial",
            "removed a block that it did not store",
        ),
    ] {
        assert_credited(&fleet, &mut prompts, "exact").await;
        let before = generations(&fleet, &fleet.indexes()[0]).await;
        let held = prompts.next().expect("endless");
        complete(&fleet, held).await;
        publish(&fleet, message).await;
        fleet.until_indexed_as(&[state]).await;
        let served = complete(&fleet, held).await;
        assert_eq!((&*served.state, served.overlap_blocks), (state, BLOCKS));
        assert_credited(&fleet, &mut prompts, state).await;
        assert_eq!(generations(&fleet, &fleet.indexes()[0]).await, before);
        until_warned(&fleet, warning).await;
        let reset = fleet.http.post(fleet.engine(0, "/reset_prefix_cache"));
        assert!(reset.send().await.unwrap().status().is_success());
        assert_credited(&fleet, &mut prompts, "exact").await;
        fleet.assert_indexed_is_true().await;
    }
}

async fn a_payload_that_is_no_batch_costs_one_generation_and_no_later_credit(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let mut prompts = 0..;
    assert_credited(&fleet, &mut prompts, "exact").await;
    let before = generations(&fleet, &fleet.indexes()[0]).await;
    publish(&fleet, "unreadable_payload").await;
    fleet
        .until("every index has the new generation", async |fleet| {
            for index in fleet.indexes() {
                if generations(fleet, &index).await == before {
                    return false;
                }
            }
            true
        })
        .await;
    assert_credited(&fleet, &mut prompts, "partial").await;
    until_warned(&fleet, "sent an unknown payload").await;
    let reset = fleet.http.post(fleet.engine(0, "/reset_prefix_cache"));
    assert!(reset.send().await.unwrap().status().is_success());
    assert_credited(&fleet, &mut prompts, "exact").await;
    fleet.assert_indexed_is_true().await;
}

async fn a_message_without_a_sequence_number_costs_credit_until_the_next_with_one(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let mut prompts = 0..;
    assert_credited(&fleet, &mut prompts, "exact").await;
    publish(&fleet, "two_frames").await;
    fleet
        .until("the source is not verified", async |fleet| {
            let sources = fleet.positions(&fleet.indexes()[0]).await;
            sources.values().all(|(state, _)| state == "unverified")
        })
        .await;
    let text = "sent a message without a sequence number";
    until_warned(&fleet, text).await;
    fleet
        .until("the source is exact", async |fleet| {
            complete(fleet, fastrand::u64(500..1000)).await;
            let sources = fleet.positions(&fleet.indexes()[0]).await;
            sources.values().all(|(state, _)| state == "exact")
        })
        .await;
    assert_credited(&fleet, &mut prompts, "exact").await;
    fleet.assert_indexed_is_true().await;
}

/// The new group may be needed by a hit, and holds none of the blocks: none is credited any more.
async fn a_group_of_an_unknown_kind_ends_exact_and_no_request(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let mut prompts = 0..;
    assert_credited(&fleet, &mut prompts, "exact").await;
    publish(&fleet, "unknown_kind").await;
    fleet
        .until("the source is partial", async |fleet| {
            let sources = fleet.positions(&fleet.indexes()[0]).await;
            sources.values().all(|(state, _)| state == "partial")
        })
        .await;
    until_warned(&fleet, "kv_cache_spec_kind \"folded_attention\"").await;
    let served = loop {
        let served = complete(&fleet, 0).await;
        assert_eq!(served.cached_tokens, BLOCKS * BLOCK);
        if served.state != "unknown" {
            break served;
        }
    };
    // What engines report is still credited, as unverified.
    assert!(served.state != "exact" && served.overlap_blocks <= BLOCKS);
}

/// The next engine at this URL may decode speculatively, which only its metrics would show.
async fn an_engine_that_comes_back_without_metrics_is_unverified(mode: Mode) {
    let fleet = Fleet::start(mode, ENGINES, Flags::default()).await;
    let mut prompts = 0..;
    let set = async |fault: Value| {
        let set = fleet
            .http
            .post(fleet.engine(0, "/debug/fault"))
            .json(&fault);
        assert!(set.send().await.unwrap().status().is_success());
    };
    let until = async |state: &str| {
        let is_so = async |fleet: &Fleet| {
            let sources = fleet.positions(&fleet.indexes()[0]).await;
            sources.values().all(|(of, _)| of == state)
        };
        fleet.until(state, is_so).await;
    };
    assert_credited(&fleet, &mut prompts, "exact").await;
    set(json!({"metrics": false})).await;
    set(json!({"health": 503})).await;
    until("stale").await;
    set(json!({"health": 200})).await;
    until("unverified").await;
    until_warned(&fleet, "hits may be shorter").await;
    set(json!({"metrics": true})).await;
    until("exact").await;
    assert_credited(&fleet, &mut prompts, "exact").await;
}
