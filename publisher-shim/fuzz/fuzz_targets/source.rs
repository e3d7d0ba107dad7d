#![no_main]
//! Any order of inputs into the state machine of one source: no panic, and it comes to rest.

use std::time::{Duration, Instant};

use warmroute_proto::{DpRank, EngineHealth, EngineSeq, Generation, Source, WorkerId};
use warmroute_shim::source::{Config, Effect, ReplayId, SourceCore};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let source = Source {
        worker: WorkerId::from("w"),
        dp_rank: DpRank(0),
    };
    let mut core = SourceCore::new(Config::new(source, true));
    let mut now = Instant::now();
    let mut replay = ReplayId(0);
    let mut generation = Generation(0);
    let mut rest = bytes;
    while let [op, arg, tail @ ..] = rest {
        let len = usize::from(*arg).min(tail.len());
        let (payload, later) = tail.split_at(len);
        rest = later;
        let seq = EngineSeq(u64::from(*arg));
        match op % 10 {
            0 => core.connected(now),
            1 => core.disconnected(now),
            2 => core.live(now, b"", Some(seq), payload.to_vec().into()),
            3 => core.live(now, b"", None, payload.to_vec().into()),
            4 => core.replay_batch(now, replay, seq, payload),
            5 => core.replay_end(now, replay),
            6 => core.lease_taken(now),
            7 => core.lease_lost(),
            8 => core.health(now, EngineHealth::Healthy),
            _ => {
                now += Duration::from_millis(u64::from(*arg) * 10);
                core.tick(now);
            }
        }
        for _ in 0..10_000 {
            match core.poll_effect() {
                Some(Effect::Replay { id, .. }) => replay = id,
                Some(Effect::ClaimGeneration { above }) => {
                    generation = generation.max(above).next();
                    core.generation_claimed(now, generation);
                }
                Some(Effect::Append { id, .. }) => core.acknowledged(now, id),
                Some(Effect::Heartbeat(_) | Effect::Notice(_)) => {}
                None => break,
            }
        }
        assert!(core.poll_effect().is_none(), "it does not come to rest");
    }
});
