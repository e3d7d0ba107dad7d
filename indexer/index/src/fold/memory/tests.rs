use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::{Change, LocalHash, Tier};

use super::*;
use crate::fold::tests::SECOND;
use crate::fold::{FREE_AFTER, NoSnapshot, RecordVerdict};
use crate::snapshot::Restored;
use crate::tests_support::{World, source};
use crate::tree::SourceNodes;

/// Blocks of one source only.
fn own(source: u64, first: u64, count: u64) -> Vec<Change> {
    let name = |block| LocalHash(source << 32 | block);
    vec![Change::Stored {
        parent: None,
        blocks: (first..first + count).map(name).collect(),
        tier: Tier::Gpu,
    }]
}

fn cleared() -> Vec<Change> {
    vec![Change::Cleared { tier: Tier::Gpu }]
}

fn reason(world: &World, name: &str) -> Option<UnknownReason> {
    let name = source(name);
    let answers = world.ask("");
    answers
        .into_iter()
        .find(|answer| answer.source == name)
        .and_then(|answer| answer.reason)
}

/// Sends heartbeats and polls requests twice a second. Returns the requested sources.
fn live(world: &mut World, shims: &[&str], seconds: u32) -> Vec<String> {
    let mut asked = Vec::new();
    for _ in 0..seconds * 2 {
        for shim in shims {
            world.heartbeat(shim);
        }
        world.wait(SECOND / 2);
        world.fold.reclaim(1024);
        let requests = world.fold.poll_resyncs(world.now);
        asked.extend(
            requests
                .into_iter()
                .map(|request| request.source.to_string()),
        );
    }
    asked
}

const SMALL: [&str; 3] = ["small/0", "small/1", "small/2"];

/// Small sources, and one that is set aside for them.
fn pressed() -> World {
    let bound = 1_800_000;
    let mut world = World::with_memory(Some(bound));
    world.publish("big/0", own(9, 0, 20_000));
    for first in 0.. {
        for (name, shim) in (0..).zip(SMALL) {
            world.publish(shim, own(name, first * 500, 500));
            assert!(world.fold.bytes() <= bound);
        }
        if world.fold.set_aside_and_returned().0 > 0 {
            break;
        }
    }
    world
}

fn make_room(world: &mut World) {
    for shim in SMALL {
        world.publish(shim, cleared());
    }
}

#[test]
fn at_the_bound_the_largest_source_is_set_aside() {
    let mut world = pressed();
    assert_eq!(reason(&world, "big/0"), Some(UnknownReason::Memory));
    assert_eq!(world.state("small/0"), SourceState::Exact);
    assert_eq!(
        world.publish("big/0", own(9, 30_000, 1)),
        RecordVerdict::NotFolded
    );
    assert_eq!(world.snapshot().err(), Some(NoSnapshot::SetAside));
    world.register("big");
    world.deregister("big");
    world.wait(FREE_AFTER);
    assert!(world.snapshot().is_ok(), "a gone source blocks no other");
}

#[test]
fn a_source_returns_once_when_there_is_room() {
    let mut world = pressed();
    let shims = [SMALL[0], SMALL[1], SMALL[2], "big/0"];
    assert_eq!(
        live(&mut world, &shims, 300),
        [""; 0],
        "no room, no request"
    );
    make_room(&mut world);
    let asked = live(&mut world, &shims, 9);
    assert_eq!(asked, ["big/0"]);
    world.shim("big/0").next_generation();
    assert_eq!(
        world.publish("big/0", own(9, 0, 20_000)),
        RecordVerdict::Started
    );
    assert_eq!(world.state("big/0"), SourceState::Exact);
    assert_eq!(world.fold.set_aside_and_returned(), (1, 1));
    assert_eq!(live(&mut world, &shims, 100), [""; 0]);
}

#[test]
fn who_is_not_there_is_not_asked() {
    let mut world = pressed();
    make_room(&mut world);
    assert_eq!(live(&mut world, &SMALL, 200), [""; 0]);
}

/// Twelve sources of which five fit; each sends its image when requested.
#[test]
fn a_fleet_that_does_not_fit_makes_no_loop_of_images() {
    let mut world = World::with_memory(Some(900_000));
    let names: Vec<String> = (0..12).map(|name| format!("w{name}/0")).collect();
    let shims: Vec<&str> = names.iter().map(String::as_str).collect();
    for (name, shim) in (0..).zip(&shims) {
        world.publish(shim, own(name, 0, 3_000));
        assert!(world.fold.bytes() <= 900_000);
    }
    let mut images = 0;
    for _ in 0..180 {
        for name in live(&mut world, &shims, 10) {
            images += 1;
            let blocks = shims.iter().position(|shim| *shim == name).unwrap() as u64;
            world.shim(&name).next_generation();
            world.publish(&name, own(blocks, 0, 3_000));
            assert!(world.fold.bytes() <= 900_000);
        }
    }
    assert!(images <= 12, "{images} images in half an hour");
    let held = shims
        .iter()
        .filter(|shim| world.state(shim) == SourceState::Exact);
    assert!(held.count() >= 4, "the others are served");
}

#[test]
fn a_snapshot_that_is_too_large_is_read_without_its_largest_sources() {
    let mut world = World::new();
    for (name, shim) in (0..).zip(SMALL) {
        world.publish(shim, own(name, 0, 1_000));
    }
    world.publish("big/0", own(9, 0, 60_000));
    let blob = world.snapshot().unwrap();
    let mut replica = World::with_memory(Some(1_800_000));
    let room = replica.fold.room_for_another(blob.len()).unwrap();
    let restored = Restored::read_within(&blob, room).unwrap();
    drop(replica.fold.adopt(replica.now, restored));
    assert!(replica.fold.bytes() <= 1_800_000);
    assert_eq!(replica.fold.set_aside_and_returned(), (1, 0));
    assert_eq!(reason(&replica, "big/0"), Some(UnknownReason::Memory));
    for shim in SMALL {
        let shim = world.shim(shim).source.clone();
        let dump = |fold: &Fold| fold.nodes_of(&shim).map(SourceNodes::into_changes);
        assert_eq!(dump(&replica.fold), dump(&world.fold));
    }
    assert_eq!(replica.fold.room_for_another(1_800_000), None);
}

/// Short runs take other memory than long ones: what was freed is of no use before it is given
/// back.
#[test]
fn bound_is_kept_when_the_shape_of_what_is_held_changes() {
    let bound = 2_000_000;
    let mut world = World::with_memory(Some(bound));
    for round in 0..12_u64 {
        let name = format!("w{round}/0");
        for step in 0..40 {
            if round % 2 == 0 {
                world.publish(&name, own(round, step * 1_000, 1_000));
            } else {
                let single = (0..50).flat_map(|block| own(round, step * 1_000 + block, 1));
                world.publish(&name, single.collect());
            }
            assert!(world.fold.bytes() <= bound, "{}", world.fold.bytes());
        }
        assert!(world.fold.tree().nodes() > 1_000, "something is held");
    }
    assert!(world.fold.set_aside_and_returned().0 > 3);
}

#[test]
#[ignore = "long: ./test.sh --all"]
fn sources_that_join_and_leave_are_forgotten_in_the_end() {
    let mut world = World::new();
    world.fold.watch_begins();
    world.fold.watch_is_current(world.now);
    let mut most = 0;
    for round in 0..10_000_u64 {
        let worker = format!("w{round}");
        let name = format!("{worker}/0");
        // Every other one is known from the log alone, as after a restart of the indexer.
        if round % 2 == 0 {
            world.register(&worker);
        }
        world.publish(&name, own(round, 0, 20));
        world.deregister(&worker);
        world.shims.clear();
        world.log.clear();
        if round % 10 == 0 {
            world.wait(FREE_AFTER / 20);
            while world.fold.reclaim(1_000) {}
            most = most.max(world.fold.bytes());
        }
        assert!(
            world.fold.tree().nodes() <= 20 * 1_000,
            "blocks are given back"
        );
        assert!(world.fold.statuses(world.now).count() <= 4096 + 1_000);
    }
    world.wait(FREE_AFTER);
    world.wait(FREE_AFTER);
    while world.fold.reclaim(1_000) {}
    assert_eq!(world.fold.tree().nodes(), 0);
    assert!(world.fold.forgotten() > 5_000);
    assert!(world.fold.workers_after(None).count() <= 4096);
    assert!(most < 12 << 20, "{most} bytes");
    world.wait(86_400 * SECOND);
    assert_eq!(world.fold.statuses(world.now).count(), 0);
    assert!(world.fold.bytes() < 1 << 20);
}

#[test]
fn who_still_speaks_is_not_gone_though_the_registry_does_not_name_it() {
    let mut world = World::new();
    world.fold.watch_begins();
    world.fold.watch_is_current(world.now);
    world.publish("w/0", own(1, 0, 10));
    live(&mut world, &["w/0"], 1_000);
    assert_eq!(world.state("w/0"), SourceState::Exact);
    live(&mut world, &[], 700);
    assert_eq!(world.fold.tree().nodes(), 0);
}

#[test]
fn recent_removals_count() {
    let mut world = World::with_memory(None);
    world.publish("w/0", own(1, 0, 1000));
    let held = &world.shim("w/0").pairs;
    let removed = Change::Removed {
        blocks: held.iter().map(|&(prefix, _)| prefix).collect(),
        tier: Tier::Gpu,
    };
    world.publish("w/0", vec![removed]);
    world.wait(SECOND);
    let bytes = world.fold.memory.removal_bytes;
    assert!(bytes >= 1000 * size_of::<u64>(), "{bytes}");
    assert!(world.fold.bytes() > bytes);
}

/// Prompts of all workers, mixed in memory. Those of the first `staying` come in every world.
fn grown(workers: u64, staying: u64) -> World {
    let mut world = World::with_memory(None);
    world.fold.watch_begins();
    world.fold.watch_is_current(world.now);
    for round in 0..60 {
        for worker in 0..workers {
            let name = format!("w{worker}");
            if round == 0 {
                world.register(&name);
            }
            let blocks = 5 + (worker + round) % 20;
            let changes = own(worker << 8 | round, 0, blocks);
            world.publish(&format!("{name}/0"), changes);
        }
    }
    for worker in staying..workers {
        world.deregister(&format!("w{worker}"));
    }
    world.wait(FREE_AFTER);
    while world.fold.reclaim(64) {}
    world.wait(SECOND);
    world
}

#[test]
fn a_fleet_that_shrank_takes_as_much_memory_as_one_that_never_grew() {
    let (shrunk, never) = (grown(24, 3), grown(3, 3));
    assert_eq!(shrunk.fold.tree().nodes(), never.fold.tree().nodes());
    let (old, new) = (shrunk.fold.bytes(), never.fold.bytes());
    assert!(old * 5 <= new * 6, "{old} bytes, and {new}");
    // All but the fences, which stay for a day.
    let [old, new] = [&shrunk, &never].map(|world| world.fold.tree().bytes());
    assert!(old * 20 <= new * 21, "{old} bytes of blocks, and {new}");
}

/// 40 workers leave and return each 10 s.
#[test]
fn a_fleet_that_flaps_keeps_its_blocks_and_moves_none() {
    let mut world = World::with_memory(None);
    world.fold.watch_begins();
    world.fold.watch_is_current(world.now);
    let names: Vec<_> = (0..40).map(|worker| format!("w{worker}")).collect();
    for (worker, name) in (0..).zip(&names) {
        world.register(name);
        world.publish(&format!("{name}/0"), own(worker, 0, 200));
    }
    while world.fold.reclaim(64) {}
    let before = [world.fold.tree().nodes(), world.fold.tree().bytes()];
    for _ in 0..12 {
        for name in &names {
            world.deregister(name);
        }
        world.wait(5 * SECOND);
        assert!(!world.fold.reclaim(1), "nothing to free or to move");
        for name in &names {
            world.register(name);
        }
        world.wait(5 * SECOND);
        assert!(!world.fold.reclaim(1), "nothing to free or to move");
    }
    let after = [world.fold.tree().nodes(), world.fold.tree().bytes()];
    assert_eq!(before, after);
}
