//! `warmroute-indexer doctor` at a real fleet: well, ill in every way at once, and without its server.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde_json::{Value, json};
use tokio::time::Instant;
use warmroute_proto::bus::{NatsConfig, NatsPlane, Plane as _};
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Namespace, codec};

use super::equality::{states, until_equal};
use super::load::sequential;
use crate::fleet::{Engines, Flags, Fleet, Mode, text};

const DEADLINE: Duration = Duration::from_secs(5);

/// Findings by code: what each is about.
type Found = BTreeMap<String, Vec<String>>;

/// Of a healthy fleet it has nothing to say. Then a killed indexer, a shim that stands still, a corrupt
/// snapshot, a log made smaller by hand and a source that is partial are found, each by its code, with
/// what to do. When all is mended it says so; without a server it says that, soon.
#[tokio::test(flavor = "multi_thread")]
async fn every_illness_is_found_and_nothing_else() {
    let engines = Engines {
        count: 3,
        ranks: 1,
        blocks: 600,
        flags: &["--profile", "instant", "--buffer-steps", "20"],
    };
    let mode = Mode::Nats {
        indexers: 2,
        routers: 1,
    };
    let flags = Flags {
        indexer: &["--snapshot-every-secs", "1"],
        ..Flags::default()
    };
    let fleet = Fleet::start(mode, engines, flags).await;
    sequential(&fleet, 40, 90).await;
    until_equal(&fleet).await;
    let plane = connect(&fleet).await;
    until_snapshot(&plane).await;
    let (code, found) = look(&fleet).await;
    assert_eq!((code, found), (Some(0), Found::new()), "a healthy fleet");

    lose_history(&fleet).await;
    let stopped = &fleet.parts().shims[0];
    stopped.signal("STOP");
    fleet.parts().indexers[1].kill();
    let name = corrupt_newest(&plane).await;
    let bound = resize_log(&plane, 4096).await;
    let (code, found) = look(&fleet).await;
    assert_eq!(code, Some(1));
    for (code, about) in [
        ("indexers_missing", "1 of 2 answer"),
        ("shim_silent", "worker-0/0: nothing within"),
        ("snapshot_unreadable", name.as_str()),
        ("stream_resized", "wr_prod: max_bytes is 4096"),
        ("source_partial", "worker-2/0: "),
    ] {
        let about_all = found.get(code);
        let is_there = about_all.is_some_and(|all| all.iter().any(|one| one.contains(about)));
        assert!(is_there, "{code} about {about} in {found:?}");
    }
    assert!(!found.contains_key("indexers_differ"), "{found:?}");
    assert!(!found.contains_key("mirror_differs"), "{found:?}");

    stopped.signal("CONT");
    resize_log(&plane, bound).await;
    fleet.parts().indexers[1].restart().await;
    heal_partial(&fleet).await;
    let mended = async |fleet: &Fleet| look(fleet).await == (Some(0), Found::new());
    fleet.until("the doctor has nothing to say", mended).await;

    fleet.parts().server.lock().await.kill();
    let begun = Instant::now();
    let command = ["doctor", "--wait-secs", "1"];
    // The server's handle is free again: a command takes its address from it.
    let (code, said) = fleet.command("doctor", &command).await;
    println!("without a server: {code:?} after {:?}", begun.elapsed());
    assert_eq!((code, said.as_str()), (Some(2), ""));
}

/// Exit code and findings; that the page has them too.
async fn look(fleet: &Fleet) -> (Option<i32>, Found) {
    let command = ["doctor", "--json", "--expect-indexers", "2"];
    let (code, said) = fleet.command("doctor", &command).await;
    let report: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}"));
    println!("{report:#}");
    assert_eq!(report["needs_somebody"], json!(code == Some(1)));
    let mut found = Found::new();
    for finding in report["findings"].as_array().expect("findings") {
        assert!(!text(&finding["advice"]).is_empty());
        let about = finding["about"].as_array().expect("what it is about");
        let about = about.iter().map(text).collect();
        found.insert(text(&finding["code"]), about);
    }
    (code, found)
}

async fn connect(fleet: &Fleet) -> NatsPlane {
    let url = fleet.parts().server.lock().await.url();
    let config = NatsConfig::new(url, Namespace::from("prod"), "test");
    NatsPlane::connect(config).await.unwrap()
}

async fn pointer(plane: &NatsPlane) -> Option<SnapshotPointer> {
    let key = Subjects::new(&Namespace::from("prod")).snapshot_pointer_key();
    let entry = plane.get(key).await.unwrap()?;
    Some(codec::decode(&entry.value).unwrap())
}

/// The newest snapshot has everything: none comes while nothing happens.
async fn until_snapshot(plane: &NatsPlane) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let last = plane.log_status().await.unwrap().last;
        let newest = pointer(plane).await.map(|pointer| pointer.newest);
        if newest.is_some_and(|newest| newest.at.position == last) {
            return;
        }
        assert!(Instant::now() < end, "no snapshot of all");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The third shim comes back without what its engine's replay buffer has forgotten.
async fn lose_history(fleet: &Fleet) {
    let shim = &fleet.parts().shims[2];
    shim.kill();
    shim.restart().await;
    until_state(fleet, "partial").await;
}

/// What is missing goes with the engine's cache.
async fn heal_partial(fleet: &Fleet) {
    let reset = fleet.engine(2, "/reset_prefix_cache");
    fleet.http.post(reset).send().await.unwrap();
    // The engine tells of it with its next batch.
    let body = json!({"model": "mock", "prompt": "x ".repeat(100), "max_tokens": 1});
    let url = fleet.engine(2, "/v1/completions");
    let answer = fleet.http.post(url).json(&body).send().await.unwrap();
    assert!(answer.status().is_success(), "{}", answer.status());
    until_state(fleet, "exact").await;
}

async fn until_state(fleet: &Fleet, word: &str) {
    let index = fleet.indexes().remove(0);
    let is_so = async |fleet: &Fleet| {
        let states = states(fleet, &index).await;
        states.get("worker-2/0").is_some_and(|state| state == word)
    };
    fleet.until(word, is_so).await;
}

/// One byte of the newest snapshot is another one. Returns its name.
async fn corrupt_newest(plane: &NatsPlane) -> String {
    until_snapshot(plane).await;
    let name = pointer(plane).await.unwrap().newest.name;
    let blob = plane.get_snapshot(name.clone()).await.unwrap().unwrap();
    let mut blob = BytesMut::from(blob);
    let middle = blob.len() / 2;
    blob[middle] ^= 1;
    plane.delete_snapshot(name.clone()).await.unwrap();
    let put = plane.put_snapshot(name.clone(), blob.freeze());
    put.await.unwrap();
    name
}

/// Gives the log another bound, as an operator's tools do. Returns the one before.
async fn resize_log(plane: &NatsPlane, max_bytes: i64) -> i64 {
    let ask = async |api: &str, body: Bytes| -> Value {
        let subject = format!("$JS.API.STREAM.{api}.wr_prod");
        let answer = plane.request(subject, body, DEADLINE).await.unwrap();
        serde_json::from_slice(&answer).unwrap()
    };
    let mut config = ask("INFO", Bytes::new()).await["config"].take();
    let before = config["max_bytes"].as_i64().unwrap();
    config["max_bytes"] = json!(max_bytes);
    let answer = ask("UPDATE", config.to_string().into()).await;
    assert_eq!(answer["config"]["max_bytes"], json!(max_bytes), "{answer}");
    before
}
