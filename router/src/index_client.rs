//! Asks an indexer what the fleet holds of a prompt, over the plane, and never waits long.
//!
//! One replica is asked, by its own subject; if it has not answered soon, or is not there, a second
//! one, and whoever answers first wins. Where no replica is known by name the question goes to any.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::StreamExt as _;
use prometheus::IntCounter;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use warmroute_plane::{Plane, PlaneError, RegistryEvent};
use warmroute_proto::LocalHash;
use warmroute_proto::codec;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::registry::IndexerEntry;
use warmroute_proto::subject::Subjects;

use crate::replicas::Replicas;

/// Later than this an answer is worth less than the time: the ladder goes on without it.
pub const DEADLINE: Duration = Duration::from_millis(10);

/// Until a second replica is asked. Well above a round trip, so that few questions are asked twice.
pub const HEDGE: Duration = Duration::from_millis(3);

/// Longer prompts are asked for their first blocks only, so that every question fits into a message
/// of any server: what lies beyond is not credited.
const BLOCKS_MAX: usize = 1 << 16;

/// Until the registry is watched again.
const RETRY: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub(crate) enum IndexError {
    #[error("the question cannot be asked")]
    Encode(#[from] codec::EncodeError),
    #[error("no answer")]
    Plane(#[from] PlaneError),
    #[error("the answer makes no sense")]
    Decode(#[from] codec::DecodeError),
}

/// See the module's documentation. Clones share what is known of the replicas.
#[derive(Clone)]
pub(crate) struct IndexClient {
    plane: Arc<dyn Plane>,
    subjects: Subjects,
    replicas: Arc<Mutex<Replicas>>,
}

impl IndexClient {
    pub(crate) fn new(plane: Arc<dyn Plane>, subjects: Subjects) -> Self {
        Self {
            plane,
            subjects,
            replicas: Arc::default(),
        }
    }

    pub(crate) async fn ask(&self, blocks: &[LocalHash]) -> Result<IndexAnswer, IndexError> {
        let query = IndexQuery {
            blocks: blocks.iter().take(BLOCKS_MAX).copied().collect(),
            at_least: None,
        };
        let payload = Bytes::from(codec::encode(&query)?);
        let asked = Instant::now();
        let two = self.replicas().two(asked.into_std(), &mut Rng::new());
        let answer = match two {
            [None, _] => self.any(payload).await?,
            [Some(first), None] => self.one(&first, payload, DEADLINE).await?,
            [Some(first), Some(second)] => self.hedged(&first, &second, payload).await?,
        };
        Ok(codec::decode(&answer)?)
    }

    /// Follows the registry until stopped. While the plane is away the last known replicas stay.
    pub(crate) async fn follow_replicas(self, unread: IntCounter, stop: CancellationToken) {
        let follow = async {
            loop {
                if let Err(error) = self.watch(&unread).await {
                    tracing::debug!(%error, "the indexers cannot be watched");
                }
                sleep(RETRY).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = follow => {}
        }
    }

    async fn watch(&self, unread: &IntCounter) -> Result<(), PlaneError> {
        let keys = self.subjects.indexer_keys();
        let mut events = self.plane.watch(keys).await?;
        let mut told = Some(Vec::new());
        while let Some(event) = events.next().await {
            match event {
                RegistryEvent::Put { key, entry } => {
                    match codec::decode::<IndexerEntry>(&entry.value) {
                        Ok(entry) if self.subjects.indexer_key(&entry.id) == key => {
                            self.replicas().put(&entry.id, entry.ready);
                            if let Some(told) = &mut told {
                                told.push(entry.id);
                            }
                        }
                        Ok(_) | Err(_) => {
                            tracing::warn!(key, "an indexer's entry is unreadable");
                            unread.inc();
                        }
                    }
                }
                RegistryEvent::Gone { key } => {
                    if let Some(id) = self.subjects.key_indexer(&key) {
                        self.replicas().gone(&id);
                    }
                }
                RegistryEvent::Current => {
                    if let Some(told) = told.take() {
                        self.replicas()
                            .retain(|id| told.iter().any(|told| told == id));
                    }
                }
            }
        }
        Ok(())
    }

    async fn any(&self, payload: Bytes) -> Result<Bytes, PlaneError> {
        self.plane
            .request(self.subjects.query(), payload, DEADLINE)
            .await
    }

    async fn one(&self, id: &str, payload: Bytes, deadline: Duration) -> Result<Bytes, PlaneError> {
        let subject = self.subjects.query_at(id);
        let answer = self.plane.request(subject, payload, deadline).await;
        match &answer {
            Ok(_) => self.replicas().answered(id),
            Err(_) => self.replicas().late(id, Instant::now().into_std()),
        }
        answer
    }

    async fn hedged(&self, first: &str, second: &str, payload: Bytes) -> Result<Bytes, PlaneError> {
        let mut early = Box::pin(self.one(first, payload.clone(), DEADLINE));
        let waiting = tokio::select! {
            answer = &mut early => match answer {
                Ok(answer) => return Ok(answer),
                Err(_) => false,
            },
            () = sleep(HEDGE) => true,
        };
        let mut late = Box::pin(self.one(second, payload, DEADLINE.saturating_sub(HEDGE)));
        if !waiting {
            return late.await;
        }
        tokio::select! {
            answer = &mut early => match answer {
                Ok(answer) => Ok(answer),
                Err(_) => late.await,
            },
            answer = &mut late => match answer {
                Ok(answer) => {
                    // It may answer yet; it was slow all the same.
                    self.replicas().late(first, Instant::now().into_std());
                    Ok(answer)
                }
                Err(_) => early.await,
            },
        }
    }

    fn replicas(&self) -> MutexGuard<'_, Replicas> {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::task::TaskTracker;
    use warmroute_plane::{MemoryPlane, MemoryPlaneConfig, PutIf};
    use warmroute_proto::{LogPosition, Namespace, StreamIdentity};

    use super::*;

    /// What timers are rounded up to.
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

    /// Answers with its own position, or never.
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
            IndexAnswer::Runs { .. } => panic!("these replicas never answer so"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_replica_that_hangs_or_is_gone_costs_no_answer() {
        let (plane, tasks) = (plane(), TaskTracker::new());
        serve(&tasks, &plane, "hangs", None).await;
        serve(&tasks, &plane, "well", Some(7)).await;
        let client = IndexClient::new(Arc::clone(&plane), subjects());
        for id in ["hangs", "well", "not-there"] {
            client.replicas().put(id, true);
        }
        let mut unanswered = 0;
        for _ in 0..50 {
            match client.ask(&[LocalHash(1)]).await {
                Ok(answer) => assert_eq!(position(&answer), 7),
                // Both that were asked were of the other two, which is learned at once.
                Err(_) => unanswered += 1,
            }
        }
        assert!(unanswered <= 1, "{unanswered}");
        // By now both bad ones are known.
        assert_eq!(position(&client.ask(&[LocalHash(1)]).await.unwrap()), 7);
    }

    /// A client that knows nothing of these replicas but their names.
    fn client(plane: &Arc<dyn Plane>, ids: &[&str]) -> IndexClient {
        let client = IndexClient::new(Arc::clone(plane), subjects());
        for id in ids {
            client.replicas().put(id, true);
        }
        client
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_replicas_one_that_hangs_costs_the_hedge_and_no_more() {
        let (plane, tasks) = (plane(), TaskTracker::new());
        serve(&tasks, &plane, "hangs", None).await;
        serve(&tasks, &plane, "well", Some(7)).await;
        let mut slow = 0;
        for _ in 0..50 {
            // Each a new one, so that the one that hangs is asked first now and then.
            let client = client(&plane, &["hangs", "well"]);
            let asked = Instant::now();
            let answer = client.ask(&[LocalHash(1)]).await.unwrap();
            assert_eq!(position(&answer), 7);
            assert!(asked.elapsed() <= HEDGE + TICK, "{:?}", asked.elapsed());
            slow += u32::from(asked.elapsed() >= HEDGE);
        }
        assert!((1..50).contains(&slow), "{slow} of 50 were asked twice");
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_answers_a_question_ends_at_its_deadline() {
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
    async fn replicas_are_found_and_forgotten_by_the_registry() {
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
