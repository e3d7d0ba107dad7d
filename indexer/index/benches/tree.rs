//! The tree on a small agentic workload: sessions of a few tenants grow turn by turn, move between
//! workers, and are evicted from their ends. `cargo bench -p warmroute-index`.
//!
//! It answers how long a lookup and a change take and what a block costs here; the comparison with
//! others is `tests/bench-tree`. Every answer is checked against a walk over sets first.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::collections::{BTreeSet, HashSet};
use std::hint::black_box;
use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_index::tree::{SourceNumber, Tree};
use warmroute_proto::hash::{LocalHash, PrefixHash, Seed, prefix_hashes, prompt_hashes};
use warmroute_proto::{BlockSize, Change, Tier};

const BLOCKS: usize = 400_000;
const QUERIES: usize = 5_000;
const CHECKED: usize = 200;
const BLOCK_TOKENS: u32 = 16;

fn random_blocks(random: &mut Rng, count: usize) -> Vec<LocalHash> {
    (0..count).map(|_| LocalHash(random.u64(..))).collect()
}

struct Session {
    path: Vec<LocalHash>,
    home: usize,
}

struct Workload {
    changes: Vec<(usize, Change)>,
    queries: Vec<Vec<PrefixHash>>,
    held: Vec<HashSet<PrefixHash>>,
}

impl Workload {
    fn new(workers: usize) -> Self {
        let mut random = Rng::with_seed(workers as u64);
        let tenants: Vec<_> = (0..16).map(|_| random_blocks(&mut random, 300)).collect();
        let begin = |random: &mut Rng| Session {
            path: tenants[random.usize(..16)].clone(),
            home: random.usize(..workers),
        };
        let mut sessions: Vec<_> = (0..2 * workers).map(|_| begin(&mut random)).collect();
        let mut workload = Self {
            changes: Vec::new(),
            queries: Vec::new(),
            held: vec![HashSet::new(); workers],
        };
        let mut stored = 0;
        while stored < BLOCKS {
            let at = random.usize(..sessions.len());
            if sessions[at].path.len() > 3000 {
                let old = std::mem::replace(&mut sessions[at], begin(&mut random));
                workload.evict(&old);
            }
            let session = &mut sessions[at];
            if random.usize(..10) == 0 {
                session.home = random.usize(..workers);
            }
            let turn = random.usize(4..120);
            session.path.extend(random_blocks(&mut random, turn));
            stored += workload.store(session);
        }
        for _ in 0..QUERIES {
            let session = &sessions[random.usize(..sessions.len())];
            let known = if random.usize(..10) == 0 {
                0
            } else {
                session.path.len()
            };
            let mut prompt = session.path[..known].to_vec();
            let new = random.usize(4..100);
            prompt.extend(random_blocks(&mut random, new));
            workload
                .queries
                .push(prefix_hashes(None, &prompt).collect());
        }
        workload
    }

    /// Stores what the session's home lacks of its path.
    fn store(&mut self, session: &Session) -> usize {
        let prefixes: Vec<_> = prefix_hashes(None, &session.path).collect();
        let held = &mut self.held[session.home];
        let from = prefixes.partition_point(|prefix| held.contains(prefix));
        held.extend(&prefixes[from..]);
        let parent = from.checked_sub(1).map(|last| prefixes[last]);
        let change = Change::Stored {
            parent,
            blocks: session.path[from..].to_vec(),
            tier: Tier::Gpu,
        };
        self.changes.push((session.home, change));
        prefixes.len() - from
    }

    /// Evicts the last half of a session everywhere, from its end.
    fn evict(&mut self, session: &Session) {
        let prefixes: Vec<_> = prefix_hashes(None, &session.path).collect();
        for (worker, held) in self.held.iter_mut().enumerate() {
            let half = prefixes[prefixes.len() / 2..].iter().rev();
            let blocks: Vec<_> = half.copied().filter(|prefix| held.remove(prefix)).collect();
            if !blocks.is_empty() {
                let tier = Tier::Gpu;
                self.changes
                    .push((worker, Change::Removed { blocks, tier }));
            }
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn measure(workers: usize) {
    let workload = Workload::new(workers);
    let mut tree = Tree::new();
    let numbers: Vec<SourceNumber> = (0..workers).map(|_| tree.open()).collect();
    let touched: usize = workload
        .changes
        .iter()
        .map(|(_, change)| match change {
            Change::Stored { blocks, .. } => blocks.len(),
            Change::Removed { blocks, .. } => blocks.len(),
            Change::Cleared { .. } => 0,
        })
        .sum();
    let start = Instant::now();
    for (worker, change) in &workload.changes {
        tree.apply(numbers[*worker], change).unwrap();
    }
    let applied = start.elapsed();
    for query in workload.queries.iter().take(CHECKED) {
        for (number, held) in numbers.iter().zip(&workload.held) {
            let run = query
                .iter()
                .take_while(|&prefix| held.contains(prefix))
                .count();
            assert_eq!(tree.lookup_all(query)[number.index()].gpu as usize, run);
        }
    }
    let time = |query: &Vec<PrefixHash>| {
        let start = Instant::now();
        drop(black_box(tree.lookup_all(black_box(query))));
        start.elapsed()
    };
    let lookup = median(workload.queries.iter().map(time).collect());
    let entries: usize = workload.held.iter().map(HashSet::len).sum();
    let distinct = workload
        .held
        .iter()
        .flatten()
        .collect::<BTreeSet<_>>()
        .len();
    assert_eq!(tree.nodes(), distinct);
    println!(
        "{workers:4} workers: apply {:5.1} M blocks/s, lookup {lookup:?} (median), {:4.1} bytes a \
         (worker, block), image {:4.1} bytes a block",
        touched as f64 / applied.as_secs_f64() / 1e6,
        tree.bytes() as f64 / entries as f64,
        tree.image(&numbers).len() as f64 / distinct as f64,
    );
}

fn main() {
    for workers in [8, 64, 512] {
        measure(workers);
    }
    let tokens: Vec<u32> = (0..32 * 1024).collect();
    let size = BlockSize::new(BLOCK_TOKENS).unwrap();
    let hash = |_| {
        let start = Instant::now();
        drop(black_box(prompt_hashes(
            black_box(&tokens),
            size,
            Seed::PLAIN,
        )));
        start.elapsed()
    };
    println!(
        "hashing a prompt of 32 k tokens: {:?}",
        median((0..1000).map(hash).collect())
    );
}
