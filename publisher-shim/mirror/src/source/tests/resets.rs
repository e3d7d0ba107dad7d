//! Resets of the engine's cache that it has not published.

use super::*;

const UNVERIFIED: TierState = TierState::Unverified;

/// A source that held a block when its engine was reset for the first time.
fn reset() -> World {
    let mut world = World::started(true);
    world.core.reset_calls(world.now, 0);
    world.drive();
    world.publish(&[store(None, &[1])]);
    world.tick_ms(1500);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.engine.flushes, []);
    count(&mut world, 1);
    world
}

fn count(world: &mut World, calls: u64) {
    world.core.reset_calls(world.now, calls);
    world.drive();
}

fn answer(world: &mut World, result: FlushResult) {
    let id = world.engine.flushes.pop().unwrap();
    world.core.flushed(world.now, id, result);
    world.drive();
}

#[test]
fn a_rise_makes_the_source_unverified_until_the_flush_is_replayed() {
    let mut world = reset();
    let heartbeat = world.heartbeats.last().unwrap();
    assert_eq!(heartbeat.states.gpu, UNVERIFIED, "without a delay");
    assert_eq!(world.engine.flushes.len(), 1);
    world.tick_ms(3000);
    assert_eq!(world.gpu(), UNVERIFIED, "replays alone show nothing");
    answer(&mut world, FlushResult::Answered);
    // The batch may be published after the answer.
    world.tick_ms(300);
    assert_eq!(world.gpu(), UNVERIFIED);
    world.publish(&[clear()]);
    assert_eq!(world.held(), 0);
    world.tick_ms(2500);
    assert_eq!(world.gpu(), GPU);
    assert_eq!(world.engine.flushes, []);
    count(&mut world, 1);
    assert_eq!(world.gpu(), GPU, "no rise");
}

/// The engine restarted between two readings, and was reset since.
#[test]
fn a_count_below_the_last_one_is_a_rise_from_zero() {
    let mut world = World::started(true);
    count(&mut world, 5);
    world.publish(&[store(None, &[1])]);
    world.tick_ms(1100);
    world.publish(&[store(None, &[2])]);
    assert_eq!(world.gpu(), GPU);
    count(&mut world, 0);
    assert_eq!(world.gpu(), GPU);
    count(&mut world, 5);
    world.tick_ms(1100);
    world.publish(&[store(None, &[3])]);
    assert_eq!(world.gpu(), GPU);
    count(&mut world, 2);
    assert_eq!(world.gpu(), UNVERIFIED);
}

#[test]
fn a_busy_engine_shows_by_its_batches_that_no_reset_is_pending() {
    let mut world = reset();
    world.publish(&[store(None, &[2])]);
    assert_eq!(world.gpu(), UNVERIFIED, "it may be of before the reset");
    world.tick_ms(1100);
    world.publish(&[store(None, &[3])]);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn an_engine_that_does_not_answer_is_flushed_again_and_late_answers_are_ignored() {
    let mut world = reset();
    let late = world.engine.flushes[0];
    answer(&mut world, FlushResult::Failed);
    world.tick_ms(4500);
    assert_eq!(world.engine.flushes, []);
    world.tick_ms(1000);
    assert_eq!(world.engine.flushes.len(), 1);
    world.core.flushed(world.now, late, FlushResult::Answered);
    world.tick_ms(4000);
    assert_eq!(world.gpu(), UNVERIFIED);
    // A second reset voids the first one's flush.
    count(&mut world, 2);
    let second = world.engine.flushes.pop().unwrap();
    answer(&mut world, FlushResult::Answered);
    world.tick_ms(4000);
    assert_eq!(world.gpu(), UNVERIFIED);
    world.core.flushed(world.now, second, FlushResult::Answered);
    world.tick_ms(2500);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn a_reset_before_the_first_reading_may_be_pending() {
    let mut world = World::started(true);
    count(&mut world, 3);
    assert_eq!(world.gpu(), UNVERIFIED);
    // A smaller count is of a server that restarted.
    answer(&mut world, FlushResult::Answered);
    world.tick_ms(2500);
    count(&mut world, 0);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn a_shim_without_the_lease_is_not_left_without_an_answer() {
    let mut world = World::started(true);
    world.core.reset_calls(world.now, 1);
    world.core.lease_lost();
    world.drive();
    assert_eq!(world.engine.flushes.len(), 1);
}
