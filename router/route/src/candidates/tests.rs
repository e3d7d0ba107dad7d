use super::*;
use warmroute_proto::BlockSize;
use warmroute_proto::registry::Lora;

fn entry(name: &str) -> WorkerEntry {
    WorkerEntry {
        models: vec!["base".into()],
        loras: vec![Lora {
            name: "tuned".into(),
            parent: Some("base".into()),
        }],
        ranks: 2,
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(name, format!("http://{name}:8000"))
    }
}

#[derive(Default)]
struct Fixture {
    fleet: WorkerDirectory,
    table: SourceTable,
}

impl Fixture {
    fn with(entries: &[WorkerEntry]) -> Self {
        let mut fixture = Self::default();
        fixture.fleet.set_workers(&mut fixture.table, entries);
        fixture
    }

    fn health(&mut self, worker: &str, health: Health) -> bool {
        self.fleet
            .set_health(&mut self.table, &worker.into(), health)
    }

    fn drain(&mut self, worker: &str) {
        self.fleet
            .set_drain(&mut self.table, &worker.into(), DrainState::Draining);
    }

    /// The workers for a leg.
    fn workers_for(&self, leg: Leg) -> Result<String, RouteRefusal> {
        let candidates = self.fleet.candidates("base", leg)?;
        let names = candidates.iter().map(|c| c.source.worker.as_str());
        Ok(names.collect::<Vec<_>>().join(" "))
    }

    fn names(&self, model: &str) -> Result<Vec<String>, RouteRefusal> {
        let candidates = self.fleet.candidates(model, Leg::Whole)?;
        Ok(candidates.iter().map(|c| c.source.to_string()).collect())
    }
}

#[test]
fn every_rank_of_a_healthy_worker_is_a_candidate() {
    let mut fixture = Fixture::with(&[entry("b"), entry("a")]);
    fixture.health("a", Health::Healthy);
    fixture.health("b", Health::Healthy);
    let names = fixture.names("base").unwrap();
    assert_eq!(names, ["a/0", "a/1", "b/0", "b/1"]);
    assert_eq!(fixture.names("tuned").unwrap(), names);
}

#[test]
fn unchecked_workers_serve_only_while_none_is_healthy() {
    let mut fixture = Fixture::with(&[entry("a"), entry("b")]);
    assert_eq!(fixture.names("base").unwrap().len(), 4);
    fixture.health("b", Health::Healthy);
    assert_eq!(fixture.names("base").unwrap(), ["b/0", "b/1"]);
    fixture.health("b", Health::Unhealthy);
    assert_eq!(fixture.names("base").unwrap(), ["a/0", "a/1"]);
}

#[test]
fn every_reason_to_refuse_is_distinct() {
    assert_eq!(
        Fixture::default().names("base"),
        Err(RouteRefusal::NoWorkers)
    );
    let mut fixture = Fixture::with(&[entry("a")]);
    assert_eq!(
        fixture.names("other"),
        Err(RouteRefusal::UnknownModel("other".into()))
    );
    fixture.health("a", Health::Unhealthy);
    assert_eq!(fixture.names("base"), Err(RouteRefusal::AllUnhealthy));
    assert!(
        fixture.fleet.model("base").is_ok(),
        "it is listed all the same"
    );
    fixture.health("a", Health::Healthy);
    fixture.drain("a");
    assert_eq!(fixture.names("base"), Err(RouteRefusal::AllDraining));
}

#[test]
fn an_adapters_name_seeds_its_blocks_and_its_base_has_the_tokenizer() {
    let fixture = Fixture::with(&[entry("a")]);
    let tuned = fixture.fleet.model("tuned").unwrap();
    assert_eq!((tuned.kind, tuned.base.as_str()), (ModelKind::Lora, "base"));
    assert_eq!(tuned.seed(None), Seed::new(Some("tuned"), None));
    assert_eq!(
        tuned.seed(Some("salt")),
        Seed::new(Some("tuned"), Some("salt"))
    );
    let base = fixture.fleet.model("base").unwrap();
    assert_eq!(base.seed(None), Seed::PLAIN);
    let names: Vec<_> = fixture
        .fleet
        .models()
        .map(|model| model.name.as_str())
        .collect();
    assert_eq!(names, ["base", "tuned"]);
}

#[test]
fn an_adapter_without_a_parent_belongs_to_its_workers_model() {
    let mut orphan = entry("a");
    orphan.loras[0].parent = None;
    let fixture = Fixture::with(&[orphan]);
    assert_eq!(fixture.fleet.model("tuned").unwrap().base, "base");
}

#[test]
fn a_name_that_is_base_and_adapter_is_a_base_model() {
    let mut plain = entry("a");
    plain.models = vec!["tuned".into()];
    plain.loras.clear();
    let fixture = Fixture::with(&[plain, entry("b")]);
    assert_eq!(fixture.fleet.model("tuned").unwrap().kind, ModelKind::Base);
    assert_eq!(fixture.names("tuned").unwrap(), ["a/0", "a/1"]);
}

#[test]
fn health_survives_a_new_entry_but_not_a_new_url_and_a_drain_survives_both() {
    let mut fixture = Fixture::with(&[entry("a")]);
    assert!(fixture.health("a", Health::Unhealthy));
    assert!(!fixture.health("a", Health::Unhealthy), "no news");
    fixture.fleet.set_workers(&mut fixture.table, &[entry("a")]);
    assert_eq!(fixture.names("base"), Err(RouteRefusal::AllUnhealthy));
    let mut moved = entry("a");
    moved.url = "http://elsewhere".into();
    fixture
        .fleet
        .set_workers(&mut fixture.table, std::slice::from_ref(&moved));
    assert!(fixture.names("base").is_ok());
    fixture.drain("a");
    moved.url = "http://elsewhere.still".into();
    fixture.fleet.set_workers(&mut fixture.table, &[moved]);
    assert_eq!(fixture.names("base"), Err(RouteRefusal::AllDraining));
}

#[test]
fn a_worker_that_left_has_no_marks_and_no_models() {
    let mut fixture = Fixture::with(&[entry("a")]);
    fixture.fleet.set_workers(&mut fixture.table, &[]);
    assert!(!fixture.health("a", Health::Healthy));
    assert_eq!(fixture.fleet.models().count(), 0);
    assert_eq!(fixture.names("base"), Err(RouteRefusal::NoWorkers));
}

fn with_role(name: &str, role: WorkerRole) -> WorkerEntry {
    WorkerEntry {
        role,
        ranks: 1,
        ..entry(name)
    }
}

#[test]
fn a_role_decides_which_leg_a_worker_takes() {
    use WorkerRole::{Both, Decode, Prefill};
    let all = [
        with_role("b", Both),
        with_role("d", Decode),
        with_role("p", Prefill),
    ];
    let mut fixture = Fixture::with(&all);
    assert_eq!(fixture.workers_for(Leg::Whole).unwrap(), "b d");
    assert_eq!(fixture.workers_for(Leg::Prefill).unwrap(), "p");
    assert_eq!(fixture.workers_for(Leg::Decode).unwrap(), "d");
    fixture.health("d", Health::Unhealthy);
    assert_eq!(fixture.workers_for(Leg::Decode).unwrap(), "b");
    fixture.health("p", Health::Unhealthy);
    let refused = fixture.workers_for(Leg::Prefill);
    assert_eq!(refused, Err(RouteRefusal::AllUnhealthy));
    assert_eq!(fixture.workers_for(Leg::Whole).unwrap(), "b");
}

#[test]
fn a_fleet_without_one_of_the_roles_names_what_is_missing() {
    let fixture = Fixture::with(&[entry("a")]);
    for leg in [Leg::Prefill, Leg::Decode] {
        assert_eq!(fixture.workers_for(leg), Err(RouteRefusal::NoPrefill));
    }
    let fixture = Fixture::with(&[with_role("p", WorkerRole::Prefill)]);
    let refused = fixture.workers_for(Leg::Whole);
    assert_eq!(refused, Err(RouteRefusal::OnlyPrefill));
    assert_eq!(fixture.workers_for(Leg::Prefill).unwrap(), "p");
}
