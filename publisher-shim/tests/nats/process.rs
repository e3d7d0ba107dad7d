//! `warmroute-shim` as operators run it: its life, its death, and its state directory.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};
use warmroute_process::build;
use warmroute_process::tls::EngineTls;

use crate::engine::Order;
use crate::nats_server::child::{Watchdog, first_line};
use crate::world::{DEADLINE, World, source, until};

/// The binary. Killed with its test.
struct Shim {
    child: Child,
    watchdog: Watchdog,
    url: String,
}

/// The checkpoint of the one source here.
const FILE: &str = "w=2E1/0.checkpoint";

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn scratch(name: &str) -> Scratch {
    let name = format!("shim-{}-{name}", std::process::id());
    Scratch(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
}

fn command(world: &World, state: Option<&Scratch>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute-shim"));
    command
        .args(["--nats-url", &world.server.url(), "--namespace", "t"])
        .args(["--worker-id", source().worker.as_str()])
        .args(["--worker-url", &world.url, "--advertise-url", &world.url])
        .args(["--kv-endpoint", &world.engine.live])
        .args(["--kv-replay-endpoint", &world.engine.replay])
        .args(["--host", "127.0.0.1", "--port", "0"])
        .stdin(Stdio::null());
    if let Some(state) = state {
        command.arg("--state-dir").arg(&state.0);
    }
    command
}

impl Shim {
    fn start(world: &World, state: Option<&Scratch>) -> Self {
        Self::of(&mut command(world, state))
    }

    fn of(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut shim = Self {
            watchdog: Watchdog::over(&child),
            child,
            url: String::new(),
        };
        let line = first_line(&mut shim.child);
        let ports: Value = serde_json::from_str(&line).expect("one line of JSON");
        shim.url = format!("http://127.0.0.1:{}", ports["port"]);
        shim
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let client = EngineTls::system().unwrap().client().build().unwrap();
        let url = format!("{}{path}", self.url);
        let answer = client.get(url).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// Waits until `/v1/digest` is the truth, in this state.
    async fn until_equal(&self, world: &World, state: &str) -> Value {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let (_, digest) = self.get("/v1/digest").await;
            let digest: Value = serde_json::from_str(&digest).unwrap();
            let source = &digest["sources"][0];
            let is_equal = source["digest"] == world.truth().hex();
            if is_equal && source["state"] == state && self.get("/readyz").await.0 == 200 {
                return source.clone();
            }
            assert!(Instant::now() < deadline, "{digest} {:?}", world.truth());
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn until_page(&self, path: &str, wanted: &str) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let (_, page) = self.get(path).await;
            if page.contains(wanted) {
                return;
            }
            assert!(Instant::now() < deadline, "no {wanted:?} in {page}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.unwrap().success());
    }

    fn kill(mut self) {
        self.watchdog.end();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM. The exit code, and how long it took.
    async fn terminate(mut self) -> (Option<i32>, Duration) {
        self.signal("-TERM");
        let told = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                self.watchdog.end();
                return (status.code(), told.elapsed());
            }
            assert!(told.elapsed() < DEADLINE, "it does not end");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.watchdog.end();
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

async fn until_other(file: &Path, bytes: &[u8]) {
    let is_other = || fs::read(file).unwrap() != bytes;
    until(is_other, || "no other checkpoint".to_owned()).await;
}

fn trim(world: &World, keep: usize) {
    world.engine.orders.send(Order::Trim(keep)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn row_6_killed_and_back_with_its_state_it_is_exact_and_without_it_says_partial() {
    let mut world = World::start().await;
    let state = scratch("state");
    let shim = Shim::start(&world, Some(&state));
    for token in 1..300 {
        world.store(token);
        world.store(token);
    }
    let before = shim.until_equal(&world, "exact").await;
    let (code, took) = shim.terminate().await;
    println!("a clean end took {took:?}");
    assert_eq!(code, Some(0));
    let stopped = fs::read(state.0.join(FILE)).unwrap();
    // The hot old blocks are only in the checkpoint from here on.
    trim(&world, 1);
    let shim = Shim::start(&world, Some(&state));
    for token in 1..100 {
        world.remove(token);
    }
    let after = shim.until_equal(&world, "exact").await;
    assert!(after["generation"].as_u64() > before["generation"].as_u64());
    // Killed without a word: what it did since its last checkpoint comes from the replay.
    until_other(&state.0.join(FILE), &stopped).await;
    shim.kill();
    for token in 1..100 {
        world.remove(token);
    }
    let shim = Shim::start(&world, Some(&state));
    shim.until_equal(&world, "exact").await;
    shim.kill();
    // Without the directory: only what the replay buffer has, and labelled so.
    trim(&world, 1);
    let shim = Shim::start(&world, None);
    shim.until_page("/v1/digest", "\"partial\"").await;
    shim.kill();
    // The engine restarted in between: nothing of its old life comes back.
    world.restart_engine();
    world.store(7);
    let shim = Shim::start(&world, Some(&state));
    shim.until_equal(&world, "exact").await;
    shim.kill();
    // A torn checkpoint is no reason not to start.
    let torn = state.0.join(FILE);
    fs::write(&torn, &fs::read(&torn).unwrap()[..40]).unwrap();
    let shim = Shim::start(&world, Some(&state));
    shim.until_equal(&world, "exact").await;
    let refused = "checkpoints_refused_total{worker=\"w.1\",dp_rank=\"0\"} 1";
    shim.until_page("/metrics", refused).await;
    drop(shim);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_mirrors_and_ends_cleanly_while_nats_is_away() {
    let mut world = World::start().await;
    let state = scratch("away");
    world.server.kill();
    let shim = Shim::start(&world, Some(&state));
    for token in 1..50 {
        world.store(token);
    }
    shim.until_page(
        "/metrics",
        "warmroute_shim_prefixes{worker=\"w.1\",dp_rank=\"0\"} 49",
    )
    .await;
    let (_, page) = shim.get("/metrics").await;
    assert!(page.contains(&build::metrics_text()), "{page}");
    let (code, why) = shim.get("/readyz").await;
    assert_eq!((code, &*why), (503, "NATS is out of reach, or not set up"));
    assert_eq!(shim.get("/readiness").await.0, 503);
    for path in ["/health", "/healthz", "/liveness"] {
        assert_eq!(shim.get(path).await.0, 200, "{path}");
    }
    let (code, took) = shim.terminate().await;
    println!("a clean end without NATS took {took:?}");
    assert_eq!(code, Some(0));
    assert!(state.0.join(FILE).exists());
    trim(&world, 1);
    let shim = Shim::start(&world, Some(&state));
    world.server.restart().await;
    shim.until_equal(&world, "exact").await;
    drop(shim);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_shims_publishes_and_the_other_takes_over() {
    let mut world = World::start().await;
    world.store(1);
    let first = Shim::start(&world, None);
    first.until_equal(&world, "exact").await;
    let second = Shim::start(&world, None);
    second
        .until_page("/readyz", "another shim serves this worker")
        .await;
    // Paused beyond its lease, it finds another one in its place.
    first.signal("-STOP");
    let taken = second.until_equal(&world, "exact").await;
    world.store(2);
    second.until_equal(&world, "exact").await;
    first.signal("-CONT");
    first
        .until_page("/readyz", "another shim serves this worker")
        .await;
    world.store(3);
    second.until_equal(&world, "exact").await;
    second.kill();
    let back = first.until_equal(&world, "exact").await;
    assert!(back["generation"].as_u64() > taken["generation"].as_u64());
    assert_eq!(world.fold().await.digest, world.truth());
    drop(first);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_process_on_one_state_directory_is_refused() {
    let world = World::start().await;
    let state = scratch("lock");
    let first = Shim::start(&world, Some(&state));
    let mut second = command(&world, Some(&state));
    let mut second = second
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let status = loop {
        if let Some(status) = second.try_wait().unwrap() {
            break status;
        }
        assert!(began.elapsed() < DEADLINE, "it does not end");
        sleep(Duration::from_millis(20)).await;
    };
    let mut said = String::new();
    second
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("(pid {})", first.child.id())),
        "{said}"
    );
    drop(first);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_asks_for_a_key_is_registered_with_its_models_and_without_the_key_it_is_said()
 {
    let world = World::start().await;
    world.http.lock().unwrap().key = Some("Bearer s3cret");
    let files = scratch("key");
    fs::create_dir_all(&files.0).unwrap();
    let log = files.0.join("log");
    let start = |key: &str| {
        let file = files.0.join("key");
        fs::write(&file, key).unwrap();
        let mut command = command(&world, None);
        command.arg("--engine-key-file").arg(&file);
        Shim::of(command.stderr(fs::File::create(&log).unwrap()))
    };
    let said = || fs::read_to_string(&log).unwrap();
    let shim = start("guess\n");
    let is_reported = || said().contains("cannot list the engine's models");
    until(is_reported, said).await;
    assert!(said().contains("401"), "{}", said());
    assert!(!said().contains("guess"), "{}", said());
    assert!(world.models().await.is_empty());
    shim.terminate().await;
    let shim = start("s3cret\n");
    let deadline = Instant::now() + DEADLINE;
    while world.models().await != ["m"] {
        assert!(Instant::now() < deadline, "{}", said());
        sleep(Duration::from_millis(20)).await;
    }
    shim.terminate().await;
    assert!(said().contains("engine-key-file"), "{}", said());
    assert!(!said().contains("s3cret"), "{}", said());
    world.end().await;
}
