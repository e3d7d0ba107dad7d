//! A load balancer in front, with the configuration of `deploy/`.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt as _;
use serde_json::json;
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

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

    /// Path of binaries that distributions install for root only.
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

/// A running balancer. Dropping it stops it.
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
                let fixed: Vec<String> = routers
                    .iter()
                    .map(|r| format!("server {r} max_fails=0;"))
                    .collect();
                let fixed = format!("upstream fixed {{ {} }}", fixed.join(" "));
                nginx(
                    &mut command,
                    fleet,
                    port,
                    &[(FIXED, &fixed), (NAMED, "set $routers fixed;")],
                );
            }
        }
        let front = Self::spawn(kind, command, port, fleet);
        let base = front.base();
        let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
        fleet.until("the balancer has a router", ready).await;
        front
    }

    /// nginx that resolves the router's name at this name server.
    fn by_name(fleet: &Fleet, resolver: &str, router: u16) -> Self {
        let port = free_port();
        let mut command = Command::new(Kind::Nginx.binary());
        let resolver = format!("resolver {resolver} ");
        let named = format!("set $routers routers:{router};");
        nginx(
            &mut command,
            fleet,
            port,
            &[("resolver 127.0.0.11 ", &resolver), (NAMED, &named)],
        );
        Self::spawn(Kind::Nginx, command, port, fleet)
    }

    fn spawn(kind: Kind, mut command: Command, port: u16, fleet: &Fleet) -> Self {
        let log = File::create(fleet.file(&format!("{}-{port}.log", kind.program())));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.expect("a log"));
        let child = command.spawn().expect("it starts");
        let kill = format!("read _; kill -9 {}", child.id());
        let mut watchdog = Command::new("sh");
        watchdog.args(["-c", &kill]).stdin(Stdio::piped());
        let watchdog = watchdog.stderr(Stdio::null()).spawn().expect("sh starts");
        Self {
            child,
            watchdog,
            port,
        }
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

/// The addresses of the routers in the shipped file.
const NAMED: &str = "set $routers routers:8080;";
const FIXED: &str =
    "# upstream fixed { server 10.0.0.1:8080 max_fails=0; server 10.0.0.2:8080 max_fails=0; }";

/// nginx reads no environment: the test replaces the addresses in the shipped file, and nothing
/// else.
fn nginx(command: &mut Command, fleet: &Fleet, port: u16, addresses: &[(&str, &str)]) {
    let file = fleet.file(&format!("nginx-{port}.conf"));
    let pid = file.with_extension("pid").display().to_string();
    let listen = format!("listen 127.0.0.1:{port};");
    let own = [
        ("listen 8080;", &*listen),
        ("/tmp/warmroute-nginx.pid", &*pid),
    ];
    let mut text = fs::read_to_string(shipped("nginx/nginx.conf")).expect("the shipped file");
    for (from, to) in own.iter().chain(addresses) {
        assert!(text.contains(from), "no {from:?} in the shipped file");
        text = text.replace(from, to);
    }
    fs::write(&file, text).expect("a file");
    command.args(["-g", "daemon off; master_process off;"]);
    command.arg("-c").arg(file);
}

type Names = Arc<Mutex<Vec<Ipv4Addr>>>;

/// A name server that returns these addresses for every name. Without addresses no name exists.
async fn name_server(names: Names) -> (String, AbortOnDrop) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    let serve = async move {
        let mut buffer = [0; 512];
        while let Ok((length, asker)) = socket.recv_from(&mut buffer).await {
            let addresses = names.lock().unwrap().clone();
            let answer = answer(&buffer[..length], &addresses);
            // The client retries.
            drop(socket.send_to(&answer, asker).await);
        }
    };
    (address, AbortOnDrop(TaskTracker::new().spawn(serve)))
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One query of any type: header, question, records (RFC 1035).
fn answer(query: &[u8], addresses: &[Ipv4Addr]) -> Vec<u8> {
    const HEADER: usize = 12;
    let name = query[HEADER..]
        .iter()
        .position(|&byte| byte == 0)
        .expect("its end");
    let question = &query[HEADER..HEADER + name + 5];
    let is_a = question[name + 1..name + 3] == [0, 1];
    let records = if is_a { addresses } else { &[] };
    // A response; recursion desired and available; no such name.
    let code = if addresses.is_empty() { 3 } else { 0 };
    let count = u8::try_from(records.len()).expect("few");
    let mut answer = [
        &query[..2],
        &[0x81, 0x80 | code, 0, 1, 0, count, 0, 0, 0, 0],
        question,
    ]
    .concat();
    for record in records {
        // The query's name, A, IN, TTL 0.
        answer.extend([0xC0, 0x0C, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
        answer.extend(record.octets());
    }
    answer
}

/// nginx starts before the routers' name exists, and finds it later. A router that is down costs no
/// request, not even a POST.
async fn nginx_follows_a_name(fleet: &Fleet) {
    let names = Names::default();
    let (resolver, _serving) = name_server(Arc::clone(&names)).await;
    let router = fleet.routers[0].said["port"].as_u64().unwrap();
    let front = Front::by_name(fleet, &resolver, u16::try_from(router).unwrap());
    let base = front.base();
    let away = async |fleet: &Fleet| {
        let answer = fleet.http.get(format!("{base}/readyz")).send().await;
        answer.is_ok_and(|answer| answer.status() == 502)
    };
    fleet.until("nginx runs, and knows no router", away).await;
    let nobody = Ipv4Addr::new(127, 0, 0, 9);
    names.lock().unwrap().extend([nobody, Ipv4Addr::LOCALHOST]);
    let ready = async |fleet: &Fleet| fleet.is_ready(&base).await;
    fleet.until("nginx has found the router", ready).await;
    for number in 0..8 {
        let body =
            json!({"model": "mock", "prompt": format!("Request {number}."), "max_tokens": 1});
        let sent = fleet
            .http
            .post(format!("{base}/v1/completions"))
            .json(&body);
        let answer = sent.send().await.unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
    }
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

/// Prints the time to the first chunk and the gaps after it, beside those without a balancer.
/// Asserts the number of chunks: one for each token, so nothing is buffered.
async fn streams_come_as_they_are(fleet: &Fleet, kind: Kind) {
    let front = Front::start(kind, fleet).await;
    let bases = [
        ("router", fleet.routers[0].base()),
        (kind.program(), front.base()),
    ];
    for (name, base) in bases {
        // The router sends `[DONE]` as its own chunk; a balancer may merge it with the last token.
        let chunks_of_ten = if name == "router" { 11..=11 } else { 10..=11 };
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
            assert!(chunks_of_ten.contains(&count), "{name}: {count} chunks");
        }
        firsts.sort_unstable();
        let median = firsts[firsts.len() / 2];
        println!("{name}: first chunk after {median} µs (median), longest gap {worst} ms of 60");
    }
    // A client that leaves in mid-stream is seen through the balancer, and so is one that still
    // waits.
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
    nginx_follows_a_name(&fleet).await;
}
