//! Reads a plane without writing: the input of `doctor`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use warmroute_plane::{LogStatus, NamespaceSetup, Plane, PlaneError, PlaneLog, RegistryEvent};
use warmroute_proto::codec::Message;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::snapshot::SnapshotRef;
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::{
    PAGE_SOURCES_MAX, ReplicaFaults, ReplicaFaultsRequest, ViewPage, ViewPageRequest,
};
use warmroute_proto::{Heartbeat, LocalHash, Namespace, Record, Source, codec};

use super::registry::sources;
use super::{LastRecord, PlaneState, Registry, ShimHeartbeats, SnapshotSeen, routers};
use crate::fold::{self, HeartbeatVerdict};
use crate::metrics::unix_ns;
use crate::same_log;
use crate::snapshot::format;

/// Listening time: three heartbeats of each shim.
const LISTEN: Duration = Duration::from_millis(3200);

/// A router writes its facts each five seconds.
const FACTS_WAIT: Duration = Duration::from_secs(6);

const LIST_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline of a replica's answer.
const VIEW_DEADLINE: Duration = Duration::from_secs(2);

/// Maximum subjects with foreign heartbeats that are reported.
const FOREIGN_MAX: usize = 1000;

/// 200 pages are 400,000 sources.
const PAGES_MAX: usize = 200;

/// Parallel reads.
const AT_ONCE: usize = 32;

/// Deadline of reading a snapshot; afterwards it counts as unreadable.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(60);

/// Reads a plane.
#[derive(Clone)]
pub struct PlaneReader {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    namespace: Namespace,
    /// Shows what is read next.
    progress: fn(&str),
}

/// Heartbeats by source, and the number of foreign ones by subject.
type Heard = (BTreeMap<Source, ShimHeartbeats>, BTreeMap<String, u64>);

impl PlaneReader {
    #[must_use]
    pub fn new(plane: Arc<dyn Plane>, namespace: &Namespace, progress: fn(&str)) -> Self {
        Self {
            plane,
            subjects: Subjects::new(namespace),
            namespace: namespace.clone(),
            progress,
        }
    }

    /// Reads everything, within seconds. What cannot be read is in [`PlaneState::unread`].
    pub async fn read(&self, setup: NamespaceSetup) -> PlaneState {
        let mut unread = setup.unread.clone();
        (self.progress)("reading the registry");
        let before = match self.registry().await {
            Ok(before) => before,
            Err(error) => {
                // A bucket that is known to be missing is a finding already.
                if setup.differences.is_empty() {
                    unread.push(format!("the registry: {error}"));
                }
                return PlaneState {
                    namespace: self.namespace.to_string(),
                    unix_ns: unix_ns(),
                    log: self.log(&setup).await,
                    unread,
                    setup,
                    ..PlaneState::default()
                };
            }
        };
        // After the registry, so that the log contains the records of the snapshots it names.
        let log = self.log(&setup).await;
        (self.progress)("listening to the shims for 3 s, reading records and snapshots");
        let started = Instant::now();
        let (heard, snapshots, last_records) = tokio::join!(
            self.listen(LISTEN),
            self.snapshots(&before, log),
            self.last_records(&before, log)
        );
        let (heartbeats, foreign) = heard.unwrap_or_else(|error| {
            unread.push(format!("heartbeats: {error}"));
            Heard::default()
        });
        let listened = match heartbeats.is_empty() && !unread.is_empty() {
            true => Duration::ZERO,
            false => started.elapsed(),
        };
        if routers::look_old(&before, unix_ns()) {
            (self.progress)("waiting for the routers' next facts, 6 s");
            sleep(FACTS_WAIT).await;
        }
        (self.progress)("asking the indexers");
        let ids = || before.indexers.keys().cloned();
        let (views, faults) = tokio::join!(self.views(ids()), self.faults(ids()));
        // After the views, for the same reason.
        let log_after = self.log(&setup).await;
        // Last, so that it contains every generation in use.
        let registry = self.registry().await.unwrap_or_else(|error| {
            unread.push(format!("the registry: {error}"));
            before.clone()
        });
        PlaneState {
            namespace: self.namespace.to_string(),
            setup,
            log,
            log_after,
            before,
            last_records,
            views,
            faults,
            heartbeats,
            foreign,
            listened,
            snapshots,
            unix_ns: unix_ns(),
            registry_read: true,
            unread,
            registry,
            ..PlaneState::default()
        }
    }

    /// Status of the log; `None` if it is absent or cannot be read.
    async fn log(&self, setup: &NamespaceSetup) -> Option<LogStatus> {
        match setup.log {
            PlaneLog::JetStream => self.plane.log_status().await.ok(),
            // Each replica reads its own.
            PlaneLog::None => None,
        }
    }

    /// The present registry.
    async fn registry(&self) -> Result<Registry, PlaneError> {
        let mut registry = Registry::default();
        let read = async {
            let mut events = self.plane.watch(self.subjects.all_keys()).await?;
            while let Some(event) = events.next().await {
                match event {
                    RegistryEvent::Put { key, entry } => {
                        registry.put(&self.subjects, &key, &entry.value);
                        registry.revisions.insert(key, entry.revision);
                    }
                    RegistryEvent::Gone { .. } => {}
                    RegistryEvent::Current => break,
                }
            }
            Ok(())
        };
        let read = timeout(LIST_DEADLINE, read).await;
        read.unwrap_or_else(|_| Err(late("the registry")))?;
        Ok(registry)
    }

    /// Queries one replica.
    pub(super) async fn query(
        &self,
        id: &str,
        blocks: Vec<LocalHash>,
    ) -> Result<IndexAnswer, PlaneError> {
        let query = IndexQuery {
            blocks,
            at_least: None,
        };
        let query = Bytes::from(codec::encode(&query).map_err(unreadable)?);
        let subject = self.subjects.query_at(id);
        let answer = self.plane.request(subject, query, VIEW_DEADLINE).await?;
        codec::decode(&answer).map_err(unreadable)
    }

    /// Collects heartbeats for some time.
    async fn listen(&self, time: Duration) -> Result<Heard, PlaneError> {
        let end = Instant::now() + time;
        let all = self.subjects.all_heartbeats();
        let mut messages = self.plane.subscribe(all).await?;
        let (mut heartbeats, mut foreign) = (BTreeMap::new(), BTreeMap::new());
        while let Ok(Some(message)) = timeout_at(end, messages.next()).await {
            match fold::heartbeat(&self.subjects, &message) {
                Ok(heartbeat) => add_heartbeat(&mut heartbeats, heartbeat),
                // A newer version: its shim counts as silent.
                Err(HeartbeatVerdict::Undecodable) => {}
                Err(_) if foreign.len() < FOREIGN_MAX || foreign.contains_key(&message.subject) => {
                    *foreign.entry(message.subject).or_default() += 1;
                }
                Err(_) => {}
            }
        }
        Ok((heartbeats, foreign))
    }

    /// Views of these replicas.
    async fn views(
        &self,
        ids: impl Iterator<Item = String>,
    ) -> BTreeMap<String, Result<ViewPage, String>> {
        let views = ids.map(|id| async move {
            let view = self.view(&id).await;
            (id, view.map_err(|error| error.to_string()))
        });
        join_all(views).await.into_iter().collect()
    }

    /// All pages of a replica's view as one. Position, lag and state are of the first page.
    async fn view(&self, id: &str) -> Result<ViewPage, PlaneError> {
        let mut view = self.page(id, None).await?;
        for _ in 0..PAGES_MAX {
            if !view.more {
                break;
            }
            let after = view.sources.last().map(|last| last.source.clone());
            let next = self.page(id, after).await?;
            view.more = next.more;
            view.sources.extend(next.sources);
        }
        Ok(view)
    }

    async fn page(&self, id: &str, after: Option<Source>) -> Result<ViewPage, PlaneError> {
        let ask = ViewPageRequest {
            after,
            sources_max: PAGE_SOURCES_MAX,
        };
        self.ask(id, &ask).await
    }

    /// Faults of those replicas that report them.
    async fn faults(&self, ids: impl Iterator<Item = String>) -> BTreeMap<String, ReplicaFaults> {
        let faults = ids.map(|id| async move {
            let faults = self.ask(&id, &ReplicaFaultsRequest {}).await;
            faults.ok().map(|faults| (id, faults))
        });
        join_all(faults).await.into_iter().flatten().collect()
    }

    async fn ask<Q: Message, A: Message>(&self, id: &str, request: &Q) -> Result<A, PlaneError> {
        let request = Bytes::from(codec::encode(request).map_err(unreadable)?);
        let subject = self.subjects.query_at(id);
        let answer = self.plane.request(subject, request, VIEW_DEADLINE).await?;
        codec::decode(&answer).map_err(unreadable)
    }

    async fn last_records(
        &self,
        registry: &Registry,
        log: Option<LogStatus>,
    ) -> BTreeMap<Source, LastRecord> {
        if log.is_none() {
            return BTreeMap::new();
        }
        let sources: Vec<Source> = registry.workers.values().flat_map(sources).collect();
        let reads = stream::iter(sources).map(|source| async {
            let subject = self.subjects.records(&source);
            let message = self.plane.last_on(subject).await.ok()??;
            let record: Record = codec::decode(&message.payload).ok()?;
            let last = LastRecord {
                position: message.position,
                generation: record.generation,
                number: record.number,
            };
            Some((source, last))
        });
        let found = reads
            .buffer_unordered(AT_ONCE)
            .filter_map(async |found| found);
        found.collect().await
    }

    async fn snapshots(&self, registry: &Registry, log: Option<LogStatus>) -> Vec<SnapshotSeen> {
        let mut seen = Vec::new();
        if let Some(pointer) = &registry.pointer {
            for named in std::iter::once(&pointer.newest).chain(&pointer.older) {
                seen.push(self.snapshot(named, log.as_ref()).await);
            }
        }
        seen
    }

    async fn snapshot(&self, named: &SnapshotRef, log: Option<&LogStatus>) -> SnapshotSeen {
        let mut seen = SnapshotSeen {
            name: named.name.clone(),
            position: named.at.position,
            bytes: named.bytes,
            unreadable: self.unreadable(named).await,
            fit: None,
            outdated_unix_ns: None,
        };
        let Some(log) = log else {
            return seen;
        };
        let found = match same_log::is_there(&named.at, log) {
            true => self.plane.at(named.at.position).await.ok().flatten(),
            false => None,
        };
        seen.fit = Some(same_log::judge(
            named.log,
            Some(&named.at),
            log,
            found.as_ref(),
        ));
        let next = self.plane.at(named.at.position.next()).await;
        let next = next.ok().flatten();
        seen.outdated_unix_ns = next.map(|message| message.stored_unix_ns);
        seen
    }

    /// Why a starting indexer could not load it. Checks the checksum, not the blocks.
    async fn unreadable(&self, named: &SnapshotRef) -> Option<String> {
        // A snapshot may be replaced while it is read: then the pointer names another one.
        let blob = self.plane.get_snapshot(named.name.clone());
        let blob = match timeout(SNAPSHOT_DEADLINE, blob).await {
            Ok(Ok(Some(blob))) => blob,
            Ok(Ok(None)) => {
                return self
                    .is_still_named(named)
                    .await
                    .then(|| "gone or torn".into());
            }
            Ok(Err(error)) => return Some(error.to_string()),
            Err(_) => return Some("it cannot be read in time".to_owned()),
        };
        match format::open(&blob) {
            Ok((head, _)) if (head.log, head.at) == (named.log, named.at) => None,
            Ok(_) => Some("it differs from the pointer".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    async fn is_still_named(&self, named: &SnapshotRef) -> bool {
        let Ok(registry) = self.registry().await else {
            return true;
        };
        let pointer = registry.pointer.as_ref();
        let names = pointer.map(|pointer| (&pointer.newest, pointer.older.as_ref()));
        names.is_some_and(|(newest, older)| newest == named || older == Some(named))
    }
}

fn add_heartbeat(heartbeats: &mut BTreeMap<Source, ShimHeartbeats>, heartbeat: Heartbeat) {
    match heartbeats.get_mut(&heartbeat.source) {
        Some(known) => {
            known.count += 1;
            known.went_back |= heartbeat.generation < known.last.generation;
            if heartbeat.generation >= known.last.generation {
                known.last = heartbeat;
            }
        }
        None => {
            let first = ShimHeartbeats {
                last: heartbeat,
                count: 1,
                went_back: false,
            };
            heartbeats.insert(first.last.source.clone(), first);
        }
    }
}

fn late(what: &str) -> PlaneError {
    PlaneError::Unavailable(format!("{what} was not read in time"))
}

fn unreadable(error: impl std::fmt::Display) -> PlaneError {
    PlaneError::Unavailable(error.to_string())
}
