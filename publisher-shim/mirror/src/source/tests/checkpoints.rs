//! Row 6: a killed shim comes back while its engine lived on, or did not.

use super::*;

/// A mirror with a hot old prefix and a second copy, of which the replay buffer knows nothing more.
fn with_old_blocks() -> World {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1, 2, 3])]);
    world.publish(&[store(None, &[1, 2])]);
    world.publish(&[remove(2)]);
    world.save();
    world.engine.oldest = world.engine.batches.len() - 1;
    world
}

fn credited(state: TierState) -> bool {
    state < TierState::Stale
}

#[test]
fn row_6_a_checkpoint_and_the_replay_from_it_are_exact() {
    let mut world = with_old_blocks();
    world.publish(&[store(Some(3), &[4])]);
    world.publish_lost(&[store(None, &[9])]);
    world.restart_shim();
    world.publish_lost(&[remove(9)]);
    world.start();
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.held(), 4);
    // Its second copy was removed before: the first one still counts.
    world.publish(&[remove(2)]);
    assert!(!world.holds(&[1, 2]));
    assert_eq!(world.held(), 3);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_6_without_the_state_directory_it_is_partial() {
    let mut world = with_old_blocks();
    world.saved = None;
    world.restart_shim();
    world.start();
    assert_eq!(world.gpu(), TierState::Partial);
    assert_eq!(world.held(), 0);
}

#[test]
fn row_6_a_checkpoint_older_than_the_buffer_is_forgotten() {
    let mut world = with_old_blocks();
    for token in 10..15 {
        world.publish(&[store(None, &[token])]);
    }
    world.engine.oldest = world.engine.batches.len() - 2;
    world.restart_shim();
    world.start();
    world.tick_ms(3000);
    assert_eq!(world.gpu(), TierState::Partial);
    assert_eq!(world.held(), 2);
}

/// The batch that the checkpoint names proves the life. Whether one is missing is not known yet.
#[test]
fn a_replay_without_its_end_proves_the_checkpoint() {
    let mut world = with_old_blocks();
    world.restart_shim();
    world.engine_answers = false;
    world.start();
    let (id, from) = world.engine.unanswered.take().unwrap();
    assert_eq!(world.core.engine.provable_last(), None);
    for (seq, payload) in world.engine.from(from) {
        world.core.replay_batch(world.now, id, seq, &payload);
    }
    world.core.replay_failed(world.now, id);
    world.drive();
    let proven = world.core.engine.provable_last();
    assert_eq!(proven.map(|(seq, _)| seq), Some(EngineSeq(2)));
}

#[test]
fn nothing_of_another_life_is_credited_for_a_moment() {
    for batches in 0..6 {
        let mut world = with_old_blocks();
        world.engine.restart();
        for token in 0..batches {
            world.engine.publish(&[store(None, &[20 + token])]);
        }
        world.restart_shim();
        let (records, heartbeats) = (world.records.len(), world.heartbeats.len());
        world.start();
        world.tick_ms(3000);
        for record in &world.records[records..] {
            if record.generation == Generation(6) {
                assert!(!credited(record.states.gpu), "{record:?}");
            }
        }
        for heartbeat in &world.heartbeats[heartbeats..] {
            let is_old = heartbeat.generation == Generation(6);
            assert!(!(is_old && credited(heartbeat.states.gpu)), "{heartbeat:?}");
        }
        assert_eq!(world.held(), batches as usize);
        assert_eq!(world.gpu(), GPU);
    }
}

#[test]
fn an_unproven_mirror_is_told_without_credit() {
    let mut world = with_old_blocks();
    world.engine_answers = false;
    world.restart_shim();
    world.start();
    world.tick_ms(5000);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), TierState::Stale);
    assert!(world.core.checkpoint().is_none(), "nothing new is known");
    world.engine_answers = true;
    world.tick_ms(3000);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.last_generation(), 6);
}

#[test]
fn where_nothing_can_be_proven_a_checkpoint_is_not_used() {
    let mut world = with_old_blocks();
    world.core.config.has_replay = false;
    world.restart_shim();
    world.start();
    assert_eq!(world.gpu(), TierState::Unverified);
    world.tick_ms(500);
    assert_eq!(world.held(), 0);
    assert!(world.core.checkpoint().is_none());
}

#[test]
fn a_replay_endpoint_that_turns_out_later_proves_it() {
    let mut world = with_old_blocks();
    world.core.config.has_replay = false;
    world.restart_shim();
    world
        .core
        .set_replay_support(world.now, ReplaySupport::Available);
    world.start();
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.held(), 3);
}

#[test]
fn row_16c_generations_go_on_above_the_checkpoint() {
    let mut world = with_old_blocks();
    world.generation = Generation(0);
    world.records.clear();
    world.restart_shim();
    world.start();
    assert_eq!(world.last_generation(), 6);
}
