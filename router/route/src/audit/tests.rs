use super::*;
use crate::testing::{source, source_id, start};
use warmroute_proto::{BlockSize, LogPosition};

const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 7,
    nonce: 1,
};

const OTHER_LOG: StreamIdentity = StreamIdentity { nonce: 2, ..LOG };

const fn at(log: StreamIdentity) -> Option<AnswerPosition> {
    Some(AnswerPosition {
        log,
        position: LogPosition(70),
    })
}

/// Ten blocks of 16 tokens were credited by an exact source as of engine sequence 100.
fn claim() -> CreditClaim {
    CreditClaim {
        source: source_id(),
        state: SourceState::Exact,
        shows_all_tiers: true,
        standing: ClaimStanding::Credited,
        decided: start(),
        generation: Some(Generation(5)),
        number: Some(RecordNumber(60)),
        position: at(LOG),
        engine_seq: Some(EngineSeq(100)),
        blocks: 10,
        gpu_blocks: 10,
        lower_tier: None,
        credit_max: 12,
        cut: BlockSize::new(16).unwrap().into(),
        main_attention_only: true,
        reads: CacheReads::Allowed,
    }
}

/// The index past that prefill, and the block held all the time.
const fn insists() -> HoldAnswer {
    HoldAnswer {
        log: Some(LOG),
        generation: Some(Generation(5)),
        engine_seq: Some(EngineSeq(101)),
        state: SourceState::Exact,
        proof_age_ms: 900,
        span: HoldSpan::Held,
    }
}

const fn block_at(depth: usize) -> Option<PrefixHash> {
    Some(PrefixHash(depth as u64))
}

fn recheck_of(audit: &mut CreditAudit, claim: &CreditClaim, cached: u32) -> Option<Recheck> {
    match audit.compare(claim, cached, block_at, start()) {
        AuditVerdict::Less { recheck, .. } => recheck,
        AuditVerdict::NoClaim | AuditVerdict::Held | AuditVerdict::Reinstate => None,
    }
}

/// One request that found less, and the index asked again.
fn round(audit: &mut CreditAudit, answer: &HoldAnswer) -> RecheckVerdict {
    let recheck = recheck_of(audit, &claim(), 0).unwrap();
    settle(audit, recheck, answer)
}

/// An index that answers a recheck alike as often as it is asked.
fn settle(audit: &mut CreditAudit, recheck: Recheck, answer: &HoldAnswer) -> RecheckVerdict {
    let mut verdict = audit.recheck(&recheck, answer, recheck.not_before);
    while let RecheckVerdict::Repeat(again) = verdict {
        verdict = audit.recheck(&again, answer, again.not_before);
    }
    verdict
}

fn demote(audit: &mut CreditAudit) {
    let verdicts: Vec<_> = (0..STRIKES).map(|_| round(audit, &insists())).collect();
    assert_eq!(verdicts.last(), Some(&RecheckVerdict::Demote));
}

#[test]
fn a_shortfall_is_counted_and_reported_in_tokens() {
    let (mut audit, now) = (CreditAudit::default(), start());
    assert_eq!(
        audit.compare(&claim(), 160, block_at, now),
        AuditVerdict::Held
    );
    assert_eq!(
        audit.compare(&claim(), 999, block_at, now),
        AuditVerdict::Held
    );
    let less = audit.compare(&claim(), 144, block_at, now);
    assert!(
        matches!(less, AuditVerdict::Less { tokens: 16, .. }),
        "{less:?}"
    );
    let nothing = CreditClaim {
        blocks: 0,
        ..claim()
    };
    assert_eq!(
        audit.compare(&nothing, 0, block_at, now),
        AuditVerdict::NoClaim
    );
    let counts = audit.counts();
    assert_eq!((counts.held, counts.less, counts.strikes), (2, 1, 0));
}

#[test]
fn only_repeated_strikes_demote() {
    let mut audit = CreditAudit::default();
    let verdicts = [(); 3].map(|()| round(&mut audit, &insists()));
    let expected = [
        RecheckVerdict::Strike,
        RecheckVerdict::Strike,
        RecheckVerdict::Demote,
    ];
    assert_eq!(verdicts, expected);
}

#[test]
fn a_request_that_finds_what_was_credited_forgives() {
    let mut audit = CreditAudit::default();
    for _ in 0..2 {
        round(&mut audit, &insists());
    }
    audit.compare(&claim(), 160, block_at, start());
    assert_eq!(round(&mut audit, &insists()), RecheckVerdict::Strike);
}

#[test]
fn the_first_missing_block_is_queried() {
    let mut audit = CreditAudit::default();
    let recheck = recheck_of(&mut audit, &claim(), 33).unwrap();
    let query = recheck.query(source("w"));
    assert_eq!(query.block, PrefixHash(2));
    assert_eq!((query.log, query.since), (LOG, LogPosition(70)));
}

#[test]
fn no_strike_without_uninterrupted_holding() {
    type Change = fn(&mut HoldAnswer);
    let changes: [(Change, RecheckVerdict); 11] = [
        (
            |it| it.span = HoldSpan::Interrupted,
            RecheckVerdict::Cleared,
        ),
        (|it| it.span = HoldSpan::Absent, RecheckVerdict::Cleared),
        (
            |it| it.generation = Some(Generation(6)),
            RecheckVerdict::Cleared,
        ),
        (|it| it.span = HoldSpan::Uncovered, RecheckVerdict::Unproven),
        // Its generation and its numbers may be those of the log before.
        (|it| it.log = Some(OTHER_LOG), RecheckVerdict::Unproven),
        (|it| it.log = None, RecheckVerdict::Unproven),
        (
            |it| it.generation = Some(Generation(4)),
            RecheckVerdict::Unproven,
        ),
        (
            |it| it.engine_seq = Some(EngineSeq(100)),
            RecheckVerdict::Unproven,
        ),
        (|it| it.engine_seq = None, RecheckVerdict::Unproven),
        (
            |it| it.state = SourceState::Partial,
            RecheckVerdict::Unproven,
        ),
        // The proof may be older than what the request itself made the engine publish.
        (|it| it.proof_age_ms = 2_001, RecheckVerdict::Unproven),
    ];
    let mut audit = CreditAudit::default();
    for (change, verdict) in changes {
        let mut answer = insists();
        change(&mut answer);
        for _ in 0..=STRIKES {
            assert_eq!(round(&mut audit, &answer), verdict, "{answer:?}");
        }
    }
    assert_eq!(audit.counts().strikes, 0);
}

#[test]
fn only_exact_gpu_blocks_and_reading_requests_are_suspected() {
    let changes: [fn(&mut CreditClaim); 7] = [
        |claim| claim.state = SourceState::Unverified,
        |claim| claim.state = SourceState::Partial,
        |claim| claim.main_attention_only = false,
        |claim| claim.reads = CacheReads::Bypassed,
        |claim| claim.gpu_blocks = 0,
        |claim| claim.position = None,
        |claim| claim.number = None,
    ];
    let mut audit = CreditAudit::default();
    for change in changes {
        let mut claim = claim();
        change(&mut claim);
        assert_eq!(recheck_of(&mut audit, &claim, 0), None);
    }
    assert_eq!(audit.counts().less, 7);
}

#[test]
fn one_recheck_a_source_is_open_and_an_abandoned_one_is_forgotten() {
    let (mut audit, now) = (CreditAudit::default(), start());
    assert!(recheck_of(&mut audit, &claim(), 0).is_some());
    assert!(recheck_of(&mut audit, &claim(), 0).is_none());
    let later = audit.compare(&claim(), 0, block_at, now + ABANDONED * 2);
    assert!(
        matches!(
            later,
            AuditVerdict::Less {
                recheck: Some(_),
                ..
            }
        ),
        "{later:?}"
    );
}

#[test]
fn agreements_in_a_row_end_a_demotion_and_a_strike_begins_them_again() {
    let mut audit = CreditAudit::default();
    demote(&mut audit);
    let doubted = CreditClaim {
        standing: ClaimStanding::Demoted,
        ..claim()
    };
    let agree = |audit: &mut CreditAudit| audit.compare(&doubted, 160, block_at, start());
    for _ in 1..AGREEMENTS {
        assert_eq!(agree(&mut audit), AuditVerdict::Held);
    }
    round(&mut audit, &insists());
    assert_eq!(audit.agreements(doubted.source), 0);
    for _ in 1..AGREEMENTS {
        assert_eq!(agree(&mut audit), AuditVerdict::Held);
    }
    // Evicted in between: no proof of anything.
    let mut evicted = insists();
    evicted.span = HoldSpan::Interrupted;
    round(&mut audit, &evicted);
    assert_eq!(agree(&mut audit), AuditVerdict::Reinstate);
}

/// What another log's index credits neither adds to the strikes of this one nor takes them back.
#[test]
fn strikes_and_agreements_are_of_one_log() {
    let mut audit = CreditAudit::default();
    let elsewhere = CreditClaim {
        position: at(OTHER_LOG),
        standing: ClaimStanding::Demoted,
        ..claim()
    };
    demote(&mut audit);
    for _ in 0..=AGREEMENTS {
        let verdict = audit.compare(&elsewhere, 160, block_at, start());
        assert_eq!(verdict, AuditVerdict::Held);
    }
    assert_eq!(audit.agreements(elsewhere.source), 0);
    for _ in 1..STRIKES {
        assert_eq!(round(&mut audit, &insists()), RecheckVerdict::Strike);
    }
    let recheck = recheck_of(&mut audit, &elsewhere, 0).unwrap();
    let answer = HoldAnswer {
        log: Some(OTHER_LOG),
        ..insists()
    };
    let verdict = settle(&mut audit, recheck, &answer);
    assert_eq!(verdict, RecheckVerdict::Strike);
}

/// An indexer on a machine that was suspended answers before it reads the log's clock: its proof
/// seems young. Later it knows better, or was suspended again.
#[test]
fn one_answer_that_the_block_was_held_is_no_strike() {
    let mut audit = CreditAudit::default();
    let recheck = recheck_of(&mut audit, &claim(), 0).unwrap();
    let verdict = audit.recheck(&recheck, &insists(), recheck.not_before);
    let RecheckVerdict::Repeat(again) = verdict else {
        panic!("{verdict:?}");
    };
    assert_eq!(again.not_before, recheck.not_before + REPEAT_AFTER);
    assert!(recheck_of(&mut audit, &claim(), 0).is_none(), "still open");
    let mut aged = insists();
    aged.proof_age_ms = 12_000;
    let verdict = audit.recheck(&again, &aged, again.not_before);
    assert_eq!(verdict, RecheckVerdict::Unproven);
    // It may have been suspended since the first answer.
    aged.proof_age_ms = 2_001;
    let verdict = audit.recheck(&again, &aged, again.not_before);
    assert_eq!(verdict, RecheckVerdict::Unproven);
    let late = again.not_before + Duration::from_millis(1_501);
    let verdict = audit.recheck(&again, &insists(), late);
    assert_eq!(verdict, RecheckVerdict::Unproven);
    assert_eq!(audit.counts().strikes, 0);
}
