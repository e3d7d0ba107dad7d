use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;
use warmroute_proto::load::LoadDigest;

use super::*;
use world::{Mutation, Net, State, World};

mod direct;
mod hostile;
mod world;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Input of a random run.
#[derive(Clone, Copy)]
struct Plan {
    seed: u64,
    mutation: Option<Mutation>,
    /// The world changes views without the replicas' knowledge.
    spoils: bool,
}

/// Five seconds of faults, agreement within one second, then nothing is left of dead routers.
fn play(plan: Plan) -> World {
    let mut dice = Rng::with_seed(plan.seed ^ 0x5EED);
    let mut world = World::new(plan.seed, 0);
    world.mutation = plan.mutation;
    world.spoils = plan.spoils;
    for _ in 0..dice.usize(2..=5) {
        world.join();
    }
    world.run(ms(600));
    world.net = Net {
        drop: [0.0, 0.1, 0.3, 0.3][dice.usize(..4)],
        twice: [0.0, 0.1, 0.3][dice.usize(..3)],
        delay_max: [ms(2), ms(20), ms(100)][dice.usize(..3)],
        straggle: [0.0, 0.01][dice.usize(..2)],
    };
    for _ in 0..10 {
        meet(&mut world, &mut dice, plan.spoils);
        world.run(ms(500));
    }
    world.net = Net::GOOD;
    for at in world.live() {
        world.set(at, State::Up);
    }
    // Delayed messages of the lossy time still arrive.
    world.run(ms(950));
    world.works = false;
    world.run(ms(50));
    world.check_agreement();
    world.forgive_no_more();
    world.run(ms(9000));
    world.check_freed();
    world.check_agreement();
    for at in world.live() {
        world.end_all(at);
    }
    world.run(ms(1000));
    world.check_idle();
    world
}

fn meet(world: &mut World, dice: &mut Rng, spoils: bool) {
    let live = world.live();
    let at = live[dice.usize(..live.len())];
    match dice.u32(..12) {
        0 if live.len() > 1 => world.crash(at),
        1 if live.len() > 1 && world_state(world, at) == State::Up => world.leave(at),
        2 | 3 => world.set(at, State::Paused),
        4 | 5 if world_state(world, at) == State::Up => world.set(at, State::Cut),
        6..9 => world.set(at, State::Up),
        9 if world.nodes.len() < 8 => {
            world.join();
        }
        10 if spoils => world.spoil(at),
        _ => {}
    }
}

fn world_state(world: &World, at: usize) -> State {
    world.nodes[at].state
}

const WHOLE: Plan = Plan {
    seed: 0,
    mutation: None,
    spoils: false,
};

/// Whether the checks find this defect for some seed.
fn is_found(mutation: Mutation, spoils: bool) -> bool {
    (0..200).any(|seed| {
        let plan = Plan {
            seed,
            mutation: Some(mutation),
            spoils,
        };
        // A count below zero is a panic.
        let played = std::panic::catch_unwind(|| play(plan));
        played.is_err() || played.is_ok_and(|world| !world.faults.is_empty())
    })
}

#[test]
fn replicas_agree_within_a_second_after_the_losses_end() {
    replicas_agree(0..50);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn replicas_agree_in_further_worlds() {
    replicas_agree(50..500);
}

fn replicas_agree(seeds: Range<u64>) {
    let (mut moves, worlds) = (0, seeds.end - seeds.start);
    for seed in seeds {
        let world = play(Plan { seed, ..WHOLE });
        assert!(world.faults.is_empty(), "seed {seed}: {:#?}", world.faults);
        moves += world.moves;
    }
    // The runs include moved requests.
    assert!(moves > worlds / 5, "{moves}");
}

#[test]
fn what_no_number_shows_the_digest_finds() {
    digests_find_spoiled_state(0..12);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn what_no_number_shows_the_digest_finds_in_further_worlds() {
    digests_find_spoiled_state(12..100);
}

fn digests_find_spoiled_state(seeds: Range<u64>) {
    for seed in seeds {
        let world = play(Plan {
            seed,
            spoils: true,
            ..WHOLE
        });
        assert!(world.faults.is_empty(), "seed {seed}: {:#?}", world.faults);
    }
}

#[test]
fn one_seed_is_one_world() {
    let trace = |seed| play(Plan { seed, ..WHOLE }).trace();
    assert_eq!(trace(7), trace(7));
    assert_ne!(trace(7), trace(8));
}

#[test]
fn a_missing_digest_is_found() {
    assert!(is_found(Mutation::DigestIgnored, true));
}

#[test]
fn own_messages_applied_twice_are_found() {
    assert!(is_found(Mutation::OwnApplied, false));
}

/// Idle peers send heartbeats only. The replica misses them for a time in which the network
/// delivers all of them.
#[test]
fn a_router_that_is_declared_dead_too_early_is_found() {
    for (unread, is_wrong) in [
        (DEAD_AFTER - 2 * HEARTBEAT_INTERVAL, false),
        (DEAD_AFTER + HEARTBEAT_INTERVAL, true),
    ] {
        let mut world = three();
        world.mutation = Some(Mutation::HeartbeatsUnread);
        world.run(unread);
        world.mutation = None;
        world.run(HEARTBEAT_INTERVAL);
        let is_found = world.faults.iter().any(|fault| fault.contains("alive"));
        assert_eq!(is_found, is_wrong, "{unread:?}: {:?}", world.faults);
    }
}

/// Number of a router's requests in another router's view.
fn held(world: &World, by: usize, of: usize) -> u64 {
    world.nodes[by].core.digest(world.nodes[of].router).count
}

fn three() -> World {
    let mut world = World::new(1, 3);
    world.works = false;
    world.run(ms(200));
    for at in 0..3 {
        for _ in 0..10 {
            world.admit(at);
        }
    }
    world.run(ms(1000));
    world.check_agreement();
    assert!(world.faults.is_empty(), "{:?}", world.faults);
    world
}

#[test]
fn a_dead_routers_load_is_gone_after_its_death_and_not_before() {
    let mut world = three();
    world.crash(0);
    world.run(DEAD_AFTER - HEARTBEAT_INTERVAL);
    assert_eq!(held(&world, 1, 0), 10);
    world.run(HEARTBEAT_INTERVAL + 2 * TICK);
    assert_eq!((held(&world, 1, 0), held(&world, 2, 0)), (0, 0));
    assert_eq!(held(&world, 1, 2), 10);
}

/// Two hours exceed every timeout.
#[test]
#[ignore = "long: ./test.sh --all"]
fn a_stream_that_lasts_for_hours_keeps_its_load() {
    let mut world = three();
    for minute in 0..120_u32 {
        world.net.drop = if minute % 10 == 0 { 0.3 } else { 0.0 };
        world.grow_all(0);
        world.run(ms(59_000));
        world.net = Net::GOOD;
        world.run(ms(1000));
        for by in 0..3 {
            assert_eq!(held(&world, by, 0), 10, "{by} after {minute} minutes");
        }
        world.check_agreement();
    }
    world.end_all(0);
    world.run(ms(500));
    assert_eq!((held(&world, 1, 0), held(&world, 2, 0)), (0, 0));
    assert_eq!(held(&world, 1, 2), 10);
    assert!(world.faults.is_empty(), "{:?}", world.faults);
}

#[test]
fn a_router_that_leaves_frees_its_slots() {
    let mut world = three();
    world.leave(0);
    world.run(ms(10));
    assert_eq!(held(&world, 1, 0), 0);
    assert!(
        world.nodes[1]
            .replica
            .peers
            .values()
            .any(|peer| peer.is_dead())
    );
}

#[test]
fn a_router_paused_for_20_seconds_is_freed_and_comes_back_once() {
    let mut world = three();
    world.set(0, State::Paused);
    world.run(ms(20_000));
    assert_eq!(held(&world, 1, 0), 0);
    // It receives the waiting messages first and declares no router dead.
    world.set(0, State::Up);
    world.run(ms(500));
    assert_eq!(world.nodes[0].replica.counts().deaths, 0);
    assert_eq!(world.nodes[0].replica.counts().incarnations, 2);
    for by in 0..3 {
        assert_eq!(held(&world, by, 0), 10, "{by}");
    }
    world.check_agreement();
    // Its requests continue and end normally.
    world.end_all(0);
    world.run(ms(500));
    assert_eq!(held(&world, 1, 0), 0);
    assert!(world.faults.is_empty(), "{:?}", world.faults);
}

/// Deaths that a router declares after a cut, until one second after its end.
fn cut_off(time: Duration, mutation: Option<Mutation>) -> (u64, World) {
    let mut world = three();
    world.mutation = mutation;
    world.set(0, State::Cut);
    world.run(time);
    world.set(0, State::Up);
    world.run(ms(1000));
    (world.nodes[0].replica.counts().deaths, world)
}

/// A router's messages of one incarnation are delayed until it has another.
fn former_incarnation(seed: u64, mutation: Option<Mutation>) -> World {
    let mut world = World::new(seed, 3);
    world.works = false;
    world.run(ms(500));
    world.mutation = mutation;
    world.net.straggle = 1.0;
    for _ in 0..10 {
        world.admit(0);
        world.run(ms(10));
    }
    world.net = Net::GOOD;
    world.set(0, State::Paused);
    world.run(DEAD_AFTER + ms(100));
    world.set(0, State::Up);
    world.run(ms(2000));
    assert_eq!(world.nodes[0].replica.counts().incarnations, 2);
    world.check_agreement();
    world
}

#[test]
fn a_former_incarnation_is_not_applied() {
    let mut found = 0;
    for seed in 0..50 {
        let world = former_incarnation(seed, None);
        assert!(world.faults.is_empty(), "seed {seed}: {:#?}", world.faults);
        let world = former_incarnation(seed, Some(Mutation::FormerAdmitted));
        found += u32::from(!world.faults.is_empty());
    }
    assert!(found > 10, "{found}");
}

#[test]
fn an_isolated_router_declares_no_router_dead() {
    for time in [ms(1000), ms(2000), ms(2600), ms(5000), ms(30_000)] {
        let (deaths, mut world) = cut_off(time, None);
        assert_eq!(deaths, 0, "{time:?}");
        assert_eq!(held(&world, 0, 1), 10);
        assert_eq!(held(&world, 1, 0), 10);
        world.check_agreement();
        assert!(world.faults.is_empty(), "{time:?} {:?}", world.faults);
    }
    let (deaths, _) = cut_off(ms(5000), Some(Mutation::LoopbackKept));
    assert!(deaths > 0, "lost own heartbeats have no effect");
}

/// All routers lose the server and reconnect one after the other.
#[test]
fn routers_that_come_back_seconds_apart_keep_each_others_load() {
    let mut world = three();
    for at in 0..3 {
        world.set(at, State::Cut);
    }
    world.run(ms(4000));
    for at in 0..3 {
        world.set(at, State::Up);
        world.run(ms(2000));
        if at == 0 {
            assert_eq!(held(&world, 0, 2), 10);
        }
    }
    for at in 0..3 {
        assert_eq!(world.nodes[at].replica.counts().deaths, 0, "{at}");
    }
    world.check_agreement();
    assert!(world.faults.is_empty(), "{:?}", world.faults);
}

#[test]
fn a_joiner_is_ready_with_the_others_load_and_not_before() {
    let mut world = three();
    let joined = world.now;
    let at = world.join();
    while world.nodes[at].ready.is_none() {
        world.run(ms(1));
    }
    for of in 0..3 {
        assert_eq!(held(&world, at, of), 10, "{of}");
    }
    assert!(world.now - joined < ms(200));
}

#[test]
fn a_joiner_waits_for_silent_routers_no_longer_than_it_must() {
    let mut world = three();
    world.set(0, State::Paused);
    let joined = world.now;
    let at = world.join();
    while world.nodes[at].ready.is_none() {
        world.run(ms(1));
    }
    assert_eq!(held(&world, at, 1), 10);
    let waited = world.now - joined;
    assert!(
        (JOIN_MAX..JOIN_MAX + ms(100)).contains(&waited),
        "{waited:?}"
    );
}

#[test]
fn a_lone_router_sends_heartbeats_only() {
    let mut world = World::new(1, 1);
    world.run(ms(10_000));
    let traffic = world.nodes[0].replica.counts().traffic;
    assert_eq!((traffic.messages_out, traffic.asks_out), (0, 0));
    assert!(!world.nodes[0].open.is_empty());
    assert!(world.nodes[0].ready.is_some());
    assert_ne!(
        world.nodes[0].core.digest(world.nodes[0].router),
        LoadDigest::default()
    );
}
