//! Requests on two sources: what is chosen, and what their slots count.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use warmroute_proto::registry::{WorkerEntry, WorkerRole};
use warmroute_proto::{BlockSize, Generation, RouterId, Seed};

use super::*;
use crate::pairing::{PairThreshold, SplitVerdict};
use crate::testing::start;

const FIXED: PairThreshold = PairThreshold::Tokens(500);

fn entry(name: &str, role: WorkerRole) -> WorkerEntry {
    WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        role,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

fn core(policy: Policy, roles: &[(&str, WorkerRole)]) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: policy.into(),
        router: RouterId([1; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    let entries: Vec<_> = roles
        .iter()
        .map(|(name, role)| entry(name, *role))
        .collect();
    core.set_workers(&entries);
    core
}

fn split_core(policy: Policy) -> Core {
    use WorkerRole::{Decode, Prefill};
    let roles = [
        ("d1", Decode),
        ("d2", Decode),
        ("p1", Prefill),
        ("p2", Prefill),
    ];
    core(policy, &roles)
}

fn prompt(tokens: u32, family: u32) -> Prompt {
    let tokens: Vec<u32> = (0..tokens).map(|at| family << 20 | at).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

const fn ask(prompt: &Prompt, leg: Leg) -> RouteRequest<'_> {
    RouteRequest {
        model: "m",
        prompt,
        exclude: &[],
        leg,
    }
}

fn admit(core: &mut Core, prompt: &Prompt, leg: Leg, now: Instant) -> Admitted {
    core.admit(&ask(prompt, leg), None, now).unwrap()
}

fn load_of(core: &Core, admitted: &Admitted) -> (u32, u64, u64) {
    let source = &admitted.decision.source;
    let loads = core.loads();
    let row = loads.iter().find(|row| row.worker == source.worker);
    let row = row.unwrap();
    (row.active_requests, row.prefill_tokens, row.decode_blocks)
}

fn note(core: &mut Core, event: SlotEvent, now: Instant) {
    core.note(event, now).unwrap();
}

fn complete(core: &mut Core, counter: u64, now: Instant) {
    let end = SlotEnd::Completed;
    note(core, SlotEvent::End { counter, end }, now);
}

#[test]
fn a_decode_leg_holds_blocks_and_no_outstanding_prefill() {
    for policy in [Policy::Time, Policy::Kv] {
        let (mut core, now) = (split_core(policy), start());
        let prompt = prompt(1_600, 1);
        let prefill = admit(&mut core, &prompt, Leg::Prefill, now);
        assert!(prefill.decision.source.worker.as_str().starts_with('p'));
        assert_eq!(load_of(&core, &prefill), (1, 1_600, 100));
        complete(&mut core, prefill.slot, now);
        assert_eq!(load_of(&core, &prefill), (0, 0, 0));
        let decode = admit(&mut core, &prompt, Leg::Decode, now);
        assert!(decode.decision.source.worker.as_str().starts_with('d'));
        assert_eq!(load_of(&core, &decode), (1, 0, 100));
        assert_eq!(decode.decision.transfer_tokens, 1_600);
        assert_eq!(decode.movable_until, None);
        complete(&mut core, decode.slot, now);
        assert_eq!(load_of(&core, &decode), (0, 0, 0));
        assert_eq!(core.counts().slot_underflows, 0);
    }
}

#[test]
fn a_decode_leg_avoids_the_queue_of_whole_requests() {
    for policy in [Policy::Time, Policy::Kv] {
        let (mut core, now) = (split_core(policy), start());
        let whole = admit(&mut core, &prompt(8_000, 1), Leg::Whole, now);
        let decode = admit(&mut core, &prompt(1_600, 2), Leg::Decode, now);
        assert_ne!(whole.decision.source, decode.decision.source);
    }
}

#[test]
fn a_decode_leg_returns_to_the_blocks_that_a_source_has() {
    for policy in [Policy::Time, Policy::Kv] {
        let (mut core, now) = (split_core(policy), start());
        let prompt = prompt(16_000, 1);
        let first = admit(&mut core, &prompt, Leg::Decode, now);
        complete(&mut core, first.slot, now);
        let second = admit(&mut core, &prompt, Leg::Decode, now);
        assert_eq!(first.decision.source, second.decision.source);
        assert!(second.decision.transfer_tokens < 16_000 / 5);
    }
}

/// Its first token shows a transfer. The time between its tokens shows what it decodes.
#[test]
fn a_decode_leg_teaches_no_prefill_speed() {
    let (mut core, now) = (split_core(Policy::Time), start());
    let decode = admit(&mut core, &prompt(1_600, 1), Leg::Decode, now);
    let (source, counter) = (decode.decision.source.clone(), decode.slot);
    let before = core.speed(&source).unwrap();
    let first = now + Duration::from_secs(1);
    note(&mut core, SlotEvent::FirstToken { counter }, first);
    note(
        &mut core,
        SlotEvent::Grow {
            counter,
            blocks: 100,
        },
        first,
    );
    complete(&mut core, counter, first + Duration::from_secs(160));
    let after = core.speed(&source).unwrap();
    assert_eq!(before.ttft, after.ttft);
    assert!(after.itl.base_secs > before.itl.base_secs, "{after:?}");
    assert_eq!(core.ttft_ratio(&source, first), None);
    let next = admit(&mut core, &prompt(1_600, 2), Leg::Decode, first);
    assert!(next.decision.chosen.time.transfer > 0.02);
}

#[test]
fn a_request_is_split_above_the_threshold() {
    let (mut core, now) = (split_core(Policy::Time), start());
    let split = |core: &mut Core, tokens| {
        let prompt = prompt(tokens, 1);
        core.split(&ask(&prompt, Leg::Whole), None, FIXED, now)
    };
    assert_eq!(split(&mut core, 500), SplitVerdict::Cached);
    assert_eq!(split(&mut core, 501), SplitVerdict::Long);
    assert_eq!(core.counts().open_slots, 0);
    // What a decode source has cached is not computed there.
    let kept = prompt(4_000, 1);
    let decode = admit(&mut core, &kept, Leg::Decode, now);
    assert_eq!(split(&mut core, 4_000), SplitVerdict::Cached);
    complete(&mut core, decode.slot, now);
}

#[test]
fn busy_decode_sources_make_a_learned_split_worth_it() {
    let (mut core, now) = (split_core(Policy::Time), start());
    let learned = |core: &mut Core| {
        let prompt = prompt(8_000, 9);
        let threshold = PairThreshold::Learned;
        core.split(&ask(&prompt, Leg::Whole), None, threshold, now)
    };
    assert_eq!(learned(&mut core), SplitVerdict::NotEarlier);
    for family in 1..9 {
        let decode = admit(&mut core, &prompt(1_600, family), Leg::Decode, now);
        let counter = decode.slot;
        note(&mut core, SlotEvent::FirstToken { counter }, now);
    }
    assert_eq!(learned(&mut core), SplitVerdict::Earlier);
}

#[test]
fn without_a_pair_a_request_is_whole() {
    use WorkerRole::{Both, Decode, Prefill};
    let (prompt, now) = (prompt(8_000, 1), start());
    let split = |core: &mut Core| core.split(&ask(&prompt, Leg::Whole), None, FIXED, now);
    for (roles, verdict) in [
        (&[("b", Both), ("d", Decode)][..], SplitVerdict::NoPair),
        (&[("p", Prefill)], SplitVerdict::NoSource),
        (&[("p", Prefill), ("b", Both)], SplitVerdict::Long),
    ] {
        assert_eq!(split(&mut core(Policy::Time, roles)), verdict);
    }
    let mut core = core(Policy::Time, &[("p", Prefill), ("d", Decode)]);
    core.set_health(&"p".into(), Health::Unhealthy);
    assert_eq!(split(&mut core), SplitVerdict::NoPair);
}

proptest! {
    /// Whatever legs are opened and ended, in any order: each is counted where its role belongs, and
    /// at the end nothing is left.
    #[test]
    fn legs_leave_no_load(
        steps in prop::collection::vec((0_u8..3, 1_u32..3_000, 0_u32..4, any::<bool>()), 1..40)
    ) {
        let (mut core, mut now) = (split_core(Policy::Time), start());
        let mut open = Vec::new();
        for (leg, tokens, family, ends) in steps {
            now += Duration::from_millis(7);
            let leg = [Leg::Whole, Leg::Prefill, Leg::Decode][usize::from(leg)];
            let admitted = admit(&mut core, &prompt(tokens, family), leg, now);
            let is_prefill = admitted.decision.source.worker.as_str().starts_with('p');
            prop_assert_eq!(is_prefill, leg == Leg::Prefill);
            let added = if leg == Leg::Decode { 0 } else { admitted.decision.prefill_tokens };
            prop_assert_eq!(admitted.decision.prefill_tokens, added);
            open.push(admitted.slot);
            if ends {
                complete(&mut core, open.remove(0), now);
            }
        }
        for counter in open {
            note(&mut core, SlotEvent::FirstToken { counter }, now);
            let end = SlotEnd::Aborted;
            note(&mut core, SlotEvent::End { counter, end }, now);
        }
        let left: u64 = core.loads().iter().map(|row| {
            u64::from(row.active_requests) + row.prefill_tokens + row.decode_blocks
        }).sum();
        prop_assert_eq!((left, core.counts().slot_underflows), (0, 0));
    }
}
