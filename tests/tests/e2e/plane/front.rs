//! A load balancer in front, configured as `deploy/` ships it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use futures_util::StreamExt as _;
use tokio::time::Instant;

use super::streams::{body, open};
use crate::fleet::{Engines, Flags, Fleet, Mode, free_port};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    HaProxy,
    Nginx,
}

impl Kind {
    const fn program(self) -> &'static str {
        match self {
            Self::HaProxy => "haproxy",
            Self::Nginx => "nginx",
        }
    }

    /// Distributions keep them where only root looks.
    fn binary(self) -> PathBuf {
        let name = self.program();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
        places.extend(["/usr/sbin".into(), "/usr/local/sbin".into()]);
        let mut found = places.iter().map(|place| place.join(name));
        found
            .find(|binary| binary.is_file())
            .unwrap_or_else(|| panic!("{name} is not installed; on Debian: apt-get install {name}"))
    }
}

/// A running balancer; gone with its handle.
pub(crate) struct Front {
    child: Child,
    watchdog: Child,
    port: u16,
}

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../deploy")
        .join(name)
}

impl Front {
    /// In front of all routers of the fleet, up to three.
    pub(crate) async fn start(kind: Kind, fleet: &Fleet) -> Self {
        let port = free_port();
        let routers: Vec<String> = fleet.routers.iter().map(|r| host_port(&r.base())).collect();
        let mut command = Command::new(kind.binary());
        match kind {
            Kind::HaProxy => {
                command
                    .arg("-db")
                    .arg("-f")
                    .arg(shipped("haproxy/haproxy.cfg"));
                command.env("WARMROUTE_BIND", format!("127.0.0.1:{port}"));
                for (number, router) in (1..).zip(&routers) {
                    command.env(format!("WARMROUTE_ROUTER_{number}"), router);
                }
            }
            Kind::Nginx => {
                let file = fleet.file(&format!("nginx-{port}.conf"));
                fs::write(&file, placed(&routers, port, &file)).expect("a file");
                command.args(["-g", "daemon off; master_process off;"]);
                command.arg("-c").arg(file);
            }
        }
        let log = File::create(fleet.file(&format!("{}-{port}.log", kind.program())));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.expect("a log"));
        let child = command.spawn().expect("it starts");
        let kill = format!("read _; kill -9 {}", child.id());
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", &kill]).stdin(Stdio::piped());
        let watchdog = watchdog.stderr(Stdio::null()).spawn().expect("sh starts");
        let front = Self {
            child,
            watchdog,
            port,
        };
        let base = front.base();
        let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
        fleet.until("the balancer has a router", ready).await;
        front
    }

    pub(crate) fn base(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        for child in [&mut self.watchdog, &mut self.child] {
            child.kill().expect("it is our child");
            child.wait().expect("it was killed");
        }
    }
}

fn host_port(base: &str) -> String {
    base.trim_start_matches("http://").to_owned()
}

/// nginx reads no environment: the addresses in the shipped file, and nothing else, are replaced.
fn placed(routers: &[String], port: u16, file: &Path) -> String {
    let text = fs::read_to_string(shipped("nginx/nginx.conf")).expect("the shipped file");
    let mut text = text;
    let mut replace = |from: &str, to: &str| {
        assert!(text.contains(from), "no {from:?} in the shipped file");
        text = text.replace(from, to);
    };
    replace("listen 8080;", &format!("listen 127.0.0.1:{port};"));
    let pid = file.with_extension("pid");
    replace("/tmp/warmroute-nginx.pid", &pid.display().to_string());
    for number in 1..=3 {
        let from = format!("server router-{number}:8080 ");
        // Fewer routers than lines: some stand twice.
        let router = &routers[(number - 1) % routers.len()];
        replace(&from, &format!("server {router} "));
    }
    text
}

async fn fleet() -> Fleet {
    let engines = Engines {
        count: 1,
        ranks: 1,
        blocks: 4096,
        flags: &["--itl-ms", "60", "--prefill-tokens-per-sec", "200000"],
    };
    let mode = Mode::Nats {
        indexers: 1,
        routers: 2,
    };
    Fleet::start(mode, engines, Flags::default()).await
}

/// The time to the first chunk and the gaps after it are printed, beside those without a balancer. That
/// nothing is gathered is asserted by the number of chunks: one a token.
async fn streams_come_as_they_are(fleet: &Fleet, kind: Kind) {
    let front = Front::start(kind, fleet).await;
    let bases = [
        ("router", fleet.routers[0].base()),
        (kind.program(), front.base()),
    ];
    for (name, base) in bases {
        let mut firsts = Vec::new();
        let mut worst = 0;
        for number in 0..10 {
            let body = body(&format!("Run {number}: count to ten."), 10);
            let since = Instant::now();
            let sent = fleet
                .http
                .post(format!("{base}/v1/completions"))
                .json(&body);
            let mut chunks = sent.send().await.unwrap().bytes_stream();
            let (mut last, mut count) = (since, 0);
            while let Some(chunk) = chunks.next().await {
                chunk.unwrap();
                match count {
                    0 => firsts.push(since.elapsed().as_micros()),
                    _ => worst = worst.max(last.elapsed().as_millis()),
                }
                last = Instant::now();
                count += 1;
            }
            assert!(count >= 10, "{name}: {count} chunks for 10 tokens");
        }
        firsts.sort_unstable();
        let median = firsts[firsts.len() / 2];
        println!("{name}: first chunk after {median} µs (median), longest gap {worst} ms of 60");
    }
    // A client that leaves in mid-stream is seen behind the balancer too; so is one that still waits.
    let aborted = fleet.counted("aborted").await;
    drop(open(&fleet.http, &front.base(), 5).await);
    let cancelled = async |fleet: &Fleet| fleet.counted("aborted").await >= aborted + 5;
    fleet
        .until("the engine is told that clients left", cancelled)
        .await;
    fleet.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_pass_a_balancer_unbuffered_and_leavers_are_seen() {
    let fleet = fleet().await;
    for kind in [Kind::HaProxy, Kind::Nginx] {
        streams_come_as_they_are(&fleet, kind).await;
    }
}
