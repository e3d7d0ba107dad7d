//! Routers and engines that report other cached tokens than the index credits.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::fleet::traffic::{Served, prompt, serve};
use crate::fleet::{BLOCK, Engines, Flags, Fleet, Mode};

const MODE: Mode = Mode::Nats {
    indexers: 2,
    routers: 2,
};

/// Bound of what takes many rechecks, each 6 s after a report.
const LONG: Duration = Duration::from_secs(600);

/// After so long a recheck that was not answered is forgotten, and another may follow.
const ABANDONED: Duration = Duration::from_secs(40);

/// Reports that are nearer to each other count as one, and what a request stored explains reports
/// for two seconds.
const SPACED: Duration = Duration::from_millis(2_200);

async fn complete(fleet: &Fleet, body: &Value) -> Served {
    serve(fleet, "/v1/completions", body).await
}

/// Sends a request until an index answers in time. Without it, reports may give credit.
async fn answered(fleet: &Fleet, body: &Value) -> Served {
    loop {
        let served = complete(fleet, body).await;
        if served.state != "unknown" {
            return served;
        }
    }
}

async fn rechecks(fleet: &Fleet) -> f64 {
    fleet.metric("warmroute_router_audit_rechecks_total").await
}

/// Number of sources that a router demoted.
async fn demoted(fleet: &Fleet, router: usize) -> usize {
    let page = fleet.get(fleet.admin(router, "/workers")).await;
    let workers = page["workers"].as_array().expect("workers").iter();
    workers
        .map(|worker| worker["demoted_ranks"].as_object().expect("ranks").len())
        .sum()
}

/// Sessions on caches that hold a part of them: blocks are evicted between decision and prefill,
/// and stored again by the very request that missed them.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_evicts_under_load_is_not_distrusted() {
    const RECHECKS: f64 = 8.0;
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 64,
        flags: &["--max-num-seqs", "4", "--prefill-tokens-per-sec", "20000"],
    };
    let fleet = Fleet::start(MODE, engines, Flags::default()).await;
    let sessions = (0..14).map(|session| {
        let fleet = &fleet;
        async move {
            for turn in 0.. {
                complete(fleet, &prompt(session, 4 + turn % 14)).await;
                if turn % 8 == 0 && rechecks(fleet).await >= RECHECKS {
                    return;
                }
            }
        }
    });
    let done = futures_util::future::join_all(sessions);
    tokio::time::timeout(LONG, done).await.expect("rechecks");
    let demotions = fleet
        .metric("warmroute_router_source_demotions_total")
        .await;
    let short = fleet
        .metric("warmroute_router_overlap_short_requests_total")
        .await;
    println!(
        "{short} requests found less, {} rechecks",
        rechecks(&fleet).await
    );
    assert!(short >= RECHECKS, "{short} requests found less");
    assert!(demotions.abs() < f64::EPSILON, "{demotions} demotions");
    fleet.until_idle().await;
}

/// An engine that cleared its cache and did not publish it.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_credits_absent_blocks_is_distrusted_until_it_is_right() {
    const PROMPTS: u64 = 100;
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 4000,
        flags: &["--profile", "instant"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 1,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    for first in 0..PROMPTS {
        complete(&fleet, &prompt(first, 10)).await;
    }
    fleet.until_indexed().await;
    let fault = fleet.http.post(fleet.engine(0, "/debug/fault"));
    let fault = fault.json(&json!({"mute_clears": true})).send().await;
    assert!(fault.unwrap().status().is_success());
    // Each prompt is missed once: the engine stores it again.
    let mut missed = 0..PROMPTS;
    while demoted(&fleet, 0).await == 0 {
        let before = rechecks(&fleet).await;
        let first = missed.next().expect("a demotion");
        let served = complete(&fleet, &prompt(first, 10)).await;
        assert_eq!(served.cached_tokens, 0);
        // On a busy machine the answer may be late, or the last proof old.
        if served.state != "exact" {
            continue;
        }
        assert_eq!(served.overlap_blocks, 10);
        let is_done = fleet.until_within(LONG, "a recheck", async |fleet: &Fleet| {
            rechecks(fleet).await > before
        });
        let _unanswered = tokio::time::timeout(ABANDONED, is_done).await;
    }
    assert!(missed.start >= 3, "{} requests demoted it", missed.start);
    // Another prompt each time: one that is sent again counts as an agreement.
    let served = loop {
        let fresh = missed.next().expect("a prompt");
        let served = complete(&fleet, &prompt(fresh, 10)).await;
        if served.state != "unknown" {
            break served;
        }
    };
    assert_eq!((served.state.as_str(), served.overlap_blocks), ("stale", 0));
    let is_shown = async |fleet: &Fleet| {
        let (_, page) = fleet.command("doctor", &["doctor"]).await;
        page.contains("source_demoted")
    };
    fleet.until("doctor shows the demotion", is_shown).await;
    // What the index would credit of these is right: they were stored again.
    let mut agreements = 0;
    while demoted(&fleet, 0).await > 0 {
        let served = complete(&fleet, &prompt(agreements % 3, 10)).await;
        assert_eq!(served.cached_tokens, 10 * BLOCK);
        agreements += 1;
    }
    assert!(agreements >= 8, "reinstated after {agreements} requests");
    let served = answered(&fleet, &prompt(0, 10)).await;
    assert_eq!(
        (served.state.as_str(), served.overlap_blocks),
        ("exact", 10)
    );
}

/// A CPU tier whose events never come, of an engine whose metrics do not show it: the index is
/// `exact` and misses what the engine has.
#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_misses_what_engines_have_is_doubted_and_reports_give_the_credit() {
    const PROMPTS: u64 = 10;
    const BLOCKS: u64 = 20;
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 64,
        flags: &["--profile", "instant", "--cpu-blocks", "400"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 1,
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    let fault = fleet.http.post(fleet.engine(0, "/debug/fault"));
    let fault = fault.json(&json!({"mute_cpu": true})).send().await;
    assert!(fault.unwrap().status().is_success());
    let one = async |number: u64| {
        let served = complete(&fleet, &prompt(number % PROMPTS, BLOCKS)).await;
        fleet.until_indexed_as(&["exact"]).await;
        served
    };
    for number in 0..PROMPTS {
        one(number).await;
    }
    let mut requests = 0;
    while fleet.metric("warmroute_router_credit_doubts").await < 1.0 {
        assert!(requests < 100, "no doubt");
        tokio::time::sleep(SPACED).await;
        let served = one(requests).await;
        assert_eq!(served.cached_tokens, BLOCKS * BLOCK);
        assert!(served.state != "exact" || served.overlap_blocks == 0);
        requests += 1;
    }
    println!("doubted after {requests} requests");
    let logged = fleet.routers[0].logged();
    let mut warnings = logged.lines().filter(|line| line.contains("WARN"));
    let is_named = |line: &str| line.contains("worker-0") && line.contains("a KV connector");
    assert!(warnings.any(is_named), "{logged}");
    let is_shown = async |fleet: &Fleet| {
        let page = fleet.get(fleet.admin(0, "/workers")).await;
        let (_, found) = fleet.command("doctor", &["doctor"]).await;
        let doubted = page["workers"][0]["doubted"].as_array();
        doubted.is_some_and(|all| !all.is_empty()) && found.contains("credit_contradicted")
    };
    fleet.until("the doubt is shown", is_shown).await;
    // What was reported before the doubt is not kept.
    let (mut credited, mut rounds) = (0, 0);
    while credited == 0 {
        assert!(rounds < 20, "reports give no credit");
        tokio::time::sleep(SPACED).await;
        for number in 0..PROMPTS {
            let served = one(number).await;
            assert_ne!(served.state, "exact");
            assert!(served.overlap_blocks <= BLOCKS);
            credited += u64::from(served.basis == "reported" && served.overlap_blocks == BLOCKS);
        }
        rounds += 1;
    }
    println!("{credited} of {PROMPTS} were credited in round {rounds}");
}

const ENGINES: Engines = Engines {
    count: 2,
    ranks: 1,
    blocks: 2000,
    flags: &["--profile", "instant", "--buffer-steps", "4"],
};

const STATE: Flags = Flags {
    router: &["--state-dir", "PLACE/state"],
    ..Flags::NONE
};

/// Requests at every engine that share two long beginnings, more than a replay reaches back.
async fn heat(fleet: &Fleet) {
    for number in 0..20 {
        for engine in 0..ENGINES.count {
            let url = fleet.engine(engine, "/v1/completions");
            let body = prompt(number % 2, 20 + number / 2);
            let answer = fleet.http.post(url).json(&body).send().await.unwrap();
            assert!(answer.status().is_success());
        }
        fleet.until_indexed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_hot_before_the_start_is_credited_by_reports() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, STATE).await;
    heat(&fleet).await;
    fleet.routers[0].kill();
    fs::remove_dir_all(fleet.file("state")).unwrap();
    fleet.routers[0].restart().await;
    fleet.until_indexed_as(&["partial"]).await;
    credited_by_reports(&fleet).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_hot_before_its_shim_started_is_credited_by_reports() {
    let fleet = Fleet::start(MODE, ENGINES, Flags::default()).await;
    heat(&fleet).await;
    for shim in &fleet.parts().shims {
        shim.kill();
        shim.restart().await;
    }
    fleet.until_indexed_as(&["partial"]).await;
    credited_by_reports(&fleet).await;
}

/// Requests with the hot beginnings, until ten were credited.
async fn credited_by_reports(fleet: &Fleet) {
    let (mut requests, mut credited) = (0, 0);
    while credited < 10 {
        let served = complete(fleet, &prompt(requests % 2, 15)).await;
        assert_eq!(served.cached_tokens, 15 * BLOCK);
        assert!(served.overlap_blocks <= 15, "{}", served.overlap_blocks);
        // `unknown`: the index did not answer in time.
        if served.overlap_blocks > 0 && served.state != "unknown" {
            assert_eq!(served.state, "unverified");
            credited += 1;
        }
        requests += 1;
    }
    println!("{credited} of {requests} requests were credited");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_router_with_a_state_directory_restarts_exact() {
    let fleet = Fleet::start(Mode::Embedded, ENGINES, STATE).await;
    heat(&fleet).await;
    fleet.routers[0].signal("TERM");
    fleet.routers[0].ended().await;
    fleet.routers[0].restart().await;
    fleet.until_indexed().await;
    let served = answered(&fleet, &prompt(0, 15)).await;
    assert_eq!(
        (served.state.as_str(), served.overlap_blocks),
        ("exact", 15)
    );
    fleet.assert_indexed_is_true().await;
}
