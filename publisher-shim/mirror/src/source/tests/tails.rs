//! The log's end, the lease, and what is sent after either was lost.

use super::*;

fn count(world: &World, reason: GenerationReason) -> u64 {
    world.core.status(world.now).counters.reasons.of(reason)
}

#[test]
fn a_log_that_lost_its_end_gets_a_new_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish(&[store(None, &[2])]);
    world.tick_ms(1200);
    assert_eq!(world.last_generation(), 5);
    world.lose_records(1);
    world.tick_ms(3000);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.held(), 2);
    assert_eq!(count(&world, GenerationReason::LogLost), 1);
}

#[test]
fn a_copy_of_the_log_that_lags_once_is_asked_again() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let last = world.records.last().unwrap().clone();
    world.records.pop();
    world.tick_ms(1000);
    assert_eq!(world.core.status(world.now).counters.tails_unexpected, 1);
    world.records.push(last);
    world.tick_ms(3000);
    assert_eq!(world.last_generation(), 5);
}

/// Believed, it would be the last one that can be claimed.
#[test]
fn a_generation_that_nobody_can_have_come_to_is_as_good_as_none() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let last = Generation(u64::MAX);
    let mut foreign = world.records.last().unwrap().clone();
    foreign.generation = last;
    world.records.push(foreign);
    world.tick_ms(3000);
    let claimed = world.generation;
    assert!((6..30).contains(&claimed.0), "{claimed}");
    assert_eq!(count(&world, GenerationReason::Overtaken), 0);
    world.records.retain(|record| record.generation < last);
    world.tick_ms(5000);
    let generation = world.generation;
    assert_eq!(world.last_generation(), generation.0);
    world.core.resync(world.now, last, ResyncReason::Fenced);
    world.tick_ms(3000);
    assert_eq!(world.core.status(world.now).counters.generations_refused, 1);
    assert_eq!(world.generation, generation);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn row_7_what_is_told_while_the_log_is_away_follows_in_the_same_generation() {
    let mut world = World::started(true);
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    world.core.plane_lost();
    world.waiting.clear();
    let (records, heartbeats) = (world.records.len(), world.heartbeats.len());
    for token in 2..6 {
        world.publish(&[store(None, &[token])]);
        world.tick_ms(1000);
    }
    assert_eq!(world.records.len(), records);
    assert_eq!(world.heartbeats.len(), heartbeats);
    world.acks_wait = false;
    world.core.plane_back(world.now);
    world.drive();
    assert_eq!(world.held(), 5);
    assert_eq!(world.last_generation(), 5);
    assert_eq!(world.gpu(), GPU);
}

/// The shims of a fleet lost the plane together, and return in one moment.
#[test]
fn a_claim_waits_a_part_of_the_back_off_after_an_outage() {
    let mut world = World::started(true);
    world.log_is_up = false;
    world.publish_unreadable();
    world.tick_ms(1000);
    world.core.plane_lost();
    world.log_is_up = true;
    world.tick_ms(60_000);
    let claims = world.claims;
    world.core.plane_back(world.now);
    world.drive();
    assert_eq!(world.claims, claims, "not at once");
    world.tick_ms(200);
    assert_eq!(world.claims, claims + 1);
}

#[test]
fn row_9_a_log_that_comes_back_without_its_end_hears_no_word_of_the_old_generation() {
    let mut world = World::started(true);
    for token in 1..4 {
        world.publish(&[store(None, &[token])]);
    }
    world.core.plane_lost();
    world.publish(&[store(None, &[4])]);
    world.lose_records(2);
    let records = world.records.len();
    world.core.plane_back(world.now);
    world.drive();
    world.tick_ms(2000);
    assert!(
        world.records[records..]
            .iter()
            .all(|r| r.generation == Generation(6))
    );
    assert_eq!(world.held(), 4);
}

#[test]
fn row_10_another_log_gets_a_new_generation_though_it_looks_alike() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.tick_ms(1000);
    world.core.plane_lost();
    world.log.nonce += 1;
    world.core.plane_back(world.now);
    world.drive();
    world.tick_ms(300);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.held(), 1);
}

#[test]
fn row_16c_a_lost_registry_is_written_again_and_generations_go_on() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.core.lease_lapsed();
    world.has_registry = false;
    world.generation = Generation(0);
    world.core.lease_taken(world.now);
    world.drive();
    world.tick_ms(2000);
    assert_eq!(count(&world, GenerationReason::RegistryLost), 1);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.generation, Generation(6));
}

#[test]
fn a_lapsed_lease_that_nobody_took_costs_no_generation() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let heartbeats = world.heartbeats.len();
    world.core.lease_lapsed();
    world.publish(&[store(None, &[2])]);
    world.tick_ms(3000);
    assert_eq!(world.held(), 1);
    assert_eq!(world.heartbeats.len(), heartbeats, "not a word");
    world.core.lease_taken(world.now);
    world.drive();
    assert_eq!(world.held(), 2);
    assert_eq!(world.last_generation(), 5);
}

#[test]
fn a_rivals_generation_in_between_is_outbid() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.core.lease_lapsed();
    world.generation = Generation(8);
    world.core.lease_taken(world.now);
    world.drive();
    world.tick_ms(300);
    assert_eq!(count(&world, GenerationReason::Overtaken), 1);
    assert_eq!(world.last_generation(), 9);
}

#[test]
fn an_outbox_that_fills_while_the_log_is_away_costs_one_generation() {
    let mut config = World::new(true).core.config;
    config.outbox_bytes_max = 10_000;
    let mut world = World::with(config);
    world.start();
    world.core.plane_lost();
    for token in 1..2000 {
        world.publish(&[store(None, &[token])]);
        assert!(world.core.status(world.now).waiting_bytes <= 12_000);
    }
    world.tick_ms(5000);
    world.core.plane_back(world.now);
    world.tick_ms(1000);
    assert_eq!(world.held(), 1999);
    assert_eq!(count(&world, GenerationReason::OutboxFull), 1);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn a_restarted_engine_is_told_though_the_log_was_away() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.core.plane_lost();
    world.engine.restart();
    world.reconnect();
    world.publish(&[store(None, &[7])]);
    world.core.plane_back(world.now);
    world.tick_ms(1500);
    assert_eq!(world.held(), 1);
    assert!(world.holds(&[7]));
    assert_eq!(world.gpu(), GPU);
}

#[test]
fn failed_claims_are_repeated_ever_more_rarely() {
    let mut world = World::new(true);
    world.log_is_up = false;
    world.start();
    world.tick_ms(60_000);
    assert!((10..40).contains(&world.claims), "{}", world.claims);
    world.log_is_up = true;
    world.tick_ms(6000);
    assert_eq!(world.last_generation(), 5);
}

#[test]
fn a_log_that_takes_less_at_once_gets_smaller_records() {
    let mut world = World::started(true);
    world.record_bytes_max = 8000;
    let tokens: Vec<u32> = (1..=5000).collect();
    world.publish(&[store(None, &tokens)]);
    world.tick_ms(1000);
    assert_eq!(world.held(), 5000);
    assert_eq!(world.last_generation(), 6);
    assert_eq!(count(&world, GenerationReason::RecordTooLarge), 1);
}

#[test]
fn without_the_lease_not_a_word_is_said() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    let (records, heartbeats) = (world.records.len(), world.heartbeats.len());
    // A record waits to be sent.
    let (seq, payload) = world.engine.publish(&[store(None, &[2])]);
    world.core.live(world.now, b"", Some(seq), payload);
    world.core.lease_lost();
    world.drive();
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
