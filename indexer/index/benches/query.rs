//! Compact answers of large fleets, in process: what a query costs by the number of sources, and
//! what the upkeep of the sources costs the writer. `cargo bench -p warmroute-index --bench query`.
//!
//! `warmroute-bench-plane --only fleets` measures the same fleets over NATS.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark reads the clock, prints, and stops when it is wrong"
)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use warmroute_index::fold::Fold;
use warmroute_index::query::PreparedQuery;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::message::{Broadcast, LogMessage};
use warmroute_proto::roster::{HolderAnswer, RosterId, RosterNumber, RosterPageRequest};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash, LogPosition,
    Namespace, Record, RecordNumber, Source, StreamIdentity, Tier, TierState, Tiers, WorkerId,
    codec,
};

const RANKS: u32 = 8;
const PROMPT_BLOCKS: u64 = 2_000;
/// Blocks of the system prompt that sources have in common.
const COMMON_BLOCKS: u64 = 32;
const QUERIES: usize = 2_000;
const TICKS: usize = 200;

fn prompt() -> Vec<LocalHash> {
    (1..=PROMPT_BLOCKS).map(LocalHash).collect()
}

struct Fleet {
    fold: Fold,
    beats: Vec<Broadcast>,
    now: Instant,
}

impl Fleet {
    /// The first source holds the whole prompt, the others these blocks.
    fn new(sources: u32, blocks_of: impl Fn(u32) -> Vec<LocalHash>) -> Self {
        let namespace = Namespace::from("bench");
        let subjects = Subjects::new(&namespace);
        let mut fold = Fold::new(&namespace, None);
        fold.set_roster_id(RosterId(1));
        let now = Instant::now();
        fold.follow(StreamIdentity {
            created_unix_ns: 1,
            nonce: 1,
        });
        fold.observe_end(now, LogPosition(0), 0);
        let mut beats = Vec::new();
        for number in 0..sources {
            let source = Source {
                worker: WorkerId::from(format!("vllm-decode-{:04}", number / RANKS)),
                dp_rank: DpRank(number % RANKS),
            };
            let blocks = match number {
                0 => prompt(),
                _ => blocks_of(number),
            };
            let mut after = Digest::default();
            for prefix in prefix_hashes(None, &blocks) {
                after.insert(prefix, Tier::Gpu);
            }
            let record = Record {
                source: source.clone(),
                generation: Generation(1),
                number: RecordNumber(0),
                engine_seq: Some(EngineSeq(0)),
                changes: vec![Change::Stored {
                    parent: None,
                    blocks,
                    tier: Tier::Gpu,
                }],
                states: Tiers::all(TierState::Complete),
                after,
                sent_at: None,
            };
            fold.apply(
                now,
                &LogMessage {
                    position: LogPosition(u64::from(number) + 1),
                    subject: subjects.records(&source),
                    payload: codec::encode(&record).unwrap().into(),
                    stored_unix_ns: u64::from(number) + 1,
                },
            );
            let heartbeat = Heartbeat {
                source: source.clone(),
                generation: Generation(1),
                number: Some(RecordNumber(0)),
                engine_seq: Some(EngineSeq(0)),
                states: Tiers::all(TierState::Complete),
                after,
                health: EngineHealth::Healthy,
                sent_at: None,
            };
            beats.push(Broadcast {
                subject: subjects.heartbeat(&source),
                payload: codec::encode(&heartbeat).unwrap().into(),
            });
        }
        Self { fold, beats, now }
    }

    fn beat(&mut self) {
        for beat in &self.beats {
            self.fold.heartbeat(self.now, beat);
        }
    }
}

/// The first tenth and the median of some turns: a busy machine hardly changes the former.
fn timed(turns: usize, mut turn: impl FnMut() -> Duration) -> (Duration, Duration) {
    let mut samples: Vec<Duration> = (0..turns).map(|_| turn()).collect();
    samples.sort_unstable();
    (samples[turns / 10], samples[turns / 2])
}

fn measure(sources: u32, holding: &str, blocks_of: impl Fn(u32) -> Vec<LocalHash>) {
    let mut fleet = Fleet::new(sources, blocks_of);
    fleet.beat();
    let tick = timed(TICKS, || {
        fleet.now += Duration::from_millis(1);
        let begun = Instant::now();
        fleet.fold.tick(fleet.now);
        begun.elapsed()
    });
    let beats = timed(20, || {
        fleet.now += Duration::from_millis(1);
        let begun = Instant::now();
        fleet.beat();
        begun.elapsed() / sources
    });
    let known = RosterPageRequest {
        roster: RosterId(1),
        since: u64::from(sources) * 4,
    };
    let query = PreparedQuery::of_blocks(&prompt());
    let mut bytes = 0;
    let mut locked = Vec::new();
    let whole = timed(QUERIES, || {
        let begun = Instant::now();
        let holders = query.holders(&fleet.fold, known, RosterNumber(0), fleet.now);
        locked.push(begun.elapsed());
        let answer = holders.unwrap().into_answer();
        let taken = begun.elapsed();
        let HolderAnswer::Holders(part) = black_box(answer) else {
            panic!("behind");
        };
        assert_eq!(part.next, None);
        bytes = part.groups.iter().map(|group| group.members.bytes()).sum();
        taken
    });
    locked.sort_unstable();
    println!(
        "{sources} sources, {holding}: query {:?} (p50 {:?}), of it locked {:?}, sets {bytes} bytes; \
         tick {:?} (p50 {:?}); heartbeat {:?}",
        whole.0,
        whole.1,
        locked[QUERIES / 10],
        tick.0,
        tick.1,
        beats.0
    );
}

fn main() {
    for sources in [100, 1_000, 8_000] {
        let own = |number| vec![LocalHash(1 << 40 | u64::from(number))];
        measure(sources, "one holder", own);
        let common = |_| (1..=COMMON_BLOCKS).map(LocalHash).collect();
        measure(sources, "all hold 32 blocks", common);
    }
}
