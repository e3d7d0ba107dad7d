use super::*;
use crate::source_table::SourceTable;
use warmroute_proto::{DpRank, Source, Tiers};

#[expect(clippy::disallowed_methods, reason = "only differences matter")]
fn start() -> Instant {
    Instant::now()
}

/// Ten blocks of 16 tokens were credited by an exact source as of engine sequence 100.
fn claim() -> CreditClaim {
    let source = Source {
        worker: "w".into(),
        dp_rank: DpRank(0),
    };
    CreditClaim {
        source: SourceTable::default().intern(&source),
        state: SourceState::Exact,
        generation: Some(Generation(5)),
        engine_seq: Some(EngineSeq(100)),
        blocks: 10,
        credit_max: 12,
        block_tokens: 16,
        main_attention_only: true,
        reads: CacheReads::Allowed,
    }
}

/// The index past that prefill, still crediting what it did.
const fn still() -> TrustedSource {
    TrustedSource {
        generation: Generation(5),
        engine_seq: Some(EngineSeq(101)),
        states: Tiers {
            gpu: SourceState::Exact,
            cpu: SourceState::Exact,
            disk: SourceState::Exact,
        },
        run: Tiers {
            gpu: 10,
            cpu: 0,
            disk: 0,
        },
    }
}

fn recheck_of(verdict: AuditVerdict) -> Option<Recheck> {
    match verdict {
        AuditVerdict::Less { recheck, .. } => recheck,
        AuditVerdict::NoClaim | AuditVerdict::Held => None,
    }
}

/// One request that found less, and the index asked again.
fn round(
    audit: &mut CreditAudit,
    claim: &CreditClaim,
    known: Option<&TrustedSource>,
    now: Instant,
) -> Option<RecheckVerdict> {
    let recheck = recheck_of(audit.compare(claim, 0, now))?;
    Some(audit.recheck(&recheck, known, recheck.not_before))
}

#[test]
fn a_shortfall_is_counted_and_reported_in_tokens() {
    let (mut audit, now) = (CreditAudit::default(), start());
    assert_eq!(audit.compare(&claim(), 160, now), AuditVerdict::Held);
    assert_eq!(audit.compare(&claim(), 999, now), AuditVerdict::Held);
    let less = audit.compare(&claim(), 144, now);
    assert!(
        matches!(less, AuditVerdict::Less { tokens: 16, .. }),
        "{less:?}"
    );
    let nothing = CreditClaim {
        blocks: 0,
        ..claim()
    };
    assert_eq!(audit.compare(&nothing, 0, now), AuditVerdict::NoClaim);
    let counts = audit.counts();
    assert_eq!((counts.held, counts.less, counts.strikes), (2, 1, 0));
}

#[test]
fn only_repeated_strikes_demote() {
    let (mut audit, now) = (CreditAudit::default(), start());
    let verdicts: Vec<_> = (0..3)
        .filter_map(|_| round(&mut audit, &claim(), Some(&still()), now))
        .collect();
    let expected = [
        RecheckVerdict::Strike,
        RecheckVerdict::Strike,
        RecheckVerdict::Demote,
    ];
    assert_eq!(verdicts, expected);
}

#[test]
fn a_request_that_finds_what_was_credited_forgives() {
    let (mut audit, now) = (CreditAudit::default(), start());
    for _ in 0..2 {
        round(&mut audit, &claim(), Some(&still()), now);
    }
    audit.compare(&claim(), 160, now);
    let next = round(&mut audit, &claim(), Some(&still()), now);
    assert_eq!(next, Some(RecheckVerdict::Strike));
}

#[test]
fn no_strike_without_the_indexs_insistence() {
    let changes: [fn(&mut TrustedSource); 5] = [
        |known| known.run.gpu = 9,
        |known| known.generation = Generation(6),
        |known| known.engine_seq = Some(EngineSeq(100)),
        |known| known.engine_seq = None,
        |known| known.states.gpu = SourceState::Partial,
    ];
    let (mut audit, now) = (CreditAudit::default(), start());
    for change in changes {
        let mut known = still();
        change(&mut known);
        let verdict = round(&mut audit, &claim(), Some(&known), now);
        assert_eq!(verdict, Some(RecheckVerdict::Cleared), "{known:?}");
    }
    assert_eq!(
        round(&mut audit, &claim(), None, now),
        Some(RecheckVerdict::Cleared)
    );
}

#[test]
fn only_exact_main_attention_sources_and_reading_requests_are_suspected() {
    let changes: [fn(&mut CreditClaim); 4] = [
        |claim| claim.state = SourceState::Unverified,
        |claim| claim.state = SourceState::Partial,
        |claim| claim.main_attention_only = false,
        |claim| claim.reads = CacheReads::Bypassed,
    ];
    let (mut audit, now) = (CreditAudit::default(), start());
    for change in changes {
        let mut claim = claim();
        change(&mut claim);
        assert_eq!(recheck_of(audit.compare(&claim, 0, now)), None);
    }
    assert_eq!(audit.counts().less, 4);
}

#[test]
fn an_answer_before_its_time_proves_nothing() {
    let (mut audit, now) = (CreditAudit::default(), start());
    let recheck = recheck_of(audit.compare(&claim(), 0, now)).unwrap();
    let early = recheck.not_before - Duration::from_millis(1);
    assert_eq!(
        audit.recheck(&recheck, Some(&still()), early),
        RecheckVerdict::Cleared
    );
}

#[test]
fn one_question_a_source_is_open_and_an_abandoned_one_is_forgotten() {
    let (mut audit, now) = (CreditAudit::default(), start());
    assert!(recheck_of(audit.compare(&claim(), 0, now)).is_some());
    assert!(recheck_of(audit.compare(&claim(), 0, now)).is_none());
    assert!(recheck_of(audit.compare(&claim(), 0, now + ABANDONED)).is_some());
}
