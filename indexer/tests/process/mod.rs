//! Indexers as processes, what publishes to them, and how they are asked.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};
use warmroute_plane::{NatsConfig, NatsPlane, Plane};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash, LogPosition,
    Namespace, PrefixHash, Record, RecordNumber, Source, Tier, TierState, Tiers, WorkerId, codec,
    hash::prefix_hashes,
};

use crate::nats_server::NatsServer;
use crate::nats_server::child::{Watchdog, ended, first_line};

/// Nothing here takes long; this only keeps a broken test from waiting for ever.
pub(crate) const CAP: Duration = Duration::from_secs(300);

pub(crate) fn namespace() -> Namespace {
    Namespace::from("t")
}

pub(crate) fn command(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute-indexer"));
    command
        .args(arguments)
        .args(["--nats-url", url, "--namespace", "t"]);
    command
}

/// `init` with these sizes; its output and whether it succeeded.
pub(crate) fn init(url: &str, sizes: &[&str]) -> (String, bool) {
    let mut arguments = vec!["init"];
    arguments.extend(sizes);
    let output = command(url, &arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8(text).unwrap();
    (text, output.status.success())
}

/// One indexer process, killed with the test.
pub(crate) struct Indexer {
    child: Child,
    watchdog: Watchdog,
    port: u16,
}

impl Indexer {
    pub(crate) fn start(url: &str) -> Self {
        Self::start_with(url, &[])
    }

    pub(crate) fn start_with(url: &str, more: &[&str]) -> Self {
        let mut arguments = vec!["--host", "127.0.0.1", "--port", "0"];
        arguments.extend([
            "--snapshot-every-secs",
            "1",
            "--snapshot-every-bytes",
            "32KiB",
        ]);
        arguments.extend(more);
        let mut child = command(url, &arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut errors = child.stderr.take().unwrap();
        let mut indexer = Self {
            watchdog: Watchdog::over(&child),
            child,
            port: 0,
        };
        let line = first_line(&mut indexer.child);
        let Ok(told) = serde_json::from_str::<Value>(&line) else {
            let mut text = String::new();
            errors.read_to_string(&mut text).unwrap();
            panic!("it did not start: {text}");
        };
        // Logs go on to the test's own output, where they help when it fails.
        std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                eprintln!("{line}");
            }
        });
        let port = told["port"].as_u64().unwrap();
        indexer.port = u16::try_from(port).unwrap();
        indexer
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.watchdog.end();
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; did it end well?
    pub(crate) fn end(&mut self) -> bool {
        self.signal("-TERM");
        let status = ended(&mut self.child);
        self.watchdog.end();
        status.success()
    }

    /// SIGSTOP: it sees nothing of what happens until it goes on.
    pub(crate) fn pause(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn go_on(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let told = Command::new("kill").args([signal, &id]).status().unwrap();
        assert!(told.success(), "{signal}");
    }

    /// The most memory that was resident at any time.
    pub(crate) fn resident_most(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = line.unwrap().trim().trim_end_matches(" kB");
        kilobytes.parse::<u64>().unwrap() << 10
    }

    /// A connection on which this request was sent.
    pub(crate) async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    /// Status and body.
    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let mut stream = self.send(&request).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    pub(crate) async fn digest(&self) -> Value {
        serde_json::from_str(&self.get("/v1/digest").await.1).unwrap()
    }

    pub(crate) async fn position(&self) -> Option<u64> {
        self.digest().await["position"].as_u64()
    }

    /// A metric's value; 0 if it is not there.
    pub(crate) async fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.get("/metrics").await;
        let name = format!("warmroute_indexer_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.map_or(0, |value| value.parse::<f64>().unwrap() as u64)
    }

    /// The source's blocks, digest and generation, which replicas have to agree on.
    pub(crate) async fn folded(&self) -> Value {
        let mut digest = self.digest().await;
        for source in digest["sources"].as_array_mut().unwrap() {
            let source = source.as_object_mut().unwrap();
            // These depend on the timing of heartbeats.
            source.remove("state");
            source.remove("reason");
            source.remove("engine_seq");
        }
        digest
    }

    pub(crate) async fn reaches(&self, position: LogPosition) {
        eventually("it reaches the position", async || {
            self.position().await >= Some(position.0)
        })
        .await;
    }
}

impl Drop for Indexer {
    fn drop(&mut self) {
        self.watchdog.end();
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Looks until it is so.
pub(crate) async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let cap = Instant::now() + CAP;
    while !is_so().await {
        assert!(Instant::now() < cap, "never: {what}");
        sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) async fn plane(server: &NatsServer) -> Arc<NatsPlane> {
    let config = NatsConfig::new(server.url(), namespace(), "test");
    Arc::new(NatsPlane::connect(config).await.unwrap())
}

/// A shim's voice: it holds what it stored, and publishes records of its changes.
#[derive(Clone)]
pub(crate) struct Publisher {
    plane: Arc<NatsPlane>,
    subjects: Subjects,
    pub(crate) source: Source,
    pub(crate) generation: Generation,
    number: Option<RecordNumber>,
    digest: Digest,
    next_block: u64,
    first: Vec<PrefixHash>,
}

impl Publisher {
    pub(crate) fn new(plane: &Arc<NatsPlane>, worker: &str) -> Self {
        Self {
            plane: Arc::clone(plane),
            subjects: Subjects::new(&namespace()),
            source: Source {
                worker: WorkerId::from(worker),
                dp_rank: DpRank(0),
            },
            generation: Generation(1),
            number: None,
            digest: Digest::default(),
            next_block: u64::from(worker.as_bytes()[0]) << 32,
            first: Vec::new(),
        }
    }

    pub(crate) fn next_generation(&mut self) {
        self.generation = self.generation.next().unwrap();
        self.number = None;
        self.digest = Digest::default();
        self.first.clear();
    }

    /// Stores so many new blocks, and removes the first one of the record before.
    pub(crate) async fn publish(&mut self, blocks: u64) -> LogPosition {
        let new: Vec<_> = (0..blocks)
            .map(|n| LocalHash(self.next_block + n))
            .collect();
        self.next_block += blocks;
        let mut changes = Vec::new();
        if !self.first.is_empty() {
            changes.push(Change::Removed {
                blocks: std::mem::take(&mut self.first),
                tier: Tier::Gpu,
            });
        }
        for change in &changes {
            if let Change::Removed { blocks, tier } = change {
                blocks
                    .iter()
                    .for_each(|&prefix| self.digest.remove(prefix, *tier));
            }
        }
        for prefix in prefix_hashes(None, &new) {
            self.digest.insert(prefix, Tier::Gpu);
        }
        self.first.extend(prefix_hashes(None, &new).next());
        changes.push(Change::Stored {
            parent: None,
            blocks: new,
            tier: Tier::Gpu,
        });
        self.number = Some(self.number.map_or(RecordNumber(0), RecordNumber::next));
        let record = Record {
            source: self.source.clone(),
            generation: self.generation,
            number: self.number.unwrap(),
            engine_seq: self.number.map(|number| EngineSeq(number.0)),
            changes,
            states: Tiers::all(TierState::Complete),
            after: self.digest,
            sent_at: None,
        };
        let payload = codec::encode(&record).unwrap();
        self.append(payload).await
    }

    async fn append(&self, payload: Vec<u8>) -> LogPosition {
        let subject = self.subjects.records(&self.source);
        let appended = self.plane.append(subject, payload.into()).await.unwrap();
        appended.await.unwrap()
    }

    pub(crate) async fn heartbeat(&self) {
        let heartbeat = Heartbeat {
            source: self.source.clone(),
            generation: self.generation,
            number: self.number,
            engine_seq: self.number.map(|number| EngineSeq(number.0)),
            states: Tiers::all(TierState::Complete),
            after: self.digest,
            health: EngineHealth::Healthy,
            sent_at: None,
        };
        let payload = codec::encode(&heartbeat).unwrap();
        let subject = self.subjects.heartbeat(&self.source);
        // The server may be away at this moment; another one follows.
        drop(self.plane.publish(subject, payload.into()).await);
    }

    pub(crate) fn hex(&self) -> String {
        self.digest.hex()
    }

    /// Sends heartbeats until the indexer credits this source with exactly what it holds.
    pub(crate) async fn is_exact_at(&self, indexer: &Indexer) {
        let worker = self.source.worker.as_str();
        eventually("the source is exact", async || {
            self.heartbeat().await;
            let digest = indexer.digest().await;
            let sources = digest["sources"].as_array().unwrap();
            sources.iter().any(|source| {
                source["worker"] == worker
                    && source["state"] == "exact"
                    && source["digest"] == self.hex().as_str()
            })
        })
        .await;
    }
}
