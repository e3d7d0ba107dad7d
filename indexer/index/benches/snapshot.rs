//! Snapshots of a large fold: how long the log waits, what readers feel, how fast one is read back.
//! `cargo bench -p warmroute-index --bench snapshot [-- ENTRIES]`, 2 million (source, block) pairs
//! by default.
//!
//! Lookups run on a thread of their own, once beside nothing and once beside one cut after the
//! other; both p99 are printed, so that their ratio is of one run.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use warmroute_index::fair_lock::{FairReader, FairWriter};
use warmroute_index::fold::{Fold, RecordVerdict};
use warmroute_index::query::PreparedQuery;
use warmroute_index::snapshot::{Restored, format};
use warmroute_proto::hash::{LocalHash, PrefixHash, prefix_hashes};
use warmroute_proto::message::LogMessage;
use warmroute_proto::query::IndexQuery;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineSeq, Generation, LogPosition, Namespace, Record, RecordNumber,
    Source, StreamIdentity, Tier, TierState, Tiers, WorkerId, codec,
};

const SOURCES: usize = 64;
const TENANTS: usize = 16;
const SHARED: usize = 300;
/// Blocks of a record: a busy engine's batch.
const RECORD: usize = 120;
/// Records of one session on one source.
const TURNS: usize = 20;
const CUTS: u32 = 10;
const LOOKING: Duration = Duration::from_secs(2);

fn random_blocks(random: &mut Rng, count: usize) -> Vec<LocalHash> {
    (0..count).map(|_| LocalHash(random.u64(..))).collect()
}

struct Shim {
    source: Source,
    number: Option<RecordNumber>,
    digest: Digest,
    /// Tenants whose prompt it holds.
    tenants: [bool; TENANTS],
}

struct World {
    fold: Fold,
    subjects: Subjects,
    now: Instant,
    position: LogPosition,
    log_bytes: u64,
}

impl World {
    fn new() -> Self {
        let namespace = Namespace::from("bench");
        let mut fold = Fold::new(&namespace, None);
        let now = Instant::now();
        fold.follow(StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        });
        fold.observe_end(now, LogPosition(0), 0);
        Self {
            fold,
            subjects: Subjects::new(&namespace),
            now,
            position: LogPosition(0),
            log_bytes: 0,
        }
    }

    fn store(&mut self, shim: &mut Shim, parent: Option<PrefixHash>, blocks: &[LocalHash]) {
        for prefix in prefix_hashes(parent, blocks) {
            shim.digest.insert(prefix, Tier::Gpu);
        }
        shim.number = Some(shim.number.map_or(RecordNumber(0), RecordNumber::next));
        let record = Record {
            source: shim.source.clone(),
            generation: Generation(1),
            number: shim.number.unwrap(),
            engine_seq: shim.number.map(|number| EngineSeq(number.0)),
            changes: vec![Change::Stored {
                parent,
                blocks: blocks.to_vec(),
                tier: Tier::Gpu,
            }],
            states: Tiers::all(TierState::Complete),
            after: shim.digest,
            sent_at: None,
        };
        self.position = self.position.next();
        let payload: Bytes = codec::encode(&record).unwrap().into();
        self.log_bytes += payload.len() as u64;
        let message = LogMessage {
            position: self.position,
            subject: self.subjects.records(&shim.source),
            payload,
            stored_unix_ns: self.position.0,
        };
        let verdict = self.fold.apply(self.now, &message);
        assert!(matches!(
            verdict,
            RecordVerdict::Applied | RecordVerdict::Started
        ));
    }
}

/// Sessions of a few tenants on random sources, some of them on two; and prompts that go on in
/// them.
fn build(entries: usize) -> (World, Vec<IndexQuery>) {
    let mut random = Rng::with_seed(entries as u64);
    let tenants: Vec<_> = (0..TENANTS)
        .map(|_| random_blocks(&mut random, SHARED))
        .collect();
    let shim = |rank: usize| Shim {
        source: Source {
            worker: WorkerId::from(format!("worker-{rank}")),
            dp_rank: DpRank(0),
        },
        number: None,
        digest: Digest::default(),
        tenants: [false; TENANTS],
    };
    let mut shims: Vec<Shim> = (0..SOURCES).map(shim).collect();
    let mut world = World::new();
    let mut queries = Vec::new();
    let mut held = 0;
    while held < entries {
        let tenant = random.usize(..TENANTS);
        let prompt = &tenants[tenant];
        let session = random_blocks(&mut random, RECORD * TURNS);
        let first = random.usize(..SOURCES);
        let second = (first + 1 + random.usize(..SOURCES - 1)) % SOURCES;
        let homes = if random.usize(..4) == 0 { 2 } else { 1 };
        for home in [first, second].into_iter().take(homes) {
            let shim = &mut shims[home];
            if !std::mem::replace(&mut shim.tenants[tenant], true) {
                world.store(shim, None, prompt);
                held += prompt.len();
            }
            let mut parent = prefix_hashes(None, prompt).last();
            for turn in session.chunks(RECORD) {
                world.store(shim, parent, turn);
                parent = prefix_hashes(parent, turn).last();
                held += turn.len();
            }
        }
        if queries.len() < 5_000 {
            let depth = random.usize(..session.len());
            let mut blocks = prompt.clone();
            blocks.extend(&session[..depth]);
            blocks.extend(random_blocks(&mut random, 50));
            queries.push(IndexQuery {
                blocks,
                at_least: None,
            });
        }
    }
    (world, queries)
}

/// Sorted times of lookups, one after the other, until stopped.
fn look(
    fold: &FairReader<Fold>,
    queries: &[IndexQuery],
    now: Instant,
    stop: &AtomicBool,
) -> Vec<Duration> {
    let mut times = Vec::new();
    for query in queries.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let start = Instant::now();
        let answer = PreparedQuery::of(query).answer(&fold.read(), now);
        times.push(start.elapsed());
        drop(answer);
    }
    times.sort_unstable();
    times
}

fn print_times(what: &str, times: &[Duration]) -> Duration {
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    let p99 = at(0.99);
    println!(
        "{what}: {} lookups, p50 {:?}, p99 {p99:?}, worst {:?}",
        times.len(),
        at(0.5),
        at(1.0)
    );
    p99
}

/// Lookups while `beside` runs.
fn beside(
    fold: &FairReader<Fold>,
    queries: &[IndexQuery],
    now: Instant,
    beside: impl FnOnce(),
) -> Vec<Duration> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| look(fold, queries, now, &stop));
        beside();
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    })
}

fn main() {
    let mut arguments = std::env::args()
        .skip(1)
        .filter_map(|text| text.parse().ok());
    let entries = arguments.next().unwrap_or(2_000_000);
    let start = Instant::now();
    let (world, queries) = build(entries);
    let built = start.elapsed();
    let (now, log_bytes) = (world.now, world.log_bytes);
    println!(
        "{entries} entries, {} blocks, tree {} MB, log {} MB, built in {built:?}",
        world.fold.tree().nodes(),
        world.fold.tree().bytes() / 1_000_000,
        log_bytes / 1_000_000,
    );
    let fold = FairWriter::new(world.fold).reader();
    let quiet = beside(&fold, &queries, now, || std::thread::sleep(LOOKING));
    let quiet = print_times("alone", &quiet);
    let mut cuts = Vec::new();
    let mut buffer = vec![1; fold.read().tree().image_bytes() * 17 / 16];
    let busy = beside(&fold, &queries, now, || {
        for _ in 0..CUTS {
            let start = Instant::now();
            let cut = fold.read().cut(std::mem::take(&mut buffer)).unwrap();
            cuts.push(start.elapsed());
            buffer = cut.image;
        }
    });
    let busy = print_times("beside cuts", &busy);
    cuts.sort_unstable();
    println!(
        "under the read lock (only the log waits): median {:?}, worst {:?}; lookups' p99 {:.2} ×",
        cuts[cuts.len() / 2],
        cuts[cuts.len() - 1],
        busy.as_secs_f64() / quiet.as_secs_f64(),
    );
    let cut = fold.read().cut(Vec::new()).unwrap();
    let start = Instant::now();
    cut.verify().unwrap();
    println!("digests recomputed, without lock: {:?}", start.elapsed());
    let start = Instant::now();
    let blob = format::encode(&cut.head, &cut.image).unwrap();
    let encoded = start.elapsed();
    let blocks = fold.read().tree().nodes();
    println!(
        "encoded and summed in {encoded:?}: {} MB, {:.2} bytes a block",
        blob.len() / 1_000_000,
        blob.len() as f64 / blocks as f64,
    );
    let start = Instant::now();
    let restored = Restored::read(&blob).unwrap();
    let read = start.elapsed();
    let mut other = Fold::new(&Namespace::from("bench"), None);
    let former = other.adopt(now, restored);
    drop(former);
    println!(
        "read, verified and adopted in {:?} (read {read:?})",
        start.elapsed()
    );
    let both = [&*fold.read(), &other].map(|fold| {
        let told = fold.statuses(now).map(|(_, standing)| standing.digest);
        told.collect::<Vec<_>>()
    });
    assert_eq!(both[0], both[1]);
    if let Some(path) = std::env::args()
        .skip(1)
        .find(|text| text.ends_with(".snapshot"))
    {
        std::fs::write(path, &blob).unwrap();
    }
}
