//! What the tree and the fold say that they keep, against what the process takes.
//!
//! Each shape of holdings is built in a process of its own, this test's executable, because an
//! allocator does not give everything back. `cargo test -p warmroute-index --test memory --
//! --nocapture` prints the ratios.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, its helpers too; it tells its parent what it measured"
)]

use std::process::Command;
use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_index::fold::{Fold, RecordVerdict};
use warmroute_index::tree::{SourceNumber, Tree};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::message::LogMessage;
use warmroute_proto::query::UnknownReason;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, Generation, LocalHash, LogPosition, Namespace, PrefixHash, Record,
    RecordNumber, Source, StreamIdentity, Tier, TierState, Tiers, WorkerId, codec,
};

/// Beyond the estimate: gaps in the allocator's memory that fit nothing, an eighth; and what the
/// process takes before anything is held.
const OVERHEAD: f64 = 1.125;
const CONSTANT: f64 = 4e6;

fn random_blocks(random: &mut Rng, count: usize) -> Vec<LocalHash> {
    (0..count).map(|_| LocalHash(random.u64(..))).collect()
}

fn resident() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = statm.split_whitespace().nth(1).unwrap();
    pages.parse::<f64>().unwrap() * 4096.0
}

/// A tree and its sources, in a process that held nothing before.
struct World {
    random: Rng,
    tree: Tree,
    sources: Vec<SourceNumber>,
    before: f64,
}

impl World {
    fn new(sources: usize) -> Self {
        let before = resident();
        let mut tree = Tree::new();
        Self {
            random: Rng::with_seed(sources as u64),
            sources: (0..sources).map(|_| tree.open()).collect(),
            tree,
            before,
        }
    }

    fn apply(&mut self, source: usize, change: &Change) {
        self.tree.apply(self.sources[source], change).unwrap();
    }

    fn store(
        &mut self,
        source: usize,
        parent: Option<PrefixHash>,
        blocks: &[LocalHash],
        tier: Tier,
    ) {
        let stored = Change::Stored {
            parent,
            blocks: blocks.to_vec(),
            tier,
        };
        self.apply(source, &stored);
    }

    fn close_all(&mut self) {
        for number in &mut self.sources {
            self.tree.close(*number);
            while self.tree.reclaim(4096) {}
            *number = self.tree.open();
        }
    }

    /// Estimate and resident bytes, for the parent.
    fn tell(&self, what: &str) {
        let (estimate, resident) = (self.tree.bytes(), resident() - self.before);
        println!(
            "measured {what} {estimate} {resident} {}",
            self.tree.nodes()
        );
    }
}

/// Sessions of turns behind shared prompts, a quarter of them on two sources, interleaved.
fn sessions(world: &mut World, turns: usize) {
    let sources = world.sources.len();
    let shared: Vec<_> = (0..16)
        .map(|_| random_blocks(&mut world.random, 100))
        .collect();
    let ends: Vec<_> = shared
        .iter()
        .map(|blocks| prefix_hashes(None, blocks).last())
        .collect();
    for source in 0..sources {
        for blocks in &shared {
            world.store(source, None, blocks, Tier::Gpu);
        }
    }
    let mut live: Vec<_> = (0..4 * sources).map(|at| ends[at % 16]).collect();
    for _ in 0..turns {
        let at = world.random.usize(..live.len());
        let blocks = random_blocks(&mut world.random, 40);
        world.store(at % sources, live[at], &blocks, Tier::Gpu);
        live[at] = prefix_hashes(live[at], &blocks).last();
        if world.random.usize(..50) == 0 {
            live[at] = ends[at % 16];
        }
    }
}

fn singles(world: &mut World, count: usize) {
    for at in 0..count {
        let blocks = random_blocks(&mut world.random, 1);
        world.store(at % world.sources.len(), None, &blocks, Tier::Gpu);
    }
}

/// Prompts of which each source holds another part, some in lower tiers and with holes.
fn shared(world: &mut World, prompts: usize) {
    for _ in 0..prompts {
        let blocks = random_blocks(&mut world.random, 60);
        let prefixes: Vec<_> = prefix_hashes(None, &blocks).collect();
        for source in 0..world.sources.len() {
            let held = 1 + world.random.usize(..60);
            world.store(source, None, &blocks[..held], Tier::Gpu);
            if source % 4 == 0 {
                world.store(source, None, &blocks[..held / 2], Tier::Cpu);
                let holes = prefixes[..held].iter().copied().step_by(3).collect();
                let removed = Change::Removed {
                    blocks: holes,
                    tier: Tier::Gpu,
                };
                world.apply(source, &removed);
            }
        }
    }
}

fn shape(name: &str) {
    match name {
        "sessions" => {
            let mut world = World::new(64);
            for part in 0..4 {
                sessions(&mut world, 10_000);
                world.tell(&format!("sessions-{part}"));
            }
            world.close_all();
            sessions(&mut world, 40_000);
            world.tell("sessions-again");
        }
        "singles" => {
            let mut world = World::new(8);
            singles(&mut world, 200_000);
            world.tell("singles");
            world.close_all();
            // The memory of many short runs is to serve long ones.
            for _ in 0..8 {
                sessions(&mut world, 8_000);
                world.tell("sessions-after-singles");
            }
        }
        "shared" => {
            let mut world = World::new(512);
            shared(&mut world, 400);
            world.tell("shared");
            world.close_all();
            singles(&mut world, 100_000);
            world.tell("singles-after-shared");
        }
        "image" => {
            let mut world = World::new(64);
            sessions(&mut world, 40_000);
            let image = world.tree.image(&world.sources);
            world.tree = Tree::new();
            let (tree, _) = Tree::from_image(&image).unwrap();
            world.tree = tree;
            drop(image);
            // What there was before is free now, and used or given back.
            world.before += 8e6;
            world.tell("restored");
        }
        "shrunk" => {
            let mut world = World::new(40);
            sessions(&mut world, 80_000);
            world.tell("full");
            for number in world.sources.split_off(5) {
                world.tree.close(number);
            }
            world.tree.trim();
            while world.tree.reclaim(64) {}
            world.tell("shrunk");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn estimate_is_what_the_process_takes() {
    if let Some(name) = asked_for() {
        shape(&name);
        return;
    }
    for name in ["sessions", "singles", "shared", "image", "shrunk"] {
        let told = child("estimate_is_what_the_process_takes", name);
        assert!(!told.is_empty());
        // What was freed stays with the process, and is used again.
        let mut most: f64 = 0.0;
        for (what, figures) in told {
            let [estimate, resident, blocks] = figures[..] else {
                panic!("{what}");
            };
            println!(
                "{what}: {:.1} MB estimated, {:.1} resident, {:.3}; {:.1} bytes a block",
                estimate / 1e6,
                resident / 1e6,
                resident / estimate,
                resident / blocks
            );
            most = most.max(estimate);
            assert!(resident <= most * OVERHEAD + CONSTANT, "{what} takes more");
        }
    }
}

/// Runs a test of this file in another process; the lines that it measured.
fn child(test: &str, what: &str) -> Vec<(String, Vec<f64>)> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            test,
            "--nocapture",
            "--skip",
            &format!("{ASKED}{what}"),
        ])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{what}: {text}{errors}");
    let lines = text.lines().filter_map(|line| line.split_once("measured "));
    let figures = |line: &str| {
        let mut words = line.split_whitespace();
        let what = words.next().unwrap().to_owned();
        (what, words.map(|word| word.parse().unwrap()).collect())
    };
    lines.map(|(_, line)| figures(line)).collect()
}

/// The test harness takes no arguments of ours, but names of tests that it is to skip.
const ASKED: &str = "child-that-builds-";

fn asked_for() -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(ASKED).map(str::to_owned))
}

// --- the bound

const BOUND: usize = 48 << 20;
/// What the process may take beyond the bound: in service also the runtime and what is on its way.
const BEYOND: f64 = 8e6;

struct Shim {
    source: Source,
    number: u64,
    digest: Digest,
    end: Option<PrefixHash>,
}

/// A fold, its log, and shims that send only changes.
struct Log {
    fold: Fold,
    subjects: Subjects,
    now: Instant,
    position: LogPosition,
    shims: Vec<Shim>,
    random: Rng,
}

impl Log {
    fn new(shims: usize) -> Self {
        let namespace = Namespace::from("t");
        let mut fold = Fold::new(&namespace, Some(BOUND));
        fold.follow(StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        });
        #[expect(clippy::disallowed_methods, reason = "any instant will do")]
        let now = Instant::now();
        fold.observe_end(now, LogPosition(0), 0);
        let shim = |name| Shim {
            source: Source {
                worker: WorkerId::from(format!("w{name}")),
                dp_rank: DpRank(0),
            },
            number: 0,
            digest: Digest::default(),
            end: None,
        };
        Self {
            fold,
            subjects: Subjects::new(&namespace),
            now,
            position: LogPosition(0),
            shims: (0..shims).map(shim).collect(),
            random: Rng::with_seed(7),
        }
    }

    fn store(&mut self, at: usize, count: usize, go_on: bool) -> RecordVerdict {
        let blocks = random_blocks(&mut self.random, count);
        let shim = &mut self.shims[at];
        let parent = shim.end.filter(|_| go_on);
        for prefix in prefix_hashes(parent, &blocks) {
            shim.digest.insert(prefix, Tier::Gpu);
            shim.end = Some(prefix);
        }
        let record = Record {
            source: shim.source.clone(),
            generation: Generation(1),
            number: RecordNumber(shim.number),
            engine_seq: None,
            changes: vec![Change::Stored {
                parent,
                blocks,
                tier: Tier::Gpu,
            }],
            states: Tiers::all(TierState::Complete),
            after: shim.digest,
            sent_at: None,
        };
        shim.number += 1;
        self.position = self.position.next();
        let message = LogMessage {
            position: self.position,
            subject: self.subjects.records(&shim.source),
            payload: codec::encode(&record).unwrap().into(),
            stored_unix_ns: 0,
        };
        let verdict = self.fold.apply(self.now, &message);
        self.fold.reclaim(1024);
        verdict
    }
}

/// Thirty times what fits, in long runs and short ones.
fn beyond_the_bound() {
    let before = resident();
    let mut log = Log::new(24);
    let mut most: f64 = 0.0;
    for round in 0..24_000_u32 {
        let at = log.random.usize(..24);
        let long = round / 4_000 % 2 == 0;
        let verdict = match long {
            true => log.store(at, 400, true),
            false => log.store(at, 1 + (round % 3) as usize, false),
        };
        let known = [
            RecordVerdict::Started,
            RecordVerdict::Applied,
            RecordVerdict::NotFolded,
        ];
        assert!(known.contains(&verdict), "{verdict:?}");
        assert!(log.fold.bytes() <= BOUND);
        if round % 16 == 0 {
            most = most.max(resident() - before);
        }
        if round % 500 == 0 {
            log.now += Duration::from_secs(1);
            log.fold.tick(log.now);
        }
    }
    let now = log.now;
    let aside = |reason| reason == Some(UnknownReason::Memory);
    let standings: Vec<_> = log
        .fold
        .statuses(now)
        .map(|(_, standing)| standing)
        .collect();
    let set_aside = standings
        .iter()
        .filter(|standing| aside(standing.reason))
        .count();
    for (shim, standing) in log.shims.iter().zip(&standings) {
        // Names are not in the order of numbers: what is held must be some shim's truth.
        let held = standing.digest.is_none() == aside(standing.reason);
        assert!(held, "{}", shim.source);
    }
    for shim in &log.shims {
        let (_, standing) = log
            .fold
            .statuses(now)
            .find(|(name, _)| **name == shim.source)
            .unwrap();
        assert!(standing.digest.is_none_or(|digest| digest == shim.digest));
    }
    assert_eq!(
        log.fold.poll_resyncs(now),
        [],
        "no request for what does not fit"
    );
    println!("measured bound {BOUND} {most} {set_aside}");
}

#[test]
fn resident_memory_keeps_to_the_bound() {
    if asked_for().is_some() {
        beyond_the_bound();
        return;
    }
    let told = child("resident_memory_keeps_to_the_bound", "bound");
    let (_, figures) = &told[0];
    let [bound, most, set_aside] = figures[..] else {
        panic!("{figures:?}");
    };
    println!(
        "bound {:.1} MB, resident at most {:.1}, {set_aside} of 24 set aside",
        bound / 1e6,
        most / 1e6
    );
    assert!(most <= bound + BEYOND, "the bound is one of the process");
    assert!(
        (1.0..24.0).contains(&set_aside),
        "some are folded, some are not"
    );
}
