use warmroute_proto::query::SourceState;
use warmroute_proto::view::SourceView;
use warmroute_proto::{EngineHealth, TierState, Tiers};

use super::*;
use crate::tests_support::{IDENTITY, source};

fn digest(sum: u64) -> Digest {
    Digest { count: 1, sum }
}

fn heartbeat(number: u64, sum: u64) -> Heartbeat {
    Heartbeat {
        source: source("w/0"),
        generation: Generation(1),
        number: Some(RecordNumber(number)),
        engine_seq: None,
        states: Tiers::all(TierState::Complete),
        after: digest(sum),
        health: EngineHealth::Healthy,
        said_at: None,
    }
}

fn view(position: u64, number: u64, sum: u64) -> Result<View, String> {
    Ok(View {
        version: String::new(),
        ready: true,
        log: Some(IDENTITY),
        position: LogPosition(position),
        lag_messages: 0,
        lag_ms: None,
        unix_ns: 0,
        snapshot_every_secs: None,
        sources: vec![SourceView {
            source: source("w/0"),
            generation: Some(Generation(1)),
            number: Some(RecordNumber(number)),
            engine_seq: Some(EngineSeq(number)),
            states: Tiers::all(SourceState::Exact),
            reason: None,
            doubt: None,
            state_age_ms: 0,
            proof_age_ms: None,
            digest: Some(digest(sum)),
            health: EngineHealth::Healthy,
            begun_lately: 0,
        }],
        more: false,
    })
}

/// Rounds of what replicas `a` and `b` say: position, number, sum.
fn compare(rounds: &[[(u64, u64, u64); 2]]) -> Comparison {
    let mut comparison = Comparison::new(["a".to_owned(), "b".to_owned()]);
    for round in rounds {
        let views = ["a", "b"].into_iter().zip(round);
        let views = views
            .map(|(id, &(position, number, sum))| (id.to_owned(), view(position, number, sum)));
        comparison.viewed(&views.collect());
    }
    comparison
}

fn codes(comparison: Comparison) -> Vec<Code> {
    let report = comparison.report("ns".to_owned(), String::new());
    report.findings.iter().map(|finding| finding.code).collect()
}

#[test]
fn equal_replicas_are_complete_once_they_met_at_one_position() {
    assert!(!compare(&[[(5, 1, 1), (6, 2, 2)]]).is_complete());
    // A number is met later than it was told: the second replica lags.
    let met = compare(&[[(5, 1, 1), (4, 0, 0)], [(6, 2, 2), (5, 1, 1)]]);
    assert!(!met.is_complete(), "never at one position");
    assert_eq!(codes(met), []);
    let met = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    assert!(met.is_complete());
    assert_eq!(codes(met), []);
}

#[test]
fn a_replica_that_differs_is_found_at_whatever_number_they_meet() {
    let differs = compare(&[[(5, 1, 1), (4, 0, 0)], [(6, 2, 2), (5, 1, 9)]]);
    let report = differs.report("ns".to_owned(), String::new());
    let finding = &report.findings[0];
    assert_eq!(finding.code, Code::IndexersDiffer);
    assert!(
        finding.about[0].starts_with("w/0 at generation 1, number 1: "),
        "{report}"
    );
    assert!(report.needs_somebody());
    assert_eq!(
        codes(compare(&[[(5, 1, 1), (5, 2, 2)]]))[0],
        Code::IndexersDiffer
    );
}

#[test]
fn shims_are_compared_and_missed_ones_told() {
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.heard(&heartbeat(0, 7));
    assert!(!comparison.is_complete());
    assert_eq!(codes(comparison), [Code::NotCompared]);
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.heard(&heartbeat(1, 1));
    assert!(comparison.is_complete());
    assert_eq!(codes(comparison), []);
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.heard(&heartbeat(1, 2));
    assert_eq!(codes(comparison), [Code::MirrorDiffers]);
}

#[test]
fn engines_are_compared_where_nothing_changed_between() {
    let check = |changed, last, sum, expected: &[Code]| {
        let mut comparison = compare(&[[(5, 4, 1), (5, 4, 1)]]);
        let listed = Listed {
            dp_rank: warmroute_proto::DpRank(0),
            changed: Some(EngineSeq(changed)),
            last: Some(EngineSeq(last)),
            digest: digest(sum),
        };
        comparison.listed(&WorkerId::from("w"), vec![listed]);
        assert_eq!(codes(comparison), expected);
    };
    check(3, 6, 1, &[]);
    check(4, 4, 1, &[]);
    check(3, 6, 2, &[Code::EngineDiffers]);
    check(5, 6, 2, &[Code::NotCompared]);
    check(1, 3, 2, &[Code::NotCompared]);
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut comparison = Comparison::new(["a".to_owned()]);
    for number in 0..1000 {
        comparison.heard(&heartbeat(number, 1));
    }
    let told = &comparison.sources[&source("w/0")];
    assert_eq!(told.points.len(), POINTS_MAX);
}
