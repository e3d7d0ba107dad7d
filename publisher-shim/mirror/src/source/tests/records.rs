//! From changes to records, generations and their images.

use super::*;

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
fn changes_that_the_log_refuses_end_the_credit_of_the_acknowledged_state() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.tick_ms(1000);
    assert_eq!(world.heartbeats.last().unwrap().states.gpu, GPU);
    // Heartbeats and polls of the engine still work.
    world.log_is_up = false;
    world.publish(&[remove(1)]);
    world.tick_ms(2900);
    assert_eq!(world.heartbeats.last().unwrap().states.gpu, GPU);
    world.tick_ms(200);
    assert_eq!(
        world.heartbeats.last().unwrap().states.gpu,
        TierState::Stale
    );
    let sent = world.heartbeats.len();
    world.tick_ms(60_000);
    let is_credited = |sent: &Heartbeat| sent.states.gpu == GPU;
    assert!(!world.heartbeats[sent..].iter().any(is_credited));
    world.log_is_up = true;
    world.tick_ms(10_000);
    assert_eq!(world.heartbeats.last().unwrap().states.gpu, GPU);
    assert_eq!(world.held(), 0);
}

#[test]
fn acknowledgements_that_stay_away_end_the_credit_of_the_acknowledged_state() {
    let mut world = World::started(true);
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    world.publish(&[store(None, &[2])]);
    world.tick_ms(3100);
    assert_eq!(
        world.heartbeats.last().unwrap().states.gpu,
        TierState::Stale
    );
    // The second change is as old as the first, and is sent only now.
    world.acknowledge_all();
    world.tick_ms(100);
    assert_eq!(
        world.heartbeats.last().unwrap().states.gpu,
        TierState::Stale
    );
    world.acknowledge_all();
    world.tick_ms(100);
    assert_eq!(world.heartbeats.last().unwrap().states.gpu, GPU);
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
    assert!(
        image
            .iter()
            .all(|part| Some(part.generation) == above.next())
    );
    world.acknowledge_all();
    world.acknowledge_all();
    assert_eq!(world.held(), 20_000);
    assert_eq!(world.last_generation(), above.0 + 1);
    // After the image, a request of a reader that still cannot follow is served.
    world.now += Duration::from_secs(10);
    world
        .core
        .resync(world.now, Generation(0), ResyncReason::Gap);
    world.drive();
    assert_eq!(world.last_generation(), above.0 + 2);
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

/// The log took three records, and the first one's acknowledgement is lost.
#[test]
fn a_lost_acknowledgement_holds_the_later_ones_back_for_half_a_second_only() {
    let mut world = World::started(true);
    world.acks_wait = true;
    let tokens: Vec<u32> = (1..20_001).collect();
    world.publish(&[store(None, &tokens)]);
    let last = world.records.last().unwrap().number;
    let acknowledged = |world: &World| world.core.status(world.now).acknowledged.unwrap().number;
    let before = acknowledged(&world);
    assert!(world.waiting.len() >= 3);
    world.waiting.remove(0);
    world.acknowledge_all();
    world.tick_ms(400);
    assert_eq!(acknowledged(&world), before);
    world.tick_ms(1000);
    assert_eq!(acknowledged(&world), last);
    let generations = world.records.iter().map(|record| record.generation);
    assert_eq!(generations.max(), Some(world.generation));
    assert_eq!(world.core.status(world.now).counters.generations, 1);
}

/// The log's time of the first sending: sending again makes a record no younger.
#[test]
fn what_is_said_says_when() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    assert_eq!(
        world.records.last().unwrap().sent_at,
        None,
        "no clock was queried"
    );
    let told = world.now;
    world.core.log_clock(told, told, 1_000_000_000_000);
    let log_time = |at: Instant| {
        let elapsed = Duration::from_secs(1_000) + (at - told);
        Some(LogTime(u64::try_from(elapsed.as_nanos()).unwrap()))
    };
    world.tick_ms(700);
    let said = world.now;
    world.log_is_up = false;
    world.publish(&[store(None, &[2])]);
    world.tick_ms(20_000);
    world.log_is_up = true;
    world.tick_ms(10_000);
    let last = world.records.last().unwrap();
    assert_eq!(last.sent_at, log_time(said));
    let heartbeat = world.heartbeats.last().unwrap();
    assert_eq!(heartbeat.number, Some(last.number));
    assert!(heartbeat.sent_at > log_time(world.now - Duration::from_millis(1_100)));
    assert!(heartbeat.sent_at <= log_time(world.now));
}

#[test]
fn the_sequence_in_heartbeats_never_goes_back() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish(&[]);
    world.tick_ms(1_000);
    assert_eq!(
        world.heartbeats.last().unwrap().engine_seq,
        Some(EngineSeq(1))
    );
    world.acks_wait = true;
    world.publish(&[store(None, &[2])]);
    world.tick_ms(1_000);
    assert_eq!(
        world.heartbeats.last().unwrap().engine_seq,
        Some(EngineSeq(1))
    );
    world.acknowledge_all();
    world.tick_ms(1_000);
    assert_eq!(
        world.heartbeats.last().unwrap().engine_seq,
        Some(EngineSeq(2))
    );
}

#[test]
fn a_record_is_as_of_later_batches_without_changes() {
    let mut world = World::started(true);
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    world.publish(&[]);
    world.publish(&[store(None, &[2])]);
    let first = world.waiting.remove(0);
    world.core.acknowledged(world.now, first);
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, Some(EngineSeq(1)));
    world.acknowledge_all();
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, Some(EngineSeq(2)));
}

/// World seed 589090: a block below an unknown parent changes nothing in the mirror, and the engine
/// holds it. A complete state is not as of that batch.
#[test]
fn a_record_is_not_as_of_a_batch_that_lowered_a_state() {
    for waits in [false, true] {
        let mut world = World::started(true);
        world.acks_wait = waits;
        world.publish(&[store(None, &[1])]);
        world.acks_wait = true;
        world.publish(&[store(Some(77), &[78])]);
        world.tick_ms(1_000);
        world.acknowledge_all();
        world.tick_ms(1_000);
        world.acknowledge_all();
        world.tick_ms(1_000);
        let is_credited = |heartbeat: &&Heartbeat| heartbeat.engine_seq == Some(EngineSeq(1));
        let mut of_orphan = world.heartbeats.iter().filter(is_credited).peekable();
        assert!(of_orphan.peek().is_some(), "waits: {waits}");
        let states = of_orphan.map(|heartbeat| *heartbeat.states.get(Tier::Gpu));
        let wrong: Vec<_> = states.filter(|&state| is_complete(state)).collect();
        assert!(wrong.is_empty(), "waits: {waits}");
    }
}

/// The engine's facts come while the log does not answer: the record in flight has states that no
/// longer are the present ones. It is as of the batches that changed nothing.
#[test]
fn a_record_whose_states_changed_is_as_of_later_batches_without_changes() {
    let mut world = World::started(true);
    world.core.learn(EngineFacts {
        speculates: Some(true),
        ..EngineFacts::default()
    });
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    world.core.learn(EngineFacts {
        speculates: Some(false),
        ..EngineFacts::default()
    });
    world.publish(&[]);
    let first = world.waiting.remove(0);
    world.core.acknowledged(world.now, first);
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, Some(EngineSeq(1)));
    assert_eq!(*last.states.get(Tier::Gpu), TierState::Unverified);
    world.acknowledge_all();
    world.tick_ms(1_000);
    assert!(is_complete(
        *world.heartbeats.last().unwrap().states.get(Tier::Gpu)
    ));
}

/// World seed 800023: a record that only changes a state does not reach the log.
#[test]
fn the_record_before_one_without_changes_is_as_of_later_batches() {
    let mut world = World::started(true);
    world.core.learn(EngineFacts {
        speculates: Some(true),
        ..EngineFacts::default()
    });
    world.publish(&[store(None, &[1])]);
    world.acks_wait = true;
    world.core.learn(EngineFacts {
        speculates: Some(false),
        ..EngineFacts::default()
    });
    world.publish(&[]);
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, Some(EngineSeq(1)));
    assert_eq!(*last.states.get(Tier::Gpu), TierState::Unverified);
    world.publish(&[store(None, &[2])]);
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert_eq!(last.engine_seq, Some(EngineSeq(1)));
}

/// A state that was lowered for a moment, while a record was in flight, comes back.
#[test]
fn a_state_that_was_lowered_in_flight_is_claimed_again() {
    let mut world = World::started(true);
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    for speculates in [true, false] {
        world.core.learn(EngineFacts {
            speculates: Some(speculates),
            ..EngineFacts::default()
        });
        world.publish(&[]);
    }
    world.acks_wait = false;
    world.acknowledge_all();
    world.tick_ms(1_000);
    let last = world.heartbeats.last().unwrap();
    assert!(is_complete(*last.states.get(Tier::Gpu)));
}

/// The parts of a split record are as of no earlier batch than the record before.
#[test]
fn the_parts_of_a_split_record_do_not_go_back() {
    let mut world = World::started(true);
    world.publish(&[store(None, &[1])]);
    world.publish(&[]);
    world.tick_ms(1_000);
    world.core.append_too_large(
        world.now,
        AppendId {
            generation: Generation(0),
            number: RecordNumber(0),
            attempt: 0,
        },
        1,
    );
    world.drive();
    world.tick_ms(2_000);
    world.publish(&[]);
    let before = world.records.len();
    let tokens: Vec<u32> = (10..400).collect();
    world.publish(&[store(None, &tokens)]);
    world.tick_ms(1_000);
    let parts = &world.records[before..];
    assert!(parts.len() > 1, "{} records", parts.len());
    let last = EngineSeq(3);
    assert_eq!(parts.last().unwrap().engine_seq, Some(last));
    for part in &parts[..parts.len() - 1] {
        assert_eq!(part.engine_seq, Some(EngineSeq(2)));
    }
}

#[test]
fn an_answer_to_an_earlier_generation_acknowledges_nothing() {
    let mut world = World::started(true);
    world.acks_wait = true;
    world.publish(&[store(None, &[1])]);
    let late = std::mem::take(&mut world.waiting);
    let above = world.core.generation().unwrap();
    world.core.resync(world.now, above, ResyncReason::Gap);
    world.drive();
    world.tick_ms(1_000);
    let generation = world.core.generation().unwrap();
    assert!(generation > above);
    for mut id in late {
        world.core.acknowledged(world.now, id);
        id.number = RecordNumber(0);
        world.core.acknowledged(world.now, id);
    }
    let status = world.core.status(world.now);
    assert_eq!(status.acknowledged, None);
    assert!(!status.is_image_acknowledged);
    world.acknowledge_all();
    let status = world.core.status(world.now);
    let number = status.acknowledged.map(|point| point.number);
    assert_eq!(number, Some(RecordNumber(0)));
    assert!(status.is_image_acknowledged);
}

/// A claim that does not say when it was made may be of long ago.
#[test]
fn nothing_is_claimed_before_the_log_told_its_time() {
    let source = World::new(true).core.status(start()).source;
    for (shows, says) in [(1_000_000_000_000, true), (0, false)] {
        let mut world = World::with(config_of(source.clone(), true));
        world.start();
        world.publish(&[store(None, &[1])]);
        world.tick_ms(3_000);
        let claims = |heartbeat: &Heartbeat| *heartbeat.states.get(Tier::Gpu);
        let said = world.heartbeats.iter().map(claims);
        assert!(said.clone().count() > 0 && said.clone().all(|state| state >= TierState::Stale));
        let of_records = world.records.iter();
        let of_records = of_records.map(|record| *record.states.get(Tier::Gpu));
        assert!(of_records.clone().count() > 0 && !of_records.clone().any(is_complete));
        world.core.log_clock(world.now, world.now, shows);
        world.tick_ms(1_500);
        let last = world.heartbeats.last().unwrap();
        assert_eq!(claims(last), TierState::Complete);
        assert_eq!(last.sent_at.is_some(), says);
    }
}

/// A machine was suspended for 20 s. What its shim reads before the log's answer waited in a socket.
#[test]
fn a_change_that_was_read_before_the_log_showed_a_jump_is_as_old_as_the_jump() {
    let mut world = World::started(true);
    let begin = world.now;
    world.core.log_clock(begin, begin, 1_000_000_000_000);
    world.publish(&[store(None, &[1])]);
    world.tick_ms(1_500);
    let last = |world: &World| *world.heartbeats.last().unwrap().states.get(Tier::Gpu);
    assert!(is_complete(last(&world)));
    world.log_is_up = false;
    world.publish(&[store(None, &[2])]);
    let elapsed = world.now - begin + Duration::from_secs(20);
    let shows = 1_000_000_000_000 + u64::try_from(elapsed.as_nanos()).unwrap();
    world.core.log_clock(world.now, world.now, shows);
    let sent = world.heartbeats.len();
    world.tick_ms(1_500);
    assert!(world.heartbeats.len() > sent);
    assert!(!is_complete(last(&world)), "the next change is 20 s old");
    world.log_is_up = true;
    world.tick_ms(10_000);
    assert!(is_complete(last(&world)));
}

/// A machine was suspended before the log answered for the first time: no earlier reading shows it.
#[test]
fn what_was_read_before_the_first_answer_of_the_log_is_claimed_only_after_a_replay() {
    let source = World::new(true).core.status(start()).source;
    let mut world = World::with(config_of(source, true));
    world.start();
    world.publish(&[store(None, &[1])]);
    world.tick_ms(200);
    world.engine_answers = false;
    world
        .core
        .log_clock(world.now, world.now, 1_000_000_000_000);
    world.drive();
    // It may have waited in the socket for hours.
    world.publish(&[store(None, &[2])]);
    let (heartbeats, records) = (world.heartbeats.len(), world.records.len());
    world.tick_ms(2_000);
    assert!(world.heartbeats.len() > heartbeats);
    let heartbeats = world.heartbeats[heartbeats..].iter().map(|one| one.states);
    let records = world.records[records..].iter().map(|one| one.states);
    assert!(
        !heartbeats
            .chain(records)
            .any(|states| is_complete(*states.get(Tier::Gpu)))
    );
    world.engine_answers = true;
    world.tick_ms(3_000);
    let last = world.heartbeats.last().unwrap();
    assert!(is_complete(*last.states.get(Tier::Gpu)));
}

fn is_complete(state: TierState) -> bool {
    state == TierState::Complete
}
