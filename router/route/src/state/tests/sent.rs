//! What was sent, where the index says nothing.

use super::*;

/// Engines without events, or no indexer: the index says nothing.
#[test]
fn where_the_index_says_nothing_a_prompt_returns_to_the_source_that_computed_it() {
    let (mut one, mut other, now) = (core(1), core(2), start());
    let asked = prompt(100, 0);
    let first = admit(&mut one, &asked, None, now);
    assert_eq!(first.decision.basis(), DecisionBasis::LoadOnly);
    other.apply_remote(&codec::decode(&first.message).unwrap(), now);
    let counter = first.slot;
    let done = SlotEvent::End {
        counter,
        end: SlotEnd::Completed,
    };
    let freed = one.note(done, now).unwrap();
    other.apply_remote(&codec::decode(&freed).unwrap(), now);
    let later = now + Duration::from_secs(60);
    for core in [&mut one, &mut other] {
        let next = admit(core, &asked, None, later);
        assert_eq!(next.decision.source, first.decision.source);
        assert_eq!(next.decision.basis(), DecisionBasis::Approximate);
        assert_eq!(
            (next.decision.overlap_blocks, next.decision.predicted_blocks),
            (0, 6)
        );
        assert_eq!(next.decision.index_state, SourceState::Unknown);
    }
}

#[test]
fn what_was_sent_ends_by_a_smaller_report_and_with_the_engine() {
    let now = start();
    let later = now + Duration::from_secs(60);
    let completed = || {
        let mut core = core(1);
        let asked = prompt(100, 0);
        let first = admit(&mut core, &asked, None, now);
        end(&mut core, first.slot, SlotEnd::Completed, now);
        assert_eq!(core.counts().sent_prompts, 1);
        (core, asked, first.decision.source)
    };
    let (mut reported, asked, _) = completed();
    let next = admit(&mut reported, &asked, None, later);
    reported.audit(&next.decision, &asked, 32, later);
    end(&mut reported, next.slot, SlotEnd::Failed, later);
    assert_eq!(reported.counts().sent_prompts, 0);
    let (mut restarted, asked, source) = completed();
    restarted.set_health(&source.worker, Health::Unhealthy);
    restarted.set_health(&source.worker, Health::Healthy);
    let next = admit(&mut restarted, &asked, None, later);
    assert_eq!(next.decision.basis(), DecisionBasis::LoadOnly);
}

#[test]
fn nothing_sent_is_kept_where_the_index_answers() {
    let (mut core, now) = (core(1), start());
    let asked = prompt(100, 0);
    let first = admit(&mut core, &asked, Some(&answer(1, 1, [0, 0])), now);
    end(&mut core, first.slot, SlotEnd::Completed, now);
    assert_eq!(core.counts().sent_prompts, 0);
}

#[test]
fn the_policy_approx_ignores_the_index() {
    let now = start();
    let mut core = Core::new(CoreConfig {
        knobs: Policy::Approx.into(),
        router: RouterId([1; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    core.set_workers(&[entry("a"), entry("b")]);
    let asked = prompt(1_000, 0);
    let answer = answer(1, 1, [60, 60]);
    let first = admit(&mut core, &asked, Some(&answer), now);
    assert_eq!(
        (first.decision.overlap_blocks, first.decision.basis()),
        (0, DecisionBasis::LoadOnly)
    );
    end(&mut core, first.slot, SlotEnd::Completed, now);
    let later = now + Duration::from_secs(60);
    let next = admit(&mut core, &asked, Some(&answer), later);
    assert_eq!(next.decision.source, first.decision.source);
    assert_eq!(next.decision.basis(), DecisionBasis::Approximate);
}

/// Images, and models without a tokenizer.
#[test]
fn a_prompt_without_tokens_returns_to_the_source_that_computed_it() {
    let (mut core, now) = (core(1), start());
    let text = [b'x'; 1_000];
    let size = BlockSize::new(16).unwrap();
    let asked = Prompt::of_text(&[&text], 250, size, Seed::PLAIN);
    let exact = answer(1, 1, [0, 0]);
    let first = admit(&mut core, &asked, Some(&exact), now);
    end(&mut core, first.slot, SlotEnd::Completed, now);
    let later = now + Duration::from_secs(60);
    let next = admit(&mut core, &asked, None, later);
    assert_eq!(next.decision.source, first.decision.source);
    assert_eq!(next.decision.basis(), DecisionBasis::Approximate);
    core.audit(&next.decision, &asked, 100, later);
    assert_eq!(
        core.counts().sent_prompts,
        1,
        "tokens do not tell blocks of text"
    );
    core.audit(&next.decision, &asked, 0, later);
    assert_eq!(core.counts().sent_prompts, 0);
}
