//! Compares the index with the engine. Real captures and random runs of the engine model go through
//! the real shim core and the real fold. The result must equal an independent reading of the wire
//! format and the engine's own list, set by set.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

mod captures;
mod naive;
mod pipeline;
mod world;

use std::ops::Range;

use naive::{Naive, Rule};
use pipeline::Pipeline;
use world::{Consumer as _, Verdict, World};

/// Runs of one engine, two at a time.
const RUNS: u64 = 1_000;
/// Pairs of them in the short test.
const PAIRS: u64 = 100;

/// Evictions, copies, holes, resets, chunked prefill, adapters, salts, tiers, restarts, dropped
/// frames, replays with holes: every claim is true, and silence heals.
#[test]
fn random_runs_are_indexed_exactly() {
    runs_are_indexed_exactly(0..PAIRS);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn further_random_runs_are_indexed_exactly() {
    runs_are_indexed_exactly(PAIRS..RUNS / 2);
}

fn runs_are_indexed_exactly(seeds: Range<u64>) {
    let runs = 2 * (seeds.end - seeds.start);
    let mut compared = 0;
    let mut exact_at_the_end = 0;
    for seed in seeds {
        let mut first = Pipeline::new();
        // The second rank's engine shares much of the first one's content, and restarts
        // independently.
        let mut second = first.beside();
        let mut held = Vec::new();
        for (seed, pipeline) in [(seed, &mut first), (seed + RUNS, &mut second)] {
            match World::run(seed, pipeline) {
                Verdict::Held(report) => {
                    compared += report.compared;
                    exact_at_the_end += u64::from(report.ended_exact);
                }
                Verdict::Broken(why) => panic!("seed {seed}: {why}\n{pipeline:#?}"),
            }
            held.push(pipeline.claim().held);
        }
        assert_eq!(first.claim().held, held[0], "seed {seed}: ranks are apart");
    }
    assert!(compared > 20 * runs, "claims are made: {compared}");
    assert!(exact_at_the_end > runs / 2, "{exact_at_the_end}");
}

/// A consumer that keeps all rules passes. A consumer that breaks one rule is found.
#[test]
fn broken_rules_are_found() {
    let caught = |rule: Option<Rule>| {
        (0..RUNS / 4).find(|&seed| {
            let mut naive = Naive::new(rule);
            matches!(World::run(seed, &mut naive), Verdict::Broken(_))
        })
    };
    if let Some(seed) = caught(None) {
        panic!("seed {seed}: {:?}", World::run(seed, &mut Naive::new(None)));
    }
    for rule in Rule::ALL {
        let seed = caught(Some(rule));
        println!("without {rule:?}: seed {seed:?}");
        assert!(seed.is_some(), "no check found a consumer without {rule:?}");
    }
}

/// Equal seeds give equal runs.
#[test]
fn a_seed_is_the_whole_input() {
    for seed in 0..5 {
        let runs = [(); 2].map(|()| format!("{:?}", World::run(seed, &mut Pipeline::new())));
        assert_eq!(runs[0], runs[1], "seed {seed}");
    }
}
