//! Any bytes from any sender: no panic, no fence goes back, and all slots are freed in the end.

use std::collections::BTreeMap;

use bytes::Bytes;
use proptest::prelude::*;
use warmroute_proto::codec;
use warmroute_proto::load::{
    LoadAnswer, LoadChange, LoadDigest, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest,
    LoadRequestKind, OpenSlot, Presence, SAMPLES_MAX, SampledPrefix, SlotEnd, StatePart,
};
use warmroute_proto::{Generation, LocalHash, PrefixHash, RecordNumber, RouterId};

use super::super::*;
use super::direct::Side;
use crate::testing::{source, start};

#[derive(Clone, Debug)]
enum Input {
    Broadcast(Vec<u8>),
    /// Answers the last question.
    Answer(Option<Vec<u8>>),
    Ask(Vec<u8>),
    Time(u64),
}

fn router() -> impl Strategy<Value = RouterId> {
    (2..5_u8).prop_map(|number| RouterId([number; 16]))
}

fn incarnation() -> impl Strategy<Value = Generation> {
    (1..4_u64).prop_map(Generation)
}

fn number() -> impl Strategy<Value = RecordNumber> {
    (0..5_u64).prop_map(RecordNumber)
}

fn digest() -> impl Strategy<Value = LoadDigest> {
    (0..3_u64, 0..2_u64).prop_map(|(count, sum)| LoadDigest { count, sum })
}

fn sampled(block: u64) -> SampledPrefix {
    SampledPrefix::of(&[LocalHash(block), LocalHash(7)])
}

fn change() -> impl Strategy<Value = LoadChange> {
    (0..4_u8, 0..4_u64, any::<u32>()).prop_map(|(what, counter, size)| match what {
        0 => LoadChange::AddRequest {
            counter,
            source: source("w"),
            prefill_tokens: size,
            blocks: size % 5,
            prompt: sampled(counter),
        },
        1 => LoadChange::MarkPrefillCompleted { counter },
        2 => LoadChange::Grow {
            counter,
            blocks: size,
        },
        _ => LoadChange::Free {
            counter,
            end: SlotEnd::Failed,
        },
    })
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec(change(), 0..3);
    (router(), incarnation(), number(), changes).prop_map(
        |(router, incarnation, number, changes)| {
            let message = LoadMessage {
                router,
                incarnation,
                number,
                changes,
            };
            codec::encode(&message).unwrap()
        },
    )
}

fn heartbeat() -> impl Strategy<Value = Vec<u8>> {
    let number = prop::option::of(number());
    let leaving = prop::bool::weighted(0.1);
    (router(), incarnation(), number, digest(), leaving).prop_map(
        |(router, incarnation, number, digest, leaving)| {
            let presence = match leaving {
                true => Presence::Leaving,
                false => Presence::Staying,
            };
            let heartbeat = LoadHeartbeat {
                router,
                incarnation,
                number,
                digest,
                beat: 1,
                presence,
            };
            codec::encode(&heartbeat).unwrap()
        },
    )
}

fn part() -> impl Strategy<Value = StatePart> {
    let slot = (0..4_u64, any::<u32>()).prop_map(|(counter, size)| OpenSlot {
        counter,
        source: source("w"),
        prefill_tokens: size,
        blocks: size % 4,
        generated_blocks: size,
        prompt: sampled(counter),
    });
    let cut = (
        router(),
        incarnation(),
        prop::option::of(number()),
        digest(),
    );
    let slots = prop::collection::vec(slot, 0..3);
    (cut, 0..3_u32, 0..4_u32, slots).prop_map(|(cut, part, parts, slots)| StatePart {
        router: cut.0,
        incarnation: cut.1,
        number: cut.2,
        digest: cut.3,
        part,
        parts,
        slots,
    })
}

fn answer() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(message(), 0..3).prop_map(LoadAnswer::Messages),
        part().prop_map(LoadAnswer::State),
        Just(LoadAnswer::Gone),
    ]
    .prop_map(|answer| codec::encode(&answer).unwrap())
}

fn ask() -> impl Strategy<Value = Vec<u8>> {
    let want = prop_oneof![
        (number(), prop::option::of(number()))
            .prop_map(|(from, to)| LoadRequestKind::Numbers { from, to }),
        Just(LoadRequestKind::State),
        (prop::option::of(number()), 0..3_u32)
            .prop_map(|(number, part)| LoadRequestKind::Part { number, part }),
    ];
    (router(), prop::option::of(incarnation()), want).prop_map(|(asker, incarnation, want)| {
        let ask = LoadRequest {
            asker,
            incarnation,
            want,
        };
        codec::encode(&ask).unwrap()
    })
}

fn input() -> impl Strategy<Value = Input> {
    let noise = || prop::collection::vec(any::<u8>(), 0..40);
    let frame = prop::collection::vec(message(), 0..4)
        .prop_map(|messages| codec::encode(&LoadFrame { messages }).unwrap());
    prop_oneof![
        6 => message().prop_map(Input::Broadcast),
        4 => heartbeat().prop_map(Input::Broadcast),
        1 => frame.prop_map(Input::Broadcast),
        1 => noise().prop_map(Input::Broadcast),
        4 => prop::option::of(answer()).prop_map(Input::Answer),
        1 => noise().prop_map(|bytes| Input::Answer(Some(bytes))),
        1 => ask().prop_map(Input::Ask),
        1 => noise().prop_map(Input::Ask),
        2 => (0..1500_u64).prop_map(Input::Time),
    ]
}

proptest! {
    #[test]
    fn nothing_that_comes_in_breaks_a_replica(inputs in prop::collection::vec(input(), 0..60)) {
        let mut now = start();
        let mut side = Side::new(1, now);
        let mut fences: BTreeMap<RouterId, Generation> = BTreeMap::new();
        for input in inputs {
            match input {
                Input::Broadcast(payload) => side.receive(&payload.into(), now),
                Input::Answer(answer) => side.answer(answer.map(Bytes::from).as_ref(), now),
                Input::Ask(question) => {
                    side.replica.serve(&question, &mut side.core, now);
                    side.settle();
                }
                Input::Time(ms) => {
                    now += Duration::from_millis(ms);
                    side.live(now);
                }
            }
            for peer in side.replica.peers.values() {
                if let Some(fence) = peer.fence() {
                    let before = fences.insert(peer.router, fence);
                    prop_assert!(before.is_none_or(|before| before <= fence));
                }
            }
            // The fence of the slots never has to act.
            prop_assert_eq!(side.core.counts().ignored.old_incarnation, 0);
        }
        // All peers are silent, and the router receives its own heartbeats.
        for _ in 0..20 {
            now += HEARTBEAT_INTERVAL;
            side.live(now);
        }
        prop_assert_eq!(side.core.counts().open_slots, 0);
        let loads = side.core.loads();
        prop_assert!(loads.iter().all(|row| row.prefill_tokens + row.decode_blocks == 0));
    }
}

/// Four routers send large states, of which each alone is within the bound.
#[test]
fn unfinished_states_of_all_peers_share_one_bound() {
    let now = start();
    let mut side = Side::new(1, now);
    let slots = large_slots(STATE_BYTES_MAX / 18);
    let counts = (2..=5).map(|number| {
        let router = RouterId([number; 16]);
        side.replica.learn(router, &mut side.core, now);
        side.settle();
        for part in 0..5 {
            let part = StatePart {
                router,
                incarnation: Generation(1),
                number: None,
                digest: LoadDigest::default(),
                part,
                parts: 9,
                slots: slots.clone(),
            };
            let answer = codec::encode(&LoadAnswer::State(part)).unwrap();
            side.answer(Some(&answer.into()), now);
        }
        side.replica.counts().refused.states
    });
    assert_eq!(counts.collect::<Vec<_>>(), [0, 0, 0, 1]);
}

/// Open slots that take at least so many bytes in an answer.
fn large_slots(bytes: usize) -> Vec<OpenSlot> {
    let hashes = vec![PrefixHash(u64::MAX); SAMPLES_MAX];
    let slot = OpenSlot {
        counter: 1,
        source: source("w"),
        prefill_tokens: 1,
        blocks: 1,
        generated_blocks: 0,
        prompt: SampledPrefix { hashes },
    };
    vec![slot; bytes / (SAMPLES_MAX * size_of::<PrefixHash>()) + 1]
}
