//! Queries an indexer for what the fleet holds of a prompt, with a short deadline.
//!
//! One replica is queried on its own subject. If it does not answer soon, is not reachable, or has
//! no good answer, a second one is queried, and the first good answer counts. While no replica is
//! known by name the query goes to the subject that all of them serve.
//!
//! A replica whose roster is read gets the compact query. Others get the full one.
//!
//! Blocks that do not fit into one message are asked for in parts, one after another. The answer to
//! a later part has each holder's run from the prompt's first block on, as of its own moment, and
//! replaces what earlier parts say of that holder. A part without an answer costs the credit beyond
//! the parts before it, and the state `exact`. A full query has one part.

mod rosters;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use prometheus::IntCounter;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warmroute_plane::{
    Connection, Plane, PlaneError, RegistryEvent, RegistryWatch, after_arrivals,
};
use warmroute_proto::codec;
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{HoldAnswer, HoldQuery, IndexAnswer, IndexQuery};
use warmroute_proto::registry::IndexerEntry;
use warmroute_proto::roster::{
    BlocksBefore, DeepHolderQuery, HolderAnswer, HolderPart, HolderQuery, RosterNumber,
    RosterPageRequest,
};
use warmroute_proto::subject::Subjects;
use warmroute_proto::{LocalHash, PrefixHash};

use rosters::IndexerRosters;

use crate::indexer_pool::{IndexFault, IndexerPool};
use crate::route::{HolderReply, IndexReply, ReplicaRoster};

/// Deadline of a query. A later answer is worth less than the time: the decision goes on without.
pub const DEADLINE: Duration = Duration::from_millis(10);

/// Deadline of a query that no request waits for.
const HOLD_DEADLINE: Duration = Duration::from_millis(200);

/// Delay before a second replica is queried. Well above a round trip, so that few queries are sent
/// twice.
pub const HEDGE: Duration = Duration::from_millis(3);

/// Most blocks in a message, so that it fits into one of any server that passes the check at the
/// start.
const BLOCKS_MAX: usize = 1 << 16;

/// Most parts of a query. What lies beyond is not credited, and not called `exact`.
const PARTS_MAX: usize = 16;

/// Bytes of a message besides its blocks.
const QUERY_ROOM: usize = 256;

/// Most blocks in a message of so many bytes.
const fn blocks_within(bytes: usize) -> usize {
    bytes.saturating_sub(QUERY_ROOM) / size_of::<LocalHash>()
}

/// A prompt's blocks in parts that fit into a message each.
#[derive(Clone, Copy)]
struct PartedBlocks<'a> {
    blocks: &'a [LocalHash],
    part: usize,
    /// The prompt has more blocks.
    is_cut: bool,
}

impl<'a> PartedBlocks<'a> {
    fn new(blocks: &'a [LocalHash], part: usize) -> Self {
        let covered = blocks.len().min(part.saturating_mul(PARTS_MAX));
        Self {
            blocks: &blocks[..covered],
            part,
            is_cut: covered < blocks.len(),
        }
    }

    fn first(self) -> &'a [LocalHash] {
        &self.blocks[..self.blocks.len().min(self.part)]
    }

    /// Each part with what precedes it; an empty prompt has one part.
    fn parts(self) -> impl Iterator<Item = (Option<BlocksBefore>, &'a [LocalHash])> {
        let rest = &self.blocks[self.first().len()..];
        let root = PrefixHash::after(None, LocalHash::RESUME_ROOT);
        let mut before = BlocksBefore {
            blocks: 0,
            prefix: root,
            resume: root,
        };
        let mut last = self.first();
        let rest = rest.chunks(self.part).map(move |part| {
            let parent = (before.blocks > 0).then_some(before.prefix);
            before = BlocksBefore {
                blocks: before.blocks.saturating_add(last.len() as u32),
                prefix: end_of(parent, last).unwrap_or(before.prefix),
                resume: end_of(Some(before.resume), last).unwrap_or(before.resume),
            };
            last = part;
            (Some(before), part)
        });
        std::iter::once((None, self.first())).chain(rest)
    }
}

/// Prefix hash of the last of these blocks.
fn end_of(parent: Option<PrefixHash>, blocks: &[LocalHash]) -> Option<PrefixHash> {
    prefix_hashes(parent, blocks).last()
}

#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("the query cannot be encoded")]
    Encode(#[from] codec::EncodeError),
    #[error("no answer")]
    Plane(#[from] PlaneError),
    #[error("the answer cannot be decoded")]
    Decode(#[from] codec::DecodeError),
    #[error("the replica does not know the log yet")]
    Behind,
    #[error("the answer names another roster")]
    OtherRoster,
}

/// Client of the indexer replicas. Clones share what is known of the replicas.
#[derive(Clone)]
pub struct IndexClient {
    pub(crate) plane: Arc<dyn Plane>,
    pub(crate) subjects: Subjects,
    indexers: Arc<Mutex<IndexerPool>>,
    pub(crate) rosters: Arc<IndexerRosters>,
    hedge: Duration,
    replicas: IndexReplicas,
}

/// Where the index is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexReplicas {
    /// In this process.
    Own,
    /// In processes that the registry names.
    Registered,
}

impl IndexClient {
    #[must_use]
    pub fn new(plane: Arc<dyn Plane>, subjects: Subjects) -> Self {
        Self {
            plane,
            subjects,
            indexers: Arc::default(),
            rosters: Arc::default(),
            hedge: HEDGE,
            replicas: IndexReplicas::Own,
        }
    }

    pub(crate) fn with_replicas(self, replicas: IndexReplicas) -> Self {
        Self { replicas, ..self }
    }

    /// Why the index is out of reach, as far as is known.
    pub(crate) fn fault(&self) -> Option<IndexFault> {
        if self.replicas == IndexReplicas::Own {
            return None;
        }
        if *self.plane.connection().borrow() == Connection::Down {
            return Some(IndexFault::PlaneAway);
        }
        self.indexers().fault(Instant::now().into_std())
    }

    /// Queries a second replica after another time than [`HEDGE`]; never from [`DEADLINE`] on.
    #[must_use]
    pub fn hedged_after(self, hedge: Duration) -> Self {
        Self { hedge, ..self }
    }

    /// Asks in as many parts as the server's limit of a message demands.
    pub async fn ask(&self, blocks: &[LocalHash]) -> Result<IndexReply, IndexError> {
        let fitting = blocks_within(self.plane.payload_max());
        self.ask_any(PartedBlocks::new(blocks, fitting.clamp(1, BLOCKS_MAX)))
            .await
    }

    async fn ask_any(&self, blocks: PartedBlocks<'_>) -> Result<IndexReply, IndexError> {
        let now = Instant::now().into_std();
        let picked = self.indexers().pick_two(now, &mut Rng::new());
        match picked {
            [None, _] => {
                let until = Instant::now() + DEADLINE;
                self.ask_whole(self.subjects.query(), blocks.first(), until)
                    .await
            }
            [Some(first), None] => self.ask_one(&first, blocks, DEADLINE).await,
            [Some(first), Some(second)] => self.ask_hedged(&first, &second, blocks).await,
        }
    }

    /// Any replica; `None` if none is known.
    pub(crate) fn pick(&self) -> Option<Arc<str>> {
        let now = Instant::now().into_std();
        let [picked, _] = self.indexers().pick_two(now, &mut Rng::new());
        picked
    }

    /// Queries one block of one source at a replica, at any without one. A replica that does not
    /// answer is not blamed.
    pub(crate) async fn hold(
        &self,
        query: &HoldQuery,
        replica: Option<&str>,
    ) -> Result<HoldAnswer, IndexError> {
        let payload = Bytes::from(codec::encode(query)?);
        let subject = match replica {
            Some(id) => self.subjects.query_at(id),
            None => self.subjects.query(),
        };
        let answer = self.plane.request(subject, payload, HOLD_DEADLINE).await?;
        Ok(codec::decode(&answer)?)
    }

    /// Follows the registry until stopped. While the plane is unavailable the known replicas stay.
    pub async fn follow_replicas(self, unread: IntCounter, stop: CancellationToken) {
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
                        self.rosters.changed();
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
        id: &Arc<str>,
        blocks: PartedBlocks<'_>,
        deadline: Duration,
    ) -> Result<IndexReply, IndexError> {
        let until = Instant::now() + deadline;
        let reply = match self.rosters.get(id) {
            Some(roster) => self.ask_holders(id, roster, blocks, until).await,
            None => {
                let subject = self.subjects.query_at(id);
                self.ask_whole(subject, blocks.first(), until).await
            }
        };
        match &reply {
            Ok(_) => self.indexers().answered(id),
            // It was not asked.
            Err(IndexError::Plane(PlaneError::TooLarge { .. })) => {}
            Err(_) => self.indexers().late(id, Instant::now().into_std()),
        }
        reply
    }

    /// Asks for every source by its name.
    async fn ask_whole(
        &self,
        subject: String,
        blocks: &[LocalHash],
        until: Instant,
    ) -> Result<IndexReply, IndexError> {
        let query = IndexQuery {
            blocks: blocks.to_vec(),
            at_least: None,
        };
        let query = Bytes::from(codec::encode(&query)?);
        let deadline = until.saturating_duration_since(Instant::now());
        let answer = self.plane.request(subject, query, deadline).await?;
        match codec::decode(&answer)? {
            answer @ IndexAnswer::Runs { .. } => Ok(answer.into()),
            IndexAnswer::Behind { .. } => Err(IndexError::Behind),
        }
    }

    /// Asks for the holders, by one part of the prompt after another: an answer to a later part
    /// must not be older than those to the parts before it.
    async fn ask_holders(
        &self,
        id: &Arc<str>,
        roster: Arc<ReplicaRoster>,
        blocks: PartedBlocks<'_>,
        until: Instant,
    ) -> Result<IndexReply, IndexError> {
        let known = roster.next_request();
        let (mut parts, mut is_cut) = (Vec::new(), blocks.is_cut);
        for (before, blocks) in blocks.parts() {
            match self.ask_part(id, before, blocks, known, until).await {
                Ok(answered) => parts.extend(answered),
                Err(error) if parts.is_empty() => return Err(error),
                Err(_) => {
                    is_cut = true;
                    break;
                }
            }
        }
        let Some(reply) = HolderReply::new(roster, parts) else {
            self.rosters.forget(id);
            return Err(IndexError::OtherRoster);
        };
        if reply.unnamed() > 0 {
            self.rosters.changed();
        }
        Ok(IndexReply::Holders(match is_cut {
            true => reply.of_first_blocks(),
            false => reply,
        }))
    }

    /// Asks for the holders by one part of the prompt, one range of the roster after another.
    async fn ask_part(
        &self,
        id: &Arc<str>,
        before: Option<BlocksBefore>,
        blocks: &[LocalHash],
        known: RosterPageRequest,
        until: Instant,
    ) -> Result<Vec<HolderPart>, IndexError> {
        let (mut from, mut parts) = (RosterNumber(0), Vec::new());
        loop {
            let blocks = blocks.to_vec();
            let payload = match before {
                None => codec::encode(&HolderQuery {
                    blocks,
                    from,
                    known,
                }),
                Some(before) => codec::encode(&DeepHolderQuery {
                    before,
                    blocks,
                    from,
                }),
            };
            let deadline = until.saturating_duration_since(Instant::now());
            let subject = self.subjects.query_at(id);
            let answer = self
                .plane
                .request(subject, payload?.into(), deadline)
                .await?;
            let HolderAnswer::Holders(part) = codec::decode(&answer)? else {
                return Err(IndexError::Behind);
            };
            // A part without an end would be asked for again.
            let next = part.next.filter(|next| *next > from);
            parts.push(part);
            match next {
                Some(next) => from = next,
                None => return Ok(parts),
            }
        }
    }

    /// The first good answer of two replicas.
    async fn ask_hedged(
        &self,
        first: &Arc<str>,
        second: &Arc<str>,
        blocks: PartedBlocks<'_>,
    ) -> Result<IndexReply, IndexError> {
        let started = Instant::now();
        let mut early = Box::pin(self.ask_one(first, blocks, DEADLINE));
        let failed = tokio::select! {
            biased;
            answer = &mut early => match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => Some(error),
            },
            () = after_arrivals(started + self.hedge) => None,
        };
        let left = DEADLINE.saturating_sub(started.elapsed());
        if left.is_zero() {
            // This process was held up: a second replica could not answer in time.
            return match failed {
                Some(error) => Err(error),
                None => early.await,
            };
        }
        let mut late = Box::pin(self.ask_one(second, blocks, left));
        if failed.is_some() {
            return late.await;
        }
        tokio::select! {
            biased;
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

    pub(crate) fn indexers(&self) -> MutexGuard<'_, IndexerPool> {
        self.indexers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
