//! Reads a plane, and writes nothing: what `doctor` and `verify` judge.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, timeout, timeout_at};
use warmroute_plane::{
    Broadcast, LogStatus, NamespaceSetup, Plane, PlaneError, PlaneStream, RegistryEvent,
};
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::snapshot::SnapshotRef;
use warmroute_proto::subject::Subjects;
use warmroute_proto::view::{PAGE_SOURCES_MAX, ViewPage, ViewPageRequest};
use warmroute_proto::{DpRank, Heartbeat, LocalHash, Namespace, Record, Source, codec};

use super::{Heard, LastRecord, PlaneState, Registry, SnapshotSeen};
use crate::fold::{self, HeartbeatVerdict};
use crate::metrics::unix_ns;
use crate::same_log;
use crate::snapshot::format;

/// Heartbeats come each second: three of each shim, or it is silent.
const LISTEN: Duration = Duration::from_millis(3200);

const LIST_DEADLINE: Duration = Duration::from_secs(5);

/// A replica that answers later is of no use to anybody.
const VIEW_DEADLINE: Duration = Duration::from_secs(2);

/// Subjects on which somebody speaks for another: more are not told.
const FOREIGN_MAX: usize = 1000;

/// 200 pages are 400,000 sources.
const PAGES_MAX: usize = 200;

/// Reads under way at once.
const AT_ONCE: usize = 32;

/// One that stalls is told as unreadable.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(60);

/// A plane that is looked at.
#[derive(Clone)]
pub struct Look {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    namespace: Namespace,
}

impl Look {
    #[must_use]
    pub fn new(plane: Arc<dyn Plane>, namespace: &Namespace) -> Self {
        Self {
            plane,
            subjects: Subjects::new(namespace),
            namespace: namespace.clone(),
        }
    }

    /// Reads everything, within some seconds. An error says that the plane cannot be read at all.
    pub async fn read(&self, setup: NamespaceSetup) -> Result<PlaneState, PlaneError> {
        let before = match self.registry().await {
            Ok(before) => before,
            // A bucket that is missing says more than that it cannot be read.
            Err(_) if !setup.differences.is_empty() => {
                let log = self.log().await;
                return Ok(self.without(setup, log));
            }
            Err(error) => return Err(error),
        };
        // Behind what the registry names: a snapshot's record was in the log before.
        let log = self.log().await;
        let listened = Instant::now();
        let (heard, snapshots, last_records) = tokio::join!(
            self.listen(LISTEN),
            self.snapshots(&before, log),
            self.last_records(&before)
        );
        let listened = listened.elapsed();
        let (heard, foreign) = heard?;
        let views = self.views(before.indexers.keys().cloned()).await;
        // Behind the views, for the same reason.
        let log_after = self.log().await;
        // Last: what is used was written there before.
        let registry = self.registry().await?;
        Ok(PlaneState {
            namespace: self.namespace.to_string(),
            setup,
            log,
            log_after,
            before,
            last_records,
            views,
            heard,
            foreign,
            listened,
            pointer: registry.pointer.clone(),
            snapshots,
            complaint: None,
            unix_ns: unix_ns(),
            indexers_expected: None,
            registry_read: true,
            registry,
        })
    }

    fn without(&self, setup: NamespaceSetup, log: Option<LogStatus>) -> PlaneState {
        PlaneState {
            namespace: self.namespace.to_string(),
            unix_ns: unix_ns(),
            setup,
            log,
            ..PlaneState::default()
        }
    }

    /// None if there is no log, or none that tells what it is.
    async fn log(&self) -> Option<LogStatus> {
        self.plane.log_status().await.ok()
    }

    /// All that is registered now.
    pub(crate) async fn registry(&self) -> Result<Registry, PlaneError> {
        let mut registry = Registry::default();
        let read = async {
            let mut events = self.plane.watch(self.subjects.all_keys()).await?;
            while let Some(event) = events.next().await {
                match event {
                    RegistryEvent::Put { key, entry } => {
                        registry.put(&self.subjects, &key, &entry.value);
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

    /// Every shim's heartbeats as they come.
    pub(crate) async fn heartbeats(&self) -> Result<PlaneStream<Broadcast>, PlaneError> {
        self.plane.subscribe(self.subjects.all_heartbeats()).await
    }

    /// What a replica holds of a prompt's blocks.
    pub(crate) async fn query(
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

    #[must_use]
    pub(crate) const fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// One of them, if it may speak for the source that it speaks of.
    pub(crate) fn heartbeat(&self, message: &Broadcast) -> Result<Heartbeat, HeartbeatVerdict> {
        fold::heartbeat(&self.subjects, message)
    }

    /// Every shim's heartbeats, for some time, and the subjects on which somebody spoke for another.
    async fn listen(
        &self,
        time: Duration,
    ) -> Result<(BTreeMap<Source, Heard>, BTreeMap<String, u64>), PlaneError> {
        let end = Instant::now() + time;
        let mut heartbeats = self.heartbeats().await?;
        let (mut heard, mut foreign) = (BTreeMap::new(), BTreeMap::new());
        while let Ok(Some(message)) = timeout_at(end, heartbeats.next()).await {
            match self.heartbeat(&message) {
                Ok(heartbeat) => hear(&mut heard, heartbeat),
                // Of a newer version: its shim is silent to this look.
                Err(HeartbeatVerdict::Undecodable) => {}
                Err(_) if foreign.len() < FOREIGN_MAX || foreign.contains_key(&message.subject) => {
                    *foreign.entry(message.subject).or_default() += 1;
                }
                Err(_) => {}
            }
        }
        Ok((heard, foreign))
    }

    /// What these replicas say of themselves.
    pub(crate) async fn views(
        &self,
        ids: impl Iterator<Item = String>,
    ) -> BTreeMap<String, Result<ViewPage, String>> {
        let views = ids.map(|id| async move {
            let view = self.view(&id).await;
            (id, view.map_err(|error| error.to_string()))
        });
        join_all(views).await.into_iter().collect()
    }

    /// All pages as one; position, lag and state are the first's.
    pub(crate) async fn view(&self, id: &str) -> Result<ViewPage, PlaneError> {
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
        let ask = Bytes::from(codec::encode(&ask).map_err(unreadable)?);
        let subject = self.subjects.query_at(id);
        let answer = self.plane.request(subject, ask, VIEW_DEADLINE).await?;
        codec::decode(&answer).map_err(unreadable)
    }

    async fn last_records(&self, registry: &Registry) -> BTreeMap<Source, LastRecord> {
        let sources = registry.workers.values().flat_map(|entry| {
            (0..entry.ranks).map(|rank| Source {
                worker: entry.worker.clone(),
                dp_rank: DpRank(rank),
            })
        });
        let sources: Vec<Source> = sources.collect();
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

    /// Why a starting indexer could not load it; its blocks are not read, its checksum is.
    async fn unreadable(&self, named: &SnapshotRef) -> Option<String> {
        // A snapshot may be replaced while it is looked at: then the pointer names another one.
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
            Err(_) => return Some("it does not come".to_owned()),
        };
        match format::open(&blob) {
            Ok((head, _)) if (head.log, head.at) == (named.log, named.at) => None,
            Ok(_) => Some("it is not what the pointer says".to_owned()),
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

fn hear(heard: &mut BTreeMap<Source, Heard>, heartbeat: Heartbeat) {
    match heard.get_mut(&heartbeat.source) {
        Some(known) => {
            known.count += 1;
            known.went_back |= heartbeat.generation < known.last.generation;
            if heartbeat.generation >= known.last.generation {
                known.last = heartbeat;
            }
        }
        None => {
            let first = Heard {
                last: heartbeat,
                count: 1,
                went_back: false,
            };
            heard.insert(first.last.source.clone(), first);
        }
    }
}

fn late(what: &str) -> PlaneError {
    PlaneError::Unavailable(format!("{what} did not come in time"))
}

fn unreadable(error: impl std::fmt::Display) -> PlaneError {
    PlaneError::Unavailable(error.to_string())
}
