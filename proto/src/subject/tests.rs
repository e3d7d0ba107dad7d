use proptest::prelude::*;

use super::*;

#[test]
fn names_become_one_token() {
    let check = |name: &str, token: &str| {
        assert_eq!(encode_name(name), token);
        assert_eq!(decode_name(token).as_deref(), Some(name));
    };
    check("worker-0", "worker-0");
    check("w.0.example:8000", "w=2E0=2Eexample=3A8000");
    check("", "=");
    check("=", "=3D");
    check("*>", "=2A=3E");
    check("größe", "gr=C3=B6=C3=9Fe");
    for foreign in ["w.0", "w=2e0", "=4", "=41", "=FF", "w 0"] {
        assert_eq!(decode_name(foreign), None, "{foreign}");
    }
}

#[test]
fn subjects_are_fixed() {
    let subjects = Subjects::new(&Namespace::from("prod"));
    let source = Source {
        worker: WorkerId::from("w.0"),
        dp_rank: DpRank(3),
    };
    assert_eq!(subjects.records(&source), "wr.prod.kv.w=2E0.3");
    assert_eq!(subjects.heartbeat(&source), "wr.prod.hb.w=2E0.3");
    assert_eq!(subjects.resync(&source.worker), "wr.prod.resync.w=2E0");
    assert_eq!(subjects.query(), "wr.prod.query");
    assert_eq!(subjects.query_at("i.0"), "wr.prod.query.i=2E0");
    assert_eq!(subjects.load(), "wr.prod.load");
    assert_eq!(subjects.tenant_reports(), "wr.prod.load.tenants");
    assert_eq!(subjects.worker_key(&source.worker), "wr.prod.worker.w=2E0");
    assert_eq!(subjects.shim_key(&source.worker), "wr.prod.shim.w=2E0");
    assert_eq!(subjects.indexer_key("i.0"), "wr.prod.indexer.i=2E0");
    let id = subjects.key_indexer("wr.prod.indexer.i=2E0");
    assert_eq!(id.as_deref(), Some("i.0"));
    assert_eq!(subjects.snapshot_pointer_key(), "wr.prod.snapshot.newest");
    assert_eq!(subjects.snapshot_lease_key(), "wr.prod.snapshot.writer");
    let key = subjects.generation_key(&source);
    assert_eq!(key, "wr.prod.generation.w=2E0.3");
    assert_eq!(subjects.key_generation(&key).as_ref(), Some(&source));
    assert_eq!(
        subjects.key_shim("wr.prod.shim.w=2E0").as_ref(),
        Some(&source.worker)
    );
    assert!(key.starts_with(&subjects.all_keys()));
    let put = subjects.registry_write(&key);
    assert_eq!(put.as_deref(), Some("wr.prod.core.put.generation.w=2E0.3"));
    assert_eq!(subjects.written_key(&put.unwrap()), Some(key));
    assert_eq!(subjects.registry_write("wr.test.generation.w.0"), None);
    assert_eq!(subjects.written_key("wr.test.core.put.x"), None);
    assert_eq!(subjects.all_registry_writes(), "wr.prod.core.put.>");
    assert_eq!(subjects.beacons(), "wr.prod.core.beacon");
    assert_eq!(subjects.registry_pages(), "wr.prod.core.pages");
    let pages = subjects.registry_pages_of(PeerId(255));
    assert_eq!(pages, "wr.prod.core.pages.00000000000000ff");
    assert_eq!(subjects.round_trip(), "wr.prod.core.ping");
    let parsed = subjects.heartbeat_source("wr.prod.hb.w=2E0.3");
    assert_eq!(parsed.as_ref(), Some(&source));
    for foreign in ["wr.prod.kv.w=2E0.3", "wr.prod.hb.w.3.0", "wr.test.hb.w.3"] {
        assert_eq!(subjects.heartbeat_source(foreign), None, "{foreign}");
    }
    assert_eq!(subjects.record_source("wr.prod.kv.w=2E0.3"), Some(source));
    for foreign in [
        "wr.prod.kv.w.3.0",
        "wr.prod.kv.w.03",
        "wr.prod.kv.w.-1",
        "wr.prod.kv.w.1024",
        "wr.prod.kv.w",
        "wr.test.kv.w.3",
        "wr.prod.kv..3",
    ] {
        assert_eq!(subjects.record_source(foreign), None, "{foreign}");
    }
    assert!(subjects.record_source("wr.prod.kv.w.1023").is_some());
}

#[test]
fn subjects_of_routers_are_fixed() {
    let subjects = Subjects::new(&Namespace::from("prod"));
    let router = RouterId(*b"0123456789abcdef");
    let hex = "30313233343536373839616263646566";
    assert_eq!(
        subjects.load_requests(router),
        format!("wr.prod.load.{hex}")
    );
    let key = subjects.router_key(router);
    assert_eq!(key, format!("wr.prod.router.{hex}"));
    assert_eq!(subjects.key_router(&key), Some(router));
    let demotions = subjects.demotion_key(router);
    assert_eq!(demotions, format!("wr.prod.router.{hex}.demoted"));
    assert_eq!(subjects.key_demotion(&demotions), Some(router));
    assert_eq!(subjects.key_demotion(&key), None);
    assert_eq!(subjects.key_router(&demotions), None);
    let facts = subjects.facts_key(router);
    assert_eq!(facts, format!("wr.prod.router.{hex}.facts"));
    assert_eq!(subjects.key_facts(&facts), Some(router));
    for foreign in [
        "wr.prod.router.",
        "wr.prod.router.30",
        "wr.prod.router.3031323334353637383961626364656G",
        "wr.prod.router.3031323334353637383961626364656F",
        "wr.test.router.30313233343536373839616263646566",
    ] {
        assert_eq!(subjects.key_router(foreign), None, "{foreign}");
    }
}

#[test]
fn filters_match_by_token() {
    assert!(matches("a.b", "a.b"));
    assert!(matches("a.*.c", "a.b.c"));
    assert!(matches("a.>", "a.b.c"));
    assert!(!matches("a.>", "a"));
    assert!(!matches("a.b", "a.b.c"));
    assert!(!matches("a.*", "b.b"));
}

proptest! {
    #[test]
    fn encoding_is_a_bijection(name in ".{0,40}", token in "[-A-Za-z0-9_=.]{0,12}") {
        let encoded = encode_name(&name);
        prop_assert!(encoded.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)));
        let decoded = decode_name(&encoded);
        prop_assert_eq!(decoded.as_deref(), Some(name.as_str()));
        if let Some(name) = decode_name(&token) {
            prop_assert_eq!(encode_name(&name), token);
        }
    }
}
