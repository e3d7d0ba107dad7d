//! What one decision costs: 64 and 512 sources with 16 active requests and four that have just
//! ended each, for a prompt of 32,000 tokens of which no source, one, or every source holds the
//! beginning. `cargo bench -p warmroute-route --bench decide [SOURCES …]`.
//!
//! One thread, everything in one process. A decision is what the core does under its lock:
//! judgement of the index's answer, choice, and accounting with its encoded message. The calls at a
//! request's first token and end hold the same lock.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use warmroute_proto::load::SlotEnd;
use warmroute_proto::query::SourceState;
use warmroute_proto::registry::WorkerEntry;
use warmroute_proto::roster::{
    HolderGroup, HolderPart, NumberSet, RosterId, RosterNumber, RosterPage, RosterRow, RosterStatus,
};
use warmroute_proto::{
    BlockSize, DpRank, Generation, LogPosition, RouterId, Seed, Source, StreamIdentity, Tiers,
};
use warmroute_route::choice::Policy;
use warmroute_route::{
    Core, CoreConfig, Health, HolderReply, IndexReply, Prompt, ReplicaRoster, RouteRequest,
    SlotEvent,
};

const ACTIVE_EACH: u32 = 16;
/// Requests of each source that ended within the last two seconds.
const ENDED_EACH: u32 = 4;
const TOKENS: u32 = 32_000;
/// Tokens of an active request's prompt.
const ACTIVE_TOKENS: u32 = 2_000;
/// Blocks of the beginning that all active requests share.
const COMMON_BLOCKS: u32 = 32;
const DECISIONS: u32 = 2_000;

/// Slots with two events each that wait for the core, as many as a router lets wait.
const NOTED_SLOTS: u32 = 8;

/// Sources that hold the beginning of the prompt.
#[derive(Clone, Copy)]
enum Holding {
    NoSource,
    One,
    All,
}

fn source(number: u32) -> Source {
    Source {
        worker: format!("worker-{number}.pool.example").as_str().into(),
        dp_rank: DpRank(0),
    }
}

fn core(policy: Policy, sources: u32) -> Core {
    let mut core = Core::new(CoreConfig {
        knobs: policy.into(),
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
    core.set_workers(&(0..sources).map(entry).collect::<Vec<_>>());
    for number in 0..sources {
        core.set_health(&source(number).worker, Health::Healthy);
    }
    core
}

/// `own` distinguishes prompts, after `common` tokens that all have.
fn prompt(length: u32, common: u32, own: u32) -> Prompt {
    let token = |at| match at < common {
        true => at,
        false => 1_000_000 + own.wrapping_mul(7919).wrapping_add(at),
    };
    let tokens: Vec<u32> = (0..length).map(token).collect();
    Prompt::new(&tokens, BlockSize::new(16).unwrap(), Seed::PLAIN)
}

/// An index that answers as its indexer does.
struct Index {
    roster: Arc<ReplicaRoster>,
    sources: u32,
    position: u64,
}

impl Index {
    fn new(sources: u32) -> Self {
        let states = Tiers::all(SourceState::Exact);
        let row = |number| RosterRow {
            number: RosterNumber(number),
            source: source(number),
            status: Some(RosterStatus {
                generation: Generation(1),
                states,
                reason: None,
            }),
        };
        let mut roster = ReplicaRoster::default();
        let page = RosterPage {
            roster: RosterId(1),
            version: 1,
            rows: (0..sources).map(row).collect(),
            more: false,
        };
        roster.take(page).unwrap();
        Self {
            roster: Arc::new(roster),
            sources,
            position: 0,
        }
    }

    fn answer(&mut self, holding: Holding) -> IndexReply {
        self.position += 1;
        let (gpu, members) = match holding {
            Holding::NoSource => (0, 0..0),
            Holding::One => (1_000, 7..8),
            Holding::All => (COMMON_BLOCKS, 0..self.sources),
        };
        let group = HolderGroup {
            run: Tiers {
                gpu,
                cpu: 0,
                disk: 0,
            },
            states: Tiers::all(SourceState::Exact),
            members: NumberSet::from_ascending(members.map(RosterNumber)),
        };
        let part = HolderPart {
            roster: RosterId(1),
            log: StreamIdentity {
                created_unix_ns: 0,
                nonce: 0,
            },
            position: LogPosition(self.position),
            groups: if gpu > 0 { vec![group] } else { Vec::new() },
            details: Vec::new(),
            changes: Vec::new(),
            next: None,
        };
        let reply = HolderReply::new(Arc::clone(&self.roster), vec![part]);
        IndexReply::Holders(reply.unwrap())
    }
}

/// A core and the time that passes in it.
struct Fleet {
    core: Core,
    index: Index,
    now: Instant,
    asked: u32,
}

impl Fleet {
    fn new(policy: Policy, sources: u32) -> Self {
        let mut fleet = Self {
            core: core(policy, sources),
            index: Index::new(sources),
            now: Instant::now(),
            asked: 0,
        };
        for number in 0..sources * ACTIVE_EACH {
            let slot = fleet.admit_active();
            // Every eighth is still being prefilled.
            if number % 8 > 0 {
                fleet.note(SlotEvent::FirstToken { counter: slot });
            }
        }
        for _ in 0..sources * ENDED_EACH {
            let counter = fleet.admit_active();
            fleet.note(SlotEvent::FirstToken { counter });
            let end = SlotEnd::Completed;
            fleet.note(SlotEvent::End { counter, end });
        }
        fleet
    }

    fn admit_active(&mut self) -> u64 {
        self.asked += 1;
        let prompt = prompt(ACTIVE_TOKENS, 16 * COMMON_BLOCKS, self.asked);
        let answer = self.index.answer(Holding::All);
        self.admit(&prompt, &answer).0
    }

    fn admit(&mut self, prompt: &Prompt, answer: &IndexReply) -> (u64, Duration) {
        self.now += Duration::from_micros(50);
        let request = RouteRequest {
            model: "m",
            prompt,
            exclude: &[],
            leg: warmroute_route::Leg::Whole,
        };
        let begin = Instant::now();
        let admitted = self.core.admit(&request, Some(answer), self.now).unwrap();
        (admitted.slot, begin.elapsed())
    }

    fn note(&mut self, event: SlotEvent) -> Duration {
        self.now += Duration::from_micros(50);
        let begin = Instant::now();
        self.core.note(event, self.now).unwrap();
        begin.elapsed()
    }

    fn measure(&mut self, holding: Holding) -> [Vec<Duration>; 4] {
        let mut spans: [Vec<Duration>; 4] = Default::default();
        for _ in 0..DECISIONS {
            self.asked += 1;
            let common = match holding {
                Holding::NoSource | Holding::One => 0,
                Holding::All => 16 * COMMON_BLOCKS,
            };
            let prompt = prompt(TOKENS, common, self.asked);
            let answer = self.index.answer(holding);
            let (counter, decided) = self.admit(&prompt, &answer);
            let begun = self.note(SlotEvent::FirstToken { counter });
            let end = SlotEnd::Aborted;
            let ended = self.note(SlotEvent::End { counter, end });
            let held = self.hold(&prompt, holding);
            for (span, time) in spans.iter_mut().zip([decided, begun, ended, held]) {
                span.push(time);
            }
        }
        spans
    }

    /// A decision with the events that waited for it.
    fn hold(&mut self, prompt: &Prompt, holding: Holding) -> Duration {
        let answers = [self.index.answer(holding), self.index.answer(holding)];
        let noted: Vec<u64> = (0..NOTED_SLOTS)
            .map(|_| self.admit(prompt, &answers[0]).0)
            .collect();
        let end = SlotEnd::Aborted;
        let mut held = Duration::ZERO;
        for counter in noted {
            held += self.note(SlotEvent::FirstToken { counter });
            held += self.note(SlotEvent::End { counter, end });
        }
        let (counter, decided) = self.admit(prompt, &answers[1]);
        self.note(SlotEvent::End { counter, end });
        held + decided
    }
}

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    format!("{:6.1} {:6.1} |", at(50), at(99))
}

fn main() {
    let asked: Vec<u32> = std::env::args()
        .filter_map(|one| one.parse().ok())
        .collect();
    let sizes = if asked.is_empty() {
        vec![64, 512]
    } else {
        asked
    };
    println!(
        "µs, p50 p99  sources  holders | decision      | first token   | end           | with 16 events |"
    );
    for policy in [Policy::Time, Policy::Kv, Policy::RoundRobin] {
        for &sources in &sizes {
            let mut fleet = Fleet::new(policy, sources);
            for (holders, holding) in [
                ("none", Holding::NoSource),
                ("one", Holding::One),
                ("all", Holding::All),
            ] {
                let spans = fleet.measure(holding).map(quantiles);
                let [decided, begun, ended, held] = spans;
                let policy = policy.label();
                println!("{policy:11} {sources:8} {holders:>8} | {decided} {begun} {ended} {held}");
            }
        }
    }
}
