//! What the engine does, and what its sockets lose.

use super::*;

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
    // Without a disconnect, an answer without batches may be one that lost them.
    assert_ne!(world.gpu(), GPU);
    world.tick_ms(10_000);
    assert_eq!(world.last_generation(), 6, "no further generation");
    world.reconnect();
    assert_eq!(world.gpu(), GPU);
    world.publish(&[store(None, &[2])]);
    assert_eq!(world.gpu(), GPU);
    assert!(world.holds(&[2]));
}

#[test]
fn row_3a_a_replay_that_loses_everything_is_not_an_empty_engine() {
    let mut world = World::started(true);
    world.publish_lost(&[store(None, &[1])]);
    world.holes = (0..2).map(|seq| (seq, u32::MAX)).collect();
    world.publish(&[store(Some(1), &[2])]);
    assert_ne!(world.gpu(), GPU);
    // Within a connection, a poll that is answered without its batch proves no other life.
    world.tick_ms(5_000);
    assert_ne!(world.gpu(), GPU);
    let generation = world.last_generation();
    world.holes.clear();
    world.tick_ms(2_000);
    assert!(world.holds(&[1, 2]));
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.last_generation(), generation);
}

#[test]
fn row_3_what_waited_in_the_socket_proves_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    let (seq, payload) = world.engine.publish(&[store(None, &[2])]);
    world.publish_lost(&[remove(2)]);
    // The process stood still. Its replay brings the last batch, and no end.
    world.now += Duration::from_secs(10);
    world.deliver(seq, payload);
    let (id, from) = world.engine.unanswered.take().unwrap();
    let (seq, payload) = world.engine.from(from).remove(0);
    world.core.replay_batch(world.now, id, seq, &payload);
    world.tick_ms(1_700);
    assert_ne!(world.gpu(), GPU);
    world.engine_answers = true;
    world.tick_ms(3_000);
    assert_eq!(world.gpu(), GPU);
    assert!(world.holds(&[1]) && !world.holds(&[2]));
}

/// The process stood still while a replay was in flight.
#[test]
fn row_3_a_replay_from_before_a_pause_proves_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.publish_lost(&[]);
    world.publish(&[]);
    let (id, from) = world.engine.unanswered.take().unwrap();
    let answer = world.engine.from(from);
    let (seq, payload) = world.engine.publish(&[store(None, &[2])]);
    world.publish_lost(&[remove(2)]);
    world.now += Duration::from_secs(10);
    world.deliver(seq, payload);
    for (seq, payload) in answer {
        world.core.replay_batch(world.now, id, seq, &payload);
    }
    world.core.replay_end(world.now, id);
    world.tick_ms(100);
    assert_ne!(world.gpu(), GPU);
    world.answer_late();
    world.tick_ms(3_000);
    assert_eq!(world.gpu(), GPU);
    assert!(world.holds(&[1]) && !world.holds(&[2]));
}

#[test]
fn row_3a_a_new_connection_may_reach_an_empty_engine() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine.restart();
    world.reconnect();
    world.tick_ms(100);
    assert_eq!(world.held(), 0);
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

/// The engine's removal was lost 1.4 s ago, and the log acknowledges nothing since.
fn with_a_gap() -> World {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.acks_wait = true;
    world.engine_answers = false;
    world.publish_lost(&[remove(1)]);
    world.publish(&[store(None, &[7])]);
    world.tick_ms(1_400);
    world
}

#[test]
fn row_3_what_a_late_replay_brings_is_as_old_as_the_gap() {
    let mut world = with_a_gap();
    assert_eq!(world.gpu(), GPU, "the gap is young");
    world.answer_late();
    assert_eq!(world.gpu(), GPU);
    // The replay proves the mirror; the log still has not acknowledged the removal.
    world.tick_ms(1_700);
    assert_eq!(world.gpu(), TierState::Stale);
    world.acks_wait = false;
    world.acknowledge_all();
    assert!(world.holds(&[7]) && !world.holds(&[1]));
    assert_eq!(world.gpu(), GPU);
}

/// World seed 800023: a record that only changes a state waits in front of what the replay brings.
#[test]
fn row_3_what_a_late_replay_brings_is_older_than_the_record_before_it() {
    let mut world = with_a_gap();
    world.core.learn(EngineFacts {
        speculates: Some(true),
        ..EngineFacts::default()
    });
    world.tick_ms(100);
    world.answer_late();
    assert_eq!(world.core.mirror().states().gpu, TierState::Unverified);
    world.tick_ms(1_600);
    assert_eq!(world.gpu(), TierState::Stale);
    world.acks_wait = false;
    world.acknowledge_all();
    assert_eq!(world.gpu(), TierState::Unverified);
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
    world.replays_asked.clear();
    world.publish(&[store(None, &[3])]);
    // Three tries, and the proof of what is behind the hole.
    assert_eq!(world.replays_asked.len(), 4);
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
    // After a disconnect nothing shows whether it is the same engine.
    world.reconnect();
    assert_eq!(world.held(), 0);
    world.tick_ms(10_000);
    assert_eq!(world.gpu(), TierState::Unverified);
    world.core.health(world.now, EngineHealth::Unknown);
    assert_eq!(world.gpu(), TierState::CatchingUp);
}

#[test]
fn a_source_whose_losses_are_hidden_is_unverified_and_needs_its_proofs() {
    let mut world = World::new(true);
    world.core.config.hides_losses = true;
    world.start();
    world.publish(&[store(None, &[1])]);
    assert_eq!(world.held(), 1);
    assert_eq!(world.gpu(), TierState::Unverified);
    let status = world.core.status(world.now);
    assert_eq!(status.unverified, Some(UnverifiedCause::UnseenLosses));
    let record = world.records.last().unwrap();
    assert_eq!(*record.states.get(Tier::Gpu), TierState::Unverified);
    world.core.disconnected(world.now);
    assert_eq!(world.gpu(), TierState::Stale);
}

/// Indexers take `Stale` without any batch for an engine without events.
#[test]
fn stale_without_a_batch_means_that_nothing_of_the_engine_was_seen() {
    let mut world = World::new(true);
    world.core.health(world.now, EngineHealth::Healthy);
    world.core.lease_taken(world.now);
    world.tick_ms(2_000);
    assert_eq!(world.gpu(), TierState::Stale, "no connection");
    world.engine_answers = false;
    world.core.connected(world.now);
    world.publish(&[store(None, &[1])]);
    world.tick_ms(10_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, None, "no replay is answered");
    assert_eq!(last.states.gpu, TierState::CatchingUp);
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
fn a_sequence_number_after_messages_without_verifies_the_source() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let (_, stray) = FakeEngine::default().publish(&[store(None, &[7])]);
    world.core.live(world.now, b"", None, stray);
    world.drive();
    let unverified = |world: &World| world.core.status(world.now).unverified;
    assert_eq!(unverified(&world), Some(UnverifiedCause::NoSequence));
    assert!(world.holds(&[7]));
    // One replay a second at most, if an engine sends both in turn.
    let replays = world.replays_asked.len();
    world.publish(&[store(None, &[2])]);
    assert_eq!(world.replays_asked.len(), replays);
    assert_eq!(world.gpu(), TierState::Unverified);
    world.tick_ms(1000);
    world.publish(&[store(None, &[3])]);
    assert_eq!(unverified(&world), None);
    assert_eq!((world.held(), world.gpu()), (3, GPU));
    assert!(!world.holds(&[7]));
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
    config.buffer_bytes_max = 150;
    let mut world = World::with(config);
    world.start();
    world.engine_answers = false;
    world.core.disconnected(world.now);
    world.core.connected(world.now);
    world.drive();
    for token in 1..10 {
        world.publish(&[store(None, &[token])]);
    }
    assert!(world.core.status(world.now).counters.buffered_dropped > 0);
    world.engine_answers = true;
    world.tick_ms(3000);
    assert_eq!(world.held(), 9);
    assert_eq!(world.gpu(), GPU);
}

/// A replay of which the engine drops all but the first is not repeated for batches that arrived
/// live.
#[test]
fn a_hole_in_a_replay_is_filled_from_what_was_held() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.reconnect();
    for token in 2..10 {
        world.publish(&[store(None, &[token])]);
    }
    assert_eq!(world.held(), 1);
    world.holes = (3..6).map(|seq| (seq, u32::MAX)).collect();
    world.answer_late();
    assert_eq!(world.held(), 9);
    assert_eq!(world.replays_asked.last_chunk(), Some(&[0, 8]));
    assert_eq!((world.last_generation(), world.gpu()), (5, GPU));
}

/// A burst begins while an idle engine is asked whether something was lost.
#[test]
fn a_hole_in_a_poll_that_live_batches_overtook_stops_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.tick_ms(1100);
    let asked = world.replays_asked.len();
    for token in 2..4 {
        world.publish(&[store(None, &[token])]);
    }
    let on_their_way: Vec<_> = (4..7)
        .map(|token| world.engine.publish(&[store(None, &[token])]))
        .collect();
    world.holes = BTreeMap::from([(3, u32::MAX)]);
    world.answer_late();
    assert_eq!((world.held(), world.gpu()), (3, GPU));
    for (seq, payload) in on_their_way {
        world.deliver(seq, payload);
    }
    assert_eq!((world.held(), world.gpu()), (6, GPU));
    assert_eq!(world.replays_asked.len(), asked);
    // One that nothing overtook is believed.
    world.holes.clear();
    world.publish_lost(&[store(None, &[7])]);
    world.tick_ms(1100);
    assert_eq!((world.held(), world.gpu()), (7, GPU));
}

/// The engine keeps few batches, and publishes as many while a poll is on its way.
#[test]
fn a_poll_that_live_batches_overtook_is_no_restart() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.tick_ms(1100);
    for token in 2..5 {
        world.publish(&[store(None, &[token])]);
    }
    world.engine.oldest = 2;
    world.answer_late();
    assert_eq!(world.core.status(world.now).counters.restarts, 0);
    assert_eq!((world.held(), world.gpu()), (4, GPU));
    // After a silence it would be one.
    world.engine.oldest = 4;
    world.tick_ms(1100);
    assert_eq!(world.core.status(world.now).counters.restarts, 1);
}

/// The engine's socket drops what it cannot queue, the end of a long answer too.
#[test]
fn a_replay_without_its_end_proves_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.core.disconnected(world.now);
    world.publish_lost(&[store(None, &[2])]);
    world.publish_lost(&[remove(1)]);
    world.core.connected(world.now);
    world.drive();
    let (id, from) = world.engine.unanswered.unwrap();
    for (seq, payload) in &world.engine.from(from)[..2] {
        world.core.replay_batch(world.now, id, *seq, payload);
    }
    for _ in 0..50 {
        world.tick_ms(100);
        assert_eq!(world.gpu(), TierState::Stale);
    }
    assert_eq!(world.held(), 2);
    world.answer_late();
    assert_eq!((world.held(), world.gpu()), (1, GPU));
}

/// Its end came, and what should stand before it did not.
#[test]
fn a_replay_that_held_batches_do_not_continue_proves_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.reconnect();
    world.publish_lost(&[store(None, &[2])]);
    world.publish(&[store(None, &[3])]);
    let (id, from) = world.engine.unanswered.unwrap();
    let first = world.engine.batches[0].clone();
    world.core.replay_batch(world.now, id, from, &first);
    world.core.replay_end(world.now, id);
    world.drive();
    assert_eq!((world.held(), world.gpu()), (1, TierState::Stale));
    world.answer_late();
    assert_eq!((world.held(), world.gpu()), (3, GPU));
}

#[test]
fn what_was_held_before_the_bound_was_reached_is_not_asked_for_again() {
    let mut config = World::new(true).core.config;
    config.buffer_bytes_max = 1000;
    let mut world = World::with(config);
    world.start();
    world.publish(&[store(None, &[1])]);
    world.engine_answers = false;
    world.reconnect();
    for token in 2..30 {
        world.publish(&[store(None, &[token])]);
    }
    let dropped = world.core.status(world.now).counters.buffered_dropped;
    assert!((1..27).contains(&dropped), "{dropped}");
    // The engine had published nothing more when it was asked.
    let late = world.engine.batches.split_off(1);
    let all = [world.engine.batches.as_slice(), &late].concat();
    let (id, from) = world.engine.unanswered.unwrap();
    world.engine_answers = true;
    let first = world.engine.from(from);
    assert_eq!(first.len(), 1);
    world.engine.batches = all;
    world.core.replay_batch(world.now, id, from, &first[0].1);
    world.core.replay_end(world.now, id);
    world.drive();
    assert_eq!(world.replays_asked.last(), Some(&(28 - dropped)));
    assert_eq!((world.held(), world.gpu()), (29, GPU));
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
    world.publish(&two_prefixes(9));
    assert_eq!(world.held(), 0);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), TierState::Partial);
    let reason = Notice::NewGeneration(GenerationReason::Mirror(Inconsistency::TwoPrefixes));
    assert!(world.notices.contains(&reason));
}

/// One engine hash for two prefixes.
fn two_prefixes(token: u32) -> Vec<Value> {
    let mut other = store(None, &[token]);
    other["token_ids"] = json!([token + 1000]);
    vec![store(None, &[token]), other]
}

#[test]
fn a_removal_of_an_unknown_block_costs_no_credit_and_no_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1, 2])]);
    world.publish(&[remove(9)]);
    assert_eq!((world.held(), world.last_generation()), (2, 5));
    world.tick_ms(3000);
    assert_eq!(world.gpu(), TierState::Partial);
    let status = world.core.status(world.now);
    assert_eq!(status.mirror.removals_unknown, 1);
    let reported = Notice::Tier(Tier::Gpu, TierLimit::Unpaired);
    assert!(world.notices.contains(&reported));
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
}

fn warnings(world: &World) -> Vec<String> {
    let warnings = world.notices.iter().filter_map(|notice| match notice {
        Notice::Warning(warning) => Some(warning.to_string()),
        Notice::NewGeneration(_) | Notice::State(_) | Notice::Tier(..) => None,
    });
    warnings.collect()
}

#[test]
fn a_payload_that_is_no_batch_starts_a_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish_unreadable();
    assert_eq!(world.held(), 0);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), TierState::Partial);
    assert_eq!(
        warnings(&world),
        ["sent an unknown payload that is no batch"]
    );
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn an_unknown_event_costs_no_block_and_no_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish(&[store(None, &[2]), unknown_event()]);
    world.publish(&[store(None, &[3])]);
    assert_eq!((world.held(), world.last_generation()), (3, 5));
    assert_eq!(world.gpu(), TierState::Unverified);
    // Named once, however often it comes.
    for _ in 0..5 {
        world.tick_ms(60_000);
        world.publish(&[unknown_event()]);
    }
    assert_eq!(
        warnings(&world),
        ["sent an unknown event type \"BlocksMoved\""]
    );
    let reported = Notice::Tier(Tier::Gpu, TierLimit::UnknownEvent);
    assert!(world.notices.contains(&reported));
    world.publish(&[clear()]);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn generations_of_one_reason_are_limited_in_rate() {
    let mut world = World::started(true);
    let first = world.last_generation();
    let mut was_stale = false;
    for token in 1..=100 {
        world.publish(&two_prefixes(token));
        assert_eq!(world.core.mirror().held(), []);
        was_stale |= world.gpu() == TierState::Stale;
        world.tick_ms(100);
    }
    // The burst, and one each 5 s of the 10 s.
    let begun = world.last_generation() - first;
    assert!((4..=5).contains(&begun), "{begun}");
    assert!(was_stale);
    assert_eq!(warnings(&world).len(), 1);
    // What is stored after the last event is in the generation that was waited for.
    world.publish(&[store(None, &[7])]);
    world.tick_ms(5000);
    assert!(world.holds(&[7]));
    assert_eq!(world.gpu(), TierState::Partial);
}

/// Each reason keeps to its own rate, and an engine that does wrong in several ways adds them up.
#[test]
fn generations_of_all_reasons_together_are_limited_in_rate() {
    let mut world = World::started(true);
    world.tick_ms(10_000);
    let first = world.last_generation();
    for token in 0..50 {
        match token % 3 {
            0 => world.publish(&two_prefixes(token)),
            1 => world.publish_unreadable(),
            _ => {
                let above = world.core.generation().unwrap();
                world.core.resync(world.now, above, ResyncReason::Mismatch);
                world.drive();
            }
        }
        world.tick_ms(100);
    }
    // The burst, and one each second of the 5 s.
    let begun = world.last_generation() - first;
    assert!((6..=8).contains(&begun), "{begun}");
}

/// A shim that was stopped for long first receives what the engine sent before it was killed.
#[test]
fn what_waited_during_a_standstill_proves_nothing() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let (seq, payload) = world.engine.publish(&[store(None, &[2])]);
    world.engine.restart();
    world.now += Duration::from_secs(20);
    let before = world.records.len();
    world.engine_answers = false;
    world.deliver(seq, payload);
    assert_eq!(world.records.len(), before, "no record is written");
    assert_ne!(world.core.status(world.now).states.gpu, GPU);
    world.engine_answers = true;
    let generation = world.generation;
    world.tick_ms(3000);
    assert!(world.generation > generation, "another life is found");
}

#[test]
fn the_limit_of_a_tier_is_reported_once_and_leaves_the_others_alone() {
    let mut world = World::started(true);
    let mut offloaded = store(None, &[1]);
    offloaded["medium"] = json!("cpu");
    offloaded["extra_keys"] = json!([null]);
    world.publish(&[store(None, &[1]), offloaded]);
    world.tick_ms(5000);
    let states = world.heartbeats.last().unwrap().states;
    assert_eq!((states.gpu, states.cpu), (GPU, TierState::Unverified));
    let limits = world.notices.iter().filter_map(|notice| match notice {
        Notice::Tier(tier, limit) => Some((*tier, *limit)),
        Notice::NewGeneration(_) | Notice::State(_) | Notice::Warning(_) => None,
    });
    let limits: Vec<_> = limits.collect();
    assert_eq!(limits, [(Tier::Cpu, TierLimit::NoRemovals)]);
}

/// As with a wrong replay endpoint. An engine that restarts misses one replay, and is not warned of.
#[test]
fn replays_without_answers_are_warned_of() {
    let mut world = World::started(true);
    world.engine_answers = false;
    world.publish_lost(&[store(None, &[1])]);
    world.publish(&[]);
    let warned = |world: &World| {
        let warning = Notice::Warning(EngineWarning::NoReplay);
        world.notices.contains(&warning)
    };
    world.tick_ms(2_000);
    assert!(!warned(&world));
    world.tick_ms(10_000);
    assert!(warned(&world));
}
