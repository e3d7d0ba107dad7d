use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};
use warmroute_proto::codec;
use warmroute_proto::{DpRank, PrefixHash, Record, Tier, WorkerId};

use super::*;
use crate::testing::Reader;
use crate::wire::{ReplayFrames, live_frames, replay_frames};

const GPU: TierState = TierState::Complete;

/// An engine's publisher: one life's batches, the last `buffer` of which it still has.
#[derive(Clone, Default)]
struct FakeEngine {
    batches: Vec<Bytes>,
    oldest: usize,
    life: u32,
}

fn store(parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({
        "type": "BlockStored", "block_hashes": tokens, "parent_block_hash": parent,
        "token_ids": tokens, "block_size": 1, "lora_id": null, "medium": "GPU", "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    })
}

fn remove(hash: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU", "group_idx": 0})
}

fn clear() -> Value {
    json!({"type": "AllBlocksCleared"})
}

impl FakeEngine {
    fn publish(&mut self, events: &[Value]) -> (EngineSeq, Bytes) {
        // The time stamp differs from life to life.
        let at = self.batches.len() + 1000 * self.life as usize;
        let payload = rmp_serde::to_vec(&json!([at, events, 0])).unwrap();
        self.batches.push(Bytes::from(payload));
        let seq = EngineSeq(self.batches.len() as u64 - 1);
        (seq, self.batches[self.batches.len() - 1].clone())
    }

    fn restart(&mut self) {
        *self = Self {
            life: self.life + 1,
            ..Self::default()
        };
    }

    fn from(&self, seq: EngineSeq) -> Vec<(EngineSeq, Bytes)> {
        let first = usize::try_from(seq.0)
            .unwrap_or(usize::MAX)
            .max(self.oldest);
        let batches = self.batches.iter().enumerate().skip(first);
        batches
            .map(|(seq, b)| (EngineSeq(seq as u64), b.clone()))
            .collect()
    }
}

/// A core with an engine on one side and a log and its reader on the other.
struct World {
    core: SourceCore,
    engine: FakeEngine,
    now: Instant,
    generation: Generation,
    /// Sequences that replays lose, as often as said.
    holes: BTreeMap<u64, u32>,
    replays_asked: Vec<u64>,
    engine_answers: bool,
    log_is_up: bool,
    acks_wait: bool,
    waiting: Vec<AppendId>,
    records: Vec<Record>,
    reader: Reader,
    heartbeats: Vec<Heartbeat>,
    notices: Vec<Notice>,
}

#[expect(
    clippy::disallowed_methods,
    reason = "an arbitrary beginning; it never advances by itself"
)]
fn beginning() -> Instant {
    Instant::now()
}

impl World {
    fn new(has_replay: bool) -> Self {
        Self::with(Config::new(
            Source {
                worker: WorkerId::from("w"),
                dp_rank: DpRank(0),
            },
            has_replay,
        ))
    }

    fn with(config: Config) -> Self {
        Self {
            core: SourceCore::new(config),
            engine: FakeEngine::default(),
            now: beginning(),
            generation: Generation(4),
            holes: BTreeMap::new(),
            replays_asked: Vec::new(),
            engine_answers: true,
            log_is_up: true,
            acks_wait: false,
            waiting: Vec::new(),
            records: Vec::new(),
            reader: Reader::default(),
            heartbeats: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// Connected, with the lease, and settled.
    fn started(has_replay: bool) -> Self {
        let mut world = Self::new(has_replay);
        world.start();
        world
    }

    fn start(&mut self) {
        self.core.health(self.now, EngineHealth::Healthy);
        self.core.lease_taken(self.now);
        self.core.connected(self.now);
        self.drive();
        self.tick_ms(100);
    }

    fn publish(&mut self, events: &[Value]) {
        let (seq, payload) = self.engine.publish(events);
        self.deliver(seq, payload);
    }

    fn deliver(&mut self, seq: EngineSeq, payload: Bytes) {
        self.core.live(self.now, b"", Some(seq), payload);
        self.drive();
    }

    /// Published, but the message is lost.
    fn publish_lost(&mut self, events: &[Value]) {
        self.engine.publish(events);
    }

    fn reconnect(&mut self) {
        self.core.disconnected(self.now);
        self.drive();
        self.core.connected(self.now);
        self.drive();
    }

    fn tick_ms(&mut self, ms: u64) {
        for _ in 0..ms.div_ceil(100) {
            self.now += Duration::from_millis(100);
            self.core.tick(self.now);
            self.drive();
        }
    }

    fn drive(&mut self) {
        let mut steps = 0;
        while let Some(effect) = self.core.poll_effect() {
            steps += 1;
            assert!(steps < 10_000, "the core does not come to rest");
            match effect {
                Effect::Replay { id, from } => self.replay(id, from),
                Effect::ClaimGeneration { above } => {
                    if self.log_is_up {
                        self.generation = self.generation.max(above).next();
                        self.core.generation_claimed(self.now, self.generation);
                    } else {
                        self.core.claim_failed(self.now);
                    }
                }
                Effect::Append { id, payload } => self.append(id, &payload),
                Effect::Heartbeat(heartbeat) => self.heartbeats.push(heartbeat),
                Effect::Notice(notice) => self.notices.push(notice),
            }
        }
        if self.is_settled() {
            self.check();
        }
    }

    fn replay(&mut self, id: ReplayId, from: EngineSeq) {
        self.replays_asked.push(from.0);
        if !self.engine_answers {
            return;
        }
        for (seq, payload) in self.engine.from(from) {
            match self.holes.get_mut(&seq.0) {
                Some(times) if *times > 0 => *times -= 1,
                Some(_) | None => self.core.replay_batch(self.now, id, seq, &payload),
            }
        }
        self.core.replay_end(self.now, id);
    }

    fn append(&mut self, id: AppendId, payload: &[u8]) {
        if !self.log_is_up {
            self.core.append_failed(self.now, id);
            return;
        }
        let record: Record = codec::decode(payload).unwrap();
        assert!(payload.len() <= codec::RECORD_BYTES_MAX);
        let last = self.records.last().map(|r| (r.generation, r.number));
        if record.number == RecordNumber(0) && last.is_none_or(|(g, _)| g < record.generation) {
            self.reader = Reader::default();
        } else if last.is_none_or(|(g, n)| (g, n.next()) != (record.generation, record.number)) {
            // Sent again, or behind something that comes again: what a sequencing reader drops.
            self.core.acknowledged(self.now, id);
            return;
        }
        self.reader.apply(&record.changes);
        assert_eq!(self.reader.digest(), record.after);
        self.records.push(record);
        if self.acks_wait {
            self.waiting.push(id);
        } else {
            self.core.acknowledged(self.now, id);
        }
    }

    fn acknowledge_all(&mut self) {
        for id in std::mem::take(&mut self.waiting) {
            self.core.acknowledged(self.now, id);
        }
        self.drive();
    }

    fn is_settled(&self) -> bool {
        self.core.is_idle()
    }

    /// What the log says is what the mirror holds.
    fn check(&self) {
        assert_eq!(self.reader.held(), self.core.mirror().held());
        assert_eq!(self.reader.digest(), self.core.mirror().digest());
    }

    fn holds(&self, tokens: &[u32]) -> bool {
        self.reader.held().contains(&(prefix(tokens), Tier::Gpu))
    }

    fn held(&self) -> usize {
        self.reader.held().len()
    }

    fn gpu(&self) -> TierState {
        self.core.status(self.now).states.gpu
    }

    fn last_generation(&self) -> u64 {
        self.records.last().unwrap().generation.0
    }
}

fn prefix(tokens: &[u32]) -> PrefixHash {
    let size = BlockSize::new(1).unwrap();
    let seed = warmroute_proto::Seed::PLAIN;
    let hashes = warmroute_proto::hash::local_hashes(tokens, size, seed);
    warmroute_proto::hash::prefix_hashes(None, &hashes)
        .last()
        .unwrap()
}

#[test]
fn a_source_followed_from_the_start_is_complete() {
    let mut world = World::started(true);
    assert_eq!(world.replays_asked[0], 0);
    assert_eq!(world.gpu(), GPU);
    world.publish(&[store(None, &[1, 2])]);
    world.publish(&[remove(2)]);
    assert!(world.holds(&[1]) && !world.holds(&[1, 2]));
    let last = world.records.last().unwrap();
    assert_eq!(last.states.gpu, TierState::Complete);
    assert_eq!(last.engine_seq, Some(EngineSeq(1)));
    assert_eq!(last.generation, Generation(5));
}

#[test]
fn row_1_engine_killed_and_restarted_in_place() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1, 2])]);
    world.engine.restart();
    world.core.disconnected(world.now);
    world.drive();
    assert_eq!(
        world.heartbeats.last().unwrap().states.gpu,
        TierState::Stale
    );
    // A batch that slips in before the check is not applied to the dead life's mirror.
    let (seq, payload) = world.engine.publish(&[store(None, &[7])]);
    world.deliver(seq, payload);
    assert_eq!(world.held(), 2);
    world.core.connected(world.now);
    world.drive();
    assert_eq!(world.held(), 1);
    assert!(world.holds(&[7]));
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_1_a_failed_health_check_ends_credit_at_once() {
    for has_replay in [true, false] {
        let mut world = World::started(has_replay);
        world.publish(&[store(None, &[1])]);
        assert!(world.gpu() < TierState::Stale);
        world.core.health(world.now, EngineHealth::Unhealthy);
        world.drive();
        assert_eq!(
            world.heartbeats.last().unwrap().states.gpu,
            TierState::Stale
        );
        world.core.health(world.now, EngineHealth::Healthy);
        world.tick_ms(1200);
        assert!(world.gpu() < TierState::Stale);
    }
}

#[test]
fn row_1_a_lapsed_proof_ends_credit() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.tick_ms(2900);
    assert_eq!(world.gpu(), GPU);
    world.tick_ms(300);
    assert_eq!(
        world.heartbeats.last().unwrap().states.gpu,
        TierState::Stale
    );
    world.engine_answers = true;
    world.tick_ms(3000);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.last_generation(), 5);
}

#[test]
fn row_2_a_restart_whose_sequence_is_the_next_one_is_found() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish(&[store(None, &[2])]);
    world.core.disconnected(world.now);
    world.engine.restart();
    world.publish_lost(&[store(None, &[3])]);
    world.publish_lost(&[store(None, &[4])]);
    world.core.connected(world.now);
    world.drive();
    // Looks like the batch behind the last one of the dead life.
    world.publish(&[store(None, &[5])]);
    assert!(world.holds(&[3]) && world.holds(&[4]) && world.holds(&[5]));
    assert_eq!(world.held(), 3);
    assert_eq!(world.gpu(), GPU);
    assert!(
        world.replays_asked.contains(&1),
        "the last seen batch is asked for"
    );
}

#[test]
fn row_2_a_restart_that_looks_like_a_gap_is_found() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine.restart();
    for token in 10..14 {
        world.publish_lost(&[store(None, &[token])]);
    }
    world.publish(&[store(None, &[14])]);
    assert_eq!(world.held(), 5);
    assert!(!world.holds(&[1]));
    assert_eq!(world.last_generation(), 6);
}

#[test]
fn row_2_a_silent_restart_is_found_by_the_poll() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine.restart();
    world.tick_ms(1500);
    assert_eq!(world.held(), 0);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_3_lost_messages_are_replayed() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish_lost(&[store(Some(1), &[2])]);
    world.publish_lost(&[remove(1)]);
    world.publish(&[store(Some(2), &[3])]);
    assert!(world.holds(&[1, 2, 3]) && !world.holds(&[1]));
    assert_eq!(world.last_generation(), 5);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_3_the_last_messages_before_a_silence_are_found() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish_lost(&[remove(1)]);
    world.tick_ms(1500);
    assert_eq!(world.held(), 0);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_3a_a_hole_in_a_replay_is_asked_for_again() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    for token in 2..6 {
        world.publish_lost(&[store(None, &[token])]);
    }
    world.holes.insert(3, 1);
    world.publish(&[store(None, &[6])]);
    assert_eq!(world.held(), 6);
    assert_eq!(world.last_generation(), 5);
    assert_eq!(world.replays_asked[1..], [0, 2]);
}

#[test]
fn row_4_a_gap_older_than_the_buffer_cannot_be_filled() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    for token in 2..6 {
        world.publish_lost(&[store(None, &[token])]);
    }
    world.engine.oldest = 3;
    world.publish(&[store(None, &[6])]);
    // What the buffer has is credited, and nothing else.
    assert_eq!(world.held(), 3);
    assert!(world.holds(&[4]) && world.holds(&[5]) && world.holds(&[6]));
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), TierState::Partial);
    // A removal of what was forgotten is normal now.
    world.publish(&[remove(1)]);
    assert_eq!(world.last_generation(), 6);
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.held(), 0);
}

#[test]
fn row_4_a_hole_that_the_engine_itself_has_is_left_behind() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish_lost(&[store(None, &[2])]);
    world.holes.insert(1, u32::MAX);
    world.publish(&[store(None, &[3])]);
    assert_eq!(world.held(), 1);
    assert!(world.holds(&[3]));
    assert_eq!(world.gpu(), TierState::Partial);
    world.publish(&[store(None, &[4])]);
    world.tick_ms(3000);
    assert_eq!(world.held(), 2);
    assert_eq!(world.last_generation(), 6);
}

#[test]
fn row_5_a_clear_empties_the_source() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1, 2])]);
    world.publish(&[clear(), store(None, &[3])]);
    assert_eq!(world.held(), 1);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.last_generation(), 5);
}

#[test]
fn a_late_joiner_is_partial_until_a_clear() {
    let mut world = World::new(true);
    for token in 1..5 {
        world.publish_lost(&[store(None, &[token])]);
    }
    world.engine.oldest = 2;
    world.start();
    assert_eq!(world.held(), 2);
    assert_eq!(world.gpu(), TierState::Partial);
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn a_duplicate_must_be_byte_equal() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let (seq, payload) = world.engine.publish(&[store(None, &[2])]);
    world.deliver(seq, payload.clone());
    world.deliver(seq, payload);
    assert_eq!(world.core.status(world.now).counters.duplicates, 1);
    assert_eq!(world.last_generation(), 5);
    world.engine.restart();
    world.publish(&[store(None, &[9])]);
    assert_eq!(world.held(), 1);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn without_replays_a_source_is_unverified() {
    let mut world = World::started(false);
    assert_eq!(world.replays_asked, [] as [u64; 0]);
    world.publish(&[store(None, &[1])]);
    assert_eq!(world.gpu(), TierState::Unverified);
    assert_eq!(world.held(), 1);
    // A gap cannot be filled.
    world.publish_lost(&[store(None, &[2])]);
    world.publish(&[store(None, &[3])]);
    assert_eq!(world.held(), 1);
    assert!(world.holds(&[3]));
    assert_eq!(world.last_generation(), 6);
    // After a disconnect nothing can tell whether it is the same engine.
    world.reconnect();
    assert_eq!(world.held(), 0);
    world.tick_ms(10_000);
    assert_eq!(world.gpu(), TierState::Unverified);
    world.core.health(world.now, EngineHealth::Unknown);
    assert_eq!(world.gpu(), TierState::Stale);
}

#[test]
fn without_sequence_numbers_a_source_is_unverified() {
    let mut world = World::started(true);
    for token in 1..3 {
        let (_, payload) = world.engine.publish(&[store(None, &[token])]);
        world.core.live(world.now, b"t", None, payload);
        world.drive();
    }
    assert_eq!(world.held(), 2);
    assert_eq!(world.gpu(), TierState::Unverified);
    assert_eq!(world.heartbeats.last().unwrap().engine_seq, None);
}

#[test]
fn messages_lost_before_the_core_force_a_check() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish_lost(&[store(None, &[2])]);
    world.core.live_lost(world.now);
    world.drive();
    assert_eq!(world.held(), 2);
}

#[test]
fn held_batches_are_bounded_and_not_missed() {
    let mut config = World::new(true).core.config;
    config.held_bytes_max = 150;
    let mut world = World::with(config);
    world.start();
    world.engine_answers = false;
    world.core.disconnected(world.now);
    world.core.connected(world.now);
    world.drive();
    for token in 1..10 {
        world.publish(&[store(None, &[token])]);
    }
    assert!(world.core.status(world.now).counters.held_dropped > 0);
    world.engine_answers = true;
    world.tick_ms(3000);
    assert_eq!(world.held(), 9);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn batches_of_other_topics_and_ranks_are_dropped() {
    let mut config = World::new(true).core.config;
    config.topic = Some("mine".to_owned());
    config.rank = Some(0);
    let mut world = World::with(config);
    world.start();
    let (_, payload) = FakeEngine::default().publish(&[store(None, &[1])]);
    world
        .core
        .live(world.now, b"other", Some(EngineSeq(0)), payload);
    let other_rank = rmp_serde::to_vec(&json!([0, [store(None, &[1])], 1])).unwrap();
    world
        .core
        .live(world.now, b"mine", Some(EngineSeq(0)), other_rank.into());
    world.drive();
    assert_eq!(world.held(), 0);
    let counters = world.core.status(world.now).counters;
    assert_eq!((counters.other_topic, counters.other_rank), (1, 1));
}

#[test]
fn a_sign_starts_a_new_generation_empty_and_partial() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1, 2])]);
    world.publish(&[remove(9)]);
    assert_eq!(world.held(), 0);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), TierState::Partial);
    let reason = Notice::NewGeneration(Reason::Sign(Sign::BelowZero));
    assert!(world.notices.contains(&reason));
}

#[test]
fn a_payload_that_is_no_batch_makes_the_source_stale() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine.batches.push(Bytes::from_static(b"\xc1"));
    world.deliver(EngineSeq(1), Bytes::from_static(b"\xc1"));
    assert_eq!(world.gpu(), TierState::Stale);
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn batches_wait_for_an_acknowledgement_and_go_together() {
    let mut world = World::started(true);
    world.acks_wait = true;
    let before = world.records.len();
    for token in 1..10 {
        world.publish(&[store(None, &[token])]);
    }
    assert_eq!(world.records.len(), before + 1);
    world.acknowledge_all();
    assert_eq!(world.records.len(), before + 2);
    assert_eq!(world.records.last().unwrap().engine_seq, Some(EngineSeq(8)));
    world.acknowledge_all();
    assert_eq!(world.held(), 9);
}

#[test]
fn a_batch_that_changes_nothing_sends_no_record_but_its_sequence() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let before = world.records.len();
    world.publish(&[store(None, &[1])]);
    assert_eq!(world.records.len(), before);
    world.tick_ms(1000);
    let heartbeat = world.heartbeats.last().unwrap();
    assert_eq!(heartbeat.engine_seq, Some(EngineSeq(1)));
    assert_eq!(heartbeat.number, Some(world.records.last().unwrap().number));
    assert_eq!(heartbeat.after, world.core.mirror().digest());
}

#[test]
fn a_large_batch_is_split_and_only_its_end_is_credited() {
    let mut world = World::started(true);
    let tokens: Vec<u32> = (1..20_001).collect();
    let before = world.records.len();
    world.publish(&[store(None, &tokens)]);
    let parts = &world.records[before..];
    assert!(parts.len() >= 3);
    let (last, earlier) = parts.split_last().unwrap();
    for part in earlier {
        assert_eq!(part.states.gpu, TierState::CatchingUp);
        assert_eq!(part.engine_seq, None);
    }
    assert_eq!(last.states.gpu, GPU);
    assert_eq!(last.engine_seq, Some(EngineSeq(0)));
    assert_eq!(world.held(), 20_000);
}

#[test]
fn a_generation_starts_with_an_image_that_is_catching_up_until_its_end() {
    let mut world = World::started(true);
    let tokens: Vec<u32> = (1..20_001).collect();
    world.publish(&[store(None, &tokens)]);
    world.publish(&[remove(5)]);
    let (before, digest) = (world.records.len(), world.core.mirror().digest());
    let above = world.generation;
    world.acks_wait = true;
    world.core.resync(world.now, above, ResyncReason::Mismatch);
    world.drive();
    // A second request meets the image under way.
    world.core.resync(world.now, above, ResyncReason::Gap);
    world.publish(&[store(None, &[50_000])]);
    let image = &world.records[before..];
    let (last, earlier) = image.split_last().unwrap();
    assert_eq!(image[0].number, RecordNumber(0));
    assert!(
        earlier
            .iter()
            .all(|part| part.states.gpu == TierState::CatchingUp)
    );
    assert_eq!(last.after, digest);
    assert_eq!(last.states.gpu, GPU);
    assert!(image.iter().all(|part| part.generation == above.next()));
    world.acknowledge_all();
    world.acknowledge_all();
    assert_eq!(world.held(), 20_000);
    assert_eq!(world.last_generation(), above.next().0);
    // Once it is told, a request by somebody who still cannot follow is served.
    world.now += Duration::from_secs(10);
    world
        .core
        .resync(world.now, Generation(0), ResyncReason::Gap);
    world.drive();
    assert_eq!(world.last_generation(), above.next().next().0);
}

#[test]
fn a_resync_from_above_takes_a_generation_above_that() {
    let mut world = World::started(true);
    world
        .core
        .resync(world.now, Generation(40), ResyncReason::Fenced);
    world.drive();
    assert_eq!(world.last_generation(), 41);
}

#[test]
fn failed_appends_are_sent_again_in_order() {
    let mut world = World::started(true);
    world.log_is_up = false;
    for token in 1..5 {
        world.publish(&[store(None, &[token])]);
    }
    assert_eq!(world.held(), 0);
    world.log_is_up = true;
    world.tick_ms(500);
    assert_eq!(world.held(), 4);
    assert_eq!(world.last_generation(), 5);
}

#[test]
fn a_full_outbox_is_replaced_by_one_generation() {
    let mut config = World::new(true).core.config;
    config.outbox_bytes_max = 10_000;
    let mut world = World::with(config);
    world.start();
    world.log_is_up = false;
    for token in 1..2000 {
        world.publish(&[store(None, &[token])]);
        assert!(world.core.status(world.now).waiting_bytes <= 12_000);
    }
    world.log_is_up = true;
    world.tick_ms(1000);
    assert_eq!(world.held(), 1999);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn a_log_that_lost_the_last_record_gets_a_new_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let last = world.records.last().unwrap();
    let (generation, number) = (last.generation, last.number);
    world.core.log_tail(world.now, Some((generation, number)));
    world.drive();
    assert_eq!(world.last_generation(), 5);
    world
        .core
        .log_tail(world.now, Some((Generation(3), number)));
    world.drive();
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.held(), 1);
}

#[test]
fn without_the_lease_not_a_word_is_said() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let (records, heartbeats) = (world.records.len(), world.heartbeats.len());
    world.core.lease_lost();
    world.publish(&[store(None, &[2])]);
    world.tick_ms(3000);
    assert_eq!(
        (world.records.len(), world.heartbeats.len()),
        (records, heartbeats)
    );
    world.core.lease_taken(world.now);
    world.drive();
    assert_eq!(world.held(), 2);
    assert_eq!(world.last_generation(), 6);
}

// --- captures of a real server

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
fn play(name: &str, rank: u32, mut each: impl FnMut(&World, EngineSeq)) -> World {
    let mut config = World::new(true).core.config;
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
    let live = play("v032_basic", 0, |_, _| {});
    let mut world = World::new(true);
    for frames in capture("v032_replay0") {
        match replay_frames(&frames).unwrap() {
            ReplayFrames::Batch { payload, .. } => {
                world.engine.batches.push(Bytes::copy_from_slice(payload));
            }
            ReplayFrames::End => {}
        }
    }
    world.start();
    assert_eq!(world.reader.held(), live.reader.held());
    assert_eq!(world.gpu(), GPU);
}

// --- any order of faults

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish {
        lost: bool,
        token: u32,
        removes: bool,
    },
    /// A dead engine's connection always breaks; sooner or later it is back.
    Restart {
        reconnects: bool,
    },
    Reconnect,
    Trim,
    HoleInReplay,
    EngineAnswers(bool),
    LogUp(bool),
    Resync,
    Health(bool),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (any::<bool>(), 1..30_u32, any::<bool>()).prop_map(|(lost, token, removes)| {
            Step::Publish { lost, token, removes }
        }),
        2 => any::<bool>().prop_map(|reconnects| Step::Restart { reconnects }),
        2 => Just(Step::Reconnect),
        1 => Just(Step::Trim),
        2 => Just(Step::HoleInReplay),
        2 => any::<bool>().prop_map(Step::EngineAnswers),
        2 => any::<bool>().prop_map(Step::LogUp),
        1 => Just(Step::Resync),
        1 => any::<bool>().prop_map(Step::Health),
        6 => (100..2500_u64).prop_map(Step::Wait),
    ]
}

/// What the engine truly holds: the token of every block, with its copies.
#[derive(Default)]
struct Truth(BTreeMap<u32, u32>);

impl World {
    fn step(&mut self, step: Step, truth: &mut Truth) {
        match step {
            Step::Publish {
                lost,
                token,
                removes,
            } => {
                let event = match truth.0.get_mut(&token) {
                    Some(copies) if removes => {
                        *copies -= 1;
                        if *copies == 0 {
                            truth.0.remove(&token);
                        }
                        remove(u64::from(token))
                    }
                    Some(_) | None => {
                        *truth.0.entry(token).or_default() += 1;
                        store(None, &[token])
                    }
                };
                let (seq, payload) = self.engine.publish(&[event]);
                if !lost && self.core.status(self.now).is_connected {
                    self.deliver(seq, payload);
                }
            }
            Step::Restart { reconnects } => {
                truth.0.clear();
                self.engine.restart();
                self.holes.clear();
                self.core.disconnected(self.now);
                self.drive();
                if reconnects {
                    self.reconnect();
                }
            }
            Step::Reconnect => self.reconnect(),
            Step::Trim => self.engine.oldest = self.engine.batches.len().saturating_sub(2),
            Step::HoleInReplay => {
                let last = self.engine.batches.len() as u64;
                self.holes.insert(last.saturating_sub(1), 1);
            }
            Step::EngineAnswers(answers) => self.engine_answers = answers,
            Step::LogUp(up) => self.log_is_up = up,
            Step::Resync => {
                let above = self.generation;
                self.core.resync(self.now, above, ResyncReason::Gap);
                self.drive();
            }
            Step::Health(healthy) => {
                let health = if healthy {
                    EngineHealth::Healthy
                } else {
                    EngineHealth::Unhealthy
                };
                self.core.health(self.now, health);
                self.drive();
            }
            Step::Wait(ms) => self.tick_ms(ms),
        }
    }

    fn heal(&mut self) {
        self.engine_answers = true;
        self.log_is_up = true;
        self.core.health(self.now, EngineHealth::Healthy);
        if !self.core.status(self.now).is_connected {
            self.core.connected(self.now);
        }
        self.drive();
        self.tick_ms(6000);
    }
}

proptest! {
    /// After the faults stop, what is credited is held; and complete means equal.
    #[test]
    fn whatever_happens_the_source_ends_equal_or_says_that_it_is_not(
        steps in proptest::collection::vec(steps(), 1..80)
    ) {
        let mut world = World::started(true);
        let mut truth = Truth::default();
        for step in steps {
            world.step(step, &mut truth);
        }
        world.heal();
        let held: std::collections::BTreeSet<_> = world.reader.held().into_iter().collect();
        let truly: std::collections::BTreeSet<_> =
            truth.0.keys().map(|&token| (prefix(&[token]), Tier::Gpu)).collect();
        match world.gpu() {
            TierState::Complete => prop_assert_eq!(held, truly),
            TierState::Partial => prop_assert!(held.is_subset(&truly)),
            state @ (TierState::Unverified | TierState::Stale | TierState::CatchingUp) => {
                prop_assert!(false, "no credit after healing: {:?}", state);
            }
        }
    }
}
