//! The official `openai` and `anthropic` Python clients see through a router what they see at its
//! engine.

use std::process::Command;

use crate::fleet::{Engines, Flags, Fleet, Mode};

/// `./test.sh` installs it, with the clients of `conformance/requirements.txt`.
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.venv/bin/python3");
const CLIENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/conformance/clients.py");

/// Slow enough that a client closes a stream before its end.
const ENGINES: Engines = Engines {
    count: 0,
    ranks: 1,
    blocks: 2_000,
    flags: &["--itl-ms", "3", "--max-model-len", "16000"],
};

const FLAGS: Flags = Flags {
    router: &[concat!(
        "--config=",
        env!("CARGO_MANIFEST_DIR"),
        "/fixtures/conformance.toml"
    )],
    ..Flags::NONE
};

#[tokio::test(flavor = "multi_thread")]
async fn official_clients_cannot_tell_a_router_from_its_engine() {
    let mut fleet = Fleet::start(Mode::Embedded, ENGINES, FLAGS).await;
    let engine = fleet.add_engine(&ENGINES).await;
    let worker = fleet.worker_spec(engine).to_string();
    let (router, admin) = (fleet.routers[0].base(), fleet.admin(0, ""));
    let mut command = Command::new(PYTHON);
    command
        .args(["-B", CLIENTS, "--router", &router, "--admin", &admin])
        .args(["--worker", &worker])
        .env("NO_PROXY", "127.0.0.1");
    let run = tokio::task::spawn_blocking(move || command.output()).await;
    let run = run
        .unwrap()
        .expect("./test.sh installs Python packages into .venv");
    let (output, errors) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    println!("{output}");
    assert!(run.status.success(), "{output}\n{errors}");
}
