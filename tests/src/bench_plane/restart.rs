//! Time until a killed indexer is ready again: it loads a snapshot and the log's tail. The indexer
//! is a process that receives SIGKILL; its state before and after is compared.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fastrand::Rng;
use futures_util::stream::{FuturesOrdered, StreamExt as _};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use warmroute_plane::{InitConfig, NatsPlane, Plane as _, RegistryEvent};
use warmroute_process::tls::EngineTls;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::snapshot::SnapshotPointer;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineSeq, Generation, LocalHash, LogPosition, Namespace, Record,
    RecordNumber, Source, Tier, TierState, Tiers, WorkerId, codec,
};

use crate::server::NatsServer;
use crate::stage::config;

const SOURCES: u32 = 64;
const PROMPT_BLOCKS: usize = 64;
/// Prompts of one record: about 32 KiB.
const PROMPTS: usize = 64;
/// Number of sources that hold each prompt.
const HOLDERS: u32 = 2;
/// Share of the entries behind the snapshot, in percent.
const TAIL_PERCENT: u64 = 2;
const END_MAX: Duration = Duration::from_secs(180);

/// Figures of one run.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Restart {
    entries: u64,
    snapshot_bytes: u64,
    tail_records: u64,
    /// From SIGKILL and start to `/readyz`.
    ready_ms: u128,
    /// Until the log's last record is applied.
    whole_ms: u128,
    /// Without a snapshot: the log is read from its beginning.
    without_snapshot_ms: u128,
}

pub(crate) async fn restart(server: &NatsServer, entries: u64) -> anyhow::Result<Restart> {
    let namespace = Namespace::from("restart");
    let sizes = InitConfig {
        max_bytes: 1 << 30,
        snapshots_max_bytes: 1 << 30,
        ..InitConfig::default()
    };
    let plane = NatsPlane::init(config(server, &namespace, "init"), sizes).await?;
    let mut fleet = Fleet::new(namespace);
    let first = fleet.append(&plane, entries).await?;
    let mut indexer = Indexer::start(server, &fleet.namespace)?;
    indexer.until_at(first).await?;
    let pointer = until_snapshot(&plane, &fleet.namespace, first).await?;
    let last = fleet.append(&plane, entries * TAIL_PERCENT / 100).await?;
    indexer.until_at(last).await?;
    let held = indexer.held().await?;
    ensure!(held == fleet.held(), "it holds what was appended");

    let newest = until_snapshot(&plane, &fleet.namespace, first)
        .await?
        .newest;
    let tail_records = last.0.saturating_sub(newest.at.position.0);
    let (ready_ms, whole_ms) = indexer.killed(server, &fleet.namespace, last).await?;
    ensure!(indexer.held().await? == held, "it holds the same again");
    for name in plane.snapshots().await? {
        plane.delete_snapshot(name).await?;
    }
    let (without_snapshot_ms, _) = indexer.killed(server, &fleet.namespace, last).await?;
    ensure!(indexer.held().await? == held, "it holds the same again");
    Ok(Restart {
        entries: held.values().map(|(blocks, _)| blocks).sum(),
        snapshot_bytes: pointer.newest.bytes,
        tail_records,
        ready_ms,
        whole_ms,
        without_snapshot_ms,
    })
}

/// Blocks and digest by source.
type Held = BTreeMap<String, (u64, String)>;

/// Writes what shims would write.
struct Fleet {
    namespace: Namespace,
    rng: Rng,
    sources: Vec<(Source, u64, Digest)>,
}

impl Fleet {
    fn new(namespace: Namespace) -> Self {
        let source = |number: u32| Source {
            worker: WorkerId::from(format!("worker-{}", number / 8).as_str()),
            dp_rank: DpRank(number % 8),
        };
        let sources = (0..SOURCES).map(|number| (source(number), 0, Digest::default()));
        Self {
            namespace,
            rng: Rng::with_seed(1),
            sources: sources.collect(),
        }
    }

    /// Appends `entries` pairs. Returns the position of the last record.
    async fn append(&mut self, plane: &NatsPlane, entries: u64) -> anyhow::Result<LogPosition> {
        const WINDOW: usize = 64;
        let mut under_way = FuturesOrdered::new();
        let mut last = LogPosition(0);
        let mut left = entries;
        let mut turn = 0;
        while left > 0 {
            let prompts: Vec<Vec<LocalHash>> = (0..PROMPTS).map(|_| self.prompt()).collect();
            for holder in 0..HOLDERS {
                let source = usize::try_from((turn + holder * 7) % SOURCES)?;
                let (subject, payload) = self.record(source, &prompts)?;
                under_way.push_back(plane.append(subject, payload.into()).await?);
                if under_way.len() >= WINDOW {
                    last = under_way.next().await.context("an append")??;
                }
            }
            left = left.saturating_sub((PROMPTS * PROMPT_BLOCKS) as u64 * u64::from(HOLDERS));
            turn += 1;
        }
        while let Some(position) = under_way.next().await {
            last = position?;
        }
        Ok(last)
    }

    fn prompt(&mut self) -> Vec<LocalHash> {
        (0..PROMPT_BLOCKS)
            .map(|_| LocalHash(self.rng.u64(..)))
            .collect()
    }

    fn record(
        &mut self,
        at: usize,
        prompts: &[Vec<LocalHash>],
    ) -> anyhow::Result<(String, Vec<u8>)> {
        let (source, number, after) = &mut self.sources[at];
        for prompt in prompts {
            prefix_hashes(None, prompt).for_each(|prefix| after.insert(prefix, Tier::Gpu));
        }
        let stored = |blocks: &Vec<LocalHash>| Change::Stored {
            parent: None,
            blocks: blocks.clone(),
            tier: Tier::Gpu,
        };
        let record = Record {
            source: source.clone(),
            generation: Generation(1),
            number: RecordNumber(*number),
            engine_seq: Some(EngineSeq(*number)),
            changes: prompts.iter().map(stored).collect(),
            states: Tiers::all(TierState::Complete),
            after: *after,
            sent_at: None,
        };
        *number += 1;
        let subject = Subjects::new(&self.namespace).records(source);
        Ok((subject, codec::encode(&record)?))
    }

    fn held(&self) -> Held {
        let row = |(source, _, digest): &(Source, u64, Digest)| {
            let name = format!("{}/{}", source.worker.as_str(), source.dp_rank);
            (name, (digest.count, digest.hex()))
        };
        self.sources.iter().map(row).collect()
    }
}

/// The indexer's binary, built beside this one.
pub(crate) struct Indexer {
    child: Child,
    base: String,
    http: reqwest::Client,
}

impl Indexer {
    pub(crate) fn start(server: &NatsServer, namespace: &Namespace) -> anyhow::Result<Self> {
        let program = std::env::current_exe()?.with_file_name("warmroute-indexer-under-test");
        let mut child = Command::new(&program)
            .args([
                "--nats-url",
                &server.url(),
                "--namespace",
                namespace.as_str(),
            ])
            .args(["--host", "127.0.0.1", "--port", "0"])
            .args(["--snapshot-every-secs", "20", "--log", "warn"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} is built with this package", program.display()))?;
        let said = child.stdout.take().context("its output")?;
        let mut indexer = Self {
            child,
            base: String::new(),
            http: EngineTls::system()?.client().build()?,
        };
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let said: Value = serde_json::from_str(&line).context("it says its port")?;
        indexer.base = format!("http://127.0.0.1:{}", said["port"]);
        Ok(indexer)
    }

    /// Times until ready and until `position` is applied, both from the kill.
    async fn killed(
        &mut self,
        server: &NatsServer,
        namespace: &Namespace,
        last: LogPosition,
    ) -> anyhow::Result<(u128, u128)> {
        let begun = Instant::now();
        self.child.kill()?;
        *self = Self::start(server, namespace)?;
        while !self.is_ready().await {
            ensure!(begun.elapsed() < END_MAX, "it does not become ready");
            sleep(Duration::from_millis(5)).await;
        }
        let ready = begun.elapsed().as_millis();
        self.until_at(last).await?;
        Ok((ready, begun.elapsed().as_millis()))
    }

    async fn is_ready(&self) -> bool {
        let answer = self.http.get(format!("{}/readyz", self.base)).send().await;
        answer.is_ok_and(|answer| answer.status().is_success())
    }

    async fn digest(&self) -> anyhow::Result<Value> {
        let answer = self
            .http
            .get(format!("{}/v1/digest", self.base))
            .send()
            .await?;
        Ok(answer.json().await?)
    }

    pub(crate) async fn until_at(&self, position: LogPosition) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.digest().await?["position"].as_u64() < Some(position.0) {
            ensure!(begun.elapsed() < END_MAX, "it does not read to {position}");
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// URL of its port.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Number of exact sources.
    pub(crate) async fn exact(&self) -> anyhow::Result<u64> {
        self.metric("sources{state=\"exact\"}").await
    }

    /// Queries that it answered so far.
    pub(crate) async fn answered(&self) -> anyhow::Result<u64> {
        self.metric("queries_total{outcome=\"answered\"}").await
    }

    /// Stops the process for a while, as a machine that is suspended.
    pub(crate) async fn pause(&self, time: Duration) -> anyhow::Result<()> {
        let signal = |name: &str| {
            let pid = self.child.id().to_string();
            Command::new("kill").args(["-s", name, &pid]).status()
        };
        signal("STOP")?;
        sleep(time).await;
        signal("CONT")?;
        Ok(())
    }

    pub(crate) async fn resident_bytes(&self) -> anyhow::Result<u64> {
        self.metric("resident_bytes").await
    }

    async fn metric(&self, name: &str) -> anyhow::Result<u64> {
        let page = self.http.get(format!("{}/metrics", self.base)).send();
        let page = page.await?.text().await?;
        let name = format!("warmroute_indexer_{name} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&name));
        Ok(line.context("the metric")?.parse::<f64>()? as u64)
    }

    /// The subject of the only replica of a namespace.
    pub(crate) async fn own_subject(
        &self,
        plane: &NatsPlane,
        namespace: &Namespace,
    ) -> anyhow::Result<String> {
        let subjects = Subjects::new(namespace);
        let mut watch = plane.watch(subjects.indexer_keys()).await?;
        loop {
            let event = watch.next().await.context("the registry")?;
            if let RegistryEvent::Put { key, .. } = event {
                let id = subjects.key_indexer(&key).context("an indexer's key")?;
                return Ok(subjects.query_at(&id));
            }
        }
    }

    async fn held(&self) -> anyhow::Result<Held> {
        let digest = self.digest().await?;
        let row = |source: &Value| {
            let name = format!("{}/{}", source["worker"].as_str()?, source["dp_rank"]);
            let digest = source["digest"].as_str()?.to_owned();
            Some((name, (source["blocks"].as_u64()?, digest)))
        };
        let sources = digest["sources"].as_array().context("sources")?;
        Ok(sources.iter().filter_map(row).collect())
    }
}

impl Drop for Indexer {
    fn drop(&mut self) {
        // The process may have ended already.
        drop(self.child.kill().and_then(|()| self.child.wait()));
    }
}

/// The snapshot pointer, if its newest snapshot covers the position.
async fn until_snapshot(
    plane: &NatsPlane,
    namespace: &Namespace,
    position: LogPosition,
) -> anyhow::Result<SnapshotPointer> {
    let begun = Instant::now();
    let key = Subjects::new(namespace).snapshot_pointer_key();
    loop {
        if let Some(entry) = plane.get(key.clone()).await? {
            let pointer: SnapshotPointer = codec::decode(&entry.value)?;
            if pointer.newest.at.position >= position {
                return Ok(pointer);
            }
        }
        ensure!(begun.elapsed() < END_MAX, "no snapshot is written");
        sleep(Duration::from_millis(50)).await;
    }
}
