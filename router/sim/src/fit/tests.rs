use std::sync::Arc;

use clap::{Args as _, Command, FromArgMatches as _};
use warmroute_proto::Seed;
use warmroute_route::Prompt;

use super::*;
use crate::recording::{
    FileEncoder, FileHeader, NamedFile, RecordedOutcome, RecordedPlacement, RecordingSalt,
    RequestFacts,
};

const TOOLS: &str = include_str!("../simulate/testdata/tools.jsonl");

fn args() -> FitArgs {
    let command = FitArgs::augment_args(Command::new("fit"));
    FitArgs::from_arg_matches(&command.get_matches_from(["fit", "in", "out"])).unwrap()
}

#[expect(clippy::disallowed_methods, reason = "only differences matter")]
fn epoch() -> Instant {
    Instant::now()
}

/// A recording of a trace on one simulated engine, which finds prompts cached as the model does.
fn recorded(profile: &EngineProfile, rate: f64) -> Recording {
    let trace = Trace::parse(TOOLS).unwrap();
    let size = BlockSize::new(16).unwrap();
    let setup = FleetSetup {
        workers: 1,
        engine: capacity::engine(size, profile.cache_tokens.unwrap(), profile.timing()),
        replicas: RouterSetup {
            routers: 1,
            sync_delay: None,
            balance: BalancePolicy::RoundRobin,
            draw: 0,
            knobs: Knobs::default(),
        },
        slow: SlowWorkers::NONE,
        event_delay: Duration::from_millis(1),
        seed: 0,
    };
    let stretch = TraceSlice {
        requests: None,
        seed: 3,
    };
    let arrivals = Arrivals::new(&trace, stretch, ArrivalRate::Rate(rate));
    let mut at: Vec<_> = arrivals.first.iter().map(|a| (a.at, a.request)).collect();
    at.sort_unstable();
    let outcome = world::run(&trace, arrivals, &setup, epoch()).unwrap();
    let header = FileHeader {
        recording: 1,
        file: 0,
        started_unix_ms: 0,
    };
    let mut bytes = Vec::new();
    let mut encoder = FileEncoder::new(RecordingSalt::new([1; 32]), header, &mut bytes);
    let worker: Arc<str> = "w".into();
    for done in outcome.done() {
        let place = at
            .binary_search_by_key(&done.arrived, |(at, _)| *at)
            .unwrap();
        let prompt = Prompt::new(&trace.prompt(at[place].1), size, Seed::PLAIN);
        let facts = RequestFacts {
            arrived: done.arrived,
            model: "m".into(),
            prompt_tokens: done.input_tokens,
            output_tokens: done.output_tokens,
            block_tokens: 16,
            ttft: Some(done.ttft),
            duration: done.ttft + done.decode,
            cached_tokens: u32::try_from(done.cached_tokens).ok(),
            outcome: RecordedOutcome::Completed,
            placement: Some(RecordedPlacement {
                worker: Arc::clone(&worker),
                dp_rank: 0,
                credited_blocks: 0,
                predicted_blocks: 0,
                active_requests: 0,
                queue: Duration::ZERO,
                prefill: Duration::ZERO,
                decode: Duration::ZERO,
            }),
            tenant: None,
        };
        encoder.encode(&facts, prompt.blocks(), &mut bytes);
    }
    let file = NamedFile {
        name: "f",
        bytes: &bytes,
    };
    Recording::decode([file]).unwrap()
}

fn known() -> EngineProfile {
    EngineProfile {
        prefill_tokens_per_sec: 9_000.0,
        step_ms: 12.0,
        step_ms_per_sequence: 0.4,
        step_ms_per_context_token: 0.0004,
        step_overhead_ms: 3.0,
        async_scheduling: false,
        request_ms: 0.0,
        cache_tokens: Some(49_152),
    }
}

/// Within 2 % for the prefill rate and a step, 10 % for what a sequence adds, a token of context, and
/// the cache.
#[test]
fn a_fit_recovers_the_profile_of_a_simulated_engine() {
    for (rate, async_scheduling) in [(0.5, false), (2.0, false), (0.5, true), (2.0, true)] {
        let wanted = EngineProfile {
            async_scheduling,
            ..known()
        };
        let recording = recorded(&wanted, rate);
        let (found, report) = fit(&recording, &args(), epoch()).unwrap();
        assert!(report.contains("hit rate"), "{report}");
        let near = |found: f64, wanted: f64, tolerance: f64| {
            assert!(
                (found / wanted - 1.0).abs() < tolerance,
                "{found} for {wanted} at {rate}/s"
            );
        };
        near(
            found.prefill_tokens_per_sec,
            wanted.prefill_tokens_per_sec,
            0.02,
        );
        let step = |of: &EngineProfile| of.step_ms + of.step_overhead_ms;
        near(step(&found), step(&wanted), 0.02);
        near(found.step_ms_per_sequence, wanted.step_ms_per_sequence, 0.1);
        near(
            found.step_ms_per_context_token,
            wanted.step_ms_per_context_token,
            0.1,
        );
        assert_eq!(found.async_scheduling, async_scheduling, "at {rate}/s");
        near(found.cache_tokens.unwrap().into(), 49_152.0, 0.1);
    }
}

#[test]
fn a_replay_with_the_fitted_profile_has_the_recorded_times() {
    let recording = recorded(&known(), 2.0);
    let samples = Samples::of(&recording, &[]);
    let trace = Trace::of_recording(&recording, &[]).unwrap();
    let profile = samples.profile(16).unwrap();
    let figures = replay(&trace, &samples, &profile, Knobs::default(), epoch()).unwrap();
    let ttfts = samples.ttfts();
    let mean = ttfts.iter().sum::<Duration>().as_secs_f64() * 1000.0 / ttfts.len() as f64;
    let error = figures.ttft_mean_ms / mean - 1.0;
    assert!(
        error.abs() < 0.2,
        "{} ms for {mean} ms",
        figures.ttft_mean_ms
    );
    let points = figures.hit_rate - samples.hit_rate().unwrap();
    assert!(points.abs() < 0.03, "{points}");
}

#[test]
fn a_recording_that_shows_nothing_has_no_fit() {
    let few = Trace::parse(TOOLS).unwrap();
    assert!(few.len() > ROWS_MIN);
    let mut recording = recorded(&known(), 2.0);
    recording.requests.truncate(20);
    let error = fit(&recording, &args(), epoch()).unwrap_err();
    assert!(
        error.to_string().contains("20 answers of several tokens"),
        "{error}"
    );
    let mut recording = recorded(&known(), 2.0);
    for (facts, _) in &mut recording.requests {
        facts.ttft = Some(Duration::ZERO);
    }
    let error = fit(&recording, &args(), epoch()).unwrap_err();
    assert!(error.to_string().contains("no profile explains"), "{error}");
}
