//! A rank's calls to the plane: ordered appends, generation claims, heartbeats, and reads of the log's
//! tail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};
use warmroute_plane::{Plane, PlaneError, PutIf};
use warmroute_proto::codec::{self, Message};
use warmroute_proto::registry::GenerationEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, Heartbeat, LogPosition, Record, Source};

use super::log_health::LogHealth;
use crate::source::{
    AppendId, FlushId, FlushResult, LogTail, RegistryReading, Tail, next_generation,
};

const PLANE_DEADLINE: Duration = Duration::from_secs(5);

/// An acknowledgement that is later than this counts as lost. Readers wait three times as long for a
/// missing record.
const ACK_DEADLINE: Duration = Duration::from_secs(2);

/// An answer of the plane or the engine.
pub(super) enum PlaneAnswer {
    Appended(AppendId, LogPosition),
    NotAppended(AppendId),
    /// With the plane's limit in bytes.
    TooLarge(AppendId, usize),
    Claimed(Option<Generation>),
    Tail(u64, Tail),
    /// The engine's answer, in the same queue.
    Flushed(FlushId, FlushResult),
}

/// Decodes messages of the plane and counts failures: a newer version, or torn bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct CountingDecoder(Arc<AtomicU64>);

impl CountingDecoder {
    pub(crate) fn decode<M: Message>(&self, bytes: &[u8]) -> Option<M> {
        let decoded = codec::decode(bytes);
        decoded
            .inspect_err(|error| {
                self.0.fetch_add(1, Ordering::Relaxed);
                warn!(%error, "undecodable message on the plane");
            })
            .ok()
    }

    pub(crate) fn failures(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A rank's way to the plane. Clones share the queue of answers.
#[derive(Clone)]
pub(super) struct RankPlane {
    pub(super) plane: Arc<dyn Plane>,
    pub(super) subjects: Subjects,
    pub(super) source: Source,
    pub(super) decoder: CountingDecoder,
    pub(super) log: LogHealth,
    pub(super) answers: mpsc::Sender<PlaneAnswer>,
    pub(super) tasks: TaskTracker,
    /// Queued appends of another attempt are dropped.
    pub(super) attempt: Arc<AtomicU32>,
}

impl RankPlane {
    /// Appends in order. Acknowledgements do not wait for each other.
    pub(super) async fn append_all(self, mut queue: mpsc::Receiver<(AppendId, Bytes)>) {
        let subject = self.subjects.records(&self.source);
        let mut unacknowledged = FuturesUnordered::new();
        let mut warned = false;
        loop {
            let (id, appended) = tokio::select! {
                // The acknowledgements first: their number is bounded by the queue's.
                biased;
                Some(answer) = unacknowledged.next() => answer,
                next = queue.recv() => {
                    let Some((id, payload)) = next else { return };
                    if id.attempt != self.attempt.load(Ordering::Acquire) {
                        continue;
                    }
                    let append = self.plane.append(subject.clone(), payload);
                    match timeout(PLANE_DEADLINE, append).await {
                        Ok(Ok(acknowledged)) => {
                            unacknowledged.push(async move {
                                let answer = timeout(ACK_DEADLINE, acknowledged).await;
                                (id, answer.unwrap_or_else(|late| Err(unavailable(&late))))
                            });
                            continue;
                        }
                        Ok(Err(error)) => (id, Err(error)),
                        Err(late) => (id, Err(unavailable(&late))),
                    }
                }
            };
            let answer = match appended {
                Ok(position) => {
                    warned = false;
                    self.log.appended(Ok(()));
                    PlaneAnswer::Appended(id, position)
                }
                Err(error) => {
                    if !warned {
                        warned = true;
                        warn!(source = %self.source, %error, "the log takes no record of this source");
                    }
                    // A record that is too large is made smaller.
                    if !matches!(error, PlaneError::TooLarge { .. }) {
                        self.log.appended(Err(error.to_string()));
                    }
                    not_appended(id, &error)
                }
            };
            if self.answers.send(answer).await.is_err() {
                return;
            }
        }
    }

    pub(super) fn claim(&self, above: Generation) {
        let this = self.clone();
        self.tasks.spawn(async move {
            let claim = timeout(PLANE_DEADLINE, this.next_generation(above)).await;
            let generation = match claim {
                Ok(Ok(generation)) => Some(generation),
                Ok(Err(error)) => {
                    debug!(source = %this.source, %error, "cannot claim a generation yet");
                    None
                }
                Err(_) => None,
            };
            drop(this.answers.send(PlaneAnswer::Claimed(generation)).await);
        });
    }

    /// Claims the generation after [`next_generation`]'s inputs by compare-and-set. The core retries a
    /// lost race.
    async fn next_generation(&self, above: Generation) -> Result<Generation, PlaneError> {
        let key = self.subjects.generation_key(&self.source);
        let entry = self.plane.get(key.clone()).await?;
        let registered = entry
            .as_ref()
            .and_then(|entry| self.generation_in(&entry.value));
        let last = self
            .plane
            .last_on(self.subjects.records(&self.source))
            .await?
            .and_then(|message| self.decoder.decode::<Record>(&message.payload))
            .map(|record| record.generation);
        let Some(generation) = next_generation(above, registered, last) else {
            error!(source = %self.source, "no generation is left: give this worker another id");
            return Err(PlaneError::Unavailable("no generation is left".to_owned()));
        };
        let value = codec::encode(&GenerationEntry { generation })
            .map_err(|error| PlaneError::Unavailable(error.to_string()))?;
        let condition = entry.map_or(PutIf::Absent, |entry| PutIf::Revision(entry.revision));
        self.plane
            .put(key, Bytes::from(value), condition, None)
            .await?;
        Ok(generation)
    }

    pub(super) fn heartbeat(&self, heartbeat: &Heartbeat) {
        let Ok(payload) = codec::encode(heartbeat) else {
            return;
        };
        let this = self.clone();
        self.tasks.spawn(async move {
            let subject = this.subjects.heartbeat(&this.source);
            let publish = this.plane.publish(subject, Bytes::from(payload));
            // The next heartbeat is due in a second.
            drop(timeout(Duration::from_secs(1), publish).await);
        });
    }

    /// `last_append` distinguishes a log that trimmed the source's records from one that lost them.
    pub(super) fn read_tail(&self, id: u64, is_thorough: bool, last_append: Option<LogPosition>) {
        let this = self.clone();
        self.tasks.spawn(async move {
            let read = timeout(PLANE_DEADLINE, this.tail(is_thorough, last_append)).await;
            let seen = read.ok().and_then(Result::ok);
            let tail = seen.map_or(Tail::Unanswered, Tail::Seen);
            drop(this.answers.send(PlaneAnswer::Tail(id, tail)).await);
        });
    }

    async fn tail(
        &self,
        is_thorough: bool,
        last_append: Option<LogPosition>,
    ) -> Result<LogTail, PlaneError> {
        let subject = self.subjects.records(&self.source);
        let last = self.plane.last_on(subject).await?;
        let mut seen = LogTail::default();
        if is_thorough || last.is_none() {
            let status = self.plane.log_status().await?;
            seen.log = Some(status.identity);
            let was_dropped = last_append.is_none_or(|position| position < status.first);
            seen.is_trimmed = last.is_none() && was_dropped;
        }
        if is_thorough {
            let key = self.subjects.generation_key(&self.source);
            let entry = self.plane.get(key).await?;
            let generation = entry.and_then(|entry| self.generation_in(&entry.value));
            seen.registered = RegistryReading::Read(generation);
        }
        seen.last = last
            .and_then(|message| self.decoder.decode::<Record>(&message.payload))
            .map(|record| (record.generation, record.number));
        Ok(seen)
    }

    fn generation_in(&self, value: &[u8]) -> Option<Generation> {
        let entry: GenerationEntry = self.decoder.decode(value)?;
        Some(entry.generation)
    }
}

fn unavailable(late: &Elapsed) -> PlaneError {
    PlaneError::Unavailable(late.to_string())
}

fn not_appended(id: AppendId, error: &PlaneError) -> PlaneAnswer {
    match error {
        PlaneError::TooLarge { max, .. } => PlaneAnswer::TooLarge(id, *max),
        PlaneError::Unavailable(_) | PlaneError::Conflict => PlaneAnswer::NotAppended(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_newer_version_are_counted() {
        let decoder = CountingDecoder::default();
        let entry = GenerationEntry {
            generation: Generation(7),
        };
        let mut bytes = codec::encode(&entry).unwrap();
        assert_eq!(decoder.decode(&bytes), Some(entry));
        assert_eq!(decoder.failures(), 0);
        bytes[0] += 1;
        assert_eq!(decoder.decode::<GenerationEntry>(&bytes), None);
        assert_eq!(decoder.failures(), 1);
    }
}
