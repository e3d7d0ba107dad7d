//! Immutable blobs in the layout of a NATS object store: chunks under a random name, then one
//! message that names them.
//!
//! That message is written only if there is none, so that one of two writers of a name loses;
//! before it the chunks are not visible. A deletion purges both without a tombstone, which would
//! make listings slower with every snapshot ever taken. Chunks of a writer that died expire with
//! the bucket's age.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use async_nats::HeaderMap;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use bytes::Bytes;
use ring::digest;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::timeout;

use super::core::{NatsCore, OutgoingMessage, PendingWrite, unavailable};
use super::link::count;
use super::pull::{BATCH_MAX, Pull, Pulled, Start, unique};
use crate::PlaneError;

/// Most bytes of a chunk, so that acknowledgements cost little. Smaller if the server's limit is.
const CHUNK_BYTES: usize = 512 << 10;

/// Chunks of a request: 8 MiB at most. Heartbeats and queries wait behind them.
const BATCH: usize = 16;

/// Unacknowledged chunks: 4 MiB at most.
const WINDOW: usize = 8;

/// A read without progress for this long fails.
const STALL: Duration = Duration::from_secs(10);

/// The message that names the chunks, as NATS' tools write it.
#[derive(Serialize, Deserialize)]
struct Object {
    name: String,
    bucket: String,
    nuid: String,
    size: usize,
    chunks: usize,
    #[serde(default)]
    digest: Option<String>,
    #[serde(default)]
    deleted: bool,
}

/// The content under a name.
enum StoredObject {
    Absent,
    Present(Object),
    Unreadable,
}

struct SnapshotBucket {
    core: Arc<NatsCore>,
    stream: String,
}

impl SnapshotBucket {
    fn new(core: &Arc<NatsCore>) -> Self {
        Self {
            core: Arc::clone(core),
            stream: core.layout.snapshots(),
        }
    }

    fn object(&self, name: &str) -> String {
        let name = URL_SAFE.encode(name);
        format!("$O.{}.M.{name}", self.core.layout.bucket())
    }

    fn chunks(&self, nuid: &str) -> String {
        format!("$O.{}.C.{nuid}", self.core.layout.bucket())
    }

    async fn find(&self, name: &str) -> Result<StoredObject, PlaneError> {
        let newest = self.core.newest(&self.stream, &self.object(name)).await?;
        Ok(newest.map_or(StoredObject::Absent, |message| {
            self.read_object(&message.payload)
        }))
    }

    /// An unreadable description must not hide other snapshots.
    fn read_object(&self, payload: &[u8]) -> StoredObject {
        match serde_json::from_slice::<Object>(payload) {
            Ok(object) if object.deleted => StoredObject::Absent,
            Ok(object) => StoredObject::Present(object),
            Err(_) => {
                count(&self.core.link.counters.snapshots_torn);
                StoredObject::Unreadable
            }
        }
    }

    async fn purge(&self, subject: String) -> Result<(), PlaneError> {
        let api = format!("STREAM.PURGE.{}", self.stream);
        let body = json!({ "filter": subject });
        let _: serde_json::Value = self.core.api(&api, &body).await?;
        Ok(())
    }

    async fn put_chunks(&self, subject: &str, blob: &Bytes) -> Result<usize, PlaneError> {
        let chunk_bytes = CHUNK_BYTES.min(self.core.payload_max());
        let mut window: VecDeque<PendingWrite> = VecDeque::with_capacity(WINDOW);
        let mut chunks = 0;
        while chunks * chunk_bytes < blob.len() {
            if window.len() == WINDOW
                && let Some(oldest) = window.pop_front()
            {
                oldest.acknowledged(&self.stream).await?;
            }
            let start = chunks * chunk_bytes;
            let chunk = blob.slice(start..blob.len().min(start + chunk_bytes));
            let message = OutgoingMessage::new(subject.to_owned(), chunk);
            window.push_back(self.core.store(message).await?);
            chunks += 1;
        }
        for stored in window {
            stored.acknowledged(&self.stream).await?;
        }
        Ok(chunks)
    }

    async fn put_object(&self, object: &Object) -> Result<(), PlaneError> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Rollup", "sub");
        headers.insert("Nats-Expected-Last-Subject-Sequence", "0");
        let message = OutgoingMessage {
            subject: self.object(&object.name),
            headers: Some(headers),
            payload: serde_json::to_vec(object).map_err(unavailable)?.into(),
        };
        let stored = self.core.store(message).await?;
        stored.acknowledged(&self.stream).await?;
        Ok(())
    }

    async fn read(&self, object: &Object) -> Result<Option<Bytes>, PlaneError> {
        let subject = self.chunks(&object.nuid);
        let filter = Some(subject.as_str());
        let mut pull =
            Pull::open(&self.core, self.stream.clone(), filter, Start::First, BATCH).await?;
        // The description is checked against what the store has.
        let is_whole = pull.pending_at_start == object.chunks as u64;
        if !is_whole || object.size > object.chunks.saturating_mul(CHUNK_BYTES) {
            return Ok(None);
        }
        let mut blob = Vec::new();
        blob.try_reserve_exact(object.size).map_err(unavailable)?;
        let mut chunks = 0;
        while chunks < object.chunks {
            match timeout(STALL, pull.next()).await.map_err(unavailable)? {
                Pulled::Message(chunk) => {
                    if blob.len() + chunk.payload.len() > object.size {
                        return Ok(None);
                    }
                    blob.extend_from_slice(&chunk.payload);
                    chunks += 1;
                    if chunk.pending == 0 {
                        break;
                    }
                }
                // The server has no further chunk.
                Pulled::Idle => break,
                Pulled::Broken => return Err(unavailable("reading the snapshot was interrupted")),
            }
        }
        Ok((chunks == object.chunks && blob.len() == object.size).then(|| Bytes::from(blob)))
    }
}

pub(super) async fn put(core: &Arc<NatsCore>, name: String, blob: Bytes) -> Result<(), PlaneError> {
    let bucket = SnapshotBucket::new(core);
    match bucket.find(&name).await? {
        StoredObject::Absent => {}
        StoredObject::Present(_) | StoredObject::Unreadable => return Err(PlaneError::Conflict),
    }
    let nuid = unique(&core.client.new_inbox());
    let subject = bucket.chunks(&nuid);
    let chunks = match bucket.put_chunks(&subject, &blob).await {
        Ok(chunks) => chunks,
        Err(error) => {
            // Best effort: the rest expires by age.
            drop(bucket.purge(subject).await);
            return Err(error);
        }
    };
    let sum = digest::digest(&digest::SHA256, &blob);
    let object = Object {
        name,
        bucket: core.layout.bucket().to_owned(),
        nuid,
        size: blob.len(),
        chunks,
        digest: Some(format!("SHA-256={}", URL_SAFE.encode(sum))),
        deleted: false,
    };
    let put = bucket.put_object(&object).await;
    if put == Err(PlaneError::Conflict) {
        drop(bucket.purge(subject).await);
    }
    put
}

pub(super) async fn get(core: &Arc<NatsCore>, name: &str) -> Result<Option<Bytes>, PlaneError> {
    let bucket = SnapshotBucket::new(core);
    let StoredObject::Present(object) = bucket.find(name).await? else {
        return Ok(None);
    };
    let blob = bucket.read(&object).await?;
    if blob.is_none() {
        count(&core.link.counters.snapshots_torn);
    }
    Ok(blob)
}

/// Purges the name first: a reader must not find one without its chunks.
pub(super) async fn delete(core: &Arc<NatsCore>, name: &str) -> Result<(), PlaneError> {
    let bucket = SnapshotBucket::new(core);
    match bucket.find(name).await? {
        StoredObject::Absent => Ok(()),
        StoredObject::Present(object) => {
            bucket.purge(bucket.object(name)).await?;
            bucket.purge(bucket.chunks(&object.nuid)).await
        }
        // Its chunks expire by age.
        StoredObject::Unreadable => bucket.purge(bucket.object(name)).await,
    }
}

pub(super) async fn list(core: &Arc<NatsCore>) -> Result<Vec<String>, PlaneError> {
    let bucket = SnapshotBucket::new(core);
    let filter = format!("$O.{}.M.>", core.layout.bucket());
    let start = Start::LastPerSubject;
    let mut pull = Pull::open(core, bucket.stream.clone(), Some(&filter), start, BATCH_MAX).await?;
    let mut names = Vec::new();
    let mut more = pull.pending_at_start > 0;
    while more {
        match timeout(STALL, pull.next()).await.map_err(unavailable)? {
            Pulled::Message(message) => {
                more = message.pending > 0;
                match bucket.read_object(&message.payload) {
                    StoredObject::Present(object) => names.push(object.name),
                    StoredObject::Absent | StoredObject::Unreadable => {}
                }
            }
            Pulled::Idle => more = false,
            Pulled::Broken => return Err(unavailable("listing the snapshots was interrupted")),
        }
    }
    names.sort_unstable();
    Ok(names)
}
