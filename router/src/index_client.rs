//! Queries an indexer for what the fleet holds of a prompt, with a short deadline.
//!
//! One replica is queried on its own subject. If it does not answer soon, or is not reachable, a
//! second one is queried, and the first answer counts. While no replica is known by name the query
//! goes to the subject that all of them serve.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use prometheus::IntCounter;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, RegistryEvent, RegistryWatch};
use warmroute_proto::LocalHash;
use warmroute_proto::codec;
use warmroute_proto::query::{HoldAnswer, HoldQuery, IndexAnswer, IndexQuery};
use warmroute_proto::registry::IndexerEntry;
use warmroute_proto::subject::Subjects;

use crate::indexer_pool::IndexerPool;

/// Deadline of a query. A later answer is worth less than the time: the decision goes on without.
pub const DEADLINE: Duration = Duration::from_millis(10);

/// Deadline of a query that no request waits for.
const HOLD_DEADLINE: Duration = Duration::from_millis(200);

/// Delay before a second replica is queried. Well above a round trip, so that few queries are sent
/// twice.
pub const HEDGE: Duration = Duration::from_millis(3);

/// Most blocks in a query, so that it fits into a message of any server. What lies beyond is not
/// credited.
const BLOCKS_MAX: usize = 1 << 16;

#[derive(Debug, thiserror::Error)]
pub(crate) enum IndexError {
    #[error("the query cannot be encoded")]
    Encode(#[from] codec::EncodeError),
    #[error("no answer")]
    Plane(#[from] PlaneError),
    #[error("the answer cannot be decoded")]
    Decode(#[from] codec::DecodeError),
}

/// Client of the indexer replicas. Clones share what is known of the replicas.
#[derive(Clone)]
pub(crate) struct IndexClient {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    indexers: Arc<Mutex<IndexerPool>>,
}

impl IndexClient {
    pub(crate) fn new(plane: Arc<dyn Plane>, subjects: Subjects) -> Self {
        Self {
            plane,
            subjects,
            indexers: Arc::default(),
        }
    }

    pub(crate) async fn ask(&self, blocks: &[LocalHash]) -> Result<IndexAnswer, IndexError> {
        let query = IndexQuery {
            blocks: blocks.iter().take(BLOCKS_MAX).copied().collect(),
            at_least: None,
        };
        let payload = Bytes::from(codec::encode(&query)?);
        let now = Instant::now().into_std();
        let picked = self.indexers().pick_two(now, &mut Rng::new());
        let answer = match picked {
            [None, _] => {
                let subject = self.subjects.query();
                self.plane.request(subject, payload, DEADLINE).await?
            }
            [Some(first), None] => self.ask_one(&first, payload, DEADLINE).await?,
            [Some(first), Some(second)] => self.ask_hedged(&first, &second, payload).await?,
        };
        Ok(codec::decode(&answer)?)
    }

    /// Queries one block of one source. A replica that does not answer is not held against it: one
    /// of an earlier version never does.
    pub(crate) async fn hold(&self, query: &HoldQuery) -> Result<HoldAnswer, IndexError> {
        let payload = Bytes::from(codec::encode(query)?);
        let now = Instant::now().into_std();
        let [picked, _] = self.indexers().pick_two(now, &mut Rng::new());
        let subject = match picked {
            Some(id) => self.subjects.query_at(&id),
            None => self.subjects.query(),
        };
        let answer = self.plane.request(subject, payload, HOLD_DEADLINE).await?;
        Ok(codec::decode(&answer)?)
    }

    /// Follows the registry until stopped. While the plane is unavailable the known replicas stay.
    pub(crate) async fn follow_replicas(self, unread: IntCounter, stop: CancellationToken) {
        let keys = self.subjects.indexer_keys();
        let mut watch = RegistryWatch::new(Arc::clone(&self.plane), keys);
        while let Some(event) = stop.run_until_cancelled(watch.next()).await {
            self.apply(event, &unread);
        }
    }

    fn apply(&self, event: RegistryEvent, unread: &IntCounter) {
        match event {
            RegistryEvent::Put { key, entry } => {
                match codec::decode::<IndexerEntry>(&entry.value) {
                    Ok(entry) if self.subjects.indexer_key(&entry.id) == key => {
                        self.indexers().put(&entry);
                    }
                    Ok(_) | Err(_) => {
                        tracing::warn!(key, "indexer entry is unreadable");
                        unread.inc();
                    }
                }
            }
            RegistryEvent::Gone { key } => {
                if let Some(id) = self.subjects.key_indexer(&key) {
                    self.indexers().remove(&id);
                }
            }
            RegistryEvent::Current => {}
        }
    }

    async fn ask_one(
        &self,
        id: &str,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<Bytes, PlaneError> {
        let subject = self.subjects.query_at(id);
        let answer = self.plane.request(subject, payload, deadline).await;
        match &answer {
            Ok(_) => self.indexers().answered(id),
            Err(_) => self.indexers().late(id, Instant::now().into_std()),
        }
        answer
    }

    async fn ask_hedged(
        &self,
        first: &str,
        second: &str,
        payload: Bytes,
    ) -> Result<Bytes, PlaneError> {
        let mut early = Box::pin(self.ask_one(first, payload.clone(), DEADLINE));
        let has_failed = tokio::select! {
            answer = &mut early => match answer {
                Ok(answer) => return Ok(answer),
                Err(_) => true,
            },
            () = sleep(HEDGE) => false,
        };
        let mut late = Box::pin(self.ask_one(second, payload, DEADLINE.saturating_sub(HEDGE)));
        if has_failed {
            return late.await;
        }
        tokio::select! {
            answer = &mut early => match answer {
                Ok(answer) => Ok(answer),
                Err(_) => late.await,
            },
            answer = &mut late => match answer {
                Ok(answer) => {
                    // The first may still answer, but it was slow.
                    self.indexers().late(first, Instant::now().into_std());
                    Ok(answer)
                }
                Err(_) => early.await,
            },
        }
    }

    fn indexers(&self) -> MutexGuard<'_, IndexerPool> {
        self.indexers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use tokio_util::task::TaskTracker;
    use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, PutIf};
    use warmroute_proto::{LogPosition, Namespace, StreamIdentity};

    use super::*;

    /// Timers are rounded up to this.
    const TICK: Duration = Duration::from_millis(1);

    fn plane() -> Arc<dyn Plane> {
        Arc::new(MemoryPlane::new(MemoryPlaneConfig {
            identity: StreamIdentity {
                created_unix_ns: 1,
                nonce: 1,
            },
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

    /// Serves queries with this position as the answer, or never answers.
    async fn serve(tasks: &TaskTracker, plane: &Arc<dyn Plane>, id: &str, position: Option<u64>) {
        let mut requests = plane.serve(subjects().query_at(id)).await.unwrap();
        let mut unanswered = Vec::new();
        tasks.spawn(async move {
            while let Some(request) = requests.next().await {
                match position {
                    Some(position) => {
                        let answer = IndexAnswer::Behind {
                            position: LogPosition(position),
                        };
                        request.reply.send(codec::encode(&answer).unwrap().into());
                    }
                    None => unanswered.push(request),
                }
            }
        });
    }

    fn position(answer: &IndexAnswer) -> u64 {
        match answer {
            IndexAnswer::Behind { position } => position.0,
            IndexAnswer::Runs { .. } => panic!("these replicas answer with a position"),
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
}
