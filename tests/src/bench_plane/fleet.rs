//! Queries of a router at a large fleet, under attacks on the indexer's port, and on a busy machine.
//!
//! The indexers are processes. Records and heartbeats are those of made-up shims.

use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use clap::ValueEnum;
use prometheus::IntCounter;
use tokio::time::{Instant, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_plane::{NatsPlane, Plane};
use warmroute_process::tls::EngineTls;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::roster::{HolderAnswer, HolderQuery, RosterNumber, RosterPageRequest};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash, LogPosition,
    Namespace, Record, RecordNumber, Source, Tier, TierState, Tiers, WorkerId, codec,
};
use warmroute_router::index_client::{DEADLINE, IndexClient};

use crate::measure::Figure;
use crate::restart::Indexer;
use crate::server::NatsServer;
use crate::stage::{config, namespace};

const RANKS: u32 = 8;
const PROMPT_BLOCKS: u64 = 2_000;
/// Blocks of the system prompt that sources have in common.
const COMMON_BLOCKS: u64 = 32;
/// Queries of one figure.
const QUERIES: usize = 2_000;
/// Blocks of each of 64 sources under attack.
const ATTACKED_BLOCKS: u64 = 20_000;
const ATTACK: Duration = Duration::from_secs(10);
const QUERY_INTERVAL: Duration = Duration::from_millis(10);
/// Longer than the deadline of a query, shorter than a lease.
const PAUSE: Duration = Duration::from_millis(30);
const PAUSE_PERIOD: Duration = Duration::from_millis(300);
const END_MAX: Duration = Duration::from_secs(120);
/// Well below the validity of a proof.
const HEARTBEATS_EVERY: Duration = Duration::from_secs(2);

/// Which sources hold the common blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holding {
    OneSource,
    AllSources,
}

/// Made-up shims with one record each.
struct Shims {
    plane: Arc<NatsPlane>,
    subjects: Subjects,
    heartbeats: Vec<(String, Bytes)>,
    last: LogPosition,
}

impl Shims {
    async fn start(
        plane: &Arc<NatsPlane>,
        namespace: &Namespace,
        blocks_of: impl Fn(u32) -> Vec<LocalHash>,
        sources: u32,
    ) -> anyhow::Result<Self> {
        let mut shims = Self {
            plane: Arc::clone(plane),
            subjects: Subjects::new(namespace),
            heartbeats: Vec::new(),
            last: LogPosition(0),
        };
        let mut pending = Vec::new();
        for number in 0..sources {
            let source = Source {
                worker: WorkerId::from(format!("vllm-decode-{:04}", number / RANKS)),
                dp_rank: DpRank(number % RANKS),
            };
            let mut digest = Digest::default();
            let blocks = blocks_of(number);
            let mut parent = None;
            let chunks: Vec<_> = blocks.chunks(4_000).collect();
            for (record, chunk) in (0..).zip(&chunks) {
                let change = Change::Stored {
                    parent,
                    blocks: chunk.to_vec(),
                    tier: Tier::Gpu,
                };
                for prefix in prefix_hashes(parent, chunk) {
                    digest.insert(prefix, Tier::Gpu);
                    parent = Some(prefix);
                }
                let record = record_of(&source, RecordNumber(record), change, digest);
                let payload = codec::encode(&record)?.into();
                let subject = shims.subjects.records(&source);
                pending.push(plane.append(subject, payload).await?);
                if pending.len() >= 256 {
                    for stored in pending.drain(..) {
                        shims.last = stored.await?;
                    }
                }
            }
            let last = RecordNumber(chunks.len() as u64 - 1);
            let payload = codec::encode(&heartbeat_of(&source, last, digest))?;
            let subject = shims.subjects.heartbeat(&source);
            shims.heartbeats.push((subject, payload.into()));
        }
        for stored in pending {
            shims.last = stored.await?;
        }
        Ok(shims)
    }

    async fn beat(&self) -> anyhow::Result<()> {
        for (subject, payload) in &self.heartbeats {
            self.plane.publish(subject.clone(), payload.clone()).await?;
        }
        Ok(())
    }

    /// Keeps the sources proven until stopped, at an even rate.
    fn keep_beating(self, tasks: &TaskTracker, stop: &CancellationToken) {
        let stop = stop.clone();
        tasks.spawn(async move {
            let steps = 100;
            let step = self.heartbeats.len().div_ceil(steps);
            let mut ticks = interval(HEARTBEATS_EVERY / u32::try_from(steps).unwrap_or(1));
            let beat = async {
                loop {
                    for some in self.heartbeats.chunks(step) {
                        ticks.tick().await;
                        for (subject, payload) in some {
                            drop(self.plane.publish(subject.clone(), payload.clone()).await);
                        }
                    }
                }
            };
            stop.run_until_cancelled(beat).await;
        });
    }
}

fn record_of(source: &Source, number: RecordNumber, change: Change, after: Digest) -> Record {
    Record {
        source: source.clone(),
        generation: Generation(1),
        number,
        engine_seq: Some(EngineSeq(number.0)),
        changes: vec![change],
        states: Tiers::all(TierState::Complete),
        after,
        sent_at: None,
    }
}

fn heartbeat_of(source: &Source, number: RecordNumber, after: Digest) -> Heartbeat {
    Heartbeat {
        source: source.clone(),
        generation: Generation(1),
        number: Some(number),
        engine_seq: Some(EngineSeq(number.0)),
        states: Tiers::all(TierState::Complete),
        after,
        health: EngineHealth::Healthy,
        sent_at: None,
    }
}

fn prompt() -> Vec<LocalHash> {
    (1..=PROMPT_BLOCKS).map(LocalHash).collect()
}

/// A fleet of this size, its indexer, and a router's connection.
struct FleetStage {
    namespace: Namespace,
    plane: Arc<NatsPlane>,
    indexer: Indexer,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl FleetStage {
    async fn start(
        server: &NatsServer,
        sources: u32,
        blocks_of: impl Fn(u32) -> Vec<LocalHash>,
    ) -> anyhow::Result<Self> {
        let (namespace, plane) = namespace(server).await?;
        let plane = Arc::new(plane);
        let indexer = Indexer::start(server, &namespace)?;
        let shims = Shims::start(&plane, &namespace, blocks_of, sources).await?;
        indexer.until_at(shims.last).await?;
        let stage = Self {
            namespace,
            plane,
            indexer,
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        };
        shims.beat().await?;
        shims.keep_beating(&stage.tasks, &stage.stop);
        stage.until_exact(u64::from(sources)).await?;
        Ok(stage)
    }

    async fn until_exact(&self, sources: u64) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.indexer.exact().await? < sources {
            ensure!(begun.elapsed() < END_MAX, "the sources do not become exact");
            sleep(Duration::from_millis(200)).await;
        }
        // The roster follows within two ticks.
        sleep(Duration::from_secs(1)).await;
        Ok(())
    }

    async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Answers of 100, 1,000 and 8,000 sources in the full and in the compact form.
pub(crate) async fn sizes(server: &NatsServer) -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for sources in [100, 1_000, 8_000] {
        for holding in [Holding::OneSource, Holding::AllSources] {
            let blocks_of = |number| match holding {
                _ if number == 0 => prompt(),
                Holding::OneSource => vec![LocalHash(1 << 40 | u64::from(number))],
                Holding::AllSources => (1..=COMMON_BLOCKS).map(LocalHash).collect(),
            };
            let stage = FleetStage::start(server, sources, blocks_of).await?;
            let subject = stage
                .indexer
                .own_subject(&stage.plane, &stage.namespace)
                .await?;
            let holders = match holding {
                Holding::OneSource => "one holder",
                Holding::AllSources => "all hold 32 blocks",
            };
            let full = codec::encode(&IndexQuery {
                blocks: prompt(),
                at_least: None,
            })?;
            let compact = codec::encode(&HolderQuery {
                blocks: prompt(),
                from: RosterNumber(0),
                known: RosterPageRequest::default(),
            })?;
            for (form, query) in [("full", full), ("compact", compact)] {
                let query = Bytes::from(query);
                let mut samples = Vec::new();
                let mut bytes = 0;
                for _ in 0..QUERIES {
                    let begun = Instant::now();
                    let answer = stage.plane.request(subject.clone(), query.clone(), END_MAX);
                    let answer = answer.await?;
                    samples.push(begun.elapsed());
                    bytes = answer.len();
                    let is_answer = match form {
                        "full" => codec::decode::<IndexAnswer>(&answer).is_ok(),
                        _ => matches!(codec::decode(&answer)?, HolderAnswer::Holders(_)),
                    };
                    ensure!(is_answer, "no answer");
                }
                let what = format!("{sources} sources, {holders}, {form}: {bytes} bytes");
                figures.push(Figure::of(&what, None, QUERIES as u64, &mut samples));
            }
            stage.end().await;
        }
    }
    Ok(figures)
}

/// What four clients do to the indexer's port.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Attack {
    None,
    Dumps,
    UnreadDumps,
    LargeQueries,
    Digests,
}

/// Queries beside four clients that load the indexer's port as much as it lets them. The clients
/// are a process of the lowest priority: they stand for other machines, and must take neither
/// processors nor threads from the queries.
pub(crate) async fn attacks(server: &NatsServer) -> anyhow::Result<Vec<Figure>> {
    let blocks_of = |number: u32| {
        let own = u64::from(number) << 40;
        let first = (1..=COMMON_BLOCKS).map(LocalHash);
        first
            .chain((0..ATTACKED_BLOCKS).map(|block| LocalHash(own | 1 << 32 | block)))
            .collect()
    };
    let stage = FleetStage::start(server, 64, blocks_of).await?;
    let subject = stage
        .indexer
        .own_subject(&stage.plane, &stage.namespace)
        .await?;
    let query = codec::encode(&HolderQuery {
        blocks: prompt(),
        from: RosterNumber(0),
        known: RosterPageRequest::default(),
    })?;
    let query = Bytes::from(query);
    let mut figures: Vec<Figure> = Vec::new();
    for (attack, what) in [
        (Attack::None, "quiet"),
        (Attack::Dumps, "four clients read dumps"),
        (Attack::UnreadDumps, "four clients read no dumps"),
        (Attack::LargeQueries, "four clients send 16 MB queries"),
        (Attack::Digests, "four clients read digests"),
        (Attack::None, "quiet again"),
    ] {
        let clients = AttackClients::start(attack, stage.indexer.base())?;
        let mut samples = Vec::new();
        let mut ticks = interval(QUERY_INTERVAL);
        let begun = Instant::now();
        while begun.elapsed() < ATTACK {
            ticks.tick().await;
            let begun = Instant::now();
            let answer = stage.plane.request(subject.clone(), query.clone(), END_MAX);
            answer.await?;
            samples.push(begun.elapsed());
        }
        drop(clients);
        let late = samples.iter().filter(|sample| **sample > DEADLINE).count();
        let share = late as f64 * 100.0 / samples.len() as f64;
        let mut figure = Figure::of("", None, samples.len() as u64, &mut samples);
        let quiet = figures
            .first()
            .unwrap_or(&figure)
            .p99_us
            .unwrap_or(1)
            .max(1);
        let ratio = figure.p99_us.unwrap_or(0) as f64 / quiet as f64;
        let memory = stage.indexer.resident_bytes().await? >> 20;
        figure.what = format!("{what}: {share:.1} % above 10 ms, p99 {ratio:.2} ×, {memory} MiB");
        figures.push(figure);
    }
    stage.end().await;
    Ok(figures)
}

/// The clients of an attack, killed when dropped.
struct AttackClients(Option<Child>);

impl AttackClients {
    fn start(attack: Attack, base: &str) -> anyhow::Result<Self> {
        let Some(name) = attack
            .to_possible_value()
            .filter(|_| attack != Attack::None)
        else {
            return Ok(Self(None));
        };
        let clients = Command::new("nice")
            .args(["-n", "19"])
            .arg(std::env::current_exe()?)
            .args(["--attack", name.get_name(), "--base", base])
            .spawn()?;
        Ok(Self(Some(clients)))
    }
}

impl Drop for AttackClients {
    fn drop(&mut self) {
        if let Some(clients) = &mut self.0 {
            // The process may have ended already.
            drop(clients.kill().and_then(|()| clients.wait()));
        }
    }
}

/// Attacks until killed.
pub(crate) async fn attack(attack: Attack, base: &str) {
    let clients: [_; 4] = std::array::from_fn(|_| attacker(attack, base.to_owned()));
    futures_util::future::join_all(clients).await;
}

async fn attacker(attack: Attack, base: String) {
    let http = EngineTls::system().map(|tls| tls.client().build());
    let Ok(Ok(http)) = http else {
        return;
    };
    let body = format!(
        "{{\"token_ids\":[{}1],\"block_size\":16}}",
        "1,".repeat(8_000_000 - 32)
    );
    let body = Bytes::from(body);
    let mut unread = Vec::new();
    loop {
        let request = match attack {
            Attack::None => return,
            Attack::UnreadDumps => {
                let address = base.trim_start_matches("http://");
                if let Ok(mut stream) = TcpStream::connect(address) {
                    drop(stream.write_all(b"GET /dump HTTP/1.1\r\nHost: localhost\r\n\r\n"));
                    unread.push(stream);
                }
                sleep(Duration::from_secs(1)).await;
                continue;
            }
            Attack::Dumps => http.get(format!("{base}/dump")),
            Attack::Digests => http.get(format!("{base}/v1/digest")),
            Attack::LargeQueries => http
                .post(format!("{base}/query"))
                .header("content-type", "application/json")
                .body(body.clone()),
        };
        if let Ok(response) = request.send().await {
            drop(response.bytes().await);
        }
    }
}

/// What keeps two indexers from answering.
#[derive(Clone, Copy)]
enum Hindrance {
    /// This many threads compute.
    BusyThreads(usize),
    /// Each indexer in turn is stopped for [`PAUSE`] of [`PAUSE_PERIOD`].
    Pauses,
}

/// The share of a router's queries without an answer in time, with two indexers: every second query
/// may ask the second one, so that both ways meet the same load.
pub(crate) async fn misses(server: &NatsServer, threads: usize) -> anyhow::Result<Vec<Figure>> {
    let stage = FleetStage::start(server, 64, |_| prompt()).await?;
    let second = Indexer::start(server, &stage.namespace)?;
    while second.exact().await? < 64 {
        sleep(Duration::from_millis(200)).await;
    }
    let stop = CancellationToken::new();
    let plane = NatsPlane::connect(config(server, &stage.namespace, "router")).await?;
    let plane: Arc<dyn Plane> = Arc::new(plane);
    let subjects = Subjects::new(&stage.namespace);
    let client = || IndexClient::new(Arc::clone(&plane), subjects.clone());
    let clients = [client().hedged_after(DEADLINE), client()];
    let unread = IntCounter::new("unread", "unread")?;
    let tasks = TaskTracker::new();
    for client in &clients {
        let follow = client.clone().follow_replicas(unread.clone(), stop.clone());
        tasks.spawn(follow);
        tasks.spawn(client.clone().follow_rosters(stop.clone()));
    }
    sleep(Duration::from_secs(2)).await;
    let mut figures = Vec::new();
    for hindrance in [Hindrance::BusyThreads(threads), Hindrance::Pauses] {
        let indexers = [&stage.indexer, &second];
        figures.extend(missed(&clients, indexers, hindrance).await?);
    }
    stop.cancel();
    tasks.close();
    tasks.wait().await;
    drop(second);
    stage.end().await;
    Ok(figures)
}

/// One figure for the client that asks one indexer, and one for that which asks a second one.
async fn missed(
    clients: &[IndexClient; 2],
    indexers: [&Indexer; 2],
    hindrance: Hindrance,
) -> anyhow::Result<[Figure; 2]> {
    let answered =
        async || anyhow::Ok(indexers[0].answered().await? + indexers[1].answered().await?);
    let before = answered().await?;
    let is_over = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = match hindrance {
        Hindrance::BusyThreads(threads) => (0..threads).map(|_| spin(&is_over)).collect(),
        Hindrance::Pauses => Vec::new(),
    };
    let pauses = async {
        let mut ticks = interval(PAUSE_PERIOD);
        for indexer in indexers.into_iter().cycle() {
            ticks.tick().await;
            if matches!(hindrance, Hindrance::Pauses) {
                indexer.pause(PAUSE).await?;
            }
        }
        anyhow::Ok(())
    };
    let queries = async {
        let mut taken = [(Vec::new(), 0), (Vec::new(), 0)];
        let mut ticks = interval(QUERY_INTERVAL);
        for _ in 0..QUERIES {
            for (client, (samples, missed)) in clients.iter().zip(&mut taken) {
                ticks.tick().await;
                let begun = Instant::now();
                *missed += u64::from(client.ask(&prompt()).await.is_err());
                samples.push(begun.elapsed());
            }
        }
        taken
    };
    let taken = tokio::select! {
        ended = pauses => return Err(ended.err().context("pauses do not end")?),
        taken = queries => taken,
    };
    is_over.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| drop(thread.join()));
    // What was answered too late counts too.
    sleep(Duration::from_millis(200)).await;
    let twice = (answered().await? - before).saturating_sub(2 * QUERIES as u64);
    let percent = |count: u64| count as f64 * 100.0 / QUERIES as f64;
    let what = match hindrance {
        Hindrance::BusyThreads(threads) => format!("{threads} busy threads"),
        Hindrance::Pauses => "indexers stopped in turn".to_owned(),
    };
    let asked = [
        "one indexer".to_owned(),
        format!("a second one for {:.2} %", percent(twice)),
    ];
    let figure = |(asked, (mut samples, missed)): (String, (Vec<Duration>, u64))| {
        let what = format!("{what}, {asked}: {:.2} % missed", percent(missed));
        Figure::of(&what, None, QUERIES as u64, &mut samples)
    };
    let [one, two] = taken;
    let [of_one, of_two] = asked;
    Ok([figure((of_one, one)), figure((of_two, two))])
}

/// A thread that computes until it is over.
fn spin(is_over: &Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    let is_over = Arc::clone(is_over);
    std::thread::spawn(move || {
        while !is_over.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
    })
}
