use std::sync::mpsc;
use std::thread;

use warmroute_proto::load::SlotEnd;
use warmroute_proto::{BlockSize, Generation};

use super::*;
use crate::route::{CoreCounts, Health, Knobs, Prompt};
use crate::testing::{ROUTER, core, worker_entry};

/// Timeout of a broken test.
const SOON: Duration = Duration::from_secs(60);

fn shared() -> Arc<SharedCore> {
    let mut core = core(ROUTER, Knobs::default());
    core.set_workers(&[worker_entry("w", 16)]);
    core.set_health(&"w".into(), Health::Healthy);
    SharedCore::new(core)
}

fn admit(core: &Arc<SharedCore>) -> SlotHold {
    let prompt = Prompt::opaque(100, BlockSize::new(16).unwrap());
    let ask = RouteRequest {
        model: "m",
        prompt: &prompt,
        exclude: &[],
        leg: crate::route::Leg::Whole,
    };
    let (admitted, _) = core.admit(&ask, None).unwrap();
    SlotHold::new(Arc::clone(core), admitted.slot)
}

fn active(core: &SharedCore) -> u64 {
    core.core().active_requests(&"w".into())
}

#[test]
fn a_slots_end_waits_for_no_user_of_the_core_and_the_next_user_sees_it() {
    let core = shared();
    let (kept, mut ended) = (admit(&core), admit(&core));
    let held = core.core();
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        ended.complete();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(SOON).unwrap();
    assert_eq!(held.active_requests(&"w".into()), 2);
    drop(held);
    assert_eq!(active(&core), 1);
    drop(kept);
    assert_eq!(active(&core), 0);
}

#[test]
fn events_that_wait_for_a_user_are_bounded() {
    let core = shared();
    let mut slot = admit(&core);
    for _ in 0..NOTED_MAX * 10 {
        slot.grow(1);
        assert!(core.noted().len() < NOTED_MAX);
    }
}

#[test]
fn what_was_noted_precedes_the_clock_and_a_new_incarnation() {
    const LONG: Duration = Duration::from_secs(3600);
    let core = shared();
    let (mut begun, mut ended) = (admit(&core), admit(&core));
    begun.first_token();
    ended.complete();
    core.core().tick(Instant::now().into_std() + LONG);
    assert_eq!(core.core().counts().stalls, 0);
    begun.complete();
    core.core().begin(Generation(2));
    assert_eq!(core.core().digest(ROUTER).count, 0);
    assert_eq!(core.core().counts().ignored, CoreCounts::default().ignored);
}

#[test]
fn slots_of_many_threads_are_all_freed() {
    const THREADS: usize = 4;
    const REQUESTS: usize = 2000;
    let core = shared();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..REQUESTS {
                    let mut slot = admit(&core);
                    slot.first_token();
                    slot.grow(2);
                    slot.complete();
                }
            });
        }
    });
    let state = core.core();
    assert_eq!(state.active_requests(&"w".into()), 0);
    assert_eq!(state.digest(ROUTER).count, 0);
    let counts = state.counts();
    assert_eq!(counts.freed.completed, (THREADS * REQUESTS) as u64);
    assert_eq!(counts.ignored, CoreCounts::default().ignored);
}

#[test]
fn the_end_of_a_slot_that_is_not_open_disturbs_no_other() {
    let core = shared();
    let slot = admit(&core);
    let (counter, end) = (slot.counter() + 7, SlotEnd::Completed);
    core.note(SlotEvent::End { counter, end });
    assert_eq!(active(&core), 1);
    drop(slot);
    assert_eq!(active(&core), 0);
}
