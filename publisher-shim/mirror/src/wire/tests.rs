use std::fmt::Write as _;
use std::num::NonZeroU32;

use proptest::prelude::*;
use serde_json::{Value, json};
use warmroute_proto::hash::{PlacedItem, item_hash, local_hashes_with_items};
use warmroute_proto::{BlockSize, LocalHash, Seed};
use xxhash_rust::xxh3::xxh3_64;

use super::*;

const SAMPLES: &str = include_str!("../../testdata/wire_samples.jsonl");

fn bytes_of_hex(hex: &str) -> Vec<u8> {
    (0..hex.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
        .collect()
}

/// The minor version of vLLM, or `None` for SGLang.
fn vllm_minor(sample: &Value) -> Option<u32> {
    let version = sample["version"].as_str().unwrap();
    (sample["engine"] == "vllm").then(|| version.split('.').nth(1).unwrap().parse().unwrap())
}

fn is_sglang(sample: &Value, version: &str) -> bool {
    sample["engine"] == "sglang" && sample["version"] == version
}

/// A store as this version sends it, before its case adds anything.
fn plain(sample: &Value) -> StoredBlocks {
    let (hashes, reports_extra_keys) = match vllm_minor(sample) {
        Some(minor) => (vec![1, 9_223_372_036_854_775_813], minor >= 17),
        None => (
            vec![1, (-5_i64).cast_unsigned()],
            is_sglang(sample, "0.5.23"),
        ),
    };
    StoredBlocks {
        hashes: hashes.into_iter().map(EngineHash).collect(),
        parent: None,
        tokens: (0..8).collect(),
        tokens_per_position: 1,
        block_size: 4,
        lookahead: 0,
        lookahead_tokens: Vec::new(),
        lora: LoraRef::None,
        lora_number: None,
        salt: None,
        keys: Vec::new(),
        reports_extra_keys,
        reports_removals: true,
        medium: Medium::Gpu,
        group: BlockGroup {
            index: since(sample, 20).then_some(0),
            kind: since(sample, 22).then_some(GroupKind::Main),
        },
    }
}

/// vLLM from this minor version on.
fn since(sample: &Value, first: u32) -> bool {
    vllm_minor(sample).is_some_and(|minor| minor >= first)
}

fn rich(sample: &Value) -> StoredBlocks {
    let minor = vllm_minor(sample);
    let named = since(sample, 14) || is_sglang(sample, "0.5.23");
    let mut stored = plain(sample);
    stored.parent = Some(EngineHash(7));
    stored.lora = if named {
        LoraRef::Named("adapter-a".to_owned())
    } else {
        LoraRef::Unnamed(3)
    };
    stored.lora_number = named.then_some(3);
    match minor {
        None => stored.salt = named.then(|| "salt".to_owned()),
        Some(minor) => {
            if minor >= 17 {
                // A salt anywhere but on block 0 is none that this engine sends: opaque.
                stored.keys = vec![(0, opaque_key_of_sample())];
                if minor >= 33 {
                    stored.lookahead = 1;
                    stored.lookahead_tokens = vec![9, 10];
                }
            }
            stored.group.kind =
                (minor >= 22).then_some(GroupKind::Sliding(NonZeroU32::new(64).unwrap()));
        }
    }
    stored
}

/// The sample mixes both forms of an item. No engine does: its bare string is no identifier.
fn opaque_key_of_sample() -> BlockKeys {
    let entry = rmp_serde::to_vec(&json!(["adapter-a", ["mmhash", 2], "salt"])).unwrap();
    BlockKeys {
        items: Vec::new(),
        opaque: Some(xxh3_64(&entry)),
    }
}

fn expected_events(sample: &Value) -> Vec<CacheEvent> {
    let removed = CacheEvent::Removed(RemovedBlocks {
        hashes: vec![EngineHash(1)],
        medium: Medium::Gpu,
        group: since(sample, 20).then_some(0),
    });
    match sample["case"].as_str().unwrap() {
        "stored_root" => vec![CacheEvent::Stored(Box::new(plain(sample)))],
        "stored_rich" => vec![CacheEvent::Stored(Box::new(rich(sample)))],
        "removed" => vec![removed],
        "cleared" => vec![CacheEvent::Cleared],
        "mixed" => vec![
            removed,
            CacheEvent::Stored(Box::new(plain(sample))),
            CacheEvent::Cleared,
        ],
        "bytes_hash" => {
            let mut stored = plain(sample);
            stored.hashes = vec![
                EngineHash(0x0101_0101_0101_0101),
                EngineHash(0x0202_0202_0202_0202),
            ];
            stored.parent = Some(EngineHash(0x0303_0303_0303_0303));
            vec![CacheEvent::Stored(Box::new(stored))]
        }
        case => panic!("no expectation for {case}"),
    }
}

#[test]
fn every_sample_of_every_version_decodes_to_its_events() {
    let mut rows = 0;
    for line in SAMPLES.lines() {
        let sample: Value = serde_json::from_str(line).unwrap();
        let what = format!(
            "{} {} {}",
            sample["engine"], sample["version"], sample["case"]
        );
        let payload = bytes_of_hex(sample["hex"].as_str().unwrap());
        let batch = Batch::decode(&payload).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(batch.events, expected_events(&sample), "{what}");
        assert_eq!(batch.skipped, SkippedEvents::default(), "{what}");
        assert!((batch.ts - 1_700_000_000.5).abs() < f64::EPSILON, "{what}");
        let rank = (!sample["dp_field"].is_null()).then_some(0);
        assert_eq!(batch.dp_rank, rank, "{what}");
        rows += 1;
    }
    assert_eq!(rows, 210);
}

/// A payload of one map event.
fn payload(event: &Value) -> Vec<u8> {
    rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap()
}

fn store(fields: &Value) -> StoredBlocks {
    let mut event = json!({
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null,
        "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null, "medium": "GPU",
    });
    for (key, value) in fields.as_object().unwrap() {
        event[key] = value.clone();
    }
    let batch = Batch::decode(&payload(&event)).unwrap();
    match &batch.events[..] {
        [CacheEvent::Stored(stored)] => (**stored).clone(),
        events => panic!("not one store: {events:?} {:?}", batch.skipped),
    }
}

#[test]
fn extra_keys_are_classified() {
    let digest = "00000000000000ff".to_owned() + &"a".repeat(48);
    let stored = store(&json!({
        "lora_name": "l",
        "extra_keys": [["l", [digest, -3], ["img", 0], "s"], ["l", [digest, 4]]],
    }));
    assert_eq!(stored.lora, LoraRef::Named("l".to_owned()));
    assert_eq!(stored.salt.as_deref(), Some("s"));
    let items = |items: &[u64]| BlockKeys {
        items: items.to_vec(),
        opaque: None,
    };
    assert_eq!(
        stored.keys,
        [
            (0, items(&[item_hash(&digest, -3), item_hash("img", 0)])),
            (1, items(&[item_hash(&digest, 4)])),
        ]
    );
}

#[test]
fn a_salt_that_equals_the_adapters_name_is_still_a_salt() {
    let stored = store(&json!({"lora_name": "x", "extra_keys": [["x", "x"], ["x"]]}));
    assert_eq!(stored.salt.as_deref(), Some("x"));
    assert_eq!(stored.keys, []);
}

#[test]
fn what_no_router_can_reproduce_is_opaque() {
    let opaque = |fields: Value| {
        let keys = store(&fields).keys;
        let [(1, key)] = &keys[..] else {
            panic!("{keys:?}")
        };
        key.opaque.unwrap()
    };
    let a = opaque(json!({"extra_keys": [null, ["unexpected"]]}));
    let b = opaque(json!({"extra_keys": [null, [["mm", "id", 3]]]}));
    let c = opaque(json!({"extra_keys": [null, [7]]}));
    assert!(a != b && b != c);
}

#[test]
fn lookahead_tokens_are_one_list_of_one_length_for_each_block() {
    let of = |lists: Value| {
        let stored = store(&json!({"lookahead_token_ids": lists}));
        (stored.lookahead, stored.lookahead_tokens)
    };
    assert_eq!(of(json!(null)), (0, vec![]));
    assert_eq!(of(json!([[3, 4], [5, 6]])), (2, vec![3, 4, 5, 6]));
    let stored = store(&json!({"lookahead_token_ids": [[3], [5]]}));
    assert_eq!(
        (stored.lookahead_of(0), stored.lookahead_of(1)),
        (&[3][..], &[5][..])
    );
    let long: Vec<u32> = (0..65).collect();
    for odd in [
        json!([[3]]),
        json!([[3], [5, 6]]),
        json!([null, [5]]),
        json!([[[1, 2]], [[3, 4]]]),
        json!([long, long]),
        json!("?"),
    ] {
        let event = json!({
            "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": null,
            "token_ids": [1, 2, 3, 4], "block_size": 2, "medium": "GPU",
            "lookahead_token_ids": odd,
        });
        let batch = Batch::decode(&payload(&event)).unwrap();
        assert_eq!((batch.skipped.stores, batch.events.len()), (1, 1), "{odd}");
    }
}

#[test]
fn embedding_digests_come_as_bytes_and_are_opaque() {
    // [ts, [["BlockStored", [1], nil, [5], 1, nil, "GPU", nil, [[bin 2]]]]]
    let mut bytes = vec![0x92, 0x01, 0x91, 0x99, 0xab];
    bytes.extend_from_slice(b"BlockStored");
    bytes.extend_from_slice(&[0x91, 0x01, 0xc0, 0x91, 0x05, 0x01, 0xc0, 0xa3]);
    bytes.extend_from_slice(b"GPU");
    bytes.extend_from_slice(&[0xc0, 0x91, 0x91, 0xc4, 0x02, 0xaa, 0xbb]);
    let batch = Batch::decode(&bytes).unwrap();
    let [CacheEvent::Stored(stored)] = &batch.events[..] else {
        panic!("{batch:?}")
    };
    let opaque = xxh3_64(&[0x91, 0xc4, 0x02, 0xaa, 0xbb]);
    assert_eq!(stored.keys[0].1.opaque, Some(opaque));
    assert_eq!(batch.dp_rank, None);
}

/// Recorded from vLLM 0.32 with a small LLaVA: events of a prompt, and what the engine's render route
/// answers to it. A router has the latter only.
const IMAGES: &str = include_str!("../../testdata/v032_images.jsonl");

#[test]
fn blocks_of_real_images_have_the_names_that_a_rendering_gives() {
    for line in IMAGES.lines() {
        let sample: Value = serde_json::from_str(line).unwrap();
        let render = &sample["render"];
        let ids = render["token_ids"].as_array().unwrap().iter();
        let ids: Vec<u32> = ids
            .map(|id| id.as_u64().unwrap().try_into().unwrap())
            .collect();
        let image = |of: &str| render["features"][of]["image"].as_array().unwrap().clone();
        let images = image("mm_hashes").into_iter().zip(image("mm_placeholders"));
        let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
        let images: Vec<_> = images
            .map(|(name, place)| PlacedItem {
                identifier: name.as_str().unwrap().into(),
                offset: number(&place["offset"]),
                length: number(&place["length"]),
            })
            .collect();
        let (seed, size) = (
            Seed::new(None, render["cache_salt"].as_str()),
            BlockSize::new(32).unwrap(),
        );
        let expected = local_hashes_with_items(&ids, size, seed, &images);
        let payload = bytes_of_hex(sample["payloads"][0].as_str().unwrap());
        let batch = Batch::decode(&payload).unwrap();
        let [CacheEvent::Stored(stored)] = &batch.events[..] else {
            panic!("{batch:?}")
        };
        let items = |block: usize| {
            let keys = stored.keys.iter().find(|(index, _)| *index == block);
            keys.map_or(Vec::new(), |(_, keys)| keys.items.clone())
        };
        let blocks = stored.tokens.chunks_exact(32).enumerate();
        let blocks = blocks.map(|(at, tokens)| LocalHash::of_block(tokens, &items(at), seed));
        let found: Vec<_> = blocks.collect();
        // The blocks before were cached.
        assert!(expected.ends_with(&found), "{stored:?}");
        assert!(stored.keys.iter().any(|(_, keys)| keys.items.len() > 1));
        assert!(stored.keys.iter().all(|(_, keys)| keys.opaque.is_none()));
        assert_eq!(stored.salt.as_deref(), render["cache_salt"].as_str());
    }
}

#[test]
fn old_array_items_are_bare_identifiers() {
    let digest = "0000000000000001".to_owned() + &"b".repeat(48);
    let event = json!([
        "BlockStored",
        [1, 2],
        null,
        [1, 2],
        1,
        null,
        "GPU",
        null,
        [[digest, "salt"], ["img"]]
    ]);
    let batch = Batch::decode(&payload(&event)).unwrap();
    let [CacheEvent::Stored(stored)] = &batch.events[..] else {
        panic!("{batch:?}")
    };
    assert_eq!(stored.salt.as_deref(), Some("salt"));
    assert_eq!(stored.keys[0].1.items, [1]);
    assert_eq!(stored.keys[1].1.items, [xxh3_64(b"img")]);
}

/// From 0.20 on, and in whatever event has an item with its offset, a string is no item.
#[test]
fn a_salt_of_hex_digits_is_no_image() {
    let salt = "0000000000000001".to_owned() + &"b".repeat(48);
    let event = |keys: Value, group: Option<u32>| {
        let mut event = json!([
            "BlockStored",
            [1, 2],
            null,
            [1, 2],
            1,
            null,
            "GPU",
            null,
            keys
        ]);
        event.as_array_mut().unwrap().extend(group.map(Value::from));
        let batch = Batch::decode(&payload(&event)).unwrap();
        let [CacheEvent::Stored(stored)] = &batch.events[..] else {
            panic!("{batch:?}")
        };
        (**stored).clone()
    };
    let salted = event(json!([[salt], null]), Some(0));
    assert_eq!(salted.salt.as_ref(), Some(&salt));
    assert_eq!(salted.keys, []);
    let beside = event(json!([[salt], [["img", 0]]]), None);
    assert_eq!(beside.salt.as_ref(), Some(&salt));
    assert_eq!(beside.keys.len(), 1);
    assert_eq!(beside.keys[0].1.items, [item_hash("img", 0)]);
}

#[test]
fn sglangs_eighth_element_may_be_a_map_with_the_salt() {
    let event =
        json!(["BlockStored", [1], null, [1], 1, null, "CPU_PINNED", {"x": 1, "cache_salt": "s"}]);
    let batch = Batch::decode(&payload(&event)).unwrap();
    let [CacheEvent::Stored(stored)] = &batch.events[..] else {
        panic!("{batch:?}")
    };
    assert_eq!(stored.salt.as_deref(), Some("s"));
    assert!(stored.reports_extra_keys);
    assert_eq!(stored.medium, Medium::Cpu);
}

#[test]
fn pairs_of_tokens_are_kept_apart_from_tokens() {
    let stored = store(&json!({"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}));
    assert_eq!(stored.tokens_per_position, 2);
    assert_eq!(stored.tokens, [1, 2, 2, 3, 3, 4, 4, 5]);
}

#[test]
fn media_are_compared_without_case() {
    for (word, medium) in [
        ("gpu", Medium::Gpu),
        ("Cpu", Medium::Cpu),
        ("cpu_pinned", Medium::Cpu),
        ("DISK", Medium::Disk),
        ("STORAGE", Medium::Disk),
        ("EXTERNAL", Medium::Disk),
    ] {
        assert_eq!(store(&json!({"medium": word})).medium, medium, "{word}");
    }
    assert_eq!(store(&json!({"medium": null})).medium, Medium::Gpu);
}

#[test]
fn the_writing_of_a_medium_tells_connectors_apart() {
    for (word, reports_removals) in [
        ("GPU", true),
        ("gpu", true),
        ("CPU", true),
        ("cpu", false),
        ("CPU_PINNED", false),
        ("STORAGE", false),
    ] {
        let stored = store(&json!({"medium": word, "group_idx": 0}));
        assert_eq!(stored.reports_removals, reports_removals, "{word}");
        let stored = store(&json!({"medium": word}));
        assert_eq!(
            stored.reports_removals,
            reports_removals && word != "CPU",
            "{word}"
        );
    }
}

#[test]
fn events_of_elsewhere_are_dropped_and_counted() {
    for event in [
        json!({"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "REMOTE"}),
        json!({"type": "BlockRemoved", "block_hashes": [1], "medium": "moon"}),
    ] {
        let batch = Batch::decode(&payload(&event)).unwrap();
        assert_eq!(batch.events, []);
        assert_eq!(batch.skipped.untracked, 1);
    }
}

#[test]
fn events_that_are_not_understood_are_told_apart() {
    let events = json!([
        {"type": "BlockStored", "block_hashes": "?"},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": -1},
        {"type": "BlockRemoved"},
        {"type": "BlocksMoved", "block_hashes": [1]},
        "AllBlocksCleared",
        ["AllBlocksCleared", "and", {"more": 1}],
    ]);
    let batch = Batch::decode(&rmp_serde::to_vec(&json!([0, events])).unwrap()).unwrap();
    let unknown = |is_store| {
        CacheEvent::Unknown(UnknownEvent {
            is_store,
            medium: None,
            group: None,
        })
    };
    let expected = [unknown(true), unknown(false), CacheEvent::Cleared];
    assert_eq!(batch.events, expected, "equal ones in a row are one");
    let skipped = SkippedEvents {
        stores: 2,
        others: 3,
        untracked: 0,
    };
    assert_eq!(batch.skipped, skipped);
    let names = ["BlockStored", "BlockRemoved", "BlocksMoved", ""];
    let named = names.map(|name| NotUnderstood::Event(EngineName::new(name)));
    assert_eq!(batch.not_understood, named);
}

#[test]
fn an_unknown_event_keeps_what_it_names() {
    let of = |event: Value| {
        let batch = Batch::decode(&payload(&event)).unwrap();
        let unknown = batch.events.first().map(|event| {
            let CacheEvent::Unknown(unknown) = event else {
                panic!("{event:?}");
            };
            (unknown.medium, unknown.group)
        });
        unknown.ok_or(batch.skipped.untracked)
    };
    let event = |medium: Value| {
        let mut event = json!({"type": "BlocksMoved", "block_hashes": [1], "group_idx": 3});
        event["medium"] = medium;
        event
    };
    assert_eq!(of(event(json!("CPU"))), Ok((Some(Medium::Cpu), Some(3))));
    assert_eq!(of(event(json!(null))), Ok((None, Some(3))));
    assert_eq!(of(event(json!([7]))), Ok((None, Some(3))));
    assert_eq!(of(event(json!("moon"))), Err(1));
    assert_eq!(of(json!({"type": "BlocksMoved"})), Ok((None, None)));
    // The places of an array's fields are those of the types that are known.
    let array = |tag| json!([tag, "?", null, [], 16, null, "CPU", null, null, 3]);
    assert_eq!(of(array("BlocksMoved")), Ok((None, None)));
    assert_eq!(of(array("BlockStored")), Ok((Some(Medium::Cpu), Some(3))));
    let removed = json!(["BlockRemoved", "?", "CPU", 3]);
    assert_eq!(of(removed), Ok((Some(Medium::Cpu), Some(3))));
}

#[test]
fn an_unknown_group_kind_is_named() {
    let event = json!({
        "type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1,
        "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "ring_attention",
    });
    let batch = Batch::decode(&payload(&event)).unwrap();
    assert_eq!(batch.events.len(), 1);
    let text = batch.not_understood.iter().map(ToString::to_string);
    let text: Vec<_> = text.collect();
    assert_eq!(text, ["kv_cache_spec_kind \"ring_attention\""]);
}

#[test]
fn claimed_lengths_are_not_believed() {
    for hex in [
        "dfffffffff",
        "93cb0000000000000000ddffffffff",
        "92019199abddffffffff",
        "920191ddffffffff",
        "9201919184ddffffffffc0c0c0c0",
        "c6ffffffff00",
    ] {
        assert!(Batch::decode(&bytes_of_hex(hex)).is_err(), "{hex}");
    }
    let too_long = vec![0x90; PAYLOAD_BYTES_MAX + 1];
    assert!(matches!(
        Batch::decode(&too_long),
        Err(WireError::TooLong { .. })
    ));
}

#[test]
fn depth_costs_no_stack() {
    let mut bytes = vec![0x93, 0x01];
    bytes.extend(std::iter::repeat_n(0x91, 1 << 20));
    bytes.push(0xc0);
    bytes.push(0xc0);
    // One event, a nest of a million arrays: not understood, and nothing worse.
    let batch = Batch::decode(&bytes).unwrap();
    assert_eq!(batch.skipped.others, 1);
}

#[test]
fn live_messages_have_two_or_three_frames() {
    let seq = 7_u64.to_be_bytes().to_vec();
    let three = [b"t".to_vec(), seq.clone(), b"p".to_vec()];
    let live = live_frames(&three).unwrap();
    assert_eq!(live.topic, b"t");
    assert_eq!(live.seq, Some(warmroute_proto::EngineSeq(7)));
    assert_eq!(live.payload, b"p");
    let two = [b"kvevents".to_vec(), b"p".to_vec()];
    assert_eq!(live_frames(&two).unwrap().seq, None);
    assert_eq!(live_frames(&[b"p".to_vec()]), None);
    assert_eq!(
        live_frames(&[b"t".to_vec(), b"7".to_vec(), b"p".to_vec()]),
        None
    );
    let last = u64::MAX.to_be_bytes().to_vec();
    assert_eq!(live_frames(&[b"t".to_vec(), last, b"p".to_vec()]), None);
}

#[test]
fn replay_answers_are_decoded_from_the_end() {
    let seq = 7_u64.to_be_bytes().to_vec();
    let end = u64::MAX.to_be_bytes().to_vec();
    let batch = ReplayFrames::Batch {
        seq: warmroute_proto::EngineSeq(7),
        payload: b"p",
    };
    let empty = Vec::new;
    let short = [empty(), seq.clone(), b"p".to_vec()];
    let long = [empty(), b"t".to_vec(), seq, b"p".to_vec()];
    assert_eq!(replay_frames(&short), Some(batch));
    assert_eq!(replay_frames(&long), Some(batch));
    let short = [empty(), end.clone(), empty()];
    let long = [empty(), empty(), end, empty()];
    assert_eq!(replay_frames(&short), Some(ReplayFrames::End));
    assert_eq!(replay_frames(&long), Some(ReplayFrames::End));
    assert_eq!(replay_frames(&[empty()]), None);
    let last = u64::MAX.to_be_bytes().to_vec();
    assert_eq!(replay_frames(&[last, b"p".to_vec()]), None);
}

fn decode_anything(bytes: &[u8]) {
    if let Ok(batch) = Batch::decode(bytes) {
        let mut shown = String::new();
        write!(shown, "{batch:?}").unwrap();
    }
}

proptest! {
    #[test]
    fn any_bytes_decode_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        decode_anything(&bytes);
    }

    #[test]
    fn any_damage_to_a_sample_decodes_or_fails(
        row in 0..210_usize,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let sample: Value = serde_json::from_str(SAMPLES.lines().nth(row).unwrap()).unwrap();
        let mut bytes = bytes_of_hex(sample["hex"].as_str().unwrap());
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(cut.index(bytes.len()) + 1);
        decode_anything(&bytes);
    }
}

/// Integers at the borders of each width, in the shortest form and in the widest.
#[test]
fn integers_of_every_width_are_read_and_passed_over() {
    let mut forms: Vec<(u64, Vec<u8>)> = Vec::new();
    for bits in [
        0,
        127,
        128,
        255,
        256,
        65_535,
        65_536,
        4_294_967_295,
        4_294_967_296,
        u64::MAX,
    ] {
        let (mut short, mut wide) = (Vec::new(), Vec::new());
        rmp::encode::write_uint(&mut short, bits).unwrap();
        rmp::encode::write_u64(&mut wide, bits).unwrap();
        forms.extend([(bits, short), (bits, wide)]);
    }
    for int in [-1, -32, -33, -128, -129, -32_769, -2_147_483_649, i64::MIN] {
        let mut bytes = Vec::new();
        rmp::encode::write_sint(&mut bytes, int).unwrap();
        forms.push((int.cast_unsigned(), bytes));
    }
    for (bits, bytes) in forms {
        assert_eq!(Cursor::new(&bytes).int_bits(), Ok(bits));
        for cut in 0..bytes.len() {
            let cursor = Cursor::new(&bytes[..cut]);
            assert_eq!({ cursor }.int_bits(), Err(WireError::Truncated));
            assert_eq!({ cursor }.skip(), Err(WireError::Truncated));
        }
        let pair = [&[0x92][..], &bytes, &bytes, &[0xc0]].concat();
        let mut cursor = Cursor::new(&pair);
        assert_eq!(cursor.skip(), Ok(&pair[..pair.len() - 1]));
        assert_eq!(cursor.nil(), Ok(true));
    }
}

/// An event's bytes: a removal in one of the forms that engines send, one that does not decode, or a
/// clear.
fn event_bytes(form: u8, hashes: &[Vec<u8>], medium: &str, group: u8) -> Vec<u8> {
    let string = |text: &str| rmp_serde::to_vec(text).unwrap();
    let len = u8::try_from(hashes.len()).unwrap();
    let list = [&[0x90 | len][..], &hashes.concat()].concat();
    let tag = string("BlockRemoved");
    let (medium_key, medium) = (string("medium"), string(medium));
    let (tag_key, list_key, group_key) = ("type", "block_hashes", "group_idx");
    let (tag_key, list_key, group_key) = (string(tag_key), string(list_key), string(group_key));
    match form {
        0 | 1 => {
            let parts = [tag_key, tag, list_key, list, medium_key, medium, group_key];
            [&[0x84][..], &parts.concat(), &[group]].concat()
        }
        2 => {
            let parts = [group_key, vec![group], medium_key, medium, list_key, list];
            [&[0x84][..], &parts.concat(), &tag_key, &tag].concat()
        }
        3 => [&[0x93][..], &tag, &list, &medium].concat(),
        4 => [&[0x93][..], &tag, &medium, &list].concat(),
        _ => rmp_serde::to_vec(&("AllBlocksCleared",)).unwrap(),
    }
}

fn any_hash_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => any::<u64>().prop_map(|hash| [&[0xcf][..], &hash.to_be_bytes()].concat()),
        3 => any::<[u8; 32]>().prop_map(|digest| [&[0xc4, 32][..], &digest].concat()),
        1 => any::<u8>().prop_map(|hash| vec![0xcc, hash]),
        1 => any::<u8>().prop_map(|byte| [&[0xc4, 8][..], &[byte; 8]].concat()),
    ]
}

fn batch_of(events: &[Vec<u8>]) -> Batch {
    let len = u16::try_from(events.len()).unwrap().to_be_bytes();
    let bytes = [&[0x92, 0x00, 0xdc][..], &len, &events.concat()].concat();
    Batch::decode(&bytes).unwrap()
}

proptest! {
    /// Against each event decoded alone.
    #[test]
    fn removals_in_a_row_are_joined_and_none_else(
        kinds in proptest::collection::vec(
            (
                0..6_u8,
                proptest::collection::vec(any_hash_bytes(), 1..3),
                prop::sample::select(vec!["GPU", "gpu", "CPU", "moon"]),
                0..2_u8,
            ),
            1..4,
        ),
        order in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..24),
    ) {
        let bytes: Vec<Vec<u8>> = order
            .iter()
            .map(|(kind, last_byte)| {
                let (form, mut hashes, medium, group) = kind.get(&kinds).clone();
                if let Some(last) = hashes.last_mut().and_then(|hash| hash.last_mut()) {
                    *last = *last_byte;
                }
                event_bytes(form, &hashes, medium, group)
            })
            .collect();
        let mut expected = Batch::default();
        for event in &bytes {
            let alone = batch_of(std::slice::from_ref(event));
            for event in alone.events {
                match (expected.events.last_mut(), event) {
                    (Some(CacheEvent::Removed(last)), CacheEvent::Removed(next))
                        if (last.medium, last.group) == (next.medium, next.group) =>
                    {
                        last.hashes.extend(next.hashes);
                    }
                    // So are equal events that are not understood.
                    (Some(last @ CacheEvent::Unknown(_)), event) if *last == event => {}
                    (_, event) => expected.events.push(event),
                }
            }
            expected.skipped.others += alone.skipped.others;
            expected.skipped.untracked += alone.skipped.untracked;
        }
        let batch = batch_of(&bytes);
        prop_assert_eq!(batch.events, expected.events);
        prop_assert_eq!(batch.skipped, expected.skipped);
    }
}
