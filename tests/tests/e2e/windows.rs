//! Engines with sliding-window layers: a prefix is credited where all windows are held.

use fastrand::Rng;

use crate::credit::compare_credit_of;
use crate::fleet::traffic::prompt;
use crate::fleet::{Engines, Flags, Fleet, Mode};

const REQUESTS: u32 = 80;

on_both_planes!(an_engine_with_windows_is_credited_what_it_can_use);

/// The engine keeps the windows of some prompts' ends only, and all blocks of the other group.
async fn an_engine_with_windows_is_credited_what_it_can_use(mode: Mode) {
    let engines = Engines {
        count: 2,
        ranks: 1,
        blocks: 400,
        flags: &["--profile", "instant", "--sliding-groups", "2"],
    };
    let fleet = Fleet::start(mode, engines, Flags::default()).await;
    fleet.until_indexed().await;
    let mut rng = Rng::with_seed(1);
    let requests = (0..REQUESTS).map(|_| {
        let body = prompt(rng.u64(0..6), rng.u64(1..24));
        ("/v1/completions", body)
    });
    let (hits, late) = compare_credit_of(&fleet, requests).await;
    println!("{hits} tokens credited; {late} of {REQUESTS} answers were late");
    assert!(hits > 0, "prompts that begin with others are credited");
    assert!(late < REQUESTS / 2, "the index does not answer");
    fleet.until_idle().await;
}
