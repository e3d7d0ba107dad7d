//! Rules broken on purpose at the simulated plane: it alters what a process reads or writes, so that
//! the rule has no effect. Without a breakage everything passes unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use warmroute_indexer::same_log;
use warmroute_indexer::snapshot::{Name, format};
use warmroute_indexer::tree::Tree;
use warmroute_plane::{Broadcast, LogMessage, LogStatus, PutIf};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{HoldAnswer, HoldSpan, IndexQuery};
use warmroute_proto::snapshot::{SnapshotHead, SnapshotHolding, SnapshotPointer, SnapshotSource};
use warmroute_proto::view::SourceView;
use warmroute_proto::{
    Change, Digest, Heartbeat, LogPosition, PrefixHash, Record, Source, Tier, codec,
};

use super::host::Kind;
use super::plane::{Op, Reply};
use super::{Breakage, World};

/// The age up to which a shim's proof of its engine counts.
const PROOF_MAX: Duration = Duration::from_secs(3);

type Pairs = BTreeSet<(PrefixHash, Tier)>;

/// What an indexer's process was given in place of what is there.
#[derive(Default)]
pub(super) struct Bent {
    /// Messages by position, as it read them.
    read: BTreeMap<LogPosition, LogMessage>,
    /// The sources of its last snapshot.
    former: Vec<SnapshotSource>,
    /// Names of snapshots, and what they became.
    renamed: BTreeMap<String, (String, warmroute_proto::snapshot::RecordMark)>,
}

impl World {
    pub(super) const fn bends_records(&self) -> bool {
        matches!(self.broken, Some(Breakage::NoFence | Breakage::NoDigest))
    }

    /// One message at a time where what a process holds decides what it reads next.
    pub(super) fn batches_as_read(
        &self,
        host: usize,
        batch: Vec<LogMessage>,
    ) -> Vec<Vec<LogMessage>> {
        let is_indexer = matches!(self.hosts[host].kind, Kind::Indexer(_));
        if is_indexer && self.bends_records() {
            batch.into_iter().map(|message| vec![message]).collect()
        } else {
            vec![batch]
        }
    }

    /// A batch as the fold gets to see it.
    pub(super) fn batch_as_read(&mut self, host: usize, batch: Vec<LogMessage>) -> Vec<LogMessage> {
        let Kind::Indexer(at) = self.hosts[host].kind else {
            return batch;
        };
        let keeps = self.bends_records() || self.broken == Some(Breakage::RefillUnseen);
        if !keeps {
            return batch;
        }
        let batch: Vec<LogMessage> = batch
            .into_iter()
            .map(|message| self.record_as_read(at, message))
            .collect();
        let read = batch
            .iter()
            .map(|message| (message.position, message.clone()));
        self.indexers[at].bent.read.extend(read);
        batch
    }

    fn record_as_read(&self, at: usize, mut message: LogMessage) -> LogMessage {
        if self.bends_records()
            && let Ok(mut record) = codec::decode::<Record>(&message.payload)
        {
            let standing = self.standing(at, &record.source);
            let present = standing.as_ref().and_then(|standing| standing.generation);
            let is_old = present.is_some_and(|present| record.generation < present);
            if self.broken == Some(Breakage::NoFence) {
                if !is_old {
                    return message;
                }
                record.generation = present.unwrap_or_default();
                let last = standing.and_then(|standing| standing.number);
                record.number = last.map_or_else(Default::default, |last| last.next());
            }
            let is_first = present.is_none_or(|present| record.generation > present);
            let mut held = self.pairs(at, &record.source);
            if is_first {
                held.clear();
            }
            record.changes.retain(|change| take(&mut held, change));
            record.after = digest(&held);
            message.payload = codec::encode(&record).unwrap().into();
        }
        message
    }

    fn pairs(&self, at: usize, source: &Source) -> Pairs {
        self.read_index(at, |handle| handle.held(source))
            .unwrap_or_default()
    }

    fn standing(&self, at: usize, source: &Source) -> Option<SourceView> {
        let mut standings = self.standings(at).into_iter();
        standings.find(|standing| standing.source == *source)
    }

    /// The answer to a call that a breakage keeps from the plane.
    pub(super) fn answer_in_place(&self, host: usize, op: &Op) -> Option<Reply> {
        let is_shell = matches!(self.hosts[host].kind, Kind::Shim(_) | Kind::Indexer(_));
        match op {
            Op::Put {
                key,
                condition: PutIf::Revision(revision),
                lease: Some(_),
                ..
            } if is_shell && self.broken == Some(Breakage::LeaseRenewedLate) => {
                let present = self.plane.keys.get(key)?;
                let is_held = present.entry.revision == *revision;
                is_held.then_some(Reply::Revision(*revision))
            }
            _ => None,
        }
    }

    /// A heartbeat as its shim sends it.
    pub(super) fn heartbeat_as_sent(&self, host: usize, mut message: Broadcast) -> Broadcast {
        self.strange_heartbeat(host, &mut message);
        let Kind::Shim(at) = self.hosts[host].kind else {
            return message;
        };
        if self.broken == Some(Breakage::BacklogIgnored)
            && let Ok(mut heartbeat) = codec::decode::<Heartbeat>(&message.payload)
            && let Some(handle) = &self.shims[at].handle
            && let Some(status) = handle.sources().pop()
            && let Some(acknowledged) = status.acknowledged
            && status.is_image_acknowledged
            && status.proof_age.is_some_and(|age| age <= PROOF_MAX)
        {
            heartbeat.states = acknowledged.states;
            message.payload = codec::encode(&heartbeat).unwrap().into();
        }
        message
    }

    pub(super) fn heartbeat_as_read(&self, at: usize, mut message: Broadcast) -> Broadcast {
        if self.broken == Some(Breakage::SubjectIgnored)
            && let Ok(heartbeat) = codec::decode::<Heartbeat>(&message.payload)
        {
            message.subject = self.subjects.heartbeat(&heartbeat.source);
        }
        if self.bends_records()
            && let Ok(mut heartbeat) = codec::decode::<Heartbeat>(&message.payload)
            && let Some(standing) = self.standing(at, &heartbeat.source)
            && let Some(digest) = standing.digest
        {
            heartbeat.after = digest;
            message.payload = codec::encode(&heartbeat).unwrap().into();
        }
        message
    }

    /// A recheck's answer as the router gets to see it.
    pub(super) fn hold_as_read(&self, answer: Bytes) -> Bytes {
        if self.broken == Some(Breakage::InterruptionUnseen)
            && let Ok(mut hold) = codec::decode::<HoldAnswer>(&answer)
            && hold.span == HoldSpan::Interrupted
        {
            hold.span = HoldSpan::Held;
            return codec::encode(&hold).unwrap().into();
        }
        answer
    }

    /// What the server does of a call, and answers, as the process gets to see it.
    pub(super) fn answer_bent(&mut self, host: usize, op: Op) -> Reply {
        let kind = self.hosts[host].kind;
        let op = match kind {
            Kind::Indexer(at) => self.op_as_done(at, op),
            Kind::Shim(_) | Kind::Router(_) => op,
        };
        if let Op::PutBlob(_, blob) = &op {
            self.checks.snapshots += 1;
            self.check_snapshot(blob);
        }
        let position = match op {
            Op::At(position) => Some(position),
            _ => None,
        };
        let reads_last = matches!(op, Op::LastOn(_));
        match (kind, self.plane.answer(self.now, op)) {
            (Kind::Shim(at), Reply::Message(found)) if reads_last => {
                Reply::Message(self.last_record_as_read(at, found))
            }
            // Without the log's clock no message has an age.
            (Kind::Indexer(_), Reply::Status(status))
                if self.broken == Some(Breakage::AgeIgnored) =>
            {
                Reply::Status(LogStatus {
                    now_unix_ns: 0,
                    ..status
                })
            }
            (Kind::Indexer(_), Reply::Status(status)) => Reply::Status(LogStatus {
                now_unix_ns: status.now_unix_ns - self.unseen_standstill(host),
                ..status
            }),
            (Kind::Indexer(at), Reply::Message(found)) => {
                let read = position.and_then(|at_| self.indexers[at].bent.read.get(&at_));
                Reply::Message(found.map(|found| read.cloned().unwrap_or(found)))
            }
            (Kind::Indexer(_), Reply::Blob(Some(blob)))
                if self.broken == Some(Breakage::TornSnapshotRestored) =>
            {
                Reply::Blob(Some(torn(&blob).unwrap_or(blob)))
            }
            (_, reply) => reply,
        }
    }

    fn op_as_done(&mut self, at: usize, op: Op) -> Op {
        match (self.broken, op) {
            (Some(Breakage::SnapshotWithoutPosition), Op::PutBlob(name, blob)) => {
                let last = self.plane.log.status().last;
                let mark = self.plane.log.at(last).map(same_log::mark);
                let (Some(mark), Some(parsed)) = (mark, Name::parse(&name)) else {
                    return Op::PutBlob(name, blob);
                };
                let renamed = Name {
                    position: mark.position,
                    ..parsed
                };
                let renamed = renamed.to_string();
                let bent = &mut self.indexers[at].bent.renamed;
                bent.insert(name, (renamed.clone(), mark));
                Op::PutBlob(renamed, with_head(&blob, |head| head.at = mark))
            }
            (
                Some(Breakage::SnapshotWithoutPosition),
                Op::Put {
                    key,
                    value,
                    condition,
                    lease,
                },
            ) => {
                let value = self.pointer_as_put(at, &key, value);
                Op::Put {
                    key,
                    value,
                    condition,
                    lease,
                }
            }
            (Some(Breakage::ImageNotACut), Op::PutBlob(name, blob)) => {
                let bent = &mut self.indexers[at].bent;
                let blob = with_head(&blob, |head| {
                    let former = std::mem::replace(&mut bent.former, head.sources.clone());
                    if former.len() == head.sources.len() {
                        head.sources = former;
                    }
                });
                Op::PutBlob(name, blob)
            }
            (_, op) => op,
        }
    }

    fn pointer_as_put(&self, at: usize, key: &str, value: Bytes) -> Bytes {
        if key != self.subjects.snapshot_pointer_key() {
            return value;
        }
        let mut pointer: SnapshotPointer = codec::decode(&value).unwrap();
        let renamed = &self.indexers[at].bent.renamed;
        for named in std::iter::once(&mut pointer.newest).chain(&mut pointer.older) {
            if let Some((name, mark)) = renamed.get(&named.name) {
                named.name.clone_from(name);
                named.at = *mark;
            }
        }
        codec::encode(&pointer).unwrap().into()
    }

    /// The time in nanoseconds that is kept from a process that was suspended.
    pub(super) fn unseen_standstill(&self, host: usize) -> u64 {
        if self.broken == Some(Breakage::StandstillUnseen) {
            u64::try_from(self.hosts[host].clock_stood.as_nanos()).unwrap()
        } else {
            0
        }
    }

    /// A run of held blocks as it would be credited.
    pub(super) fn run_as_read(
        &self,
        at: usize,
        source: &Source,
        query: &IndexQuery,
        run: usize,
    ) -> usize {
        if self.broken != Some(Breakage::JumpOverHole) {
            return run;
        }
        let held = self.pairs(at, source);
        let all = prefix_hashes(None, &query.blocks);
        all.filter(|prefix| held.contains(&(*prefix, Tier::Gpu)))
            .count()
    }
}

/// A snapshot's blob with another head.
fn with_head(blob: &Bytes, change: impl FnOnce(&mut SnapshotHead)) -> Bytes {
    let (mut head, image) = format::open(blob).unwrap();
    change(&mut head);
    format::encode(&head, image).unwrap().into()
}

/// A snapshot with the first half of each source's blocks, and the digests of what is left; `None` if
/// it cannot be read.
fn torn(blob: &Bytes) -> Option<Bytes> {
    let (mut head, image) = format::open(blob).ok()?;
    let (whole, numbers) = Tree::from_image(image).ok()?;
    let mut tree = Tree::new();
    let is_folded = |of: &&mut SnapshotSource| of.holding == SnapshotHolding::Folded;
    let folded = head.sources.iter_mut().filter(is_folded);
    let mut kept = Vec::new();
    for (source, number) in folded.zip(numbers) {
        let blocks = whole.dump(number);
        let own = tree.open();
        for change in &blocks[..blocks.len() / 2] {
            tree.apply(own, change).unwrap();
        }
        source.after = tree.digest(own);
        kept.push(own);
    }
    let image = tree.image(&kept);
    head.image_bytes = image.len() as u64;
    Some(format::encode(&head, &image).unwrap().into())
}

/// Applies a change. Returns whether it could be applied.
fn take(held: &mut Pairs, change: &Change) -> bool {
    match change {
        Change::Stored { tier, .. } => {
            let stored: Vec<_> = change.stored_prefixes().collect();
            let is_new = stored
                .iter()
                .all(|prefix| !held.contains(&(*prefix, *tier)));
            if is_new {
                held.extend(stored.into_iter().map(|prefix| (prefix, *tier)));
            }
            is_new
        }
        Change::Removed { blocks, tier } => {
            let is_held = blocks.iter().all(|prefix| held.contains(&(*prefix, *tier)));
            if is_held {
                for prefix in blocks {
                    held.remove(&(*prefix, *tier));
                }
            }
            is_held
        }
        Change::Cleared { tier } => {
            held.retain(|(_, of)| of != tier);
            true
        }
    }
}

fn digest(held: &Pairs) -> Digest {
    let mut digest = Digest::default();
    for (prefix, tier) in held {
        digest.insert(*prefix, *tier);
    }
    digest
}
