use std::time::Duration;

use warmroute_plane::{ClockOffset, PlaneLog, Revision, SetupDifference, StreamRole, StreamUsage};
use warmroute_proto::query::{SourceState, UnknownReason};
use warmroute_proto::registry::{
    CreditDoubt, DemotedSource, DemotionEntry, DrainEntry, DrainState, DrainUntil, FailedCheck,
    IndexerEntry, LostWorker, ModelProblem, RouterDoubts, RouterFacts, RouterMisses, ShimEntry,
    UnreachableWorker, WorkerEntry, WorkerRole,
};
use warmroute_proto::snapshot::{RecordMark, SnapshotPointer, SnapshotRef};
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::{SourceFault, SourceView};
use warmroute_proto::{
    Digest, EngineHealth, EngineSeq, RouterId, TierState, Tiers, WorkerId, codec, load::RouterEntry,
};

use super::*;
use crate::tests_support::{IDENTITY, namespace, source};

const NOW: u64 = 1_700_000_000_000_000_000;
const SECOND: u64 = 1_000_000_000;

fn stream(role: StreamRole, name: &str) -> StreamUsage {
    StreamUsage {
        role,
        name: name.to_owned(),
        messages: 100,
        bytes: 10_000,
        bytes_max: Some(1 << 30),
        age_max: Some(Duration::from_secs(86_400)),
        oldest_unix_ns: Some(NOW - 60 * SECOND),
        written_ago: Some(Duration::from_secs(1)),
        replicas: 1,
        copies_away: Vec::new(),
    }
}

fn digest(sum: u64) -> Digest {
    Digest { count: 10, sum }
}

fn view_of(name: &str) -> SourceView {
    SourceView {
        source: source(name),
        generation: Some(Generation(3)),
        number: Some(RecordNumber(7)),
        engine_seq: Some(EngineSeq(9)),
        states: Tiers::all(SourceState::Exact),
        reason: None,
        doubt: None,
        state_age_ms: 60_000,
        proof_age_ms: Some(300),
        digest: Some(digest(1)),
        health: EngineHealth::Healthy,
        begun_lately: 1,
    }
}

fn replica() -> ViewPage {
    ViewPage {
        version: "0.1.0".to_owned(),
        ready: true,
        log: Some(IDENTITY),
        position: LogPosition(100),
        lag_messages: 0,
        lag_ms: Some(200),
        unix_ns: NOW,
        snapshot_every_secs: Some(600),
        sources: vec![view_of("w/0"), view_of("w/1")],
        more: false,
    }
}

fn heartbeats(name: &str) -> ShimHeartbeats {
    ShimHeartbeats {
        last: Heartbeat {
            source: source(name),
            generation: Generation(3),
            number: Some(RecordNumber(7)),
            engine_seq: Some(EngineSeq(9)),
            states: Tiers::all(TierState::Complete),
            after: digest(1),
            health: EngineHealth::Healthy,
            sent_at: None,
        },
        count: 3,
        went_back: false,
    }
}

fn worker() -> WorkerEntry {
    WorkerEntry {
        models: vec!["base".to_owned()],
        ranks: 2,
        main_attention_only: true,
        version: "0.1.0".to_owned(),
        ..WorkerEntry::new("w", "http://10.0.0.1:8000")
    }
}

fn registry() -> Registry {
    let subjects = Subjects::new(&namespace());
    let mut registry = Registry::default();
    let mut put = |key: String, value: Vec<u8>| registry.put(&subjects, &key, &value);
    let id = WorkerId::from("w");
    put(subjects.worker_key(&id), codec::encode(&worker()).unwrap());
    let shim = ShimEntry {
        instance: [1; 16],
        version: "0.1.0".to_owned(),
    };
    put(subjects.shim_key(&id), codec::encode(&shim).unwrap());
    for name in ["w/0", "w/1"] {
        let generation = Generation(3);
        let entry = warmroute_proto::registry::GenerationEntry { generation };
        let key = subjects.generation_key(&source(name));
        put(key, codec::encode(&entry).unwrap());
    }
    for id in ["a", "b"] {
        let entry = IndexerEntry {
            id: id.to_owned(),
            url: None,
            version: "0.1.0".to_owned(),
            ready: true,
            log: Some(IDENTITY),
            position: LogPosition(100),
        };
        put(subjects.indexer_key(id), codec::encode(&entry).unwrap());
    }
    let router = RouterId([2; 16]);
    let version = "0.1.0".to_owned();
    let entry = RouterEntry { router, version };
    put(subjects.router_key(router), codec::encode(&entry).unwrap());
    let pointer = SnapshotPointer {
        newest: SnapshotRef {
            name: "s".to_owned(),
            log: IDENTITY,
            at: RecordMark {
                position: LogPosition(90),
                stored_unix_ns: NOW,
                checksum: 1,
            },
            bytes: 100,
        },
        older: None,
    };
    put(
        subjects.snapshot_pointer_key(),
        codec::encode(&pointer).unwrap(),
    );
    registry
}

fn log(last: u64) -> LogStatus {
    LogStatus {
        identity: IDENTITY,
        first: LogPosition(1),
        last: LogPosition(last),
        now_unix_ns: 0,
    }
}

/// A plane of which there is nothing to say.
fn healthy() -> PlaneState {
    let registry = registry();
    let record = LastRecord {
        position: LogPosition(100),
        generation: Generation(3),
        number: RecordNumber(7),
    };
    PlaneState {
        namespace: "test".to_owned(),
        foreign: BTreeMap::new(),
        setup: NamespaceSetup {
            log: PlaneLog::JetStream,
            server_version: "2.15.1".to_owned(),
            clock: Some(ClockOffset {
                ahead_ms: 1,
                within_ms: 2,
            }),
            differences: Vec::new(),
            resized: Vec::new(),
            streams: vec![
                stream(StreamRole::Log, "wr_test"),
                stream(StreamRole::Registry, "KV_wr_test"),
                stream(StreamRole::Snapshots, "OBJ_wr_test"),
            ],
            unread: Vec::new(),
        },
        log: Some(log(100)),
        log_after: Some(log(100)),
        before: registry.clone(),
        registry_read: true,
        last_records: [(source("w/0"), record), (source("w/1"), record)].into(),
        views: [
            ("a".to_owned(), Ok(replica())),
            ("b".to_owned(), Ok(replica())),
        ]
        .into(),
        heartbeats: [
            (source("w/0"), heartbeats("w/0")),
            (source("w/1"), heartbeats("w/1")),
        ]
        .into(),
        listened: Duration::from_millis(3200),
        snapshots: vec![SnapshotSeen {
            name: "s".to_owned(),
            position: LogPosition(90),
            bytes: 100,
            unreadable: None,
            fit: Some(LogMatch::Same),
            outdated_unix_ns: Some(NOW - 5 * SECOND),
        }],
        faults: [("a".to_owned(), ReplicaFaults::default())].into(),
        complaint: None,
        probes: None,
        monitors: None,
        unix_ns: NOW,
        expected: Expected {
            indexers: Some(2),
            ..Expected::default()
        },
        unread: Vec::new(),
        registry,
    }
}

fn codes(report: &Report) -> Vec<Code> {
    report.findings.iter().map(|finding| finding.code).collect()
}

/// A healthy plane with one change has exactly this finding.
fn check(code: Code, change: impl FnOnce(&mut PlaneState)) {
    let mut state = healthy();
    change(&mut state);
    let report = diagnose(&state);
    assert_eq!(codes(&report), [code], "{report}");
    let needed = code.severity() < Severity::Note;
    assert_eq!(report.needs_action(), needed, "{report}");
    assert!(report.to_string().contains(code.label()), "{report}");
    assert!(!report.findings[0].about.is_empty(), "{report}");
}

fn view(state: &mut PlaneState, id: &str, change: impl FnOnce(&mut ViewPage)) {
    let view = state.views.get_mut(id).unwrap();
    change(view.as_mut().unwrap());
}

/// Changes a source at every replica.
fn sources(state: &mut PlaneState, change: impl Fn(&mut SourceView)) {
    for view in state.views.values_mut() {
        change(&mut view.as_mut().unwrap().sources[0]);
    }
}

#[test]
fn of_a_healthy_plane_there_is_nothing_to_say() {
    let report = diagnose(&healthy());
    assert_eq!(codes(&report), []);
    assert!(!report.needs_action());
    let page = report.to_string();
    assert!(page.contains("nothing wrong"), "{page}");
    assert!(page.contains("2 exact"), "{page}");
    assert!(page.lines().count() < 20, "{page}");
}

#[test]
fn labels_are_unique_and_have_texts() {
    let mut words: Vec<&str> = Code::ALL.iter().map(|code| code.label()).collect();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), Code::ALL.len());
    let texts = |code: &Code| [code.cause(), code.effect(), &code.run("ns")].map(str::len);
    assert!(
        Code::ALL
            .iter()
            .all(|code| texts(code).into_iter().all(|length| length >= 4))
    );
    let severities: Vec<Severity> = Code::ALL.iter().map(|code| code.severity()).collect();
    assert!(severities.is_sorted(), "the gravest first");
}

#[test]
fn streams_are_judged() {
    let difference = |field| SetupDifference {
        of: "wr_test".to_owned(),
        field,
        is: "1".to_owned(),
        must_be: "2".to_owned(),
    };
    check(Code::StreamDiffers, |state| {
        state.setup.differences.push(difference("discard"));
    });
    check(Code::StreamResized, |state| {
        state.setup.resized.push(difference("max_bytes"));
    });
    check(Code::LogTooSmall, |state| {
        state.setup.streams[0].bytes_max = Some(20 * 16 * 4 - 1);
    });
    check(Code::StoreFull, |state| {
        state.setup.streams[1].bytes_max = Some(11_000);
    });
    check(Code::CopyAway, |state| {
        state.setup.streams[0].copies_away.push("nats-2".to_owned());
    });
    check(Code::PermissionMissing, |state| {
        state.complaint = Some("permissions violation".to_owned());
    });
    check(Code::PermissionMissing, |state| {
        let faults = state.faults.entry("a".to_owned()).or_default();
        faults.refused.push("subscribe wr.prod.hb.>".to_owned());
    });
    check(Code::PermissionMissing, |state| {
        let refused = vec!["publish wr.prod.load.tenants".to_owned()];
        state.registry.refusals.insert(RouterId([2; 16]), refused);
    });
    check(Code::AnswersTooLarge, |state| {
        let faults = state.faults.entry("a".to_owned()).or_default();
        faults.answers_too_large = 1;
    });
    check(Code::ApiOverloaded, |state| {
        state.faults.entry("a".to_owned()).or_default().turned_away = 255;
    });
    check(Code::ClockSkew, |state| {
        state.setup.clock.as_mut().unwrap().ahead_ms = -5000;
    });
    check(Code::ClockSkew, |state| {
        view(state, "a", |view| view.unix_ns += 10 * SECOND);
    });
    let mut state = healthy();
    state.setup.differences.push(difference("stream"));
    state.registry_read = false;
    assert_eq!(codes(&diagnose(&state)), [Code::StreamMissing]);
}

#[test]
fn indexers_are_judged() {
    check(Code::IndexersDiffer, |state| {
        view(state, "a", |view| view.sources[0].digest = Some(digest(2)));
        // Its shim is at another number, which leaves open which of the two is right.
        state
            .heartbeats
            .get_mut(&source("w/0"))
            .unwrap()
            .last
            .number = Some(RecordNumber(8));
    });
    check(Code::MirrorDiffers, |state| {
        sources(state, |source| source.digest = Some(digest(2)));
    });
    check(Code::IndexerSilent, |state| {
        state.views.insert("c".to_owned(), Err("late".to_owned()));
        let entry = state.registry.indexers["a"].clone();
        state.registry.indexers.insert("c".to_owned(), entry);
    });
    check(Code::IndexersMissing, |state| {
        state.views.remove("a");
        state.registry.indexers.remove("a");
    });
    check(Code::OneIndexer, |state| {
        state.views.remove("a");
        state.expected.indexers = None;
    });
    check(Code::NoIndexer, |state| {
        state.views.clear();
        state.registry.indexers.clear();
        state.expected.indexers = None;
    });
    check(Code::IndexerOtherLog, |state| {
        view(state, "a", |view| view.log.as_mut().unwrap().nonce += 1);
    });
    check(Code::IndexerAhead, |state| {
        view(state, "a", |view| view.position = LogPosition(101));
    });
    // A log at work goes on during a look.
    let mut state = healthy();
    view(&mut state, "a", |view| view.position = LogPosition(105));
    state.log_after = Some(log(105));
    assert_eq!(codes(&diagnose(&state)), []);
    // One illness hides no other.
    let mut state = healthy();
    view(&mut state, "a", |view| {
        view.position = LogPosition(101);
        view.ready = false;
    });
    let both = [Code::IndexerAhead, Code::IndexerNotReady];
    assert_eq!(codes(&diagnose(&state)), both);
    check(Code::IndexerBehind, |state| {
        view(state, "a", |view| view.lag_messages = 1001);
    });
    check(Code::IndexerBehind, |state| {
        view(state, "a", |view| view.lag_ms = None);
    });
    check(Code::IndexerNotReady, |state| {
        view(state, "a", |view| view.ready = false);
    });
    // One that left during the look owes nothing.
    let mut state = healthy();
    state.views.insert("c".to_owned(), Err("late".to_owned()));
    assert_eq!(codes(&diagnose(&state)), []);
    // Digests of different numbers are not compared.
    let moved = |view: &mut ViewPage| {
        view.position = LogPosition(99);
        view.sources[0].number = Some(RecordNumber(6));
        view.sources[0].digest = Some(digest(2));
    };
    view(&mut state, "a", moved);
    assert_eq!(codes(&diagnose(&state)), []);
}

#[test]
fn replicas_at_one_position_have_equal_numbers_of_all_registered_sources() {
    check(Code::IndexersDiffer, |state| {
        view(state, "a", |view| {
            view.sources[0].number = Some(RecordNumber(6));
        });
    });
    let unlisted = |state: &mut PlaneState| view(state, "a", |view| drop(view.sources.pop()));
    check(Code::NotCompared, unlisted);
    // A replica that starts, or a source that registered in between, is not judged.
    let mut state = healthy();
    unlisted(&mut state);
    state.before.workers.clear();
    assert_eq!(codes(&diagnose(&state)), []);
    let mut state = healthy();
    unlisted(&mut state);
    view(&mut state, "a", |view| view.ready = false);
    assert_eq!(codes(&diagnose(&state)), [Code::IndexerNotReady]);
    let page = diagnose(&state).to_string();
    assert!(
        page.contains("4 comparisons at equal numbers, of 2 of 2 sources"),
        "{page}"
    );
}

#[test]
fn probes_are_judged() {
    let probed = |outcome| {
        move |state: &mut PlaneState| {
            let (source, indexer) = (source("w/0"), "a".to_owned());
            state.probes = Some(vec![EngineProbe {
                source,
                indexer,
                outcome,
            }]);
        }
    };
    check(
        Code::ProbeUncredited,
        probed(ProbeOutcome::Uncredited { blocks: 3 }),
    );
    let (credited, cached) = (64, 48);
    check(
        Code::ProbeShort,
        probed(ProbeOutcome::Short { credited, cached }),
    );
    let reason = "it serves no model".to_owned();
    check(Code::ProbeSilent, probed(ProbeOutcome::Failed { reason }));
    let mut state = healthy();
    probed(ProbeOutcome::Equal)(&mut state);
    assert_eq!(codes(&diagnose(&state)), []);
}

#[test]
fn shims_are_judged() {
    check(Code::ShimSilent, |state| {
        state.heartbeats.remove(&source("w/1"));
    });
    check(Code::ShimWithoutLease, |state| {
        state.before.shims.clear();
        state.registry.shims.clear();
    });
    check(Code::ForeignHeartbeats, |state| {
        state.foreign.insert("wr.test.hb.w2.0".to_owned(), 3);
    });
    check(Code::TwoShims, |state| {
        state.heartbeats.get_mut(&source("w/0")).unwrap().went_back = true;
    });
    check(Code::TwoShims, |state| {
        let worker = WorkerId::from("w");
        state.registry.shims.get_mut(&worker).unwrap().instance = [9; 16];
    });
    check(Code::EngineUnhealthy, |state| {
        let heard = state.heartbeats.get_mut(&source("w/0")).unwrap();
        heard.last.health = EngineHealth::Unhealthy;
    });
    // A worker that registered while doctor ran may have sent no heartbeat.
    let mut state = healthy();
    state.heartbeats.clear();
    state.before.workers.clear();
    assert_eq!(codes(&diagnose(&state)), []);
}

#[test]
fn sources_are_judged() {
    let state_is = |word: SourceState| move |source: &mut SourceView| source.states.gpu = word;
    check(Code::SourcePartial, |state| {
        sources(state, state_is(SourceState::Partial));
    });
    for (code, word) in [
        (Code::TierUncredited, SourceState::Stale),
        (Code::TierUnverified, SourceState::Unverified),
    ] {
        check(code, |state| {
            sources(state, |source| source.states.cpu = word)
        });
    }
    check(Code::SourceUnverified, |state| {
        sources(state, state_is(SourceState::Unverified));
    });
    check(Code::SourceStale, |state| {
        sources(state, |source| {
            source.states.gpu = SourceState::Stale;
            source.doubt = Some(SourceFault::Overdue);
        });
    });
    check(Code::SourceCatchingUp, |state| {
        sources(state, state_is(SourceState::CatchingUp));
    });
    let unknown = |reason, age_secs: u64| {
        move |source: &mut SourceView| {
            source.states.gpu = SourceState::Unknown;
            source.reason = Some(reason);
            source.state_age_ms = age_secs * 1000;
        }
    };
    check(Code::SourceUnknown, |state| {
        sources(state, unknown(UnknownReason::NoProof, 60));
    });
    check(Code::SourceUnknown, |state| {
        sources(state, unknown(UnknownReason::Memory, 0));
    });
    check(Code::SourceUnknown, |state| {
        sources(state, unknown(UnknownReason::ShimGone, 700));
    });
    check(Code::SourceWithoutEvents, |state| {
        sources(state, |source| {
            source.states = Tiers::all(SourceState::Unknown);
            source.engine_seq = None;
        });
    });
    for reason in [UnknownReason::ShimGone, UnknownReason::NoProof] {
        check(Code::SourceGone, |state| {
            sources(state, unknown(reason, 30));
            state.registry.workers.clear();
            state.before.workers.clear();
        });
    }
    check(Code::SourceBeginsAgain, |state| {
        sources(state, |source| source.begun_lately = 4);
    });
    // What may be for a moment is none before it lasts.
    let mut state = healthy();
    sources(&mut state, unknown(UnknownReason::NoProof, 9));
    assert_eq!(codes(&diagnose(&state)), []);
    let page = diagnose(&state).to_string();
    assert!(page.contains("1 exact, 1 unknown"), "{page}");
}

#[test]
fn a_demoted_source_is_named() {
    check(Code::SourceDemoted, |state| {
        let router = RouterId([2; 16]);
        let demoted = DemotedSource {
            source: source("w/0"),
            generation: Generation(1),
            agreements: 0,
        };
        let entry = DemotionEntry {
            router,
            total: 1,
            sources: vec![demoted],
        };
        let subjects = Subjects::new(&namespace());
        let value = codec::encode(&entry).unwrap();
        let key = subjects.demotion_key(router);
        state.registry.put(&subjects, &key, &value);
    });
}

#[test]
fn credit_that_reports_contradict_is_named() {
    check(Code::CreditContradicted, |state| {
        let router = RouterId([2; 16]);
        let doubt = CreditDoubt {
            about: "all prompts at w/0".to_owned(),
            engine_had: "more".to_owned(),
            likely_cause: "events".to_owned(),
        };
        let entry = RouterDoubts {
            router,
            total: 2,
            doubts: vec![doubt],
        };
        let subjects = Subjects::new(&namespace());
        let value = codec::encode(&entry).unwrap();
        let key = subjects.doubts_key(router);
        state.registry.put(&subjects, &key, &value);
    });
}

#[test]
fn a_tier_that_no_source_is_credited_on_is_named() {
    let mut state = healthy();
    for id in ["a", "b"] {
        view(&mut state, id, |view| {
            for source in &mut view.sources {
                source.states.cpu = SourceState::CatchingUp;
            }
        });
    }
    let found = codes(&diagnose(&state));
    assert_eq!(found, [Code::NothingCredited, Code::TierUncredited]);
}

#[test]
fn registry_and_versions_are_judged() {
    check(Code::GenerationBehind, |state| {
        state
            .registry
            .generations
            .insert(source("w/0"), Generation(2));
    });
    check(Code::GenerationBehind, |state| {
        state.registry.generations.remove(&source("w/0"));
    });
    check(Code::RegistryUnreadable, |state| {
        let subjects = Subjects::new(&namespace());
        let key = subjects.worker_key(&WorkerId::from("x"));
        state.registry.put(&subjects, &key, &[2, 6, 0]);
    });
    check(Code::VersionsDiffer, |state| {
        let entry = state.registry.indexers.get_mut("a").unwrap();
        entry.version = "0.2.0".to_owned();
    });
    check(Code::NoRouter, |state| state.registry.routers.clear());
    // A worker that is gone may have left its generation anywhere.
    let mut state = healthy();
    state.registry.generations.clear();
    state.registry.workers.clear();
    assert_eq!(codes(&diagnose(&state)), []);
}

fn facts(router: u8) -> RouterFacts {
    RouterFacts {
        router: RouterId([router; 16]),
        settings: 1,
        unix_ns: NOW - 4 * SECOND,
        failed_checks: Vec::new(),
        unregistered: Vec::new(),
        without_tokenizer: Vec::new(),
    }
}

/// Adds what two routers say of themselves.
fn two_routers(state: &mut PlaneState, other: RouterFacts) {
    for facts in [facts(2), other] {
        state.registry.facts.insert(facts.router, facts);
    }
}

type FactsChange = (Code, fn(&mut RouterFacts));

#[test]
fn routers_are_judged() {
    let mut state = healthy();
    two_routers(&mut state, facts(3));
    assert_eq!(codes(&diagnose(&state)), []);
    let cases: [FactsChange; 4] = [
        (Code::RoutersDiffer, |facts| facts.settings = 2),
        (Code::ClockSkew, |facts| facts.unix_ns = NOW + 3 * SECOND),
        (Code::WorkerUnregistered, |facts| {
            facts.unregistered = vec![WorkerId::from("other")];
        }),
        (Code::ModelWithoutTokenizer, |facts| {
            let (model, why) = ("m".to_owned(), "none".to_owned());
            facts.without_tokenizer = vec![ModelProblem { model, why }];
        }),
    ];
    for (code, change) in cases {
        check(code, |state| {
            let mut other = facts(3);
            change(&mut other);
            two_routers(state, other);
        });
    }
    // Facts that are written, and old.
    check(Code::ClockSkew, |state| {
        let old = |secs: u64| RouterFacts {
            unix_ns: NOW - secs * SECOND,
            ..facts(3)
        };
        two_routers(state, old(10));
        let earlier = old(15);
        state.before.facts.insert(earlier.router, earlier);
    });
    // Facts of a router that ended, or stands still.
    let mut state = healthy();
    let mut ended = facts(3);
    ended.unix_ns = NOW - 15 * SECOND;
    two_routers(&mut state, ended);
    state.before.facts = state.registry.facts.clone();
    assert_eq!(codes(&diagnose(&state)), []);
    check(Code::RouterCheckFailed, |state| {
        let mut other = facts(3);
        other.failed_checks = vec![FailedCheck {
            worker: WorkerId::from("w"),
            check: "chat".to_owned(),
            why: "differs".to_owned(),
        }];
        two_routers(state, other);
    });
}

#[test]
fn a_drained_worker_that_returned_is_named() {
    let drain = |state: &mut PlaneState, shim: u8| {
        let worker = WorkerId::from("w");
        let entry = DrainEntry {
            worker: worker.clone(),
            drain: DrainState::Draining,
            turn: 3,
            set_unix_s: 0,
            shim: Some([shim; 16]),
            until: DrainUntil::Undone,
        };
        state.registry.drained.insert(worker, entry);
    };
    // The engine has published nothing: it is not the one that was drained.
    let is_new = |state: &mut PlaneState| {
        for heard in state.heartbeats.values_mut() {
            heard.last.engine_seq = None;
        }
    };
    check(Code::DrainedReturned, |state| {
        drain(state, 9);
        is_new(state);
    });
    let mut state = healthy();
    drain(&mut state, 1);
    is_new(&mut state);
    assert_eq!(codes(&diagnose(&state)), []);
    // Only its shim was restarted, or the shim cannot know.
    let mut state = healthy();
    drain(&mut state, 9);
    assert_eq!(codes(&diagnose(&state)), []);
    is_new(&mut state);
    for heard in state.heartbeats.values_mut() {
        heard.last.states.gpu = TierState::Unverified;
    }
    let found = codes(&diagnose(&state));
    assert!(!found.contains(&Code::DrainedReturned), "{found:?}");
}

#[test]
fn refused_clients_are_named() {
    check(Code::CredentialsRefused, |state| {
        let refused = RefusedClient {
            name: "warmroute-shim-1".to_owned(),
            ip: "10.0.0.7".to_owned(),
            user: None,
            reason: "Authentication Failure".to_owned(),
            times: 31,
        };
        state.monitors = Some(MonitorAnswers {
            refused: vec![refused],
            ..MonitorAnswers::default()
        });
    });
    let mut state = healthy();
    state.monitors = Some(MonitorAnswers::default());
    assert_eq!(codes(&diagnose(&state)), []);
    check(Code::MonitorUnread, |state| {
        state.monitors = Some(MonitorAnswers {
            unread: vec!["http://127.0.0.1:9: error sending request".to_owned()],
            ..MonitorAnswers::default()
        });
    });
}

#[test]
fn snapshots_are_judged() {
    check(Code::SnapshotUnreadable, |state| {
        state.snapshots[0].unreadable = Some("its checksum is wrong".to_owned());
    });
    check(Code::SnapshotMisfit, |state| {
        state.snapshots[0].fit = Some(LogMatch::OtherRecord);
    });
    check(Code::SnapshotBehindLog, |state| {
        state.snapshots[0].fit = Some(LogMatch::Trimmed);
        state.log.as_mut().unwrap().first = LogPosition(92);
    });
    check(Code::SnapshotOld, |state| {
        state.snapshots[0].outdated_unix_ns = Some(NOW - 1861 * SECOND);
    });
    check(Code::SnapshotMissing, |state| {
        state.snapshots.clear();
        state.log.as_mut().unwrap().first = LogPosition(2);
    });
    let mut state = healthy();
    state.snapshots[0].outdated_unix_ns = None;
    assert_eq!(codes(&diagnose(&state)), [], "nothing came since");
}

#[test]
fn the_worst_comes_first() {
    let mut state = healthy();
    state.registry.routers.clear();
    state.snapshots[0].unreadable = Some("torn".to_owned());
    view(&mut state, "a", |view| {
        view.sources[0].digest = Some(digest(2))
    });
    let found = codes(&diagnose(&state));
    let expected = [
        Code::IndexersDiffer,
        Code::MirrorDiffers,
        Code::SnapshotUnreadable,
        Code::NoRouter,
    ];
    assert_eq!(found, expected);
}

/// The two readings of the registry, with the leases that were renewed in between.
fn leases(state: &mut PlaneState, is_renewed: impl Fn(&str) -> bool) {
    let subjects = Subjects::new(&namespace());
    let worker = WorkerId::from("w");
    let keys = [
        subjects.shim_key(&worker),
        subjects.indexer_key("a"),
        subjects.indexer_key("b"),
        subjects.router_key(RouterId([2; 16])),
    ];
    for key in keys {
        let now = if is_renewed(&key) { 2 } else { 1 };
        state.before.revisions.insert(key.clone(), Revision(1));
        state.registry.revisions.insert(key, Revision(now));
    }
}

#[test]
fn leases_that_stand_still_together_are_the_servers_fault_and_one_its_process() {
    let mut state = healthy();
    leases(&mut state, |_| true);
    assert_eq!(codes(&diagnose(&state)), []);
    check(Code::RouterSilent, |state| {
        leases(state, |key| !key.contains("router"));
    });
    // A full disk: no lease is renewed, and shims that lost theirs send nothing.
    let mut state = healthy();
    leases(&mut state, |_| false);
    state.setup.streams[1].written_ago = Some(Duration::from_secs(34));
    state.heartbeats.clear();
    state.views.insert("b".to_owned(), Err("late".to_owned()));
    let mut stopped = facts(2);
    stopped.unix_ns = NOW - 34 * SECOND;
    state.registry.facts.insert(stopped.router, stopped);
    let report = diagnose(&state);
    assert_eq!(codes(&report), [Code::StoreRefuses], "{report}");
    let consequences = [
        (Code::IndexerSilent, 1),
        (Code::IndexersMissing, 1),
        (Code::ShimSilent, 2),
    ];
    assert_eq!(report.findings[0].explains, consequences);
    let page = report.to_string();
    assert!(page.contains("explains: indexer_silent (1)"), "{page}");
    assert!(page.contains("the last write 34 s ago"), "{page}");
    assert!(page.contains("restart nats-server"), "{page}");
}

#[test]
fn what_cannot_be_read_is_a_finding_and_the_rest_is_judged() {
    check(Code::PlaneUnread, |state| {
        state.unread.push("heartbeats: no answer".to_owned());
        state.heartbeats.clear();
        state.listened = Duration::ZERO;
    });
    let report = unreachable("test", "timed out");
    assert_eq!(codes(&report), [Code::NatsUnreachable]);
    assert!(report.to_string().contains("timed out"), "{report}");
}

#[test]
fn what_to_run_names_the_namespace() {
    let run = Code::StreamMissing.run("prod");
    assert!(
        run.contains("init --nats-url URL --namespace prod"),
        "{run}"
    );
}

#[test]
fn fewer_processes_than_expected_are_named() {
    check(Code::RoutersMissing, |state| {
        state.expected.routers = Some(2)
    });
    check(Code::WorkersMissing, |state| {
        state.expected.workers = Some(2)
    });
    let mut state = healthy();
    state.expected = Expected {
        indexers: Some(2),
        routers: Some(1),
        workers: Some(1),
    };
    assert_eq!(codes(&diagnose(&state)), []);
}

#[test]
fn models_that_lack_a_role_are_named() {
    let with = |roles: &[WorkerRole]| {
        let mut state = healthy();
        let first = state.registry.workers.values().next().unwrap().clone();
        for (number, role) in roles.iter().enumerate() {
            let id = match number {
                0 => first.worker.clone(),
                _ => WorkerId::from(format!("w{number}").as_str()),
            };
            let entry = WorkerEntry {
                worker: id.clone(),
                role: *role,
                ..first.clone()
            };
            state.registry.workers.insert(id, entry);
        }
        let found = codes(&diagnose(&state));
        let of_roles = [Code::ModelOnlyPrefill, Code::ModelOnlyDecode];
        let found = found.into_iter().filter(|code| of_roles.contains(code));
        found.collect::<Vec<Code>>()
    };
    use WorkerRole::{Both, Decode, Prefill};
    assert_eq!(with(&[Prefill]), [Code::ModelOnlyPrefill]);
    assert_eq!(with(&[Decode]), [Code::ModelOnlyDecode]);
    assert_eq!(with(&[Decode, Both]), [Code::ModelOnlyDecode]);
    for complete in [&[Both][..], &[Prefill, Decode], &[Prefill, Both]] {
        assert_eq!(with(complete), []);
    }
}

fn misses(state: &mut PlaneState, unreachable: &[&str], lost: &[&str]) {
    let router = RouterId([2; 16]);
    let misses = RouterMisses {
        router,
        unreachable: unreachable
            .iter()
            .map(|worker| UnreachableWorker {
                worker: WorkerId::from(*worker),
                url: "http://10.0.0.1:8000".to_owned(),
                why: "nothing listens there".to_owned(),
            })
            .collect(),
        lost: lost
            .iter()
            .map(|worker| LostWorker {
                worker: WorkerId::from(*worker),
                silent_secs: 40,
            })
            .collect(),
    };
    let subjects = Subjects::new(&namespace());
    let value = codec::encode(&misses).unwrap();
    let key = subjects.misses_key(router);
    state.registry.put(&subjects, &key, &value);
}

#[test]
fn workers_that_routers_miss_are_named() {
    check(Code::WorkerUnreachable, |state| misses(state, &["w"], &[]));
    check(Code::WorkerLost, |state| misses(state, &[], &["w2"]));
    // The shim sees it too.
    check(Code::EngineUnhealthy, |state| {
        misses(state, &["w"], &[]);
        let heard = state.heartbeats.get_mut(&source("w/0")).unwrap();
        heard.last.health = EngineHealth::Unhealthy;
    });
    // It came back, or left, after the router wrote.
    let mut state = healthy();
    misses(&mut state, &["w2"], &["w"]);
    assert_eq!(codes(&diagnose(&state)), []);
}

/// A wrong replay endpoint: the shim itself is behind its engine.
#[test]
fn a_source_whose_shim_waits_for_its_engine_is_no_matter_of_the_plane() {
    let state_is = |word: SourceState| move |source: &mut SourceView| source.states.gpu = word;
    check(Code::SourceCatchingUp, |state| {
        sources(state, state_is(SourceState::CatchingUp));
    });
    check(Code::SourceUnproven, |state| {
        sources(state, state_is(SourceState::CatchingUp));
        let heard = state.heartbeats.get_mut(&source("w/0")).unwrap();
        heard.last.states.gpu = TierState::CatchingUp;
    });
}
