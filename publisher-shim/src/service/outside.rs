//! How a rank reaches the plane: appends in order, claims, heartbeats, and a look at the log's end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};
use warmroute_plane::{Plane, PlaneError, PutIf};
use warmroute_proto::codec::{self, Message};
use warmroute_proto::registry::GenerationEntry;
use warmroute_proto::subject::Subjects;
use warmroute_proto::{Generation, Heartbeat, LogPosition, Record, Source};

use crate::source::{AppendId, Seen, Tail, next_generation};

const PLANE_DEADLINE: Duration = Duration::from_secs(5);

/// An acknowledgement that has not come by now will not come. Readers wait three times as long for what
/// is missing.
const ACK_DEADLINE: Duration = Duration::from_secs(2);

/// An answer of the plane.
pub(super) enum Done {
    Appended(AppendId, LogPosition),
    NotAppended(AppendId),
    /// It takes so many bytes at once.
    TooLarge(AppendId, usize),
    Claimed(Option<Generation>),
    Tail(u64, Tail),
}

/// Reads what comes over the plane, and counts what cannot be read: it is of a newer version, or torn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reader(Arc<AtomicU64>);

impl Reader {
    pub(crate) fn read<M: Message>(&self, bytes: &[u8]) -> Option<M> {
        let read = codec::decode(bytes);
        read.inspect_err(|error| {
            self.0.fetch_add(1, Ordering::Relaxed);
            warn!(%error, "what the plane carries cannot be read");
        })
        .ok()
    }

    pub(crate) fn unread(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Clone)]
pub(super) struct Outside {
    pub(super) plane: Arc<dyn Plane>,
    pub(super) subjects: Subjects,
    pub(super) source: Source,
    pub(super) reader: Reader,
    pub(super) done: mpsc::Sender<Done>,
    pub(super) tasks: TaskTracker,
    /// Appends of another attempt are void: what waits in the queue is not sent any more.
    pub(super) attempt: Arc<AtomicU32>,
}

impl Outside {
    /// Appends in order. None of the acknowledgements waits for another one.
    pub(super) async fn append_all(self, mut queue: mpsc::Receiver<(AppendId, Bytes)>) {
        let subject = self.subjects.records(&self.source);
        let mut under_way = FuturesUnordered::new();
        loop {
            let ended = tokio::select! {
                next = queue.recv() => {
                    let Some((id, payload)) = next else { return };
                    if id.attempt != self.attempt.load(Ordering::Acquire) {
                        continue;
                    }
                    let append = self.plane.append(subject.clone(), payload);
                    match timeout(PLANE_DEADLINE, append).await {
                        Ok(Ok(acknowledged)) => {
                            under_way.push(async move {
                                match timeout(ACK_DEADLINE, acknowledged).await {
                                    Ok(Ok(position)) => Done::Appended(id, position),
                                    Ok(Err(error)) => not_appended(id, &error),
                                    Err(_) => Done::NotAppended(id),
                                }
                            });
                            continue;
                        }
                        Ok(Err(error)) => not_appended(id, &error),
                        Err(_) => Done::NotAppended(id),
                    }
                }
                Some(ended) = under_way.next() => ended,
            };
            if self.done.send(ended).await.is_err() {
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
            drop(this.done.send(Done::Claimed(generation)).await);
        });
    }

    /// See [`next_generation`]; by compare-and-set. Whoever loses it reads again, with the core's next try.
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
            .and_then(|message| self.reader.read::<Record>(&message.payload))
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
            // The next one comes in a second.
            drop(timeout(Duration::from_secs(1), publish).await);
        });
    }

    /// `last_append` tells a log that dropped our records by age or size from one that lost them.
    pub(super) fn look_at_tail(
        &self,
        id: u64,
        is_thorough: bool,
        last_append: Option<LogPosition>,
    ) {
        let this = self.clone();
        self.tasks.spawn(async move {
            let look = timeout(PLANE_DEADLINE, this.tail(is_thorough, last_append)).await;
            let seen = look.ok().and_then(Result::ok);
            let tail = seen.map_or(Tail::Unanswered, Tail::Seen);
            drop(this.done.send(Done::Tail(id, tail)).await);
        });
    }

    async fn tail(
        &self,
        is_thorough: bool,
        last_append: Option<LogPosition>,
    ) -> Result<Seen, PlaneError> {
        let subject = self.subjects.records(&self.source);
        let last = self.plane.last_on(subject).await?;
        let mut seen = Seen::default();
        if is_thorough || last.is_none() {
            let status = self.plane.log_status().await?;
            seen.log = Some(status.identity);
            let was_dropped = last_append.is_none_or(|position| position < status.first);
            seen.is_trimmed = last.is_none() && was_dropped;
        }
        if is_thorough {
            let key = self.subjects.generation_key(&self.source);
            let entry = self.plane.get(key).await?;
            seen.registered = Some(entry.and_then(|entry| self.generation_in(&entry.value)));
        }
        seen.last = last
            .and_then(|message| self.reader.read::<Record>(&message.payload))
            .map(|record| (record.generation, record.number));
        Ok(seen)
    }

    fn generation_in(&self, value: &[u8]) -> Option<Generation> {
        let entry: GenerationEntry = self.reader.read(value)?;
        Some(entry.generation)
    }
}

fn not_appended(id: AppendId, error: &PlaneError) -> Done {
    match error {
        PlaneError::TooLarge { max, .. } => Done::TooLarge(id, *max),
        PlaneError::Unavailable(_) | PlaneError::Conflict => Done::NotAppended(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_a_newer_version_is_counted() {
        let reader = Reader::default();
        let entry = GenerationEntry {
            generation: Generation(7),
        };
        let mut bytes = codec::encode(&entry).unwrap();
        assert_eq!(reader.read(&bytes), Some(entry));
        assert_eq!(reader.unread(), 0);
        bytes[0] += 1;
        assert_eq!(reader.read::<GenerationEntry>(&bytes), None);
        assert_eq!(reader.unread(), 1);
    }
}
