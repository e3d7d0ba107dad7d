//! Wire values that are fixed for ever, and golden samples of every message.
//!
//! A failing vector means that fleets with two versions would disagree. Never change one; add a
//! version. `WARMROUTE_BLESS=1 cargo test -p warmroute-proto` writes samples of messages that have
//! none yet, and only those.
#![expect(
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers too"
)]
#![expect(
    clippy::disallowed_methods,
    reason = "the test reads its own switch from the environment"
)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs;
use std::path::PathBuf;

use warmroute_proto::codec::{self, Message};
use warmroute_proto::load::{
    LoadAnswer, LoadChange, LoadDigest, LoadFrame, LoadHeartbeat, LoadMessage, LoadRequest,
    LoadRequestKind, OpenSlot, Presence, RouterEntry, SampledPrefix, SlotEnd, StatePart,
};
use warmroute_proto::peers::{
    PeerBeacon, PeerId, RegistryDigest, RegistryPage, RegistryPageRequest, RegistryWrite,
};
use warmroute_proto::query::{
    HoldAnswer, HoldQuery, HoldSpan, IndexAnswer, IndexQuery, SourceAnswer, SourceState,
    UnknownReason,
};
use warmroute_proto::registry::{
    CreditDoubt, DemotedSource, DemotionEntry, DrainEntry, DrainState, DrainUntil, FailedCheck,
    GenerationEntry, IndexerEntry, Lora, LostWorker, ModelProblem, ResyncReason, ResyncRequest,
    RouterDoubts, RouterFacts, RouterMisses, RouterRefusals, ShimEntry, SnapshotLease,
    UnreachableWorker, WorkerEntry, WorkerRole,
};
use warmroute_proto::roster::{
    BlocksBefore, DeepHolderQuery, HolderAnswer, HolderDetail, HolderGroup, HolderPart,
    HolderQuery, NumberSet, RosterId, RosterNumber, RosterPage, RosterPageRequest, RosterRow,
    RosterStatus,
};
use warmroute_proto::snapshot::{
    RecordMark, SnapshotHead, SnapshotHolding, SnapshotPointer, SnapshotRef, SnapshotSource,
};
use warmroute_proto::tenant_use::{TenantLevel, TenantLevels, TenantReport, TenantUse, UnitUse};
use warmroute_proto::view::{
    ReplicaFaults, ReplicaFaultsRequest, SourceFault, SourceView, ViewPage, ViewPageRequest,
};
use warmroute_proto::{
    BlockSize, Change, Digest, DpRank, EngineHealth, EngineSeq, Generation, Heartbeat, LocalHash,
    LogPosition, LogTime, PrefixHash, Record, RecordNumber, RouterId, Source, StreamIdentity, Tier,
    TierState, Tiers, WorkerId,
};

/// Retired, or not assigned yet.
const ABSENT_KINDS: [u8; 4] = [22, 30, 41, 43];

#[test]
fn prefix_chain() {
    let mut parent = None;
    let chain: Vec<u64> = [1, 2, 3, u64::MAX]
        .map(|local| {
            let prefix = PrefixHash::after(parent, LocalHash(local));
            parent = Some(prefix);
            prefix.0
        })
        .to_vec();
    assert_eq!(chain, PREFIX_CHAIN);
    assert_eq!(LocalHash::RESUME_ROOT.0, 0x7265_7375_6d65_3a31);
}

const PREFIX_CHAIN: [u64; 4] = [
    3532530939619463537,
    16160540577978722100,
    8959385448912344148,
    15631368028542641217,
];

#[test]
fn digest_mix() {
    let sums = Tier::ALL.map(|tier| {
        let mut digest = Digest::default();
        digest.insert(PrefixHash(42), tier);
        digest.sum
    });
    assert_eq!(sums, DIGEST_OF_42);
    let mut digest = Digest::default();
    digest.insert(PrefixHash(0), Tier::Gpu);
    digest.insert(PrefixHash(u64::MAX), Tier::Disk);
    digest.remove(PrefixHash(0), Tier::Gpu);
    let mut other = Digest::default();
    other.insert(PrefixHash(u64::MAX), Tier::Disk);
    assert_eq!(digest, other);
}

const DIGEST_OF_42: [u64; 3] = [
    13679457532755275413,
    2949826092126892291,
    5139283748462763858,
];

fn source() -> Source {
    Source {
        worker: WorkerId::from("worker-0.example"),
        dp_rank: DpRank(1),
    }
}

fn states() -> Tiers<TierState> {
    Tiers {
        gpu: TierState::Complete,
        cpu: TierState::Stale,
        disk: TierState::Partial,
    }
}

fn digest() -> Digest {
    let mut digest = Digest::default();
    digest.insert(PrefixHash(7), Tier::Gpu);
    digest
}

fn record() -> Record {
    Record {
        source: source(),
        generation: Generation(3),
        number: RecordNumber(258),
        engine_seq: Some(EngineSeq(9)),
        changes: vec![
            Change::Stored {
                parent: None,
                blocks: vec![LocalHash(1), LocalHash(2)],
                tier: Tier::Gpu,
            },
            Change::Stored {
                parent: Some(PrefixHash(5)),
                blocks: vec![LocalHash(3)],
                tier: Tier::Disk,
            },
            Change::Removed {
                blocks: vec![PrefixHash(6)],
                tier: Tier::Cpu,
            },
            Change::Cleared { tier: Tier::Gpu },
        ],
        states: states(),
        after: digest(),
        sent_at: Some(LogTime(1_700_000_000_000_000_003)),
    }
}

fn heartbeat() -> Heartbeat {
    Heartbeat {
        source: source(),
        generation: Generation(3),
        number: None,
        engine_seq: Some(EngineSeq(10)),
        states: Tiers::all(TierState::Unverified),
        after: digest(),
        health: EngineHealth::Healthy,
        sent_at: Some(LogTime(1_700_000_000_000_000_004)),
    }
}

fn answer() -> IndexAnswer {
    IndexAnswer::Runs {
        log: StreamIdentity {
            created_unix_ns: 1,
            nonce: 2,
        },
        position: LogPosition(77),
        sources: vec![SourceAnswer {
            source: source(),
            generation: Generation(3),
            number: Some(RecordNumber(4)),
            engine_seq: None,
            states: Tiers {
                gpu: SourceState::Exact,
                cpu: SourceState::CatchingUp,
                disk: SourceState::Unknown,
            },
            reason: Some(UnknownReason::ShimGone),
            proof_age_ms: 950,
            run: Tiers {
                gpu: 10,
                cpu: 2,
                disk: 0,
            },
        }],
    }
}

fn load() -> LoadMessage {
    LoadMessage {
        router: RouterId(*b"0123456789abcdef"),
        incarnation: Generation(8),
        number: RecordNumber(1),
        changes: vec![
            LoadChange::AddRequest {
                counter: 1,
                source: source(),
                prefill_tokens: 100,
                blocks: 9,
                prompt: SampledPrefix::of(&[LocalHash(1), LocalHash(2)]),
            },
            LoadChange::MarkPrefillCompleted { counter: 1 },
            LoadChange::Grow {
                counter: 1,
                blocks: 2,
            },
            LoadChange::Free {
                counter: 1,
                end: SlotEnd::Aborted,
            },
        ],
    }
}

fn load_heartbeat() -> LoadHeartbeat {
    LoadHeartbeat {
        router: RouterId(*b"0123456789abcdef"),
        incarnation: Generation(8),
        number: Some(RecordNumber(1)),
        digest: LoadDigest { count: 2, sum: 3 },
        beat: 4,
        presence: Presence::Staying,
    }
}

fn state_part() -> StatePart {
    StatePart {
        router: RouterId(*b"0123456789abcdef"),
        incarnation: Generation(8),
        number: None,
        digest: LoadDigest { count: 1, sum: 3 },
        part: 0,
        parts: 1,
        slots: vec![OpenSlot {
            counter: 5,
            source: source(),
            prefill_tokens: 100,
            blocks: 9,
            generated_blocks: 2,
            prompt: SampledPrefix::of(&[LocalHash(1), LocalHash(2)]),
        }],
    }
}

fn load_requests(want: LoadRequestKind) -> LoadRequest {
    LoadRequest {
        asker: RouterId(*b"0123456789abcdef"),
        incarnation: Some(Generation(8)),
        want,
    }
}

/// Between routers: frames, heartbeats, questions, answers, registration.
#[test]
fn golden_samples_of_replicas() {
    let messages = vec![codec::encode(&load()).unwrap(), vec![1, 5]];
    golden(
        "load_frame",
        &LoadFrame {
            messages: messages.clone(),
        },
    );
    golden("load_heartbeat", &load_heartbeat());
    let requests = UnitUse {
        before: 1,
        used: 2,
        demand: 3,
        claim: -4,
    };
    let tenant = TenantUse {
        tenant: TenantUse::id("search"),
        requests,
        tokens: UnitUse::default(),
        open: 5,
        open_claim: 6,
        second_claim: 7,
    };
    golden(
        "tenant_report",
        &TenantReport {
            router: RouterId(*b"0123456789abcdef"),
            number: 8,
            tenants: vec![tenant],
        },
    );
    golden(
        "tenant_levels",
        &TenantLevels {
            router: RouterId(*b"0123456789abcdef"),
            known: vec![RouterId(*b"fedcba9876543210")],
            following: 1,
            tenants: vec![TenantLevel {
                tenant: TenantUse::id("search"),
                second: None,
                minute: Some(-2),
                tokens: Some(3),
            }],
        },
    );
    golden(
        "load_ask_numbers",
        &load_requests(LoadRequestKind::Numbers {
            from: RecordNumber(3),
            to: Some(RecordNumber(4)),
        }),
    );
    golden("load_ask_state", &load_requests(LoadRequestKind::State));
    golden(
        "load_ask_part",
        &load_requests(LoadRequestKind::Part {
            number: Some(RecordNumber(7)),
            part: 1,
        }),
    );
    golden("load_answer_messages", &LoadAnswer::Messages(messages));
    golden("load_answer_state", &LoadAnswer::State(state_part()));
    golden("load_answer_gone", &LoadAnswer::Gone);
    golden(
        "router",
        &RouterEntry {
            router: RouterId(*b"0123456789abcdef"),
            version: "0.1.0".into(),
        },
    );
}

#[test]
fn a_message_and_a_frame_are_read_in_part() {
    let message = load();
    let bytes = codec::encode(&message).unwrap();
    assert_eq!(LoadMessage::sender(&bytes), Some(message.router));
    assert_eq!(LoadMessage::sender(&bytes[..17]), None);
    let frame = LoadFrame {
        messages: vec![bytes.clone(), Vec::new(), vec![7]],
    };
    let encoded = codec::encode(&frame).unwrap();
    let messages = codec::frame_messages(&encoded).unwrap();
    assert_eq!(messages, frame.messages);
    assert!(codec::frame_messages(&encoded[..encoded.len() - 1]).is_err());
    assert!(codec::frame_messages(&bytes).is_err());
}

/// What parts are filled by is what they take.
#[test]
fn an_open_slot_takes_what_it_says() {
    let mut part = state_part();
    let full = codec::encode(&LoadAnswer::State(part.clone()))
        .unwrap()
        .len();
    let slot = part.slots.pop().unwrap();
    let empty = codec::encode(&LoadAnswer::State(part)).unwrap().len();
    assert_eq!(full - empty, slot.encoded_bytes());
}

fn worker() -> WorkerEntry {
    WorkerEntry {
        worker: WorkerId::from("worker-0.example"),
        url: "http://10.0.0.1:8000".into(),
        models: vec!["base".into()],
        loras: vec![Lora {
            name: "adapter".into(),
            parent: Some("base".into()),
        }],
        ranks: 2,
        block_size: BlockSize::new(16),
        blocks_per_rank: Some(4096),
        max_model_len: None,
        main_attention_only: true,
        version: "0.1.0".into(),
        lookahead: 3,
        role: WorkerRole::Decode,
    }
}

fn snapshot_ref(position: u64) -> SnapshotRef {
    SnapshotRef {
        name: format!("s{position}"),
        log: answer_log(),
        at: RecordMark {
            position: LogPosition(position),
            stored_unix_ns: 1_700_000_000_000_000_001,
            checksum: 0xC0FF_EE00_C0FF_EE00,
        },
        bytes: 4096,
    }
}

const fn answer_log() -> StreamIdentity {
    StreamIdentity {
        created_unix_ns: 1_700_000_000_000_000_000,
        nonce: 42,
    }
}

fn snapshot_head() -> SnapshotHead {
    let folded = SnapshotSource {
        source: source(),
        generation: Generation(7),
        number: Some(RecordNumber(3)),
        engine_seq: Some(EngineSeq(9)),
        states: record().states,
        holding: SnapshotHolding::Folded,
        after: record().after,
    };
    let freed = SnapshotSource {
        number: None,
        engine_seq: None,
        holding: SnapshotHolding::Freed,
        after: Digest::default(),
        ..folded.clone()
    };
    SnapshotHead {
        log: answer_log(),
        at: snapshot_ref(99).at,
        sources: vec![folded, freed],
        image_bytes: 1 << 33,
    }
}

#[test]
fn golden_samples_of_indexers() {
    golden("snapshot_head", &snapshot_head());
    let older = Some(snapshot_ref(98));
    let newest = snapshot_ref(99);
    golden("snapshot_pointer", &SnapshotPointer { newest, older });
    let entry = IndexerEntry {
        id: "indexer-0.7f".into(),
        url: Some("http://10.0.0.2:8090".into()),
        version: "0.1.0".into(),
        ready: true,
        log: Some(answer_log()),
        position: LogPosition(99),
    };
    golden("indexer", &entry);
    let writer = entry.id;
    golden("snapshot_lease", &SnapshotLease { writer, attempt: 3 });
}

fn view() -> ViewPage {
    ViewPage {
        version: "0.1.0".into(),
        ready: true,
        log: Some(answer_log()),
        position: LogPosition(99),
        lag_messages: 1,
        lag_ms: Some(20),
        unix_ns: 1_700_000_000_000_000_002,
        snapshot_every_secs: Some(600),
        sources: vec![SourceView {
            source: source(),
            generation: Some(Generation(7)),
            number: Some(RecordNumber(3)),
            engine_seq: Some(EngineSeq(9)),
            states: Tiers {
                gpu: SourceState::Stale,
                cpu: SourceState::Exact,
                disk: SourceState::Partial,
            },
            reason: None,
            doubt: Some(SourceFault::Diverged),
            state_age_ms: 1500,
            proof_age_ms: Some(950),
            digest: Some(digest()),
            health: EngineHealth::Healthy,
            begun_lately: 4,
        }],
        more: true,
    }
}

#[test]
fn golden_samples_of_views() {
    let after = Some(source());
    golden(
        "view_ask",
        &ViewPageRequest {
            after,
            sources_max: 2000,
        },
    );
    golden("view", &view());
    golden("faults_ask", &ReplicaFaultsRequest {});
    let faults = ReplicaFaults {
        answers_too_large: 1,
        turned_away: 255,
        refused: vec!["subscribe wr.prod.hb.>".into()],
    };
    golden("faults", &faults);
}

#[test]
fn golden_samples() {
    golden("record", &record());
    golden("heartbeat", &heartbeat());
    golden(
        "query",
        &IndexQuery {
            blocks: vec![LocalHash(1), LocalHash(u64::MAX)],
            at_least: Some(LogPosition(5)),
        },
    );
    golden("answer_runs", &answer());
    golden(
        "answer_behind",
        &IndexAnswer::Behind {
            position: LogPosition(4),
        },
    );
    golden("load", &load());
    golden("worker", &worker());
    golden(
        "generation",
        &GenerationEntry {
            generation: Generation(6),
        },
    );
    golden(
        "resync",
        &ResyncRequest {
            source: source(),
            above: Generation(6),
            reason: ResyncReason::Mismatch,
        },
    );
    golden(
        "shim",
        &ShimEntry {
            instance: *b"0123456789abcdef",
            version: "0.1.0".into(),
        },
    );
    golden(
        "drain",
        &DrainEntry {
            worker: WorkerId::from("worker-0.example"),
            drain: DrainState::Draining,
            turn: 3,
            set_unix_s: 1_700_000_000,
            shim: Some(*b"0123456789abcdef"),
            until: DrainUntil::Restart,
        },
    );
}

/// Claims that an engine contradicted, and the sources that lost credit by them.
#[test]
fn golden_samples_of_audits() {
    golden(
        "hold_query_since_record",
        &HoldQuery {
            source: source(),
            log: answer_log(),
            since: LogPosition(258),
            block: PrefixHash(7),
            tier: Tier::Gpu,
            generation: Generation(3),
            number: RecordNumber(7),
        },
    );
    golden(
        "hold_answer",
        &HoldAnswer {
            log: Some(answer_log()),
            generation: Some(Generation(3)),
            engine_seq: Some(EngineSeq(9)),
            state: SourceState::Exact,
            proof_age_ms: 950,
            span: HoldSpan::Interrupted,
        },
    );
    golden(
        "demotion",
        &DemotionEntry {
            router: RouterId(*b"0123456789abcdef"),
            total: 1,
            sources: vec![DemotedSource {
                source: source(),
                generation: Generation(3),
                agreements: 2,
            }],
        },
    );
}

/// What operators' tools read.
#[test]
fn golden_samples_of_routers() {
    golden(
        "router_facts",
        &RouterFacts {
            router: RouterId(*b"0123456789abcdef"),
            settings: 0x0123_4567_89AB_CDEF,
            unix_ns: 1_700_000_000_000_000_003,
            failed_checks: vec![FailedCheck {
                worker: source().worker,
                check: "chat".to_owned(),
                why: "differs".to_owned(),
            }],
            unregistered: vec![WorkerId::from("w.1")],
            without_tokenizer: vec![ModelProblem {
                model: "m".to_owned(),
                why: "none".to_owned(),
            }],
        },
    );
    golden(
        "router_refusals",
        &RouterRefusals {
            router: RouterId(*b"0123456789abcdef"),
            refused: vec!["publish wr.prod.load.tenants".to_owned()],
        },
    );
    golden(
        "router_doubts",
        &RouterDoubts {
            router: RouterId(*b"0123456789abcdef"),
            total: 1,
            doubts: vec![CreditDoubt {
                about: "all prompts at w.1/0".to_owned(),
                engine_had: "more".to_owned(),
                likely_cause: "events".to_owned(),
            }],
        },
    );
    golden(
        "router_misses",
        &RouterMisses {
            router: RouterId(*b"0123456789abcdef"),
            unreachable: vec![UnreachableWorker {
                worker: WorkerId::from("w.1"),
                url: "http://10.0.0.1:8000".to_owned(),
                why: "refused".to_owned(),
            }],
            lost: vec![LostWorker {
                worker: WorkerId::from("w.2"),
                silent_secs: 40,
            }],
        },
    );
}

#[test]
fn golden_samples_of_holder_queries() {
    let roster = RosterId(0x0123_4567_89AB_CDEF);
    let query = HolderQuery {
        blocks: vec![LocalHash(1), LocalHash(u64::MAX)],
        from: RosterNumber(6),
        known: RosterPageRequest { roster, since: 11 },
    };
    golden("holder_query", &query);
    let before = BlocksBefore {
        blocks: 8_000,
        prefix: PrefixHash(3),
        resume: PrefixHash(4),
    };
    let deep = DeepHolderQuery {
        before,
        blocks: query.blocks,
        from: query.from,
    };
    golden("deep_holder_query", &deep);
}

/// Sources by their numbers.
#[test]
fn golden_samples_of_rosters() {
    let roster = RosterId(0x0123_4567_89AB_CDEF);
    let states = Tiers {
        gpu: SourceState::Exact,
        cpu: SourceState::Unverified,
        disk: SourceState::Unknown,
    };
    golden(
        "roster_page_request",
        &RosterPageRequest { roster, since: 9 },
    );
    let row = |number, status| RosterRow {
        number: RosterNumber(number),
        source: source(),
        status,
    };
    let status = RosterStatus {
        generation: Generation(3),
        states,
        reason: Some(UnknownReason::ShimGone),
    };
    golden(
        "roster_page",
        &RosterPage {
            roster,
            version: 11,
            rows: vec![row(4, Some(status)), row(5, None)],
            more: true,
        },
    );
    let run = Tiers {
        gpu: 32,
        cpu: 4,
        disk: 0,
    };
    let members = [6, 7, 8, 300, 70_000].map(RosterNumber);
    let part = HolderPart {
        roster,
        log: StreamIdentity {
            created_unix_ns: 1_700_000_000_000_000_000,
            nonce: 5,
        },
        position: LogPosition(77),
        groups: vec![HolderGroup {
            run,
            states,
            members: NumberSet::from_ascending(members),
        }],
        details: vec![HolderDetail {
            source: RosterNumber(300),
            generation: Generation(3),
            number: Some(RecordNumber(258)),
            engine_seq: Some(EngineSeq(9)),
        }],
        changes: vec![row(300, Some(status))],
        next: Some(RosterNumber(70_001)),
    };
    golden("holder_answer", &HolderAnswer::Holders(part));
    golden("holder_answer_behind", &HolderAnswer::Behind);
}

#[test]
fn samples_of_peers() {
    let write = RegistryWrite {
        key: "wr.prod.worker.w=2E0".to_owned(),
        revision: 0x0123_4567_89ab_cdef,
        value: Some(vec![2, 6, 255]),
        lease_ms: Some(6000),
    };
    let deleted = RegistryWrite {
        key: "wr.prod.drain.w".to_owned(),
        revision: 7,
        value: None,
        lease_ms: None,
    };
    golden("registry_write", &write);
    golden("registry_write_deleted", &deleted);
    let mut registry = RegistryDigest::default();
    registry.insert("wr.prod.generation.w.0", 65_537);
    golden(
        "peer_beacon",
        &PeerBeacon {
            peer: PeerId(0xfedc_ba98_7654_3210),
            unix_ns: 1_700_000_000_000_000_000,
            registry,
        },
    );
    let after = "wr.prod.drain.w".to_owned();
    golden("registry_page_request", &RegistryPageRequest { after });
    golden(
        "registry_page",
        &RegistryPage {
            unix_ns: 1_700_000_000_000_000_001,
            writes: vec![deleted, write],
            more: true,
        },
    );
}

/// Readers make up a source for each rank: four thousand million of them would be the end of every
/// reader.
#[test]
fn a_worker_of_impossibly_many_ranks_or_tokens_ahead_is_no_message() {
    for (ranks, is_possible) in [
        (0, false),
        (1, true),
        (1024, true),
        (1025, false),
        (u32::MAX, false),
    ] {
        let entry = WorkerEntry { ranks, ..worker() };
        let read = codec::decode::<WorkerEntry>(&codec::encode(&entry).unwrap());
        assert_eq!(read.is_ok(), is_possible, "{ranks}: {read:?}");
    }
    for (lookahead, is_possible) in [(0, true), (64, true), (65, false)] {
        let entry = WorkerEntry {
            lookahead,
            ..worker()
        };
        let read = codec::decode::<WorkerEntry>(&codec::encode(&entry).unwrap());
        assert_eq!(read.is_ok(), is_possible, "{lookahead}: {read:?}");
    }
}

/// The next version must read what this one wrote, of every kind.
#[test]
fn every_kind_has_a_golden_sample() {
    let samples = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let files = fs::read_dir(samples).unwrap();
    let kinds: BTreeSet<u8> = files
        .map(|file| {
            let name = file.unwrap().file_name().into_string().unwrap();
            let name = name
                .strip_suffix(".hex")
                .and_then(|name| name.strip_prefix("v2_"));
            codec::kind(&sample(name.unwrap())).unwrap()
        })
        .collect();
    let present = (1..=RouterMisses::KIND).filter(|kind| !ABSENT_KINDS.contains(kind));
    assert!(kinds.into_iter().eq(present), "a kind without a sample");
}

/// A flipped bit is found wherever it is, in what no digest covers too.
#[test]
fn a_flipped_bit_is_no_message() {
    let mut bytes = codec::encode(&record()).unwrap();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            assert!(codec::decode::<Record>(&bytes).is_err(), "byte {at}");
            bytes[at] ^= 1 << bit;
        }
    }
    assert_eq!(codec::decode::<Record>(&bytes).unwrap(), record());
}

fn path_of(name: &str) -> PathBuf {
    let version = codec::VERSION;
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/v{version}_{name}.hex"))
}

fn sample(name: &str) -> Vec<u8> {
    let path = path_of(name);
    let sample = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    unhex(sample.trim())
}

fn golden<M: Message + PartialEq + Debug>(name: &str, message: &M) {
    let path = path_of(name);
    let bytes = codec::encode(message).unwrap();
    if !path.exists() && std::env::var("WARMROUTE_BLESS").is_ok() {
        fs::write(&path, hex(&bytes) + "\n").unwrap();
    }
    let sample = sample(name);
    assert_eq!(&codec::decode::<M>(&sample).unwrap(), message, "{name}");
    assert_eq!(bytes, sample, "{name}");
    refuses_what_is_no_message::<M>(&sample);
}

/// Every truncation and every extension of a message is refused, whatever its content.
fn refuses_what_is_no_message<M: Message + Debug>(bytes: &[u8]) {
    for length in 0..bytes.len() {
        assert!(codec::decode::<M>(&bytes[..length]).is_err(), "{length}");
    }
    assert!(codec::decode::<M>(&[bytes, &[0]].concat()).is_err());
    for (index, wrong) in [(0, 0), (0, 1), (0, codec::VERSION + 1), (1, 0), (1, 99)] {
        let mut bytes = bytes.to_vec();
        bytes[index] = wrong;
        assert!(codec::decode::<M>(&bytes).is_err());
    }
}

#[test]
fn a_claimed_length_is_refused_before_it_is_allocated() {
    let query = IndexQuery {
        blocks: vec![LocalHash(0)],
        at_least: None,
    };
    let mut bytes = codec::encode(&query).unwrap();
    bytes.truncate(bytes.len() - size_of::<u64>());
    bytes[2..10].copy_from_slice(&(u64::MAX / 16).to_le_bytes());
    codec::seal(&mut bytes);
    let refused = codec::decode::<IndexQuery>(&bytes);
    assert!(matches!(refused, Err(codec::DecodeError::Malformed(_))));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let nibbles: Vec<u8> = text
        .chars()
        .map(|digit| u8::try_from(digit.to_digit(16).unwrap()).unwrap())
        .collect();
    nibbles
        .chunks(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}
