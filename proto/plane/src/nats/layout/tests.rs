use super::*;
use warmroute_proto::roster::part_bytes_within;

fn layout(namespace: &str) -> Layout {
    Layout::new(&Namespace::from(namespace))
}

#[test]
fn names_are_fixed() {
    let prod = layout("prod");
    assert_eq!(prod.log(), "wr_prod");
    assert_eq!(prod.registry(), "KV_wr_prod");
    assert_eq!(prod.snapshots(), "OBJ_wr_prod");
    assert_eq!(prod.key_prefix(), "$KV.wr_prod.");
    assert_eq!(layout("a.b").log(), "wrx_613d324562");
    let [log, registry, snapshots] = prod.wanted(&InitConfig::default(), 7);
    assert_eq!(log.subjects, ["wr.prod.kv.>"]);
    assert_eq!(registry.subjects, ["$KV.wr_prod.>"]);
    assert_eq!(snapshots.subjects, ["$O.wr_prod.C.>", "$O.wr_prod.M.>"]);
}

#[test]
fn every_wrong_field_is_named() {
    let init = InitConfig::default();
    let [wanted, registry, _] = layout("prod").wanted(&init, 7);
    assert_eq!(stream_differences(&wanted, &wanted, Sizes::Of(&init)), []);
    assert_eq!(stream_differences(&registry, &registry, Sizes::Bounded), []);
    let check = |field: &str, change: &dyn Fn(&mut Config)| {
        let mut is = wanted.clone();
        change(&mut is);
        let found = stream_differences(&is, &wanted, Sizes::Bounded);
        let fields: Vec<&str> = found.iter().map(|one| one.field).collect();
        assert_eq!(fields, [field]);
    };
    check("max_bytes", &|is| is.max_bytes = -1);
    check("max_age", &|is| is.max_age = Duration::ZERO);
    check("discard", &|is| is.discard = DiscardPolicy::New);
    check("storage", &|is| is.storage = StorageType::Memory);
    check("subjects", &|is| is.subjects = vec!["wr.>".to_owned()]);
    check("allow_direct", &|is| is.allow_direct = false);
    check("duplicate_window", &|is| {
        is.duplicate_window = Duration::from_secs(120);
    });
    check("metadata", &|is| is.metadata.clear());
    check("max_msg_size", &|is| is.max_message_size = 4096);
    check("discard_new_per_subject", &|is| {
        is.discard_new_per_subject = true
    });
    check("max_consumers", &|is| is.max_consumers = 8);
    check("max_msgs_per_subject", &|is| {
        is.max_messages_per_subject = 5
    });
    check("retention", &|is| is.retention = RetentionPolicy::WorkQueue);
    check("allow_msg_counter", &|is| is.allow_message_counter = true);
    check("persist_mode", &|is| {
        is.persist_mode = Some(PersistenceMode::Async);
    });
    let mut roomy = wanted.clone();
    roomy.max_message_size = 8 << 20;
    assert_eq!(stream_differences(&roomy, &wanted, Sizes::Bounded), []);
    let mut plain = registry.clone();
    plain.allow_rollup = false;
    let found = stream_differences(&plain, &registry, Sizes::Bounded);
    assert_eq!(found[0].field, "allow_rollup_hdrs");
    assert_eq!(resized(&wanted), []);
    let mut other = wanted.clone();
    other.max_bytes += 1;
    assert_eq!(
        resized(&other)[0].to_string(),
        "wr_prod: max_bytes is 2147483649, must be 2147483648"
    );
    assert_eq!(stream_differences(&other, &wanted, Sizes::Bounded), []);
    let found = stream_differences(&other, &wanted, Sizes::Of(&init));
    assert_eq!(
        found[0].to_string(),
        "wr_prod: max_bytes is 2147483649, must be 2147483648"
    );
}

#[test]
fn bounds_grow_and_never_shrink() {
    let init = InitConfig::default();
    let [is, ..] = layout("prod").wanted(&init, 7);
    assert_eq!(enlarged(&is, &is), None);
    let larger = InitConfig {
        max_bytes: init.max_bytes * 2,
        max_age: init.max_age / 2,
        ..init
    };
    let [wanted, ..] = layout("prod").wanted(&larger, 9);
    let grown = enlarged(&is, &wanted).unwrap();
    assert_eq!(grown.max_bytes, wanted.max_bytes);
    assert_eq!(grown.max_age, is.max_age);
    assert_eq!(grown.metadata.get(NONCE), is.metadata.get(NONCE));
    assert_eq!(resized(&grown), []);
    assert_eq!(enlarged(&wanted, &is).unwrap().max_bytes, wanted.max_bytes);
}

#[test]
fn old_servers_and_small_logs_are_refused() {
    let check = |version: &str, ok: bool| {
        assert_eq!(
            server_differences(version, 1 << 20).is_empty(),
            ok,
            "{version}"
        );
    };
    check("2.15.1", true);
    check("2.11.0-beta.1", true);
    check("2.9.10", false);
    check("", false);
    assert_eq!(server_differences("2.15.1", 4096).len(), 1);
    // A page of an indexer's sources would not fit.
    assert_eq!(server_differences("2.15.1", 512 << 10).len(), 1);
    assert_eq!(server_differences("2.15.1", 600 << 10), []);
    // No part of an answer is smaller than it may be.
    assert_eq!(part_bytes_within(PAYLOAD_BYTES_MIN), PART_BYTES_MAX);
    let init = InitConfig::default();
    assert_eq!(init_differences(&init), []);
    let max_bytes = 0;
    assert_eq!(init_differences(&InitConfig { max_bytes, ..init }).len(), 1);
    let max_age = Duration::ZERO;
    assert_eq!(init_differences(&InitConfig { max_age, ..init }).len(), 1);
}
