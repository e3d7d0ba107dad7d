//! Rules broken on purpose, at the edge of the real cores: what they are told is bent so that the rule
//! does nothing. Without a breakage everything goes through unchanged.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::time::Instant;

use warmroute_indexer::fold::{Fold, SnapshotCut, SourceStatus};
use warmroute_indexer::same_log::{self, LogMatch};
use warmroute_plane::{Broadcast, LogMessage, LogStatus};
use warmroute_proto::hash::prefix_hashes;
use warmroute_proto::query::{IndexAnswer, IndexQuery};
use warmroute_proto::{
    Change, Digest, Generation, Heartbeat, PrefixHash, Record, Source, Tier, codec,
};

use super::indexer::IndexRun;
use super::{Breakage, World};

type Pairs = BTreeSet<(PrefixHash, Tier)>;

impl World {
    /// A record as the fold gets to see it.
    pub(super) fn record_as_read(
        &self,
        fold: &Fold,
        now: Instant,
        mut message: LogMessage,
    ) -> LogMessage {
        let is_bent = matches!(self.broken, Some(Breakage::NoFence | Breakage::NoDigest));
        if is_bent && let Ok(mut record) = codec::decode::<Record>(&message.payload) {
            let standing = standing(fold, &record.source, now);
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
            let mut held: Pairs = fold.held(&record.source).collect();
            if is_first {
                held.clear();
            }
            record.changes.retain(|change| take(&mut held, change));
            record.after = digest(&held);
            message.payload = codec::encode(&record).unwrap().into();
        }
        message
    }

    pub(super) fn heartbeat_as_read(
        &self,
        fold: &Fold,
        now: Instant,
        mut message: Broadcast,
    ) -> Broadcast {
        if self.broken == Some(Breakage::SubjectIgnored)
            && let Ok(heartbeat) = codec::decode::<Heartbeat>(&message.payload)
        {
            message.subject = self.subjects.heartbeat(&heartbeat.source);
        }
        let is_bent = matches!(self.broken, Some(Breakage::NoFence | Breakage::NoDigest));
        if is_bent
            && let Ok(mut heartbeat) = codec::decode::<Heartbeat>(&message.payload)
            && let Some(standing) = standing(fold, &heartbeat.source, now)
            && let Some(digest) = standing.digest
        {
            heartbeat.after = digest;
            message.payload = codec::encode(&heartbeat).unwrap().into();
        }
        message
    }

    /// An answer as a router's view gets to see it.
    pub(super) fn answer_as_read<'a>(
        &self,
        answer: Option<&'a IndexAnswer>,
    ) -> Option<Cow<'a, IndexAnswer>> {
        let mut answer = Cow::Borrowed(answer?);
        if self.broken == Some(Breakage::OvertakenBelieved)
            && let IndexAnswer::Runs { sources, .. } = answer.to_mut()
        {
            for source in sources {
                source.generation = Generation(1);
                source.number = None;
            }
        }
        Some(answer)
    }

    /// What the log's clock shows, or nothing: then no message has an age.
    pub(super) fn clock_as_seen(&self, status: &LogStatus) -> u64 {
        match self.broken {
            Some(Breakage::AgeIgnored) => 0,
            _ => status.now_unix_ns,
        }
    }

    /// What a look at the log says, or would without the record at the position.
    pub(super) fn fit_as_seen(&self, fit: LogMatch) -> LogMatch {
        match fit {
            LogMatch::OtherRecord if self.broken == Some(Breakage::RefillUnseen) => LogMatch::Same,
            other => other,
        }
    }

    pub(super) fn bend_cut(&self, run: &mut IndexRun, cut: &mut SnapshotCut) {
        match self.broken {
            Some(Breakage::SnapshotWithoutPosition) => {
                let last = self.plane.log.status().last;
                if let Some(last) = self.plane.log.at(last) {
                    cut.head.at = same_log::mark(last);
                }
            }
            Some(Breakage::ImageNotACut) => {
                if let Some(head) = run.former_head.take()
                    && head.sources.len() == cut.head.sources.len()
                {
                    cut.head.sources = head.sources;
                }
            }
            _ => {}
        }
    }

    /// A run of held blocks as it would be credited.
    pub(super) fn run_as_read(
        &self,
        fold: &Fold,
        source: &Source,
        query: &IndexQuery,
        run: usize,
    ) -> usize {
        if self.broken != Some(Breakage::JumpOverHole) {
            return run;
        }
        let held: Pairs = fold.held(source).collect();
        let all = prefix_hashes(None, &query.blocks);
        all.filter(|prefix| held.contains(&(*prefix, Tier::Gpu)))
            .count()
    }
}

fn standing(fold: &Fold, source: &Source, now: Instant) -> Option<SourceStatus> {
    let mut standings = fold.statuses(now);
    let found = standings.find(|(of, _)| *of == source)?;
    Some(found.1)
}

/// Applies a change; says whether it could be.
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
