//! A shim in a process of its own, whose engine is behind TLS.

use std::fs;

use serde_json::Value;

use super::certificates::Authority;
use super::gate::TlsGate;
use super::{ENGINES, SECRET, prompt};
use crate::fleet::traffic::send;
use crate::fleet::{Engines, Flags, Fleet, Mode};

async fn worker(fleet: &Fleet) -> Value {
    let page = fleet.get(fleet.admin(0, "/workers")).await;
    page["workers"][0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shim_with_the_engines_authority_registers_it_over_nats() {
    let mode = Mode::Nats {
        indexers: 1,
        routers: 0,
    };
    let flags = Flags {
        shim: &[
            "--engine-ca",
            "PLACE/shim-ca.crt",
            "--engine-key-file",
            "PLACE/key",
        ],
        router: &["--config", "PLACE/router.toml"],
        ..Flags::default()
    };
    let none = Engines {
        count: 0,
        ..ENGINES
    };
    let mut fleet = Fleet::start(mode, none, flags).await;
    let (authority, stranger) = (Authority::new(), Authority::new());
    let dir = fleet.file("");
    authority.write(&dir, "router-ca.crt");
    fs::write(dir.join("key"), SECRET).unwrap();
    let settings = "[engines]\nca = \"router-ca.crt\"\nkey_file = \"key\"\n\
        authorization = \"replace\"\n[admin]\nexplain_headers = \"all\"\n";
    fs::write(dir.join("router.toml"), settings).unwrap();
    fleet.add_router().await;
    let index = fleet.add_engine(&ENGINES).await;
    let gate = TlsGate::start(&authority.issue(), &dir, &fleet.engine(index, "")).await;

    // Another authority: the engine's facts cannot be read.
    stranger.write(&dir, "shim-ca.crt");
    fleet.add_shim_at(index, &ENGINES, &gate.url()).await;
    let says_why = async |fleet: &Fleet| {
        let log = fleet.parts().shims[0].logged();
        log.contains("UnknownIssuer")
    };
    fleet.until("the shim names the reason", says_why).await;
    assert_eq!(worker(&fleet).await, Value::Null);
    assert!(gate.requests().is_empty());

    authority.write(&dir, "shim-ca.crt");
    fleet.parts().shims[0].restart().await;
    let is_healthy = async |fleet: &Fleet| worker(fleet).await["health"] == "healthy";
    fleet.until("the worker is healthy", is_healthy).await;
    let is_credited = async |fleet: &Fleet| {
        let answer = send(fleet, "/v1/completions", &prompt(2)).await;
        let overlap = answer.headers().get("x-warmroute-overlap-blocks").cloned();
        answer.text().await.unwrap();
        overlap.is_some_and(|overlap| overlap != "0")
    };
    fleet.until("the prompt is credited", is_credited).await;
    let sent = gate.requests();
    let key = format!("authorization: bearer {SECRET}");
    for path in ["GET /metrics", "GET /v1/models", "POST /v1/completions"] {
        let mut heads = sent.iter().filter(|head| head.starts_with(path));
        let is_authorized = |head: &String| head.to_lowercase().contains(&key);
        assert!(heads.any(is_authorized), "{path}");
    }

    // The shim alone reads the metrics.
    fs::write(dir.join("key"), "another-key").unwrap();
    let follows = async |_: &Fleet| {
        let is_new = |head: &String| {
            let head = head.to_lowercase();
            head.starts_with("get /metrics") && head.contains("authorization: bearer another-key")
        };
        gate.requests().iter().any(is_new)
    };
    fleet.until("the shim sends the new key", follows).await;
}
