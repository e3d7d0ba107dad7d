//! What a fuzzer does with bytes from outside; the corpus test does the same.
#![allow(dead_code, reason = "each user of this file runs one of the functions")]

use std::time::{Duration, Instant};

use warmroute_mirror::source::{
    Effect, FlushResult, ReplayId, SourceConfig, SourceCore, Tail, next_generation,
};
use warmroute_mirror::wire::Batch;
use warmroute_proto::{DpRank, EngineHealth, EngineSeq, Generation, Source, WorkerId};

/// More effects of one input than this are a loop.
const EFFECTS_MAX: usize = 10_000;

/// Any bytes into the decoder of engine payloads: no panic, no allocation beyond the input's size.
pub(crate) fn wire(bytes: &[u8]) {
    drop(Batch::decode(bytes));
}

/// Any order of inputs into the state machine of one source: no panic, and it comes to rest. An
/// input is what happens, a sequence number or time, a length, and so many bytes of payload.
pub(crate) fn source(bytes: &[u8]) {
    let source = Source {
        worker: WorkerId::from("w"),
        dp_rank: DpRank(0),
    };
    let mut world = World {
        core: SourceCore::new(SourceConfig {
            waits_for_clock: false,
            ..SourceConfig::new(source, true)
        }),
        now: now(),
        replay: ReplayId(0),
        generation: Generation(0),
    };
    let mut rest = bytes;
    while let [what, number, length, tail @ ..] = rest {
        let (payload, later) = tail.split_at(usize::from(*length).min(tail.len()));
        rest = later;
        world.input(what % 10, *number, payload);
        world.settle();
    }
}

struct World {
    core: SourceCore,
    now: Instant,
    replay: ReplayId,
    generation: Generation,
}

impl World {
    fn input(&mut self, what: u8, number: u8, payload: &[u8]) {
        let (core, now, seq) = (&mut self.core, self.now, EngineSeq(number.into()));
        match what {
            0 => core.connected(now),
            1 => core.disconnected(now),
            2 => core.live(now, b"", Some(seq), payload.to_vec().into()),
            3 => core.live(now, b"", None, payload.to_vec().into()),
            4 => core.replay_batch(now, self.replay, seq, payload),
            5 => core.replay_end(now, self.replay),
            6 => core.lease_taken(now),
            7 => core.lease_lost(),
            8 => core.health(now, EngineHealth::Healthy),
            _ => {
                self.now += Duration::from_millis(u64::from(number) * 10);
                core.tick(self.now);
            }
        }
    }

    fn settle(&mut self) {
        for _ in 0..EFFECTS_MAX {
            match self.core.poll_effect() {
                Some(Effect::Replay { id, .. }) => self.replay = id,
                Some(Effect::ClaimGeneration { above }) => {
                    match next_generation(above, Some(self.generation), None) {
                        Some(next) => {
                            self.generation = next;
                            self.core.generation_claimed(self.now, next);
                        }
                        None => self.core.claim_failed(self.now),
                    }
                }
                Some(Effect::Append { id, .. }) => self.core.acknowledged(self.now, id),
                Some(Effect::ReadTail { id, .. }) => {
                    self.core.log_tail(self.now, id, Tail::Unanswered);
                }
                Some(Effect::Flush(id)) => {
                    self.core.flushed(self.now, id, FlushResult::Answered);
                }
                Some(Effect::Heartbeat(_) | Effect::Notice(_)) => {}
                None => return,
            }
        }
        panic!("it does not come to rest");
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "where time begins; it goes on by inputs"
)]
fn now() -> Instant {
    Instant::now()
}
