//! What one decision costs among 512 sources with 20,000 active requests, for a prompt of 32,000
//! tokens of which nine tenths are cached at some: hashing, the index's lookup, and the decision
//! with its accounting. `cargo bench -p warmroute-route --bench decide`.
//!
//! One thread, everything in one process, no encoding and no task: the pure parts of a request's
//! way.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::time::{Duration, Instant};

use fastrand::Rng;
use warmroute_index::tree::{SourceNumber, TierMask, Tree};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, SourceAnswer, SourceState};
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::{
    BlockSize, Change, DpRank, EngineSeq, Generation, LogPosition, PrefixHash, RecordNumber,
    RouterId, Seed, Source, StreamIdentity, Tier, Tiers,
};
use warmroute_route::{
    Core, CoreConfig, Health, IndexReply, Knobs, Prompt, RouteRequest, SlotEvent,
};

const SOURCES: u32 = 512;
const ACTIVE: u32 = 20_000;
const TOKENS: u32 = 32_000;
/// Number of different prompt families.
const FAMILIES: u32 = 64;
/// Sources that hold a family's common part.
const HOLDERS: u32 = 8;
const DECISIONS: usize = 2_000;

fn source(number: u32) -> Source {
    Source {
        worker: format!("worker-{number}.pool.example").as_str().into(),
        dp_rank: DpRank(0),
    }
}

fn core() -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: Knobs::default(),
        router: RouterId([1; 16]),
        incarnation: Generation(1),
        seed: 1,
    });
    let entry = |number| WorkerEntry {
        models: vec!["m".into()],
        block_size: BlockSize::new(16),
        main_attention_only: true,
        ..WorkerEntry::new(
            source(number).worker,
            format!("http://worker-{number}:8000"),
        )
    };
    core.set_workers(&(0..SOURCES).map(entry).collect::<Vec<_>>());
    for number in 0..SOURCES {
        core.set_health(&source(number).worker, Health::Healthy);
    }
    core
}

/// Nine tenths are the family's.
fn tokens(family: u32, own: u32) -> Vec<u32> {
    let common = TOKENS / 10 * 9;
    let token = |at| match at < common {
        true => family * 100_000 + at,
        false => 10_000_000 + own.wrapping_mul(7919).wrapping_add(at),
    };
    (0..TOKENS).map(token).collect()
}

fn prompt(tokens: &[u32]) -> Prompt {
    Prompt::new(tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

struct Index {
    tree: Tree,
    sources: Vec<(Source, SourceNumber)>,
}

impl Index {
    fn new() -> Self {
        let mut tree = Tree::new();
        let open = |number| (source(number), tree.open());
        let sources: Vec<_> = (0..SOURCES).map(open).collect();
        for family in 0..FAMILIES {
            let prompt = prompt(&tokens(family, 0));
            let common = prompt.blocks().len() / 10 * 9;
            let change = Change::Stored {
                parent: None,
                blocks: prompt.blocks()[..common].to_vec(),
                tier: Tier::Gpu,
            };
            for holder in 0..HOLDERS {
                let at = (family * HOLDERS + holder) % SOURCES;
                tree.apply(sources[at as usize].1, &change).unwrap();
            }
        }
        Self { tree, sources }
    }

    fn answer(&self, prompt: &Prompt) -> IndexReply {
        let chain: Vec<PrefixHash> = prefix_hashes(None, prompt.blocks()).collect();
        let allowed: Vec<_> = self
            .sources
            .iter()
            .map(|(_, number)| (*number, TierMask::ALL))
            .collect();
        let runs = self.tree.lookup_chain(&chain, &allowed);
        let of = |((source, _), run): (&(Source, SourceNumber), Tiers<u32>)| SourceAnswer {
            source: source.clone(),
            generation: Generation(1),
            number: Some(RecordNumber(1)),
            engine_seq: Some(EngineSeq(1)),
            states: Tiers::all(SourceState::Exact),
            reason: None,
            proof_age_ms: 0,
            run,
        };
        let answer = IndexAnswer::Runs {
            log: StreamIdentity {
                created_unix_ns: 0,
                nonce: 0,
            },
            position: LogPosition(1),
            sources: self.sources.iter().zip(runs).map(of).collect(),
        };
        answer.into()
    }
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
    println!("{what:<34} p50 {:>9.1?}  p99 {:>9.1?}", at(50), at(99));
}

fn main() {
    let (index, mut core, mut rng) = (Index::new(), core(), Rng::with_seed(1));
    let mut now = Instant::now();
    let mut admit = |core: &mut Core, prompt: &Prompt, answer: Option<&IndexReply>| {
        now += Duration::from_micros(100);
        let ask = RouteRequest {
            model: "m",
            prompt,
            exclude: &[],
        };
        (core.admit(&ask, answer, now).unwrap().slot, now)
    };
    // What is active decodes, and has shorter prompts: 16 families' beginnings.
    for number in 0..ACTIVE {
        let shorter = tokens(rng.u32(..16), number);
        let (counter, now) = admit(&mut core, &prompt(&shorter[..2_000]), None);
        core.note(SlotEvent::FirstToken { counter }, now).unwrap();
    }
    let mut spans: [Vec<Duration>; 4] = Default::default();
    for number in 0..DECISIONS {
        let tokens = tokens(rng.u32(..FAMILIES), 100_000 + number as u32);
        let begin = Instant::now();
        let prompt = prompt(&tokens);
        let hashed = Instant::now();
        let answer = index.answer(&prompt);
        let looked = Instant::now();
        let (counter, now) = admit(&mut core, &prompt, Some(&answer));
        let decided = Instant::now();
        for (span, time) in spans.iter_mut().zip([
            hashed - begin,
            looked - hashed,
            decided - looked,
            decided - begin,
        ]) {
            span.push(time);
        }
        core.note(SlotEvent::FirstToken { counter }, now).unwrap();
    }
    println!("{SOURCES} sources, {ACTIVE} active requests, prompts of {TOKENS} tokens");
    let names = ["hash", "look up", "decide and account", "all"];
    for (name, times) in names.into_iter().zip(spans) {
        report(name, times);
    }
}
