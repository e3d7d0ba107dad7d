//! Captures of a real server, played to the core.

use std::collections::BTreeSet;

use warmroute_proto::hash::prompt_hashes;
use warmroute_proto::{BlockSize, PrefixHash, Seed};

use super::*;
use crate::mirror::Assumptions;
use crate::wire::{ReplayFrames, live_frames, replay_frames};

fn capture(name: &str) -> Vec<Vec<Vec<u8>>> {
    let path = format!("{}/testdata/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(path).unwrap();
    let mut rest = &bytes[..];
    let mut messages = Vec::new();
    let mut take = |len: usize| {
        let (head, tail) = rest.split_at_checked(len)?;
        rest = tail;
        Some(head.to_vec())
    };
    let length = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap()) as usize;
    while let Some(head) = take(12) {
        let frames = (0..length(&head[8..]))
            .map(|_| {
                let len = length(&take(4).unwrap());
                take(len).unwrap()
            })
            .collect();
        messages.push(frames);
    }
    messages
}

/// Plays a capture of one rank; the replay buffer has what the capture has.
fn play(name: &str, rank: u32, each: impl FnMut(&World, EngineSeq)) -> World {
    play_assuming(Assumptions::default(), name, rank, each)
}

fn play_assuming(
    assume: Assumptions,
    name: &str,
    rank: u32,
    mut each: impl FnMut(&World, EngineSeq),
) -> World {
    let mut config = World::new(true).core.config;
    config.mirror.assume = assume;
    config.rank = Some(rank);
    let mut world = World::with(config);
    let messages = capture(name);
    let mut live = messages
        .iter()
        .map(|frames| live_frames(frames).unwrap())
        .filter(|frames| crate::wire::rank_of(frames.payload) == Some(rank))
        .peekable();
    let first = live.peek().unwrap().seq.unwrap();
    world.engine.batches = vec![Bytes::new(); usize::try_from(first.0).unwrap()];
    world.engine.oldest = world.engine.batches.len();
    world.start();
    for frames in live {
        let seq = frames.seq.unwrap();
        let payload = Bytes::copy_from_slice(frames.payload);
        world.engine.batches.push(payload.clone());
        world.core.live(world.now, frames.topic, Some(seq), payload);
        world.drive();
        each(&world, seq);
    }
    assert_eq!(world.core.status(world.now).engine_seq.map(|s| s.0 + 1), {
        Some(world.engine.batches.len() as u64)
    });
    world
}

#[test]
fn captures_from_the_start_are_complete_after_every_batch() {
    for (name, rank) in [
        ("v032_basic", 0),
        ("v032_dp2", 0),
        ("v032_dp2", 1),
        ("v032_hybrid_gemma", 0),
        ("sglang0523_rank0", 0),
        ("sglang0523_rank1", 1),
    ] {
        let world = play(name, rank, |world, _| assert_eq!(world.gpu(), GPU));
        assert_eq!(world.last_generation(), 5, "{name}");
        assert_eq!(world.core.status(world.now).mirror.removals_unknown, 0);
        assert_eq!(
            world.core.mirror().main_attention_only(),
            name != "v032_hybrid_gemma"
        );
    }
}

#[test]
fn the_capture_that_starts_late_is_partial_until_the_clear() {
    let world = play("v032_preempt", 0, |world, seq| {
        let expected = if seq.0 < 197 { TierState::Partial } else { GPU };
        assert_eq!(world.gpu(), expected, "at {seq}");
    });
    assert_eq!(world.held(), 3);
}

#[test]
fn a_captured_replay_ends_where_the_live_capture_ends() {
    for (replay, live) in [
        ("v032_replay0", "v032_basic"),
        ("sglang0523_replay", "sglang0523_rank0"),
    ] {
        let live = play(live, 0, |_, _| {});
        let mut world = World::new(true);
        let mut ends = 0;
        for frames in capture(replay) {
            match replay_frames(&frames).unwrap() {
                ReplayFrames::Batch { payload, .. } => {
                    world.engine.batches.push(Bytes::copy_from_slice(payload));
                }
                ReplayFrames::End => ends += 1,
            }
        }
        world.start();
        assert_eq!(ends, 1, "{replay}");
        assert_eq!(world.reader.held(), live.reader.held());
        assert_eq!(world.gpu(), GPU);
    }
}

/// `tests/real-vllm/capture_lmcache.py` describes the prompts and batches.
#[test]
fn chunks_of_lmcache_are_credited_as_the_blocks_that_they_consist_of() {
    let a: Vec<u32> = (1000..1512).collect();
    let b: Vec<u32> = (1000..1256).chain(5000..5256).collect();
    let size = BlockSize::new(16).unwrap();
    let prefixes = |prompts: &[&[u32]]| -> BTreeSet<PrefixHash> {
        let of_prompt = |tokens: &&[u32]| prompt_hashes(tokens, size, Seed::PLAIN);
        prompts.iter().flat_map(of_prompt).collect()
    };
    let both = prefixes(&[&a[..256], &b]);
    let expected = [
        prefixes(&[&a]),
        prefixes(&[&a]),
        prefixes(&[&a, &b]),
        both.clone(),
        both,
    ];
    let assume = Assumptions {
        no_extra_keys: true,
        no_lora: true,
        ..Assumptions::default()
    };
    let world = play_assuming(assume, "lmcache056", 0, |world, seq| {
        let held = world.core.mirror().held().into_iter();
        let in_cpu = held.filter(|&(_, tier)| tier == Tier::Cpu);
        let in_cpu: BTreeSet<PrefixHash> = in_cpu.map(|(prefix, _)| prefix).collect();
        assert_eq!(
            in_cpu,
            expected[usize::try_from(seq.0).unwrap()],
            "after {seq}"
        );
        let states = world.core.mirror().states();
        assert_eq!(states.gpu, TierState::Complete);
        assert_eq!(states.cpu, TierState::Unverified);
    });
    assert_eq!(world.core.status(world.now).mirror.removals_unknown, 0);
    let plain = play("lmcache056", 0, |_, _| {});
    assert_eq!(plain.held(), 0, "without declarations");
}
