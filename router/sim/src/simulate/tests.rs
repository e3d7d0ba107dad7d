use std::time::Duration;

use clap::{Args as _, Command, FromArgMatches as _};

use super::SimulateArgs;
use super::arrivals::{ArrivalRate, Arrivals, TraceSlice};
use super::capacity;
use super::replicas::{BalancePolicy, RouterSetup};
use super::report::simulate;
use super::world::{self, FleetSetup, SlowWorkers};
use crate::sim::TimingProfile;
use crate::trace::Trace;
use warmroute_proto::BlockSize;
use warmroute_route::{Knobs, Policy};

const TOOLS: &str = include_str!("testdata/tools.jsonl");
const AGENT: &str = include_str!("testdata/agent.jsonl");

/// One run over a small trace, with caches that cannot hold all of it.
fn report(trace: &str, flags: &str) -> String {
    let small = "simulate --trace x --json --workers 4 --block-size 64 --cache-tokens 65536";
    let flags = small.split(' ').chain(flags.split_whitespace());
    let command = SimulateArgs::augment_args(Command::new("simulate"));
    let matches = command.try_get_matches_from(flags).unwrap();
    let args = SimulateArgs::from_arg_matches(&matches).unwrap();
    simulate(&args, &Trace::parse(trace).unwrap(), epoch()).unwrap()
}

#[expect(clippy::disallowed_methods, reason = "only differences matter")]
fn epoch() -> std::time::Instant {
    std::time::Instant::now()
}

fn figures(trace: &str, flags: &str) -> serde_json::Value {
    serde_json::from_str(&report(trace, flags)).unwrap()
}

fn figure(trace: &str, flags: &str, name: &str) -> f64 {
    figures(trace, flags)[name].as_f64().unwrap()
}

/// The mean over seeds.
fn mean(trace: &str, flags: &str, name: &str) -> f64 {
    let each = (0..4).map(|seed| figure(trace, &format!("{flags} --seed {seed}"), name));
    each.sum::<f64>() / 4.0
}

#[test]
fn equal_flags_give_equal_bytes() {
    for trace in [TOOLS, AGENT] {
        let flags = "--routers 3 --sync-ms 2 --balance random --router-temperature 0.2 --seed 7";
        assert_eq!(report(trace, flags), report(trace, flags));
        let capacity = figure(trace, "", "capacity");
        assert!(capacity > 1.0, "{capacity}");
    }
    let capacity = figure(TOOLS, "", "capacity");
    for other in ["--policy random", "--routers 4", "--seed 9", "--load 2"] {
        assert_eq!(figure(TOOLS, other, "capacity"), capacity, "{other}");
    }
}

#[test]
fn another_seed_is_another_sample() {
    for trace in [TOOLS, AGENT] {
        let flags = "--capacity 10 --seed";
        let one = report(trace, &format!("{flags} 1"));
        let other = report(trace, &format!("{flags} 2"));
        assert_ne!(one.replace("\"seed\":1", "\"seed\":2"), other);
    }
}

/// Without random choices, another draw changes nothing. Agents' sessions leave `time` no tie of
/// sources that differ.
#[test]
fn another_draw_is_the_same_sample_decided_by_other_ties() {
    let draws = |trace: &str, flags: &str| {
        ["0", "1"].map(|draw| {
            let flags = format!("--seed 1 {flags} --draw {draw}");
            let mut found = figures(trace, &flags);
            assert_eq!(found["draw"].to_string(), draw);
            found["draw"] = 0.into();
            found
        })
    };
    for (trace, flags) in [
        (TOOLS, "--capacity 20 --load 1"),
        (TOOLS, "--capacity 10 --policy kv"),
        (AGENT, "--capacity 10 --policy kv"),
    ] {
        let [one, other] = draws(trace, flags);
        assert_ne!(one, other, "{flags}");
    }
    let spread = "--routers 3 --sync-ms off --balance random --policy round-robin";
    for trace in [TOOLS, AGENT] {
        let [one, other] = draws(trace, &format!("--capacity 10 {spread}"));
        assert_eq!(one, other);
    }
}

#[test]
fn every_request_is_answered_or_refused() {
    let rows = |trace: &str| trace.lines().count() as u64;
    for trace in [TOOLS, AGENT] {
        for policy in Policy::ALL.map(Policy::label) {
            let found = figures(trace, &format!("--policy {policy} --capacity 30 --load 1"));
            assert_eq!(found["requests"], rows(trace), "{policy}");
            assert_eq!(found["refused"], 0, "{policy}");
            assert_eq!(found["policy"], policy);
        }
        let found = figures(trace, "--capacity 1000 --load 1 --max-active-requests 1");
        assert_eq!(found["requests"], rows(trace));
        assert!(found["goodput"].as_f64().unwrap() < 1.0);
        if trace == TOOLS {
            assert!(found["refused"].as_u64().unwrap() > 0);
        }
    }
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn choosing_by_cache_finds_more_in_it_than_chance() {
    for trace in [TOOLS, AGENT] {
        let time = mean(trace, "", "hit_rate");
        for policy in ["random", "round-robin", "least-load"] {
            let blind = mean(trace, &format!("--policy {policy}"), "hit_rate");
            assert!(time > blind, "{time} for time, {blind} for {policy}");
        }
    }
}

/// Exchanging load must not delay answers, and four routers choose like one.
#[test]
#[ignore = "long: ./test.sh --all"]
fn routers_that_exchange_load_are_no_worse_than_isolated_ones() {
    let ttft = |flags: &str| mean(TOOLS, &format!("--load 0.9 {flags}"), "ttft_mean_ms");
    let four =
        |policy: &str, sync: &str| ttft(&format!("--policy {policy} --routers 4 --sync-ms {sync}"));
    for policy in ["time", "kv"] {
        let (synced, isolated) = (four(policy, "1"), four(policy, "off"));
        assert!(
            synced <= isolated,
            "{policy}: {synced} ms with sync, {isolated} ms without"
        );
        let one = ttft(&format!("--policy {policy}"));
        assert!(
            synced < 1.15 * one,
            "{policy}: {synced} ms by four, {one} ms by one"
        );
    }
}

/// Bursts of eight requests with one prefix, within less than the delay: every router decides
/// without the others' choices. After moves, eight routers spread a burst as one does.
#[test]
fn a_burst_of_one_prefix_within_the_delay_is_spread_as_one_router_would() {
    let request = |number: u32| {
        let (burst, place) = (number / 8, number % 8);
        let ids: Vec<u32> = (burst * 8..burst * 8 + 8).collect();
        let at = burst * 100_000 + place;
        format!(r#"{{"timestamp":{at},"input_length":4096,"output_length":64,"hash_ids":{ids:?}}}"#)
    };
    let trace: Vec<String> = (0..320).map(request).collect();
    let trace = trace.join("\n");
    // Half a millisecond from one to the next.
    let found = |routers: u32, name: &str| {
        let flags = format!("--capacity 0.16 --load 1 --sync-ms 5 --routers {routers}");
        mean(&trace, &flags, name)
    };
    let [one, eight] = [1, 8].map(|routers| found(routers, "ttft_mean_ms"));
    let busiest = [1, 8].map(|routers| found(routers, "busiest_worker"));
    println!("{one} ms by one, {eight} ms by eight; the busiest worker's part {busiest:?}");
    // Choices crossed and requests moved.
    assert!(found(8, "moved_share") > 0.1);
    assert!(eight < 1.05 * one, "{eight} ms by eight, {one} ms by one");
    assert!(busiest.iter().all(|&part| part < 1.1), "{busiest:?}");
}

/// The trace again and again.
fn repeated(trace: &str, times: u64) -> String {
    let rows: Vec<serde_json::Value> = trace
        .lines()
        .map(|row| serde_json::from_str(row).unwrap())
        .collect();
    let at = |row: &serde_json::Value| row["timestamp"].as_u64().unwrap();
    let span = rows.last().map_or(0, at);
    let turn = |turn: u64| {
        rows.iter().map(move |row| {
            let mut row = row.clone();
            row["timestamp"] = (at(&row) + turn * span).into();
            row.to_string()
        })
    };
    (0..times).flat_map(turn).collect::<Vec<_>>().join("\n")
}

/// Backlogs alone leave it a third of a worker's share here; later it is a normal worker.
#[test]
fn a_slow_worker_loses_its_share_and_gets_it_back() {
    let flags = "--capacity 10 --load 1";
    assert_eq!(figures(TOOLS, flags).get("slow_worker_share"), None);
    for policy in ["time", "kv"] {
        let slow = format!("{flags} --policy {policy} --slow-worker 5");
        let share = mean(TOOLS, &slow, "slow_worker_share");
        assert!(share < 0.24, "{policy}: {share}");
        assert!(figures(TOOLS, &slow).get("later_share").is_none());
    }
    // The share of each one, of two of four.
    let half = format!("{flags} --policy time --slow-worker 5 --slow-workers 2");
    let share = mean(TOOLS, &half, "slow_worker_share");
    assert!(share < 0.5, "{share}");
    let brief = "--slow-worker 5 --slow-secs 10";
    // A quarter of the run.
    let later = mean(
        TOOLS,
        &format!("{flags} --policy kv {brief}"),
        "later_share",
    );
    assert!(later > 0.6, "{later}");
    // Unused, half of the difference is forgotten in 7 s, and of times within 2 % the source with
    // the fewest requests is chosen: five times as slow, that takes 52 of the later 390 s.
    let long = repeated(TOOLS, 10);
    let later = mean(&long, &format!("{flags} {brief}"), "later_share");
    assert!(later > 0.6, "{later}");
}

#[test]
fn the_sync_delay_does_not_affect_a_single_router() {
    let with = |flags: &str| figure(TOOLS, flags, "ttft_mean_ms");
    assert_eq!(with("--sync-ms off"), with("--sync-ms 50"));
    assert_eq!(figure(TOOLS, "", "sync_messages_per_request"), 0.0);
    assert!(figure(TOOLS, "--routers 2", "sync_messages_per_request") > 2.0);
}

/// Prefill at a known speed: time stands for tokens.
#[test]
fn a_lone_request_takes_as_long_as_its_work() {
    let ids: Vec<u64> = (0..15).collect();
    let lengths = r#""input_length":8000,"output_length":1"#;
    let row = |at: u32| format!(r#"{{"timestamp":{at},{lengths},"hash_ids":{ids:?}}}"#);
    let alone = row(0);
    let found = figure(&alone, "--capacity 1", "ttft_mean_ms");
    // 8,000 tokens at 20,000 a second, and a step's overhead.
    assert!((found - 401.0).abs() < 1e-6, "{found}");
    let twice = format!("{alone}\n{}", row(1000));
    let found = figures(&twice, "--capacity 1 --policy kv");
    let hits = f64::from(15 * 512) / 16_000.0;
    assert!((found["hit_rate"].as_f64().unwrap() - hits).abs() < 1e-9);
    assert_eq!(found["credited_rate"], found["hit_rate"]);
}

/// A capacity exists for bounds that all answers or none keep.
#[test]
fn a_capacity_is_found_whatever_the_bounds() {
    for trace in [TOOLS, AGENT] {
        let short: Vec<&str> = trace.lines().take(12).collect();
        for bound in ["3600000", "0"] {
            let flags = format!("--ttft-bound-ms {bound} --itl-bound-ms {bound}");
            let capacity = figure(&short.join("\n"), &flags, "capacity");
            assert!(capacity.is_finite() && capacity > 0.0, "{capacity}");
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let wrong = |flags: &str| {
        let flags = "simulate --trace x".split(' ').chain(flags.split(' '));
        let command = SimulateArgs::augment_args(Command::new("simulate"));
        let matches = command.try_get_matches_from(flags).unwrap();
        let args = SimulateArgs::from_arg_matches(&matches).unwrap();
        simulate(&args, &Trace::parse(TOOLS).unwrap(), epoch())
            .unwrap_err()
            .to_string()
    };
    for (flags, says) in [
        ("--workers 0", "--workers 0 is not between 1 and 4096"),
        ("--load 0", "--load 0 is not between"),
        ("--load nan", "--load NaN"),
        ("--routers 0", "--routers 0"),
        ("--requests 0", "--requests 0"),
        ("--block-size 0", "--block-size 0"),
        ("--cache-tokens 8", "--cache-tokens 8"),
        ("--profile instant", "--profile instant takes no time"),
        ("--overlap-score-weight=-1", "--overlap-score-weight -1"),
    ] {
        let error = wrong(flags);
        assert!(error.starts_with(says), "{error}");
    }
}

#[test]
fn sync_is_a_time_or_off() {
    use super::args::SyncDelay;
    assert_eq!("off".parse(), Ok(SyncDelay::Off));
    assert_eq!(
        "0.5".parse(),
        Ok(SyncDelay::After(Duration::from_micros(500)))
    );
    for wrong in ["", "on", "-1", "nan", "1e99"] {
        assert!(wrong.parse::<SyncDelay>().is_err(), "{wrong}");
    }
}

/// Time to the first token of a prompt that arrives in the 91st step of another one's answer, 2 ms
/// before its end.
fn ttft_beside_an_answer(timing: TimingProfile) -> Duration {
    let trace = r#"{"timestamp": 0, "input_length": 512, "output_length": 200, "hash_ids": [1]}
{"timestamp": 1000, "input_length": 512, "output_length": 1, "hash_ids": [2]}"#;
    let trace = Trace::parse(trace).unwrap();
    let profile = TimingProfile {
        itl: Duration::from_millis(10),
        step_overhead: Duration::from_millis(1),
        ..timing
    };
    let setup = FleetSetup {
        workers: 1,
        engine: capacity::engine(BlockSize::new(64).unwrap(), 65_536, profile),
        replicas: RouterSetup {
            routers: 1,
            sync_delay: None,
            balance: BalancePolicy::RoundRobin,
            draw: 0,
            knobs: Knobs::default(),
        },
        slow: SlowWorkers::NONE,
        event_delay: Duration::ZERO,
        seed: 0,
    };
    let slice = TraceSlice {
        requests: None,
        seed: 0,
    };
    let arrivals = Arrivals::new(&trace, slice, ArrivalRate::Rate(2.0));
    let outcome = world::run(&trace, arrivals, &setup, epoch()).unwrap();
    let last = outcome.done().iter().max_by_key(|done| done.arrived);
    last.unwrap().ttft
}

#[test]
fn asynchronous_scheduling_costs_a_prompt_one_step_more() {
    let step = Duration::from_millis(11);
    let synchronous = ttft_beside_an_answer(TimingProfile::INSTANT);
    assert_eq!(synchronous, Duration::from_millis(2) + step);
    let ahead = TimingProfile {
        async_scheduling: true,
        ..TimingProfile::INSTANT
    };
    assert_eq!(ttft_beside_an_answer(ahead), synchronous + step);
}

#[test]
fn the_latency_outside_an_engine_is_part_of_the_time_to_the_first_token() {
    let request_latency = Duration::from_millis(4);
    let outside = TimingProfile {
        request_latency,
        ..TimingProfile::INSTANT
    };
    let found = ttft_beside_an_answer(outside);
    let inside = ttft_beside_an_answer(TimingProfile::INSTANT);
    assert_eq!(found, inside + request_latency);
}
