//! A router's queries on a real nats-server whose `max_payload` was lowered while it ran.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking, its helpers too"
)]

#[expect(dead_code, reason = "its server has settings of its own")]
#[path = "../../proto/plane/tests/nats_server/mod.rs"]
mod nats_server;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nats_server::NatsServer;
use prometheus::IntCounter;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warmroute_indexer::{IndexerConfig, Replica, Service};
use warmroute_plane::{InitConfig, NatsConfig, NatsPlane, Plane};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{
    Change, Digest, DpRank, EngineSeq, Generation, LocalHash, Namespace, PrefixHash, Record,
    RecordNumber, Source, Tier, TierState, Tiers, codec,
};
use warmroute_router::index_client::IndexClient;
use warmroute_router::route::IndexReply;

/// Timeout of a broken test.
const SOON: Duration = Duration::from_secs(60);

/// 140,000 tokens in blocks of 16: 70,000 bytes of hashes.
const BLOCKS: u64 = 8_750;

/// Blocks of a record.
const STEP: usize = 2_000;

const LIMIT: usize = 64 << 10;

fn set_limit(path: &Path, bytes: usize) {
    fs::write(path, format!("max_payload: {bytes}\njetstream: enabled\n")).unwrap();
}

fn namespace() -> Namespace {
    Namespace::from("t")
}

async fn plane(server: &NatsServer, name: &str) -> Arc<dyn Plane> {
    let config = NatsConfig::new(server.url(), namespace(), name);
    let init = InitConfig {
        max_bytes: 64 << 20,
        snapshots_max_bytes: 64 << 20,
        ..InitConfig::default()
    };
    Arc::new(NatsPlane::init(config, init).await.unwrap())
}

async fn limit_is(plane: &Arc<dyn Plane>, bytes: usize) {
    let follows = async {
        while plane.payload_max() != bytes {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, follows).await.expect("the limit is read");
}

/// What a source with all blocks publishes.
fn records(blocks: &[LocalHash]) -> Vec<Record> {
    let source = Source {
        worker: "w".into(),
        dp_rank: DpRank(0),
    };
    let (mut parent, mut digest): (Option<PrefixHash>, _) = (None, Digest::default());
    let steps = (0..).zip(blocks.chunks(STEP));
    let record = |(number, step): (u64, &[LocalHash])| {
        let change = Change::Stored {
            parent,
            blocks: step.to_vec(),
            tier: Tier::Gpu,
        };
        for prefix in prefix_hashes(parent, step) {
            digest.insert(prefix, Tier::Gpu);
            parent = Some(prefix);
        }
        Record {
            source: source.clone(),
            generation: Generation(1),
            number: RecordNumber(number),
            engine_seq: Some(EngineSeq(number)),
            changes: vec![change],
            states: Tiers::all(TierState::Complete),
            after: digest,
            sent_at: None,
        }
    };
    steps.map(record).collect()
}

fn credited(reply: &IndexReply) -> u32 {
    let IndexReply::Holders(holders) = reply else {
        return 0;
    };
    holders.sources().map(|holder| holder.run().gpu).sum()
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_into_a_message_keeps_its_credit() {
    let dir = tempfile::tempdir().unwrap();
    let settings = dir.path().join("nats.conf");
    set_limit(&settings, 1 << 20);
    let arguments = ["-c".into(), settings.clone().into_os_string()];
    let mut server = NatsServer::start_with(&arguments, &[]).await;
    let (indexers, routers) = (
        plane(&server, "indexer").await,
        plane(&server, "router").await,
    );
    set_limit(&settings, LIMIT);
    server.restart().await;
    limit_is(&indexers, LIMIT).await;
    limit_is(&routers, LIMIT).await;

    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let config = IndexerConfig {
        namespace: namespace(),
        max_memory_bytes: None,
    };
    let service = Service::new(config, Arc::clone(&indexers)).unwrap();
    let service = service.registered_as(Replica {
        id: "indexer".to_owned(),
        url: None,
    });
    let indexer = service.handle();
    tasks.spawn(service.run(stop.clone()));
    let subjects = Subjects::new(&namespace());
    let client = IndexClient::new(Arc::clone(&routers), subjects.clone());
    let unread = IntCounter::new("unread", "u").unwrap();
    tasks.spawn(client.clone().follow_replicas(unread, stop.clone()));
    tasks.spawn(client.clone().follow_rosters(stop.clone()));

    let blocks: Vec<LocalHash> = (1..=BLOCKS).map(LocalHash).collect();
    for record in records(&blocks) {
        let subject = subjects.records(&record.source);
        let payload = codec::encode(&record).unwrap();
        let appended = indexers.append(subject, payload.into()).await.unwrap();
        appended.await.unwrap();
    }
    let is_credited = async {
        loop {
            // A loaded machine answers some queries too late.
            if let Ok(reply) = client.ask(&blocks).await
                && u64::from(credited(&reply)) == BLOCKS
            {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    let in_time = timeout(SOON, is_credited).await;
    in_time.unwrap_or_else(|_| panic!("not credited: {:?}", indexer.readiness()));
    stop.cancel();
    tasks.close();
    tasks.wait().await;
}
