//! Memory stays where it is while blocks and sources come and go at constant residency.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers too"
)]

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use fastrand::Rng;
use warmroute_index::tree::{SourceNumber, Tree};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::{Change, LocalHash, PrefixHash, Tier};

/// Resident memory is the whole process's: one test at a time.
static PROCESS: Mutex<()> = Mutex::new(());

const SOURCES: usize = 32;
/// Blocks that a source holds besides the shared prompts.
const RESIDENT: usize = 8_000;

fn random_blocks(random: &mut Rng, count: usize) -> Vec<LocalHash> {
    (0..count).map(|_| LocalHash(random.u64(..))).collect()
}

struct Engine {
    number: SourceNumber,
    resident: usize,
    /// The blocks of each prompt behind the shared part, the oldest prompt first.
    prompts: VecDeque<Vec<PrefixHash>>,
}

struct World {
    random: Rng,
    tree: Tree,
    shared: Vec<Vec<LocalHash>>,
    engines: Vec<Engine>,
    blocks: u64,
}

fn stored(parent: Option<PrefixHash>, blocks: Vec<LocalHash>) -> Change {
    Change::Stored {
        parent,
        blocks,
        tier: Tier::Gpu,
    }
}

impl World {
    fn new() -> Self {
        let mut random = Rng::with_seed(1);
        let shared = (0..16).map(|_| random_blocks(&mut random, 100)).collect();
        let mut world = Self {
            random,
            tree: Tree::new(),
            shared,
            engines: Vec::new(),
            blocks: 0,
        };
        for _ in 0..SOURCES {
            let engine = world.join();
            world.engines.push(engine);
        }
        world
    }

    fn join(&mut self) -> Engine {
        let number = self.tree.open();
        for shared in &self.shared {
            self.tree
                .apply(number, &stored(None, shared.clone()))
                .unwrap();
            self.blocks += shared.len() as u64;
        }
        Engine {
            number,
            resident: 0,
            prompts: VecDeque::new(),
        }
    }

    /// One engine takes a new prompt and evicts its oldest ones; rarely it restarts instead.
    fn step(&mut self) {
        let at = self.random.usize(..SOURCES);
        if self.random.usize(..2_000) == 0 {
            self.tree.close(self.engines[at].number);
            self.engines[at] = self.join();
        }
        self.tree.reclaim(4096);
        let shared = &self.shared[self.random.usize(..16)];
        // Most branch off somewhere in the shared prompt, as conversations do.
        let cut = 1 + self.random.usize(..shared.len());
        let parent = prefix_hashes(None, &shared[..cut]).last();
        let count = 1 + self.random.usize(..200);
        let blocks = random_blocks(&mut self.random, count);
        let engine = &mut self.engines[at];
        engine
            .prompts
            .push_back(prefix_hashes(parent, &blocks).collect());
        engine.resident += count;
        self.blocks += count as u64;
        self.tree
            .apply(engine.number, &stored(parent, blocks))
            .unwrap();
        while engine.resident > RESIDENT {
            let mut oldest = engine.prompts.pop_front().unwrap();
            engine.resident -= oldest.len();
            self.blocks += oldest.len() as u64;
            if self.random.usize(..10) > 0 {
                oldest.reverse();
            } else {
                // Holes first, then the rest.
                oldest.sort_unstable();
            }
            let removed = Change::Removed {
                blocks: oldest,
                tier: Tier::Gpu,
            };
            self.tree.apply(engine.number, &removed).unwrap();
        }
    }

    fn run_until(&mut self, blocks: u64) {
        while self.blocks < blocks {
            self.step();
        }
    }
}

fn resident_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = statm.split_whitespace().nth(1).unwrap();
    pages.parse::<f64>().unwrap() * 4096.0
}

fn soak(blocks: u64) {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut world = World::new();
    world.run_until(blocks / 20);
    let (tree, resident) = (world.tree.bytes() as f64, resident_bytes());
    world.run_until(blocks);
    assert!(
        (world.tree.bytes() as f64) < tree * 1.1,
        "{tree} grew to {}",
        world.tree.bytes()
    );
    assert!(
        resident_bytes() < resident * 1.1,
        "{resident} grew to {}",
        resident_bytes()
    );
    for engine in &world.engines {
        let recomputed = world.tree.recomputed_digest(engine.number);
        assert_eq!(world.tree.digest(engine.number), recomputed);
        world.tree.close(engine.number);
    }
    while world.tree.reclaim(1000) {}
    assert_eq!(world.tree.nodes(), 0);
    assert!(
        world.tree.bytes() < 1 << 16,
        "only the sources' numbers stay"
    );
}

#[test]
fn memory_does_not_grow_under_churn() {
    soak(20_000_000);
}

/// `cargo test --release -p warmroute-index --test churn -- --ignored`
#[test]
#[ignore = "some minutes in a release build"]
fn memory_does_not_grow_under_churn_for_long() {
    soak(500_000_000);
}

#[test]
fn ten_thousand_sources_join_and_leave_without_growth() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut tree = Tree::new();
    let mut random = Rng::with_seed(2);
    let shared = random_blocks(&mut random, 50);
    let mut bytes = 0;
    for round in 0..10_000 {
        let number = tree.open();
        assert!(number.index() < 3, "numbers are used again");
        tree.apply(number, &stored(None, shared.clone())).unwrap();
        let parent = prefix_hashes(None, &shared).nth(20);
        let own = random_blocks(&mut random, 20);
        tree.apply(number, &stored(parent, own)).unwrap();
        tree.close(number);
        tree.reclaim(100);
        if round == 100 {
            bytes = tree.bytes();
        }
        assert!(round < 100 || tree.bytes() <= bytes * 2);
    }
}
