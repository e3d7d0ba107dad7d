use warmroute_proto::registry::Lora;
use warmroute_proto::{Generation, RouterId};

use super::*;
use crate::route::{Core, CoreConfig, Knobs, RouteRefusal};

fn fleet() -> Arc<Fleet> {
    let core = Core::new(CoreConfig {
        knobs: Knobs::default(),
        router: RouterId([0; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    Fleet::new(SharedCore::new(core), None)
}

fn entry(worker: &str, block_tokens: u32) -> WorkerEntry {
    WorkerEntry {
        worker: worker.into(),
        url: format!("http://{worker}:1"),
        models: vec!["m".to_owned()],
        loras: vec![Lora {
            name: "a".to_owned(),
            parent: Some("m".to_owned()),
        }],
        ranks: 1,
        block_size: BlockSize::new(block_tokens),
        blocks_per_rank: None,
        max_model_len: Some(100),
        main_attention_only: true,
        version: "0".to_owned(),
    }
}

fn checks(chat: Check) -> Checks {
    Checks {
        chat,
        chat_with_tools: Check::skipped("x"),
        text: Check::Passed,
        block_size: Check::Passed,
    }
}

impl Fleet {
    fn pass(&self, worker: &str, chat: Check) {
        let worker = WorkerId::from(worker);
        let life = self.members()[&worker].life;
        self.checked(&worker, life, checks(chat));
    }
}

fn candidates(fleet: &Fleet) -> Result<usize, RouteRefusal> {
    let core = fleet.desk.core();
    core.fleet().candidates("m").map(<[_]>::len)
}

/// At the address of [`entry`].
fn see(fleet: &Fleet, worker: &str, sight: Sight) {
    let url = format!("http://{worker}:1");
    fleet.see(&worker.into(), &url, sight, Instant::now());
}

#[test]
fn a_lapsed_registration_removes_nobody_who_answers() {
    let fleet = fleet();
    fleet.put(entry("w", 16), Instant::now());
    see(&fleet, "w", Sight::CheckPassed);
    fleet.gone(&"w".into());
    see(&fleet, "w", Sight::CheckPassed);
    assert_eq!(candidates(&fleet), Ok(1));
    see(&fleet, "w", Sight::ConnectFailed);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllUnhealthy));
    let later = Instant::now() + FORGET_AFTER * 2;
    fleet.see(&"w".into(), "http://w:1", Sight::ConnectFailed, later);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::NoWorkers));
    assert!(fleet.snapshot().is_empty());
}

#[test]
fn a_drain_is_older_than_its_worker_and_outlives_it() {
    let fleet = fleet();
    fleet.set_drain(&"w".into(), DrainState::Draining);
    fleet.put(entry("w", 16), Instant::now());
    see(&fleet, "w", Sight::CheckPassed);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllDraining));
    // Gone, forgotten, and back at another address.
    fleet.gone(&"w".into());
    see(&fleet, "w", Sight::ConnectFailed);
    let later = Instant::now() + FORGET_AFTER * 2;
    fleet.see(&"w".into(), "http://w:1", Sight::ConnectFailed, later);
    assert!(fleet.snapshot().is_empty());
    let mut moved = entry("w", 16);
    moved.url = "http://elsewhere:1".to_owned();
    fleet.put(moved, later);
    fleet.see(&"w".into(), "http://elsewhere:1", Sight::CheckPassed, later);
    assert_eq!(candidates(&fleet), Err(RouteRefusal::AllDraining));
    fleet.set_drain(&"w".into(), DrainState::Serving);
    assert_eq!(candidates(&fleet), Ok(1));
}

#[test]
fn an_address_is_its_last_workers() {
    let fleet = fleet();
    let at_once = |worker: &str| {
        let mut entry = entry(worker, 16);
        entry.url = "http://w:1".to_owned();
        entry
    };
    let names = || -> Vec<String> {
        let members = fleet.snapshot();
        members.iter().map(|m| m.entry.worker.to_string()).collect()
    };
    fleet.put(at_once("w"), Instant::now());
    see(&fleet, "w", Sight::CheckPassed);
    fleet.gone(&"w".into());
    assert_eq!(
        fleet.addresses()[0].must_list,
        ["m"],
        "nobody vouches for it"
    );
    // The same engine under another name, or another one at the same address.
    fleet.put(at_once("v"), Instant::now());
    assert_eq!(names(), ["v"]);
    assert!(fleet.addresses()[0].must_list.is_empty());
    // The other order: the old name's lease runs out after the new one came.
    fleet.put(at_once("u"), Instant::now());
    assert_eq!(names(), ["u", "v"], "nobody can tell which");
    fleet.gone(&"v".into());
    assert_eq!(names(), ["u"]);
    // Away for a moment, and back as it was.
    fleet.gone(&"u".into());
    fleet.put(at_once("u"), Instant::now());
    assert!(fleet.addresses()[0].must_list.is_empty());
}

#[test]
fn a_registered_worker_is_never_forgotten() {
    let fleet = fleet();
    fleet.put(entry("w", 16), Instant::now());
    let later = Instant::now() + FORGET_AFTER * 2;
    for _ in 0..3 {
        fleet.see(&"w".into(), "http://w:1", Sight::ConnectFailed, later);
    }
    assert_eq!(fleet.snapshot().len(), 1);
}

#[test]
fn a_model_is_trusted_once_one_worker_showed_it_and_until_one_contradicts() {
    let fleet = fleet();
    for worker in ["v", "w"] {
        fleet.put(entry(worker, 16), Instant::now());
        see(&fleet, worker, Sight::CheckPassed);
    }
    let trusted = || {
        let view = fleet.view();
        (view.models["m"].chat, view.models["a"].text)
    };
    assert_eq!(trusted(), (false, false));
    fleet.pass("v", Check::Passed);
    assert_eq!(trusted(), (true, true));
    fleet.pass("w", Check::failed("differs"));
    assert_eq!(trusted(), (false, true));
    // It comes back as another life: what it showed before is void.
    see(&fleet, "w", Sight::ConnectFailed);
    see(&fleet, "w", Sight::CheckPassed);
    assert_eq!(trusted(), (true, true));
    assert_eq!(fleet.unchecked().len(), 1);
}

#[test]
fn what_is_seen_at_a_former_address_is_void() {
    let fleet = fleet();
    fleet.put(entry("w", 16), Instant::now());
    let mut moved = entry("w", 16);
    moved.url = "http://elsewhere:1".to_owned();
    fleet.put(moved, Instant::now());
    // The answer that was asked for before it moved.
    see(&fleet, "w", Sight::CheckPassed);
    assert!(!fleet.snapshot()[0].health.usable());
    let seen = |sight| fleet.see(&"w".into(), "http://elsewhere:1", sight, Instant::now());
    seen(Sight::CheckPassed);
    see(&fleet, "w", Sight::ConnectFailed);
    assert!(fleet.snapshot()[0].health.usable());
    seen(Sight::ConnectFailed);
    assert!(!fleet.snapshot()[0].health.usable());
}

#[test]
fn a_check_of_a_former_life_is_void() {
    let fleet = fleet();
    fleet.put(entry("w", 16), Instant::now());
    see(&fleet, "w", Sight::CheckPassed);
    let life = fleet.snapshot()[0].life;
    see(&fleet, "w", Sight::ConnectFailed);
    see(&fleet, "w", Sight::CheckPassed);
    fleet.checked(&"w".into(), life, checks(Check::Passed));
    assert!(!fleet.view().models["m"].chat);
}

/// What an operator says of the blocks is said of all workers, whatever one of them tells.
#[test]
fn blocks_are_as_long_as_the_operator_says() {
    let told = Fleet::new(Arc::clone(&fleet().desk), BlockSize::new(16));
    told.put(entry("w", 32), Instant::now());
    let learned = fleet();
    learned.put(entry("w", 32), Instant::now());
    for model in ["m", "a"] {
        let size = |fleet: &Fleet| fleet.view().models[model].block_size;
        assert_eq!(size(&told), BlockSize::new(16), "{model}");
        assert_eq!(size(&learned), BlockSize::new(32), "{model}");
    }
}

#[test]
fn a_renewed_lease_changes_nothing() {
    let fleet = fleet();
    fleet.put(entry("w", 16), Instant::now());
    see(&fleet, "w", Sight::CheckPassed);
    fleet.pass("w", Check::Passed);
    fleet.put(entry("w", 16), Instant::now());
    assert!(fleet.view().models["m"].chat);
    fleet.put(entry("w", 32), Instant::now());
    assert!(!fleet.view().models["m"].chat);
}
