use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};

use futures_util::StreamExt as _;
use tokio::time::sleep;
use tokio_util::task::TaskTracker;
use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, PutIf};
use warmroute_proto::codec::Message as _;
use warmroute_proto::query::SourceState;
use warmroute_proto::roster::{
    HolderGroup, HolderPart, NumberSet, RosterId, RosterPage, RosterPageRequest, RosterRow,
};
use warmroute_proto::{DpRank, LogPosition, Namespace, Source, StreamIdentity, Tiers};

use super::*;

/// Timers are rounded up to this.
const TICK: Duration = Duration::from_millis(1);

fn plane() -> Arc<dyn Plane> {
    Arc::new(MemoryPlane::new(MemoryPlaneConfig {
        identity: LOG,
        log_bytes_max: 1 << 20,
        queue_max: 64,
    }))
}

fn subjects() -> Subjects {
    Subjects::new(&Namespace::from("ns"))
}

fn entry(id: &str) -> IndexerEntry {
    IndexerEntry {
        id: id.to_owned(),
        url: None,
        version: String::new(),
        ready: true,
        log: None,
        position: LogPosition(0),
    }
}

const LOG: StreamIdentity = StreamIdentity {
    created_unix_ns: 1,
    nonce: 1,
};

/// Serves full queries with this position, as a replica without a roster does, or never answers.
async fn serve(tasks: &TaskTracker, plane: &Arc<dyn Plane>, id: &str, position: Option<u64>) {
    let mut requests = plane.serve(subjects().query_at(id)).await.unwrap();
    let mut unanswered = Vec::new();
    tasks.spawn(async move {
        while let Some(request) = requests.next().await {
            match position {
                // What it cannot read it drops.
                Some(_) if codec::decode::<IndexQuery>(&request.payload).is_err() => {}
                Some(position) => {
                    let answer = IndexAnswer::Runs {
                        log: LOG,
                        position: LogPosition(position),
                        sources: Vec::new(),
                    };
                    request.reply.send(codec::encode(&answer).unwrap().into());
                }
                None => unanswered.push(request),
            }
        }
    });
}

fn position(reply: &IndexReply) -> u64 {
    match reply {
        IndexReply::Full(IndexAnswer::Runs { position, .. }) => position.0,
        IndexReply::Full(IndexAnswer::Behind { .. })
        | IndexReply::Holders(_)
        | IndexReply::Cuts(_) => {
            panic!("these replicas answer with a position")
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_hangs_or_is_gone_costs_no_answer() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "hangs", None).await;
    serve(&tasks, &plane, "well", Some(7)).await;
    let client = IndexClient::new(Arc::clone(&plane), subjects());
    for id in ["hangs", "well", "not-there"] {
        client.indexers().put(&entry(id));
    }
    let mut unanswered = 0;
    for _ in 0..50 {
        match client.ask(&[LocalHash(1)]).await {
            Ok(answer) => assert_eq!(position(&answer), 7),
            // Both picked ones were of the other two, which is learned from this failure.
            Err(_) => unanswered += 1,
        }
    }
    assert!(unanswered <= 1, "{unanswered}");
    // By now both bad ones are known.
    assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 7);
}

/// A client that knows only the names of these replicas.
fn client(plane: &Arc<dyn Plane>, ids: &[&str]) -> IndexClient {
    let client = IndexClient::new(Arc::clone(plane), subjects());
    for id in ids {
        client.indexers().put(&entry(id));
    }
    client
}

#[tokio::test(start_paused = true)]
async fn with_two_replicas_one_that_hangs_costs_only_the_hedge() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "hangs", None).await;
    serve(&tasks, &plane, "well", Some(7)).await;
    let mut slow = 0;
    for _ in 0..50 {
        // A new client each time, so that the one that hangs is picked first now and then.
        let client = client(&plane, &["hangs", "well"]);
        let asked = Instant::now();
        let answer = client.ask(&[LocalHash(1)]).await.unwrap();
        assert_eq!(position(&answer), 7);
        assert!(asked.elapsed() <= HEDGE + TICK, "{:?}", asked.elapsed());
        slow += u32::from(asked.elapsed() >= HEDGE);
    }
    assert!(
        (1..50).contains(&slow),
        "{slow} of 50 queries were sent twice"
    );
}

/// A router without a processor for a while finds answer and timers due together.
#[tokio::test(start_paused = true)]
async fn no_second_replica_is_queried_if_the_answer_is_there() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    let queries = Arc::new(AtomicUsize::new(0));
    for id in ["a", "b"] {
        let mut requests = plane.serve(subjects().query_at(id)).await.unwrap();
        let queries = Arc::clone(&queries);
        tasks.spawn(async move {
            while let Some(request) = requests.next().await {
                queries.fetch_add(1, Ordering::Relaxed);
                let answer = IndexAnswer::Runs {
                    log: LOG,
                    position: LogPosition(7),
                    sources: Vec::new(),
                };
                request.reply.send(codec::encode(&answer).unwrap().into());
            }
        });
    }
    for asked in 1..=50 {
        let client = client(&plane, &["a", "b"]);
        let mut ask = std::pin::pin!(client.ask(&[LocalHash(1)]));
        assert!(
            ask.as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
        while queries.load(Ordering::Relaxed) < asked {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(2 * DEADLINE).await;
        assert_eq!(position(&ask.await.unwrap()), 7);
        assert_eq!(queries.load(Ordering::Relaxed), asked);
    }
}

#[tokio::test(start_paused = true)]
async fn no_second_replica_is_queried_without_time_for_its_answer() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "hangs", None).await;
    serve(&tasks, &plane, "hangs-too", None).await;
    let client = client(&plane, &["hangs", "hangs-too"]);
    let mut ask = std::pin::pin!(client.ask(&[LocalHash(1)]));
    assert!(
        ask.as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    tokio::time::advance(2 * DEADLINE).await;
    assert!(ask.await.is_err());
    let now = Instant::now().into_std();
    let suspects = client.indexers().suspects(now).into_iter();
    let suspects = suspects.filter(|(_, is_suspect)| *is_suspect).count();
    assert_eq!(suspects, 1, "the one that was asked");
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_query_ends_at_its_deadline() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "hangs", None).await;
    serve(&tasks, &plane, "hangs-too", None).await;
    for ids in [&["hangs"][..], &["hangs", "hangs-too"]] {
        let client = client(&plane, ids);
        let asked = Instant::now();
        assert!(client.ask(&[LocalHash(1)]).await.is_err());
        let took = asked.elapsed();
        assert!(took >= DEADLINE && took <= DEADLINE + TICK, "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn replicas_are_added_and_removed_by_the_registry() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "a", Some(1)).await;
    let client = IndexClient::new(Arc::clone(&plane), subjects());
    assert!(client.ask(&[LocalHash(1)]).await.is_err());
    let unread = IntCounter::new("unread", "u").unwrap();
    let stop = CancellationToken::new();
    tasks.spawn(client.clone().follow_replicas(unread.clone(), stop.clone()));
    let value = Bytes::from(codec::encode(&entry("a")).unwrap());
    let key = subjects().indexer_key("a");
    let revision = plane
        .put(key.clone(), value, PutIf::Always, None)
        .await
        .unwrap();
    while client.ask(&[LocalHash(1)]).await.is_err() {
        sleep(Duration::from_millis(1)).await;
    }
    plane.delete(key, revision).await.unwrap();
    while client.ask(&[LocalHash(1)]).await.is_ok() {
        sleep(Duration::from_millis(1)).await;
    }
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_does_not_know_the_log_is_not_the_first_good_answer() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "well", Some(7)).await;
    let mut requests = plane.serve(subjects().query_at("behind")).await.unwrap();
    tasks.spawn(async move {
        while let Some(request) = requests.next().await {
            let answer = IndexAnswer::Behind {
                position: LogPosition(0),
            };
            request.reply.send(codec::encode(&answer).unwrap().into());
        }
    });
    for _ in 0..20 {
        let client = client(&plane, &["behind", "well"]);
        assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 7);
    }
}

/// The roster of a replica with sources 0 and 1, and its answers in two parts. Its answers name the
/// roster `answers`.
async fn serve_roster(tasks: &TaskTracker, plane: &Arc<dyn Plane>, id: &str, answers: RosterId) {
    let mut requests = plane.serve(subjects().query_at(id)).await.unwrap();
    let row = |number| RosterRow {
        number: RosterNumber(number),
        source: Source {
            worker: "w".into(),
            dp_rank: DpRank(number),
        },
        status: None,
    };
    let page = move |ask: RosterPageRequest| RosterPage {
        roster: RosterId(1),
        version: ask.since + 1,
        rows: (ask.since < 2)
            .then(|| row(ask.since as u32))
            .into_iter()
            .collect(),
        more: ask.since < 1,
    };
    let part = move |query: HolderQuery| HolderPart {
        roster: answers,
        log: LOG,
        position: LogPosition(9),
        groups: vec![HolderGroup {
            run: Tiers::all(1),
            states: Tiers::all(SourceState::Exact),
            members: NumberSet::from_ascending([query.from]),
        }],
        details: Vec::new(),
        changes: Vec::new(),
        next: (query.from < RosterNumber(2)).then_some(RosterNumber(query.from.0 + 1)),
    };
    tasks.spawn(async move {
        while let Some(request) = requests.next().await {
            let payload = &request.payload;
            let answer = match codec::kind(payload) {
                Some(RosterPageRequest::KIND) => {
                    codec::encode(&page(codec::decode(payload).unwrap()))
                }
                Some(HolderQuery::KIND) => {
                    let part = part(codec::decode(payload).unwrap());
                    codec::encode(&HolderAnswer::Holders(part))
                }
                _ => codec::encode(&IndexAnswer::Runs {
                    log: LOG,
                    position: LogPosition(3),
                    sources: Vec::new(),
                }),
            };
            request.reply.send(answer.unwrap().into());
        }
    });
}

#[tokio::test(start_paused = true)]
async fn a_replica_whose_roster_is_read_is_asked_for_holders_in_parts() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve_roster(&tasks, &plane, "a", RosterId(1)).await;
    let client = client(&plane, &["a"]);
    assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 3);
    let stop = CancellationToken::new();
    tasks.spawn(client.clone().follow_rosters(stop.clone()));
    sleep(Duration::from_millis(1)).await;
    let IndexReply::Holders(reply) = client.ask(&[LocalHash(1)]).await.unwrap() else {
        panic!("its roster is read");
    };
    assert_eq!(reply.unnamed(), 1, "three parts of one holder, two named");
    stop.cancel();
}

/// Numbers of another life of a replica would name other sources.
#[tokio::test(start_paused = true)]
async fn an_answer_of_another_roster_is_refused_and_the_roster_read_again() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve_roster(&tasks, &plane, "a", RosterId(2)).await;
    let client = client(&plane, &["a"]);
    let stop = CancellationToken::new();
    tasks.spawn(client.clone().follow_rosters(stop.clone()));
    sleep(Duration::from_millis(1)).await;
    let refused = client.ask(&[LocalHash(1)]).await;
    assert!(
        matches!(refused, Err(IndexError::OtherRoster)),
        "{refused:?}"
    );
    assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 3);
    stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn a_replica_without_a_roster_gets_full_queries() {
    let (plane, tasks) = (plane(), TaskTracker::new());
    serve(&tasks, &plane, "old", Some(7)).await;
    let client = client(&plane, &["old"]);
    let stop = CancellationToken::new();
    tasks.spawn(client.clone().follow_rosters(stop.clone()));
    for _ in 0..20 {
        assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 7);
        sleep(Duration::from_secs(1)).await;
    }
    stop.cancel();
}

/// Serves the roster of sources 0 and 1. Both hold the first two blocks, and source 1 holds the
/// third too, if the replica answers for later parts.
async fn serve_parts(tasks: &TaskTracker, plane: &Arc<dyn Plane>, answers_later_parts: bool) {
    let mut requests = plane.serve(subjects().query_at("a")).await.unwrap();
    let row = |number| RosterRow {
        number: RosterNumber(number),
        source: Source {
            worker: "w".into(),
            dp_rank: DpRank(number),
        },
        status: None,
    };
    let page = RosterPage {
        roster: RosterId(1),
        version: 1,
        rows: vec![row(0), row(1)],
        more: false,
    };
    let holders = |gpu, members: &[u32]| {
        let group = HolderGroup {
            run: Tiers {
                gpu,
                ..Tiers::all(0)
            },
            states: Tiers::all(SourceState::Exact),
            members: NumberSet::from_ascending(members.iter().copied().map(RosterNumber)),
        };
        codec::encode(&HolderAnswer::Holders(HolderPart {
            roster: RosterId(1),
            log: LOG,
            position: LogPosition(9),
            groups: vec![group],
            details: Vec::new(),
            changes: Vec::new(),
            next: None,
        }))
    };
    let (first, later) = (holders(2, &[0, 1]).unwrap(), holders(3, &[1]).unwrap());
    tasks.spawn(async move {
        while let Some(request) = requests.next().await {
            let answer = match codec::kind(&request.payload) {
                Some(RosterPageRequest::KIND) => codec::encode(&page).unwrap(),
                Some(HolderQuery::KIND) => first.clone(),
                Some(DeepHolderQuery::KIND) if answers_later_parts => later.clone(),
                _ => continue,
            };
            request.reply.send(answer.into());
        }
    });
}

/// A replica of an older version drops what it cannot read.
#[tokio::test(start_paused = true)]
async fn parts_are_joined_and_one_without_an_answer_costs_what_is_beyond() {
    for (answers_later_parts, runs) in [(true, [2, 3]), (false, [2, 2])] {
        let (plane, tasks) = (plane(), TaskTracker::new());
        serve_parts(&tasks, &plane, answers_later_parts).await;
        let client = client(&plane, &["a"]);
        let stop = CancellationToken::new();
        tasks.spawn(client.clone().follow_rosters(stop.clone()));
        sleep(Duration::from_millis(1)).await;
        let blocks = [1, 2, 3].map(LocalHash);
        let reply = client.ask_any(PartedBlocks::new(&blocks, 2)).await.unwrap();
        let IndexReply::Holders(reply) = reply else {
            panic!("its roster is read");
        };
        let found: Vec<u32> = reply.sources().map(|holder| holder.run().gpu).collect();
        assert_eq!(found, runs);
        let state = match answers_later_parts {
            true => SourceState::Exact,
            false => SourceState::Partial,
        };
        for holder in reply.sources() {
            assert_eq!(holder.states(), Some(Tiers::all(state)));
        }
        stop.cancel();
    }
}

#[test]
fn parts_fit_and_continue_the_chain() {
    let blocks: Vec<LocalHash> = (1..=30_000).map(LocalHash).collect();
    let root = PrefixHash::after(None, LocalHash::RESUME_ROOT);
    for limit in [70_000, 65_536, 600 << 10] {
        let mut covered = 0;
        for (before, part) in PartedBlocks::new(&blocks, blocks_within(limit)).parts() {
            assert_eq!(part, &blocks[covered..][..part.len()]);
            let blocks_of_part = part.to_vec();
            let from = RosterNumber(0);
            let payload = match before {
                None => {
                    let known = RosterPageRequest {
                        roster: RosterId(1),
                        since: 1,
                    };
                    codec::encode(&HolderQuery {
                        blocks: blocks_of_part,
                        from,
                        known,
                    })
                    .unwrap()
                }
                Some(before) => {
                    assert_eq!(before.blocks as usize, covered);
                    let above = &blocks[..covered];
                    assert_eq!(prefix_hashes(None, above).last(), Some(before.prefix));
                    assert_eq!(prefix_hashes(Some(root), above).last(), Some(before.resume));
                    codec::encode(&DeepHolderQuery {
                        before,
                        blocks: blocks_of_part,
                        from,
                    })
                    .unwrap()
                }
            };
            assert!(payload.len() <= limit, "{} of {limit}", payload.len());
            covered += part.len();
        }
        assert_eq!(covered, blocks.len());
    }
    assert_eq!(blocks_within(10), 0);
    let none = PartedBlocks::new(&[], 5);
    assert_eq!(none.parts().count(), 1);
    let bounded = PartedBlocks::new(&blocks, 10);
    assert_eq!(bounded.parts().count(), PARTS_MAX);
    assert!(bounded.is_cut && !none.is_cut);
}
