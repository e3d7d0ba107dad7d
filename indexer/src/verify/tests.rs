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
        sent_at: None,
    }
}

fn view(position: u64, number: u64, sum: u64) -> Result<ViewPage, String> {
    Ok(ViewPage {
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
        comparison.add_views(&views.collect());
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
    // The second replica lags: a number is compared later than it was reported.
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
    assert!(report.needs_action());
    assert_eq!(
        codes(compare(&[[(5, 1, 1), (5, 2, 2)]]))[0],
        Code::IndexersDiffer
    );
}

#[test]
fn shims_are_compared_and_missing_ones_reported() {
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.add_heartbeat(&heartbeat(0, 7));
    assert!(!comparison.is_complete());
    assert_eq!(codes(comparison), [Code::NotCompared]);
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.add_heartbeat(&heartbeat(1, 1));
    assert!(comparison.is_complete());
    assert_eq!(codes(comparison), []);
    let mut comparison = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    comparison.add_heartbeat(&heartbeat(1, 2));
    assert_eq!(codes(comparison), [Code::MirrorDiffers]);
}

#[test]
fn engines_are_compared_where_nothing_changed_between() {
    let check = |changed, last, sum, expected: &[Code]| {
        let mut comparison = compare(&[[(5, 4, 1), (5, 4, 1)]]);
        let listed = EngineRankList {
            dp_rank: warmroute_proto::DpRank(0),
            changed: Some(EngineSeq(changed)),
            last: Some(EngineSeq(last)),
            digest: digest(sum),
        };
        comparison.add_list(&WorkerId::from("w"), vec![listed]);
        assert_eq!(codes(comparison), expected);
    };
    check(3, 6, 1, &[]);
    check(4, 4, 1, &[]);
    check(3, 6, 2, &[Code::EngineDiffers]);
    check(5, 6, 2, &[Code::NotCompared]);
    check(1, 3, 2, &[Code::NotCompared]);
}

/// Nobody's silence is taken for a yes.
#[test]
fn origins_missing_for_a_registered_source_are_reported() {
    let not_compared = |comparison: Comparison| {
        assert!(!comparison.is_complete());
        let report = comparison.report("ns".to_owned(), String::new());
        assert!(report.needs_action());
        assert_eq!(report.findings[0].code, Code::NotCompared);
        report.findings[0].about.clone()
    };
    let empty = Comparison::new(["a".to_owned(), "b".to_owned()]);
    assert_eq!(not_compared(empty), ["nothing: no source was reported"]);
    let mut unheard = Comparison::new(["a".to_owned()]);
    unheard.expect([source("w/0")]);
    assert_eq!(not_compared(unheard), ["w/0: its shim, indexer a"]);
    let mut without_its_shim = compare(&[[(5, 1, 1), (5, 1, 1)]]);
    without_its_shim.expect([source("w/0")]);
    assert_eq!(not_compared(without_its_shim), ["w/0: its shim"]);

    let b_holds_nothing = || {
        let mut comparison = Comparison::new(["a".to_owned(), "b".to_owned()]);
        comparison.expect([source("w/0")]);
        let mut set_aside = view(5, 1, 1).unwrap();
        set_aside.sources[0].digest = None;
        let views = [
            ("a".to_owned(), view(5, 1, 1)),
            ("b".to_owned(), Ok(set_aside)),
        ];
        comparison.add_views(&views.into());
        comparison.add_heartbeat(&heartbeat(1, 1));
        comparison
    };
    assert_eq!(not_compared(b_holds_nothing()), ["w/0: indexer b"]);
    // Deregistered replicas need not report.
    let mut left = b_holds_nothing();
    left.excuse(|_| true, |id| id == "a");
    assert_eq!(codes(left), []);
    let mut left = b_holds_nothing();
    left.excuse(|_| false, |_| true);
    assert_eq!(codes(left), []);
}

/// It counts its batches from 0 again.
#[test]
fn a_restarted_engine_is_not_compared_with_its_former_life() {
    let listed = |sum| {
        let listed = EngineRankList {
            dp_rank: warmroute_proto::DpRank(0),
            changed: Some(EngineSeq(3)),
            last: Some(EngineSeq(6)),
            digest: digest(sum),
        };
        vec![listed]
    };
    let worker = WorkerId::from("w");
    let mut begun = heartbeat(0, 0);
    begun.generation = Generation(2);
    // The list is of the new life, and comes before or after the new generation.
    let mut before = compare(&[[(5, 4, 1), (5, 4, 1)]]);
    before.add_list(&worker, listed(2));
    assert!(before.is_engine_contradicted());
    before.add_heartbeat(&begun);
    assert!(!before.is_engine_contradicted());
    assert!(!codes(before).contains(&Code::EngineDiffers));
    let mut after = compare(&[[(5, 4, 1), (5, 4, 1)]]);
    after.add_heartbeat(&begun);
    after.add_list(&worker, listed(2));
    // A lagging replica still reports the former generation.
    let lagging = [("b".to_owned(), view(5, 4, 1))];
    after.add_views(&lagging.into());
    assert!(!after.is_engine_contradicted());
    assert!(!codes(after).contains(&Code::EngineDiffers));
    // A list of the former life is not compared with the new one's.
    let mut late = compare(&[[(5, 4, 1), (5, 4, 1)]]);
    late.add_list(&worker, listed(1));
    let mut new_life = view(9, 4, 2).unwrap();
    new_life.sources[0].generation = Some(Generation(2));
    late.add_views(&[("a".to_owned(), Ok(new_life))].into());
    assert!(!codes(late).contains(&Code::EngineDiffers));
}

#[test]
fn what_is_remembered_is_bounded() {
    let mut comparison = Comparison::new(["a".to_owned()]);
    for number in 0..1000 {
        comparison.add_heartbeat(&heartbeat(number, 1));
    }
    let digests = &comparison.sources[&source("w/0")];
    assert_eq!(digests.points.len(), POINTS_MAX);
}
