//! Workers with blocks of different sizes, and models with equal tokens.

use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::{
    BlockCut, BlockSize, EngineSeq, LogPosition, RecordNumber, Seed, StreamIdentity, Tiers,
};

use super::*;
use crate::testing::{source, start};

fn entry(name: &str, model: &str, block_size: u32) -> WorkerEntry {
    WorkerEntry {
        models: vec![model.into()],
        block_size: BlockSize::new(block_size),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

fn core(policy: Policy, workers: &[WorkerEntry]) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: policy.into(),
        router: RouterId([1; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    core.set_workers(workers);
    core
}

fn answer(runs: &[(&str, u32)]) -> IndexReply {
    let part = |(name, gpu): &(&str, u32)| SourceAnswer {
        source: source(name),
        generation: Generation(1),
        number: Some(RecordNumber(1)),
        engine_seq: Some(EngineSeq(1)),
        states: Tiers::all(SourceState::Exact),
        reason: None,
        proof_age_ms: 0,
        run: Tiers {
            gpu: *gpu,
            ..Tiers::default()
        },
    };
    let answer = IndexAnswer::Runs {
        log: StreamIdentity {
            created_unix_ns: 0,
            nonce: 0,
        },
        position: LogPosition(1),
        sources: runs.iter().map(part).collect(),
    };
    answer.into()
}

fn size(tokens: u32) -> BlockSize {
    BlockSize::new(tokens).unwrap()
}

fn prompt(tokens: u32, sizes: &[u32]) -> Prompt {
    let tokens: Vec<u32> = (0..tokens).collect();
    let cut = |tokens_each: &u32| Prompt::new(&tokens, size(*tokens_each), Seed::PLAIN);
    cut(&sizes[0]).with_other_cuts(sizes[1..].iter().map(cut).collect())
}

fn admit(core: &mut Core, prompt: &Prompt, answer: &IndexReply, now: Instant) -> Decision {
    let ask = RouteRequest {
        model: "m",
        prompt,
        exclude: &[],
        leg: Leg::Whole,
    };
    core.admit(&ask, Some(answer), now).unwrap().decision
}

/// Only the sources with its block size count in each answer; a run of 20 blocks of 32 tokens is
/// more than one of 30 blocks of 16.
#[test]
fn each_source_is_credited_in_blocks_of_its_own_size() {
    for policy in [Policy::Kv, Policy::Time] {
        let workers = [entry("small", "m", 16), entry("large", "m", 32)];
        let mut core = core(policy, &workers);
        let prompt = prompt(1000, &[16, 32]);
        // What the query with the other size finds is a coincidence.
        let answers = IndexReply::Cuts(vec![
            (size(16).into(), answer(&[("small", 30), ("large", 60)])),
            (size(32).into(), answer(&[("small", 60), ("large", 20)])),
        ]);
        let now = start();
        let decision = admit(&mut core, &prompt, &answers, now);
        assert_eq!(decision.source, source("large"), "{policy:?}");
        assert_eq!(
            (decision.overlap_blocks, decision.claim.block_tokens()),
            (20, 32)
        );
        assert_eq!(decision.claim.credit_max, 31);
        let mut weighed: Vec<_> = decision.weighed.iter().collect();
        weighed.sort_by_key(|terms| terms.block_tokens);
        let credit = weighed
            .iter()
            .map(|terms| (terms.block_tokens, terms.overlap.gpu));
        assert_eq!(credit.collect::<Vec<_>>(), [(16, 30), (32, 20)]);
        // The engine reports tokens, which agree with the claim.
        let verdict = core.audit(&decision, &prompt, 640, now);
        assert_eq!(verdict, AuditVerdict::Held);
        // What is recorded of the request is in the blocks of its source.
        let predicted = admit(&mut core, &prompt, &answers, now);
        let there = predicted
            .weighed
            .iter()
            .find(|terms| terms.block_tokens == 32);
        assert_eq!(there.unwrap().expected_blocks, 31);
    }
}

/// A worker whose engine names its blocks by the tokens behind them too.
fn looking_ahead(name: &str, lookahead: u32) -> WorkerEntry {
    WorkerEntry {
        lookahead,
        ..entry(name, "m", 16)
    }
}

/// Engines of one block size whose names of blocks cover more or fewer tokens.
#[test]
fn each_source_is_credited_in_blocks_of_its_own_lookahead() {
    let workers = [looking_ahead("plain", 0), looking_ahead("mtp", 3)];
    let mut core = core(Policy::Kv, &workers);
    let tokens: Vec<u32> = (0..162).collect();
    let cut = |lookahead| BlockCut {
        size: size(16),
        lookahead,
    };
    let of = |lookahead| Prompt::new(&tokens, cut(lookahead), Seed::PLAIN);
    let prompt = of(0).with_other_cuts(vec![of(3)]);
    // Behind the tenth block are two tokens only: it has no name there.
    assert_eq!((of(0).credit_max(), of(3).credit_max()), (10, 9));
    let answers = IndexReply::Cuts(vec![
        (cut(0), answer(&[("plain", 4), ("mtp", 10)])),
        (cut(3), answer(&[("plain", 9), ("mtp", 9)])),
    ]);
    let now = start();
    let decision = admit(&mut core, &prompt, &answers, now);
    assert_eq!(decision.source, source("mtp"));
    assert_eq!((decision.overlap_blocks, decision.claim.cut), (9, cut(3)));
    let verdict = core.audit(&decision, &prompt, 144, now);
    assert_eq!(verdict, AuditVerdict::Held);
}

/// A size without an answer gives no credit.
#[test]
fn an_answer_of_one_size_credits_no_source_of_another() {
    let mut core = core(
        Policy::Kv,
        &[entry("small", "m", 16), entry("large", "m", 32)],
    );
    let answers = IndexReply::Cuts(vec![(
        size(32).into(),
        answer(&[("small", 20), ("large", 0)]),
    )]);
    let decision = admit(&mut core, &prompt(1000, &[16, 32]), &answers, start());
    assert!(decision.weighed.iter().all(|terms| terms.overlap.gpu == 0));
}

/// Block hashes do not contain the model. Sources do: an engine serves one base model, and a request
/// compares the sources of its model only.
#[test]
fn equal_tokens_of_another_model_give_no_credit() {
    let mut core = core(
        Policy::Kv,
        &[entry("own", "m", 16), entry("other", "n", 16)],
    );
    let held = answer(&[("own", 0), ("other", 60)]);
    let decision = admit(&mut core, &prompt(1000, &[16]), &held, start());
    assert_eq!(
        (decision.source, decision.overlap_blocks),
        (source("own"), 0)
    );
    assert_eq!(decision.weighed.len(), 1);
}
