use clap::{Args as _, Command, FromArgMatches as _};

use super::*;

const TOOLS: &str = include_str!("../simulate/testdata/tools.jsonl");

fn args(flags: &str) -> TuneArgs {
    let small = "tune --trace x --workers 4 --block-size 64 --cache-tokens 65536 --capacity 10";
    let flags = small.split(' ').chain(flags.split_whitespace());
    let command = TuneArgs::augment_args(Command::new("tune"));
    let matches = command.try_get_matches_from(flags).unwrap();
    TuneArgs::from_arg_matches(&matches).unwrap()
}

#[expect(clippy::disallowed_methods, reason = "only differences to it are used")]
fn epoch() -> Instant {
    Instant::now()
}

fn searched<'t>(flags: &str, trace: &'t Trace) -> Tuner<'t> {
    let mut tuner = Tuner::new(&args(flags), trace, epoch()).unwrap();
    while let Some((_, jobs)) = tuner.next_round() {
        let runs = jobs.iter().map(|job| tuner.run(job).unwrap()).collect();
        tuner.finish_round(&jobs, runs);
    }
    tuner
}

#[test]
fn a_search_keeps_the_default_and_names_flags_and_equal_searches_are_equal() {
    let trace = Trace::parse(TOOLS).unwrap();
    let tuner = searched("--seeds 2 --load 1 --requests 200", &trace);
    let kinds: Vec<RoundKind> = tuner.rounds.iter().map(|round| round.kind).collect();
    assert!(RoundKind::ALL.starts_with(&kinds) && kinds.len() >= 3);
    for round in &tuner.rounds {
        assert!(
            round.of(TuneCandidate::DEFAULT).is_some(),
            "{:?}",
            round.kind
        );
        let means = round.ranking.iter().map(|runs| runs.mean_log(tuner.goal));
        assert!(means.is_sorted(), "{:?}", round.kind);
    }
    let report = tuner.report();
    assert!(report.contains("--policy "), "{report}");
    let page = tuner.page();
    for part in [
        "polyline",
        "fill-opacity",
        "Load of the workers",
        "Over time",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for outside in [
        "http:", "https:", "<script", "src=", "@import", "NaN", "inf",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
    let again = searched("--seeds 2 --load 1 --requests 200", &trace);
    assert_eq!((again.report(), again.page()), (report, page));
}

#[test]
fn rounds_share_no_seed() {
    let trace = Trace::parse(TOOLS).unwrap();
    let tuner = Tuner::new(&args("--seeds 1000"), &trace, epoch()).unwrap();
    let ends = RoundKind::ALL.map(|kind| tuner.seeds(kind));
    assert!(ends.windows(2).all(|pair| pair[0].end <= pair[1].start));
    let error = Tuner::new(&args("--seeds 1"), &trace, epoch())
        .err()
        .unwrap();
    assert_eq!(error.to_string(), "--seeds 1 is not between 2 and 1000");
}
